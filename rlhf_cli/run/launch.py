"""Runs a stage for `rlhf <stage>` and `torchrun -m stages.<stage>`. Its config is checked before torch is imported."""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import importlib
import importlib.util
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from rlhf_cli.config.by_stage import load_stage_config
from rlhf_cli.config.ppo import ENDS, PPOConfig, Requirement
from rlhf_cli.config.stage import Stage
from rlhf_cli.config.yaml_text import as_override
from rlhf_cli.errors import ArtifactError, ConfigError, EndedElsewhere, Interrupted, RunError
from rlhf_cli.files import KNOWN_FILE, known_digests, learn_digests
from rlhf_cli.printing import say
from rlhf_cli.processes.environment import is_first_worker
from rlhf_cli.processes.exits import INTERRUPTED, exit_code
from rlhf_cli.processes.launcher import run_processes
from rlhf_cli.processes.signals import LAUNCHED
from rlhf_cli.program import command, set_options, torchrun
from rlhf_cli.run import artifacts, checkpoint_files
from rlhf_cli.run.artifacts import read_manifest_or_none
from rlhf_cli.run.identity import identity, require_files, require_inputs
from rlhf_cli.run.state import problems_of

Run = Callable[..., None]
FULL_OR_UNWRITABLE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS),
    *(errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE),
}
SHARED_KEYS = ("seed", "artifacts", "device", "precision")
"""Top-level keys that mean the same in every stage: an override of one is carried to a command for another stage."""


def run_stage(
    stage: str,
    load_run: Callable[[], Run],
    config_path: str | Path,
    overrides: Sequence[str] = (),
    *,
    restart: bool = False,
    quiet: bool = False,
    resume_with: str | None = None,
    num_processes: int = 1,
) -> bool:
    """Run one stage unless it is finished and unchanged; returns whether it ran.

    Args:
        stage: sft, rm or ppo.
        load_run: imports the stage's `run`; called once the config has been checked.
        config_path: the stage's YAML file.
        overrides: `key=value` strings, as after `--set`.
        restart: run even if finished, and discard an unfinished run.
        quiet: print warnings and errors only.
        resume_with: the command that resumes an interrupted run; None for that of this stage.
        num_processes: start this many processes, after the checks.
    """
    config = load_stage_config(stage, config_path, overrides)
    silent = quiet or not is_first_worker() or LAUNCHED in os.environ
    with explained(config_path, config.artifacts, overrides):
        reason, lines = _check(stage, config, restart=restart, thorough=num_processes > 1)
        directory = artifacts.stage_directory(config.artifacts, stage)
        if reason is None:
            lines = [f"skipped, {directory} is finished and its config, data and inputs are unchanged"]
        elif reason:
            lines.append(f"runs again ({reason}); {directory} is replaced when the new run is finished")
        for line in () if silent else lines:
            say(f"{stage}: {line}", flush=True)
        if reason is None:
            return False
        again = resume_with or _command(stage, config_path, overrides, num_processes)
        try:
            if num_processes == 1:
                load_run()(config, quiet=quiet, restart=restart)
            else:
                arguments = [sys.executable, "-m", f"stages.{stage}", "--config", str(config_path)]
                arguments += [*set_options(overrides), *["--quiet"] * quiet, *["--restart"] * restart]
                in_words = partial(checkpoint_files.last_step_in_words, config.artifacts, stage)
                if code := run_processes(arguments, num_processes, str(again), checkpoint_in_words=in_words):
                    raise EndedElsewhere(code)
        except Interrupted as error:
            if checkpoint_files.unfinished_identity(config.artifacts, stage) is None:
                raise
            how_to = f"To resume: {again}" if again else "To resume, run the same command on every machine"
            raise Interrupted(f"{error}. {how_to}", error.exit_code) from None
    return True


