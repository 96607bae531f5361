"""What the length of a reply tells of its score, and the score without it."""

from typing import NamedTuple

import torch
from torch import Tensor

NUM_POINTS = 33
SPAN = 0.5


def reply_length(text: str, eos: str | None = None) -> int:
    """The length that a reward model is corrected by: characters, without space around them and an `eos` behind them.

    Characters are the same for every tokenizer.

    >>> reply_length(" Hello! "), reply_length("Hi</s>", "</s>")
    (6, 2)
    """
    return len(text.strip().removesuffix(eos or "").rstrip())


class LengthCurve(NamedTuple):
    """A piecewise linear function of the length: two tensors [G], the lengths increasing."""

    lengths: Tensor
    values: Tensor


def regression_on_length(lengths: Tensor, scores: Tensor, *, span: float = SPAN) -> LengthCurve:
    """The score that a length predicts, minus the mean score: locally weighted linear regression.

    ``value(x) = a_x - mean(scores)``, where ``a_x, b_x`` minimise ``sum_i w_i (scores_i - a_x - b_x (l_i - x))^2`` with
    ``w_i = (1 - (|l_i - x| / h)^3)^3`` for ``|l_i - x| < h``, and h is the distance to the nearest share `span` of the
    replies. It is computed at quantiles of the lengths. A score minus its value has no trend with length, so
    optimising it does not pay by length alone, and the mean score stays.

    Where all near replies have one length, the slope is 0.

    `lengths` [n] are in any unit, and n is above 0. A small `span` (above 0, at most 1) follows the data, 1 is nearly
    one line. The curve is in float64 and has at most `NUM_POINTS` points; `value_at` reads it.

    Cleveland 1979 (LOWESS, here without its robust iterations); Huang et al. 2024 (arXiv 2409.17407) correct rewards by
    it.

    >>> curve = regression_on_length(torch.tensor([1.0, 2.0, 3.0, 5.0]), torch.tensor([0.0, 1.0, 2.0, 4.0]), span=1.0)
    >>> value_at(curve, torch.tensor([1.0, 2.5, 5.0, 9.0])) + 1.75
    tensor([0.0000, 1.5000, 4.0000, 4.0000], dtype=torch.float64)
    """
    lengths, scores = lengths.double(), scores.double()
    at = lengths.quantile(torch.linspace(0, 1, NUM_POINTS, dtype=torch.float64)).unique()  # [G]
    away = lengths - at[:, None]  # [G, n]
    near = max(2, round(span * len(lengths)))
    # A little beyond the farthest near reply, whose weight would be 0.
    width = away.abs().sort(1).values[:, min(near, len(lengths)) - 1, None] * (1 + 1e-3) + 1e-9
    weight = (1 - (away.abs() / width).clamp(max=1) ** 3) ** 3
    weight = weight / weight.sum(1, keepdim=True)
    middle, level = (weight * away).sum(1), (weight * scores).sum(1)
    spread = (weight * (away - middle[:, None]) ** 2).sum(1)
    product = (weight * (away - middle[:, None]) * scores).sum(1)
    slope = torch.where(spread > 1e-12, product / spread.clamp_min(1e-12), 0.0)
    curve = LengthCurve(at, level - slope * middle)
    return LengthCurve(at, curve.values - value_at(curve, lengths).mean())


def value_at(curve: LengthCurve, lengths: Tensor) -> Tensor:
    """The curve at [B] lengths, [B] float64: linear between its points.

    Before the first point and behind the last one it is constant: nothing was measured there.

    >>> value_at(LengthCurve(torch.tensor([2.0, 4.0]), torch.tensor([0.0, 1.0])), torch.tensor([1, 2, 3, 9]))
    tensor([0.0000, 0.0000, 0.5000, 1.0000], dtype=torch.float64)
    """
    at, values, lengths = curve.lengths.double(), curve.values.double(), lengths.double()
    if len(at) == 1:
        return values.expand(len(lengths)).clone()
    right = torch.searchsorted(at, lengths).clamp(1, len(at) - 1)
    share = ((lengths - at[right - 1]) / (at[right] - at[right - 1])).clamp(0, 1)
    return torch.lerp(values[right - 1], values[right], share)
