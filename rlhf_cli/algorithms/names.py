"""The names of PPO's choices, each defined once: the config accepts them, and the functions dispatch over them.

Every dispatch ends in `typing.assert_never`. If you add a name here, mypy reports each place that does not handle it
yet, and running such a place raises. docs/extending.md shows two worked examples. This module imports no torch, so
that the config stays fast to load.
"""

from dataclasses import dataclass
from typing import Literal, assert_never

AdvantageEstimator = Literal[
    "gae", "monte_carlo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "rloo", "grpo", "dr_grpo"
]
"""`ppo.advantage_estimator`: how the advantages, which weight each token in the policy's loss, are estimated."""

GroupBaseline = Literal["rloo", "grpo", "dr_grpo"]
"""How `group_advantages` compares the responses to one prompt."""

KLPlace = Literal["reward", "loss"]
"""`ppo.kl_in`: where the KL to ref_policy is charged."""

TokenKL = Literal["k1", "k2", "k3", "abs"]
"""The estimators of `kl_estimate`, which need only the log-probability of the sampled token."""

KLEstimator = Literal[TokenKL, "full", "k2_sequence"]
"""`ppo.kl_estimator`: those of a token, the exact KL over the vocabulary, and the loss on whole responses."""

KLController = Literal["fixed", "adaptive"]
"""`ppo.kl_controller`: whether kl_coef follows the measured KL."""

Objective = Literal["clip", "penalty"]
"""`ppo.objective`: what keeps one update small."""

LossAggregation = Literal["token", "sequence", "constant"]
"""`ppo.loss_aggregation`: how token losses become the loss of a minibatch."""

ScoreNormalization = Literal["none", "running", "reference", "running_std", "reference_std"]
"""`ppo.score_normalization`: which mean and standard deviation normalise the score; `_std` leaves the mean."""

PtxMode = Literal["additive", "convex"]
"""`ptx.mode`: how the policy loss and the language-model loss are added."""

PairwiseLoss = Literal["logsigmoid", "logexp"]
"""The pairwise losses of the reward model."""

PointwiseLoss = Literal["mse", "bce"]
"""The losses of the reward model on single answers: the squared error of scores, and the logistic loss of labels."""

RewardModelLoss = Literal[PairwiseLoss, "plackett_luce", PointwiseLoss]
"""`rm.loss`."""


@dataclass(frozen=True)
class EstimatorTraits:
    """What a run must provide for an advantage estimator."""

    has_values: bool
    """Trains a value model."""
    compares_responses: bool
    """Needs several responses per prompt."""
    per_response: bool
    """Gives all tokens of a response the same advantage, so gamma and whiten_rewards do nothing."""
    whitens: bool
    """Whitens the advantages by default."""


EVALUATION_FIGURES = ("score_mean", "kl", "length", "eos_fraction", "distinct_2", "score_median", "seconds")
"""What PPO measures of its held-out replies without a judge."""


def estimator_traits(estimator: AdvantageEstimator) -> EstimatorTraits:
    """The traits of an advantage estimator.

    >>> estimator_traits("rloo")
    EstimatorTraits(has_values=False, compares_responses=True, per_response=True, whitens=False)
    """
    match estimator:
        case "gae" | "monte_carlo":
            return EstimatorTraits(has_values=True, compares_responses=False, per_response=False, whitens=True)
        case "reinforce":
            return EstimatorTraits(has_values=False, compares_responses=False, per_response=False, whitens=False)
        case "reinforce_pp":
            return EstimatorTraits(has_values=False, compares_responses=False, per_response=False, whitens=True)
        case "reinforce_pp_baseline":
            return EstimatorTraits(has_values=False, compares_responses=True, per_response=False, whitens=True)
        case "rloo" | "grpo" | "dr_grpo":
            return EstimatorTraits(has_values=False, compares_responses=True, per_response=True, whitens=False)
        case _:
            assert_never(estimator)
