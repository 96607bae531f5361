"""The modules beside a reward file that it imports. They are part of the reward's identity. Does not import torch."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

OURS = ("rlhf_cli", "stages")
"""Packages that a reward file in a checkout of this repository has beside it; their version is in the manifest."""


def imported_files(file: Path) -> list[Path]:
    """The files in the folder of `file` and below that it imports, directly or through one another, sorted.

    Found by the import statements, without running anything. Modules in other folders, installed packages, names given
    to `importlib` and files that the code reads are not found.
    """
    known: set[Path] = set()
    waiting = [file]
    while waiting:
        current = waiting.pop()
        for parts in _imports(current, file.parent):
            for path in _files_of(file.parent, parts):
                if path != file and path not in known:
                    known.add(path)
                    waiting.append(path)
    return sorted(known)


def _imports(file: Path, root: Path) -> Iterator[tuple[str, ...]]:
    """The modules that a file's import statements name, as parts of their dotted names."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # running the file gives the error
    package = file.parent.relative_to(root).parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            yield from ((*base, alias.name) for alias in node.names)


def _files_of(root: Path, parts: tuple[str, ...]) -> Iterator[Path]:
    """The files below `root` that an import of a dotted name runs: its packages and the module itself."""
    if parts[0] in OURS:
        return
    for end in range(1, len(parts) + 1):
        package = root.joinpath(*parts[:end])
        for path in (package / "__init__.py", package.with_name(f"{package.name}.py")):
            if path.is_file():
                yield path
