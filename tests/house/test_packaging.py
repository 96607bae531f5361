"""The wheel contains both packages, its command works elsewhere, and every import is a dependency."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from support.paths import ROOT


def without_path() -> dict[str, str]:
    """The environment without PYTHONPATH. If it names a checkout, pip takes rlhf for installed already."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--quiet", "--wheel-dir", str(folder)]
    subprocess.run(command, check=True, timeout=300, env=without_path())
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_contains_both_packages_and_nothing_else(wheel: Path) -> None:
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


@pytest.mark.slow
def test_the_wheel_works_in_another_environment(wheel: Path, tmp_path: Path) -> None:
    """In a new environment away from the checkout, with the dependencies of this one on its path."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, timeout=300, env=without_path())
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    lent = next(path for path in sys.path if path.endswith("site-packages"))
    # PYTHONPATH reads no .pth file, so the editable install of this checkout is not found.
    env = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{lent}"}
    (tmp_path / "away").mkdir()
    where = "import rlhf_cli, stages; print(rlhf_cli.__file__, stages.__file__)"
    process = subprocess.run([python, "-c", where], capture_output=True, text=True, env=env, cwd=tmp_path / "away")
    assert process.stdout.count(str(site)) == 2, process.stdout + process.stderr
    config = ROOT / "configs" / "support"
    small = ["--set", f"artifacts={tmp_path / 'run'}", "--set", f"data.train={ROOT}/data/support/sft_test.jsonl"]
    small += ["--set", "data.test=null", "--set", "training.num_steps=3", "--set", "evaluation.num_samples=0"]
    command = [tmp_path / "env" / "bin" / "rlhf", "sft", "--config", str(config / "sft.yaml"), *small]
    result = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path / "away", timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "run" / "sft" / "model" / "model.safetensors").is_file()
    # `rlhf init` finds its templates in the wheel, and what it writes runs there.
    rlhf = tmp_path / "env" / "bin" / "rlhf"
    short = ["sft:training.num_steps=3", "rm:training.num_steps=3", "ppo:ppo.num_iterations=1"]
    short += ["ppo:evaluation.num_prompts=4", "rm:evaluation.num_normalization_samples=4"]
    sets = [word for pair in short for word in ("--set", pair)]
    for command in (["init", "mine"], ["pipeline", "mine", "--quiet", *sets]):
        result = subprocess.run([rlhf, *command], capture_output=True, text=True, env=env, cwd=tmp_path / "away")
        assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "away" / "artifacts" / "mine" / "ppo" / "model" / "model.safetensors").is_file()
    for template, code in {
        "blank": ("reward.py",),
        "bilingual": ("reward.py", "data/prompts.jsonl"),
        "sentiment": ("judge.py",),
        "hh": (),
        "stories": ("reward.py", "data/prompts.jsonl"),
    }.items():
        result = subprocess.run(
            [rlhf, "init", template, "--from", template], capture_output=True, text=True, env=env, cwd=tmp_path / "away"
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert all((tmp_path / "away" / template / name).stat().st_size for name in ("ppo.yaml", *code))
    result = subprocess.run(
        [rlhf, "pipeline", "blank", "--quiet"], capture_output=True, text=True, env=env, cwd=tmp_path / "away"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    # What has been trained is used: each command's files and optional parts are there.
    away, run = tmp_path / "away", "artifacts/mine"
    (away / "prompts.jsonl").write_text('{"prompt": "Hello"}\n', encoding="utf-8")
    for typed, command, written in (
        ("Hello\n", ["chat", run], ""),
        (
            "",
            ["generate", run, "--prompts", "prompts.jsonl", "--compare", "sft", "--out", "pairs.jsonl"],
            "pairs.jsonl",
        ),
        ("1", ["label", "pairs.jsonl", "--num", "1"], "pairs.labels.jsonl"),
        ("", ["eval", run], ""),
        ("", ["report", run], "artifacts/mine/report.html"),
        ("", ["export", run, "--no-check", "--out", "exported"], "exported/model.safetensors"),
        ("", ["push", "exported", "me/mine"], ""),
        ("", ["serve", run, "--dry-run"], ""),
    ):
        result = subprocess.run([rlhf, *command], input=typed, capture_output=True, text=True, env=env, cwd=away)
        assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
        assert (away / written).exists()


NAME_OF = {"vl_convert": "vl-convert-python", "yaml": "pyyaml", "mlflow": "mlflow-skinny"}
USED_BY_OTHERS = {"tensorboard", "sqlalchemy", "alembic", "gguf", "sentencepiece"}
"""Packages that torch.utils.tensorboard, MLflow's database and llama.cpp's converter import."""
NEVER_INSTALLED = {"vllm"}
"""vLLM brings a torch of its own, so the tests do without it."""
COME_ALONG = {"pyarrow": "datasets", "pydantic_core": "pydantic"}
"""Packages that need no own entry: a listed dependency always requires them."""


def test_every_imported_package_is_a_dependency_and_pinned() -> None:
    """Imports inside functions included. A package that only comes with another one may disappear with it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    named = [*project["dependencies"], *(line for name, lines in extras.items() if name != "dev" for line in lines)]
    asked = {re.split(r"[^A-Za-z0-9_.-]", requirement)[0].lower() for requirement in named}
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    imported: dict[str, Path] = {}
    for path in [*(ROOT / "rlhf_cli").rglob("*.py"), *(ROOT / "stages").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            imported |= {name.split(".")[0]: path for name in names}
    others = imported.keys() - sys.stdlib_module_names - {"rlhf_cli", "stages"} - COME_ALONG.keys()
    assert {NAME_OF.get(name, name) for name in others} | USED_BY_OTHERS | NEVER_INSTALLED == asked
    assert asked - NEVER_INSTALLED <= pinned
