"""Starts the processes of `rlhf <stage> --nproc N` on this machine, and ends them together. Does not import torch.

`torchrun` works too, and is the way to several machines. With this launcher the config is checked once, and a signal
reaches every process and leaves it the time to save. `torchrun` ends its processes 30 seconds after a signal, and
SIGUSR1 ends `torchrun` alone.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from rlhf_cli.errors import EndedElsewhere
from rlhf_cli.files import KNOWN_FILE, known_digests
from rlhf_cli.printing import say
from rlhf_cli.processes.environment import num_cores
from rlhf_cli.processes.exits import INTERRUPTED, LOST
from rlhf_cli.processes.signals import LAUNCHED, stop_signals
from rlhf_cli.program import command

GRACE_S = 20.0
"""How long the others may take to end by themselves after one has failed, before they are killed."""
AT_ONCE_S = 5.0
"""The same after a second signal."""
POLL_S = 0.05


def run_processes(
    command: Sequence[str],
    count: int,
    resume_command: str,
    *,
    checkpoint_in_words: Callable[[], str] = lambda: "",
    grace_s: float = GRACE_S,
) -> int:
    """Run a command in `count` processes that find each other through the variables of `torchrun`.

    Returns 0 if all processes return 0, else the code of the first one that failed and said why. If a signal killed one
    and the others could not say so, print the line, with `checkpoint_in_words`, and return 1. After a stop signal it is
    never 0, also if the processes had ended.
    """
    environment = {
        **os.environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, num_cores() // count))),
        LAUNCHED: resume_command,
    }
    workers: list[subprocess.Popen[bytes]] = []
    with tempfile.NamedTemporaryFile("w", suffix=".json") as digests, _stop_signals(workers) as received:
        digests.write(known_digests())
        digests.flush()
        environment[KNOWN_FILE] = digests.name
        for rank in range(count):
            own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            # In a process group of its own, or Ctrl-C would reach it twice: from the terminal and from us.
            workers.append(subprocess.Popen(list(command), env=own, process_group=0))
        failed: list[int] = []  # the ranks, in the order in which they ended
        deadline, num_passed_on = math.inf, 0
        while running := [worker for worker in workers if worker.poll() is None]:
            failed += [rank for rank, w in enumerate(workers) if w.returncode and rank not in failed]
            if failed and deadline == math.inf:
                deadline = time.monotonic() + grace_s
            if len(received) != 1 and time.monotonic() > deadline:  # a process that hangs reacts to nothing else
                _signal(running, signal.SIGKILL)
            # Here, not in the handler: it may interrupt the start of a worker, which would then miss the signal.
            for number in received[num_passed_on:]:
                _signal(workers, number)
                num_passed_on += 1
                if num_passed_on == 2:
                    deadline = time.monotonic() + AT_ONCE_S
            time.sleep(POLL_S)
        failed += [rank for rank, w in enumerate(workers) if w.returncode and rank not in failed]
    if received and workers[0].returncode <= 0:  # too late or too early for it, or it did not react
        say(INTERRUPTED, error=True)
        return 130 if received[0] == signal.SIGINT else 143
    # One that lost the connection to another process is not the cause.
    codes = {rank: workers[rank].returncode for rank in failed if workers[rank].returncode != LOST}
    if received or not failed:  # after a signal the first process has said where the run stopped
        code = next(iter(codes.values()), 0)
        return code if code >= 0 else 128 - code
    if said := [code for code in codes.values() if code > 0]:
        return said[0]
    if codes:
        rank, code = next(iter(codes.items()))
        number = signal.Signals(-code)
        why = " The system kills a process when memory runs out." if number == signal.SIGKILL else ""
        checkpoint = f" {checkpoint_in_words()}".rstrip()
        say(
            f"error: process {rank} of {count} was ended by {number.name}.{why} The others were stopped.{checkpoint} "
            "To continue, run the same command",
            error=True,
        )
    return 1


@contextlib.contextmanager
def _stop_signals(workers: list[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Inside the block a stop signal does not end this process. Yields the list of those received so far.

    Ctrl-Z stops the workers too, and they continue with this process.
    """
    received: list[int] = []

    def suspend(_: int, __: FrameType | None) -> None:
        _signal(workers, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        _signal(workers, signal.SIGCONT)

    handlers: dict[int, Callable[[int, FrameType | None], Any]] = dict.fromkeys(
        stop_signals(), lambda number, _: received.append(number)
    )
    handlers[signal.SIGTSTP] = suspend
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _signal(workers, signal.SIGKILL)  # none is left unless an error of ours ended the wait


def _signal(workers: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.send_signal(number)


def free_port() -> int:
    """A port that no process uses now.

    The first process binds it only seconds later. So it is below those that the system gives to outgoing connections,
    which begin at 32768 on Linux and at 49152 on macOS.
    """
    for port in [*random.SystemRandom().sample(range(20_000, 30_000), 99), 0]:
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return int(free.getsockname()[1])
    raise OSError("no free port")


def is_worker() -> bool:
    return LAUNCHED in os.environ


def run_again(arguments: Sequence[str], count: int) -> None:
    """Run this rlhf command in `count` processes. Raises EndedElsewhere with the exit code of a run that failed."""
    again = [sys.executable, "-m", "rlhf_cli", *arguments]
    if code := run_processes(again, count, command(*arguments)):
        raise EndedElsewhere(code)
