"""Runs the user's code with settings of its own, so that it cannot change the training's.

A reward file may call `torch.set_grad_enabled(False)` or `os.chdir`, and both apply to the whole process. The user's
code keeps what it sets: its next call finds it again. The training gets its own settings back after each call. The
global random generators need no guard: training never draws from them.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf_cli.processes.signals import STOP_SIGNALS


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


SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, _set_default_device),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (_directory, _change_directory),
)
"""The function that reads each setting of the process, and the one that sets it."""
_kept: dict[int, Any] = {}
"""The values that the user's code has set for itself so far, by their number in SETTINGS."""


@contextlib.contextmanager
def user_code() -> Iterator[None]:
    """Within this context the settings of the user's code apply: `SETTINGS` and inference mode.

    The handlers of the signals that stop a run are ours again after the context; the user's code cannot keep its own.
    """
    ours = _values()
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        with torch.inference_mode(mode=False):
            entered = [_kept.get(number, value) for number, value in enumerate(ours)]
            _set(entered)
            try:
                yield
            finally:
                _kept.update({n: value for n, value in enumerate(_values()) if value != entered[n]})
    finally:
        _set(ours)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _values() -> list[Any]:
    return [get() for get, _ in SETTINGS]


def _set(values: Sequence[Any]) -> None:
    for (get, set_to), value in zip(SETTINGS, values, strict=True):
        if get() != value:  # a new number of threads would start a new pool of threads
            set_to(value)
