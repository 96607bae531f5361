"""The memory of a run, phase by phase, computed from the shapes of its models. Bytes, for one process.

What is counted is what lives at the same time. The allocators of torch and of the system take more:
benchmarks/PLAN.md has the measured difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rlhf_cli.config.models import Quantization
from rlhf_cli.kernels.head import CHUNK, MOST_LOGITS
from rlhf_cli.plan.shapes import Shape
from rlhf_cli.processes.pass_loop import BUCKET_BYTES

Kept = Literal["float32", "exact", "rounded"]
"""How frozen weights are held if the passes compute in bfloat16: in float32; in bfloat16 if their file has them so; in
bfloat16 in any case (`rlhf_cli.models.frozen`)."""
BYTES_OF_NF4: dict[Quantization, float] = {"nf4": 0.5 + 4 / 64, "nf4_double": 0.5 + 1 / 64 + 4 / (64 * 256)}
"""Bytes of a number in 4 bits, with the scales of the blocks of 64 and of the 256 blocks of scales."""
STATES: dict[str, tuple[float, float, float]] = {
    "float32": (4, 4, 8),
    "8bit": (4, 4, 2 + 8 / 256),
    "bfloat16": (2, 2, 4),
}
"""Bytes of a trained number by `optimizer.precision`: the weight, its gradient, its two moments."""
LIBRARIES = {"float32": 45_000_000, "bfloat16": 75_000_000}
"""Bytes of a CPU process that belong to no tensor, by the precision of its passes: code that is read at its first use,
rows of data, and what oneDNN generates and keeps for each shape of a product (benchmarks/plan_memory.py)."""
SHARDING = 20_000_000
"""The same of a process that exchanges the weights of sharded models: buffers of FSDP and gloo."""


@dataclass(frozen=True)
class Held:
    """A model in memory."""

    shape: Shape
    kept: Kept = "float32"
    shares: bool = False
    """Whether its frozen weights are those of the policy, so that only its adapters and its head count."""
    whole: bool = False
    """Whether `distributed.shard` leaves it whole (`distributed.keep_whole`)."""

    def among(self, setting: Setting) -> int:
        """The processes among which it is sharded."""
        return 1 if self.whole else setting.sharded

    def waits(self, setting: Setting) -> bool:
        """Whether its weights, gradients and moments are in the CPU's memory between the passes of a GPU."""
        return setting.offloads and self.among(setting) > 1


@dataclass(frozen=True)
class Setting:
    """How a process computes."""

    device: str
    """cpu or cuda."""
    processes: int = 1
    sharded: int = 1
    """Processes among which every model is sharded (`distributed.shard`)."""
    offloads: bool = False
    """Whether a GPU's share of sharded models is in the CPU's memory (`distributed.offload`)."""
    half: bool = False
    """Whether the passes compute in 16 bits."""
    states: str = "float32"
    """`optimizer.precision`."""
    checkpointing: bool = False
    saves: bool = False
    """Whether the run writes checkpoints on its way."""

    @property
    def number(self) -> int:
        """Bytes of a number that the passes compute."""
        return 2 if self.half else 4


@dataclass(frozen=True)
class Batch:
    """A microbatch of full rows."""

    tokens: int
    targets: int
    """Tokens whose logits are computed."""
    num: int
    """Microbatches for each optimizer step."""
    later: int | None = None
    """Most tokens of a microbatch that is not the first of its step; None: as many as the first may have."""
    logits_copies: float = 2.0
    """Tensors of the size of the logits that exist together: the logits and their gradient."""
    is_chunked: bool = True
    """Whether large logits are computed a chunk at a time (`linear_logprobs`)."""

    @property
    def after_first(self) -> Batch:
        """A microbatch that is not the first of its step."""
        tokens = self.tokens if self.later is None else self.later
        return replace(self, tokens=tokens, targets=round(self.targets * tokens / self.tokens))


@dataclass(frozen=True)
class Phase:
    """A part of the run, and what is in memory at its fullest moment."""

    name: str
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def join(*parts: dict[str, float]) -> dict[str, float]:
    """The sum of several parts, by name; empty ones are dropped."""
    names = dict.fromkeys(name for part in parts for name in part)
    sums = {name: sum(part.get(name, 0.0) for part in parts) for name in names}
    return {name: size for name, size in sums.items() if size}


def fullest(moments: Iterable[dict[str, float]]) -> dict[str, float]:
    """The moment that needs most."""
    return max(moments, key=lambda parts: sum(parts.values()))


# ----------------------------------------------------------------------------------- what does not depend on a batch


