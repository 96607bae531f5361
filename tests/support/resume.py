"""Configs, commands and comparisons for the tests that stop, kill and resume runs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rlhf_cli.cli import app
from rlhf_cli.run import checkpoint_files
from rlhf_cli.run.checkpoint import CheckpointStore
from rlhf_cli.run.stage_run import StageRun
from support import projects

ALL = bool(os.environ.get("RLHF_ALL_KILLS"))  # test every point and 300 kills; otherwise a sample of them
STEPS = {"sft": 6, "rm": 6, "ppo": 4}
TRAINING = {"training": {"num_steps": 6, "microbatch_size": 3}, "evaluation": {"every_steps": 2}}
PPO_CARRIES: dict[str, Any] = {
    "ppo": {
        "num_iterations": 4,
        "kl_controller": "adaptive",
        "kl_target": 0.5,
        "kl_horizon": 50,
        "score_normalization": "running",
        "ema_decay": 0.9,
        "num_rollouts_per_update": 2,
    },
    "value_model": {"warmup_iterations": 1},
    "rollout": {"no_repeat_ngram_size": 2},
    "evaluation": {"every_iterations": 1, "best_metric": "score_mean"},
    "num_logged_samples": 3,
}
"""All the state that PPO can carry from one step to the next."""


def rlhf(arguments: list[str], *more: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(app, [*arguments, *more])


def succeed(arguments: list[str], *more: str) -> str:
    return words(projects.rlhf(*arguments, *more).output)


def refused(arguments: list[str], *more: str, code: int = 2) -> str:
    """Run a command that must fail with one line and no traceback; return the line."""
    result = projects.rlhf(*arguments, "--quiet", *more, code=code)
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    return result.stderr


def ask_to_stop(_: StageRun) -> None:
    signal.raise_signal(signal.SIGTERM)


FINISH_STEP = StageRun.finish_step


def stopping_after(step: int, happens: Callable[[StageRun], object] = ask_to_stop) -> Callable[..., None]:
    """A replacement for `StageRun.finish_step` that asks the run to stop after `step`, or does something else."""

    def finish(self: StageRun, done: int, total: int) -> None:
        if done == step:
            happens(self)
        FINISH_STEP(self, done, total)

    return finish


def stopped_after(step: int, arguments: list[str], *more: str) -> Result:
    """Run the command until it has been asked to stop after `step`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageRun, "finish_step", stopping_after(step))
        return projects.rlhf(*arguments, *more, code=143)


def same(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one.keys() == two.keys()
    for name in one:
        assert one[name] == two[name], name


def checkpoints(root: Path, stage: str) -> list[Path]:
    return checkpoint_files.list_checkpoints(checkpoint_files.checkpoints_directory(root, stage))


def state_of(store: CheckpointStore) -> dict[str, Any]:
    """Copies of the tensors and numbers of every part."""
    states = {}
    for name, part in store.parts.items():
        tensors, numbers = part.state()
        states[name] = ({key: value.clone() for key, value in tensors.items()}, json.loads(json.dumps(numbers)))
    return states


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def words(text: str) -> str:
    """A text with single spaces between its words."""
    return " ".join(text.split())


def status(root: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "400")
        return succeed(["status", str(root)])
