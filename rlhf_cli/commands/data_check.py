"""`rlhf data check`: what a stage would read, counted before it runs.

Rows are read as the stage reads them. Of each row two hashes of 8 bytes, its lengths and its place are kept, so that
memory does not grow with the texts.
"""

from __future__ import annotations

import io
import json
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.text import Text

from rlhf_cli.algorithms.statistics import wilson_interval
from rlhf_cli.artifacts import model_directory
from rlhf_cli.config.by_stage import load_stage_config, stage_of
from rlhf_cli.config.data import DataSource, Rows
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.data.encode import (
    LeftOut,
    encode_answers,
    encode_for_classifier,
    encode_rows,
    is_chat,
    prompt_text,
    require_chat_template,
    require_eos,
    whole_text,
)
from rlhf_cli.data.formats import Purpose
from rlhf_cli.data.reading import Report, first_format, records
from rlhf_cli.data.records import (
    Demonstration,
    Message,
    Prompt,
    Record,
    demonstration,
    prompt,
    ranking,
    scored,
)
from rlhf_cli.errors import DataError, RunError

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

For = Literal["sft", "rm", "rm-scores", "ppo"]
PERCENTILES = (1, 10, 50, 90, 99)
SHOWN = 10
"""Bad rows that are shown."""
EXAMPLES = 3
"""Places that are named of duplicates and of leaks."""
CHUNK = 1000
"""Rows whose lengths are counted at a time."""
FEW_SCORES = 10
"""So many different scores are labels, and each is counted."""
WIDTH = 80


# ------------------------------------------------------------------------------------ what is to be read


@dataclass(frozen=True)
class Part:
    """Rows that a stage reads, and how it reads them."""

    role: str
    """data, data.probes or ptx, as messages call it."""
    rows: Rows
    purpose: Purpose
    max_length: int | None = None
    truncation: Literal["drop", "left", "right"] = "drop"
    min_response_length: int = 0
    template: str | None = None
    prompt_words: int = 0
    learn_all: bool = False
    margin_column: str | None = None


def part_of_source(
    source: DataSource,
    for_: For,
    *,
    test: str | None = None,
    max_length: int | None = None,
    on_bad_row: Literal["error", "skip"] = "skip",
) -> Part:
    """What a stage would read of a source. `test` is read as the source is."""
    held_out = [source.model_copy(update={"path": test})] if test is not None else None
    rows = Rows(train=[source], test=held_out, test_fraction=0, on_bad_row=on_bad_row)
    return Part("data", rows, _purpose(source, for_), max_length)


def _purpose(source: DataSource, for_: For) -> Purpose:
    """Which of a stage's two losses a source is for: pairs where its first row can be one, else scores."""
    if for_ != "rm":
        return "rm scores" if for_ == "rm-scores" else for_
    try:
        # Texts with a label each are read as scores, and paired afterwards.
        return "rm scores" if first_format(source, "rm pairs").name == "labelled" else "rm pairs"
    except DataError as error:
        try:
            first_format(source, "rm scores")
        except DataError:
            raise error from None
        return "rm scores"


