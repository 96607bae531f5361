"""Files: opening them safely, digests, headers of *.safetensors files, JSON Lines of metrics, the folder of caches."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open


def cache_root() -> Path:
    """The folder of all caches: $RLHF_CACHE, or else `rlhf` in the user's cache directory."""
    if chosen := os.environ.get("RLHF_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf"


def open_regular(path: str | Path) -> BufferedReader:
    """A file opened for reading. Raises OSError for what is not a regular file: a named pipe would block forever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a named pipe must not wait for a writer
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_text(path: str | Path) -> str:
    """A regular file's text, without a byte order mark; raises OSError, and UnicodeDecodeError if it is not UTF-8."""
    with open_regular(path) as file:
        return file.read().decode("utf-8-sig")


def link(source: str, target: str) -> None:
    """Copy a file that is replaced, not written to: by a second name where the file system has them."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


# ------------------------------------------------------------------------------------------- digests


SETTLED_NS = 2_000_000_000
"""A file that changed within the last two seconds may change again and keep its time stamps."""
KNOWN_FILE = "RLHF_KNOWN_DIGESTS"
"""The environment variable that names the file in which `--nproc` gives its processes the digests that it computed."""
_KNOWN: dict[str, str] = {}


def digest_file(path: str | Path) -> str:
    """sha256 of a file's content, in hex."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_once(path: str | Path) -> str:
    """`digest_file`, once per process as long as the file's size and time stamps stay the same."""
    stat = Path(path).stat()
    # Without the device's number, which differs between the machines that mount a file system.
    key = f"{stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
    digest = _KNOWN.get(key) or digest_file(path)
    if time.time_ns() - stat.st_ctime_ns > SETTLED_NS:
        _KNOWN[key] = digest
    return digest


def known_digests() -> str:
    """The digests that `digest_once` has computed, as text for `learn_digests` in another process of the run."""
    return json.dumps(_KNOWN)


def learn_digests(text: str) -> None:
    _KNOWN.update(json.loads(text))


# ------------------------------------------------------------------------------------------- *.safetensors


NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
"""The number formats of safetensors, by the names of torch."""


def stored_dtype(folder: str | Path) -> str | None:
    """The number format of most numbers in the *.safetensors files of a folder, such as `bfloat16`; None if none.

    Skips files that cannot be read.
    """
    numbers: Counter[str] = Counter()
    for path in sorted(Path(folder).glob("*.safetensors")):
        with contextlib.suppress(OSError, SafetensorError), safe_open(path, framework="np") as file:
            for tensor in map(file.get_slice, file.keys()):
                numbers[tensor.get_dtype()] += math.prod(tensor.get_shape())
    return next((NAMES.get(most, most.lower()) for most, _ in numbers.most_common(1)), None)


# ------------------------------------------------------------------------------------------- JSON Lines


LAST_BYTES = 1 << 16
"""Bytes at the end of a file in which its last row is looked for."""


class JsonLines:
    """Appends rows to a .jsonl file and flushes each row to the operating system."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._file = self.path.open("ab")
        present = self.path.read_bytes()
        self.size, self._digest = len(present), hashlib.sha256(present)

    def write(self, row: dict[str, Any]) -> dict[str, Any]:
        """Append one row; NaN and infinity become null. Returns what it wrote; raises OSError with the file's name."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        line = (json.dumps(clean, ensure_ascii=False) + "\n").encode()
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        self.size += len(line)
        self._digest.update(line)
        return clean

    def digest(self) -> str:
        return self._digest.hexdigest()

    def close(self) -> None:
        self._file.close()


@dataclass
class Tail:
    """The rows of a JSONL file that is being written; `new` reads only what was added since the last call."""

    path: Path
    offset: int = 0
    identity: tuple[int, int] = (0, 0)

    def new(self) -> tuple[bool, list[dict[str, Any]]]:
        """(whether the file was replaced or cut, the new complete rows)."""
        try:
            with self.path.open("rb") as file:
                status = self.path.stat()
                identity = (status.st_dev, status.st_ino)
                restarted = identity != self.identity or status.st_size < self.offset
                if restarted:
                    self.identity, self.offset = identity, 0
                file.seek(self.offset)
                data = file.read()
        except OSError:
            return False, []
        complete = data[: data.rfind(b"\n") + 1]
        self.offset += len(complete)
        return restarted, list(json_rows(complete.splitlines()))


def last_row(path: Path) -> dict[str, Any] | None:
    """The last complete row of a JSONL file that may be growing, read from its end; None if it has none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LAST_BYTES))
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return None
    complete = (line for line in reversed(lines) if line.endswith(b"\n"))
    return next(json_rows(complete), None)


def json_rows(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of lines; other lines are skipped.

    >>> list(json_rows(["[" * 100_000, "1", "{", '{"step": 1}']))
    [{'step': 1}]
    """
    yield from (row for line in lines if (row := json_object(line)) is not None)


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file, none without the file. Damaged lines are skipped."""
    if path.is_file():
        with path.open("rb") as file:
            yield from json_rows(file)


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object that a text holds; None if it holds none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_object(path: str | Path) -> dict[str, Any]:
    """The JSON object in a regular file; empty if the file cannot be read or holds none."""
    try:
        with open_regular(path) as file:
            return json_object(file.read()) or {}
    except OSError:
        return {}
