"""What the health rules read: the metrics of this iteration, of recent ones and of the first ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

START = 3
"""The first iterations; their mean is "the start". Iteration 1 samples from the initial model."""
PERSIST = 3
"""Consecutive iterations, or the number averaged, before most warnings are given."""
WINDOW = 20
"""Iterations of a trend: the later half is compared with the earlier half."""
MIN_TREND = 10
"""The fewest iterations that make a trend."""
NEAR_BEST = 0.1
"""A score is near the best if it lacks at most this share of the gain since the start."""
STANDARD_ERRORS = 2.0
"""Standard errors by which two means must differ to count as a rise."""
LARGEST = 1e75
"""Stands for infinity, which JSON does not have. Larger than any float32, and its square can still be summed."""


@dataclass
class History:
    """The metrics of a run. The first five fields are settings of the run, the others change with each iteration."""

    kl_in_reward: bool
    """ppo.kl_in is reward."""
    has_value_model: bool
    starts_at_reference: bool
    """policy and ref_policy start as the same model, so the first KL is 0."""
    max_new_tokens: int
    """rollout.max_new_tokens."""
    ratio_tolerance: float
    """Nats; see `health_rules.RATIO_TOLERANCE`."""
    iteration: int = 0
    """Counted from 1."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """All metrics of this iteration, as they are."""
    start: list[dict[str, float]] = field(default_factory=list)
    """Watched metrics of the first START iterations."""
    recent: list[dict[str, float]] = field(default_factory=list)
    """Watched metrics of the last WINDOW iterations, this one included."""
    bests: list[list[float]] = field(default_factory=list)
    """Each new best score so far: [iteration, score, KL]. Score and KL are means of PERSIST iterations."""

    def add(self, iteration: int, metrics: Mapping[str, float], watched: Sequence[str]) -> None:
        """Add an iteration. Watched metrics that are absent or NaN are left out of its row."""
        self.iteration, self.metrics = iteration, metrics
        row = {
            key: max(-LARGEST, min(LARGEST, float(metrics[key])))
            for key in watched
            if not math.isnan(metrics.get(key, math.nan))
        }
        if len(self.start) < START:
            self.start.append(row)
        self.recent = [*self.recent, row][-WINDOW:]
        score, kl = self.mean("objective/score"), self.mean("objective/kl")
        if score is not None and kl is not None and (not self.bests or score > self.bests[-1][1]):
            self.bests.append([iteration, score, kl])

    def last(self, key: str, n: int) -> list[float]:
        """The last n values; empty if there are fewer iterations or one of them lacks the key."""
        rows = self.recent[-n:]
        return [row[key] for row in rows] if len(rows) == n and all(key in row for row in rows) else []

    def mean(self, key: str) -> float | None:
        """The mean of the last PERSIST values; None if one is missing."""
        last = self.last(key, PERSIST)
        return fmean(last) if last else None

    def mean_at_start(self, key: str) -> float | None:
        """The mean over the first START iterations that have the key; None if none has it."""
        values = [row[key] for row in self.start if key in row]
        return fmean(values) if values else None

    def trend(self, key: str) -> list[float]:
        """The values of the window; empty if there are fewer than MIN_TREND or one is missing."""
        n = len(self.recent)
        return self.last(key, n) if n >= MIN_TREND else []

    def near_best(self, first: float) -> float:
        """The lowest score that is near the best one; `first` is the mean score at the start."""
        best = self.bests[-1][1]
        return best - NEAR_BEST * max(best - first, 0.0)

    @property
    def stay_near_reference(self) -> str:
        """Advice that keeps the policy closer to ref_policy."""
        if self.recent and self.recent[-1].get("objective/kl_coef") == 0:
            return "set ppo.kl_coef above 0 (nothing keeps the policy near ref_policy)"
        return "raise ppo.kl_coef (or lower ppo.kl_target)"


def halves(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """The earlier and the later half."""
    return values[: len(values) // 2], values[len(values) // 2 :]


def variance_of_mean(values: Sequence[float]) -> float:
    """The squared standard error of the mean."""
    mean = fmean(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)


def rises(values: Sequence[float]) -> bool:
    """Whether the mean of the later half is higher by more than STANDARD_ERRORS of the difference.

    >>> rises([1.0, 1.1, 0.9, 1.0, 2.0, 2.1, 1.9, 2.0]), rises([1.0, 3.0, 1.0, 3.0, 2.0, 3.0, 1.0, 3.0])
    (True, False)
    """
    early, late = halves(values)
    error = math.sqrt(variance_of_mean(early) + variance_of_mean(late))
    return fmean(late) - fmean(early) > STANDARD_ERRORS * error


def paired(now: Sequence[float], before: Sequence[float]) -> tuple[float, float]:
    """The mean difference of pairs, and its standard error.

    >>> paired([2.0, 4.0], [1.0, 1.0])
    (2.0, 1.0)
    """
    differences = [a - b for a, b in zip(now, before, strict=True)]
    return fmean(differences), math.sqrt(variance_of_mean(differences))
