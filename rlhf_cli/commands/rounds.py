"""`rlhf pipeline --rounds N`: label replies of the policy, train the reward model again with them, and PPO from SFT.

    <artifacts>                     round 1: sft, rm and ppo
    <artifacts>/rounds/2            a link to sft, labels.jsonl, rm and ppo; and so on

A pair is two replies of the policy of the round before. (With a reply of the SFT model as the other one, gold ended
lower on the one seed that was tried, docs/overoptimization.md.) The reward model of a round learns from its own rows
and the labels of all rounds so far, and the policy starts again from the SFT model, which arXiv 2505.18126 found the
most robust start. Without --labels the round writes samples.jsonl, and the pipeline ends until labels.jsonl is there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rlhf_cli.commands.output import Dropped, Outcome, Output, data_digest, each_item, items, prompt_column
from rlhf_cli.config.base import Section
from rlhf_cli.config.data import DataSource
from rlhf_cli.config.loader import load_values
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.rewards import FunctionReward, ModelReward, Reward, named_rewards
from rlhf_cli.config.sft_rm import RMConfig
from rlhf_cli.config.stage import Stage
from rlhf_cli.config.yaml_text import as_override
from rlhf_cli.data.records import Record
from rlhf_cli.errors import ConfigError
from rlhf_cli.files import read_object
from rlhf_cli.program import command
from rlhf_cli.report.progress import Display
from rlhf_cli.run.artifacts import read_manifest, stage_directory
from rlhf_cli.run.identity import require_files
from rlhf_cli.seeding import derived_seed

if TYPE_CHECKING:
    from rlhf_cli.trained.model import TrainedLanguageModel

PAIRS = 500
"""Pairs that a round labels, if the prompts suffice."""
FIGURES = {
    "reward model's accuracy": ("rm", "eval/accuracy"),
    "gold": ("ppo", "ppo/gold"),
    "score": ("ppo", "ppo/score_mean"),
    "KL": ("ppo", "ppo/kl"),
}
"""The columns of the table of rounds: a metric in the manifest of a stage."""


class _Labels(Section):
    labels: Reward


@dataclass(frozen=True)
class Rounds:
    """How the rounds after the first get their labels."""

    labels: Reward | None
    """What scores the replies; None if the labels come from outside."""
    num_pairs: int

    @classmethod
    def of(cls, labels: str | None, num_pairs: int | None, configs: Mapping[str, Stage]) -> Rounds:
        """The options, for stages with these configs. Raises ConfigError if rounds would do nothing with them."""
        rm, ppo = configs.get("rm"), configs.get("ppo")
        if not isinstance(rm, RMConfig) or not isinstance(ppo, PPOConfig):
            raise ConfigError("--rounds: trains the reward model and PPO again, so it needs rm.yaml and ppo.yaml")
        if "rm" not in ppo.needs:
            found = "ppo.yaml has no reward from the run's own rm stage (`type: reward_model` without `path`)"
            raise ConfigError(f"--rounds: {found}, so labels would change nothing. Add one")
        if not rm.is_pairwise:
            raise ConfigError(f"--rounds: labels are pairs, and rm.yaml has loss: {rm.loss}. Use a pairwise loss")
        if rm.data.split is not None:
            found = "data.split of rm.yaml would leave out the labels, whose prompts are PPO's"
            raise ConfigError(f"--rounds: {found}. Give the reward model a file of its own")
        return cls(None if labels is None else _reward(labels, ppo), num_pairs or PAIRS)

    def prepare(self, number: int, before: str, folder: Path, *, display: Display, again: str, restart: bool) -> bool:
        """Write the pairs of a round into its folder; returns whether they have their labels.

        `before` is the directory of the round before, and `again` the command to run when the labels are there.
        """
        from rlhf_cli.trained.model import find_model

        policy = find_model(before, "ppo")
        labels, samples = folder / "labels.jsonl", folder / "samples.jsonl"
        self._write(samples if self.labels is None else labels, number, policy, display, restart=restart)
        has_sft = read_manifest(stage_directory(before, "sft")) is not None
        if has_sft and not (folder / "sft").is_symlink():
            (folder / "sft").symlink_to(Path("../../sft"))
        if self.labels is not None or _are_complete(labels, samples):
            return True
        by_hand = command("label", str(samples), "--out", str(labels))
        by_model = command("data", "score", str(samples), "--compare", "--out", str(labels), "--model", "JUDGE")
        display.note(f"round {number} waits for {labels}. Label the pairs: {by_hand}, or: {by_model}. Then: {again}")
        return False

    def overrides(self, configs: Mapping[str, Stage], root: str, number: int) -> dict[str, list[str]]:
        """The settings of a round's stages that differ from the first: their directory, and all labels so far."""
        rm = configs["rm"]
        assert isinstance(rm, RMConfig)
        place = as_override("artifacts", f"{root}/rounds/{number}")
        sources = [source.model_dump(mode="json", exclude_defaults=True) for source in rm.data.train]
        sources += [{"path": f"{root}/rounds/{one}/labels.jsonl"} for one in range(2, number + 1)]
        return {"rm": [place, f"data.train={json.dumps(sources)}"], "ppo": [place]}

    def _write(self, out: Path, number: int, policy: TrainedLanguageModel, display: Display, *, restart: bool) -> None:
        """Sample two replies to each prompt, and label the pairs if there is a source of labels."""
        from rlhf_cli.commands.generate import Generator, ResponseOptions, with_prompt
        from rlhf_cli.data.stage_rows import prompt
        from rlhf_cli.processes import distributed
        from rlhf_cli.trained.model import RewardSet

        config = policy.config
        assert isinstance(config, PPOConfig)
        options = ResponseOptions(seed=derived_seed(config.seed, "round", number), device=config.device)
        judge = None if self.labels is None else RewardSet(named_rewards([self.labels], "", 0))
        data, every = config.data, []
        for source in data.train:
            found = items(source, "ppo", data.on_bad_row, prompt, prompt_words=data.prompt_words)
            every += [item for item in map(with_prompt, found) if isinstance(item, Record)]
        first = (number - 2) * self.num_pairs  # each round takes the next prompts, and starts over at the end
        records = [every[(first + n) % len(every)] for n in range(min(self.num_pairs, len(every)))]

        def open_model() -> Generator:
            generator = Generator(policy, options, judge, distributed.start(config.device).device)
            display.notes(*generator.notes)
            return generator

        def pairs(generator: Generator, numbered: Sequence[tuple[int, Record]]) -> list[Outcome]:
            # A reply is drawn from the number of its prompt, so the second one gets another number.
            replies = [generator.respond([(2 * n + k, prompt(record)) for n, record in numbered]) for k in (0, 1)]
            return [_pair(record, *both) for (_, record), *both in zip(numbered, *replies, strict=True)]

        settings = {
            "model": policy.digest(),
            "rollout": options.rollout(policy).model_dump(mode="json"),
            "labels": None if judge is None else json.dumps(judge.settings()),
            "data": [data_digest(source) for source in config.data.train],
            "pairs": self.num_pairs,
            "seed": config.seed,
        }
        try:
            with Output(out, settings, restart=restart) as rows:
                each_item(rows, lambda: iter(records), open_model, pairs, display, chunk=options.batch_size)
                display.note(f"{out}: {rows.num_rows} pairs{rows.summary_of_dropped()}")
                rows.require_rows()
        except ConfigError as error:
            if "was made with other settings" not in str(error):
                raise
            raise ConfigError(f"{str(error).partition('. Restore')[0]}. Restore them, or remove the file") from None


