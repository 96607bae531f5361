"""Whether held-out figures show that a reward model is better than simple rules, and PPO's warning if they do not.

The RM stage, `rlhf rm score`, `rlhf eval`, reports and the start of PPO judge a reward model by `baselines`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GUESSING = 0.5
"""The accuracy of guessing which of two answers is better."""
ACCURACIES = ("eval/accuracy", "eval/pair_accuracy")
"""Shares of held-out pairs in the right order. `_low95` and `_high95` behind the key are their 95 % interval."""
CHANCE, MOST_FREQUENT, MEAN_TARGET = "chance", "giving every answer the more frequent label", "a constant score"
WEAK_REWARD_ADVICE = (
    "Train the reward model on more pairs, or on pairs that differ in what you want and not in length. More rows in "
    "its data.test narrow the interval"
)


@dataclass(frozen=True)
class Baseline:
    """What a simple rule reaches on the rows of a held-out figure."""

    key: str
    """The figure of the reward model."""
    rule: str
    value: float
    is_beaten: bool
    """Whether the whole 95 % interval of the model's figure is better."""


def baselines(figures: Mapping[str, float]) -> list[Baseline]:
    """What each simple rule reaches, from the held-out figures of a reward model. An absent figure is not judged.

    >>> figures = {"eval/accuracy": 0.55, "eval/accuracy_low95": 0.51, "eval/length_baseline": 0.41}
    >>> [(one.rule, one.is_beaten) for one in baselines(figures)]
    [('chance', True), ('choosing the shorter answer', False)]
    """
    found = []
    for key in ACCURACIES:
        if key not in figures:
            continue
        rules = {CHANCE: GUESSING}
        if key == "eval/accuracy" and "eval/base_rate" in figures:  # of single labels, not of pairs
            rules = {MOST_FREQUENT: figures["eval/base_rate"]}
        elif "eval/length_baseline" in figures:
            longer = figures["eval/length_baseline"]
            side = "longer" if longer >= GUESSING else "shorter"
            rules[f"choosing the {side} answer"] = max(longer, 1 - longer)
        low = figures.get(f"{key}_low95", figures[key])
        found += [Baseline(key, rule, value, low > value) for rule, value in rules.items()]
    if "eval/mse" in figures and "eval/target_variance" in figures:
        variance, high = figures["eval/target_variance"], figures.get("eval/mse_high95", figures["eval/mse"])
        found.append(Baseline("eval/mse", MEAN_TARGET, variance, high < variance))
    return found


def held_out_verdict(figures: Mapping[str, float]) -> tuple[str, bool]:
    """A sentence on held-out figures, and whether the model is better than chance and than the simple rules.

    The figures come from `ranking_figures`, `label_figures`, `score_figures` or a stage's manifest. The model counts as
    better only if the whole 95 % interval is.

    >>> figures = {"eval/accuracy": 0.55, "eval/accuracy_low95": 0.51, "eval/accuracy_high95": 0.59}
    >>> figures |= {"eval/num_rows": 600, "eval/length_baseline": 0.41, "eval/shorter_baseline": 0.59}
    >>> print(*held_out_verdict(figures), sep="\\n")
    held-out accuracy 0.550 (95 % interval 0.510 to 0.590, 600 rows): above chance (0.500), but not above choosing \
the shorter answer (0.590)
    False
    """
    rules = baselines(figures)
    is_better = all(rule.is_beaten for rule in rules)
    order = ""
    if "eval/pair_accuracy" in figures:
        longer = figures.get("eval/length_baseline", GUESSING)
        rule = (
            f"the length alone {max(longer, 1 - longer):.3f}" if "eval/length_baseline" in figures else "chance 0.500"
        )
        order = f". It orders {figures['eval/pair_accuracy']:.3f} of the pairs as their targets do, {rule}"
    if "eval/mse" in figures:
        error, variance = figures["eval/mse"], figures["eval/target_variance"]
        if all(rule.is_beaten for rule in rules if rule.key == "eval/mse"):
            place = "below the variance of the targets"
        elif error > variance:
            place = "above the variance of the targets, so predicting their mean would be better"
        else:
            place = "not clearly below the variance of the targets, the error of predicting their mean"
        return f"held-out error {_measured(figures, 'eval/mse', '.4g')}: {place} ({variance:.4g}){order}", is_better
    named = {f"{rule.rule} ({rule.value:.3f})": rule.is_beaten for rule in rules if rule.key == "eval/accuracy"}
    above, missed = ([name for name, beaten in named.items() if beaten is wanted] for wanted in (True, False))
    parts = [f"above {' and '.join(above)}"] * bool(above) + [f"not above {' or '.join(missed)}"] * bool(missed)
    accuracy = _measured(figures, "eval/accuracy", ".3f")
    return f"held-out accuracy {accuracy}: {', but '.join(parts)}{order}", is_better


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
    if all(one.is_beaten for one in baselines(figures)):
        return None
    return (
        f"Reward model {name}: {held_out_verdict(figures)[0]}. Its scores may be noise, or may follow a simple rule "
        "alone: PPO would move the policy away from ref_policy for nothing."
    )
