"""The encoder of the reward model: rankings and scored answers to sequences of prompt, answer and EOS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_cli.algorithms.length import reply_length
from rlhf_cli.data.cache import Table, Tokenised
from rlhf_cli.data.encode import Skipped, encode_for_classifier, fit, last_run
from rlhf_cli.data.encoders import RowEncoder, Tokens
from rlhf_cli.data.records import Answer, Record
from rlhf_cli.data.special_tokens import special_tokens_of
from rlhf_cli.data.splits import SIDES
from rlhf_cli.data.stage_rows import StageRows, pairs_of_labels
from rlhf_cli.errors import DataError
from rlhf_cli.packing import common_prefix
from rlhf_cli.seeding import generator

T = TypeVar("T")


@dataclass(frozen=True)
class RankedIds:
    """Answers to one prompt as token sequences, best first. A preference pair has two."""

    answers: list[list[int]]
    row: Record

    @property
    def sequences(self) -> list[list[int]]:
        return self.answers

    @property
    def lengths(self) -> list[int]:
        return [reply_length(answer) for answer in self.row.texts]


@dataclass(frozen=True)
class ScoredIds:
    """The token sequence of a scored answer."""

    ids: list[int]
    score: float
    row: Record

    @property
    def sequences(self) -> list[list[int]]:
        return [self.ids]

    @property
    def lengths(self) -> list[int]:
        return [reply_length(self.row.response)]


@dataclass(frozen=True)
class TargetScale:
    """Brings the scores of `loss: mse` to mean 0 and standard deviation 1, which the head learns as targets."""

    mean: float
    std: float

    def target(self, score: float) -> float:
        return (score - self.mean) / self.std


class AnswerEncoder(RowEncoder[T]):
    """Each answer of a ranking or of a scored row becomes one sequence: prompt, answer and EOS.

    A causal model is read at its last token, so a sequence is cut between prompt and answer as in SFT. An encoder
    model reads a whole text: its own tokenizer adds special tokens and cuts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stage_rows: StageRows, *, reads_last_token: bool):
        super().__init__(tokenizer, stage_rows)
        self.reads_last_token = reads_last_token

    def sequences(self, rows: Sequence[Record]) -> list[list[Tokens]]:
        found = iter(self.encode_rows([one for row in rows for one in row.each()]))
        return [[next(found) for _ in row.answers] for row in rows]

    def encode_rows(self, rows: Sequence[Record]) -> list[Tokens]:
        """The uncut sequence of each row with one answer. That of an encoder model has an empty mask."""
        if self.reads_last_token:
            return self.text.answer_ids(rows, start=False)
        texts = [self.text.whole(row) for row in rows]
        return [(ids, []) for ids in encode_for_classifier(self.tokenizer, texts, None)]

    def answer_length(self, row: Record, tokens: Tokens) -> int:
        """Tokens of the last answer; for an encoder, everything after the prompt."""
        ids, answer_mask = tokens
        if answer_mask:
            return last_run(answer_mask)
        text = self.text.prompt(row, marked=True)
        return len(ids) - len(special_tokens_of(self.tokenizer).encode([text], add_special_tokens=False)[0])

    def cut(self, row: Record, tokens: Tokens) -> list[int] | Skipped:
        ids, limits = tokens[0], self.limits
        if limits.min_response_length and self.answer_length(row, tokens) < limits.min_response_length:
            return limits.too_short
        if self.reads_last_token:
            fitting = fit(*tokens, limits, self.tokenizer.bos_token_id)
            return fitting if isinstance(fitting, Skipped) else fitting[0]
        if len(ids) <= limits.max_length:
            return ids
        if limits.truncation == "drop":
            return Skipped(f"longer than {limits.max_length} tokens", needs=len(ids))
        # The tokenizer cuts, so that its special tokens stay in place.
        text = self.text.whole(row)
        return encode_for_classifier(self.tokenizer, [text], limits.max_length, limits.truncation)[0]


