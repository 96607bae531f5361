"""What `rlhf data check` counts: the rows of each side, their lengths, duplicates, and rows to look at."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_cli.commands.output import batched
from rlhf_cli.config.data import Rows
from rlhf_cli.data.encode import Skipped, require_eos
from rlhf_cli.data.encoders import DemonstrationEncoder, PromptEncoder, RowEncoder
from rlhf_cli.data.reading import records, row_digest
from rlhf_cli.data.records import Record
from rlhf_cli.data.row_counts import DUPLICATE, Report
from rlhf_cli.data.views import SeenRow, StageRows, demonstrations_of, see
from rlhf_cli.data.words import glued
from rlhf_cli.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_BAD_ROWS = 10
"""Bad rows that are printed."""
MAX_EXAMPLES = 3
"""Places that are named of duplicates, of leaks and of other rows to look at."""
CHUNK = 1000
"""Rows that are measured together."""


@dataclass
class Remarkable:
    """Rows with something that you should look at."""

    number: int = 0
    first: list[str] = field(default_factory=list)
    """The places of the first rows."""
    example: str | None = None

    def add(self, seen: SeenRow, example: str | None) -> None:
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

    def add(self, seen: SeenRow, measured: Measured, spec: StageRows) -> None:
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


def _glued(seen: SeenRow, spec: StageRows) -> Iterator[str | None]:
    """`words.glued` of the prompt, as its template writes it, and each answer. A chat template separates the two."""
    record = seen.record
    if record.messages or spec.template == "chat":
        return
    before, _, after = (spec.template or "{prompt}").partition("{prompt}")
    for answer in seen.answers:
        yield glued(before + record.prompt + after, answer)


# ------------------------------------------------------------------------------------------- measures


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


def in_words(rows: Sequence[SeenRow]) -> list[Measured]:
    """Lengths in words, separated by blanks. Length limits are in tokens, so no row is skipped for its length."""
    return [
        Measured(
            len(seen.record.prompt.split()),
            [len(answer.split()) for answer in seen.answers],
            kept=len(seen.scores) or 1,
        )
        for seen in rows
    ]


def in_tokens(encoder: RowEncoder, rows: Sequence[SeenRow]) -> list[Measured]:
    """Lengths in tokens, EOS included, of the sequences that the stage's encoder makes."""
    from rlhf_cli.data.answers import AnswerEncoder

    found = []
    for seen, sequences in zip(rows, encoder.sequences([seen.row for seen in rows]), strict=True):
        if encoder.stage_rows.purpose == "ppo":
            answers = []
        elif isinstance(encoder, AnswerEncoder):
            each = zip(demonstrations_of(seen), sequences, strict=True)
            answers = [encoder.answer_length(row, tokens) for row, tokens in each]
        else:
            answers = [sum(mask) for _, mask in sequences]  # SFT learns every assistant turn
        prompt = len(sequences[-1][0]) - (answers[-1] if answers else 0)
        items = list(encoder.items(seen.row, sequences))
        skipped = tuple(item for item in items if isinstance(item, Skipped))
        found.append(Measured(prompt, answers, len(items) - len(skipped), skipped, encoder.special_token_in(seen.row)))
    return found


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


# ------------------------------------------------------------------------------------------- counts


class Check(Report):
    """Everything that `rlhf data check` counts. The sides are train, test, probes and ptx."""

    def __init__(self, progress: Callable[[int], object] = lambda _: None) -> None:
        super().__init__()
        self.progress = progress
        """Called now and then with the number of rows so far."""
        self.sides: dict[str, Side] = {}
        self.num_read: Counter[str] = Counter()
        """Rows of each side without the bad ones."""
        self.num_bad: Counter[str] = Counter()
        self.files: dict[str, int] = {}
        """The beginning of each row's place, up to its number, and its index."""
        self._role = "data"

    def bad_row(self, data: Rows, side: str, error: DataError) -> None:  # noqa: ARG002
        """Count a bad row, whatever the stage would do about it."""
        self.num_bad[self._name(side)] += 1
        if len(self.bad) < MAX_BAD_ROWS:
            self.bad.append(str(error))

    def _name(self, side: str) -> str:
        return side if self._role == "data" else self._role.removeprefix("data.")

    def count(self, spec: StageRows, measure: Callable[[Sequence[SeenRow]], list[Measured]]) -> None:
        """Read the rows of a stage and count them. Raises DataError for a source that cannot be read at all."""
        self._role = spec.role
        # A weight above 1 would read the same rows again. Duplicates are counted here, see `_views`.
        once = [source.model_copy(update={"weight": 1.0}) for source in spec.rows.train]
        rows = spec.rows.model_copy(update={"train": once, "deduplicate": False})
        with ThreadPoolExecutor(1) as pool:
            # The tokenizer works on one chunk while the next one is read.
            pending: list[tuple[list[tuple[str, SeenRow]], Future[list[Measured]]]] = []
            for chunk in batched(self._views(rows, spec), CHUNK):
                pending.append((chunk, pool.submit(measure, [seen for _, seen in chunk])))
                if len(pending) == 2:
                    self._take(*pending.pop(0), spec)
            for chunk, measured in pending:
                self._take(chunk, measured, spec)

    def _views(self, rows: Rows, spec: StageRows) -> Iterator[tuple[str, SeenRow]]:
        """(name of the side, row) of the rows that the stage would encode; the others are counted."""
        digests: set[tuple[str, bytes]] = set()
        for side, record in records(rows, spec.purpose, self, prompt_words=spec.prompt_words, role=spec.role):
            num_before = len(digests)
            if spec.rows.deduplicate:
                digests.add((side, row_digest(record)))
            try:
                seen = see(record, spec, side)
            except DataError as error:
                self.bad_row(spec.rows, side, error)
                continue
            name = self._name(side)
            self.num_read[name] += 1
            if isinstance(seen, SeenRow):
                self._register(name, record)
            if spec.rows.deduplicate and len(digests) == num_before:
                self.skip(name, DUPLICATE)
            elif isinstance(seen, Skipped):
                self.skip(name, seen.reason)
            else:
                yield name, seen

    def _register(self, name: str, record: Record) -> None:
        """Keep the hashes and the place of a row, to find duplicates and leaks."""
        counts = self.sides.setdefault(name, Side())
        key = record.key.strip()
        counts.prompts.append(hash(key) if key else 0)
        counts.rows.append(hash((record.prompt, *[answer.text for answer in record.answers])))
        counts.empty_prompts += not record.prompt.strip()
        file = record.where.rstrip("0123456789")
        counts.files.append(self.files.setdefault(file, len(self.files)))
        counts.numbers.append(int(record.where[len(file) :] or -1))

    def _take(self, chunk: Sequence[tuple[str, SeenRow]], pending: Future[list[Measured]], spec: StageRows) -> None:
        """Add the measurements of a chunk."""
        for (name, seen), measured in zip(chunk, pending.result(), strict=True):
            self.sides[name].add(seen, measured, spec)
            self.kept[name] += measured.kept
            for skipped in measured.skipped:
                self.skip(name, skipped.reason, skipped.needs)
        self.progress(self.num_read.total())

    def side(self, name: str) -> Side:
        """The counts of a side, empty if no row of it was read."""
        return self.sides.get(name, Side())

    def places(self, side: Side, numbers: Iterable[int]) -> list[str]:
        """The places (`file:line`) of the rows with these indices."""
        files = list(self.files)
        found = []
        for n in numbers:
            file, number = files[side.files[n]], side.numbers[n]
            found.append(file if number < 0 else f"{file}{number}")
        return found
