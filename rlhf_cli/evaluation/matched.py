"""PPO beside best-of-n of the SFT model at the same KL, on the same prompts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_cli.algorithms.best_of_n import best_of_n, best_of_n_kl
from rlhf_cli.algorithms.bootstrap import bootstrap_interval
from rlhf_cli.evaluation.replies import Replies
from rlhf_cli.report.figure import Figure, Figures


@dataclass(frozen=True)
class Matched:
    """Both policies at PPO's KL."""

    n: float
    """The n of best-of-n that has this KL, interpolated."""
    best_of_n: Figures
    ppo: Figures
    difference: Figures
    """PPO minus best-of-n."""


def at_same_kl(samples: Replies, after: Replies, *, seed: int) -> Matched | None:
    """Score and gold of PPO and of best-of-n at PPO's KL; None if no n up to the number of samples reaches it.

    Best-of-n is interpolated between two n. The intervals come from resampling the prompts. Each resample matches the
    KL again, so they include the uncertainty of both KLs.

    Args:
        samples: of the SFT model, [P, K].
        after: PPO's replies to these prompts.
        seed: of the resampling.
    """
    prompts, most = samples.score.shape
    names = ["score", *([] if samples.gold_name is None else [samples.gold_name])]
    columns = [samples.score, *(samples.gold[name] for name in names[1:])]
    own = [after.score, *(after.gold[name] for name in names[1:])]
    rows = [best_of_n(samples.score, n, best_of_n_kl(samples.logprob, n), *columns[1:]) for n in range(1, most + 1)]
    score, kl, *gold = (torch.stack(column, dim=1) for column in zip(*rows, strict=True))  # [P, K] each, by n
    curves = torch.stack([kl, score, *gold])
    points = torch.stack([column[:, 0].double() for column in (after.kl, *own)])
    if points[0].mean() > curves[0].mean(0).max() or most < 2:
        return None

    def matched(index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """n [B], and best-of-n and PPO [C, B], of resamples with these row numbers [B, P]."""
        share = torch.zeros(len(index), prompts, dtype=torch.float64)
        share.scatter_add_(1, index, torch.full(index.shape, 1 / prompts, dtype=torch.float64))
        means, ppo = torch.einsum("bp,cpn->cbn", share, curves), torch.einsum("bp,cp->cb", share, points)
        distance = means[0].cummax(-1).values
        right = torch.searchsorted(distance, ppo[0][:, None]).clamp(1, most - 1)
        low, high = distance.gather(1, right - 1), distance.gather(1, right)
        part = ((ppo[0][:, None] - low) / (high - low).clamp_min(1e-12)).clamp(0, 1)
        best = [curve.gather(1, right - 1) * (1 - part) + curve.gather(1, right) * part for curve in means[1:]]
        return (right + part)[:, 0], torch.stack(best)[:, :, 0], ppo[1:]

    everyone = torch.arange(prompts)
    n, best, ppo = matched(everyone[None])

    def figure(value: Tensor, i: int, side: int | None) -> Figure:
        def statistic(index: Tensor) -> Tensor:
            _, best, ppo = matched(index)
            return ppo[i] - best[i] if side is None else (best, ppo)[side][i]

        return Figure(value.item(), *bootstrap_interval(statistic, everyone, seed=seed), prompts)

    return Matched(
        n.item(),
        {name: figure(best[i, 0], i, 0) for i, name in enumerate(names)},
        {name: figure(ppo[i, 0], i, 1) for i, name in enumerate(names)},
        {name: figure(ppo[i, 0] - best[i, 0], i, None) for i, name in enumerate(names)},
    )
