"""How a model of a run is prompted, for those who get the model without the run: a chat template and a card section."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_cli.evaluation.conversation import PromptForm, form_of
from rlhf_cli.evaluation.locate import StageModel
from rlhf_cli.evaluation.trained import find_model
from rlhf_cli.models.load import load_tokenizer

TEMPLATE_FILE = "chat_template.jinja"
"""Where transformers, vLLM and llama.cpp's converter look for a chat template."""
HEADING = "## How it is prompted"


@dataclass(frozen=True)
class Prompting:
    """How a model is prompted."""

    sentence: str
    chat_template: str | None
    """A template that writes conversations as in training; None if the tokenizer's own does, or none can."""

    @property
    def section(self) -> str:
        """The section of the model card."""
        text = f"{HEADING}\n\nPrompts: {self.sentence}."
        if self.chat_template is not None:
            text += f" The chat template in `{TEMPLATE_FILE}` writes the messages of a chat in this way."
        return text


def prompting_of(located: StageModel | None) -> Prompting | None:
    """How a language model of a run is prompted; None for other models.

    A transcript gets a chat template: without it, a program that has the model alone sends bare text.
    """
    if located is None or located.stage == "rm" or located.folder == "value_model":
        return None
    trained = find_model(located.path)
    tokenizer = load_tokenizer(trained.path, trained.revision)
    form: PromptForm = form_of(trained, tokenizer)
    sentence = form.sentence.removeprefix("no chat template; ")
    return Prompting(sentence, form.chat_template(tokenizer) if form.kind == "transcript" else None)
