"""Measure how long the processes of a PPO run take to exchange a rollout, and the memory that it needs.

    python benchmarks/exchange.py                                    # 1,024 responses of 1,024 tokens, 4 processes
    python benchmarks/exchange.py --processes 2 --responses 256

Each process has its share of the responses: token ids, log-probabilities of the sampler and of both models, values,
advantages, returns.
Prints the seconds, the processor seconds of a process, the bytes of a token on the network, and by how much the peak
memory of the largest process grows: as tensors, which is what a run does, and as pickled objects for comparison.
Medians of five.
"""

from __future__ import annotations

if __name__ == "__main__":  # Before torch is imported, which reads these settings.
    from rlhf_cli.processes.environment import set_up_process

    set_up_process()

import argparse
import itertools
import os
import pickle
import statistics
import sys
import time
from functools import partial

import torch

from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.data.records import Record
from rlhf_cli.ppo.update import TENSORS, UpdateBatch, from_all_processes, merge, select
from rlhf_cli.processes import distributed
from rlhf_cli.processes.distributed import World
from rlhf_cli.processes.launcher import run_processes
from rlhf_cli.rollout.sampling import Response
from rlhf_cli.training.speed import peak_memory

MB = 1024**2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--responses", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--pickled", action="store_true", help="measure pickled objects (started by this script)")
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(args.responses, args.tokens, pickled=args.pickled)
        return
    sizes = ["--responses", str(args.responses), "--tokens", str(args.tokens)]
    print(f"{args.responses:,} responses of {args.tokens:,} tokens on {args.processes} processes, gloo, CPU")
    for more in ([], ["--pickled"]):
        code = run_processes([sys.executable, __file__, *sizes, *more], args.processes, "")
        if code:
            sys.exit(code)


def measure(num_responses: int, num_tokens: int, *, pickled: bool) -> None:
    """Exchange a rollout five times, and print the figures on the first process."""
    world = distributed.start("cpu")
    batch = share(num_responses, num_tokens, world)
    prompts = batch.prompts * world.size
    exchange = (
        partial(gathered, batch, world) if pickled else partial(from_all_processes, batch, lambda: prompts, world, 1)
    )
    world.barrier()
    before = peak_memory(world.device)
    seconds, processor_s = [], []
    for _ in range(5):
        world.barrier()
        began, began_cpu = time.monotonic(), time.process_time()
        exchange()
        seconds.append(time.monotonic() - began)
        processor_s.append(time.process_time() - began_cpu)
    grown = max(world.gather(peak_memory(world.device) - before)) / MB
    # As tensors: int32 ids and the float32 numbers of each token.
    size = len(pickle.dumps(batch)) / (len(batch.responses) * num_tokens) if pickled else 4 + 4 * (len(TENSORS) - 1)
    if world.is_main:
        name = "pickled objects" if pickled else "tensors"
        print(
            f"{name}: {statistics.median(seconds):.2f} s, {statistics.median(processor_s):.2f} processor seconds, "
            f"{size:.1f} bytes a token, peak memory +{grown:.0f} MB"
        )
    world.barrier()
    distributed.stop()


def gathered(batch: UpdateBatch, world: World) -> UpdateBatch:
    """The rows of all processes, exchanged as pickled objects."""
    shards = world.gather(batch)
    ends = list(itertools.accumulate(len(shard.responses) for shard in shards))
    rows = [range(end - len(shard.responses), end) for shard, end in zip(shards, ends, strict=True)]
    return select(merge(shards), world.interleave(rows))


def share(num_responses: int, num_tokens: int, world: World) -> UpdateBatch:
    """This process's share of a random rollout."""
    count = len(world.shard(range(num_responses)))
    ids = torch.randint(50_000, (count, num_tokens)).tolist()
    responses = [Response(row, torch.randn(num_tokens).tolist(), True) for row in ids]
    prompts = [PromptRow("a prompt", list(range(64)), Record("a prompt", f"row {i}")) for i in range(count)]
    tensors = {name: torch.randn(count, num_tokens) for name in TENSORS}
    tensors["response_mask"] = torch.ones(count, num_tokens, dtype=torch.bool)
    return UpdateBatch(prompts, responses, **tensors)


if __name__ == "__main__":
    main()
