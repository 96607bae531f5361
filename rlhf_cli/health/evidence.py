"""The figures of a run that the rules of `rlhf diagnose` read, from its files alone. Does not import torch.

Names begin with the stage. A stage without files has no figures, and a rule finds nothing in a figure that is absent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from statistics import correlation, fmean, median
from typing import Any

from rlhf_cli.algorithms.names import EVALUATION_FIGURES
from rlhf_cli.config.by_stage import load_stage_config
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.rewards import EnsembleReward, ModelReward
from rlhf_cli.health.baselines import weak_reward
from rlhf_cli.health.history import PERSIST, START
from rlhf_cli.report.run_data import StageData, measured, read_run
from rlhf_cli.run.artifacts import flat

OF_ITERATIONS = (
    "objective/score",
    "objective/score_std",
    "objective/kl",
    "objective/kl_coef",
    "objective/return_variance",
    "value/error",
    "value/explained_variance",
    "policy/entropy",
    "response/eos_fraction",
)
"""Metrics of PPO of which the first START and the last PERSIST iterations are averaged."""
OF_EVALUATIONS = ("score_mean", "kl", "length")
"""What rules read of PPO's evaluation of both policies, besides the numbers of the judge."""
MIN_TEXTS = 3
"""Different prompts that show what all prompts have in common."""


class Figures(float):
    """A figure that a run does not have: NaN, so that comparisons with it are false. Its attributes are the figures
    whose names begin with its own.

    >>> ppo = Figures("ppo", {"ppo.end.kl": 3.5})
    >>> ppo.end.kl, ppo.end.score, ppo.end.score > 1
    (3.5, nan, False)
    """

    _name: str
    _known: Mapping[str, Any]

    def __new__(cls, name: str, known: Mapping[str, Any]) -> Figures:
        figures = super().__new__(cls, math.nan)
        figures._name, figures._known = name, known
        return figures

    def __getattr__(self, name: str) -> Any:
        full = f"{self._name}.{name}"
        return self._known[full] if full in self._known else Figures(full, self._known)


@dataclass(frozen=True)
class Evidence:
    """What a run left, in numbers. `dataclasses.asdict` of it is plain JSON."""

    stages: list[str]
    """The stages that have files, in order."""
    finished: list[str] = field(default_factory=list)
    """Those of them that are finished."""
    figures: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """Config values by stage and dotted key."""
    texts: dict[str, str] = field(default_factory=dict)
    """`<stage>.prompt_end`, with which all prompts of a stage end, and what the probes found."""
    findings: dict[str, dict[str, str]] = field(default_factory=dict)
    """`<stage>.<name>` of each health finding -> its last `message` and `advice`."""
    problems: list[str] = field(default_factory=list)
    """What could not be measured, a line each."""

    @property
    def sft(self) -> Figures:
        """SFT's figures, settings and texts: `run.sft.loss_end`, `run.sft.data.max_length`."""
        return self._of("sft")

    @property
    def rm(self) -> Figures:
        return self._of("rm")

    @property
    def ppo(self) -> Figures:
        return self._of("ppo")

    def _of(self, stage: str) -> Figures:
        return Figures(stage, self.settings | self.texts | self.figures)

    def gain(self, name: str) -> float:
        """The difference of the policies after and before PPO in a figure of its evaluation."""
        return self.figures.get(f"ppo.after.{name}", math.nan) - self.figures.get(f"ppo.before.{name}", math.nan)

    @property
    def weakness(self) -> str | None:
        """The message of the health check on reward models; None if it is better than guessing and simple rules."""
        return weak_reward("rm", {f"eval/{name[3:]}": x for name, x in self.figures.items() if name.startswith("rm.")})

    def said(self, *names: str) -> list[str]:
        """The messages of these health findings, where the run had them."""
        return [self.findings[name]["message"] for name in names if name in self.findings]


def read_evidence(root: Path) -> Evidence:
    """The evidence in the files of the run at `root`, finished or not.

    Raises ArtifactError if no stage has metrics, and ConfigError for a config of another version of rlhf.
    """
    run = read_run(root, root.name)
    figures: dict[str, float] = {}
    settings: dict[str, Any] = {}
    for stage, data in run.stages.items():
        config = load_stage_config(stage, data.directory / "config.yaml")
        settings |= flat(config.model_dump(mode="json"), stage)
        rows = measured(data.directory / "metrics.jsonl")
        figures |= _of_manifest(stage, data)
        figures |= _ppo(rows, config) if isinstance(config, PPOConfig) else _training(stage, rows)
        if stage == "sft":  # the share of its last samples that ended by themselves
            last = max((row.get("step", 0) for row in data.samples), default=0)
            ended = [float(row["ended"]) for row in data.samples if row.get("step", 0) == last and "ended" in row]
            figures |= {"sft.samples_ended": fmean(ended), "sft.samples": float(len(ended))} if ended else {}
        elif isinstance(config, PPOConfig):
            figures |= _eval_of_ppo(data.evaluation)
            weights = [reward.weight for reward in config.rewards if isinstance(reward, ModelReward)]
            settings["ppo.has_reward_model"] = bool(weights)
            settings["ppo.opposed"] = [weight for weight in weights if weight < 0]
        elif length := data.evaluation.get("figures", {}).get("score_length_correlation"):
            figures["rm.score_length_correlation"] = length["value"]
    finished = [stage for stage, data in run.stages.items() if data.manifest is not None]
    findings = {
        f"{stage}.{finding.name}": {"message": finding.message, "advice": finding.advice}
        for stage, data in run.stages.items()
        for finding in data.findings
        if finding.message
    }
    prompts = {
        stage: {str(row["prompt"]) for row in data.samples if "prompt" in row} for stage, data in run.stages.items()
    }
    texts = {f"{stage}.prompt_end": common_end(found) for stage, found in prompts.items() if len(found) >= MIN_TEXTS}
    return Evidence(list(run.stages), finished, figures, settings, texts, findings)


