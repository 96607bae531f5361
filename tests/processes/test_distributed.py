"""What real processes exchange, and how long they wait for each other. Each runs a small program with gloo."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from rlhf_cli.config.by_stage import load_stage_config
from rlhf_cli.errors import EndedElsewhere
from rlhf_cli.processes import ending
from rlhf_cli.processes.exits import LOST
from rlhf_cli.processes.signs_of_life import LastSign, missing
from rlhf_cli.run.artifacts import read_manifest
from support.crash import wait_for
from support.paths import ROOT
from support.runs import slurm_variables, start_forked, variables

PROGRAM = """
import os, sys, time, torch
from rlhf_cli.errors import RunError
from rlhf_cli.processes import distributed, ending, signs_of_life
from rlhf_cli.run import launch
signs_of_life.EVERY_S, signs_of_life.PATIENCE_S, ending.KNOWN_S = 0.1, {patience_s}, 0.5
distributed.at_step("sft start")
world = distributed.start("cpu", {timeout_s})
def program():
{body}
code = launch.exit_code(program)
distributed.stop()
sys.exit(code)
"""


@pytest.fixture
def start(tmp_path):
    """A function that runs the body of a program in several processes with a `world`.

    `timeout_s` is that of the world. The store may take `patience_s` to answer.
    """

    def processes(body, count, *, timeout_s=120.0, patience_s=20.0):
        body = textwrap.indent(textwrap.dedent(body), "    ")
        code = PROGRAM.format(body=body, timeout_s=timeout_s, patience_s=patience_s)
        return start_forked(variables(count), code, log=tmp_path / "body")

    return processes


def test_the_others_wait_for_longer_than_the_timeout_while_the_first_process_works(start):
    """A collective operation would have ended the run after a second."""
    body = """
    def work():
        time.sleep(2.5)
        return "result"
    print(world.rank, world.of_main(work), world.gather(world.rank))
    """
    for rank, process in enumerate(start(body, 3, timeout_s=1.0)):
        assert process.wait() == (0, f"{rank} result [0, 1, 2]\n")


@pytest.mark.slow
def test_a_process_that_stops_for_less_than_the_timeout_is_waited_for(start, tmp_path):
    """The other one looks for signs of life every two seconds, and finds none meanwhile."""
    body = f"""
    open(f"{tmp_path}/ready{{world.rank}}", "w")
    while world.is_main and not os.path.exists("{tmp_path}/continue"):
        time.sleep(0.02)
    world.barrier()
    """
    processes = start(body, 2, timeout_s=8.0, patience_s=0.5)
    wait_for(lambda: all(Path(f"{tmp_path}/ready{i}").exists() for i in range(2)))
    os.kill(processes[0].pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(processes[0].pid, signal.SIGCONT)
    (tmp_path / "continue").touch()
    assert [process.wait() for process in processes] == [(0, ""), (0, "")]


@pytest.mark.slow
def test_a_process_that_is_told_to_stop_does_not_wait_the_whole_timeout_for_one_that_hangs(start):
    """torchrun tells it so when another one has ended, and kills it half a minute later."""
    body = """
    from rlhf_cli.processes.signals import StopRequests
    StopRequests().install()
    world.barrier()
    os.kill(os.getpid(), 19 if world.rank == 1 else 15)
    world.barrier("the rewards")
    """
    code, output = start(body, 2, timeout_s=600.0)[0].wait(300)
    assert code == 1
    waited = r"error: sft start: process 0 waited \d+ s for the rewards of all 2 processes: "
    assert re.match(waited + r"process 1 \(last seen at sft start\) gives no sign of life", output), output
    assert len(output.splitlines()) == 1, output


@pytest.mark.parametrize(("rank", "fate"), [(0, "stopped"), (1, "stopped"), (1, "computes"), (0, "meets")])
def test_a_process_that_hangs_is_named(start, rank, fate, tmp_path):
    """Where operations return at once, as over NCCL, the others hang later, in no operation of ours. `meets`: they wait
    for work of one process. Process 0 holds the store, so the others cannot even read the signs of life if it hangs."""
    body = f"""
    distributed.at_step("ppo step 7")
    world.barrier()
    open(f"{tmp_path}/ready{{world.rank}}", "w")
    if world.rank != {rank} and "{fate}" == "meets":
        world.barrier("the gradients")
    elif world.rank != {rank}:
        distributed.collective("the gradients", lambda: None)
    time.sleep(600)
    """
    processes = start(body, 3, timeout_s=2.0, patience_s=1.0)
    wait_for(lambda: all(Path(f"{tmp_path}/ready{i}").exists() for i in range(3)))
    if fate != "computes":
        os.kill(processes[rank].pid, signal.SIGSTOP)
    others = [processes[i] for i in range(3) if i != rank]
    ended = [process.wait(120) for process in others]
    (line,) = "".join(output for _, output in ended).splitlines()
    first = min(i for i in range(3) if i != rank)
    assert line.startswith(f"error: ppo step 7: process {first} waited "), line
    found = {"computes": f"process {rank} still computes ppo step 7"}.get(fate, f"process {rank}")
    assert f"s for the gradients of all 3 processes: {found}" in line
    assert ("gives no sign of life" in line) is (fate != "computes")
    assert [code for code, _ in ended] == [1, LOST]
    if fate == "computes":
        assert processes[rank].wait(120) == (LOST, ""), "it ends itself"


@pytest.mark.parametrize(
    ("table", "found"),
    [
        # Each process: (exchanges begun, whether it waits, whether it gives signs, whether it has begun one lately).
        ([(7, False, True, False)] * 3, ([], [])),  # all compute: a reward, a compilation
        ([(7, False, True, False), (7, True, True, False), (7, True, True, False)], ([], [])),  # the first works alone
        ([(7, False, False, False), (7, False, True, False), (7, False, True, False)], ([], [])),  # nobody waits for it
        ([(7, False, True, False), (7, False, False, False), (7, False, False, False)], ([], [])),  # the others left
        ([(7, False, True, False), (6, True, False, False), (5, True, True, True)], ([], [])),  # one has just begun one
        ([(7, False, True, False), (7, True, False, False)], ([], [])),  # the one that waited is gone itself
        ([(7, False, True, False), (8, True, True, False), (8, True, True, False)], ([], [0])),
        ([(8, False, True, False), (7, False, True, False)], ([], [1])),  # over NCCL no process waits
        ([(7, True, True, False), (7, False, True, False), (7, False, False, False)], ([2], [])),
        ([(8, False, True, False), (7, False, False, False), (7, False, True, False)], ([1], [2])),
        ([(8, False, True, False), (7, False, False, False)], ([1], [])),
    ],
)
def test_a_process_is_missing_only_if_another_one_waits_for_it(table, found):
    now, limit = 1000.0, 300.0
    seen = {
        rank: LastSign({"begun": begun, "waits": waits}, now - (0 if gives_signs else 301), now - (0 if moves else 301))
        for rank, (begun, waits, gives_signs, moves) in enumerate(table)
    }
    assert missing(seen, now, limit) == found
    assert missing(seen, now - 2, limit) == ([], []), "not yet"


@pytest.mark.parametrize(
    ("work", "error", "says"),
    [
        ("world.of_main(work)", 'RunError("no room")', "error: no room"),
        ("work()", 'RunError("no room")', "error: no room"),
        ("work()", 'ConnectionResetError(104, "reset")', "ConnectionResetError: [Errno 104] reset"),
    ],
    ids=["of the first", "of all", "unexpected"],
)
def test_an_error_ends_all_and_is_printed_once(start, work, error, says):
    body = f"""
    def work():
        raise {error}
    {work}
    """
    ended = [process.wait() for process in start(body, 2)]
    assert [code for code, _ in ended] == [1, 1]
    output = "".join(output for _, output in ended)
    assert output.endswith(f"{says}\n")
    assert output.count(says) == 1
    assert says.startswith("error") is (output == f"{says}\n"), "the traceback of a bug"


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


@pytest.mark.parametrize("rank", [0, 2])
def test_a_process_that_is_killed_is_named_once_where_no_command_of_ours_started_it(start, rank):
    """As under `srun`. The first process holds the store through which the others agree on who prints."""
    body = f"""
    distributed.at_step("ppo step 7")
    distributed.name_checkpoint(lambda: "The checkpoint of step 5 is intact.")
    world.barrier()
    if world.rank == {rank}:
        os.kill(os.getpid(), 9)
    world.gather(None)
    """
    ended = [process.wait() for process in start(body, 3)]
    assert ended.pop(rank) == (-9, "")
    (line,) = "".join(output for _, output in ended).splitlines()
    # The first process holds the store, so the others cannot read its step.
    ended_process = rf"process {rank}" + (r" \(last seen at (sft start|ppo step 7)\)" if rank else "")
    waited = rf"error: ppo step 7: process \d waited for the figures of all 3 processes, but {ended_process} ended"
    assert re.match(waited, line), line
    assert line.endswith("The run ends. The checkpoint of step 5 is intact."), line
    assert all(code in (1, LOST) for code, _ in ended)


NO_GROUP = """
import torch.distributed as dist
from rlhf_cli.processes import distributed
def refuse(*given, **named):
    raise RuntimeError("no group")
