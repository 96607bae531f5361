"""A model that speaks: a language model with its tokenizer, the form of its prompts, and how it draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.config.ppo import Rollout
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.data.records import Record
from rlhf_cli.errors import DataError
from rlhf_cli.models.forward import autocast, positions
from rlhf_cli.processes.sharding import device_of
from rlhf_cli.rollout.distribution import Response, Sampling
from rlhf_cli.rollout.prompt_form import AS_IT_IS, PromptForm
from rlhf_cli.rollout.sampling import response_text, sample, sampling_of

NOT_YET_TEXT = "\ufffd"
"""What a tokenizer decodes the first bytes of a character to."""


class PromptRefused(DataError):
    """A prompt that the model cannot reply to, for one of a few reasons."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Reply:
    """A response and its text."""

    text: str
    response: Response
    """Not `ended` if it reached the maximum length or was interrupted."""


@dataclass(frozen=True)
class Speaker:
    """A language model that replies."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    max_new_tokens: int
    """Longest reply."""
    precision: str = "float32"
    form: PromptForm = AS_IT_IS
    name: str = ""
    """What the user calls it."""

    @classmethod
    def of(
        cls,
        rollout: Rollout,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        precision: str,
        form: PromptForm = AS_IT_IS,
        name: str = "",
    ) -> Speaker:
        """A model that draws as `rollout` says. Raises ConfigError for a stop token that is not in the vocabulary."""
        sampling = sampling_of(rollout, model, tokenizer)
        return cls(model, tokenizer, sampling, rollout.max_new_tokens, precision, form, name)

    @classmethod
    def at_evaluation(
        cls, config: SFTConfig | RMConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> Speaker:
        """A model that replies to held-out prompts as `evaluation` of an SFT or RM stage says."""
        settings = config.evaluation
        form = PromptForm(template=config.data.prompt_template, keep_special=config.data.special_tokens == "keep")
        rollout = Rollout(temperature=settings.temperature, max_new_tokens=settings.max_new_tokens)
        return cls.of(rollout, model, tokenizer, config.precision, form)

    def at(self, temperature: float | None) -> Speaker:
        """The speaker at another temperature; 0 is greedy, None its own."""
        if temperature is None:
            return self
        changes = {"temperature": temperature} if temperature else {"temperature": 1.0, "top_k": 1}
        return replace(self, sampling=replace(self.sampling, **changes))  # type: ignore[arg-type]

    # ------------------------------------------------------------------------------------------- prompts

    @property
    def longest_prompt(self) -> int:
        """Maximum tokens of a prompt that leaves room for the longest reply."""
        return positions(self.model) - self.max_new_tokens

    def fitting(self, rows: Iterable[Record]) -> Iterator[tuple[Record, list[int]]]:
        """The rows whose prompts leave room for the longest reply, each with its ids."""
        for row in rows:
            ids = self.form.encode_row(self.tokenizer, row)
            if len(ids) <= self.longest_prompt:
                yield row, ids

    def room(self, ids: Sequence[int], advice: str = "Shorten the prompt") -> int:
        """The model's positions behind a prompt. Raises PromptRefused with the advice if there are none."""
        most = positions(self.model)
        if not ids:
            detail = f"the prompt has no token, and the model must read at least one. {advice}"
            raise PromptRefused("prompt empty", detail)
        if len(ids) >= most:
            detail = f"the prompt has {len(ids)} tokens and the model reads {most}, reply included. {advice}"
            raise PromptRefused("prompt too long", detail)
        return most - len(ids)

    def encode(self, row: Record, *, takes_what_fits: bool = False) -> list[int]:
        """The ids that the reply to a row follows.

        Raises PromptRefused for a row that the chat template refuses, and for one that leaves no room: for the longest
        reply or, with `takes_what_fits`, for any.
        """
        try:
            ids = self.form.encode_row(self.tokenizer, row)
        except DataError as error:
            raise PromptRefused("prompt refused", str(error)) from None
        if takes_what_fits or not ids:
            self.room(ids)
        elif len(ids) > self.longest_prompt:
            raise PromptRefused(
                "prompt too long",
                f"{len(ids)} prompt tokens and {self.max_new_tokens} new tokens do not fit the model's "
                f"{positions(self.model)} positions. Lower --max-new-tokens or shorten the prompt",
            )
        return ids

    # ------------------------------------------------------------------------------------------- replies

    def respond(
        self,
        prompts: Sequence[Sequence[int]],
        uniforms: Tensor,
        *,
        limits: Sequence[int] | None = None,
        max_live_rows: int | None = None,
        on_tokens: Callable[[Tensor], None] | None = None,
    ) -> list[Response]:
        """A response to each prompt, drawn in the model's precision. The arguments are those of `sample`."""
        with autocast(device_of(self.model), self.precision):
            return sample(
                self.model,
                prompts,
                uniforms,
                self.sampling,
                self.tokenizer,
                limits=limits,
                max_live_rows=max_live_rows,
                on_tokens=on_tokens,
            )

    def text(self, response: Response) -> str:
        """The response as users and reward models read it."""
        return response_text(self.tokenizer, response, self.sampling)

    def stream(
        self,
        ids: list[int],
        uniforms: Tensor,
        on_text: Callable[[str], None],
        *,
        as_message: bool = True,
        keep_partial: bool = False,
    ) -> Reply:
        """Continue one prompt by a token for each of the uniforms [1, R], or until it ends.

        `on_text` gets the whole text so far after each token, without what may still change: half a character, half a
        stop string. What it raises ends the response. The text of a message has no whitespace around it. With
        `keep_partial`, Ctrl-C ends the reply, and what was shown of it is returned.
        """
        drawn: list[int] = []
        shown = ""

        def show(new_ids: Tensor) -> None:
            nonlocal shown
            drawn.append(int(new_ids[0]))
            text = str(self.tokenizer.decode(drawn, skip_special_tokens=True))
            text = text.lstrip() if as_message else text
            for string in self.sampling.stop_strings:
                text = text.partition(string)[0]
                begun = next((n for n in range(len(string) - 1, 0, -1) if text.endswith(string[:n])), 0)
                text = text[: len(text) - begun]
            shown = text.rstrip().rstrip(NOT_YET_TEXT)
            on_text(shown)

        try:
            (response,) = self.respond([ids], uniforms, on_tokens=show)
        except KeyboardInterrupt:
            if not keep_partial or not shown:
                raise
            return Reply(shown, Response(drawn, [], ended=False))
        text = self.text(response)
        text = text.strip() if as_message else text
        on_text(text)
        return Reply(text, response)
