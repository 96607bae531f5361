"""Measure the time until a stage's first step, relative to importing torch and transformers.

    python benchmarks/startup.py --work DIR

Whole processes alternate with `python -c "import torch, transformers; from transformers import AutoModelForCausalLM,
AutoTokenizer"`. The table has medians of processor and wall seconds and their ratio to that import. The stages are
those of configs/support, in order, so that each finds the result of the one before. "Cold" is the first SFT run, which
tokenises its rows; the others find them in the cache. PPO first evaluates the SFT model on its held-out prompts. The
last column is the whole run, with two steps.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMPORTS = "import torch, transformers; from transformers import AutoModelForCausalLM, AutoTokenizer"
# The loop of every stage starts with this call.
UNTIL_FIRST_STEP = """
import os, sys
from rlhf_cli.report.progress import Display
Display.begin = lambda *_: os._exit(0)
from rlhf_cli.cli import main
main()
"""
TWO_STEPS = {
    "sft": ["--set", "training.num_steps=2"],
    "rm": ["--set", "training.num_steps=2"],
    "ppo": ["--set", "ppo.num_iterations=2"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--times", type=int, default=5)
    args = parser.parse_args()
    work = args.work / "startup"
    shutil.rmtree(work, ignore_errors=True)
    os.environ["RLHF_CACHE"] = str(work / "cache")
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores; seconds: processor / wall (ratio / ratio)")
    print(f"rlhf --help: {in_words(median(measured(['-m', 'rlhf_cli', '--help']) for _ in range(args.times)))}")
    cold = measured(["-c", UNTIL_FIRST_STEP, *command("sft", work)])
    print("| stage | torch and transformers | until the first step | ratio | whole run |\n|---|---|---|---|---|")
    print(f"| sft, cold | | {in_words(cold)} | | |")
    for stage in TWO_STEPS:
        whole = measured(["-m", "rlhf_cli", *command(stage, work)])
        pairs = [
            (measured(["-c", IMPORTS]), measured(["-c", UNTIL_FIRST_STEP, *command(stage, work)]))
            for _ in range(args.times)
        ]
        imports, start = median(pair[0] for pair in pairs), median(pair[1] for pair in pairs)
        ratios = f"{start[0] / imports[0]:.2f} / {start[1] / imports[1]:.2f}"
        print(f"| {stage} | {in_words(imports)} | {in_words(start)} | {ratios} | {in_words(whole)} |", flush=True)


def command(stage: str, work: Path) -> list[str]:
    """The arguments of a run of two steps; removes what an earlier run left."""
    settings = ["--set", f"artifacts={work / 'artifacts'}", "--set", "optimizer.warmup_steps=1"]
    return [stage, "--config", f"configs/support/{stage}.yaml", *settings, *TWO_STEPS[stage], "--restart", "--quiet"]


def measured(arguments: list[str]) -> tuple[float, float]:
    """Processor and wall seconds of a Python process."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"failed: {' '.join(arguments)[:300]}")
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - began


def median(pairs) -> tuple[float, float]:
    both = list(pairs)
    return statistics.median(p[0] for p in both), statistics.median(p[1] for p in both)


def in_words(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.2f} / {pair[1]:.2f}"


if __name__ == "__main__":
    main()
