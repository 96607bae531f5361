"""`--nproc`: several processes on one machine are started, told of signals, and ended together.

The processes here are small programs without torch. Real stages are in tests/stages/test_nproc.py.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from rlhf_cli.processes import launcher
from rlhf_cli.processes.exits import INTERRUPTED, LOST
from rlhf_cli.processes.launcher import run_processes
from support.crash import wait_for
from support.paths import ROOT


def run(body, count=2, grace_s=120, **more):
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


def test_the_others_are_ended_with_the_process_that_fails_first(capfd):
    body = "if rank == 1: sys.exit(print('error: no room', file=sys.stderr) or 2)\ntime.sleep(600)"
    assert run(body, grace_s=0.2) == 2
    assert capfd.readouterr().err == "error: no room\n"


def test_a_killed_process_is_named_if_the_others_could_not_do_so(capfd, tmp_path):
    """Those that lost the connection to it are not named, even if it is found last."""
    body = f"""
    if rank < 2:
        open(f'{tmp_path}/{{rank}}', 'w')
        sys.exit({LOST})
    while not all(os.path.exists(f'{tmp_path}/{{other}}') for other in range(2)):
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run(body, count=3, checkpoint_in_words=lambda: "The checkpoint of step 3 is intact.") == 1
    assert capfd.readouterr().err == (
        "error: process 2 of 3 was ended by SIGKILL. The system kills a process when memory runs out. The others were "
        "stopped. The checkpoint of step 3 is intact. To continue, run the same command\n"
    )
    said = "if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(0.3)\nsys.exit(print('1 ended', file=sys.stderr) or 1)"
    assert run(said) == 1
    assert capfd.readouterr().err == "1 ended\n"


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


@pytest.mark.parametrize(
    ("number", "times", "code"), [(signal.SIGINT, 1, 130), (signal.SIGTERM, 1, 143), (signal.SIGINT, 2, 130)]
)
def test_a_signal_to_processes_that_do_not_react_is_not_forgotten(number, times, code, tmp_path, monkeypatch, capfd):
    """They may have ended already, and the next stage of a pipeline must not begin. A second signal ends them."""
    monkeypatch.setattr(launcher, "AT_ONCE_S", 0.2)
    body = f"""
    signal.signal({int(number)}, signal.SIG_IGN)
    open(f'{tmp_path}/{{rank}}', 'w')
    while not os.path.exists('{tmp_path}/end'):
        time.sleep(0.01)
    """

    def send():
        wait_for(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)))
        for _ in range(times):
            os.kill(os.getpid(), number)
            time.sleep(0.1)
        if times == 1:
            (tmp_path / "end").touch()

    thread = threading.Thread(target=send)
    thread.start()
    assert run(body) == code
    thread.join()
    assert capfd.readouterr().err == f"{INTERRUPTED}\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_the_imports_is_one_line(number, code, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    body = f"""
    from rlhf_cli.processes.environment import set_up_process
    set_up_process()
    open(f'{tmp_path}/{{rank}}', 'w')
    time.sleep(60)
    """

    def send():
        wait_for(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)))
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    assert run(body) == code
    thread.join()
    assert capfd.readouterr().err == f"{INTERRUPTED}\n"


def test_ctrl_c_during_the_imports_of_a_stage_is_one_line():
    """transformers turns the exception into another one."""
    code = """
import importlib, os, signal, time
from rlhf_cli.run import launch
def import_module(_):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except KeyboardInterrupt:
        raise ModuleNotFoundError from None
importlib.import_module = import_module
launch.load_stage("sft")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (130, f"{INTERRUPTED}\n")


def test_a_signal_during_the_start_of_a_process_reaches_it_too(tmp_path, monkeypatch):
    body = f"""
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(143))
    open(f'{tmp_path}/{{rank}}', 'w')
    time.sleep(60)
    """
    start = subprocess.Popen

    def start_slowly(*args, **more):
        worker = start(*args, **more)
        rank = more["env"]["RANK"]
        wait_for(lambda: (tmp_path / rank).exists())
        if rank == "1":
            os.kill(os.getpid(), signal.SIGUSR1)
        return worker

    monkeypatch.setattr(subprocess, "Popen", start_slowly)
    began = time.monotonic()
    assert run(body) == 143
    assert time.monotonic() - began < 30
