"""Held-out prompts that the SFT model answers at each evaluation, for you to read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.config.sft_rm import SFTConfig
from rlhf_cli.data.encode import before_answer, encode_rows, prompt_text
from rlhf_cli.data.records import Demonstration
from rlhf_cli.models.forward import autocast, positions
from rlhf_cli.rollout.distribution import Sampling
from rlhf_cli.rollout.sampling import draw_uniforms, sample, stop_ids
from rlhf_cli.training.progress import Display
from rlhf_cli.training.stage_run import StageRun


@dataclass(frozen=True)
class Question:
    """A held-out prompt."""

    text: str
    ids: list[int]
    target: str
    """The answer of the row."""


def first_questions(
    rows: Iterable[Demonstration],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: SFTConfig,
    display: Display,
) -> list[Question]:
    """The first prompts that leave room for an answer in the model's positions."""
    settings, template = config.evaluation, config.data.prompt_template
    keep_special = config.data.special_tokens == "keep"
    room = positions(model) - settings.max_new_tokens
    found: list[Question] = []
    for row in rows:
        if len(found) == settings.num_samples:
            return found
        ids = encode_rows(tokenizer, [row], template, keep_special=keep_special)[0]
        if len(ids) <= room:
            text = prompt_text(row.prompt, template, tokenizer, before_answer(row))
            found.append(Question(text, ids, row.response))
    if settings.num_samples and not found:
        display.note(f"no held-out prompt leaves room for {settings.max_new_tokens} tokens, so no samples")
    return found


@torch.no_grad()
def answer(
    questions: list[Question],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: SFTConfig,
    stage: StageRun,
    step: int,
    *,
    num_shown: int,
) -> None:
    """Sample an answer to each question on the first process, for samples.jsonl; print the first `num_shown`."""
    if not questions or not stage.world.takes_part(model):
        return
    settings = config.evaluation
    was_training = model.training
    model.eval()
    with autocast(stage.world.device, config.precision):
        responses = sample(
            model,
            [question.ids for question in questions],
            draw_uniforms(config.seed, "sft samples", step, len(questions), settings.max_new_tokens),
            Sampling(temperature=settings.temperature, stop=frozenset(stop_ids(model, tokenizer))),
        )
    model.train(was_training)
    for number, (question, response) in enumerate(zip(questions, responses, strict=True)):
        text = str(tokenizer.decode(response.ids, skip_special_tokens=True))
        row = {"step": step, "prompt": question.text, "response": text, "ended": response.ended}
        stage.sample(row | {"target": question.target})
        if number < num_shown:
            stage.display.exchange(question.text, {f"step {step}": text, "target": question.target})
