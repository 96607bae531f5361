"""What the health rules read: the metrics of this iteration, of recent ones and of the first ones, and the config."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from rlhf_cli.config.ppo import PPOConfig

START = 3
"""The first iterations; their mean is "the start". Iteration 1 samples from the initial model."""
EARLY = 10
"""The first iterations that are kept, for rules that compare noisy figures."""
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
BEFORE_KL = "objective/reward before KL"
"""The key of a row's objective/reward without the KL that it was charged."""
RARE_WORD = 0.02
"""Share of responses. Words in fewer are not kept; they count as being in none."""
RATIO_TOLERANCE = {"float32": 5e-3, "bfloat16": 0.5}
"""Nats: the largest |log ratio| before the first step. Good: 0 on a CPU, however the batch was split. A GPU may round
differently for batches of another shape. A temperature that is 1 % off gives 0.1. bfloat16 rounds a logit near 16 by up
to 1/16, and the largest of many thousand tokens is far out in the tail."""
GAP_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
"""Nats: the mean |difference| of a token's log-probability between sampling and training. Good in bfloat16: 0.010 to
0.018. Weights with an older head: 0.2 to 2."""
LARGEST = 1e75
"""Stands for infinity, which JSON does not have. Larger than any float32, and its square can still be summed."""


@dataclass
class History:
    """The config and the metrics of a run."""

    config: PPOConfig
    precision: Literal["float32", "bfloat16"] = "float32"
    """The precision of the passes, which decides the tolerances."""
    iteration: int = 0
    """Counted from 1."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """All metrics of this iteration, as they are."""
    start: list[dict[str, float]] = field(default_factory=list)
    """The metrics of the first EARLY iterations."""
    recent: list[dict[str, float]] = field(default_factory=list)
    """The metrics of the last WINDOW iterations, this one included."""
    bests: list[list[float]] = field(default_factory=list)
    """Each new best score so far: [iteration, score, KL]. Score and KL are means of PERSIST iterations."""
    first_words: list[dict[str, float]] = field(default_factory=list)
    """For each of the first START iterations, the share of responses that contain each word."""
    recent_words: list[dict[str, float]] = field(default_factory=list)
    """The same of the last PERSIST iterations."""
    golds: list[list[float]] = field(default_factory=list)
    """[iteration, mean gold] of each evaluation on held-out prompts."""
    best_gold: dict[str, Any] | None = None
    """The evaluation with the highest mean gold: its `iteration`, and `scores` and `golds` of each prompt."""
    judged: dict[str, Any] | None = None
    """The newest evaluation."""

    def add(self, iteration: int, metrics: Mapping[str, float], words: Mapping[str, float]) -> None:
        """Add an iteration. Metrics that are NaN are left out of its row."""
        self.iteration, self.metrics = iteration, metrics
        row = {
            key: max(-LARGEST, min(LARGEST, float(value))) for key, value in metrics.items() if not math.isnan(value)
        }
        if "objective/reward" in row:
            kl_coef = row.get("objective/kl_coef", 0.0) if self.config.ppo.kl_in == "reward" else 0.0
            row[BEFORE_KL] = row["objective/reward"] + kl_coef * row.get("objective/kl", 0.0)
        if len(self.start) < EARLY:
            self.start.append(row)
        self.recent = [*self.recent, row][-WINDOW:]
        common = {word: share for word, share in words.items() if share >= RARE_WORD}
        if len(self.first_words) < START:
            self.first_words.append(common)
        self.recent_words = [*self.recent_words, common][-PERSIST:]
        score, kl = self.mean("objective/score"), self.mean("objective/kl")
        if not math.isnan(score + kl) and (not self.bests or score > self.bests[-1][1]):
            self.bests.append([iteration, score, kl])

    def last(self, key: str, n: int) -> list[float]:
        """The last n values; empty if there are fewer iterations or one of them lacks the key."""
        rows = self.recent[-n:]
        return [row[key] for row in rows] if len(rows) == n and all(key in row for row in rows) else []

    def __getitem__(self, key: str) -> float:
        """The newest value of a metric; NaN without one, so that comparisons with it are false."""
        return self.recent[-1].get(key, math.nan)

    def at_start(self, key: str) -> float:
        """The mean over the first START iterations that have the metric, or NaN."""
        return fmean([row[key] for row in self.start[:START] if key in row] or [math.nan])

    def mean(self, key: str, n: int = PERSIST) -> float:
        """The mean of the last n values; NaN if one is missing, as in `least` and `most`."""
        return fmean(self.last(key, n) or [math.nan])

    def least(self, key: str, n: int = PERSIST) -> float:
        return min(self.last(key, n) or [math.nan])

    def most(self, key: str, n: int = PERSIST) -> float:
        return max(self.last(key, n) or [math.nan])

    def before_and_now(self, key: str) -> tuple[list[float], list[float]] | None:
        """The values of the first and of the last EARLY iterations; None if the two overlap or a row lacks the key."""
        now = self.last(key, EARLY)
        if len(self.recent) < 2 * EARLY or not now or not all(key in row for row in self.start):
            return None
        return [row[key] for row in self.start], now

    def trend(self, key: str) -> list[float]:
        """The values of the window; empty if there are fewer than MIN_TREND or one is missing."""
        n = len(self.recent)
        return self.last(key, n) if n >= MIN_TREND else []

    @property
    def ratio_tolerance(self) -> float:
        """Nats: of the first ratio and of the first KL, and half the tolerance of the largest sampler gap."""
        return RATIO_TOLERANCE[self.precision]

    @property
    def near_best(self) -> float:
        """The lowest score that is near the best one; NaN if there is none."""
        best = self.bests[-1][1] if self.bests else math.nan
        return best - NEAR_BEST * max(best - self.at_start("objective/score"), 0.0)

    @property
    def has_judge(self) -> bool:
        """Whether the run judges held-out replies on the way."""
        return self.config.evaluation.gold is not None and self.config.evaluation.every_iterations is not None

    @property
    def advice(self) -> dict[str, str]:
        """The parts of an advice that depend on the config, by the name that a rule's advice has for them.

        No advice names a key that is set already.
        """
        ppo, evaluation = self.config.ppo, self.config.evaluation
        if self.recent and self.recent[-1].get("objective/kl_coef") == 0:
            stay = "set ppo.kl_coef above 0 (nothing keeps the policy near ref_policy)"
        else:
            stay = "lower ppo.kl_target" if ppo.kl_controller == "adaptive" else "raise ppo.kl_coef"
        judge = f"set {'evaluation.gold and ' * (evaluation.gold is None)}evaluation.every_iterations"
        return {
            "stay": stay,
            "judge": "read the judge's figures in evaluations.jsonl" if self.has_judge else judge,
            "steps": "optimizer.learning_rate" + ("" if ppo.ppo_epochs == 1 else " or ppo.ppo_epochs"),
            "end_early": f"{'set' if ppo.max_approx_kl is None else 'lower'} ppo.max_approx_kl",
            "best": str((self.best_gold or {}).get("iteration")),
            "best_model": "best_model" if evaluation.best_metric else "evaluation.best_metric keeps it",
        }


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
    return fmean(late) - fmean(early) > STANDARD_ERRORS * standard_error(early, late)


def standard_error(some: Sequence[float], others: Sequence[float]) -> float:
    """The standard error of the difference of two means.

    >>> standard_error([0.0, 2.0], [5.0, 5.0])
    1.0
    """
    return math.sqrt(variance_of_mean(some) + variance_of_mean(others))


def paired(now: Sequence[float], before: Sequence[float]) -> tuple[float, float]:
    """The mean difference of pairs, and its standard error.

    >>> paired([2.0, 4.0], [1.0, 1.0])
    (2.0, 1.0)
    """
    differences = [a - b for a, b in zip(now, before, strict=True)]
    return fmean(differences), math.sqrt(variance_of_mean(differences))
