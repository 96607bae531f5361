"""Responses of a trained model to prompts of a file: greedy, sampled, the best of n, by beam or contrastive search."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList, StopStringCriteria

from rlhf_cli.config.ppo import Rollout
from rlhf_cli.data.encode import encode_rows, prompt_text
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.data.records import Prompt
from rlhf_cli.errors import ConfigError, DataError, RunError
from rlhf_cli.evaluation.contrastive import contrastive_search
from rlhf_cli.evaluation.conversation import form_of
from rlhf_cli.evaluation.trained import Quantize, RewardSet, TrainedModel, samples_of
from rlhf_cli.models.forward import autocast, positions
from rlhf_cli.models.seq2seq import encoder_inputs, is_seq2seq, start_of_response
from rlhf_cli.rewards.base import RewardSource
from rlhf_cli.rewards.sources import total_score
from rlhf_cli.rollout.distribution import Response, Sampling
from rlhf_cli.rollout.sampling import sample, sampling_of, stop_string_start
from rlhf_cli.seeding import generator


@dataclass(frozen=True)
class Decoding:
    """How responses are chosen."""

    rollout: Rollout
    """Length, temperature, filters and stops."""
    takes_what_fits: bool = False
    """Whether a response also ends at the model's last position. Otherwise a prompt that leaves less room than the
    maximum length is refused."""
    greedy: bool = False
    num_samples: int = 1
    """Responses per prompt, of which the one with the highest score is kept."""
    num_beams: int = 1
    """More than 1: beam search of transformers."""
    penalty_alpha: float | None = None
    """Given: contrastive search with this penalty."""
    num_candidates: int = 4
    """Tokens among which contrastive search chooses."""
    seed: int = 0
    batch_size: int = 64
    """Maximum responses decoded at the same time."""
    quantization: Quantize | None = None


@dataclass(frozen=True)
class Answer:
    """A response to a prompt."""

    text: str
    ended: bool
    """True if a stop token or a stop string ended it, False if it reached the maximum length."""
    score: float | None = None
    """The weighted sum of the rewards; None if they were not asked."""


@dataclass(frozen=True)
class Refused:
    """A prompt without a response."""

    reason: str
    detail: str


class Generator:
    """A loaded language model that responds to numbered prompts.

    Response k to the prompt with number n is drawn from the uniforms of (seed, n, k), so it does not depend on the
    other prompts, except for rounding.

    Raises ArtifactError for a directory without a language model, ConfigError for rewards that do not fit it, and for
    contrastive search with a model whose cache is a state.
    """

    def __init__(self, source: TrainedModel, decoding: Decoding, rewards: RewardSet | None, device: torch.device):
        self.source, self.decoding, self.device = source, decoding, device
        self.model, self.tokenizer = source.load(device, decoding.quantization)
        if decoding.penalty_alpha is not None and self.model._is_stateful:
            raise ConfigError(f"--penalty-alpha: a {type(self.model).__name__} has no keys and values. Use --beams")
        self.template = "chat" if form_of(source, self.tokenizer).kind == "chat" else source.template
        self.sampling = self._sampling()
        self.rewards: list[RewardSource] = []
        if rewards is not None:
            self.rewards, _ = rewards.load(self.tokenizer, device, source.precision)

    def _sampling(self) -> Sampling:
        sampling = sampling_of(self.decoding.rollout, self.model, self.tokenizer)
        if self.decoding.greedy:
            return replace(sampling, temperature=1.0, top_k=1, top_p=None, min_p=None)
        return sampling

    def respond(self, numbered: Sequence[tuple[int, Prompt]]) -> list[Answer | Refused]:
        """A response to each prompt. The numbers identify the draws.

        Raises RewardError if a score cannot be computed, RunError if a score is NaN.
        """
        encoded = [self._encode(prompt) for _, prompt in numbered]
        rows: list[PromptRow] = []
        counters: list[tuple[int, int]] = []
        for (number, _), row in zip(numbered, encoded, strict=True):
            if isinstance(row, PromptRow):
                rows += [row] * self.decoding.num_samples
                counters += [(number, k) for k in range(self.decoding.num_samples)]
        answers = iter(self._best(self._judged(rows, self._responses(rows, counters)))) if rows else iter(())
        return [next(answers) if isinstance(row, PromptRow) else row for row in encoded]

    def _encode(self, prompt: Prompt) -> PromptRow | Refused:
        try:
            ids = encode_rows(self.tokenizer, [prompt], self.template, keep_special=self.source.keep_special)[0]
            text = prompt_text(prompt.prompt, self.template, self.tokenizer, prompt.messages)
        except DataError as error:  # The chat template refuses this conversation.
            return Refused("prompt refused", str(error))
        new, room = self.decoding.rollout.max_new_tokens, positions(self.model)
        if not ids:
            return Refused("prompt empty", "the prompt has no token, and the tokenizer adds none")
        if self.decoding.takes_what_fits and len(ids) >= room:
            detail = f"{len(ids)} prompt tokens leave no room for a response in the model's {room} positions"
            return Refused("prompt too long", f"{detail}. Shorten the prompt")
        if len(ids) + new > room and not self.decoding.takes_what_fits:
            return Refused(
                "prompt too long",
                f"{len(ids)} prompt tokens and {new} new tokens do not fit the model's {room} positions. Lower "
                "--max-new-tokens or shorten the prompt",
            )
        return PromptRow(text, ids, prompt)

    def _limits(self, rows: Sequence[PromptRow]) -> list[int]:
        """The maximum length of each response."""
        longest, room = self.decoding.rollout.max_new_tokens, positions(self.model)
        return [min(longest, room - len(row.ids)) for row in rows]

    def _responses(self, rows: Sequence[PromptRow], counters: Sequence[tuple[int, int]]) -> list[Response]:
        decoding, longest, limits = self.decoding, self.decoding.rollout.max_new_tokens, self._limits(rows)
        with autocast(self.device, self.source.precision):
            if decoding.num_beams > 1 or decoding.penalty_alpha is not None:
                return [self._search(row.ids, limit) for row, limit in zip(rows, limits, strict=True)]
            draws = [torch.rand(longest, generator=generator(decoding.seed, "generate", *c)) for c in counters]
            uniforms = torch.stack(draws)  # [B, R]
            return sample(
                self.model,
                [row.ids for row in rows],
                uniforms,
                self.sampling,
                self.tokenizer,
                limits=limits if min(limits) < longest else None,
                max_live_rows=decoding.batch_size,
            )

    def _search(self, ids: list[int], limit: int) -> Response:
        """Beam or contrastive search, one prompt at a time: padding would change the last bits."""
        sampling, rollout, decoding = self.sampling, self.decoding.rollout, self.decoding
        stops, strings = sorted(sampling.stop), list(sampling.stop_strings)
        config = GenerationConfig(
            num_beams=decoding.num_beams,
            do_sample=False,
            max_new_tokens=limit,
            min_new_tokens=rollout.min_new_tokens or None,
            no_repeat_ngram_size=rollout.no_repeat_ngram_size,
            eos_token_id=stops,
            pad_token_id=stops[0],
        )
        method: dict[str, Any] = {}
        if decoding.penalty_alpha is not None:
            method["custom_generate"] = functools.partial(
                contrastive_search, penalty_alpha=decoding.penalty_alpha, num_candidates=decoding.num_candidates
            )
        prompt, num_before = torch.tensor([ids], device=self.device), len(ids)
        if is_seq2seq(self.model):
            # Its output begins with the decoder's start token.
            prompt, num_before = encoder_inputs(self.model, [prompt[0]])[0], 1
            config.decoder_start_token_id = start_of_response(self.model)
        output: Tensor = self.model.generate(  # type: ignore[operator]
            prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([StopStringCriteria(self.tokenizer, strings)] if strings else []),
            **method,
        )
        new = output[0, num_before:].tolist()
        end = next((n for n, token in enumerate(new, 1) if token in sampling.stop), None)
        new = new[:end]
        stopped = bool(strings) and stop_string_start(self.tokenizer, new, sampling.stop_strings) is not None
        return Response(new, [], end is not None or stopped)

    def _judged(self, rows: Sequence[PromptRow], responses: Sequence[Response]) -> list[Answer]:
        samples = samples_of(self.tokenizer, self.sampling, rows, responses, self.rewards)
        texts = samples.responses
        scores = total_score(self.rewards, samples).total.tolist() if self.rewards else [None] * len(texts)
        return [Answer(text, r.ended, score) for text, r, score in zip(texts, responses, scores, strict=True)]

    def _best(self, answers: Sequence[Answer]) -> list[Answer]:
        """Of each prompt's responses the one with the highest score; the first of equal ones."""
        count = self.decoding.num_samples
        if count == 1:
            return list(answers)
        groups = [answers[first : first + count] for first in range(0, len(answers), count)]
        if any(answer.score is None or answer.score != answer.score for answer in answers):
            raise RunError("a score is NaN, so there is no best response. Check the rewards")
        return [max(group, key=lambda answer: answer.score or 0.0) for group in groups]
