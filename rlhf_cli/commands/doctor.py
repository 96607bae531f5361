"""`rlhf doctor`: checks this machine and, if given, the integrity of an artifact directory.

Nothing is modified. Each line is printed as soon as it is known, and torch is imported only when it is needed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer
from rich.text import Text

from rlhf_cli.commands.status import runs_in
from rlhf_cli.config.by_stage import load_stage_config
from rlhf_cli.config.stage import STAGES
from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.files import digest_file
from rlhf_cli.printing import printable, size
from rlhf_cli.processes.environment import num_cores
from rlhf_cli.report.progress import Console
from rlhf_cli.run.artifacts import MANIFEST, Manifest, partial_directory, read_manifest, stage_directory
from rlhf_cli.run.checkpoint_files import checkpoints_directory, damage_of, list_checkpoints
from rlhf_cli.run.lock import owner_of
from rlhf_cli.run.state import what_changed

NAMES_SHOWN = 5
ARTIFACTS = "the `artifacts` directory of your configs"
COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


class Result(NamedTuple):
    """What a check found: how bad it is, its subject, and a sentence."""

    word: Literal["ok", "warning", "problem"]
    what: str
    text: str


ok, warning, problem = partial(Result, "ok"), partial(Result, "warning"), partial(Result, "problem")


def doctor(
    directory: Annotated[
        Path | None, typer.Argument(help="A run's directory, or that of one stage, to check as well.")
    ] = None,
) -> None:
    """Check this machine and, if given, the integrity of a run's files."""
    if directory is not None and not directory.is_dir():
        raise ArtifactError(f"{directory}: no such directory. Give {ARTIFACTS}, or a stage in it")
    console = Console(soft_wrap=True)
    problems = 0
    for line in _lines(directory):
        problems += line.word == "problem"
        text = printable(line.text)
        if console.is_terminal:  # a file keeps one line for each finding
            room = max(20, console.width - 22)
            text = f"\n{'':22}".join(textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False))
        console.print(Text.assemble((f"{line.word:8}", COLOURS[line.word]), f"{line.what:13} {text}"))
    if problems:
        raise ArtifactError(f"{problems} problem{'s' if problems > 1 else ''}, see above")


def _lines(directory: Path | None) -> Iterator[Result]:
    yield from versions()
    yield from machine()
    yield disk(directory or Path.cwd())
    if directory is None:
        return
    if (directory / MANIFEST).exists():
        stage = directory.resolve()
        yield from finished(directory, stage.name)
        if stage.name in STAGES:
            yield from unfinished(stage.parent, stage.name)
        return
    seen = 0
    for name in STAGES:
        built = stage_directory(directory, name)
        lines = [*(finished(built, name) if built.is_dir() else ()), *unfinished(directory, name)]
        seen += len(lines)
        yield from lines
    if not seen:
        runs = ", ".join(map(str, runs_in(directory)))
        instead = f", but contains runs: {runs}. Give one of them" if runs else f". Give {ARTIFACTS}"
        yield problem("artifacts", f"{directory}: is not a run{instead}")


def names(items: Sequence[str]) -> str:
    """The first NAMES_SHOWN items, and the number of the others."""
    more = f" and {len(items) - NAMES_SHOWN} more" if len(items) > NAMES_SHOWN else ""
    return ", ".join(items[:NAMES_SHOWN]) + more


# --------------------------------------------------------------------------------------------- the machine


def versions() -> Iterator[Result]:
    """Python and the packages that rlhf requires. Imports none of them and downloads nothing."""
    yield ok("python", platform.python_version())
    try:
        yield from packages(importlib.metadata.requires("rlhf-cli") or [])
    except importlib.metadata.PackageNotFoundError:
        yield warning("packages", "rlhf-cli is not installed, so the required versions are unknown")


def packages(requirements: Sequence[str]) -> Iterator[Result]:
    """Compare installed versions with the required ones, without those of extras."""
    from packaging.requirements import Requirement

    others = []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, specifier = requirement.name, requirement.specifier
        advice = f"{specifier} is required. Run: pip install '{name}{specifier}'"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield problem(name, f"not installed, {advice}")
            continue
        if not specifier.contains(version, prereleases=True):
            yield problem(name, f"{version} is installed, {advice}")
        elif name in ("torch", "transformers"):
            yield ok(name, version)
        else:
            others.append(f"{name} {version}")
    if others:
        yield ok("packages", ", ".join(others))


def machine() -> Iterator[Result]:
    """Whether torch can be imported, and the processor and GPUs that it finds."""
    try:
        import torch
    except Exception as error:
        # A broken installation fails in many ways: a missing package, a missing library, a missing symbol.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        yield problem("torch", f"cannot be imported ({reason[0][:300]}). Install it again")
        return
    processor = platform.machine()
    with contextlib.suppress(OSError):
        about = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if model := re.search(r"^model name\s*: *(.+?) *$", about, re.MULTILINE):
            processor = model[1]
    yield ok("device", f"cpu: {processor}, {torch.backends.cpu.get_cpu_capability()}, {num_cores()} cores")
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        major, minor = torch.cuda.get_device_capability(number)
        memory = f"{size(free)} of {size(total)} free, compute capability {major}.{minor}"
        yield ok("device", f"cuda:{number}: {torch.cuda.get_device_name(number)}, {memory}")
    if not torch.cuda.is_available() and Path("/proc/driver/nvidia/version").exists():
        yield warning("device", f"an NVIDIA driver is loaded, but torch {torch.__version__} finds no GPU")


