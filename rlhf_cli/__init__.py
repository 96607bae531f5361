"""rlhf: from raw text to an aligned language model in three stages, SFT, reward model, PPO."""

import os

__version__ = "0.1.0"

# torch's CPU threads wait for one another thousands of times a second, and by default they do so busily for some
# milliseconds before they let the core go. Where another process wants the core that is what it waits for, and so do
# the threads: beside a second run on two cores a step took 22 times as long as it does so, and alone it takes 3 % less
# (benchmarks/threads.py). Read when libgomp is loaded, so before torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
