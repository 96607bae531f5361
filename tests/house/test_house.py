"""Habits of the tests: they do not import each other, and none of them limits wall time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from support.paths import ROOT, TESTS
from support.source import imports

TEST_MODULES = sorted(TESTS.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_no_test_module_imports_another() -> None:
    """Helpers are in tests/support, shared fixtures in a conftest.py."""
    modules = {path.stem for path in TEST_MODULES if path.parent.name != "support"}
    found = {name_of(path): modules & {name.split(".")[0] for name in imports(path)} for path in TEST_MODULES}
    assert {name: names for name, names in found.items() if names} == {}


def test_test_files_have_different_names() -> None:
    """pytest imports them by their file name alone."""
    counts = Counter(path.name for path in TEST_MODULES if path.name.startswith("test_"))
    assert [name for name, count in counts.items() if count > 1] == []
