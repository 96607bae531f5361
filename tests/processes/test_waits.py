"""The seconds of exchanges: by the clock on a CPU, by events on GPUs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rlhf_cli.processes import sharding


def test_an_exchange_counts_unless_it_fails(monkeypatch):
    now = SimpleNamespace(at=5.0)
    monkeypatch.setattr(sharding, "time", SimpleNamespace(monotonic=lambda: now.at))
    before = sharding.waited_s()
    with sharding.exchange():
        now.at += 2.0

    def fails():
        with sharding.exchange():
            now.at += 7.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert sharding.waited_s() - before == 2.0


def test_exchanges_of_gpus_count_when_they_are_over(monkeypatch):
    """The clock is not read: it would measure the work that the GPU has to do before."""
    events = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing
            self.number = len(events)
            self.is_over = False
            events.append(self)

        def record(self):
            pass

        def query(self):
            return self.is_over

        def elapsed_time(self, end):
            return 1500.0 * (end.number - self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    before = sharding.waited_s()
    for _ in range(2):
        with sharding.exchange():
            pass
    assert sharding.waited_s() == before
    events[0].is_over = events[1].is_over = True
    assert sharding.waited_s() - before == 1.5
    events[2].is_over = events[3].is_over = True
    assert sharding.waited_s() - before == 3.0
