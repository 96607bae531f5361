"""Floors: a module imports only from floors below its own, or from its own room. Habits of modules and of tests."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

from support.paths import ROOT, TESTS
from support.source import imports, nodes, source_files

# The first matching prefix gives the floor. The room is the folder, or the module itself at the top level.
FLOORS = {
    "rlhf_cli.errors": 0,
    "rlhf_cli.printing": 0,
    "rlhf_cli.files": 0,
    "rlhf_cli.program": 0,
    "rlhf_cli.templates": 0,
    "rlhf_cli.tensor_ops": 0,
    "rlhf_cli.algorithms.names": 0,
    "rlhf_cli.config.base": 0,
    "rlhf_cli.seeding": 1,
    "rlhf_cli.packing": 1,
    "rlhf_cli.processes": 1,
    "rlhf_cli.run.artifacts": 1,
    "rlhf_cli.hub": 1,
    "rlhf_cli.algorithms": 1,
    "rlhf_cli.config": 1,
    "rlhf_cli.data": 2,
    "rlhf_cli.kernels": 2,
    "rlhf_cli.models": 3,
    "rlhf_cli.run.stage_run": 5,
    "rlhf_cli.run": 3,
    "rlhf_cli.training.supervised": 6,
    "rlhf_cli.training": 4,
    "rlhf_cli.decoders": 4,
    "rlhf_cli.plan": 4,
    "rlhf_cli.rollout": 6,
    "rlhf_cli.rewards": 6,
    "rlhf_cli.trained": 7,
    "rlhf_cli.ppo": 7,
    "rlhf_cli.health.probes": 9,
    "rlhf_cli.health.evidence": 8,
    "rlhf_cli.health": 2,
    "rlhf_cli.evaluation": 8,
    "rlhf_cli.report.progress": 4,
    "rlhf_cli.report.trackers": 4,
    "rlhf_cli.report": 6,
    "stages": 9,
    "rlhf_cli.commands": 10,
    "rlhf_cli.cli": 11,
    "rlhf_cli.__main__": 12,
    "rlhf_cli": 0,
}


WITHOUT_TORCH = (
    "errors",
    "files",
    "program",
    "run.artifacts",
    "hub",
    "algorithms.names",
    "seeding",
    "rewards.chat_client",
    "rewards.concurrency",
    "rewards.http_client",
    "cli",
    "config",
    "commands",
    "report",
    "data.paths",
    "processes.environment",
    "processes.exits",
    "processes.failures",
    "processes.launcher",
    "processes.signals",
    "run.launch",
    "run.identity",
    "health.findings",
    "health.running",
    "health.recap",
    "health.ranking",
    "run.lock",
    "run.state",
    "run.checkpoint_files",
)


def modules() -> list[tuple[str, Path]]:
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in source_files()]
    return [(name.removesuffix(".__init__"), path) for name, path in zip(names, source_files(), strict=True)]


def floor(name: str) -> int:
    return next(level for prefix, level in FLOORS.items() if name == prefix or name.startswith(prefix + "."))


def room(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:2])


def test_a_module_imports_only_from_lower_floors_or_its_own_room() -> None:
    """A stage imports no other stage: each is a room of its own."""
    upwards = []
    for name, path in modules():
        for imported in imports(path):
            is_ours = imported.startswith(("rlhf_cli.", "stages."))
            own_room = room(imported) == room(name) and name.startswith("rlhf_cli.")
            if is_ours and not own_room and floor(imported) >= floor(name):
                upwards.append(f"{name} (floor {floor(name)}) imports {imported}")
    assert upwards == []


def answers_at_once(name: str) -> bool:
    short = name.removeprefix("rlhf_cli.")
    return any(short == prefix or short.startswith(prefix + ".") for prefix in WITHOUT_TORCH)


def test_modules_that_must_start_fast_do_not_import_torch() -> None:
    heavy = {"torch", "transformers", "datasets", "numpy"}
    tops = {
        name: heavy & {imported.split(".")[0] for imported in imports(path, top_level_only=True)}
        for name, path in modules()
        if answers_at_once(name)
    }
    assert {name: found for name, found in tops.items() if found} == {}


def test_every_module_has_a_docstring() -> None:
    assert [name for name, path in modules() if path.stat().st_size and not ast.get_docstring(nodes(path)[0])] == []


def test_packages_are_all_listed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    real = {name for name, path in modules() if path.name == "__init__.py"}
    assert {name for name in listed if not name.startswith("rlhf_cli.templates.")} == real


def test_no_test_module_imports_another_and_all_have_different_names() -> None:
    """pytest imports them by their file name alone. Helpers are in tests/support, shared fixtures in a conftest.py."""
    paths = sorted(TESTS.rglob("*.py"))
    counts = Counter(path.name for path in paths if path.name.startswith("test_"))
    assert [name for name, count in counts.items() if count > 1] == []
    names = {path.stem for path in paths if path.parent.name != "support"}
    # Parsing all of them would take two seconds.
    statement = re.compile(r"^ *(?:from|import) (\w+)", re.MULTILINE)
    found = {path: names & set(statement.findall(path.read_text(encoding="utf-8"))) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}
