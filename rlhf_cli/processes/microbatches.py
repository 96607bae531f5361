"""Run the passes of all microbatches, several at the same time, and sum their gradients over threads and processes.

A CPU computes several microbatches at the same time, each in a thread of its own (threads.py). Results and gradients
are taken in the order of the microbatches, so the number of threads changes no number. All processes take part in each
pass of a sharded model, so one that has fewer microbatches than another gets empty ones, whose sums and gradients are 0
(`models/forward.py`). Microbatches must not depend on each other.

As in torch's DDP, gradients are sent in buckets, from the last layer to the first, as soon as a bucket is complete. DDP
itself averages them, and needs a backward pass on every process. Here a process without a row in a step sends zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlhf_cli.processes.distributed import World
from rlhf_cli.processes.sharding import is_sharded, most
from rlhf_cli.processes.threads import cores, in_threads, is_large, num_threads

R = TypeVar("R")
Rows = Sequence[int]
"""The numbers of the rows of a microbatch."""
Loss = Callable[[Rows], tuple[Tensor, Mapping[str, Tensor]]]
"""From the rows of a microbatch to a loss and its statistics."""

COPIES_BYTES = 2 * 2**30
"""The most memory for the gradients of passes that run at the same time, or wait to be added. If not even two fit,
passes run in turn."""
BUCKET_BYTES = 25 * 2**20
"""The largest bucket in float32, as in DDP. A larger gradient is sent alone."""


def over_microbatches(
    microbatches: Sequence[Rows],
    *passes: Callable[[Rows], R],
    models: Sequence[nn.Module | None] = (),
    in_turn: bool = False,
) -> list[R]:
    """The results of all passes of the first microbatch, then of the second, and so on.

    Passes must not depend on each other. `models` compute in them; if one is sharded, all processes must call this.
    With `in_turn` no two passes run at the same time.

    >>> over_microbatches([[4, 1], [2]], sum, len)
    [5, 2, 2, 1]
    """
    everything = [*microbatches, *[()] * _num_missing(len(microbatches), models)]
    tasks = [partial(compute, rows) for rows in everything for compute in passes]
    most = 1 if in_turn or not _can_thread(models) else None
    return list(in_threads(tasks, most, wide=is_large(*models)))[: len(microbatches) * len(passes)]


def _can_thread(models: Sequence[nn.Module | None]) -> bool:
    """Whether passes of these models may run at the same time: on a CPU, unsharded, and without state of their own."""
    for model in filter(None, models):
        weight = next(model.parameters(), None)
        if is_sharded(model) or weight is None or weight.device.type != "cpu":
            return False
        # Some rotary embeddings write their frequencies for the longest text that they have read.
        config = getattr(model, "config", None)
        text = getattr(config, "get_text_config", lambda config=config: config)()
        rope = getattr(text, "rope_parameters", None) or {}
        if "dynamic" in str(rope) or "longrope" in str(rope):
            return False
    return True


def _num_missing(count: int, models: Sequence[nn.Module | None]) -> int:
    """How many passes another process makes more than this one, which makes `count`; 0 if no model is sharded."""
    return most(count) - count if any(map(is_sharded, filter(None, models))) else 0


@dataclass
class _Bucket:
    weights: list[nn.Parameter] = field(default_factory=list)
    num_bytes: int = 0
    num_complete: int = 0
    """Gradients that the last backward pass has completed."""
    sums: Tensor | None = None
    """The gradients end to end, in float32; summed over the processes when `wait` returns."""
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
    """Adds up the gradients of microbatches, then sums them over the processes.

        gradients = GradientSum(world, loss_scale.scaled, model)
        stats = gradients.add(microbatches, loss_of_rows)
        gradients.receive()

    Every process sends its buckets in the same order. FSDP itself sums the gradients of a sharded model.

    Args:
        world: the processes.
        scaled: multiplies a loss by its scale, which is 1 except in float16.
        models: those whose gradients are summed.
        beside: further models that compute in the passes.
        in_turn: compute no two passes at the same time.
    """

    def __init__(
        self,
        world: World,
        scaled: Callable[[Tensor], Tensor],
        *models: nn.Module,
        beside: Sequence[nn.Module | None] = (),
        in_turn: bool = False,
    ):
        self._world, self._scaled, self._models = world, scaled, (*models, *beside)
        self._weights = [weight for model in models for weight in model.parameters() if weight.requires_grad]
        self._is_large = is_large(*self._models)
        size = sum(weight.numel() * weight.element_size() for weight in self._weights)
        self._at_once = 1 if in_turn or not _can_thread(self._models) else max(1, COPIES_BYTES // max(1, size))
        self._buckets: list[_Bucket] = []
        self._num_sent = 0
        # The passes of a sharded model exchange weights, and all exchanges must be in the same order everywhere.
        self._overlaps = not any(map(is_sharded, filter(None, self._models)))
        for weight in (p for model in models for p in reversed(list(model.parameters()))):
            if world.size == 1 or not weight.requires_grad or isinstance(weight, DTensor):
                continue
            num_bytes = 4 * weight.numel()
            if not self._buckets or self._buckets[-1].num_bytes + num_bytes > BUCKET_BYTES:
                self._buckets.append(_Bucket())
            self._buckets[-1].weights.append(weight)
            self._buckets[-1].num_bytes += num_bytes

    def add(self, microbatches: Sequence[Rows], *losses: Loss, last: bool = True) -> list[dict[str, Tensor]]:
        """Add the gradients of each microbatch; returns the statistics of each.

        A thread backpropagates each of `losses` before it computes the next one. Each may make one backward pass of a
        model. Sums over the processes begin in the last microbatch; give `last=False` if more follow.
        """
        if min(num_threads(), self._at_once, len(microbatches) * len(losses)) > 1:
            return self._add_in_threads(microbatches, losses)
        with cores(num_threads()) if self._is_large else nullcontext():
            return self._add_in_turn(microbatches, losses, last=last)

    def _add_in_turn(self, parts: Sequence[Rows], losses: Sequence[Loss], *, last: bool) -> list[dict[str, Tensor]]:
        everything = [*parts, *[()] * _num_missing(len(parts), self._models)]
        found: list[dict[str, Tensor]] = []
        for number, rows in enumerate(everything, start=1):
            stats: dict[str, Tensor] = {}
            with ExitStack() as hooks:
                if self._overlaps and last and number == len(everything):
                    for bucket in self._buckets:
                        for weight in bucket.weights:
                            handle = weight.register_post_accumulate_grad_hook(partial(self._complete, bucket))
                            hooks.callback(handle.remove)
                for loss_of in losses:
                    loss, figures = loss_of(rows)
                    if loss.requires_grad:
                        self._scaled(loss).backward()
                    stats |= figures
            found.append(stats)
        return found

    def _add_in_threads(self, parts: Sequence[Rows], losses: Sequence[Loss]) -> list[dict[str, Tensor]]:
        """`add` with passes at the same time, each of which has its gradients to itself until its turn."""

        def gradients_of(rows: Rows, loss_of: Loss) -> tuple[Sequence[Tensor | None], Mapping[str, Tensor]]:
            loss, figures = loss_of(rows)
            if not loss.requires_grad:
                return [], figures
            return torch.autograd.grad(self._scaled(loss), self._weights, allow_unused=True), figures

        tasks = [partial(gradients_of, rows, loss_of) for rows in parts for loss_of in losses]
        found: list[dict[str, Tensor]] = [{} for _ in parts]
        for number, (gradients, figures) in enumerate(in_threads(tasks, self._at_once, wide=self._is_large)):
            found[number // len(losses)] |= figures
            for weight, gradient in zip(self._weights, gradients, strict=bool(gradients)):
                if gradient is not None:
                    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        return found

    def _complete(self, bucket: _Bucket, weight: Tensor) -> None:  # noqa: ARG002
        """Count a gradient of the last backward pass, and send the complete buckets, in their order."""
        bucket.num_complete += 1
        if bucket.num_complete > len(bucket.weights):
            raise RuntimeError("a second backward pass of a model in the last microbatch of GradientSum.add")
        for bucket in self._buckets[self._num_sent :]:
            if bucket.num_complete < len(bucket.weights):
                return
            bucket.send(self._world)
            self._num_sent += 1

    def receive(self) -> None:
        """Send what is left, and wait for all sums."""
        for bucket in self._buckets[self._num_sent :]:
            bucket.send(self._world)
        for bucket in self._buckets:
            bucket.receive()
