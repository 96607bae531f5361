"""Rows that a command writes and a later one resumes: `rlhf generate`, `data generate`, `data score` and `label`.

    OUT.jsonl             the rows, one JSON object a line, written as they arrive
    OUT.jsonl.dropped     the items without a row and why, one JSON object a line
    OUT.jsonl.settings    the settings that the rows were made with

Every input item becomes one line of the first two files, in order, so their lengths say where a run resumes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from rlhf_cli.commands.options import OnBadRow
from rlhf_cli.config.data import DataSource
from rlhf_cli.data.formats import Purpose
from rlhf_cli.data.paths import find_files
from rlhf_cli.data.read import read_records
from rlhf_cli.data.records import Record, batched, turns_of
from rlhf_cli.errors import ArtifactError, ConfigError, DataError, Interrupted, RunError
from rlhf_cli.files import digest_file, json_object, read_object
from rlhf_cli.report.progress import Display
from rlhf_cli.run.artifacts import differences, fingerprint
from rlhf_cli.run.checkpoint_files import write_text

if TYPE_CHECKING:
    from rlhf_cli.processes.distributed import World

M = TypeVar("M")
T = TypeVar("T")
OutputRow = dict[str, Any]


@dataclass(frozen=True)
class Dropped:
    reason: str
    """A few words, the same for items of the same kind, so that they can be counted."""
    columns: dict[str, Any] = field(default_factory=dict)
    """More about the item, for the file of dropped items."""


@dataclass(frozen=True)
class Failure:
    """Why a request has no answer. If it is fatal, no further one can be answered, and the run must stop."""

    reason: str
    fatal: bool = False


Outcome = OutputRow | Dropped | Failure


# ------------------------------------------------------------------------------------------- items


def items(
    source: DataSource,
    purpose: Purpose,
    on_bad_row: OnBadRow,
    check: Callable[[Record], object] = lambda _record: None,
    *,
    prompt_words: int = 0,
) -> Iterator[Record | Dropped]:
    """The rows of a source as records; the first `prompt_words` words of a plain text are its prompt.

    A row that cannot be read, or for which `check` raises DataError, stops the command or, with "skip", is Dropped.
    """
    for record in read_records(source, purpose, prompt_words=prompt_words):
        try:
            if isinstance(record, DataError):
                raise record
            check(record)
            yield record
        except DataError as error:
            if on_bad_row == "error":
                raise
            yield Dropped("cannot be read", {"detail": str(error)})


def require_answer(record: Record) -> None:
    """Raise DataError for a row without an answer, as `check` of `items`."""
    if not record.answers:
        raise DataError(f"{record.where}: the row has no answer to score. Write answers with `rlhf data generate`")


def each_item(
    output: Output | None,
    read: Callable[[], Iterator[Record | Dropped]],
    open_model: Callable[[], M],
    answer: Callable[[M, Sequence[tuple[int, Record]]], list[Outcome]],
    display: Display,
    *,
    chunk: int,
    only_missing: bool = False,
    shared_on: str | None = None,
) -> None:
    """Write a line for each item that has none yet, in chunks that begin at multiples of `chunk`.

    `answer` turns numbered records into outcomes. A started chunk is answered as a whole, so that a local model sees
    the same batches and gives the same bits; with `only_missing` just the rows without a line, because the answers of a
    server cost and would differ anyway.

    With `shared_on`, a device, each of several processes answers a chunk at the same time, and the first one, which
    alone has an `output`, writes them all. So the lines do not depend on the number of processes.
    """
    total = sum(1 for _ in read())  # reads every row before the model is asked, so that a bad row costs nothing
    done = output.num_rows + output.num_dropped if output is not None else 0
    world: World | None = None
    rank, size = 0, 1
    if shared_on is not None:
        from rlhf_cli.processes import distributed

        world = distributed.start(shared_on)
        distributed.at_step("generate")
        rank, size, done = world.rank, world.size, world.gather(done)[0]
    if done >= total:
        return
    model = open_model()

    def answered(numbered: Sequence[tuple[int, Record | Dropped]]) -> list[Outcome]:
        first = done if only_missing else 0
        records = [(n, item) for n, item in numbered if n >= first and not isinstance(item, Dropped)]
        found = dict(zip((n for n, _ in records), answer(model, records), strict=True))
        return [item if isinstance(item, Dropped) else found[n] for n, item in numbered if n >= done]

    unfinished = (some for some in batched(enumerate(read()), chunk) if some[-1][0] >= done)
    with display.counting(total, "row", done):
        for together in batched(unfinished, size):  # a chunk for each process; at the end there may be fewer
            outcomes = answered(together[rank]) if rank < len(together) else []
            if world is not None:
                world.barrier("the responses")  # one chunk may take much longer than another
            everyone = [outcomes] if world is None else world.gather(outcomes)
            for numbered, outcomes in zip(together, everyone, strict=False):
                if output is None:
                    continue
                pairs = list(zip([item for n, item in numbered if n >= done], outcomes, strict=True))
                output.refuse_all_failed([outcome for item, outcome in pairs if not isinstance(item, Dropped)])
                for item, outcome in pairs:
                    output.write(outcome, {} if isinstance(item, Dropped) else {"where": item.where})
                display.step(output.num_rows + output.num_dropped, [f"dropped {output.num_dropped}"])
        if world is not None:
            world.barrier("the last rows")


def data_digest(source: DataSource) -> dict[str, Any]:
    """Everything that decides which rows a source gives; of local files their content."""
    files = find_files(source.path)
    digest = hashlib.sha256("".join(digest_file(file) for file in files).encode()).hexdigest()
    options = source.model_dump(mode="json", exclude={"path", "limit"}, exclude_defaults=True)
    return {"rows": digest if files else fingerprint(source.path, source.revision), **options}


def refuse_own_output(source: DataSource, out: Path) -> None:
    """Raise ConfigError if the output would be a file of the source, or is not a .jsonl file."""
    if not out.name.endswith(".jsonl"):
        raise ConfigError(f"--out: {out}: must end in .jsonl, the rows are written as JSON Lines")
    target, named = Path(os.path.realpath(out)), Path(os.path.realpath(source.path))
    # PurePath's `match` knows no `**`: try each number of folders.
    globs = (str(named).replace("**/", "*/" * depth) for depth in range(len(target.parts)))
    if named in (target, target.parent) or any(map(target.match, globs)):
        raise ConfigError(f"--out: {out}: would be one of the files of {source.path}. Write it to another folder")


def prompt_column(record: Record) -> str | list[dict[str, str]]:
    """The `prompt` column of a row: text, or the messages of a conversation."""
    return turns_of(record.messages) if record.messages else record.prompt


def text_of(record: Record, answer: str) -> str:
    """An answer for a row; in a conversation, without the space that the transcript puts before it."""
    return answer.removeprefix(" ") if record.messages else answer


def with_columns(record: Record, new: dict[str, Any]) -> OutputRow:
    """The input row followed by the new columns. An input column with the name of a new one becomes `<name>_before`.

    So do `score` and `scores` and, beside new `scores`, `chosen` and `rejected`, which would be read instead. A prompt
    or response that equals the new one, and scores that are all null, are dropped.
    """
    row = {}
    replaced = {"score", "scores", *new, *(("chosen", "rejected") if "scores" in new else ())}
    for name, value in record.columns.items():
        same = name == "ended" or (name in ("prompt", "response", "responses") and value == new.get(name))
        empty = name == "scores" and isinstance(value, list) and all(score is None for score in value)
        if name not in replaced:
            row[name] = value
        elif not same and not empty:
            row[f"{name}_before"] = value
    return row | new


def json_line(values: dict[str, Any], indent: int | None = None) -> bytes:
    """The values as one line of JSON, or as several with an indent.

    A row may hold a lone surrogate, which is escaped, and NaN or infinity, which become null: JSON has none.

    >>> print(json_line({"half a character": "\\ud800", "x": float("nan")}).decode(), end="")
    {"half a character": "\\ud800", "x": null}
    """
    text = json.dumps(values, ensure_ascii=False, default=str, indent=indent)
    if "NaN" in text or "Infinity" in text:
        text = json.dumps(json.loads(text, parse_constant=lambda _: None), ensure_ascii=False, indent=indent)
    return text.encode(errors="backslashreplace") + b"\n"


@contextlib.contextmanager
def new_file(out: Path) -> Iterator[BinaryIO]:
    """A file that is on the disk under the name `out` once the block succeeds; otherwise nothing is left."""
    beside = out.with_name(f".{out.name}.writing")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        beside.unlink(missing_ok=True)
        # O_EXCL: a link with this name, which would lead elsewhere, is not followed.
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.rename(out)
    except OSError as error:
        found = f"{out}: cannot be written ({error.strerror or error})"
        raise ArtifactError(f"{found}. Free disk space, or give another --out") from None
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


class Line(dict[str, Any]):
    """A row or a dropped item. It may have been edited by hand: raises ArtifactError if it is no JSON object or lacks
    a key."""

    def __init__(self, text: bytes, path: Path, number: int):
        self.where = f"{path}:{number}"
        value = json_object(text)
        if value is None:
            raise self.error("is not a JSON object")
        super().__init__(value)

    def __missing__(self, key: str) -> Any:
        raise self.error(f"has no `{key}`")

    def error(self, problem: str) -> ArtifactError:
        advice = "Restore the line as it was written, give another --out, or pass --restart"
        return ArtifactError(f"{self.where}: {problem}. {advice}")

    def number(self, key: str) -> int:
        value = self[key]
        if type(value) is not int:
            raise self.error(f"`{key}` is not a whole number")
        return value


def read_lines(path: Path) -> Iterator[Line]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            yield Line(line, path, number)


# ------------------------------------------------------------------------------------------- files


class Output:
    """The rows and dropped items of one run; a later run with the same settings resumes them.

    A run that is refused before its first line leaves no file behind and, with `restart`, keeps the existing rows.

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
        self.is_started = False
        """Whether the files hold the rows of this run, not those of an earlier one."""

    def __enter__(self) -> Output:
        try:
            with self._writing():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._open(self.path)
                self._open(self.dropped_path)
                self.is_started = self._resumes()
                self.cut_from()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._close()
        if isinstance(error, KeyboardInterrupt):
            found = f": {self.num_rows} rows are in {self.path}" if self.is_started else " before the first row"
            raise Interrupted(f"interrupted{found}. Run {self.to_resume} to resume", 130) from None

    @property
    def to_resume(self) -> str:
        """The command that resumes this run. With --restart it would discard what is written."""
        return "the same command" + (" without --restart" if self.restart and self.is_started else "")

    def _open(self, path: Path) -> None:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644), "r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # on the file itself: no lock file beside the rows
        except BlockingIOError:
            file.close()
            raise ArtifactError(f"{path}: another process is writing it. Wait for it, or give another --out") from None
        self._files.append(file)

    def _resumes(self) -> bool:
        """Are there lines to resume, which are not to be discarded?"""
        no_rows, no_drops = (os.fstat(file.fileno()).st_size == 0 for file in self._files)
        before = read_object(self.settings_path)
        if not before:
            if no_rows and no_drops:
                return False
            found = f"already exists, but its settings file {self.settings_path.name} is missing or cannot be read"
            raise ArtifactError(f"{self.path}: {found}. Remove the rows, or give another --out")
        changed = differences(before, self.settings)
        if self.restart or (no_rows and (no_drops or (changed and not self.keep_dropped))):
            return False
        if not changed:
            return True
        shown = []
        for key in changed:
            old, new = (_text_at(values, key) for values in (before, self.settings))
            shown.append(f"{key} ({old}, now {new})" if old and new else key)
        advice = "Restore them, give another --out, or pass --restart to start over"
        raise ConfigError(f"{self.path}: was made with other settings: {', '.join(shown)}. {advice}")

    def _start(self) -> None:
        """Discard the rows of an earlier run, and write the settings, unless rows are being resumed."""
        if self.is_started:
            return
        with self._writing():
            # Settings first: without them, rows that a kill leaves behind are never taken for rows of this run.
            self.settings_path.unlink(missing_ok=True)
            for file in self._files:
                file.truncate(0)
            write_text(self.settings_path, json_line(self.settings, indent=2).decode())
        self.is_started = True

    def write(self, outcome: Outcome, about: dict[str, Any]) -> None:
        """Write a row, or why there is none and what identifies the item; raises RunError for a fatal Failure."""
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

    def rows(self) -> Iterator[Line]:
        return read_lines(self.path) if self.is_started else iter(())

    def drops(self) -> Iterator[Line]:
        return read_lines(self.dropped_path) if self.is_started else iter(())

    def cut_from(self, key: str | None = None, value: int = 0) -> None:
        """Remove an incomplete last line, which a killed run may leave, and the lines from the first one whose `key`
        is at least `value`. The values never decrease."""
        if not self.is_started:
            return
        counts = []
        for path, file in zip((self.path, self.dropped_path), self._files, strict=True):
            file.seek(0)
            count = end = 0
            for line in file:
                if not line.endswith(b"\n") or (key is not None and Line(line, path, count + 1).number(key) >= value):
                    break
                count, end = count + 1, end + len(line)
            file.truncate(end)
            counts.append(count)
        self.num_rows, self.num_dropped = counts

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        with self._writing():
            for file in self._files:
                os.fsync(file.fileno())

    def summary_of_dropped(self) -> str:
        """How many items were dropped and why, to end a sentence; "" if none was."""
        reasons = Counter(drop["reason"] for drop in self.drops()).most_common()
        counts = ", ".join(f"{number} {reason}" for reason, number in reasons)
        return f"; {self.num_dropped} dropped ({counts}), see {self.dropped_path.name}" if reasons else ""

    def require_rows(self, *, may_be_none: bool = False) -> None:
        """Raise RunError if every item was dropped: a run that wrote nothing has failed. A shard may have no items."""
        if may_be_none and not self.num_dropped:
            self._start()  # the empty files of a shard without items
        elif not self.num_rows:
            again = "start over with --restart" if self.keep_dropped else "run it again"
            found = f"{self.path}: no row was written{self.summary_of_dropped()}"
            raise RunError(f"{found}. Change the model, the template or the data, and {again}")

    def _line(self, which: int, values: dict[str, Any]) -> None:
        self._start()
        with self._writing():
            self._files[which].write(json_line(values))
            self._files[which].flush()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno == errno.ELOOP:  # of O_NOFOLLOW
                raise ArtifactError(f"{error.filename}: is a link. Give the file itself") from None
            found = f"{error.filename or self.path}: cannot be written ({error.strerror or error})"
            raise ArtifactError(f"{found}. Free disk space, remove the obstacle, or give another --out") from None

    def _close(self) -> None:
        for path, file in zip((self.path, self.dropped_path), self._files, strict=False):
            with contextlib.suppress(OSError):  # a full disk was reported when the line was written
                if not self.settings_path.exists() and os.fstat(file.fileno()).st_size == 0:
                    path.unlink()
                file.close()


def _text_at(value: Any, dotted: str) -> str:
    """The value of a dotted key as JSON; "" if it is long, or a list or mapping."""
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    text = json.dumps(value, ensure_ascii=False)
    return "" if len(text) > 60 or text[0] in "[{" else text
