"""Replies of a policy to the held-out prompts: their scores, gold scores and distance to SFT, before and after PPO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.algorithms.comparison import wins
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.data.cache import tokenise
from rlhf_cli.data.encoders import PromptEncoder, PromptRow
from rlhf_cli.data.splits import Drawn, held_out_rows
from rlhf_cli.data.stage_rows import ppo_rows
from rlhf_cli.errors import ConfigError
from rlhf_cli.evaluation.figures import (
    bootstrapped,
    difference_figure,
    equal_length_figure,
    mean_figure,
    rate_figure,
    share_figure,
)
from rlhf_cli.evaluation.likelihood import reply_figures
from rlhf_cli.report.figure import Figures
from rlhf_cli.rewards.base import RewardSource, Scores, samples_of, total_score
from rlhf_cli.rewards.sources import load_judge, load_rewards, main_number
from rlhf_cli.rollout.rollout import Models, collect
from rlhf_cli.rollout.sampling import Response, draw_uniforms
from rlhf_cli.rollout.speaker import Speaker
from rlhf_cli.trained.run import Run

ROWS = 512  # replies that are sampled and scored at the same time
PERCENTILES = (10, 50, 90)


@dataclass(frozen=True)
class Replies:
    """K replies to each of P prompts. Tensors are [P, K] float64 on the CPU."""

    texts: list[list[str]]  # [P][K]
    ids: list[list[list[int]]]  # [P][K] token ids
    score: Tensor  # the weighted sum of the rewards, as PPO sees it before normalization and penalties
    each: dict[str, Tensor]  # each reward's own score
    gold: dict[str, Tensor]  # the numbers of the judge `evaluation.gold`; empty without one
    logprob: Tensor  # log-probability of the reply under the policy that wrote it, in nats
    kl: Tensor
    """Log-probability under that policy minus that under the SFT model, in nats; its mean estimates the KL."""
    token_kl: list[list[list[float]]]  # [P][K] the same for each token; 0 for the SFT model itself
    length: Tensor  # tokens
    ended: Tensor  # 1 if a stop token or stop string ended the reply, else 0

    def of(self, prompts: Sequence[int]) -> Replies:
        """The replies to the prompts with these numbers."""
        rows = list(prompts)

        def some(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: values[rows] for name, values in value.items()}
            return value[rows] if isinstance(value, Tensor) else [value[i] for i in rows]

        return Replies(**{name: some(value) for name, value in vars(self).items()})

    @property
    def numbers(self) -> dict[str, Tensor]:
        """The score, the score of each of several rewards, and the judge's numbers, by their names in tables."""
        each = {f"reward/{name}": values for name, values in self.each.items() if len(self.each) > 1}
        return {"score": self.score, **each, **self.gold}

    @property
    def gold_name(self) -> str | None:
        """The judge's main number: `gold`, or else its first. None without a judge."""
        return main_number(self.gold) if self.gold else None


