"""Health of a PPO run: each iteration's metrics are checked for the ways in which PPO on language models fails.

A finding has a name, a message with its numbers and the rule, and advice. `stop` is for what is wrong whatever the
data: a ratio that is not 1 or a KL that is not 0 before any training, and NaN or infinite metrics. Everything else is a
`warning`, because it may be intended.

The rules are in `ppo_rules.py`, the one before the first iteration in `baselines.py`. A limit is relative to the run's
own first iterations, unless there is a natural one. Most must be passed for several iterations, so that one unusual
batch gives no warning; a value far beyond is reported immediately. The limits are set between good runs and runs that
were made bad on purpose.
Good: the shop-support task over seeds and 50 to 200 iterations, and in bfloat16; the stories, sentiment and HH tasks.
Bad: the shop-support task with kl_coef 0, 10 and 50 times the learning rate, 16 ppo_epochs, and rewards for length, for
brevity, or equal for all responses.

Does not import torch. The findings depend on figures of all processes, so all get the same ones and stop together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from typing import Any

from rlhf_cli.health.baselines import WEAK_REWARD_ADVICE, weak_reward
from rlhf_cli.health.findings import Finding, Rule
from rlhf_cli.health.history import LARGEST, History
from rlhf_cli.health.ppo_rules import EVALUATION, STOPS, WARNINGS

REPEAT = 10
"""Iterations after which a warning may be given again ..."""
WORSE = 1.5
"""... if its number has grown by this factor since it was given."""
SHOWN = {
    "score": "objective/score",
    "KL": "objective/kl",
    "length": "response/length",
    "entropy": "policy/entropy",
}
"""Metrics in the health line."""
OF_START = "weak_reward_model"
"""The finding of `check_start`; it holds for the whole run."""
STATE = (
    "start", "recent", "bests", "first_words", "recent_words", "golds", "best_gold", "present", "said",
)  # fmt: skip
"""What a checkpoint keeps."""


@dataclass
class Health(History):
    """Watches a run, iteration by iteration."""

    present: dict[str, int] = field(default_factory=dict)
    """The warnings that hold now, and the iteration since which they hold."""
    said: dict[str, list[float]] = field(default_factory=dict)
    """The iteration in which each warning was last given, and how bad it was."""

    def check_start(self, reward_models: Mapping[str, Mapping[str, float]]) -> list[Finding]:
        """The findings before the first iteration, from the held-out figures of each reward model (its manifest's)."""
        messages = [weak_reward(name, figures) for name, figures in reward_models.items()]
        findings = [Finding(OF_START, "warning", message, WEAK_REWARD_ADVICE) for message in messages if message]
        self.present |= {finding.name: 0 for finding in findings}
        return findings

    def check(
        self, iteration: int, metrics: Mapping[str, float], words: Mapping[str, float] | None = None
    ) -> list[Finding]:
        """The findings after `iteration` (from 1): stops, and warnings that are new or have become worse.

        `words` gives the share of the responses that contain each word.

        A metric that is absent or NaN is not judged, except those that must be finite. If the run was resumed, call
        `load_state_dict` first; else this iteration is taken as its start.
        """
        self.add(iteration, metrics, words or {})
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
        self.judged = {"iteration": iteration, "scores": list(scores), "golds": list(golds)}
        found = self._apply(EVALUATION)
        if golds:
            self.golds.append([iteration, fmean(golds)])
            if self.best_gold is None or fmean(golds) > fmean(self.best_gold["golds"]):
                self.best_gold = self.judged
        return self._due(iteration, found, evaluation=True)

    def line(self, findings: Sequence[Finding], metrics: Mapping[str, float]) -> str:
        """One line: `healthy`, or the new findings and those that still hold, then a few metrics."""
        new = list(dict.fromkeys(finding.name for finding in findings))
        old = [
            f"{name} (since iteration {since})" if since else f"{name} (from the start)"
            for name, since in self.present.items()
            if name not in new
        ]
        figures = ", ".join(f"{word} {metrics[key]:.3g}" for word, key in SHOWN.items() if key in metrics)
        return (", ".join(new + old) or "healthy") + (f": {figures}" if figures else "")

    def state_dict(self) -> dict[str, Any]:
        """The state for `load_state_dict`, as a copy, of plain JSON values."""
        return deepcopy({name: getattr(self, name) for name in STATE})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`: the next findings are the same as without an interruption."""
        for name, value in deepcopy(dict(state)).items():
            setattr(self, name, value)

    def _apply(self, rules: Sequence[Rule]) -> list[tuple[Finding, float]]:
        """What the rules find, each with its number that grows as it becomes worse."""
        return [
            (Finding(rule.name, rule.severity, text, rule.advice.format(**self.advice)), size)
            for rule in rules
            for size, text in islice(rule.signs(self), 1)
        ]

    def _due(self, iteration: int, found: list[tuple[Finding, float]], *, evaluation: bool) -> list[Finding]:
        """The warnings to give: those that were not given yet, and those that have become worse since."""
        names, of_evaluation = {finding.name for finding, _ in found}, {rule.name for rule in EVALUATION}
        # A finding of the other kinds of check still holds.
        self.present = {
            name: since
            for name, since in self.present.items()
            if name in names or name == OF_START or (name in of_evaluation) is not evaluation
        }
        due = []
        for finding, size in found:
            self.present.setdefault(finding.name, iteration)
            said, then = self.said.get(finding.name, (-REPEAT, 0.0))
            if iteration - said >= REPEAT and size > WORSE * then:
                self.said[finding.name] = [iteration, min(size, LARGEST)]
                due.append(finding)
        return due
