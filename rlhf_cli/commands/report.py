"""`rlhf report`: see `rlhf_cli.report.page`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhf_cli.printing import say
from rlhf_cli.report.page import write_report


def report(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Directories of runs.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="The HTML file; report.html in the first directory by default.")
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Also write the main curves as a PNG.")] = None,
) -> None:
    """Write a page about one or several runs: curves, figures, samples, findings."""
    path = out or directories[0] / "report.html"
    write_report(directories, path, png)
    say(path)
    if png is not None:
        say(png)
