"""`rlhf data check`: what a stage would read, counted before it runs.

Rows go through the views and encoders of the stage, so both count the same rows as kept and as skipped. A source's
`weight` is not applied: each row counts once. For each row the check keeps two hashes of 8 bytes, its lengths and its
place, so memory does not grow with the texts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from rlhf_cli.artifacts import model_directory
from rlhf_cli.commands.data_measure import InTokens, Measure, Measured, Side, encoder_of, in_words
from rlhf_cli.commands.data_report import figures, new_console, print_bad_rows, print_figures
from rlhf_cli.config.by_stage import load_stage_config, stage_of
from rlhf_cli.config.data import DataSource, Rows
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.console import Console
from rlhf_cli.data.encode import Limits, Skipped
from rlhf_cli.data.reading import records, row_digest
from rlhf_cli.data.records import Record
from rlhf_cli.data.report import DUPLICATE, Report
from rlhf_cli.data.views import Seen, StageRows, ppo_rows, probe_rows, ptx_rows, rm_purpose, rm_rows, see, sft_rows
from rlhf_cli.errors import DataError, RunError
from rlhf_cli.printing import say

For = Literal["sft", "rm", "rm-scores", "ppo"]
MAX_BAD_ROWS = 10
"""Bad rows that are printed."""
CHUNK = 1000
"""Rows that are measured together."""


# ----------------------------------------------------------------------------------------- which rows to read


def rows_of_source(
    source: DataSource,
    for_: For,
    *,
    test: str | None = None,
    max_length: int | None = None,
    on_bad_row: Literal["error", "skip"] = "skip",
) -> StageRows:
    """What a stage would read from a source. The file `test` is read with the same options."""
    held_out = [source.model_copy(update={"path": test})] if test is not None else None
    rows = Rows(train=[source], test=held_out, test_fraction=0, on_bad_row=on_bad_row)
    purposes = {"sft": "sft", "rm-scores": "rm scores", "ppo": "ppo"}
    return StageRows(
        rows,
        rm_purpose(source) if for_ == "rm" else purposes[for_],  # type: ignore[arg-type]
        limits=Limits(max_length) if max_length is not None else None,
        length_key="--max-length",
    )


def rows_of_config(path: Path, stage: str | None, overrides: Sequence[str]) -> tuple[list[StageRows], str | None]:
    """What the stage of a config reads, and the path of its tokenizer if that is on this disk."""
    config = load_stage_config(stage_of(path, stage), path, overrides)
    found: list[StageRows | None] = []
    if isinstance(config, PPOConfig):
        found = [ppo_rows(config), ptx_rows(config)]
    elif isinstance(config, RMConfig):
        found = [rm_rows(config), probe_rows(config)]
    elif isinstance(config, SFTConfig):
        found = [sft_rows(config)]
    model, _ = config.inputs.get("policy" if isinstance(config, PPOConfig) else "model", (None, None))
    # A model made from scratch has a tokenizer once its stage is finished.
    folder = Path(model_directory(model or config.stage_model(None, "sft")))
    is_there = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    return [rows for rows in found if rows is not None], str(folder) if is_there else None


# ----------------------------------------------------------------------------------------------- counting


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

    def skip(self, side: str, reason: str, needs: int | None = None) -> None:
        super().skip(self._name(side), reason, needs)

    def _name(self, side: str) -> str:
        return side if self._role == "data" else self._role.removeprefix("data.")

    def count(self, spec: StageRows, measure: Measure) -> None:
        """Read the rows of a stage and count them. Raises DataError for a source that cannot be read at all."""
        self._role = spec.role
        # A weight above 1 would read the same rows again. Duplicates are counted here, see `_views`.
        once = [source.model_copy(update={"weight": 1.0}) for source in spec.rows.train]
        rows = spec.rows.model_copy(update={"train": once, "deduplicate": False})
        found = records(rows, spec.purpose, self, prompt_words=spec.prompt_words, role=spec.role)
        with ThreadPoolExecutor(1) as pool:
            # The tokenizer works on one chunk while the next one is read.
            pending: Future[list[Measured]] | None = None
            before: list[tuple[str, Seen]] = []
            for chunk in _chunks(self._views(found, spec)):
                now = pool.submit(measure, [seen for _, seen in chunk])
                self._take(before, pending, spec)
                before, pending = chunk, now
            self._take(before, pending, spec)

    def _views(self, found: Iterable[tuple[str, Record]], spec: StageRows) -> Iterator[tuple[str, Seen]]:
        """(side, what the stage sees) of the rows that the stage would encode; the others are counted."""
        digests: set[tuple[str, bytes]] = set()
        for side, record in found:
            is_duplicate = False
            if spec.rows.deduplicate:
                digest = (side, row_digest(record))
                is_duplicate = digest in digests
                digests.add(digest)
            try:
                seen = see(record, spec, side)
            except DataError as error:
                self.bad_row(spec.rows, side, error)
                continue
            self.num_read[self._name(side)] += 1
            if isinstance(seen, Seen):
                self._register(side, seen)
            if is_duplicate:
                self.skip(side, DUPLICATE)
            elif isinstance(seen, Skipped):
                self.skip(side, seen.reason)
            else:
                yield side, seen

    def _register(self, side: str, seen: Seen) -> None:
        """Keep the hashes and the place of a row, to find duplicates and leaks."""
        record = seen.record
        counts = self.sides.setdefault(self._name(side), Side())
        key = record.key.strip()
        counts.prompts.append(hash(key) if key else 0)
        counts.rows.append(hash((record.prompt, *[answer.text for answer in record.answers])))
        counts.empty_prompts += not record.prompt.strip()
        file = record.where.rstrip("0123456789")
        counts.files.append(self.files.setdefault(file, len(self.files)))
        counts.numbers.append(int(record.where[len(file) :] or -1))

    def _take(self, chunk: Sequence[tuple[str, Seen]], pending: Future[list[Measured]] | None, spec: StageRows) -> None:
        """Add the measurements of a chunk."""
        if pending is None:
            return
        for (side, seen), measured in zip(chunk, pending.result(), strict=True):
            self.sides[self._name(side)].add(seen, measured, spec)
            self.kept[self._name(side)] += measured.kept
            for skipped in measured.skipped:
                self.skip(side, skipped.reason, skipped.needs)
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


def _chunks(rows: Iterable[tuple[str, Seen]]) -> Iterator[list[tuple[str, Seen]]]:
    chunk: list[tuple[str, Seen]] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


# -------------------------------------------------------------------------------------------- the command


def check_data(specs: Sequence[StageRows], tokenizer_path: str | None, *, as_json: bool) -> None:
    """Read the rows of a stage and print what they are.

    Raises RunError with the number of bad rows if there are any, and DataError for a source that cannot be read at all
    or that the stage cannot use.
    """
    tokenizer = None
    if tokenizer_path is not None:
        from rlhf_cli.models.load import load_tokenizer

        tokenizer_path = model_directory(tokenizer_path)
        tokenizer = load_tokenizer(tokenizer_path)
    console = new_console()
    # A line with the count so far, on the error output of a terminal. It disappears at the end.
    status = Console(stderr=True).status("reading")
    check = Check(lambda number: status.update(f"{number:,} rows"))
    try:
        with status:
            for spec in specs:
                encoder = encoder_of(spec, tokenizer, str(tokenizer_path)) if tokenizer is not None else None
                check.count(spec, InTokens(encoder) if encoder is not None else in_words)
    except DataError:
        if not as_json:
            print_bad_rows(console, check.bad, check.num_bad.total())
        raise
    found: dict[str, Any] = figures(check, specs, "words" if tokenizer is None else "tokens")
    if as_json:
        say(json.dumps(found, indent=2))
    else:
        print_figures(console, found)
    bad = check.num_bad.total()
    if bad:
        raise RunError(f"{bad:,} bad row{'s' if bad > 1 else ''}. Fix or remove them, or set data.on_bad_row: skip")
