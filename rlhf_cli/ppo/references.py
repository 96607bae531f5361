"""Replies of ref_policy to the prompts of a run, with whose scores `shaping` compares those of the policy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, assert_never

import torch
from torch import Tensor

from rlhf_cli.algorithms.shaping import log_sigmoid_score, preference_score
from rlhf_cli.config.rewards import Shaping
from rlhf_cli.data.batches import chunks
from rlhf_cli.files import read_text
from rlhf_cli.ppo.scores import models_of_reference, or_failure, sampled_and_scored
from rlhf_cli.ppo.setup import Setup
from rlhf_cli.processes.distributed import gather_texts
from rlhf_cli.rewards.base import Scores
from rlhf_cli.rollout.rollout import RolloutBatch
from rlhf_cli.rollout.sampling import draw_uniforms


class References:
    """The rows of references.jsonl, by the number of the prompt. Without `shaping` it does nothing.

    A row has the prompt's number and text, the replies, and their scores by each source that has a `shaping`.
    The replies to a prompt depend on the seed and the prompt alone. A resumed run reads them from the file.
    """

    def __init__(self, setup: Setup):
        self.setup, self.shapings = setup, setup.config.shapings
        self.count = max((shaping.num_references for _, shaping in self.shapings.values()), default=0)
        self.rows: dict[int, dict[str, Any]] = {}
        self.sampled: list[int] = []
        """The numbers of the rows that are not in the file."""

    def sample(self) -> None:
        """Sample and score what the file of an interrupted run lacks, before training: the policy is ref_policy.

        Raises RewardError if a reward fails on any process.
        """
        setup, config = self.setup, self.setup.config
        if not self.shapings:
            return
        self.rows = {row["number"]: row for row in setup.world.of_main(self._read)}
        used = {number for iteration in range(config.ppo.num_iterations) for number in setup.numbers_of(iteration)}
        self.sampled = sorted(used - self.rows.keys())
        if self.sampled:
            setup.stage.display.note(
                f"sampling {self.count} replies of ref_policy to each of {len(self.sampled):,} prompts, with which "
                f"shaping compares ({', '.join(self.shapings)})"
            )
        for part in chunks(self.sampled, config.ppo.rollout_batch_size):
            self._sample(part)

    def write(self, first: int) -> None:
        """Write the new rows, once it is known at which iteration the run starts: at 0 without any file."""
        for number in sorted(self.rows) if first == 0 else self.sampled:
            self.setup.stage.record("references", self.rows[number])

    def compared(self, scores: Scores, iteration: int) -> Scores:
        """The scores of this process's responses of an iteration, with the shaped ones."""
        if not self.shapings:
            return scores
        setup = self.setup
        of_responses = [n for n in setup.numbers_of(iteration) for _ in range(setup.config.rollout.samples_per_prompt)]
        own = setup.world.shard(of_responses, setup.adjacent)
        total, each = scores.total, dict(scores.each)
        for name, (weight, shaping) in self.shapings.items():
            found = [self.rows[number]["scores"][name][: shaping.num_references] for number in own]
            shaped = _shaped(scores.each[name], torch.tensor(found).view(-1, shaping.num_references), shaping)
            total = total + weight * (shaped - scores.each[name])
            each[f"{name}_shaped"] = shaped
        return replace(scores, each=each, optimised=total)

    def _sample(self, numbers: Sequence[int]) -> None:
        """The rows of some prompts, on every process."""
        setup, names, world = self.setup, list(self.shapings), self.setup.world
        longest, seed = setup.config.rollout.max_new_tokens, setup.config.seed
        prompts = [setup.train[number] for number in numbers for _ in range(self.count)]
        uniforms = torch.cat([draw_uniforms(seed, "ppo references", n, self.count, longest) for n in numbers])
        shaped = [s for s in setup.rewards if (s.name if s.ensemble is None else s.ensemble.name) in names]
        own_setup = replace(setup, rewards=shaped)

        def read(_: RolloutBatch, texts: list[str], scores: Scores) -> list[tuple[str, list[float]]]:
            each = torch.stack([scores.each[name] for name in names], 1)
            return list(zip(texts, each.tolist(), strict=True))

        def sampled() -> list[tuple[str, list[float]]]:
            models = models_of_reference(setup)
            return sampled_and_scored(own_setup, models, prompts, uniforms, read, with_kl=False)

        own = or_failure(world, sampled)
        texts = world.interleave(gather_texts(world, [text for text, _ in own]))
        own_scores = torch.tensor([scores for _, scores in own]).view(-1, len(names))
        scores = torch.tensor(world.interleave([part.tolist() for part in world.gather_tensors(own_scores)]))
        for i, number in enumerate(numbers):
            rows = slice(i * self.count, (i + 1) * self.count)
            self.rows[number] = {
                "number": number,
                "prompt": setup.train[number].text,
                "replies": texts[rows],
                "scores": dict(zip(names, scores[rows].T.tolist(), strict=True)),
            }

    def _read(self) -> list[dict[str, Any]]:
        """The complete rows of the file of an interrupted run; [] without one."""
        path = self.setup.stage.directory / "references.jsonl"
        lines = read_text(path).split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]


def _shaped(score: Tensor, references: Tensor, shaping: Shaping) -> Tensor:
    """The shaped scores [B], from scores [B] and those of the references [B, M]."""
    match shaping.kind:
        case "log_sigmoid":
            return log_sigmoid_score(score, references, quantile=shaping.quantile)
        case "par":
            return preference_score(score, references)
        case _:
            assert_never(shaping.kind)
