"""SFT against PPO on the held-out prompts: before training, during it, and at the end. How far their replies differ."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.algorithms.mahalanobis import Gaussian, shrunk_gaussian, squared_shift, whitened
from rlhf_cli.algorithms.statistics import distinct_n
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.data.splits import Drawn
from rlhf_cli.errors import ConfigError, RewardError
from rlhf_cli.health.findings import Finding
from rlhf_cli.health.running import Health
from rlhf_cli.ppo.scores import or_failure, sampled_and_scored
from rlhf_cli.ppo.setup import Setup, save_policy
from rlhf_cli.processes.distributed import World
from rlhf_cli.rewards.base import Samples, Scores
from rlhf_cli.rewards.sources import Judge, load_judge, main_number
from rlhf_cli.rollout.rollout import RolloutBatch
from rlhf_cli.rollout.sampling import draw_uniforms
from rlhf_cli.training.best import Best

# ------------------------------------------------ one policy: its replies, their scores, its distance from ref_policy


Reply = tuple[str, float, float, int, bool, Tensor]
"""The text of a reply, its score, the sum of log policy - log ref_policy over its tokens in nats, its tokens, whether
it ended, and [H] what the reward models scored it by (`RewardSource.features`)."""


@dataclass(frozen=True)
class Evaluation:
    """The figures of one policy and its replies, in the order of the prompts."""

    metrics: dict[str, float]
    """score_mean, score_median, the means of the judge's numbers, kl, length, eos_fraction, distinct_2, seconds."""
    texts: Sequence[str]
    columns: dict[str, list[float]]  # of each reply: score_mean, kl and the judge's numbers
    gold: list[dict[str, float]]  # the judge's numbers of each reply; empty without a judge
    features: Tensor  # [n, H]

    def intervals(self) -> dict[str, float]:
        """The ends of the 95 % intervals of score_mean, kl and the judge's numbers over the prompts."""
        found: dict[str, float] = {}
        for name, values in self.columns.items():
            mean, error = statistics.fmean(values), statistics.pstdev(values) / max(1, len(values) - 1) ** 0.5
            found |= {f"{name}_low95": mean - 1.96 * error, f"{name}_high95": mean + 1.96 * error}
        return found

    def example(self, i: int) -> dict[str, Any]:
        """Reply i with its score and the judge's numbers."""
        return {"reply": self.texts[i], "score": self.columns["score_mean"][i], **(self.gold[i] if self.gold else {})}

    def check(self, health: Health, step: int) -> list[Finding]:
        """The findings about the scores after `step` iterations, beside the judge's main number."""
        judged = self.columns[main_number(self.gold[0])] if self.gold else None
        return health.check_evaluation(step, self.columns["score_mean"], judged)


def evaluate(setup: Setup, prompts: Drawn[PromptRow], gold: Judge | None) -> Evaluation:
    """Sample one reply to each of the prompts and measure it; the uniforms are the same at every call.

    ``kl`` is the mean over replies of the sum over tokens of log policy - log ref_policy, in nats. It estimates
    KL(policy, ref_policy) without bias, and is exactly 0 for ref_policy itself. ``distinct_2`` counts pairs of words
    (Li et al. 2016), so it does not depend on the tokenizer. With several sources, score, judge (`gold`) and kl are
    also given for each: ``score_mean/<source>``. Raises RewardError if a reward or the judge fails on any process.
    """
    start, world = time.monotonic(), setup.world
    replies = world.interleave(world.gather(or_failure(world, lambda: _own_replies(setup, prompts))))
    texts, scores, kl, lengths, ended, features = zip(*replies, strict=True)

    def judge() -> list[dict[str, float]]:
        # The judge may be a large model or a paid service: only the first process asks it.
        if gold is None or not world.is_main:
            return []
        rows, where = [p.row.columns for p in prompts], [p.row.where for p in prompts]
        return gold(Samples([p.text for p in prompts], list(texts), [], [], list(ended), rows, where=where))

    gold_rows = world.gather(or_failure(world, judge))[0]
    judged = {name: [row[name] for row in gold_rows] for name in (gold_rows[0] if gold_rows else ())}
    columns = {"score_mean": list(scores), "kl": list(kl), **judged}
    metrics = {
        "score_mean": statistics.fmean(scores),
        "score_median": statistics.median(scores),
        **{name: statistics.fmean(values) for name, values in judged.items()},
        "kl": statistics.fmean(kl),
        "length": statistics.fmean(lengths),
        "eos_fraction": statistics.fmean(ended),
        "distinct_2": distinct_n([text.split() for text in texts], 2),
        "seconds": time.monotonic() - start,
    }
    for source, numbers in prompts.by_source.items():
        metrics |= {f"{name}/{source}": statistics.fmean(each[i] for i in numbers) for name, each in columns.items()}
    return Evaluation(metrics, texts, columns, gold_rows, torch.stack(features))


def _own_replies(setup: Setup, prompts: Sequence[PromptRow]) -> list[Reply]:
    """This process's replies, with their figures."""
    config = setup.config
    uniforms = draw_uniforms(config.seed, "ppo evaluation", 0, len(prompts), config.rollout.max_new_tokens)

    def read(rollout: RolloutBatch, texts: list[str], scores: Scores) -> list[Reply]:
        kl = (rollout.logprobs - rollout.ref_logprobs).sum(1).tolist()
        lengths, ended = [len(r.ids) for r in rollout.responses], [r.ended for r in rollout.responses]
        features = scores.features if scores.features is not None else torch.zeros(len(texts), 0)
        return list(zip(texts, scores.total.tolist(), kl, lengths, ended, map(torch.clone, features), strict=True))

    return sampled_and_scored(setup, setup.models.refreshed(), prompts, uniforms, read, with_kl=True)


