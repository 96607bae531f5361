"""What a model costs: floating-point operations and bytes of a token, against what the device has and can do."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rlhf_cli.kernels.linear import linear
from rlhf_cli.models.forward import autocast, computes_in_bfloat16, vocabulary_rows

CPU_TOKENS = 2048
"""What `auto` takes on a CPU, where that much fits. Processor time a token of a forward and backward pass on one Zen 5
core, rows of 90 tokens on average, against the fastest (benchmarks/microbatches.py, docs/speed.md):

    tokens at a time         256    512   1024   2048   4096   8192  16384
    1 M parameters          1.91   1.41   1.21   1.03   1.00   1.00   1.23
    23 M parameters         1.19   1.09   1.02   1.00   1.01

Below, each operation's own cost shows; far above, memory of large tensors is given back to the system and taken from
it again. Where it is all the same the smaller memory decides."""
CPU_BYTES = 300e6
"""Of activations and logits that `auto` takes on a CPU, though never fewer tokens than half of CPU_TOKENS, which cost
the larger model above 2 %: a third less memory in its PPO."""
GPU_TOKENS = 65_536
"""The most that `auto` takes on a GPU, whose products have long been large enough by then."""
FEWEST_TOKENS = 256
SHARE = 0.6
"""Of the memory beside weights, gradients and moments, what a microbatch may take: the rest is for the sampler's cache,
what the allocator can't use, and a backward pass's own tensors."""
LOGITS_COPIES = 4
"""Float32 tensors as large as the logits that live at once while a token's log-probability and gradient are computed:
the logits, what temperature and filters make of them, the gradients of both."""
COPIES_OF_WHOLE_DISTRIBUTIONS = 8
"""The same where an entropy or a KL over the whole vocabulary has a gradient too."""
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where Linux says how much memory a container may have."""


# ------------------------------------------------------------------------------------------- memory


