"""What a model computes for each token, and what the device has: floating-point operations and memory."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_cli.kernels.linear import linear
from rlhf_cli.models.forward import autocast, compute_dtype
from rlhf_cli.tensor_ops import num_weights

CPU_TOKENS = 2048
"""Most tokens per microbatch that `auto` chooses on a CPU (benchmarks/microbatches.py, docs/speed.md). With fewer the
fixed cost of each operation shows. With many more the allocator returns large tensors to the system each time."""
READ_TOKENS = 4096
"""Maximum tokens of prompts, padding included, that a GPU reads in one pass before it samples."""
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files in which Linux reports the memory limit of a container."""


def total_memory(device: torch.device) -> int:
    """Total memory of the device in bytes. On a CPU a lower limit of the container counts instead."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in LIMITS:
        if Path(limit).is_file():
            text = Path(limit).read_text(encoding="utf-8").strip()
            total = min(total, int(text)) if text.isdecimal() else total
    return total


@dataclass(frozen=True)
class Work:
    """The floating-point operations of a model, counted from its shape. A multiply-add counts as two.

    Two operations per weight and token forward, twice that backward, and attention, as in Kaplan et al. 2020 (arXiv
    2001.08361, table 1) and PaLM (Chowdhery et al. 2022, appendix B). Unlike there, the attention of a token counts
    only the tokens that it can see, and the head only the tokens that it runs on.

    >>> work = Work(weights=100, trained=100, head=30, trained_head=30, width=4)
    >>> work.forward([3], 2)  # 100 x 3 x 2 + 30 x 2 x 2 + 4 x 4 x (1+2+3)
    816
    >>> work.forward([3, 4], 2, shared=[0, 2]) - 816  # the second one's last two tokens: 100 x 2 x 2 + 4 x 4 x (3+4)
    512
    >>> work.training([3], 2)
    2448
    """

    weights: int  # of the layers; in a mixture of experts, the share that a token uses
    trained: int  # those that get a gradient
    head: int  # weights of the head over the vocabulary
    trained_head: int
    width: int  # of the queries, summed over the layers: layers x heads x head_dim

    def forward(self, lengths: Sequence[int], head_tokens: int, shared: Sequence[int] | None = None) -> int:
        """Operations of a forward pass: ``2 * weights * N + 2 * head * head_tokens + 4 * width * pairs``.

        `lengths` are the tokens of each sequence, N in total. `pairs` counts those that attend to each other: n (n + 1)
        / 2 in a sequence of n, with two products of 2 * width operations each. `shared` counts the first tokens of each
        sequence that an earlier one has, too: they are computed once.
        """
        prefixes = shared or [0] * len(lengths)
        pairs = sum(n * (n + 1) // 2 for n in lengths) - sum(n * (n + 1) // 2 for n in prefixes)
        return 2 * self.weights * (sum(lengths) - sum(prefixes)) + 2 * self.head * head_tokens + 4 * self.width * pairs

    def training(self, lengths: Sequence[int], head_tokens: int, shared: Sequence[int] | None = None) -> int:
        """Operations of a forward and backward pass: ``3 * forward``, minus the gradients of frozen weights."""
        num_tokens = sum(lengths) - sum(shared or ())
        frozen = 2 * (self.weights - self.trained) * num_tokens + 2 * (self.head - self.trained_head) * head_tokens
        return 3 * self.forward(lengths, head_tokens, shared) - frozen


def work_of(model: PreTrainedModel) -> Work:
    config, backbone = model.config.get_text_config(), model.base_model
    head = model.get_output_embeddings()
    tables = {id(p) for m in backbone.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
    tables |= {id(head.weight)} if head is not None else set()  # T5 calls the whole model its backbone
    experts = getattr(config, "num_experts_per_tok", None)
    weights = trained = 0
    for parameter in backbone.parameters():
        if id(parameter) in tables:
            continue
        size = num_weights(parameter)
        if experts and parameter.ndim == 3:  # the weights of all experts [experts, out, in]
            size = size * experts // parameter.shape[0]
        weights += size
        trained += size if parameter.requires_grad else 0
    assert head is None or isinstance(head.weight, Tensor)
    head_weights = head.weight.numel() if head is not None else 0
    trained_head = head_weights if head is not None and head.weight.requires_grad else 0
    # A state space model has no attention heads, and no cost that grows with the square of the length.
    heads = getattr(config, "num_attention_heads", None)
    head_dim = (getattr(config, "head_dim", None) or config.hidden_size // heads) if heads else 0
    width = config.num_hidden_layers * heads * head_dim if heads else 0
    return Work(weights, trained, head_weights, trained_head, width)


@functools.cache
def peak_flops(device: torch.device, precision: str) -> float:
    """The most operations per second of ten matrix products, or of as many as fit into half a second."""
    size = 8192 if device.type == "cuda" else 1024
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.rand(size, size, generator=draw).to(device) for _ in range(2))
    best = 0.0
    with torch.no_grad(), autocast(device, precision):
        x, weight = x.to(compute_dtype(device, precision)), weight.to(compute_dtype(device, precision))
        begun = time.perf_counter()
        for _ in range(10):
            synchronize(device)
            started = time.perf_counter()
            linear(x, weight)
            synchronize(device)
            ended = time.perf_counter()
            best = max(best, 2 * size**3 / (ended - started))
            if ended - begun > 0.5:
                break
    if device.type == "cuda":  # the run's own peak of memory excludes this
        del x, weight
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return best


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its queued work. A CPU has no queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
