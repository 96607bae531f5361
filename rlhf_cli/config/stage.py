"""The keys that all three stages share: artifacts, device, optimizer, number of steps, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rlhf_cli.config.base import (
    EXPANDED,
    BelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from rlhf_cli.config.data import DataSource
from rlhf_cli.config.models import TrainedModel

STAGES = ("sft", "rm", "ppo")


class Optimizer(Section):
    """AdamW with a warm-up and a schedule."""

    learning_rate: PositiveFloat
    """The peak learning rate."""
    precision: Literal["float32", "8bit", "bfloat16"] = "float32"
    """Number format of what AdamW keeps. `float32`: weights, gradients and moments in float32, 16 bytes a weight.
    `8bit`: the moments in 8 bits (Dettmers et al. 2022), 10 bytes; needs the package bitsandbytes. `bfloat16`: weights,
    gradients and moments in bfloat16, rounded stochastically, 8 bytes; needs `precision: bfloat16`. Scalar heads and
    norms stay float32."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate changes after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up. The learning rate of the first step is 0."""
    warmup_ratio: BelowOne | None = None
    """The warm-up as a share of the optimizer steps, rounded up, instead of `warmup_steps`."""
    min_lr_ratio: BelowOne = 0.0
    """The final learning rate of cosine and linear, as a fraction of the peak."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """Decay rates of AdamW's averages of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator of AdamW."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of matrices. Biases and norms are never decayed."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Clip the norm of the gradient to this. Null never clips; the norm is still measured."""
    max_bad_steps: PositiveInt = 1
    """Stop after this many consecutive steps with a NaN or infinite loss or gradient. Until then such a step is
    skipped: the weights stay, the schedule and the data move on, and the batch is written to
    `<artifacts>/<stage>.failed_batch.jsonl`."""

    def rules(self) -> Iterator[str]:
        if self.warmup_ratio is not None and self.warmup_steps:
            yield "warmup_ratio and warmup_steps both set the length of the warm-up. Remove one of them"

    def warmup(self, total_steps: int) -> int:
        """Steps of the warm-up of a run of `total_steps`.

        >>> [Optimizer(learning_rate=1, warmup_ratio=0.07).warmup(steps) for steps in (100, 101)]
        [7, 8]
        """
        return self.warmup_steps if self.warmup_ratio is None else math.ceil(round(self.warmup_ratio * total_steps, 6))


class Training(Section):
    """The number of steps, and the batches."""

    num_epochs: PositiveFloat | None = None
    """Passes over the training rows. Set either this or `num_steps`."""
    num_steps: PositiveInt | None = None
    """Optimizer steps. Set either this or `num_epochs`."""
    save_every: Literal["epoch"] | None = None
    """Also save the model after each pass over the training rows but the last, as `epoch_1`, `epoch_2`, ... beside
    `model`. Null saves the last model only."""
    minibatch_size: PositiveInt = 16
    """Rows per optimizer step, over all processes."""
    tokens_per_microbatch: PositiveInt | Literal["auto"] = "auto"
    """Maximum tokens per backward pass of a process; a single longer row is still one pass. A smaller value needs
    less memory and gives the same gradient. `auto` chooses by the model and the memory of the device
    (docs/speed.md)."""
    microbatch_size: PositiveInt | None = None
    """Maximum rows per backward pass of a process. Null limits only the tokens."""

    def rules(self) -> Iterator[str]:
        if (self.num_epochs is None) == (self.num_steps is None):
            yield "set exactly one of num_epochs and num_steps"

    def total_steps(self, num_rows: int) -> int:
        """Optimizer steps for this many training rows, at least 1."""
        if self.num_steps is not None:
            return self.num_steps
        assert self.num_epochs is not None
        return max(1, round(self.num_epochs * num_rows / self.minibatch_size))


class Checkpoints(Section):
    """What a run saves while it trains, so that the same command resumes it after an interruption. No key here
    changes the result."""

    every_steps: PositiveInt | None = None
    """Save a checkpoint every this many steps (PPO: iterations). Null saves by time only."""
    every_minutes: PositiveFloat | None = 10.0
    """Save a checkpoint when this many minutes have passed since the last one. Null saves by steps only."""
    keep: PositiveInt = 2
    """Number of recent checkpoints to keep. If the newest is damaged, the run resumes from an older one."""


class Distributed(Section):
    """Several processes of one run. No key here changes the result."""

    timeout_s: PositiveFloat = 300.0
    """How long a process waits for the others in one operation. Then the run ends with the names of those that hang.
    At the start it waits for at least a minute."""
    shard: bool | Literal["hybrid"] = False
    """Shard weights, gradients and AdamW's moments among the processes (torch's `fully_shard`, FSDP2), so that each
    holds its share of them and gathers a block of layers at a time. `hybrid` shards among the processes of a machine,
    and every machine holds the same: less traffic between machines for more memory. With one process nothing is
    sharded. See docs/processes.md."""
    offload: bool = False
    """Keep a process's share of the sharded weights, of their gradients and of AdamW's moments in the CPU's memory.
    Each block is copied to the GPU for its passes, and AdamW steps on the CPU: slower, for a model that does not fit
    otherwise. The result of a pass is the same to the last bit. Needs `shard`."""

    def rules(self) -> Iterator[str]:
        if self.offload and not self.shard:
            yield "offload needs shard: true, which shards the models. Set it, or remove offload"


