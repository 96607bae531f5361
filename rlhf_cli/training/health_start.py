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
        low = figures.get(f"{key}_low95", figures[key])
        seen = f"The held-out accuracy of reward model {name} is {figures[key]:.2f}{_interval(figures, key)}"
        if low <= GUESSING:
            return (
                f"{seen}, and that of guessing is {GUESSING:g}. Its scores may be noise: PPO would move the policy "
                "away from ref_policy for nothing."
            )
        longer = figures.get("eval/length_baseline", GUESSING)
        baseline = max(longer, 1 - longer)
        rule, learned = f"choosing the {'longer' if longer >= GUESSING else 'shorter'} answer", "length"
        if key == "eval/accuracy" and "eval/base_rate" in figures:  # of single labels, not of pairs
            baseline, rule, learned = figures["eval/base_rate"], "always the more frequent label", "how frequent it is"
        if low <= baseline:
            return f"{seen}, and {rule} is right in {baseline:.2f}. The model may have learned {learned} alone."
    error, variance = figures.get("eval/mse"), figures.get("eval/target_variance")
    if error is not None and variance is not None and figures.get("eval/mse_high95", error) >= variance:
        return (
            f"The held-out error of reward model {name} is {error:.3g}{_interval(figures, 'eval/mse')}, "
            f"and a constant score has {variance:.3g}, the variance of "
            "the targets. Its scores may be noise: PPO would move the policy away from ref_policy for nothing."
        )
    return None


def _interval(figures: Mapping[str, float], key: str) -> str:
    """The 95 % interval of a figure in words; "" if it has none."""
    low, high = figures.get(f"{key}_low95"), figures.get(f"{key}_high95")
    return f" (95 % interval {low:.2g} to {high:.2g})" if low is not None and high is not None else ""
