"""What a model costs: bytes and floating-point operations for each token, compared with what the device has."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rlhf_cli.kernels.linear import linear
from rlhf_cli.models.deferred import blocks
from rlhf_cli.models.forward import autocast, compute_dtype, vocabulary_rows
from rlhf_cli.sharding import gathered, is_sharded, local
from rlhf_cli.tensor_ops import num_weights

CPU_TOKENS = 2048
"""Most tokens per microbatch that `auto` chooses on a CPU. Processor time per token of a forward and backward
pass on one Zen 5 core, relative to the fastest, with rows of 90 tokens on average (benchmarks/microbatches.py,
docs/speed.md):

    tokens per microbatch    256    512   1024   2048   4096   8192  16384
    1 M parameters          1.91   1.41   1.21   1.03   1.00   1.00   1.23
    23 M parameters         1.19   1.09   1.02   1.00   1.01

With fewer tokens the fixed cost of each operation shows. With many more, the allocator returns large tensors to the
system and requests them again. Where the times are equal, the smaller memory decides."""
CPU_BYTES = 300e6
"""Memory for activations and logits that `auto` chooses on a CPU. It never chooses less than half of CPU_TOKENS for
this: that costs the larger model above 2 % of its time and saves a third of the memory in its PPO."""
GPU_TOKENS = 65_536
"""Most tokens per microbatch that `auto` chooses on a GPU. Its matrix products are large enough long before that."""
FEWEST_TOKENS = 256
SHARE = 0.6
"""Share of the memory left by weights, gradients and moments that a microbatch may use. The rest is for the sampler's
cache, for fragmentation in the allocator, and for temporary tensors of the backward pass."""
LOGITS_COPIES = 4
"""Float32 tensors of the size of the logits that exist together while the log-probability of a token and its gradient
are computed: the logits, the logits after temperature and filters, and the gradients of both."""
COPIES_OF_WHOLE_DISTRIBUTIONS = 8
"""The same if an entropy or a KL over the whole vocabulary has a gradient too."""
TRAINED_BYTES = {"float32": 12, "8bit": 6, "bfloat16": 4}
"""Bytes of a trained number beside its float32 weight, by `optimizer.precision`: its gradient and its two moments. In
bfloat16 they are 6, and the weight is 2 smaller."""
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files in which Linux reports the memory limit of a container."""


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
    optimizer: str = "float32",
) -> int:
    """Maximum tokens per microbatch on each process for `tokens_per_microbatch: auto`.

    ``SHARE * (total - static_bytes) / token_bytes``, at least FEWEST_TOKENS. The upper limit is GPU_TOKENS on a GPU.
    On a CPU it is CPU_TOKENS, or fewer if CPU_BYTES hold fewer.

    The result depends on the shapes of the models, the precision and the total memory of the device. It depends
    neither on the memory that is free at the moment nor on a clock, so a run that resumes on a machine of the same
    kind computes the same bytes.

    Args:
        trained: the models that are trained. Only one of them has a microbatch in memory at a time.
        frozen: all other models in the device's memory.
        device: the total is the GPU's memory, or on a CPU this machine's memory (within its container's limit).
        precision: of the forward passes.
        num_processes: processes that share the memory of a CPU.
        checkpointing: True if layers are recomputed in the backward pass.
        logits_copies: LOGITS_COPIES or COPIES_OF_WHOLE_DISTRIBUTIONS.
        optimizer: `optimizer.precision`.
    """
    static = static_bytes(trained, frozen, optimizer)
    per_token = token_bytes(trained, precision, checkpointing=checkpointing, logits_copies=logits_copies)
    total = total_memory(device) / (1 if device.type == "cuda" else num_processes)
    return budget_within(total, static, per_token, device.type)


