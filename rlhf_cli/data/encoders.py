"""The encoder of each stage: rows as a stage sees them to token items, or the reason to skip a row.

An encoder works in two steps. `sequences` gives the uncut token sequences of each row, and `items` cuts them to the
length limits. A stage needs the items; `rlhf data check` measures the sequences and counts the same items.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from rlhf_cli.data.encode import Example, LengthLimits, RowText, Skipped, fit, fit_prompt
from rlhf_cli.data.records import Record
from rlhf_cli.data.special_tokens import special_tokens_of
from rlhf_cli.data.stage_rows import StageRows
from rlhf_cli.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

Tokens = tuple[list[int], list[bool]]
"""Token ids, and the mask of those that are an answer's."""
NO_LIMITS = LengthLimits(10**9)


@dataclass(frozen=True)
class PromptRow:
    """A prompt of PPO: its text, its tokens and its row."""

    text: str
    ids: list[int]
    row: Record


class RowEncoder(Generic[T]):
    """Encodes the rows that a stage sees to items of one kind `T`."""

    kind: type[T]
    reads_last_token = True
    """The model is causal. Only a reward model may be an encoder model, which reads whole texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stage_rows: StageRows):
        self.tokenizer, self.stage_rows = tokenizer, stage_rows
        self.text = RowText(tokenizer, stage_rows.template, stage_rows.keep_special)
        self.limits = stage_rows.limits or NO_LIMITS

    def sequences(self, rows: Sequence[Record]) -> list[list[Tokens]]:
        """The uncut token sequences of each row."""
        raise NotImplementedError

    def items(self, row: Record, sequences: Sequence[Tokens]) -> Iterable[T | Skipped]:
        """The items of a row within the length limits, or the reasons to skip them."""
        raise NotImplementedError

    def tried(self, rows: Sequence[Record]) -> list[list[Tokens] | DataError]:
        """`sequences`, with the error of each row that the chat template or the tokenizer refuses."""
        try:
            return [*self.sequences(rows)]
        except DataError as error:
            if len(rows) == 1:
                return [DataError(f"{rows[0].where}: {error}")]
            middle = len(rows) // 2
            return self.tried(rows[:middle]) + self.tried(rows[middle:])

    def encode(self, rows: Sequence[Record]) -> Iterator[T | Skipped | DataError]:
        for row, sequences in zip(rows, self.tried(rows), strict=True):
            yield from [sequences] if isinstance(sequences, DataError) else self.items(row, sequences)

    def special_token_in(self, row: Record) -> str | None:
        """The first special token in the row's own text, or None."""
        before = [message.content for message in row.messages] or [row.prompt]
        return special_tokens_of(self.tokenizer).first_in([*before, *row.texts])


class DemonstrationEncoder(RowEncoder[Example]):
    """Demonstrations to training sequences of SFT. The prompt is no target of the loss unless `learn_all` is set."""

    kind = Example

    def sequences(self, rows: Sequence[Record]) -> list[list[Tokens]]:
        return [[tokens] for tokens in self.text.answer_ids(rows)]

    def items(self, row: Record, sequences: Sequence[Tokens]) -> list[Example | Skipped]:
        ((ids, answer_mask),) = sequences
        fitting = fit(ids, answer_mask, self.limits, self.tokenizer.bos_token_id)
        if isinstance(fitting, Skipped):
            return [fitting]
        ids, answer_mask = fitting
        # No token predicts the first one.
        loss_mask = [False, *(self.stage_rows.learn_all or is_answer for is_answer in answer_mask[1:])]
        return [Example(ids, loss_mask, row.where)]


class PromptEncoder(RowEncoder[PromptRow]):
    """Prompts to the token ids that a rollout starts from."""

    kind = PromptRow

    def sequences(self, rows: Sequence[Record]) -> list[list[Tokens]]:
        return [[(ids, [])] for ids in self.text.prompt_ids(rows)]

    def items(self, row: Record, sequences: Sequence[Tokens]) -> list[PromptRow | Skipped]:
        ((ids, _),) = sequences
        kept = fit_prompt(ids, self.limits, self.tokenizer.bos_token_id)
        if isinstance(kept, Skipped):
            return [kept]
        text = self.text.prompt(row)
        if kept != ids:
            # A judge of the text must read what the policy read.
            text = str(self.tokenizer.decode(kept, skip_special_tokens=True))
        return [PromptRow(text, kept, row)]
