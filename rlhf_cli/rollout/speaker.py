"""A model that speaks: a language model with its tokenizer, the form of its prompts, and how it draws."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.config.ppo import Rollout
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.data.encode import RowText, chat_text
from rlhf_cli.data.records import ASSISTANT, SPEAKERS, Message, Record, transcript
from rlhf_cli.data.special_tokens import special_tokens_of
from rlhf_cli.errors import DataError
from rlhf_cli.models.forward import autocast, positions
from rlhf_cli.processes.sharding import device_of
from rlhf_cli.rollout.sampling import (
    LEAST_TEMPERATURE,
    Response,
    Sampling,
    response_text,
    sample,
    sampling_of,
    stop_string_start,
)


@dataclass(frozen=True)
class PromptForm:
    """The form in which a model reads a row of prompts, and a conversation."""

    kind: Literal["chat", "transcript", "single"] = "single"
    """How a conversation becomes a prompt: by the chat template, as a transcript, or as its last message alone."""
    template: str | None = None
    """`data.prompt_template` around a transcript or a single message; None for the bare text."""
    lead: str = ""
    """The beginning of a transcript: HH-RLHF has an empty line before its first turn."""
    keep_special: bool = False
    """Whether a row's text that spells a special token becomes that token (`data.special_tokens: keep`)."""

    def rows(self, tokenizer: PreTrainedTokenizerBase) -> RowText:
        """The reader of rows. A prompt without messages is a user's message for a chat model."""
        return RowText(tokenizer, "chat" if self.kind == "chat" else self.template, self.keep_special)

    def encode_row(self, tokenizer: PreTrainedTokenizerBase, row: Record) -> list[int]:
        """The ids that the reply to a row follows. Raises DataError if the chat template refuses the conversation."""
        return self.rows(tokenizer).prompt_ids([row])[0]

    def row(self, messages: Sequence[Message]) -> Record:
        text = messages[-1].content if self.kind == "single" else transcript(messages)
        if self.kind == "transcript":
            text = self.lead + text.lstrip("\n")
        return Record(text, "the conversation", messages=tuple(messages) if self.kind == "chat" else ())

    def encode(self, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
        """The ids that the reply to a conversation follows. Raises DataError if the chat template refuses it."""
        try:
            return self.encode_row(tokenizer, self.row(messages))
        except DataError:
            if self.kind != "chat" or len(messages) == 1:
                raise
        # Some templates shorten earlier turns, for example their reasoning. Training needs the tokens of each turn, and
        # a reply does not.
        text = chat_text(tokenizer, messages, self.rows(tokenizer).marks, generation=True)
        return special_tokens_of(tokenizer).encode([text], add_special_tokens=False)[0]

    def chat_template(self, tokenizer: PreTrainedTokenizerBase) -> str | None:
        """A template that writes a transcript as this form does, for programs that have the model alone; else None."""
        if self.kind != "transcript":
            return None
        before, _, after = (self.template or "{prompt}").partition("{prompt}")
        # A rendered template gets no special tokens, so the one that begins each text is written into it.
        begin = str(tokenizer.decode(tokenizer("")["input_ids"]))
        refusal = "raise_exception('a role must be system, user or assistant')"
        return (
            f"{{{{ {json.dumps(begin + before + self.lead, ensure_ascii=False)} }}}}"
            "{% for m in messages %}"
            '{% if not loop.first %}{{ "\\n\\n" }}{% endif %}'
            f"{{{{ {json.dumps(SPEAKERS)}[m['role']] or {refusal} }}}}: "
            "{{ m['content'] | trim if m['role'] == 'assistant' else m['content'] }}"
            "{% endfor %}"
            f"{{{{ {json.dumps(ASSISTANT + after, ensure_ascii=False)} }}}}"
        )

    @property
    def sentence(self) -> str:
        around = "" if self.template is None else f", in data.prompt_template {json.dumps(self.template)}"
        match self.kind:
            case "chat":
                return "the tokenizer's chat template"
            case "transcript":
                turns = json.dumps(f"{self.lead}Human: ...{ASSISTANT}")
                return f"no chat template; turns as in training, {turns}{around}"
            case "single":
                return f"no chat template; each message alone{around or ', as raw text'}, without earlier turns"


AS_IT_IS = PromptForm()  # a prompt's own text, and the chat template for a row of messages


def prompt_form(
    tokenizer: PreTrainedTokenizerBase, template: str | None, logged: Sequence[str], *, keep_special: bool = False
) -> PromptForm:
    """The form of a stage's prompts, from `data.prompt_template` and the prompts that the stage logged.

    Without a prompt template the logged prompts decide whether rows were messages, transcripts or plain text. Without
    these a model uses its chat template if it has one.
    """
    before, _, after = (template or "{prompt}").partition("{prompt}")
    special = special_tokens_of(tokenizer)

    def bare(text: str) -> str:
        # SFT logs its prompts without special tokens.
        for token in special.tokens:
            text = text.replace(token, "")
        return text

    if template == "chat":
        return PromptForm("chat", template, keep_special=keep_special)
    if template is None and tokenizer.chat_template:
        question = "QUESTION"
        ending = bare(chat_text(tokenizer, [Message("user", question)], generation=True).rpartition(question)[2])
        if not logged or any(bare(prompt).endswith(ending) for prompt in logged):
            return PromptForm("chat", keep_special=keep_special)
    own = [bare(prompt).removeprefix(bare(before)).removesuffix(bare(after)) for prompt in logged]
    if own and all(prompt.endswith(ASSISTANT) for prompt in own):
        lead = "\n\n" if all(prompt.startswith("\n\n") for prompt in own) else ""
        return PromptForm("transcript", template, lead, keep_special)
    return PromptForm("single", template, keep_special=keep_special)


# ------------------------------------------------------------------------------------------------------------ the model

NOT_YET_TEXT = "\ufffd"  # the text of the first bytes of a character


class PromptRefused(DataError):
    """A prompt that the model cannot reply to, for one of a few reasons."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Reply:
    text: str
    response: Response  # not `ended` if it reached the maximum length or was interrupted


@dataclass(frozen=True)
class Speaker:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    max_new_tokens: int
    precision: str = "float32"
    form: PromptForm = AS_IT_IS
    name: str = ""  # the user's name for it

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
        """The speaker at another temperature; 0, or one too low to divide by, is greedy, None its own."""
        if temperature is None:
            return self
        is_greedy = temperature < LEAST_TEMPERATURE
        changes = {"temperature": 1.0, "top_k": 1} if is_greedy else {"temperature": temperature}
        return replace(self, sampling=replace(self.sampling, **changes))  # type: ignore[arg-type]

    # ------------------------------------------------------------------------------------------- prompts

    @property
    def longest_prompt(self) -> int:
        """Maximum tokens of a prompt with room for the longest reply behind it."""
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

        Raises PromptRefused if the chat template refuses the row, or if it leaves no room for the longest reply or,
        with `takes_what_fits`, for any.
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

    def respond(self, prompts: Sequence[Sequence[int]], uniforms: Tensor, **options: Any) -> list[Response]:
        """A response to each prompt, drawn in the model's precision. `sample` gets the `options`."""
        with autocast(device_of(self.model), self.precision):
            return sample(self.model, prompts, uniforms, self.sampling, self.tokenizer, **options)

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
            text, strings = str(self.tokenizer.decode(drawn, skip_special_tokens=True)), self.sampling.stop_strings
            if strings and len(drawn) >= self.sampling.min_new_tokens:
                text = text[: stop_string_start(self.tokenizer, drawn, strings)]
            begun = (n for string in strings for n in range(1, len(string)) if text.endswith(string[:n]))
            text = text[: len(text) - max(begun, default=0)]
            shown = (text.lstrip() if as_message else text).rstrip().rstrip(NOT_YET_TEXT)
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
