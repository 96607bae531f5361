"""The speed of a run: seconds, tokens and FLOPs of each phase."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import torch

from rlhf_cli.processes.distributed import World

T = TypeVar("T")

PHASES = {
    "sft": ("data", "step", "evaluation", "checkpoint"),
    "rm": ("data", "step", "evaluation", "checkpoint"),
    "ppo": ("rollout", "scoring", "reward", "update", "evaluation", "checkpoint"),
}
"""The phases of each stage. `data` is the wait for a batch, `scoring` the forward passes over responses."""
COMPUTING = ("step", "rollout", "scoring", "update")  # phases whose model FLOPs are counted
GB = 1024**3


@dataclass
class Count:
    """Totals of one phase, on one process or on all."""

    seconds: float = 0.0
    tokens: float = 0.0
    flops: float = 0.0

    def add(self, other: Count) -> None:
        self.seconds += other.seconds
        self.tokens += other.tokens
        self.flops += other.flops


class Speed:
    """Counts the phases of a stage, for each row of metrics and for the whole run.

    Seconds are this process's; tokens and FLOPs are summed over all processes.
    """

    def __init__(self, stage: str, world: World):
        self.world = world
        self.peak_flops = 0.0  # measured FLOPs per second of this process's device; 0 if not measured
        self.started = time.monotonic()
        self._now = {name: Count() for name in PHASES[stage]}
        self._total = {name: Count() for name in PHASES[stage]}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds inside the block. Waits for the GPU, so that its work counts in the right phase."""
        started = time.monotonic()
        try:
            yield
        finally:
            if self.world.device.type == "cuda":
                torch.cuda.synchronize(self.world.device)
            self.count(name, seconds=time.monotonic() - started)

    def timed(self, name: str, items: Iterator[T]) -> Iterator[T]:
        """Yield the items, and count the seconds spent waiting for each."""
        while True:
            with self.phase(name):
                one = list(islice(items, 1))
            if not one:
                return
            yield from one

    def count(self, name: str, *, seconds: float = 0.0, tokens: int = 0, flops: int = 0) -> None:
        """Add work of this process to a phase."""
        self._now[name].add(Count(seconds, tokens, flops))

    def row(self) -> dict[str, float]:
        """The metrics since the last row. All processes must call this.

        ``time/<phase>_s``; ``speed/<phase>_tokens_per_s`` of all processes, without padding and with prompts;
        ``speed/<phase>_mfu``, model FLOPs (`Work`) divided by what the devices could have done in that time;
        ``memory/peak_gb``.
        """
        row: dict[str, float] = {}
        counts = {f"{name} {what}": getattr(c, what) for name, c in self._now.items() for what in ("tokens", "flops")}
        sums = self.world.sum_floats(counts)
        for name, mine in self._now.items():
            count = Count(mine.seconds, sums[f"{name} tokens"], sums[f"{name} flops"])
            row[f"time/{name}_s"] = round(count.seconds, 4)
            if name in COMPUTING or count.tokens:
                row[f"speed/{name}_tokens_per_s"] = round(count.tokens / max(count.seconds, 1e-9), 1)
            if name in COMPUTING:
                row[f"speed/{name}_mfu"] = round(self._mfu(count), 4)
            self._total[name].add(count)
            self._now[name] = Count()
        return row | {"memory/peak_gb": round(peak_memory(self.world.device) / GB, 3)}

    def line(self) -> str:
        """A summary of the run: tokens per second, model FLOPs utilization (MFU), shares of the time, memory."""
        for name, count in self._now.items():
            self._total[name].add(count)  # for example an evaluation after the last row
            self._now[name] = Count()
        rates = [
            f"{name} {count.tokens / count.seconds:,.0f} tokens/s"
            + (f" (MFU {self._mfu(count):.0%})" if self.peak_flops else "")
            for name, count in self._total.items()
            if name in COMPUTING and count.seconds > 0
        ]
        total = max(time.monotonic() - self.started, 1e-9)
        shares = [f"{name} {c.seconds / total:.0%}" for name, c in self._total.items() if c.seconds / total >= 0.01]
        shares.append(f"rest {max(0.0, 1 - sum(count.seconds for count in self._total.values()) / total):.0%}")
        peak = f"peak {self.peak_flops / 1e9:,.0f} GFLOPS; " if self.peak_flops else ""
        return (
            f"speed: {', '.join(rates) or 'no step'}; {peak}time: {', '.join(shares)}; "
            f"peak memory {peak_memory(self.world.device) / GB:.2f} GB"
        )

    def _mfu(self, count: Count) -> float:
        """Model FLOPs utilization; 0 without a measured peak."""
        possible = self.peak_flops * self.world.size * count.seconds
        return count.flops / possible if possible > 0 else 0.0


def peak_memory(device: torch.device) -> int:
    """Peak bytes so far, allocated on the GPU or resident in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