def _of_manifest(stage: str, data: StageData) -> dict[str, float]:
    """The final figures of a finished stage. PPO's are `ppo.before.*` and `ppo.after.*`; the judge's number is gold."""
    if data.manifest is None:
        return {}
    metrics = data.manifest.metrics
    if stage != "ppo":
        return {f"{stage}.{name.removeprefix('eval/')}": value for name, value in metrics.items()}
    judged = [name for key in metrics if (name := key.removeprefix("sft/")) != key and name not in EVALUATION_FIGURES]
    gold = "gold" if "gold" in judged else next(iter(judged), None)
    found: dict[str, float] = {}
    for side, name in (("before", "sft"), ("after", "ppo")):
        found |= {f"ppo.{side}.{key}": metrics[f"{name}/{key}"] for key in OF_EVALUATIONS if f"{name}/{key}" in metrics}
        if gold is not None:
            found[f"ppo.{side}.gold"] = metrics[f"{name}/{gold}"]
    return found


def _training(stage: str, rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The training loss of SFT or RM: over the first tenth, up to the middle, and over the last tenth of the steps."""
    loss = [row[f"loss/{stage}"] for row in rows if f"loss/{stage}" in row]
    if not loss:
        return {}
    tenth = max(1, len(loss) // 10)
    half = len(loss) // 2
    found = {
        f"{stage}.steps": float(len(loss)),
        f"{stage}.loss_first": loss[0],
        f"{stage}.loss_start": fmean(loss[:tenth]),
        f"{stage}.loss_half": fmean(loss[max(0, half - tenth) : half] or loss[:1]),
        f"{stage}.loss_end": fmean(loss[-tenth:]),
        f"{stage}.loss_lowest": min(fmean(loss[i : i + tenth]) for i in range(0, len(loss) - tenth + 1, tenth)),
        f"{stage}.bad_steps": sum(row.get(f"{stage}/bad_steps", 0.0) for row in rows),
    }
    if norms := [row[f"{stage}/grad_norm"] for row in rows if f"{stage}/grad_norm" in row][half:]:
        found[f"{stage}.grad_spike"] = max(norms) / max(median(norms), 1e-12)
    if accuracy := [row["rm/accuracy"] for row in rows if "rm/accuracy" in row]:
        found["rm.training_accuracy"] = fmean(accuracy[-tenth:])
    return found


def _ppo(rows: Sequence[Mapping[str, float]], config: PPOConfig) -> dict[str, float]:
    """PPO's first and last iterations, its extremes, and the share of texts that a reward model had to cut."""
    iterations = [row for row in rows if "objective/score" in row]
    if not iterations:
        return {}
    found = {"ppo.iterations": float(len(iterations))}
    for key in OF_ITERATIONS:
        values = [row[key] for row in iterations if key in row]
        if values:
            name = key.partition("/")[2]
            found[f"ppo.start.{name}"] = fmean(values[:START])
            found[f"ppo.end.{name}"] = fmean(values[-PERSIST:])
    for name in ("approx_kl", "clip_fraction"):
        values = [row[f"policy/{name}"] for row in iterations if f"policy/{name}" in row]
        if values:
            found[f"ppo.mean.{name}"] = fmean(values)
    cut = [sum(v for k, v in row.items() if k.startswith("reward/") and k.endswith("_cut")) for row in iterations]
    found["ppo.cut_share"] = fmean(cut) / config.ppo.rollout_batch_size
    only = config.rewards[0] if len(config.rewards) == 1 else None
    normalised = isinstance(only, ModelReward | EnsembleReward) and only.normalize
    found["ppo.only_normalised_rewards"] = float(normalised)
    return found


def _eval_of_ppo(report: Mapping[str, Any]) -> dict[str, float]:
    """How far score and gold agree on the replies of SFT that `rlhf eval` wrote, and how gold changed."""
    change = report.get("difference", {}).get("gold", {})
    found = {f"ppo.gold_change_{key}": float(change[key]) for key in ("low", "high") if key in change}
    replies = [row["sft"] for row in report.get("replies", []) if "gold" in row.get("sft", {})]
    scores, golds = ([reply[key] for reply in replies] for key in ("score", "gold"))
    if len(set(scores)) > 1 and len(set(golds)) > 1:
        found["ppo.score_gold_correlation"] = correlation(scores, golds)
        found["ppo.score_gold_pairs"] = float(len(replies))
    return found


def common_start(texts: Iterable[str]) -> str:
    """The longest text that all of some texts begin with."""
    columns: Iterable[tuple[str, ...]] = zip(*texts, strict=False)
    return "".join(letters[0] for letters in takewhile(lambda letters: len(set(letters)) == 1, columns))


def common_end(texts: Iterable[str]) -> str:
    """The longest text that all of some texts end with.

    >>> common_end(["one A:", "two A:"])
    ' A:'
    """
    return common_start([text[::-1] for text in texts])[::-1]
