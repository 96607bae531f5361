"""What can be wrong with a run: rules, and what they find. Does not import torch.

The same kind of rule serves while a run is running (`ppo_rules.py` reads a `History`) and after it (`causes.py` reads
an `Evidence`, in which is also what health said while the run was running).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_cli.config.stage import STAGES

Seen = tuple[float, str]
"""How much a sign weighs, and sentences on one line: what was found, its numbers, the limit and the likely cause.

While a run is running, the weight is a number above 0 that grows as the problem becomes worse. After it: 2 if the sign
shows the cause by itself, 1 if it only supports it.
"""
Signs = Callable[[Any], Iterator[Seen]]
"""Yields the signs of a rule in a run. While a run is running, the first counts."""


@dataclass(frozen=True)
class Rule:
    """One thing that can be wrong, and how to see it."""

    name: str
    advice: str
    """What to try, with config keys, on one line. While a run is running, names in braces are replaced by those parts
    of `History.advice`."""
    signs: Signs
    severity: Literal["stop", "warning"] = "warning"
    """`stop` for what is wrong whatever the data, `warning` for what may be intended."""
    title: str = ""
    """What is wrong, as a short sentence, if this is a cause."""
    stage: str = "ppo"
    """The stage whose data or config has to change."""
    explains: tuple[str, ...] = ()
    """The causes that may be consequences of this one, besides those in `ranking.OUTCOMES`. They are named after it."""
    needs: tuple[str, ...] = ()
    """Figures or texts of which at least one is needed to judge this cause."""
    wants: str = ""
    """What gives those figures."""


def rule(rules: list[Rule], advice: str, **fields: Any) -> Callable[[Signs], Signs]:
    """Add a function to `rules` as a rule with its name; its docstring is the title, if it has one."""

    def add(signs: Signs) -> Signs:
        rules.append(Rule(signs.__name__, advice, signs, title=signs.__doc__ or "", **fields))
        return signs

    return add


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a run, or may be: what is wrong and what to try, on one line each."""

    name: str
    severity: Literal["stop", "warning", "likely", "sure"]
    """How bad it is while the run is running; how sure it is after the run."""
    message: str
    advice: str


@dataclass(frozen=True)
class Cause(Finding):
    """A cause that `rlhf diagnose` names."""

    stage: str
    evidence: tuple[str, ...]
    explained_by: str | None = None
    """The name of another cause that may have led to this one."""

    @property
    def order(self) -> tuple[bool, int]:
        """Sure ones come first, then earlier stages."""
        return self.severity != "sure", STAGES.index(self.stage)
