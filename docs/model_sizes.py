"""Write the table of docs/model_sizes.md: which model size fits which machine.

    python docs/model_sizes.py          # rewrites docs/model_sizes.md, about a minute

The models are built on torch's `meta` device, where they have shapes and no weights, so nothing is downloaded and no
large memory is needed. The figures come from rlhf_cli/models/cost.py, the cost model that also chooses
`tokens_per_microbatch: auto`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from rlhf_cli.config.models import Lora
from rlhf_cli.environment import set_up_process
from rlhf_cli.models.adapters import add_lora
from rlhf_cli.models.cost import cache_bytes, static_bytes, token_bytes

TOKENS = 1024
"""Tokens per microbatch: one text of 1,024, and the fewest that `auto` chooses on a CPU with enough memory."""
ROWS, LENGTH = 32, 1024
"""Responses that are sampled together (`rollout.max_live_rows`), and their longest text, prompt included."""
GB = 1e9
SPARE = 1.5
"""GB of a machine that the run cannot use: the operating system's or the CUDA context's, and the libraries'."""
MACHINES = {"laptop, 16 GB": 16, "GPU, 24 GB": 24, "GPU, 80 GB": 80}

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
}


@dataclass(frozen=True)
class Measured:
    """Peak memory of a stage above its imports, in one CPU process, and what the cost model says of it."""

    millions: float
    """Parameters of each model."""
    static_mb: int
    """Weights, gradients and moments: 16 bytes for each trained weight, 4 for each frozen one."""
    modelled_mb: int
    peak_mb: int

    @property
    def ratio(self) -> float:
        """Measured over modelled, of the part that depends on the batch."""
        return (self.peak_mb - self.static_mb) / (self.modelled_mb - self.static_mb)


MEASURED = {
    "SFT": [Measured(0.9, 14, 493, 539), Measured(26, 416, 1095, 1230), Measured(100, 1600, 2699, 2931)],
    "RM": [Measured(0.9, 14, 463, 642), Measured(26, 416, 1080, 1640), Measured(100, 1600, 2685, 3653)],
    "PPO": [Measured(0.9, 36, 513, 651), Measured(26, 1040, 1694, 2210), Measured(100, 4000, 4986, 6063)],
}


@dataclass(frozen=True)
class Run:
    """The models of a run, and what kind of run it is."""

    stage: str
    trained: list[PreTrainedModel]
    frozen: list[PreTrainedModel]


def main() -> None:
    """Print the page and write it."""
    set_up_process()
    warnings.simplefilter("ignore")
    page = render()
    (Path(__file__).parent / "model_sizes.md").write_text(page, encoding="utf-8")
    print(page)


def render() -> str:
    """The page in Markdown."""
    needs = {name: {method: needed(make(name)) for method, make in METHODS.items()} for name in MODELS}
    lines = [INTRODUCTION.format(TOKENS=f"{TOKENS:,}", ROWS=ROWS, LENGTH=f"{LENGTH:,}"), "## Largest model that fits\n"]
    lines += table(
        ["machine", *METHODS], [[m, *(largest(needs, x, size) for x in METHODS)] for m, size in MACHINES.items()]
    )
    lines += ["\n## Memory of one process, GB\n"]
    lines += table(["model", *METHODS], [[m, *(f"{row[x]:.1f}" for x in METHODS)] for m, row in needs.items()])
    lines += ["\n## The cost model against measured peaks\n", MEASUREMENT]
    rows = [
        [stage, *(f"{x:,g}" for x in (m.millions, m.static_mb, m.modelled_mb, m.peak_mb)), f"{m.ratio:.2f}"]
        for stage, runs in MEASURED.items()
        for m in runs
    ]
    head = ["stage", "M parameters", "static, MB", "modelled peak, MB", "measured peak, MB", "ratio of the rest"]
    lines += table(head, rows)
    return "\n".join(lines) + "\n"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def largest(needs: dict[str, dict[str, float]], method: str, gigabytes: float) -> str:
    """The largest of the models that needs less than the machine has to spare."""
    fitting = [name for name, row in needs.items() if row[method] <= gigabytes - SPARE]
    return fitting[-1] if fitting else "none of these"


