"""The mean and standard deviation of a reward model's score over fresh samples of the SFT model.

They go into the model's config as `score_mean` and `score_std`. PPO normalises scores by them, so that kl_coef means
the same whatever the scale of the scores.

The samples are drawn before the reward model is loaded, so that no two models are in memory at the same time.
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.algorithms.length import regression_on_length, reply_length
from rlhf_cli.config.sft_rm import RMConfig
from rlhf_cli.data.answers import AnswerEncoder, RankedIds, ScoredIds
from rlhf_cli.data.batches import Budget
from rlhf_cli.data.encode import Skipped
from rlhf_cli.data.formats import first_words
from rlhf_cli.data.records import Record
from rlhf_cli.data.special_tokens import special_tokens_of
from rlhf_cli.models.frozen import hold_frozen, is_held
from rlhf_cli.models.heads import reads_last_token
from rlhf_cli.models.load import (
    LENGTH_CURVE,
    is_language_model,
    load_policy,
    load_reward_model,
    load_tokenizer,
    same_tokenizer,
)
from rlhf_cli.models.save import save_facts
from rlhf_cli.models.shard import prepare_for, shards
from rlhf_cli.rewards.base import Spoken
from rlhf_cli.rewards.models import closed, cut_all, encode_whole, length_limit, score_sequences
from rlhf_cli.rollout.rollout import gather_responses
from rlhf_cli.rollout.sampling import draw_uniforms
from rlhf_cli.rollout.speaker import Speaker
from rlhf_cli.run.artifacts import MANIFEST, model_directory, stage_directory
from rlhf_cli.run.checkpoint_files import write_text
from rlhf_cli.run.stage_run import StageRun

SMALLEST_STD = 1e-6  # below this, the scores of several texts are equal up to rounding
KEPT = "normalization_samples.json"
"""The file beside the checkpoints with the samples of a run that is not finished."""


@dataclass(frozen=True)
class Sample:
    """A fresh sample of the SFT model."""

    prompt: str
    prompt_ids: list[int]
    ids: list[int]
    """The response. With a stop token if it ended with one."""
    ended: bool


Items = Sequence[RankedIds] | Sequence[ScoredIds]  # the rows of the stage as tokens
Source = tuple[str, str | None]  # the directory or hub id of a model, and its revision
Text = tuple[list[int], int]  # a text as the reward model reads it, and the `reply_length` of its reply


def samples_of_sft(items: Items, config: RMConfig, stage: StageRun) -> list[Sample]:
    """Fresh samples of the SFT model, which answer the prompts of `items`, or the first words of answers without one.

    Call it on all processes, while no other model is in memory. A resumed run reads the samples that it has drawn
    before. Empty if no samples are needed, if there is no SFT model, or if every prompt is too long for the model.
    """
    source, file = _sft_model(config), stage.checkpoints_directory / KEPT
    if config.evaluation.num_normalization_samples == 0 or source is None:
        return []
    kept = stage.world.of_main(lambda: json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None)
    if kept is not None:
        return [Sample(**row) for row in kept]
    words = config.evaluation.prompt_words
    prompts = [
        replace(row, prompt=row.prompt or first_words(row.response, words)[0], answers=())
        for row in _rows(items, config)
    ]
    samples = _draw(source, prompts, config, stage)
    gc.collect()  # the parts of a sharded model refer to each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the freed model is in blocks of other sizes than the next one needs
    if stage.world.is_main:
        # Without the file a resumed run draws the same samples again.
        with contextlib.suppress(OSError):
            write_text(file, json.dumps([asdict(s) for s in samples]))
    return samples


def _draw(source: Source, prompts: Sequence[Record], config: RMConfig, stage: StageRun) -> list[Sample]:
    """A sample for each prompt that fits. Each process samples its share."""
    world, settings = stage.world, config.evaluation
    tokenizer, policy = load_tokenizer(*source), load_policy(*source, deferred=_is_deferred(config, stage))
    speaker = Speaker.at_evaluation(config, policy, tokenizer)
    fitting = list(speaker.fitting(prompts))
    if not fitting:
        return []
    _hold(policy, config, stage)
    rows = world.shard(range(len(fitting)))
    uniforms = draw_uniforms(config.seed, "rm normalization", 0, len(fitting), settings.max_new_tokens)[rows]
    share = speaker.respond([fitting[i][1] for i in rows], uniforms, max_live_rows=settings.max_live_rows)
    responses = world.interleave(gather_responses(world, share))
    return [
        Sample(prompt.prompt, ids, response.ids, response.ended)
        for (prompt, ids), response in zip(fitting, responses, strict=True)
    ]


def _sft_model(config: RMConfig) -> Source | None:
    """The run's own SFT model, or else the language model that the backbone came from; None for an encoder."""
    own = stage_directory(config.artifacts, "sft")
    if (own / MANIFEST).is_file():
        return str(own / "model"), None
    if config.model.path is None:
        return None
    source = model_directory(config.model.path), config.model.revision
    return source if is_language_model(*source) else None


def _rows(items: Items, config: RMConfig) -> list[Record]:
    """A row with one answer for each sample. The rows are repeated if there are fewer than needed.

    For rankings, alternate between the best and the worst answer, so that neither kind prevails.
    """
    rows = [items[i % len(items)].row for i in range(config.evaluation.num_normalization_samples)]
    return [row.each()[-1 if number % 2 else 0] for number, row in enumerate(rows)]


