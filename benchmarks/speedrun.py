"""Check an entry of the speedrun table in SPEEDRUN.md: train six seeds, judge them, and count their minutes.

    python benchmarks/speedrun.py --work DIR [--config configs/support]

Each seed is `rlhf pipeline CONFIG` on one thread, to DIR/seed<N>. Its time is processor time of the whole command, with
imports and evaluation: a busy machine hardly changes it. Finished seeds are kept.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from ppo_quality import ROOT, execute, measure

from rlhf_cli.processes.environment import set_up_process

SEEDS = range(6)
GOLD, KL = 4.5, 3.7
"""The goal: the mean gold of the six seeds is at least this, and their mean KL at most that, in nats a reply."""
DRAWS = 4
"""Replies to each of the 256 held-out prompts."""


def train(config: str, run: Path, seed: int) -> None:
    """Run the three stages, and note their processor seconds."""
    noted = run / "processor_s.json"
    if noted.is_file():
        return
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "rlhf_cli", "pipeline", config, "--restart", "--threads", "1"]
    execute([*command, "--set", f"seed={seed}", "--set", f"artifacts={run}"], run.with_suffix(".log"))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    noted.write_text(json.dumps(seconds), encoding="utf-8")


def verdict(golds: list[float], kls: list[float], seconds: list[float], commit: str) -> tuple[str, bool]:
    """The row of the table, and whether the entry reaches the goal.

    >>> verdict([4.4, 4.8], [3.7, 3.6], [60, 120], "abc")
    ('| 1.5 | 4.60 (4.40 to 4.80) | 3.65 (3.60 to 3.70) | abc |', True)
    >>> verdict([4.4, 4.5], [3.7, 3.6], [60, 120], "abc")[1], verdict([4.8], [3.8], [60], "abc")[1]
    (False, False)
    """
    means = [statistics.fmean(values) for values in (golds, kls, seconds)]
    ranges = [f"{mean:.2f} ({min(x):.2f} to {max(x):.2f})" for mean, x in zip(means, (golds, kls), strict=False)]
    return f"| {means[2] / 60:.1f} | {ranges[0]} | {ranges[1]} | {commit} |", means[0] >= GOLD and means[1] <= KL


def main() -> None:
    """Train, measure, print the row; exit code 1 for an entry that misses the goal."""
    parser = argparse.ArgumentParser(description="Check an entry of the speedrun table.")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--config", default="configs/support")
    args = parser.parse_args()
    set_up_process()
    golds, kls, seconds = [], [], []
    for seed in SEEDS:
        run = args.work.resolve() / f"seed{seed}"
        train(args.config, run, seed)
        measured = measure(run / "ppo" / "model", run, DRAWS)
        golds.append(measured.mean("gold"))
        kls.append(measured.mean("kl"))
        seconds.append(json.loads((run / "processor_s.json").read_text(encoding="utf-8")))
        print(f"seed {seed}: gold {golds[-1]:.2f}, KL {kls[-1]:.2f}, {seconds[-1]:.0f} s", flush=True)
    git = ["git", "describe", "--always", "--dirty", "--abbrev=7"]
    commit = subprocess.run(git, check=True, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    row, reaches = verdict(golds, kls, seconds, commit)
    print(f"| minutes | gold | KL | commit |\n|---|---|---|---|\n{row}")
    sys.exit(0 if reaches else "error: the entry misses the goal")


if __name__ == "__main__":
    main()
