"""How a model reads prompts and conversations: as those of its training were written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from rlhf_cli.data.encode import RowText, chat_text
from rlhf_cli.data.records import ASSISTANT, SPEAKERS, Message, Record, transcript
from rlhf_cli.data.special_tokens import special_tokens_of
from rlhf_cli.errors import DataError
from rlhf_cli.files import read_text


@dataclass(frozen=True)
class PromptForm:
    """How a model reads a row of prompts, and a conversation."""

    kind: Literal["chat", "transcript", "single"] = "single"
    """Of a conversation: the chat template, a transcript of all turns, or the last message alone."""
    template: str | None = None
    """`data.prompt_template` around a transcript or a single message; None for the bare text."""
    lead: str = ""
    """What begins a transcript: HH-RLHF has an empty line before its first turn."""
    keep_special: bool = False

    def _rows(self, tokenizer: PreTrainedTokenizerBase) -> RowText:
        """How rows are read. A prompt without messages is a user's message for a chat model."""
        return RowText(tokenizer, "chat" if self.kind == "chat" else self.template, self.keep_special)

    def encode_row(self, tokenizer: PreTrainedTokenizerBase, row: Record) -> list[int]:
        """The ids that the reply to a row follows. Raises DataError if the chat template refuses the conversation."""
        return self._rows(tokenizer).prompt_ids([row])[0]

    def row_text(self, tokenizer: PreTrainedTokenizerBase, row: Record) -> str:
        """The prompt of a row as text, as the rewards read it."""
        return self._rows(tokenizer).prompt(row)

    def row(self, messages: Sequence[Message]) -> Record:
        """The conversation as a row of prompts."""
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
        text = chat_text(tokenizer, messages, self._rows(tokenizer).marks, generation=True)
        return special_tokens_of(tokenizer).encode([text], add_special_tokens=False)[0]

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


AS_IT_IS = PromptForm()
"""A prompt's own text, and the chat template for a row of messages."""


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


def logged_prompts(directory: Path) -> list[str]:
    """The prompts in a stage's samples.jsonl; [] if it has none."""
    try:
        rows: list[Any] = [json.loads(line) for line in read_text(directory / "samples.jsonl").splitlines()]
    except (OSError, ValueError, RecursionError):
        return []
    return [row["prompt"] for row in rows if isinstance(row, dict) and isinstance(row.get("prompt"), str)]
