"""From the score of a response to a reward, an advantage and a return for each of its tokens."""

from collections.abc import Callable
from typing import assert_never

import torch
from torch import Tensor

from rlhf_cli.algorithms.names import GroupBaseline
from rlhf_cli.tensor_ops import masked_sum


def token_rewards(score: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float, dense: Tensor | None = None) -> Tensor:
    """The reward of each token: the KL penalty at every token, and the score at the last real token.

    ``rewards[b, t] = -kl_coef * kl[b, t] + (score[b] if t is the last real token of row b else 0) + dense[b, t]``

    Each row sums to ``score - kl_coef * kl.sum() + dense.sum()``. The score is placed *at* the last real token, EOS
    included. TRL since 0.12 places it one token later; ColossalChat adds it to every token.

    Args:
        score: [B], one per response.
        kl: [B, R], nats, as from ``kl_estimate`` with "k1"; padding may hold anything.
        mask: [B, R] bool, True on real response tokens; it may have holes.
        kl_coef: 0 or more.
        dense: [B, R], rewards of single tokens, for example from a process reward; padding may hold anything. None
            means 0.

    Returns:
        [B, R], 0 under padding, without gradient.

    Raises:
        ValueError: a row has no real token to place its score at.

    Ziegler et al. 2019 (arXiv 1909.08593), equation 2, there for the whole response.

    >>> mask = torch.tensor([[True, True, False]])
    >>> token_rewards(torch.tensor([2.0]), torch.tensor([[1.0, 3.0, 1e6]]), mask, kl_coef=0.5)
    tensor([[-0.5000,  0.5000,  0.0000]])
    """
    empty_rows = (~mask.any(-1)).nonzero().flatten().tolist()
    if empty_rows:
        raise ValueError(f"no real token in rows {empty_rows} of {mask.shape[0]}, so no place for the score")
    last_mask = mask & (mask.cumsum(-1) == mask.sum(-1, keepdim=True))  # [B, R], one True per row
    rewards = torch.where(last_mask, score.unsqueeze(-1), 0) - kl_coef * torch.where(mask, kl, 0)
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
    """Generalised advantage estimation, and the returns that the value model learns to predict.

    ``delta[t] = rewards[t] + gamma * values[t + 1] - values[t]``
    ``advantages[t] = delta[t] + gamma * gae_lambda * advantages[t + 1]``
    ``returns[t] = advantages[t] + values[t]``, with value_lambda in place of gae_lambda if given

    t + 1 is the next *real* token: tokens in a hole of the mask are skipped. The value after the last token is 0,
    because the response has ended. A response that was cut at the length limit counts as ended too: nothing is
    bootstrapped from the value of its last state.

    Args:
        rewards: [B, R], as from ``token_rewards``; padding may hold anything.
        values: [B, R], of the state *before* each token, so of the prompt at t = 0; padding may hold anything.
        mask: [B, R] bool, True on real response tokens.
        gamma: discount, 0 to 1. Usually 1, because responses end.
        gae_lambda: 0 to 1. 1 gives return minus value (the values add no bias), 0 the one-step error.
        value_lambda: 0 to 1, lambda of the returns only; None uses gae_lambda. With 1 the returns are the discounted
            sums of future rewards and do not depend on the values.

    Returns:
        (advantages, returns): [B, R] each, 0 under padding, without gradient. The advantages are not whitened. The
        returns are computed from the advantages as returned here.

    Schulman et al. 2016 (arXiv 1506.02438), equation 16; as a recursion in Schulman et al. 2017 (arXiv 1707.06347),
    equations 11 and 12. Two lambdas: Yuan et al. 2025 (arXiv 2503.01491).

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
    """The recursion of ``gae``, from the last token to the first; padding of the result may hold anything."""
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(values.shape[0])  # [B]
    for t in reversed(range(values.shape[1])):
        real_mask = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(real_mask, delta + gamma * gae_lambda * next_advantage, next_advantage)
        next_value = torch.where(real_mask, values[:, t], next_value)
        advantages[:, t] = next_advantage
    return advantages


def reward_to_go(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """The discounted sum of the rewards from each token on: the advantage of REINFORCE without a baseline.

    ``returns[t] = rewards[t] + gamma * returns[t + 1]``

    t + 1 is the next *real* token, and the return after the last one is 0. This is ``gae`` with all values 0 and
    lambda 1. Whitened over the batch it is the advantage of REINFORCE++.

    Args:
        rewards: [B, R], as from ``token_rewards``; padding may hold anything.
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


