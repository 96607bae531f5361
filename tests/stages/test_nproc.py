"""`rlhf sft --nproc 2` with real processes: the result of one, and one that hangs, dies or is told to stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhf_cli.run import checkpoint_files
from rlhf_cli.run.artifacts import read_manifest
from support.compare import same_weights
from support.crash import wait_for
from support.paths import ROOT
from support.resume import succeed
from support.runs import ENVIRONMENT
from support.tiny import read_jsonl

pytestmark = pytest.mark.slow
RLHF = (sys.executable, "-m", "rlhf_cli")
GUARD_S = 300
"""A wait that takes longer than this hangs."""


def pids_of(root: Path) -> dict[int, int]:
    """rank -> process id, of the processes whose config is in `root`."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = str(root).encode() in (path / "cmdline").read_bytes()
            rank = re.search(rb"\0RANK=(\d+)", b"\0" + (path / "environ").read_bytes())
        except OSError:
            continue
        if is_ours and rank:
            found[int(rank[1])] = int(path.name)
    return found


@pytest.fixture
def begin(write_config, make_model, tmp_path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A function that starts a long SFT run by a command, and returns when both processes train."""
    started = []

    def start(*command: str, shard: bool = False, timeout_s: float = 60) -> subprocess.Popen[str]:
        changes = {"model": {"path": str(make_model("llama"))}, "training": {"num_steps": 100_000}}
        changes |= {"checkpoints": {"every_minutes": None}, "distributed": {"timeout_s": timeout_s, "shard": shard}}
        words = [word.format(config=write_config("sft", tmp_path, **changes)) for word in command]
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(words, env=ENVIRONMENT, cwd=ROOT, **streams)
        started.append(process)
        metrics = tmp_path / ".sft.partial/metrics.jsonl"
        wait_for(lambda: process.poll() is not None or (metrics.exists() and metrics.stat().st_size > 2000))
        assert process.poll() is None, process.communicate()[1]
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
    for pid in pids_of(tmp_path).values():
        os.kill(pid, signal.SIGKILL)


WITH_NPROC = (*RLHF, "sft", "--config", "{config}", "--quiet", "--nproc", "2")
WITH_TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *("-m", "stages.sft", "--config", "{config}", "--quiet"),
)


def test_two_processes_give_the_weights_of_one(write_config, make_model, run_stage, tmp_path):
    changes = {"model": {"path": str(make_model("llama"))}, "optimizer": {"eps": 1e-3}}
    run_stage("sft", tmp_path / "one", **changes)
    config = write_config("sft", tmp_path / "two", **changes)
    command = [*RLHF, "sft", str(config), "--nproc", "2"]
    options = {"env": ENVIRONMENT, "cwd": ROOT, "capture_output": True, "text": True}
    assert subprocess.run(command, **options, check=True).stdout.count("finished in") == 1
    same_weights(tmp_path / "one/sft", tmp_path / "two/sft")
    assert read_manifest(tmp_path / "two/sft").num_processes == 2
    assert "skipped" in subprocess.run(command, **options, check=True).stdout
    refused = subprocess.run([*command, "--set", "training.num_steps=no"], **options, check=False)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)


# The first process holds the store by which all know of each other, and the shards of one are missed by the others.
@pytest.mark.parametrize(("rank", "shard"), [(0, False), (1, True)])
def test_a_process_that_hangs_is_named_after_the_timeout(begin, tmp_path, rank, shard):
    process = begin(*WITH_NPROC, shard=shard, timeout_s=5)
    os.kill(pids_of(tmp_path)[rank], signal.SIGSTOP)
    _, error = process.communicate(timeout=GUARD_S)
    assert process.returncode == 1
    waited = rf"error: sft step \d+: process {1 - rank} waited \d+ s for [\w ]+ of all 2 processes: "
    at = r" \(last seen at sft (start|step \d+)\)"
    silent = rf"process {rank}{at} gives no sign of life\. The run ends\. There is no earlier checkpoint\. "
    assert re.match(waited + silent, error), error
    assert "distributed.timeout_s" in error
    assert len(error.splitlines()) == 1, error
    assert not pids_of(tmp_path)


def test_a_signal_saves_a_sharded_run_which_resumes_whole_on_one_process(begin, tmp_path):
    process = begin(*WITH_NPROC, shard=True)
    process.send_signal(signal.SIGUSR1)
    _, error = process.communicate(timeout=GUARD_S)
    assert process.returncode == 143
    assert "SIGUSR1: stopped after step" in error
    assert f"sft --config {tmp_path}/sft.yaml --nproc 2" in " ".join(error.split())
    assert error.count("To resume") == 1
    step = checkpoint_files.last_step(str(tmp_path), "sft")
    assert step > 0
    assert len(list(tmp_path.glob(".sft.checkpoints/step-*/state-*.safetensors"))) == 2
    more = ("--set", f"training.num_steps={step + 2}", "--set", "distributed.shard=false")
    assert f"resuming after step {step} of {step + 2}" in succeed(["sft", str(tmp_path / "sft.yaml"), *more])
    assert [row["step"] for row in read_jsonl(tmp_path / "sft/metrics.jsonl") if "loss/sft" in row][-1] == step + 2


def test_the_processes_of_a_torchrun_that_has_ended_save_and_stop(begin, tmp_path):
    """No signal reaches them: SIGKILL ends `torchrun` alone."""
    process = begin(*WITH_TORCHRUN)
    process.kill()
    wait_for(lambda: not pids_of(tmp_path), every=0.1)
    assert checkpoint_files.last_step(str(tmp_path), "sft") > 0
    assert read_jsonl(tmp_path / ".sft.partial/metrics.jsonl")[-1]["step"] >= 1
