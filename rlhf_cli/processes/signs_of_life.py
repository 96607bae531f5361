"""Signs of life between the processes of a run, so that a process that hangs is named by the others.

Every two seconds each process writes to the store of the process group what it is doing, and how many collective
operations it has begun. Whoever waits longer than `distributed.timeout_s` for another process in a collective operation
reads there which one is missing. Over NCCL such an operation returns at once, and the process hangs later, in the GPU's
queue, until NCCL aborts it. So the thread of signs compares the numbers itself (`missing`), and ends the process first.
Work that only one process does, such as saving a model, may take longer: the others wait in `Pulse.meet`, for as long
as the missing process gives signs of life.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from rlhf_cli.errors import EndedElsewhere, RunError
from rlhf_cli.processes.ending import STORE_THREAD, Ending, in_time, pause
from rlhf_cli.processes.exits import LOST, another_has_failed, note_hanging, note_wait
from rlhf_cli.processes.sharding import count, exchange, num_begun
from rlhf_cli.processes.signals import stop_requested

T = TypeVar("T")

EVERY_S = 2.0
"""Seconds between two signs of life."""
PATIENCE_S = 5.0
"""Seconds that the store may take to answer."""
SLOWEST_POLL_S = 0.25
"""Seconds between two looks at the store in a long wait."""
LATER_S = 30.0
"""Seconds that the thread of signs leaves to a main thread that judges its wait itself."""
NO_SIGN = {"number": 0, "begun": 0, "waits": False}
"""In place of the sign of a process of which none was read yet."""
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
    process that gives signs has begun more operations than another one, or waits for one that is silent. So all may
    compute for as long as they need, and one may work alone while the others wait for it in `Pulse.meet`.

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
        # Connections of its own: the process group may wait in the other one.
        self._group_store = ending.store
        self.store = self._connected("rlhf", PATIENCE_S)
        self._spare: dist.Store | None = self._connected("rlhf", PATIENCE_S)
        """Another connection: one that timed out once cannot be used again."""
        self._meetings = self._connected("rlhf meetings", timeout_s)
        self.rank, self.size, self.timeout_s = ending.rank, ending.size, timeout_s
        self.step = step
        """What the stage is working on, such as `ppo step 12`."""
        self.checkpoint_in_words: Callable[[], str] = lambda: ""
        """A sentence about the last checkpoint; "" before the stage has begun."""
        self.waits_for: str | None = None
        """What this process waits for, such as `the gradients`; None while it computes."""
        self.keep_end: Callable[[Exception], object] = lambda _: None
        """Keeps the error with the stage if this thread ends the process."""
        self.blocks = dist.get_backend() == "gloo"
        """Whether a collective operation returns when it is complete, or fails, so that the main thread judges it."""
        self._last_what = "the arrival"
        self._meets = False
        self._seen: dict[int, LastSign] = {}
        """What the thread of signs has seen of each process, by its last judgement."""
        self._signs_read: dict[int, dict[str, Any]] = {rank: dict(NO_SIGN) for rank in range(self.size)}
        self._is_store_gone = False
        self._next_read = 0.0
        self._judged = time.monotonic()
        self._num_signs = 0
        self._num_met = 0
        """Meetings at which this process has arrived."""
        self._is_over = threading.Event()

    def run(self) -> None:
        """Write a sign of life every two seconds, and a last one at `end`, so that nobody seems behind who has left."""
        asking: threading.Thread | None = None
        while True:
            is_last = self._is_over.is_set()
            if asking is None or not asking.is_alive():
                # In a thread: if the process that holds the store hangs, so does every request.
                asking = threading.Thread(target=self._exchange_signs, name=STORE_THREAD, daemon=True)
                asking.start()
            asking.join(PATIENCE_S)
            if is_last or (self._is_store_gone and self.blocks):
                return
            if (error := self._judge(is_there=not (asking.is_alive() or self._is_store_gone))) is not None:
                self._end_with(error)
            self._is_over.wait(EVERY_S)

    def _exchange_signs(self) -> None:
        """Write this process's sign of life and, at times, read the others'."""
        self._num_signs += 1
        others = [rank for rank in range(self.size) if rank != self.rank]
        try:
            self.store.set(str(self.rank), json.dumps(self._own_sign()))
            self.ending.look()
            self._spare = self._spare or self._connected("rlhf", PATIENCE_S)
            if time.monotonic() < self._next_read or not self.store.check([str(rank) for rank in others]):
                return
            signs = map(json.loads, self.store.multi_get([str(rank) for rank in others]))
            self._signs_read |= dict(zip(others, signs, strict=True))
            self._next_read = time.monotonic() + max(EVERY_S, self.timeout_s / LOOKS)
        except RuntimeError:  # the process that holds the store has ended, or was late
            self._is_store_gone = self._spare is None
            self.store, self._spare = self._spare or self.store, None

    def _own_sign(self) -> dict[str, Any]:
        sign = {"number": self._num_signs, "step": self.step, "waits": self.waits_for is not None}
        return sign | {"met": self._num_met, "begun": num_begun()}

    def _judge(self, *, is_there: bool) -> Exception | None:
        """What ends this process if another one waits for a `missing` one, for `distributed.timeout_s`; else None.

        If the store does not answer (`is_there`), process 0 is silent, and of the others nothing is known.
        """
        now, limit = time.monotonic(), max(self.timeout_s, 3 * EVERY_S)
        if now - self._judged > 3 * EVERY_S + 2 * PATIENCE_S:
            self._seen = {}  # this process was stopped itself
        self._judged = now
        for rank, sign in {**self._signs_read, self.rank: self._own_sign()}.items():
            last = self._seen.get(rank)
            is_new = last is None or rank == self.rank or sign["number"] != last.sign["number"]
            has_moved = last is None or sign["begun"] != last.sign["begun"]
            heard, moved = (now if is_new else last.heard), (now if has_moved else last.moved)  # type: ignore[union-attr]
            self._seen[rank] = LastSign(sign, heard, moved)
        limit += max(EVERY_S, self.timeout_s / LOOKS) + (LATER_S if self.blocks or self._meets else 0)
        seen = {rank: one for rank, one in self._seen.items() if is_there or rank in (0, self.rank)}
        silent, behind = missing(seen, now, limit)
        if not silent and not behind:
            return None
        if not is_there:
            silent, behind = [0], []
        self.ending.is_store_gone |= not is_there
        waited_s = now - max(one.moved for one in seen.values())
        signs = {rank: one.sign if one.sign["number"] else {} for rank, one in seen.items()}
        return self._missing(self._last_what, waited_s, silent, behind, signs)

    def _end_with(self, error: Exception) -> None:
        """End this process with one line. Its main thread hangs in the queue of a GPU, or computes for too long."""
        from rlhf_cli.processes.exits import exit_code

        def fail() -> None:
            raise error

        if isinstance(error, RunError):
            with contextlib.suppress(Exception):
                self.keep_end(error)
        code = exit_code(fail)
        sys.stdout.flush()
        os._exit(code)

    def end(self) -> None:
        """Write no further signs. Call it before Python's finalization, which aborts the process if a thread is in the
        C++ code of the store."""
        self._is_over.set()
        self.join(2 * PATIENCE_S)

    def waiting(self, what: str, work: Callable[[], T]) -> T:
        """Run a collective operation `work` over `what`.

        Raises what `failure` returns if it takes longer than the timeout, or the connection to another process is lost.
        """
        self.waits_for, began = what, time.monotonic()
        self._last_what = what
        try:
            with exchange():
                return work()
        except RuntimeError as error:
            raise self.failure(what, error, time.monotonic() - began) from error
        finally:
            self.waits_for = None

    def meet(self, what: str) -> None:
        """Wait until every process is here, for as long as those that are missing give signs of life.

        Raises RunError, which names the processes, if one gives none for `timeout_s`, and what `_lost` returns if one
        has ended.
        """
        self._num_met += 1
        self.waits_for, began, self._meets = what, time.monotonic(), True
        errors: list[RuntimeError] = []
        # In a thread: if the process that holds the store hangs, so does every request to it.
        arrival = threading.Thread(target=self._arrive, args=(errors,), name=STORE_THREAD, daemon=True)
        arrival.start()
        try:
            while arrival.is_alive():
                arrival.join(EVERY_S)
                if arrival.is_alive() and (self.ending.is_anothers or another_has_failed()):
                    raise self._lost(what)
                if arrival.is_alive() and (silent := self._silent_since(began)):
                    raise self._explained(what, time.monotonic() - began, silent)
            if errors:
                raise self._lost(what) from errors[0]
        finally:
            self.waits_for, self._meets = None, False
        count(began, time.monotonic())

    def _arrive(self, errors: list[RuntimeError]) -> None:
        """Tell the others that this process has arrived at the meeting, and return when all have."""
        arrived, complete, seen = (f"{self._num_met} {name}" for name in ("arrived", "complete", "seen"))
        store, began = self._meetings, time.monotonic()
        try:
            if store.add(arrived, 1) == self.size:
                store.set(complete, "")
            # `Store.wait` would print a warning whenever it times out.
            while not store.check([complete]):
                pause(min(SLOWEST_POLL_S, 0.001 + (time.monotonic() - began) / 20))
            if store.add(seen, 1) == self.size:
                for key in (arrived, complete, seen):  # no process reads them again
                    store.delete_key(key)
        except RuntimeError as error:
            errors.append(error)

    def _silent_since(self, began: float) -> list[int]:
        """The processes that have not arrived at the meeting, and give no sign of life for too long."""
        limit = max(self.timeout_s, 3 * EVERY_S)  # a sign comes every two seconds, or later on a busy machine
        if stop_requested():
            # torchrun sends SIGTERM when a process has ended, and kills the others half a minute later.
            limit, self._next_read = 3 * EVERY_S, 0.0
        # If this process was stopped itself, the thread of signs has not judged since. It ends if the store is gone.
        now = self._judged if self.is_alive() else time.monotonic()
        others = {rank: one for rank, one in list(self._seen.items()) if rank != self.rank}
        return [
            rank
            for rank, one in others.items()
            if one.sign.get("met", 0) < self._num_met and now - max(one.heard, began) > limit
        ]

    def _connected(self, prefix: str, timeout_s: float) -> dist.Store:
        """A new connection to the store of the process group, whose keys begin with `prefix`."""
        store = dist.PrefixStore(prefix, self._group_store.clone())  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=timeout_s))
        return store

    def failure(self, what: str, error: RuntimeError, waited_s: float = 0.0) -> Exception:
        """The error to raise when a collective operation over `what` fails."""
        if waited_s < 0.9 * self.timeout_s and "timed out" not in str(error).lower():
            return self._lost(what)
        self.waits_for = what
        return self._explained(what, self.timeout_s)

    def _lost(self, what: str) -> Exception:
        """The error for a process that has ended during a wait. One process reports it."""
        # `--nproc` knows which process has ended, and how.
        if note_wait(self.step, self.rank, what) or not self.ending.claim():
            return EndedElsewhere(LOST)
        before, after = self._signs_twice() or ({}, {})
        ended = _silent(before, after) if after else [0]
        names = [_name(rank, after) for rank in ended]
        which = " and ".join(names) or "the connection to another process"
        return RunError(
            f"{self.step}: process {self.rank} waited for {what} of all {self.size} processes, but {which} ended "
            f"without a message. The system kills a process when memory runs out. {self._outcome()}"
        )

    def _explained(self, what: str, waited_s: float, known_silent: Sequence[int] = ()) -> Exception:
        """The error for a wait that took too long. One process reports it."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        signs = self._signs_twice()
        if signs is None:
            return self._missing(what, waited_s, [0], [], {})
        before, after = signs
        silent = list(known_silent) or _silent(before, after)
        busy = [rank for rank in others if rank not in silent and not after[rank].get("waits")]
        return self._missing(what, waited_s, silent, busy, after)

    def _missing(
        self,
        what: str,
        waited_s: float,
        silent: Sequence[int],
        busy: Sequence[int],
        signs: Mapping[int, Mapping[str, Any]],
    ) -> Exception:
        """The error for a wait for processes that are silent or compute. The first of those that wait reports it."""
        waiting = [rank for rank in range(self.size) if rank not in (*silent, *busy)]
        if signs and waiting[0] != self.rank:
            return EndedElsewhere(LOST)
        note_hanging([*silent, *busy])
        found = [f"{_name(rank, signs)} gives no sign of life" for rank in silent]
        found += [f"process {rank} still computes {signs[rank].get('step', 'start')}" for rank in busy]
        in_words = "; ".join(found) or "every process waits, so the network between them failed"
        return RunError(
            f"{self.step}: process {self.rank} waited {waited_s:.0f} s for {what} of all {self.size} processes: "
            f"{in_words}. {self._outcome()} If a step takes that long, raise distributed.timeout_s"
        )

    def _signs_twice(self) -> tuple[dict[int, dict[str, object]], dict[int, dict[str, object]]] | None:
        """The last sign of life of every other process, now and after two of the intervals; None if the store does not
        answer. On a busy machine a sign may be late: while several processes are silent, they get more time."""
        others = [rank for rank in range(self.size) if rank != self.rank]

        def signs() -> dict[int, dict[str, object]]:
            known = [rank for rank in others if self.store.check([str(rank)])]
            return {rank: json.loads(self.store.get(str(rank))) if rank in known else {} for rank in others}

        def read() -> tuple[dict[int, dict[str, object]], dict[int, dict[str, object]]]:
            before = signs()
            pause(2 * EVERY_S)
            after, deadline = signs(), time.monotonic() + PATIENCE_S
            while len(_silent(before, after)) > 1 and time.monotonic() < deadline:
                pause(EVERY_S / 4)
                after = signs()
            return before, after

        # The first process holds the store, unless torchrun does.
        return in_time(read, None, 2 * EVERY_S + 2 * PATIENCE_S)

    def _outcome(self) -> str:
        return f"The run ends. {self.checkpoint_in_words()}".strip()


def _silent(before: Mapping[int, Mapping[str, object]], after: Mapping[int, Mapping[str, object]]) -> list[int]:
    """The processes that gave no sign of life between two looks."""
    return [rank for rank in after if after[rank].get("number") == before[rank].get("number")]


def _name(rank: int, signs: Mapping[int, Mapping[str, object]]) -> str:
    """`process 1 (last seen at ppo step 12)`. Its last sign of life may be two seconds older than its end."""
    sign = signs.get(rank)
    return f"process {rank} (last seen at {sign['step']})" if sign else f"process {rank}"
