"""Write the tables of docs/scale.md about 8 to 1,024 GPUs.

    python docs/scale.py          # rewrites the end of docs/scale.md, seconds

Memory comes from `rlhf plan`'s own functions, for SFT with every model divided among all GPUs. Communication is counted
from the sizes of the models, as the text above the tables says.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

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
    "8 B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70 B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
FLOPS = 989e12 * 0.4
"""Operations a second of an H100 in bfloat16, at 40 % of its peak."""
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
    for name, size in SIZES.items():
        for gpus in GPUS:
            plan = planned(size, gpus)
            sent, computes, sends = step(plan, gpus)
            lines.append(
                f"| {name} | {gpus:,} | {plan.peak.total / 1e9:.0f} | {sent / 1e9:.0f} | {computes:.1f} | {sends:.1f} |"
            )
    return "\n".join(lines) + "\n"


def planned(size: dict[str, int], gpus: int) -> StagePlan:
    """The plan of SFT in full on this many GPUs of 80 GB."""
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(**size, num_key_value_heads=8, vocab_size=128256, dtype="bfloat16").save_pretrained(folder)
        config = SFTConfig.model_validate(
            {
                "artifacts": "a",
                "model": {"path": folder},
                "data": {"train": "rows.jsonl", "max_length": TOKENS},
                "training": {"num_steps": 1, "minibatch_size": gpus, "tokens_per_microbatch": TOKENS},
                "optimizer": {"learning_rate": 1e-5},
                "gradient_checkpointing": True,
                "distributed": {"shard": True},
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
    computes = 8 * shape.weights * TOKENS / FLOPS
    return sent, computes, sent / (NVLINK if gpus <= 8 else NETWORK)


if __name__ == "__main__":
    main()
