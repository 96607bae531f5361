"""What `rlhf data check` measures of a row, and the counts of a side."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_cli.commands.data_report import MAX_EXAMPLES
from rlhf_cli.data.answers import AnswerEncoder, answer_encoder
from rlhf_cli.data.encode import Skipped, require_eos
from rlhf_cli.data.encoders import DemonstrationEncoder, PromptEncoder, RowEncoder, Tokens
from rlhf_cli.data.views import Seen, StageRows, demonstrations_of
from rlhf_cli.data.words import glued
from rlhf_cli.models.heads import offer_classifier, reads_last_token

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
    reads_last_token = _reads_last_token(path, tokenizer)
    if reads_last_token:
        require_eos(tokenizer, path)
    return answer_encoder(tokenizer, rows, reads_last_token=reads_last_token)


def _reads_last_token(path: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a reward model on this backbone is causal. Its classifier is built without weights to find out."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        offer_classifier(type(config))
        with torch.device("meta"):
            return reads_last_token(AutoModelForSequenceClassification.from_config(config))
    except (OSError, ValueError):
        # A tokenizer without a model: tokenizers of encoder models rarely have an EOS.
        return tokenizer.eos_token_id is not None


# ----------------------------------------------------------------------------------------------- counting


@dataclass
class Remarkable:
    """Rows with something that you should look at."""

    number: int = 0
    first: list[str] = field(default_factory=list)
    """The places of the first rows."""
    example: str | None = None

    def add(self, seen: Seen, example: str | None) -> None:
        """Count a row, unless `example` is None."""
        if example is None:
            return
        self.number += 1
        self.example = self.example or example
        if len(self.first) < MAX_EXAMPLES:
            self.first.append(seen.record.where)

    def figures(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {"rows": self.number, "first": self.first, "example": self.example}


@dataclass
class Side:
    """Counts and lengths of the rows of one side."""

    lengths: dict[str, array[int]] = field(default_factory=dict)
    prompts: array[int] = field(default_factory=lambda: array("q"))
    """A hash of each row's prompt, 0 for an empty one."""
    rows: array[int] = field(default_factory=lambda: array("q"))
    """A hash of each row's prompt and answers."""
    files: array[int] = field(default_factory=lambda: array("i"))
    """The file of each row, by its index in `Check.files`."""
    numbers: array[int] = field(default_factory=lambda: array("q"))
    """The line or row number of each row in its file."""
    scores: array[float] = field(default_factory=lambda: array("d"))
    num_answers: Counter[int] = field(default_factory=Counter)
    """Rankings by their number of answers."""
    empty_prompts: int = 0
    too_long: int = 0
    too_short: int = 0
    chosen_longer: int = 0
    equally_long: int = 0
    longer_wins: float = 0.0
    special: Remarkable = field(default_factory=Remarkable)
    """Rows with special tokens in their own text."""
    glued: Remarkable = field(default_factory=Remarkable)
    """Rows whose prompt and answer meet without a space."""

    def add(self, seen: Seen, measured: Measured, spec: StageRows) -> None:
        """Count the lengths of a row, and what is remarkable about its texts."""
        self.special.add(seen, measured.special_token)
        self.glued.add(seen, next((pair for pair in _glued(seen, spec) if pair is not None), None))
        self._length("prompt", measured.prompt)
        totals = [measured.prompt + length for length in measured.answers] or [measured.prompt]
        if measured.answers:
            self._length("whole", max(totals))
        if spec.limits is not None:
            # A ranking is skipped as a whole, scored answers one by one.
            each = spec.purpose == "rm scores"
            long = sum(length > spec.limits.max_length for length in totals)
            short = sum(length < spec.limits.min_response_length for length in measured.answers)
            self.too_long += long if each else bool(long)
            self.too_short += short if each else bool(short)
        self.scores.extend(seen.scores)
        if spec.purpose == "rm pairs":
            self._compare(measured.answers)
            self.num_answers[len(measured.answers)] += 1
        else:
            for length in measured.answers:
                self._length("answer", length)

    def _compare(self, lengths: Sequence[int]) -> None:
        """Count whether the better answers of a ranking are the longer ones."""
        chosen, rejected = lengths[0], lengths[-1]
        self._length("chosen", chosen)
        self._length("rejected", rejected)
        self.chosen_longer += chosen > rejected
        self.equally_long += chosen == rejected
        pairs = [(better, worse) for n, better in enumerate(lengths) for worse in lengths[n + 1 :]]
        self.longer_wins += sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)

    def _length(self, name: str, length: int) -> None:
        if name not in self.lengths:
            self.lengths[name] = array("i")
        self.lengths[name].append(length)


def _glued(seen: Seen, spec: StageRows) -> Iterator[str | None]:
    """`words.glued` of the prompt, as its template writes it, and each answer. A chat template separates the two."""
    record = seen.record
    if record.messages or spec.template == "chat":
        return
    before, _, after = (spec.template or "{prompt}").partition("{prompt}")
    for answer in seen.answers:
        yield glued(before + record.prompt + after, answer)
