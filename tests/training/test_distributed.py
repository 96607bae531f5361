"""What real processes exchange, and how long they wait for each other. Each runs a small program with gloo."""

from __future__ import annotations

import os
import signal
import socket
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhf_cli.config.by_stage import load_stage_config
from support.forked import Forked
from support.paths import ROOT

PROGRAM = """
import os, sys, time, torch
from rlhf_cli.errors import RunError
from rlhf_cli.training import distributed, launch, pulse
pulse.EVERY_S, pulse.PATIENCE_S = 0.1, 0.5
world = distributed.start("cpu", 1.0)
def program():
{body}
code = launch.exit_code(program)
distributed.stop()
sys.exit(code)
"""


@pytest.fixture
def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def variables(count: int, port: int) -> list[dict[str, str]]:
    """The variables of `torchrun` of each process."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


@pytest.fixture
def start(tmp_path, free_port) -> Iterator[Callable[[str, int], list[Forked]]]:
    """A function that runs the body of a program in several processes with a `world`, whose timeout is a second."""
    started: list[Forked] = []

    def processes(body: str, count: int) -> list[Forked]:
        code = PROGRAM.format(body=textwrap.indent(textwrap.dedent(body), "    "))
        started.extend(
            Forked(code, folder=ROOT, log=tmp_path / f"log{rank}", environment=names)
            for rank, names in enumerate(variables(count, free_port))
        )
        return started

    yield processes
    for process in started:
        process.kill()


def test_the_others_wait_for_longer_than_the_timeout_while_the_first_process_works(start):
    """A collective operation would have ended the run after a second."""
    body = """
    def work():
        time.sleep(2.5)
        return "result"
    print(world.rank, world.of_main(work), world.gather(world.rank))
    """
    for rank, process in enumerate(start(body, 3)):
        assert process.wait() == (0, f"{rank} result [0, 1, 2]\n")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_hangs_while_the_others_wait_is_named(start, rank, tmp_path):
    """The first process holds the store, so the others cannot even read the signs of life if it hangs."""
    body = f"""
    open(f"{tmp_path}/ready{{world.rank}}", "w")
    if world.rank == {rank}:
        time.sleep(60)
    world.barrier("the model to be saved")
    """
    processes = start(body, 2)
    while not all(Path(f"{tmp_path}/ready{i}").exists() for i in range(2)):
        time.sleep(0.02)
    os.kill(processes[rank].pid, signal.SIGSTOP)
    code, output = processes[1 - rank].wait()
    assert code == 1
    assert f"process {1 - rank} waited" in output
    assert f"s for the model to be saved of all 2 processes: process {rank} gives no sign of life" in output


@pytest.mark.slow
def test_a_process_that_stops_for_less_than_the_timeout_is_waited_for(start, tmp_path):
    body = f"""
    open(f"{tmp_path}/ready{{world.rank}}", "w")
    if world.is_main:
        time.sleep(1.5)
    world.barrier()
    """
    processes = start(body, 2)
    while not all(Path(f"{tmp_path}/ready{i}").exists() for i in range(2)):
        time.sleep(0.02)
    os.kill(processes[0].pid, signal.SIGSTOP)
    time.sleep(0.7)
    os.kill(processes[0].pid, signal.SIGCONT)
    assert [process.wait() for process in processes] == [(0, ""), (0, "")]


def test_an_error_of_the_first_process_ends_all_and_is_printed_once(start):
    body = """
    def work():
        raise RunError("no room")
    world.of_main(work)
    """
    assert [process.wait() for process in start(body, 2)] == [(1, "error: no room\n"), (1, "")]


def test_tensors_of_different_lengths_are_gathered_in_order_of_rank(start):
    """Also those of a process that has none."""
    body = """
    rows = torch.arange(2 * world.rank, dtype=torch.float64)[:, None] * torch.tensor([1.0, 10.0])
    print([part.tolist() for part in world.gather_tensors(rows)])
    flags = torch.arange(1 + world.rank) == 0
    print([part.tolist() for part in world.gather_tensors(flags)], world.gather_tensors(flags)[0].dtype)
    """
    rows = [[[10.0**j * i for j in range(2)] for i in range(2 * rank)] for rank in range(3)]
    flags = [[i == 0 for i in range(1 + rank)] for rank in range(3)]
    assert [process.wait() for process in start(body, 3)] == [(0, f"{rows}\n{flags} torch.bool\n")] * 3


COUNTED = """
import sys
from rlhf_cli import digests
digest_file = digests.digest_file
digests.digest_file = lambda path: print("read", path) or digest_file(path)
digests.SETTLED_NS = -1  # the files of this test are new
from rlhf_cli.training import launch
from stages import sft
launch.main("sft", sft.run)
"""


def test_one_process_reads_models_and_data_for_their_digests(write_config, make_model, tmp_path, free_port):
    """The others are told the digests, also when they load the model."""
    model = make_model("llama")
    config = write_config("sft", tmp_path, model={"path": str(model)}, training={"num_steps": 1})
    output = ""
    for process in [
        Forked(COUNTED, "--config", str(config), "--quiet", folder=ROOT, log=tmp_path / f"log{rank}", environment=names)
        for rank, names in enumerate(variables(2, free_port))
    ]:
        code, log = process.wait()
        assert code == 0, log
        output += log
    data = load_stage_config("sft", config).sources["train"].path
    for path in (f"{model}/model.safetensors", data):
        assert output.count(f"read {path}\n") == 1, output
