"""Measure memory, traffic and time of sharded training on 1, 2 and 4 processes of this machine, against whole copies.

    python benchmarks/sharding.py                          # a Llama of 90 M parameters, 1, 2 and 4 processes
    python benchmarks/sharding.py --processes 2 --whole    # whole copies
    unshare -rn sh -c "ip link set lo up; python benchmarks/sharding.py"  # without other programs' traffic

Each step trains on 8 rows of 128 tokens (SFT in float32, tied embeddings, vocabulary 32,001), shared out to the
processes, each with one thread. Memory is what a process holds above its imports: its peak while the model is built,
after the build, between two steps, and its peak in a step. Traffic is what passes through the loopback device in a
step, all processes together, and so whatever else this machine sends to itself.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_cli.config.stage import Optimizer
from rlhf_cli.data.batches import Budget
from rlhf_cli.data.encode import Example
from rlhf_cli.models.load import load_policy, prepare
from rlhf_cli.models.shard import shard_model
from rlhf_cli.processes import distributed
from rlhf_cli.processes.environment import set_up_process
from rlhf_cli.training.bad_steps import LossScale
from rlhf_cli.training.optimizer import build_stepper
from stages.sft import _accumulate

ROWS, LENGTH, STEPS = 8, 128, 4
SHAPE = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 9,
    "num_attention_heads": 12,
    "vocab_size": 32_001,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


def held(name: str = "VmRSS") -> float:
    """The memory of this process in MB."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.split(f"{name}:")[1].split()[0]) / 1024


def peak() -> float:
    """The largest memory of this process since `forget_peak`, in MB."""
    return held("VmHWM")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def sent() -> int:
    """The bytes that the loopback device has sent."""
    # /sys/class/net would show the device of another network namespace after `unshare`.
    lines = Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines()
    [numbers] = [line.partition(":")[2].split() for line in lines if line.strip().startswith("lo:")]
    return int(numbers[8])


def train(folder: str, *, whole: bool) -> dict[str, float]:
    """Train in this process; its figures."""
    world = distributed.start("cpu")
    sharded = world.size > 1 and not whole
    rows = [
        Example([(7 * i + 31 * r) % 32_000 + 1 for i in range(LENGTH)], [i > 0 for i in range(LENGTH)], "")
        for r in range(ROWS)
    ]
    forget_peak()
    imports = held()
    model = load_policy(folder, deferred=sharded)
    prepare(model, world.device)
    if sharded:
        shard_model(model, world.device, "float32")
    found = {"build peak": peak() - imports, "built": held() - imports}
    stepper = build_stepper(model.train(), Optimizer(learning_rate=1e-4), STEPS)
    stage: Any = SimpleNamespace(world=world, loss_scale=LossScale(world.device, "float32"))
    seconds, traffic, losses = [], [], []
    for step in range(STEPS):
        if step == 1:
            forget_peak()
        world.barrier()
        began, before = time.perf_counter(), sent()
        losses.append(_accumulate(model, rows, Budget(2 * LENGTH), "float32", stage))
        stepper.clip(world)
        stepper.advance()
        world.barrier()
        seconds.append(time.perf_counter() - began)
        traffic.append(sent() - before)
    found |= {"between steps": held() - imports, "step peak": peak() - imports, "step s": min(seconds[1:])}
    found |= {"loopback MB": min(traffic[1:]) / 1e6, "loss": losses[-1]}
    distributed.stop()
    return found


def launch(count: int, folder: str, *, whole: bool) -> list[dict[str, float]]:
    """The figures of each of `count` processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    # Freed memory returns to the system at once, or memory that nothing uses would count.
    keeps_nothing = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0"}
    common = {**os.environ, **variables, **keeps_nothing}
    command = [sys.executable, __file__, "--train", folder, *["--whole"] * whole]
    processes = [
        subprocess.Popen(command, env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(count)
    ]
    return [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--train", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        print(json.dumps(train(args.train, whole=args.whole)))
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": args.layers}))
        print(f"{model.num_parameters() / 1e6:.1f} M parameters; MB above imports, the largest of the processes")
        model.save_pretrained(folder)
        del model
        for count in args.processes:
            figures = launch(count, folder, whole=args.whole)
            worst = {name: max(one[name] for one in figures) for name in figures[0]}
            print(
                f"{count} processes: " + ", ".join(f"{name} {value:,.4g}" for name, value in worst.items()), flush=True
            )


if __name__ == "__main__":
    set_up_process()
    main()
