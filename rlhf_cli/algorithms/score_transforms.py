"""What is done to a response's score before it becomes a reward: moments that normalise it, comparisons, limits, a clip
and several penalties.

Each penalty is 0 or more and is subtracted from the score.
"""

from dataclasses import dataclass
from math import exp, sqrt

import torch
from torch import Tensor

LEAST_LAMBDA, MOST_LAMBDA = 1e-3, 1e3
"""The range of a limit's multiplier. At its ends the score, or the limit, hardly counts."""


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
    def std(self) -> float:
        """Unbiased standard deviation, ``sqrt(squared_deviations / (count - 1))``.

        It is 1 for fewer than two numbers, so that dividing by it leaves their scale unchanged. For two or more equal
        numbers it is 0: guard the division.
        """
        return sqrt(self.squared_deviations / (self.count - 1)) if self.count >= 2 else 1.0


def merge(moments: Moments, new: Moments) -> Moments:
    """The moments of two sets of numbers together, from the moments of each.

    ``shift = new.mean - moments.mean``
    ``mean = moments.mean + shift * new.count / (moments.count + new.count)``
    ``squared_deviations = moments.squared_deviations + new.squared_deviations``
    ``+ shift**2 * moments.count * new.count / (moments.count + new.count)``

    Exact up to rounding, whatever the order and the split into batches. Either set may be empty.

    Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".

    >>> merge(Moments(2, 3.0, 2.0), Moments(1, 6.0, 0.0))  # 2 and 4, then 6
    Moments(count=3, mean=4.0, squared_deviations=8.0)
    """
    if not new.count:
        return moments
    total, shift = moments.count + new.count, new.mean - moments.mean
    between = shift * shift * moments.count * new.count / total
    return Moments(
        count=total,
        mean=moments.mean + shift * new.count / total,
        squared_deviations=moments.squared_deviations + new.squared_deviations + between,
    )


def moments_of(x: torch.Tensor) -> Moments:
    """The moments of the numbers in a tensor.

    ``Moments(x.numel(), mean(x), sum((x - mean(x))**2))``

    `x` has any shape and may be empty; there is no mask, so pass real entries only. The result is computed in float64
    on the CPU in two passes.

    >>> moments_of(torch.tensor([2.0, 4.0]))
    Moments(count=2.0, mean=3.0, squared_deviations=2.0)
    """
    if x.numel() == 0:
        return Moments()
    x = x.detach().cpu().double()
    mean = x.mean()
    return Moments(float(x.numel()), float(mean), float((x - mean).square().sum()))


# ----------------------------------------------------------------------------------------------- from scores to rewards


def clip_score(score: Tensor, clip: float) -> Tensor:
    """Clip the score to a range, so that no single response dominates a batch.

    ``min(max(score, -clip), clip)``

    [B] -> [B]; `clip` is above 0, in units of the score. The KL penalty is added later, so it is not clipped.

    >>> clip_score(torch.tensor([-9.0, 0.5, 3.0]), 2.0)
    tensor([-2.0000,  0.5000,  2.0000])
    """
    return score.clamp(-clip, clip)


def pessimistic_score(scores: Tensor, beta: float) -> Tensor:
    """One score from several reward models, nearer to the lowest the more they disagree.

    ``-beta log mean_k exp(-r_k / beta)``

    With beta the coefficient of the KL, the best policy under this score is the reference times the harmonic mean of
    the members' ``exp(r_k / beta)``: a response gains only if all members like it. The second order in 1 / beta is the
    mean minus ``variance / (2 beta)`` (Coste et al. 2023, arXiv 2310.02743, subtract a multiple of the variance).

    `scores` is [K, B], one row for each member. With beta 0 it is the lowest score, with infinity the mean. The result
    is [B].

    >>> scores = torch.tensor([[1.0, 2.0], [1.0, 0.0]])
    >>> [pessimistic_score(scores, beta) for beta in (0.0, 1.0, float("inf"))]
    [tensor([1., 0.]), tensor([1.0000, 0.5662]), tensor([1., 1.])]
    """
    lowest = scores.min(0).values
    if beta == 0:
        return lowest
    if beta == torch.inf:
        return scores.mean(0)
    # From the lowest score, and with expm1 and log1p: exact for a small and for a large beta.
    above = (scores - lowest).double() / beta
    return lowest - beta * torch.log1p(torch.expm1(-above).mean(0)).to(scores.dtype)


def log_sigmoid_score(score: Tensor, references: Tensor, *, quantile: float) -> Tensor:
    """The log-probability that a response is good: better than most replies of the reference policy to its prompt.

    ``log(sigmoid(score - r_ref))``, with ``r_ref`` the quantile of the references' scores

    It saturates: a response far better than r_ref gains almost nothing by becoming better still, and one far below it
    loses as much as its score. The sum over several scores is the log-probability that the response is good by all.

    `score` [B] is the logit of a reward model learned from pairs; in other units, the sigmoid has another slope.
    `references` [B, M] are the scores of M replies to the prompt of each response, and `quantile` is 0 to 1, linearly
    interpolated between them. The result is [B], below 0.

    Wang et al. 2024 (arXiv 2402.00742), equation 3.

    >>> log_sigmoid_score(torch.tensor([1.0]), torch.tensor([[0.0, 1.0, 2.0]]), quantile=0.5)  # log(1 / 2)
    tensor([-0.6931])
    """
    return torch.nn.functional.logsigmoid(score - references.quantile(quantile, dim=1))


