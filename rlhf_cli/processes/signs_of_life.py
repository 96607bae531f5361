"""Signs of life between the processes of a run, so that a process that hangs is named by the others.

Every two seconds a thread of each process writes to the store what the process is doing, and how many collective
operations it has begun, and reads the signs of the others. If another process is waited for longer than
`distributed.timeout_s` (`missing`), the thread ends this process with a line that names the other: the main thread
hangs in the operation or, over NCCL, in the GPU's queue behind it. Work of one process, such as saving a model, may
take longer: the others wait in a barrier, for as long as it gives signs of life.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from rlhf_cli.errors import EndedElsewhere, RunError
from rlhf_cli.processes.ending import PATIENCE_S, STORE_THREAD, Ending, in_time, pause
from rlhf_cli.processes.exits import LOST, exit_code
from rlhf_cli.processes.sharding import num_begun
from rlhf_cli.processes.signals import stop_requested

T = TypeVar("T")

EVERY_S = 2.0
"""Seconds between two signs of life."""
SLOWEST_POLL_S = 0.25
"""Seconds between two looks in a long wait."""
LOOKS = 20
"""How often the thread of signs reads the signs of the others during `distributed.timeout_s`."""


@dataclass
class LastSign:
    """What this process has seen of one process, itself included."""

    sign: Mapping[str, Any]
    heard: float
    """When its last new sign was seen."""
    moved: float
    """When the number of collective operations that it has begun was last seen to grow."""


def missing(seen: Mapping[int, LastSign], now: float, limit: float) -> tuple[list[int], list[int]]:
    """(the processes that give no sign of life, those that compute too long); both are empty while a run is healthy.

    A run is healthy if a process has begun a collective operation in the last `limit` seconds, or if nobody waits: no
    process that gives signs has begun more operations than another one, or waits for a silent one. So all may compute
    for as long as they need, and one may work alone while the others wait in a barrier.

    >>> def seen(begun, heard, waits=False):
    ...     return LastSign({"begun": begun, "waits": waits}, heard=heard, moved=0)
    >>> missing({0: seen(8, heard=99), 1: seen(7, heard=99)}, now=100, limit=60)
    ([], [1])
    >>> missing({0: seen(7, heard=99, waits=True), 1: seen(7, heard=99)}, now=100, limit=60)
    ([], [])
    >>> missing({0: seen(7, heard=99, waits=True), 1: seen(7, heard=0)}, now=100, limit=60)
    ([1], [])
    """
    if not seen or now - max(one.moved for one in seen.values()) <= limit:
        return [], []
    silent = [rank for rank, one in seen.items() if now - one.heard > limit]
    signs = {rank: one.sign for rank, one in seen.items() if rank not in silent}
    most = max((sign["begun"] for sign in signs.values()), default=0)
    behind = [rank for rank, sign in signs.items() if sign["begun"] < most]
    waits = any(sign["waits"] for sign in signs.values()) or any(seen[rank].sign["begun"] < most for rank in silent)
    return (silent, behind) if behind or waits else ([], [])


class Pulse(threading.Thread):
    """Writes this process's sign of life, and reads the others'."""

    def __init__(self, ending: Ending, timeout_s: float, step: str):
        super().__init__(name="pulse", daemon=True)
        self.ending = ending
        # Connections of its own: the process group may wait in the other one. One that timed out is of no use again.
        self._store = self._connected()
        self._spare: dist.Store | None = self._connected()
        self.rank, self.size, self.timeout_s = ending.rank, ending.size, timeout_s
        self.step = step
        """What the stage is working on, such as `ppo step 12`."""
        self.checkpoint_in_words: Callable[[], str] = lambda: ""
        """A sentence about the last checkpoint; "" before the stage has begun."""
        self.keep_end: Callable[[Exception], object] = lambda _: None
        """Keeps the error with the stage if this thread ends the process."""
        self._waits = False
        self._last_what = "the arrival"
        """What this process waits for or has waited for last, such as `the gradients`."""
        self._seen: dict[int, LastSign] = {}
        """What the thread had seen of each process when it judged last."""
        self._signs_read = {rank: {"number": 0, "begun": 0, "waits": False} for rank in range(self.size)}
        self._is_store_gone = False
        self._next_read = 0.0
        self._judged = time.monotonic()
        self._num_signs = 0
        self._is_over = threading.Event()
        # A first sign before the process group is formed: the first look at the others then finds all of theirs.
        self._store.set(str(self.rank), json.dumps(self._own_sign()))

    def run(self) -> None:
        """Write a sign of life every two seconds, and a last one at `end`: who has left must not seem behind."""
        asking: threading.Thread | None = None
        while True:
            is_last = self._is_over.is_set()
            if asking is None or not asking.is_alive():
                # In a thread: if the process that holds the store hangs, so does every request.
                asking = threading.Thread(target=self._exchange_signs, name=STORE_THREAD, daemon=True)
                asking.start()
            asking.join(PATIENCE_S)
            if is_last:
                return
            if (error := self._judge(is_there=not (asking.is_alive() or self._is_store_gone))) is not None:
                self._end_with(error)
            self._is_over.wait(EVERY_S)

    def end(self) -> None:
        """Write no further signs. Call it before Python's finalization (`ending.end_questions`)."""
        self._is_over.set()
        self.join(2 * PATIENCE_S)

    def _exchange_signs(self) -> None:
        """Write this process's sign of life and, at times, read the others'."""
        self._num_signs += 1
        try:
            self._store.set(str(self.rank), json.dumps(self._own_sign()))
            self.ending.look()
            self._spare = self._spare or self._connected()
            if time.monotonic() >= self._next_read or stop_requested():
                self._signs_read |= self._signs_of_others()
                self._next_read = time.monotonic() + max(EVERY_S, self.timeout_s / LOOKS)
        except RuntimeError:  # the process that holds the store has ended, or was late
            self._is_store_gone = self._spare is None
            self._store, self._spare = self._spare or self._store, None

    def _own_sign(self) -> dict[str, Any]:
        return {"number": self._num_signs, "step": self.step, "waits": self._waits, "begun": num_begun()}

    def _signs_of_others(self) -> dict[int, dict[str, Any]]:
        """The last sign of each other process; {} until each has given one."""
        others = [str(rank) for rank in range(self.size) if rank != self.rank]
        if not self._store.check(others):
            return {}
        return {int(rank): json.loads(sign) for rank, sign in zip(others, self._store.multi_get(others), strict=True)}

    def _connected(self) -> dist.Store:
        """A new connection to the store of the process group."""
        store = dist.PrefixStore("rlhf", self.ending.store.clone())  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=PATIENCE_S))
        return store

    # ------------------------------------------------------------------------------------ a process that hangs

    def _judge(self, *, is_there: bool) -> Exception | None:
        """What ends this process if another one is `missing` for longer than `distributed.timeout_s`; else None.

        If the store does not answer (`is_there`), process 0 is silent, and nothing is known of the others.
        """
        now, limit = time.monotonic(), max(self.timeout_s, 3 * EVERY_S) + max(EVERY_S, self.timeout_s / LOOKS)
        if stop_requested():
            # torchrun sends SIGTERM when a process has ended, and kills the others half a minute later.
            limit = 3 * EVERY_S
        if now - self._judged > 3 * EVERY_S + 2 * PATIENCE_S:
            self._seen = {}  # this process was stopped itself
        self._judged = now
        for rank, sign in {**self._signs_read, self.rank: self._own_sign()}.items():
            last = self._seen.get(rank) or LastSign(sign, now, now)
            is_new = rank == self.rank or sign["number"] != last.sign["number"]
            has_moved = sign["begun"] != last.sign["begun"]
            self._seen[rank] = LastSign(sign, now if is_new else last.heard, now if has_moved else last.moved)
        seen = {rank: one for rank, one in self._seen.items() if is_there or rank in (0, self.rank)}
        silent, behind = missing(seen, now, limit)
        if not is_there and (silent or behind):
            silent, behind = [0], []
            self.ending.is_store_gone = True
        if self.ending.is_ours or not (silent or (behind and not stop_requested())):
            return None  # all are well, or the main thread says why the run ends
        if min(set(range(self.size)) - {*silent, *behind}) != self.rank:
            return EndedElsewhere(LOST)  # the first of those that wait reports it
        found = [f"{_name(rank, seen[rank].sign)} gives no sign of life" for rank in silent]
        found += [f"process {rank} still computes {seen[rank].sign.get('step', 'start')}" for rank in behind]
        waited_s = now - max(one.moved for one in seen.values())
        return RunError(
            f"{self.step}: process {self.rank} waited {waited_s:.0f} s for {self._last_what} of all {self.size} "
            f"processes: {'; '.join(found)}. {self._outcome()} If a step takes that long, raise distributed.timeout_s"
        )

    def _end_with(self, error: Exception) -> None:
        """End this process, whose main thread hangs or computes for too long, with one line."""

        def fail() -> None:
            raise error

        if isinstance(error, RunError):
            with contextlib.suppress(Exception):
                self.keep_end(error)
        code = exit_code(fail)
        sys.stdout.flush()
        os._exit(code)

    # ------------------------------------------------------------------------------------ waits of the main thread

    def waiting(self, what: str, work: Callable[[], T]) -> T:
        """The result of `work`, which waits for the other processes. Raises what `lost` returns if it fails."""
        self._waits, self._last_what = True, what
        try:
            return work()
        except RuntimeError as error:
            raise self.lost(what) from error
        finally:
            self._waits = False

    def meet(self) -> None:
        """Wait until every process is here: no exchange, as one may work alone while it gives signs of life."""
        arrival, began = dist.barrier(async_op=True), time.monotonic()
        assert arrival is not None
        while not arrival.is_completed():  # Not `wait`: Python would run no handler of a signal meanwhile.
            time.sleep(min(SLOWEST_POLL_S, 0.001 + (time.monotonic() - began) / 20))
            if self.ending.is_ours is False:
                raise EndedElsewhere(LOST)
        arrival.wait()

    def lost(self, what: str) -> Exception:
        """The error for a process that has ended while this one waited for `what`. One process reports it."""
        if not self.ending.claim():
            return EndedElsewhere(LOST)

        def silent() -> tuple[list[int], dict[int, dict[str, Any]]]:
            """The processes that give no sign in two intervals, and all signs. Several may just be late."""
            before, deadline = self._signs_of_others(), time.monotonic() + 2 * EVERY_S + PATIENCE_S
            pause(2 * EVERY_S)
            while True:
                after = self._signs_of_others()
                ranks = [rank for rank in after if after[rank] == before.get(rank)]
                if len(ranks) <= 1 or time.monotonic() > deadline:
                    return ranks, after
                pause(EVERY_S / 4)

        # The first process holds the store, unless torchrun does.
        ended, signs = in_time(silent, ([0], dict[int, dict[str, Any]]()), 2 * EVERY_S + 2 * PATIENCE_S)
        which = " and ".join(_name(rank, signs.get(rank, {})) for rank in ended) or "the connection to another process"
        return RunError(
            f"{self.step}: process {self.rank} waited for {what} of all {self.size} processes, but {which} ended "
            f"without a message. The system kills a process when memory runs out. {self._outcome()}"
        )

    def _outcome(self) -> str:
        return f"The run ends. {self.checkpoint_in_words()}".strip()


def _name(rank: int, sign: Mapping[str, Any]) -> str:
    """`process 1 (last seen at ppo step 12)`."""
    return f"process {rank} (last seen at {sign['step']})" if "step" in sign else f"process {rank}"
