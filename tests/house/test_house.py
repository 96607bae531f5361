"""Sizes and imports: short functions and files, stages of one screen, and tests that do not import each other."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT, TESTS

MODULES = [path for room in ("rlhf_cli", "stages") for path in sorted((ROOT / room).rglob("*.py"))]
STAGES = [ROOT / "stages" / f"{stage}.py" for stage in ("sft", "rm", "ppo")]
TEST_MODULES = sorted(TESTS.rglob("*.py"))
LONGEST_FUNCTION = 60
LONGEST_RUN = 65
LONGEST_FILE = 400
LARGE_FILES = 3
"""How many files of rlhf_cli/ may have more lines."""
LONGEST_TEST_FILE = 1000


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def functions(source: str) -> Iterator[tuple[str, int]]:
    """The functions and methods of a module, each with its number of lines without docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = span(node)
            if ast.get_docstring(node) is not None:
                lines -= span(node.body[0])
            yield node.name, lines


def span(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def imported(path: Path) -> set[str]:
    """The names of all modules that a file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def test_functions_are_short() -> None:
    found = {(name_of(path), *found) for path in MODULES for found in functions(path.read_text(encoding="utf-8"))}
    assert sorted(item for item in found if item[-1] > LONGEST_FUNCTION) == []


def test_few_files_are_large() -> None:
    large = {name_of(path): num_lines(path) for path in MODULES if num_lines(path) > LONGEST_FILE}
    assert len(large) <= LARGE_FILES, large


@pytest.mark.parametrize("path", STAGES, ids=name_of)
def test_a_stage_is_short_and_its_run_fits_one_screen(path: Path) -> None:
    assert num_lines(path) <= LONGEST_FILE
    [(_, lines)] = [found for found in functions(path.read_text(encoding="utf-8")) if found[0] == "run"]
    assert lines <= LONGEST_RUN


def test_test_files_are_not_too_long() -> None:
    assert {name_of(path): num_lines(path) for path in TEST_MODULES if num_lines(path) > LONGEST_TEST_FILE} == {}


def test_no_test_module_imports_another() -> None:
    """Helpers are in tests/support, shared fixtures in a conftest.py."""
    modules = {path.stem for path in TEST_MODULES if path.parent.name != "support"}
    found = {name_of(path): modules & {name.split(".")[0] for name in imported(path)} for path in TEST_MODULES}
    assert {name: names for name, names in found.items() if names} == {}


def test_test_files_have_different_names() -> None:
    """pytest imports them by their file name alone."""
    counts = Counter(path.name for path in TEST_MODULES if path.name.startswith("test_"))
    assert [name for name, count in counts.items() if count > 1] == []


def test_sizes_are_measured_without_docstrings() -> None:
    body = "".join(f"    x{i} = {i}\n" for i in range(5))
    assert list(functions(f'def f():\n    """One.\n\n    Two.\n    """\n{body}')) == [("f", 6)]
    assert list(functions(f"class A:\n    def f(self):\n{body.replace('    x', '        x')}")) == [("f", 6)]


CLOCKS = {"time.monotonic()", "time.perf_counter()", "time.time()"}
HANG_S = 120
"""An upper limit of wall time that is at least this long only catches what hangs."""


def wall_time_limits(source: str) -> list[int]:
    """The lines of a module that compare a span of wall time with a shorter upper limit."""
    lines = []
    for node in ast.walk(ast.parse(source)):
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
    found = {name_of(path): wall_time_limits(path.read_text(encoding="utf-8")) for path in TEST_MODULES}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_limits_of_wall_time_are_found() -> None:
    too_short = "assert 0.6 <= time.monotonic() - started < 3\nassert time.time() - a <= 1\n"
    accepted = "a = time.monotonic() - b\nassert a > 1 <= time.monotonic() - b\nassert time.process_time() - b < 2\n"
    assert wall_time_limits(too_short + accepted + "assert time.monotonic() - a < 120\n") == [1, 2]
