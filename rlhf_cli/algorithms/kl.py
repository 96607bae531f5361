"""How far the policy is from the reference policy, from the tokens that it sampled."""

from typing import Literal

import torch
from torch import Tensor


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimates KL(policy, ref_policy) at each token that the policy sampled.

    ``difference = logprobs - ref_logprobs``
    ``k1 = difference``
    ``k2 = difference**2 / 2``
    ``k3 = exp(-difference) - 1 + difference``

    k1 and k3 are right on average, k1 with either sign at a single token, k3 never below 0 and with less
    spread; k2 is never below 0 and slightly off. Nothing is clamped, so k3 of a token that the reference
    finds far likelier than the policy can be huge (verl stops at 10). As a reward take k1. As a loss, mind
    that the gradient of k1 is 0 on average and that of k3 isn't the gradient of the KL; that of k2 is.

    Args:
        logprobs: [...], nats, of the sampled tokens by the policy that sampled them.
        ref_logprobs: [...], the same by the reference policy, at the same temperature.
        estimator: "k1", "k2" or "k3".

    Returns:
        [...], nats. There is no mask in here: what comes of padding is to be masked afterwards.

    Raises:
        ValueError: an estimator by another name.

    Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html).

    >>> logprobs, ref_logprobs = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    >>> kl_estimate(logprobs, ref_logprobs, estimator="k1")  # log(2)
    tensor([0.6931])
    >>> kl_estimate(logprobs, ref_logprobs, estimator="k3")  # 1/2 - 1 + log(2)
    tensor([0.1931])
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return torch.expm1(-difference) + difference
    raise ValueError(f"estimator is {estimator!r}, not one of k1, k2, k3")
