"""The memory of a model in a run, computed from its shape. Bytes, for one process.

What is counted is what lives at the same time. The allocators of torch and of the system take more:
benchmarks/PLAN.md has the measured difference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rlhf_cli.config.models import Lora, Quantization
from rlhf_cli.kernels.head import MOST_LOGITS, chunk_tokens
from rlhf_cli.models.cost import READ_TOKENS
from rlhf_cli.processes.microbatches import BUCKET_BYTES
from rlhf_cli.processes.sharding import LARGEST_FILE

if TYPE_CHECKING:
    from rlhf_cli.plan.shapes import Shape

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
SAMPLING = 30_000_000
"""The same of bfloat16 once the paged decoder has sampled, whose products have many shapes."""
SHARDING = 5_000_000
"""The same of a process that exchanges the weights of sharded models: buffers of FSDP and gloo."""


@dataclass(frozen=True)
class Machine:
    """What each process has."""

    device: str
    """cpu or cuda."""
    memory: float
    """Bytes for one process."""
    processes: int = 1
    per_node: int = 8
    """Processes of one machine, for `distributed.shard: hybrid`."""
    name: str = "this machine"
    auto_is_half: bool = True
    """Whether `precision: auto` computes in 16 bits on its GPU."""


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
    half: bool = False  # the passes compute in 16 bits
    states: str = "float32"
    """`optimizer.precision`."""
    checkpointing: bool = False
    saves: bool = False
    """Whether the run writes checkpoints on its way."""
    threads: int = 1
    """Passes at the same time."""
    samples: bool = False
    """Whether it samples, from a model that is whole."""
    keep_whole: tuple[str, ...] = ()
    """Sections of the models that stay whole although the others are sharded (`distributed.keep_whole`)."""

    @property
    def number(self) -> int:
        """Bytes of a number that the passes compute."""
        return 2 if self.half else 4

    @property
    def precision(self) -> str:
        return "bfloat16" if self.half else "float32"

    @property
    def libraries(self) -> dict[str, float]:
        """What belongs to no tensor."""
        size = LIBRARIES[self.precision] + SHARDING * (self.sharded > 1) + SAMPLING * (self.half and self.samples)
        return {"libraries": size} if self.device == "cpu" else {}


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
    logits_copies: float = 1.0
    """Tensors of the size of the logits that exist together. One: what the backward pass keeps of them
    (`linear_logprobs`)."""

    @property
    def after_first(self) -> Batch:
        """A microbatch that is not the first of its step."""
        return self if self.later is None else self.of(self.later)

    def of(self, tokens: int) -> Batch:
        """A microbatch of as many tokens, with the same share of targets."""
        return replace(self, tokens=tokens, targets=round(self.targets * tokens / self.tokens))


@dataclass(frozen=True)
class Phase:
    """A part of the run, and what is in memory at its fullest moment."""

    name: str
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def of_pass(self) -> float:
        """What grows with the tokens of a pass."""
        return self.parts.get("activations", 0.0) + self.parts.get("logits", 0.0)


def join(*parts: dict[str, float]) -> dict[str, float]:
    """The sum of several parts, by name; empty ones are dropped."""
    names = dict.fromkeys(name for part in parts for name in part)
    sums = {name: sum(part.get(name, 0.0) for part in parts) for name in names}
    return {name: size for name, size in sums.items() if size}


def fullest(moments: Iterable[dict[str, float]]) -> dict[str, float]:
    """The moment that needs most."""
    return max(moments, key=lambda parts: sum(parts.values()))


@dataclass(frozen=True)
class Held:
    """A model in the memory of a process."""

    name: str
    """What the run calls it: policy, value model, ..."""
    shape: Shape
    setting: Setting
    lora: Lora | None = None
    is_trained: bool = True
    """Whether its weights or adapters are; otherwise it is only read."""
    stored: int = 4
    """Bytes of a number in its file."""
    is_merged: bool = False
    """Whether adapters are added to its weights when they are read, which makes them float32 numbers."""
    shares: bool = False
    """Whether it shares the policy's frozen weights, so that only its adapters and its head count."""
    whole: bool = False
    """Whether `distributed.shard` leaves it whole (`distributed.keep_whole`)."""

    @property
    def among(self) -> int:
        """The processes among which it is sharded."""
        return 1 if self.whole else self.setting.sharded

    @property
    def waits(self) -> bool:
        """Whether its weights, gradients and moments are in the CPU's memory between the passes of a GPU."""
        return self.setting.offloads and self.among > 1

    @property
    def states(self) -> str:
        """How AdamW keeps it. Adapters are never in bfloat16."""
        return "float32" if self.lora is not None and self.setting.states == "bfloat16" else self.setting.states

    @property
    def quantization(self) -> Quantization | None:
        """How its frozen linear layers are held in 4 bits, if they are."""
        return None if self.lora is None else self.lora.quantize

    @property
    def holds_half(self) -> bool:
        """Whether frozen weights that are numbers of 16 bits in the file stay so (`rlhf_cli.models.frozen`)."""
        return self.setting.half and not (self.is_trained and self.lora is None) and self.stored == 2

    @property
    def weight_bytes(self) -> float:
        """Its weights. If it is offloaded, only the scales of its 4-bit weights stay on the device."""
        shape = self.shape
        four_bit, of_four_bit = 0.0, 0.0
        if self.quantization is not None:
            four_bit, of_four_bit = shape.quantizable, BYTES_OF_NF4[self.quantization]
        if self.waits:
            return four_bit * (of_four_bit - 0.5)
        trained = self._state_bytes(0)
        if self.shares:
            return trained / self.among
        of_linear = 2 if self.holds_half or (self.setting.half and not self.is_trained) else 4
        of_tables = 2 if self.holds_half else 4
        rest = shape.frozen - shape.frozen_linear - shape.frozen_tables
        frozen = (shape.frozen_linear - four_bit) * of_linear + shape.frozen_tables * of_tables + rest * 4
        frozen += four_bit * of_four_bit
        if self.holds_half:
            frozen += 2 * max(0.0, self._num_merged - four_bit)
        return (trained + frozen) / self.among

    @property
    def _num_merged(self) -> float:
        """Numbers of frozen layers that are kept exactly and got adapters when they were read: float32 numbers."""
        shape = self.shape
        is_exact = self.is_merged and self.is_trained and self.lora is not None
        return shape.frozen_linear - shape.has_head * shape.vocabulary * shape.hidden if is_exact else 0.0

    @property
    def gradient_bytes(self) -> float:
        return 0.0 if self.waits else self._state_bytes(1) / self.among

    @property
    def moment_bytes(self) -> float:
        return 0.0 if self.waits else self._state_bytes(2) / self.among

    def _state_bytes(self, part: int) -> float:
        """One part of STATES of all trained numbers. Adapters and experts are never in bfloat16."""
        trained = self.shape.trained
        in_float32 = min(trained, self.shape.experts) if self.states == "bfloat16" else 0.0
        return (trained - in_float32) * STATES[self.states][part] + in_float32 * STATES["float32"][part]

    @property
    def offloaded_bytes(self) -> float:
        """What is in the CPU's memory for the GPU (`distributed.offload`)."""
        here = replace(self, setting=replace(self.setting, offloads=False))
        held = here.weight_bytes + here.gradient_bytes + here.moment_bytes
        return held - self.weight_bytes - self.gradient_bytes - self.moment_bytes

    @property
    def step_bytes(self) -> float:
        """What AdamW adds while it steps the largest weight, one weight at a time.

        On a CPU bitsandbytes computes 8-bit moments in float32: two moments, the gradient, and two temporary tensors.
        """
        if self.states != "8bit" or self.setting.device != "cpu" or self.lora is not None:
            return 0.0
        return 5 * 4.0 * self.shape.largest / self.among

    @property
    def communication_bytes(self) -> float:
        """What is beside the gradients while processes with whole models sum them (`GradientSum`)."""
        if self.setting.processes == 1 or self.among > 1:
            return 0.0
        # Sums take the place of float32 gradients, a bucket at a time. Sums of 16-bit gradients are twice as large.
        return self.gradient_bytes if self.states == "bfloat16" else min(BUCKET_BYTES, self.gradient_bytes)

    @property
    def file_bytes(self) -> float:
        """Its file on a CPU: merged weights in float32, or of a sharded model one file, and their copy in bfloat16.

        Weights of their own precision need nothing.
        """
        if self.setting.device != "cpu" or (self.lora is not None and self.lora.save == "adapter"):
            return 0.0
        base, is_sharded = self.shape.base, self.among > 1
        copies = (4 * base if self.lora is not None or is_sharded else 0.0) + (2 * base if self.stored == 2 else 0.0)
        return min(copies, 1.5 * LARGEST_FILE) if is_sharded else copies

    def in_training(self, batch: Batch) -> dict[str, float]:
        """What a forward and backward pass over a microbatch adds at its fullest moment.

        Beside all activations and the gradient of the head there are either the logits and their gradient, or the
        temporary tensors of the last layer and, of a sharded model, the blocks that are gathered for it. When the
        backward pass of a sharded model ends, its activations are free and the gradient of its embeddings exists twice.
        """
        shape, setting, tokens = self.shape, self.setting, batch.tokens
        kept = shape.kept * tokens
        if setting.checkpointing:
            kept = kept / shape.layers + tokens * 4 * shape.layers * shape.hidden
        activations = max(kept, tokens * 16 * shape.hidden)
        number = 4 if shape.largest_expert else setting.number  # autocast leaves experts in float32
        temporary = tokens * 3 * shape.widest * number
        head = 4.0 * shape.vocabulary * shape.hidden if shape.has_head and self.lora is None else 0.0
        # Adapted experts are kept as the sum of weights and adapters.
        merged = {"merged experts": 4.0 * shape.adapted_experts / (shape.layers if setting.checkpointing else 1)}
        # The gradient of all experts of a layer is added as a whole to the sum of the microbatches before.
        has_experts = self.lora is None or shape.adapted_experts > 0
        of_layer = max(head, 4.0 * shape.largest_expert if has_experts else 0.0)
        at_head = {"activations": activations, **merged, "logits": self.logits(batch), "gradients": head}
        at_layer = {"activations": activations + temporary, **merged, "gradients": of_layer}
        if self.among == 1:
            # When the backward pass ends, its activations are free, and the gradient of the embeddings exists.
            at_end = {"gradients": 4.0 * shape.vocabulary * shape.hidden if self.lora is None else 0.0}
            return join(fullest([at_head, at_layer, at_end]), self.copied_weights)
        ends, blocks = self._gathered(trains=True)
        at_end = {"gradients": 2 * ends if self.lora is None else 0.0}
        return fullest([join(at_head, {"gathered": ends}), join(at_layer, {"gathered": ends + blocks}), at_end])

    def in_forward(self, batch: Batch) -> dict[str, float]:
        """What a forward pass without gradients adds."""
        shape = self.shape
        whole = batch.logits_copies > Batch.logits_copies
        one = replace(batch, logits_copies=batch.logits_copies - 1 if whole else 0.0)
        added = {
            "activations": batch.tokens * (3 * shape.widest + 4 * shape.hidden) * float(self.setting.number),
            "merged experts": 4.0 * shape.adapted_experts / shape.layers,
            "logits": self.logits(one),
        }
        return join(added, self.copied_weights)

    def in_sampling(self, rows: int, length: int) -> dict[str, float]:
        """What sampling `rows` responses at the same time adds: keys and values, logits, and the decoder's weights."""
        shape, number = self.shape, float(self.setting.number)
        parts = {
            "keys and values": rows * length * shape.cache * (number if self.setting.device != "cpu" else 4.0),
            "logits": 3.0 * rows * shape.vocabulary * 4,
        }
        if self.setting.device != "cpu":
            a_token = 3 * shape.widest * number + shape.hidden * (16 + 6 * number)
            parts["prompts"] = min(READ_TOKENS, rows * length) * a_token
            parts["logits"] += 2 * rows * shape.vocabulary * number  # of the first call and of the graph
        return parts | self.of_decoder

    @property
    def of_decoder(self) -> dict[str, float]:
        """The weights that a decoder holds beside it: what it gathers of a sharded one, or its copy of some."""
        if self.among > 1:
            return self.copied_weights
        if self.setting.device != "cpu":
            casts_head = self.quantization is not None and self.setting.half and self.stored != 2
            copied = self._num_cast + casts_head * self.shape.vocabulary * self.shape.hidden
            return {"rollout copy": 2 * copied} if copied else {}
        if self.lora is not None:
            return {}
        return {"rollout copy": 2.0 * self.shape.linear if self.setting.half else 4.0 * self.shape.joined}

    def logits(self, batch: Batch) -> float:
        """The logits and their gradient: `batch.logits_copies` tensors, and a chunk if they are computed in chunks."""
        if not self.shape.has_head:
            return 0.0
        numbers = batch.targets * self.shape.vocabulary
        copies = batch.logits_copies * numbers * self.setting.number
        if batch.logits_copies > Batch.logits_copies:
            return copies
        # On a GPU in 16 bits the product and its copy in float32.
        number = 6.0 if self.setting.device != "cpu" and self.setting.number != 4 else 4.0
        trains_head = self.is_trained and self.lora is None
        tokens = chunk_tokens(self.shape.vocabulary, self.setting.device, trains_head=trains_head)
        chunk = number * min(batch.targets, tokens) * self.shape.vocabulary
        return 3 * chunk if numbers > MOST_LOGITS else copies + chunk

    def _gathered(self, *, trains: bool) -> tuple[float, float]:
        """What a process gathers of a sharded model: the weights outside of its blocks, and blocks.

        Two blocks are gathered: one computes while the next arrives. In a backward pass there are also the gradient of
        a block, and the float32 copy of the gradient of the block before, which is summed over the processes.
        """
        shape, number = self.shape, self.setting.number
        gradient = number + 4 if trains and shape.trained > shape.layer else 0
        of_ends = 2.0 if self.states == "bfloat16" and shape.trained else 4.0
        return of_ends * shape.ends, shape.layer * float(2 * number + gradient)

    @property
    def copied_weights(self) -> dict[str, float]:
        """Weights that exist a second time during a pass, of a sharded model in one without gradients.

        Autocast keeps a bfloat16 copy of each float32 weight for the backward pass. NF4 gives one dequantized layer at
        a time.
        """
        shape, setting = self.shape, self.setting
        if self.among > 1:
            return {"gathered": sum(self._gathered(trains=False))}
        if self.quantization is not None:
            return {"dequantized": 4.0 * shape.hidden * shape.widest}
        if not self._num_cast:
            return {}
        return {"16-bit copies": 2 * self._num_cast / (shape.layers if setting.checkpointing else 1)}

    @property
    def _num_cast(self) -> float:
        """Numbers of the float32 weights that passes in 16 bits cast."""
        setting, shape = self.setting, self.shape
        if not setting.half or self.quantization is not None or (setting.states == "bfloat16" and self.lora is None):
            return 0.0
        if not self.is_trained or self.holds_half:
            return shape.linear - shape.frozen_linear + self._num_merged
        return float(shape.linear)
