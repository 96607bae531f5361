"""A policy against the one it started from: before and after, win rates, and best-of-n as a yardstick."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.algorithms.best_of_n import best_of_n, best_of_n_kl, best_of_n_kl_bound
from rlhf_cli.algorithms.bootstrap import bootstrap_interval
from rlhf_cli.algorithms.comparison import wins
from rlhf_cli.algorithms.overoptimization import fit_gold_curve
from rlhf_cli.algorithms.tilt import exponential_tilt, tilt_beta
from rlhf_cli.evaluation.figures import difference_figure, equal_length_figure, mean_figure, rate_figure, share_figure
from rlhf_cli.evaluation.language_model import reply_figures
from rlhf_cli.evaluation.replies import Replies
from rlhf_cli.report.figure import Figure, Figures

PERCENTILES = (10, 50, 90)
TILT_POINTS = 20
MIN_DISTANCES = 5
"""Points of a curve with two coefficients. Fewer fit any shape."""
MIN_KL = 1e-3
"""Nats. Points nearer to the start say nothing about the curve."""


def side_figures(replies: Replies, *, seed: int) -> Figures:
    """One policy's first reply to each prompt: scores, each reward, gold numbers, KL, form."""
    score = replies.score[:, 0]
    figures = {"score": rate_figure(score, seed=seed)}
    for percent in PERCENTILES:
        q = percent / 100
        low, high = bootstrap_interval(lambda rows, q=q: rows.quantile(q, dim=-1), score, seed=seed)
        figures[f"score_p{percent}"] = Figure(score.quantile(q).item(), low, high, len(score))
    if len(replies.each) > 1:
        figures |= {f"reward/{name}": rate_figure(values[:, 0], seed=seed) for name, values in replies.each.items()}
    figures |= {name: rate_figure(values[:, 0], seed=seed) for name, values in replies.gold.items()}
    figures["kl"] = mean_figure(replies.kl[:, 0], seed=seed)
    texts = [row[0] for row in replies.texts]
    return figures | reply_figures(texts, replies.length[:, 0], replies.ended[:, 0], seed=seed)


def differences(before: Replies, after: Replies, *, seed: int) -> Figures:
    """After minus before, paired by prompt."""
    columns = {"score": (before.score, after.score)}
    columns |= {f"reward/{name}": (before.each[name], after.each[name]) for name in before.each if len(before.each) > 1}
    columns |= {name: (before.gold[name], after.gold[name]) for name in before.gold}
    figures = {name: difference_figure(b[:, 0], a[:, 0], seed=seed) for name, (a, b) in columns.items()}
    for name, change in (("kl", after.kl - before.kl), ("length", after.length - before.length)):
        figures[name] = mean_figure(change[:, 0], seed=seed)
    return figures | {"eos_rate": difference_figure(after.ended[:, 0], before.ended[:, 0], seed=seed)}


def win_rates(before: Replies, after: Replies) -> Figures:
    """How often the reply after is better than the one before, by score and by the judge; ties count 1/2.

    `..._equal_length` is the rate that would remain if both were as long (`length_controlled_win_rate`).
    """
    judges = {"score": (before.score, after.score)}
    if (name := before.gold_name) is not None:
        judges[name] = (before.gold[name], after.gold[name])
    figures: Figures = {}
    for judge, (a, b) in judges.items():
        won = wins(b[:, 0], a[:, 0])
        figures[judge] = share_figure(won)
        figures[f"{judge}_equal_length"] = equal_length_figure(won, after.length[:, 0], before.length[:, 0])
    return figures


# ----------------------------------------------------------------------------------------- best of n


@dataclass(frozen=True)
class Yardstick:
    """Best-of-n of the SFT model, for one n."""

    n: int
    score: Figure
    gold: Figure | None
    length: Figure
    kl: float
    """Estimated KL to the SFT model, in nats."""
    kl_bound: float
    """Upper bound of that KL, ``log(n) - (n - 1) / n``."""

    def as_json(self) -> dict[str, Any]:
        """The figures as JSON values."""
        gold = {} if self.gold is None else {"gold": self.gold.as_json()}
        return {
            "n": self.n,
            "score": self.score.as_json(),
            **gold,
            "length": self.length.as_json(),
            "kl": self.kl,
            "kl_bound": self.kl_bound,
        }