def preference_score(score: Tensor, references: Tensor) -> Tensor:
    """The probability that a response is preferred to a reply of the reference policy: preference as reward (PAR).

    ``mean_m sigmoid(score - references_m)``

    `score` [B] and `references` [B, M] are as for `log_sigmoid_score`. The result is [B], 0 to 1.

    Fu et al. 2025 (arXiv 2502.18770).

    >>> preference_score(torch.tensor([1.0]), torch.tensor([[1.0, -100.0]]))
    tensor([0.7500])
    """
    return torch.sigmoid(score.unsqueeze(1) - references).mean(1)


def limited_score(score: Tensor, excess: Tensor, lambdas: Tensor) -> Tensor:
    """The Lagrangian of a score under limits on others, divided by the sum of its weights.

    ``(score - sum_i lambdas_i * excess_i) / (1 + sum_i lambdas_i)``

    Advantages are linear in the rewards and values: with a value model that predicts the return of this score,
    ``A = (A_score - lambda * A_excess) / (1 + lambda)``, the advantage of Safe RLHF, without a second value model. The
    KL is added later and keeps its weight, so for fixed lambdas the optimum is the reference times
    ``exp(limited_score / kl_coef)``. No policy with its KL and its mean excess has a higher mean score.

    `score` is [B]; `excess` [N, B], by how much each response is beyond each limit (below 0 within it); `lambdas` [N],
    above 0. The result is [B].

    Dai et al. 2023 (arXiv 2310.12773), section 3.2.

    >>> limited_score(torch.tensor([2.0]), torch.tensor([[-1.0], [0.5]]), torch.tensor([1.0, 2.0]))
    tensor([0.5000])
    """
    return (score - lambdas @ excess) / (1 + lambdas.sum())


def next_lambda(lam: float, excess: float, *, learning_rate: float) -> float:
    """The next multiplier of a limit, by gradient ascent on its logarithm.

    ``lam * exp(clip(learning_rate * lam * excess, -0.2, 0.2))``, between 0.001 and 1000

    ``lam * excess`` is the gradient of ``lam * excess`` by ``log(lam)``. It grows with lam, so without the clip a limit
    that cannot be met would let lam explode within a few steps.

    `lam` and `learning_rate` are above 0; `excess` is the mean over responses of how much they are beyond the limit,
    below 0 within it. Returns the multiplier for the next rollout; NaN if excess is NaN.

    Dai et al. 2023 (arXiv 2310.12773), the update of lambda, there without the clip.

    >>> round(next_lambda(2.0, 0.5, learning_rate=0.1), 4), next_lambda(1000.0, 0.5, learning_rate=0.1)
    (2.2103, 1000.0)
    """
    step = min(max(learning_rate * lam * excess, -0.2), 0.2)
    return min(max(lam * exp(step), LEAST_LAMBDA), MOST_LAMBDA)


def length_penalty(lengths: Tensor, *, per_token: float) -> Tensor:
    """A penalty for each token of the response.

    ``per_token * lengths``

    `lengths` [B] are the tokens of each response, EOS included; `per_token` is in units of the score. The result is
    [B].

    >>> length_penalty(torch.tensor([1, 10]), per_token=0.5)
    tensor([0.5000, 5.0000])
    """
    return per_token * lengths


def overlong_penalty(lengths: Tensor, *, max_new_tokens: int, buffer: int, penalty: float) -> Tensor:
    """A penalty for a response that comes near the length limit.

    ``penalty * clip((lengths - (max_new_tokens - buffer)) / buffer, 0, 1)``

    It is 0 up to max_new_tokens - buffer, the full penalty at max_new_tokens, and linear in between. Only the length
    counts: a response whose EOS is its last possible token pays the full penalty.

    `lengths` [B] are the tokens of each response, EOS included; `buffer` is 1 to max_new_tokens, in tokens; `penalty`
    is in units of the score. The result is [B], 0 to penalty. Raises ValueError for a buffer below 1.

    Yu et al. 2025 (arXiv 2503.14476), "soft overlong punishment", with a penalty of 1.

    >>> overlong_penalty(torch.tensor([6, 7, 9, 10]), max_new_tokens=10, buffer=4, penalty=2.0)
    tensor([0.0000, 0.5000, 1.5000, 2.0000])
    """
    if buffer < 1:
        raise ValueError(f"buffer is {buffer}, but it must be 1 or more")
    return penalty * ((lengths - (max_new_tokens - buffer)) / buffer).clamp(0, 1)


def missing_eos(ended: Tensor, *, penalty: float) -> Tensor:
    """A penalty for a response that was cut at the length limit.

    ``0 if ended else penalty``

    `ended` [B] is True if the response ended with a stop token or a stop string; `penalty` is in units of the score.
    The result is [B] float32.

    >>> missing_eos(torch.tensor([True, False]), penalty=1.5)
    tensor([0.0000, 1.5000])
    """
    return penalty * (~ended).to(torch.float32)
