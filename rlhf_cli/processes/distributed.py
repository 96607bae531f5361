"""Communication between the processes of a run. A single process is a world of size 1, and nothing communicates.

A loss is a sum divided by a count over all processes. So gradients are summed, not averaged, and statistics are
reduced before they are used.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist

from rlhf_cli.errors import ConfigError, EndedElsewhere, RunError, UserError
from rlhf_cli.processes.sharding import begin_exchange, is_sharded

if TYPE_CHECKING:
    from rlhf_cli.processes.signs_of_life import Pulse

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process's rank, the number of processes, and this process's device."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def takes_part(self, model: torch.nn.Module) -> bool:
        """Whether this process joins what the first one does with a model: all do with a sharded one."""
        return self.is_main or is_sharded(model)

    def shard(self, items: Sequence[T], adjacent: int = 1) -> list[T]:
        """This process's share of a global list, cut into pieces of `adjacent` items that are dealt in turn.

        >>> World(1, 2, torch.device("cpu")).shard("aabbcc", adjacent=2)
        ['b', 'b']
        """
        return [item for i, item in enumerate(items) if i // adjacent % self.size == self.rank]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor summed over all processes: a new tensor, or the same one with one process."""
        if self.size == 1:
            return tensor
        total = tensor.detach().clone()
        collective("the sums", lambda: dist.all_reduce(total))
        return total

    def sum_floats(self, values: dict[str, float]) -> dict[str, float]:
        """Each value summed over all processes, which pass the same keys in the same order."""
        if self.size == 1:
            return values
        device = self.device if self.device.type == "cuda" else "cpu"  # NCCL sends from a GPU, gloo from the CPU
        total = self.sum(torch.tensor(list(values.values()), dtype=torch.float64, device=device))
        return dict(zip(values, total.tolist(), strict=True))

    def gather(self, item: Any) -> list[Any]:
        """Every process's item, in order of rank, on every process."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        collective("the figures", lambda: dist.all_gather_object(items, item))
        return items

    def gather_tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every process's tensor, in order of rank, on the device of this process's tensor.

        They have the same type and, but for the first dimension, the same shape.
        """
        if self.size == 1:
            return [tensor]
        # As arrays: pickle would write all numbers that a tensor is a view of.
        parts = self.gather(tensor.detach().cpu().numpy())
        return [torch.from_numpy(part).to(tensor.device) for part in parts]

    def of_main(self, compute: Callable[[], T]) -> T:
        """The result of `compute`, which only the first process calls, on every process. Its error ends all."""
        if self.size == 1:
            return compute()
        result, exit_code = None, 0
        if self.is_main:
            try:
                result = compute()
            except (UserError, RunError) as error:
                self.barrier()
                self.gather((None, error.exit_code))
                raise
        self.barrier()
        result, exit_code = self.gather((result, exit_code))[0]
        if exit_code:
            raise EndedElsewhere(exit_code)
        return cast(T, result)

    def interleave(self, shards: Sequence[Sequence[T]], adjacent: int = 1) -> list[T]:
        """The global list from the shards of all processes: the inverse of `shard`.

        >>> World(0, 2, torch.device("cpu")).interleave(["aacc", "bb"], adjacent=2)
        ['a', 'a', 'b', 'b', 'c', 'c']
        """
        remaining = [iter(shard) for shard in shards]
        return [next(remaining[i // adjacent % self.size]) for i in range(sum(map(len, shards)))]

    def barrier(self, what: str = "the arrival") -> None:
        """Wait until every process is here. One may work alone for longer than `distributed.timeout_s`."""
        if self.size > 1 and _pulse is not None:
            _pulse.waiting(what, _pulse.meet)

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin to sum a tensor over all processes, in place; returns what waits until it is done."""
        work = collective("the gradients", lambda: dist.all_reduce(tensor, async_op=True))
        assert work is not None
        return lambda: collective("the gradients", work.wait)


ALONE = World(0, 1, torch.device("cpu"))
"""The world of a program that is one process."""
START_S = 60.0
"""The least seconds that the processes may start apart. On a busy machine the imports of one take that long."""
_pulse: Pulse | None = None
_step = "start"


def collective(what: str, work: Callable[[], T]) -> T:
    """Run a collective operation over `what`. A process that has ended is named (`Pulse.waiting`)."""
    begin_exchange()
    return _pulse.waiting(what, work) if _pulse is not None else work()


def failure_of(error: BaseException | None) -> Exception | None:
    """The error to raise when a collective inside FSDP fails; None for any other error."""
    is_exchange = isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo", "NCCL"))
    return _pulse.lost("the weights of a sharded model") if _pulse is not None and is_exchange else None


def at_step(step: str) -> None:
    """Note what this process is working on, such as `ppo step 12`, and tell the others."""
    global _step
    _step = step
    if _pulse is not None:
        _pulse.step = step


def where(world: World) -> str:
    """What this process is working on: `ppo step 12, process 1 of 2`."""
    return _step if world.size == 1 else f"{_step}, process {world.rank} of {world.size}"


def name_checkpoint(in_words: Callable[[], str], keep_end: Callable[[Exception], object] = lambda _: None) -> None:
    """Set what says which checkpoint is left if the run ends, and what keeps the error."""
    if _pulse is not None:
        _pulse.checkpoint_in_words, _pulse.keep_end = in_words, keep_end


def start(device: str = "auto", timeout_s: float = 300.0) -> World:
    """Choose the device, and join the other processes that the variables of `torchrun` name.

    A collective operation of more than `timeout_s` ends the run. Raises ConfigError if there is no such device.
    """
    global _pulse
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda, but torch finds no GPU on this machine. Set device: auto or cpu")
    if device == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device: mps, but torch has no MPS on this machine. Set device: auto or cpu")
    chosen = torch.device(device)
    if device == "cuda":
        local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= num_gpus:
            raise ConfigError(
                f"process {rank} has no GPU: this machine has {num_gpus}, and each process needs one. Start {num_gpus}"
            )
        chosen = torch.device("cuda", local_rank)
        torch.cuda.set_device(chosen)
    if size > 1 and not dist.is_initialized():
        from rlhf_cli.processes.ending import connect
        from rlhf_cli.processes.signs_of_life import Pulse

        patience = max(timeout_s, START_S)
        ending = connect(patience)
        ending.wait_until_ready(patience)
        backend = "nccl" if device == "cuda" else "gloo"
        timeout = timedelta(days=7)  # the thread of signs ends a wait, and names the missing process (`Pulse`)
        pulse = Pulse(ending, timeout_s, _step)
        dist.init_process_group(backend, store=ending.store, rank=rank, world_size=size, timeout=timeout)
        _pulse = pulse
        _pulse.start()
        atexit.register(_pulse.end)
    return World(rank, size, chosen)


def require_rows_for_all(world: World, batch_size: int, key: str) -> None:
    """Raise ConfigError if a batch has fewer rows than there are processes."""
    if batch_size < world.size:
        raise ConfigError(
            f"{key}: {batch_size} rows for {world.size} processes, and each needs at least one. Raise {key}"
        )


def stop() -> None:
    global _pulse
    if _pulse is not None:
        _pulse.end()
    _pulse = None
    if dist.is_initialized():
        dist.destroy_process_group()