def yardsticks(samples: Replies, *, seed: int) -> list[Yardstick]:
    """Best-of-n for n = 1, 2, 4, ... up to the number of samples, from one set of samples of the SFT model."""
    most = samples.score.shape[1]
    counts = [2**i for i in range(most.bit_length()) if 2**i <= most]
    if counts[-1] != most:
        counts.append(most)
    gold = samples.gold[samples.gold_name] if samples.gold_name is not None else None
    found = []
    for n in counts:
        kl = best_of_n_kl(samples.logprob, n)
        others = [samples.length, kl] if gold is None else [samples.length, kl, gold]
        score, length, kl, *rest = best_of_n(samples.score, n, *others)
        found.append(
            Yardstick(
                n,
                mean_figure(score, seed=seed),
                mean_figure(rest[0], seed=seed) if rest else None,
                mean_figure(length, seed=seed),
                kl.mean().item(),
                best_of_n_kl_bound(n),
            )
        )
    return found


def best_of_every_n(samples: Replies) -> list[dict[str, float]]:
    """The mean score, KL and gold of best-of-n for every n up to the number of samples."""
    gold = [samples.gold[samples.gold_name]] if samples.gold_name is not None else []
    found = []
    for n in range(1, samples.score.shape[1] + 1):
        values = best_of_n(samples.score, n, best_of_n_kl(samples.logprob, n), *gold)
        found.append({"n": n, **dict(zip(("score", "kl", "gold"), (x.mean().item() for x in values), strict=False))})
    return found


def samples_needed(samples: Replies, score: float) -> int | None:
    """The smallest n whose best-of-n reaches this mean score; None if no n up to the number of samples does."""
    low, high = 1, samples.score.shape[1]
    if _mean_best(samples.score, high) < score:
        return None
    while low < high:  # The expected best score grows with n.
        middle = (low + high) // 2
        low, high = (low, middle) if _mean_best(samples.score, middle) >= score else (middle + 1, high)
    return low


def samples_needed_interval(samples: Replies, score: Tensor, *, seed: int) -> tuple[float, float]:
    """The 95 % interval of `samples_needed` for a policy's [P] scores; prompts are resampled.

    One more than the number of samples stands for a number that is out of reach.
    """
    prompts, most = samples.score.shape
    curve = torch.stack([best_of_n(samples.score, n)[0] for n in range(1, most + 1)], dim=1)  # [P, N]

    def needed(rows: Tensor) -> Tensor:
        share = torch.zeros(len(rows), prompts, dtype=torch.float64)
        share.scatter_add_(1, rows, torch.full(rows.shape, 1 / prompts, dtype=torch.float64))
        return 1 + ((share @ curve) < (share @ score.double())[:, None]).sum(1)

    return bootstrap_interval(needed, torch.arange(prompts), seed=seed)


def _mean_best(score: Tensor, n: int) -> float:
    return best_of_n(score, n)[0].mean().item()


def gold_at_score(samples: Replies, score: float) -> float | None:
    """The gold score of best-of-n where its score is `score`, interpolated between two n; None if out of reach."""
    if samples.gold_name is None:
        return None
    gold, most = samples.gold[samples.gold_name], samples.score.shape[1]
    n = samples_needed(samples, score)
    if n is None:
        return None
    points = [[x.mean().item() for x in best_of_n(samples.score, m, gold)] for m in (max(1, n - 1), min(n, most))]
    (score_a, gold_a), (score_b, gold_b) = points
    if score_b == score_a:
        return gold_b
    return gold_a + (gold_b - gold_a) * (score - score_a) / (score_b - score_a)


# ------------------------------------------------------------------------------------------ the tilt


