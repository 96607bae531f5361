"""Functions of tensors that torch runs without Python.

A decoding step is hundreds of operations of a few microseconds. Python takes as long as many of them, and two threads
wait for each other at each one, because only one of them can run Python. So a function is recorded once as a graph,
which runs as one call and leaves Python to the other threads.

torch.jit is deprecated in recent releases of torch. Where it is missing or fails, and if the recorded function gives
other bytes, callers use the function itself.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

_warnings_are_off = threading.Lock()


def recorded(function: Callable[..., Any], *examples: tuple[Any, ...]) -> Callable[..., Any] | None:
    """`function` as a graph; None if it cannot be recorded, or gives other bytes for one of the examples.

    Arguments are tensors, lists of tensors and tuples of tensors. Numbers that the function computes from anything else
    are constants of the graph. So give examples that differ in all that may vary.
    """

    def named(*inputs: Any) -> Any:  # torch.jit.trace asks for a name, and a partial has none
        return function(*inputs)

    try:
        with _warnings_are_off, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated, and names what becomes a constant
            graph = torch.jit.trace(named, examples[0], check_trace=False)

        def run(*inputs: Any) -> Any:
            # Optimizing the graph takes longer than the calls of a rollout.
            with torch.jit.optimized_execution(False):
                return graph(*inputs)

        same = all(_same(run(*example), function(*example)) for example in examples)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return run if same else None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return all(map(_same, a, b))
