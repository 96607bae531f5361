"""`rlhf data check`: what a stage would read, counted before it runs.

Rows go through the views and encoders of the stage, so both count the same rows as kept and as skipped. A source's
`weight` is not applied. Of each row the check keeps two hashes and its lengths, so long texts take no memory.
"""

from __future__ import annotations

import io
import json
import statistics
import sys
import textwrap
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from rlhf_cli.algorithms.counts import longer_wins, wilson_interval
from rlhf_cli.commands.options import SOURCE_HELP, For, Format, Keys, OnBadRow, SourceOptions
from rlhf_cli.config.by_stage import load_stage_config, stage_of
from rlhf_cli.config.data import DataSource, Rows
from rlhf_cli.data.encode import LengthLimits, Skipped, require_eos
from rlhf_cli.data.encoders import DemonstrationEncoder, PromptEncoder, RowEncoder
from rlhf_cli.data.records import Record, batched
from rlhf_cli.data.row_counts import DUPLICATE, MANY_SKIPPED, Report
from rlhf_cli.data.splits import SIDES
from rlhf_cli.data.stage_rows import StageRows, records, rm_purpose, row_digest, rows_of_stage
from rlhf_cli.data.words import glued
from rlhf_cli.errors import ConfigError, DataError, RunError
from rlhf_cli.printing import printable, say
from rlhf_cli.report.progress import Console
from rlhf_cli.run.artifacts import model_directory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def rows_of_source(
    source: DataSource,
    for_: For,
    *,
    test: str | None = None,
    max_length: int | None = None,
    on_bad_row: OnBadRow = "skip",
) -> StageRows:
    """What a stage would read from a source, and from the file `test` with the same options."""
    held_out = [source.model_copy(update={"path": test})] if test is not None else None
    rows = Rows(train=[source], test=held_out, test_fraction=0, on_bad_row=on_bad_row)
    purpose: Any = rm_purpose(source) if for_ == "rm" else for_.replace("-", " ")
    limits = LengthLimits(max_length) if max_length is not None else None
    return StageRows(rows, purpose, limits=limits, length_key="--max-length")


@dataclass(frozen=True)
class RowsOptions:
    """The rows to read as a stage would: a source, or the rows of a stage's config."""

    path: Annotated[str | None, typer.Argument(metavar="SOURCE", help=SOURCE_HELP)] = None
    for_: Annotated[
        For | None,
        typer.Option("--for", help="The stage to read for. rm-scores is rm with loss: mse or bce.", show_default=False),
    ] = None
    config: Annotated[Path | None, typer.Option("--config", help="A stage's YAML file instead of SOURCE.")] = None
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set a key of the source, such as limit=100 or split=test, or of the config. Repeatable.",
        ),
    ] = None
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="A model directory or hub id. Without it, lengths are in words.")
    ] = None
    max_length: Annotated[int | None, typer.Option("--max-length", min=1, help="Longest row that the stage takes.")] = (
        None
    )
    format: Format = None
    keys: Keys = None

    def read(self, test: str | None = None) -> tuple[list[StageRows], str | None]:
        """The rows, and the path of the tokenizer to measure them with, if one is known.

        `test` is a file of held-out rows. Raises ConfigError unless either a source or a config is named.
        """
        if self.path is not None and self.config is None:
            if self.for_ is None:
                raise ConfigError("--for: is missing, must be one of sft, rm, rm-scores, ppo: the stage to read for")
            source = SourceOptions(self.overrides, self.format, self.keys).source(self.path)
            return [rows_of_source(source, self.for_, test=test, max_length=self.max_length)], self.tokenizer
        if self.config is None or self.path is not None:
            raise ConfigError("give either SOURCE and --for, or --config")
        given = {"--key": self.keys, "--format": self.format, "--test": test, "--max-length": self.max_length}
        for option, value in given.items():
            if value is not None:
                raise ConfigError(f"{option}: does not go with --config. Change the file, or --set a key of it")
        stage = stage_of(self.config, "rm" if self.for_ == "rm-scores" else self.for_)
        config = load_stage_config(stage, self.config, self.overrides or [])
        tokenizer = self.tokenizer
        if tokenizer is None:
            model, _ = config.inputs.get("policy" if stage == "ppo" else "model", (None, None))
            # A model made from scratch has a tokenizer once its stage is finished.
            folder = Path(model_directory(model or config.stage_model(None, "sft")))
            if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
                tokenizer = str(folder)
        return rows_of_stage(config), tokenizer


