"""Where a stage's time goes, operation by operation: calls, bytes and rate of each, for every phase of its steps.

    python benchmarks/operations.py sft configs/support --set artifacts=DIR
    python benchmarks/operations.py ppo configs/support --set artifacts=DIR     # DIR has the stages before it

Runs the first steps of a stage on one core, in a copy that is thrown away. Takes the processor time of every operation
of torch. An operation's bytes are the sizes of the tensors that it takes and gives; a view has none. Its rate is what
its products compute per second, or what it reads and writes. The phase as a whole is timed in a run of its own, without
the counting. What it takes beyond its operations is Python, autograd and the calls themselves.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cli.processes.environment import set_up_process

set_up_process()  # Before torch is imported, as in the `rlhf` command.

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402

from rlhf_cli.config.loader import load_config  # noqa: E402
from rlhf_cli.config.ppo import PPOConfig  # noqa: E402
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig  # noqa: E402
from rlhf_cli.training.speed import Speed  # noqa: E402

CONFIGS: dict[str, tuple[type, str]] = {
    "sft": (SFTConfig, "training.num_steps"),
    "rm": (RMConfig, "training.num_steps"),
    "ppo": (PPOConfig, "ppo.num_iterations"),
}
"""A stage's config, and its key for the number of steps."""
SMALL = 0.01
"""An operation with a smaller share of its phase's seconds is not listed, nor a phase with one of the whole."""


@dataclass
class Cost:
    """What the calls of one operation cost in one phase."""

    calls: int = 0
    seconds: float = 0.0
    bytes: int = 0
    flops: int = 0


class Counter(TorchDispatchMode):
    """Counts each operation under the name of the phase that is running."""

    def __init__(self) -> None:
        super().__init__()
        self.phase: str | None = None
        self.costs: dict[str, dict[str, Cost]] = defaultdict(lambda: defaultdict(Cost))
        self.seconds: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.thread_time()
        result = func(*args, **(kwargs or {}))
        seconds = time.thread_time() - began
        if self.phase is not None:
            cost = self.costs[self.phase][func.overloadpacket.__name__]
            cost.calls += 1
            cost.seconds += seconds
            if not func.is_view:
                tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
                cost.bytes += sum(t.nbytes for t in tensors)
            if (count := flop_registry.get(func.overloadpacket)) is not None:
                cost.flops += count(*args, **(kwargs or {}), out_val=result)
        return result


def measure(stage: str, folder: Path, settings: list[str], steps: int) -> Counter:
    """Run the first steps of a stage twice: for the seconds of its phases, and for what its operations cost."""
    counter = Counter()
    timed = Speed.phase

    @contextmanager
    def phase(self: Speed, name: str) -> Iterator[None]:
        counter.phase, began = name, time.thread_time()
        try:
            with timed(self, name):
                yield
        finally:
            if not counter.costs:
                counter.seconds[name] += time.thread_time() - began
            counter.phase = None

    Speed.phase = phase  # type: ignore[method-assign]
    kind, key = CONFIGS[stage]
    config: Any = load_config(folder / f"{stage}.yaml", kind, [f"{key}={steps}", "threads=1", *settings])
    run = importlib.import_module(f"stages.{stage}").run
    run(config, quiet=True, restart=True)
    with counter:
        run(config, quiet=True, restart=True)
    return counter


def report(counter: Counter, steps: int) -> str:
    """The tables in Markdown: milliseconds and calls of a step."""
    lines = []
    for phase, costs in counter.costs.items():
        total = counter.seconds[phase]
        if total < SMALL * sum(counter.seconds.values()):
            continue
        lines += [f"{phase}, {1e3 * total / steps:,.0f} ms per step:", ""]
        lines += ["| operation | share | ms | calls | MB | rate |", "|---|---|---|---|---|---|"]
        for name, cost in sorted(costs.items(), key=lambda item: -item[1].seconds):
            if cost.seconds >= SMALL * total:
                rate = f"{cost.flops / cost.seconds / 1e9:,.0f} GFLOPS"
                if not cost.flops:
                    rate = f"{cost.bytes / cost.seconds / 1e9:,.0f} GB/s"
                cells = [name, f"{cost.seconds / total:.0%}", f"{1e3 * cost.seconds / steps:,.1f}"]
                cells += [f"{cost.calls / steps:,.0f}", f"{cost.bytes / steps / 1e6:,.0f}", rate]
                lines.append("| " + " | ".join(cells) + " |")
        rest = total - sum(cost.seconds for cost in costs.values())
        lines += [f"| the rest | {rest / total:.0%} | {1e3 * rest / steps:,.1f} | | | |", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=CONFIGS)
    parser.add_argument("folder", type=Path, help="the folder of the stage's config file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of `rlhf`")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    given = dict(setting.split("=", 1) for setting in args.set)
    with tempfile.TemporaryDirectory() as copy:
        for stage in Path(given["artifacts"]).resolve().iterdir() if "artifacts" in given else ():
            if stage.name in CONFIGS and stage.name != args.stage:
                (Path(copy) / stage.name).symlink_to(stage)
        settings = [f"{key}={value}" for key, value in (given | {"artifacts": copy}).items()]
        print(report(measure(args.stage, args.folder, settings, args.steps), args.steps))


if __name__ == "__main__":
    main()
