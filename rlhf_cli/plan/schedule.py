"""How long a run is: optimizer steps, tokens, and hours from a given or a measured speed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rlhf_cli.artifacts import partial_directory, stage_directory
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.config.stage import Stage
from rlhf_cli.plan.rows import TrainingRows, training_rows

NO_PHASES = ("time/elapsed_s", "time/waited_s", "time/compile_s")
"""Seconds of a row of metrics that are not those of a phase of its step: since the start, inside a phase, or once."""


@dataclass(frozen=True)
class Schedule:
    """The length of a stage."""

    steps: int | None
    """Optimizer steps. None: they follow from the number of rows, which is not known."""
    tokens: int | None
    """Tokens of all steps, prompts included; of PPO each response once."""
    is_bound: bool = True
    """Whether `tokens` takes every row to have the maximum length. Otherwise it follows from the mean of the rows."""
    rows: TrainingRows | None = None
    """The training rows of SFT and RM."""
    epochs: float | None = None
    """Passes over these rows."""
    hours: float | None = None
    basis: str = ""
    """Where the hours come from."""
    hours_are_bound: bool = False
    """Whether the hours follow from tokens that are a bound."""


def schedule_of(stage: str, configs: Mapping[str, Stage], tokens_per_s: float | None, num_rows: int | None) -> Schedule:
    """The length of a stage, whose config is one of `configs`.

    Hours are ``tokens / tokens_per_s / 3600``, or follow from the mean time of a step in the metrics that this run has
    written so far. `tokens_per_s` counts all processes; for PPO it is that of whole iterations, rollouts included.
    `num_rows` are the training rows of SFT or RM; None counts them (`training_rows`).
    """
    config = configs[stage]
    units: int | None
    if isinstance(config, PPOConfig):
        length, units = _length_of_ppo(config), config.ppo.num_iterations
    else:
        assert isinstance(config, SFTConfig | RMConfig)
        length = _length(config, training_rows(config, configs, num_rows))
        units = length.steps
    if tokens_per_s is not None and length.tokens is not None:
        hours = length.tokens / tokens_per_s / 3600
        basis = f"at {tokens_per_s:,g} tokens a second"
        return replace(length, hours=hours, basis=basis, hours_are_bound=length.is_bound)
    measured = _seconds_of_a_unit(stage, config)
    if measured is None or units is None:
        return length
    seconds, path = measured
    unit = "an iteration" if isinstance(config, PPOConfig) else "a step"
    return replace(length, hours=units * seconds / 3600, basis=f"at {seconds:.3g} s {unit}, as in {path}")


def _length_of_ppo(config: PPOConfig) -> Schedule:
    length = config.data.max_prompt_length + config.rollout.max_new_tokens
    return Schedule(config.ppo.total_steps, config.ppo.num_iterations * config.ppo.rollout_batch_size * length)


def _length(config: SFTConfig | RMConfig, rows: TrainingRows) -> Schedule:
    training = config.training
    if rows.num is None and training.num_steps is None:
        return Schedule(None, None, rows=rows)
    steps = training.total_steps(rows.num or 0)
    taken = steps * training.minibatch_size
    of_row = rows.tokens if rows.tokens is not None else rows.sequences * config.data.max_length
    epochs = None if rows.num is None else taken / max(1, rows.num)
    return Schedule(steps, round(taken * of_row), rows.tokens is None, rows, epochs)


def _seconds_of_a_unit(stage: str, config: Stage) -> tuple[float, Path] | None:
    """The mean seconds of a step (PPO: an iteration) so far, and the file that says so."""
    for directory in (stage_directory(config.artifacts, stage), partial_directory(config.artifacts, stage)):
        path = directory / "metrics.jsonl"
        if not path.is_file():
            continue
        seconds = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
                times = [float(row[name]) for name in row if name.startswith("time/") and name not in NO_PHASES]
            except (ValueError, TypeError, AttributeError, RecursionError):
                continue
            if times:
                seconds.append(sum(times))
        if seconds:
            return sum(seconds) / len(seconds), path
    return None
