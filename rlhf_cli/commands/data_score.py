"""`rlhf data score`: a language model that is asked with a template scores each answer, or compares two.

`rlhf_cli.commands.output` describes the files.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any, Literal

import typer

from rlhf_cli.commands.options import OutputOptions, Source, SourceOptions, Template
from rlhf_cli.commands.output import (
    Dropped,
    Outcome,
    Output,
    data_digest,
    each_item,
    items,
    prompt_column,
    refuse_own_output,
    require_answer,
    text_of,
    with_columns,
)
from rlhf_cli.commands.writer import (
    Failure,
    MaxNewTokens,
    Request,
    Temperature,
    Writer,
    WriterOptions,
    read_template,
)
from rlhf_cli.data.records import Record, fill
from rlhf_cli.errors import ConfigError, DataError
from rlhf_cli.report.progress import Display

Ties = Literal["drop", "keep"]
Verdict = Literal["first", "second"]

SCORE_TEMPLATE = """\
Rate the response to the request with a number from {min} to {max}. {min} is useless, wrong or harmful, {max} could \
not be better. How long it is and how sure it sounds do not count.

Request:
{prompt}

Response:
{response}

Answer with the number and nothing else.
"""
COMPARE_TEMPLATE = """\
Which of two responses to a request is better, A or B? How long they are, how sure they sound and which one comes \
first do not count.

Request:
{prompt}

Response A:
{a}

Response B:
{b}

