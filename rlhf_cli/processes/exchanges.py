"""The seconds that a process spends in exchanges with the others.

They tell which process of a run is slow. Between two exchanges a process computes, so the one that spends the least
time in them is the one that the others wait for. Processor time would not tell: a process that gets fewer processor
seconds needs as many of them as the others. On a CPU an exchange blocks, and a clock measures it. On GPUs it is queued:
an exchange lasts from the moment when this GPU has reached it until all have (two events on the stream that is
current). A clock would measure how long the GPU needs for the work that was queued before, which is longest on the
slowest.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

MANY = 4096
"""Pairs of events that are kept before those in the past are counted."""
Mark = float | torch.cuda.Event
"""A moment: seconds of the clock, or an event of a GPU."""
_queued: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
_seconds = 0.0
_begun = 0


def mark() -> Mark:
    """This moment of the process, or of its GPU."""
    if not dist.is_initialized() or "nccl" not in dist.get_backend():
        return time.monotonic()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def count(begin: Mark, end: Mark) -> None:
    """Count the time between two moments of the same kind as an exchange."""
    global _seconds
    if isinstance(begin, float) and isinstance(end, float):
        _seconds += end - begin
    elif isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        _queued.append((begin, end))
        if len(_queued) > MANY:
            _count_queued()


@contextmanager
def exchange() -> Iterator[None]:
    """Count the time in the block as an exchange. One that fails is not counted."""
    global _begun
    _begun += 1
    begin = mark()
    yield
    count(begin, mark())


def num_begun() -> int:
    """Exchanges that this process has begun. Every process of a run begins the same ones in the same order."""
    return _begun


def waited_s() -> float:
    """Seconds in exchanges so far. On a GPU those that are not over are counted later."""
    _count_queued()
    return _seconds


def _count_queued() -> None:
    global _seconds
    while _queued and _queued[0][1].query():
        begin, end = _queued.popleft()
        _seconds += begin.elapsed_time(end) / 1000
