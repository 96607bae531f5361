"""The commands that messages print: each starts this rlhf from the shell it is pasted into."""

import shutil
import subprocess
import sys

import pytest

from rlhf_cli import program
from support.paths import ROOT


@pytest.fixture
def bin_folder(tmp_path, monkeypatch):
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


def test_in_an_activated_environment_and_under_uv(bin_folder, monkeypatch):
    monkeypatch.setenv("PATH", str(bin_folder))
    assert program.command("status", "a b") == "rlhf status 'a b'"
    assert program.torchrun() == "torchrun"
    monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    assert program.program() == "uv run rlhf"


def test_in_an_environment_that_is_not_activated(bin_folder, tmp_path, monkeypatch):
    assert program.program() == str(bin_folder / "rlhf")
    monkeypatch.chdir(tmp_path)
    assert program.program() == ".venv/bin/rlhf"
    assert program.torchrun() == ".venv/bin/python -m torch.distributed.run"


def test_an_rlhf_on_the_path_is_advised_only_if_it_is_this_one(bin_folder, tmp_path, monkeypatch):
    """pipx and `uv tool install` leave a link to it."""
    for name in ("other", "local"):
        (tmp_path / name).mkdir()
    shutil.copy(bin_folder / "rlhf", tmp_path / "other" / "rlhf")
    (tmp_path / "local" / "rlhf").symlink_to(bin_folder / "rlhf")
    monkeypatch.setenv("PATH", str(tmp_path / "other"))
    assert program.program() == str(bin_folder / "rlhf")
    monkeypatch.setenv("PATH", str(tmp_path / "local"))
    assert program.program() == "rlhf"


def test_a_checkout_that_is_not_installed(bin_folder, monkeypatch):
    (bin_folder / "rlhf").unlink()
    assert program.program() == f"{bin_folder}/python -m rlhf_cli"
    monkeypatch.setenv("PATH", str(bin_folder))
    assert program.program() == "python -m rlhf_cli"


def test_the_command_of_this_environment_starts():
    done = subprocess.run(program.command("--version"), shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_extra_is_installed_from_the_checkout_or_as_its_package(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert program.install_extra("lora", "peft").endswith("-m pip install -e '.[lora]'")
    monkeypatch.chdir(tmp_path)
    assert program.install_extra("lora", "peft").endswith(f"-m pip install -e '{ROOT}[lora]'")
    monkeypatch.setattr(program, "__file__", str(tmp_path / "site-packages" / "rlhf_cli" / "program.py"))
    assert program.install_extra("lora", "peft").endswith("-m pip install peft")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert program.install_extra("lora", "peft") == f"uv pip install --python {program.python()} peft"