def weight_bytes(model: Held, setting: Setting) -> float:
    """Bytes of the weights of a model on one process. Of an offloaded one the scales of its 4-bit weights stay."""
    counts, shape = model.shape.counts, model.shape
    quantization = shape.lora.quantize if shape.lora is not None else None
    four_bit = counts.quantizable if quantization is not None else 0.0
    if model.waits(setting):
        return four_bit * (BYTES_OF_NF4[quantization] - 0.5) if quantization is not None else 0.0
    trained = _state_bytes(model, setting, 0)
    if model.shares:
        return trained / model.among(setting)
    is_lossless = model.kept != "float32" and shape.stored == 2
    of_linear = 2 if setting.half and (model.kept == "rounded" or is_lossless) else 4
    of_tables = 2 if setting.half and is_lossless else 4
    rest = counts.frozen - counts.frozen_linear - counts.frozen_tables
    frozen = (counts.frozen_linear - four_bit) * of_linear + counts.frozen_tables * of_tables + rest * 4
    if is_lossless and setting.half:
        frozen += 2 * max(0.0, _num_merged(model) - four_bit)
    if quantization is not None:
        frozen += four_bit * BYTES_OF_NF4[quantization]
    return (trained + frozen) / model.among(setting)


def _num_merged(model: Held) -> float:
    """Numbers of frozen layers that are kept exactly and got adapters when they were read: 16 bits do not hold them."""
    shape = model.shape
    is_exact = shape.is_merged and model.kept == "exact"
    return shape.counts.frozen_linear - shape.has_head * shape.vocabulary * shape.hidden if is_exact else 0.0


def gradient_bytes(model: Held, setting: Setting) -> float:
    """Bytes of the gradients of a model on one process."""
    return 0.0 if model.waits(setting) else _state_bytes(model, setting, 1) / model.among(setting)


def moment_bytes(model: Held, setting: Setting) -> float:
    """Bytes of AdamW's moments of a model on one process."""
    return 0.0 if model.waits(setting) else _state_bytes(model, setting, 2) / model.among(setting)


def step_bytes(model: Held, setting: Setting) -> float:
    """Bytes that AdamW adds while it steps the largest weight of a model, one weight at a time.

    On a CPU bitsandbytes computes 8-bit moments in float32: two moments, the gradient, and two temporary tensors.
    """
    if states_of(model, setting) != "8bit" or setting.device != "cpu" or model.shape.lora is not None:
        return 0.0
    return 5 * 4.0 * model.shape.largest / model.among(setting)


def _state_bytes(model: Held, setting: Setting, part: int) -> float:
    """Bytes of one part of STATES of all trained numbers. Adapters and experts are never in bfloat16."""
    trained, states = model.shape.trained, states_of(model, setting)
    in_float32 = min(trained, model.shape.counts.experts) if states == "bfloat16" else 0.0
    return (trained - in_float32) * STATES[states][part] + in_float32 * STATES["float32"][part]


def offloaded_bytes(models: Sequence[Held], setting: Setting) -> float:
    """Bytes that a process keeps in the CPU's memory for its GPU (`distributed.offload`)."""

    def held(setting: Setting) -> float:
        kinds = (weight_bytes, gradient_bytes, moment_bytes)
        return sum(kind(model, setting) for kind in kinds for model in models)

    return held(replace(setting, offloads=False)) - held(setting)


def states_of(model: Held, setting: Setting) -> str:
    """How AdamW keeps a model. Adapters are never in bfloat16."""
    return "float32" if model.shape.lora is not None and setting.states == "bfloat16" else setting.states


# --------------------------------------------------------------------------------------------- passes


def pass_bytes(model: Held, batch: Batch, setting: Setting) -> dict[str, float]:
    """What a forward and backward pass over a microbatch adds at its fullest moment.

    Beside all activations and the gradient of the head there are either the logits and their gradient, or the
    temporary tensors of the last layer and, of a sharded model, the blocks that are gathered for it. When the backward
    pass of a sharded model ends, its activations are free and the gradient of its embeddings exists twice.
    """
    shape, tokens = model.shape, batch.tokens
    kept = shape.counts.kept * tokens
    a_layer = kept / shape.layers
    if setting.checkpointing:
        kept = a_layer + tokens * 4 * shape.layers * shape.hidden
    activations = max(kept, tokens * 16 * shape.hidden)
    number = 4 if shape.largest_expert else setting.number  # autocast leaves experts in float32
    temporary = tokens * 3 * shape.widest * number
    head = 4.0 * shape.vocabulary * shape.hidden if shape.has_head and shape.lora is None else 0.0
    # Adapted experts are kept as the sum of weights and adapters.
    merged = 4.0 * shape.counts.adapted_experts / (shape.layers if setting.checkpointing else 1)
    at_head = {
        "activations": activations,
        "merged experts": merged,
        "logits": logit_bytes(shape, batch, setting),
        "gradients": head,
    }
    # The gradient of all experts of a layer is added to that of the microbatches before as a whole.
    has_experts = shape.lora is None or shape.counts.adapted_experts > 0
    of_layer = max(head, 4.0 * shape.largest_expert if has_experts else 0.0)
    at_layer = {"activations": activations + temporary, "merged experts": merged, "gradients": of_layer}
    if model.among(setting) > 1:
        ends, blocks = gathered_bytes(model, setting, trains=True)
        at_end = {"gradients": 2 * ends if shape.lora is None else 0.0}
        moments = [join(at_head, {"gathered": ends}), join(at_layer, {"gathered": ends + blocks}), at_end]
    else:
        moments = [join(parts, copies_of_weights(model, setting)) for parts in (at_head, at_layer)]
    return fullest(moments)


