"""Run a stage and kill it; compare the outcome of finished stages.

An attempt runs the `rlhf` command in a child of a fork server, which has imported everything once. SIGKILL comes from
outside at any moment, or at a chosen point: just before a file operation below the artifact root, or when a weights
file or a row is half written. A kill before an operation is also one after the previous one.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any

import torch

from rlhf_cli import cli
from rlhf_cli.files import JsonLines
from rlhf_cli.models import save
from rlhf_cli.run import checkpoint
from rlhf_cli.run.artifacts import digest_file
from stages import ppo, rm, sft
from support.paths import OF_THE_MACHINE, ROOT, TESTS

IMPORTED = (ppo, rm, sft)  # modules that the fork server has for its children
KILLED = -int(signal.SIGKILL)


# ---------------------------------------------------------------------------------------- the child


@dataclass(frozen=True)
class Watch:
    """The file operations below `root`. Each is a point with a name, for example `rename .sft.partial #1`."""

    root: str
    record: str | None = None  # a file for the names, one per line
    signals: dict[str, int] = field(default_factory=dict)
    """The signal that the process sends itself, by point. SIGKILL at a point whose name begins with `half` leaves the
    weights or the row half written."""


def no_fsync(_descriptor: int) -> None:
    """In place of `os.fsync`: a kill loses no file that was not flushed, only a power cut does."""


def redirect(log: str) -> None:
    """Write the output of this process to `log`, compute on one thread, and do not wait for the disk."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
    torch.set_num_threads(1)
    os.fsync = no_fsync


