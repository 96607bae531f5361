"""The settings of a process: environment variables that torch, oneDNN and transformers read when they are loaded.

The entry points call `set_up_process` before torch is imported: the `rlhf` command, ``python -m stages.<stage>`` and
the benchmarks. A variable that you have set keeps your value.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from rlhf_cli.printing import say
from rlhf_cli.processes.signals import LAUNCHED

DEFAULTS = {
    # By default both caches keep 1,024 shapes of matrix products, which took 0.3 GB in a few PPO iterations of a small
    # model. Packed rows have few shapes, since they are rounded up (models/forward.py), and more made no step faster.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "32",
    # Our own messages say in one line what is wrong with a model, or which process has ended. When a connection ends,
    # torch logs a warning with the stack of each process.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
SPIN_COUNT = "4000"
"""How often a waiting CPU thread checks for work before it gives up its core (libgomp; its default is 300,000).

By default it keeps its core busy for some milliseconds, and beside another busy process such a run can take many times
as long. With fewer checks each operation that uses several cores waits longer for them (benchmarks/threads.py)."""
CGROUP = Path("/sys/fs/cgroup/cpu.max")
"""The limit of a container: microseconds of processor time, or `max`, in each period of microseconds."""


def set_up_process() -> None:
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # the shell closed it, as in `rlhf status >&-`
            setattr(sys, name, Path(os.devnull).open("r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without Unicode shows escapes
            stream.reconfigure(errors="backslashreplace")
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    # OMP_WAIT_POLICY is the other way to choose how threads wait; a spin count would override it.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    # transformers imports torchao wherever it finds it, and then both log that kernels of other GPUs do not load.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.update(torchrun_variables(os.environ))
    if LAUNCHED in os.environ:  # Ctrl-C ends the imports without a traceback; `exit_code` sets Python's handler again
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        Path.cwd()
    except FileNotFoundError:
        say("error: the working directory was removed. Change to a directory that exists", error=True)
        sys.exit(2)


def is_first_worker() -> bool:
    """Whether this is the first of several processes, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def num_cores() -> int:
    """The CPU cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = CGROUP.read_text(encoding="ascii").split()
        cores = min(cores, max(1, math.ceil(int(quota) / int(period))))  # "max" is no limit
    return cores


def torchrun_variables(slurm: Mapping[str, str]) -> dict[str, str]:
    """The variables of `torchrun` for a task of `srun`, made from Slurm's; {} if this is not one of several tasks.

    The first process listens on the first node of the step, on a port that depends on the job and the step.

    >>> step = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "4711"}
    >>> step |= {"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_NODELIST": "gpu[03-04],cpu1", "SLURM_STEP_ID": "2"}
    >>> for name, value in torchrun_variables(step).items(): print(name, value)
    RANK 9
    WORLD_SIZE 16
    LOCAL_RANK 1
    LOCAL_WORLD_SIZE 8
    MASTER_ADDR gpu03
    MASTER_PORT 24713
    """
    if "RANK" in slurm or int(slurm.get("SLURM_STEP_NUM_TASKS", "1")) < 2 or "SLURM_PROCID" not in slurm:
        return {}
    port = 20_000 + (int(slurm.get("SLURM_JOB_ID", "0")) + int(slurm.get("SLURM_STEP_ID", "0"))) % 10_000
    tasks_per_node = re.match(r"\d+", slurm.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return {
        "RANK": slurm["SLURM_PROCID"],
        "WORLD_SIZE": slurm["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": slurm.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": tasks_per_node.group() if tasks_per_node else slurm["SLURM_STEP_NUM_TASKS"],
        "MASTER_ADDR": slurm.get("MASTER_ADDR") or first_host(slurm.get("SLURM_STEP_NODELIST", "localhost")),
        "MASTER_PORT": slurm.get("MASTER_PORT") or str(port),
    }


def first_host(nodes: str) -> str:
    """The first host of a node list of Slurm.

    >>> first_host("gpu[03-04,07],cpu1"), first_host("cpu1,cpu2"), first_host("rack[1-2]node[5,9]")
    ('gpu03', 'cpu1', 'rack1node5')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group() if first else nodes)
