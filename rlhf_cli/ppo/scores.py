"""The score of each response: the rewards, the comparison with ref_policy's replies, what normalises it, the limits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import chain
from typing import Any, TypeVar, assert_never, cast

import torch
from torch import Tensor

from rlhf_cli.algorithms.score_transforms import (
    Moments,
    limited_score,
    log_sigmoid_score,
    merge,
    moments_of,
    next_lambda,
    preference_score,
)
from rlhf_cli.config.ppo import PPO
from rlhf_cli.config.rewards import Limit
from rlhf_cli.data.batches import stream
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.data.records import batched
from rlhf_cli.errors import RewardError
from rlhf_cli.files import read_text
from rlhf_cli.ppo.setup import Setup
from rlhf_cli.processes.distributed import World, where
from rlhf_cli.processes.microbatches import over_microbatches
from rlhf_cli.processes.sharding import is_sharded
from rlhf_cli.rewards.base import Scores, samples_of, total_score
from rlhf_cli.rewards.models import RewardModel
from rlhf_cli.rollout.rollout import Models, RolloutBatch, collect
from rlhf_cli.rollout.sampling import draw_uniforms, response_text
from rlhf_cli.run.checkpoint import State
from rlhf_cli.tensor_ops import pad_rows

T = TypeVar("T")


def ask_rewards(setup: Setup, rollout: RolloutBatch) -> tuple[list[str], Scores]:
    """The responses as text; the weighted sum of their rewards, and each reward's own score. Raises RewardError.

    ``total = sum of weight * score`` (`total_score`). A reward model gives ``(logit - score_mean) / score_std``, with
    the logit of its head at the last token (`RewardModel.score` in rewards/models.py).
    """
    texts = [response_text(setup.tokenizer, response, setup.sampling) for response in rollout.responses]
    samples = samples_of(setup.rewards, setup.tokenizer, rollout.prompts, texts, rollout.responses)
    return texts, total_score(setup.rewards, samples)


def sampled_and_scored(
    setup: Setup,
    models: Models,
    prompts: Sequence[PromptRow],
    uniforms: Tensor,
    read: Callable[[RolloutBatch, list[str], Scores], list[T]],
    *,
    with_kl: bool,
) -> list[T]:
    """Sample a response to each prompt of this process's share, and score it: at a time as many as in a rollout.

    `read` gets each rollout (without values, and with ref_policy's log-probabilities only if `with_kl`), the responses
    as text and their scores. With sharded models all raise RewardError if a reward fails on one process.
    """
    config, world = setup.config, setup.world
    of_rewards = [source.model for source in setup.rewards if isinstance(source, RewardModel)]
    computing = [*models.with_weights, *of_rewards]
    shares_passes = any(model is not None and is_sharded(model) for model in computing)

    def score(rows: Sequence[int]) -> list[T]:
        rollout = collect(
            [prompts[i] for i in rows],
            uniforms[list(rows)],
            models,
            sampling=setup.sampling,
            tokenizer=setup.tokenizer,
            budget=setup.budget,
            precision=config.precision,
            recompute=with_kl,
            with_ref_logprobs=with_kl,
            max_live_rows=config.rollout.max_live_rows,
            with_values=False,
        )
        ask = partial(ask_rewards, setup, rollout)
        # The next rollout of a sharded policy begins with a collective operation, which a slow reward must not delay.
        return read(rollout, *(or_failure(world, ask) if shares_passes else ask()))

    at_once = -(-config.ppo.rollout_batch_size // world.size)
    parts = list(batched(world.shard(list(range(len(prompts)))), at_once))
    return list(chain.from_iterable(over_microbatches(parts, score, models=computing, in_turn=True)))


def split_dense(scores: Scores, lengths: list[int], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """(score, dense): the part of the scores for the last token, [B], and the rewards of single tokens, [B, R]."""
    total = scores.total if scores.optimised is None else scores.optimised
    if scores.dense is None:
        return total, None
    dense = pad_rows(torch.tensor([x for row in scores.dense for x in row]), lengths)
    return total - torch.tensor([sum(row) for row in scores.dense]), dense.to(device)


def count_failures(setup: Setup) -> None:
    """Give each source's `report` the failed scores and cut texts of all processes, since the start or a resume."""
    for source in setup.rewards:
        everyone = setup.world.gather((source.num_errors, source.first_error, source.num_cut))
        errors, firsts, cut = zip(*everyone, strict=True)
        source.num_errors, source.first_error = sum(errors), next(filter(None, firsts), "")
        source.num_cut = sum(cut) if source.num_cut is not None else None


def measure_reference_scores(setup: Setup, scale: ScoreScale) -> None:
    """Set the scale to the mean and standard deviation of ref_policy's scores on training prompts."""
    config, total = setup.config, setup.config.ppo.num_reference_samples
    numbers = stream(len(setup.train), total, 0, config.seed, "ppo reference prompts")
    uniforms = draw_uniforms(config.seed, "ppo reference", 0, total, config.rollout.max_new_tokens)
    prompts = [setup.train[number] for number in numbers]

    def read(rollout: RolloutBatch, _: list[str], scores: Scores) -> list[float]:
        return split_dense(scores, [len(r.ids) for r in rollout.responses], setup.world.device)[0].tolist()

    # Each process has its own number of chunks, so nothing is exchanged before all of them are scored.
    sampled = partial(sampled_and_scored, setup, models_of_reference(setup), prompts, uniforms, read, with_kl=False)
    scale.take(torch.tensor(or_failure(setup.world, sampled)), setup.world)
    setup.stage.display.note(
        f"scores are normalised by those of {total} samples of ref_policy: mean {scale.moments.mean:.3g}, "
        f"standard deviation {scale.moments.std:.3g}"
    )


def models_of_reference(setup: Setup) -> Models:
    """The models with ref_policy as the policy, before training."""
    models = setup.models.refreshed()
    sampler = models.sampler if setup.config.ref_policy is None else None  # the policy is its own reference
    return replace(models, policy=models.ref_policy or models.policy, sampler=sampler)


# ------------------------------------------------------------------------------- between the processes


class _PlacedError(RewardError):
    """A failed reward whose message begins with the step and the process."""


def or_failure(world: World, compute: Callable[[], T], save: Callable[[], object] = lambda: None) -> T:
    """The result of `compute`; if it raises RewardError on any process, all processes call `save` and raise it."""
    result, failure = None, ""
    try:
        result = compute()
    except RewardError as error:
        failure = str(error) if isinstance(error, _PlacedError) else f"{where(world)}: {error}"
    world.barrier("the rewards")  # a slow reward or judge may take longer than a collective operation
    if first := next(filter(None, world.gather(failure)), None):
        save()
        raise _PlacedError(first)
    return cast(T, result)


# ---------------------------------------------------------- replies of ref_policy, with whose scores `shaping` compares


class ReferenceReplies:
    """The rows of references.jsonl, by the number of the prompt: its replies, scored by the sources with a `shaping`.

    The replies depend on the seed and the prompt alone. A resumed run reads them from the file. Without `shaping` this
    does nothing.
    """

    def __init__(self, setup: Setup):
        self.setup, self.shapings = setup, setup.config.shapings
        self.count = max((shaping.num_references for _, shaping in self.shapings.values()), default=0)
        self.rows: dict[int, dict[str, Any]] = {}

    def sample(self) -> None:
        """Sample and score what the file of an interrupted run lacks, before training: the policy is ref_policy."""
        setup, config = self.setup, self.setup.config
        if not self.shapings:
            return
        self.rows = self._in_file()
        used = {number for iteration in range(config.ppo.num_iterations) for number in setup.numbers_of(iteration)}
        missing = sorted(used - self.rows.keys())
        if missing:
            setup.stage.display.note(
                f"sampling {self.count} replies of ref_policy to each of {len(missing):,} prompts, with which "
                f"shaping compares ({', '.join(self.shapings)})"
            )
        for part in batched(missing, config.ppo.rollout_batch_size):
            self._sample(part)

    def write(self) -> None:
        """Write the rows that the file lacks, after a resume has cut it to what its checkpoint has."""
        for number in sorted(self.rows.keys() - self._in_file()) if self.shapings else ():
            self.setup.stage.record("references", self.rows[number])

    def _in_file(self) -> dict[int, dict[str, Any]]:
        path = self.setup.stage.directory / "references.jsonl"
        # The last line may be incomplete.
        lines = self.setup.world.of_main(lambda: read_text(path).split("\n")[:-1] if path.exists() else [])
        return {row["number"]: row for row in map(json.loads, lines)}

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
            references = torch.tensor(found).view(-1, shaping.num_references)  # [B, M]
            match shaping.kind:
                case "log_sigmoid":
                    shaped = log_sigmoid_score(scores.each[name], references, quantile=shaping.quantile)
                case "par":
                    shaped = preference_score(scores.each[name], references)
                case _:
                    assert_never(shaping.kind)
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

        def read(_: RolloutBatch, texts: list[str], scores: Scores) -> list[tuple[str, list[float]]]:
            each = torch.stack([scores.each[name] for name in names], 1)
            return list(zip(texts, each.tolist(), strict=True))

        of_reference = replace(setup, rewards=shaped), models_of_reference(setup)
        sampled = partial(sampled_and_scored, *of_reference, prompts, uniforms, read, with_kl=False)
        replies = iter(world.interleave(world.gather(or_failure(world, sampled))))
        for number in numbers:
            texts, scores = zip(*(next(replies) for _ in range(self.count)), strict=True)
            self.rows[number] = {
                "number": number,
                "prompt": setup.train[number].text,
                "replies": list(texts),
                "scores": dict(zip(names, zip(*scores, strict=True), strict=True)),
            }


# ----------------------------------------------------------------------- what normalises scores, and their limits


S = TypeVar("S", float, torch.Tensor)


class ScoreScale:
    """The mean and standard deviation that normalise scores, in addition to each reward model's own.

    `running` updates them with every batch before it normalises that batch; `reference` computes them once, from
    samples of ref_policy. `running_std` and `reference_std` divide by the standard deviation and leave the mean.
    """

    def __init__(self, ppo: PPO):
        self.kind = ppo.score_normalization
        self.moments = Moments()

    def take(self, score: torch.Tensor, world: World) -> None:
        """Update the moments with the scores [B] of all processes."""
        self.moments = reduce(merge, world.gather(moments_of(score)), self.moments)

    def apply(self, score: torch.Tensor) -> torch.Tensor:
        """``(score - mean) / std`` or ``score / std``, [B]; a standard deviation of 0 counts as 1."""
        std = self.moments.std if self.moments.std > 0 else 1.0
        if self.kind == "none":
            return score
        return (score if self.kind.endswith("_std") else score - self.moments.mean) / std


WITHIN = 0.1  # the first multiplier of a limit that already holds


class Limits:
    """The multiplier lambda of each limit (`rewards: - {limit: ...}`), by the name of its source.

    The unit of an excess over a limit is the standard deviation of the source's scores in the first iteration, so the
    same learning rate fits a probability and a number of words. A multiplier starts at 1, or at WITHIN if the first
    scores hold the limit: with 1, PPO would be paid for moving further away from a limit that it already holds.
    """

    def __init__(self, limits: Mapping[str, Limit]):
        self.limits = limits
        self.lambdas = dict.fromkeys(limits, 1.0)
        self.units: dict[str, float] = {}

    def measure(self, each: Mapping[str, torch.Tensor], world: World) -> None:
        """Take units and first multipliers from the first scores [B] of each source on all processes."""
        if not self.units:
            shards = {name: world.gather(moments_of(each[name])) for name in self.limits}
            first = {name: reduce(merge, parts, Moments()) for name, parts in shards.items()}
            self.units = {name: moments.std or 1.0 for name, moments in first.items()}
            self.lambdas = {name: WITHIN if self._excess(name, first[name].mean) < 0 else 1.0 for name in first}

    def apply(self, score: torch.Tensor, each: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """`limited_score` [B], from the score [B] and the scores [B] of each source."""
        if not self.limits:
            return score
        excess = torch.stack([self._excess(name, each[name].to(score)) for name in self.limits])
        return limited_score(score, excess, torch.tensor(list(self.lambdas.values()), dtype=score.dtype))

    @property
    def score_share(self) -> float:
        """The share of the score beside the limits: ``1 / (1 + sum of lambdas)``."""
        return 1 / (1 + sum(self.lambdas.values()))

    def figures(self) -> dict[str, float]:
        return {f"lambda/{name}": lam for name, lam in self.lambdas.items()}

    def adapt(self, metrics: Mapping[str, float]) -> None:
        """Adapt the multipliers after an iteration with these metrics, unless the policy did not learn in it."""
        if "policy/grad_norm" not in metrics:
            return
        for name, limit in self.limits.items():
            excess = self._excess(name, metrics[f"reward/{name}"])
            self.lambdas[name] = next_lambda(self.lambdas[name], excess, learning_rate=limit.learning_rate)

    def _excess(self, name: str, score: S) -> S:
        """The distance of a score beyond its limit, in units; below 0 within it."""
        limit = self.limits[name]
        return (limit.above - score if limit.above is not None else score - (limit.below or 0.0)) / self.units[name]

    def state(self) -> State:
        return {}, {"lambdas": self.lambdas, "units": self.units}

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, dict[str, float]]) -> None:  # noqa: ARG002
        self.lambdas, self.units = numbers["lambdas"], numbers["units"]
