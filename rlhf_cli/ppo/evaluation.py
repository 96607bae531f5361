"""One policy on held-out prompts: what it says, what that scores, how far it is from ref_policy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_cli.algorithms.statistics import distinct_n
from rlhf_cli.data.batches import Budget, chunks
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.errors import RewardError
from rlhf_cli.rollout.distribution import Response, Sampling
from rlhf_cli.rollout.rollout import collect
from rlhf_cli.rollout.sampling import response_text
from rlhf_cli.rollout.scoring import Models
from rlhf_cli.training.distributed import World


@dataclass(frozen=True)
class Evaluation:
    """The figures of one policy and its replies, in the order of the prompts."""

    metrics: dict[str, float]
    """score_mean, score_median, the judge's own means (gold), kl, length, eos_fraction, distinct_2, seconds."""
    replies: list[str]
    scores: list[float]
    gold: list[dict[str, float]]

    def example(self, i: int) -> dict[str, Any]:
        """Reply i with its score and the judge's numbers, for people to read."""
        return {"reply": self.replies[i], "score": self.scores[i], **(self.gold[i] if self.gold else {})}


Score = Callable[[Sequence[PromptRow], list[str], Sequence[Response]], list[float]]
Judge = Callable[[Sequence[PromptRow], list[str], list[bool]], list[dict[str, float]]]


def evaluate(
    models: Models,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[PromptRow],
    table: torch.Tensor,
    world: World,
    *,
    score: Score,
    judge: Judge | None,
    sampling: Sampling,
    batch_size: int,
    budget: Budget,
    precision: str,
    max_live_rows: int | None,
) -> Evaluation:
    """Sample one reply to each prompt and measure it; `table` [prompts, tokens] are the uniforms.

    The KL of a reply is the sum over its tokens of log policy - log ref_policy, in nats; its mean over
    replies estimates KL(policy, ref_policy) without bias, and is exactly 0 for ref_policy itself.
    distinct_2 counts pairs of words (Li et al. 2016), so that it does not depend on the tokenizer.

    Raises RewardError where `score` or `judge` does so on any process.
    """
    start = time.monotonic()
    numbers = world.shard(list(range(len(prompts))))
    mine: list[tuple[str, float, float, int, bool]] = []
    failure = ""
    for part in chunks(numbers, batch_size):
        some = [prompts[i] for i in part]
        rollout = collect(
            some,
            table[list(part)],
            models,
            sampling=sampling,
            tokenizer=tokenizer,
            budget=budget,
            precision=precision,
            recompute=True,
            max_live_rows=max_live_rows,
            with_values=False,
        )
        texts = [response_text(tokenizer, response, sampling) for response in rollout.responses]
        kl = (rollout.logprobs - rollout.ref_logprobs).sum(1).tolist()
        try:
            scores = score(some, texts, rollout.responses)
        except RewardError as error:
            failure = str(error)
            break
        lengths, ended = [len(r.ids) for r in rollout.responses], [r.ended for r in rollout.responses]
        mine += list(zip(texts, scores, kl, lengths, ended, strict=True))
    if told := world.first_failure(failure):
        raise RewardError(told)
    rows = world.interleave(world.gather(mine))
    replies, scores, kls, lengths, endings = map(list, zip(*rows, strict=True))
    gold = []
    try:
        gold = judge(prompts, replies, endings) if judge is not None else []
    except RewardError as error:
        failure = str(error)
    if told := world.first_failure(failure):
        raise RewardError(told)
    metrics = {
        "score_mean": statistics.fmean(scores),
        "score_median": statistics.median(scores),
        **{name: statistics.fmean(row[name] for row in gold) for name in (gold[0] if gold else ())},
        "kl": statistics.fmean(kls),
        "length": statistics.fmean(lengths),
        "eos_fraction": statistics.fmean(endings),
        "distinct_2": distinct_n([reply.split() for reply in replies], 2),
        "seconds": time.monotonic() - start,
    }
    return Evaluation(metrics, replies, scores, gold)
