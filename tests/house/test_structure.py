"""Floors: a module imports only from floors below its own, or from its own room. Habits of modules and of tests."""

import ast
import re
import tomllib
from collections import Counter

from support.paths import ROOT, TESTS
from support.source import imports, nodes, source_files

# The rooms and modules of rlhf_cli on each floor. The room is the folder, or the module itself at the top level.
FLOORS = {
    0: "errors printing files program templates tensor_ops algorithms.names config.base",
    1: "seeding packing processes run.artifacts hub algorithms config",
    2: "data kernels health",
    3: "models run",
    4: "training decoders plan report.progress report.trackers",
    5: "run.stage_run",
    6: "training.supervised rollout rewards report",
    7: "trained ppo",
    8: "health.evidence evaluation",
    9: "health.probes",
    10: "commands",
    11: "cli",
    12: "__main__",
}
LEVELS = {f"rlhf_cli.{name}": level for level, names in FLOORS.items() for name in names.split()}
LEVELS |= {"rlhf_cli": 0, "stages": 9}

WITHOUT_TORCH = """
errors files program run.artifacts hub algorithms.names seeding rewards.chat_client rewards.concurrency
rewards.http_client cli config commands report data.paths processes.environment processes.exits
processes.failures processes.launcher processes.signals run.launch run.identity health.findings
health.running health.recap health.ranking run.lock run.state run.checkpoint_files
"""
"""Modules and rooms of rlhf_cli that do not import torch at their top."""


def modules():
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in source_files()]
    return [(name.removesuffix(".__init__"), path) for name, path in zip(names, source_files(), strict=True)]


def floor(name):
    """That of the longest listed name which contains it."""
    while name not in LEVELS:
        name = name.rpartition(".")[0]
    return LEVELS[name]


def room(name):
    parts = name.split(".")
    return ".".join(parts[:2])


def test_a_module_imports_only_from_lower_floors_or_its_own_room():
    """A stage imports no other stage: each is a room of its own."""
    upwards = []
    for name, path in modules():
        for imported in imports(path):
            is_ours = imported.startswith(("rlhf_cli.", "stages."))
            own_room = room(imported) == room(name) and name.startswith("rlhf_cli.")
            if is_ours and not own_room and floor(imported) >= floor(name):
                upwards.append(f"{name} (floor {floor(name)}) imports {imported}")
    assert upwards == []


def answers_at_once(name):
    short = name.removeprefix("rlhf_cli.")
    return any(short == prefix or short.startswith(prefix + ".") for prefix in WITHOUT_TORCH.split())


def test_modules_that_must_start_fast_do_not_import_torch():
    heavy = {"torch", "transformers", "datasets", "numpy"}
    tops = {
        name: heavy & {imported.split(".")[0] for imported in imports(path, top_level_only=True)}
        for name, path in modules()
        if answers_at_once(name)
    }
    assert {name: found for name, found in tops.items() if found} == {}


def test_every_module_has_a_docstring():
    assert [name for name, path in modules() if path.stat().st_size and not ast.get_docstring(nodes(path)[0])] == []


def test_packages_are_all_listed():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    real = {name for name, path in modules() if path.name == "__init__.py"}
    assert {name for name in listed if not name.startswith("rlhf_cli.templates.")} == real


def test_no_test_module_imports_another_and_all_have_different_names():
    """pytest imports them by their file name alone. Helpers are in tests/support, shared fixtures in a conftest.py."""
    paths = sorted(TESTS.rglob("*.py"))
    counts = Counter(path.name for path in paths if path.name.startswith("test_"))
    assert [name for name, count in counts.items() if count > 1] == []
    names = {path.stem for path in paths if path.parent.name != "support"}
    # Parsing all of them would take two seconds.
    statement = re.compile(r"^ *(?:from|import) (\w+)", re.MULTILINE)
    found = {path: names & set(statement.findall(path.read_text(encoding="utf-8"))) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}
