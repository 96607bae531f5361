"""Resumable output of `rlhf generate`, `rlhf data generate` and `rlhf data score`: one line for each item.

    OUT.jsonl             the rows, one JSON object a line, written as they arrive
    OUT.jsonl.dropped     the items without a row and why, one JSON object a line
    OUT.jsonl.settings    the settings that the rows were made with

Every input item becomes one line of one of the first two files, in order, so that their lengths say where a run
resumes.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Protocol, TypeVar

from rlhf_cli.artifacts import differences, fingerprint
from rlhf_cli.config.data import DataSource
from rlhf_cli.data_files import find_files
from rlhf_cli.digests import digest_file
from rlhf_cli.errors import ArtifactError, ConfigError, DataError, Interrupted, RunError
from rlhf_cli.files import read_text
from rlhf_cli.rollout.requests import Failure
from rlhf_cli.training.checkpoint_files import write_text
from rlhf_cli.training.progress import Display

if TYPE_CHECKING:
    from rlhf_cli.data.formats import Purpose
    from rlhf_cli.data.records import Record

OnBadRow = Literal["error", "skip"]
OutputRow = dict[str, Any]
T = TypeVar("T")
W = TypeVar("W")
W_co = TypeVar("W_co", covariant=True)


@dataclass(frozen=True)
class Dropped:
    """An item without a row."""

    reason: str
    """A few words, the same for items of the same kind, so that they can be counted."""
    columns: dict[str, Any] = field(default_factory=dict)
    """More about the item, for the file of dropped items."""


Outcome = OutputRow | Dropped | Failure


# ------------------------------------------------------------------------------------------- items


class Opens(Protocol[W_co]):
    """The model that is asked for each item, not loaded yet: `WriterOptions` for example."""

    @property
    def server(self) -> str | None:
        """The address of its server; None for a model on this machine."""

    @property
    def chunk(self) -> int:
        """Number of items per call."""

    def open(self) -> W_co:
        """Load it."""


def items(
    source: DataSource,
    purpose: Purpose,
    on_bad_row: OnBadRow,
    check: Callable[[Record], None] | None = None,
    *,
    prompt_words: int = 0,
) -> Iterator[Record | Dropped]:
    """The rows of a source as records; the first `prompt_words` words of a plain text are its prompt.

    A row that cannot be read, or for which `check` raises DataError, stops the command or, with "skip", is Dropped.
    """
    from rlhf_cli.data.formats import read_record, recognise
    from rlhf_cli.data.rows import BadRow
    from rlhf_cli.data.sources import read_rows

    format_ = None
    for row in read_rows(source):
        try:
            if isinstance(row, BadRow):
                raise DataError(f"{row.where}: {row.reason}")
            if format_ is None:
                format_ = recognise(row, source, purpose)
            record = read_record(row, format_, source, prompt_words=prompt_words)
            if check is not None:
                check(record)
        except DataError as error:
            # If no format fits the first row, the file is the wrong one; skipping would drop every row.
            if on_bad_row == "error" or (format_ is None and not isinstance(row, BadRow)):
                raise
            yield Dropped("cannot be read", {"detail": str(error)})
            continue
        yield record


def each_item(
    output: Output,
    read: Callable[[], Iterator[Record | Dropped]],
    num: int | None,
    options: Opens[W],
    answer: Callable[[W, Sequence[tuple[int, Record]]], list[Outcome]],
    display: Display,
) -> None:
    """Write a line for each of the first `num` items that has none yet.

    All items are read once before the model is asked, so that a bad row costs nothing. `answer` turns records with
    their numbers into outcomes.
    """
    total = sum(1 for _ in islice(read(), num))
    done = output.num_rows + output.num_dropped
    if done >= total:
        return
    writer = options.open()
    display.begin(total, "row", done)
    for number, chunk in enumerate(batched(islice(read(), num), options.chunk)):
        begin = number * options.chunk
        if begin + len(chunk) <= done:
            continue
        # A local model answers the rows of a started chunk again: the same batches give the same bits. A server is
        # asked for the missing rows only: its answers cost and would differ anyway.
        skip = max(0, done - begin)
        first = skip if options.server else 0
        records = [(begin + n, item) for n, item in enumerate(chunk) if n >= first and not isinstance(item, Dropped)]
        found = dict(zip((n for n, _ in records), answer(writer, records), strict=True))
        outcomes = [item if isinstance(item, Dropped) else found.get(begin + n) for n, item in enumerate(chunk)]
        output.refuse_all_failed(list(found.values()))
        for item, outcome in zip(chunk[skip:], outcomes[skip:], strict=True):
            assert outcome is not None
            output.write(outcome, {} if isinstance(item, Dropped) else {"where": item.where})
        display.step(output.num_rows + output.num_dropped, [f"dropped {output.num_dropped}"])
    display.end()


def batched(things: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of `size` things; the last one may be shorter."""
    things = iter(things)
    while batch := list(islice(things, size)):
        yield batch