def budget_within(total: float, static: float, per_token: float, device: str) -> int:
    """`token_budget` of a process with `total` bytes, of which the models take `static`.

    >>> [budget_within(8e9, 2e9, 1e6, device) for device in ("cuda", "cpu")], budget_within(4e9, 4e9, 1e6, "cuda")
    ([3600, 1024], 256)
    """
    fitting = int(SHARE * (total - static) / per_token)
    most = GPU_TOKENS if device == "cuda" else min(CPU_TOKENS, max(CPU_TOKENS // 2, int(CPU_BYTES / per_token)))
    return max(FEWEST_TOKENS, min(fitting, most))


def static_bytes(
    trained: Sequence[PreTrainedModel], frozen: Sequence[PreTrainedModel], optimizer: str = "float32"
) -> int:
    """Bytes that do not depend on the batch, before `hold_trained`.

    The bytes of each weight, and TRAINED_BYTES for each trained number: its gradient and the two moments of AdamW.
    Weights that several models share count once. A model that is given twice counts twice, for a copy of its weights.
    Of a sharded model the rows of this process count, and what it gathers at a time.
    """
    numbers = sum(local(p).numel() for m in trained for p in m.parameters() if p.requires_grad)
    moments = TRAINED_BYTES[optimizer] * numbers
    models = [*trained, *frozen]
    once = {id(p): local(p).nbytes for m in models for p in m.parameters()}
    copies = [m for number, m in enumerate(models) if m in models[:number]]
    exchanged = max((exchanged_bytes(m) for m in models if is_sharded(m)), default=0)
    return exchanged + moments + sum(once.values()) + sum(local(p).nbytes for m in copies for p in m.parameters())


def exchanged_bytes(model: PreTrainedModel) -> int:
    """The most bytes of a sharded model's weights that a process has gathered at a time, with their gradients.

    The weights outside of the blocks, and two blocks: one computes while the next arrives.
    """
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks(model)]
    outside = sum(p.numel() for p in model.parameters()) - sum(sizes)
    return 8 * outside + 12 * max(sizes)


def token_bytes(
    trained: Sequence[PreTrainedModel],
    precision: str,
    *,
    checkpointing: bool = False,
    logits_copies: int = LOGITS_COPIES,
) -> float:
    """Bytes for each token of a microbatch: ``activation_bytes + logits_copies * 4 * V``.

    The activations are those of the trained model that needs most, since only one has a graph at a time. V is the
    largest vocabulary of a language model among them. With `checkpointing` a model keeps only the input of each layer,
    and the activations of the one layer that is recomputed: ``activation_bytes / layers + 4 * layers * hidden``.
    """
    count = _checkpointed_bytes if checkpointing else activation_bytes
    # A frozen backbone keeps nothing for a backward pass, but its forward pass needs memory too.
    activations = max(max(count(m, precision), 16 * m.config.get_text_config().hidden_size) for m in trained)
    vocabulary = max((vocabulary_rows(m) for m in trained if m.get_output_embeddings() is not None), default=0)
    return activations + logits_copies * 4 * vocabulary


def activation_bytes(model: PreTrainedModel, precision: str) -> float:
    """Bytes that the backbone keeps for each token until the backward pass.

    They are measured, not computed by a formula: the bytes that autograd keeps for a sequence of 16 tokens, minus
    those for 8 tokens, over 8. Weights and tables cancel in the difference. For a Llama in float32 the result is about
    ``4 * layers * (7 * hidden + 2 * key_value_width + 4 * intermediate)``. Each layer keeps the inputs and outputs of
    two norms; query, key and value; the output of attention twice (as computed, and as the next product reads it);
    the gate, its activation, the up projection and their product. Other families, adapters and bfloat16 are measured
    in the same way. Attention that keeps its N x N weights needs more than this for long sequences.

    A model on the `meta` device, which has shapes and no weights, is measured in float32.
    """
    return (_kept_bytes(model, 16, precision) - _kept_bytes(model, 8, precision)) / 8


def cache_bytes(model: PreTrainedModel, num_tokens: int, number_bytes: int = 4) -> int:
    """Bytes of the keys and values of `num_tokens` tokens while the sampler runs.

    ``2 * layers * key_value_heads * head_dim * num_tokens * number_bytes``
    """
    config = model.config.get_text_config()
    heads: int = config.num_attention_heads
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_value_heads: int = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * key_value_heads * head_dim * num_tokens * number_bytes


def _checkpointed_bytes(model: PreTrainedModel, precision: str) -> float:
    config = model.config.get_text_config()
    layers: int = config.num_hidden_layers
    return activation_bytes(model, precision) / layers + 4 * layers * config.hidden_size


@gathered
def _kept_bytes(model: PreTrainedModel, num_tokens: int, precision: str) -> int:
    """`kept_bytes` of a forward pass over one sequence."""
    device = next(model.parameters()).device
    ids = (torch.arange(num_tokens, device=device) * 7 + 3) % vocabulary_rows(model)
    with autocast(device, precision) if device.type != "meta" else contextlib.nullcontext():
        inputs = {"decoder_input_ids": ids[None]} if model.config.is_encoder_decoder else {}
        return kept_bytes(lambda: model.base_model(input_ids=ids[None], **inputs))


def kept_bytes(compute: Callable[[], object]) -> int:
    """Bytes of the storages that autograd keeps for a computation. Each storage counts once."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # The address of the storage object: data_ptr() is 0 for every tensor without numbers (meta, fake).
        kept[storage._cdata] = storage.nbytes()
        # An operation that keeps its own output would form a cycle, which Python cannot free. The weights are in it.
        return tensor.detach()

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # All storages live as long as the output, so no two of them have the same address.
        output = compute()
    del output
    return sum(kept.values())


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


# ------------------------------------------------------------------------------------------- operations


@dataclass(frozen=True)
class Work:
    """The floating-point operations of a model, counted from its shape. A multiply-add counts as two.

    The count follows Kaplan et al. 2020 (arXiv 2001.08361, table 1) and PaLM (Chowdhery et al. 2022, appendix B): two
    operations per weight and token forward, twice that backward, and attention separately. Norms, activations, softmax
    and the optimizer are not counted, and neither is anything that is computed a second time. Unlike in those papers,
    the attention of a token counts only the tokens that it can see, and the head only the tokens that it runs on.

    >>> work = Work(weights=100, trained=100, head=30, trained_head=30, width=4)
    >>> work.forward([3], 2)  # 100 x 3 x 2 + 30 x 2 x 2 + 4 x 4 x (1+2+3)
    816
    >>> work.forward([3, 4], 2, shared=[0, 2]) - 816  # the second one's last two tokens: 100 x 2 x 2 + 4 x 4 x (3+4)
    512
    >>> work.training([3], 2)
    2448
    """

    weights: int
    """Weights that a token passes: those of the layers, without embeddings and head. Of a mixture of experts, the share
    that a token uses."""
    trained: int
    """The number of `weights` that get a gradient."""
    head: int
    """Weights of the head over the vocabulary."""
    trained_head: int
    """The number of `head` weights that get a gradient."""
    width: int
    """Width of the queries, summed over the layers: layers x heads x head_dim."""

    def forward(self, lengths: Sequence[int], head_tokens: int, shared: Sequence[int] | None = None) -> int:
        """Operations of a forward pass.

        ``2 * weights * N + 2 * head * head_tokens + 4 * width * pairs``

        Args:
            lengths: tokens of each sequence, N in total. `pairs` counts the pairs of tokens that attend to each other:
                n (n + 1) / 2 in a sequence of n. Queries with keys, and weights with values, are two products of
                2 * width operations each.
            head_tokens: tokens that the head runs on.
            shared: for each sequence, the number of its first tokens that an earlier sequence shares with it. They are
                computed once, so they are not counted again. None: no sequence shares any.
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
    """The `Work` of a model, counted from its parameters."""
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
        if experts and parameter.ndim == 3:
            # One parameter has the weights of all experts: [experts, out, in].
            size = size * experts // parameter.shape[0]
        weights += size
        trained += size if parameter.requires_grad else 0
    assert head is None or isinstance(head.weight, torch.Tensor)
    head_weights = head.weight.numel() if head is not None else 0
    trained_head = head_weights if head is not None and head.weight.requires_grad else 0
    # A state space model has no attention heads, and no cost that grows with the square of the length.
    heads = getattr(config, "num_attention_heads", None)
    width = 0
    if heads:
        width = config.num_hidden_layers * heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return Work(weights, trained, head_weights, trained_head, width)


@functools.cache
def peak_flops(device: torch.device, precision: str) -> float:
    """The most operations per second that a matrix product reaches on this device, in the passes' precision.

    The best of ten square products, or of as many as fit into half a second. Their size is 1024 on a CPU (10 to 20 ms
    each on one core) and 8192 on a GPU. Measured once per process.
    """
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
    if device.type == "cuda":
        # This measurement must not count in the run's own peak of memory.
        del x, weight
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return best


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its queued work. A CPU has no queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
