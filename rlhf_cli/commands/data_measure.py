"""What `rlhf data check` measures of a row: its lengths, and what the stage would keep of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_cli.data.encode import Skipped, require_eos
from rlhf_cli.data.encoders import DemonstrationEncoder, PromptEncoder, RowEncoder, Tokens
from rlhf_cli.data.views import Seen, StageRows, demonstrations_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Measured:
    """The lengths of a row, and what the stage would keep of it."""

    prompt: int
    answers: list[int]
    kept: int = 1
    """Items that the stage would use: one per scored answer, else one per row."""
    skipped: tuple[Skipped, ...] = ()
    special_token: str | None = None
    """A special token in the row's own text."""


Measure = Callable[[Sequence[Seen]], list[Measured]]


def in_words(rows: Sequence[Seen]) -> list[Measured]:
    """Lengths in words, separated by blanks. Length limits are in tokens, so no row is skipped for its length."""
    return [
        Measured(
            len(seen.record.prompt.split()),
            [len(answer.split()) for answer in seen.answers],
            kept=len(seen.scores) or 1,
        )
        for seen in rows
    ]


class InTokens:
    """Lengths in tokens, EOS included, of the sequences that the stage's encoder makes."""

    def __init__(self, encoder: RowEncoder):
        self.encoder, self.purpose = encoder, encoder.stage_rows.purpose

    def __call__(self, rows: Sequence[Seen]) -> list[Measured]:
        found = []
        for seen, sequences in zip(rows, self.encoder.sequences([seen.row for seen in rows]), strict=True):
            items = list(self.encoder.items(seen.row, sequences))
            skipped = tuple(item for item in items if isinstance(item, Skipped))
            prompt, answers = self._lengths(seen, sequences)
            special_token = self.encoder.special_token_in(seen.row)
            found.append(Measured(prompt, answers, len(items) - len(skipped), skipped, special_token))
        return found

    def _lengths(self, seen: Seen, sequences: Sequence[Tokens]) -> tuple[int, list[int]]:
        """Tokens of the prompt, and of each answer."""
        from rlhf_cli.data.answers import AnswerEncoder

        if self.purpose == "ppo":
            return len(sequences[0][0]), []
        if isinstance(self.encoder, AnswerEncoder):
            rows = zip(demonstrations_of(seen), sequences, strict=True)
            answers = [self.encoder.answer_length(row, tokens) for row, tokens in rows]
        else:
            # SFT learns every assistant turn.
            answers = [sum(mask) for _, mask in sequences]
        return len(sequences[-1][0]) - answers[-1], answers


def encoder_of(rows: StageRows, tokenizer: PreTrainedTokenizerBase, path: str) -> RowEncoder:
    """The encoder with which the stage would read these rows. `path` is the model that the tokenizer belongs to."""
    if rows.purpose in ("sft", "ppo"):
        require_eos(tokenizer, path)
        return DemonstrationEncoder(tokenizer, rows) if rows.purpose == "sft" else PromptEncoder(tokenizer, rows)
    from rlhf_cli.data.answers import answer_encoder

    reads_last_token = _reads_last_token(path, tokenizer)
    if reads_last_token:
        require_eos(tokenizer, path)
    return answer_encoder(tokenizer, rows, reads_last_token=reads_last_token)


def _reads_last_token(path: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a reward model on this backbone is causal. Its classifier is built without weights to find out."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from rlhf_cli.models.heads import offer_classifier, reads_last_token

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        offer_classifier(type(config))
        with torch.device("meta"):
            return reads_last_token(AutoModelForSequenceClassification.from_config(config))
    except (OSError, ValueError):
        # A tokenizer without a model: tokenizers of encoder models rarely have an EOS.
        return tokenizer.eos_token_id is not None
