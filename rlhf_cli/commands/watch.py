"""`rlhf watch`: see `rlhf_cli.report.watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhf_cli.report import watch as screen


def watch(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Directories of runs.")],
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="Time between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print a single time.")] = False,
) -> None:
    """Show curves and the latest samples of runs in the terminal, until Ctrl-C."""
    screen.watch(directories, seconds=seconds, once=once)
