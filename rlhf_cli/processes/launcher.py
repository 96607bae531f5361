"""Starts the processes of `rlhf <stage> --nproc N` on this machine, and ends them together. Does not import torch.

torch's own launcher, `torchrun`, works too, and is the way to several machines. On one machine this one is simpler for
the user: the config is checked once, a process that fails is named in one line, and a signal reaches every process and
leaves it the time to save. `torchrun` ends its processes 30 seconds after a signal, and SIGUSR1 ends `torchrun` alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from rlhf_cli.errors import EndedElsewhere
from rlhf_cli.files import KNOWN_FILE, known_digests
from rlhf_cli.printing import say
from rlhf_cli.processes.environment import num_cores
from rlhf_cli.processes.exits import FAILURES, LOST
from rlhf_cli.processes.signals import LAUNCHED, STOP_SIGNALS
from rlhf_cli.program import command

GRACE_S = 20.0
"""How long the others may take to end by themselves after one has failed, before they are killed."""
SHORT_GRACE_S = 3.0
"""The same for a command that has nothing to save, such as `rlhf generate`."""
POLL_S = 0.05


@dataclass
class Worker:
    """One process of a run."""

    rank: int
    process: subprocess.Popen[bytes]
    stderr: IO[bytes] | None
    """What it printed on stderr. None for the first process, which prints to this terminal."""

    def last_words(self) -> str:
        """What it printed on stderr, or ""."""
        if self.stderr is None:
            return ""
        self.stderr.seek(0)
        return self.stderr.read().decode("utf-8", "replace").strip()


def run_processes(
    command: Sequence[str],
    count: int,
    resume_command: str,
    *,
    checkpoint_in_words: Callable[[], str] = lambda: "",
    grace_s: float = GRACE_S,
) -> int:
    """Run a command in `count` processes that find each other through the variables of `torchrun`.

    Returns the exit code of the run: 0 if all processes return 0, else the code of the first that failed, and 1 if
    a signal killed it. Prints one line if the process that failed is not the first one, which prints its own. If it was
    killed, the line ends with `checkpoint_in_words`.
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
    workers: list[Worker] = []
    with (
        tempfile.NamedTemporaryFile("w", suffix=".json") as digests,
        tempfile.NamedTemporaryFile(suffix=".jsonl") as failures,
        _signals_reach(workers) as received,
    ):
        digests.write(known_digests())
        digests.flush()
        environment |= {KNOWN_FILE: digests.name, FAILURES: failures.name}
        workers += [_start(command, rank, environment) for rank in range(count)]
        failed = _wait(workers, received, grace_s, Path(failures.name))
        noted = Path(failures.name).read_text(encoding="utf-8").splitlines()
    if failed is None or received:
        # After a signal the first process says where the run stopped.
        code = failed.process.returncode if failed is not None else 0
        return code if code >= 0 else 128 - code
    first = workers[0].process.returncode
    # With the same error another process may be aborted: Python stops its threads inside of torch when it ends.
    if first > 0 and first != LOST and (failed.process.returncode > 0 or failed.process.returncode == -signal.SIGABRT):
        return first  # the first process has an error of its own, and has printed it
    return _explain(failed, count, [json.loads(line) for line in noted], checkpoint_in_words)


def _start(command: Sequence[str], rank: int, environment: Mapping[str, str]) -> Worker:
    # Errors of the other processes are kept back: most of them repeat what the first one prints.
    stderr = tempfile.TemporaryFile() if rank else None  # noqa: SIM115
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    # In a process group of its own, or Ctrl-C would reach it twice: from the terminal and from us.
    process = subprocess.Popen(list(command), env={**environment, **own}, stderr=stderr, process_group=0)
    return Worker(rank, process, stderr)


