"""Statistics for reports: differences of rates, correlation of two rankings, diversity of texts, intervals by
the bootstrap.

They are computed in float64 on the CPU and returned as Python floats.
"""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from math import pi, sqrt, tan
from statistics import NormalDist

import torch
from torch import Tensor

from rlhf_cli.algorithms.counts import wilson_interval


def newcombe_interval(after: Tensor, before: Tensor) -> tuple[float, float]:
    """The 95 % interval of the difference of two success rates on the same rows, ``mean(after) - mean(before)``.

    With the Wilson intervals (l, u) of both rates p, and phi the correlation of the two columns:

    ``low = difference - sqrt((p1 - l1)**2 - 2 * phi * (p1 - l1) * (u2 - p2) + (u2 - p2)**2)``
    ``high = difference + sqrt((u1 - p1)**2 - 2 * phi * (u1 - p1) * (p2 - l2) + (p2 - l2)**2)``

    A phi above 0 has a continuity correction. It is 0 if a column is constant, so two equal columns of ones do not give
    an interval of width 0.

    `after` and `before` are [n], 0 or 1, in the same order.

    Newcombe 1998, "Improved confidence intervals for the difference between binomial proportions based on paired
    data", Statistics in Medicine 17, method 10.

    >>> low, high = newcombe_interval(torch.ones(100), torch.ones(100))
    >>> round(low, 3), round(high, 3)
    (-0.037, 0.037)
    """
    a, b, n = after.double(), before.double(), len(after)
    sums = a.sum().item(), b.sum().item()
    both, neither = (a * b).sum().item(), ((1 - a) * (1 - b)).sum().item()
    product = sums[0] * (n - sums[0]) * sums[1] * (n - sums[1])
    cross = both * neither - (sums[0] - both) * (sums[1] - both)
    cross = max(cross - n / 2, 0.0) if cross > 0 else cross
    phi = cross / sqrt(product) if product else 0.0
    (p1, p2), ((l1, u1), (l2, u2)) = (x / n for x in sums), (wilson_interval(x, n) for x in sums)
    below = sqrt(max(0.0, (p1 - l1) ** 2 - 2 * phi * (p1 - l1) * (u2 - p2) + (u2 - p2) ** 2))
    above = sqrt(max(0.0, (u1 - p1) ** 2 - 2 * phi * (u1 - p1) * (p2 - l2) + (p2 - l2) ** 2))
    return p1 - p2 - below, p1 - p2 + above