def token_budget(
    trained: Sequence[PreTrainedModel],
    frozen: Sequence[PreTrainedModel],
    device: torch.device,
    precision: str,
    num_processes: int,
    *,
    checkpointing: bool = False,
    logits_copies: int = LOGITS_COPIES,
) -> int:
    """`tokens_per_microbatch: auto`: how many tokens a process computes at a time.

    ``SHARE * (total - static) / (activation_bytes + logits_copies * 4 * V)``, at least FEWEST_TOKENS, at most
    GPU_TOKENS, or on a CPU CPU_TOKENS and what CPU_BYTES are enough for. ``activation_bytes`` is the largest of the
    trained models', since only one has a graph at a time, ``static`` is 4 bytes a weight and 12 more a trained one
    (its gradient and AdamW's two moments), and V the largest vocabulary of a language model.

    It follows from the models' shapes, the precision and the memory that the device has in all, never from what is
    free just now or from a clock: a run that goes on on a machine of the same kind computes the same bytes.

    Args:
        trained: the models that learn, one microbatch of one of them at a time.
        frozen: what else is in the device's memory, each model once.
        device: the total is a GPU's memory, or this machine's (within the limit of its container) on a CPU.
        num_processes: on a CPU they share it.
        checkpointing: a trained model keeps each layer's input only, and beside them what one layer keeps while that
            is computed again: ``activation_bytes / layers + 4 * layers * hidden``.
    """
    static = sum(4 * p.numel() + (12 * p.numel() if p.requires_grad else 0) for m in trained for p in m.parameters())
    static += sum(4 * p.numel() for m in frozen for p in m.parameters())
    a_token = max(
        _checkpointed_bytes(m, precision) if checkpointing else activation_bytes(m, precision) for m in trained
    )
    vocabulary = max((vocabulary_rows(m) for m in trained if m.get_output_embeddings() is not None), default=0)
    a_token += logits_copies * 4 * vocabulary
    total = total_memory(device) / (1 if device.type == "cuda" else num_processes)
    fitting = int(SHARE * (total - static) / a_token)
    most = GPU_TOKENS if device.type == "cuda" else min(CPU_TOKENS, max(CPU_TOKENS // 2, int(CPU_BYTES / a_token)))
    return max(FEWEST_TOKENS, min(fitting, most))


def activation_bytes(model: PreTrainedModel, precision: str) -> float:
    """What the backbone keeps of each token for the backward pass, in bytes.

    It is counted, not computed from a formula: what autograd keeps of a sequence of 16 tokens less what it keeps of
    one of 8, over 8; the difference has neither weights nor tables in it. For a Llama in float32 it is about
    ``4 * layers * (7 * hidden + 2 * key_value_width + 4 * intermediate)``: of a layer the two norms' inputs and
    outputs, query, key, value, what attention gives (twice: as it comes and as the next product takes it), gate, its
    activation, up and their product. Other families, adapters and a half precision are counted as they are. Attention
    that keeps its N x N weights needs more for long sequences than is said here.
    """
    return (_kept(model, 16, precision) - _kept(model, 8, precision)) / 8


def _checkpointed_bytes(model: PreTrainedModel, precision: str) -> float:
    config = model.config.get_text_config()
    layers: int = config.num_hidden_layers
    return activation_bytes(model, precision) / layers + 4 * layers * config.hidden_size


def _kept(model: PreTrainedModel, num_tokens: int, precision: str) -> int:
    """Bytes of the tensors that autograd keeps of a forward pass, each memory once."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    device = next(model.parameters()).device
    ids = (torch.arange(num_tokens, device=device) * 7 + 3) % vocabulary_rows(model)
    with (
        torch.enable_grad(),
        autocast(device, precision),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        # While the output lives all of them do, and no two have the same address.
        output = model.base_model(input_ids=ids[None])
    del output
    return sum(kept.values())


def total_memory(device: torch.device) -> int:
    """The memory that the device has in all, in bytes; a container's limit counts where it is the lower."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in LIMITS:
        if Path(limit).is_file():
            text = Path(limit).read_text(encoding="utf-8").strip()
            total = min(total, int(text)) if text.isdecimal() else total
    return total


# ------------------------------------------------------------------------------------------- operations


@dataclass(frozen=True)
class Work:
    """The floating-point operations of a model, counted from its shape; a multiplication with its addition is two.

    The count of Kaplan et al. 2020 (arXiv 2001.08361, table 1) and of PaLM (Chowdhery et al. 2022, appendix B): two a
    weight and token forward, twice that backward, and attention by itself. Norms, activations, softmax and the
    optimizer are left out, and so is whatever is computed twice. Unlike theirs a token's attention counts the tokens
    that it can see and no others, and the head the tokens that it runs on.

    >>> work = Work(weights=100, trained=100, head=30, trained_head=30, width=4)
    >>> work.forward([3], 2)  # 100 x 3 x 2 + 30 x 2 x 2 + 4 x 4 x (1+2+3)
    816
    >>> work.forward([3, 4], 2, shared=[0, 2]) - 816  # the second one's last two tokens: 100 x 2 x 2 + 4 x 4 x (3+4)
    512
    >>> work.training([3], 2)
    2448
    """

    weights: int
    """That a token passes: those of the layers, without embeddings and head; of experts its share."""
    trained: int
    """Of these, those that get a gradient."""
    head: int
    """Weights of the head over the vocabulary."""
    trained_head: int
    """Of these, those that get a gradient."""
    width: int
    """Of the queries, summed over the layers: layers x heads x head_dim."""

    def forward(self, lengths: Sequence[int], head_tokens: int, shared: Sequence[int] | None = None) -> int:
        """``2 * weights * N + 2 * head * head_tokens + 4 * width * pairs``.

        Args:
            lengths: tokens of each sequence, N in all; ``pairs`` are the tokens that see one another, n (n + 1) / 2 of
                a sequence of n (queries with keys and weights with values are two products of 2 * width each).
            head_tokens: tokens that the head runs on.
            shared: of each sequence, with how many tokens it begins that another one has begun with; None: with none.
                They are computed once, so here they do not count.
        """
        begun = shared or [0] * len(lengths)
        pairs = sum(n * (n + 1) // 2 for n in lengths) - sum(n * (n + 1) // 2 for n in begun)
        return 2 * self.weights * (sum(lengths) - sum(begun)) + 2 * self.head * head_tokens + 4 * self.width * pairs

    def training(self, lengths: Sequence[int], head_tokens: int, shared: Sequence[int] | None = None) -> int:
        """``3 * forward``, less the weights' gradients of what is frozen."""
        num_tokens = sum(lengths) - sum(shared or ())
        frozen = 2 * (self.weights - self.trained) * num_tokens + 2 * (self.head - self.trained_head) * head_tokens
        return 3 * self.forward(lengths, head_tokens, shared) - frozen


def work_of(model: PreTrainedModel) -> Work:
    """The count of a model's weights that `Work` multiplies."""
    config, backbone = model.config.get_text_config(), model.base_model
    tables = {id(p) for m in backbone.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
    experts = getattr(config, "num_experts_per_tok", None)
    weights = trained = 0
    for parameter in backbone.parameters():
        if id(parameter) in tables:
            continue
        size = parameter.numel()
        if experts and parameter.ndim == 3:
            # The weights of all experts in one: [experts, out, in].
            size = size * experts // parameter.shape[0]
        weights += size
        trained += size if parameter.requires_grad else 0
    head = model.get_output_embeddings()
    assert head is None or isinstance(head.weight, torch.Tensor)
    of_head = head.weight.numel() if head is not None else 0
    trained_head = of_head if head is not None and head.weight.requires_grad else 0
    # A state space model has no heads, and nothing that grows with the square of the length.
    heads = getattr(config, "num_attention_heads", None)
    width = 0
    if heads:
        width = config.num_hidden_layers * heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return Work(weights, trained, of_head, trained_head, width)


def peak_flops(device: torch.device, precision: str) -> float:
    """The most operations a second that a matrix product reaches here, in the precision of the forward passes.

    The best of ten products, or of those that half a second is enough for: square ones of 1024 on a CPU, which take 10
    to 20 ms each on one core, of 8192 on a GPU.
    """
    size = 8192 if device.type == "cuda" else 1024
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.rand(size, size, generator=draw).to(device) for _ in range(2))
    best = 0.0
    with torch.no_grad(), autocast(device, precision):
        if computes_in_bfloat16(device, precision):
            x, weight = x.bfloat16(), weight.bfloat16()
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
    if device.type == "cuda":
        # What the run needs at most is not what this needed.
        del x, weight
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return best


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what it was told; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
