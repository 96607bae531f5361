"""Sends a stage's rows to TensorBoard or Weights & Biases (the config key `trackers`).

Each tracker has a thread with a queue of the rows that the stage writes, so the stage never waits for it, and an error
ends the thread with one warning. The place of the last row that was sent is saved beside the checkpoints, so a resumed
run does not send the rows again that it repeats. Each service imports its package when it is created, and has
environment variables for where it writes (docs/training.md).
"""

from __future__ import annotations

import json
import os
import queue
import textwrap
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rlhf_cli.config.stage import Stage
from rlhf_cli.config.yaml_text import dump_config
from rlhf_cli.files import read_object, rows_of
from rlhf_cli.program import install_extra
from rlhf_cli.report.progress import Display
from rlhf_cli.run.artifacts import partial_directory
from rlhf_cli.run.checkpoint_files import checkpoints_directory

FILES = ("metrics", "evaluations", "samples", "health")
"""The files of rows that are sent. The rows of one step in the files of a resumed run are sent in this order."""
SECONDS_TO_CLOSE = 60.0
"""The end of a stage waits so long for all trackers together: to import their packages, and for the last rows."""
LONGEST_REASON = 1000

Place = tuple[int, int]
"""The step of a row, and its number among those of the step in its file: a resume may change how many a step has."""
Row = tuple[str, Place, dict[str, Any]]  # name of the file without .jsonl, place in it, and the rest of the row


class Trackers:
    """The trackers that a config names."""

    def __init__(self, stage: str, config: Stage, display: Display):
        self.stage, self.config, self.display = stage, config, display
        self.root = Path(config.artifacts)
        self.name = self.root.resolve().name
        self._followers: list[_Follower] = []
        self._last: dict[str, Place] = dict.fromkeys(FILES, (-1, 0))
        self._num_rows = 0

    def start(self) -> None:
        """Start to send, first the rows of a resumed run. Call it when the rows that it repeats are removed."""
        self._followers = [_Follower(name, self) for name in dict.fromkeys(self.config.trackers)]
        for follower in self._followers:
            follower.start()
        partial = partial_directory(self.root, self.stage)
        rows = [(file, row) for file in FILES for row in rows_of(partial / f"{file}.jsonl")]
        for file, row in sorted(rows, key=lambda row: row[1].get("step", 0)):
            self.send(file, row)

    def send(self, name: str, row: dict[str, Any]) -> None:
        """Queue a row of the file <name>.jsonl, if trackers take such rows."""
        if name in FILES:
            self._num_rows += 1
            step, (last, count) = int(row.get("step", 0)), self._last[name]
            self._last[name] = place = (step, count + 1 if step == last else 1)
            values = {key: value for key, value in row.items() if key != "step"}
            for follower in (one for one in self._followers if one.is_alive()):
                follower.rows.put((name, place, values))

    def close(self, status: str, seconds: float | None = None) -> None:
        """Send the last rows and end within `seconds`, as finished, stopped or failed. A second call does nothing."""
        seconds = SECONDS_TO_CLOSE if seconds is None else seconds
        followers, self._followers = self._followers, []
        for follower in followers:
            follower.status = status
            follower.rows.put(None)
        deadline = time.monotonic() + seconds
        for follower in followers:
            follower.join(max(0.0, deadline - time.monotonic()))
            if follower.is_alive():
                self.display.warn(
                    f"tracker {follower.tracker}: did not answer for {seconds:g} s; {follower.num_arrived:,} "
                    f"of {self._num_rows:,} rows arrived there. The files of the stage have all of them"
                )


