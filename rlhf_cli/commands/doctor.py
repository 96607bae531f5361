"""`rlhf doctor`: checks this machine and, if given, the integrity of an artifact directory.

Nothing is modified. Each line is printed as soon as it is known, and torch is imported only when it is needed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
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
from rlhf_cli.run.artifacts import (
    MANIFEST,
    Manifest,
    partial_directory,
    read_manifest,
    set_aside_directory,
    stage_directory,
)
from rlhf_cli.run.checkpoint_files import checkpoints_directory, damage_of, list_checkpoints
from rlhf_cli.run.lock import lock_path, owner_of
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
    yield disk(directory)
    if directory is None:
        return
    if (directory / MANIFEST).exists():
        name = directory.resolve().name
        yield from finished(directory, name)
        if name in STAGES:
            yield from unfinished(directory.resolve().parent, name)
        return
    seen = 0
    for stage in STAGES:
        built = stage_directory(directory, stage)
        lines = [*(finished(built, stage) if built.is_dir() else ()), *unfinished(directory, stage)]
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


def versions() -> Iterator[Result]:
    """Python and the packages that rlhf requires. Imports none of them and downloads nothing."""
    python = platform.python_version()
    try:
        metadata = importlib.metadata.metadata("rlhf-cli")
    except importlib.metadata.PackageNotFoundError:
        yield ok("python", python)
        yield warning("packages", "rlhf-cli is not installed, so the required versions are unknown")
        return
    from packaging.specifiers import SpecifierSet

    required = metadata["Requires-Python"]
    if SpecifierSet(required or "").contains(python, prereleases=True):
        yield ok("python", python)
    else:
        yield problem("python", f"{python} is running, {required} is required")
    yield from packages(metadata.get_all("Requires-Dist") or [])


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
    yield ok("device", f"cpu: {_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {num_cores()} cores")
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        major, minor = torch.cuda.get_device_capability(number)
        memory = f"{size(free)} of {size(total)} free, compute capability {major}.{minor}"
        yield ok("device", f"cuda:{number}: {torch.cuda.get_device_name(number)}, {memory}")
    if not torch.cuda.is_available() and Path("/proc/driver/nvidia/version").exists():
        yield warning("device", f"an NVIDIA driver is loaded, but torch {torch.__version__} finds no GPU")


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def disk(directory: Path | None) -> Result:
    """The free space, and whether stages can be run in the directory."""
    location = directory if directory is not None else Path.cwd()
    text = f"{size(shutil.disk_usage(location).free)} free at {location}"
    if not os.access(location, os.W_OK):
        return warning("disk", f"{text}, which is not writable: you can inspect it, but not run a stage")
    return ok("disk", text)


# ---------------------------------------------------------------------------------------------- stages

NOT_SAFETENSORS = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npz", ".h5", ".msgpack", ".gguf"}
OUTSIDE = "its manifest names files outside the directory, which were not read"
LINKS = "files were replaced by links, which were not followed"
MISSING, CHANGED = "missing", "modified after they were written"


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
    """Check the files of a directory against their digests. Names that lead outside it, and links, are not followed."""
    there = [
        (Path(parent) / name).relative_to(directory)
        for parent, folders, names in os.walk(directory)
        for name in [*names, *(n for n in folders if (Path(parent) / n).is_symlink())]
    ]
    links = {path for path in there if (directory / path).is_symlink()}
    wrong: dict[str, list[str]] = {OUTSIDE: [], LINKS: [], MISSING: [], CHANGED: []}
    for name, digest in digests.items():
        path = Path(name)
        if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
            wrong[OUTSIDE].append(name)
        elif links & {path, *path.parents}:
            wrong[LINKS].append(name)
        elif not (directory / path).is_file():
            wrong[MISSING].append(name)
        elif path.suffix != ".md":  # you may edit a model card
            try:
                wrong[CHANGED] += [name] * (digest_file(directory / path) != digest)
            except OSError as error:
                wrong[CHANGED].append(f"{name} (cannot be read: {error.strerror})")
    unwanted = {
        "not written by the stage": sorted({path.as_posix() for path in there} - {*digests, MANIFEST}),
        "not safetensors: rlhf does not read them, and programs that do may run code in them": [
            path.as_posix() for path in there if path.suffix.lower() in NOT_SAFETENSORS
        ],
        "Python code, which rlhf does not run": [path.as_posix() for path in there if path.suffix == ".py"],
    }
    for result, found in ((problem, wrong), (warning, unwanted)):
        yield from (result(stage, f"{directory}: {what}: {names(items)}") for what, items in found.items() if items)


def inputs(directory: Path, manifest: Manifest) -> Result:
    """Check whether the data and inputs of a stage are unchanged."""
    stage = manifest.stage
    try:
        config = load_stage_config(stage, directory / "config.yaml")
    except ConfigError:
        why = "this version of rlhf cannot read its config.yaml, so it is unknown whether it is stale"
        return warning(stage, why)
    try:
        words = what_changed(config, manifest.identity, directory.absolute().parent)
    except OSError as error:
        return warning(stage, f"its data or inputs cannot be read ({error})")
    return warning(stage, words) if words else ok(stage, "its data and inputs are unchanged")


def unfinished(root: Path, stage: str) -> Iterator[Result]:
    """Check for a running process, an interrupted run and its checkpoints, and files left by a killed process."""
    directory, partial = checkpoints_directory(root, stage), partial_directory(root, stage)
    old, lock = set_aside_directory(root, stage), lock_path(root, stage)
    is_lock = lock.is_file() and not lock.is_symlink()
    owner = owner_of(root, stage) if is_lock else None
    if owner is not None:
        yield ok(stage, f"running: {owner}")
    elif is_lock:
        yield ok(stage, f"{lock}: left by a process that has ended; the next run uses it")
    elif lock.exists() or lock.is_symlink():
        yield problem(stage, f"{lock}: is not a lock file of rlhf. Remove it")
    if directory.is_dir() and (partial.is_dir() or owner is not None):
        yield from _checkpoints(directory, stage, is_running=owner is not None)
    elif directory.is_dir():
        yield warning(stage, f"{directory}: left by a finished run, no longer needed. Remove it")
    if owner is None and partial.is_dir() and not list_checkpoints(directory):
        left = "left by a run that was stopped before its first checkpoint; the next run starts over"
        yield warning(stage, f"{partial}: {left}")
    if old.is_dir() and stage_directory(root, stage).exists():
        yield warning(stage, f"{old}: left by an interrupted publication; the next run removes it")
    elif old.is_dir():
        left = "the finished stage, set aside by an interrupted publication; the next run restores it"
        yield warning(stage, f"{old}: {left}")


def _checkpoints(directory: Path, stage: str, *, is_running: bool) -> Iterator[Result]:
    good, damaged = [], []
    for checkpoint in list_checkpoints(directory):
        wrong = _damage(checkpoint)
        if wrong is None:
            good.append(checkpoint.name)
        elif not is_running or checkpoint.exists():  # else the running process removed it meanwhile
            damaged.append(f"{checkpoint.name} ({wrong})")
    if good and not is_running:
        resumes = f"interrupted; the next run resumes from {good[-1]}, {len(good)} good checkpoints in {directory}"
        yield ok(stage, resumes)
    elif good:
        yield ok(stage, f"{len(good)} good checkpoints, the newest {good[-1]}")
    if damaged and good:
        yield warning(stage, f"{directory}: damaged, not used: {names(damaged)}")
    elif damaged:
        yield problem(stage, f"{directory}: every checkpoint is damaged, the next run starts over: {names(damaged)}")
    left = sorted(path.name for path in directory.glob(".*"))
    if left and not is_running:
        yield warning(stage, f"{directory}: temporary files, not used: {names(left)}")


def _damage(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be used, or None. Opens regular files only, and follows no link."""
    if checkpoint.is_symlink() or not checkpoint.is_dir():
        return "not a folder"
    for path in sorted(checkpoint.iterdir()):
        if path.is_symlink() or not path.is_file():
            return f"{path.name} is not a regular file"
    return damage_of(checkpoint)
