"""The source of the project and of its tests, parsed once for all tests that read it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from support.paths import ROOT


@cache
def source_files() -> list[Path]:
    """Every module of the project."""
    return sorted(path for package in ("rlhf_cli", "stages") for path in (ROOT / package).rglob("*.py"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """A module and every node in it."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports(path: Path, *, top_level_only: bool = False) -> list[str]:
    """The full names that a module imports, also inside functions: `a.b` for `from a import b`."""
    module = nodes(path)[0]
    assert isinstance(module, ast.Module)
    names = []
    for node in module.body if top_level_only else nodes(path):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: a relative import hides what is imported"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names
