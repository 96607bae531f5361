"""The mean and standard deviation of a reward model's score over fresh samples of the SFT model.

They go into the model's config as `score_mean` and `score_std`. PPO normalises scores by them, so that kl_coef means
the same whatever the scale of the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.artifacts import MANIFEST, model_directory, stage_directory
from rlhf_cli.config.sft_rm import RMConfig
from rlhf_cli.data.answers import AnswerEncoder, RankedIds, ScoredIds
from rlhf_cli.data.batches import Budget
from rlhf_cli.data.encode import Skipped, encode_rows
from rlhf_cli.data.formats_plain import first_words
from rlhf_cli.data.records import Prompt, Ranking, Scored
from rlhf_cli.data.special_tokens import special_tokens_of
from rlhf_cli.data.views import answered
from rlhf_cli.models.heads import reads_last_token
from rlhf_cli.models.limits import positions
from rlhf_cli.models.load import is_language_model, load_policy, load_tokenizer, same_tokenizer
from rlhf_cli.models.shard import divides
from rlhf_cli.rewards.models import score_sequences
from rlhf_cli.rewards.texts import closed, cut_all, encode_texts, length_limit
from rlhf_cli.training.stage_run import StageRun

SMALLEST_STD = 1e-6
"""A standard deviation below this would blow scores up to noise."""


class Sampled(Protocol):
    """A response of the policy."""

    @property
    def ids(self) -> list[int]: ...
    @property
    def ended(self) -> bool: ...


Draw = Callable[[PreTrainedModel, PreTrainedTokenizerBase, list[list[int]]], Sequence[Sampled]]
"""Samples a response of a policy to each prompt. Sampling is above this floor, so the stage passes it in."""


def score_statistics(
    model: PreTrainedModel,
    encoder: AnswerEncoder,
    items: Sequence[RankedIds] | Sequence[ScoredIds],
    budget: Budget,
    config: RMConfig,
    draw: Draw,
    stage: StageRun,
) -> tuple[float, float]:
    """Mean and standard deviation of the score over fresh samples, or of the data's own answers.

    The samples answer the prompts of `items`, repeated if there are fewer than needed. A row without a prompt is
    prompted with the first words of its answer. Without an SFT model the rows' own answers are scored, and a line on
    the screen says so.
    """
    settings = config.evaluation
    if settings.num_normalization_samples == 0:
        return 0.0, 1.0
    rows: list[Ranking | Scored] = [items[i % len(items)].row for i in range(settings.num_normalization_samples)]
    answers = [_one_answer(row, number) for number, row in enumerate(rows)]
    prompts = [
        Prompt(row.prompt or first_words(answer, settings.prompt_words)[0], row.where, {}, row.messages)
        for row, answer in zip(rows, answers, strict=True)
    ]
    sequences = _samples(model, encoder.tokenizer, prompts, config, draw, stage)
    if not sequences:
        stage.display.note("no SFT model to sample from: the score is normalised over the data's own answers")
        single = [answered(row, answer) for row, answer in zip(rows, answers, strict=True)]
        cut = [encoder.cut(row, tokens) for row, tokens in zip(single, encoder.encode_rows(single), strict=True)]
        sequences = [ids for ids in cut if not isinstance(ids, Skipped)]
    model.eval()
    share = score_sequences(model, stage.world.shard(sequences), config.precision, budget)
    scores = torch.tensor(stage.world.interleave([part.tolist() for part in stage.world.gather_tensors(share)]))
    return scores.mean().item(), max(scores.std(correction=0).item(), SMALLEST_STD)


def _samples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    config: RMConfig,
    draw: Draw,
    stage: StageRun,
) -> list[list[int]]:
    """The prompts with fresh samples, as the reward model reads them: the policy's ids if it can, else their text.

    Empty if there is no model to sample from, or no prompt leaves room for a sample in its positions. The first eight
    samples go to samples.jsonl.
    """
    path = _sft_model(config)
    if path is None:
        return []
    policy_tokenizer, policy = load_tokenizer(path), load_policy(path, deferred=divides(config))
    keep_special = config.data.special_tokens == "keep"
    encoded = encode_rows(policy_tokenizer, prompts, config.data.prompt_template, keep_special=keep_special)
    room = positions(policy) - config.evaluation.max_new_tokens
    fitting = [(prompt.prompt, ids) for prompt, ids in zip(prompts, encoded, strict=True) if len(ids) <= room]
    if not fitting:
        return []
    responses = draw(policy, policy_tokenizer, [ids for _, ids in fitting])
    for (text, _), response in zip(fitting[:8], responses, strict=False):
        reply = policy_tokenizer.decode(response.ids, skip_special_tokens=True)
        stage.sample({"prompt": text, "response": reply, "ended": response.ended})
    return sequences_of(
        model, tokenizer, policy_tokenizer, [ids for _, ids in fitting], responses, keep_special=keep_special
    )


def sequences_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    policy_tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    responses: Sequence[Sampled],
    *,
    keep_special: bool,
) -> list[list[int]]:
    """A policy's prompts and responses as the reward model reads them: the policy's ids if it can, else their text."""
    texts = [ids + response.ids for ids, response in zip(prompts, responses, strict=True)]
    ended = [response.ended for response in responses]
    if reads_last_token(model) and same_tokenizer(policy_tokenizer, tokenizer):
        texts = [closed(ids, end, tokenizer.eos_token_id) for ids, end in zip(texts, ended, strict=True)]
        return cut_all(texts, *length_limit(model, tokenizer), tokenizer.bos_token_id)[0]
    decoded = [str(policy_tokenizer.decode(ids, skip_special_tokens=True)) for ids in texts]
    if not keep_special:
        decoded = [special_tokens_of(tokenizer).protect(text) for text in decoded]
    return encode_texts(model, tokenizer, decoded, ended)


def _one_answer(row: Ranking | Scored, number: int) -> str:
    """An answer of the row. Of rankings it is in turn the best and the worst, so that neither kind prevails."""
    if isinstance(row, Scored):
        return row.response
    return row.rejected if number % 2 else row.chosen


def _sft_model(config: RMConfig) -> str | None:
    """The model to sample from: the run's own SFT model, or else the language model that the backbone came from.

    None if there is neither: an encoder cannot be sampled from.
    """
    own = stage_directory(config.artifacts, "sft")
    if (own / MANIFEST).is_file():
        return str(own / "model")
    path = model_directory(config.model.path) if config.model.path is not None else None
    return path if path is not None and is_language_model(path, config.model.revision) else None
