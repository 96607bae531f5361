"""Answers from a language model on this machine, for `rlhf data generate` and `rlhf data score`."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_cli.commands.output import batched
from rlhf_cli.commands.writer import Failure, Request, WriterOptions, Written
from rlhf_cli.config.ppo import Rollout
from rlhf_cli.data.encode import require_eos
from rlhf_cli.data.records import Record, transcript
from rlhf_cli.models.load import check_vocabulary, load_policy, load_tokenizer, prepare
from rlhf_cli.processes.distributed import start
from rlhf_cli.rollout.speaker import PromptForm, PromptRefused, Speaker
from rlhf_cli.run.artifacts import model_directory
from rlhf_cli.seeding import generator


class LocalWriter:
    """A Hugging Face directory or a finished stage that writes answers.

    Messages are rendered with the tokenizer's chat template. Without a template, a single message is used as it is
    and several become a transcript. The uniforms of an answer are seeded by (seed, its counters), so an answer does
    not depend on the batch it is sampled in, except for rounding.

    Raises ArtifactError for a directory without a language model.
    """

    def __init__(self, options: WriterOptions):
        self.options = options
        directory = model_directory(options.model)
        tokenizer = load_tokenizer(directory)
        require_eos(tokenizer, options.model)
        model = load_policy(directory)
        check_vocabulary(model, tokenizer, options.model)
        prepare(model, start(options.device).device)
        rollout = Rollout(top_p=options.top_p, max_new_tokens=options.max_new_tokens)
        form = PromptForm(keep_special=options.keep_special)
        self.speaker = Speaker.of(rollout, model, tokenizer, "float32", form).at(options.temperature)

    def write(self, requests: Sequence[Request]) -> list[Written | Failure]:
        """One answer for each request; a Failure when the model or its chat template cannot take the prompt."""
        return [answer for batch in batched(requests, self.options.batch_size) for answer in self._batch(batch)]

    def _batch(self, requests: Sequence[Request]) -> list[Written | Failure]:
        import torch

        columns, seed = self.options.max_new_tokens, self.options.seed
        answers: list[Written | Failure | None] = []
        prompts, draws = [], []
        for request in requests:
            messages = request.messages
            text = messages[0].content if len(messages) == 1 else transcript(messages)
            try:
                prompts.append(self.speaker.encode(Record(text, "a prompt", messages=messages)))
            except PromptRefused as error:
                answers.append(Failure(str(error)))
                continue
            draws.append(torch.rand(columns, generator=generator(seed, "writer", *request.counters)))
            answers.append(None)
        responses = self.speaker.respond(prompts, torch.stack(draws)) if prompts else []
        written = (Written(self.speaker.text(response), response.ended) for response in responses)
        return [answer or next(written) for answer in answers]
