"""Run a stage on several processes, and digest its files."""

from __future__ import annotations

import os
import subprocess
import sys

from rlhf_cli.artifacts import digest_file
from support.paths import ROOT


def run_processes(count, stage, config):
    """Run a stage with `torchrun` on the CPU. The system chooses the port."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "-m", f"stages.{stage}", "--config", str(config), "--quiet"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def digests(directory):
    return {p.relative_to(directory).as_posix(): digest_file(p) for p in sorted(directory.rglob("*")) if p.is_file()}
