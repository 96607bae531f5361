"""The sum of the gradients over the processes, which begins while the last backward pass of a step still computes.

As in torch's DDP, gradients are sent in buckets, from the last layer to the first, and a bucket is sent as soon as its
gradients are complete. DDP itself averages them, and needs a backward pass on every process. Here a loss is a sum
divided by a count over all processes, and a process without a row in a step sends zeros.

The sums take the place of the gradients. So they need the memory of one bucket beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlhf_cli.sharding import first_sharded
from rlhf_cli.training.distributed import World

T = TypeVar("T")

BUCKET_BYTES = 25 * 2**20
"""The largest bucket in float32, as in DDP. A larger gradient is sent alone."""


@dataclass
class _Bucket:
    """Gradients that are sent together."""

    weights: list[nn.Parameter] = field(default_factory=list)
    num_bytes: int = 0
    num_complete: int = 0
    """Gradients that the last backward pass has completed."""
    sums: Tensor | None = None
    """The gradients end to end, in float32: of this process, and when `wait` returns of all."""
    wait: Callable[[], None] = lambda: None

    def send(self, world: World) -> None:
        """Begin the sum. A gradient that does not exist counts as zero."""
        flat = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1).float() for p in self.weights]
        for weight in self.weights:
            weight.grad = None
        self.sums = torch.cat(flat) if len(flat) > 1 else flat[0]
        self.wait = world.start_sum(self.sums)

    def receive(self) -> None:
        """Wait for the sums, which become the gradients."""
        assert self.sums is not None
        self.wait()
        parts = self.sums.split([weight.numel() for weight in self.weights])
        for weight, part in zip(self.weights, parts, strict=True):
            weight.grad = part.view_as(weight).to(weight.dtype)
        self.sums = None


class GradientSum:
    """Sums the gradients of models over the processes, once.

        gradients = GradientSum(world, model)
        for rows in gradients.passes(microbatches):
            ...  # add the gradients of this microbatch
        gradients.receive()

    A bucket is sent when all before it are, so that every process sends them in the same order. Weights of a sharded
    model are left out: FSDP sums their gradients. With one process nothing happens.
    """

    def __init__(self, world: World, *models: nn.Module):
        self._world = world
        self._buckets: list[_Bucket] = []
        self._num_sent = 0
        self._overlaps = False
        if world.size == 1:
            return
        # The passes of a sharded model exchange weights, and all exchanges must be in the same order everywhere.
        self._overlaps = first_sharded(*models) is None
        for weight in (p for model in models for p in reversed(list(model.parameters()))):
            if not weight.requires_grad or isinstance(weight, DTensor):
                continue
            num_bytes = 4 * weight.numel()
            if not self._buckets or self._buckets[-1].num_bytes + num_bytes > BUCKET_BYTES:
                self._buckets.append(_Bucket())
            self._buckets[-1].weights.append(weight)
            self._buckets[-1].num_bytes += num_bytes

    def passes(self, items: Iterable[T], *, last: bool = True) -> Iterator[T]:
        """Each item. For each the caller makes at most one backward pass per model.

        Sums begin in the passes of the last item, unless `last` is false: then other backward passes follow.
        """
        if not (self._overlaps and last):
            yield from items
            return
        parts = list(items)
        for number, item in enumerate(parts, start=1):
            with self._sending() if number == len(parts) else nullcontext():
                yield item

    @contextmanager
    def _sending(self) -> Iterator[None]:
        """Send each bucket when the gradients of a backward pass in the block have completed it."""
        handles = [
            weight.register_post_accumulate_grad_hook(partial(self._complete, bucket))
            for bucket in self._buckets
            for weight in bucket.weights
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _complete(self, bucket: _Bucket, weight: Tensor) -> None:  # noqa: ARG002
        """Count a gradient of the last backward pass, and send what is complete."""
        bucket.num_complete += 1
        if bucket.num_complete > len(bucket.weights):
            raise RuntimeError("a second backward pass of a model in the last item of GradientSum.passes")
        while self._num_sent < len(self._buckets):
            bucket = self._buckets[self._num_sent]
            if bucket.num_complete < len(bucket.weights):
                return
            self._send()

    def _send(self) -> None:
        self._buckets[self._num_sent].send(self._world)
        self._num_sent += 1

    def receive(self) -> None:
        """Send what is left, and wait for all sums."""
        while self._num_sent < len(self._buckets):
            self._send()
        for bucket in self._buckets:
            bucket.receive()