def group_advantages(totals: Tensor, *, samples_per_prompt: int, baseline: GroupBaseline, eps: float = 1e-6) -> Tensor:
    """How much better each response is than the other responses to the same prompt.

    ``rloo: totals - mean of the others``
    ``grpo: (totals - mean) / (std + eps)``
    ``dr_grpo: totals - mean``

    The mean and the unbiased standard deviation (n - 1) are taken over the group of n responses. dr_grpo includes the
    response itself in the mean, so it is (n - 1) / n times rloo: the same direction, a shorter step. grpo gives
    prompts whose responses differ little the same weight as prompts whose responses differ a lot.

    Args:
        totals: [B], one per response, for example the score minus the KL penalty. Prompt-major: the n responses to a
            prompt are adjacent.
        samples_per_prompt: n, 2 or more.
        baseline: "rloo", "grpo" or "dr_grpo".
        eps: added to the standard deviation, outside any root; only "grpo" reads it (verl 1e-6, TRL 1e-4).

    Returns:
        [B], without gradient; exactly 0 for a group whose totals are all equal.

    Raises:
        ValueError: samples_per_prompt is below 2, or does not divide B.

    rloo: Ahmadian et al. 2024 (arXiv 2402.14740); grpo: Shao et al. 2024 (arXiv 2402.03300); dr_grpo: Liu et
    al. 2025 (arXiv 2503.20783).

    >>> totals = torch.tensor([1.0, 3.0, 5.0, 5.0])
    >>> group_advantages(totals, samples_per_prompt=2, baseline="rloo")
    tensor([-2.,  2.,  0.,  0.])
    >>> group_advantages(totals, samples_per_prompt=2, baseline="dr_grpo")
    tensor([-1.,  1.,  0.,  0.])
    >>> group_advantages(totals, samples_per_prompt=2, baseline="grpo")  # std sqrt(2)
    tensor([-0.7071,  0.7071,  0.0000,  0.0000])
    """
    if samples_per_prompt < 2:
        raise ValueError(f"samples_per_prompt is {samples_per_prompt}, but a comparison needs 2 or more")
    if totals.shape[0] % samples_per_prompt:
        raise ValueError(f"{totals.shape[0]} responses cannot be split into groups of {samples_per_prompt}")
    groups = totals.detach().view(-1, samples_per_prompt)  # [prompts, n]
    # The mean of equal numbers may be off by a rounding error, which division by a tiny std would magnify.
    all_equal = groups.amin(-1, keepdim=True) == groups.amax(-1, keepdim=True)
    deviation = torch.where(all_equal, 0, groups - groups.mean(-1, keepdim=True))
    match baseline:
        case "rloo":
            advantages = deviation * (samples_per_prompt / (samples_per_prompt - 1))
        case "grpo":
            advantages = deviation / (groups.std(-1, keepdim=True) + eps)
        case "dr_grpo":
            advantages = deviation
        case _:
            assert_never(baseline)
    return advantages.reshape(-1)


def broadcast_to_tokens(advantages: Tensor, mask: Tensor) -> Tensor:
    """Give each token the advantage of its response.

    ``broadcast[b, t] = advantages[b]`` at real tokens, 0 elsewhere

    Args:
        advantages: [B].
        mask: [B, R] bool, True on real response tokens.

    Returns:
        [B, R], 0 under padding, without gradient. Every token gets the full advantage, not a share of it.

    >>> broadcast_to_tokens(torch.tensor([2.0, 3.0]), torch.tensor([[True, True], [True, False]]))
    tensor([[2., 2.],
            [3., 0.]])
    """
    return torch.where(mask, advantages.detach().unsqueeze(-1), 0)


def masked_whiten(
    x: Tensor,
    mask: Tensor,
    *,
    shift_mean: bool = True,
    bessel: bool = True,
    eps: float = 1e-8,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Scale the real tokens to variance 1, and shift them to mean 0.

    ``(x - mean) / sqrt(variance + eps)``, plus ``mean`` if not shift_mean

    The statistics cover all real tokens together, not each row. They are computed in two passes (the mean, then the
    squared deviations from it), so a large mean costs no precision. A single real token has no spread to scale by: it
    becomes 0, or stays as it is if not shift_mean; it never becomes NaN.

    Args:
        x: any shape, float32 or float64; padding may hold anything.
        mask: the same shape, bool, True on real tokens.
        shift_mean: True makes the mean 0 (advantages). False keeps the mean, so most signs are kept (rewards).
            torchtune's flag of the same name means the opposite.
        bessel: divide the squared deviations by n - 1 (TRL, verl), otherwise by n (OpenAI, OpenRLHF).
        eps: added to the variance, inside the root.
        reduce: sums a tensor over all processes and returns the sum. Every process calls it twice, even without a
            real token. None for a single process.

    Returns:
        The shape of x; 0 under padding.

    Used in the code of Ziegler et al. 2019; described in Huang et al. 2024 (arXiv 2403.17031).

    >>> x, mask = torch.tensor([1.0, 3.0, 1e6]), torch.tensor([True, True, False])
    >>> masked_whiten(x, mask, bessel=False)  # mean 2, variance 1
    tensor([-1.,  1.,  0.])
    >>> masked_whiten(x, mask, bessel=False, shift_mean=False)
    tensor([1., 3., 0.])
    """

    def over_processes(statistic: Tensor) -> Tensor:
        return statistic if reduce is None else reduce(statistic)

    count, total = over_processes(torch.stack([mask.sum().to(x.dtype), masked_sum(x, mask)]))
    mean = total / count.clamp(min=1)
    deviation = torch.where(mask, x - mean, 0)
    degrees_of_freedom = (count - 1 if bessel else count).clamp(min=1)
    variance = over_processes(deviation.square().sum()) / degrees_of_freedom
    whitened = deviation / (variance + eps).sqrt()
    return whitened if shift_mean else torch.where(mask, whitened + mean, 0)
