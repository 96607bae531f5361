"""`--nproc`: several processes on one machine are started, told of signals, named when they fail, and ended together.

The processes here are small programs without torch. Real stages are in tests/stages/test_nproc.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.processes.exits import FAILURES, LOST
from rlhf_cli.processes.launcher import run_processes
from support.crash import wait_for
from support.paths import ROOT


def run(body: str, count: int = 2, grace_s: float = 120, **more: Any) -> int:
    """Run a program in `count` processes; `rank` is a variable of it."""
    program = "import json, os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(body)
    return run_processes([sys.executable, "-S", "-c", program], count, "rlhf sft again", grace_s=grace_s, **more)


def test_each_process_knows_its_rank_and_how_to_find_the_others(tmp_path):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    body = f"open(f'{tmp_path}/{{rank}}', 'w').write(json.dumps([os.environ[name] for name in {names}]))"
    assert run(body, count=3) == 0
    told = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert [row[:5] for row in told] == [[str(rank), str(rank), "3", "3", "127.0.0.1"] for rank in range(3)]
    (port,) = {int(row[5]) for row in told}
    assert 20_000 <= port < 30_000, "no connection of another process takes it before the first process binds it"


def test_the_process_that_fails_first_is_named_in_one_line_and_the_others_are_ended(capfd):
    code = run("if rank == 1: sys.exit(print('error: no room', file=sys.stderr) or 2)\ntime.sleep(600)", grace_s=0.2)
    assert code == 2
    assert capfd.readouterr().err == "error: no room (process 1 of 2)\n"


def test_an_error_that_every_process_has_is_printed_once(capfd):
    assert run("print('error: a bad key', file=sys.stderr)\nsys.exit(2)", count=4) == 2
    assert capfd.readouterr().err == "error: a bad key\n"


def test_a_bug_keeps_its_traceback(capfd):
    assert run("if rank == 1: raise KeyError('x')") == 1
    assert capfd.readouterr().err.startswith("Traceback")


def test_a_killed_process_is_named_and_not_those_that_lost_the_connection_to_it(capfd, tmp_path):
    """Even if it is found last."""
    body = f"""
    if rank < 2:
        open(f'{tmp_path}/{{rank}}', 'w')
        sys.exit({LOST})
    while not all(os.path.exists(f'{tmp_path}/{{other}}') for other in range(2)):
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run(body, count=3) == 1
    error = capfd.readouterr().err
    assert error.startswith(
        "error: process 2 of 3 was ended by SIGKILL. The system kills a process when memory runs out"
    )
    assert len(error.splitlines()) == 1


def test_the_line_about_a_killed_process_has_the_step_and_wait_of_another_and_the_checkpoint(capfd):
    """The others learn that one has failed even where they wait for it without a connection to it."""
    body = f"""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    path = os.environ["{FAILURES}"]
    while not os.path.getsize(path):
        time.sleep(0.01)
    open(path, "a").write(json.dumps({{"step": "ppo step 4", "rank": 0, "what": "the scores"}}) + "\\n")
    sys.exit({LOST})
    """
    assert run(body, checkpoint_in_words=lambda: "The checkpoint of step 3 is intact.") == 1
    error = capfd.readouterr().err
    assert error.startswith(
        "error: ppo step 4: process 1 of 2 was ended by SIGKILL while process 0 waited for the scores. The system kills"
    )
    assert error.endswith("The checkpoint of step 3 is intact. To continue, run the same command\n")
    assert len(error.splitlines()) == 1, error


def test_a_process_that_hangs_is_killed_after_the_grace(tmp_path):
    body = f"""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank == 1:
        while not os.path.exists('{tmp_path}/0'):
            time.sleep(0.01)
        sys.exit(1)
    open('{tmp_path}/writing', 'w').write(str(os.getpid()))
    os.rename('{tmp_path}/writing', '{tmp_path}/0')
    time.sleep(600)
    """
    assert run(body, grace_s=0.2) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "0").read_text()), 0)


def test_a_process_that_was_named_is_killed_at_once(capfd):
    """The line is printed, and nothing of it can be saved. It would have the time to save otherwise."""
    body = """
    from rlhf_cli.processes.exits import note_hanging
    if rank == 1:
        note_hanging([0])
        sys.exit(print("error: process 0 gives no sign of life, process 1 waited", file=sys.stderr) or 1)
    time.sleep(600)
    """
    began = time.monotonic()
    assert run(f"sys.path[:0] = {sys.path!r}\n" + textwrap.dedent(body), grace_s=300) == 1
    assert time.monotonic() - began < 200
    assert capfd.readouterr().err == "error: process 0 gives no sign of life, process 1 waited\n"


SAVES = """
import os, signal, sys, time
def stop(number, frame):
    for _ in range(6000):
        if os.environ["RANK"] == "0" and not os.path.exists(os.environ["OUT"] + "1"):
            time.sleep(0.01)  # the first process saves after the other has
    time.sleep(0.3 * (1 - int(os.environ["RANK"])))
    open(os.environ["OUT"] + os.environ["RANK"], "w").write(str(number))
    sys.exit(143)
for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
    signal.signal(getattr(signal, name), stop)
open(os.environ["OUT"] + "ready" + os.environ["RANK"], "w")
time.sleep(600)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_reaches_every_process_and_leaves_it_time_to_save(name, tmp_path):
    out = f"{tmp_path}/"
    parent = (
        "import sys; from rlhf_cli.processes.launcher import run_processes\n"
        f"sys.exit(run_processes([sys.executable, '-S', '-c', {SAVES!r}], 2, 'again', grace_s=0.0))"
    )
    environment = {**os.environ, "OUT": out, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", parent], env=environment, stderr=subprocess.PIPE)
    wait_for(lambda: all(Path(f"{out}ready{rank}").exists() for rank in range(2)))
    process.send_signal(getattr(signal, name))
    _, error = process.communicate(timeout=120)
    assert process.returncode == 143
    number = str(int(getattr(signal, name)))
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [number, number]
    assert error == b""
