"""The health rule that looks at a reward model before PPO starts."""

from __future__ import annotations

from collections.abc import Mapping

GUESSING = 0.5
"""The accuracy of guessing which of two answers is better."""
ACCURACIES = ("eval/accuracy", "eval/pair_accuracy")
"""Shares of held-out pairs in the right order. `_low95` and `_high95` behind the key are their 95 % interval."""
WEAK_REWARD_ADVICE = (
    "Train the reward model on more pairs, or on pairs that differ in what you want and not in length. More rows in "
    "its data.test narrow the interval"
)


def weak_reward(name: str, figures: Mapping[str, float]) -> str | None:
    """The message about a reward model that held-out rows do not show to be better than guessing; else None.

    `figures` are those of its manifest. A figure that is absent is not judged.

    >>> weak_reward("rm", {"eval/accuracy": 0.9, "eval/accuracy_low95": 0.85, "eval/length_baseline": 0.3}) is None
    True
    """
    for key in ACCURACIES:
        if key not in figures:
            continue
        accuracy = figures[key]
        low, high = figures.get(f"{key}_low95", accuracy), figures.get(f"{key}_high95", accuracy)
        seen = f"The held-out accuracy of reward model {name} is {accuracy:.2f} (95 % interval {low:.2f} to {high:.2f})"
        if low <= GUESSING:
            return (
                f"{seen}, and that of guessing is {GUESSING:g}. Its scores may be noise: PPO would move the policy "
                "away from ref_policy for nothing."
            )
        longer = figures.get("eval/length_baseline", GUESSING)
        baseline = max(longer, 1 - longer)
        if low <= baseline:
            rule = "longer" if longer >= GUESSING else "shorter"
            return (
                f"{seen}, and choosing the {rule} answer is right in {baseline:.2f}. It may have learned length "
                "alone: PPO would change the length of the responses and little else."
            )
    error, variance = figures.get("eval/mse"), figures.get("eval/target_variance")
    if error is not None and variance is not None and error >= variance:
        return (
            f"The held-out error of reward model {name} is {error:.3g}, and a constant score has {variance:.3g}, the "
            "variance of the targets. Its scores may be noise: PPO would move the policy away from ref_policy for "
            "nothing."
        )
    return None
