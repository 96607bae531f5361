"""What should not change a reward model's opinion: the place of an answer in its batch, and polite words before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlhf_cli.algorithms.comparison import wins
from rlhf_cli.data.answers import AnswerEncoder, RankedIds
from rlhf_cli.data.records import Message, Record, transcript
from rlhf_cli.evaluation.figures import mean_figure, share_figure
from rlhf_cli.report.figure import Figure, Figures

PREFIXES = ("Hello. ", "Please read this carefully. ", "Thank you for your time. ")
"""Words that say nothing about which answer is better."""
MOST_PAIRS = 128
"""Pairs that are scored again."""

Score = Callable[[list[list[list[int]]], list[list[int]]], Tensor]
"""Scores of the sequences of all rows, row by row, from these and the `reply_length` of each."""


def position_figures(rows: Sequence[RankedIds], better: Tensor, worse: Tensor, score: Score) -> Figures:
    """The largest change of a score if rows and answers come in the reverse order, in standard deviations of the score.

    Every answer is read by itself, so this is rounding, unless batching is wrong.
    """
    rows = rows[:MOST_PAIRS]
    turned = [[row.answers[-1], row.answers[0]] for row in reversed(rows)]
    again = score(turned, [[row.lengths[-1], row.lengths[0]] for row in reversed(rows)]).flip(0)
    change = torch.maximum((again[0::2] - better[: len(rows)]).abs(), (again[1::2] - worse[: len(rows)]).abs())
    spread = torch.cat([better, worse]).std(correction=0).item() or 1.0
    return {"position_shift": Figure(change.max().item() / spread, rows=len(rows))}


def prefix_figures(
    rows: Sequence[RankedIds],
    margin: Tensor,
    encoder: AnswerEncoder[RankedIds],
    score: Score,
    *,
    seed: int,
) -> Figures:
    """What neutral words before the prompt change: the share of pairs that change their order, and the mean absolute
    change of the margin in standard deviations of the margin.

    Rows without a prompt, and rows that are too long with a prefix, are skipped; {} if none is left.
    Kumar et al. 2025, "Detecting prefix bias in LLM-based reward models" (arXiv 2505.13487).
    """
    rows = rows[:MOST_PAIRS]
    number: list[int] = []
    changed: list[list[list[int]]] = []
    for prefix in PREFIXES:
        kept = [i for i, row in enumerate(rows) if row.row.prompt.strip()]
        views = [with_prefix(rows[i].row, prefix) for i in kept]
        for i, view, tokens in zip(kept, views, encoder.sequences(views), strict=True):
            (item,) = encoder.items(view, tokens)
            if isinstance(item, RankedIds) and len(item.answers) == len(rows[i].answers):
                number.append(i)
                changed.append([item.answers[0], item.answers[-1]])
    if not changed:
        return {}
    found = score(changed, [[rows[i].lengths[0], rows[i].lengths[-1]] for i in number]).double()
    index = torch.tensor(number)
    new = found[0::2] - found[1::2]
    flips = (wins(new, torch.zeros_like(new)) - wins(margin[index], torch.zeros_like(new))).abs()
    shift = (new - margin[index]).abs() / (margin.std(correction=0).item() or 1.0)
    count = torch.bincount(index).double()
    used = count > 0

    def per_row(values: Tensor) -> Tensor:
        """The mean over prefixes of each row: the prefixes of one row are not independent."""
        return (torch.bincount(index, weights=values) / count)[used]

    return {
        "prefix_flips": share_figure(per_row(flips)),
        "prefix_shift": mean_figure(per_row(shift), seed=seed),
    }


def with_prefix(row: Record, prefix: str) -> Record:
    """The row with a prefix before its prompt; of a conversation, before the first turn of the user."""
    if not row.messages:
        return replace(row, prompt=prefix + row.prompt)
    first = next((i for i, message in enumerate(row.messages) if message.role == "user"), 0)
    turns = list(row.messages)
    turns[first] = Message(turns[first].role, prefix + turns[first].content)
    return replace(row, prompt=transcript(turns), messages=tuple(turns))
