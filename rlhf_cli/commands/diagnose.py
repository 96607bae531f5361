"""`rlhf diagnose`: name the stage at fault, with the evidence and what to try."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from rlhf_cli.commands.options import Device
from rlhf_cli.errors import ArtifactError, EndedElsewhere
from rlhf_cli.printing import printable, say
from rlhf_cli.report.progress import Console

if TYPE_CHECKING:
    from rlhf_cli.health.evidence import Evidence
    from rlhf_cli.health.findings import Cause, Rule

PAGE = "docs/diagnose.md"
COLOURS = {"sure": "red", "likely": "yellow"}


def diagnose(
    directory: Annotated[Path, typer.Argument(help="A run's directory, for example artifacts/support.")],
    files_only: Annotated[
        bool, typer.Option("--files-only", help="Read files only: load no model and call no judge.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    device: Device = "auto",
) -> None:
    """Name the stage of a run that is at fault, with the evidence and what to try. Nothing is trained.

    Exit code 0: no fault was found. 2: at least one was named, or the directory is wrong.
    """
    from rlhf_cli.health.ranking import gather, not_judged, rank
    from rlhf_cli.run.state import unfinished_stages

    unfinished = unfinished_stages(directory)
    evidence = gather(directory, device=device, files_only=files_only)
    causes, skipped = rank(evidence), not_judged(evidence)
    lines = [text for _, text in unfinished]
    if as_json:
        names = {"message": "title", "severity": "certainty"}
        found = {
            "unfinished": lines,
            "causes": [{names.get(key, key): value for key, value in asdict(cause).items()} for cause in causes],
            "not_judged": [{"name": rule.name, "needs": rule.wants} for rule in skipped],
            "evidence": asdict(evidence),
        }
        say(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        show(directory, evidence, causes, skipped, lines)
    if causes:
        raise EndedElsewhere(ArtifactError.exit_code)  # the causes are the message
    if any(state.name in ("failed", "interrupted") for state, _ in unfinished):
        raise ArtifactError(f"{directory}: not finished, see above. Run the same command again")


def show(
    root: Path, evidence: Evidence, causes: Sequence[Cause], skipped: Sequence[Rule], unfinished: Sequence[str]
) -> None:
    from rlhf_cli.health.ranking import CAUSES

    console = Console(soft_wrap=True)

    def write(text: str, first: str = "", rest: str = "", *, colour: str = "") -> None:
        lines = textwrap.fill(printable(text), console.width, initial_indent=first, subsequent_indent=rest)
        styled = Text(lines)
        if colour:
            styled.stylize(colour, len(first), len(first) + text.index(":"))
        console.print(styled)

    for text in unfinished:
        write(text, "", "  ", colour="yellow")
    count = sum(cause.stage in evidence.stages for cause in CAUSES) - len(skipped)
    if not causes and unfinished:
        write(f"{root}: none of {count} causes shows so far; a run is judged when its three stages are finished")
    elif not causes:
        write(f"{root}: none of {count} causes shows ({PAGE}); `rlhf eval {root}` measures quality")
    for number, cause in enumerate(causes, 1):
        title = f"{cause.stage}, {cause.severity}: {cause.message}"
        write(title, f"{number}. ", "   ", colour=COLOURS[cause.severity])
        for text in cause.evidence:
            write(text, "   - ", "     ")
        if cause.explained_by is not None:
            write(f"This may follow from {cause.explained_by}: mend that first.", "   ", "   ")
        else:
            write(f"Try: {cause.advice}.", "   ", "   ")
            write(f"See: {PAGE}, {cause.name}", "   ", "   ")
    shown = {text for cause in causes for text in cause.evidence}
    for key, said in evidence.findings.items():
        if said["message"] not in shown:
            stage, _, name = key.partition(".")
            write(f"Health of {stage}, {name}: {said['message']}", "", "  ")
            write(f"To try: {said['advice']}", "  ", "  ")
    for problem in evidence.problems:
        write(f"Not measured: {problem}", "", "  ")
    for rule in skipped:
        write(f"Not judged: {rule.name}. It needs {rule.wants}.", "", "  ")
