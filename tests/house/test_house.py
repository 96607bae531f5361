"""Habits of the tests: they do not import each other, and none of them limits wall time."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from support.paths import ROOT, TESTS
from support.source import imports, nodes

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


CLOCKS = {"time.monotonic()", "time.perf_counter()", "time.time()"}
HANG_S = 120
"""An upper limit of wall time that is at least this long only catches what hangs."""


def wall_time_limits(nodes: Iterable[ast.AST]) -> list[int]:
    """The lines of nodes that compare a span of wall time with a shorter upper limit."""
    lines = []
    for node in nodes:
        if not isinstance(node, ast.Compare):
            continue
        for small, operator, large in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            is_span = isinstance(small, ast.BinOp) and isinstance(small.op, ast.Sub)
            reads_clock = is_span and ast.unparse(small.left) in CLOCKS
            is_short = isinstance(large, ast.Constant) and isinstance(large.value, int | float) and large.value < HANG_S
            if reads_clock and is_short and isinstance(operator, ast.Lt | ast.LtE):
                lines.append(node.lineno)
    return lines


def test_no_test_limits_wall_time() -> None:
    """Other processes can use it up. Limit `time.process_time`, or count the work."""
    found = {name_of(path): wall_time_limits(nodes(path)) for path in TEST_MODULES}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_limits_of_wall_time_are_found() -> None:
    too_short = "assert 0.6 <= time.monotonic() - started < 3\nassert time.time() - a <= 1\n"
    accepted = "a = time.monotonic() - b\nassert a > 1 <= time.monotonic() - b\nassert time.process_time() - b < 2\n"
    source = too_short + accepted + "assert time.monotonic() - a < 120\n"
    assert wall_time_limits(ast.walk(ast.parse(source))) == [1, 2]
