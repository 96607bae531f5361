"""The four trackers behind one interface. Each imports its package when it is created.

Where each one writes, and under which project, is set by its own environment variables (docs/training.md).
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlhf_cli.run.artifacts import flat

PROJECT = "rlhf"
EVERY_ROW = "time/elapsed_s"
"""A metric that every row of metrics.jsonl has."""
MOST_PARAMS, MOST_METRICS, LONGEST_PARAM, LONGEST_TAG = 100, 1000, 500, 5000
"""Limits of MLflow: per call, and characters."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told about the run of a stage."""

    stage: str
    name: str
    """The name of the run's directory."""
    artifacts: Path
    config: dict[str, Any]
    config_text: str
    """The same as YAML."""

    @property
    def title(self) -> str:
        return f"{self.name}/{self.stage}"


class Tracker(Protocol):
    """One run in a tracker. It is created with the id of an unfinished run, or None for a new one."""

    id: str
    """What finds this run again after an interruption."""
    url: str
    """Where to look at it, as shown to the user."""
    num_rows: int | None
    """The rows of metrics.jsonl that arrived before an interruption; None if the tracker cannot tell."""

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Send rows of (step, numbers by name); the steps never decrease."""

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send the samples of a step as a table."""

    def alert(self, step: int, finding: Mapping[str, str]) -> None:
        """Send a health finding: `name`, `severity`, `message` and `advice`."""

    def close(self, status: str) -> None:
        """End the run as finished, stopped or failed, once everything is sent."""


class TensorBoard:
    """Event files in `<artifacts>/tensorboard/<stage>`. Findings are texts named `health/...`."""

    num_rows: int | None = None

    def __init__(self, run: TrackedRun, id: str | None):
        from torch.utils.tensorboard import SummaryWriter

        directory = run.artifacts / "tensorboard" / run.stage
        if id is None:  # The run replaces the stage's previous result, and its curves too.
            for path in directory.glob("events.out.tfevents.*"):
                path.unlink()
        self.id, self.url = str(directory), f"tensorboard --logdir {run.artifacts}"
        self._writer = SummaryWriter(str(directory))
        if id is None:
            self._writer.add_text("config", "    " + run.config_text.replace("\n", "\n    "), 0)

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        for step, values in rows:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns, cells = _table(rows)
        lines = [columns, ["---"] * len(columns), *cells]
        self._writer.add_text("samples", "\n".join(f"| {' | '.join(map(_markdown, line))} |" for line in lines), step)
        self._writer.flush()

    def alert(self, step: int, finding: Mapping[str, str]) -> None:
        self._writer.add_text(f"health/{finding['name']}", _text(finding), step)
        self._writer.flush()

    def close(self, status: str) -> None:  # noqa: ARG002
        self._writer.close()


