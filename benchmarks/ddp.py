"""Measure how gradients of whole copies are summed: as the stages do, after the backward pass, and by torch's DDP.

    python benchmarks/ddp.py                                  # Llamas of 3 M and 25 M parameters, 2 processes, 15 steps
    python benchmarks/ddp.py --sizes tiny --steps 3           # seconds
    python benchmarks/ddp.py --microbatches 4 --processes 4

Each size is one run in which steps of all ways alternate on the same model and batch, in random order. So other
programs slow all of them. A step is forward and backward passes over the microbatches and the sum:

    none      no sum
    flat      one reduction of all gradients after the backward pass
    own       `GradientSum` of the stages, in buckets while the last backward pass computes
    ddp       torch's DDP with its defaults, which sums in the last microbatch

Prints the median milliseconds of each, and its median ratio to the neighbouring step of `flat` with the range of the
middle half. A ratio below 1 is faster than the flat reduction.
"""

from __future__ import annotations

if __name__ == "__main__":  # Before torch is imported, which reads these settings.
    from rlhf_cli.processes.environment import set_up_process

    set_up_process()

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_cli.processes import distributed
from rlhf_cli.processes.distributed import World
from rlhf_cli.processes.launcher import run_processes
from rlhf_cli.processes.microbatches import GradientSum

SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    "3M": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 5},
    "25M": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 7},
}
ROWS, LENGTH, VOCABULARY = 4, 128, 4096
WAYS = ("none", "flat", "own", "ddp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["3M", "25M"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    if "RANK" in os.environ:
        world = distributed.start("cpu")
        measure(args.sizes[0], args.microbatches, args.steps, world)
        distributed.stop()
        return
    for size in args.sizes:
        options = ["--sizes", size, "--microbatches", str(args.microbatches), "--steps", str(args.steps)]
        code = run_processes([sys.executable, __file__, *options], args.processes, "")
        if code:
            sys.exit(code)


def measure(size: str, num_microbatches: int, num_steps: int, world: World) -> None:
    """Print the figures of one size."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "vocab_size": VOCABULARY, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(**SIZES[size], **heads))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(world.rank))
    gradients = {way: step(ddp, ids, way, num_microbatches, world)[1] for way in WAYS[1:]}
    torch.testing.assert_close(gradients["own"], gradients["flat"], rtol=1e-4, atol=1e-6)
    # DDP averages, a stage sums.
    torch.testing.assert_close(gradients["ddp"] * world.size, gradients["flat"], rtol=1e-3, atol=1e-5)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    order = random.Random(0)
    for _ in range(num_steps):
        for way in order.sample(WAYS, len(WAYS)):
            seconds[way].append(step(ddp, ids, way, num_microbatches, world)[0])
    if not world.is_main:
        return
    print(
        f"{model.num_parameters() / 1e6:.1f} M parameters, {world.size} processes, {num_microbatches} microbatches of "
        f"{ROWS} x {LENGTH} tokens; load average {os.getloadavg()[0]:.1f}"
    )
    for way in WAYS:
        ratios = [one / flat for one, flat in zip(seconds[way], seconds["flat"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        median = 1000 * statistics.median(seconds[way])
        print(f"  {way:5} {median:7,.0f} ms, {middle:.2f} of flat ({low:.2f} to {high:.2f})", flush=True)


def step(
    ddp: DistributedDataParallel, ids: torch.Tensor, way: str, num_microbatches: int, world: World
) -> tuple[float, torch.Tensor]:
    """(seconds until all processes have their gradients, the gradient of the embeddings)."""
    ddp.zero_grad(set_to_none=True)
    world.barrier()
    began = time.perf_counter()
    total = GradientSum(world, lambda loss: loss, ddp.module)

    def loss_of(piece: Sequence[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        sums_now = way == "ddp" and piece[0] == num_microbatches - 1
        with nullcontext() if sums_now else ddp.no_sync():
            return ddp(input_ids=ids, labels=ids).loss, {}

    total.add([[number] for number in range(num_microbatches)], loss_of, last=way == "own")
    if way == "own":
        total.receive()
    if way == "flat":
        sum_flat(list(ddp.parameters()))
    mine = torch.tensor(time.perf_counter() - began)
    torch.distributed.all_reduce(mine, op=torch.distributed.ReduceOp.MAX)
    gradient = ddp.module.get_input_embeddings().weight.grad
    return mine.item(), gradient.clone()


def sum_flat(weights: list[torch.nn.Parameter]) -> None:
    """Sum all gradients as one tensor."""
    flat = torch.cat([weight.grad.reshape(-1) for weight in weights])
    torch.distributed.all_reduce(flat)
    for weight, part in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
        weight.grad = part.view_as(weight)


if __name__ == "__main__":
    main()
