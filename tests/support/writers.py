"""Settings for `rlhf data generate` and `score`, and a process that dies in the middle of a line."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.commands.options import OutputOptions, SourceOptions
from rlhf_cli.commands.output import Output, items
from rlhf_cli.commands.writer import WriterOptions
from rlhf_cli.config.data import DataSource
from rlhf_cli.data.formats import Purpose
from rlhf_cli.data.records import Record
from support.servers import ChatServer


def run_command(work: Callable[..., None], source: Path | str, out: Path, **settings: Any) -> None:
    """Call `rlhf generate`, `data generate` or `data score` as the command line does, with `settings` as options."""
    reading = SourceOptions(on_bad_row=settings.pop("on_bad_row", "error"))
    common = {name: settings.pop(name) for name in ("num", "restart") if name in settings}
    work(str(source), output=OutputOptions(out, quiet=True, **common), reading=reading, **settings)


def local(model: Path, **settings: Any) -> WriterOptions:
    return WriterOptions(str(model), **{"max_new_tokens": 8, "batch_size": 4, "device": "cpu", **settings})


def remote(server: ChatServer, **settings: Any) -> WriterOptions:
    fast = {"concurrency": 2, "backoff_s": 0.01, "retries": 1, "timeout_s": 60.0}
    return WriterOptions("judge-7b", server.url, **{**fast, **settings})


def read_back(out: Path, purpose: Purpose, **source: Any) -> list[Record]:
    """The rows of a file as a stage reads them."""
    found = items(DataSource(path=str(out), **source), purpose, "error")
    return [row for row in found if isinstance(row, Record)]


def contents(out: Path) -> tuple[bytes, bytes]:
    return out.read_bytes(), out.with_name(out.name + ".dropped").read_bytes()


@contextlib.contextmanager
def failing_after(monkeypatch: pytest.MonkeyPatch, lines: int) -> Iterator[None]:
    """Simulate a crash while line number `lines` is written: half of it is in the file."""
    write_line, written = Output._line, itertools.count()

    class Died(BaseException):
        pass

    def line(self: Output, which: int, values: dict[str, Any]) -> None:
        if next(written) < lines:
            write_line(self, which, values)
            return
        self._start()
        path = (self.path, self.dropped_path)[which]
        text = json.dumps(values, ensure_ascii=False).encode()
        with path.open("ab") as file:
            file.write(text[: len(text) // 2])
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(Output, "_line", line)
        with contextlib.suppress(Died):
            yield
