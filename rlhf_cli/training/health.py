"""Health of a PPO run: each iteration's metrics are checked for the ways in which PPO on language models fails.

A finding has a name, a message with its numbers and the rule, and advice. `stop` is for what is wrong whatever the
data: a ratio that is not 1 or a KL that is not 0 before any training, and NaN or infinite metrics. Everything else is a
`warning`, because it may be intended.

The rules are in `health_rules.py` (one or a few iterations), `health_trends.py` (the whole run) and `health_start.py`
(before the first iteration). A limit is relative to the run's own first iterations, unless there is a natural one. Most
must be passed for several iterations, so that one unusual batch gives no warning; a value far beyond is reported
immediately. The limits are set between good runs and runs that were made bad on purpose.
Good: the shop-support task over seeds and 50 to 200 iterations, and in bfloat16; the stories, sentiment and HH tasks.
Bad: the shop-support task with kl_coef 0, 10 and 50 times the learning rate, 16 ppo_epochs, and rewards for length, for
brevity, or equal for all responses.

Does not import torch. The findings depend on figures of all processes, so all get the same ones and stop together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from rlhf_cli.training.health_history import LARGEST, History
from rlhf_cli.training.health_rules import (
    GAP_TOLERANCE,
    ON_ONE_ITERATION,
    ON_SOME_ITERATIONS,
    RATIO_TOLERANCE,
    STOPS,
    Rule,
    Seen,
)
from rlhf_cli.training.health_start import WEAK_REWARD_ADVICE, weak_reward
from rlhf_cli.training.health_trends import OVEROPTIMISATION_ADVICE, TRENDS, overoptimisation

WARNINGS = (*ON_ONE_ITERATION, *ON_SOME_ITERATIONS, *TRENDS)
REPEAT = 10
"""Iterations after which a warning may be given again ..."""
WORSE = 1.5
"""... if its number has grown by this factor since it was given."""
WATCHED = (
    "objective/score",
    "objective/score_std",
    "objective/kl",
    "objective/kl_coef",
    "objective/reward",
    "response/length",
    "response/eos_fraction",
    "response/empty_fraction",
    "response/distinct_2",
    "response/duplicate_fraction",
    "response/score_length_correlation",
    "policy/entropy",
    "policy/approx_kl",
    "policy/clip_fraction",
    "policy/grad_norm",
    "value/explained_variance",
)
"""Metrics that are kept for later iterations."""
SHOWN = {
    "score": "objective/score",
    "KL": "objective/kl",
    "length": "response/length",
    "entropy": "policy/entropy",
}
"""Metrics in the health line."""
OF_EVALUATIONS = ("overoptimisation",)
"""Findings of `check_evaluation`; they hold until the next evaluation."""
OF_START = ("weak_reward_model",)
"""Findings of `check_start`; they hold for the whole run."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with the run, or may be."""

    name: str
    severity: Literal["stop", "warning"]
    message: str
    """What was found with its numbers, the limit and the likely cause, on one line."""
    advice: str
    """What to try, with config keys, on one line."""


