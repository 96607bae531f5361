"""Which metrics a report draws over the steps of a stage."""

from __future__ import annotations

from dataclasses import dataclass

HELD_OUT = "held out"
"""Name of a series of held-out figures: few points, which are marked and never smoothed."""

SETTING = "setting"
"""Name of a series that is no measurement, such as a learning rate, and is never smoothed."""


@dataclass(frozen=True)
class Curve:
    """A chart of one or two metrics over the steps of a stage."""

    stage: str
    title: str
    metrics: dict[str, str]
    """Metric -> its name in the legend."""
    note: str
    is_share: bool = False
    """The values are between 0 and 1."""
    target: str = ""
    """The config key of the value that the metric is steered to."""


CURVES = (
    Curve("sft", "SFT loss", {"loss/sft": "training", "eval/loss": HELD_OUT}, "nats per target token"),
    Curve("sft", "SFT token accuracy", {"eval/token_accuracy": HELD_OUT}, "share of target tokens"),
    Curve("sft", "SFT gradient norm", {"sft/grad_norm": "training"}, "before clipping"),
    Curve("sft", "SFT learning rate", {"sft/learning_rate": SETTING}, "of the step"),
    Curve("rm", "RM loss", {"loss/rm": "training", "eval/loss": HELD_OUT}, "per pair or answer"),
    Curve("rm", "RM accuracy", {"rm/accuracy": "training", "eval/accuracy": HELD_OUT}, "chance is 0.5"),
    Curve("rm", "RM gradient norm", {"rm/grad_norm": "training"}, "before clipping"),
    Curve("rm", "RM learning rate", {"rm/learning_rate": SETTING}, "of the step"),
    Curve("ppo", "Score", {"objective/score": "training"}, "of the rewards, after normalization"),
    Curve("ppo", "Gold score on held-out prompts", {"eval:gold": HELD_OUT}, "the judge of evaluation.gold"),
    Curve("ppo", "KL to the SFT model", {"objective/kl": "training"}, "nats per reply", target="ppo.kl_target"),
    Curve("ppo", "KL coefficient", {"objective/kl_coef": SETTING}, "what a nat costs in score"),
    Curve("ppo", "Reply length", {"response/length": "training"}, "tokens"),
    Curve("ppo", "Entropy", {"policy/entropy": "training"}, "nats per token"),
    Curve("ppo", "Replies that ended", {"response/eos_fraction": "training"}, "share", is_share=True),
    Curve("ppo", "Diversity", {"response/distinct_2": "training"}, "share of different word pairs"),
    Curve("ppo", "Clipped ratios", {"policy/clip_fraction": "training"}, "share of tokens"),
    Curve("ppo", "Explained variance", {"value/explained_variance": "training"}, "of the returns, by the value model"),
    Curve("ppo", "Gradient norm", {"policy/grad_norm": "training"}, "of the policy, before clipping"),
    Curve("ppo", "Learning rate", {"policy/learning_rate": SETTING}, "of the policy"),
)
_METRICS = dict.fromkeys(name for curve in CURVES for name in curve.metrics if ":" not in name)
METRICS = (*_METRICS, *(name.replace("eval/", "validation/") for name in _METRICS if name.startswith("eval/")))
"""Their metrics, of validation rows too. The others of a long run would only take time to read."""