def best_of_n_at(samples: Replies, kl: float) -> Tensor:
    """[P] scores of best-of-n at this mean KL, interpolated between two n; beyond the largest n, those of it."""
    counts = range(1, samples.score.shape[1] + 1)
    rows = [best_of_n(samples.score, n, best_of_n_kl(samples.logprob, n)) for n in counts]
    score = torch.stack([row[0] for row in rows])  # [N, P]
    distance = torch.stack([row[1].mean() for row in rows]).cummax(0).values
    right = min(max(1, int(torch.searchsorted(distance, kl))), len(rows) - 1)
    left = max(0, right - 1)
    part = ((kl - distance[left]) / (distance[right] - distance[left]).clamp_min(1e-12)).clamp(0, 1)
    return score[left] * (1 - part) + score[right] * part


@dataclass(frozen=True)
class Tilt:
    """The exponential tilt of the SFT samples at a KL."""

    kl: float
    beta: float
    score: Tensor
    """[P]"""
    gold: Tensor | None
    """[P], with a judge."""

    def as_json(self) -> dict[str, float]:
        """The KL, beta, and the means over prompts."""
        gold = {} if self.gold is None else {"gold": self.gold.mean().item()}
        return {"kl": self.kl, "beta": self.beta, "score": self.score.mean().item(), **gold}


def tilted(samples: Replies, kl: float) -> Tilt | None:
    """The exponential tilt of the SFT samples at this KL; None if so few samples cannot express that KL.

    The true tilt has the best score of any policy there. Its estimate is too low where the KL is near the logarithm of
    the number of samples, and surely so where `best_of_n_at` is above it.
    """
    try:
        beta = tilt_beta(samples.score, kl)
    except ValueError:
        return None
    weights, _ = exponential_tilt(samples.score, beta=beta)
    gold = None
    if samples.gold_name is not None:
        gold = (weights * samples.gold[samples.gold_name]).sum(1)
    return Tilt(kl, beta, (weights * samples.score).sum(1), gold)


def tilt_curve(samples: Replies, highest: float) -> list[dict[str, float]]:
    """`tilted` at KLs from 0.1 to a little above `highest`, up to the first that is below best-of-n."""
    grid = [0.1 + i * (1.1 * highest - 0.1) / (TILT_POINTS - 1) for i in range(TILT_POINTS)] if highest > 0.1 else []
    curve = []
    for kl in grid:
        tilt = tilted(samples, kl)
        if tilt is None or tilt.score.mean() < best_of_n_at(samples, kl).mean():
            break
        curve.append(tilt.as_json())
    return curve


def share_of_gain(own: Tensor, best: Tensor, start: Tensor, *, seed: int) -> Figure:
    """How much of the gain of `best` over `start` a policy has, from [P] scores each: resampled over prompts."""

    def share(own: Tensor, best: Tensor, start: Tensor) -> Tensor:
        return (own.mean(-1) - start.mean(-1)) / (best.mean(-1) - start.mean(-1))

    columns = [column.double() for column in (own, best, start)]
    return Figure(share(*columns).item(), *bootstrap_interval(share, *columns, seed=seed), len(own))


# ------------------------------------------------------------------------------- gold along the run


def gold_curve(points: Sequence[Mapping[str, float]], gold_name: str) -> dict[str, Any] | None:
    """The fit of Gao et al. 2023 to the held-out figures along a PPO run, and where on the curve the run ended.

    `points` are rows with `kl` and the gold number, first the policy before training. None with fewer than
    MIN_DISTANCES distances above 0.
    """
    start = points[0][gold_name]
    used = [point for point in points if point["kl"] > MIN_KL]
    distance = torch.tensor([point["kl"] ** 0.5 for point in used], dtype=torch.float64)
    if len(distance.unique()) < MIN_DISTANCES:
        return None
    gold = torch.tensor([point[gold_name] for point in used], dtype=torch.float64)
    curve = fit_gold_curve(distance, gold, start=start)
    found: dict[str, Any] = {
        "start": start,
        "points": [{"d": d, "gold": g} for d, g in zip(distance.tolist(), gold.tolist(), strict=True)],
    }
    for name, value, error in (("a", curve.a, curve.error_a), ("b", curve.b, curve.error_b)):
        found[name] = Figure(value, value - error, value + error, len(distance)).as_json()
    found["peak"] = curve.peak
    found["end"] = distance[-1].item()
    return found
