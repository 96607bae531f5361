"""Running mean and variance, updated batch by batch without storing the numbers."""

from dataclasses import dataclass
from math import sqrt

import torch


@dataclass(frozen=True)
class Moments:
    """The count of some numbers, their mean, and the sum of their squared deviations from the mean.

    >>> Moments(count=2, mean=3.0, squared_deviations=2.0).std  # of 2 and 4: sqrt(2 / 1)
    1.4142135623730951
    """

    count: float = 0.0
    mean: float = 0.0
    squared_deviations: float = 0.0

    @property
    def var(self) -> float:
        """Population variance, ``squared_deviations / count``; 0 if empty."""
        return self.squared_deviations / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        """Unbiased standard deviation, ``sqrt(squared_deviations / (count - 1))``.

        It is 1 for fewer than two numbers, so that dividing by it leaves their scale unchanged. For two or more equal
        numbers it is 0: guard the division.
        """
        return sqrt(self.squared_deviations / (self.count - 1)) if self.count >= 2 else 1.0


def merge(moments: Moments, count: float, mean: float, squared_deviations: float) -> Moments:
    """The moments of two sets of numbers together, from the moments of each.

    ``shift = mean - moments.mean``
    ``new_mean = moments.mean + shift * count / (moments.count + count)``
    ``new_squared_deviations = moments.squared_deviations + squared_deviations``
    ``+ shift**2 * moments.count * count / (moments.count + count)``

    Exact up to rounding, whatever the order and the split into batches. Either set may be empty.

    Args:
        moments: of the numbers so far; ``Moments()`` if there are none.
        count: how many numbers are new, 0 or more.
        mean: of the new numbers; anything if there are none.
        squared_deviations: of the new numbers from their own mean.

    Returns:
        The moments of all of them.

    Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".

    >>> merge(Moments(2, 3.0, 2.0), 1, 6.0, 0.0)  # 2 and 4, then 6
    Moments(count=3, mean=4.0, squared_deviations=8.0)
    """
    if not count:
        return moments
    total, shift = moments.count + count, mean - moments.mean
    return Moments(
        count=total,
        mean=moments.mean + shift * count / total,
        squared_deviations=(
            moments.squared_deviations + squared_deviations + shift * shift * moments.count * count / total
        ),
    )


def moments_of(x: torch.Tensor) -> Moments:
    """The moments of the numbers in a tensor.

    ``Moments(x.numel(), mean(x), sum((x - mean(x))**2))``

    Args:
        x: any shape, may be empty; there is no mask, so pass real entries only.

    Returns:
        Python floats, computed in float64 on the CPU in two passes.

    >>> moments_of(torch.tensor([2.0, 4.0]))
    Moments(count=2.0, mean=3.0, squared_deviations=2.0)
    """
    if x.numel() == 0:
        return Moments()
    x = x.detach().cpu().double()
    mean = x.mean()
    return Moments(float(x.numel()), float(mean), float((x - mean).square().sum()))
