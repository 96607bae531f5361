"""Whether held-out figures show that a reward model is better than simple rules, and PPO's warning if they do not.

The RM stage, `rlhf rm score`, `rlhf eval`, reports and the start of PPO judge a reward model by `is_better`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

ACCURACIES = ("eval/accuracy", "eval/pair_accuracy")
"""Shares of held-out pairs in the right order. `_low95` and `_high95` behind the key are their 95 % interval."""
WEAK_REWARD_ADVICE = (
    "Train the reward model on more pairs, or on pairs that differ in what you want and not in length. More rows in "
    "its data.test narrow the interval"
)


def simple_rules(figures: Mapping[str, float], key: str) -> dict[str, float]:
    """What simple rules reach on the rows of an accuracy; {} if it is absent.

    >>> simple_rules({"eval/accuracy": 0.55, "eval/length_baseline": 0.41}, "eval/accuracy")
    {'chance': 0.5, 'choosing the shorter answer': 0.5900000000000001}
    """
    if key not in figures:
        return {}
    if key == "eval/accuracy" and "eval/base_rate" in figures:  # of single labels, not of pairs
        return {"giving every answer the more frequent label": figures["eval/base_rate"]}
    longer = figures.get("eval/length_baseline")
    if longer is None:
        return {"chance": 0.5}
    return {"chance": 0.5, f"choosing the {'longer' if longer >= 0.5 else 'shorter'} answer": max(longer, 1 - longer)}


def is_better(figures: Mapping[str, float]) -> bool:
    """Whether the whole 95 % interval of each figure is better than what simple rules reach, and a constant score.

    An absent figure is not judged.
    """
    lows = {key: figures.get(f"{key}_low95", figures.get(key, 0.0)) for key in ACCURACIES}
    high = figures.get("eval/mse_high95", figures.get("eval/mse", 0.0))
    is_below = high < figures.get("eval/target_variance", math.inf)
    return is_below and all(lows[key] > value for key in ACCURACIES for value in simple_rules(figures, key).values())


def held_out_verdict(figures: Mapping[str, float]) -> tuple[str, bool]:
    """A sentence on held-out figures, and `is_better`.

    The figures come from `ranking_figures`, `label_figures`, `score_figures` or a stage's manifest.

    >>> figures = {"eval/accuracy": 0.55, "eval/accuracy_low95": 0.51, "eval/accuracy_high95": 0.59}
    >>> figures |= {"eval/num_rows": 600, "eval/length_baseline": 0.41, "eval/shorter_baseline": 0.59}
    >>> print(*held_out_verdict(figures), sep="\\n")
    held-out accuracy 0.550 (95 % interval 0.510 to 0.590, 600 rows): above chance (0.500), but not above choosing \
the shorter answer (0.590)
    False
    """
    order = ""
    if "eval/pair_accuracy" in figures:
        longer = figures.get("eval/length_baseline")
        rule = "chance 0.500" if longer is None else f"the length alone {max(longer, 1 - longer):.3f}"
        order = f". It orders {figures['eval/pair_accuracy']:.3f} of the pairs as their targets do, {rule}"
    if "eval/mse" in figures:
        error, variance = figures["eval/mse"], figures["eval/target_variance"]
        if figures.get("eval/mse_high95", error) < variance:
            place = "below the variance of the targets"
        elif error > variance:
            place = "above the variance of the targets, so predicting their mean would be better"
        else:
            place = "not clearly below the variance of the targets, the error of predicting their mean"
        found = f"held-out error {_measured(figures, 'eval/mse', '.4g')}: {place} ({variance:.4g}){order}"
        return found, is_better(figures)
    low = figures.get("eval/accuracy_low95", figures["eval/accuracy"])
    named = {f"{rule} ({x:.3f})": low > x for rule, x in simple_rules(figures, "eval/accuracy").items()}
    above, missed = ([name for name, beaten in named.items() if beaten is wanted] for wanted in (True, False))
    parts = [f"above {' and '.join(above)}"] * bool(above) + [f"not above {' or '.join(missed)}"] * bool(missed)
    accuracy = _measured(figures, "eval/accuracy", ".3f")
    return f"held-out accuracy {accuracy}: {', but '.join(parts)}{order}", is_better(figures)


def _measured(figures: Mapping[str, float], key: str, digits: str) -> str:
    """A figure with its 95 % interval and the number of its rows, where they are known."""
    low, high = figures.get(f"{key}_low95"), figures.get(f"{key}_high95")
    known = [f"95 % interval {low:{digits}} to {high:{digits}}"] if low is not None and high is not None else []
    known += [f"{figures['eval/num_rows']:,.0f} rows"] if "eval/num_rows" in figures else []
    return f"{figures[key]:{digits}}" + (f" ({', '.join(known)})" if known else "")


def weak_reward(name: str, figures: Mapping[str, float]) -> str | None:
    """The message about a reward model that held-out rows do not show to be better than a simple rule; else None.

    `figures` come from its manifest.

    >>> weak_reward("rm", {"eval/accuracy": 0.9, "eval/accuracy_low95": 0.85, "eval/length_baseline": 0.3}) is None
    True
    """
    if is_better(figures):
        return None
    return (
        f"Reward model {name}: {held_out_verdict(figures)[0]}. Its scores may be noise, or may follow a simple rule "
        "alone: PPO would move the policy away from ref_policy for nothing."
    )
