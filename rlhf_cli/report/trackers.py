"""Sends a stage's rows to TensorBoard, Weights & Biases, MLflow or trackio (the config key `trackers`).

Each tracker has a thread that reads the files of rows which the stage writes, so the stage never waits for it. Whatever
a tracker does, the run continues: after an error the thread prints one warning and ends. The number of rows that were
sent is saved beside the checkpoints. So a resumed run continues in the same place, and does not send the rows again
that it repeats.
"""

from __future__ import annotations

import json
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from rlhf_cli.config.loader import dump_config
from rlhf_cli.config.stage import Stage
from rlhf_cli.metrics import Tail
from rlhf_cli.program import install_extra
from rlhf_cli.report.progress import Display
from rlhf_cli.report.tracker_services import TRACKERS, MLflow, TrackedRun, Tracker, WandB
from rlhf_cli.run.artifacts import partial_directory
from rlhf_cli.run.checkpoint_files import checkpoints_directory

FILES = ("metrics", "evaluations", "samples", "health")
"""The files of rows that are sent. Rows of one step are sent in this order."""
SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_TO_OPEN = 120.0
"""How long the end of a stage waits for its trackers to open: a package is imported, a database is created."""
SECONDS_TO_CLOSE = 15.0
"""How long it then waits for the last rows to arrive. Both are for all trackers together."""
SECONDS_TO_UPLOAD = 3600.0
"""How long it waits instead if the model is sent too (`track_model`)."""
MOST_ROWS = 100
"""Rows of metrics in one call. These may be lost if the process is killed during the call."""
LONGEST_REASON = 1000

Row = tuple[str, int, dict[str, Any]]
"""Name of the file without .jsonl, step, and the row without its step."""


class Trackers:
    """The trackers that a config names; without any, nothing is imported or started."""

    def __init__(self, stage: str, config: Stage, display: Display):
        self.stage, self.config, self.display = stage, config, display
        self._followers: list[_Follower] = []

    def start(self) -> None:
        """Start to follow the files. Call it after a resumed run has removed the rows that it repeats."""
        if not self.config.trackers:
            return
        root = self.config.artifacts
        values, text = self.config.model_dump(mode="json"), dump_config(self.config)
        run = TrackedRun(self.stage, Path(root).resolve().name, Path(root), values, text)
        for name in dict.fromkeys(self.config.trackers):
            follower = _Follower(name, run, self.display)
            try:
                follower.start()
            except RuntimeError as error:
                self.display.warn(f"tracker {name}: is off, the run continues without it ({error})")
            else:
                self._followers.append(follower)

    def close(self, status: str) -> None:
        """Send the last rows and end: `status` is finished, stopped or failed. A second call does nothing."""
        followers, self._followers = self._followers, []
        for follower in followers:
            follower.end(status)
        deadline = time.monotonic() + SECONDS_TO_OPEN
        for follower in followers:
            follower.is_open.wait(max(0.0, deadline - time.monotonic()))
        sends_model = self.config.track_model and status == "finished"
        to_close = SECONDS_TO_UPLOAD if sends_model else SECONDS_TO_CLOSE
        deadline = time.monotonic() + to_close
        for follower in followers:
            follower.join(max(0.0, deadline - time.monotonic()))
            if follower.is_alive():
                waited = to_close if follower.is_open.is_set() else SECONDS_TO_OPEN + to_close
                self.display.warn(
                    f"tracker {follower.tracker}: did not answer for {waited:g} s; {follower.arrived()} arrived there. "
                    "The files of the stage have all of them"
                )


