"""`rlhf diagnose`: name the stage at fault, with the evidence and what to try."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.text import Text

from rlhf_cli.console import Console
from rlhf_cli.diagnosis import rules_ppo, rules_rm, rules_sft
from rlhf_cli.diagnosis.causes import Cause, Finding, not_judged, rank
from rlhf_cli.diagnosis.evidence import Evidence, read_evidence
from rlhf_cli.errors import ArtifactError, EndedElsewhere
from rlhf_cli.printing import printable, say
from rlhf_cli.training.checkpoint_files import StageState, unfinished_stages

CAUSES: tuple[Cause, ...] = (*rules_sft.CAUSES, *rules_rm.CAUSES, *rules_ppo.CAUSES)
"""All causes, in the order of the stages."""
PAGE = "docs/diagnose.md"
COLOURS = {"sure": "red", "likely": "yellow"}


def diagnose(root: Path, *, device: str = "auto", files_only: bool = False, as_json: bool = False) -> None:
    """Print the stages that are not finished, then the causes that the run at `root` shows, the one to mend first.

    Raises EndedElsewhere with exit code 2 if there are causes, and ArtifactError for a stage that failed or was
    interrupted, and if the run has no figures yet.
    """
    unfinished = unfinished_stages(root)
    evidence = gather(root, device=device, files_only=files_only)
    findings = rank(CAUSES, evidence)
    skipped = not_judged(CAUSES, evidence)
    if as_json:
        say(json.dumps(_as_json(evidence, findings, skipped, unfinished), indent=2, ensure_ascii=False))
    else:
        _show(root, evidence, findings, skipped, unfinished)
    ended = [text for state, text in unfinished if state.name in ("failed", "interrupted")]
    if findings:
        raise EndedElsewhere(ArtifactError.exit_code)  # the findings are the message
    if ended:
        raise ArtifactError(f"{root}: not finished, see above. Run the same command again")


def gather(root: Path, *, device: str = "auto", files_only: bool = False) -> Evidence:
    """The evidence in the files of a run and, unless `files_only`, in forward passes of its finished stages."""
    evidence = read_evidence(root)
    if files_only or not evidence.finished:
        return evidence
    from rlhf_cli.diagnosis.probes import probe

    found, problems = probe(root, device)
    figures = {name: value for name, value in found.items() if not isinstance(value, str)}
    texts = {name: value for name, value in found.items() if isinstance(value, str)}
    return replace(evidence, figures=evidence.figures | figures, texts=evidence.texts | texts, problems=problems)


def _show(
    root: Path,
    evidence: Evidence,
    findings: Sequence[Finding],
    skipped: Sequence[Cause],
    unfinished: Sequence[tuple[StageState, str]],
) -> None:
    console = Console(soft_wrap=True)

    def show(text: str, first: str = "", rest: str = "", *, colour: str = "") -> None:
        lines = textwrap.fill(printable(text), console.width, initial_indent=first, subsequent_indent=rest)
        styled = Text(lines)
        if colour:
            styled.stylize(colour, len(first), len(first) + text.index(":"))
        console.print(styled)

    for _, text in unfinished:
        show(text, "", "  ", colour="yellow")
    count = len(CAUSES) - len(skipped)
    if not findings and unfinished:
        show(f"{root}: none of {count} causes shows so far; a run is judged when its three stages are finished")
    elif not findings:
        show(f"{root}: none of {count} causes shows ({PAGE}); `rlhf eval {root}` measures quality")
    for number, finding in enumerate(findings, 1):
        cause = finding.cause
        show(
            f"{cause.stage}, {finding.certainty}: {cause.title}",
            f"{number}. ",
            "   ",
            colour=COLOURS[finding.certainty],
        )
        for sign in finding.signs:
            show(sign.text, "   - ", "     ")
        if finding.explained_by is not None:
            show(f"This may follow from {finding.explained_by}: mend that first.", "   ", "   ")
        else:
            show(f"Try: {cause.advice}.", "   ", "   ")
            show(f"See: {PAGE}, {cause.name}", "   ", "   ")
    shown = {sign.text for finding in findings for sign in finding.signs}
    for name, said in evidence.findings.items():
        if said["message"] not in shown:
            stage, _, name = name.partition(".")
            show(f"Health of {stage}, {name}: {said['message']}", "", "  ")
            show(f"To try: {said['advice']}", "  ", "  ")
    for problem in evidence.problems:
        show(f"Not measured: {problem}", "", "  ")
    for cause in skipped:
        show(f"Not judged: {cause.name}. It needs {cause.wants}.", "", "  ")


def _as_json(
    evidence: Evidence,
    findings: Sequence[Finding],
    skipped: Sequence[Cause],
    unfinished: Sequence[tuple[StageState, str]],
) -> dict[str, Any]:
    return {
        "unfinished": [text for _, text in unfinished],
        "causes": [
            {
                "name": finding.cause.name,
                "stage": finding.cause.stage,
                "title": finding.cause.title,
                "certainty": finding.certainty,
                "evidence": [sign.text for sign in finding.signs],
                "advice": finding.cause.advice,
                "explained_by": finding.explained_by,
            }
            for finding in findings
        ],
        "not_judged": [{"name": cause.name, "needs": cause.wants} for cause in skipped],
        "evidence": evidence.as_json(),
    }
