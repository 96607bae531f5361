"""The order of batches."""

from __future__ import annotations

import pytest

from rlhf_cli.data.batches import chunks, stream


@pytest.mark.parametrize(("rows", "batch"), [(10, 3), (7, 7), (5, 8), (12, 4)])
def test_every_row_once_an_epoch(rows: int, batch: int) -> None:
    epochs = 4
    order = [i for step in range(-(-rows * epochs // batch)) for i in stream(rows, batch, step, 0, "x")]
    for epoch in range(epochs):
        assert sorted(order[epoch * rows : (epoch + 1) * rows]) == list(range(rows))
    assert order[:rows] != order[rows : 2 * rows] or rows == 1


def test_the_order_depends_on_seed_and_purpose_alone() -> None:
    assert stream(50, 8, 3, 0, "a") == stream(50, 8, 3, 0, "a")
    assert stream(50, 8, 3, 0, "a") != stream(50, 8, 3, 1, "a")
    assert stream(50, 8, 3, 0, "a") != stream(50, 8, 3, 0, "b")


def test_chunks() -> None:
    assert [list(part) for part in chunks([1, 2, 3, 4, 5], 2)] == [[1, 2], [3, 4], [5]]
    assert [list(part) for part in chunks([1, 2, 3], None)] == [[1, 2, 3]]
    assert list(chunks([], 2)) == []
