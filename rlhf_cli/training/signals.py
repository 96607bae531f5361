"""Signals that ask a run to stop. It finishes its step, saves a checkpoint and prints how to resume."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C; the end of a job or container; Slurm's warning before the end of a job (`--signal=USR1@120`)."""


class StopRequests:
    """While installed, records the first stop signal. The second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Install the handlers. Does nothing outside the main thread, where Python does not allow it."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}

    def remove(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number