dist.init_process_group = refuse
try:
    distributed.start("cpu", 60.0)
except RuntimeError as error:
    print(error)
distributed.stop()
"""


def test_a_group_that_cannot_be_formed_can_be_stopped(tmp_path):
    first, other = start_forked(variables(2), NO_GROUP, log=tmp_path / "log")
    assert first.wait() == (0, "no group\n")
    other.wait()  # may find that the first one, which holds the store, has ended


EXITS = """
import sys
from rlhf_cli.processes import distributed, ending, signs_of_life
{short}
world = distributed.start("cpu", 60.0)
world.barrier()
ending.in_time(ending.connect(60.0)._code_said, None, 0.1)
sys.exit(5)
"""


@pytest.mark.slow
@pytest.mark.parametrize("short", ["signs_of_life.EVERY_S = 0.0", "ending.POLL_S = 0.0"], ids=["signs", "questions"])
def test_threads_that_ask_the_store_do_not_abort_a_process_that_exits(short, tmp_path):
    """Not forked, as a forked process has no finalization. A thread in the C++ code of the store would abort about half
    of these processes there, since they make no pause between two signs or questions."""
    log = tmp_path / "log"
    with log.open("w") as output:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", EXITS.format(short=short)], env={**os.environ, **names}, stderr=output, cwd=ROOT
            )
            for names in variables(4)
        ]
    assert [process.wait(300) for process in processes] == [5] * 4, log.read_text()


OWN_CONFIG = """
import os, sys
if os.path.exists(own := sys.argv[2] + os.environ["RANK"]):
    sys.argv[2] = own
