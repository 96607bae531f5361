"""`rlhf data show`: rows as the model will see them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from rlhf_cli.artifacts import model_directory
from rlhf_cli.commands.data_report import is_unicode, new_console, printable
from rlhf_cli.config.data import Rows
from rlhf_cli.data.encode import (
    Limits,
    Skipped,
    encode_answers,
    encode_rows,
    fit,
    fit_prompt,
    last_run,
    require_chat_template,
    require_eos,
)
from rlhf_cli.data.encoders import NO_LIMITS
from rlhf_cli.data.formats import read_record, recognise
from rlhf_cli.data.reading import records
from rlhf_cli.data.records import Demonstration, Prompt, Record, shown_name
from rlhf_cli.data.report import Report
from rlhf_cli.data.sources import BadRow, Row, read_rows
from rlhf_cli.data.views import Seen, StageRows, demonstrations_of, see
from rlhf_cli.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEARNT = {"sft": "learnt", "rm pairs": "the answer that is judged", "rm scores": "the answer that is judged", "ppo": ""}
SHOWN_VALUE = 2000
"""Characters of a bad row's value that are shown."""

Piece = tuple[str, bool, bool]
"""Some text, is it learnt, is it a special token."""


class _Report(Report):
    """Keeps the bad rows for whoever shows them in their place."""

    def bad_row(self, data: Rows, side: str, error: DataError) -> None:  # noqa: ARG002
        self.bad.append(str(error))


def show_data(part: StageRows, tokenizer_path: str | None, *, num: int, row: int | None) -> None:
    """Print the first `num` training rows of a stage, or the one that messages call by the number `row`.

    Raises DataError for a row that can't be read, where it was asked for, and where there is no such row.
    """
    tokenizer = None
    if tokenizer_path is not None:
        from rlhf_cli.models.load import load_tokenizer

        tokenizer = load_tokenizer(model_directory(tokenizer_path))
        require_eos(tokenizer, tokenizer_path)
        if part.template == "chat":
            require_chat_template(tokenizer)
    screen = Screen(new_console(), part)
    if row is not None:
        screen.legend()
        _show(screen, _numbered(screen, part, row), part, tokenizer)
        return
    report = _Report()
    once = [source.model_copy(update={"weight": 1.0}) for source in part.rows.train]
    rows = part.rows.model_copy(update={"train": once})
    found = records(rows, part.purpose, report, prompt_words=part.prompt_words, role=part.role, only="train")
    for number, record in enumerate(islice((record for _, record in found), num)):
        if number == 0:
            for path, kind in report.kinds.items():
                screen.line(f"{path}: rows of {kind}, read for {part.purpose}")
            screen.legend()
        while report.bad:
            screen.bad(report.bad.pop(0))
        _show(screen, record, part, tokenizer)


def _numbered(screen: Screen, part: StageRows, number: int) -> Record:
    """The row whose place ends in `number`, of the first file that has one; a bad one is shown as it is."""
    for source in [*part.rows.train, *(part.rows.test or [])]:
        format_ = None
        for row in read_rows(source):
            if format_ is None and isinstance(row, Row):
                format_ = recognise(row, source, part.purpose)
            if row.where[len(row.where.rstrip("0123456789")) :] != str(number):
                continue
            if isinstance(row, BadRow) or format_ is None:
                raise DataError(f"{row.where}: {row.reason if isinstance(row, BadRow) else 'unknown keys'}")
            try:
                return read_record(row, format_, source, prompt_words=part.prompt_words)
            except DataError:
                for name, value in row.values.items():
                    text = value if isinstance(value, str) else repr(value)
                    more = f" ... ({len(text):,} characters)" if len(text) > SHOWN_VALUE else ""
                    screen.line(f"{shown_name(name)}: {text[:SHOWN_VALUE]}{more}")
                raise
    paths = ", ".join(source.path for source in part.rows.train)
    raise DataError(f"{paths}: no row is called by the number {number}. Blank lines of a file have a number and no row")


def _show(screen: Screen, record: Record, part: StageRows, tokenizer: PreTrainedTokenizerBase | None) -> None:
    try:
        seen = see(record, part, "train")
    except DataError as error:
        screen.bad(str(error))
        return
    if isinstance(seen, Skipped):
        screen.title(record.where, f"skipped: {seen.reason}")
        screen.body([(record.prompt, False, False)])
        for answer in record.answers:
            screen.body([(answer.text, False, False)])
    elif tokenizer is None:
        _show_texts(screen, seen, part)
    elif part.purpose == "ppo":
        _show_prompt(screen, seen, part, tokenizer)
    else:
        _show_answers(screen, seen, part, tokenizer)


def _show_texts(screen: Screen, seen: Seen, part: StageRows) -> None:
    if not seen.answers:
        screen.title(seen.record.where)
        screen.body([(seen.record.prompt, False, False)])
    for number, answer in enumerate(seen.answers):
        screen.title(seen.record.where, _name(seen, part, number))
        screen.body([("" if number else seen.record.prompt, False, False), (answer, True, False)])


def _show_prompt(screen: Screen, seen: Seen, part: StageRows, tokenizer: PreTrainedTokenizerBase) -> None:
    record, row = seen.record, seen.row
    assert isinstance(row, Prompt)
    ids = encode_rows(tokenizer, [row], part.template)[0]
    fitting = fit_prompt(ids, _limits(part), tokenizer.bos_token_id)
    kept = ids if isinstance(fitting, Skipped) else fitting
    screen.title(record.where, _tokens(ids, kept, fitting))
    screen.body(pieces(tokenizer, kept, [False] * len(kept)))


