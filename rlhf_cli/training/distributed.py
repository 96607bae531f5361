"""One process is the case n = 1 of many.

A loss is a sum divided by a count over all processes, so gradients are summed and never averaged, and a
statistic is reduced before it is used. With one process nothing here communicates. `torchrun` sets the
environment that `start` reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rlhf_cli.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among all: its number, how many there are, the device it computes on."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def shard(self, items: Sequence[T], together: int = 1) -> list[T]:
        """This process's share of a global list: of its pieces of `together` items every size-th.

        >>> World(1, 2, torch.device("cpu")).shard("aabbcc", together=2)
        ['b', 'b']
        """
        return [item for i, item in enumerate(items) if i // together % self.size == self.rank]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor summed over all processes (a new tensor; the same one with one process)."""
        if self.size == 1:
            return tensor
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total

    def sum_floats(self, values: dict[str, float]) -> dict[str, float]:
        """Each value summed over all processes; every process must give the same keys in the same order."""
        if self.size == 1:
            return values
        total = self.sum(torch.tensor(list(values.values()), dtype=torch.float64, device=self._wire))
        return dict(zip(values, total.tolist(), strict=True))

    def gather(self, item: Any) -> list[Any]:
        """Every process's item, in order of rank, on every process."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item)
        return items

    def first_failure(self, failure: str) -> str | None:
        """What went wrong on any process, for all of them to say; "" is nothing, and so is None for all.

        One that stopped by itself would leave the others waiting for it.
        """
        return next(filter(None, self.gather(failure)), None)

    def interleave(self, shards: Sequence[Sequence[T]], together: int = 1) -> list[T]:
        """The global list back from the shards that `shard` made of it.

        >>> World(0, 2, torch.device("cpu")).interleave(["aacc", "bb"], together=2)
        ['a', 'a', 'b', 'b', 'c', 'c']
        """
        left = [iter(shard) for shard in shards]
        return [next(left[i // together % self.size]) for i in range(sum(map(len, shards)))]

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def sync_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sum the gradients over all processes, in one message."""
        if self.size == 1:
            return
        trained = [p for p in parameters if p.requires_grad]
        for p in trained:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        flat = torch.cat([p.grad.reshape(-1) for p in trained if p.grad is not None])
        dist.all_reduce(flat)
        for p, part in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
            p.grad = part.view_as(p).clone()

    @property
    def _wire(self) -> torch.device:
        return self.device if self.device.type == "cuda" else torch.device("cpu")


def start(device: str = "auto") -> World:
    """Join the other processes, where torchrun started several, and choose the device.

    Raises ConfigError for a device that this machine does not have.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: found cuda, but torch sees no GPU here. Set device: auto or cpu")
    if device == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device: found mps, but torch has no MPS here. Set device: auto or cpu")
    place = torch.device(device)
    if device == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    if size > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=size)
    return World(rank, size, place)


def require_rows_for_all(world: World, batch_size: int, key: str) -> None:
    """Raise ConfigError where a batch has fewer rows than there are processes."""
    if batch_size < world.size:
        raise ConfigError(f"{key}: {batch_size} rows for {world.size} processes, each needs one. Raise {key}")


def stop() -> None:
    """Leave the other processes."""
    if dist.is_initialized():
        dist.destroy_process_group()
