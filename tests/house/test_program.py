"""The commands that messages print: each starts this rlhf from the shell it is pasted into."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_cli import program
from support.paths import ROOT


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like a virtual environment's bin, with a python and an rlhf; nothing on the PATH."""
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "rlhf", "torchrun"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)
    return folder


def test_an_activated_environment(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(venv))
    assert program.command("status", "a b") == "rlhf status 'a b'"
    assert program.torchrun() == "torchrun"


def test_an_environment_that_is_not_activated(venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert program.program() == str(venv / "rlhf")
    monkeypatch.chdir(tmp_path)
    assert program.program() == ".venv/bin/rlhf"
    assert program.torchrun() == ".venv/bin/python -m torch.distributed.run"


def test_an_rlhf_of_another_environment_is_not_advised(
    venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    shutil.copy(venv / "rlhf", tmp_path / "other" / "rlhf")
    monkeypatch.setenv("PATH", str(tmp_path / "other"))
    assert program.program() == str(venv / "rlhf")


def test_a_link_on_the_path_to_this_rlhf(venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pipx and `uv tool install` leave it."""
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "rlhf").symlink_to(venv / "rlhf")
    monkeypatch.setenv("PATH", str(tmp_path / "local"))
    assert program.program() == "rlhf"


def test_a_checkout_that_is_not_installed(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (venv / "rlhf").unlink()
    monkeypatch.setenv("PATH", str(venv))
    assert program.program() == "python -m rlhf_cli"
    monkeypatch.setenv("PATH", "/nowhere")
    assert program.program() == f"{venv}/python -m rlhf_cli"


def test_uv_run(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(venv))
    monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    assert program.program() == "uv run rlhf"


def test_the_command_of_this_environment_starts() -> None:
    done = subprocess.run(program.command("--version"), shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_extra_is_installed_from_the_checkout_or_as_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.chdir(ROOT)
    assert program.install_extra("lora", "peft").endswith("-m pip install -e '.[lora]'")
    monkeypatch.chdir(tmp_path)
    assert program.install_extra("lora", "peft").endswith(f"-m pip install -e '{ROOT}[lora]'")
    monkeypatch.setattr(program, "__file__", str(tmp_path / "site-packages" / "rlhf_cli" / "program.py"))
    assert program.install_extra("lora", "peft").endswith("-m pip install peft")
