"""The settings of a process: environment variables that torch, oneDNN and transformers read when they are loaded.

Importing a module of this package changes no setting. The entry points call `set_up_process` instead: the `rlhf`
command, ``python -m stages.<stage>`` and the benchmarks. Call it before torch is imported. A variable that you have
set keeps your value.
"""

from __future__ import annotations

import os

DEFAULTS = {
    # Both caches keep an entry for each shape of a matrix product, by default for the last 1,024 shapes. Packed rows
    # have a new number of tokens in every step, so the caches took 0.3 GB in a few PPO iterations of a model of a
    # million weights, and kept growing. One step has about a dozen shapes.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "32",
    # Our own messages say what is wrong with a model, in one line.
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
SPIN_COUNT = "2000"
"""How often a waiting CPU thread checks for work before it gives up its core (libgomp; its default is 300,000).

torch's threads wait for each other thousands of times a second, and by default each wait keeps the core busy for some
milliseconds. Another process that needs the core has to wait, and so do the threads that wait for that process. With
this value a training step beside a second run on two cores is 22 times as fast, and a step alone is 3 % faster
(benchmarks/threads.py)."""


def set_up_process() -> None:
    """Set the environment variables of this process, except those that are set already."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    # OMP_WAIT_POLICY is the other way to choose how threads wait; a spin count would override it.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
