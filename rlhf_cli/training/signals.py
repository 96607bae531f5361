"""Signals that ask a run to stop: it finishes its step, saves, and says how to go on."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

ASKS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C; a scheduler's or a container's end; Slurm's warning before it (`--signal=USR1@120`)."""


class StopRequests:
    """While it is installed, the first such signal is remembered and the second interrupts at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Listen; does nothing outside of the main thread, where Python can't."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in ASKS}

    def remove(self) -> None:
        """Leave the signals to whoever had them before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number
