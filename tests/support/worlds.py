"""Several processes of a run, simulated by threads that take turns.

A thread runs until it communicates, and then waits until all have arrived. Only one thread runs at a time, so nothing
that is global to a process (random state, patches of a library) is seen half changed. A world of two costs the work of
two processes and none of their imports.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from rlhf_cli.config.by_stage import CONFIGS
from rlhf_cli.config.loader import load_config
from rlhf_cli.errors import RunError
from rlhf_cli.processes import distributed
from rlhf_cli.processes.distributed import World
from stages import ppo, rm, sft

T = TypeVar("T")
CPU = torch.device("cpu")
PROGRAMS = {"sft": sft, "rm": rm, "ppo": ppo}


@dataclass
class Meeting:
    """Where the threads of a world exchange items. The thread that runs holds `turn`."""

    size: int
    turn: threading.Condition = field(default_factory=threading.Condition)
    items: dict[int, Any] = field(default_factory=dict)
    exchanged: list[Any] = field(default_factory=list)
    num_rounds: int = 0
    num_ended: int = 0
    """Threads that have returned or raised. The others can then communicate no more."""

    def exchange(self, rank: int, item: Any) -> list[Any]:
        """Every thread's item, in order of rank, once all have arrived."""
        this_round = self.num_rounds
        self.items[rank] = item
        if len(self.items) == self.size:
            self.exchanged, self.items = [self.items[i] for i in range(self.size)], {}
            self.num_rounds += 1
            self.turn.notify_all()
        else:
            self.turn.wait_for(lambda: self.num_rounds > this_round or self.num_ended)
        if self.num_rounds == this_round:
            raise EndedError(f"process {rank} waits for one that has ended")
        return self.exchanged

    def end(self) -> None:
        """A thread has returned or raised."""
        self.num_ended += 1
        self.turn.notify_all()


class EndedError(Exception):
    """A process waits for another that has ended, as a real one would until its time-out."""


@dataclass(frozen=True)
class ThreadWorld(World):
    """`World` whose processes are threads. As between real ones, only copies of items pass from one to another."""

    meeting: Meeting

    def gather(self, item: Any) -> list[Any]:
        return list(self.meeting.exchange(self.rank, pickle.loads(pickle.dumps(item))))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.gather(tensor.detach().clone())).sum(0)

    def barrier(self, what: str = "the arrival") -> None:  # noqa: ARG002
        self.gather(None)

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        tensor.copy_(self.sum(tensor))
        return lambda: None


def in_each_process(size: int, program: Callable[[World], T]) -> list[T]:
    """Run a function in each process of a world of `size`; returns the results in order of rank.

    Raises the first error of the process with the lowest rank that failed by itself.
    """
    meeting = Meeting(size)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        with meeting.turn:
            try:
                results[rank] = program(ThreadWorld(rank, size, CPU, meeting))
            except BaseException as error:
                errors[rank] = error
            finally:
                meeting.end()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors, key=lambda rank: (isinstance(errors[rank], EndedError), rank))]
    return [results[rank] for rank in range(size)]


def run_in_threads(size: int, stage: str, config: Path) -> None:
    """Run a stage on `size` processes, as `support.runs.run_forked` does with real ones.

    Raises the RunError that ends it. No process may wait for another then, and all must have the same message.
    """

    def program(world: World) -> str | None:
        worlds[threading.get_ident()] = world
        try:
            PROGRAMS[stage].run(load_config(config, CONFIGS[stage]), quiet=True)
        except RunError as error:
            return str(error)
        return None

    worlds: dict[int, World] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "start", lambda *_: worlds[threading.get_ident()])
        (message,) = set(in_each_process(size, program))
    if message is not None:
        raise RunError(message)