from rlhf_cli.run import launch
from stages import sft
launch.main("sft", sft.run)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_mistake_that_one_process_alone_has_is_printed_and_ends_all(rank, write_config, make_model, tmp_path):
    """For example a file that differs on one machine. The others do not wait for `distributed.timeout_s`."""
    config = write_config("sft", tmp_path, model={"path": str(make_model("llama"))})
    Path(f"{config}{rank}").write_text(f"{config.read_text()}\nsead: 1\n", encoding="utf-8")
    processes = start_forked(variables(2), OWN_CONFIG, "--config", str(config), log=config)
    ended = [process.wait() for process in processes]
    assert [code for code, _ in ended] == [2, 2]
    assert ended[1 - rank][1] == ""
    assert re.match(r"error: .*sead: unknown key", ended[rank][1]), ended


def test_process_0_keeps_the_store_until_the_others_know_the_exit_code():
    """A process that starts looks for a line twice in 0.1 s. It must not report that it knows one before it is said."""
    first = ending.Ending(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), 0, 2)
    second = ending.Ending(first.store.clone(), 1, 2)
    assert first.claim()
    codes = []

    def start():
        with pytest.raises(EndedElsewhere) as ended:
            second.wait_until_ready(120.0)
        codes.append(ended.value.exit_code)

    process = threading.Thread(target=start)
    process.start()
    process.join(0.5)
    assert not first._store.check(["known 1"])
    first.leave(2)
    process.join(120)
    assert codes == [2]
    assert first._store.check(["known 1"])


def test_ctrl_c_ends_a_process_that_waits_for_the_others_to_start(tmp_path):
    code = PROGRAM.partition("world =")[0].format(patience_s=0.5)
    code += f"open('{tmp_path}/begins', 'w')\nsys.exit(launch.exit_code(lambda: distributed.start('cpu', 600.0)))"
    (process,) = start_forked(variables(2)[:1], code, log=tmp_path / "alone")
    wait_for((tmp_path / "begins").exists)
    time.sleep(1)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == (130, "interrupted; finished stages and the last checkpoint are intact\n")


def test_a_process_that_never_starts_is_waited_for_until_the_timeout(tmp_path):
    code = PROGRAM.replace("world = distributed", "program = lambda: distributed").partition("def program")[0]
    code = code.format(timeout_s=1.0, patience_s=0.5) + "distributed.START_S = 0.0\nsys.exit(launch.exit_code(program))"
    (process,) = start_forked(variables(2)[:1], code, log=tmp_path / "alone")
    exit_code, output = process.wait()
    assert exit_code == 1
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, output
    assert lines[0].startswith("error: start: process 0 waited 1 s for all 2 processes at 127.0.0.1:"), output


COUNTED = """
import sys
from rlhf_cli.processes.environment import set_up_process
set_up_process()
from rlhf_cli import files as digests
digest_file = digests.digest_file
digests.digest_file = lambda path: print("read", path) or digest_file(path)
digests.SETTLED_NS = -1  # the files of this test are new
from rlhf_cli.run import launch
from stages import sft
launch.main("sft", sft.run)
"""


def test_processes_of_srun_train_and_one_reads_models_and_data_for_their_digests(write_config, make_model, tmp_path):
    """The others are told the digests, also when they load the model."""
    model = make_model("llama")
    config = write_config("sft", tmp_path, model={"path": str(model)}, training={"num_steps": 1})
    options = ("--config", str(config), "--quiet")
    ended = [process.wait() for process in start_forked(slurm_variables(2), COUNTED, *options, log=tmp_path / "srun")]
    output = "".join(log for _, log in ended)
    assert [code for code, _ in ended] == [0, 0], output
    assert read_manifest(tmp_path / "sft").num_processes == 2
    for path in (f"{model}/model.safetensors", load_stage_config("sft", config).sources["train"].path):
        assert output.count(f"read {path}\n") == 1, output
