"""Measure how long torch's CPU threads should spin while waiting: alone on the cores, and beside a second such run.

    python benchmarks/threads.py [--spins 500 4000 300000]      # about a minute each

GOMP_SPINCOUNT is how often a thread polls before it yields its core. libgomp's default is 300,000 if no more threads
run than there are cores; rlhf_cli/processes/environment.py sets 4,000. Each figure is the median time of a training
step (forward and backward over 2,000 packed tokens of a Llama of 1 M parameters) in a separate process, with one thread
per core. The spin counts take turns.
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 3
STEP = """
import statistics, time
from rlhf_cli.processes.environment import set_up_process
set_up_process()
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from rlhf_cli.models.forward import target_logprobs
from rlhf_cli.models.load import prepare

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(hidden_size=128, intermediate_size=344, num_hidden_layers=4,
                                     num_attention_heads=4, vocab_size=2048, tie_word_embeddings=True))
prepare(model, torch.device("cpu"))
rows = [torch.randint(2048, (n,)).tolist() for n in range(40, 141, 5)]
learned = [[i > 20 for i in range(len(row))] for row in rows]
times = []
ends = time.monotonic() + 6
while time.monotonic() < ends or len(times) < 6:
    began = time.perf_counter()
    target_logprobs(model, rows, learned).sum().backward()
    times.append(time.perf_counter() - began)
print(1e3 * statistics.median(times[3:]))
"""


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spins", type=int, nargs="+", default=[0, 500, 1000, 2000, 4000, 10_000, 300_000])
    spins = parser.parse_args().spins
    found: dict[tuple[int, int], list[float]] = {(spin, count): [] for spin in spins for count in (1, 2)}
    for _ in range(ROUNDS):
        for (spin, count), times in found.items():
            times += steps(spin, count)
    print(f"{os.cpu_count()} cores; ms per step | alone | beside another")
    for spin in spins:
        print(f"GOMP_SPINCOUNT={spin} |", " | ".join(f"{statistics.median(found[spin, n]):.1f}" for n in (1, 2)))


def steps(spin: int, count: int) -> list[float]:
    """Milliseconds of a step in each of `count` processes that run at the same time."""
    environment = {**os.environ, "GOMP_SPINCOUNT": str(spin), "OMP_NUM_THREADS": str(os.cpu_count())}
    running = [
        subprocess.Popen([sys.executable, "-c", STEP], env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    return [float(process.communicate()[0]) for process in running]


if __name__ == "__main__":
    main()
