"""From a score of the whole response to a reward, an advantage and a return for each of its tokens."""

from typing import Literal

import torch
from torch import Tensor


def token_rewards(score: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float, dense: Tensor | None = None) -> Tensor:
    """The reward of each token: the KL penalty everywhere, and the score at the last real token.

    ``rewards[b, t] = -kl_coef * kl[b, t] + (score[b] if t is the last real token of row b else 0) + dense[b, t]``

    Each row adds up to ``score - kl_coef * kl.sum() + dense.sum()``. The score stands *at* the last real token,
    EOS included, not one later (TRL since 0.12) and not at every token (ColossalChat).

    Args:
        score: [B], of the whole response.
        kl: [B, R], nats, as from ``kl_estimate`` with "k1"; under padding anything at all.
        mask: [B, R] bool, True on real response tokens; they need not be without holes.
        kl_coef: 0 or more.
        dense: [B, R], rewards of single tokens, as from a reward for each step; under padding anything at all.
            None is 0.

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
    if dense is not None:
        rewards = rewards + torch.where(mask, dense, 0)
    return rewards.detach()


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    value_lambda: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, and the returns that the values learn to predict.

    ``delta[t] = rewards[t] + gamma * values[t + 1] - values[t]``
    ``advantages[t] = delta[t] + gamma * gae_lambda * advantages[t + 1]``
    ``returns[t] = advantages[t] + values[t]``, with value_lambda in the place of gae_lambda if it is given

    Here t + 1 is the next *real* token, so a hole in the mask is as if its tokens weren't there. After the
    last one the value is 0: the response has ended. One that was cut at the length limit is treated alike;
    its score, given to it as it stands, is all it gets, and no value stands in for what might have followed.

    Args:
        rewards: [B, R], as from ``token_rewards``; under padding anything at all.
        values: [B, R], of the state *before* each token, so of the prompt at t = 0; under padding anything.
        mask: [B, R] bool, True on real response tokens.
        gamma: discount, 0 to 1; usually 1 for responses, which end.
        gae_lambda: 0 to 1. 1 is the return less the value (no bias from the values), 0 the one-step error.
        value_lambda: 0 to 1, the lambda of the returns only; None takes gae_lambda. With 1 the returns are
            the discounted sums of the rewards to come, and don't depend on the values.

    Returns:
        (advantages, returns): [B, R] each, 0 under padding, without gradient. The advantages aren't
        whitened, and the returns are made of the advantages as they are here.

    Schulman et al. 2016 (arXiv 1506.02438), equation 16; as a recursion in Schulman et al. 2017
    (arXiv 1707.06347), equations 11 and 12. Two lambdas: Yuan et al. 2025 (arXiv 2503.01491).

    >>> rewards, values = torch.tensor([[0.0, 1.0, 1e6]]), torch.tensor([[0.5, 0.25, 1e6]])
    >>> mask = torch.tensor([[True, True, False]])
    >>> advantages, returns = gae(rewards, values, mask, gamma=1.0, gae_lambda=0.5)
    >>> advantages  # deltas 0 + 0.25 - 0.5 and 1 + 0 - 0.25; -0.25 + 0.5 * 0.75
    tensor([[0.1250, 0.7500, 0.0000]])
    >>> returns
    tensor([[0.6250, 1.0000, 0.0000]])
    """
    rewards, values = rewards.detach(), values.detach()
    advantages = _lambda_advantages(rewards, values, mask, gamma, gae_lambda)
    if value_lambda is None or value_lambda == gae_lambda:
        value_advantages = advantages
    else:
        value_advantages = _lambda_advantages(rewards, values, mask, gamma, value_lambda)
    return torch.where(mask, advantages, 0), torch.where(mask, value_advantages + values, 0)