Answer with the letter A or B and nothing else.
"""
NUMBER = re.compile(r"(?<![\w.,−])(?<!\d-)-?[0-9]++(?:[.,][0-9]++)*+(?![\w%])")
"""Numbers with sign and separators: 4, 3.5, -1, 1,000, 4,5; not the digits of GPT4, 5th or 80%."""
LETTER = re.compile(r"\b[AB]\b")


@dataclass(frozen=True)
class Unclear:
    """The last answer to a question, if the parser found nothing in any of them."""

    text: str


@dataclass(frozen=True)
class JudgeOptions(WriterOptions):
    """The judge: short answers that hardly vary."""

    temperature: Temperature = 0.2
    max_new_tokens: MaxNewTokens = 16


def data_score(
    path: Source,
    output: OutputOptions,
    writer: JudgeOptions,
    reading: SourceOptions,
    compare: Annotated[
        bool, typer.Option("--compare", help="Choose the better of two answers; asks in both orders.")
    ] = False,
    template: Template = None,
    lowest: Annotated[float, typer.Option("--min", help="The lowest score.")] = 0.0,
    highest: Annotated[float, typer.Option("--max", help="The highest score.")] = 5.0,
    attempts: Annotated[
        int, typer.Option("--attempts", min=1, help="Maximum requests until the answer has a score.")
    ] = 3,
    ties: Annotated[Ties, typer.Option("--ties", help="With --compare: keep scores both 0.5.")] = "drop",
) -> None:
    """Let a language model judge answers: a score for each, or the better of two."""
    # Without --compare each answer gets a number from --min to --max, both included, in the column `score` (`scores` if
    # the row has several answers). With it, rows of two answers become `chosen` and `rejected`; if the judge
    # contradicts itself in the other order, the row is a tie.
    source = reading.source(path)
    if not lowest < highest:
        raise ConfigError(f"--min {lowest:g} --max {highest:g}: --min must be below --max")
    needed = ["prompt", "a", "b"] if compare else ["prompt", "response"]
    text = read_template(template, needed) or (COMPARE_TEMPLATE if compare else SCORE_TEMPLATE)
    refuse_own_output(source, output.out)
    settings = {"compare": compare, "template": text, "attempts": attempts, "data": data_digest(source)}
    settings |= {"ties": ties} if compare else {"min": lowest, "max": highest}
    judge = _Comparison(text, ties, writer.model) if compare else _Scoring(text, lowest, highest, writer.model)
    display = Display("score", quiet=output.quiet)

    def read() -> Iterator[Record | Dropped]:
        return islice(items(source, "sft", reading.on_bad_row, judge.check), output.num)

    def answer(model: Writer, numbered: Sequence[tuple[int, Record]]) -> list[Outcome]:
        questions = [judge.questions(n, record) for n, record in numbered]
        answers = iter(ask(model, [q for some in questions for q in some], judge.parse, attempts))
        each = zip(numbered, questions, strict=True)
        return [judge.outcome(record, [next(answers) for _ in some]) for (_, record), some in each]

    with Output(output.out, {**settings, **writer.settings()}, restart=output.restart) as rows:
        each_item(rows, read, writer.open, answer, display, chunk=writer.chunk, only_missing=writer.server is not None)
        display.note(f"{rows.path}: {rows.num_rows} rows{rows.summary_of_dropped()}")
        judge.report(rows, display)
        rows.require_rows()


def ask(writer: Writer, questions: Sequence[Request], parse: Callable[[str], Any], attempts: int) -> list[Any]:
    """`parse` of the answer to each question, which is asked again with another draw while that is None.

    The result is a Failure for a request that failed, and Unclear if the last attempt was None.
    """
    results: list[Any] = [None] * len(questions)
    for attempt in range(attempts):
        left = [n for n, answer in enumerate(results) if answer is None or isinstance(answer, Unclear)]
        if not left:
            break
        requests = [replace(questions[n], counters=(*questions[n].counters, attempt)) for n in left]
        for n, answer in zip(left, writer.write(requests), strict=True):
            results[n] = answer
            if not isinstance(answer, Failure):
                parsed = parse(answer.text)
                results[n] = Unclear(answer.text) if parsed is None else parsed
    return results


class _Scoring:
    def __init__(self, template: str, lowest: float, highest: float, judge: str):
        self.template, self.lowest, self.highest, self.judge = template, lowest, highest, judge

    check = staticmethod(require_answer)

    def questions(self, number: int, record: Record) -> list[Request]:
        values = {"min": f"{self.lowest:g}", "max": f"{self.highest:g}", "prompt": record.prompt.strip()}
        texts = [fill(self.template, response=text.strip(), **values) for text in record.texts]
        return [Request.of(text, number, n) for n, text in enumerate(texts)]

    def parse(self, answer: str) -> float | None:
        return number_in(answer, self.lowest, self.highest)

    def outcome(self, record: Record, answers: list[Any]) -> Outcome:
        if unusable := _unusable(answers, enough=any(isinstance(answer, float) for answer in answers)):
            return unusable
        scores = [answer if isinstance(answer, float) else None for answer in answers]
        texts = [text_of(record, text) for text in record.texts]
        columns: dict[str, Any] = {"responses": texts, "scores": scores}
        if len(scores) == 1:
            columns = {"response": texts[0], "score": scores[0]}
        return with_columns(record, {"prompt": prompt_column(record), **columns, "judge": self.judge})

    def report(self, output: Output, display: Display) -> None:
        values: list[float | None] = []
        new: list[float] = []
        own: list[float] = []
        for row in output.rows():
            values += row["scores"] if "scores" in row else [row["score"]]
            before = row.get("score_before")
            if "score" in row and isinstance(before, int | float) and math.isfinite(before):
                new.append(row["score"])
                own.append(before)
        scores = [value for value in values if value is not None]
        if not scores:
            return
        missing = len(values) - len(scores)
        without = f", {missing} answers without a score (null)" if missing else ""
        display.note(f"{len(scores)} scores by {self.judge}, mean {statistics.fmean(scores):.3f}{without}")
        if len({*new}) > 1 and len({*own}) > 1:
            r = statistics.correlation(new, own)
            display.note(f"correlation with the {len(own)} scores of the input rows: {r:.2f}")


def number_in(answer: str, lowest: float, highest: float) -> float | None:
    """The first number in an answer that is from `lowest` to `highest`, or None.

    Numbers with a comma are skipped: 4,5 can mean four and a half or a list.

    >>> number_in("Score: 4/5", 0, 5), number_in("I would say 0.", 0, 5), number_in("10 of 10", 0, 5)
    (4.0, 0.0, None)
    """
    for number in NUMBER.findall(answer):
        if "," not in number and number.count(".") < 2 and lowest <= float(number) <= highest:
            return float(number) + 0.0  # turns -0.0 into 0.0
    return None


def letter_in(answer: str) -> Verdict | None:
    """Which of A and B an answer names, if exactly one of the two letters occurs as a word; else None.

    >>> letter_in("A"), letter_in("[[B]]"), letter_in("A is shorter, but B is right")
    ('first', 'second', None)
    """
    letters = set(LETTER.findall(answer))
    return None if len(letters) != 1 else "first" if letters == {"A"} else "second"


class _Comparison:
    def __init__(self, template: str, ties: Ties, judge: str):
        self.template, self.ties, self.judge = template, ties, judge

    def check(self, record: Record) -> None:
        if len(record.answers) != 2:
            raise DataError(f"{record.where}: the row has {len(record.answers)} answers, --compare needs exactly two")

    def questions(self, number: int, record: Record) -> list[Request]:
        texts = [text.strip() for text in record.texts]
        if texts[0] == texts[1]:
            return []
        orders = [fill(self.template, prompt=record.prompt.strip(), a=a, b=b) for a, b in (texts, texts[::-1])]
        return [Request.of(text, number, n) for n, text in enumerate(orders)]

    parse = staticmethod(letter_in)

    def outcome(self, record: Record, answers: list[Any]) -> Outcome:
        if not answers:
            return Dropped("both answers are the same text")
        if unusable := _unusable(answers, enough=all(isinstance(answer, str) for answer in answers)):
            return unusable
        verdicts = {"verdicts": answers}
        tie = answers[0] == answers[1]
        if tie and self.ties == "drop":
            return Dropped("tie", verdicts)
        texts = [text_of(record, text) for text in record.texts]
        best = 0 if answers[0] == "first" else 1
        columns: dict[str, Any] = {"chosen": texts[best], "rejected": texts[1 - best]}
        if not all(answer.ended for answer in record.answers):
            columns["ended"] = [record.answers[n].ended for n in (best, 1 - best)]
        if self.ties == "keep":
            # A list with scores can hold a tie, which the ranking loss skips.
            columns = {"responses": texts, "scores": [0.5, 0.5] if tie else [1.0 - best, float(best)]}
        return with_columns(record, {"prompt": prompt_column(record), **columns, "judge": self.judge, **verdicts})

    def report(self, output: Output, display: Display) -> None:
        seen, agree, ranked = Counter[tuple[Verdict, Verdict]](), 0, 0
        for row in output.rows():
            verdicts = tuple(row["verdicts"])
            seen[verdicts] += 1
            if "chosen_before" in row and verdicts[0] != verdicts[1]:
                ranked += 1
                agree += verdicts[0] == "first"  # in the first question the row's own choice comes first
        seen += Counter(tuple(drop["verdicts"]) for drop in output.drops() if "verdicts" in drop)
        if not (total := seen.total()):
            return
        first, second = seen["first", "first"], seen["second", "second"]
        same = total - first - second
        lines = [
            ("same answer both times", f"{same} ({same / total:.1%})"),
            ("ties, always the first position", f"{first} ({first / total:.1%})"),
            ("ties, always the second position", f"{second} ({second / total:.1%})"),
            # A pair without a tie gives each position one win.
            ("wins of the first position", f"{(first + same / 2) / total:.1%} (50% without position bias)"),
        ]
        if ranked:
            share = f"{agree} of {ranked} rows without ties ({agree / ranked:.1%})"
            lines.append(("agrees with the input rows", share))
        ties = "dropped" if self.ties == "drop" else "kept with scores of 0.5"
        display.block(f"{total} pairs compared by {self.judge}, ties {ties}", lines)


def _unusable(answers: Sequence[Any], *, enough: bool) -> Dropped | Failure | None:
    """Why the row cannot be written: the judge's answers are not `enough`, or the run must stop; else None."""
    failures = [answer for answer in answers if isinstance(answer, Failure)]
    if any(failure.fatal for failure in failures) or (failures and not enough):
        return max(failures, key=lambda failure: failure.fatal)
    if enough:
        return None
    unclear = next(answer for answer in answers if isinstance(answer, Unclear))
    return Dropped("no clear answer", {"answer": unclear.text[:200]})
