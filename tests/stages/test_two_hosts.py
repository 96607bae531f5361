"""Two hosts, as network namespaces with a link between them: `torchrun` on each, and the link is cut for a while."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhf_cli.run import checkpoint_files
from rlhf_cli.run.artifacts import read_manifest
from support.crash import wait_for
from support.paths import ROOT
from support.resume import succeed
from support.runs import ENVIRONMENT, dies_once

pytestmark = pytest.mark.slow
NAMES = [f"rlhf{os.getpid()}{side}" for side in "ab"]
LINKS = [f"v{os.getpid()}{side}" for side in "ab"]
ADDRESSES = ["10.213.7.1", "10.213.7.2"]
NOT_ALLOWED = r"Operation not permitted|Permission denied|not supported|Unknown device type|Read-only file system"
"""What `ip` says where namespaces or links between them are not allowed. Any other failure is one of this test."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def set_link(state: str) -> None:
    ip("-n", NAMES[1], "link", "set", LINKS[1], state)


@pytest.fixture
def hosts() -> Iterator[None]:
    """Two namespaces, each with one end of a link."""
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", LINKS[0], "netns", NAMES[0], "type", "veth", "peer", "name", LINKS[1], "netns", NAMES[1])
        for name, link, address in zip(NAMES, LINKS, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", link, "up")
    except FileNotFoundError:
        pytest.skip("the program `ip` is not installed (package iproute2)")
    except subprocess.CalledProcessError as error:
        _remove()
        if not re.search(NOT_ALLOWED, error.stderr):
            raise
        pytest.skip(f"this machine does not allow network namespaces ({error.stderr.strip()})")
    yield
    _remove()


def _remove() -> None:
    for name in NAMES:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            ip("netns", "del", name)


class Job:
    """`torchrun` with one process on each host, which it may restart `restarts` times."""

    def __init__(self, config: Path, folder: Path, restarts: int = 0, program: tuple[str, ...] = ("-m", "stages.sft")):
        self.program = program
        self.logs = [folder / f"host{rank}.log" for rank in range(2)]
        self.restarts = restarts
        self.processes = [self._start(rank, config) for rank in range(2)]

    def _start(self, rank: int, config: Path) -> subprocess.Popen[bytes]:
        command = [
            *("ip", "netns", "exec", NAMES[rank], sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "2", "--nproc-per-node", "1", *self._rendezvous(rank)),
            *(*self.program, "--config", str(config)),
        ]
        environment = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": LINKS[rank], "TP_SOCKET_IFNAME": LINKS[rank]}
        if self.restarts:
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with self.logs[rank].open("wb") as log:
            return subprocess.Popen(
                command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _rendezvous(self, rank: int) -> list[str]:
        """How the hosts meet. Only `c10d` lets them meet again after a restart."""
        if not self.restarts:
            return ["--node-rank", str(rank), "--master-addr", ADDRESSES[0], "--master-port", "29500"]
        # Both namespaces have the name of this machine, so its host cannot be found by it.
        hosting = f"is_host={int(rank == 0)}"
        endpoint = ["--rdzv-backend", "c10d", "--rdzv-id", "1", "--rdzv-endpoint", f"{ADDRESSES[0]}:29500"]
        local = ["--rdzv-conf", hosting, "--local-addr", ADDRESSES[rank]]
        return [*endpoint, *local, "--max-restarts", str(self.restarts)]

    def train(self, until: Callable[[], bool]) -> None:
        """Wait until it has trained so far on both hosts."""
        wait_for(lambda: until() or any(process.poll() is not None for process in self.processes))
        assert all(process.poll() is None for process in self.processes), self.text()

    def wait(self) -> list[int]:
        return [process.wait(600) for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def text(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)


@pytest.mark.usefixtures("hosts")
def test_a_short_cut_is_waited_for_and_a_long_one_ends_the_run_which_resumes(write_config, make_model, tmp_path):
    keys = {"model": {"path": str(make_model("llama"))}, "training": {"num_steps": 100_000}}
    keys |= {"checkpoints": {"every_steps": 20, "every_minutes": None}, "distributed": {"timeout_s": 15}}
    config = write_config("sft", tmp_path, **keys)
    metrics = tmp_path / ".sft.partial/metrics.jsonl"

    def num_rows() -> int:
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    job = Job(config, tmp_path)
    try:
        job.train(lambda: num_rows() > 25)
        set_link("down")
        time.sleep(3)
        set_link("up")
        at = num_rows()
        job.train(lambda: num_rows() > at + 25)

        set_link("down")
        assert 0 not in job.wait()
        # A wait for a checkpoint of another process may be longer: it lasts while signs of life arrive.
        waited = re.findall(r"process \d waited (\d+) s for [\w ]+ of all 2 processes", job.text())
        assert waited, job.text()
        assert min(map(int, waited)) >= 15, job.text()
    finally:
        set_link("up")
        job.kill()
    step = checkpoint_files.last_step(str(tmp_path), "sft")
    assert step is not None
    output = succeed(["sft", str(config), "--set", f"training.num_steps={step + 5}"])
    assert f"resuming after step {step} of {step + 5}" in output


@pytest.mark.usefixtures("hosts")
def test_a_killed_process_of_a_sharded_run_is_restarted_on_both_hosts(write_config, make_model, tmp_path):
    """`distributed.shard` between the hosts. The run resumes from its last checkpoint and ends."""
    keys = {"model": {"path": str(make_model("llama"))}, "training": {"num_steps": 30}}
    keys |= {"checkpoints": {"every_steps": 4, "every_minutes": None}, "distributed": {"timeout_s": 60, "shard": True}}
    config = write_config("sft", tmp_path, **keys)
    second_host = {"GLOO_SOCKET_IFNAME": LINKS[1]}
    program = dies_once(tmp_path / "dies.py", tmp_path / ".sft.checkpoints", **second_host)
    job = Job(config, tmp_path, restarts=1, program=(program,))
    try:
        assert job.wait() == [0, 0], job.text()
        assert re.search(r"resuming after step \d+ of 30", job.text()), job.text()
    finally:
        job.kill()
    assert read_manifest(tmp_path / "sft") is not None
