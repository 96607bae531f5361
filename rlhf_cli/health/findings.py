"""What can be wrong with a run: rules, and what they find. Does not import torch.

A rule is a generator. It reads what is known of a run and yields a sign for each thing that it sees. The same kind of
rule serves while a run is running (`iterations.py` and `trends.py` read a `History` and yield one sign at most) and
after it (`sft_causes.py`, `rm_causes.py` and `ppo_causes.py` read an `Evidence`). What health said while the run was
running is evidence for the latter.

To add a rule for `rlhf diagnose`, write the function with its decorator, a section in docs/diagnose.md and a run in
tests/support/faults.py that shows it. A rule for a running stage is also named at the end of its file, and needs a row
in docs/health.md and a test in tests/health/test_running.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rlhf_cli.config.stage import STAGES


class Sign(NamedTuple):
    """One thing that a rule sees."""

    weight: float
    """While a run is running: a number above 0 that grows as the problem becomes worse. After it: 2 if the sign shows
    the cause by itself, 1 if it only supports it, as a setting that differs."""
    text: str
    """What was found with its numbers, the limit and the likely cause, in full sentences on one line."""


Signs = Iterator[Sign]


def shows(text: str) -> Sign:
    """A sign that shows a cause by itself."""
    return Sign(2, text)


def supports(text: str) -> Sign:
    """A sign that only supports a cause."""
    return Sign(1, text)


@dataclass(frozen=True)
class Rule:
    """One thing that can be wrong, and how to see it."""

    signs: Callable[[Any], Signs]
    advice: str
    """What to try, with config keys, on one line. While a run is running, names in braces are replaced by those parts
    of `History.advice`."""
    severity: Literal["stop", "warning"] = "warning"
    """`stop` for what is wrong whatever the data, `warning` for what may be intended."""
    stage: str = "ppo"
    """The stage whose data or config has to change."""
    explains: tuple[str, ...] = ()
    """The causes that may be consequences of this one, besides those in `ranking.OUTCOMES`. They are named after it."""
    needs: tuple[str, ...] = ()
    """Figures or texts of which at least one is needed to judge this cause."""
    wants: str = ""
    """What gives those figures."""

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.signs.__name__

    @property
    def title(self) -> str:
        """What is wrong, as a short sentence: the docstring of a cause."""
        return self.signs.__doc__ or ""


def rule(advice: str, **settings: Any) -> Callable[[Callable[[Any], Signs]], Rule]:
    """Make a function a rule; `settings` are fields of `Rule`."""
    return lambda signs: Rule(signs, advice, **settings)


def rules_of(names: Mapping[str, Any]) -> tuple[Rule, ...]:
    """The rules of a file, in its order, from its globals()."""
    return tuple(value for value in names.values() if isinstance(value, Rule))


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a run, or may be."""

    name: str
    severity: Literal["stop", "warning", "likely", "sure"]
    """How bad it is while the run is running; how sure it is after the run."""
    message: str
    """What is wrong, on one line."""
    advice: str
    """What to try, with config keys, on one line."""


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