class WandB:
    """A run of Weights & Biases, online or with WANDB_MODE=offline. Findings are its alerts."""

    num_rows: int | None = None

    def __init__(self, run: TrackedRun, id: str | None):
        import wandb

        settings = wandb.Settings(silent=True, console="off")
        mode = wandb.setup(settings).settings.mode
        if mode in ("online", "shared", "run") and not wandb.login(prompt=False):
            raise RuntimeError("not logged in: run `wandb login`, or set WANDB_MODE=offline")
        self._wandb, self._stage, self._name = wandb, run.stage, f"{run.name}-{run.stage}"
        self._is_online = mode != "offline"
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=id or uuid.uuid4().hex[:12],
            resume="allow" if id is not None and mode != "offline" else None,
            name=run.title,
            group=run.name,
            job_type=run.stage,
            config=run.config,
            allow_val_change=True,
            dir=os.environ.get("WANDB_DIR", str(run.artifacts)),
            reinit="create_new",
            settings=settings,
        )
        self.id, self.url = self._run.id, self._run.url or str(Path(self._run.dir).parent)

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        for step, values in rows:
            self._run.log(dict(values), step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns, cells = _table([{"step": step, **row} for row in rows])
        table = self._wandb.Table(columns=columns, data=cells, allow_mixed_types=True)
        self._run.log({"samples": table}, step=step)

    def alert(self, step: int, finding: Mapping[str, str]) -> None:
        level = "ERROR" if finding["severity"] == "stop" else "WARN"
        self._run.alert(f"{self._stage}: {finding['name']}"[:63], f"step {step}: {_text(finding)}", level)

    def model(self, directory: Path) -> None:
        """Send a model directory as an artifact of the run."""
        artifact = self._wandb.Artifact(f"{self._name}-model", type="model")
        artifact.add_dir(str(directory))
        sent = self._run.log_artifact(artifact)
        if self._is_online:  # offline, `wandb sync` sends it
            sent.wait()

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


class MLflow:
    """A run of MLflow at MLFLOW_TRACKING_URI. Findings are tags named `health.<finding>`."""

    num_rows: int | None = None

    def __init__(self, run: TrackedRun, id: str | None):
        # Else its migrations and its bars are printed over the progress.
        for name in ("alembic", "mlflow.store.db.utils"):
            logging.getLogger(name).setLevel(logging.WARNING)
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        import mlflow

        self._client = mlflow.MlflowClient()
        if id is not None:
            self._client.update_run(id, status="RUNNING")
            self.id, self.num_rows = id, len(self._client.get_metric_history(id, EVERY_ROW))
        else:
            self.id = self._new_run(run)
        self.url = f"run {self.id} at {mlflow.get_tracking_uri()}"

    def _new_run(self, run: TrackedRun) -> str:
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        new: str = self._client.create_run(number, run_name=run.title).info.run_id
        params = [Param(key, str(value)[:LONGEST_PARAM]) for key, value in flat(run.config).items()]
        for start in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(new, params=params[start : start + MOST_PARAMS])
        self._client.log_text(new, run.config_text, "config.yaml")
        return new

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        points = [Metric(name, value, now, step) for step, values in rows for name, value in values.items()]
        for start in range(0, len(points), MOST_METRICS):
            self._client.log_batch(self.id, metrics=points[start : start + MOST_METRICS])

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns, cells = _table([{"step": step, **row} for row in rows])
        table = {name: [row[i] for row in cells] for i, name in enumerate(columns)}
        self._client.log_table(self.id, table, "samples.json")

    def alert(self, step: int, finding: Mapping[str, str]) -> None:
        self._client.set_tag(self.id, f"health.{finding['name']}", f"step {step}: {_text(finding)}"[:LONGEST_TAG])

    def model(self, directory: Path) -> None:
        """Send a model directory as an artifact of the run."""
        self._client.log_artifacts(self.id, str(directory), "model")

    def close(self, status: str) -> None:
        self._client.set_terminated(self.id, {"finished": "FINISHED", "stopped": "KILLED"}.get(status, "FAILED"))


class Trackio:
    """A run of trackio in its local database, or in the Space of TRACKIO_SPACE_ID. Findings are its alerts."""

    num_rows: int | None = None

    def __init__(self, run: TrackedRun, id: str | None):
        import trackio
        import trackio.run

        for module in (trackio, trackio.run, trackio.utils):
            module.print = lambda *_, **__: None  # Its messages would be printed over the progress.
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self.id = id or f"{run.name}-{run.stage}-{uuid.uuid4().hex[:6]}"
        resume = "never" if id is None else "allow"
        self._run = trackio.init(project, name=self.id, group=run.name, config=run.config, resume=resume, embed=False)
        self._trackio, self.url = trackio, f"trackio show --project {project}"

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        for step, values in rows:
            self._run.log(dict(values), step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns, cells = _table([{"step": step, **row} for row in rows])
        self._run.log({"samples": self._trackio.Table(columns=columns, data=cells)}, step=step)

    def alert(self, step: int, finding: Mapping[str, str]) -> None:
        level = self._trackio.AlertLevel.ERROR if finding["severity"] == "stop" else self._trackio.AlertLevel.WARN
        self._run.alert(finding["name"], _text(finding), level, step)

    def close(self, status: str) -> None:  # noqa: ARG002
        self._run.finish()


TRACKERS: dict[str, Callable[[TrackedRun, str | None], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def _table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[list[Any]]]:
    """The columns of rows, and the cells; a value that is neither a number nor a text becomes its text."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[row.get(name) for name in columns] for row in rows]
    return columns, [
        [cell if isinstance(cell, int | float | str | None) else str(cell) for cell in row] for row in cells
    ]


def _markdown(cell: Any) -> str:
    """A cell of a Markdown table, on one line.

    >>> _markdown(0.123456), _markdown("a | b")
    ('0.1235', 'a \\\\| b')
    """
    text = f"{cell:.4g}" if isinstance(cell, float) else str(cell)
    return " ".join(text.split()).replace("|", "\\|")


def _text(finding: Mapping[str, str]) -> str:
    return f"{finding['message']} To try: {finding['advice']}"