class _Follower(threading.Thread):
    """Sends the rows of one stage to one tracker."""

    def __init__(self, tracker: str, run: TrackedRun, display: Display):
        super().__init__(name=f"tracker {tracker}", daemon=True)
        self.tracker, self.tracked_run, self.display = tracker, run, display
        self._state = checkpoints_directory(run.artifacts, run.stage) / f"tracker-{tracker}.json"
        self._directory = partial_directory(run.artifacts, run.stage)
        self._tails = {name: Tail(self._directory / f"{name}.jsonl") for name in FILES}
        self._read = dict.fromkeys(FILES, 0)
        self._sent = dict.fromkeys(FILES, 0)
        self._num_arrived = 0
        self._held: list[Row] = []
        self._newest = -1
        self._status = "failed"
        self._is_last = threading.Event()
        self.is_open = threading.Event()
        """Set when the tracker can take rows, or has failed."""

    def arrived(self) -> str:
        """How many of the rows in the stage's files the tracker has taken, in words."""
        total = sum(tail.path.read_bytes().count(b"\n") for tail in self._tails.values() if tail.path.is_file())
        return f"{self._num_arrived:,} of {total:,} rows"

    def end(self, status: str) -> None:
        """Have the thread send the rest, close the tracker with this status, and end."""
        self._status = status
        self._is_last.set()

    def run(self) -> None:
        try:
            self._follow()
        except ImportError as error:
            install = install_extra(self.tracker, self.tracker)
            self.display.warn(f"tracker {self.tracker}: cannot be imported ({error}), so it is off. Run: {install}")
        except BaseException as error:  # A tracker never ends a run, not even by SystemExit.
            reason = textwrap.shorten(f"{type(error).__name__}: {error}", LONGEST_REASON, placeholder=" ...")
            self.display.warn(f"tracker {self.tracker}: is off, the run continues without it ({reason})")
        finally:
            self.is_open.set()

    def _follow(self) -> None:
        saved = self._saved()
        service = TRACKERS[self.tracker](self.tracked_run, saved.get("id"))
        self._sent |= saved.get("rows", {})
        if service.num_rows is not None:
            self._sent["metrics"] = service.num_rows
        self._num_arrived = sum(self._sent.values())
        self._save(service)
        self.is_open.set()
        self.display.note(f"tracker {self.tracker}: {service.url}")
        while True:
            is_last = self._is_last.is_set()
            self._send(service, self._new_rows(is_last=is_last))
            if is_last:
                sends_model = self.tracked_run.config["track_model"] and self._status == "finished"
                if sends_model and isinstance(service, WandB | MLflow):
                    service.model(self._directory / "model")
                service.close(self._status)
                return
            self._is_last.wait(SECONDS_BETWEEN_LOOKS)

    def _new_rows(self, *, is_last: bool) -> list[Row]:
        """The rows that can be sent now, by step. Those of the newest steps wait for the next look.

        The stage writes while the files are read one after another, so a row may be missed in a file that was read
        before it was written, although a later step is found in the next file. But the stage writes the steps in their
        order. So the files now have all rows before the newest step of the last look, and rows up to it can be sent.
        """
        newest_before, rows = self._newest, self._held
        for name, tail in self._tails.items():
            for row in tail.new()[1]:
                self._read[name] += 1
                step = int(row.pop("step", 0))
                self._newest = max(self._newest, step)
                if self._read[name] > self._sent[name]:
                    rows.append((name, step, row))
        rows.sort(key=lambda row: (row[1], FILES.index(row[0])))
        num_ready = len(rows) if is_last else sum(step <= newest_before for _, step, _ in rows)
        self._held = rows[num_ready:]
        return rows[:num_ready]

    def _send(self, service: Tracker, rows: Sequence[Row]) -> None:
        for name, group in _groups(rows):
            for file, *_ in group:
                self._sent[file] += 1
            # Before they are sent: after a kill, a missing point is better than one that is drawn twice.
            self._save(service)
            steps = [step for _, step, _ in group]
            if name == "samples":
                service.samples(steps[0], [row for *_, row in group])
            elif name == "health":
                for step, finding in ((step, f) for _, step, row in group for f in row["findings"]):
                    service.alert(step, finding)
            else:
                service.metrics([(step, _numbers(file, row)) for file, step, row in group])
            self._num_arrived += len(group)

    def _saved(self) -> dict[str, Any]:
        """The id of the unfinished run in this tracker and the number of rows sent, by file; empty for a new run."""
        try:
            return dict(json.loads(self._state.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError):
            return {}

    def _save(self, service: Tracker) -> None:
        temporary = self._state.with_name(f".{self._state.name}.writing")
        temporary.write_text(json.dumps({"id": service.id, "rows": self._sent}), encoding="utf-8")
        temporary.replace(self._state)


def _groups(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Rows that go out in one call: rows of metrics that follow each other, or the samples of one step."""

    def call(row: Row) -> tuple[str, int]:
        name, step, _ = row
        return (name, step) if name == "samples" else ("metrics" if name == "evaluations" else name, 0)

    for (name, _), group in groupby(rows, key=call):
        while part := list(islice(group, MOST_ROWS)):
            yield name, part


def _numbers(file: str, row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row; those of evaluations.jsonl have no group of their own."""
    group = "evaluation/" if file == "evaluations" else ""
    return {f"{group}{name}": float(value) for name, value in row.items() if isinstance(value, int | float)}