class Health:
    """Watches a run, iteration by iteration.

    Args:
        kl_in_reward: ppo.kl_in is reward.
        has_value_model: whether there is a value model; without one its metrics are ignored.
        starts_at_reference: policy and ref_policy start as the same model, so the first KL is 0.
        max_new_tokens: rollout.max_new_tokens.
        ratio_tolerance: in nats, from RATIO_TOLERANCE by precision. It is also the tolerance of the first KL, and half
            that of the largest sampler gap.
        gap_tolerance: in nats, from GAP_TOLERANCE by precision, of the mean sampler gap.
        config: the run's config by dotted key, for the advice. An absent key is unknown.

    >>> health = Health(kl_in_reward=True, has_value_model=True, starts_at_reference=True, max_new_tokens=64)
    >>> metrics = {"objective/score": 0.5, "objective/kl": 0.25, "policy/first_ratio_error": 0.0}
    >>> findings = health.check(1, metrics)
    >>> [(finding.name, finding.severity) for finding in findings]
    [('kl_not_zero', 'stop')]
    >>> health.line(findings, metrics)
    'kl_not_zero: score 0.5, KL 0.25'
    """

    def __init__(
        self,
        *,
        kl_in_reward: bool,
        has_value_model: bool,
        starts_at_reference: bool,
        max_new_tokens: int,
        ratio_tolerance: float = RATIO_TOLERANCE["float32"],
        gap_tolerance: float = GAP_TOLERANCE["float32"],
        config: Mapping[str, Any] | None = None,
    ):
        self.history = History(
            kl_in_reward,
            has_value_model,
            starts_at_reference,
            max_new_tokens,
            ratio_tolerance,
            gap_tolerance,
            config or {},
        )
        self._best_gold: dict[str, Any] | None = None
        """The evaluation with the highest mean gold: iteration, scores, golds."""
        self._present: dict[str, int] = {}
        """The warnings that hold now, and the iteration since which they hold."""
        self._said: dict[str, list[float]] = {}
        """The iteration in which each warning was last given, and how bad it was."""

    def check_start(self, reward_models: Mapping[str, Mapping[str, float]]) -> list[Finding]:
        """The findings before the first iteration, from the held-out figures of each reward model (its manifest's)."""
        messages = [weak_reward(name, figures) for name, figures in reward_models.items()]
        findings = [
            Finding("weak_reward_model", "warning", message, WEAK_REWARD_ADVICE) for message in messages if message
        ]
        self._present |= {finding.name: 0 for finding in findings}
        return findings

    def check(
        self, iteration: int, metrics: Mapping[str, float], words: Mapping[str, float] | None = None
    ) -> list[Finding]:
        """The findings after `iteration` (from 1): stops, and warnings that are new or have become worse.

        `words` gives the share of the responses that contain each word.

        A metric that is absent or NaN is not judged, except those that must be finite. If the run was resumed, call
        `load_state_dict` first; else this iteration is taken as its start.
        """
        self.history.add(iteration, metrics, WATCHED, words or {})
        stops = [finding for finding, _ in self._apply(STOPS)]
        return stops + self._due(iteration, self._apply(WARNINGS), evaluation=False)

    def check_evaluation(
        self, iteration: int, scores: Sequence[float], golds: Sequence[float] | None = None
    ) -> list[Finding]:
        """The findings of an evaluation on held-out prompts after `iteration` (0: before training).

        Each prompt has a score and a gold score. The prompts and their order must be the same in every evaluation,
        because evaluations are compared prompt by prompt. Without gold scores nothing is found.
        """
        if golds is None:
            return []
        if len(scores) != len(golds) or (self._best_gold and len(golds) != len(self._best_gold["golds"])):
            raise ValueError(
                f"iteration {iteration}: evaluations are compared prompt by prompt, and the number of prompts differs"
            )
        findings: list[tuple[Finding, float]] = []
        if self._best_gold is not None:
            best = (self._best_gold["iteration"], self._best_gold["scores"], self._best_gold["golds"])
            seen = overoptimisation(best, iteration, scores, golds)
            if seen is not None:
                advice = OVEROPTIMISATION_ADVICE.format(best=best[0], **self.history.advice)
                findings.append((Finding("overoptimisation", "warning", seen[0], advice), seen[1]))
        if golds:
            self.history.golds.append([iteration, fmean(golds)])
        if golds and (self._best_gold is None or fmean(golds) > fmean(self._best_gold["golds"])):
            self._best_gold = {"iteration": iteration, "scores": list(scores), "golds": list(golds)}
        return self._due(iteration, findings, evaluation=True)

    def line(self, findings: Sequence[Finding], metrics: Mapping[str, float]) -> str:
        """One line: `healthy`, or the new findings and those that still hold, then a few metrics."""
        new = list(dict.fromkeys(finding.name for finding in findings))
        old = [
            f"{name} (since iteration {since})" if since else f"{name} (from the start)"
            for name, since in self._present.items()
            if name not in new
        ]
        figures = ", ".join(f"{word} {metrics[key]:.3g}" for word, key in SHOWN.items() if key in metrics)
        return (", ".join(new + old) or "healthy") + (f": {figures}" if figures else "")

    def state_dict(self) -> dict[str, Any]:
        """The state for `load_state_dict`, as a copy, of plain JSON values."""
        state = {
            "start": self.history.start,
            "recent": self.history.recent,
            "bests": self.history.bests,
            "first_words": self.history.first_words,
            "recent_words": self.history.recent_words,
            "golds": self.history.golds,
            "best_gold": self._best_gold,
            "present": self._present,
            "said": self._said,
        }
        return deepcopy(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`: the next findings are the same as without an interruption."""
        state = deepcopy(dict(state))
        history = self.history
        history.start, history.recent, history.bests = state["start"], state["recent"], state["bests"]
        history.first_words, history.recent_words = state["first_words"], state["recent_words"]
        history.golds = state.get("golds", [])  # absent in the checkpoints of rlhf 0.1
        self._best_gold, self._present = state["best_gold"], state["present"]
        self._said = {name: one if isinstance(one, list) else [one, LARGEST] for name, one in state["said"].items()}

    def _apply(self, rules: Sequence[Rule]) -> list[tuple[Finding, float]]:
        """What the rules find, each with its number that grows as it becomes worse."""
        found: list[tuple[Rule, Seen | None]] = [(rule, rule.look(self.history)) for rule in rules]
        return [
            (Finding(rule.name, rule.severity, seen[0], rule.advice.format(**self.history.advice)), seen[1])
            for rule, seen in found
            if seen is not None
        ]

    def _due(self, iteration: int, found: list[tuple[Finding, float]], *, evaluation: bool) -> list[Finding]:
        """The warnings to give: those that were not given yet, and those that have become worse since."""
        names = {finding.name for finding, _ in found}
        # A finding of the other kinds of check still holds.
        self._present = {
            name: since
            for name, since in self._present.items()
            if name in names or name in OF_START or (name in OF_EVALUATIONS) is not evaluation
        }
        due = []
        for finding, size in found:
            self._present.setdefault(finding.name, iteration)
            said, then = self._said.get(finding.name, (-REPEAT, 0.0))
            if iteration - said >= REPEAT and size > WORSE * then:
                self._said[finding.name] = [iteration, min(size, LARGEST)]
                due.append(finding)
        return due