def _show_answers(screen: Screen, seen: Seen, part: StageRows, tokenizer: PreTrainedTokenizerBase) -> None:
    record = seen.record
    rows = demonstrations_of(seen)
    first: list[int] = []
    for number, (ids, learnt, told) in enumerate(_encoded(rows, part, tokenizer)):
        before = len(ids) - last_run(learnt)
        name = _name(seen, part, number)
        screen.title(record.where, ", ".join(text for text in (name, told) if text))
        if number == 0:
            first = ids[:before]
            screen.body(pieces(tokenizer, ids, learnt))
        elif ids[:before] == first and before:
            found = pieces(tokenizer, ids, learnt)
            screen.line(f"  (the same {before} tokens, then)")
            screen.body([piece for piece in found if piece[1]])
        else:
            screen.body(pieces(tokenizer, ids, learnt))


def _encoded(
    rows: Sequence[Demonstration], part: StageRows, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[list[int], list[bool], str]]:
    """Of each row the ids, which of them are learnt (or judged), and how many there are."""
    for ids, answer in encode_answers(tokenizer, rows, part.template, start=part.purpose == "sft"):
        fitting = fit(ids, answer, _limits(part), tokenizer.bos_token_id)
        kept, learnt = (ids, answer) if isinstance(fitting, Skipped) else fitting
        if part.purpose != "sft":
            learnt = [n >= len(kept) - last_run(learnt) for n in range(len(kept))]
        elif part.learn_all:
            learnt = [n > 0 for n in range(len(kept))]
        told = _tokens(ids, kept, fitting)
        yield kept, learnt, f"{told}, {sum(learnt)} learnt" if part.purpose == "sft" else told


def _limits(part: StageRows) -> Limits:
    return part.limits or NO_LIMITS


def _tokens(ids: list[int], kept: list[int], fitting: object) -> str:
    if isinstance(fitting, Skipped):
        return f"skipped: {fitting.reason}, {len(ids)} tokens"
    return f"{len(kept)} tokens" if len(kept) == len(ids) else f"{len(kept)} tokens, cut from {len(ids)}"


def _name(seen: Seen, part: StageRows, number: int) -> str:
    if part.purpose == "rm pairs":
        names = (
            ("chosen", "rejected") if len(seen.answers) == 2 else [f"rank {n}" for n in range(1, 1 + len(seen.answers))]
        )
        return names[number]
    return f"score {seen.scores[number]:g}" if part.purpose == "rm scores" else ""


def pieces(tokenizer: PreTrainedTokenizerBase, ids: list[int], learnt: Sequence[bool]) -> list[Piece]:
    """The text of token ids in runs that are learnt or not, and each special token by itself.

    A run's text is what it adds to the text before it, so that blanks stand where the model reads them.
    """
    special = {*tokenizer.all_special_ids, *(n for n, token in tokenizer.added_tokens_decoder.items() if token.special)}
    found: list[Piece] = []
    start, before = 0, ""
    for end in range(1, len(ids) + 1):
        goes_on = end < len(ids) and learnt[end] == learnt[start] and not special & {ids[end], ids[start]}
        if goes_on:
            continue
        whole = str(tokenizer.decode(ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if whole.startswith(before):
            text = whole[len(before) :]
        else:
            text = str(tokenizer.decode(ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        found.append((text, learnt[start], ids[start] in special))
        start, before = end, whole
    return found


class Screen:
    """Prints rows: what is learnt in colour, or between marks where there is none."""

    def __init__(self, console: Console, part: StageRows):
        self.console, self.word = console, LEARNT[part.purpose]
        self.coloured = console.color_system is not None and not console.no_color
        self.marks = ("⟦", "⟧") if is_unicode(console) else ("[[", "]]")

    def legend(self) -> None:
        """Say what the marks mean."""
        if not self.word:
            return
        if self.coloured:
            self.console.print(Text.assemble((self.word, "green"), "  ", ("special token", "reverse")))
        else:
            self.line(f"{self.marks[0]}{self.word}{self.marks[1]}")

    def line(self, text: str) -> None:
        """A line of plain text."""
        self.console.print(Text(printable(text, keep="\n")))

    def title(self, where: str, told: str = "") -> None:
        """Which row comes, and what is to be said of it."""
        self.console.print(Text(f"\n{printable(where)}{'  ' if told else ''}{told}", "bold"))

    def bad(self, message: str) -> None:
        """A row that can't be read."""
        self.console.print(Text(f"\n{printable(message)}", "red"))

    def body(self, parts: Sequence[Piece]) -> None:
        """The text of a row, its lines indented."""
        text = Text("  ")
        open_ = False
        for piece, learnt, special in parts:
            if not piece:
                continue
            if not self.coloured and learnt != open_:
                text.append(self.marks[0] if learnt else self.marks[1])
                open_ = learnt
            shown = printable(piece, keep="\n").replace("\n", "\n  ").replace("\n  \n", "\n\n")
            text.append(shown, f"{'green ' if learnt else ''}{'reverse' if special else ''}".strip())
        if open_:
            text.append(self.marks[1])
        self.console.print(text)
