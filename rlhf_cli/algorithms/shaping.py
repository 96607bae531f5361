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
