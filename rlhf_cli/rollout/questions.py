"""Held-out prompts that the SFT model answers at each evaluation, for you to read."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.config.sft_rm import SFTConfig
from rlhf_cli.data.encode import RowText
from rlhf_cli.data.records import Record
from rlhf_cli.rollout.sampling import draw_uniforms
from rlhf_cli.rollout.speaker import Speaker
from rlhf_cli.run.stage_run import StageRun


class Questions:
    """The first held-out prompts that leave room for an answer in the model's positions; none without rows."""

    def __init__(
        self,
        rows: Iterable[Record] | None,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: SFTConfig,
        stage: StageRun,
    ):
        self.stage, self.seed = stage, config.seed
        self.speaker, most = Speaker.at_evaluation(config, model, tokenizer), config.evaluation.num_samples
        self.rows = list(islice(self.speaker.fitting(rows or ()), most))
        self.text = RowText(tokenizer, self.speaker.form.template)
        if rows is not None and most and not self.rows:
            room = f"no held-out prompt leaves room for {self.speaker.max_new_tokens} tokens, so no samples"
            stage.display.note(room)

    @torch.no_grad()
    def answer(self, step: int, num_shown: int | None) -> None:
        """Sample an answer to each on the first process, for samples.jsonl; print the first `num_shown`, or all."""
        speaker, stage, model = self.speaker, self.stage, self.speaker.model
        if not self.rows or not stage.world.takes_part(model):
            return
        was_training = model.training
        model.eval()
        uniforms = draw_uniforms(self.seed, "sft samples", step, len(self.rows), speaker.max_new_tokens)
        responses = speaker.respond([ids for _, ids in self.rows], uniforms)
        model.train(was_training)
        for number, ((row, _), response) in enumerate(zip(self.rows, responses, strict=True)):
            prompt, text = self.text.prompt(row), speaker.text(response)
            sample = {"step": step, "prompt": prompt, "response": text, "ended": response.ended}
            stage.sample(sample | {"target": row.response})
            if num_shown is None or number < num_shown:
                stage.display.exchange(prompt, {f"step {step}": text, "target": row.response})
