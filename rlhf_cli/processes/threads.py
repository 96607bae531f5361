"""Work in threads: passes that do not depend on each other run at the same time on a CPU, one core each.

torch can split one product among threads instead (OpenMP). For small products that gains little, and the last digits
then depend on the number of threads. Here they do not, as results are taken in order. Only if there are fewer passes
than threads, those of LARGE models use several cores each, as do decoding steps (`rollout/sampling.py`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch
from torch import nn

from rlhf_cli.errors import ConfigError
from rlhf_cli.processes.environment import num_cores

R = TypeVar("R")

LARGE = 30_000_000
"""Weights of a model from which a pass may use several cores. Its products are large enough to be split, and to decode
groups of rows apart, each with all weights, gains nothing."""


def is_large(*models: nn.Module | None, weights: int | None = None) -> bool:
    """Whether one of the models has so many weights; LARGE by default."""
    least = LARGE if weights is None else weights
    return any(sum(weight.numel() for weight in model.parameters()) >= least for model in filter(None, models))


_count: int | None = None
"""How many passes run at the same time; None until something asks."""
_executor: ThreadPoolExecutor | None = None
_worker = threading.local()


def _forget() -> None:
    global _executor
    _executor = None


os.register_at_fork(after_in_child=_forget)  # a child starts without threads


def _start_worker() -> None:
    _worker.yes = True
    torch.set_num_threads(1)


def num_threads() -> int:
    """How many passes run at the same time; 1 within one of them."""
    global _count
    if getattr(_worker, "yes", False):
        return 1
    if _count is None:
        given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
        if given and not given.isdecimal():
            raise ConfigError(f"OMP_NUM_THREADS: found {given}, must be a number of threads. Correct it, or unset it")
        _count = int(given or 0) or num_cores()
    return _count


def use_threads(count: int | None) -> None:
    """Compute this many passes at the same time, and everything else in one thread.

    None: `OMP_NUM_THREADS`, or the cores that this process may use.
    """
    global _count, _executor
    if _executor is not None:
        _executor.shutdown()
    _executor, _count = None, count
    torch.set_num_threads(1)


@contextlib.contextmanager
def cores(count: int) -> Iterator[None]:
    """Inside the block, this thread's operations use so many cores (OpenMP)."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_threads(tasks: Sequence[Callable[[], R]], most: int | None = None, *, wide: bool = False) -> Iterator[R]:
    """The result of each task, in order.

    A task sees the gradient mode of its caller. If one raises, those that have begun finish first. If one runs out of
    memory, it is called again alone: it must not keep anything of the first call.

    Args:
        tasks: they must not depend on each other.
        most: how many run or wait to be taken at the same time, at most. Never more than `num_threads` and one.
        wide: if there are more threads than tasks, let each task use several cores.

    >>> list(in_threads([lambda: 1, lambda: 2]))
    [1, 2]
    """
    most = min(most or len(tasks), len(tasks))
    count = max(1, min(num_threads(), most))
    each = num_threads() // count if wide else 1
    if count == 1:
        with cores(each) if wide else contextlib.nullcontext():
            yield from (task() for task in tasks)
        return
    mode = torch.is_grad_enabled()

    def compute(task: Callable[[], R]) -> R:
        with torch.set_grad_enabled(mode), cores(each):
            return task()

    global _executor
    executor = _executor = _executor or ThreadPoolExecutor(num_threads(), "rlhf pass", _start_worker)
    # One more than can run is ready, so that a thread with a short task need not wait for a longer one before it.
    ahead = min(most, count + 1)
    waiting = deque(tasks[ahead:])
    with cores(1):
        running = deque((executor.submit(compute, task), task) for task in tasks[:ahead])
        try:
            while running:
                future, task = running.popleft()
                if is_out_of_memory(future.exception()):
                    del future  # its error holds the memory of the pass
                    wait([future for future, _ in running])
                    result = task()
                else:
                    result = future.result()
                if waiting:
                    following = waiting.popleft()
                    running.append((executor.submit(compute, following), following))
                yield result
        finally:
            for future, _ in running:
                if not future.cancel():
                    with contextlib.suppress(Exception):
                        future.result()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a GPU, Python or torch's CPU allocator ran out of memory, or a thread could not be started."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or lacks_thread(error):
        return True
    # torch's allocator raises a plain RuntimeError.
    texts = ("can't allocate memory", "out of memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def lacks_thread(error: BaseException | None) -> bool:
    """Whether the system refused Python or pyarrow a thread, for example because its stack does not fit."""
    texts = ("can't start new thread", "Failed to launch worker thread")
    return isinstance(error, Exception) and any(text in str(error) for text in texts)