def needed(run: Run) -> float:
    """Gigabytes that a run needs: the static part, and the rest times the largest measured ratio of its stage.

    An update and a rollout take turns. During a rollout there are no gradients. There is instead a copy of the
    policy's weights in the sampler's order, and the keys and values of the live rows.
    """
    static = static_bytes(run.trained, run.frozen)
    update = TOKENS * token_bytes(run.trained, "float32")
    rollout = 0.0
    if run.stage == "PPO":
        policy = run.trained[0]
        gradients = sum(4 * p.numel() for m in run.trained for p in m.parameters() if p.requires_grad)
        copies = sum(4 * p.numel() for p in policy.parameters())
        rollout = copies + cache_bytes(policy, ROWS * LENGTH) - gradients
    margin = max(measured.ratio for measured in MEASURED[run.stage])
    return (static + max(margin * update, rollout)) / GB


def language_model(name: str, *, lora: bool = False, head: bool = False) -> PreTrainedModel:
    """A model on the meta device, with a scalar head instead of the vocabulary's if `head`."""
    family, size = MODELS[name]
    config = AutoConfig.for_model(
        family,
        hidden_size=size["hidden"],
        intermediate_size=size["mlp"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv"],
        vocab_size=size["vocab"],
        tie_word_embeddings=size.get("tied", True),
        num_labels=1,
        pad_token_id=0,
    )
    build = AutoModelForSequenceClassification if head else AutoModelForCausalLM
    with torch.device("meta"):
        model: PreTrainedModel = build.from_config(config)
        if lora:
            add_lora(model, Lora(r=16), "policy.lora", seed=0)
    return model


METHODS: dict[str, Callable[[str], Run]] = {
    "SFT": lambda name: Run("SFT", [language_model(name)], []),
    "RM": lambda name: Run("RM", [language_model(name, head=True)], []),
    "PPO": lambda name: Run(
        "PPO",
        [language_model(name), language_model(name, head=True)],
        [language_model(name), language_model(name, head=True)],
    ),
    "PPO, LoRA": lambda name: Run(
        "PPO",
        [language_model(name, lora=True), language_model(name, head=True, lora=True)],
        [language_model(name, head=True)],
    ),
    "GRPO, reward function": lambda name: Run("PPO", [language_model(name)], [language_model(name)]),
}

INTRODUCTION = """# What model size fits which machine

<!-- Written by docs/model_sizes.py; do not edit by hand. -->

One process, AdamW, all weights in float32 (16 bytes for each trained weight, 4 for each frozen one), microbatches of
{TOKENS} tokens without gradient checkpointing. PPO has a policy, a value model, a reference and a reward model of the
same size. With LoRA (r = 16) policy and value model train adapters, and the reference is the policy without them. GRPO
has no value model and takes its rewards from a function. Rollouts sample {ROWS} responses at a time
(`rollout.max_live_rows`), {LENGTH} tokens each with their prompt.

`rlhf plan` computes your own run, phase by phase and closer to measured peaks ([scale.md](scale.md)).

Computed on models without weights, which keep 13 to 25 % more for each token than the layers that run. A figure is
the static part (weights, gradients, moments) plus the cost model's part for the batch, which is multiplied
by the largest ratio that was measured for its stage (last table). Peaks were measured on a CPU only. The figures for
GPUs are computed, not measured. In bfloat16 the activations are smaller than computed here, but each pass keeps a
bfloat16 copy of the weights (2 bytes each), which is not counted.
"""
MEASUREMENT = """Peak memory above the imports, in one CPU process with `tokens_per_microbatch: auto`. The peak is
9 to 12 % above the cost model for SFT, 36 to 52 % for RM (normalisation after training) and 22 to 30 % for PPO (copies
for the rollout, memory that the allocator keeps). The last column compares only the part that depends on the batch.
"""

if __name__ == "__main__":
    main()
