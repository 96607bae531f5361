"""`rlhf compare`: see `rlhf_cli.evaluation.between_runs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR DIR...", help="Runs that `rlhf eval` measured.")],
) -> None:
    """Compare the PPO policies of several runs on the same prompts."""
    from rlhf_cli.evaluation.between_runs import compare as show

    show(directories)
