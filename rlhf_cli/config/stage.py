"""What the three stages have in common: optimizer, length, checkpoints, device."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlhf_cli.config.base import FILLED, BelowOne, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section
from rlhf_cli.config.data import DataSource

STAGES = ("sft", "rm", "ppo")


class Optimizer(Section):
    """AdamW (torch's fused one) with a warm-up and a schedule."""

    learning_rate: PositiveFloat
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """What follows the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up; the first step after a warm-up's begin has learning rate 0."""
    min_lr_ratio: BelowOne = 0.0
    """Where cosine and linear end, as a share of the peak."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    """On matrices only; biases and norms are never decayed."""
    max_grad_norm: PositiveFloat = 1.0
    """The gradient's norm is clipped to this."""
    max_bad_steps: PositiveInt = 1
    """So many steps in a row whose loss or gradient is no number stop the run; of fewer each is left out: nothing is
    stepped, the schedule and the data go on, and its batch is in `<artifacts>/<stage>.failed_batch.jsonl`."""


class Training(Section):
    """How long, in what batches."""

    num_epochs: PositiveFloat | None = None
    """Passes over the training rows (give this or `num_steps`)."""
    num_steps: PositiveInt | None = None
    """Optimizer steps (give this or `num_epochs`)."""
    minibatch_size: PositiveInt = 16
    """Rows of one optimizer step, over all processes."""
    tokens_per_microbatch: PositiveInt | Literal["auto"] = "auto"
    """Tokens of one backward pass of a process, at most, except for a row that is longer by itself; less memory, the
    same gradient. auto goes by the model and the device's memory (docs/speed.md)."""
    microbatch_size: PositiveInt | None = None
    """Rows of one backward pass of a process, at most; null goes by the tokens alone."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.num_epochs is None) == (self.num_steps is None):
            raise ValueError("give exactly one of num_epochs and num_steps")
        return self

    def total_steps(self, num_rows: int) -> int:
        """Optimizer steps for this many training rows; at least one."""
        if self.num_steps is not None:
            return self.num_steps
        assert self.num_epochs is not None
        return max(1, round(self.num_epochs * num_rows / self.minibatch_size))


class Checkpoints(Section):
    """What a run saves on its way, so that the same command goes on after whatever stopped it. None of it
    changes the result."""

    every_steps: PositiveInt | None = None
    """Save after every so many steps (PPO: iterations); null goes by the clock alone."""
    every_minutes: PositiveFloat | None = 10.0
    """Save when so long has passed since the last time; null goes by the steps alone."""
    keep: PositiveInt = 2
    """How many of the last ones stay; an older one is used where a newer one is damaged."""


class Stage(Section):
    """What every stage's file says."""

    artifacts: Annotated[str, Field(min_length=1), FILLED]
    """Root of the run's artifact directory; the stage writes `<artifacts>/<stage>/`."""
    seed: int = 0
    """Every random draw is counted from this."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto takes a CUDA GPU where torch sees one, else the CPU."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the forward and backward passes; weights stay float32. auto takes bfloat16 on a GPU that
    has it and float32 elsewhere."""
    gradient_checkpointing: bool = False
    """Keep of each layer its input only, and compute the rest again in the backward pass: the same gradient with
    less memory, and a third more arithmetic."""
    compile: bool = False
    """Compile the training passes by torch.compile, for a GPU: seconds to minutes at the start, and on a CPU slower
    steps. Needs a C++ compiler."""
    checkpoints: Checkpoints = Checkpoints()

    @model_validator(mode="after")
    def _passes(self) -> Self:
        if self.compile and self.gradient_checkpointing:
            raise ValueError("compile and gradient_checkpointing can't be had at once: attention is not compiled")
        return self

    @property
    def sources(self) -> dict[str, DataSource]:
        """The data of the stage, by role."""
        raise TypeError(f"{type(self).__name__} is no stage")

    @property
    def inputs(self) -> dict[str, tuple[str, str | None]]:
        """The models and the user's code that the stage reads, by role: (path or hub id, revision)."""
        raise TypeError(f"{type(self).__name__} is no stage")

    @property
    def needs(self) -> tuple[str, ...]:
        """Stages of the same run that must be finished before."""
        return ()

    def stage_model(self, path: str | None, stage: str) -> str:
        """`path`, or where the run's own `stage` stands."""
        return path if path is not None else f"{self.artifacts}/{stage}"