def _reward(text: str, ppo: PPOConfig) -> Reward:
    """The source of --labels: `file.py:function`, or a mapping as in `rewards`."""
    value: Any = {"type": "function", "function": text}
    if not re.fullmatch(r"[^{}]+\.py:\w+", text):
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
    reward = load_values({"labels": value}, _Labels, [], "--labels").labels
    models = [one.reward for one in named_rewards([reward], "", 0) if isinstance(one.reward, ModelReward)]
    if any(model.path is None for model in models):
        raise ConfigError("--labels: give the reward model a `path`; the run's own would repeat its mistakes")
    require_files(ppo.model_copy(update={"rewards": [reward]}))
    if isinstance(reward, FunctionReward):
        from rlhf_cli.rewards.functions import load_function

        load_function(reward.function)
    return reward


def _pair(record: Record, *replies: Outcome) -> Outcome:
    """The row of two replies, with the better one as `chosen` if they have scores; or why there is none."""
    both = [reply for reply in replies if isinstance(reply, dict)]
    if len(both) < len(replies):
        return next(reply for reply in replies if not isinstance(reply, dict))
    texts = {reply["response"].strip() for reply in both}
    if "" in texts:
        return Dropped("a reply is blank")
    if len(texts) == 1:
        return Dropped("the replies are equal")
    row: dict[str, Any] = {"prompt": prompt_column(record)}
    if "score" not in both[0]:
        responses, ended = ([reply[name] for reply in both] for name in ("response", "ended"))
        return {**row, "responses": responses, "scores": [None, None], "ended": ended}
    if both[0]["score"] == both[1]["score"]:
        return Dropped("tie")
    best, worst = sorted(both, key=lambda reply: -reply["score"])
    row |= {"chosen": best["response"], "rejected": worst["response"]}
    row |= {"chosen_score": best["score"], "rejected_score": worst["score"]}
    return row if best["ended"] and worst["ended"] else {**row, "ended": [best["ended"], worst["ended"]]}


def _are_complete(labels: Path, samples: Path) -> bool:
    """Does every pair have a label, or a reason without one? Raises ConfigError for labels of other pairs."""
    if not labels.is_file():
        return False
    settings = labels.with_name(labels.name + ".settings")
    if not settings.is_file():
        return True  # not written by a command of ours
    made_with = read_object(settings)
    if not made_with:
        raise ConfigError(f"{settings}: is not a JSON object. Remove it and {labels.name} to label again")
    if made_with.get("data") != data_digest(DataSource(path=str(samples))):
        raise ConfigError(f"{labels}: has labels of other pairs than those in {samples}. Remove it to label again")
    files = (labels, labels.with_name(labels.name + ".dropped"), samples)
    done, dropped, total = (sum(1 for _ in path.open("rb")) if path.is_file() else 0 for path in files)
    return done + dropped >= total


def show(roots: Sequence[str], display: Display) -> None:
    rows = []
    for number, root in enumerate(roots, 1):
        manifests = {stage: read_manifest(stage_directory(root, stage)) for stage in ("rm", "ppo")}
        found = [m.metrics.get(key) if (m := manifests[stage]) is not None else None for stage, key in FIGURES.values()]
        rows.append([str(number), *("" if value is None else f"{value:.3f}" for value in found)])
    display.table("Rounds", ["round", *FIGURES], rows)
