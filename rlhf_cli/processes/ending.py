"""Lets one process say why a run of several processes ends, however many of them know it.

The processes find each other through a store, also before they form a process group. The first one that has an error
claims a key of the store and prints its line; the others end silently.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from rlhf_cli.errors import EndedElsewhere, RunError
from rlhf_cli.printing import say
from rlhf_cli.processes.exits import INTERRUPTED

T = TypeVar("T")
D = TypeVar("D")

PATIENCE_S = 5.0
"""Seconds that the store may take to answer."""
SAID_S = 15.0
"""Seconds that a silent process waits for the line of another before it ends. A launcher may end all with the first."""
KNOWN_S = 3.0
"""Seconds that the process which holds the store waits for the others to learn that a line is printed, once they train.
While they start they are slow, and none has been killed in a step: `SAID_S`."""
CONNECT_S = 30.0
"""Seconds in which a process that has an error at the start must find the others. Otherwise it prints."""
POLL_S = 0.05
STORE_THREAD = "store"
"""The name of threads that ask the store."""
_exits = threading.Event()
"""Set before Python's finalization."""


def pause(seconds: float) -> None:
    """Wait between two questions to the store, in a thread. Raises RuntimeError if the process exits."""
    if _exits.wait(seconds):
        raise RuntimeError("the process exits")


def end_questions() -> None:
    """End the threads that ask the store: Python's finalization aborts a process with a thread in its C++ code."""
    _exits.set()
    for thread in threading.enumerate():
        if thread.name == STORE_THREAD:
            thread.join(1.0)


class Ending:
    """Which process of the run says why it ends."""

    def __init__(self, store: dist.Store, rank: int, size: int):
        self.store, self.rank, self.size = store, rank, size
        # A connection of its own: the process group may wait in the other one.
        self._store = dist.PrefixStore("rlhf ending", store.clone())  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=PATIENCE_S))
        self.is_ours: bool | None = None
        """Whether this process says why the run ends; None while it knows of none that does."""
        self.is_store_gone = False
        """Whether process 0, which holds the store, has ended without a word, or hangs."""

    def look(self) -> None:
        """Learn whether another process has claimed the line. Raises RuntimeError if the store has gone."""
        if self.is_ours is None and self._store.check(["claimed"]):
            self.is_ours = False
            self._store.set(f"known {self.rank}", "")

    def claim(self) -> bool:
        """Whether this process prints why the run ends: it is the first one that asks, or process 0 is gone."""
        if self.is_ours is None:
            first = None if self.is_store_gone else in_time(lambda: self._store.add("claimed", 1) == 1, None)
            self.is_store_gone = first is None
            self.is_ours = self.rank == 1 if first is None else first
        return self.is_ours

    def leave(self, exit_code: int) -> None:
        """Call it when the line is printed, and before this process ends without one."""
        if self.is_store_gone:
            return
        if self.is_ours:
            in_time(lambda: self._store.set("said", str(exit_code)), None)
        else:
            in_time(self._code_said, None, SAID_S)
        in_time(lambda: self._store.set(f"known {self.rank}", ""), None)
        if self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            known = [f"known {rank}" for rank in range(self.size)]
            in_time(lambda: self._wait_for(known), None, KNOWN_S if dist.is_initialized() else SAID_S)

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until every process has started.

        Raises EndedElsewhere if one ends with an error, and RunError if one is missing after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        missing = list(range(self.size))
        try:
            self._store.set(f"ready {self.rank}", "")
            while missing := [rank for rank in missing if not self._store.check([f"ready {rank}"])]:
                if self._store.check(["claimed"]):
                    raise EndedElsewhere(in_time(self._code_said, 1, SAID_S))
                if time.monotonic() > deadline:
                    raise _missing(self.rank, timeout_s, f"process {missing[0]} of {self.size}")
                time.sleep(POLL_S)
        except RuntimeError as error:  # the process that holds the store has ended
            raise EndedElsewhere(1) from error

    def _code_said(self) -> int:
        """The exit code of the process that prints, once it has printed."""
        self._wait_for(["said"])
        code = int(self._store.get("said"))
        self.look()  # Not before: process 0, which holds the store, may end when the others know.
        return code

    def _wait_for(self, keys: list[str]) -> None:
        while not self._store.check(keys):
            pause(POLL_S)


_ending: Ending | None = None
_is_alone = False
"""Whether this process could not find the others."""


def connect(timeout_s: float) -> Ending:
    """Find the other processes by the variables of `torchrun`. Raises RunError if they are not there in time."""
    global _ending, _is_alone
    if _ending is None:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

        def find() -> dist.Store | RuntimeError:
            try:
                return next(rendezvous("env://", rank, size, timeout=timedelta(seconds=timeout_s)))[0]
            except RuntimeError as error:
                return error

        try:
            # It waits in C++, where this thread would not notice Ctrl-C.
            store = in_time(find, RuntimeError("no answer"), threading.TIMEOUT_MAX)
        except KeyboardInterrupt:
            if rank == 0:
                say(INTERRUPTED, error=True, flush=True)
            os._exit(130)  # finalization would abort
        if isinstance(store, RuntimeError):
            _is_alone = True
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise _missing(rank, timeout_s, f"all {size} processes at {address}", str(store))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":
            # After a restart torchrun gives the processes the same store, with addresses of those that have ended.
            store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        _ending = Ending(store, rank, size)
        atexit.register(end_questions)
    return _ending


def end(exit_code: int, line: str | None) -> None:
    """Print why this process ends, unless it has no line or another process prints one."""
    ending = _ending
    if line is not None:
        with contextlib.suppress(RunError):
            ending = None if _is_alone else connect(CONNECT_S)
        if ending is None or ending.claim():
            say(line, error=True, flush=True)
    if ending is not None:
        ending.leave(exit_code)


def in_time(work: Callable[[], T], otherwise: D, seconds: float | None = None) -> T | D:
    """The result of a request to the store, or `otherwise` if it fails or takes too long.

    It runs in a thread: if the process that holds the store hangs, so does every request.
    """
    results: list[T] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            results.append(work())

    asking = threading.Thread(target=ask, name=STORE_THREAD, daemon=True)
    asking.start()
    asking.join(PATIENCE_S if seconds is None else seconds)
    return results[0] if results else otherwise


def _missing(rank: int, timeout_s: float, what: str, details: str = "") -> RunError:
    more = f" ({details.splitlines()[0]})" if details else ""
    return RunError(
        f"start: process {rank} waited {timeout_s:.0f} s for {what}{more}. Start every process of the run with "
        "the same MASTER_ADDR and MASTER_PORT, or raise distributed.timeout_s"
    )