def _check(stage: str, config: Stage, *, restart: bool, thorough: bool) -> tuple[str | None, list[str]]:
    """(why the stage runs, or None if it is up to date; what to tell the user of `require`).

    With `thorough` a stage that runs reads the models of its inputs here. Of several processes only the first one reads
    data and models, and tells the others. Raises for inputs that are missing, damaged or below their required figures.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return _check_here(stage, config, restart=restart, thorough=thorough)
    from rlhf_cli.processes import distributed

    if KNOWN_FILE in os.environ:
        learn_digests(Path(os.environ[KNOWN_FILE]).read_text(encoding="utf-8"))
    distributed.at_step(f"{stage} start")
    world = distributed.start(config.device, config.distributed.timeout_s)
    check = partial(_check_here, stage, config, restart=restart, thorough=True)
    found, digests = world.of_main(lambda: (check(), known_digests()))
    learn_digests(digests)
    return found


def _check_here(stage: str, config: Stage, *, restart: bool, thorough: bool) -> tuple[str | None, list[str]]:
    require_inputs(config)
    require_files(config)
    inputs = dict.fromkeys(path for path, _ in config.inputs.values())
    for path in inputs:
        artifacts.require_intact(path)  # reads files with new time stamps; the stage compares all that it loads
    for path in inputs if LAUNCHED not in os.environ else ():
        _warn_if_stale(stage, path)
    reason = _reason_to_run(stage, config, restart=restart)
    if reason is not None:
        for path in inputs if thorough else ():
            artifacts.require_intact(path, thorough=True)
        return reason, check_requirements(config)
    artifacts.require_intact(artifacts.stage_directory(config.artifacts, stage))
    check_requirements(config, is_finished=True)
    checkpoint_files.remove_leftovers(config.artifacts, stage)
    return None, []


def _warn_if_stale(stage: str, path: str) -> None:
    """Warn of an input that is a stage whose own data or inputs changed since it was finished."""
    manifest = read_manifest_or_none(path)
    if manifest is None or Path(path).name != manifest.stage:
        return
    with contextlib.suppress(ConfigError, OSError):
        problems = problems_of(Path(path).parent, manifest.stage, manifest)
        if problems.startswith("stale"):
            say(f"{stage}: warning: {path} is used as it is, but it is {problems}", flush=True)


def _reason_to_run(stage: str, config: Stage, *, restart: bool) -> str | None:
    """Why the stage runs: "" if it never finished, else what differs; None if it is up to date.

    Raises ConfigError for a finished stage of another seed, which a run would replace.
    """
    current, directory = identity(config), artifacts.stage_directory(config.artifacts, stage)
    # An interrupted --restart of a finished stage is resumed by the same command without --restart.
    is_unfinished = checkpoint_files.unfinished_identity(config.artifacts, stage) == current
    manifest = read_manifest_or_none(directory) if restart else artifacts.read_manifest(directory)
    if manifest is None:
        return "its manifest cannot be read" if (directory / artifacts.MANIFEST).exists() else ""
    changed = artifacts.differences(manifest.identity, current)
    if "config.seed" in changed and not restart and not is_unfinished:
        others = [key.removeprefix("config.") for key in changed if key != "config.seed"]
        differs = f"; {', '.join(others[:4])} {'differ' if len(others) > 1 else 'differs'} too" if others else ""
        own = shlex.quote(as_override("artifacts", f"{config.artifacts}-{{seed}}"))
        raise ConfigError(
            f"seed: {directory} is finished with seed {manifest.seed}, and a run with seed {config.seed} would replace "
            f"it{differs}. To keep both, give each seed its own directory: --set {own}. To replace the finished one, "
            "pass --restart"
        )
    if changed:
        more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
        return f"changed: {', '.join(changed[:4])}{more}"
    if restart:
        return "--restart"
    return "an interrupted --restart of it is resumed" if is_unfinished else None


def _command(stage: str, config_path: str | Path, overrides: Sequence[str], num_processes: int) -> str | None:
    """The command that starts this stage as it was started; None if several machines take part."""
    if LAUNCHED in os.environ:
        return os.environ[LAUNCHED]
    arguments = ["--config", str(config_path), *set_options(overrides)]
    processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if os.environ.get("WORLD_SIZE", processes) != processes:
        return None
    if processes == "1":
        return command(stage, *arguments, *(["--nproc", str(num_processes)] if num_processes > 1 else []))
    return f"{torchrun()} --nproc-per-node {processes} -m stages.{stage} {shlex.join(arguments)}"


@contextlib.contextmanager
def explained(config_path: str | Path, root: str, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Add the command to run, or what else to do, to errors raised inside the block."""
    try:
        yield
    except artifacts.MissingStageError as error:
        raise ArtifactError(f"{error}. Run: {_command_for(error.stage, error.root, config_path, overrides)}") from None
    except artifacts.DamagedStageError as error:
        if not error.is_of_run:
            raise
        rebuild = _command_for(error.stage, error.root, config_path, overrides)
        raise ArtifactError(f"{error}. To rebuild: {rebuild} --restart") from None
    except KeyboardInterrupt as stop:
        stop.args = (INTERRUPTED,)
        raise
    except OSError as error:
        if error.errno in FULL_OR_UNWRITABLE:
            raise ArtifactError(
                f"{error.filename or root}: cannot be read or written ({error.strerror}); finished stages and earlier "
                "checkpoints are intact. Change its permissions, free disk space or set another `artifacts`"
            ) from None
        raise


def _command_for(stage: str, root: str, config_path: str | Path, given: Sequence[str]) -> str:
    """The command that builds a missing stage at `root`, where the stage of `config_path` will look for it."""
    path = Path(config_path).parent / f"{stage}.yaml"
    if not path.is_file():
        return command(stage, "--config", f"YOUR_{stage.upper()}.yaml", "--set", as_override("artifacts", root))
    keys = {text: text.partition("=")[0].strip() for text in given}
    overrides = [text for text in given if keys[text] in SHARED_KEYS]
    with contextlib.suppress(ConfigError):
        if Path(load_stage_config(stage, path, overrides).artifacts) != Path(root):
            overrides = [*(text for text in overrides if keys[text] != "artifacts"), as_override("artifacts", root)]
    return command(stage, "--config", str(path), *set_options(overrides))


