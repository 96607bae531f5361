"""The order of batches, and batches made one step ahead."""

from __future__ import annotations

import threading

import pytest
import torch

from rlhf_cli.data.batches import ahead, stream
from rlhf_cli.errors import DataError


@pytest.mark.parametrize(("rows", "batch"), [(10, 3), (7, 7), (5, 8), (12, 4)])
def test_every_epoch_takes_each_row_once(rows, batch):
    epochs = 4
    order = [i for step in range(-(-rows * epochs // batch)) for i in stream(rows, batch, step, 0, "x")]
    for epoch in range(epochs):
        assert sorted(order[epoch * rows : (epoch + 1) * rows]) == list(range(rows))
    assert order[:rows] != order[rows : 2 * rows] or rows == 1


def test_the_order_depends_only_on_seed_and_purpose():
    assert stream(50, 8, 3, 0, "a") == stream(50, 8, 3, 0, "a")
    assert stream(50, 8, 3, 0, "a") != stream(50, 8, 3, 1, "a")
    assert stream(50, 8, 3, 0, "a") != stream(50, 8, 3, 0, "b")


# ------------------------------------------------------------------------------------------ one step ahead


CPU, GPU = torch.device("cpu"), torch.device("cuda")  # nothing is computed on it


@pytest.mark.parametrize("device", [CPU, GPU])
def test_prefetched_batches_are_the_same_in_the_same_order(device):
    calls = []

    def make(step):
        calls.append(step)
        return stream(11, 4, step, 0, "x")

    assert list(ahead(make, 3, 9, device)) == [(step, stream(11, 4, step, 0, "x")) for step in range(3, 9)]
    assert calls == list(range(3, 9))
    assert list(ahead(make, 4, 4, device)) == []
    assert threads() == []


def test_the_next_batch_is_made_during_this_step():
    is_ready = [threading.Event() for _ in range(4)]

    def make(step):
        is_ready[step].set()
        return step

    for step, _ in ahead(make, 0, 3, GPU):
        if step < 2:
            assert is_ready[step + 1].wait(120)
        # and not the one after it, however long this step takes
        assert not is_ready[step + 2].wait(0.05) if step < 2 else not is_ready[3].is_set()


@pytest.mark.parametrize("device", [CPU, GPU])
def test_an_exception_in_a_batch_is_raised_at_its_own_step(device):
    def make(step):
        if step == 2:
            raise DataError("row 7 is gone")
        return step

    batches = ahead(make, 0, 5, device)
    assert [next(batches), next(batches)] == [(0, 0), (1, 1)]
    with pytest.raises(DataError, match="row 7"):
        next(batches)
    assert threads() == []


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError])
def test_no_thread_outlives_the_loop(stop):
    seen = []
    try:
        for step, _ in ahead(lambda step: step, 0, 100, GPU):
            if step == 3:
                raise stop
    except stop:
        # As a stage's own `with` sees it: before the error is anybody else's.
        seen.append(threads())
    assert seen == [[]]
    for step, _ in ahead(lambda step: step, 0, 100, GPU):
        if step == 3:
            break
    assert threads() == []


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("next batch")]
