"""What can be wrong with a run, and the order in which `rlhf diagnose` names it. Does not import torch.

A cause has a rule: a function that looks at the evidence and returns signs. A cause is named if the weights of its
signs add up to NAMED. A sign of weight 2 shows the cause by itself. One of weight 1 only supports it: a setting that
differs is not a fault by itself.

To add a cause: write the rule in `rules_<stage>.py`, add a `Cause` to the tuple at its end, a section to
docs/diagnose.md, and a run that shows it to tests/support/faults.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rlhf_cli.config.stage import STAGES
from rlhf_cli.diagnosis.evidence import Evidence

NAMED = 2
"""The weight at which a cause is named."""
SURE = 3
"""The weight from which a cause is called sure instead of likely."""


@dataclass(frozen=True)
class Sign:
    """One piece of evidence for a cause."""

    weight: Literal[1, 2]
    """2 if it shows the cause by itself."""
    text: str
    """What was found, with its numbers and the limit, in full sentences."""


@dataclass(frozen=True)
class Cause:
    """One thing that can be at fault."""

    name: str
    stage: Literal["sft", "rm", "ppo"]
    """The stage whose data or config has to change."""
    title: str
    """What is wrong, as a short sentence."""
    signs: Callable[[Evidence], list[Sign]]
    advice: str
    """What to try, with config keys."""
    explains: tuple[str, ...] = ()
    """The causes that may be consequences of this one: they are named after it."""
    needs: tuple[str, ...] = ()
    """Figures or texts of which at least one is needed to judge this cause."""
    wants: str = ""
    """What gives those figures."""


@dataclass(frozen=True)
class Finding:
    """A cause that was named, with its evidence."""

    cause: Cause
    signs: list[Sign]
    explained_by: str | None = None
    """The name of another named cause that may have led to this one."""

    @property
    def weight(self) -> int:
        return sum(sign.weight for sign in self.signs)

    @property
    def certainty(self) -> Literal["sure", "likely"]:
        return "sure" if self.weight >= SURE else "likely"


def rank(causes: Sequence[Cause], evidence: Evidence) -> list[Finding]:
    """The causes that the evidence shows, first the one to mend first.

    A cause that another named cause explains comes after it. Otherwise the surer one comes first, and of equally sure
    ones that of the earlier stage.
    """
    found = [Finding(cause, cause.signs(evidence)) for cause in causes if cause.stage in evidence.stages]
    named = sorted(
        (finding for finding in found if finding.weight >= NAMED),
        key=lambda finding: (finding.certainty != "sure", STAGES.index(finding.cause.stage)),
    )
    first = [finding for finding in named if not any(finding.cause.name in other.cause.explains for other in named)]
    rest = [finding for finding in named if finding not in first]
    return first + [replace(finding, explained_by=_reason(finding, first + rest)) for finding in rest]


def _reason(finding: Finding, named: Sequence[Finding]) -> str:
    """The first of the named causes that explains a finding."""
    return next(other.cause.name for other in named if finding.cause.name in other.cause.explains)


def not_judged(causes: Sequence[Cause], evidence: Evidence) -> list[Cause]:
    """The causes of the run's stages that need a figure which the run does not have."""
    known = evidence.figures.keys() | evidence.texts.keys()
    return [
        cause
        for cause in causes
        if cause.stage in evidence.stages and cause.needs and not known.intersection(cause.needs)
    ]
