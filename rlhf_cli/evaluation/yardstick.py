"""PPO beside yardsticks that need no training, best-of-n and the exponential tilt, and the figures along a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.algorithms.best_of_n import best_of_n, best_of_n_kl, best_of_n_kl_bound
from rlhf_cli.algorithms.overoptimization import fit_gold_curve
from rlhf_cli.algorithms.statistics import bootstrap_interval
from rlhf_cli.algorithms.tilt import exponential_tilt, tilt_beta
from rlhf_cli.data.splits import Drawn
from rlhf_cli.evaluation.figures import Sentences, as_json, bootstrapped, mean_figure, show
from rlhf_cli.evaluation.replies import Arena, Replies
from rlhf_cli.report.figure import Figure, Figures
from rlhf_cli.report.run_data import evaluations_of
from rlhf_cli.run.artifacts import stage_directory
from rlhf_cli.trained.run import Run

MOST_SHOWN = 10  # rows of the table of a run, beside its start
TILT_POINTS = 20
MIN_DISTANCES = 5
"""Points of a curve with two coefficients. Fewer fit any shape."""
MIN_KL = 1e-3
"""Nats. Points nearer to the start say nothing about the curve."""


def _gold(replies: Replies) -> list[Tensor]:
    """The numbers of the judge, [P, K]; empty without one."""
    return [] if replies.gold_name is None else [replies.gold[replies.gold_name]]


class BestOfN:
    """Best-of-n of the SFT model for every n up to the number N of its samples to each of P prompts."""

    def __init__(self, samples: Replies):
        self.samples, (self.prompts, self.most) = samples, samples.score.shape
        rows = [
            best_of_n(samples.score, n, best_of_n_kl(samples.logprob, n), samples.length, *_gold(samples))
            for n in range(1, self.most + 1)
        ]
        names = ["score", "kl", "length", "gold"][: len(rows[0])]
        self.curves = {name: torch.stack([row[i] for row in rows], dim=1) for i, name in enumerate(names)}
        """[P, N] float64, by n - 1: score, KL, length, and gold with a judge."""

    def mean(self, name: str, n: int) -> float:
        return self.curves[name][:, n - 1].mean().item()

    def rows(self, *, seed: int) -> list[dict[str, Any]]:
        """n = 1, 2, 4, ... and N: figures of score, gold and length, the estimated KL in nats, and its upper bound."""
        found = []
        for n in sorted({2**i for i in range(self.most.bit_length())} | {self.most}):
            names = [name for name in ("score", "gold", "length") if name in self.curves]
            row: dict[str, Any] = {"n": n}
            row |= {name: mean_figure(self.curves[name][:, n - 1], seed=seed) for name in names}
            found.append(row | {"kl": self.mean("kl", n), "kl_bound": best_of_n_kl_bound(n)})
        return found

    def every_n(self) -> list[dict[str, float]]:
        """The mean score, KL and gold for every n."""
        names = [name for name in ("score", "kl", "gold") if name in self.curves]
        return [{"n": n, **{name: self.mean(name, n) for name in names}} for n in range(1, self.most + 1)]

    def needed(self, score: float) -> int | None:
        """The smallest n whose mean score is at least this one; None if no n up to N reaches it."""
        return next((n for n in range(1, self.most + 1) if self.mean("score", n) >= score), None)

    def needed_interval(self, score: Tensor, *, seed: int) -> tuple[float, float]:
        """The 95 % interval of `needed` for a policy's [P] scores; prompts are resampled. N + 1 is out of reach."""

        def needed(rows: Tensor) -> Tensor:
            share = self._shares(rows)
            return 1 + ((share @ self.curves["score"]) < (share @ score.double())[:, None]).sum(1)

        return bootstrap_interval(needed, torch.arange(self.prompts), seed=seed)

    def gold_at(self, score: float) -> float | None:
        """The mean gold where the mean score is this one, interpolated between two n; None if out of reach."""
        if "gold" not in self.curves or self.needed(score) is None:
            return None
        scores, gold = (self.curves[name].mean(0, keepdim=True) for name in ("score", "gold"))
        return _interpolated(scores, torch.tensor([score], dtype=torch.float64), gold)[1].item()

    def score_at(self, kl: float) -> Tensor:
        """[P] scores at this mean KL, interpolated between two n; beyond N the scores of N."""
        distance = self.curves["kl"].mean(0).expand(self.prompts, -1)
        return _interpolated(distance, torch.full((self.prompts,), kl, dtype=torch.float64), self.curves["score"])[1]

    def beside(self, after: Replies, *, seed: int) -> tuple[float, dict[str, Figures]] | None:
        """(n, figures of best-of-n, PPO and their difference) at PPO's KL, interpolated; None if no n reaches it.

        `after` are PPO's replies to the same prompts. The intervals come from resampling the prompts. Each resample
        matches the KL again, so they include the uncertainty of both KLs.
        """
        names = {"score": "score"} if after.gold_name is None else {"score": "score", "gold": after.gold_name}
        curves = torch.stack([self.curves[name] for name in ("kl", *names)])  # [C, P, N]
        own = torch.stack([after.kl, after.score, *_gold(after)])[:, :, 0].double()  # [C, P]
        if own[0].mean() > curves[0].mean(0).max() or self.most < 2:
            return None

        def matched(rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            """n [B], and figures [C, B] of both sides, of resamples with these row numbers [B, P]."""
            share = self._shares(rows)
            means, ppo = torch.einsum("bp,cpn->cbn", share, curves), torch.einsum("bp,cp->cb", share, own)
            n, *best = _interpolated(means[0], ppo[0], *means[1:])
            return n, {"best_of_n": torch.stack(best), "ppo": ppo[1:], "difference": ppo[1:] - torch.stack(best)}

        everyone = torch.arange(self.prompts)
        n, sides = matched(everyone[None])

        def figure(side: str, i: int) -> Figure:
            interval = bootstrap_interval(lambda rows: matched(rows)[1][side][i], everyone, seed=seed)
            return Figure(sides[side][i, 0].item(), *interval, self.prompts)

        shown = names.values()
        return n.item(), {side: {name: figure(side, i) for i, name in enumerate(shown)} for side in sides}

    def _shares(self, rows: Tensor) -> Tensor:
        """[B, P]: how much each prompt counts in resamples with these row numbers [B, P]."""
        share = torch.zeros(len(rows), self.prompts, dtype=torch.float64)
        return share.scatter_add_(1, rows, torch.full(rows.shape, 1 / self.prompts, dtype=torch.float64))


def _interpolated(distance: Tensor, at: Tensor, *curves: Tensor) -> list[Tensor]:
    """n [B], and the values [B] of [B, N] curves where their [B, N] distance, by n - 1, is `at` [B]."""
    rising = distance.cummax(-1).values
    right = torch.searchsorted(rising, at[:, None].contiguous()).clamp_min(1).clamp_max(rising.shape[1] - 1)
    left = (right - 1).clamp_min(0)
    low, high = rising.gather(1, left), rising.gather(1, right)
    part = ((at[:, None] - low) / (high - low).clamp_min(1e-12)).clamp(0, 1)
    values = [curve.gather(1, left) * (1 - part) + curve.gather(1, right) * part for curve in curves]
    return [value[:, 0] for value in (left + 1 + part, *values)]


# ------------------------------------------------------------------------------------------ the tilt


def tilted(samples: Replies, kl: float) -> tuple[Tensor, dict[str, float]] | None:
    """The exponential tilt of the SFT samples at this KL: its [P] scores, and its KL, beta and means for the file.

    None if so few samples cannot express that KL.

    The true tilt has the best score of any policy there. Its estimate is too low where the KL is near the logarithm of
    the number of samples, and surely so where best-of-n is above it.
    """
    try:
        beta = tilt_beta(samples.score, kl)
    except ValueError:
        return None
    weights, _ = exponential_tilt(samples.score, beta=beta)
    score, *gold = ((weights * values).sum(1) for values in (samples.score, *_gold(samples)))
    means = zip(("score", "gold"), (score, *gold), strict=False)
    return score, {"kl": kl, "beta": beta, **{name: values.mean().item() for name, values in means}}


def tilt_curve(best: BestOfN, highest: float) -> list[dict[str, float]]:
    """`tilted` at KLs from 0.1 to a little above `highest`, up to the first that is below best-of-n."""
    grid = [0.1 + i * (1.1 * highest - 0.1) / (TILT_POINTS - 1) for i in range(TILT_POINTS)] if highest > 0.1 else []
    curve = []
    for kl in grid:
        tilt = tilted(best.samples, kl)
        if tilt is None or tilt[0].mean() < best.score_at(kl).mean():
            break
        curve.append(tilt[1])
    return curve


def share_of_gain(own: Tensor, best: Tensor, start: Tensor, *, seed: int) -> Figure:
    """The share of the gain of `best` over `start` that a policy has, from [P] scores each: resampled over prompts."""

    def share(own: Tensor, best: Tensor, start: Tensor) -> Tensor:
        return (own.mean(-1) - start.mean(-1)) / (best.mean(-1) - start.mean(-1))

    return bootstrapped(share, own, best, start, seed=seed)


def best_of_n_report(
    arena: Arena, after: Replies, num_samples: int, num_prompts: int, sentences: Sentences, *, seed: int
) -> dict[str, Any]:
    """Best-of-n of the SFT model on some of the prompts, beside PPO on the same prompts."""
    every, drawn = len(arena.prompts), Drawn(arena.prompts, num_prompts, seed)
    arena.prompts, after = drawn, after.of(drawn.numbers)
    best = BestOfN(arena.replies(arena.reference, num_samples))
    rows, last = best.rows(seed=seed), best.most
    numbers = zip(("score", "kl", "gold"), (after.score, after.kl, *_gold(after)), strict=False)
    own = {name: values[:, 0].mean().item() for name, values in numbers}
    names = [name for name in ("score", "gold") if name in own]
    lines = [
        [f"best of {row['n']}", *(str(row[name]) for name in names), f"{row['kl']:.2f}", f"{row['kl_bound']:.2f}"]
        for row in rows
    ]
    lines.append(["PPO", *(f"{own[name]:.3f}" for name in names), f"{own['kl']:.2f}", ""])
    heads = ["", *names, "KL", "KL at most"]
    sentences.display.table(f"Best-of-n of the SFT model, {drawn} prompts", heads, lines)
    needed = best.needed(own["score"])
    says = f"n = {needed}" if needed is not None else f"more than n = {last}"
    low, high = best.needed_interval(after.score[:, 0], seed=seed)
    if len(drawn) > 1:
        most = f"{high:.0f}" if high <= last else f"more than {last}"
        says += f" (95 % interval {low:.0f} to {most})"
    sentences.say(f"to reach PPO's score, best-of-n of the SFT model needs {says} samples a reply")
    found: dict[str, Any] = {
        "prompts": len(drawn),
        "of_prompts": every,
        "n_for_ppo_score": needed,
        "n_for_ppo_score_interval": Figure(math.nan, low, high).as_json(),
        "rows": [{key: x.as_json() if isinstance(x, Figure) else x for key, x in row.items()} for row in rows],
        "every_n": best.every_n(),
    }
    if (same := best.beside(after, seed=seed)) is not None:  # PPO and best-of-n at the same KL
        n, sides = same
        columns = dict(zip((f"best of {n:.0f}", "PPO", "difference"), sides.values(), strict=True))
        show(sentences.display, f"PPO and best-of-n at the same KL of {own['kl']:.2f} nats", columns)
        found["at_ppo_kl"] = {"n": n} | {name: as_json(figures) for name, figures in sides.items()}
    found["ppo"] = own
    found |= beside_the_best(best, after.score[:, 0], own["kl"], sentences, seed=seed)
    found["tilt_curve"] = tilt_curve(best, max(own["kl"], best.mean("kl", last)))
    if "gold" in own and (same_score := best.gold_at(own["score"])) is not None:
        found["gold_at_ppo_score"] = same_score
        sentences.say(f"gold at PPO's score of {own['score']:.3f}: best-of-n {same_score:.3f}, PPO {own['gold']:.3f}")
    elif "gold" in own:
        sentences.say(
            f"no best-of-n has PPO's score. Best-of-{last} has score {best.mean('score', last):.3f} and gold "
            f"{best.mean('gold', last):.3f}, PPO {own['score']:.3f} and {own['gold']:.3f}"
        )
    return found


def beside_the_best(best: BestOfN, own: Tensor, kl: float, sentences: Sentences, *, seed: int) -> dict[str, Any]:
    """The share of PPO, with [P] scores `own`, in the gain that its KL allows: `yardstick`; and `tilt` if the samples
    can express the KL. {} if it allows none.

    The yardstick is the exponential tilt or best-of-n, whichever has the higher score: both are policies with at most
    PPO's KL.
    """
    found: dict[str, Any] = {}
    start, highest, tilt = best.samples.score.mean(1), best.score_at(kl), tilted(best.samples, kl)
    if kl <= 0 or not highest.mean() > start.mean():
        why = "the samples of each prompt have the same score"
        why = why if kl > 0 else f"PPO's KL of {kl:z.1f} nats is not above 0"
        sentences.say(f"{why}, so there is no gain at that KL with which PPO can be compared")
        return {}
    name = "best_of_n"
    if tilt is not None:
        found["tilt"] = tilt[1]
        if tilt[0].mean() >= highest.mean():
            name, highest = "tilt", tilt[0]
    share = share_of_gain(own, highest, start, seed=seed)
    found["yardstick"] = {"policy": name, "score": highest.mean().item(), "share": share.as_json()}
    gain = f"{highest.mean().item():.3f}; PPO has {share:%} of its gain over SFT"
    if name == "tilt":
        sentences.say(f"the exponential tilt of the samples, about the best possible at PPO's KL, has the score {gain}")
        return found
    if tilt is None:
        sentences.say(
            f"what the best policy gains at PPO's KL of {kl:.1f} nats cannot be estimated from {best.most} samples a "
            "prompt. Give more --samples"
        )
    else:
        sentences.say(
            f"{best.most} samples a prompt are too few to estimate what the best policy gains at PPO's KL: the "
            f"estimate, {tilt[1]['score']:.3f}, is below best-of-n. Give more --samples"
        )
    sentences.say(f"best-of-n at PPO's KL or less has the score {gain}. The best possible is higher")
    return found


# ------------------------------------------------------------------------------------------ along the run


def along_the_run(run: Run, gold_name: str | None, sentences: Sentences) -> dict[str, Any]:
    """Score, KL and gold at the evaluations that PPO wrote while it trained, and the fit to gold; {} without them."""
    points = evaluations_of(stage_directory(run.root, "ppo"))
    if not points:
        sentences.say(
            "without evaluation.every_iterations in ppo.yaml there are no score, gold and KL along the run, no fit to "
            "gold, and no place on its curve where the run ended"
        )
        return {}
    names = {"score": "score_mean", "kl": "kl"}
    if gold_name is not None and gold_name in points[0]:  # a judge that has changed since may name it otherwise
        names["gold"] = gold_name
    shown = [points[i] for i in sorted({round(j * (len(points) - 1) / MOST_SHOWN) for j in range(MOST_SHOWN + 1)})]
    lines = [[f"{point['step']:,}", *(f"{point[name]:.3f}" for name in names.values())] for point in shown]
    heads = ["iteration", *("KL" if name == "kl" else name for name in names)]
    sentences.display.table("Along the run, held-out prompts", heads, lines)
    along = [{"step": point["step"], **{label: point[name] for label, name in names.items()}} for point in points]
    report: dict[str, Any] = {"along": along}
    if "gold" in names and (curve := gold_curve(points, names["gold"])) is not None:
        report["gold_curve"] = curve
        a, b = (Figure(**{"value": math.nan} | curve[name]) for name in ("a", "b"))
        text = f"gold along the run: gold(0) + d (a - b log d) with d = sqrt(KL), a = {a}, b = {b}"
        peak, end = curve["peak"], curve["end"]
        if b.low <= 0 or peak is None:
            sentences.say(
                f"{text}. b is not surely above 0, so these KLs do not show a peak; the run ended at d = {end:.2f}"
            )
        else:
            place = "before the peak: gold was still rising" if end < peak else "behind the peak: gold was falling"
            sentences.say(
                f"{text}. It peaks at d = {peak:.2f} (KL {peak**2:.1f}); the run ended at d = {end:.2f}, {place}"
            )
    return report


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
    figures = {
        name: Figure(value, value - error, value + error, len(distance)).as_json()
        for name, value, error in (("a", curve.a, curve.error_a), ("b", curve.b, curve.error_b))
    }
    drawn = [{"d": d, "gold": g} for d, g in zip(distance.tolist(), gold.tolist(), strict=True)]
    return {"start": start, "points": drawn, **figures, "peak": curve.peak, "end": distance[-1].item()}
