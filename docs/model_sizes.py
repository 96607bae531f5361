"""Write docs/model_sizes.md: which model size fits which machine.

    python docs/model_sizes.py          # rewrites the page, half a minute

The figures are those of `rlhf plan` (rlhf_cli/plan). Nothing is downloaded: a plan needs the config of a model and no
weights.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from rlhf_cli.commands.plan import ROOM
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.config.stage import Stage
from rlhf_cli.plan.memory import Machine
from rlhf_cli.plan.origins import ModelOrigins
from rlhf_cli.plan.stages import plan_stage
from rlhf_cli.processes.environment import set_up_process

PAGE = Path(__file__).with_suffix(".md")
TOKENS = 1024
"""Tokens per microbatch, and those of the longest text."""
ROWS = 32
"""Responses that are sampled together (`rollout.max_live_rows`)."""
MINIBATCH = 16
GB = 1e9


@dataclass(frozen=True)
class Place:
    """Machines of one kind."""

    title: str
    device: str
    changes: dict[str, Any]
    """Keys of every config."""
    machines: dict[str, int]
    """Their memory in GB, by name."""
    methods: tuple[str, ...]


PLACES = (
    Place(
        "On a CPU, in float32",
        "cpu",
        {"precision": "float32"},
        {"laptop, 16 GB": 16, "laptop, 32 GB": 32, "64 GB": 64},
        ("SFT", "SFT, LoRA", "RM", "PPO", "PPO, LoRA", "GRPO"),
    ),
    Place(
        "On a GPU: float32 masters, passes in bfloat16",
        "cuda",
        {"precision": "bfloat16", "gradient_checkpointing": True},
        {"GPU, 24 GB": 24, "GPU, 48 GB": 48, "GPU, 80 GB": 80},
        ("SFT", "SFT, LoRA", "SFT, QLoRA", "RM", "PPO", "PPO, LoRA", "PPO, QLoRA", "GRPO", "GRPO, LoRA"),
    ),
)
LORA: dict[str, dict[str, Any]] = {"LoRA": {"r": 16}, "QLoRA": {"r": 16, "quantize": "nf4"}}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "SmolLM2-135M": ("llama", {"hidden": 576, "mlp": 1536, "layers": 30, "heads": 9, "kv": 3, "vocab": 49152}),
    "SmolLM2-360M": ("llama", {"hidden": 960, "mlp": 2560, "layers": 32, "heads": 15, "kv": 5, "vocab": 49152}),
    "Qwen2.5-0.5B": ("qwen2", {"hidden": 896, "mlp": 4864, "layers": 24, "heads": 14, "kv": 2, "vocab": 151936}),
    "SmolLM2-1.7B": ("llama", {"hidden": 2048, "mlp": 8192, "layers": 24, "heads": 32, "kv": 32, "vocab": 49152}),
    "Qwen2.5-3B": ("qwen2", {"hidden": 2048, "mlp": 11008, "layers": 36, "heads": 16, "kv": 2, "vocab": 151936}),
    "Qwen2.5-7B": (
        "qwen2",
        {"hidden": 3584, "mlp": 18944, "layers": 28, "heads": 28, "kv": 4, "vocab": 152064, "tied": False},
    ),
    "Llama-3.1-8B": (
        "llama",
        {"hidden": 4096, "mlp": 14336, "layers": 32, "heads": 32, "kv": 8, "vocab": 128256, "tied": False},
    ),
    "Qwen2.5-14B": (
        "qwen2",
        {"hidden": 5120, "mlp": 13824, "layers": 48, "heads": 40, "kv": 8, "vocab": 152064, "tied": False},
    ),
    "Qwen2.5-32B": (
        "qwen2",
        {"hidden": 5120, "mlp": 27648, "layers": 64, "heads": 40, "kv": 8, "vocab": 152064, "tied": False},
    ),
}


def main() -> None:
    """Write the page."""
    set_up_process()
    PAGE.write_text(render(), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))


def render() -> str:
    """The page in Markdown."""
    lines = [INTRODUCTION.format(TOKENS=f"{TOKENS:,}", ROWS=ROWS, HALF=TOKENS // 2, ROOM=f"{100 * ROOM:.0f} %")]
    for place in PLACES:
        needs = {name: {method: needed(name, method, place) for method in place.methods} for name in MODELS}
        lines += [f"## {place.title}\n", "The largest of the models that fits:\n"]
        lines += table(
            ["", *place.machines],
            [[x, *(largest(needs, x, size) for size in place.machines.values())] for x in place.methods],
        )
        lines += ["\nPeak of the process, in GB, of each model of which something fits:\n"]
        most = ROOM * max(place.machines.values())
        fitting = {name: row for name, row in needs.items() if min(row.values()) <= most}
        lines += table(
            ["model", *place.methods],
            [[name, *(f"{row[x]:.1f}" for x in place.methods)] for name, row in fitting.items()],
        )
        lines += [""]
    return "\n".join([*lines, ACCURACY])


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def largest(needs: dict[str, dict[str, float]], method: str, gigabytes: float) -> str:
    """The largest of the models that fits, by the rule of `rlhf plan`."""
    fitting = [name for name, row in needs.items() if row[method] <= ROOM * gigabytes]
    return fitting[-1] if fitting else "none of these"


def needed(name: str, method: str, place: Place) -> float:
    """The planned peak of a stage, in GB."""
    with tempfile.TemporaryDirectory() as folder:
        config_of_model(name).save_pretrained(folder)
        configs = configs_of(folder, method, place)
        stage = list(configs)[-1]
        # The memory of the machine does not matter, because the size of a microbatch is given.
        machine = Machine(place.device, 1e12)
        return plan_stage(stage, configs[stage], ModelOrigins(configs), machine).peak.total / GB


def config_of_model(name: str) -> Any:
    """The config of a model, whose file has bfloat16 numbers."""
    family, size = MODELS[name]
    return AutoConfig.for_model(
        family,
        hidden_size=size["hidden"],
        intermediate_size=size["mlp"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv"],
        vocab_size=size["vocab"],
        tie_word_embeddings=size.get("tied", True),
        max_position_embeddings=8192,
        dtype="bfloat16",
        pad_token_id=0,
    )


def configs_of(folder: str, method: str, place: Place) -> dict[str, Stage]:
    """The configs of a stage and of those before it."""
    stage, _, kind = method.partition(", ")
    lora = {"lora": LORA[kind]} if kind else {}
    common = {"artifacts": "a", "threads": 1, "optimizer": {"learning_rate": 1e-5}, **place.changes}
    rows = {
        "data": {"train": "rows.jsonl", "max_length": TOKENS},
        "training": {"num_steps": 1, "minibatch_size": MINIBATCH, "tokens_per_microbatch": TOKENS},
    }
    sft = SFTConfig.model_validate({**common, **rows, "model": {"path": folder, **(lora if stage == "SFT" else {})}})
    # As a folder of adapters, the reward model shares the policy's weights.
    adapters = {"model": {"lora": {**LORA[kind], "save": "adapter"}}} if kind else {}
    rm = RMConfig.model_validate({**common, **rows, **adapters, "evaluation": {"num_normalization_samples": ROWS}})
    if stage in ("SFT", "RM"):
        return {"sft": sft} if stage == "SFT" else {"sft": sft, "rm": rm}
    is_group = stage == "GRPO"
    config = {
        **common,
        "policy": lora,
        "data": {"train": "prompts.jsonl", "max_prompt_length": TOKENS // 2},
        "rewards": [{"type": "length", "target": 1}] if is_group else [{"type": "reward_model"}],
        "rollout": {
            "max_new_tokens": TOKENS // 2,
            "max_live_rows": ROWS,
            **({"samples_per_prompt": 8} if is_group else {}),
        },
        "ppo": {
            "num_iterations": 1,
            "rollout_batch_size": 8 * MINIBATCH,
            "minibatch_size": MINIBATCH,
            "tokens_per_microbatch": TOKENS,
            **({"advantage_estimator": "grpo"} if is_group else {}),
        },
        **({"value_model": lora} if lora and not is_group else {}),
    }
    return {"sft": sft, "rm": rm, "ppo": PPOConfig.model_validate(config)}


INTRODUCTION = """# What model size fits which machine

