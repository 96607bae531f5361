"""The settings of a process."""

import os
import platform
import subprocess
import sys

import pytest

SECOND_ROUND = """
import resource
from rlhf_cli.processes.environment import set_up_process
set_up_process()
import torch
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.zeros(1 << 18) for _ in range(200)]  # 1 MB each
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
@pytest.mark.parametrize("variable", [{}, {"MALLOC_TRIM_THRESHOLD_": "0"}])
def test_freed_memory_stays_in_the_process_unless_a_variable_says_otherwise(variable: dict[str, str]) -> None:
    """200 MB are freed and asked for again: pages of 4 kB that the system has to fill with zeros."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", SECOND_ROUND]
    done = subprocess.run(command, env={**kept, **variable}, capture_output=True, text=True, check=True, timeout=300)
    assert (int(done.stdout) > 25_000) == bool(variable)
