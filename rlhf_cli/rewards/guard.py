"""Runs the user's code with settings of its own, so that it cannot change the training's.

A reward file may call `torch.set_grad_enabled(False)` or `os.chdir`, and both apply to the whole process. The user's
code keeps what it sets: its next call finds it again. The training gets its own settings back after each call.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_cli.processes.signals import STOP_SIGNALS

GetAndSet = tuple[Callable[[], Any], Callable[[Any], object]]


def _directory() -> Path | None:
    """The working directory; None if it was removed."""
    try:
        return Path.cwd()
    except OSError:
        return None


def _change_directory(path: Path | None) -> None:
    if path is not None:
        with contextlib.suppress(OSError):
            os.chdir(path)


def _set_default_device(device: torch.device) -> None:
    # Any other argument than None slows down every call of a torch function.
    torch.set_default_device(None if device.type == "cpu" else device)


def autocast_depth() -> int:
    """How many contexts of torch.autocast are open. While one is, torch reuses weights in low precision: old ones."""
    torch.autocast_increment_nesting()
    depth: int = torch.autocast_decrement_nesting()
    return depth


def _set_autocast_depth(depth: int) -> None:
    while autocast_depth() > depth:
        torch.autocast_decrement_nesting()
    while autocast_depth() < depth:
        torch.autocast_increment_nesting()
    if depth == 0:
        torch.clear_autocast_cache()


MODES: tuple[GetAndSet, ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, _set_default_device),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    *(
        (partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device))
        for device in ("cpu", "cuda")
    ),
    (autocast_depth, _set_autocast_depth),
    (_directory, _change_directory),
)
"""Settings of the process that are set only if they differ: a new number of threads starts a new pool of threads."""
GENERATORS: tuple[GetAndSet, ...] = (
    (torch.get_rng_state, torch.set_rng_state),
    (np.random.get_state, np.random.set_state),
    (random.getstate, random.setstate),
)
"""The global random generators. A draw by the user's code continues its own sequence."""


@dataclass
class Kept:
    """What the user's code has set for itself so far."""

    modes: dict[int, Any] = field(default_factory=dict)
    """Values that differ from ours, by their number in `MODES`."""
    generators: list[Any] | None = None
    """The states of `GENERATORS`; None before the code first ran."""


_kept = Kept()


EXIT_NOW = os._exit


def _raising_exit() -> Callable[[int], object]:
    """`os._exit` as an exception that we can report. In a child process of the user's code it still ends the child."""
    mine = os.getpid()

    def exit_(status: int) -> None:
        if os.getpid() != mine:
            EXIT_NOW(status)
        raise SystemExit(status)

    return exit_


@contextlib.contextmanager
def user_code() -> Iterator[None]:
    """Within this context the settings of the user's code apply, and after it those from before.

    Covers the global random generators of torch, NumPy and Python, `MODES`, inference mode, and the handlers of the
    signals that stop a run. These handlers are ours again after the context; the user's code cannot keep its own.
    Within it `os._exit` raises SystemExit.
    """
    modes, generators = _values(MODES), _values(GENERATORS)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    os._exit = _raising_exit()  # type: ignore[assignment]
    try:
        with torch.inference_mode(mode=False):
            entered = [_kept.modes.get(number, value) for number, value in enumerate(modes)]
            _set(MODES, entered)
            for (_, set_to), state in zip(GENERATORS, _kept.generators or [], strict=False):
                set_to(state)
            try:
                yield
            finally:
                now = _values(MODES)
                _kept.modes |= {n: value for n, value in enumerate(now) if value != entered[n]}
                _kept.generators = _values(GENERATORS)
    finally:
        os._exit = EXIT_NOW
        _set(MODES, modes)
        for (_, set_to), state in zip(GENERATORS, generators, strict=True):
            set_to(state)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _values(settings: Sequence[GetAndSet]) -> list[Any]:
    return [get() for get, _ in settings]


def _set(settings: Sequence[GetAndSet], values: Sequence[Any]) -> None:
    for (get, set_to), value in zip(settings, values, strict=True):
        if get() != value:
            set_to(value)
