"""What can be wrong with a run: the rows of the tables of rules, and what they find. Does not import torch.

A row has a name, what to try, and signs. The same kind of row serves while a run is running (`ppo_rules.py` reads a
`History`) and after it (`causes.py` reads an `Evidence`, in which is also what health said while the run was running).

A sign is a condition and a sentence. In both, `sft.loss_end` stands for ``run["sft.loss_end"]``; an unknown figure is
NaN, so comparisons with it are false. In the sentence, `{limit}` is the first number of the condition:

>>> sign = shows("sft.loss > 1.5 * sft.loss_end + 0.05", "The held-out loss is {sft.loss:.2f} (limit {limit:g} times).")
>>> list(sign({"sft.loss": 0.9, "sft.loss_end": 0.5}))
[(2, 'The held-out loss is 0.90 (limit 1.5 times).')]

A sign that needs more than that is a generator function of the run.

A new cause of `rlhf diagnose` also needs a section in docs/diagnose.md and a run in tests/support/faults.py that shows
it. A new rule for a running stage needs a row in docs/health.md and a test in tests/health/test_running.py.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from rlhf_cli.config.stage import STAGES

FIGURE = re.compile(r"(?<![\w.'])(?:(?:sft|rm|ppo)\.\w[\w.]*|[a-z]+/\w+(?:\.\w+)?)")
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-\d+)?")
FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")

Seen = tuple[float, str]
"""What a sign saw, and how much it weighs.

While a run is running, the weight is a number above 0 that grows as the problem becomes worse. After it: 2 if the sign
shows the cause by itself, 1 if it only supports it, as a setting that differs. The text is full sentences on one line,
with what was found, its numbers, the limit and the likely cause.
"""
Signs = Callable[[Any], Iterator[Seen]]
"""A function of the run that yields each thing that it sees."""


@dataclass(frozen=True)
class Sign:
    """A condition, the sentence if it holds, and the weight, all of them expressions in figures of the run."""

    when: str
    text: str
    weight: str

    def __call__(self, run: Any) -> Iterator[Seen]:
        """What the sign sees in a run: one thing or nothing."""
        value = partial(value_of, run=run, limit=first_number(self.when))
        if value(self.when):
            yield value(self.weight), FIELD.sub(lambda field: format(value(field[1]), field[2] or ""), self.text)


@functools.cache
def first_number(condition: str) -> float | None:
    """The limit in a condition."""
    number = NUMBER.search(FIGURE.sub("", condition))
    return float(number[0]) if number else None


def value_of(expression: str, **names: Any) -> Any:
    """The value of an expression in figures of `run`."""
    return _compiled(expression)(names)


@functools.cache
def _compiled(expression: str) -> Callable[[Mapping[str, Any]], Any]:
    """A function of the names in an expression, which has the notation of Jinja."""
    import jinja2

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    environment.globals.update(abs=abs, max=max, min=min, len=len, repr=repr, words=str.split, strip=str.strip)
    return environment.compile_expression(FIGURE.sub(r"run['\g<0>']", expression), undefined_to_none=False)


def shows(when: str, text: str) -> Sign:
    """A sign that shows a cause by itself."""
    return Sign(when, text, "2")


def supports(when: str, text: str) -> Sign:
    """A sign that only supports a cause."""
    return Sign(when, text, "1")


def said(weight: float, *names: str) -> Signs:
    """The messages of these health findings as signs, where the run had them."""
    return lambda run: ((weight, text) for text in run.said(*names))


@dataclass(frozen=True)
class Rule:
    """One thing that can be wrong, and how to see it."""

    name: str
    advice: str
    """What to try, with config keys, on one line. While a run is running, names in braces are replaced by those parts
    of `History.advice`."""
    signs: tuple[Signs, ...]
    """While a run is running, the first that sees something counts."""
    severity: Literal["stop", "warning"] = "warning"
    """`stop` for what is wrong whatever the data, `warning` for what may be intended."""
    title: str = ""
    """What is wrong, as a short sentence, if this is a cause."""
    stage: str = "ppo"
    """The stage whose data or config has to change."""
    given: str = "true"
    """The condition under which this cause is looked for."""
    explains: tuple[str, ...] = ()
    """The causes that may be consequences of this one, besides those in `ranking.OUTCOMES`. They are named after it."""
    needs: tuple[str, ...] = ()
    """Figures or texts of which at least one is needed to judge this cause."""
    wants: str = ""
    """What gives those figures."""


def table(text: str, names: Mapping[str, Any], **settings: Any) -> tuple[Rule, ...]:
    """The rows that a text describes, with empty lines between them; `settings` are other fields of all of them.

    `$name` stands for names["name"]. A row begins with its name and, for a cause, its title. Then come what to `try`,
    the condition that must be `given` for a cause, and the signs: a condition that `shows` the cause or `supports` it,
    or `when` a rule finds something, with the sentence below and the `size` of the problem; what health `said`, with
    its weight; a `sign` that is a function of names, with its arguments. Longer lines go on behind two spaces,
    sentences behind four.

    >>> text = "slow: It is slow.\\ntry: Wait\\nshows: sft.seconds > $MOST\\n    It took {sft.seconds} s."
    >>> (row,) = table(text, {"MOST": 9}, stage="sft")
    >>> row.name, row.title, row.advice, list(row.signs[0]({"sft.seconds": 10}))
    ('slow', 'It is slow.', 'Wait', [(2, 'It took 10 s.')])
    """
    while "$" in text:
        text = re.sub(r"\$(\w+)", lambda found: str(names[found[1]]), text)
    return tuple(_row(block, names, settings) for block in text.strip().split("\n\n"))


def _row(block: str, names: Mapping[str, Any], settings: Mapping[str, Any]) -> Rule:
    lines: list[list[str]] = []
    for line in block.splitlines():
        if line.startswith("    "):
            lines[-1][2] += " " * bool(lines[-1][2]) + line.strip()
        elif line.startswith("  "):
            lines[-1][1] += " " + line.strip()
        elif not line.startswith("#"):
            key, _, value = line.partition(": ")
            lines.append([key, value, ""])
    (name, title, _), *others = lines
    signs: list[Signs] = []
    fields: dict[str, Any] = {}
    for key, value, sentence in others:
        words = value.split()
        match key:
            case "shows" | "supports":
                signs.append((shows if key == "shows" else supports)(value, sentence))
            case "when":
                signs.append(Sign(value, sentence, "1"))
            case "size":
                assert isinstance(signs[-1], Sign)
                signs[-1] = replace(signs[-1], weight=value)
            case "above":
                signs += names["above"](*words, sentence)
            case "said":
                signs.append(said(int(words[0]), *words[1:]))
            case "sign":
                signs.append(partial(names[words[0]], *words[1:]))
            case "explains" | "needs":
                fields[key] = tuple(words)
            case _:
                fields["advice" if key == "try" else key] = value
    return Rule(name, signs=tuple(signs), title=title, **fields, **settings)


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
