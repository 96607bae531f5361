"""What sets a KL coefficient from the KL that it led to: plain numbers, once after each update."""


def adaptive_kl_coef(kl_coef: float, kl: float, *, target: float, horizon: float, num_episodes: float) -> float:
    """The next coefficient of the KL penalty in the reward, so that the KL comes to a target.

    ``error = clip(kl / target - 1, -0.2, 0.2)``
    ``kl_coef * (1 + error * num_episodes / horizon)``

    Proportional in the logarithm: while the KL is off by 20 % or more, the coefficient changes by a factor
    of about e every 5 * horizon episodes. A negative kl (an estimate from few responses may be one) counts as
    far below the target. The coefficient never becomes negative: a batch of 5 * horizon episodes or more
    below the target would take it to 0, where it stays, so keep num_episodes well below horizon.

    Args:
        kl_coef: the coefficient now, 0 or more.
        kl: nats, the mean over responses of the KL to the reference summed over tokens (not a mean over tokens).
        target: nats a response, above 0; 6 is usual.
        horizon: in episodes, above 0; 10000 is usual.
        num_episodes: responses since the last call, over all processes; not optimizer steps.

    Returns:
        The coefficient for the next rollout; nan if kl is nan.

    Ziegler et al. 2019 (arXiv 1909.08593), section 2.2.

    >>> adaptive_kl_coef(0.5, 9.0, target=6.0, horizon=1000, num_episodes=500)  # error 0.5, clipped to 0.2
    0.55
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return max(kl_coef * (1 + error * num_episodes / horizon), 0.0)  # in this order a nan stays nan


def adaptive_policy_kl_coef(coef: float, kl: float, *, target: float) -> float:
    """The next coefficient of the KL term of PPO-penalty, so that an update moves the policy by a target.

    ``coef / 2 if kl < target / 1.5, coef * 2 if kl > 1.5 * target, else coef``

    Args:
        coef: the coefficient now, above 0.
        kl: nats, the mean over tokens of KL(old policy, new policy) after the update (not during it, as
            ``policy/approx_kl`` is).
        target: nats a token, above 0.

    Returns:
        The coefficient for the next update; unchanged if kl is nan.

    Schulman et al. 2017 (arXiv 1707.06347), section 4.

    >>> adaptive_policy_kl_coef(1.0, 0.031, target=0.02), adaptive_policy_kl_coef(1.0, 0.03, target=0.02)
    (2.0, 1.0)
    >>> adaptive_policy_kl_coef(1.0, 0.013, target=0.02)
    0.5
    """
    if kl < target / 1.5:
        return coef / 2
    if kl > 1.5 * target:
        return coef * 2
    return coef
