"""`rlhf diagnose`: see `rlhf_cli.diagnosis.diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhf_cli.commands.options import WhereToRun


def diagnose(
    directory: Annotated[Path, typer.Argument(help="A run's directory, for example artifacts/support.")],
    files_only: Annotated[
        bool, typer.Option("--files-only", help="Read files only: load no model and call no judge.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    device: WhereToRun = "auto",
) -> None:
    """Name the stage of a run that is at fault, with the evidence and what to try. Nothing is trained.

    Exit code 0: no fault was found. 2: at least one was named, or the directory is wrong.
    """
    from rlhf_cli.diagnosis.diagnose import diagnose as examine

    examine(directory, device=device, files_only=files_only, as_json=as_json)
