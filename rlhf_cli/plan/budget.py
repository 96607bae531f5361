"""What `tokens_per_microbatch: auto` chooses: the most tokens with which every phase of the plan fits."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from rlhf_cli.data.batches import Budget
from rlhf_cli.models.cost import CPU_TOKENS, total_memory
from rlhf_cli.models.forward import compute_dtype, is_packed
from rlhf_cli.plan.memory import Batch, Held, Machine, Phase, Setting
from rlhf_cli.plan.shapes import shape_of_loaded

CPU_BYTES = 300e6
"""Memory for activations and logits that `auto` chooses on a CPU. It never chooses less than half of CPU_TOKENS for
this: that costs the larger model above 2 % of its time and saves a third of the memory in its PPO."""
GPU_TOKENS = 65_536
"""Most tokens per microbatch that `auto` chooses on a GPU. Its matrix products are large enough long before that."""
FEWEST_TOKENS = 256
SHARE_OF_GPU = 0.8
"""Share of a GPU's memory that a planned phase may take. Measured peaks were at most 1.14 times the planned ones
(benchmarks/PLAN.md), on a CPU; 1.14 times 0.8 leaves a tenth for CUDA and NCCL and for gaps between the allocator's
blocks."""
SHARE_OF_CPU = 0.6
"""The same on a CPU, whose C library keeps freed memory: the peaks of models whose weights are trained were then up to
1.6 times the planned ones. The system, and the code of the libraries, take their part, too."""
BY_TOKENS = ("scoring", "update", "checkpoint")
"""The phases whose memory depends on the size of a microbatch."""


def auto_tokens(phases: Callable[[int], Sequence[Phase]], machine: Machine, setting: Setting) -> int:
    """The most tokens per microbatch with which every phase in BY_TOKENS takes at most its share of the memory.

    At least FEWEST_TOKENS, and at most GPU_TOKENS on a GPU. On a CPU the limit is CPU_TOKENS, or fewer if CPU_BYTES
    hold the activations and logits of fewer.

    It follows from the shapes of the models, the config and the total memory: neither from the memory that is free at
    the moment nor from a clock. So a run that resumes on a machine of the same kind computes the same bytes.

    `phases` gives the phases of the plan with full microbatches of a number of tokens.
    """

    def total(tokens: int) -> float:
        return max(phase.total for phase in phases(tokens) if phase.name in BY_TOKENS)

    def batch(tokens: int) -> float:
        return max(phase.of_pass for phase in phases(tokens) if phase.name in BY_TOKENS)

    if setting.device == "cuda":
        return max(FEWEST_TOKENS, most_tokens(total, SHARE_OF_GPU * machine.memory, GPU_TOKENS))
    limit = max(CPU_TOKENS // 2, most_tokens(batch, CPU_BYTES, CPU_TOKENS))
    return max(FEWEST_TOKENS, most_tokens(total, SHARE_OF_CPU * machine.memory, limit))


def most_tokens(need: Callable[[int], float], room: float, limit: int) -> int:
    """The most tokens, up to `limit`, whose `need` is at most `room`. The need grows with the tokens.

    >>> most_tokens(lambda tokens: 100 + 2 * tokens, 160, 1000), most_tokens(lambda tokens: tokens, 160, 100)
    (30, 100)
    """
    return bisect_right(range(1, limit + 1), room, key=need)


def forward_budget(model: PreTrainedModel, device: torch.device, precision: str) -> Budget:
    """The size of a pass without gradients of a model that is alone in memory."""
    setting = Setting(device.type, half=compute_dtype(device, precision) != torch.float32)
    held = Held("model", shape_of_loaded(model, precision), setting)

    def phases(tokens: int) -> list[Phase]:
        batch = Batch(tokens, tokens, 1)
        return [Phase("scoring", {"weights": held.weight_bytes} | held.in_forward(batch))]

    tokens = auto_tokens(phases, machine_of_run(device, 1), setting)
    return Budget(tokens, padded=not is_packed(model), parts=int(device.type == "cpu"))


def machine_of_run(device: torch.device, num_processes: int) -> Machine:
    """What each process of a run has."""
    return Machine(
        device.type,
        total_memory(device) / (1 if device.type == "cuda" else num_processes),
        num_processes,
        int(os.environ.get("LOCAL_WORLD_SIZE", num_processes)),
        auto_is_half=compute_dtype(device, "auto") != torch.float32,
    )
