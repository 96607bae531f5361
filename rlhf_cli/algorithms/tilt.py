"""The exponential tilt: the score that a KL to ref_policy allows, from scored samples of ref_policy.

A trained policy is compared with it at the same KL. The tilt trains nothing, but pays with many samples per prompt for
what the policy does with one. `best_of_n` is the other such yardstick.
"""

from math import exp, log

import torch
from torch import Tensor


def exponential_tilt(scores: Tensor, *, beta: float) -> tuple[Tensor, Tensor]:
    """The exponential tilt of ref_policy: the weight of each sample, and the KL to ref_policy per prompt.

    ``weights = softmax(scores / beta)`` over the samples of a prompt
    ``kl = sum(weights * log(N * weights))``

    The expected score of the tilt is ``sum(weights * scores)``; any other figure of the samples has its mean likewise.

    ``pi(y|x) = ref_policy(y|x) * exp(score(x, y) / beta) / Z(x)`` has the highest expected score of all policies with
    its mean KL, and it is the optimum of the KL-regularised objective at ``kl_coef = beta``. Here self-normalised
    importance weights on N samples of ref_policy take its place.

    The estimates are consistent and biased. The estimated KL cannot exceed log(N) (4.16 nats for 64 samples), nor the
    score that of the best sample. The closer the KL comes to log(N), the fewer samples carry the weight, and the lower
    is the estimated score compared with that of the true tilt at the same KL.

    `scores` is [P, N], of N independent samples of ref_policy for each of P prompts; `beta`, above 0, is one number for
    all prompts, in units of the score. Returns (weights, kl): [P, N], rows that sum to 1, and [P], in nats per
    response; float64.

    Yang et al. 2024, "Asymptotics of language model alignment" (arXiv 2404.01730).

    >>> weights, kl = exponential_tilt(torch.tensor([[0.0, 1.0]]), beta=1 / log(3))
    >>> weights
    tensor([[0.2500, 0.7500]], dtype=torch.float64)
    >>> kl  # log(1/2) / 4 + log(3/2) * 3/4
    tensor([0.1308], dtype=torch.float64)
    """
    log_weights = (scores.double() / beta).log_softmax(1)
    weights = log_weights.exp()
    # A weight of 0 adds nothing, and its logarithm may be -inf.
    terms = torch.where(weights > 0, weights * (log_weights + log(scores.shape[1])), 0)
    return weights, terms.sum(1)


def tilt_beta(scores: Tensor, kl: float) -> float:
    """The beta whose exponential tilt has this mean KL over all prompts.

    Found by bisection on log(beta): the KL falls as beta grows.

    `scores` is [P, N], as for ``exponential_tilt``; `kl` is in nats per response, the mean over prompts. Raises
    ValueError if kl is not above 0, or N samples cannot express it: it must be below log(N), and below it by more if
    several samples of a prompt share the highest score.

    >>> scores = torch.tensor([[0.0, 1.0]])
    >>> round(tilt_beta(scores, 0.130812) * log(3), 4)
    1.0
    >>> tilt_beta(scores, 0.7)
    Traceback (most recent call last):
    ValueError: kl 0.7: must be above 0 and below 0.693, the highest KL that 2 samples per prompt express
    """
    scores = scores.double()
    num_best = (scores == scores.amax(1, keepdim=True)).sum(1)
    limit = log(scores.shape[1]) - num_best.double().log().mean().item()
    if not 0 < kl < limit:
        raise ValueError(
            f"kl {kl:g}: must be above 0 and below {limit:.3f}, the highest KL that {scores.shape[1]} samples per "
            "prompt express"
        )
    spread = (scores.amax(1) - scores.amin(1)).max().item()
    low, high = log(spread) - 30, log(spread) + 30
    for _ in range(100):
        middle = (low + high) / 2
        if exponential_tilt(scores, beta=exp(middle))[1].mean().item() > kl:
            low = middle
        else:
            high = middle
    return exp(high)
