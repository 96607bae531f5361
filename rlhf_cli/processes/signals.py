"""Signals that ask a run to stop. It finishes its step, saves a checkpoint and prints how to resume."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

LAUNCHED = "RLHF_RESUME_COMMAND"
"""The environment variable that tells a process that `--nproc` started it, and how its run is resumed."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Ctrl-C; the end of a job or container; Slurm's warning before the end of a job (`--signal=USR1@120`); the end of the
terminal or connection."""


def stop_signals() -> list[int]:
    """`STOP_SIGNALS`, under `nohup` without SIGHUP, which it ignores."""
    return [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]


class SecondSignal(KeyboardInterrupt):
    """A second stop signal: the run ends immediately."""


def is_interrupt(error: BaseException) -> bool:
    """Whether a signal raised this exception. Code that is not ours may raise KeyboardInterrupt by itself.

    Outside of a stage Python's own handler raises it for Ctrl-C, and the two cannot be told apart.
    """
    python_raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return isinstance(error, SecondSignal) or (python_raises and isinstance(error, KeyboardInterrupt))


class StopRequests:
    """While installed, records the first stop signal. The second one raises SecondSignal, a KeyboardInterrupt."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}
        self._launcher = os.getppid() if {"TORCHELASTIC_RUN_ID", LAUNCHED} & os.environ.keys() else None

    def install(self) -> None:
        """Install the handlers, in the main thread; Python allows it nowhere else."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in stop_signals()}

    def remove(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def asked(self) -> int | None:
        """The signal that asks the run to stop, or None. It is SIGTERM if `torchrun` or `rlhf --nproc` has ended.

        SIGUSR1 and SIGKILL end `torchrun` alone. Its processes would go on without it.
        """
        has_ended = self._launcher is not None and os.getppid() != self._launcher
        return self.received or (signal.SIGTERM if has_ended else None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.received is not None:
            raise SecondSignal
        self.received = number
        if number == signal.SIGHUP:
            discard_output_of_closed()


def _in_a_child() -> None:
    """Give a child process of the user's code, such as one of a `multiprocessing.Pool`, handlers of its own.

    SIGTERM ends it, as `terminate()` expects. It ignores Ctrl-C and the end of the terminal: this run decides.
    """
    for number in STOP_SIGNALS:
        owner = getattr(signal.getsignal(number), "__self__", None)
        if isinstance(owner, StopRequests):
            by_terminal = number in (signal.SIGINT, signal.SIGHUP)
            signal.signal(number, (lambda *_: None) if by_terminal else signal.SIG_DFL)


os.register_at_fork(after_in_child=_in_a_child)


def discard_output_of_closed(files: Iterable[int] = (1, 2)) -> None:
    """Redirect file descriptors whose terminal was closed to /dev/null: a write there would end the run."""
    for file in files:
        try:
            os.write(file, b"")
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, file)
            os.close(null)


def stop_requested() -> bool:
    """Whether a signal asked the run of this process to stop. Long waits within a step end when it is true."""
    owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return isinstance(owner, StopRequests) and owner.received is not None
