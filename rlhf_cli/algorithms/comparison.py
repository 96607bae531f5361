"""Which of several policies is better: win rates, win rates at equal length, Bradley-Terry strengths."""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 0.1
"""Weight of half the squared coefficients in the logistic regression, beside a weight of 1 for each row. It keeps the
coefficients finite if one side always wins."""


def wins(a: Tensor, b: Tensor) -> Tensor:
    """For each pair of numbers, 1 if a is larger, 0 if b is, 1/2 if they are equal: the shape of both, float64.

    >>> wins(torch.tensor([2.0, 1.0]), torch.tensor([1.0, 1.0]))
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    return ((a - b).sign().double() + 1) / 2


def length_controlled_win_rate(win: Tensor, length_a: Tensor, length_b: Tensor) -> tuple[float, float, float]:
    """The win rate that A would have if its replies were as long as B's, and its 95 % interval.

    Fits ``P(win) = sigmoid(strength + slope * tanh(d / std(d)))`` with d the difference of lengths, by logistic
    regression; the rate is ``sigmoid(strength)``. The interval is Wald's, on the strength: its standard error comes
    from the curvature of the fit. Ties make it wider than needed.

    `win` is [n], 1, 1/2 or 0: whether A's reply won. The lengths are [n], in one unit. Returns (rate, low, high); the
    interval is NaN for fewer than two rows.

    Dubois et al. 2024 (arXiv 2404.04475), section 3, without the terms of single prompts.

    >>> win = torch.tensor([1.0, 0.0] * 50)
    >>> [round(x, 1) for x in length_controlled_win_rate(win, torch.zeros(100), torch.zeros(100))]
    [0.5, 0.4, 0.6]
    """
    y, d = win.double(), (length_a - length_b).double()
    spread = d.std(correction=0)
    term = torch.tanh(d / spread) if spread > 0 else torch.zeros_like(d)
    x = torch.stack([torch.ones_like(term), term], dim=1)  # [n, 2]
    penalty = RIDGE * torch.eye(2, dtype=torch.float64)
    weight = torch.zeros(2, dtype=torch.float64)  # strength, slope
    for _ in range(50):  # Newton's method; the objective is strictly convex.
        p = torch.sigmoid(x @ weight)
        gradient = x.T @ (p - y) + penalty @ weight
        curvature = (x.T * (p * (1 - p))) @ x + penalty
        step = torch.linalg.solve(curvature, gradient)
        weight = weight - step / max(1.0, float(step.abs().max()))
        if float(step.abs().max()) < 1e-12:
            break
    strength = weight[0]
    half = 1.96 * torch.linalg.inv(curvature)[0, 0].sqrt() if len(win) > 1 else torch.tensor(torch.nan)
    rate, low, high = torch.sigmoid(torch.stack([strength, strength - half, strength + half])).tolist()
    return rate, low, high


def bradley_terry(won: Tensor, *, prior: float = 0.5) -> Tensor:
    """Strengths of k players from who beat whom: ``P(i beats j) = sigmoid(strength[i] - strength[j])``.

    The most likely strengths, by the minorization-maximization algorithm, with mean 0.

    `won` is [..., k, k], the number of times that i beat j; a tie counts 1/2 for both, and the diagonal is ignored.
    `prior` wins are added for both sides of every pair, so that strengths stay finite. The result is [..., k] float64,
    in nats.

    Bradley and Terry 1952; Hunter 2004, "MM algorithms for generalized Bradley-Terry models".

    >>> [round(x, 2) for x in bradley_terry(torch.tensor([[0.0, 75.0], [25.0, 0.0]]), prior=0.0).tolist()]
    [0.55, -0.55]
    """
    count = won.double() + prior
    count.diagonal(dim1=-2, dim2=-1).zero_()
    games, total = count + count.mT, count.sum(-1)
    strength = torch.ones_like(total)  # exp of the result
    for _ in range(10_000):
        new = total / (games / (strength[..., :, None] + strength[..., None, :])).sum(-1)
        new = new / new.log().mean(-1, keepdim=True).exp()
        done = (new.log() - strength.log()).abs().max() < 1e-12
        strength = new
        if done:
            break
    return strength.log()