def load_stage(stage: str) -> Run:
    """Import the `run` of a stage. Only the package `stages` beside this one counts: other projects have one too."""
    spec = importlib.util.find_spec("stages")
    ours = Path(__file__).resolve().parents[2] / "stages" / "__init__.py"
    other = Path(spec.origin).resolve() if spec is not None and spec.origin else None
    if other != ours:
        raise ConfigError(
            f"Python finds another package 'stages' ({other}) before rlhf's own ({ours}). "
            "Uninstall it, or run the command from another directory"
        )

    def end(*_: object) -> NoReturn:
        say(INTERRUPTED, error=True, flush=True)
        os._exit(130)

    # The import creates several hundred thousand objects that stay. To scan them again and again would take a third of
    # the import's time. Frozen objects are not scanned during the run either.
    gc.disable()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # transformers turns the exception of Ctrl-C into an ImportError
        signal.signal(signal.SIGINT, end)
    try:
        run: Run = importlib.import_module(f"stages.{stage}").run
    finally:
        gc.enable()
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)
    gc.freeze()
    return run


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. {self.format_usage().strip()}")


def main(stage: str, run: Run) -> None:
    """The command line of `python -m stages.<stage>`, also under torchrun."""
    parser = _Parser(prog=f"stages.{stage}", description=f"Run the {stage} stage.")
    parser.add_argument("--config", required=True, help="YAML file of the stage")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--restart", action="store_true", help="run even if finished and unchanged")
    parser.add_argument("--quiet", action="store_true", help="print warnings and errors only")

    def work() -> None:
        args = parser.parse_args()
        run_stage(stage, lambda: run, args.config, args.overrides, restart=args.restart, quiet=args.quiet)

    code = exit_code(work)
    if code == 0:
        from rlhf_cli.processes import distributed

        distributed.stop()
    sys.exit(code)


# -------------------------------------------------------------- the gate before PPO: held-out figures of earlier stages


SECTIONS = ("validation/", "eval/", "probe/")
"""Held-out figures of a manifest begin with one of these. Figures of validation rows come first, so that what decides
whether PPO starts is not what the last figures are measured on."""


def check_requirements(config: Stage, *, is_finished: bool = False) -> list[str]:
    """Compare the manifests of the stages that `config` reads with its `require`; returns a line for each figure.

    Every reward model of `rewards` must meet a limit. With `is_finished` PPO would not run again. Raises ConfigError
    for a figure or interval that a manifest lacks, RunError for a limit that is not met.
    """
    if not isinstance(config, PPOConfig):
        return []
    lines = []
    for name, requirement in config.require.items():
        stage = name.partition("/")[0]
        recorded: dict[str, Mapping[str, float]] = {}
        for path, _ in config.inputs.values():
            directory = Path(path).parent if Path(path).name == "model" else Path(path)
            manifest = read_manifest_or_none(directory)
            if manifest is not None and manifest.stage == stage:
                recorded[str(directory)] = manifest.metrics
        if not recorded:
            raise ConfigError(f"require: {name}: this config reads no finished {stage} stage. Remove it")
        for path, figures in recorded.items():
            line, is_met = _compare(name, requirement, path, figures)
            if not is_met:
                outcome = "The finished PPO stage stays as it is" if is_finished else "PPO was not started"
                raise RunError(f"{line}. {outcome}. Improve the {stage} stage, or change `require`")
            lines.append(line)
    return lines


def _compare(name: str, requirement: Requirement, path: str, figures: Mapping[str, float]) -> tuple[str, bool]:
    """A line that compares a figure of the stage at `path` with its limits, and whether it is within them."""
    stage, _, figure = name.partition("/")
    key = next((section + figure for section in ("validation/", "eval/", "") if section + figure in figures), None)
    if key is None or not key.startswith(SECTIONS):
        no_figures = (*ENDS.values(), "/num_rows")
        held_out = [key for key in figures if key.startswith(SECTIONS) and not key.endswith(no_figures)]
        known = dict.fromkeys(f"{stage}/{key.removeprefix('validation/').removeprefix('eval/')}" for key in held_out)
        has = f"has {', '.join(known)}" if known else "has no held-out figures. Set its data.test and train it again"
        raise ConfigError(f"require: {name}: no such figure; {path} {has}")
    end = requirement.interval
    value = figures.get(key + ENDS.get(end, ""))
    if value is None:
        raise ConfigError(f"require: {name}: {path} has no 95 % interval of it. Set interval: mean")
    low, high = requirement.above, requirement.below
    limits = [f"{side} {limit:g}" for side, limit in (("above", low), ("below", high)) if limit is not None]
    is_met = (low is None or value > low) and (high is None or value < high)
    interval = ""
    if key + "_low95" in figures and key + "_high95" in figures:
        interval = f" (95 % interval {figures[key + '_low95']:.3f} to {figures[key + '_high95']:.3f})"
    compared = {"mean": "it", "lower": "the lower end", "upper": "the upper end"}[end]
    be = "is" if is_met else "must be"
    line = f"require: {name} of {path} is {figures[key]:.4g}{interval}, {compared} {be} {' and '.join(limits)}"
    return line, is_met
