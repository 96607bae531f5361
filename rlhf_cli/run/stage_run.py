"""One run of a stage: its directory, metrics, progress, checkpoints and publication."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft_rm import RMConfig
from rlhf_cli.config.stage import Stage
from rlhf_cli.config.yaml_text import dump_config
from rlhf_cli.errors import ArtifactError, ConfigError, EndedElsewhere, Interrupted, RewardError, RunError, UserError
from rlhf_cli.files import read_object
from rlhf_cli.health.findings import Finding
from rlhf_cli.health.recap import at, findings_of, unit_of
from rlhf_cli.processes import distributed
from rlhf_cli.processes.signals import SecondSignal, StopRequests
from rlhf_cli.processes.threads import is_out_of_memory, lacks_thread, use_threads
from rlhf_cli.report.progress import Display, figures
from rlhf_cli.run import artifacts, checkpoint_files
from rlhf_cli.run.checkpoint import BEFORE, NOTHING_WRITTEN, CheckpointStore, StageFiles, Stateful
from rlhf_cli.run.identity import identity, may_change, require_inputs
from rlhf_cli.run.lock import Lock
from rlhf_cli.training.bad_steps import BadSteps, LossScale, append_new
from rlhf_cli.training.speed import Speed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rlhf_cli.config.by_stage import AnyConfig
    from rlhf_cli.report.trackers import Trackers

C = TypeVar("C", bound=Stage)
ADVICE_ON_BAD_STEPS = (
    "Lower optimizer.learning_rate, lengthen optimizer.warmup_steps, or look in the batch for values that are not "
    "finite or are outliers"
)


class StageRun:
    """A context in which a stage is built in `directory`; `publish` turns it into the finished stage.

    Only the first process writes and prints. `resume` restores the last checkpoint of an interrupted run, and
    `finish_step` writes the next one when it is due.
    """

    def __init__(self, stage: str, config: AnyConfig, *, quiet: bool = False, restart: bool = False):
        self.stage, self.config, self.restart = stage, config, restart
        require_inputs(config)
        distributed.at_step(f"{stage} start")
        self.world = distributed.start(config.device, config.distributed.timeout_s)
        use_threads(config.threads)
        distributed.name_checkpoint(
            partial(checkpoint_files.last_step_in_words, config.artifacts, stage), self._keep_end
        )
        self.world.of_main(self._require_adapters)  # nothing is written yet
        self.identity = self.world.of_main(lambda: identity(config))  # one process reads all data and models
        self.display = Display(stage, quiet=quiet, silent=not self.world.is_main)
        self.checkpoints_directory = checkpoint_files.checkpoints_directory(config.artifacts, stage)
        self._train_in(artifacts.partial_directory(config.artifacts, stage), self.checkpoints_directory)
        self.trackers: Trackers | None = None
        self.lock = Lock(config.artifacts, stage)
        self.stop_requests = StopRequests()
        self.speed = Speed(stage, self.world)
        self.precision: str = config.precision
        """`precision` of the config, or what `settled` takes for `auto`."""
        self.tokens_per_microbatch: int | None = None
        """Set by `microbatch_tokens`; named in the message when memory runs out."""
        self._last_checkpoint = time.monotonic()
        self._is_due = False

    def _train_in(self, directory: Path, checkpoints: Path) -> None:
        """Begin a training that writes into these directories."""
        self.directory, config = directory, self.config
        self.files = StageFiles(directory, writes=self.world.is_main)
        self.checkpoints = CheckpointStore(checkpoints, keep=config.checkpoints.keep, world=self.world)
        self.bad_steps = BadSteps(config.optimizer.max_bad_steps)
        self.loss_scale = LossScale(self.world.device, config.precision)
        self._saved_step = 0

    def __enter__(self) -> Self:
        self.world.of_main(self._open)
        self.stop_requests.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # While it finds out which process has ended, a launcher may send SIGTERM.
        failure = distributed.failure_of(error)
        self.stop_requests.remove()
        shown = self._shown(error, failure)
        self.display.end()
        if self.trackers is not None:
            status = "stopped" if self.stop_requests.received is not None else "failed"
            self.trackers.close(status, 1.0 if isinstance(error, SecondSignal) else None)
        if shown is not None and not isinstance(shown, EndedElsewhere):
            self._keep_end(shown)
        if self.world.is_main:
            try:
                # Finish the current checkpoint in any case; an error here must not hide the one that ends the run.
                with contextlib.suppress(*((Exception,) if error is not None else ())):
                    self.checkpoints.wait()
                    self.files.close()
            finally:
                self.lock.release()
        if shown is not error and shown is not None:
            raise shown from None

    def _shown(self, error: BaseException | None, failure: Exception | None) -> BaseException | None:
        """The exception with which the run ends: one that says more than `error`, or `error` itself."""
        own = (str(self.directory), str(self.checkpoints_directory))  # only this run writes there
        if isinstance(error, FileNotFoundError) and str(error.filename).startswith(own):
            return self._removed(error.filename)
        if failure is not None:
            return failure
        if error is not None and is_out_of_memory(error):
            lacking = what_to_lower(self.config, self.world.size, self.tokens_per_microbatch)
            if lacks_thread(error):
                lacking = f"the system refused to start a thread ({error}). Raise its limit of memory or processes "
                lacking += "(ulimit -v, ulimit -u) and run the same command again"
            return RunError(f"{distributed.where(self.world)}: {lacking}")
        if self.stop_requests.received is not None and (error is None or isinstance(error, RewardError)):
            what = str(error) if error is not None else "the stage had already finished"
            return self._interrupted(self.stop_requests.received, what)
        return error

    def _keep_end(self, error: BaseException) -> None:
        """Keep with the stage whether it failed or was interrupted, and the line that says why."""
        is_ours = isinstance(error, UserError | RunError | Interrupted)
        line = str(error) if is_ours else f"{type(error).__name__}: {error}"
        if isinstance(error, KeyboardInterrupt):
            line = "stopped at once by a second signal"
        name = "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
        checkpoint_files.keep_end(self.config.artifacts, self.stage, name, " ".join(line.split()))

    # ------------------------------------------------------------------------------------ start and resume

    def _require_adapters(self) -> None:
        """Raise now what is wrong with adapters, and not after models and rows are loaded."""
        reads = any(artifacts.is_adapter(artifacts.model_directory(path)) for path, _ in self.config.inputs.values())
        if self.config.trains_adapters or reads:
            from rlhf_cli.plan.adapter_errors import require_adapters

            require_adapters(self.config)

    def settled(self, config: C) -> C:
        """The config with the precision that `precision: auto` means. The first process decides: CPUs may differ."""
        if config.precision == "auto" and self.world.device.type == "cpu":
            from rlhf_cli.plan.origins import ModelOrigins, settled_precision

            origins = ModelOrigins({}, downloads=True)
            self.precision = self.world.of_main(lambda: settled_precision(self.config, origins))
            if self.precision != "auto":
                self.display.note("precision: auto is bfloat16 for a model of this size on this CPU, which has AMX")
        return config.model_copy(update={"precision": self.precision})

    def microbatch_tokens(self, models: Mapping[str, PreTrainedModel]) -> int:
        """Maximum tokens of a microbatch: as configured, or what `auto` chooses for the models (by name)."""
        given = self.config.batches[1].tokens_per_microbatch
        if given == "auto":
            from rlhf_cli.plan.stages import microbatch_tokens

            config = self.config.model_copy(update={"precision": self.precision})
            given = microbatch_tokens(config, models, self.world)
        self.tokens_per_microbatch = given
        return given

    def _open(self) -> None:
        """Lock the stage, and prepare the directory to build in: an empty one, or that of the interrupted run."""
        root, stage = self.config.artifacts, self.stage
        try:
            if warning := self.lock.acquire():
                self.display.warn(warning)
            checkpoint_files.refuse_links(root, stage)
            resumes = self._resumes()
            if not resumes:
                # Before the files of rows: a checkpoint without its rows cannot be used.
                shutil.rmtree(self.checkpoints_directory, ignore_errors=True)
            artifacts.open_partial(root, stage, keep=resumes)
            self.checkpoints_directory.mkdir(exist_ok=True)
            for path in self.checkpoints_directory.glob(".*"):  # temporary files that a killed run left
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            text = json.dumps(self.identity) + "\n"
            checkpoint_files.write_text(self.checkpoints_directory / checkpoint_files.RUN, text)
            text = f"# rlhf {stage} --config THIS_FILE\n{dump_config(self.config)}"
            checkpoint_files.write_text(self.directory / "config.yaml", text)
        except BaseException:
            self.lock.release()
            raise

    def _resumes(self) -> bool:
        """Whether an unfinished run is resumed. Raises ConfigError if a key differs that must not."""
        root = self.config.artifacts
        checkpoints = checkpoint_files.resumable_checkpoints(root, self.stage)
        if not checkpoints:
            # What the same run has paid for is kept: a judge's grades, samples, replies of ref_policy.
            began = read_object(self.checkpoints_directory / checkpoint_files.RUN)
            return self.directory.is_dir() and not self.restart and began == self.identity
        if self.restart:
            self.display.note(
                f"--restart: discarding an unfinished run ({len(checkpoints)} checkpoints, the last {checkpoints[-1]})"
            )
            return False
        saved = checkpoint_files.unfinished_identity(root, self.stage)
        if saved is None:
            self.display.warn(
                f"{self.checkpoints_directory / checkpoint_files.RUN}: cannot be read, so the {len(checkpoints)} "
                "checkpoints beside it may belong to another run; starting over"
            )
            return False
        names = {key: key.removeprefix("config.") for key in artifacts.differences(saved, self.identity)}
        if refused := [name for key, name in names.items() if not may_change(key)]:
            raise ConfigError(
                f"{root}: an unfinished {self.stage} run (step {checkpoint_files.step_of(checkpoints[-1])}) was "
                f"started with a different {', '.join(refused)}. Restore it to resume, pass --restart to start over, "
                "or set another `artifacts`"
            )
        if names:
            self.display.note(f"resuming with a different {', '.join(names.values())}")
        return True

    def resume(self, parts: Mapping[str, Stateful], total: int) -> int:
        """Restore `parts` from the newest usable checkpoint; returns how many of the `total` steps are done.

        Rows that were written after the checkpoint are removed: these steps are repeated with the same result.
        """
        self.checkpoints.parts = {"files": self.files, "bad_steps": self.bad_steps, **self.loss_scale.parts(), **parts}
        path, rejected = self.world.of_main(
            lambda: self.checkpoints.newest(lambda numbers: self.files.mismatch(numbers["files"]))
        )
        for checkpoint, reason in rejected.items():
            instead = "starting over" if path is None else "using an older one"
            self.display.warn(f"{checkpoint}: cannot be used, {reason}; {instead}")
        done = checkpoint_files.step_of(path) if path is not None else 0
        if done > total:
            raise ConfigError(
                f"the unfinished run has done {done} steps, more than the {total} of this config. Raise the number of "
                "steps, or pass --restart to start over"
            )
        if path is None:
            self.files.restore({}, NOTHING_WRITTEN)
        else:
            self.checkpoints.restore(path)
            self.display.note(f"resuming after step {done} of {total}, from {path}")
        if self.world.is_main:
            # Else they would count among the last `checkpoints.keep`.
            checkpoint_files.remove(list(rejected))
            text = json.dumps({"total": total}) + "\n"
            checkpoint_files.write_text(self.checkpoints_directory / checkpoint_files.TOTAL, text)
            for name in ("metrics", "samples"):
                self.files.rows(name)
            is_member = self.checkpoints.directory != self.checkpoints_directory
            if self.config.trackers and not is_member:
                from rlhf_cli.report.trackers import Trackers

                self.trackers = Trackers(self.stage, self.config, self.display)
                self.trackers.start()
        self.world.barrier()
        self._last_checkpoint = time.monotonic()
        self._saved_step = done
        distributed.at_step(f"{self.stage} step {done + 1}")
        return done

    def restore_finished(self, parts: Mapping[str, Stateful], unusable: Callable[[Any], str | None]) -> bool:
        """Restore `parts` if the newest checkpoint has exactly these: a member is finished. Returns whether it is."""
        self.checkpoints.parts = dict(parts)
        path, _ = self.world.of_main(lambda: self.checkpoints.newest(unusable))
        if path is not None:
            self.checkpoints.restore(path)
        return path is not None

    def save_finished(self, step: int, parts: Mapping[str, Stateful]) -> None:
        """Save `parts` as the only checkpoint."""
        self.checkpoints.parts, self.checkpoints.keep = dict(parts), 1
        self.checkpoints.save(step)
        self.checkpoints.wait()
        self.world.barrier()

    @contextlib.contextmanager
    def member(self, number: int) -> Iterator[None]:
        """Inside the block the rows, checkpoints and bad steps are those of a member of a reward model.

        If the block raises, they stay until the stage has ended.
        """
        own = dict(vars(self))
        place = self.checkpoints_directory / checkpoint_files.MEMBERS / str(number)
        self.world.of_main(lambda: (place / "rows").mkdir(parents=True, exist_ok=True))
        self._train_in(place / "rows", place)
        yield
        self.checkpoints.wait()
        self.files.close()
        changed = ("directory", "files", "checkpoints", "bad_steps", "loss_scale", "_saved_step")
        vars(self).update({name: own[name] for name in changed})

    # ---------------------------------------------------------------------------------------------- steps

    def finish_step(self, step: int, total: int) -> None:
        """End a step: save a checkpoint if one is due or a signal asks the run to stop.

        After a bad step only a signal causes one, so that the last good ones are kept. Raises Interrupted after a
        signal, and RunError if a weight is NaN or infinite.
        """
        settings, now = self.config.checkpoints, time.monotonic()
        is_late = settings.every_minutes is not None and now - self._last_checkpoint > 60 * settings.every_minutes
        self._is_due |= is_late or (settings.every_steps is not None and step % settings.every_steps == 0)
        distributed.at_step(f"{self.stage} step {step + 1}" if step < total else f"{self.stage} end")
        everyone = self.world.gather((self._is_due, self.stop_requests.asked()))
        stop = next((number for _, number in everyone if number is not None), None)
        if self.world.is_main:
            self._require_files()
        # The clock of the first process decides; a signal to any process counts.
        is_time = everyone[0][0] and not self.bad_steps.in_a_row and step < total
        began = time.monotonic()
        if is_time or stop is not None or step == total or self.bad_steps.in_a_row:
            self._require_finite_weights(step)
        if is_time or stop is not None:
            self._is_due = False
            self.checkpoints.save(step)
            self.world.barrier()  # the first process may have waited for its previous checkpoint to be written
            self._saved_step = step
            self._last_checkpoint = time.monotonic()
            self.speed.count("checkpoint", seconds=self._last_checkpoint - began)
        if stop is not None:
            self.checkpoints.wait()
            # A launcher ends the other processes as soon as one has ended, and the first one writes the checkpoint.
            self.world.barrier()
            raise self._interrupted(stop, f"stopped after step {step} of {total}, and saved")

    def save_now(self, step: int) -> None:
        """Save the state after `step`, because an error outside the training is about to end the run."""
        if step > 0 and step != self._saved_step and not self.bad_steps.in_a_row:
            self.checkpoints.save(step)
            self._saved_step = step
        self.checkpoints.wait()

    def set_aside(self, name: str, *, copy: bool = False) -> None:
        """Call before a model that the stage has saved is replaced, or changed (`copy`): a checkpoint may have it."""
        if self.world.is_main:
            self.checkpoints.wait()
            self.files.set_aside(name, copy=copy)

    def may_step(
        self, step: int, what: str, numbers: Mapping[str, float], rows: Callable[[], list[dict[str, Any]]]
    ) -> bool:
        """Whether an optimizer step may be taken: the loss and gradient norm in `numbers` are finite.

        If not, and the scale of the loss is not the reason, write the batch, `rows`, beside the stage. All processes
        must pass the same numbers. Raises RunError after `optimizer.max_bad_steps` in a row.
        """
        is_scale = self.loss_scale.explains(numbers)
        wrong = self.bad_steps.count(numbers, is_excused=is_scale)
        if wrong is None or is_scale:
            return wrong is None
        path = Path(self.config.artifacts) / f"{self.stage}.failed_batch.jsonl"
        batch = [{"step": step, **row} for row in rows()]
        if self.world.is_main:
            append_new(path, batch)
        message, limit = f"{wrong}; the step was skipped. The batch is in {path}.", self.bad_steps.limit
        if self.bad_steps.in_a_row >= limit:
            count = f" These were {limit} bad steps in a row, the limit (optimizer.max_bad_steps)." if limit > 1 else ""
            raise RunError(f"{what}: {message}{count} {self._last_checkpoint_in_words()} {ADVICE_ON_BAD_STEPS}")
        if self.bad_steps.in_a_row == 1:
            text = f"{what}: {message} The run continues, and stops after {limit} such steps in a row."
            self.report(step, [Finding("bad_step", "warning", text, ADVICE_ON_BAD_STEPS)], None)
        return False

    def _require_finite_weights(self, step: int) -> None:
        """Raise RunError for a NaN or infinite weight: such a state is neither saved nor published."""
        names = self.world.gather(self.checkpoints.not_finite())
        if name := next(filter(None, names), None):  # on all processes, which stop together
            raise RunError(
                f"{self.stage} step {step}: weight {name} contains NaN or inf; nothing was saved from this step. "
                f"{self._last_checkpoint_in_words()} Lower optimizer.learning_rate or lengthen optimizer.warmup_steps"
            )

    def _last_checkpoint_in_words(self) -> str:
        """As the first process, which writes it, finds it. All processes must call this."""
        self.checkpoints.wait()
        return self.world.gather(checkpoint_files.last_step_in_words(self.config.artifacts, self.stage))[0]

    def _interrupted(self, number: int, what: str) -> Interrupted:
        code = 130 if number == signal.SIGINT else 143
        return Interrupted(f"{self.stage}: {signal.Signals(number).name}: {what}", code)

    def _require_files(self) -> None:
        """Raise ArtifactError if the files of this run were removed, perhaps by another run in the same directory."""
        files = [self.checkpoints_directory / checkpoint_files.RUN, *self.files.paths()]
        missing = [path for path in files if not path.exists()]
        if not self.lock.is_held():
            missing = [self.lock.path]
        if missing:
            raise self._removed(missing[0])

    def _removed(self, path: object) -> ArtifactError:
        return ArtifactError(
            f"{path}: was removed while the {self.stage} stage was running. Run the same command again"
        )

    # -------------------------------------------------------------------------------------------- rows

    def log(self, step: int, metrics: dict[str, float], shown: tuple[str, ...] = ()) -> None:
        """Write a row of metrics.jsonl; show the latest value of each metric in `shown` beside the progress."""
        self.record("metrics", {"step": step, **metrics, "time/elapsed_s": self.files.seconds()})
        if shown and self.world.is_main:
            latest = self.files.latest
            latest |= {name: value for name, value in metrics.items() if name in shown}
            self.display.step(step, figures({name: latest[name] for name in shown if name in latest}))

    def sample(self, row: dict[str, Any]) -> None:
        self.record("samples", row)

    def record(self, name: str, row: dict[str, Any]) -> None:
        """Write a row of <name>.jsonl; the file is created with its first row."""
        if self.world.is_main:
            written = self.files.rows(name).write(row)
            if self.trackers is not None:
                self.trackers.send(name, written)

    def report(self, step: int, findings: Sequence[Finding], line: str | None) -> None:
        """Print health findings and write them to health.jsonl; `line` is the summary beside the progress.

        Raises RunError for a finding that stops the run.
        """
        if line is not None or findings:
            self.record("health", {"step": step, "line": line, "findings": [asdict(f) for f in findings]})
        if line is not None:
            self.display.health(line)
        when = at(step, unit_of(self.stage))
        for finding in findings:
            if finding.severity == "stop":
                raise RunError(f"{self.stage} {when}: {finding.name}: {finding.message} To try: {finding.advice}")
            self.display.warn(f"{when}, {finding.name}: {finding.message}\n  To try: {finding.advice}")

    # -------------------------------------------------------------------------------------- publication

    def publish(self, metrics: dict[str, float]) -> None:
        """Turn the directory into the finished stage; `metrics` are its final figures."""
        self.world.barrier()  # another process may still read a model in the directory
        self.world.of_main(partial(self._publish, metrics))  # no process may start the next stage before

    def _publish(self, metrics: dict[str, float]) -> None:
        from rlhf_cli.models.forward import compute_dtype
        from rlhf_cli.run.model_card import library_versions, write_cards

        self._require_files()
        try:
            self.checkpoints.wait()
        except ArtifactError as error:
            if not self.checkpoints_directory.is_dir():
                raise
            self.display.warn(f"{str(error).partition('; ')[0]}; the finished stage does not need it")
        if self.bad_steps.total:
            self.display.warn(f"{self.bad_steps.total} steps were skipped: their loss or gradient was NaN or infinite")
        self.files.close()
        for path in self.directory.glob(f"*{BEFORE}"):
            shutil.rmtree(path)
        try:
            versions = library_versions()
            write_cards(self.stage, self.config, metrics, versions, self.directory)
            artifacts.publish(
                self.config.artifacts,
                self.stage,
                identity=self.identity,
                metrics={key: round(value, 6) for key, value in metrics.items() if math.isfinite(value)},
                seed=self.config.seed,
                versions=versions,
                device=str(self.world.device),
                precision=str(compute_dtype(self.world.device, self.precision)).removeprefix("torch."),
                num_processes=self.world.size,
                seconds=round(self.files.seconds(), 1),
                finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            )
        except FileNotFoundError:
            raise  # something was removed meanwhile, and `_shown` says which file
        except OSError as error:
            raise ArtifactError(f"{self.directory}: cannot be published ({error.strerror or error})") from None
        if self.trackers is not None:
            self.trackers.close("finished")
        shutil.rmtree(self.checkpoints_directory, ignore_errors=True)
        directory = artifacts.stage_directory(self.config.artifacts, self.stage)
        self.display.recap(findings_of(directory))
        self.display.note(self.speed.line())
        self.display.note(f"finished in {self.files.seconds():.0f} s; the model is in {directory}/model")


# ------------------------------------------------------------------------------------ out of memory: which key to lower


def what_to_lower(config: AnyConfig, num_processes: int, tokens_per_microbatch: int | None) -> str:
    """The message for a lack of memory: the size of a microbatch on one process, and the keys to lower.

    `tokens_per_microbatch` is None if the model was not yet loaded.
    """
    section, part = config.batches
    if isinstance(config, PPOConfig):
        what = "responses"
        longest = config.data.max_prompt_length + config.rollout.max_new_tokens
        length_keys = "data.max_prompt_length or rollout.max_new_tokens"
        sampling, num_samples, live = "rollout", config.ppo.rollout_batch_size, config.rollout.max_live_rows
    else:
        what, longest, length_keys = "rows", config.data.max_length, "data.max_length"
        sampling, num_samples, live = "evaluation", 0, None
        if isinstance(config, RMConfig):
            num_samples, live = config.evaluation.num_normalization_samples, config.evaluation.max_live_rows
    rows = min(-(-part.minibatch_size // num_processes), part.microbatch_size or part.minibatch_size)
    tokens = min(rows * longest, tokens_per_microbatch or rows * longest)
    limit = f" and {tokens} tokens in total" if tokens < rows * longest else ""
    advice = f"Lower {section}.tokens_per_microbatch below {tokens} and run the same command to resume"
    if tokens <= longest:
        # A row that is longer than the limit is a microbatch by itself, and this may have been one.
        advice = f"Lower {length_keys}" if rows == 1 else f"{advice}, or lower {length_keys}"
    if num_samples:
        live = live or -(-num_samples // num_processes)
        advice += f"; if it ran out while sampling, lower {sampling}.max_live_rows below {live}"
    if not (config.gradient_checkpointing or config.compile):
        advice += "; gradient_checkpointing: true needs less memory too"
    return f"out of memory with a microbatch of {rows} {what} of at most {longest} tokens{limit}. {advice}"