# ------------------------------------------------------------------------------- SFT against PPO


class HeldOut:
    """The held-out figures of a run. Without held-out prompts it does nothing.

    Along the run and for the best policy it uses the validation prompts, if there are any; at the end it compares SFT
    and PPO on the test prompts. Creating it measures the policy before PPO, so a failing judge fails before training.
    """

    def __init__(self, setup: Setup, health: Health):
        self.setup, self.health = setup, health
        judge, rows = setup.config.evaluation.gold, setup.held_out
        self.gold = load_judge(judge) if judge is not None else None
        self.before = self._measure(0, rows.watched) if rows.watched else None
        self.before_test = self._measure(0, rows.test) if rows.validation and rows.test else self.before
        if self.before is None:
            setup.stage.display.note("no held-out prompts, so SFT and PPO are not compared")
            self.home = None
        else:
            self.before.check(health, 0)
            self.home = home_of(self.before.features)
        self.best = best_of(setup.config.evaluation.best_metric, self.before)
        self.last_step = 0  # the iteration of the latest figures; a checkpoint keeps it

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
        # First, because it may fail, and a resumed run would write the row of the watched prompts again.
        after = self._measure(config.ppo.num_iterations, prompts) if prompts is not watched else None
        last = self._measure_and_report(config.ppo.num_iterations)
        self._keep_if_best(config.ppo.num_iterations, last)
        after = after or last
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
        if config.evaluation.gold is not None:
            name, judge = main_number(after.gold[0]), config.evaluation.gold
            stage.display.note(f"{name} and the figures from there to kl come from the judge {judge}, not the reward")
        stage.display.before_and_after(report)
        if stage.world.is_main:
            text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
            (stage.directory / "evaluation.json").write_text(text, encoding="utf-8")
        return {f"{name}/{key}": v for name, side in sides.items() for key, v in side.metrics.items()}

    def state(self) -> dict[str, Any]:
        """The best figure and the latest iteration, for a checkpoint."""
        return {"best": {"step": self.best.step, "value": self._signed(self.best.value)}, "evaluated": self.last_step}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        self.best.step, self.best.value = numbers["best"]["step"], self._signed(numbers["best"]["value"])
        self.last_step = numbers["evaluated"]

    def _signed(self, value: float | None) -> float | None:
        """The best value as a checkpoint stores it: a figure to be minimised is negated."""
        return -value if value is not None and self.best.lower else value

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
        stage.report(step, now.check(self.health, step), None)
        return now

    def _record(self, step: int, now: Evaluation) -> None:
        self.setup.stage.record("evaluations", {"step": step, **now.metrics, **now.intervals()})

    def _keep_if_best(self, step: int, now: Evaluation) -> None:
        if self.best.is_better(step, now.metrics):
            self.setup.stage.set_aside("best_model")
            save_policy(self.setup, "best_model")
            self.setup.world.barrier("best_model to be saved")


def best_of(key: str | None, before: Evaluation | None) -> Best:
    """The figure that `evaluation.best_metric` names, lowest after a minus sign; ConfigError if `before` lacks it."""
    if key is None:
        return Best(None, lower=False)
    if before is None:
        raise ConfigError("evaluation.best_metric: no held-out prompts. Set data.validation or data.test")
    metric = key.removeprefix("-")
    if metric not in before.metrics:
        raise ConfigError(f"evaluation.best_metric: found {key}, the figures are {', '.join(before.metrics)}")
    return Best(metric, lower=key.startswith("-"))


# --------------------------------------------------------- how far PPO's replies are from the SFT model's (Mahalanobis)


NEAREST = 0.05
"""The unit of the figure is this quantile of the distances of single SFT replies from their mean."""
LEAST = 20  # fewest replies of the SFT model from which the figure is computed


@dataclass(frozen=True)
class Home:
    """The place of the replies before PPO among the features of the reward models."""

    gaussian: Gaussian  # fitted to every other reply
    unit: float  # the NEAREST quantile of the other replies' distances from its mean

    def unfamiliarity(self, features: Tensor | None, world: World) -> dict[str, float]:
        """The distance of the centre of all processes' replies [own B, H] from home, in units; {} of fewer than two."""
        own = _finite(features)
        z = whitened(own, self.gaussian) if len(own) else own.new_zeros(0, len(self.gaussian.mean)).double()
        sums = torch.cat([z.sum(0), z.square().sum()[None], torch.tensor([float(len(z))])])[None]
        *total, squares, count = torch.cat(world.gather_tensors(sums)).sum(0).tolist()
        if count < 2:
            return {}
        squared = squared_shift(torch.tensor(total, dtype=torch.float64), squares, int(count))
        return {"response/unfamiliarity": max(squared, 0.0) ** 0.5 / self.unit}


def home_of(features: Tensor) -> Home | None:
    """The home of the SFT model's replies with these features [n, H]; None if they are too few, or all equal."""
    features = _finite(features)
    if len(features) < LEAST:
        return None
    gaussian = shrunk_gaussian(features[::2])
    unit = whitened(features[1::2], gaussian).norm(dim=1).quantile(NEAREST).item()
    return Home(gaussian, unit) if unit > 0 else None


def _finite(features: Tensor | None) -> Tensor:
    """The rows of responses that have been scored; of reward models without features none."""
    return features[features.isfinite().all(1)] if features is not None and features.shape[1] else torch.zeros(0, 0)
