"""Run a stage on several processes, and digest its files."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from rlhf_cli.artifacts import digest_file
from support.forked import Forked
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


def run_forked(count, stage, config, per_node=None):
    """Run a stage as `run_processes` does, without `torchrun` and without seconds of imports in each process.

    per_node: the processes that count as those of one machine; None for all.
    """
    code = f"from stages import {stage}\nfrom rlhf_cli.training import launch\nlaunch.main({stage!r}, {stage}.run)"
    run_forked_code(count, code, "--config", str(config), "--quiet", log=config, per_node=per_node)


def run_forked_code(count, code, *arguments, log, per_node=None):
    """Run Python code in `count` processes that find each other, as `run_forked` does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    per_node = per_node or count
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": per_node}
    ranks = [{"RANK": rank, "LOCAL_RANK": rank % per_node} for rank in range(count)]
    processes = [
        Forked(
            code,
            *arguments,
            folder=ROOT,
            log=Path(f"{log}.log{rank}"),
            environment={name: str(value) for name, value in {**common, **own}.items()},
        )
        for rank, own in enumerate(ranks)
    ]
    for process in processes:
        exit_code, output = process.wait()
        assert exit_code == 0, output[-3000:]


def digests(directory):
    return {p.relative_to(directory).as_posix(): digest_file(p) for p in sorted(directory.rglob("*")) if p.is_file()}
