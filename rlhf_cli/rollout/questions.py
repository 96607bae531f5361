"""Held-out prompts that the SFT model answers at each evaluation, for you to read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.config.sft_rm import SFTConfig
from rlhf_cli.data.encode import RowText
from rlhf_cli.data.records import Demonstration
from rlhf_cli.report.progress import Display
from rlhf_cli.rollout.sampling import draw_uniforms
from rlhf_cli.rollout.speaker import Speaker
from rlhf_cli.run.stage_run import StageRun


@dataclass(frozen=True)
class HeldOutPrompt:
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
) -> list[HeldOutPrompt]:
    """The first prompts that leave room for an answer in the model's positions."""
    speaker, most = Speaker.at_evaluation(config, model, tokenizer), config.evaluation.num_samples
    found = [
        HeldOutPrompt(RowText(tokenizer, speaker.form.template).prompt(row), ids, row.response)
        for row, ids in islice(speaker.fitting(rows), most)
    ]
    if most and not found:
        display.note(f"no held-out prompt leaves room for {speaker.max_new_tokens} tokens, so no samples")
    return found


@torch.no_grad()
def answer(
    questions: list[HeldOutPrompt],
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
    speaker, was_training = Speaker.at_evaluation(config, model, tokenizer), model.training
    model.eval()
    uniforms = draw_uniforms(config.seed, "sft samples", step, len(questions), speaker.max_new_tokens)
    responses = speaker.respond([question.ids for question in questions], uniforms)
    model.train(was_training)
    for number, (question, response) in enumerate(zip(questions, responses, strict=True)):
        text = speaker.text(response)
        row = {"step": step, "prompt": question.text, "response": text, "ended": response.ended}
        stage.sample(row | {"target": question.target})
        if number < num_shown:
            stage.display.exchange(question.text, {f"step {step}": text, "target": question.target})
