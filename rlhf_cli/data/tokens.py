"""Rows to tokens, once: what a stage learns from stands in a cache on disk and is mapped, never held.

A cache entry is a folder named after everything that decides its bytes: the data's own bytes, every setting that
chooses or cuts rows, the tokenizer and its template, and the code that reads and encodes. Anything of it changed makes
another entry. It can be removed at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import pyarrow as pa
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf_cli.artifacts import digest_file
from rlhf_cli.config.data import DataSource, Rows
from rlhf_cli.data.encode import LeftOut
from rlhf_cli.data.formats import Purpose
from rlhf_cli.data.reading import Report, records
from rlhf_cli.data.records import Record
from rlhf_cli.data.table import Table, TableWriter
from rlhf_cli.data_files import data_fingerprint
from rlhf_cli.errors import DataError

T = TypeVar("T")
V = TypeVar("V")

View = Callable[[Record, str], "V | LeftOut"]
"""What a stage sees of a record of a side, or why it has no use for it; may raise DataError for a row that is bad."""
Encode = Callable[[Sequence[V]], Iterable["T | LeftOut"]]
"""What was seen to what is learnt from, in order: one or several items each, or why there is none."""

SIDES = ("train", "test")
CHUNK = 1000
"""Records that are encoded at a time: enough for the tokenizer to use every core."""
KEPT_DAYS = 30
"""An entry that nobody asked for in so long is removed."""


@dataclass(frozen=True)
class Tokenised(Generic[T]):
    """The rows of a stage, tokenised."""

    train: Table[T]
    test: Table[T]
    lines: list[str]
    """What the user should read about them."""


def tokenise(
    data: Rows,
    purpose: Purpose,
    kind: type[T],
    view: View[V],
    encode: Encode[V, T],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_words: int = 0,
    settings: dict[str, Any] | None = None,
    role: str = "data",
) -> Tokenised[T]:
    """The rows of `data` as items of the dataclass `kind`, from the cache or made now.

    `settings` is what `encode` goes by beside the keys of `data` and the tokenizer. `role` is how messages call the
    data. Raises DataError for rows that can't be read, where no training row is left, or where there is no room.
    """
    key = _key(data, purpose, kind, tokenizer, {"prompt_words": prompt_words, "settings": settings})
    with _place(key) as place:
        if not (place / "facts.json").is_file():
            _build(place, data, purpose, kind, view, encode, prompt_words, role)
        os.utime(place)
        facts = json.loads((place / "facts.json").read_text(encoding="utf-8"))
        tables = [Table(place / f"{side}.arrow", kind) for side in SIDES]
    return Tokenised(tables[0], tables[1], facts["lines"])


def cache_directory() -> Path:
    """Where the tokens are kept: $RLHF_CACHE, else `rlhf` in the user's cache directory."""
    own = os.environ.get("RLHF_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf"


# ------------------------------------------------------------------------------------------- writing


def _build(
    place: Path,
    data: Rows,
    purpose: Purpose,
    kind: type[T],
    view: View[V],
    encode: Encode[V, T],
    prompt_words: int,
    role: str,
) -> None:
    report = Report()
    partial = place.with_name(f"{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        writers = {side: TableWriter(partial / f"{side}.arrow", kind) for side in SIDES}
        rows = records(data, purpose, report, prompt_words=prompt_words, role=role)
        for side, some in _by_side(_seen(rows, view, data, report)):
            items = []
            for item in encode(some):
                if isinstance(item, LeftOut):
                    report.leave_out(side, item.reason)
                else:
                    items.append(item)
            writers[side].write(items)
        for side, writer in writers.items():
            writer.close()
            if report.rows[side] and not writer.num_rows:
                reasons = "; ".join(report.left_out.get(side, {})) or "no row holds what is asked for"
                raise DataError(f"{role}.{side}: none of {report.rows[side]} rows is left: {reasons}")
        lines = [line.replace("data.", f"{role}.", 1) if line.startswith("data.") else line for line in report.lines()]
        (partial / "facts.json").write_text(json.dumps({"lines": lines}), encoding="utf-8")
        shutil.rmtree(place, ignore_errors=True)
        partial.rename(place)
    except OSError as error:
        raise DataError(
            f"{place.parent}: the tokenised rows can't be written there ({error.strerror or error}). Make room, or "
            "name another folder in the environment variable RLHF_CACHE"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _seen(rows: Iterable[tuple[str, Record]], view: View[V], data: Rows, report: Report) -> Iterator[tuple[str, V]]:
    for side, record in rows:
        try:
            found = view(record, side)
        except DataError as error:
            report.bad_row(data, side, error)
            continue
        if isinstance(found, LeftOut):
            report.leave_out(side, found.reason)
        else:
            yield side, found


def _by_side(stream: Iterable[tuple[str, V]]) -> Iterator[tuple[str, list[V]]]:
    """Pieces of at most CHUNK of one side, the order within each side kept."""
    waiting: dict[str, list[V]] = {side: [] for side in SIDES}
    for side, seen in stream:
        waiting[side].append(seen)
        if len(waiting[side]) == CHUNK:
            yield side, waiting[side]
            waiting[side] = []
    for side, rest in waiting.items():
        if rest:
            yield side, rest


@contextlib.contextmanager
def _place(key: str) -> Iterator[Path]:
    """The entry's folder, with nobody else at work on it. Where the cache can't be written it is a folder that goes
    when the process has the tables open."""
    root = cache_directory()
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / f"{key}.lock").open("w")
    except OSError:
        with tempfile.TemporaryDirectory(prefix="rlhf-tokens-") as folder:
            yield Path(folder) / key
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _remove_old(root)
        if (root / key).is_dir() and not _is_whole(root / key):
            shutil.rmtree(root / key)
        yield root / key


def _is_whole(place: Path) -> bool:
    try:
        json.loads((place / "facts.json").read_text(encoding="utf-8"))
        for side in SIDES:
            with pa.memory_map(str(place / f"{side}.arrow")) as file:
                pa.ipc.open_file(file)
    except (OSError, ValueError, pa.ArrowException):
        return False
    return True


def _remove_old(root: Path) -> None:
    too_old = time.time() - KEPT_DAYS * 86400
    for entry in root.iterdir():
        with contextlib.suppress(OSError):
            if entry.stat().st_mtime < too_old:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


# -------------------------------------------------------------------------------------------- the key


def _key(data: Rows, purpose: Purpose, kind: type, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]) -> str:
    sources = [*data.train, *(data.test or [])]
    whole = {
        "data": [_digest_source(source) for source in sources],
        "rows": data.model_dump(mode="json"),
        "purpose": purpose,
        "settings": settings,
        "tokenizer": _digest_tokenizer(tokenizer),
        "code": _digest_code(kind),
    }
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:32]


def _digest_source(source: DataSource) -> str:
    found = data_fingerprint(source.path, source.revision)
    return f"{found} {_hub_commit(source)}" if found.startswith("hub:") else found


def _hub_commit(source: DataSource) -> str:
    """The commit that a hub dataset's branch stands at; "" where the hub can't be asked."""
    import huggingface_hub

    try:
        return str(huggingface_hub.HfApi().dataset_info(source.path, revision=source.revision, timeout=10).sha)
    except Exception:
        return ""


def _digest_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of what a tokenizer does; not of how it was last told to cut and pad."""
    own: Any = tokenizer.init_kwargs | {"vocabulary": tokenizer.get_vocab()}
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        own = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    facts = [type(tokenizer).__name__, tokenizer.chat_template, tokenizer.special_tokens_map, own]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _digest_code(kind: type) -> str:
    """Of this package's files, of the one that `kind` is written in, and of the libraries that tokenise."""
    own = sorted(Path(__file__).parent.glob("*.py"))
    module = sys.modules[kind.__module__].__file__
    files = [digest_file(path) for path in [*own, *([Path(module)] if module else [])]]
    versions = [importlib.metadata.version(name) for name in ("tokenizers", "transformers", "datasets", "pyarrow")]
    return " ".join(files + versions)
