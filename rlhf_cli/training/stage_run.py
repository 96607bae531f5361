"""One run of a stage: its directory while it is built, its metrics, its progress, and its publication."""

from __future__ import annotations

import datetime
import json
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import transformers

import rlhf_cli
from rlhf_cli import artifacts
from rlhf_cli.config.loader import dump_config
from rlhf_cli.config.schemas import Stage
from rlhf_cli.errors import ArtifactError, RunError
from rlhf_cli.metrics import JsonLines
from rlhf_cli.training import distributed
from rlhf_cli.training.health import Finding
from rlhf_cli.training.identity import identity, require_inputs
from rlhf_cli.training.progress import Display, figures


class StageRun:
    """A context: inside it `directory` is being built, and only `publish` makes it the finished stage.

    Only the first process writes and prints; the others take part in what all must do together.
    """

    def __init__(self, stage: str, config: Stage, *, quiet: bool = False):
        self.stage, self.config = stage, config
        require_inputs(config)
        self.identity = identity(config)
        self.world = distributed.start(config.device)
        self.display = Display(stage, quiet=quiet, silent=not self.world.is_main)
        self.directory: Path = artifacts.partial_directory(config.artifacts, stage)
        self.started = time.monotonic()

    def __enter__(self) -> Self:
        if self.world.is_main:
            artifacts.open_partial(self.config.artifacts, self.stage)
            (self.directory / "config.yaml").write_text(
                f"# rlhf {self.stage} --config THIS_FILE\n{dump_config(self.config)}", encoding="utf-8"
            )
            self._files = {name: JsonLines(self.directory / f"{name}.jsonl") for name in ("metrics", "samples")}
        self.world.barrier()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.display.end()
        if self.world.is_main:
            self._close()

    def log(self, step: int, metrics: dict[str, float], shown: tuple[str, ...] = ()) -> None:
        """A row of metrics.jsonl, and progress where `shown` names what to show."""
        if not self.world.is_main:
            return
        self._files["metrics"].write(
            {"step": step, **metrics, "time/elapsed_s": round(time.monotonic() - self.started, 3)}
        )
        if shown:
            self.display.step(step, figures({name: metrics[name] for name in shown if name in metrics}))

    def sample(self, row: dict[str, Any]) -> None:
        """A row of samples.jsonl."""
        if self.world.is_main:
            self._files["samples"].write(row)

    def record(self, name: str, row: dict[str, Any]) -> None:
        """A row of <name>.jsonl, which is begun with its first row."""
        if self.world.is_main:
            if name not in self._files:
                self._files[name] = JsonLines(self.directory / f"{name}.jsonl")
            self._files[name].write(row)

    def report(self, step: int, findings: Sequence[Finding], line: str | None) -> None:
        """What is wrong, on the screen and in health.jsonl; `line` sums up a step's health beside the progress.

        Raises RunError for a finding that ends the run.
        """
        if line is not None or findings:
            self.record("health", {"step": step, "line": line, "findings": [asdict(f) for f in findings]})
        if line is not None and self.world.is_main:
            self.display.step(step, line)
        for finding in findings:
            if finding.severity == "stop":
                raise RunError(f"{self.stage} step {step}: {finding.name}: {finding.message} To try: {finding.advice}")
            self.display.warn(f"step {step}, {finding.name}: {finding.message}\n  To try: {finding.advice}")

    def failed_batch(self, rows: list[dict[str, Any]]) -> Path:
        """Write the rows of a batch that can't be learnt from beside the stage; returns where."""
        path = Path(self.config.artifacts) / f"{self.stage}.failed_batch.jsonl"
        if self.world.is_main:
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return path

    def _close(self) -> None:
        for file in self._files.values():
            file.close()

    def publish(self, metrics: dict[str, float]) -> None:
        """Make what was built the finished stage; `metrics` are its final figures."""
        self.world.barrier()
        if self.world.is_main:
            self._publish(metrics)
        # Nobody goes on to a stage that stands on this one before it is there.
        self.world.barrier()

    def _publish(self, metrics: dict[str, float]) -> None:
        self._close()
        try:
            artifacts.publish(
                self.config.artifacts,
                self.stage,
                identity=self.identity,
                metrics={key: round(value, 6) for key, value in metrics.items() if math.isfinite(value)},
                seed=self.config.seed,
                versions={
                    "rlhf": rlhf_cli.__version__,
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                    "python": platform.python_version(),
                },
                device=str(self.world.device),
                num_processes=self.world.size,
                seconds=round(time.monotonic() - self.started, 1),
                finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            )
        except OSError as error:
            raise ArtifactError(f"{self.directory}: can't be published ({error.strerror or error})") from None
        place = artifacts.stage_directory(self.config.artifacts, self.stage)
        self.display.note(f"finished in {time.monotonic() - self.started:.0f} s, {place}/model is the model")
