"""Write the tables of docs/scale.md about 8 to 1,024 GPUs, and hold them against figures of others.

    python docs/scale.py          # rewrites the end of docs/scale.md, seconds

Memory comes from `rlhf plan`'s own functions, for SFT with every model divided among all GPUs. Communication is counted
from the sizes of the models, as the text above the tables says.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from rlhf_cli.config.sft_rm import SFTConfig
from rlhf_cli.plan.parts import Machine, StagePlan
from rlhf_cli.plan.shapes import Shape
from rlhf_cli.plan.sources import Sources
from rlhf_cli.plan.stages import plan_stage

PAGE = Path(__file__).with_suffix(".md")
MARK = "<!-- Written by docs/scale.py from here on; do not edit by hand. -->\n"
GPUS = (8, 64, 256, 1024)
TOKENS = 8192
"""Tokens of a GPU in a step, as one sequence."""
SIZES = {
    # Llama 2 7B, and Llama 3.1 8B and 70B.
    "7 B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 32, "vocab_size": 32000},
    "8 B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "vocab_size": 128256},
    "70 B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    | {"num_key_value_heads": 8, "vocab_size": 128256},
}
SHARE_OF_PEAK = 0.4
FLOPS = {"H100": 989e12 * SHARE_OF_PEAK, "A800": 312e12 * SHARE_OF_PEAK}
"""Operations a second in bfloat16."""
MEMORY = {"H100": 3.35e12, "A800": 2.0e12}
"""Bytes a second that a GPU reads from its own memory."""
NVLINK, NETWORK = 400e9, 40e9
"""Bytes a second that a GPU sends in a collective operation inside a machine of 8, and between machines."""


def main() -> None:
    """Rewrite the tables."""
    text = PAGE.read_text(encoding="utf-8").split(MARK)[0] + MARK + render()
    PAGE.write_text(text, encoding="utf-8")
    print(render())


def render() -> str:
    """The tables in Markdown."""
    lines = [
        "",
        "| model | GPUs | GB a GPU | sent by a GPU in a step, GB | computing, s | sending, s |",
        "|---" * 6 + "|",
    ]
    for name in SIZES:
        for gpus in GPUS:
            plan = planned(name, gpus)
            sent, computes, sends = step(plan, gpus)
            lines.append(
                f"| {name} | {gpus:,} | {plan.peak.total / 1e9:.0f} | {sent / 1e9:.0f} | {computes:.1f} | {sends:.1f} |"
            )
    lines += ["", "| figure | measured by others | on paper |", "|---" * 3 + "|"]
    lines += [f"| {' | '.join(row)} |" for row in held_against()]
    return "\n".join(lines) + "\n"


def held_against() -> list[tuple[str, str, str]]:
    """(what, the figure of others, what the same assumptions give for it)."""
    sft = planned("8 B", 8)
    _, computes, sends = step(sft, 8)
    kept = planned("8 B", 8, gradient_checkpointing=False)
    rows = [
        (
            "SFT of Llama 3.1 8B, 8 H100, FSDP2 in bfloat16: tokens/s on each GPU (torchtitan)",
            "5,762",
            f"{TOKENS / max(computes, sends):,.0f}",
        ),
        (
            "its memory on each GPU, GB",
            f"{82 * 1.0737:.0f}",
            f"{sft.peak.total / 1e9:.0f} with recomputed layers, {kept.peak.total / 1e9:.0f} without",
        ),
    ]
    small = {"tokens": 2 * 2048, "shard": False}
    for name, lora, gib in (("LoRA", {"r": 8}, 16.2), ("QLoRA", {"r": 8, "quantize": "nf4"}, 7.4)):
        peak = planned("8 B", 1, lora=lora, **small).peak.total
        what = f"{name} of 8 B, one RTX 4090, 2 x 2,048 tokens: GB (torchtune)"
        rows.append((what, f"{gib * 1.0737:.1f}", f"{peak / 1e9:.1f}"))
    eight, seven, seventy = (planned(name, 8).models[0].shape for name in ("8 B", "7 B", "70 B"))
    seconds = 2048 * 1019 / 16 / 1581
    rows += [
        (
            "RL step of 8 B without a critic, 16 H100, 2,048 responses of 1,019 tokens: s (NeMo-RL 0.5)",
            f"{seconds:.0f}",
            f"{rl_step(eight, 'H100', 16, 2048, 0, 1019, trained_models=1, passes=2):.0f}",
        ),
        (
            "PPO of 7 B with critic and reward model, 16 A800, 1,024 prompts: s (OpenRLHF, DeepSpeed-Chat)",
            "471, 855",
            f"{rl_step(seven, 'A800', 16, 1024, 1024, 1024, trained_models=2, passes=4):.0f}",
        ),
        (
            "the same of 70 B, 32 A800, sampled from the divided policy: s",
            "4,489, 10,407",
            f"{rl_step(seventy, 'A800', 32, 1024, 1024, 1024, trained_models=2, passes=4, divided=True):,.0f}",
        ),
    ]
    return rows


def rl_step(
    shape: Shape,
    gpu: str,
    gpus: int,
    num_rows: int,
    prompt: int,
    response: int,
    *,
    trained_models: int,
    passes: int,
    divided: bool = False,
) -> float:
    """Seconds of an RL step: sampling, `passes` scoring passes, and the update of `trained_models` models.

    Sampling reads all weights in bfloat16, and the keys and values so far, for each token. With `divided` the weights
    come over the network. The other passes take 2 operations for each weight and token, an update 8.
    """
    weights, tokens = shape.weights, num_rows * (prompt + response) / gpus
    computing = (2 + 2 * passes + 8 * trained_models) * weights * tokens / FLOPS[gpu]
    cache = num_rows / gpus * (prompt + response / 2) * 2 * shape.cache
    weights_s = sent_in_pass(shape, gpus) / NETWORK if divided else 2 * weights / MEMORY[gpu]
    return computing + response * (weights_s + cache / MEMORY[gpu])


def planned(
    name: str,
    gpus: int,
    *,
    tokens: int = TOKENS,
    shard: bool = True,
    gradient_checkpointing: bool = True,
    lora: dict[str, Any] | None = None,
) -> StagePlan:
    """The plan of SFT of a model in SIZES on this many GPUs of 80 GB, each with `tokens` tokens in a step."""
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(**SIZES[name], dtype="bfloat16").save_pretrained(folder)
        config = SFTConfig.model_validate(
            {
                "artifacts": "a",
                "model": {"path": folder, "lora": lora},
                "data": {"train": "rows.jsonl", "max_length": tokens},
                "training": {"num_steps": 1, "minibatch_size": gpus, "tokens_per_microbatch": tokens},
                "optimizer": {"learning_rate": 1e-5},
                "gradient_checkpointing": gradient_checkpointing,
                "distributed": {"shard": shard},
            }
        )
        return plan_stage("sft", config, Sources({"sft": config}), Machine("cuda", 80e9, gpus))


def sent_in_pass(shape: Shape, gpus: int) -> float:
    """Bytes that a GPU sends while a pass gathers all weights once, as each sampled token does.

    Blocks are gathered in bfloat16, embeddings and head in float32. In a ring each GPU sends ``(gpus - 1) / gpus``.
    """
    return (2 * shape.layer * shape.layers + 4 * shape.ends) * (gpus - 1) / gpus


def sent_in_step(shape: Shape, gpus: int) -> float:
    """Bytes that a GPU sends in a training step of one microbatch.

    Weights are gathered for the forward and for the backward pass, and gradients are summed in float32.
    """
    return 2 * sent_in_pass(shape, gpus) + 4 * shape.weights * (gpus - 1) / gpus


def step(plan: StagePlan, gpus: int) -> tuple[float, float, float]:
    """(bytes that a GPU sends, seconds of computing, seconds of sending) of a step."""
    shape = plan.models[0].shape
    sent = sent_in_step(shape, gpus)
    # Six operations for each weight and token, and two more for the layers that are computed again.
    computes = 8 * shape.weights * TOKENS / FLOPS["H100"]
    return sent, computes, sent / (NVLINK if gpus <= 8 else NETWORK)


if __name__ == "__main__":
    main()
