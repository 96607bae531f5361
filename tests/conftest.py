"""Settings of a test process. The fixtures that several folders use are in support/fixtures.py."""

from __future__ import annotations

import gc
import os

import pytest

from rlhf_cli.processes.environment import DEFAULTS

os.environ.update(DEFAULTS, HF_HUB_OFFLINE="1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny matrices are slower on several


def pytest_configure(config: pytest.Config) -> None:
    """Load the shared fixtures. The process that only distributes tests to workers starts without torch."""
    only_distributes = getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput")
    if only_distributes:
        return
    # Imports and collection create a million objects that live until the end. Do not search them for garbage.
    gc.disable()
    config.pluginmanager.import_plugin("support.fixtures")

    import hypothesis

    # By default an example may take 200 ms of wall time, which other processes can use up.
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("any load", deadline=None, suppress_health_check=slow)
    hypothesis.settings.load_profile("any load")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()
