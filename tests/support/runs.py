"""Run a stage on several processes, and digest its files."""

from __future__ import annotations

import os
from pathlib import Path

from rlhf_cli.processes.launcher import free_port
from support.forked import Forked
from support.paths import ROOT

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
"""For a new Python that runs a stage."""
STAGE = "from stages import {stage}\nfrom rlhf_cli.run import launch\nlaunch.main({stage!r}, {stage}.run)"


def run_forked(count, stage, config, per_node=None):
    """Run a stage on the CPU in `count` processes, as `torchrun` does, without seconds of imports in each.

    per_node: the processes that count as those of one machine; None for all.
    """
    options = ["--config", str(config), "--quiet"]
    run_forked_code(count, STAGE.format(stage=stage), *options, log=config, per_node=per_node)


def ended_forked(count, stage, *options, log):
    """(exit code, output) of each of `count` processes of a stage."""
    return [process.wait() for process in start_forked(variables(count), STAGE.format(stage=stage), *options, log=log)]


def run_forked_code(count, code, *arguments, log, per_node=None):
    """Run Python code in `count` processes that find each other, as `run_forked` does."""
    ended = [process.wait() for process in start_forked(variables(count, per_node), code, *arguments, log=log)]
    assert all(exit_code == 0 for exit_code, _ in ended), "\n".join(output[-3000:] for _, output in ended)


def start_forked(environments, code, *arguments, log):
    """Start Python code in a process for each of the environments; their outputs are in `log`.log0, `log`.log1, ..."""
    return [
        Forked(code, *arguments, folder=ROOT, log=Path(f"{log}.log{rank}"), environment=environment)
        for rank, environment in enumerate(environments)
    ]


DIES_ONCE = """
from rlhf_cli.processes.environment import set_up_process
set_up_process()  # as python -m stages.sft does
import os, signal
from pathlib import Path
from rlhf_cli.run import launch
from stages import sft
accumulate, has_died = sft._accumulate, Path({has_died!r})
def dies(*given, **more):
    chosen = all(os.environ[name] == value for name, value in {chosen!r}.items())
    if chosen and not has_died.exists() and list(Path({checkpoints!r}).glob("step-*")):
        has_died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return accumulate(*given, **more)
sft._accumulate = dies
launch.main("sft", sft.run)
"""


def dies_once(script, checkpoints, **chosen):
    """Write a script that runs SFT; returns its path. The process with the `chosen` environment variables kills itself,
    once, in the first step that begins after a checkpoint is there: two checkpoints before the end is enough, since
    one is complete when the next one is saved."""
    values = {name: str(value) for name, value in chosen.items()}
    names = {"has_died": f"{script}.has_died", "checkpoints": str(checkpoints), "chosen": values}
    script.write_text(DIES_ONCE.format(**names), encoding="utf-8")
    return str(script)


def variables(count, per_node=None):
    """The variables of `torchrun` of each of `count` processes."""
    per_node = per_node or count
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": per_node}
    ranks = [{"RANK": rank, "LOCAL_RANK": rank % per_node} for rank in range(count)]
    return [{name: str(value) for name, value in {**common, **own}.items()} for own in ranks]


def slurm_variables(count):
    """The variables of Slurm of each of `count` tasks of `srun` on this machine. The job's id determines the port."""
    common = {"SLURM_STEP_NUM_TASKS": count, "SLURM_STEP_TASKS_PER_NODE": count, "SLURM_STEP_NODELIST": "localhost"}
    common |= {"SLURM_JOB_ID": free_port() - 20_000, "SLURM_STEP_ID": 0}
    ranks = [{"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in range(count)]
    return [{name: str(value) for name, value in {**common, **own}.items()} for own in ranks]
