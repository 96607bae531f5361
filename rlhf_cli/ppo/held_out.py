"""SFT against PPO on the held-out prompts: before training, during it, and at the end."""

from __future__ import annotations

import json
from typing import Any

from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.data.splits import Drawn
from rlhf_cli.errors import ConfigError, RewardError
from rlhf_cli.health.running import Health
from rlhf_cli.ppo.evaluation import Evaluation, evaluate, load_gold
from rlhf_cli.ppo.saving import save_policy
from rlhf_cli.ppo.setup import Setup
from rlhf_cli.training.best import Best


class HeldOut:
    """The held-out figures of a run. Without held-out prompts it does nothing.

    Along the run and for the best policy they are those of the validation prompts, if there are some; at the end SFT
    and PPO are compared on the test prompts. Creating it measures the policy before PPO, so that a judge that fails
    does so before training.
    """

    def __init__(self, setup: Setup, health: Health):
        self.setup, self.health = setup, health
        self.gold = load_gold(setup)
        rows = setup.held_out
        self.before = self._measure(0, rows.watched) if rows.watched else None
        self.before_test = self._measure(0, rows.test) if rows.validation and rows.test else self.before
        if self.before is None:
            setup.stage.display.note("no held-out prompts, so SFT and PPO are not compared")
        else:
            health.check_evaluation(0, self.before.scores, self.before.gold_scores)
        self.best = best_of(setup.config.evaluation.best_metric, self.before)
        self.last_step = 0
        """The iteration of the latest figures; a checkpoint keeps it."""

    def measure_if_due(self, iteration: int) -> None:
        """Measure the policy before this iteration if `evaluation.every_iterations` says so, and keep the best."""
        every = self.setup.config.evaluation.every_iterations
        if self.before is None or every is None or iteration % every:
            return
        if iteration == 0:
            self._record(0, self.before)
        if iteration <= self.last_step:
            return
        self._keep_if_best(iteration, self._measure_and_report(iteration))
        self.last_step = iteration

    def compare(self) -> dict[str, float]:
        """Measure the final policy, show it beside SFT, write evaluation.json; returns the figures of both."""
        if self.before is None or self.before_test is None:
            return {}
        setup, config, stage = self.setup, self.setup.config, self.setup.stage
        watched, prompts = setup.held_out.watched, setup.held_out.test or setup.held_out.watched
        last = after = self._measure_and_report(config.ppo.num_iterations)
        self._keep_if_best(config.ppo.num_iterations, last)
        if prompts is not watched:
            after = self._measure(config.ppo.num_iterations, prompts)
        sides = {"sft": self.before_test, "ppo": after}
        examples = [
            {"prompt": prompts[i].text, **{name: side.example(i) for name, side in sides.items()}}
            for i in range(min(config.evaluation.num_examples, len(prompts)))
        ]
        report: dict[str, Any] = {"num_prompts": len(prompts)}
        if len(prompts) < prompts.total:
            report["of_prompts"] = prompts.total
        report |= {"sft": self.before_test.metrics, "ppo": after.metrics, "examples": examples}
        if prompts is not watched:
            report["validation"] = {"sft": self.before.metrics, "ppo": last.metrics}
        if self.best.metric is not None:
            metric = config.evaluation.best_metric
            report["best"] = {"step": self.best.step, "metric": metric, "value": self.best.value}
            stage.display.note(f"best_model is the policy of iteration {self.best.step}, by {metric}")
        stage.display.before_and_after(report)
        if stage.world.is_main:
            text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
            (stage.directory / "evaluation.json").write_text(text, encoding="utf-8")
        return {f"{name}/{key}": v for name, side in sides.items() for key, v in side.metrics.items()}

    def _measure(self, step: int, prompts: Drawn[PromptRow]) -> Evaluation:
        """The figures after `step` iterations. If a reward fails, save a checkpoint of that step before raising."""
        try:
            with self.setup.stage.speed.phase("evaluation"):
                return evaluate(self.setup, prompts, self.gold)
        except RewardError:
            self.setup.stage.save_now(step)
            raise

    def _measure_and_report(self, step: int) -> Evaluation:
        """Measure and check the health; print the main figures, and write a row of evaluations.jsonl if requested."""
        now, stage = self._measure(step, self.setup.held_out.watched), self.setup.stage
        if self.setup.config.evaluation.every_iterations is not None:
            self._record(step, now)
        if step < self.setup.config.ppo.num_iterations:  # the last figures are shown as a table
            shown = {"score": "score_mean", "gold": "gold", "KL": "kl"}
            values = [f"{name} {now.metrics[key]:.3g}" for name, key in shown.items() if key in now.metrics]
            stage.display.note(f"iteration {step}: held-out {', '.join(values)}")
        stage.report(step, self.health.check_evaluation(step, now.scores, now.gold_scores), None)
        return now

    def _record(self, step: int, now: Evaluation) -> None:
        """Write a row of evaluations.jsonl."""
        self.setup.stage.record("evaluations", {"step": step, **now.metrics, **now.intervals()})

    def _keep_if_best(self, step: int, now: Evaluation) -> None:
        """Save `best_model` if these figures are the best so far."""
        if not self.best.is_better(step, now.metrics):
            return
        save_policy(self.setup, "best_model")
        self.setup.world.barrier("best_model to be saved")


def best_of(key: str | None, before: Evaluation | None) -> Best:
    """The figure that `evaluation.best_metric` names: the highest is the best, or the lowest after a minus sign.

    `before` is the evaluation of the policy before PPO. Raises ConfigError if it lacks that figure.
    """
    if key is None:
        return Best(None, lower=False)
    if before is None:
        raise ConfigError("evaluation.best_metric: no held-out prompts. Set data.validation or data.test")
    metric = key.removeprefix("-")
    if metric not in before.metrics:
        raise ConfigError(f"evaluation.best_metric: found {key}, the figures are {', '.join(before.metrics)}")
    return Best(metric, lower=key.startswith("-"))