class _Follower(threading.Thread):
    """Sends the rows of one stage to one tracker."""

    def __init__(self, tracker: str, trackers: Trackers):
        super().__init__(name=f"tracker {tracker}", daemon=True)
        self.tracker, self.trackers, self.display = tracker, trackers, trackers.display
        self.rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()  # the rows to send, then None
        self.status = "failed"
        self.num_arrived = 0
        self._state = checkpoints_directory(trackers.root, trackers.stage) / f"tracker-{tracker}.json"
        self._sent: dict[str, Place] = dict.fromkeys(FILES, (-1, 0))

    def run(self) -> None:
        try:
            self._follow()
        except ImportError as error:
            install = install_extra(self.tracker, self.tracker)
            self.display.warn(f"tracker {self.tracker}: cannot be imported ({error}), so it is off. Run: {install}")
        except BaseException as error:  # A tracker never ends a run, not even by SystemExit.
            reason = textwrap.shorten(f"{type(error).__name__}: {error}", LONGEST_REASON, placeholder=" ...")
            self.display.warn(f"tracker {self.tracker}: is off, the run continues without it ({reason})")

    def _follow(self) -> None:
        saved = read_object(self._state)  # the id of an unfinished run, and the place of the last row sent, by file
        service = TRACKERS[self.tracker](self.trackers, saved.get("id"))
        self._sent |= {file: (step, number) for file, (step, number) in saved.get("sent", {}).items()}
        before = dict(self._sent)
        self._save(service)
        self.display.note(f"tracker {self.tracker}: {service.url}")
        is_last = False
        while not is_last:
            rows = [self.rows.get()]
            while not self.rows.empty():
                rows.append(self.rows.get())
            is_last = None in rows
            new = [row for row in rows if row is not None and row[1] > before[row[0]]]
            self.num_arrived += len(rows) - is_last - len(new)
            for (file, step), group in groupby(new, key=lambda row: (row[0], row[1][0])):
                some = list(group)
                self._sent[file] = some[-1][1]
                # Before they are sent: after a kill, a missing point is better than one that is drawn twice.
                self._save(service)
                self._send(service, file, step, [values for _, _, values in some])
                self.num_arrived += len(some)
        service.close(self.status)

    def _send(self, service: TensorBoard | WandB, file: str, step: int, rows: Sequence[dict[str, Any]]) -> None:
        if file == "samples":
            service.samples(step, rows)
            return
        group = "evaluation/" if file == "evaluations" else ""  # those numbers have no group of their own
        for row in rows:
            if file == "health":
                for finding in row["findings"]:
                    service.alert(step, finding, f"{finding['message']} To try: {finding['advice']}")
            else:
                numbers = {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
                service.metrics(step, {f"{group}{name}": value for name, value in numbers.items()})

    def _save(self, service: TensorBoard | WandB) -> None:
        temporary = self._state.with_name(f".{self._state.name}.writing")
        temporary.write_text(json.dumps({"id": service.id, "sent": self._sent}), encoding="utf-8")
        temporary.replace(self._state)


# ------------------------------------------------------------------------------------------- the two services

PROJECT = "rlhf"


class TensorBoard:
    """Event files in `<artifacts>/tensorboard/<stage>`. Findings are texts named `health/...`.

    `id` finds the run of a tracker again after an interruption; it is None for a new one. `url` is where to look at it.
    """

    def __init__(self, run: Trackers, id: str | None):
        from torch.utils.tensorboard import SummaryWriter

        directory = run.root / "tensorboard" / run.stage
        if id is None:  # The run replaces the stage's previous result, and its curves too.
            for path in directory.glob("events.out.tfevents.*"):
                path.unlink()
        self.id, self.url = str(directory), f"tensorboard --logdir {run.root}"
        self._writer = SummaryWriter(str(directory))
        if id is None:
            self._writer.add_text("config", textwrap.indent(dump_config(run.config), "    ", lambda _: True), 0)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers by name; the steps never decrease."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns, cells = _table(rows)
        texts = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in cells]
        lines = [columns, ["---"] * len(columns), *texts]
        shown = (" | ".join(" ".join(text.split()).replace("|", "\\|") for text in line) for line in lines)
        self._writer.add_text("samples", "\n".join(f"| {line} |" for line in shown), step)
        self._writer.flush()

    def alert(self, step: int, finding: Mapping[str, str], text: str) -> None:
        self._writer.add_text(f"health/{finding['name']}", text, step)
        self._writer.flush()

    def close(self, status: str) -> None:  # noqa: ARG002
        """End the run as finished, stopped or failed, once everything is sent."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases, online or with WANDB_MODE=offline. Findings are its alerts."""

    def __init__(self, run: Trackers, id: str | None):
        import wandb

        settings = wandb.Settings(silent=True, console="off")
        mode = wandb.setup(settings).settings.mode
        if mode in ("online", "shared", "run") and not wandb.login(prompt=False):
            raise RuntimeError("not logged in: run `wandb login`, or set WANDB_MODE=offline")
        self._wandb, self._stage = wandb, run.stage
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=id or uuid.uuid4().hex[:12],
            resume="allow" if id is not None and mode != "offline" else None,
            name=f"{run.name}/{run.stage}",
            group=run.name,
            job_type=run.stage,
            config=run.config.model_dump(mode="json"),
            allow_val_change=True,
            dir=os.environ.get("WANDB_DIR", str(run.root)),
            reinit="create_new",
            settings=settings,
        )
        self.id, self.url = self._run.id, self._run.url or str(Path(self._run.dir).parent)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns, cells = _table([{"step": step, **row} for row in rows])
        table = self._wandb.Table(columns=columns, data=cells, allow_mixed_types=True)
        self._run.log({"samples": table}, step=step)

    def alert(self, step: int, finding: Mapping[str, str], text: str) -> None:
        level = "ERROR" if finding["severity"] == "stop" else "WARN"
        self._run.alert(f"{self._stage}: {finding['name']}"[:63], f"step {step}: {text}", level)

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


TRACKERS: dict[str, type[TensorBoard | WandB]] = {"tensorboard": TensorBoard, "wandb": WandB}


def _table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[list[Any]]]:
    """The columns of rows, and the cells; a value that is neither a number nor a text becomes its text."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[row.get(name) for name in columns] for row in rows]
    return columns, [
        [cell if isinstance(cell, int | float | str | None) else str(cell) for cell in row] for row in cells
    ]
