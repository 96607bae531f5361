"""Tests that need a GPU: `pytest -m gpu` runs them. Without one they are skipped with one reason.

The tests with a `device` run on the CPU too, so that their own code is known to work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

MARKS = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))
DEVICES = ["cpu", pytest.param("cuda", marks=MARKS)]


def needs_gpu(test: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a test that has no meaning on a CPU."""
    for mark in MARKS:
        test = mark(test)
    return test