def _wait(workers: list[Worker], received: list[int], grace_s: float, failures: Path) -> Worker | None:
    """Wait until all have ended; returns the one whose failure ended the run, or None. Notes it in `failures`."""
    failed: list[Worker] = []
    deadline = None
    while running := [worker for worker in workers if worker.process.poll() is None]:
        failed += [w for w in workers if w.process.returncode and w not in failed]
        if failed and not received:
            if deadline is None:
                deadline = time.monotonic() + grace_s
                with failures.open("a", encoding="utf-8") as file:
                    file.write("{}\n")
            # A process that hangs reacts to nothing else. One that was named has no time to lose.
            rows = map(json.loads, failures.read_text(encoding="utf-8").splitlines())
            hanging = {rank for row in rows for rank in row.get("hanging", [])}
            has_said = any(worker.process.returncode != LOST for worker in failed)
            is_late = time.monotonic() > deadline
            killed = [worker for worker in running if is_late or (has_said and worker.rank in hanging)]
            _signal(killed, signal.SIGKILL)
            failed += [worker for worker in killed if worker not in failed]
        time.sleep(POLL_S)
    failed += [w for w in workers if w.process.returncode and w not in failed]
    # One that lost the connection to another process is not the cause.
    return next((w for w in failed if w.process.returncode != LOST), failed[0] if failed else None)


def _explain(
    failed: Worker, count: int, noted: Sequence[Mapping[str, Any]], checkpoint_in_words: Callable[[], str]
) -> int:
    """Say what happened to the process that failed first; returns the exit code of the run."""
    code, name = failed.process.returncode, f"process {failed.rank} of {count}"
    if code < 0:
        number = signal.Signals(-code)
        text = f"{name} was ended by {number.name}"
        if waited := next((row for row in noted if "step" in row), None):
            text = f"{waited['step']}: {text} while process {waited['rank']} waited for {waited['what']}"
        why = " The system kills a process when memory runs out." if number == signal.SIGKILL else ""
        checkpoint = f" {checkpoint_in_words()}".rstrip()
        say(f"error: {text}.{why} The others were stopped.{checkpoint} To continue, run the same command", error=True)
        return 1
    if words := failed.last_words():
        last = words.splitlines()[-1]
        is_named = f"process {failed.rank} " in last
        say(words if "Traceback" in words else last if is_named else f"{last} ({name})", error=True)
    return 1 if code == LOST else code


@contextlib.contextmanager
def _signals_reach(workers: list[Worker]) -> Iterator[list[int]]:
    """While active, a stop signal to this process reaches every worker. Yields the signals received so far.

    Ctrl-Z stops the workers too, and they continue with this process.
    """
    received: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        received.append(number)
        _signal(workers, number)

    def suspend(_: int, __: FrameType | None) -> None:
        _signal(workers, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        _signal(workers, signal.SIGCONT)

    handlers: dict[int, Callable[[int, FrameType | None], Any]] = dict.fromkeys(STOP_SIGNALS, forward)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
        del handlers[signal.SIGHUP]
    handlers[signal.SIGTSTP] = suspend
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _signal(workers, signal.SIGKILL)  # none is left unless an error of ours ended the wait


def _signal(workers: Sequence[Worker], number: int) -> None:
    for worker in workers:
        if worker.process.poll() is None:
            worker.process.send_signal(number)


def free_port() -> int:
    """A port that no process uses now.

    The first process binds it only seconds later, after its imports. So it is not one of those that the system gives
    to outgoing connections, which begin at 32768 on Linux and at 49152 on macOS.
    """
    for port in [*random.SystemRandom().sample(range(20_000, 30_000), 99), 0]:
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return int(free.getsockname()[1])
    raise OSError("no free port")


def is_worker() -> bool:
    """Whether `--nproc` started this process."""
    return LAUNCHED in os.environ


def is_first_worker() -> bool:
    """Whether this is the first process of those that a launcher started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def run_again(arguments: Sequence[str], count: int) -> None:
    """Run this rlhf command in `count` processes, which meet by `distributed.start`.

    Raises EndedElsewhere with the exit code of a run that failed.
    """
    again = [sys.executable, "-m", "rlhf_cli", *arguments]
    code = run_processes(again, count, command(*arguments), grace_s=SHORT_GRACE_S)
    if code:
        raise EndedElsewhere(code)