def child(arguments: Sequence[str], log: str, watch: Watch | None, environment: Mapping[str, str]) -> None:
    """Run the `rlhf` command with its output in `log`."""
    redirect(log)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` would have it ignored
    os.environ.update(environment)
    if watch is not None:
        _watch(watch)
    sys.argv = ["rlhf", *arguments]
    cli.main()


def _watch(watch: Watch) -> None:
    seen: Counter[str] = Counter()
    lock = threading.Lock()
    record = os.open(watch.record, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if watch.record is not None else None

    def point(operation: str, path: Any, *, last_words: Callable[[], object] | None = None) -> None:
        text = os.fsdecode(path)
        if not text.startswith(watch.root):
            return
        name = f"{operation} {re.sub(r'[.]tmp[A-Za-z0-9_]+', '.tmp', text[len(watch.root) :].strip('/'))}"
        with lock:
            seen[name] += 1
            label = f"{name} #{seen[name]}"
        if record is not None:
            os.write(record, f"{label}\n".encode())
        if label in watch.signals:
            if last_words is not None and watch.signals[label] == signal.SIGKILL:
                last_words()
            os.kill(os.getpid(), watch.signals[label])

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and not isinstance(args[0], int):
            path, mode, flags = args
            if (mode and set(mode) & set("wax+")) or (mode is None and flags & (os.O_WRONLY | os.O_RDWR)):
                point("open", path)
        elif event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir"):
            folder = args[2] if event in ("os.rename", "os.mkdir") else args[1]
            inside = f"{_path_of(folder)}/" if folder != -1 else ""
            point(event.removeprefix("os."), inside + os.fsdecode(args[0]))
        elif event == "os.truncate" and not isinstance(args[0], int):
            point("truncate", args[0])

    real_fsync = os.fsync

    def fsync(file: int) -> None:
        point("fsync", _path_of(file))
        real_fsync(file)

    def halfway(save_file: Callable[..., None]) -> Callable[..., None]:
        def saves(tensors: dict[str, Any], path: Any, *args: Any, **kwargs: Any) -> None:
            def half() -> None:
                # Some versions of safetensors write to the file, others beside it: leave half of both.
                save_file(tensors, path, *args, **kwargs)
                os.truncate(path, Path(path).stat().st_size // 2)
                Path(path).with_name(".tmpHalf").write_bytes(Path(path).read_bytes())

            point("half", path, last_words=half)
            save_file(tensors, path, *args, **kwargs)

        return saves

    real_write = JsonLines.write

    def write(self: JsonLines, row: dict[str, Any]) -> None:
        point("half", self.path, last_words=lambda: self._file.write(b'{"half": ') and self._file.flush())
        real_write(self, row)

    sys.addaudithook(audit)
    JsonLines.write = write  # type: ignore[method-assign]
    os.fsync = fsync
    for module in (checkpoint, save):
        module.save_file = halfway(module.save_file)


def _path_of(file: int) -> str:
    return str(Path(f"/proc/self/fd/{file}").readlink())


# --------------------------------------------------------------------------------------- the parent


STARTED: list[Any] = []


def end_all() -> None:
    """Kill every attempt that is still running or stopped."""
    for process in STARTED:
        process.kill()
        process.join()
    STARTED.clear()


class Child:
    """A process that is forked from one that has imported everything, with its output in `log`."""

    def __init__(self, target: Callable[..., None], args: Sequence[Any], log: Path):
        log.unlink(missing_ok=True)
        self.log = log
        self._process = server().Process(target=target, args=args, daemon=True)
        self._process.start()
        STARTED.append(self._process)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = 600) -> int:
        """Wait for the end; return the exit code, or minus the number of the signal that killed it."""
        self._process.join(seconds)
        if self._process.exitcode is None:
            self._process.kill()
            raise TimeoutError(f"still running after {seconds} s: {self.output}")
        return self._process.exitcode

    def kill(self) -> None:
        """End it, also if it was stopped."""
        self._process.kill()
        self._process.join()

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8") if self.log.is_file() else ""


class Attempt(Child):
    """One start of the `rlhf` command."""

    def __init__(self, arguments: Sequence[str], log: Path, watch: Watch | None = None, **environment: str):
        super().__init__(child, (list(arguments), str(log), watch, environment), log)

    def kill_after(self, seconds: float) -> int:
        """Kill it if it still runs after `seconds`; return the exit code."""
        self._process.join(seconds)
        self._process.kill()
        return self.wait()

    def wait_until_stopped(self) -> None:
        """Wait until it has sent itself SIGSTOP."""
        wait_for(lambda: Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].startswith("T"))


def server() -> Any:
    """A multiprocessing context whose processes are forked from one that has imported everything.

    Call it before the first test: the server is a fork of this process, with what it has patched by then.
    """
    # The server has its own path and one thread in its environment; ours is restored afterwards.
    inside = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)]),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    before = {name: os.environ.get(name) for name in inside}
    os.environ.update(inside)
    spawn = util.spawnv_passfds
    util.spawnv_passfds = _fork_server
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return multiprocessing.get_context("forkserver")


def _fork_server(_path: str, arguments: Sequence[str], kept: Sequence[int]) -> int:
    """In place of starting Python with `arguments`, which would import everything again: run their code in a fork."""
    process = os.fork()
    if process:
        return process
    try:
        # Among the others is the pipe whose end tells the server that this process has ended.
        null = os.open(os.devnull, os.O_RDWR)
        for file in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
            if file > 2 and file not in (null, *kept):
                with contextlib.suppress(OSError):
                    os.dup2(null, file)
        exec(arguments[-1], {})
    finally:
        os._exit(0)


def wait_for(condition: Callable[[], object], seconds: float = 300, every: float = 0.005) -> None:
    """Wait until the condition is true, looking each `every` seconds; raise TimeoutError after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(every)


# -------------------------------------------------------------------------------------- the outcome


def _timeless(value: Any) -> Any:
    """Remove values that a clock or the machine determines."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not (k.startswith(OF_THE_MACHINE) or k.endswith("seconds"))}
        return {k: _timeless(v) for k, v in kept.items()}
    return [_timeless(item) for item in value] if isinstance(value, list) else value


def results(directory: Path) -> dict[str, Any]:
    """`outcome` without the files that repeat the config."""
    return {name: value for name, value in outcome(directory).items() if name not in ("config.yaml", "manifest.json")}


def outcome(directory: Path) -> dict[str, Any]:
    """The content of a finished stage by file: rows and metrics without durations, other files as digests.

    Asserts that every file matches its manifest.
    """
    manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
    names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    contents: dict[str, Any] = {}
    for name in names:
        path = directory / name
        if name.endswith(".jsonl"):
            contents[name] = [_timeless(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        elif name == "evaluation.json":
            contents[name] = _timeless(json.loads(path.read_text(encoding="utf-8")))
        elif name == "manifest.json":
            contents[name] = _timeless({"metrics": manifest["metrics"], "identity": manifest["identity"]})
        elif path.name == "base_model.json":  # the way from an adapter to its base depends on the artifact root
            contents[name] = {**json.loads(path.read_text(encoding="utf-8")), "relative_path": None}
        elif path.name == "README.md":  # a model card, whose title is the name of the artifact root
            lines = path.read_text(encoding="utf-8").splitlines()
            contents[name] = [line for line in lines if f"-{directory.name}" not in line]
        elif name == "config.yaml":
            contents[name] = re.sub("(?m)^artifacts: .*\n", "", path.read_text(encoding="utf-8"))
        else:
            contents[name] = digest_file(path)
        if name != "manifest.json":
            assert manifest["files"].get(name) == digest_file(path), f"{name} differs from its manifest"
    assert set(manifest["files"]) == set(names) - {"manifest.json"}
    return contents
