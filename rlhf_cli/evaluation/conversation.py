"""Conversations with the models of a run: how each model is prompted, its replies, and what the rewards say of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.data.encode import chat_text, encode_rows, prompt_text
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.data.records import ASSISTANT, SPEAKERS, Message, Prompt, transcript
from rlhf_cli.data.special_tokens import special_tokens_of
from rlhf_cli.errors import DataError, RewardError
from rlhf_cli.evaluation.trained import Quantize, TrainedModel, find_model, samples_of
from rlhf_cli.files import read_text
from rlhf_cli.models.forward import autocast, positions
from rlhf_cli.processes.distributed import start
from rlhf_cli.rewards.base import RewardSource
from rlhf_cli.rewards.sources import total_score
from rlhf_cli.rollout.distribution import Response, Sampling
from rlhf_cli.rollout.sampling import draw_uniforms, response_text, sample, sampling_of

NOT_YET_TEXT = "\ufffd"
"""What a tokenizer decodes the first bytes of a character to."""


@dataclass(frozen=True)
class PromptForm:
    """How a model reads a conversation: as the prompts of its training were written."""

    kind: Literal["chat", "transcript", "single"]
    """The chat template, a transcript of all turns, or the last message alone."""
    template: str | None = None
    """`data.prompt_template` around a transcript or a single message; None for the bare text."""
    lead: str = ""
    """What begins a transcript: HH-RLHF has an empty line before its first turn."""
    keep_special: bool = False

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """The conversation as a row of prompts."""
        text = messages[-1].content if self.kind == "single" else transcript(messages)
        if self.kind == "transcript":
            text = self.lead + text.lstrip("\n")
        return Prompt(text, "the conversation", messages=tuple(messages) if self.kind == "chat" else ())

    def encode(self, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
        """The ids that the reply follows. Raises DataError if the chat template refuses the conversation."""
        row = self.prompt(messages)
        try:
            return encode_rows(tokenizer, [row], self.template, keep_special=self.keep_special)[0]
        except DataError:
            if self.kind != "chat" or len(messages) == 1:
                raise
        # Some templates shorten earlier turns, for example their reasoning. Training needs the tokens of each turn, and
        # a reply does not.
        special = special_tokens_of(tokenizer)
        text = chat_text(tokenizer, messages, None if self.keep_special else special, generation=True)
        return special.encode([text], add_special_tokens=False)[0]

    def text(self, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
        """The prompt as text, as the rewards read it."""
        row = self.prompt(messages)
        return prompt_text(row.prompt, self.template, tokenizer, row.messages)

    def chat_template(self, tokenizer: PreTrainedTokenizerBase) -> str | None:
        """A chat template that writes conversations as this form does, for servers. None for single messages."""
        if self.kind != "transcript":
            return str(tokenizer.chat_template) if self.kind == "chat" else None
        around = self.template if self.template not in (None, "chat") else "{prompt}"
        before, _, after = str(around).partition("{prompt}")
        # A rendered template gets no special tokens, so the one that begins each text is written into it.
        begin = str(tokenizer.decode(tokenizer("")["input_ids"]))
        refusal = "raise_exception('a role must be system, user or assistant')"
        return (
            f"{{{{ {json.dumps(begin + before + self.lead)} }}}}"
            "{% for m in messages %}"
            '{% if not loop.first %}{{ "\\n\\n" }}{% endif %}'
            f"{{{{ {json.dumps(SPEAKERS)}[m['role']] or {refusal} }}}}: "
            "{{ m['content'] | trim if m['role'] == 'assistant' else m['content'] }}"
            "{% endfor %}"
            f"{{{{ {json.dumps(ASSISTANT + after)} }}}}"
        )

    @property
    def sentence(self) -> str:
        """How the model is prompted, for the user."""
        around = "" if self.template in (None, "chat") else f", in data.prompt_template {json.dumps(self.template)}"
        match self.kind:
            case "chat":
                return "the tokenizer's chat template"
            case "transcript":
                turns = json.dumps(f"{self.lead}Human: ...{ASSISTANT}")
                return f"no chat template; turns as in training, {turns}{around}"
            case "single":
                return f"no chat template; each message alone{around or ', as raw text'}, without earlier turns"


def prompt_form(
    tokenizer: PreTrainedTokenizerBase, template: str | None, logged: Sequence[str], *, keep_special: bool = False
) -> PromptForm:
    """The form of a stage's prompts, from `data.prompt_template` and the prompts that the stage logged.

    Without a prompt template the rows decide: they were messages or plain text, with the turns of a transcript or
    without. A model without logged prompts uses its chat template if it has one.
    """
    before, _, after = (template if template not in (None, "chat") else "{prompt}").partition("{prompt}")
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


@dataclass(frozen=True)
class Drawing:
    """How replies are drawn. None leaves a value to the model."""

    seed: int = 0
    temperature: float | None = None
    """0 takes the likeliest token."""
    max_new_tokens: int | None = None


@dataclass(frozen=True)
class Reply:
    """A reply to a conversation."""

    text: str
    response: Response
    """Not `ended` if it reached the maximum length or was interrupted."""


@dataclass(frozen=True)
class ChatModel:
    """A language model that replies to conversations."""

    name: str
    """The stage, or the directory of a model that belongs to no run."""
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    form: PromptForm
    sampling: Sampling
    max_new_tokens: int
    precision: str

    def reply(
        self,
        messages: Sequence[Message],
        drawing: Drawing,
        number: int,
        on_text: Callable[[str], None],
        *,
        keep_partial: bool = False,
    ) -> Reply:
        """Reply number `number` of the session. `on_text` is called with the whole text so far, as it grows.

        With `keep_partial`, Ctrl-C ends the reply and what was written of it is returned. Raises DataError for a
        conversation that is too long, or that the chat template refuses.
        """
        ids = self.form.encode(self.tokenizer, messages)
        room = self.room(ids, "Shorten the message, or start over with /clear")
        wanted = drawing.max_new_tokens or self.max_new_tokens
        uniforms = draw_uniforms(drawing.seed, "chat", number, 1, wanted)[:, :room]
        sampling = self.sampling_at(drawing.temperature)
        return self.respond(ids, uniforms, sampling, on_text, keep_partial=keep_partial)

    def room(self, ids: Sequence[int], advice: str) -> int:
        """The model's positions behind a prompt. Raises DataError with the advice if there are none."""
        most = positions(self.model)
        if not ids:
            raise DataError(f"the prompt has no token, and the model must read at least one. {advice}")
        if len(ids) >= most:
            raise DataError(f"the prompt has {len(ids)} tokens and the model reads {most}, reply included. {advice}")
        return most - len(ids)

    def respond(
        self,
        ids: list[int],
        uniforms: Tensor,
        sampling: Sampling,
        on_text: Callable[[str], None],
        *,
        as_message: bool = True,
        keep_partial: bool = False,
    ) -> Reply:
        """Continue a prompt by one token for each of the uniforms [1, R], or until it ends.

        The text of a message has no whitespace around it. `on_text` gets the whole text so far after each token; what
        it raises ends the response.
        """
        stream = _Stream(self.tokenizer, sampling, uniforms.shape[1], on_text, as_message=as_message)
        device = next(self.model.parameters()).device
        try:
            with autocast(device, self.precision):
                (response,) = sample(self.model, [ids], uniforms, sampling, self.tokenizer, on_tokens=stream.take)
        except KeyboardInterrupt:
            if not keep_partial or not stream.text:
                raise
            return Reply(stream.text, Response(stream.ids, [], ended=False))
        text = response_text(self.tokenizer, response, sampling)
        text = text.strip() if as_message else text
        on_text(text)
        return Reply(text, response)

    def sampling_at(self, temperature: float | None) -> Sampling:
        """The sampling at another temperature; 0 is greedy."""
        if temperature is None:
            return self.sampling
        if temperature == 0:
            return replace(self.sampling, temperature=1.0, top_k=1)
        return replace(self.sampling, temperature=temperature)