def data_check(
    rows: RowsOptions,
    test: Annotated[
        str | None,
        typer.Option("--test", metavar="FILE", help="Held-out rows. Reports prompts that are in both files."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a stage would read: counts, lengths, duplicates, leaks, labels, bad rows.

    Exit code 0: every row can be read. 1: some rows cannot. 2: the source or an option is wrong.
    """
    specs, tokenizer_path = rows.read(test)
    encoders = encoders_of(specs, tokenizer_path)
    console = new_console()
    check = Check()
    try:
        # A line with the count so far, on the error output of a terminal. It disappears at the end.
        with Console(stderr=True).status("reading") as status:
            for spec, encoder in zip(specs, encoders, strict=True):
                for number in check.count(spec, in_words if encoder is None else partial(in_tokens, encoder)):
                    status.update(f"{number:,} rows")
    except DataError:
        if not as_json:
            print_bad_rows(console, check.bad, check.num_bad)
        raise
    found = figures(check, specs[0].purpose, "words" if tokenizer_path is None else "tokens")
    if as_json:
        say(json.dumps(found, indent=2))
    else:
        print_figures(console, found)
    if bad := check.num_bad:
        raise RunError(f"{bad:,} bad row{'s' if bad > 1 else ''}. Fix or remove them, or set data.on_bad_row: skip")


# ------------------------------------------------------------------------------------------- counts of a side

MAX_BAD_ROWS = 10
"""Bad rows that are printed."""
MAX_EXAMPLES = 3
"""Places that are named of duplicates, of leaks and of other rows to look at."""
CHUNK = 1000
"""Rows that are measured together."""
PERCENTILES = (1, 10, 50, 90, 99)
FEW_SCORES = 10
"""Up to this many different scores count as labels, and each is counted."""


@dataclass
class Remarkable:
    """Rows with something that you should look at, as `--json` prints them."""

    rows: int = 0
    first: list[str] = field(default_factory=list)
    example: str | None = None

    def add(self, where: str, example: str | None = None) -> None:
        self.rows += 1
        self.example = self.example or example
        if len(self.first) < MAX_EXAMPLES:
            self.first.append(where)


@dataclass(frozen=True)
class Measured:
    """The lengths of a row, and what the stage would make of it."""

    prompt: int
    answers: list[int]
    items: Sequence[object]
    """What the stage would use, or why not: one per scored answer, else one per row."""
    special_token: str | None = None
    """A special token in the row's own text."""


@dataclass
class Side:
    """Counts and lengths of the rows of one side."""

    spec: StageRows
    counts: Counter[str] = field(default_factory=Counter)
    lengths: dict[str, array[int]] = field(default_factory=lambda: defaultdict(lambda: array("i")))
    digests: set[bytes] = field(default_factory=set)
    """A hash of each different row."""
    prompts: Counter[int] = field(default_factory=Counter)
    """The hash of each prompt that is not empty, with its number of different rows."""
    places: list[tuple[int, str]] = field(default_factory=list)
    """(hash of the prompt, place) of each held-out row with a prompt."""
    scores: array[float] = field(default_factory=lambda: array("d"))
    num_answers: Counter[int] = field(default_factory=Counter)
    """Rankings by their number of answers."""
    longer_wins: float = 0.0
    remarkable: dict[str, Remarkable] = field(default_factory=lambda: defaultdict(Remarkable))
    """`duplicates`, `special_tokens`, and `glued`: rows whose prompt and answer meet without a space."""

    def register(self, record: Record, *, is_new: bool, is_held_out: bool) -> None:
        key = record.key.strip()
        self.counts["empty_prompts"] += not record.prompt.strip()
        if not is_new:
            self.remarkable["duplicates"].add(record.where)
        elif key:
            self.prompts[hash(key)] += 1
        if is_held_out and key:
            self.places.append((hash(key), record.where))

    def add(self, seen: Record, measured: Measured) -> None:
        """Count the lengths of a row, and what is remarkable about its texts."""
        spec, answers = self.spec, measured.answers
        self.counts["read"] += 1
        if measured.special_token is not None:
            self.remarkable["special_tokens"].add(seen.where, measured.special_token)
        if not seen.messages and spec.template != "chat":  # a chat template separates prompt and answer
            before, _, after = (spec.template or "{prompt}").partition("{prompt}")
            meetings = (glued(before + seen.prompt + after, answer) for answer in seen.texts)
            if (pair := next(filter(None, meetings), None)) is not None:
                self.remarkable["glued"].add(seen.where, pair)
        self.lengths["prompt"].append(measured.prompt)
        totals = [measured.prompt + length for length in answers] or [measured.prompt]
        if answers:
            self.lengths["whole"].append(max(totals))
        if spec.limits is not None:
            long = sum(length > spec.limits.max_length for length in totals)
            short = sum(length < spec.limits.min_response_length for length in answers)
            # A ranking is skipped as a whole, scored answers one by one.
            is_whole = spec.purpose != "rm scores"
            self.counts["too_long"] += bool(long) if is_whole else long
            self.counts["too_short"] += bool(short) if is_whole else short
        self.scores.extend(seen.scores)
        if spec.purpose == "rm pairs":
            self.lengths["chosen"].append(answers[0])
            self.lengths["rejected"].append(answers[-1])
            self.longer_wins += longer_wins(answers)
            self.num_answers[len(answers)] += 1
        elif answers:
            self.lengths["answer"].extend(answers)

    def figures(self, skipped: dict[str, int], used: int) -> dict[str, Any]:
        """Everything that was found on this side, as `--json` prints it."""
        import numpy as np

        limits, counts = self.spec.limits, self.counts
        times = [count for count in self.prompts.values() if count > 1]
        found: dict[str, Any] = {
            "read": counts["read"],
            "bad": counts["bad"],
            "skipped": skipped,
            "used": used,
            "duplicates": asdict(self.remarkable["duplicates"]),
            "prompts_of_several_rows": {"prompts": len(times), "rows": sum(times)},
            "empty_prompts": counts["empty_prompts"],
            "special_tokens": asdict(self.remarkable["special_tokens"]),
            "glued": asdict(self.remarkable["glued"]),
            "max_length": limits.max_length if limits is not None else None,
            "too_long": counts["too_long"],
            "min_response_length": limits.min_response_length if limits is not None else 0,
            "too_short": counts["too_short"],
            "lengths": {},
        }
        for name, lengths in self.lengths.items():
            # For each percentage, the smallest length that this share of the rows does not exceed.
            at = np.percentile(lengths, PERCENTILES, method="inverted_cdf")
            shares = {f"p{p}": int(length) for p, length in zip(PERCENTILES, at, strict=True)}
            found["lengths"][name] = {**shares, "max": max(lengths), "mean": sum(lengths) / len(lengths)}
        if n := self.num_answers.total():
            # A ranking's pairs are not independent: it is one trial.
            low, high = wilson_interval(self.longer_wins, n)
            chosen, rejected = (np.asarray(self.lengths[name]) for name in ("chosen", "rejected"))
            found["length_bias"] = {
                "chosen_longer": float((chosen > rejected).mean()),
                "as_long": float((chosen == rejected).mean()),
                "mean_chosen": found["lengths"]["chosen"]["mean"],
                "mean_rejected": found["lengths"]["rejected"]["mean"],
                "longer_is_right": self.longer_wins / n,
                "low95": low,
                "high95": high,
            }
            found["answers_of_a_row"] = {str(n): self.num_answers[n] for n in sorted(self.num_answers)}
        if scores := self.scores:
            found["scores"] = {"number": len(scores), "mean": statistics.fmean(scores), "std": float(np.std(scores))}
            # In the digits that are printed: 1/3 and 0.33333333 are one label.
            if len(labels := Counter(f"{value:g}" for value in sorted(scores))) <= FEW_SCORES:
                found["scores"]["counts"] = dict(labels)
            else:
                found["scores"] |= {"min": min(scores), "median": statistics.median_low(scores), "max": max(scores)}
        return found


def in_words(rows: Sequence[Record]) -> list[Measured | DataError]:
    """Lengths in words, separated by blanks. Length limits are in tokens, so no row is skipped for its length."""
    return [
        Measured(len(seen.prompt.split()), [len(text.split()) for text in seen.texts], seen.scores or [seen])
        for seen in rows
    ]


def in_tokens(encoder: RowEncoder, rows: Sequence[Record]) -> list[Measured | DataError]:
    """Lengths in tokens, EOS included, of the sequences that the stage's encoder makes; or why it makes none."""
    from rlhf_cli.data.answers import AnswerEncoder

    found: list[Measured | DataError] = []
    for seen, sequences in zip(rows, encoder.tried(rows), strict=True):
        if isinstance(sequences, DataError):
            found.append(sequences)
            continue
        answers = [sum(mask) for _, mask in sequences if mask]  # SFT learns every assistant turn, a prompt has no mask
        if isinstance(encoder, AnswerEncoder):
            answers = [encoder.answer_length(*each) for each in zip(seen.each(), sequences, strict=True)]
        prompt = len(sequences[-1][0]) - (answers[-1] if answers else 0)
        items = list(encoder.items(seen, sequences))
        found.append(Measured(prompt, answers, items, encoder.special_token_in(seen)))
    return found


def encoders_of(specs: Sequence[StageRows], path: str | None) -> Sequence[RowEncoder | None]:
    """The encoder with which a stage would read each of these rows; None if no tokenizer is known."""
    if path is None:
        return [None] * len(specs)
    from rlhf_cli.models.load import load_tokenizer

    tokenizer = load_tokenizer(path := model_directory(path))
    return [encoder_of(spec, tokenizer, path) for spec in specs]


def encoder_of(rows: StageRows, tokenizer: PreTrainedTokenizerBase, path: str) -> RowEncoder:
    """The encoder of rows. `path` is the model that the tokenizer belongs to."""
    if rows.purpose in ("sft", "ppo"):
        require_eos(tokenizer, path)
        return DemonstrationEncoder(tokenizer, rows) if rows.purpose == "sft" else PromptEncoder(tokenizer, rows)
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from rlhf_cli.data.answers import answer_encoder
    from rlhf_cli.models.heads import offer_classifier, reads_last_token

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        offer_classifier(type(config))
        # The classifier of this backbone, built without weights, says whether it is causal.
        with torch.device("meta"):
            is_causal = reads_last_token(AutoModelForSequenceClassification.from_config(config))
    except (OSError, ValueError):
        # A tokenizer without a model: tokenizers of encoder models rarely have an EOS.
        is_causal = tokenizer.eos_token_id is not None
    if is_causal:
        require_eos(tokenizer, path)
    return answer_encoder(tokenizer, rows, reads_last_token=is_causal)


class Check(Report):
    """Everything that `rlhf data check` counts. The sides are train, validation, test, probes and ptx."""

    def __init__(self) -> None:
        super().__init__()
        self.sides: dict[str, Side] = {}
        self.num_bad = 0
        self._spec: StageRows

    def bad_row(self, data: Rows, side: str, error: DataError) -> None:  # noqa: ARG002
        """Count a bad row, whatever the stage would do about it."""
        self._side(side)[1].counts.update(("read", "bad"))
        self.num_bad += 1
        if len(self.bad) < MAX_BAD_ROWS:
            self.bad.append(str(error))

    def _side(self, side: str) -> tuple[str, Side]:
        """The name of a side of the rows that are being read, and its counts."""
        name = side if self._spec.role == "data" else self._spec.role.removeprefix("data.")
        if name not in self.sides:
            self.sides[name] = Side(self._spec)
        return name, self.sides[name]

    def count(
        self, spec: StageRows, measure: Callable[[Sequence[Record]], list[Measured | DataError]]
    ) -> Iterator[int]:
        """Count the rows of a stage; yields their number now and then. Raises DataError for an unreadable source."""
        self._spec = spec
        for chunk in batched(self._views(spec), CHUNK):
            for (name, seen), measured in zip(chunk, measure([seen for _, seen in chunk]), strict=True):
                if isinstance(measured, DataError):
                    self.bad_row(spec.rows, name, measured)
                    continue
                self.sides[name].add(seen, measured)
                for item in measured.items:
                    if isinstance(item, Skipped):
                        self.skip(name, item.reason, item.needs)
                    else:
                        self.kept[name] += 1
            yield sum(side.counts["read"] for side in self.sides.values())

    def _views(self, spec: StageRows) -> Iterator[tuple[str, Record]]:
        """(name of the side, row) of the rows that the stage would encode; the others are counted."""
        for side, record in records(spec.unweighted(deduplicate=False), self):  # duplicates are counted here
            name, counted = self._side(side)
            digest = row_digest(record)
            is_new = digest not in counted.digests
            counted.digests.add(digest)
            try:
                seen = spec.view(record, side)
            except DataError as error:
                self.bad_row(spec.rows, side, error)
                continue
            if not isinstance(seen, Skipped):
                counted.register(record, is_new=is_new, is_held_out=name in ("validation", "test"))
            is_repeated = spec.rows.deduplicate and not is_new
            if is_repeated or isinstance(seen, Skipped):
                counted.counts["read"] += 1
                self.skip(name, seen.reason if isinstance(seen, Skipped) and not is_repeated else DUPLICATE)
            else:
                yield name, seen


def figures(check: Check, purpose: str, unit: str) -> dict[str, Any]:
    """Everything that was found, as `--json` prints it."""
    sides = {name: check.sides[name] for name in (*SIDES, "probes", "ptx") if name in check.sides}
    warnings = [check.warning(name, name, side.spec.length_key) for name, side in sides.items()]
    for name, side in sides.items():
        joined, used = side.remarkable["glued"], check.kept[name]
        if joined.rows > MANY_SKIPPED * used:
            template = json.dumps((side.spec.template or "{prompt}") + "\n", ensure_ascii=False)
            warnings.append(
                f"{name}: prompt and answer meet without a space in {joined.rows:,} of {used:,} rows "
                f"({joined.example}). data.prompt_template: {template} would separate them"
            )
    found: dict[str, Any] = {
        "for": purpose,
        "formats": check.kinds,
        "unit": unit,
        "bad_rows": {"number": check.num_bad, "first": check.bad},
        "warnings": [line for line in warnings if line is not None],
        "sides": {name: side.figures(check.skipped.get(name, {}), check.kept[name]) for name, side in sides.items()},
    }
    for name, key in (("validation", "validation_leaks"), ("test", "leaks")):
        if "train" in sides and name in sides:  # held-out rows whose prompt is in a training row too
            leaking = [(prompt, where) for prompt, where in sides[name].places if prompt in sides["train"].prompts]
            first = [where for _, where in leaking[:MAX_EXAMPLES]]
            found[key] = {"rows": len(leaking), "prompts": len({prompt for prompt, _ in leaking}), "first": first}
    return found


# --------------------------------------------------------------------------------------------- the screen

WIDTH = 80
"""Columns of the screen that the report needs."""


def new_console() -> Console:
    """A console on the standard output that can print any text, with colours only on a terminal."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(soft_wrap=True)


def print_figures(console: Console, found: dict[str, Any]) -> None:
    """Print the figures of `figures` for the eye."""
    unit, sides = found["unit"], found["sides"]
    for path, name in found["formats"].items():
        console.print(f"{printable(path)}: rows of {name}, read for {found['for']}")
    _print_rows(console, sides, unit, "answers used" if found["for"] == "rm scores" else "used")
    for name, side in sides.items():
        if side["used"]:
            of = f" of {name}" if len(sides) > 1 else ""
            _print_lengths(console, f"Lengths{of} in {unit}", side["lengths"])
            if "length_bias" in side:
                _print_length_bias(console, f"Length bias{of}", side, unit)
            if "scores" in side:
                _print_scores(console, f"Scores{of}", side["scores"])
    for title, key, name in (
        ("Prompts on both sides", "leaks", "test"),
        ("Prompts of training and validation", "validation_leaks", "validation"),
    ):
        if (leaks := found.get(key)) is None:
            continue
        text = f"{leaks['prompts']:,}, in {leaks['rows']:,} {name} rows" if leaks["rows"] else "none"
        console.print(Text.assemble((f"\n{title}: ", "bold"), (text, "yellow" if leaks["rows"] else "")))
        if leaks["rows"]:
            console.print(f"    {_examples(leaks['first'], leaks['rows'])}")
    for line in found["warnings"]:
        text = textwrap.fill(f"Warning: {printable(line)}", WIDTH, break_long_words=False, break_on_hyphens=False)
        console.print(f"\n{text}", style="yellow")
    print_bad_rows(console, found["bad_rows"]["first"], found["bad_rows"]["number"])


def _print_rows(console: Console, sides: dict[str, Any], unit: str, used: str) -> None:
    each, several = list(sides.values()), len(sides) > 1
    header = "".join(f"{name:>12}" for name in sides) if several else ""
    console.print(f"\n{'Rows':38}{header}".rstrip(), style="bold")

    def line(label: str, numbers: Sequence[int], style: str = "") -> None:
        text = "".join(f"{number:>12,}" for number in numbers)
        console.print(Text.assemble(f"  {label:36}", (text, style if any(numbers) else "")))

    def remarkable(label: str, key: str, *, is_always: bool = True) -> None:
        """The number of such rows, and below it the first places of each side that has some, with an example."""
        if is_always or any(side[key]["rows"] for side in each):
            line(label, [side[key]["rows"] for side in each], "yellow")
        for name, side in sides.items():
            if (one := side[key])["rows"]:
                example = f" ({printable(one['example'])})" if one["example"] else ""
                console.print(f"    {f'{name}: ' if several else ''}{_examples(one['first'], one['rows'])}{example}")

    line("read", [side["read"] for side in each])
    line("bad", [side["bad"] for side in each], "red")
    for reason in dict.fromkeys(reason for side in each for reason in side["skipped"]):
        line(f"skipped: {reason}"[:36], [side["skipped"].get(reason, 0) for side in each], "yellow")
    line(used, [side["used"] for side in each])
    remarkable("exact duplicates", "duplicates")
    line("prompts with several different rows", [side["prompts_of_several_rows"]["prompts"] for side in each])
    line("  rows of these", [side["prompts_of_several_rows"]["rows"] for side in each])
    line("empty prompts", [side["empty_prompts"] for side in each], "yellow")
    remarkable("special tokens in the text", "special_tokens", is_always=False)
    remarkable("answer meets prompt without space", "glued", is_always=False)
    for limit, count, label in (
        ("max_length", "too_long", "longer than"),
        ("min_response_length", "too_short", "answers shorter than"),
    ):
        for length in sorted({side[limit] for side in each} - {None, 0}):
            numbers = [side[count] if side[limit] == length else 0 for side in each]
            line(f"{label} {length:,} {unit}", numbers, "yellow")
    if unit == "words" and any(side["max_length"] for side in each):
        console.print("    a word is one token or more: pass --tokenizer to count tokens")


def _examples(first: Sequence[str], number: int) -> str:
    """The first places. Further ones of the same file are only a number: `a.jsonl:3, 7, ...`."""
    shown, last = [], ""
    for place in first:
        file = place.rstrip("0123456789")
        shown.append(place[len(file) :] if file == last else printable(place))
        last = file
    return ", ".join([*shown, *(["..."] if number > len(first) else [])])


def _print_lengths(console: Console, title: str, lengths: dict[str, Any]) -> None:
    """Percentiles as numbers and as bars, all on one scale from 0 to the largest p99."""
    columns = [*(f"p{p}" for p in PERCENTILES), "max"]
    # If no row has a prompt, "whole" is the same as the answer.
    hidden = () if lengths["prompt"]["max"] else ("prompt", "whole")
    shown = {name: values for name, values in lengths.items() if name not in hidden}
    scale = max([1, *(values["p99"] for values in shown.values())])
    room = WIDTH - 11 - 7 * len(columns) - 3
    thin, thick, middle = ("-", "=", "|") if console.options.ascii_only else ("─", "━", "┃")
    legend = f"({thin} p1 to p99, {thick} p10 to p90, {middle} p50; 0 to {scale:,})"
    console.print(Text.assemble(("\n" + title, "bold"), (f"  {legend}", "dim")))
    console.print(f"{'':11}" + "".join(f"{name:>7}" for name in columns), style="dim")
    for name, values in shown.items():
        numbers = "".join(f"{values[column]:>7}" for column in columns)
        at = {p: round(values[f"p{p}"] / scale * (room - 1)) for p in PERCENTILES}
        drawn = [" "] * room
        for start, end, sign in ((1, 99, thin), (10, 90, thick), (50, 50, middle)):
            drawn[at[start] : at[end] + 1] = sign * (at[end] - at[start] + 1)
        name = "together" if name == "whole" else name
        console.print(Text.assemble(f"  {name:9}{numbers}   ", ("".join(drawn).rstrip(), "cyan")))


def _print_length_bias(console: Console, title: str, side: dict[str, Any], unit: str) -> None:
    bias, sizes = side["length_bias"], side["answers_of_a_row"]
    console.print(f"\n{title}", style="bold")
    if list(sizes) != ["2"]:
        kinds = ", ".join(f"{number:,} of {size} answers" for size, number in sizes.items())
        console.print(f"  rankings: {kinds}; chosen is the best, rejected the worst answer")
    console.print(
        f"  chosen is longer in {percent(bias['chosen_longer'])} of {sum(sizes.values()):,}, "
        f"equally long in {percent(bias['as_long'])}\n"
        f"  mean length: chosen {bias['mean_chosen']:.1f}, rejected {bias['mean_rejected']:.1f} {unit}\n"
        f"  choosing the longer answer would be right in {percent(bias['longer_is_right'])} of pairs\n"
        f"  (95 % interval: {percent(bias['low95'])} to {percent(bias['high95'])})"
    )


def _print_scores(console: Console, title: str, scores: dict[str, Any]) -> None:
    number = scores["number"]
    text = f"\n{title}: {number:,}, mean {scores['mean']:.4g}, standard deviation {scores['std']:.4g}"
    console.print(text, style="bold")
    if "counts" not in scores:
        console.print(f"  smallest {scores['min']:g}, median {scores['median']:g}, largest {scores['max']:g}")
        return
    block = "#" if console.options.ascii_only else "█"
    for score, times in scores["counts"].items():
        bar = block * round(30 * times / number)
        console.print(Text.assemble(f"  {score:>12}{times:>12,}{percent(times / number):>9}   ", (bar, "cyan")))


def print_bad_rows(console: Console, first: Sequence[str], number: int) -> None:
    if number:
        shown = f", the first {len(first)}" if number > len(first) else ""
        console.print(f"\nBad rows: {number:,}{shown}", style="bold red")
        for line in first:
            console.print(f"  {printable(line)}")


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"