def pearson(x: Tensor, y: Tensor) -> float:
    """The Pearson correlation of x and y.

    ``sum((x - mean(x)) * (y - mean(y))) / sqrt(sum((x - mean(x))**2) * sum((y - mean(y))**2))``

    If x or y is constant, or there are fewer than two pairs, the quotient is 0 / 0 and the result is 0.

    `x` and `y` are [n], in the same order. The result is -1 to 1, or NaN if one of them contains NaN.

    >>> pearson(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 6.0]))
    1.0
    """
    x, y = x.detach().cpu().double(), y.detach().cpu().double()
    if x.numel() == 0 or x.min() == x.max() or y.min() == y.max():
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    return float((x.dot(y) / (x.dot(x) * y.dot(y)).sqrt()).clamp(-1, 1))


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """The Pearson correlations of [..., n] pairs, [...]: `pearson` of each row of a batch, as a bootstrap needs it.

    >>> correlation(torch.tensor([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]]), torch.tensor([[2.0, 4.0, 6.0]] * 2))
    tensor([1., 0.])
    """
    is_constant = (a.amax(-1) == a.amin(-1)) | (b.amax(-1) == b.amin(-1))
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    quotient = (a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()
    return torch.where(is_constant, 0.0, quotient.clamp(-1, 1))


def spearman(x: Tensor, y: Tensor) -> float:
    """The rank correlation of x and y: 1 if both give the same order.

    ``pearson(rank(x), rank(y))``

    Equal numbers share the mean of their ranks. The result is 0 if x or y is constant.

    `x` and `y` are [n], in the same order. The result is -1 to 1, or NaN if one of them contains NaN.

    Spearman 1904, "The proof and measurement of association between two things".

    >>> spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 10.0, 100.0]))
    1.0
    >>> spearman(torch.tensor([1.0, 2.0, 2.0]), torch.tensor([3.0, 1.0, 1.0]))  # ranks 1 2.5 2.5, 3 1.5 1.5
    -1.0
    """
    return pearson(ranks(x), ranks(y))


def kendall(x: Tensor, y: Tensor, count: Tensor | None = None) -> Tensor:
    """Kendall's tau-b: how much more often x and y agree on the order of two rows than disagree, corrected for ties.

    ``sum over i < j of sign(x[i] - x[j]) * sign(y[i] - y[j]) / sqrt(pairs untied in x * pairs untied in y)``

    If x or y is constant, or there are fewer than two pairs, the quotient is 0 / 0 and the result is 0.

    `x` and `y` are [n], in the same order; time and memory grow with n squared. `count` [..., n] says how often each
    row is there, as in resamples of the rows; once by default. The result is [...] float64, -1 to 1.

    Kendall 1945, "The treatment of ties in ranking problems".

    >>> kendall(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 3.0, 2.0]))  # they agree on two of three pairs
    tensor(0.3333, dtype=torch.float64)
    """
    a, b = _order(x), _order(y)
    same, untied_x, untied_y = (_over_pairs(matrix, count) for matrix in (a * b, a.abs(), b.abs()))
    return same / (untied_x * untied_y).sqrt().clamp_min(1e-12)


def pair_accuracy(x: Tensor, y: Tensor, count: Tensor | None = None) -> Tensor:
    """The share of pairs that x orders as y does, among the pairs whose y differ.

    ``mean over pairs with y[i] > y[j] of (1 if x[i] > x[j], 1/2 if x[i] == x[j], else 0)``

    If y has two distinct values, this is the area under the ROC curve. If y is constant, it is 1/2.

    `x` are [n] predictions and `y` [n] targets, in the same order; `count` is as for `kendall`. The result is [...]
    float64, 0 to 1.

    >>> pair_accuracy(torch.tensor([0.1, 0.9, 0.5]), torch.tensor([0.0, 1.0, 1.0]))
    tensor(1., dtype=torch.float64)
    """
    a, above = _order(x), (_order(y) > 0).float()
    right, pairs = (_over_pairs(matrix, count) for matrix in (above * (a + 1) / 2, above))
    return torch.where(pairs > 0, right / pairs.clamp_min(1), 0.5)


def _order(x: Tensor) -> Tensor:
    """[n, n] 1 where x[i] > x[j], 0 where they are equal, else -1."""
    return (x[:, None] - x[None, :]).sign().float()


def _over_pairs(matrix: Tensor, count: Tensor | None) -> Tensor:
    """The sum of a [n, n] matrix over pairs of rows, each of which is there [..., n] times: [...] float64."""
    count = torch.ones(len(matrix)) if count is None else count
    return ((count @ matrix) * count).double().sum(-1)


def ranks(x: Tensor) -> Tensor:
    """Ranks from 1; equal numbers get the mean of their ranks, and NaN stays NaN.

    >>> ranks(torch.tensor([5.0, 2.0, 2.0])).tolist()
    [3.0, 1.5, 1.5]
    """
    _, group, size = x.unique(return_inverse=True, return_counts=True)
    rank = size.cumsum(0) - (size.double() - 1) / 2
    return torch.where(x.isnan(), torch.nan, rank[group])


def distinct_n(sequences: Sequence[Sequence[Hashable]], n: int) -> float:
    """The share of distinct n-grams among all n-grams of all sequences.

    ``number of distinct n-grams / number of n-grams``

    It falls with the amount of text, so compare only samples of similar size. A sequence shorter than n has no n-gram;
    without any n-gram the share is 0.

    The `sequences` are lists of words or token ids; no n-gram crosses from one to the next. The share is low if the
    texts repeat themselves or each other.

    Li et al. 2016 (arXiv 1510.03055), section 5.

    >>> distinct_n([[1, 2, 1, 2], [1, 2]], 2)  # 12 21 12, 12: two of four
    0.5
    """
    ngrams = [tuple(ids[i : i + n]) for ids in sequences for i in range(len(ids) - n + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def distinct_n_interval(sequences: Sequence[Sequence[Hashable]], n: int) -> tuple[float, float]:
    """The 95 % interval of `distinct_n` by the jackknife: leave out each sequence, and take 1.96 standard errors.

    The bootstrap does not apply: a resample repeats sequences, so it always has fewer distinct n-grams.
    (NaN, NaN) for fewer than two sequences.

    Efron and Tibshirani 1993, "An introduction to the bootstrap", chapter 11.

    >>> distinct_n_interval([[1, 2], [3, 4]], 1)
    (1.0, 1.0)
    """
    rows = [Counter(tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)) for ids in sequences]
    if len(rows) < 2:
        return float("nan"), float("nan")
    holders = Counter(ngram for row in rows for ngram in row)
    total, value = sum(row.total() for row in rows), distinct_n(sequences, n)
    without = []
    for row in rows:
        others = total - row.total()
        own = sum(holders[ngram] == 1 for ngram in row)
        without.append((len(holders) - own) / others if others else 0.0)
    mean = sum(without) / len(rows)
    error = sqrt((len(rows) - 1) / len(rows) * sum((x - mean) ** 2 for x in without))
    return max(0.0, value - 1.96 * error), min(1.0, value + 1.96 * error)


def word_shares(texts: Sequence[str]) -> dict[str, float]:
    """The share of texts that contain each word, whatever its case.

    A word is a run of letters, digits and underscores, and is returned in lower case.

    >>> word_shares(["Great film, great cast!", "A dull film."])
    {'cast': 0.5, 'film': 1.0, 'great': 0.5, 'a': 0.5, 'dull': 0.5}
    """
    counts = Counter(word for text in texts for word in sorted(set(re.findall(r"\w+", text.lower()))))
    return {word: count / len(texts) for word, count in counts.items()}


# ------------------------------------------------------------------------------------------- intervals by the bootstrap


CHUNK = 1 << 22
"""Numbers that are resampled at the same time."""


def bootstrap_interval(
    statistic: Callable[..., Tensor], *columns: Tensor, seed: int, num_resamples: int = 2000
) -> tuple[float, float]:
    """The 95 % interval of a statistic of n independent rows, by the expanded percentile bootstrap.

    Rows are drawn with replacement, the same rows of every column, so columns that belong together stay paired. The
    plain percentile interval is too narrow for small n. The quantiles are therefore those of
    ``Phi(-sqrt(n / (n - 1)) * t)`` with t the quantile of Student's distribution with n - 1 degrees of freedom
    (Hesterberg 2015, "What teachers should know about the bootstrap", section 5.3).

    `statistic` maps resampled columns, [B, n] each, to [B]; the columns are [n]. The same seed gives the same interval.
    With fewer than two rows both ends are NaN.

    >>> mean = lambda x: x.mean(-1)
    >>> low, high = bootstrap_interval(mean, torch.tensor([0.0, 1.0] * 50), seed=0)
    >>> round(low, 1), round(high, 1)  # 0.5 plus and minus 1.98 * 0.05
    (0.4, 0.6)
    """
    n = len(columns[0])
    if n < 2:
        return float("nan"), float("nan")
    generator = torch.Generator().manual_seed(seed)
    values = []
    for start in range(0, num_resamples, step := max(1, CHUNK // n)):
        size = min(step, num_resamples - start)
        rows = torch.randint(n, (size, n), generator=generator)
        values.append(statistic(*(column[rows] for column in columns)).double())
    tail = NormalDist().cdf(-sqrt(n / (n - 1)) * student_quantile(0.975, n - 1))
    low, high = torch.cat(values).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


def student_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t distribution: exact for 1 and 2 degrees of freedom, else by the Cornish-Fisher
    expansion to the third order.

    At probability 0.975 the error is below 0.001 for 10 degrees of freedom or more, and below 1 % for 3 or more.

    >>> [round(student_quantile(0.975, freedom), 3) for freedom in (1, 2, 10, 1000)]
    [12.706, 4.303, 2.228, 1.962]
    """
    if freedom == 1:
        return tan(pi * (probability - 0.5))
    if freedom == 2:
        share = 2 * probability - 1
        return share * sqrt(2 / (1 - share**2))
    z, v = NormalDist().inv_cdf(probability), float(freedom)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / v + second / v**2 + third / v**3