def disk(directory: Path) -> Result:
    """The free space, and whether stages can be run in the directory."""
    text = f"{size(shutil.disk_usage(directory).free)} free at {directory}"
    if not os.access(directory, os.W_OK):
        return warning("disk", f"{text}, which is not writable: you can inspect it, but not run a stage")
    return ok("disk", text)


# ---------------------------------------------------------------------------------------------- stages


def finished(directory: Path, stage: str) -> Iterator[Result]:
    """Check a finished stage: its manifest, the digest of every file, foreign files, and whether it is stale."""
    try:
        manifest = read_manifest(directory) if (directory / MANIFEST).is_file() else None
    except ArtifactError as error:
        yield problem(stage, str(error))
        return
    if manifest is None:
        advice = f"has no {MANIFEST}, so it is not a finished stage. Remove it, or run the stage"
        yield problem(stage, f"{directory}: {advice}")
    elif manifest.stage not in STAGES:
        advice = "names an unknown stage. Run the stage again with --restart"
        yield problem(stage, f"{directory / MANIFEST}: {advice}")
    else:
        found = list(files(directory, manifest.files, stage))
        yield from found
        if not any(result.word == "problem" for result in found):
            total = size(sum((directory / name).stat().st_size for name in manifest.files))
            unchanged = f"all unchanged since they were written on {manifest.finished[:10]}"
            yield ok(stage, f"{len(manifest.files)} files, {total}, {unchanged}")
        yield inputs(directory, manifest)


def files(directory: Path, digests: Mapping[str, str], stage: str) -> Iterator[Result]:
    """Check the files of a directory against their digests. Reads nothing outside it, and follows no link."""
    there = {
        path.relative_to(directory).as_posix(): path
        for parent, folders, inside in os.walk(directory)
        for path in map(Path(parent).joinpath, [*inside, *folders])
        if path.is_symlink() or not path.is_dir()
    }
    missing, changed = [], []
    for name, digest in digests.items():
        path = there.get(name)
        if path is None or path.is_symlink() or not path.is_file():
            missing.append(name)
        elif path.suffix != ".md":  # you may edit a model card
            try:
                if digest_file(path) != digest:
                    changed.append(name)
            except OSError as error:
                changed.append(f"{name} (cannot be read: {error.strerror})")
    if missing:
        yield problem(stage, f"{directory}: missing, or replaced by a link: {names(missing)}")
    if changed:
        yield problem(stage, f"{directory}: modified after they were written: {names(changed)}")
    if unwanted := sorted(there.keys() - {*digests, MANIFEST}):
        yield warning(stage, f"{directory}: not written by the stage: {names(unwanted)}")


def inputs(directory: Path, manifest: Manifest) -> Result:
    """Check whether the data and inputs of a stage are unchanged."""
    stage = manifest.stage
    try:
        config = load_stage_config(stage, directory / "config.yaml")
        words = what_changed(config, manifest.identity, directory.absolute().parent)
    except ConfigError:
        why = "this version of rlhf cannot read its config.yaml, so it is unknown whether it is stale"
        return warning(stage, why)
    except OSError as error:
        return warning(stage, f"its data or inputs cannot be read ({error})")
    return warning(stage, words) if words else ok(stage, "its data and inputs are unchanged")


def unfinished(root: Path, stage: str) -> Iterator[Result]:
    """Check for a running process, and an interrupted run and its checkpoints."""
    directory, partial = checkpoints_directory(root, stage), partial_directory(root, stage)
    owner, checkpoints = owner_of(root, stage), list_checkpoints(directory)
    if owner is not None:
        yield ok(stage, f"running: {owner}")
    elif partial.is_dir() and not checkpoints:
        left = "left by a run that was stopped before its first checkpoint; the next run starts over"
        yield warning(stage, f"{partial}: {left}")
    elif directory.is_dir() and not partial.is_dir():
        yield warning(stage, f"{directory}: left by a finished run, no longer needed. Remove it")
        return
    good, damaged = [], []
    for checkpoint in checkpoints:
        wrong = damage_of(checkpoint) if checkpoint.is_dir() else "not a folder"
        if wrong is None:
            good.append(checkpoint.name)
        elif owner is None or checkpoint.exists():  # else the running process removed it meanwhile
            damaged.append(f"{checkpoint.name} ({wrong})")
    if good:
        resumes = f"interrupted; the next run resumes from {good[-1]}, " if owner is None else ""
        yield ok(stage, f"{resumes}{len(good)} good checkpoints in {directory}")
    if damaged and good:
        yield warning(stage, f"{directory}: damaged, not used: {names(damaged)}")
    elif damaged:
        yield problem(stage, f"{directory}: every checkpoint is damaged, the next run starts over: {names(damaged)}")
