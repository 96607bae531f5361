"""How fast a run is: seconds, real tokens and operations of each of its phases. Nothing of it goes into training."""

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

from rlhf_cli.training.distributed import World

T = TypeVar("T")

PHASES = {
    "sft": ("data", "step", "evaluation", "checkpoint"),
    "rm": ("data", "step", "evaluation", "checkpoint"),
    "ppo": ("rollout", "scoring", "reward", "update", "evaluation", "checkpoint"),
}
"""What time goes into; `data` is what a step waits for, `scoring` the forward passes over what was sampled."""
COMPUTING = ("step", "rollout", "scoring", "update")
"""Those of which the model's operations are counted."""
GB = 1024**3


@dataclass
class Count:
    """Of one phase, on this process or on all."""

    seconds: float = 0.0
    tokens: float = 0.0
    flops: float = 0.0


class Speed:
    """The phases of a stage, counted from row to row of its metrics and over the whole of it.

    Seconds are those of the first process; tokens and operations are summed over all of them. A checkpoint or an
    evaluation between two steps counts in the row of the step after it.
    """

    def __init__(self, stage: str, world: World):
        self.world = world
        self.peak_flops = 0.0
        """Operations a second of this process's device, measured once; 0 where it was not."""
        self.started = time.monotonic()
        self._now = {name: Count() for name in PHASES[stage]}
        self._total = {name: Count() for name in PHASES[stage]}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds inside as this phase's; a GPU is waited for, so that it is its own work that counts."""
        started = time.monotonic()
        try:
            yield
        finally:
            if self.world.device.type == "cuda":
                torch.cuda.synchronize(self.world.device)
            self.count(name, seconds=time.monotonic() - started)

    def timed(self, name: str, items: Iterator[T]) -> Iterator[T]:
        """The items, with the seconds that each is waited for counted as this phase's."""
        while True:
            with self.phase(name):
                found = list(islice(items, 1))
            if not found:
                return
            yield found[0]

    def count(self, name: str, *, seconds: float = 0.0, tokens: int = 0, flops: int = 0) -> None:
        """Add to a phase what this process did in it."""
        count = self._now[name]
        count.seconds += seconds
        count.tokens += tokens
        count.flops += flops

    def row(self) -> dict[str, float]:
        """The figures since the last row, for the metrics; all processes must ask.

        ``time/<phase>_s``; ``speed/<phase>_tokens_per_s`` of real tokens, prompts included, over all processes;
        ``speed/<phase>_mfu``, the operations of `Work` over those that the devices could have done in that time;
        ``memory/peak_gb``.
        """
        found: dict[str, float] = {}
        sums = self.world.sum_floats(
            {f"{name} {what}": getattr(c, what) for name, c in self._now.items() for what in ("tokens", "flops")}
        )
        for name, own in self._now.items():
            count = Count(own.seconds, sums[f"{name} tokens"], sums[f"{name} flops"])
            found[f"time/{name}_s"] = round(count.seconds, 4)
            if name in COMPUTING or count.tokens:
                found[f"speed/{name}_tokens_per_s"] = round(count.tokens / max(count.seconds, 1e-9), 1)
            if name in COMPUTING:
                found[f"speed/{name}_mfu"] = round(self._mfu(count), 4)
            total = self._total[name]
            total.seconds += count.seconds
            total.tokens += count.tokens
            total.flops += count.flops
            self._now[name] = Count()
        return found | {"memory/peak_gb": round(peak_memory(self.world.device) / GB, 3)}

    def line(self) -> str:
        """The whole run so far in a line: rates, model FLOPs utilisation, shares of the time, memory.

        What is in no phase (loading, saving the model, and what a stage does between them) is the rest of the shares.
        """
        for name, count in self._now.items():
            # After the last row there was an evaluation perhaps; its seconds need nobody else's.
            self._total[name].seconds += count.seconds
            self._now[name] = Count()
        rates = [
            f"{name} {count.tokens / count.seconds:,.0f} tokens/s"
            + (f" (MFU {self._mfu(count):.0%})" if self.peak_flops else "")
            for name, count in self._total.items()
            if name in COMPUTING and count.seconds > 0
        ]
        whole = max(time.monotonic() - self.started, 1e-9)
        shares = [f"{name} {c.seconds / whole:.0%}" for name, c in self._total.items() if c.seconds / whole >= 0.01]
        rest = 1 - sum(count.seconds for count in self._total.values()) / whole
        peak = f"peak {self.peak_flops / 1e9:,.0f} GFLOPS; " if self.peak_flops else ""
        return (
            f"speed: {', '.join(rates)}; {peak}time: {', '.join([*shares, f'rest {max(rest, 0.0):.0%}'])}; "
            f"memory at most {peak_memory(self.world.device) / GB:.2f} GB"
        )

    def _mfu(self, count: Count) -> float:
        """Model FLOPs utilisation; 0 without a measured peak."""
        could = self.peak_flops * self.world.size * count.seconds
        return count.flops / could if could > 0 else 0.0


def peak_memory(device: torch.device) -> int:
    """The most bytes so far: a GPU's of this process, else what this process had in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