class Stage(Section):
    """The keys of every stage's file."""

    artifacts: Annotated[str, Field(min_length=1), EXPANDED]
    """The directory of the run; the stage writes `<artifacts>/<stage>/`. Any key in braces is replaced by its
    value: `artifacts/run-{seed}-{optimizer.learning_rate}`. Stages of one run need the same directory."""
    seed: int = 0
    """The seed of every random draw."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to run. `auto` uses a CUDA GPU if torch finds one, and the CPU otherwise."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the products in forward and backward passes, that of the language-model head included. Scalar
    heads, log-probabilities and losses are float32 and, unless `optimizer.precision` says otherwise, trained weights
    too. `auto` uses bfloat16 on a GPU that supports it, and on a CPU with AMX for a model of at least 10 million
    weights; float32 elsewhere; never float16, in which large activations overflow. The manifest says what it was.
    `float16` is for a GPU without bfloat16; the loss is then scaled (docs/training.md)."""
    save_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the saved weights. `auto` is bfloat16 for a model that starts from bfloat16 weights, and float32
    for every other. Adapters and scalar heads are always float32."""
    gradient_checkpointing: bool = False
    """Store only the input of each layer and recompute the rest in the backward pass. Gives the same gradient with
    less memory and about a third more arithmetic."""
    compile: bool = False
    """Compile the training passes with torch.compile, for a long run on a GPU. Costs seconds to minutes at the start; a
    step of SFT with 1.5 billion weights takes a quarter less time. On a CPU steps get slower. Needs a C++ compiler."""
    checkpoints: Checkpoints = Checkpoints()
    """What a run saves so that it can resume."""
    trackers: list[Literal["tensorboard", "wandb"]] = []
    """Send metrics, samples, config and health findings to these as well (docs/training.md). A tracker that fails is
    switched off with a warning; the run continues."""
    threads: PositiveInt | None = None
    """On a CPU: how many passes run at the same time, each on one core. Null: `OMP_NUM_THREADS`, or the cores that the
    process may use. The result does not depend on it (docs/speed.md)."""
    distributed: Distributed = Distributed()
    """How the processes of a run work together (`--nproc`, `torchrun`)."""

    if TYPE_CHECKING:
        from rlhf_cli.config.ppo import PPO

        optimizer: Optimizer  # a field of each stage: the fields of this class come first in config.yaml

    def rules(self) -> Iterator[str]:
        if self.compile and self.gradient_checkpointing:
            yield "compile and gradient_checkpointing exclude each other. Remove one of them"
        if self.distributed.offload and self.device == "cpu":
            yield "distributed.offload does nothing with device: cpu, whose memory holds everything. Remove it"
        if self.precision == "float16" and self.distributed.offload:
            yield (
                "precision: float16 and distributed.offload exclude each other; whether a gradient overflows is "
                "found on the GPU. Remove one of them"
            )
        key, model = self.trained
        if self.optimizer.precision == "bfloat16" and self.precision not in ("auto", "bfloat16"):
            yield (
                f"optimizer.precision: bfloat16 needs bfloat16 passes, and precision is {self.precision}. Set "
                "precision: bfloat16"
            )
        if self.optimizer.precision == "bfloat16" and model.lora is not None:
            yield (
                f"optimizer.precision: bfloat16 does nothing with {key}.lora, whose adapters are trained in float32. "
                "Remove one of them"
            )

    @property
    def trained(self) -> tuple[str, TrainedModel]:
        """The key and the section of the model that the stage trains: `policy` in PPO."""
        key = "policy" if "policy" in type(self).model_fields else "model"
        return key, getattr(self, key)

    @property
    def batches(self) -> tuple[str, Training | PPO]:
        """The key and the section with the sizes of the batches: `ppo` in PPO."""
        key = "ppo" if "ppo" in type(self).model_fields else "training"
        return key, getattr(self, key)

    @property
    def sources(self) -> dict[str, DataSource]:
        """The data sources of the stage by role."""
        raise TypeError(f"{type(self).__name__} is not a stage")

    @property
    def inputs(self) -> dict[str, tuple[str, str | None]]:
        """The models and the user's code that the stage reads, by role: (path or hub id, revision)."""
        raise TypeError(f"{type(self).__name__} is not a stage")

    @property
    def needs(self) -> tuple[str, ...]:
        """Stages of the same run that must be finished before this one."""
        return ()

    @property
    def trains_adapters(self) -> bool:
        """Whether the stage trains LoRA adapters on one of its models."""
        return any(getattr(section, "lora", None) is not None for _, section in self)

    def stage_model(self, path: str | None, stage: str) -> str:
        """`path`, or the directory of the run's own `stage` if `path` is None."""
        return path if path is not None else f"{self.artifacts}/{stage}"
