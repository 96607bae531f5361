"""Answers from a language model on this machine, for `rlhf data generate` and `rlhf data score`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlhf_cli.config.ppo import Rollout
from rlhf_cli.data.encode import require_eos
from rlhf_cli.data.records import Prompt, transcript
from rlhf_cli.models.load import check_vocabulary, load_policy, load_tokenizer, prepare
from rlhf_cli.processes.distributed import start
from rlhf_cli.rollout.prompt_form import PromptForm
from rlhf_cli.rollout.requests import Drawing, Failure, Request, Written
from rlhf_cli.rollout.speaker import PromptRefused, Speaker
from rlhf_cli.run.artifacts import model_directory
from rlhf_cli.seeding import generator


class LocalWriter:
    """A Hugging Face directory or a finished stage that writes answers.

    Messages are rendered with the tokenizer's chat template. Without a template, a single message is used as it is
    and several become a transcript. Special tokens in messages are plain text unless `keep_special` is set. The
    uniforms of an answer are seeded by (seed, its counters), so an answer does not depend on the batch it is sampled
    in, except for rounding.

    Raises ArtifactError for a directory without a language model.
    """

    def __init__(
        self, path: str, drawing: Drawing, *, batch_size: int = 16, device: str = "auto", keep_special: bool = False
    ):
        self.name, self.drawing, self.batch_size = path, drawing, batch_size
        directory = model_directory(path)
        tokenizer = load_tokenizer(directory)
        require_eos(tokenizer, path)
        model = load_policy(directory)
        check_vocabulary(model, tokenizer, path)
        prepare(model, start(device).device)
        rollout = Rollout(top_p=drawing.top_p, max_new_tokens=drawing.max_new_tokens)
        form = PromptForm(keep_special=keep_special)
        self.speaker = Speaker.of(rollout, model, tokenizer, "float32", form).at(drawing.temperature)

    def write(self, requests: Sequence[Request]) -> list[Written | Failure]:
        """One answer for each request; a Failure when the model or its chat template cannot take the prompt."""
        starts = range(0, len(requests), self.batch_size)
        return [answer for first in starts for answer in self._batch(requests[first : first + self.batch_size])]

    def _batch(self, requests: Sequence[Request]) -> list[Written | Failure]:
        encoded = [self._encode(request) for request in requests]
        possible = [(ids, request) for ids, request in zip(encoded, requests, strict=True) if isinstance(ids, list)]
        columns, seed = self.drawing.max_new_tokens, self.drawing.seed
        draws = [torch.rand(columns, generator=generator(seed, "writer", *request.counters)) for _, request in possible]
        prompts = [ids for ids, _ in possible]
        responses = iter(self.speaker.respond(prompts, torch.stack(draws)) if possible else [])
        return [
            ids if isinstance(ids, Failure) else Written(self.speaker.text(one := next(responses)), one.ended)
            for ids in encoded
        ]

    def _encode(self, request: Request) -> list[int] | Failure:
        messages = request.messages
        text = messages[0].content if len(messages) == 1 else transcript(messages)
        try:
            return self.speaker.encode(Prompt(text, "a prompt", messages=messages))
        except PromptRefused as error:
            return Failure(str(error))
