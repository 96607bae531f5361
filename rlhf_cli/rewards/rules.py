"""Rewards by rule, without a model or code: length, regular expressions, answers, repetition, JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, assert_never

import regex
import torch

from rlhf_cli.algorithms.statistics import distinct_n
from rlhf_cli.config.rewards import AnswerReward, JSONReward, LengthReward, RegexReward, RepetitionReward, RuleReward
from rlhf_cli.rewards.base import RewardSource, Samples, columns_of, shown

MARK = "####"
"""GSM8K writes this before the answer."""
NUMBER = re.compile(
    r"(?P<minus>(?<![\w)\]])[-−])?"  # a minus sign, unless it is between two numbers or words
    r"(?:[$€£¥] ?(?P<inner_minus>[-−])?)?"
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?P<exponent>[eE][-+]?[0-9]{1,3}(?![0-9]))?"
    r"(?:/(?P<divisor>[0-9]+(?:\.[0-9]+)?))?"
)
MAX_NUMBER_LENGTH = 1000
"""Longest number in characters that is read; Python takes quadratic time for longer ones."""


# ------------------------------------------------------------------------------------------- answers


def number_of(match: re.Match[str]) -> Fraction | None:
    """The exact value of a match of NUMBER; None for a division by 0 and for an overlong number.

    >>> [str(number_of(m)) for m in NUMBER.finditer("-$1,200.50, 3/4, 1e3 and 2/0")]
    ['-2401/2', '3/4', '1000', 'None']
    """
    if len(match.group()) > MAX_NUMBER_LENGTH:
        return None
    divisor = Fraction(match["divisor"] or 1)
    if divisor == 0:
        return None
    value = Fraction(match["digits"].replace(",", "") + (match["exponent"] or "")) / divisor
    return -value if match["minus"] or match["inner_minus"] else value


def last_number(text: str) -> Fraction | None:
    """The exact value of the last number in a text, a fraction being one; None if there is no number.

    Thousands separators, currency signs and a final full stop are ignored. A minus sign between two numbers or words
    does not count.

    >>> [str(last_number(text)) for text in ("It costs $1,234.50.", "10-3", "x = -3", "1/2", ".5 kg", "none")]
    ['2469/2', '3', '-3', '1/2', '1/2', 'None']
    """
    matches = list(NUMBER.finditer(text))
    return number_of(matches[-1]) if matches else None


def numeric_answer(text: str) -> Fraction | None:
    """The number after the last `####` with one on its line, else the last number of the text; None without any.

    >>> str(numeric_answer("3 + 4 = 7. #### 7 apples for 2")), str(numeric_answer("So 3, or rather 4."))
    ('7', '4')
    """
    for part in reversed(text.split(MARK)[1:]):
        match = NUMBER.search(part.split("\n", 1)[0])
        if match is not None:
            return number_of(match)
    return last_number(text)


def text_answer(text: str) -> str:
    """The rest of the line after the last `####`, or the whole text without one; stripped.

    >>> text_answer("Because. #### Paris \\nNext"), text_answer(" Paris ")
    ('Paris', 'Paris')
    """
    _, mark, after = text.rpartition(MARK)
    return (after.split("\n", 1)[0] if mark else text).strip()


def answer_of(text: str, rule: AnswerReward) -> Fraction | str | None:
    """The answer in a response; None if there is none.

    With a pattern it is the first group of its last match, or the whole match if the pattern has no group. Raises
    TimeoutError after `timeout_s` seconds: some patterns take exponential time.

    >>> rule = AnswerReward(type="answer_match", column="x", pattern="answer is (.+?)[.]")
    >>> answer_of("The answer is 3. No, the answer is 4.", rule)
    Fraction(4, 1)
    """
    if rule.pattern is None:
        return numeric_answer(text) if rule.mode == "numeric" else text_answer(text)
    found = None
    for match in regex.finditer(rule.pattern, text, timeout=rule.timeout_s):
        found = (match.group(1) if match.re.groups else match.group()) or ""
    if found is None:
        return None
    return last_number(found) if rule.mode == "numeric" else found.strip()


def truth_of(row: Mapping[str, Any], column: str, mode: Literal["numeric", "exact"]) -> Fraction | str:
    """The correct answer in a row's column; raises ValueError if there is none.

    >>> truth_of({"answer": "5 - 3 = 2 #### 2"}, "answer", "numeric"), truth_of({"answer": 2}, "answer", "exact")
    (Fraction(2, 1), '2')
    """
    if column not in row:
        raise ValueError(f"its row has no column {column!r}; it has {columns_of(row)}")
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{column!r} is {shown(repr(value))}, it must be a number or text")
    answer = numeric_answer(str(value)) if mode == "numeric" else text_answer(str(value))
    if answer is None or answer == "":
        needed = "a number" if mode == "numeric" else "text"
        raise ValueError(f"{column!r} is {shown(repr(value))}, it must contain {needed}")
    return answer


# --------------------------------------------------------------------------------- repetition and JSON


def repeated(items: Sequence[Hashable], n: int) -> float:
    """The fraction of n-grams that repeat an earlier one.

    ``1 - number of distinct n-grams / number of n-grams``

    0 without a repetition and for fewer than n items. This is seq-rep-n of Welleck et al. 2019 (arXiv 1908.04319).

    >>> repeated("a b a b a".split(), 2)  # ab ba ab ba: two of four are distinct
    0.5
    >>> repeated(["a"], 2)
    0.0
    """
    return 1.0 - distinct_n([items], n) if len(items) >= n else 0.0


def is_json(text: str, required: Sequence[str] = ()) -> bool:
    """Is a text valid JSON (RFC 8259: no NaN, no comments) and, if keys are required, an object with all of them?

    >>> is_json('{"a": 1}', ["a"]), is_json('{"a": 1}', ["b"]), is_json("[1, 2]"), is_json("[1, 2"), is_json("NaN")
    (True, False, True, False, False)
    """
    try:
        # Numbers are kept as text: converting a very long one takes quadratic time.
        value = json.loads(text, parse_constant=_no_constant, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return not required or (isinstance(value, dict) and all(key in value for key in required))


def _no_constant(name: str) -> None:
    raise ValueError(name)


# -------------------------------------------------------------------------------------------- source


@dataclass(kw_only=True)
class RuleSource(RewardSource):
    rule: RuleReward

    def score(self, samples: Samples) -> torch.Tensor:
        scores = torch.full((len(samples.responses),), math.nan)
        for i in range(len(samples.responses)):
            try:
                scores[i] = self.of_row(samples, i)
            except TimeoutError as error:
                self.fail(samples, [i], "its pattern took longer than timeout_s on this response", error)
            except ValueError as error:
                self.fail(samples, [i], str(error), error)
        return scores

    def of_row(self, samples: Samples, i: int) -> float:
        """The score of one response; raises TimeoutError or ValueError if it cannot be computed."""
        rule, text = self.rule, samples.responses[i]
        if isinstance(rule, LengthReward):
            shortest, longest = rule.bounds
            length = len(text) if rule.unit == "characters" else len(units(samples, i, rule.unit))
            # For a single length this is the length term that L1 adds to correctness, and the reward's weight is its
            # alpha (Aggarwal and Welleck 2025, arXiv 2503.04697).
            return float(min(length - shortest, 0 if longest is None else longest - length, 0))
        if isinstance(rule, RegexReward):
            match = regex.fullmatch if rule.full else regex.search
            return float(match(rule.pattern, text, timeout=rule.timeout_s) is not None)
        if isinstance(rule, AnswerReward):
            return float(answer_of(text, rule) == truth_of(samples.rows[i], rule.column, rule.mode))
        if isinstance(rule, RepetitionReward):
            return 0.0 - repeated(units(samples, i, rule.unit), rule.n)
        if isinstance(rule, JSONReward):
            return float(is_json(text, rule.required))
        assert_never(rule)

    @property
    def column(self) -> str | None:
        return self.rule.column if isinstance(self.rule, AnswerReward) else None

    def check_row(self, row: Mapping[str, Any]) -> None:
        assert isinstance(self.rule, AnswerReward), "no other rule reads a column"
        truth_of(row, self.rule.column, self.rule.mode)


def units(samples: Samples, i: int, unit: Literal["words", "tokens"]) -> Sequence[Hashable]:
    """The words of a response, or its token ids, including EOS."""
    return samples.response_ids[i] if unit == "tokens" else samples.responses[i].split()