def data_digest(source: DataSource) -> dict[str, Any]:
    """Everything that decides which rows a source gives; of local files their content."""
    files = find_files(source.path)
    digest = hashlib.sha256("".join(digest_file(file) for file in files).encode()).hexdigest()
    options = source.model_dump(mode="json", exclude={"path", "limit"}, exclude_defaults=True)
    return {"rows": digest if files else fingerprint(source.path, source.revision), **options}


def prompt_column(record: Record) -> str | list[dict[str, str]]:
    """The `prompt` column of a row: text, or the messages of a conversation."""
    if record.messages:
        return [{"role": m.role, "content": m.content} for m in record.messages]
    return record.prompt


# ------------------------------------------------------------------------------------------- the files


class Output:
    """The rows and dropped items of one run, one line each; a later run with the same settings resumes them.

    Raises ArtifactError for files that another program made or is writing, links, and files that cannot be written.
    Raises ConfigError when the settings differ from those of the existing rows, unless `restart` discards them. Without
    `keep_dropped`, other settings discard dropped items too, if no row exists.
    """

    def __init__(self, path: Path, settings: dict[str, Any], *, restart: bool = False, keep_dropped: bool = True):
        self.path, self.restart, self.keep_dropped = path, restart, keep_dropped
        self.dropped_path = path.with_name(path.name + ".dropped")
        self.settings_path = path.with_name(path.name + ".settings")
        self.settings = json.loads(json.dumps(settings))
        self.num_rows = self.num_dropped = 0
        self._files: list[BinaryIO] = []

    def __enter__(self) -> Output:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._files = [self._open(self.path), self._open(self.dropped_path)]
            self._begin()
        except OSError as error:
            self._close()
            raise self._not_writable(error) from None
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(
                f"interrupted: {self.num_rows} rows are in {self.path}. Run the same command to resume", 130
            ) from None

    def _open(self, path: Path) -> BinaryIO:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644), "r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # on the file itself: no lock file beside the rows
        except BlockingIOError:
            file.close()
            raise ArtifactError(f"{path}: another process is writing it. Wait for it, or give another --out") from None
        return file

    def _begin(self) -> None:
        """Start empty files, or check that existing ones have these settings and cut off incomplete lines."""
        rows, drops = self._files
        before = self._settings_before()
        empty = all(os.fstat(file.fileno()).st_size == 0 for file in self._files)
        if before is None and not empty:
            raise ArtifactError(
                f"{self.path}: already exists, but its settings file {self.settings_path.name} is missing or cannot "
                "be read. Remove the rows, or give another --out"
            )
        changed = differences(before, self.settings) if before is not None else []
        no_rows = os.fstat(rows.fileno()).st_size == 0
        if self.restart or (changed and no_rows and not self.keep_dropped):
            # Settings first: without them, rows that a kill leaves behind are never taken for rows of this run.
            self.settings_path.unlink(missing_ok=True)
            rows.truncate(0)
            drops.truncate(0)
            empty = True
        if empty:
            write_text(self.settings_path, json.dumps(self.settings, indent=2) + "\n")
        elif before is not None and changed:
            raise ConfigError(
                f"{self.path}: was made with other settings: {self._changes(before, changed)}. Restore them, give "
                "another --out, or pass --restart to start over"
            )
        self.num_rows, self.num_dropped = cut_incomplete_line(rows), cut_incomplete_line(drops)

    def _settings_before(self) -> dict[str, Any] | None:
        try:
            values = json.loads(read_text(self.settings_path))
        except (FileNotFoundError, ValueError):
            return None
        return values if isinstance(values, dict) else None

    def _changes(self, before: dict[str, Any], changed: list[str]) -> str:
        shown = []
        for key in changed:
            old, new = (_at(values, key) for values in (before, self.settings))
            short = all(isinstance(v, int | float | None) or (isinstance(v, str) and len(v) < 60) for v in (old, new))
            shown.append(f"{key} ({json.dumps(old)}, now {json.dumps(new)})" if short else key)
        return ", ".join(shown)

    def write(self, outcome: Outcome, about: dict[str, Any]) -> None:
        """Write a row, or why there is none together with `about`, which identifies the item.

        Raises RunError for a Failure that ends the run.
        """
        if isinstance(outcome, dict):
            self._line(0, outcome)
            self.num_rows += 1
            return
        if isinstance(outcome, Dropped):
            line = {"reason": outcome.reason, **about, **outcome.columns}
        elif outcome.fatal:
            raise RunError(f"{about['where']}: {outcome.reason}" if "where" in about else outcome.reason)
        else:
            line = {"reason": "no answer", **about, "detail": outcome.reason}
        self._line(1, line)
        self.num_dropped += 1

    def refuse_all_failed(self, outcomes: Sequence[Any]) -> None:
        """Raise RunError if the very first items all failed: then the cause is not a single row."""
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        if any(failure.fatal for failure in failures):
            return  # `write` raises it
        if self.num_rows + self.num_dropped == 0 and failures and len(failures) == len(outcomes):
            raise RunError(f"{self.path}: none of the first {len(failures)} rows was answered: {failures[0].reason}")

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows written so far."""
        return _read(self.path)

    def drops(self) -> Iterator[dict[str, Any]]:
        """The dropped items written so far."""
        return _read(self.dropped_path)

    def last_lines(self) -> list[dict[str, Any]]:
        """The last row and the last dropped item, as far as they exist."""
        return [*_last(self.rows()), *_last(self.drops())]

    def cut_from(self, key: str, value: int) -> None:
        """Remove all lines from the first one whose `key` is `value` or more. The values of `key` never decrease."""
        for file in self._files:
            file.seek(0)
            end = 0
            for line in file:
                if json.loads(line)[key] >= value:
                    break
                end += len(line)
            file.truncate(end)
        self.num_rows, self.num_dropped = map(cut_incomplete_line, self._files)

    def sync(self) -> None:
        """Wait until all lines are on the disk, where a power failure does not lose them."""
        try:
            for file in self._files:
                os.fsync(file.fileno())
        except OSError as error:
            raise self._not_writable(error) from None

    def summary_of_dropped(self) -> str:
        """How many items were dropped and why, to end a sentence; "" if none was."""
        reasons = Counter(drop["reason"] for drop in self.drops())
        if not reasons:
            return ""
        counts = ", ".join(f"{number} {reason}" for reason, number in reasons.most_common())
        return f"; {self.num_dropped} dropped ({counts}), see {self.dropped_path.name}"

    def require_rows(self) -> None:
        """Raise RunError if every item was dropped: a run that wrote nothing has failed."""
        if not self.num_rows:
            raise RunError(
                f"{self.path}: no row was written{self.summary_of_dropped()}. Change the model, the template or the "
                f"data, and {'start over with --restart' if self.keep_dropped else 'run it again'}"
            )

    def _line(self, which: int, values: dict[str, Any]) -> None:
        try:
            self._files[which].write(json_line(values))
            self._files[which].flush()
        except OSError as error:
            raise self._not_writable(error) from None

    def _not_writable(self, error: OSError) -> ArtifactError:
        return ArtifactError(
            f"{error.filename or self.path}: cannot be written ({error.strerror or error}). Free disk space, remove "
            "the obstacle, or give another --out"
        )

    def _close(self) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):  # a full disk was reported when the line was written
                file.close()


def refuse_own_output(source: DataSource, out: Path) -> None:
    """Raise ConfigError if the output would be a file of the source, or is not a .jsonl file."""
    if not out.name.endswith(".jsonl"):
        raise ConfigError(f"--out: {out}: must end in .jsonl, the rows are written as JSON Lines")
    target, source_path = out.absolute(), Path(source.path).absolute()
    inside = target.parent == source_path or fnmatch.fnmatch(str(target), str(source_path))
    if inside or target.resolve() == source_path.resolve():
        raise ConfigError(f"--out: {out}: would be one of the files of {source.path}. Write it to another folder")


def json_line(values: dict[str, Any]) -> bytes:
    """The values as one line of JSON."""
    try:
        line = json.dumps(values, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:  # a lone surrogate in a column of the input row
        line = json.dumps(values, default=str).encode()
    return line + b"\n"


def cut_incomplete_line(file: BinaryIO) -> int:
    """Cut off an incomplete last line, which a killed run may leave; returns the number of lines."""
    file.seek(0)
    count = end = 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        count, end = count + 1, end + len(line)
    file.truncate(end)
    return count


def _read(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in file:
            yield json.loads(line)


def _last(lines: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    last: list[dict[str, Any]] = []
    for line in lines:
        last = [line]
    return last


def _at(values: dict[str, Any], dotted: str) -> Any:
    value: Any = values
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value
