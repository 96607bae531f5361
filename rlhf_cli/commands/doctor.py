"""`rlhf doctor`: checks this machine and, if given, the integrity of an artifact directory.

Nothing is modified. Each line is printed as soon as it is known, and torch is imported only when it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from rlhf_cli.artifacts import MANIFEST, stage_directory
from rlhf_cli.commands.doctor_artifacts import disk, finished, unfinished
from rlhf_cli.commands.doctor_machine import machine, versions
from rlhf_cli.commands.doctor_text import Line
from rlhf_cli.commands.status import runs_in
from rlhf_cli.config.stage import STAGES
from rlhf_cli.console import Console
from rlhf_cli.errors import ArtifactError
from rlhf_cli.printing import printable

COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


def doctor(
    directory: Annotated[
        Path | None, typer.Argument(help="A run's directory, or that of one stage, to check as well.")
    ] = None,
) -> None:
    """Check this machine and, if given, the integrity of a run's files."""
    if directory is not None and not directory.is_dir():
        raise ArtifactError(
            f"{directory}: no such directory. Give the `artifacts` directory of your configs, or a stage in it"
        )
    console = Console(soft_wrap=True)
    problems = 0
    for line in _lines(directory):
        problems += line.word == "problem"
        text = printable(line.text)
        console.print(Text.assemble((f"{line.word:8}", COLOURS[line.word]), f"{line.what:13} {text}"))
    if problems:
        raise ArtifactError(f"{problems} problem{'s' if problems > 1 else ''}, see above")


def _lines(directory: Path | None) -> Iterator[Line]:
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
        advice = (
            f"is not a run, but contains runs: {runs}. Give one of them"
            if runs
            else ("is not a run. Give the `artifacts` directory of your configs")
        )
        yield Line("problem", "artifacts", f"{directory}: {advice}")