<!-- Written by docs/model_sizes.py; do not edit by hand. -->

A run fits if its peak is at most {ROOM} of the memory. The peaks are those of `rlhf plan`, which computes [your
own run](scale.md), for one process with one thread, AdamW in float32 and models that are published in bfloat16,
with texts and microbatches of {TOKENS} tokens. The four models of PPO have the same size. GRPO has no value model
and takes its rewards from a function. Rollouts sample {ROWS} responses at a time (`rollout.max_live_rows`), of
{HALF} tokens after prompts of {HALF}.

In full, a trained weight takes 16 bytes; with LoRA (r = 16) and QLoRA (NF4) only adapters take that, and the models of
PPO share one set of frozen weights. [Other choices](training.md#memory) lower the figures further. On GPUs
`gradient_checkpointing` is on, on CPUs it is off. On a CPU a process also copies weights and moments while it writes a
checkpoint, 12 bytes for each trained weight: `checkpoints.every_minutes: null` saves them.
"""
ACCURACY = """## How close this is

**The figures of models with more than 300 million parameters are computed, not measured.** Smaller ones were within
15 % of measured peaks on a CPU, and on an [H100](speed.md#on-a-gpu) five runs of 25 million. On a CPU freed memory that
the C library keeps can make them higher ([what helps](scale.md#the-plan-against-measured-peaks)).
"""

if __name__ == "__main__":
    main()