def parts_of_config(path: Path, stage: str | None, overrides: Sequence[str]) -> tuple[list[Part], str | None]:
    """What the stage of a config reads, and where its tokenizer is, if that is on this disk already."""
    config = load_stage_config(stage_of(path, stage), path, overrides)
    parts = []
    if isinstance(config, PPOConfig):
        prompts = config.data
        parts.append(
            Part(
                "data",
                prompts,
                "ppo",
                prompts.max_prompt_length,
                prompts.truncation,
                template=prompts.prompt_template,
                prompt_words=prompts.prompt_words,
            )
        )
        if config.ptx is not None:
            ptx = Rows(train=config.ptx.train, test_fraction=0)
            learn_all = config.ptx.loss_on == "all"
            words, template = config.ptx.prompt_words, prompts.prompt_template
            parts.append(Part("ptx", ptx, "sft", config.ptx.max_length, "drop", 0, template, words, learn_all))
    elif isinstance(config, RMConfig | SFTConfig):
        data = config.data
        limits = (data.max_length, data.truncation, data.min_response_length, data.prompt_template)
        if isinstance(config, SFTConfig):
            learn_all = config.data.loss_on == "all"
            parts.append(Part("data", data, "sft", *limits, config.data.prompt_words, learn_all))
        else:
            purpose = "rm scores" if config.loss == "mse" else _purpose(data.train[0], "rm")
            parts.append(Part("data", data, purpose, *limits, margin_column=config.data.margin_column))
            if config.data.probes is not None:
                probes = Rows(train=[config.data.probes], test_fraction=0)
                parts.append(Part("data.probes", probes, "rm pairs", *limits))
    path_or_none, _ = config.inputs.get("policy" if isinstance(config, PPOConfig) else "model", (None, None))
    # A model made from scratch has a tokenizer once its stage is finished.
    place = Path(model_directory(path_or_none or config.stage_model(None, "sft")))
    is_there = any((place / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    return parts, str(place) if is_there else None


# --------------------------------------------------------------------------------- what a stage sees of it


@dataclass(frozen=True)
class Seen:
    """A row and those of its answers that the stage learns from."""

    record: Record
    answers: tuple[str, ...] = ()
    """Of a ranking best first."""
    scores: tuple[float, ...] = ()


def see(record: Record, part: Part, side: str) -> Seen | LeftOut:
    """What the stage sees of a row; raises DataError for one that is bad."""
    if part.purpose == "sft":
        found = demonstration(record)
        return Seen(record, (found.response,)) if found is not None else LeftOut("no answer to learn from")
    if part.purpose == "ppo":
        prompt(record)
        return Seen(record)
    if part.purpose == "rm scores":
        each = scored(record)
        answers = tuple(row.response for row in each)
        return Seen(record, answers, tuple(row.score for row in each)) if each else LeftOut("no answer with a score")
    if part.role == "data.probes" and not isinstance(record.columns.get("probe"), str):
        raise DataError(f"{record.where}: a row of data.probes needs a text `probe`, what it probes")
    order = ranking(record, margin_column=part.margin_column if side == "train" else None)
    if order is not None:
        return Seen(record, order.answers)
    is_one = len({answer.text for answer in record.answers}) == 1 < len(record.answers)
    return LeftOut("its answers are equal" if is_one else "no two answers of which one is better")


def with_answer(record: Record, answer: str) -> Demonstration:
    """A row with one of its answers."""
    messages = (*record.messages, Message("assistant", answer.removeprefix(" "))) if record.messages else ()
    return Demonstration(record.prompt, answer, record.where, messages)


# ---------------------------------------------------------------------------------------------- lengths

Lengths = tuple[int, list[int]]
"""Of the prompt, and of each answer."""
Measure = Callable[[Sequence[Seen]], list[Lengths]]


def in_words(rows: Sequence[Seen]) -> list[Lengths]:
    """Lengths in words: what stands between blanks.

    >>> in_words([Seen(Record("file:1", "1 + 1 =", (), "1 + 1 ="), ("two", "it is two"))])
    [(4, [1, 3])]
    """
    return [(len(row.record.prompt.split()), [len(answer.split()) for answer in row.answers]) for row in rows]


class InTokens:
    """Lengths in tokens, with EOS, of the ids that the stage makes; the tokenizer takes every core for a chunk.

    Whole texts are tokenised where they must be. Where prompts and answers by themselves give the same lengths,
    which the first chunk shows, only these are: a prompt of two answers is then read once and not three times.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, part: Part, path: str):
        from transformers import PreTrainedTokenizerFast

        self.tokenizer, self.part = tokenizer, part
        self.start = part.purpose in ("sft", "ppo")
        self.is_classifier = part.purpose.startswith("rm") and tokenizer.eos_token_id is None
        self.is_fast = isinstance(tokenizer, PreTrainedTokenizerFast)
        self.apart_is_exact: bool | None = None
        if part.template == "chat":
            require_chat_template(tokenizer)
        if not self.is_classifier:
            require_eos(tokenizer, path)

    def __call__(self, rows: Sequence[Seen]) -> list[Lengths]:
        if self.part.purpose == "ppo":
            prompts = [Prompt(row.record.prompt, row.record.where, messages=row.record.messages) for row in rows]
            return [(len(ids), []) for ids in encode_rows(self.tokenizer, prompts, self.part.template)]
        if self.is_classifier:
            return self._of_classifier(rows)
        if any(is_chat(row.record.messages, self.part.template, self.tokenizer) for row in rows):
            return self._exact(rows)
        if self.apart_is_exact is None:
            exact = self._exact(rows)
            self.apart_is_exact = self.is_fast and exact == self._apart(rows)
            return exact
        return self._apart(rows) if self.apart_is_exact else self._exact(rows)

    def _exact(self, rows: Sequence[Seen]) -> list[Lengths]:
        answered = [with_answer(row.record, answer) for row in rows for answer in row.answers]
        encoded = iter(encode_answers(self.tokenizer, answered, self.part.template, start=self.start))
        found = []
        for row in rows:
            of_prompt, of_answers = 0, []
            for _ in row.answers:
                ids, is_answer = next(encoded)
                # Every turn of the assistant is learnt by SFT; a reward model judges the last one.
                last = sum(is_answer) if self.part.purpose == "sft" else num_last(is_answer)
                of_prompt = len(ids) - last
                of_answers.append(last)
            found.append((of_prompt, of_answers))
        return found

    def _apart(self, rows: Sequence[Seen]) -> list[Lengths]:
        template, eos = self.part.template, self.tokenizer.eos_token_id
        texts = [prompt_text(row.record.prompt, template, self.tokenizer) for row in rows]
        answers = [answer for row in rows for answer in row.answers]
        # The Rust tokenizer itself: only numbers are wanted, and ids as Python's lists take half of the time.
        encode = self.tokenizer.backend_tokenizer.encode_batch_fast
        ids = iter(encode(answers, add_special_tokens=False))
        found = []
        for row, before in zip(rows, encode(texts, add_special_tokens=template != "chat"), strict=True):
            of_prompt = len(before)
            if of_prompt > 1 and before.ids[-1] == eos:
                of_prompt -= 1
            found.append((of_prompt or int(self.start), [len(next(ids)) + 1 for _ in row.answers]))
        return found

    def _of_classifier(self, rows: Sequence[Seen]) -> list[Lengths]:
        template = self.part.template
        answered = [with_answer(row.record, answer) for row in rows for answer in row.answers]
        wholes = [whole_text(row, template, self.tokenizer) for row in answered]
        encoded = iter(encode_for_classifier(self.tokenizer, wholes, None))
        texts = [prompt_text(r.record.prompt, template, self.tokenizer, r.record.messages) for r in rows]
        prompts = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [
            (len(before), [len(next(encoded)) - len(before) for _ in row.answers])
            for row, before in zip(rows, prompts, strict=True)
        ]


def num_last(is_answer: Sequence[bool]) -> int:
    """How many tokens the last answer has: the run of True at the end.

    >>> num_last([False, True, False, True, True])
    2
    """
    return next((n for n, learnt in enumerate(reversed(is_answer)) if not learnt), len(is_answer))


# ---------------------------------------------------------------------------------------------- counting


@dataclass
class Side:
    """What is counted of the rows of one side."""

    lengths: dict[str, array[int]] = field(default_factory=dict)
    prompts: array[int] = field(default_factory=lambda: array("q"))
    """A hash of each row's prompt; 0 where it has none."""
    rows: array[int] = field(default_factory=lambda: array("q"))
    """A hash of each row's prompt and answers."""
    files: array[int] = field(default_factory=lambda: array("i"))
    numbers: array[int] = field(default_factory=lambda: array("q"))
    """Of each row the file, as a number, and its number in there."""
    scores: array[float] = field(default_factory=lambda: array("d"))
    num_answers: Counter[int] = field(default_factory=Counter)
    """Of rankings."""
    empty_prompts: int = 0
    too_long: int = 0
    too_short: int = 0
    chosen_longer: int = 0
    as_long: int = 0
    longer_wins: float = 0.0

    def add(self, row: Seen, lengths: Lengths, part: Part) -> None:
        of_prompt, of_answers = lengths
        self._length("prompt", of_prompt)
        wholes = [of_prompt + length for length in of_answers] or [of_prompt]
        if of_answers:
            self._length("whole", max(wholes))
        if part.max_length is not None:
            long = sum(length > part.max_length for length in wholes)
            # Of a ranking all answers go, of scored ones each by itself.
            self.too_long += long if part.purpose == "rm scores" else bool(long)
        short = sum(length < part.min_response_length for length in of_answers)
        self.too_short += short if part.purpose == "rm scores" else bool(short)
        self.scores.extend(row.scores)
        if part.purpose == "rm pairs":
            self._compare(of_answers)
            self.num_answers[len(of_answers)] += 1
        else:
            for length in of_answers:
                self._length("answer", length)

    def _compare(self, of_answers: Sequence[int]) -> None:
        chosen, rejected = of_answers[0], of_answers[-1]
        self._length("chosen", chosen)
        self._length("rejected", rejected)
        self.chosen_longer += chosen > rejected
        self.as_long += chosen == rejected
        pairs = [(better, worse) for n, better in enumerate(of_answers) for worse in of_answers[n + 1 :]]
        self.longer_wins += sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)

    def _length(self, name: str, length: int) -> None:
        if name not in self.lengths:
            self.lengths[name] = array("i")
        self.lengths[name].append(length)


class Check(Report):
    """Everything that is found out about the rows of a stage.

    Raises DataError for a source that can't be read at all.
    """

    def __init__(self, progress: Callable[[int], object] = lambda _: None) -> None:
        super().__init__()
        self.progress = progress
        """Told the number of rows that are counted, now and then."""
        self.sides: dict[str, Side] = {}
        self.num_bad: Counter[str] = Counter()
        self._files: dict[str, int] = {}
        self._part = "data"

    def bad_row(self, data: Rows, side: str, error: DataError) -> None:  # noqa: ARG002
        """Count a bad row, whatever the stage would do with it."""
        self.num_bad[self._name(side)] += 1
        if len(self.bad) < SHOWN:
            self.bad.append(str(error))

    def leave_out(self, side: str, reason: str) -> None:
        super().leave_out(self._name(side), reason)

    def _name(self, side: str) -> str:
        return side if self._part == "data" else self._part.removeprefix("data.")

    def count(self, part: Part, measure: Measure) -> None:
        """Read the rows of a part and count them."""
        self._part = part.role
        # Duplicates are counted, so none is left out, and none is made by reading a source twice.
        once = [source.model_copy(update={"weight": 1.0}) for source in part.rows.train]
        rows = part.rows.model_copy(update={"train": once, "deduplicate": False})
        found = records(rows, part.purpose, self, prompt_words=part.prompt_words, role=part.role)
        with ThreadPoolExecutor(1) as pool:
            # The tokenizer works on a chunk while the next one is read.
            waiting: Future[list[Lengths]] | None = None
            before: list[tuple[str, Seen]] = []
            for chunk in _chunks(self._seen(found, rows, part)):
                now = pool.submit(measure, [row for _, row in chunk])
                self._take(before, waiting, part)
                before, waiting = chunk, now
            self._take(before, waiting, part)

    def _seen(self, found: Iterable[tuple[str, Record]], rows: Rows, part: Part) -> Iterator[tuple[str, Seen]]:
        for side, record in found:
            try:
                seen = see(record, part, side)
            except DataError as error:
                self.bad_row(rows, side, error)
                continue
            if isinstance(seen, LeftOut):
                self.leave_out(side, seen.reason)
                continue
            counts = self.sides.setdefault(self._name(side), Side())
            key = record.key.strip()
            counts.prompts.append(hash(key) if key else 0)
            counts.rows.append(hash((record.prompt, *[answer.text for answer in record.answers])))
            counts.empty_prompts += not record.prompt.strip()
            file = record.where.rstrip("0123456789")
            counts.files.append(self._files.setdefault(file, len(self._files)))
            counts.numbers.append(int(record.where[len(file) :] or -1))
            yield self._name(side), seen

    def _take(self, chunk: Sequence[tuple[str, Seen]], waiting: Future[list[Lengths]] | None, part: Part) -> None:
        if waiting is not None:
            for (side, row), lengths in zip(chunk, waiting.result(), strict=True):
                self.sides[side].add(row, lengths, part)
            self.progress(sum(len(side.rows) for side in self.sides.values()))

    def places(self, side: Side, numbers: Iterable[int]) -> list[str]:
        """Where the rows of these numbers stand."""
        files = list(self._files)
        found = []
        for n in numbers:
            place, number = files[side.files[n]], side.numbers[n]
            found.append(place if number < 0 else f"{place}{number}")
        return found


def _chunks(rows: Iterable[tuple[str, Seen]]) -> Iterator[list[tuple[str, Seen]]]:
    chunk: list[tuple[str, Seen]] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


# ---------------------------------------------------------------------------------------------- figures


def figures(check: Check, parts: Sequence[Part], unit: str) -> dict[str, Any]:
    """Everything that was found, as `--json` prints it."""
    by_side = {"train": parts[0], "test": parts[0], **{part.role.removeprefix("data."): part for part in parts[1:]}}
    names = [name for name in by_side if name in {*check.sides, *check.num_bad, *check.left_out}]
    found: dict[str, Any] = {
        "for": parts[0].purpose,
        "formats": check.kinds,
        "unit": unit,
        "bad_rows": {"number": sum(check.num_bad.values()), "first": check.bad},
        "sides": {name: _side_figures(check, name, by_side[name]) for name in names},
    }
    if "train" in check.sides and "test" in check.sides:
        found["leaks"] = _leaks(check, check.sides["train"], check.sides["test"])
    return found


def _side_figures(check: Check, name: str, part: Part) -> dict[str, Any]:
    import numpy as np

    side = check.sides.get(name, Side())
    rows, prompts = _array(side.rows), _array(side.prompts)
    _, first = np.unique(rows, return_index=True)
    again = np.ones(len(rows), bool)
    again[first] = False
    different = prompts[first]
    _, times = np.unique(different[different != 0], return_counts=True)
    left_out = dict(check.left_out.get(name, {}))
    bad = check.num_bad[name]
    found: dict[str, Any] = {
        "read": len(rows) + sum(left_out.values()) + bad,
        "bad": bad,
        "left_out": left_out,
        "used": len(rows),
        "duplicates": {
            "rows": int(again.sum()),
            "first": check.places(side, np.flatnonzero(again)[:EXAMPLES].tolist()),
        },
        "prompts_of_several_rows": {"prompts": int((times > 1).sum()), "rows": int(times[times > 1].sum())},
        "empty_prompts": side.empty_prompts,
        "max_length": part.max_length,
        "too_long": side.too_long,
        "min_response_length": part.min_response_length,
        "too_short": side.too_short,
        "lengths": {key: _percentiles(_array(values)) for key, values in side.lengths.items()},
    }
    if side.num_answers:
        found["length_bias"] = _length_bias(side)
        found["answers_of_a_row"] = {str(n): side.num_answers[n] for n in sorted(side.num_answers)}
    if side.scores:
        found["scores"] = _score_figures(_array(side.scores))
    return found


def _percentiles(values: np.ndarray) -> dict[str, float]:
    """The smallest length that so many per cent of the rows do not exceed."""
    import numpy as np

    found = np.percentile(values, PERCENTILES, method="inverted_cdf")
    return {
        **{f"p{p}": int(value) for p, value in zip(PERCENTILES, found, strict=True)},
        "max": int(values.max()),
        "mean": float(values.mean()),
    }


def _length_bias(side: Side) -> dict[str, float]:
    """How much of what is preferred is length. A ranking's pairs are not independent: it counts as one trial."""
    n = sum(side.num_answers.values())
    low, high = wilson_interval(side.longer_wins, n)
    return {
        "chosen_longer": side.chosen_longer / n,
        "as_long": side.as_long / n,
        "mean_chosen": float(_array(side.lengths["chosen"]).mean()),
        "mean_rejected": float(_array(side.lengths["rejected"]).mean()),
        "longer_is_right": side.longer_wins / n,
        "low95": low,
        "high95": high,
    }


def _score_figures(scores: np.ndarray) -> dict[str, Any]:
    import numpy as np

    values, times = np.unique(scores, return_counts=True)
    found: dict[str, Any] = {"number": len(scores), "mean": float(scores.mean()), "std": float(scores.std())}
    if len(values) <= FEW_SCORES:
        return found | {"counts": {f"{v:g}": int(n) for v, n in zip(values, times, strict=True)}}
    middle = float(np.percentile(scores, 50, method="inverted_cdf"))
    return found | {"min": float(values[0]), "median": middle, "max": float(values[-1])}


def _leaks(check: Check, train: Side, test: Side) -> dict[str, Any]:
    import numpy as np

    prompts = _array(test.prompts)
    leaking = np.isin(prompts, _array(train.prompts)) & (prompts != 0)
    return {
        "rows": int(leaking.sum()),
        "prompts": len(np.unique(prompts[leaking])),
        "first": check.places(test, np.flatnonzero(leaking)[:EXAMPLES].tolist()),
    }


def _array(values: array[Any]) -> np.ndarray:
    import numpy as np

    return np.frombuffer(values, {"q": np.int64, "i": np.int32, "d": np.float64}[values.typecode])


# -------------------------------------------------------------------------------------------- the command


def check_data(parts: Sequence[Part], tokenizer_path: str | None, *, as_json: bool) -> None:
    """Read the rows of a stage and print what they are; raises RunError with the number of bad ones if there are any.

    Raises DataError for a source that can't be read at all, or that no stage's row is in.
    """
    tokenizer = None
    if tokenizer_path is not None:
        from rlhf_cli.models.load import load_tokenizer

        tokenizer = load_tokenizer(model_directory(tokenizer_path))
    console = new_console()
    # A line that counts, gone at the end, and only where the errors' output is a terminal.
    status = Console(stderr=True).status("reading")
    check = Check(lambda number: status.update(f"{number:,} rows"))
    try:
        with status:
            for part in parts:
                measure = InTokens(tokenizer, part, str(tokenizer_path)) if tokenizer is not None else in_words
                check.count(part, measure)
    except DataError:
        if not as_json:
            _print_bad_rows(console, check.bad, sum(check.num_bad.values()))
        raise
    found = figures(check, parts, "words" if tokenizer is None else "tokens")
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _print(console, found)
    bad = found["bad_rows"]["number"]
    if bad:
        raise RunError(f"{bad:,} bad row{'s' if bad > 1 else ''}. Mend or remove them, or set data.on_bad_row: skip")


def new_console() -> Console:
    """Prints to the standard output whatever text it is given, and colours on a terminal only."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(highlight=False, soft_wrap=True)


def printable(text: str, *, keep: str = "") -> str:
    r"""A text without what a terminal would act on, but for the characters of `keep`.

    >>> printable("a\x1b[2J\n"), printable("a\n", keep="\n")
    ('a\\x1b[2J\\n', 'a\n')
    """
    escaped = (c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)
    return "".join(escaped)


def _print(console: Console, found: dict[str, Any]) -> None:
    unit, sides = found["unit"], found["sides"]
    for path, name in found["formats"].items():
        console.print(Text(f"{printable(path)}: rows of {name}, read for {found['for']}"))
    _print_rows(console, sides, unit)
    for name, side in sides.items():
        if side["used"]:
            of = f" of {name}" if len(sides) > 1 else ""
            _print_lengths(console, f"Lengths{of} in {unit}", side["lengths"])
            if "length_bias" in side:
                _print_length_bias(console, f"Length bias{of}", side, unit)
            if "scores" in side:
                _print_scores(console, f"Scores{of}", side["scores"])
    if "leaks" in found:
        leaks = found["leaks"]
        text = f"{leaks['prompts']:,}, in {leaks['rows']:,} test rows" if leaks["rows"] else "none"
        console.print(Text.assemble(("\nPrompts on both sides: ", "bold"), (text, "yellow" if leaks["rows"] else "")))
        if leaks["rows"]:
            console.print(Text(f"    {_examples(leaks['first'], leaks['rows'])}"))
    _print_bad_rows(console, found["bad_rows"]["first"], found["bad_rows"]["number"])


def _print_rows(console: Console, sides: dict[str, Any], unit: str) -> None:
    """A table with a column for each side."""
    several = len(sides) > 1
    header = "".join(f"{name:>12}" for name in sides) if several else ""
    console.print(Text(f"\n{'Rows':38}{header}".rstrip(), "bold"))

    def line(what: str, numbers: Sequence[int], style: str = "", note: str = "") -> None:
        text = "".join(f"{number:>12,}" for number in numbers)
        console.print(Text.assemble(f"  {what:36}", (text, style if any(numbers) else ""), note))

    each = list(sides.values())
    line("read", [side["read"] for side in each])
    line("bad", [side["bad"] for side in each], "red")
    for reason in dict.fromkeys(reason for side in each for reason in side["left_out"]):
        line(f"left out: {reason}"[:36], [side["left_out"].get(reason, 0) for side in each], "yellow")
    line("used", [side["used"] for side in each])
    line("exact duplicates", [side["duplicates"]["rows"] for side in each], "yellow")
    for name, side in sides.items():
        if side["duplicates"]["rows"]:
            of = f"{name}: " if several else ""
            console.print(Text(f"    {of}{_examples(side['duplicates']['first'], side['duplicates']['rows'])}"))
    line("prompts with several different rows", [side["prompts_of_several_rows"]["prompts"] for side in each])
    line("  rows of these", [side["prompts_of_several_rows"]["rows"] for side in each])
    line("empty prompts", [side["empty_prompts"] for side in each], "yellow")
    lengths = {side["max_length"] for side in each} - {None}
    for length in sorted(lengths):
        line(f"longer than {length:,} {unit}", [s["too_long"] * (s["max_length"] == length) for s in each], "yellow")
    for length in sorted({side["min_response_length"] for side in each} - {0}):
        shorter = [s["too_short"] * (s["min_response_length"] == length) for s in each]
        line(f"answers shorter than {length:,} {unit}", shorter, "yellow")
    if lengths and unit == "words":
        console.print(Text("    a word is one token or more: give --tokenizer to count these"))


def _examples(first: Sequence[str], number: int) -> str:
    """The first places, those of one file by their number: `a.jsonl:3, 7, ...`."""
    told, last = [], ""
    for place in first:
        file = place.rstrip("0123456789")
        told.append(place[len(file) :] if file == last else printable(place))
        last = file
    return ", ".join([*told, *(["..."] if number > len(first) else [])])


def _print_lengths(console: Console, title: str, lengths: dict[str, Any]) -> None:
    """Percentiles in figures and drawn, all on one scale from 0 to the largest p99."""
    columns = [*(f"p{p}" for p in PERCENTILES), "max"]
    # Where no row has a prompt, there is nothing to add to the answer.
    shown = {name: values for name, values in lengths.items() if name != "whole" or lengths["prompt"]["max"]}
    shown = {name: values for name, values in shown.items() if values["max"] or name != "prompt"}
    scale = max(1, max(values["p99"] for values in shown.values())) if shown else 1
    room = WIDTH - 11 - 7 * len(columns) - 3
    thin, thick, middle = ("─", "━", "┃") if is_unicode(console) else ("-", "=", "|")
    legend = f"({thin} p1 to p99, {thick} p10 to p90, {middle} p50; 0 to {scale:,})"
    console.print(Text.assemble(("\n" + title, "bold"), (f"  {legend}", "dim")))
    console.print(Text(f"{'':11}" + "".join(f"{name:>7}" for name in columns), "dim"))
    for name, values in shown.items():
        numbers = "".join(f"{values[column]:>7}" for column in columns)
        at = {p: round(values[f"p{p}"] / scale * (room - 1)) for p in PERCENTILES}
        drawn = [" "] * room
        for start, end, sign in ((1, 99, thin), (10, 90, thick), (50, 50, middle)):
            drawn[at[start] : at[end] + 1] = sign * (at[end] - at[start] + 1)
        name = "together" if name == "whole" else name
        console.print(Text.assemble(f"  {name:9}{numbers}   ", ("".join(drawn).rstrip(), "cyan")))


def _print_length_bias(console: Console, title: str, side: dict[str, Any], unit: str) -> None:
    bias = side["length_bias"]
    n = sum(side["answers_of_a_row"].values())
    kinds = [f"{number:,} of {size} answers" for size, number in side["answers_of_a_row"].items()]
    console.print(Text(f"\n{title}", "bold"))
    if list(side["answers_of_a_row"]) != ["2"]:
        console.print(f"  rankings: {', '.join(kinds)}; chosen is the best, rejected the worst answer")
    console.print(f"  chosen is longer in {bias['chosen_longer']:.1%} of {n:,}, as long in {bias['as_long']:.1%}")
    console.print(f"  mean length: chosen {bias['mean_chosen']:.1f}, rejected {bias['mean_rejected']:.1f} {unit}")
    console.print(
        f"  to choose the longer answer is right in {bias['longer_is_right']:.1%} "
        f"(95 %: {bias['low95']:.1%} to {bias['high95']:.1%})"
    )


def _print_scores(console: Console, title: str, scores: dict[str, Any]) -> None:
    number = scores["number"]
    console.print(Text(f"\n{title}: {number:,}, mean {scores['mean']:.4g}, deviation {scores['std']:.4g}", "bold"))
    if "counts" not in scores:
        console.print(f"  smallest {scores['min']:g}, middle {scores['median']:g}, largest {scores['max']:g}")
        return
    block = "█" if is_unicode(console) else "#"
    for score, times in scores["counts"].items():
        bar = block * round(30 * times / number)
        console.print(Text.assemble(f"  {score:>12}{times:>12,}{times / number:>8.1%}   ", (bar, "cyan")))


def _print_bad_rows(console: Console, first: Sequence[str], number: int) -> None:
    if not number:
        return
    shown = f", the first {len(first)}" if number > len(first) else ""
    console.print(Text(f"\nBad rows: {number:,}{shown}", "bold red"))
    for line in first:
        console.print(Text(f"  {printable(line)}"))


def is_unicode(console: Console) -> bool:
    """Can the output hold more than ASCII?"""
    return console.encoding.lower().startswith("utf")
