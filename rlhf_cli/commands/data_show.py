"""`rlhf data show`: rows as the model sees them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from rlhf_cli.commands.data_check import RowsOptions, encoders_of, new_console
from rlhf_cli.data.encode import Skipped, encode_for_classifier, fit, fit_prompt, last_run
from rlhf_cli.data.encoders import RowEncoder
from rlhf_cli.data.formats import read_record
from rlhf_cli.data.read import read_rows
from rlhf_cli.data.records import BadRow, Record, shown_name
from rlhf_cli.data.row_counts import Report
from rlhf_cli.data.stage_rows import StageRows, first_format, records
from rlhf_cli.errors import DataError
from rlhf_cli.printing import printable
from rlhf_cli.report.progress import Console

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TARGET = {"sft": "trained on", "rm pairs": "scored answer", "rm scores": "scored answer", "ppo": ""}
"""The name of the marked tokens for each purpose."""
MAX_SHOWN = 2000
"""Characters of a bad row's value to show."""

Piece = tuple[str, bool, bool]
"""(text, is it a target, is it a special token)."""


def data_show(
    rows: RowsOptions,
    num: Annotated[int, typer.Option("-n", "--num", min=1, help="Number of rows, from the first.")] = 3,
    row: Annotated[
        int | None, typer.Option("--row", min=1, help="Show the row with this number, as messages count rows.")
    ] = None,
) -> None:
    """Show rows as the model sees them: prompt, answer, special tokens, learned tokens."""
    (part, *_), tokenizer_path = rows.read()
    (encoder,) = encoders_of([part], tokenizer_path)
    screen = Screen(new_console(), part, encoder)
    if row is not None:
        screen.legend()
        screen.show(_numbered(screen, part, row))
        return
    report = Report()
    found = records(part.unweighted(on_bad_row="skip"), report, only="train")
    for number, (_, record) in enumerate(islice(found, num)):
        if number == 0:
            for path, kind in report.kinds.items():
                screen.line(f"{path}: rows of {kind}, read for {part.purpose}")
            screen.legend()
        _show_bad(screen, report)
        screen.show(record)
    _show_bad(screen, report)


def _show_bad(screen: Screen, report: Report) -> None:
    while report.bad:
        screen.line(f"\n{report.bad.pop(0)}", "red")


def _numbered(screen: Screen, part: StageRows, number: int) -> Record:
    """The row whose place ends in `number`, from the first file that has one. A bad row is printed unparsed."""
    for source in chain(*part.rows.by_side.values()):
        for row in read_rows(source):
            if row.where[len(row.where.rstrip("0123456789")) :] != str(number):
                continue
            if isinstance(row, BadRow):
                raise DataError(f"{row.where}: {row.reason}")
            format_ = first_format(source, part.purpose)
            try:
                return read_record(row, format_, source, prompt_words=part.prompt_words)
            except DataError:
                for name, value in row.values.items():
                    text = value if isinstance(value, str) else repr(value)
                    more = f" ... ({len(text):,} characters)" if len(text) > MAX_SHOWN else ""
                    screen.line(f"{shown_name(name)}: {text[:MAX_SHOWN]}{more}")
                raise
    paths = ", ".join(source.path for source in part.rows.train)
    raise DataError(f"{paths}: there is no row {number}. Blank lines are counted but give no row")