def _lambda_advantages(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """The recursion of ``gae`` from the last token to the first; under padding anything at all."""
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        is_real = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(is_real, delta + gamma * gae_lambda * next_advantage, next_advantage)
        next_value = torch.where(is_real, values[:, t], next_value)
        advantages[:, t] = next_advantage
    return advantages


def reward_to_go(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """The discounted sum of the rewards from each token on: the advantage of REINFORCE, without a baseline.

    ``returns[t] = rewards[t] + gamma * returns[t + 1]``

    Here t + 1 is the next *real* token, and after the last one there is nothing. It is ``gae`` with all values
    0 and lambda 1. Whitened over the batch it is the advantage of REINFORCE++.

    Args:
        rewards: [B, R], as from ``token_rewards``; under padding anything at all.
        mask: [B, R] bool, True on real response tokens.
        gamma: discount, 0 to 1; usually 1.

    Returns:
        [B, R], 0 under padding, without gradient.

    Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning";
    REINFORCE++: Hu 2025 (arXiv 2501.03262).

    >>> reward_to_go(torch.tensor([[1.0, 2.0, 1e6]]), torch.tensor([[True, True, False]]), gamma=0.5)
    tensor([[2., 2., 0.]])
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, gae_lambda=1.0)[0]


def group_advantages(
    totals: Tensor,
    *,
    samples_per_prompt: int,
    kind: Literal["rloo", "grpo", "dr_grpo", "mean"],
    eps: float = 1e-6,
) -> Tensor:
    """How much better each response is than the others to the same prompt.

    ``rloo: totals - mean of the others``
    ``grpo: (totals - mean) / (std + eps)``
    ``dr_grpo, mean: totals - mean``

    The mean and the unbiased standard deviation (n - 1) are those of the group of n. dr_grpo has the response
    itself in what it subtracts, and is (n - 1) / n times rloo for that: the same direction, a shorter step.
    grpo makes prompts whose responses differ a little weigh as much as those where they differ a lot.

    Args:
        totals: [B], of the whole response, for example the score less the KL penalty; prompt-major: the n
            responses to a prompt stand together.
        samples_per_prompt: n, 2 or more.
        kind: "rloo", "grpo", "dr_grpo" or "mean", which is another name for "dr_grpo".
        eps: added to the standard deviation, outside any root; only "grpo" reads it (verl 1e-6, TRL 1e-4).

    Returns:
        [B], without gradient; exactly 0 throughout a group whose totals are all equal.

    Raises:
        ValueError: fewer than 2 samples per prompt, a B that isn't a multiple of it, or another kind.

    rloo: Ahmadian et al. 2024 (arXiv 2402.14740); grpo: Shao et al. 2024 (arXiv 2402.03300); dr_grpo: Liu et
    al. 2025 (arXiv 2503.20783).

    >>> totals = torch.tensor([1.0, 3.0, 5.0, 5.0])
    >>> group_advantages(totals, samples_per_prompt=2, kind="rloo")
    tensor([-2.,  2.,  0.,  0.])
    >>> group_advantages(totals, samples_per_prompt=2, kind="dr_grpo")
    tensor([-1.,  1.,  0.,  0.])
    >>> group_advantages(totals, samples_per_prompt=2, kind="grpo")  # std sqrt(2)
    tensor([-0.7071,  0.7071,  0.0000,  0.0000])
    """
    if samples_per_prompt < 2:
        raise ValueError(f"samples_per_prompt is {samples_per_prompt}: a group of fewer than 2 has no others")
    if totals.shape[0] % samples_per_prompt:
        raise ValueError(f"{totals.shape[0]} responses aren't groups of {samples_per_prompt}")
    groups = totals.detach().view(-1, samples_per_prompt)
    # The mean of equal numbers may be off by a rounding, which a std of nearly 0 would blow up.
    all_equal = groups.amin(-1, keepdim=True) == groups.amax(-1, keepdim=True)
    deviation = torch.where(all_equal, 0, groups - groups.mean(-1, keepdim=True))
    if kind == "rloo":
        advantages = deviation * (samples_per_prompt / (samples_per_prompt - 1))
    elif kind == "grpo":
        advantages = deviation / (groups.std(-1, keepdim=True) + eps)
    elif kind in ("dr_grpo", "mean"):
        advantages = deviation
    else:
        raise ValueError(f"kind is {kind!r}, not one of rloo, grpo, dr_grpo, mean")
    return advantages.reshape(-1)


def spread(advantages: Tensor, mask: Tensor) -> Tensor:
    """The advantage of a response to each of its tokens.

    ``spread[b, t] = advantages[b]`` where the token is real, 0 elsewhere

    Args:
        advantages: [B].
        mask: [B, R] bool, True on real response tokens.

    Returns:
        [B, R], 0 under padding, without gradient. Every token has the whole of it, not a share.

    >>> spread(torch.tensor([2.0, 3.0]), torch.tensor([[True, True], [True, False]]))
    tensor([[2., 2.],
            [3., 0.]])
    """
    return torch.where(mask, advantages.detach().unsqueeze(-1), 0)
