"""`rlhf generate --nproc`: the bytes of one process, whatever the number of processes, after a failure too."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.commands import generate as module
from rlhf_cli.commands.generate import Generator, ResponseOptions, generate
from rlhf_cli.errors import RunError
from rlhf_cli.processes import distributed, launcher
from rlhf_cli.processes.distributed import World
from support.paths import ROOT
from support.tiny import read_jsonl, write_jsonl
from support.worlds import in_each_process
from support.writers import contents, failing_after, run_command

RLHF = (sys.executable, "-m", "rlhf_cli")


def write(
    size: int, run: Path, prompts: Path, out: Path, options: ResponseOptions | None = None, **settings: Any
) -> tuple[bytes, bytes]:
    """Generate in `size` processes; returns the bytes of the rows and of the dropped items."""
    options = options or ResponseOptions(device="cpu", batch_size=2)
    worlds: dict[int, World] = {}

    def program(world: World) -> None:
        worlds[threading.get_ident()] = world
        work = functools.partial(generate, None, str(run))
        run_command(work, prompts, out, options=options, nproc=size, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "start", lambda *_: worlds[threading.get_ident()])
        patch.setattr(module, "is_worker", lambda: True)
        patch.setattr(module, "is_first_worker", lambda: worlds[threading.get_ident()].is_main)
        in_each_process(size, program)
    return contents(out)


@pytest.mark.parametrize("choice", [{"seed": 3}, {"temperature": 0.0}])
def test_the_rows_are_those_of_one_process(run: Path, prompts: Path, tmp_path: Path, choice: dict[str, Any]) -> None:
    options = ResponseOptions(device="cpu", batch_size=2, **choice)
    alone = write(1, run, prompts, tmp_path / "1.jsonl", options)
    assert len(alone[0].splitlines()) == 8
    for size in (2, 3):
        assert write(size, run, prompts, tmp_path / f"{size}.jsonl", options) == alone
    assert write(2, run, prompts, tmp_path / "2.jsonl", options) == alone, "nothing is left to do"


def test_another_number_of_processes_resumes_a_run_that_was_killed(
    run: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, out = write(1, run, prompts, tmp_path / "alone.jsonl"), tmp_path / "out.jsonl"
    with failing_after(monkeypatch, 3):
        write(3, run, prompts, out)
    assert contents(out) != alone
    assert write(2, run, prompts, out) == alone


def test_a_process_that_fails_leaves_whole_rows_from_the_beginning(
    run: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, out = write(1, run, prompts, tmp_path / "alone.jsonl"), tmp_path / "out.jsonl"
    respond = Generator.respond

    def fail(self: Generator, numbered: Sequence[Any]) -> Any:
        if any(number == 7 for number, _ in numbered):
            raise RunError("a score is NaN")
        return respond(self, numbered)

    with monkeypatch.context() as patch:
        patch.setattr(Generator, "respond", fail)
        with pytest.raises(RunError, match="a score is NaN"):
            write(2, run, prompts, out)
    assert alone[0].startswith(out.read_bytes())
    assert len(read_jsonl(out)) == 4
    assert write(2, run, prompts, out) == alone


def test_the_command_starts_itself_with_the_same_options(
    run: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def run_processes(command: Sequence[str], count: int, resume_command: str) -> int:
        started.append((command, count, resume_command))
        return 7

    monkeypatch.setattr(launcher, "run_processes", run_processes)
    arguments = ["generate", str(run), "--prompts", str(prompts), "--out", str(tmp_path / "out"), "--nproc", "2"]
    assert CliRunner().invoke(app, arguments).exit_code == 7
    ((words, count, _),) = started
    assert (words, count) == ([*RLHF, *arguments], 2)


@pytest.mark.slow
def test_two_real_processes_write_the_bytes_of_one_after_a_kill(run: Path, prompts: Path, tmp_path: Path) -> None:
    many = write_jsonl(tmp_path / "many.jsonl", read_jsonl(prompts) * 40)
    alone, out = write(1, run, many, tmp_path / "alone.jsonl"), tmp_path / "out.jsonl"
    arguments = ["generate", str(run), "--prompts", str(many), "--out", str(out), "--device", "cpu"]
    command = [*RLHF, *arguments, "--batch-size", "2", "--quiet", "--nproc", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not (out.exists() and out.stat().st_size > 0):
            time.sleep(0.05)
        workers = subprocess.run(["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, check=True)
        os.kill(int(sorted(workers.stdout.split(), key=int)[-1]), signal.SIGKILL)
        assert process.stderr is not None
        error = process.stderr.read()
    assert process.returncode == 1
    assert error.startswith("error: generate: process 0 waited for the "), error
    assert "of all 2 processes, but process 1 (last seen at generate) ended without a message" in error
    assert len(error.splitlines()) == 1
    assert alone[0].startswith(out.read_bytes())
    assert write(2, run, many, out) == alone
