"""How unusual a vector is among others: the Mahalanobis distance, with a covariance that few samples can give."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gaussian:
    """A normal distribution over vectors of H numbers, its covariance by eigenvectors. In all else it has `rest`."""

    mean: Tensor
    """[H]."""
    directions: Tensor
    """[H, r], orthonormal: the eigenvectors of the samples' covariance."""
    variances: Tensor
    """[r], above 0: the variance along each."""
    rest: float
    """Above 0: the variance in every direction that is orthogonal to them."""


def shrunk_gaussian(x: Tensor) -> Gaussian:
    """The normal distribution of samples, with the covariance S shrunk towards a multiple of the identity (OAS).

    ``covariance = (1 - rho) S + rho (tr S / H) I``
    ``rho = min(1, ((1 - 2/H) tr S^2 + (tr S)^2) / ((n + 1 - 2/H) (tr S^2 - (tr S)^2 / H)))``

    `x` is [n, H], finite; n may be far below H, which only makes rho larger. Float64 on the CPU. Samples that are all
    equal get the variance 1.

    Chen, Wiesel, Eldar and Hero 2010, "Shrinkage Algorithms for MMSE Covariance Estimation" (arXiv 0907.4698), eq. 23.

    >>> shrunk_gaussian(torch.tensor([[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]])).variances
    tensor([2.9375, 2.0625], dtype=torch.float64)
    """
    n, size = x.shape
    x = x.detach().cpu().double()
    mean = x.mean(0)
    _, singular, rows = torch.linalg.svd(x - mean, full_matrices=False)
    variances = singular.square() / n
    trace, squares = variances.sum(), variances.square().sum()
    if trace == 0:
        return Gaussian(mean, rows.T, torch.ones_like(variances), 1.0)
    spread = (squares - trace.square() / size).clamp_min(0)
    rho = (((1 - 2 / size) * squares + trace.square()) / ((n + 1 - 2 / size) * spread)).clamp_max(1)
    rest = (rho * trace / size).item()
    return Gaussian(mean, rows.T, (1 - rho) * variances + rest, rest)


def whitened(x: Tensor, home: Gaussian) -> Tensor:
    """Vectors in coordinates in which the distribution is the standard normal one.

    ``covariance^(-1/2) (x - mean)``, whose length is the Mahalanobis distance of x from the mean.

    [n, H] of any float type -> [n, H] float64 on the CPU. The square of the length is H on average over vectors of the
    distribution.

    Mahalanobis 1936. As a sign of reward hacking, of a reward model's features: Miao et al. 2024, "InfoRM" (arXiv
    2402.09345).

    >>> home = Gaussian(torch.zeros(2).double(), torch.eye(2).double()[:, :1], torch.tensor([4.0]).double(), rest=1.0)
    >>> whitened(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), home)
    tensor([[1., 0.],
            [0., 2.]], dtype=torch.float64)
    """
    away = x.detach().cpu().double() - home.mean
    along = away @ home.directions  # [n, r]
    return away / home.rest**0.5 + (along / home.variances.sqrt() - along / home.rest**0.5) @ home.directions.T


def squared_shift(total: Tensor, squares: float, n: int) -> float:
    """The squared length of the mean of a distribution, from n vectors z of it; without bias, so it may be negative.

    ``mean over i != j of z_i . z_j = (|sum z|^2 - sum |z|^2) / (n (n - 1))``

    `total` is the sum [H] of the vectors, `squares` that of their squared lengths, and n, 2 or more, their number.

    >>> squared_shift(torch.tensor([6.0, 0.0]), squares=18.0, n=2)  # twice (3, 0)
    9.0
    """
    return (total.square().sum().item() - squares) / (n * (n - 1))
