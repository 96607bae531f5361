"""Best-of-n: draw n samples of a policy and keep the one with the highest score. A yardstick for PPO.

It needs no training and is near the best that any policy can reach at its KL, but costs n samples a reply.
"""

from __future__ import annotations

from math import comb, log

import torch
from torch import Tensor


def best_of_n(score: Tensor, n: int, *others: Tensor) -> list[Tensor]:
    """The expected score of the best of n samples, and what other numbers that sample has, without bias.

    ``sum over ranks i = n..N of comb(i - 1, n - 1) / comb(N, n) * score of rank i``, ranks from the lowest

    is the mean over all subsets of n of the N samples. Samples of equal score share the numbers of `others`.

    `score` is [prompts, N], n is 1 to N, and the `others` are [prompts, N] for the same samples: a gold score, a
    length. Returns [prompts] for `score`, then for each of `others`.

    Nakano et al. 2021 (arXiv 2112.09332), appendix I; Gao et al. 2023 (arXiv 2210.10760), section 2.

    >>> best_of_n(torch.tensor([[3.0, 1.0, 2.0]]), 2)[0].item()  # the pairs' best: 3, 3, 2
    2.6666666666666665
    """
    num_samples = score.shape[1]
    if not 1 <= n <= num_samples:
        raise ValueError(f"n is {n}, it must be 1 to {num_samples}, the number of samples")
    weight = torch.tensor(
        [comb(i, n - 1) / comb(num_samples, n) for i in range(num_samples)], dtype=torch.float64
    )  # [N] by rank, from the lowest score
    ordered, index = score.double().sort(dim=1)
    shared = _shared(ordered, weight)
    return [(shared * other.double().gather(1, index)).sum(1) for other in (score, *others)]


def _shared(ordered: Tensor, weight: Tensor) -> Tensor:
    """The weights [N] of the ranks for each row of `ordered` [prompts, N], equal among equal scores of a row."""
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    group = is_first.flatten().cumsum(0) - 1
    count = group.bincount()
    total = torch.zeros(len(count), dtype=weight.dtype).index_add(0, group, weight.repeat(len(ordered)))
    return (total / count)[group].view_as(ordered)


def best_of_n_kl_bound(n: int) -> float:
    """``log(n) - (n - 1) / n``, in nats: an upper bound of the KL of best-of-n to the policy that it samples.

    It is reached if no two samples can be equal. Beirami et al. 2025 (arXiv 2401.01879), theorem 3.1.

    >>> round(best_of_n_kl_bound(16), 2)
    1.84
    """
    return log(n) - (n - 1) / n


def best_of_n_kl(logprob: Tensor, n: int) -> Tensor:
    """An estimate of the KL of best-of-n, in nats, that allows for samples which are likely to be drawn again.

    With e the probability of the sample y that was chosen and q = (1 - e)**n:

    ``q * (log(n) + (n - 1) * log(1 - e) - (n - 1) / n) + (1 - q) * log((1 - q) / e)``

    For e -> 0 it is the bound `best_of_n_kl_bound`. Average it over chosen samples.

    `logprob` has any shape: the log-probability of each chosen sample under the policy that was sampled, in nats. The
    result has its shape.

    Beirami et al. 2025 (arXiv 2401.01879), section 4.

    >>> best_of_n_kl(torch.tensor(0.0), 4).item()  # only one sample exists
    0.0
    """
    e = logprob.double().exp().clamp(max=1.0)
    log_rest = torch.log1p(-e)  # log(1 - e)
    q = (n * log_rest).exp()
    # 0 * log(0) = 0
    rest = torch.where(q > 0, q * (log(n) + (n - 1) * log_rest - (n - 1) / n), 0.0)
    chosen = -torch.expm1(n * log_rest)  # 1 - q, exact for small e
    return rest + torch.where(chosen > 0, chosen * (chosen.log() - logprob.double()), 0.0)
