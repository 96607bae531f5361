"""The source of the project and of its tests, parsed once for all tests that read it, and its scripts as modules."""

from __future__ import annotations

import ast
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from support.paths import ROOT


@cache
def source_files() -> list[Path]:
    """Every module of the project."""
    return sorted(path for package in ("rlhf_cli", "stages") for path in (ROOT / package).rglob("*.py"))


def module_at(path: Path) -> ModuleType:
    """A script, imported under its name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up annotations
    spec.loader.exec_module(module)
    return module


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