class Arena:
    """The held-out prompts of a PPO stage, and what judges replies to them."""

    def __init__(self, run: Run, config: PPOConfig, reference: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self.run, self.config, self.reference, self.tokenizer = run, config, reference, tokenizer
        self.speaker = Speaker.of(config.rollout, reference, tokenizer, config.precision)
        rows = tokenise(PromptEncoder(tokenizer, ppo_rows(config)), longest=self.speaker.longest_prompt)
        self.prompts: Drawn[PromptRow] = held_out_rows(rows, config.data, config.evaluation.num_prompts, run.seed).test
        if not self.prompts:
            raise ConfigError(f"{run.root}/ppo: the stage has no held-out prompts. Set data.test or data.test_fraction")
        self.rewards: list[RewardSource] = load_rewards(
            config.named_rewards, config.artifacts, tokenizer, run.device, config.precision
        )[0]
        gold, advice = config.evaluation.gold, "Fix the function, or remove evaluation.gold"
        self.judge = load_judge(gold, advice) if gold is not None else None

    def replies(self, policy: PreTrainedModel, count: int) -> Replies:
        """`count` replies of the policy to each prompt.

        Reply k to prompt p uses the same uniforms for every policy, also of other runs with the same `--seed`, so
        policies are compared pair by pair. If it is the seed of the run, the first reply to each prompt is that of the
        ppo stage's own evaluation.
        """
        longest, size = self.config.rollout.max_new_tokens, (len(self.prompts), count)
        drawn = [draw_uniforms(self.run.seed, "ppo evaluation", k, size[0], longest) for k in range(count)]
        # Replies to one prompt are side by side: they share its keys and values.
        uniforms = torch.stack(drawn, 1).flatten(0, 1)  # [P * K, longest]
        everyone = [prompt for prompt in self.prompts for _ in range(count)]
        responses: list[Response] = []
        token_kl: list[list[float]] = []
        texts: list[str] = []
        scores: list[Scores] = []
        judged: list[dict[str, float]] = []
        for start in range(0, len(everyone), ROWS):
            prompts = everyone[start : start + ROWS]
            found, distances = self._sample(policy, prompts, uniforms[start : start + ROWS])
            samples = samples_of(self.rewards, self.tokenizer, prompts, list(map(self.speaker.text, found)), found)
            scores.append(total_score(self.rewards, samples))
            judged += self.judge(samples) if self.judge is not None else []
            responses += found
            texts += samples.responses
            token_kl += distances

        def grid(values: Sequence[float] | Tensor) -> Tensor:
            return torch.as_tensor(values, dtype=torch.float64).reshape(size)

        def rows(values: list[Any]) -> list[Any]:
            return [values[i : i + count] for i in range(0, len(values), count)]

        return Replies(
            texts=rows(texts),
            ids=rows([r.ids for r in responses]),
            score=grid(torch.cat([one.total for one in scores])),
            each={name: grid(torch.cat([one.each[name] for one in scores])) for name in scores[0].each},
            gold={name: grid([row[name] for row in judged]) for name in (judged[0] if judged else ())},
            logprob=grid([sum(r.logprobs) for r in responses]),
            kl=grid([sum(row) for row in token_kl]),
            token_kl=rows(token_kl),
            length=grid([len(r.ids) for r in responses]),
            ended=grid([float(r.ended) for r in responses]),
        )

    def _sample(
        self, policy: PreTrainedModel, prompts: Sequence[PromptRow], uniforms: Tensor
    ) -> tuple[list[Response], list[list[float]]]:
        """A reply to each prompt, and for each of its tokens log-probability minus that under the reference."""
        if policy is self.reference:
            found = self.speaker.respond([p.ids for p in prompts], uniforms)
            return found, [[0.0] * len(one.ids) for one in found]
        rollout = collect(
            prompts,
            uniforms,
            Models(policy, self.reference),
            sampling=self.speaker.sampling,
            tokenizer=self.tokenizer,
            budget=self.run.budget(policy, self.config.precision),
            precision=self.config.precision,
            recompute=True,
            with_values=False,
        )
        distances = (rollout.logprobs - rollout.ref_logprobs).tolist()
        return rollout.responses, [row[: len(r.ids)] for row, r in zip(distances, rollout.responses, strict=True)]


def side_figures(replies: Replies, *, seed: int) -> Figures:
    """One policy's first reply to each prompt: scores, each reward, gold numbers, KL, form."""
    figures: Figures = {}
    for name, values in replies.numbers.items():
        figures[name] = rate_figure(values[:, 0], seed=seed)
        for percent in PERCENTILES if name == "score" else ():
            quantile = partial(torch.quantile, q=percent / 100, dim=-1)
            figures[f"score_p{percent}"] = bootstrapped(quantile, values[:, 0], seed=seed)
    figures["kl"] = mean_figure(replies.kl[:, 0], seed=seed)
    texts = [row[0] for row in replies.texts]
    return figures | reply_figures(texts, replies.length[:, 0], replies.ended[:, 0], seed=seed)


def differences(before: Replies, after: Replies, *, seed: int) -> Figures:
    """After minus before, paired by prompt."""
    figures = {
        name: difference_figure(after.numbers[name][:, 0], values[:, 0], seed=seed)
        for name, values in before.numbers.items()
    }
    for name, change in (("kl", after.kl - before.kl), ("length", after.length - before.length)):
        figures[name] = mean_figure(change[:, 0], seed=seed)
    return figures | {"eos_rate": difference_figure(after.ended[:, 0], before.ended[:, 0], seed=seed)}


def win_rates(before: Replies, after: Replies) -> Figures:
    """The share of prompts whose reply after is better than before, by score and by the judge; ties count 1/2.

    `..._equal_length` is the rate that would remain if both were as long (`length_controlled_win_rate`).
    """
    judges = {"score": (before.score, after.score)}
    if (name := before.gold_name) is not None:
        judges[name] = (before.gold[name], after.gold[name])
    figures: Figures = {}
    for judge, (a, b) in judges.items():
        won = wins(b[:, 0], a[:, 0])
        figures[judge] = share_figure(won)
        figures[f"{judge}_equal_length"] = equal_length_figure(won, after.length[:, 0], before.length[:, 0])
    return figures
