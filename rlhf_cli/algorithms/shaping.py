"""Shaping of a response's score before it becomes a reward: a clip and several penalties.

Each penalty is 0 or more and is subtracted from the score.
"""

import torch
from torch import Tensor


def clip_score(score: Tensor, clip: float) -> Tensor:
    """Clip the score to a range, so that no single response dominates a batch.

    ``min(max(score, -clip), clip)``

    Args:
        score: [B].
        clip: above 0, in units of the score.

    Returns:
        [B]. The KL penalty is added later, so it is not clipped.

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

    Args:
        scores: [K, B], one row for each member.
        beta: 0 or more; 0 gives the lowest score, infinity the mean.

    Returns:
        [B], between the lowest score and the mean.

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


def length_penalty(lengths: Tensor, *, per_token: float) -> Tensor:
    """A penalty for each token of the response.

    ``per_token * lengths``

    Args:
        lengths: [B], tokens of each response, EOS included.
        per_token: 0 or more, in units of the score.

    Returns:
        [B], 0 or more.

    >>> length_penalty(torch.tensor([1, 10]), per_token=0.5)
    tensor([0.5000, 5.0000])
    """
    return per_token * lengths


def overlong_penalty(lengths: Tensor, *, max_new_tokens: int, buffer: int, penalty: float) -> Tensor:
    """A penalty for a response that comes near the length limit.

    ``penalty * clip((lengths - (max_new_tokens - buffer)) / buffer, 0, 1)``

    It is 0 up to max_new_tokens - buffer, the full penalty at max_new_tokens, and linear in between. Only the length
    counts: a response whose EOS is its last possible token pays the full penalty.

    Args:
        lengths: [B], tokens of each response, EOS included.
        max_new_tokens: the length limit of the sampling.
        buffer: 1 to max_new_tokens, in tokens.
        penalty: 0 or more, in units of the score.

    Returns:
        [B], 0 to penalty.

    Raises:
        ValueError: the buffer is below 1.

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

    Args:
        ended: [B] bool, True if the response ended with a stop token or a stop string.
        penalty: 0 or more, in units of the score.

    Returns:
        [B] float32, 0 or penalty.

    >>> missing_eos(torch.tensor([True, False]), penalty=1.5)
    tensor([0.0000, 1.5000])
    """
    return penalty * (~ended).to(torch.float32)
