"""The wheel contains both packages, its command works elsewhere, and every import is a dependency."""

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile

import pytest

from support.paths import ROOT
from support.source import imports, source_files


def without_path():
    """The environment without PYTHONPATH. If it names a checkout, pip takes rlhf for installed already."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--quiet", "--wheel-dir", str(folder)]
    subprocess.run(command, check=True, timeout=300, env=without_path())
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_contains_both_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "rlhf_cli/py.typed",
        "stages/py.typed",
        "rlhf_cli/cli.py",
        "rlhf_cli/commands/label_page.html",
        "rlhf_cli/config/data.py",
        "stages/sft.py",
        "stages/rm.py",
        "stages/ppo.py",
    ):
        assert name in names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"rlhf_cli", "stages"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


COMMANDS = """
import json, os, sys
import rlhf_cli, stages, stages.ppo, stages.rm, stages.sft
from rlhf_cli.cli import main
print(rlhf_cli.__file__, stages.__file__, flush=True)
for typed, words in json.loads(sys.argv[1]):
    if not (process := os.fork()):
        with open("typed", "w") as file:
            file.write(typed)
        os.dup2(os.open("typed", os.O_RDONLY), 0)
        sys.stdin, sys.argv = open(0, closefd=False), ["rlhf", *words]
        main()
        sys.exit(0)
    if code := os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
        sys.exit(f"{words}: exit code {code}")
"""
"""Runs commands, each with what is typed, in forks of one process: the imports of torch take most of the time."""


@pytest.mark.slow
def test_the_wheel_works_in_another_environment(wheel, tmp_path):
    """In a new environment away from the checkout, with the dependencies of this one on its path."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, timeout=300, env=without_path())
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    lent = next(path for path in sys.path if path.endswith("site-packages"))
    # PYTHONPATH reads no .pth file, so the editable install of this checkout is not found.
    env = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{lent}", "OMP_NUM_THREADS": "1"}
    away, run = tmp_path / "away", "artifacts/mine"
    away.mkdir()
    (away / "prompts.jsonl").write_text('{"prompt": "Hello"}\n', encoding="utf-8")
    short = ["sft:training.num_steps=3", "rm:training.num_steps=3", "ppo:ppo.num_iterations=1"]
    short += ["ppo:evaluation.num_prompts=4", "rm:evaluation.num_normalization_samples=4"]
    short = [word for pair in short for word in ("--set", pair)]
    # `rlhf init` finds its templates in the wheel, and what it writes runs below.
    command = [tmp_path / "env/bin/rlhf", "init", "mine"]
    result = subprocess.run(command, capture_output=True, text=True, env=env, cwd=away, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    generate = ["generate", run, "--prompts", "prompts.jsonl"]
    commands = [
        ("", ["pipeline", "mine", "--quiet", *short], f"{run}/ppo/model/model.safetensors"),
        *(
            ("", ["init", name, "--from", name], f"{name}/{written}")
            for name, written in {
                "blank": "reward.py",
                "support-hard": "data/preferences.jsonl",
                "bilingual": "data/prompts.jsonl",
                "sentiment": "judge.py",
                "hh": "ppo.yaml",
                "stories": "data/prompts.jsonl",
            }.items()
        ),
        ("", ["pipeline", "blank", "--quiet"], "blank/ppo.yaml"),
        # What has been trained is used: each command's files and optional parts are there.
        ("Hello\n", ["chat", run], ""),
        ("", [*generate, "--compare", "sft", "--out", "pairs.jsonl"], "pairs.jsonl"),
        ("", ["eval", run], ""),
        ("", ["report", run], f"{run}/report.html"),
        ("", ["export", run, "--no-check", "--out", "exported"], "exported/model.safetensors"),
        ("", ["push", "exported", "me/mine"], ""),
    ]
    typed = json.dumps([command[:2] for command in commands])
    result = subprocess.run([python, "-c", COMMANDS, typed], capture_output=True, text=True, env=env, cwd=away)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(str(site)) == 2, result.stdout
    for _, command, written in commands:
        assert (away / written).exists(), command


NAME_OF = {"vl_convert": "vl-convert-python", "yaml": "pyyaml"}
USED_BY_OTHERS = {"tensorboard", "gguf", "sentencepiece"}
"""Packages that torch.utils.tensorboard and llama.cpp's converter import."""
COME_ALONG = {"pyarrow": "datasets", "pydantic_core": "pydantic"}
"""Packages that need no own entry: a listed dependency always requires them."""


def test_every_imported_package_is_a_dependency_and_pinned():
    """Imports inside functions included. A package that only comes with another one may disappear with it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    # Neither is part of the wheel.
    ours = [lines for name, lines in extras.items() if name not in ("dev", "docs")]
    named = [*project["dependencies"], *(line for lines in ours for line in lines)]
    asked = {re.split(r"[^A-Za-z0-9_.-]", requirement)[0].lower() for requirement in named}
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    imported = {}
    for path in source_files():
        imported |= {name.split(".")[0]: path for name in imports(path)}
    others = imported.keys() - sys.stdlib_module_names - {"rlhf_cli", "stages"} - COME_ALONG.keys()
    assert {NAME_OF.get(name, name) for name in others} | USED_BY_OTHERS == asked
    assert asked <= pinned
