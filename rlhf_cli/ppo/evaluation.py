"""One policy on held-out prompts: its replies, their scores, and its distance from ref_policy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_cli.algorithms.statistics import distinct_n
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.data.splits import Drawn
from rlhf_cli.ppo.processes import or_failure
from rlhf_cli.ppo.scores import sampled_and_scored
from rlhf_cli.ppo.setup import Setup
from rlhf_cli.processes.distributed import World, gather_texts
from rlhf_cli.rewards.base import Samples, Scores
from rlhf_cli.rewards.functions import call, load_function, named_numbers
from rlhf_cli.rollout.rollout import RolloutBatch
from rlhf_cli.rollout.sampling import draw_uniforms

GoldJudge = Callable[[Sequence[PromptRow], list[str], list[bool]], list[dict[str, float]]]
"""The user's judge (`evaluation.gold`): prompts, a reply to each, and whether each ended, to named numbers."""


@dataclass(frozen=True)
class Evaluation:
    """The figures of one policy and its replies, in the order of the prompts."""

    metrics: dict[str, float]
    """score_mean, score_median, the means of the judge's numbers, kl, length, eos_fraction, distinct_2, seconds."""
    replies: list[str]
    scores: list[float]
    gold: list[dict[str, float]]
    """The judge's numbers of each reply; empty without a judge."""
    kl: list[float]

    def intervals(self) -> dict[str, float]:
        """The ends of the 95 % intervals of score_mean, kl and the judge's numbers over the prompts."""
        columns = {"score_mean": self.scores, "kl": self.kl}
        columns |= {name: [row[name] for row in self.gold] for name in (self.gold[0] if self.gold else ())}
        found: dict[str, float] = {}
        for name, values in columns.items():
            mean, error = statistics.fmean(values), statistics.pstdev(values) / max(1, len(values) - 1) ** 0.5
            found |= {f"{name}_low95": mean - 1.96 * error, f"{name}_high95": mean + 1.96 * error}
        return found

    def example(self, i: int) -> dict[str, Any]:
        """Reply i with its score and the judge's numbers."""
        return {"reply": self.replies[i], "score": self.scores[i], **(self.gold[i] if self.gold else {})}

    @property
    def gold_scores(self) -> list[float] | None:
        """The judge's main number of each reply: `gold`, or else its first number. None without a judge."""
        if not self.gold:
            return None
        name = "gold" if "gold" in self.gold[0] else next(iter(self.gold[0]))
        return [row[name] for row in self.gold]


@dataclass(frozen=True)
class Reply:
    """One reply with its figures."""

    text: str
    score: float
    kl: float
    """Sum over its tokens of log policy - log ref_policy, in nats."""
    length: int
    ended: bool


GOLD_ADVICE = "Fix the function, set evaluation.gold to one that fits your data, or remove evaluation.gold"


def load_gold(setup: Setup) -> GoldJudge | None:
    """The judge that `evaluation.gold` names, or None."""
    name = setup.config.evaluation.gold
    if name is None:
        return None
    function = load_function(name)

    def judge(prompts: Sequence[PromptRow], replies: list[str], ended: list[bool]) -> list[dict[str, float]]:
        rows, where = [p.row.columns for p in prompts], [p.row.where for p in prompts]
        samples = Samples([p.text for p in prompts], replies, [], [], ended, rows, where=where)
        return call(f"evaluation.gold ({name})", function, samples, named_numbers, GOLD_ADVICE)

    return judge


def evaluate(setup: Setup, prompts: Drawn[PromptRow], gold: GoldJudge | None) -> Evaluation:
    """Sample one reply to each of the prompts and measure it; the uniforms are the same at every call.

    ``kl`` is the mean over replies of the sum over tokens of log policy - log ref_policy, in nats. It estimates
    KL(policy, ref_policy) without bias, and is exactly 0 for ref_policy itself. ``distinct_2`` counts pairs of words
    (Li et al. 2016), so it does not depend on the tokenizer. With several sources, score, judge and kl are also given
    for each: ``score_mean/<source>``.

    Raises RewardError if a reward or the judge fails on any process.
    """
    start = time.monotonic()
    world = setup.world
    own = or_failure(world, lambda: _own_replies(setup, prompts))
    replies = world.interleave(_from_all_processes(own, world))
    texts, scores = [reply.text for reply in replies], [reply.score for reply in replies]
    # The judge may be a large model or a paid service: only the first process asks it.
    asks = gold if world.is_main else None
    own_rows = or_failure(world, lambda: asks(prompts, texts, [r.ended for r in replies]) if asks else [])
    gold_rows = _of_main(own_rows, world)
    metrics = {
        "score_mean": statistics.fmean(scores),
        "score_median": statistics.median(scores),
        **{name: statistics.fmean(row[name] for row in gold_rows) for name in (gold_rows[0] if gold_rows else ())},
        "kl": statistics.fmean(reply.kl for reply in replies),
        "length": statistics.fmean(reply.length for reply in replies),
        "eos_fraction": statistics.fmean(reply.ended for reply in replies),
        "distinct_2": distinct_n([text.split() for text in texts], 2),
        "seconds": time.monotonic() - start,
    }
    columns: dict[str, list[float]] = {"score_mean": scores, "kl": [reply.kl for reply in replies]}
    columns |= {name: [row[name] for row in gold_rows] for name in (gold_rows[0] if gold_rows else ())}
    for source, numbers in prompts.by_source.items():
        metrics |= {
            f"{name}/{source}": statistics.fmean(values[i] for i in numbers) for name, values in columns.items()
        }
    return Evaluation(metrics, texts, scores, gold_rows, columns["kl"])


def _from_all_processes(own: Sequence[Reply], world: World) -> list[list[Reply]]:
    """Every process's replies, in order of rank."""
    figures = torch.tensor([[r.score, r.kl, r.length, r.ended] for r in own], dtype=torch.float64).view(-1, 4)
    texts = gather_texts(world, [reply.text for reply in own])
    return [
        [
            Reply(text, score, kl, int(length), bool(ended))
            for text, (score, kl, length, ended) in zip(*shard, strict=True)
        ]
        for shard in zip(texts, (part.tolist() for part in world.gather_tensors(figures)), strict=True)
    ]


def _of_main(rows: list[dict[str, float]], world: World) -> list[dict[str, float]]:
    """The first process's rows, which all have the same keys, on every process."""
    if world.size == 1:
        return rows
    names = world.gather(list(rows[0]) if rows else [])[0]
    numbers = torch.tensor([row[name] for row in rows for name in row], dtype=torch.float64)
    table = world.gather_tensors(numbers)[0].view(-1, max(1, len(names)))
    return [dict(zip(names, row, strict=True)) for row in table.tolist()]


def _own_replies(setup: Setup, prompts: Sequence[PromptRow]) -> list[Reply]:
    """This process's replies, with their figures."""
    config = setup.config
    uniforms = draw_uniforms(config.seed, "ppo evaluation", 0, len(prompts), config.rollout.max_new_tokens)
    if setup.engine is not None:
        setup.engine.require_current()

    def read(rollout: RolloutBatch, texts: list[str], scores: Scores) -> list[Reply]:
        kl = (rollout.logprobs - rollout.ref_logprobs).sum(1).tolist()
        lengths, ended = [len(r.ids) for r in rollout.responses], [r.ended for r in rollout.responses]
        return list(map(Reply, texts, scores.total.tolist(), kl, lengths, ended))

    models = setup.models_to_sample()
    return sampled_and_scored(setup, models, prompts, uniforms, read, recompute=True, engine=setup.engine)