class RankingEncoder(AnswerEncoder[RankedIds]):
    """Preference pairs and rankings, for the pairwise losses."""

    kind = RankedIds

    def items(self, row: Record, sequences: Sequence[Tokens]) -> list[RankedIds | Skipped]:
        cut = [self.cut(one, tokens) for one, tokens in zip(row.each(), sequences, strict=True)]
        kept = [ids for ids in cut if not isinstance(ids, Skipped)]
        uncut = [ids for ids, _ in sequences]
        if skipped := [each for each in cut if isinstance(each, Skipped)]:
            # The limit that keeps a ranking must keep each answer, and a difference between them.
            needs = [each.needs for each in skipped if each.needs is not None]
            if self.limits.truncation == "right":
                needs.append(common_prefix(uncut) + 1)
            return [replace(skipped[0], needs=max(needs) if all(each.needs for each in skipped) else None)]
        different = [i for i, ids in enumerate(kept) if ids not in kept[:i]]
        if len(different) < 2 and all(ids == uncut[0] for ids in uncut):
            return [Skipped("its answers are the same tokens")]
        if len(different) < 2:
            return [Skipped("the part in which its answers differ was cut off", needs=common_prefix(uncut) + 1)]
        answers = tuple(row.answers[i] for i in different)
        return [RankedIds([kept[i] for i in different], replace(row, answers=answers))]


class ScoreEncoder(AnswerEncoder[ScoredIds]):
    """Scored or labelled answers, each by itself, for the pointwise losses."""

    kind = ScoredIds

    def items(self, row: Record, sequences: Sequence[Tokens]) -> list[ScoredIds | Skipped]:
        items: list[ScoredIds | Skipped] = []
        # Nothing reads the columns of a score, and each of a row's answers would store all of them.
        for one, score, tokens in zip(replace(row, columns={}).each(), row.scores, sequences, strict=True):
            ids = self.cut(one, tokens)
            items.append(ids if isinstance(ids, Skipped) else ScoredIds(ids, score, one))
        return items


class LabelledPairs(Sequence[RankedIds]):
    """Pairs of texts with a higher and a lower label. Their prompts differ, so each text is judged as a whole."""

    def __init__(self, items: Table[ScoredIds], generator: torch.Generator):
        self.items = items
        self.pairs = pairs_of_labels(items.numbers("score").tolist(), generator) if len(items) else []

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        higher, lower = (self.items[i] for i in self.pairs[index])
        answers = tuple(Answer(one.row.prompt + one.row.response) for one in (higher, lower))
        return RankedIds([higher.ids, lower.ids], Record("", higher.row.where, answers, ranked=True))


def answer_encoder(
    tokenizer: PreTrainedTokenizerBase, stage_rows: StageRows, *, reads_last_token: bool
) -> AnswerEncoder[Any]:
    """The encoder for the purpose of `stage_rows`: rankings or scored answers."""
    kind = RankingEncoder if stage_rows.purpose == "rm pairs" else ScoreEncoder
    return kind(tokenizer, stage_rows, reads_last_token=reads_last_token)


def labelled_pairs(found: Tokenised[ScoredIds], seed: int) -> Any:
    """The sides of tokenised rows with one label each, as `LabelledPairs`."""
    sides: Any = {name: LabelledPairs(getattr(found, name), generator(seed, f"pairs of {name}")) for name in SIDES}
    return replace(found, **sides)


def require_labels(train: Table[ScoredIds], *held_out: Table[ScoredIds]) -> None:
    """Raise DataError unless `loss: bce` can learn the scores: from 0 (bad) to 1 (good), and not all alike."""
    for side in (train, *held_out):
        for number, score in enumerate(side.numbers("score").tolist()):
            if not 0 <= score <= 1:
                found = f"the label is {score:g}, loss: bce needs labels from 0 (bad) to 1 (good)"
                raise DataError(f"{side[number].row.where}: {found}. For other scores set loss: mse")
    labels = train.numbers("score")
    if labels.min() == labels.max():
        raise DataError(f"every label of the training rows is {labels[0]:g}, loss: bce needs good and bad rows")
