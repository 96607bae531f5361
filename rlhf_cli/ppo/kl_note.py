"""A note for the user if the chosen KL optimises something other than the KL-regularised score."""

from __future__ import annotations

from rlhf_cli.config.ppo import PPOConfig

KL_NOTES = {
    ("reward", "k2"): "k2 in the reward is not the KL: its optimum is not ref_policy * exp(score / kl_coef). Use k1",
    ("reward", "k3"): "k3 in the reward has another gradient than the KL, and another optimum. Use k1",
    ("reward", "abs"): "the absolute log-ratio in the reward is not the KL: a token that became rarer than in "
    "ref_policy is charged too, and so becomes rarer still. Use k1",
    ("reward", "full"): "the full KL in the reward does not depend on the sampled token, so a token is charged only "
    "for the tokens after it. Use k1, or full in the loss",
    ("loss", "k3"): "k3 in the loss has the gradient of KL(ref_policy, policy)",
    ("loss", "abs"): "the absolute log-ratio in the loss has the gradient of twice the total variation, not of a KL",
    ("loss", "k2"): "k2 of single tokens in the loss charges no token for the KL of the tokens after it; "
    "k2_sequence does",
    ("loss", "full"): "the full KL of single tokens in the loss charges no token for the KL of the tokens after it; "
    "k2_sequence does",
}
"""What each pair of kl_in and kl_estimator optimises, if that is not the KL-regularised score."""


def kl_note(config: PPOConfig) -> str | None:
    """A note if the chosen KL optimises something other than the KL-regularised score."""
    ppo = config.ppo
    if ppo.kl_coef == 0:
        return None
    if ppo.kl_in == "loss" and (ppo.whitens_advantages or ppo.advantage_estimator == "grpo"):
        return (
            "ppo.kl_in: loss with advantages that are divided by their standard deviation: as it shrinks, the KL's "
            "weight shrinks to nothing. Set whiten_advantages: false (dr_grpo or rloo instead of grpo), or "
            "kl_in: reward (docs/ppo.md)"
        )
    note = KL_NOTES.get((ppo.kl_in, ppo.kl_estimator_used))
    return f"ppo.kl_estimator: {note} (docs/ppo.md)" if note else None
