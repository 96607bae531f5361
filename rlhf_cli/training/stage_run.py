"""One run of a stage: its directory while it is built, its metrics, its progress, and its publication."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import platform
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import transformers

import rlhf_cli
from rlhf_cli import artifacts
from rlhf_cli.config.loader import dump_config
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.config.stage import Stage
from rlhf_cli.errors import ArtifactError, ConfigError, Interrupted, RunError
from rlhf_cli.metrics import JsonLines
from rlhf_cli.training import checkpoint_files, distributed
from rlhf_cli.training.bad_steps import BadSteps, append_new
from rlhf_cli.training.checkpoint import Checkpoints, Part, State
from rlhf_cli.training.health import Finding
from rlhf_cli.training.identity import identity, may_change, require_inputs
from rlhf_cli.training.memory import is_out_of_memory, what_to_lower
from rlhf_cli.training.progress import Display, figures
from rlhf_cli.training.signals import StopRequests
from rlhf_cli.training.speed import Speed

WHAT_TO_TRY = (
    "Lower optimizer.learning_rate, lengthen optimizer.warmup_steps, or look in the batch for numbers that are not "
    "finite or far from the others"
)
NOTHING_YET: dict[str, Any] = {"sizes": {}, "folders": [], "seconds": 0.0}


class StageRun:
    """A context: inside it `directory` is being built, and only `publish` makes it the finished stage.

    Only the first process writes and prints; the others take part in what all must do together. A run that was
    stopped goes on: `resume` puts what it carries into the state of its last checkpoint and says where that is,
    and `finish_step` writes the next one when it is due.
    """

    def __init__(self, stage: str, config: Stage, *, quiet: bool = False, restart: bool = False):
        self.stage, self.config, self.restart = stage, config, restart
        require_inputs(config)
        self.identity = identity(config)
        self.world = distributed.start(config.device)
        self.display = Display(stage, quiet=quiet, silent=not self.world.is_main)
        self.directory: Path = artifacts.partial_directory(config.artifacts, stage)
        self.started = time.monotonic()
        self.lock = checkpoint_files.Lock(config.artifacts, stage)
        self.place = checkpoint_files.checkpoints_directory(config.artifacts, stage)
        self.checkpoints = Checkpoints(self.place, keep=config.checkpoints.keep, writes=self.world.is_main)
        self.stop_requests = StopRequests()
        assert isinstance(config, SFTConfig | RMConfig | PPOConfig)
        self.bad_steps = BadSteps(config.optimizer.max_bad_steps)
        self.speed = Speed(stage, self.world)
        self.tokens_per_microbatch: int | None = None
        """What was given or found, once the model is there: said where memory runs out."""
        self._files: dict[str, JsonLines] = {}
        self._last_checkpoint = self.started
        self._saved_step = 0
        self._is_due = False

    def __enter__(self) -> Self:
        if self.world.is_main:
            try:
                self.lock.acquire()
                self._open()
            except BaseException:
                self.lock.release()
                raise
        self.world.barrier()
        self.stop_requests.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_requests.remove()
        self.display.end()
        if self.world.is_main:
            try:
                # What is being written is finished whatever happened; what goes wrong here counts less.
                with contextlib.suppress(*((Exception,) if error is not None else ())):
                    self.checkpoints.wait()
                    self._close()
            finally:
                self.lock.release()
        if error is not None and is_out_of_memory(error):
            raise RunError(
                f"{self.stage}: {what_to_lower(self.config, self.world.size, self.tokens_per_microbatch)}"
            ) from None
        if error is None and self.stop_requests.received is not None:
            raise self._interrupted(self.stop_requests.received, "the stage was done by then, and is finished")

    def _open(self) -> None:
        """Make the directory to build in: a new one, or the one of the run that was stopped."""
        root, stage = self.config.artifacts, self.stage
        checkpoint_files.refuse_links(root, stage)
        artifacts.recover(root, stage)
        identity = json.loads(json.dumps(self.identity))
        old, steps = checkpoint_files.read_run(self.place), checkpoint_files.to_go_on_with(root, stage)
        goes_on = bool(steps) and old is not None and not self.restart
        if steps and self.restart:
            self.display.note(f"--restart: discards an unfinished run of {len(steps)} checkpoints, {steps[-1]}")
        elif steps and old is None:
            self.display.warn(
                f"{self.place / checkpoint_files.RUN}: can't be read, so nobody knows whose the {len(steps)} "
                "checkpoints beside it are; the run begins anew"
            )
        if goes_on and old is not None:
            changed = artifacts.differences(old, identity)
            refused = [key.removeprefix("config.") for key in changed if not may_change(key)]
            if refused:
                raise ConfigError(
                    f"{root}: an unfinished {stage} run stands here, at {steps[-1].name}, and was made with another "
                    f"{', '.join(refused)}. Put it back to go on, begin anew with --restart, or give another "
                    "`artifacts`"
                )
            if changed:
                self.display.note(f"goes on with another {', '.join(k.removeprefix('config.') for k in changed)}")
        if not goes_on:
            # Before the rows that they count on.
            shutil.rmtree(self.place, ignore_errors=True)
        artifacts.open_partial(root, stage, keep=goes_on)
        self.place.mkdir(exist_ok=True)
        checkpoint_files.remove_cut_off(self.place)
        checkpoint_files.write_text(self.place / checkpoint_files.RUN, json.dumps(identity) + "\n")
        checkpoint_files.write_text(
            self.directory / "config.yaml", f"# rlhf {stage} --config THIS_FILE\n{dump_config(self.config)}"
        )

    def resume(self, parts: Mapping[str, Part], total: int) -> int:
        """How many of `total` steps are done; the parts are put into the state after them.

        Rows of metrics and samples that were written after the last checkpoint are taken back, as their steps are
        done again and come out the same.
        """
        self.checkpoints.parts = {"files": self, "bad_steps": self.bad_steps, **parts}
        found: tuple[Path | None, dict[Path, str]] = (None, {})
        if self.world.is_main:
            found = self.checkpoints.newest(self._rows_missing)
        path, wrong_ones = self.world.gather(found)[0]
        then = "the run begins anew" if path is None else "an older one is taken"
        for checkpoint, wrong in wrong_ones.items():
            self.display.warn(f"{checkpoint}: can't be used, {wrong}; {then}")
        done = checkpoint_files.step_of(path) if path is not None else 0
        if done > total:
            raise ConfigError(f"the unfinished run has {done} steps behind it, and now asks for {total}. Ask for more")
        if path is not None:
            self.checkpoints.restore(path)
            self.display.note(f"goes on after step {done} of {total}, from {path}")
        else:
            self.restore({}, NOTHING_YET)
        if self.world.is_main:
            # They would count among the last ones that are kept.
            checkpoint_files.remove(list(wrong_ones))
            self._files |= {
                name: JsonLines(self.directory / f"{name}.jsonl")
                for name in ("metrics", "samples")
                if name not in self._files
            }
        self.world.barrier()
        self._last_checkpoint = time.monotonic()
        self._saved_step = done
        return done

    def finish_step(self, step: int, total: int) -> None:
        """A step is over: save if it is time to, and stop if a signal asked for it.

        While steps are bad none is saved that a signal did not ask for: the last good ones would have to go for
        them. Raises Interrupted, after saving, where a signal came, and RunError for weights that are no numbers.
        """
        settings, now = self.config.checkpoints, time.monotonic()
        late = settings.every_minutes is not None and now - self._last_checkpoint > 60 * settings.every_minutes
        due = late or (settings.every_steps is not None and step % settings.every_steps == 0)
        self._is_due |= due
        asked = self.world.gather((self._is_due, self.stop_requests.received))
        stop = next((number for _, number in asked if number is not None), None)
        if self.world.is_main:
            self._require_place()
        # The clock of the first process counts, a signal to any of them.
        is_time = asked[0][0] and not self.bad_steps.in_a_row and step < total
        began = time.monotonic()
        if is_time or stop is not None or step == total or self.bad_steps.in_a_row:
            self._require_numbers(step)
        if is_time or stop is not None:
            self._is_due = False
            self.checkpoints.save(step)
            self._saved_step = step
            self._last_checkpoint = time.monotonic()
            self.speed.count("checkpoint", seconds=self._last_checkpoint - began)
            self.record("checkpoints", {"step": step, "pause_s": round(self._last_checkpoint - began, 4)})
        if stop is not None:
            if self.world.is_main:
                self.checkpoints.wait()
            raise self._interrupted(stop, f"stopped after step {step} of {total}, and saved")

    def save_what_stands(self, step: int) -> None:
        """Save the state after `step`, which is as it was then: something outside of the run is about to end it."""
        if step > 0 and step != self._saved_step and not self.bad_steps.in_a_row:
            self.checkpoints.save(step)
            self._saved_step = step
        if self.world.is_main:
            self.checkpoints.wait()

    def _require_numbers(self, step: int) -> None:
        """Raise RunError where a weight is no number: that is neither saved nor published."""
        name = self.checkpoints.not_finite()
        if name is not None:
            raise RunError(
                f"{self.stage} step {step}: the weights are no numbers any more ({name}), and nothing is saved of "
                f"them. {self._what_stands()} Lower optimizer.learning_rate or lengthen optimizer.warmup_steps"
            )

    def _what_stands(self) -> str:
        self.checkpoints.wait()
        step = checkpoint_files.last_step(self.config.artifacts, self.stage)
        return "No checkpoint was written before." if step is None else f"The checkpoint of step {step} stands."

    def _interrupted(self, number: int, what: str) -> Interrupted:
        """The end of a run that was asked to stop."""
        code = 130 if number == signal.SIGINT else 143
        return Interrupted(f"{self.stage}: {signal.Signals(number).name}: {what}", code)

    # What stands in the directory is a part of the run's state: how many bytes of each file of rows, which folders;
    # and how long it took.

    def state(self) -> State:
        if not self.world.is_main:
            return {}, {}
        artifacts.sync_tree(self.directory)
        sizes = {name: file.size() for name, file in self._files.items() if name != "checkpoints"}
        folders = sorted(path.name for path in self.directory.iterdir() if path.is_dir())
        return {}, {"sizes": sizes, "folders": folders, "seconds": round(time.monotonic() - self.started, 3)}

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Take back what came after: rows, models, the manifest of a publication that was cut off."""
        if not self.world.is_main:
            return
        self.started -= numbers["seconds"]
        stays = {"config.yaml", "checkpoints.jsonl", *numbers["folders"], *(f"{n}.jsonl" for n in numbers["sizes"])}
        for path in self.directory.iterdir():
            if path.name not in stays:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name, size in numbers["sizes"].items():
            os.truncate(self.directory / f"{name}.jsonl", size)
            self._files[name] = JsonLines(self.directory / f"{name}.jsonl")

    def _rows_missing(self, numbers: Mapping[str, Any]) -> str | None:
        for name, size in numbers["files"]["sizes"].items():
            if Path(name).name != name:
                return f"its numbers name a file outside of the stage ({name})"
            path = self.directory / f"{name}.jsonl"
            has = path.stat().st_size if path.is_file() else 0
            if has < size:
                return f"{path.name} has {has} of the {size} bytes that it had then"
        return None

    def _require_place(self) -> None:
        """Raise ArtifactError where somebody removed what is being built, and perhaps builds there himself."""
        files = [self.place / checkpoint_files.RUN, *(file.path for file in self._files.values())]
        gone = [path for path in files if not path.exists()]
        if not self.lock.is_held():
            gone = [self.lock.path]
        if gone:
            raise ArtifactError(f"{gone[0]}: was removed while the {self.stage} stage was built. Start it again")

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

    def may_step(
        self, step: int, what: str, numbers: Mapping[str, float], rows: Callable[[], list[dict[str, Any]]]
    ) -> bool:
        """Is a step's loss and gradient a number, so that it may be taken?

        Where it is not, the batch's `rows` go to the file beside the stage, with `step`, that of the metrics' row.
        All processes ask, with the same numbers. Raises RunError where there were too many in a row
        (`optimizer.max_bad_steps`).
        """
        wrong = self.bad_steps.count(numbers)
        if wrong is None:
            return True
        path = Path(self.config.artifacts) / f"{self.stage}.failed_batch.jsonl"
        batch = [{"step": step, **row} for row in rows()]
        if self.world.is_main:
            append_new(path, batch)
        message, most = f"{wrong}; nothing was stepped. The batch is in {path}.", self.bad_steps.most_in_a_row
        if self.bad_steps.are_too_many:
            many = f" It was the last of {most} such steps in a row." if most > 1 else ""
            raise RunError(f"{what}: {message}{many} {self._what_stands()} {WHAT_TO_TRY}")
        if self.bad_steps.in_a_row == 1:
            text = f"{what}: {message} The run goes on, and stops after {most} such steps in a row."
            self.report(step, [Finding("bad_step", "warning", text, WHAT_TO_TRY)], None)
        return False

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
        self._require_place()
        self.checkpoints.wait()
        if self.bad_steps.total:
            self.display.warn(f"{self.bad_steps.total} steps were left out, their loss or gradient was no number")
        self._close()
        (self.directory / "checkpoints.jsonl").unlink(missing_ok=True)
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
        shutil.rmtree(self.place, ignore_errors=True)
        place = artifacts.stage_directory(self.config.artifacts, self.stage)
        self.display.note(self.speed.line())
        self.display.note(f"finished in {time.monotonic() - self.started:.0f} s, {place}/model is the model")
