"""How long a run is: optimizer steps, tokens, and hours from a given or a measured speed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rlhf_cli.artifacts import partial_directory, stage_directory
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.config.stage import Stage


@dataclass(frozen=True)
class Schedule:
    """The length of a stage."""

    steps: int | None
    """Optimizer steps. None: they follow from the number of rows, which only the data tell."""
    tokens: int | None
    """Tokens of all steps at most: rows of the maximum length, prompts included; of PPO each response once."""
    hours: float | None = None
    basis: str = ""
    """Where the hours come from."""


def schedule_of(stage: str, config: Stage, tokens_per_s: float | None) -> Schedule:
    """The length of a stage.

    Hours are ``tokens / tokens_per_s / 3600``, or follow from the mean time of a step in the metrics that this run has
    written so far. `tokens_per_s` counts all processes; for PPO it is that of whole iterations, rollouts included.
    """
    steps, units, tokens = _length(config)
    if tokens_per_s is not None and tokens is not None:
        return Schedule(steps, tokens, tokens / tokens_per_s / 3600, f"--tokens-per-s {tokens_per_s:g}")
    measured = _seconds_of_a_unit(stage, config)
    if measured is None or units is None:
        return Schedule(steps, tokens)
    seconds, path = measured
    return Schedule(steps, tokens, units * seconds / 3600, f"{seconds:.3g} s a step in {path}")


def _length(config: Stage) -> tuple[int | None, int | None, int | None]:
    """(optimizer steps, rows of metrics, tokens)."""
    if isinstance(config, PPOConfig):
        length = config.data.max_prompt_length + config.rollout.max_new_tokens
        responses = config.ppo.num_iterations * config.ppo.rollout_batch_size
        return config.ppo.total_steps, config.ppo.num_iterations, responses * length
    assert isinstance(config, SFTConfig | RMConfig)
    steps = config.training.num_steps
    if steps is None:
        return None, None, None
    sequences = 2 if isinstance(config, RMConfig) and config.is_pairwise else 1
    return steps, steps, steps * config.training.minibatch_size * sequences * config.data.max_length


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
                times = [
                    float(value) for name, value in row.items() if name.startswith("time/") and name.endswith("_s")
                ]
            except (ValueError, TypeError, AttributeError):
                continue
            if times:
                seconds.append(sum(times))
        if seconds:
            return sum(seconds) / len(seconds), path
    return None
