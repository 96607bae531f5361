"""Measure how much faster each stage is on two processes than on one, and the bytes that they exchange in a step.

    python benchmarks/processes.py --work DIR                        # configs/support, one thread a process
    python benchmarks/processes.py --work DIR --processes 1 2 4 --shard

Runs a short pipeline on each number of processes and prints, for each stage, the median tokens per second of its steps
(PPO: of rollout, scoring and update together), the speed-up, and the bytes that a process sends in a step: 4 bytes a
trained weight, in PPO for each optimizer step, and 28 bytes a token of the rollout. These are computed, for two
processes; sharding.py counts them. N processes send 2 (N - 1) / N times as much for the gradients.
Use a machine with an idle core for each process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from safetensors import safe_open

ROOT = Path(__file__).resolve().parent.parent
STEPS = {"sft": 40, "rm": 40, "ppo": 8}
SHORT = ["sft:training.num_steps=40", "rm:training.num_steps=40", "ppo:ppo.num_iterations=8"]
PHASES = {"sft": ("step",), "rm": ("step",), "ppo": ("rollout", "scoring", "update")}
SKIPPED = 2
"""The first rows of a run are slower."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shard", action="store_true", help="with several processes set distributed.shard: true")
    args = parser.parse_args()
    found = {count: measure(args.work / str(count), count, shard=args.shard and count > 1) for count in args.processes}
    first = args.processes[0]
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    print("| stage | " + " | ".join(f"tokens/s on {count}" for count in found) + " | speed-up | bytes a step |")
    print("|---|" + "---|" * (len(found) + 2))
    for stage in STEPS:
        rates = [found[count][stage][0] for count in found]
        cells = [f"{rate:,.0f}" for rate in rates]
        speed_up = ", ".join(f"{rate / found[first][stage][0]:.2f}" for rate in rates[1:])
        print(f"| {stage} | {' | '.join(cells)} | {speed_up} | {found[first][stage][1] / 1e6:.1f} MB |")


def measure(root: Path, count: int, *, shard: bool) -> dict[str, tuple[float, float]]:
    """(tokens per second, bytes of a step) of each stage of a short pipeline on `count` processes."""
    command = [sys.executable, "-m", "rlhf_cli", "pipeline", str(ROOT / "configs/support"), "--quiet", "--restart"]
    command += ["--nproc", str(count)] if count > 1 else []
    for text in [f"artifacts={root}", *SHORT, *([f"distributed.shard={str(shard).lower()}"] if shard else [])]:
        command += ["--set", text]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    return {stage: figures(root / stage, stage) for stage in STEPS}


def figures(directory: Path, stage: str) -> tuple[float, float]:
    """(tokens per second, bytes of a step) of a finished stage."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if f"time/{PHASES[stage][0]}_s" in row][SKIPPED:]
    rates, rollout = [], 0.0
    for row in rows:
        phases = [(row[f"time/{name}_s"], row[f"speed/{name}_tokens_per_s"]) for name in PHASES[stage]]
        tokens = [seconds * rate for seconds, rate in phases]
        # A token of PPO is sampled, scored and trained on: it counts once.
        rates.append(tokens[0] / sum(seconds for seconds, _ in phases))
        rollout = 28 * tokens[0] if stage == "ppo" else 0.0
    weights = sum(
        4.0 * num_weights(directory / name) for name in ("model", "value_model") if (directory / name).is_dir()
    )
    config = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))["identity"]["config"]
    steps = 1
    if stage == "ppo":
        ppo = config["ppo"]
        steps = ppo["ppo_epochs"] * ppo["rollout_batch_size"] // ppo["minibatch_size"]
    return statistics.median(rates), steps * weights + rollout


def num_weights(directory: Path) -> int:
    """The number of weights in a model directory."""
    total = 0
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                size = 1
                for length in file.get_slice(name).get_shape():
                    size *= length
                total += size
    return total


if __name__ == "__main__":
    main()
