"""From a score of the whole response to a reward, an advantage and a return for each of its tokens."""

import torch
from torch import Tensor


def token_rewards(score: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
    """The reward of each token: the KL penalty everywhere, and the score at the last real token.

    ``rewards[b, t] = -kl_coef * kl[b, t] + (score[b] if t is the last real token of row b else 0)``

    Each row adds up to ``score - kl_coef * kl.sum()``. The score stands *at* the last real token, EOS
    included, not one later (TRL since 0.12) and not at every token (ColossalChat).

    Args:
        score: [B], of the whole response.
        kl: [B, R], nats, as from ``kl_estimate`` with "k1"; under padding anything at all.
        mask: [B, R] bool, True on real response tokens; they need not be without holes.
        kl_coef: 0 or more.

    Returns:
        [B, R], 0 under padding, without gradient.

    Raises:
        ValueError: a row has no real token, so its score has no place.

    Ziegler et al. 2019 (arXiv 1909.08593), equation 2; there for the whole response.

    >>> mask = torch.tensor([[True, True, False]])
    >>> token_rewards(torch.tensor([2.0]), torch.tensor([[1.0, 3.0, 1e6]]), mask, kl_coef=0.5)
    tensor([[-0.5000,  0.5000,  0.0000]])
    """
    empty_rows = (~mask.any(-1)).nonzero().flatten().tolist()
    if empty_rows:
        raise ValueError(f"no real token in rows {empty_rows} of {mask.shape[0]}, so no place for the score")
    is_last = mask & (mask.cumsum(-1) == mask.sum(-1, keepdim=True))
    rewards = torch.where(is_last, score.unsqueeze(-1), 0) - kl_coef * torch.where(mask, kl, 0)
    return rewards.detach()


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, and the returns that the values learn to predict.

    ``delta[t] = rewards[t] + gamma * values[t + 1] - values[t]``
    ``advantages[t] = delta[t] + gamma * gae_lambda * advantages[t + 1]``
    ``returns[t] = advantages[t] + values[t]``

    Here t + 1 is the next *real* token, so a hole in the mask is as if its tokens weren't there. After the
    last one the value is 0: the response has ended. One that was cut at the length limit is treated alike;
    its score, given to it as it stands, is all it gets, and no value stands in for what might have followed.

    Args:
        rewards: [B, R], as from ``token_rewards``; under padding anything at all.
        values: [B, R], of the state *before* each token, so of the prompt at t = 0; under padding anything.
        mask: [B, R] bool, True on real response tokens.
        gamma: discount, 0 to 1; usually 1 for responses, which end.
        gae_lambda: 0 to 1. 1 is the return less the value (no bias from the values), 0 the one-step error.

    Returns:
        (advantages, returns): [B, R] each, 0 under padding, without gradient. The advantages aren't
        whitened, and the returns are made of the advantages as they are here.

    Schulman et al. 2016 (arXiv 1506.02438), equation 16; as a recursion in Schulman et al. 2017
    (arXiv 1707.06347), equations 11 and 12.

    >>> rewards, values = torch.tensor([[0.0, 1.0, 1e6]]), torch.tensor([[0.5, 0.25, 1e6]])
    >>> mask = torch.tensor([[True, True, False]])
    >>> advantages, returns = gae(rewards, values, mask, gamma=1.0, gae_lambda=0.5)
    >>> advantages  # deltas 0 + 0.25 - 0.5 and 1 + 0 - 0.25; -0.25 + 0.5 * 0.75
    tensor([[0.1250, 0.7500, 0.0000]])
    >>> returns
    tensor([[0.6250, 1.0000, 0.0000]])
    """
    rewards, values = rewards.detach(), values.detach()
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        is_real = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(is_real, delta + gamma * gae_lambda * next_advantage, next_advantage)
        next_value = torch.where(is_real, values[:, t], next_value)
        advantages[:, t] = next_advantage
    return torch.where(mask, advantages, 0), torch.where(mask, advantages + values, 0)