def logit_bytes(shape: Shape, batch: Batch, setting: Setting) -> float:
    """Bytes of logits, and of their gradient if `batch.logits_copies` says so."""
    if not shape.has_head:
        return 0.0
    numbers = batch.targets * shape.vocabulary
    if batch.is_chunked and numbers > MOST_LOGITS:
        return 3 * 4 * CHUNK
    return batch.logits_copies * numbers * setting.number


def forward_bytes(model: Held, batch: Batch, setting: Setting) -> dict[str, float]:
    """What a forward pass without gradients adds."""
    shape = model.shape
    one = replace(batch, logits_copies=max(1.0, batch.logits_copies - 1))
    hidden = batch.tokens * (3 * shape.widest + 4 * shape.hidden) * setting.number
    added = {
        "activations": hidden,
        "merged experts": 4.0 * shape.counts.adapted_experts / shape.layers,
        "logits": logit_bytes(shape, one, setting),
    }
    return join(added, copies_of_weights(model, setting))


def gathered_bytes(model: Held, setting: Setting, *, trains: bool) -> tuple[float, float]:
    """What a process gathers of a sharded model: the weights outside of its blocks, and blocks.

    Two blocks are gathered: one computes while the next arrives. In a backward pass there are also the gradient of a
    block, and the float32 copy of that of the block before, which is summed over the processes.
    """
    shape = model.shape
    gradient = setting.number + 4 if trains and shape.trained > shape.layer else 0
    of_ends = 2.0 if states_of(model, setting) == "bfloat16" and shape.trained else 4.0
    return of_ends * shape.ends, shape.layer * float(2 * setting.number + gradient)


def copies_of_weights(model: Held, setting: Setting) -> dict[str, float]:
    """Weights that exist a second time during a pass, of a sharded model in one without gradients.

    Autocast keeps a bfloat16 copy of each float32 weight for the backward pass. NF4 gives one dequantized layer at a
    time.
    """
    shape, counts = model.shape, model.shape.counts
    if model.among(setting) > 1:
        return {"gathered": sum(gathered_bytes(model, setting, trains=False))}
    if shape.lora is not None and shape.lora.quantize is not None:
        return {"dequantized": 4.0 * shape.hidden * shape.widest}
    if not setting.half:
        return {}
    in_float32 = counts.linear
    if model.kept == "rounded" or (model.kept == "exact" and shape.stored == 2):
        in_float32 -= counts.frozen_linear - _num_merged(model)
    if setting.states == "bfloat16" and shape.lora is None:
        in_float32 = 0.0
    if setting.checkpointing:
        in_float32 /= shape.layers
    return {"16-bit copies": 2 * in_float32}


def communication_bytes(model: Held, setting: Setting) -> float:
    """Bytes beside the gradients while processes with whole models sum them (`GradientSum`)."""
    if setting.processes == 1 or model.among(setting) > 1:
        return 0.0
    # The sums take the place of float32 gradients, a bucket at a time. Those of 16-bit gradients are twice as large.
    is_half = states_of(model, setting) == "bfloat16"
    return gradient_bytes(model, setting) if is_half else min(BUCKET_BYTES, gradient_bytes(model, setting))


# --------------------------------------------------------------------------------------------- sampling


def sampling_bytes(policy: Held, rows: int, length: int, setting: Setting) -> dict[str, float]:
    """What sampling `rows` responses at the same time adds: keys and values, logits, and the decoder's weights."""
    shape = policy.shape
    parts = {
        "keys and values": rows * length * shape.cache * setting.number,
        "logits": 3.0 * rows * shape.vocabulary * 4,
    }
    return parts | decoder_bytes(policy, setting)


def decoder_bytes(policy: Held, setting: Setting) -> dict[str, float]:
    """The weights that a decoder holds beside the policy: what it gathers of a sharded one, or its copy of some."""
    if policy.among(setting) > 1:
        return copies_of_weights(policy, setting)
    if setting.device == "cpu" and not setting.half and policy.shape.lora is None:
        return {"rollout copy": policy.shape.counts.joined * 4}
    return {}


def later_tokens(first: int, total: float, longest: int) -> int:
    """Most tokens of a microbatch that is not the first, if `total` tokens are cut so that `first` fit into each.

    A microbatch takes whole rows. The first may lack almost one of the longest rows of what fits, which comes later.

    >>> later_tokens(1000, 1200, 100), later_tokens(1000, 9000, 100)
    (300, 1000)
    """
    return min(first, round(total) - first + longest)
