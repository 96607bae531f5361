"""Answers from a language model on this machine, for `rlhf data generate` and `rlhf data score`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlhf_cli.artifacts import model_directory
from rlhf_cli.data.encode import encode_rows, require_eos
from rlhf_cli.data.records import Prompt, transcript
from rlhf_cli.errors import DataError
from rlhf_cli.models.forward import positions
from rlhf_cli.models.load import check_vocabulary, load_policy, load_tokenizer, prepare
from rlhf_cli.processes.distributed import start
from rlhf_cli.rollout.distribution import Sampling
from rlhf_cli.rollout.requests import Drawing, Failure, Request, Written
from rlhf_cli.rollout.sampling import response_text, sample, stop_ids
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
        self.name, self.drawing, self.batch_size, self.keep_special = path, drawing, batch_size, keep_special
        directory = model_directory(path)
        self.tokenizer = load_tokenizer(directory)
        require_eos(self.tokenizer, path)
        self.model = load_policy(directory)
        check_vocabulary(self.model, self.tokenizer, path)
        prepare(self.model, start(device).device)
        greedy = drawing.temperature == 0
        self.sampling = Sampling(
            temperature=1.0 if greedy else drawing.temperature,
            top_k=1 if greedy else None,
            top_p=drawing.top_p,
            stop=frozenset(stop_ids(self.model, self.tokenizer)),
        )

    def write(self, requests: Sequence[Request]) -> list[Written | Failure]:
        """One answer for each request; a Failure when the model or its chat template cannot take the prompt."""
        answers: list[Written | Failure] = []
        for first in range(0, len(requests), self.batch_size):
            answers += self._batch(requests[first : first + self.batch_size])
        return answers

    def _batch(self, requests: Sequence[Request]) -> list[Written | Failure]:
        encoded = [self._encode(request) for request in requests]
        possible = [n for n, ids in enumerate(encoded) if not isinstance(ids, Failure)]
        answers: list[Any] = list(encoded)
        if possible:
            columns, seed = self.drawing.max_new_tokens, self.drawing.seed
            uniforms = torch.stack(  # [B, R]
                [torch.rand(columns, generator=generator(seed, "writer", *requests[n].counters)) for n in possible]
            )
            responses = sample(self.model, [answers[n] for n in possible], uniforms, self.sampling)
            for n, response in zip(possible, responses, strict=True):
                answers[n] = Written(response_text(self.tokenizer, response, self.sampling), response.ended)
        return answers

    def _encode(self, request: Request) -> list[int] | Failure:
        messages = request.messages
        text = messages[0].content if len(messages) == 1 else transcript(messages)
        try:
            prompt = Prompt(text, "a prompt", messages=messages)
            ids = encode_rows(self.tokenizer, [prompt], None, keep_special=self.keep_special)[0]
        except DataError as error:  # The chat template refuses this conversation.
            return Failure(str(error))
        new, room = self.drawing.max_new_tokens, positions(self.model)
        if len(ids) + new > room:
            return Failure(
                f"{len(ids)} prompt tokens and {new} new tokens do not fit the model's {room} positions. Lower "
                "--max-new-tokens or shorten the prompt"
            )
        return ids
