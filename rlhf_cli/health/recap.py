"""The health findings of a whole run, from its `health.jsonl`. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from rlhf_cli.files import rows_of

HEALTHY = "healthy"


@dataclass
class Seen:
    """One kind of finding in a run."""

    name: str
    steps: list[int] = field(default_factory=list)
    """The steps after which it held; 0 is before the first one."""
    message: str = ""
    """Its latest message; several of one step, as of two weak reward models, are lines."""
    advice: str = ""
    """What to try, by that message."""

    def stretches(self) -> list[tuple[int, int]]:
        """The first and the last of consecutive steps.

        >>> Seen("empty", [2, 3, 4, 8]).stretches()
        [(2, 4), (8, 8)]
        """
        groups = [list(group) for _, group in groupby(enumerate(self.steps), lambda one: one[1] - one[0])]
        return [(group[0][1], group[-1][1]) for group in groups]

    def when(self, unit: str) -> str:
        """The steps in words.

        >>> Seen("kl_far", [3]).when("iteration"), Seen("empty", [2, 5]).when("step"), Seen("empty", [0]).when("step")
        ('iteration 3', '2 steps (2 to 5)', 'before step 1')
        """
        steps = [step for step in self.steps if step] or self.steps  # 0 is not a step
        return at(steps[0], unit) if len(steps) == 1 else f"{len(steps)} {unit}s ({steps[0]} to {steps[-1]})"


def unit_of(stage: str) -> str:
    """What a step of a stage is called."""
    return "iteration" if stage == "ppo" else "step"


def at(step: int, unit: str) -> str:
    """A step in words; 0 is before the first one."""
    return f"{unit} {step}" if step else f"before {unit} 1"


def state_in(line: str) -> str:
    """The part of a health line before its figures.

    >>> state_in("empty (since iteration 3): score 0.5")
    'empty (since iteration 3)'
    """
    return line.partition(": ")[0]


def names_in(line: str) -> list[str]:
    """The names of the findings that hold, from a health line.

    >>> names_in("approx_kl, empty (since iteration 3): score 0.5"), names_in("healthy")
    (['approx_kl', 'empty'], [])
    """
    return [name.partition(" ")[0] for name in state_in(line).split(", ") if name != HEALTHY]


def findings_of(directory: Path) -> list[Seen]:
    """The kinds of findings of the run that writes to a stage's directory, in the order in which they appeared."""
    seen: dict[str, Seen] = {}
    for row in rows_of(directory / "health.jsonl"):
        named = [one["name"] for one in row["findings"]]
        for name in dict.fromkeys([*named, *names_in(row["line"] or HEALTHY)]):
            one = seen.setdefault(name, Seen(name))
            if row["step"] not in one.steps[-1:]:
                one.steps.append(row["step"])
            if said := [each for each in row["findings"] if each["name"] == name]:
                one.message, one.advice = "\n".join(each["message"] for each in said), said[-1]["advice"]
    return list(seen.values())
