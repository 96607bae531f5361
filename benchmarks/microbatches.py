"""Measure processor time per token and peak memory against the tokens per microbatch, on one core.

    python benchmarks/microbatches.py               # both models, about 4 minutes
    python benchmarks/microbatches.py --models a

Rows have 90 tokens on average (lognormal, 8 to 400), of which the second half is learned. A forward and backward pass
and a forward pass alone are timed; the sizes take turns in one process, and the minimum over the rounds counts. Memory
is measured in one process per size, which returns freed memory immediately, and printed beside the cost model of
`auto`.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rlhf_cli.data.batches import Budget
from rlhf_cli.models.forward import target_logits
from rlhf_cli.models.load import prepare
from rlhf_cli.plan.memory import Batch, Held, Setting
from rlhf_cli.plan.shapes import shape_of_loaded
from rlhf_cli.processes.environment import set_up_process
from rlhf_cli.tensor_ops import token_logprobs

SHAPES = {"a": (128, 344, 4, 4, 2048), "b": (512, 1376, 6, 8, 8192)}
"""hidden, intermediate, layers, heads, vocabulary."""
SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384)
TOTAL = {"a": 16384, "b": 4096}


def new(name: str) -> PreTrainedModel:
    hidden, intermediate, layers, heads, vocabulary = SHAPES[name]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        vocab_size=vocabulary,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    note = prepare(model, torch.device("cpu"))
    assert note is None, note
    return model


def rows(name: str) -> list[list[int]]:
    draw = random.Random(0)
    found: list[list[int]] = []
    while sum(map(len, found)) < TOTAL[name]:
        length = max(8, min(400, int(draw.lognormvariate(4.45, 0.43))))
        found.append([draw.randrange(SHAPES[name][-1]) for _ in range(length)])
    return found


def work(model: PreTrainedModel, sequences: list[list[int]], size: int, *, backward: bool) -> None:
    for part in Budget(size).cut([len(ids) for ids in sequences]):
        some = [sequences[i] for i in part]
        with torch.set_grad_enabled(backward):
            logits, targets = target_logits(
                model, some, [[j >= len(ids) // 2 for j in range(len(ids))] for ids in some]
            )
            loss = -token_logprobs(logits, targets).sum()
        if backward:
            loss.backward()


def compare_times(name: str, rounds: int) -> None:
    model, sequences = new(name), rows(name)
    num_tokens = sum(map(len, sequences))
    sizes = [size for size in SIZES if size <= TOTAL[name]]
    for backward in (True, False):
        work(model, sequences, sizes[0], backward=backward)
        best = dict.fromkeys(sizes, float("inf"))
        for _ in range(rounds):
            for size in sizes:
                started = time.process_time()
                work(model, sequences, size, backward=backward)
                best[size] = min(best[size], time.process_time() - started)
        least = min(best.values())
        for size in sizes:
            what = "forward and backward" if backward else "forward"
            print(
                f"{name}  {what:20}  {size:6} tokens  {best[size] / num_tokens * 1e6:7.1f} us/token  "
                f"{best[size] / least:.2f}",
                flush=True,
            )


def print_peak(name: str, size: int) -> None:
    """Peak memory of a forward and backward pass over one microbatch, above that before it (Linux)."""
    model, sequences = new(name), rows(name)
    part = Budget(size).cut([len(ids) for ids in sequences])[0]
    some = [sequences[i] for i in part]
    work(model, some[-1:], size, backward=True)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    work(model, some, size, backward=True)
    num_tokens = sum(map(len, some))
    learned = sum(len(ids) - len(ids) // 2 for ids in some)
    held = Held("model", shape_of_loaded(model, "float32"), Setting("cpu"))
    planned = sum(held.in_training(Batch(num_tokens, learned, 1)).values())
    print(f"{name}  {num_tokens:6} tokens  {_status('VmHWM') - before:7.1f} MB  planned {planned / 2**20:.1f} MB")


def _status(key: str) -> float:
    """A field of /proc/self/status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", nargs=2, metavar=("MODEL", "TOKENS"), help="measure only the memory of this size")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.peak:
        print_peak(args.peak[0], int(args.peak[1]))
        return
    for name in args.models:
        compare_times(name, args.rounds)
        for size in (1024, 2048, 4096):
            # Freed memory is returned immediately; otherwise earlier use would hide the need.
            keeps_nothing = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0"}
            command = [sys.executable, __file__, "--peak", name, str(size)]
            subprocess.run(command, env={**os.environ, **keeps_nothing}, check=True)


if __name__ == "__main__":
    set_up_process()
    main()
