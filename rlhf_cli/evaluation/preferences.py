"""A reward model on held-out rows: calibration, length, groups, words before the prompt, worst mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.algorithms.calibration import best_temperature, calibration_error
from rlhf_cli.algorithms.comparison import wins
from rlhf_cli.algorithms.statistics import bootstrap_interval, correlation
from rlhf_cli.data.answers import AnswerEncoder, RankedIds, ScoredIds
from rlhf_cli.data.records import Message, Record, transcript
from rlhf_cli.evaluation.agreement import gold_gap
from rlhf_cli.evaluation.figures import bootstrapped, equal_length_figure, mean_figure, share_figure
from rlhf_cli.report.figure import Figure, Figures

GROUP_COLUMNS = ("subset", "source", "category", "probe", "split")
"""Columns of a row that name a group of rows; each group gets its own accuracy."""
MOST_GROUPS = 40
WORST = 20  # answers or mistakes that are kept with their texts
QUARTERS = ("smallest quarter", "second quarter", "third quarter", "largest quarter")
SOURCE = "source of the data"  # the group of the figures by source of `data.test`
TEMPERATURE_RESAMPLES, TEMPERATURE_STEPS = 1000, 30
"""For the best temperature: resamples of its interval, and steps of its search, which give its inverse to 1e-6."""
CHANCE = Figure(0.5)
AGAINST_CHANCE = (
    "accuracy",
    "gold_accuracy",
    "length_controlled",
    "accuracy_longer_is_worse",
    "accuracy_longer_is_better",
)
"""Figures of pairs whose level of chance is 1/2."""
LENGTH_BINS = {
    "below -16": (-math.inf, -16),
    "-16 to -5": (-16, -4),
    "-4 to 3": (-4, 4),
    "4 to 15": (4, 16),
    "16 or more": (16, math.inf),
}
"""Tokens by which the better answer is longer, from and below."""
PREFIXES = ("Hello. ", "Please read this carefully. ", "Thank you for your time. ")
"""Words before a prompt that say nothing about which answer is better."""
MOST_PAIRS = 128  # pairs that are scored again with such words

Score = Callable[[list[list[list[int]]], list[list[int]]], Tensor]
"""Scores of the sequences of all rows, row by row, from these and the `reply_length` of each."""


@dataclass(frozen=True)
class Pairs:
    """n pairs of a better and a worse answer. A ranking of K answers gives its best and its worst one."""

    rows: Sequence[RankedIds]
    better: Tensor  # [n] score of the better answer
    worse: Tensor  # [n] score of the worse answer

    @property
    def right(self) -> Tensor:
        """[n] 1 where the better answer has the higher score, 1/2 for equal scores."""
        return wins(self.better, self.worse)

    @property
    def margin(self) -> Tensor:
        """[n] score of the better answer minus score of the worse one."""
        return (self.better - self.worse).double()

    @property
    def lengths(self) -> tuple[Tensor, Tensor]:
        """[n] tokens of the better answer, and of the worse one."""
        better, worse = (torch.tensor([float(len(row.answers[i])) for row in self.rows]) for i in (0, -1))
        return better, worse

    @property
    def longer_by(self) -> Tensor:
        """[n] tokens of the better answer minus tokens of the worse one."""
        better, worse = self.lengths
        return better - worse

    @property
    def longer_wins(self) -> Tensor:
        """[n] 1 where the better answer is the longer one, 1/2 for equal lengths: a rule that prefers the longer."""
        return wins(*self.lengths)


def preference_figures(pairs: Pairs, *, seed: int) -> Figures:
    """Accuracy and margin beside two baselines, calibration, and how much of it is length.

    `longer_wins` and `shorter_wins` are the accuracies of rules that prefer the longer or the shorter answer; chance is
    0.5. `accuracy_longer_is_worse` is the accuracy where the worse answer is the longer one. `length_controlled` is the
    accuracy at equal length (`length_controlled_win_rate`). `score_length_correlation` is that of scores and lengths of
    all answers; pairs are resampled, because their two answers belong together.
    """

    def of_both(better: Tensor, worse: Tensor, length: Tensor, length_of_worse: Tensor) -> Tensor:
        return correlation(torch.cat([better, worse], -1), torch.cat([length, length_of_worse], -1))

    margin, right, longer = pairs.margin, pairs.right, pairs.longer_by
    confidence = torch.sigmoid(margin.abs())
    temperatures = partial(best_temperature, steps=TEMPERATURE_STEPS)
    temperature = bootstrap_interval(temperatures, margin, seed=seed, num_resamples=TEMPERATURE_RESAMPLES)
    figures = {
        "accuracy": share_figure(right),
        "longer_wins": share_figure(pairs.longer_wins),
        "shorter_wins": share_figure(1 - pairs.longer_wins),
        "margin": mean_figure(margin, seed=seed),
        "calibration_error": bootstrapped(partial(calibration_error, low=0.5), confidence, right, seed=seed),
        "brier": mean_figure((confidence - right).square(), seed=seed),
        "best_temperature": Figure(best_temperature(margin).item(), *temperature, len(margin)),
        "score_length_correlation": bootstrapped(of_both, pairs.better, pairs.worse, *pairs.lengths, seed=seed),
        "length_controlled": equal_length_figure(right, longer, torch.zeros_like(longer)),
    }
    gaps = [gold_gap(row.row) for row in pairs.rows]
    if all(gap is not None for gap in gaps) and any(gaps):
        gap = torch.tensor([float(gap or 0.0) for gap in gaps], dtype=torch.float64)
        figures["gold_accuracy"] = share_figure((margin * gap > 0)[gap != 0])
    if bool((longer < 0).any()):
        figures["accuracy_longer_is_worse"] = share_figure(right[longer < 0])
    if bool((longer > 0).any()):
        figures["accuracy_longer_is_better"] = share_figure(right[longer > 0])
    return figures


def groups(pairs: Pairs, right: Tensor, by_source: Mapping[str, Sequence[int]] = {}) -> dict[str, Figures]:
    """The share of pairs with `right`, [n], in groups: by columns that name one, by length difference, by margin.

    `by_source` has the numbers of the pairs from each source of the data, if there are several.
    """
    masks: dict[str, dict[str, Tensor]] = {}
    for column in GROUP_COLUMNS:
        names = [row.row.columns.get(column) for row in pairs.rows]
        known = sorted({name for name in names if isinstance(name, str)})
        if 1 < len(known) <= MOST_GROUPS:
            masks[column] = {name: torch.tensor([other == name for other in names]) for name in known}
    longer = pairs.longer_by
    masks["better answer longer by (tokens)"] = {
        name: (longer >= low) & (longer < high) for name, (low, high) in LENGTH_BINS.items()
    }
    masks["size of the margin"] = quarters(pairs.margin.abs())
    tables = {SOURCE: {name: share_figure(right[list(rows)]) for name, rows in by_source.items()}}
    for title, groups in masks.items():
        tables[title] = {name: share_figure(right[mask]) for name, mask in groups.items() if bool(mask.any())}
    return {title: table for title, table in tables.items() if table}


def quarters(values: Tensor) -> dict[str, Tensor]:
    """The masks of the rows in each quarter of [n] numbers.

    Equal numbers are in one group, so there may be fewer than four; {} for fewer than 8 rows.
    """
    if len(values) < 8:
        return {}
    values = values.double()
    quarter = torch.bucketize(values, values.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)))
    masks = {name: quarter == number for number, name in enumerate(QUARTERS)}
    return {name: mask for name, mask in masks.items() if bool(mask.any())}


def error_groups(
    error: Tensor, target: Tensor, length: Tensor, by_source: Mapping[str, Sequence[int]] = {}, *, seed: int
) -> dict[str, Figures]:
    """The mean of [n] absolute errors in groups: by quarters of the length and of the target, by source of the data."""
    tables: dict[str, Mapping[str, Any]] = {
        "length of the answer": quarters(length),
        "true score": quarters(target),
        SOURCE: {name: list(rows) for name, rows in by_source.items()},
    }
    return {
        title: {name: mean_figure(error[rows], seed=seed) for name, rows in of_title.items()}
        for title, of_title in tables.items()
        if of_title
    }


def worst_mistakes(pairs: Pairs) -> list[dict[str, Any]]:
    """The pairs in which the model prefers the worse answer most, with their texts."""
    margin, found = pairs.margin, []
    for i in margin.argsort()[:WORST].tolist():
        if margin[i] < 0:
            row = pairs.rows[i].row
            texts = {"where": row.where, "prompt": row.prompt, "better": row.texts[0], "worse": row.texts[-1]}
            found.append({**texts, "better_score": pairs.better[i].item(), "worse_score": pairs.worse[i].item()})
    return found


def worst_answers(rows: Sequence[ScoredIds], stated: Tensor, target: Tensor) -> list[dict[str, Any]]:
    """The answers whose stated score or probability is farthest from the true one, with their texts."""
    found = []
    for i in (stated.double() - target.double()).abs().argsort(descending=True)[:WORST].tolist():
        row = rows[i].row
        texts = {"where": row.where, "prompt": row.prompt, "response": row.response}
        found.append({**texts, "stated": stated[i].item(), "target": target[i].item()})
    return found


# --------------------------------------------------------------------- what should not change the model's opinion


def prefix_figures(pairs: Pairs, encoder: AnswerEncoder[RankedIds], score: Score, *, seed: int) -> Figures:
    """The effect of neutral words before the prompt: the share of pairs that change their order, and the mean absolute
    change of the margin in its standard deviations.

    Rows without a prompt, and rows that are too long with a prefix, are skipped; {} if none is left.
    Kumar et al. 2025, "Detecting prefix bias in LLM-based reward models" (arXiv 2505.13487).
    """
    rows, margin = pairs.rows[:MOST_PAIRS], pairs.margin
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

    def per_row(values: Tensor) -> Tensor:
        """The mean over prefixes of each row: the prefixes of one row are not independent."""
        return (torch.bincount(index, weights=values) / count)[count > 0]

    return {"prefix_flips": share_figure(per_row(flips)), "prefix_shift": mean_figure(per_row(shift), seed=seed)}


def with_prefix(row: Record, prefix: str) -> Record:
    """The row with a prefix before its prompt; of a conversation, before the first turn of the user."""
    if not row.messages:
        return replace(row, prompt=prefix + row.prompt)
    first = next((i for i, message in enumerate(row.messages) if message.role == "user"), 0)
    turns = list(row.messages)
    turns[first] = Message(turns[first].role, prefix + turns[first].content)
    return replace(row, prompt=transcript(turns), messages=tuple(turns))


# ------------------------------------------------------------------------------------------- in words


def about_probes(accuracy: Figures) -> str:
    """A sentence on the probes, and on the gold scores, whose accuracy is not surely above chance."""
    missed = [f"{name} {figure}" for name, figure in accuracy.items() if not figure.low > CHANCE.value]
    if not missed:
        return "accuracy is above chance (0.50) in every probe"
    number = f"{len(missed)} of {len(accuracy)} probes"
    return f"not above chance (0.50) in {number}, so their defects cost no score: {', '.join(missed)}"


def remarks(figures: Figures) -> list[str]:
    """Sentences about calibration, length and words before the prompt."""
    error, temperature = figures["calibration_error"].value, figures["best_temperature"].value
    if not math.isfinite(temperature):
        advice = "no temperature mends that"
    elif temperature == 0:
        advice = "every pair is right, so no confidence is too high"
    elif temperature > 1:
        advice = f"it is overconfident, and dividing its margins by {temperature:.2f} fits best"
    else:
        advice = f"its margins are too cautious, and dividing them by {temperature:.2f} fits best"
    found = [f"stated confidence is off by {error:.3f} on average: {advice}"]
    correlation, controlled = figures["score_length_correlation"], figures["length_controlled"]
    found.append(f"scores correlate with length by {correlation}; at equal length the accuracy would be {controlled}")
    if "gold_accuracy" in figures:
        gold = figures["gold_accuracy"]
        above = "above" if gold.low > CHANCE.value else "not above"
        found.append(f"it agrees with the gold scores on {gold} of the pairs, {above} chance (0.50)")
    if "prefix_flips" in figures:
        found.append(
            f"words such as {PREFIXES[0].strip()!r} before the prompt change its preference in "
            f"{figures['prefix_flips'].value:.1%} of pairs"
        )
    return found
