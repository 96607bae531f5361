"""The loop over passes: every process makes equally many, and the sums of their gradients begin in the last one.

A process cuts its rows into pieces, one for each pass. All processes take part in each pass of a sharded model, so one
that has fewer pieces than another gets empty ones. A pass over no rows computes two tokens that nothing reads
(`models/forward.py`): its sums are 0, and its gradient is 0 for each trained weight. So a caller writes one function
from rows to numbers, and does not ask whether a model is sharded. Pieces must not depend on each other.

As in torch's DDP, gradients are sent in buckets, from the last layer to the first, and a bucket is sent as soon as its
gradients are complete. DDP itself averages them, and needs a backward pass on every process. Here a loss is a sum
divided by a count over all processes, and a process without a row in a step sends zeros. The sums take the place of the
gradients, so they need the memory of one bucket beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlhf_cli.processes.distributed import World
from rlhf_cli.processes.sharding import is_sharded, most

R = TypeVar("R")
Rows = Sequence[int]
"""The numbers of the rows of a piece."""
Loss = Callable[[Rows], tuple[Tensor, Mapping[str, Tensor]]]
"""From the rows of a piece to a loss and its statistics."""

BUCKET_BYTES = 25 * 2**20
"""The largest bucket in float32, as in DDP. A larger gradient is sent alone."""


def over_pieces(pieces: Sequence[Rows], compute: Callable[[Rows], R], *models: nn.Module | None) -> list[R]:
    """The result of each piece, in order. With sharded models among those that compute, all processes must call this.

    >>> over_pieces([[4, 1], [2]], sum)
    [5, 2]
    """
    missing = _num_missing(len(pieces), models)
    results = [compute(rows) for rows in pieces]
    for _ in range(missing):
        compute([])
    return results


def _num_missing(count: int, models: Sequence[nn.Module | None]) -> int:
    """How many passes another process makes more than this one, which makes `count`; 0 if no model is sharded."""
    shares_passes = any(model is not None and is_sharded(model) for model in models)
    return most(count) - count if shares_passes else 0


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
    """Adds up the gradients of pieces, then sums them over the processes.

        gradients = GradientSum(world, loss_scale.backward, model)
        stats = gradients.add(pieces, loss_of_rows)
        gradients.receive()

    A bucket is sent when all before it are, so that every process sends them in the same order. Weights of a sharded
    model are left out: FSDP sums their gradients. With one process nothing is sent.

    Args:
        world: the processes.
        backward: computes the gradient of a loss.
        models: those whose gradients are summed.
        beside: further models that compute in the passes.
    """

    def __init__(
        self,
        world: World,
        backward: Callable[[Tensor], None],
        *models: nn.Module,
        beside: Sequence[nn.Module | None] = (),
    ):
        self._world, self._backward, self._models = world, backward, (*models, *beside)
        self._buckets: list[_Bucket] = []
        self._num_sent = 0
        self._overlaps = False
        if world.size == 1:
            return
        # The passes of a sharded model exchange weights, and all exchanges must be in the same order everywhere.
        self._overlaps = not any(model is not None and is_sharded(model) for model in self._models)
        for weight in (p for model in models for p in reversed(list(model.parameters()))):
            if not weight.requires_grad or isinstance(weight, DTensor):
                continue
            num_bytes = 4 * weight.numel()
            if not self._buckets or self._buckets[-1].num_bytes + num_bytes > BUCKET_BYTES:
                self._buckets.append(_Bucket())
            self._buckets[-1].weights.append(weight)
            self._buckets[-1].num_bytes += num_bytes

    def add(self, pieces: Sequence[Rows], *losses: Loss, last: bool = True) -> list[dict[str, Tensor]]:
        """Add the gradients of each piece; returns the statistics of each.

        The graph of each of `losses` is freed before the next one is computed. Each may make one backward pass of a
        model. The sums begin in the last piece, unless `last` is false: then further pieces follow.
        """
        everything = [*pieces, *[()] * _num_missing(len(pieces), self._models)]
        found: list[dict[str, Tensor]] = []
        for number, rows in enumerate(everything, start=1):
            sends = self._overlaps and last and number == len(everything)
            stats: dict[str, Tensor] = {}
            with self._sending() if sends else nullcontext():
                for loss_of in losses:
                    loss, figures = loss_of(rows)
                    if loss.requires_grad:
                        self._backward(loss)
                    stats |= figures
            found.append(stats)
        return found

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
            raise RuntimeError("a second backward pass of a model in the last piece of GradientSum.add")
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