class Screen:
    """Prints rows with the targets in colour, or between marks on a screen without colour."""

    def __init__(self, console: Console, part: StageRows, encoder: RowEncoder[Any] | None):
        self.console, self.part, self.encoder = console, part, encoder
        self.coloured = console.color_system is not None and not console.no_color
        self.marks = ("[[", "]]") if console.options.ascii_only else ("⟦", "⟧")

    def line(self, text: str, style: str = "") -> None:
        self.console.print(Text(printable(text, keep="\n"), style))

    def legend(self) -> None:
        if not (word := TARGET[self.part.purpose]):
            return
        if self.coloured:
            self.console.print(Text.assemble((word, "green"), "  ", ("special token", "reverse")))
        else:
            self.line(f"{self.marks[0]}{word}{self.marks[1]}")

    def show(self, record: Record) -> None:
        """Print a row's prompt, or each of its answers behind its prompt, which is written out once."""
        where, purpose = printable(record.where), self.part.purpose
        encoder = self.encoder
        try:
            seen = self.part.view(record, "train")
            encoded = [] if encoder is None or isinstance(seen, Skipped) else [*self._encoded(seen, encoder)]
        except DataError as error:
            self.line(f"\n{error}", "red")
            return
        if isinstance(seen, Skipped):
            self.line(f"\n{where}  skipped: {seen.reason}", "bold")
            for text in (record.prompt, *record.texts):
                self.body([(text, False, False)])
            return
        names = [f"score {score:g}" for score in seen.scores] or [""]
        if purpose == "rm pairs":
            ranks = [f"rank {n}" for n in range(1, 1 + len(seen.answers))]
            names = ["chosen", "rejected"] if len(ranks) == 2 else ranks
        if encoder is None:
            for number, (name, answer) in enumerate(zip(names, seen.texts or ("",), strict=True)):
                self.line("  ".join(filter(None, (f"\n{where}", name))), "bold")
                self.body([("" if number else record.prompt, False, False), (answer, True, False)])
            return
        first: list[int] = []
        for number, (name, (ids, target_mask, about)) in enumerate(zip(names, encoded, strict=True)):
            before = len(ids) - last_run(target_mask)
            self.line(f"\n{where}  {', '.join(filter(None, (name, about)))}", "bold")
            found = pieces(encoder.tokenizer, ids, target_mask)
            if number == 0:
                first = ids[:before]
            elif ids[:before] == first and before:
                self.line(f"  (the same {before} tokens, then)")
                found = [piece for piece in found if piece[1]]
            self.body(found)

    def _encoded(self, seen: Record, encoder: RowEncoder[Any]) -> Iterator[tuple[list[int], list[bool], str]]:
        """For each sequence of a row its ids, which of them are targets, and a description of both."""
        from rlhf_cli.data.answers import AnswerEncoder
        from rlhf_cli.packing import common_prefix

        part, bos = self.part, encoder.tokenizer.bos_token_id
        (sequences,) = encoder.tried([seen])
        if isinstance(sequences, DataError):
            raise sequences
        for one, (ids, answer) in zip(seen.each() or [seen], sequences, strict=True):
            if part.purpose == "ppo":
                cut = fit_prompt(ids, encoder.limits, bos)
                kept = ids if isinstance(cut, Skipped) else cut
                yield kept, [False] * len(kept), _tokens(ids, kept, cut)
            elif isinstance(encoder, AnswerEncoder) and not encoder.reads_last_token:
                whole = encoder.cut(one, (ids, answer))
                kept = ids if isinstance(whole, Skipped) else whole
                (prompt,) = encode_for_classifier(encoder.tokenizer, [encoder.text.prompt(one, marked=True)], None)
                start = common_prefix([ids, prompt])
                yield kept, [n >= start for n in range(len(kept))], _tokens(ids, kept, whole)
            else:
                fitting = fit(ids, answer, encoder.limits, bos)
                kept, target_mask = (ids, answer) if isinstance(fitting, Skipped) else fitting
                if part.purpose != "sft":
                    target_mask = [n >= len(kept) - last_run(target_mask) for n in range(len(kept))]
                elif part.learn_all:
                    target_mask = [n > 0 for n in range(len(kept))]
                is_trained = part.purpose == "sft" and not isinstance(fitting, Skipped)
                trained = f", {sum(target_mask)} trained on" if is_trained else ""
                yield kept, target_mask, _tokens(ids, kept, fitting) + trained

    def body(self, parts: Sequence[Piece]) -> None:
        text = Text("  ")
        open_ = False
        for piece, is_target, special in parts:
            if not piece:
                continue
            if not self.coloured and is_target != open_:
                text.append(self.marks[0] if is_target else self.marks[1])
                open_ = is_target
            shown = printable(piece, keep="\n").replace("\n", "\n  ").replace("\n  \n", "\n\n")
            text.append(shown, f"{'green ' if is_target else ''}{'reverse' if special else ''}".strip())
        if open_:
            text.append(self.marks[1])
        self.console.print(text)


def _tokens(ids: list[int], kept: list[int], fitting: object) -> str:
    if isinstance(fitting, Skipped):
        return f"skipped: {fitting.reason}, {len(ids)} tokens"
    return f"{len(kept)} tokens" if len(kept) == len(ids) else f"{len(kept)} tokens, cut from {len(ids)}"


def pieces(tokenizer: PreTrainedTokenizerBase, ids: list[int], target_mask: Sequence[bool]) -> list[Piece]:
    """The text of token ids in runs of targets and others, with each special token on its own.

    The text of a run is what it adds to the decoded text before it, so that spaces are where the model reads them.
    """
    special = {*tokenizer.all_special_ids, *(n for n, token in tokenizer.added_tokens_decoder.items() if token.special)}
    plain = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    result: list[Piece] = []
    start, before = 0, ""
    for end in range(1, len(ids) + 1):
        if end < len(ids) and target_mask[end] == target_mask[start] and not special & {ids[end], ids[start]}:
            continue
        whole = str(tokenizer.decode(ids[:end], **plain))
        own = whole[len(before) :] if whole.startswith(before) else str(tokenizer.decode(ids[start:end], **plain))
        result.append((own, target_mask[start], ids[start] in special))
        start, before = end, whole
    return result
