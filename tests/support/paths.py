"""Folders of the repository."""

from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
OF_THE_MACHINE = ("time/", "speed/", "memory/")
"""Prefixes of metrics that describe the machine: they differ between two runs of the same computation."""