def texts_to_score(
    model: PreTrainedModel,
    encoder: AnswerEncoder,
    items: Items,
    samples: Sequence[Sample],
    config: RMConfig,
    stage: StageRun,
) -> list[Text]:
    """The texts of the statistics: the samples as the reward model reads them, or else answers of the data.

    The first eight samples go to samples.jsonl. Without samples a line on the screen says so. Empty if the config asks
    for none.
    """
    if samples and (source := _sft_model(config)) is not None:
        tokenizer = load_tokenizer(*source)
        for one in samples[:8]:
            reply = tokenizer.decode(one.ids, skip_special_tokens=True)
            stage.sample({"prompt": one.prompt, "response": reply, "ended": one.ended})
        prompts, keep_special = [one.prompt_ids for one in samples], config.data.special_tokens == "keep"
        return texts_of(model, encoder.tokenizer, tokenizer, prompts, samples, keep_special=keep_special)
    rows = _rows(items, config)
    if rows:
        stage.display.note("no SFT model to sample from: the score is normalised over the data's own answers")
    cut = [encoder.cut(row, tokens) for row, tokens in zip(rows, encoder.encode_rows(rows), strict=True)]
    lengths = [reply_length(row.response) for row in rows]
    return [(ids, length) for ids, length in zip(cut, lengths, strict=True) if not isinstance(ids, Skipped)]


def frozen_reward_model(directory: Path, config: RMConfig, stage: StageRun) -> PreTrainedModel:
    """The reward model that the run saved in `directory`, ready to score."""
    model = load_reward_model(str(directory), deferred=_is_deferred(config, stage))
    _hold(model, config, stage)
    return model


def _is_deferred(config: RMConfig, stage: StageRun) -> bool:
    """True if `_hold` reads the weights."""
    return shards(config) or is_held(stage.world.device, config.precision)


def _hold(model: PreTrainedModel, config: RMConfig, stage: StageRun) -> None:
    """Freeze a model, hold it in the precision of the passes, and prepare it for them."""
    model.requires_grad_(False)
    if not shards(config):
        hold_frozen(model, stage.world.device, config.precision, exact=False)
    prepare_for(config, model, stage.world.device)


def write_statistics(
    model: PreTrainedModel,
    texts: Sequence[Text],
    facts: Mapping[str, Any],
    directory: Path,
    budget: Budget,
    config: RMConfig,
    stage: StageRun,
) -> tuple[float, float]:
    """The `scale_of` the scores of `texts`; 0 and 1 without texts.

    It goes with `facts` into the config of the model, which is saved in `directory`.
    """
    mean, std = 0.0, 1.0
    if texts:
        own = stage.world.shard(texts)
        sequences, lengths = [ids for ids, _ in own], [length for _, length in own]
        share = score_sequences(model.eval(), sequences, config.precision, budget, lengths=lengths)
        scores = torch.tensor(stage.world.interleave([part.tolist() for part in stage.world.gather_tensors(share)]))
        mean, std = scale_of(scores)
        if scores.std(correction=0) < SMALLEST_STD:
            stage.display.warn(
                f"the scores of the {len(scores)} texts for score_std are equal, so it is 1 and PPO's scores are not "
                "scaled. Raise evaluation.num_normalization_samples or evaluation.temperature, or add rows to data.test"
            )
    if directory.parent == stage.directory:  # a member's is in no checkpoint yet
        stage.set_aside(directory.name, copy=True)
    if stage.world.is_main:
        save_facts({**facts, "score_mean": mean, "score_std": std}, directory)
    return mean, std


def scale_of(scores: torch.Tensor) -> tuple[float, float]:
    """The mean and the population standard deviation of scores, [n]; 1 for equal scores, because PPO divides by it.

    >>> scale_of(torch.tensor([1.0, 5.0])), scale_of(torch.tensor([2.0]))
    ((3.0, 2.0), (2.0, 1.0))
    """
    std = scores.std(correction=0).item()
    return scores.mean().item(), 1.0 if std < SMALLEST_STD else std


def fit_length(
    model: PreTrainedModel, lengths: Sequence[Sequence[int]], score: Callable[[], torch.Tensor]
) -> dict[str, Any]:
    """Correct the model for the length of replies, fitted on held-out rows. Returns the key for its config.json.

    `lengths` are the `reply_length` of the answers, row by row; `score` gives their scores, uncorrected.
    """
    vars(model.config).pop(LENGTH_CURVE, None)
    each = torch.tensor([length for row in lengths for length in row])
    curve = torch.stack(regression_on_length(each, score()), 1).tolist()
    model.config.update({LENGTH_CURVE: curve})
    return {LENGTH_CURVE: curve}


def texts_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    policy_tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    responses: Sequence[Spoken],
    *,
    keep_special: bool,
) -> list[Text]:
    """A policy's prompts and responses as the reward model reads them: the policy's ids if it can, else their text."""
    spoken = [str(policy_tokenizer.decode(one.ids, skip_special_tokens=True)) for one in responses]
    texts = [ids + response.ids for ids, response in zip(prompts, responses, strict=True)]
    ended = [response.ended for response in responses]
    if reads_last_token(model) and same_tokenizer(policy_tokenizer, tokenizer):
        texts = [closed(ids, end, tokenizer.eos_token_id) for ids, end in zip(texts, ended, strict=True)]
        found = cut_all(texts, *length_limit(model, tokenizer), tokenizer.bos_token_id)[0]
    else:
        decoded = [str(policy_tokenizer.decode(ids, skip_special_tokens=True)) for ids in texts]
        if not keep_special:
            decoded = [special_tokens_of(tokenizer).protect(text) for text in decoded]
        found = encode_whole(model, tokenizer, decoded, ended)[0]
    return list(zip(found, map(reply_length, spoken), strict=True))