class _Stream:
    """The text of a reply while it grows, without what may still change: half a character, half a stop string."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        longest: int,
        on_text: Callable[[str], None],
        *,
        as_message: bool = True,
    ):
        self.tokenizer, self.sampling, self.longest, self.on_text = tokenizer, sampling, longest, on_text
        self.as_message = as_message
        self.ids: list[int] = []
        self.text = ""
        self.ended = False

    def take(self, new_ids: Tensor) -> None:
        """The newest token. Tokens behind the end of the reply are ignored."""
        if self.ended:
            return
        self.ids.append(int(new_ids[0]))
        self.ended = self.ids[-1] in self.sampling.stop or len(self.ids) == self.longest
        text = str(self.tokenizer.decode(self.ids, skip_special_tokens=True))
        text = text.lstrip() if self.as_message else text
        for string in self.sampling.stop_strings:
            text = text.partition(string)[0]
            begun = next((n for n in range(len(string) - 1, 0, -1) if text.endswith(string[:n])), 0)
            text = text[: len(text) - begun]
        self.text = text.rstrip().rstrip(NOT_YET_TEXT)
        self.on_text(self.text)


def reply_scores(
    sources: Sequence[RewardSource], model: ChatModel, messages: Sequence[Message], reply: Reply
) -> tuple[dict[str, float], list[str]]:
    """Each source's score of a reply, before its weight, and a line for each source that has none.

    With several sources, `sum` is their weighted sum, unless one has no score.
    """
    form, tokenizer = model.form, model.tokenizer
    row = PromptRow(form.text(tokenizer, messages), form.encode(tokenizer, messages), form.prompt(messages))
    samples = samples_of(tokenizer, model.sampling, [row], [reply.response], sources)
    found: dict[str, float] = {}
    problems: list[str] = []
    for source in sources:
        try:
            scores = total_score([source], samples)
        except RewardError as error:
            problems.append(str(error))
            continue
        if scores.errors.get(source.name):
            problems.append(f"{source.name}: has no score, which counts as 0.0 (on_error: zero)")
        else:
            found[source.name] = scores.each[source.name].item()
    if len(sources) > 1 and not problems:
        found["sum"] = sum(source.weight * found[source.name] for source in sources)
    return found, problems


# ------------------------------------------------------------------------------------------- opening


def open_models(
    directory: str, stage: str | None, device: str, quantization: Quantize | None = None
) -> list[ChatModel]:
    """The model at `directory`: of a run its `stage`, or by default the last finished one of sft and ppo.

    Raises ArtifactError if the stage is not finished or there is no language model, ConfigError for a stage of a
    directory that is no run and for a model that cannot be quantized.
    """
    return [_chat_model(find_model(directory, stage), start(device).device, quantization)]


def open_comparison(
    directory: str, device: str, quantization: Quantize | None = None
) -> tuple[list[ChatModel], list[RewardSource], list[str]]:
    """The models of sft and ppo of a run, the reward sources of ppo, and notes of the sources for the user.

    Raises ArtifactError if one of the stages is not finished, ConfigError for a directory that is no run.
    """
    trained = find_model(directory)
    both = [trained.compared(stage) for stage in ("sft", "ppo")]
    world, rewards = start(device), trained.rewards()
    assert rewards is not None
    models = [_chat_model(model, world.device, quantization) for model in both]
    sources, notes = rewards.load(models[1].tokenizer, world.device, models[1].precision)
    return models, sources, notes


def _chat_model(trained: TrainedModel, device: torch.device, quantization: Quantize | None) -> ChatModel:
    """The loaded model, prompted and sampled as in its run."""
    model, tokenizer = trained.load(device, quantization)
    rollout = trained.rollout()
    sampling = sampling_of(rollout, model, tokenizer)
    form = form_of(trained, tokenizer)
    return ChatModel(trained.name, model, tokenizer, form, sampling, rollout.max_new_tokens, trained.precision)


def form_of(trained: TrainedModel, tokenizer: PreTrainedTokenizerBase) -> PromptForm:
    """The form of a model's prompts, as its stage wrote them."""
    directory = trained.stage_directory
    logged = _logged_prompts(directory) if directory is not None else []
    return prompt_form(tokenizer, trained.template, logged, keep_special=trained.keep_special)


def _logged_prompts(directory: Path) -> list[str]:
    """The prompts in a stage's samples.jsonl; [] if it has none."""
    try:
        rows: list[Any] = [json.loads(line) for line in read_text(directory / "samples.jsonl").splitlines()]
    except (OSError, ValueError, RecursionError):
        return []
    return [row["prompt"] for row in rows if isinstance(row, dict) and isinstance(row.get("prompt"), str)]
