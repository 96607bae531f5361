"""The losses of the reward model: on pairs of responses, or on one target score or label per response."""

from collections.abc import Sequence
from typing import assert_never

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_cli.algorithms.names import PairwiseLoss, PointwiseLoss


def pairwise_loss(
    chosen_score: Tensor,
    rejected_score: Tensor,
    *,
    margin: Tensor | None = None,
    weight: Tensor | None = None,
    loss: PairwiseLoss = "logsigmoid",
    flipped_weight: float = 0.0,
    zero_mean_coef: float = 0.0,
    num_pairs: Tensor | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the preferences under the Bradley-Terry model.

    ``lead = chosen_score - rejected_score - margin``
    ``nll = -log(sigmoid(lead))``, or ``nll = log(1 + exp(-lead))`` for "logexp"
    ``flipped = -log(sigmoid(rejected_score - chosen_score - margin))``, of the opposite label
    ``each = (1 - flipped_weight) * nll + flipped_weight * flipped``
    ``loss = sum(weight * (each + zero_mean_coef * (chosen_score + rejected_score)**2)) / num_pairs``

    Both formulas are the same function; "logexp" is its name in ColossalChat and OpenRLHF. Both are computed without
    overflow: a pair that is wrong by 200 costs 200, not inf. Only differences of scores count, so zero_mean_coef is
    the only term that determines their mean.

    Args:
        chosen_score: [B], of the preferred responses.
        rejected_score: [B], of the other ones.
        margin: [B], 0 or more: the minimum lead that the chosen score should have; None means 0.
        weight: [B], weight of each pair in the loss and in the stats; None means 1.
        loss: "logsigmoid" or "logexp".
        flipped_weight: e smooths the labels as if a share e of them were flipped. `unbiased_weight` of a known share
            is negative and undoes the flips.
        zero_mean_coef: 0 or more; TRL recommends 0.01. The *sum* of the two scores is squared, not each. Hong et al.
            2025 (arXiv 2505.07271) square the sum over the whole batch. In expectation both punish the mean and the
            variance of a pair's sum, and theirs counts the mean B times as much; the sum of a pair adds up over
            microbatches.
        num_pairs: divisor of the sums, by default B. For a microbatch, pass the number of pairs in its whole
            minibatch: then losses, gradients and stats *add up*. For pairs from `ranking_pairs`, pass the number of
            rankings.

    Returns:
        (loss, stats): a scalar to minimise, and detached scalars with the same divisor.

        - ``rm/accuracy``: the share of pairs whose chosen score is higher; a tie counts one half, and the margin
          argument is ignored;
        - ``rm/margin``: ``chosen_score - rejected_score``, the actual lead (not the margin argument);
        - ``rm/chosen_score``, ``rm/rejected_score``: the scores.

    Ouyang et al. 2022 (arXiv 2203.02155), equation 1; the margin is equation 2 of Touvron
    et al. 2023 (arXiv 2307.09288), the zero mean equation 2 of Eisenstein et al. 2023 (arXiv 2312.09244), the smoothed
    labels Wang et al. 2024 (arXiv 2401.06080).

    >>> loss, stats = pairwise_loss(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 200.0]))
    >>> loss  # (log(2) + 200) / 2
    tensor(100.3466)
    >>> stats["rm/accuracy"], stats["rm/margin"]  # a tie and a miss
    (tensor(0.2500), tensor(-100.))
    """
    num_pairs = chosen_score.numel() if num_pairs is None else num_pairs
    difference = chosen_score - rejected_score
    nll = _nll(difference if margin is None else difference - margin, loss)
    if flipped_weight:
        flipped = _nll(-difference if margin is None else -difference - margin, loss)
        nll = (1 - flipped_weight) * nll + flipped_weight * flipped
    each = nll + zero_mean_coef * (chosen_score + rejected_score).square()
    weight = torch.ones_like(each) if weight is None else weight
    with torch.no_grad():
        stats = {
            "rm/accuracy": (weight * (difference.sign() + 1)).sum() / 2 / num_pairs,
            "rm/margin": (weight * difference).sum() / num_pairs,
            "rm/chosen_score": (weight * chosen_score).sum() / num_pairs,
            "rm/rejected_score": (weight * rejected_score).sum() / num_pairs,
        }
    return (weight * each).sum() / num_pairs, stats


def _nll(lead: Tensor, loss: PairwiseLoss) -> Tensor:
    match loss:
        case "logsigmoid":
            return -logsigmoid(lead)
        case "logexp":
            return torch.logaddexp(torch.zeros_like(lead), -lead)
        case _:
            assert_never(loss)


def unbiased_weight(flip_rate: float) -> float:
    """The `flipped_weight` that makes the loss unbiased if a share `flip_rate` of the labels was flipped at random.

    ``each = ((1 - flip_rate) * nll - flip_rate * flipped) / (1 - 2 * flip_rate)``

    Its expectation over the flips is the loss on the true labels. It has no lower bound: its slope stays
    ``-flip_rate / (1 - 2 * flip_rate)`` as the lead grows, so long training memorises the rows.

    Chowdhury et al. 2024 (arXiv 2403.00409).

    >>> unbiased_weight(0.25)  # 1.5 * nll - 0.5 * flipped
    -0.5
    """
    return -flip_rate / (1 - 2 * flip_rate)


def ranking_pairs(sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """All pairs of each ranking; the answers are laid end to end, best first within each ranking.

    A ranking of K answers gives K * (K - 1) / 2 pairs of weight ``1 / (K * (K - 1) / 2)`` each. All rankings count the
    same, whatever their length, and each answer goes through the model once. If the pairs were separate rows, the
    model would train on each answer K - 1 times per epoch and overfit.

    Args:
        sizes: number of answers of each ranking, at least 2.

    Returns:
        (better, worse, weight): [pairs] each, the int64 indices of the better and the worse answer, and the float64
        weight.

    Ouyang et al. 2022 (arXiv 2203.02155), section 3.5 and equation 1.

    >>> better, worse, weight = ranking_pairs([2, 3])
    >>> better.tolist(), worse.tolist()
    ([0, 2, 2, 3], [1, 3, 4, 4])
    >>> weight
    tensor([1.0000, 0.3333, 0.3333, 0.3333], dtype=torch.float64)
    """
    better, worse, weight = [], [], []
    start = 0
    for size in sizes:
        pairs = [(start + i, start + j) for i in range(size) for j in range(i + 1, size)]
        better += [i for i, _ in pairs]
        worse += [j for _, j in pairs]
        weight += [1 / len(pairs)] * len(pairs)
        start += size
    indices = torch.tensor([better, worse], dtype=torch.int64)
    return indices[0], indices[1], torch.tensor(weight, dtype=torch.float64)


def plackett_luce_loss(scores: Tensor, sizes: Sequence[int], *, num_rankings: Tensor | float | None = None) -> Tensor:
    """Negative log-likelihood of whole rankings under the Plackett-Luce model, per choice.

    ``P(ranking) = prod over k < K of exp(s_k) / sum over j >= k of exp(s_j)``: the best answer is chosen from all, then
    the second from the rest. Each choice is ``sigmoid(s_k - log sum over j > k of exp(s_j))``, so a ranking of two is
    Bradley-Terry to the last bit. A ranking counts as the mean over its K - 1 choices, whatever its length.

    Args:
        scores: the answers of all rankings, laid end to end, best first within each ranking.
        sizes: number of answers of each ranking, at least 2.
        num_rankings: divisor of the sum, by default the number of rankings, as `num_pairs` of `pairwise_loss`.

    Plackett 1975, "The Analysis of Permutations"; Luce 1959.

    >>> plackett_luce_loss(torch.zeros(3), [3])  # (log(3) + log(2)) / 2
    tensor(0.8959)
    """
    parts = scores.split(list(sizes))
    first = torch.cat([part[:-1] for part in parts])  # [choices], as the others
    rest = torch.stack([part[k:].logsumexp(0) for part in parts for k in range(1, len(part))])
    weight = torch.cat([part.new_full((len(part) - 1,), 1 / (len(part) - 1)) for part in parts])
    return -(weight * logsigmoid(first - rest)).sum() / (len(sizes) if num_rankings is None else num_rankings)


def label_accuracy(score: Tensor, label: Tensor) -> Tensor:
    """Whether the sign of each score agrees with its label: 1, 0, or 1/2 for a score of 0 or a label of 1/2.

    Args:
        score: [B], log-odds of a good answer.
        label: [B], 0 for bad to 1 for good.

    Returns:
        [B].

    >>> label_accuracy(torch.tensor([2.0, -2.0, 0.0]), torch.tensor([1.0, 0.9, 0.0]))
    tensor([1.0000, 0.0000, 0.5000])
    """
    return (score.sign() * (label - 0.5).sign() + 1) / 2


def pointwise_loss(
    score: Tensor, target: Tensor, *, loss: PointwiseLoss, num_rows: Tensor | float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of rows with a target score, or with a label that marks them as good or bad, instead of a preference.

    ``mse: sum((score - target)**2) / num_rows``
    ``bce: -sum(target * log(sigmoid(score)) + (1 - target) * log(sigmoid(-score))) / num_rows``

    Unlike ``value_loss``, "mse" has no factor 1/2. "bce" is the negative log-likelihood of the labels: the score is the
    log-odds of a good answer. A label between 0 and 1 is the probability of a good answer, such as the share of
    annotators who liked it. A score that is wrong by 200 costs 200, not inf.

    Args:
        score: [B], of the reward model; carries the gradient.
        target: [B], the score to learn, or the label, 0 for bad to 1 for good.
        loss: "mse" or "bce".
        num_rows: divisor of the sums, by default B. For a microbatch, pass the number of rows in its whole minibatch:
            then losses, gradients and stats *add up*.

    Returns:
        (loss, stats): a scalar to minimise, and detached scalars with the same divisor.

        - ``rm/mse``: the loss, for "mse";
        - ``rm/accuracy``: the `label_accuracy`, for "bce";
        - ``rm/score``: the scores.

    >>> value, stats = pointwise_loss(torch.tensor([1.0, 4.0]), torch.tensor([0.0, 2.0]), loss="mse")
    >>> value, stats["rm/score"]  # (1 + 4) / 2
    (tensor(2.5000), tensor(2.5000))
    >>> value, stats = pointwise_loss(torch.tensor([0.0, 200.0]), torch.tensor([1.0, 0.0]), loss="bce")
    >>> value, stats["rm/accuracy"]  # (log(2) + 200) / 2; a tie and a miss
    (tensor(100.3466), tensor(0.2500))
    """
    num_rows = score.numel() if num_rows is None else num_rows
    match loss:
        case "mse":
            value = (score - target).square().sum() / num_rows
            stats = {"rm/mse": value.detach()}
        case "bce":
            value = -(target * logsigmoid(score) + (1 - target) * logsigmoid(-score)).sum() / num_rows
            stats = {"rm/accuracy": label_accuracy(score.detach(), target).sum() / num_rows}
        case _:
            assert_never(loss)
    return value, stats | {"rm/score": score.detach().sum() / num_rows}
