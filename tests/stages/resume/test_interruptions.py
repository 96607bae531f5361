"""Signals, a second start, full disks, links and lack of memory: nothing is lost, and the run can be resumed."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhf_cli.run import artifacts, checkpoint
from rlhf_cli.run.artifacts import digest_file
from rlhf_cli.run.checkpoint import CheckpointStore, StageFiles
from rlhf_cli.run.lock import Lock, Owner, lock_path, owner_of
from rlhf_cli.run.stage_run import StageRun
from rlhf_cli.run.state import state_of
from stages import sft as sft_stage
from support import crash, resume
from support.resume import STEPS, checkpoints, refused, rlhf, same, status, stopped_after, succeed, words

# ------------------------------------------------------------------------------------------ signals


@pytest.mark.parametrize(
    ("case", "number", "code"),
    [
        ("sft", signal.SIGUSR1, 143),
        ("sft", signal.SIGHUP, 143),
        ("rm", signal.SIGINT, 130),
        ("ppo", signal.SIGTERM, 143),
    ],
)
def test_a_signal_lets_the_step_finish_and_saves_it(case, number, code, config_in, finish, tmp_path):
    """The signal comes during step 3, while the checkpoint of step 2 is written."""
    root = tmp_path / "a root"
    arguments = [*config_in(case, root), "--set", "checkpoints.keep=2"]
    when = f"mkdir .{case}.checkpoints/.step-00000002.writing #1"
    attempt = crash.Attempt(arguments, tmp_path / "log", crash.Watch(str(root), signals={when: number}))
    assert attempt.wait() == code, attempt.output
    last = attempt.output.strip().splitlines()[-1]
    name, total = signal.Signals(number).name, STEPS[case]
    assert last.startswith(f"{case}: {name}: stopped after step 3 of {total}, and saved. To resume: "), last
    assert last.endswith(f"rlhf {case} --config '{arguments[2]}' --set checkpoints.keep=2")
    assert [path.name for path in checkpoints(root, case)] == ["step-00000002", "step-00000003"]
    assert f"interrupted saved after step 3 of {total}; run the same command to resume" in words(status(root))
    assert state_of(root, case).line == last.partition(". To resume")[0]
    assert "resuming after step 3" in finish(arguments)


def test_a_second_signal_stops_immediately(config_in, undisturbed, tmp_path):
    arguments = config_in("sft", tmp_path)
    signals = {
        "mkdir .sft.checkpoints/.step-00000002.writing #1": signal.SIGINT,
        "half .sft.partial/metrics.jsonl #4": 2,
    }
    attempt = crash.Attempt(arguments, tmp_path / "log", crash.Watch(str(tmp_path), signals=signals))
    assert attempt.wait() == 130, attempt.output
    last = attempt.output.strip().splitlines()[-1]
    assert last.startswith("interrupted; finished stages and the last checkpoint are intact")
    assert "resuming after step 2" in succeed(arguments)
    (tmp_path / "log").unlink()
    same(crash.outcome(tmp_path / "sft"), undisturbed("sft"))


def test_a_signal_after_the_last_step_lets_the_stage_finish_and_stops_the_pipeline(config_in, undisturbed, tmp_path):
    arguments = config_in("sft", tmp_path)
    config_in("rm", tmp_path)
    shutil.rmtree(tmp_path / "sft")
    watch = crash.Watch(str(tmp_path), signals={"open .sft.partial/model/config.json #1": signal.SIGINT})
    attempt = crash.Attempt(["pipeline", str(tmp_path)], tmp_path / "log", watch)
    assert attempt.wait() == 130, attempt.output
    assert attempt.output.strip().splitlines()[-1] == "sft: SIGINT: the stage had already finished"
    assert not (tmp_path / "rm").exists()
    assert not (tmp_path / ".rm.partial").exists()
    same(crash.outcome(tmp_path / "sft"), undisturbed("sft"))
    assert "skipped" in succeed(arguments)


# --------------------------------------------------------------------------------------- one writer


def test_a_second_start_of_a_running_stage_is_refused(config_in, finish, tmp_path):
    """The first start is halted in step 5, and the second is refused with its process id. A kill leaves no lock."""
    arguments = config_in("sft", tmp_path)
    # The seventh row belongs to step 5: the checkpoint of step 2 is saved, that of step 4 is being written.
    watch = crash.Watch(str(tmp_path), signals={"half .sft.partial/metrics.jsonl #7": signal.SIGSTOP})
    first = crash.Attempt(arguments, tmp_path / "log", watch)
    first.wait_until_stopped()
    before = {path: digest_file(path) for path in tmp_path.rglob("*.safetensors")}
    for more in ([], ["--restart"]):
        second = crash.Attempt([*arguments, *more], tmp_path / "second")
        assert second.wait() == 2
        assert f"process {first.pid} on {socket.gethostname()}" in second.output
        assert "is writing its sft stage. Wait for it, stop it, or set another `artifacts`" in second.output
        assert len(second.output.strip().splitlines()) == 1
    assert f"process {first.pid} on {socket.gethostname()}" in refused(arguments)
    assert before == {path: digest_file(path) for path in tmp_path.rglob("*.safetensors")}
    assert f"running, step 4 of {STEPS['sft']}" in status(tmp_path)
    owner = f"process {first.pid} on {socket.gethostname()}, since "
    assert re.search(f"saved after step [24] of {STEPS['sft']}; {owner}", status(tmp_path))
    first.send(signal.SIGKILL)
    assert first.wait() == crash.KILLED
    assert (tmp_path / ".sft.lock").is_file()
    assert re.search("interrupted saved after step [24] of .; run the same command to resume", words(status(tmp_path)))
    assert re.search("resuming after step [24]", finish(arguments))
    assert "finished" in status(tmp_path)


def test_a_process_of_the_users_code_does_not_hold_the_lock(tmp_path):
    """One of a pool in a reward function lives on if the run is killed."""
    lock = Lock(tmp_path, "ppo")
    lock.acquire()
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    try:
        assert owner_of(tmp_path, "ppo").pid == os.getpid()
        lock._file.close()  # as the end of this process does
        crash.wait_for(lambda: owner_of(tmp_path, "ppo") is None, 30)
    finally:
        child.kill()


def test_status_never_takes_the_lock(tmp_path, monkeypatch):
    """A stage that starts while `rlhf status` looks must not be refused. Here it looks until the stage has tried."""
    lock = Lock(tmp_path, "sft")
    lock.acquire()
    lock.release()
    (tmp_path / ".sft.lock").touch()
    with (tmp_path / ".sft.lock").open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        pauses = []

        def stops_looking(seconds):
            pauses.append(seconds)
            fcntl.flock(looking, fcntl.LOCK_UN)

        monkeypatch.setattr("rlhf_cli.run.lock.time", SimpleNamespace(**vars(time) | {"sleep": stops_looking}))
        lock.acquire()
    assert len(pauses) == 1
    lock.release()


def test_a_file_system_without_locks_is_named_and_does_not_stop_a_run(config_in, tmp_path, monkeypatch):
    """NFS without a lock daemon and Lustre without `-o flock` refuse every lock. A live owner is still respected."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("rlhf_cli.run.lock.fcntl", SimpleNamespace(**vars(fcntl) | {"flock": refuse}))
    output = " ".join(succeed(config_in("sft", tmp_path)).split())
    assert "this file system has no locks (No locks available)" in output
    assert "is writing" not in output
    owner = {"pid": os.getppid(), "host": socket.gethostname(), "since": "now"}
    lock_path(tmp_path, "sft").write_text(json.dumps(owner))
    assert owner_of(tmp_path, "sft") == Owner(**owner)
    assert "is writing its sft stage" in refused(config_in("sft", tmp_path), "--restart")
    ended = subprocess.Popen(["true"])
    ended.wait()
    lock_path(tmp_path, "sft").write_text(json.dumps(owner | {"pid": ended.pid}))
    assert owner_of(tmp_path, "sft") is None
    Lock(tmp_path, "sft").acquire()


def test_the_lock_is_released_after_every_failure(config_in, tmp_path, monkeypatch):
    """Also within one process, where no exit releases it."""
    arguments = config_in("sft", tmp_path)
    for where, name in ((StageFiles, "close"), (CheckpointStore, "wait")):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            assert rlhf(arguments).exit_code == 2
    succeed(arguments)


def test_status_before_the_first_checkpoint(config_in, at_step, tmp_path):
    at_step(1, lambda _: 1 / 0)
    rlhf(config_in("sft", tmp_path))
    shown = words(status(tmp_path))
    assert shown.startswith(
        f"status: warning: {tmp_path}: sft: failed after step 1 of 6: ZeroDivisionError: division by zero"
    )
    assert "failed nothing saved; the next run starts over" in shown


def test_what_a_run_has_paid_for_outlives_an_end_before_the_first_checkpoint(config_in, at_step, finish, tmp_path):
    """A judge's answers, for the same run alone."""
    arguments, grades = config_in("sft", tmp_path), tmp_path / ".sft.checkpoints/grades/0.jsonl"
    found = []

    def fail(_):
        found.append(grades.exists())
        grades.parent.mkdir(exist_ok=True)
        grades.write_text("{}")
        raise ZeroDivisionError

    at_step(1, fail)
    for more in ([], [], ["--restart"], ["--set", "optimizer.weight_decay=0.2"]):
        assert isinstance(rlhf(arguments, *more).exception, ZeroDivisionError)
    assert found == [False, True, False, False]
    at_step(1, lambda _: None)
    finish(arguments)


# --------------------------------------------------------------------------------------------- disk


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Callable[[str], Path]]:
    """A function: size -> a file system of that size. The test is skipped if none can be mounted."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        disk = tmp_path / f"disk{len(mounted)}"
        disk.mkdir()
        process = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(disk)], check=False)
        if process.returncode:
            pytest.skip("no file system can be mounted here")
        mounted.append(disk)
        return disk

    yield mount
    for disk in mounted:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize("size", [f"{n}k" for n in (60, 500, 750)])
def test_a_disk_that_is_full_at_any_point_gives_one_line_and_can_be_resumed(size, small_disk, config_in, finish):
    """Rows, a checkpoint or the model may not fit: one line, and with more space the run resumes to the same bytes."""
    disk = small_disk(size)
    root = disk / "run"
    arguments = config_in("sft", root)
    result = rlhf(arguments, "--quiet")
    assert result.exit_code == 2, result.output
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert "No space left on device" in result.stderr
    assert not (root / "sft").exists()
    subprocess.run(["mount", "-o", "remount,size=9m", str(disk)], check=True)
    finish(arguments)


def test_a_checkpoint_that_could_not_be_written_does_not_discard_a_finished_training(config_in, finish, tmp_path):
    """The disk was full for a moment, after which the model itself was saved."""
    written, save_file = [], checkpoint.save_file

    def full_at_last(*given):
        written.append(given)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full_at_last)
        output = words(finish(config_in("sft", tmp_path)))
    assert "could not write a checkpoint (No space left on device); the finished stage does not need it" in output


@pytest.mark.parametrize(
    ("removed", "step"),
    [(".", 3), (".sft.checkpoints", 6), (".sft.lock", 6), (".sft.partial", None)],
)
def test_a_stage_directory_that_is_deleted_during_the_run(removed, step, config_in, undisturbed, tmp_path, monkeypatch):
    """Deleted in a step, in the last one, or before publishing: nothing is published, and the next run is complete."""
    root = tmp_path / "run"
    arguments = config_in("sft", root)

    def remove(stage: StageRun) -> None:
        stage.checkpoints.wait()
        path = root / removed
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    with monkeypatch.context() as patch:
        if step is None:
            publish = StageRun.publish
            patch.setattr(StageRun, "publish", lambda self, metrics: (remove(self), publish(self, metrics)))
        else:
            patch.setattr(StageRun, "finish_step", resume.stopping_after(step, remove))
        message = refused(arguments)
    assert "removed" in message
    assert not (root / "sft").exists()
    if removed == ".":
        assert not root.exists()
    succeed(config_in("sft", root))
    same(crash.outcome(root / "sft"), undisturbed("sft"))


def test_the_finished_stage_stays_until_a_new_run_is_complete(config_in, at_step, finish, tmp_path):
    """After a full disk, a stop and a bug. The resumed run then replaces it."""
    arguments = config_in("sft", tmp_path / "run", optimizer={"weight_decay": 0.2})
    succeed(arguments)
    old = crash.outcome(tmp_path / "run/sft")
    config_in("sft", tmp_path / "run")
    at_step(3, lambda _: 1 / 0)
    assert isinstance(rlhf(arguments).exception, ZeroDivisionError)
    same(crash.outcome(tmp_path / "run/sft"), old)
    stopped_after(4, arguments)
    same(crash.outcome(tmp_path / "run/sft"), old)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(artifacts, "sync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        assert "cannot be published (Input/output error)" in refused(arguments)
    same(crash.outcome(tmp_path / "run/sft"), old)
    assert "resuming after step 4" in finish(arguments)


# ------------------------------------------------------------------------------------------- links


def test_the_artifact_root_can_be_a_link(stopped, config_in, undisturbed, tmp_path):
    """A link to a scratch disk: resuming, rerunning and cleaning up after a kill work as in a folder."""
    scratch, root = tmp_path / "scratch", tmp_path / "run"
    stopped("sft", scratch)
    root.symlink_to("scratch", target_is_directory=True)
    arguments = config_in("sft", root)
    assert "resuming after step 4" in succeed(arguments)
    same(crash.outcome(root / "sft"), undisturbed("sft"))
    for _ in range(2):
        succeed(arguments, "--restart")
        same(crash.outcome(scratch / "sft"), undisturbed("sft"))
    assert root.is_symlink()
    assert {path.name for path in scratch.iterdir()} == {"sft", "sft.yaml"}


def test_a_stage_directory_that_is_a_link_is_refused_at_the_start(config_in, tmp_path):
    """Its target may be read, also by later stages, but is never written, renamed or removed."""
    arguments = config_in("sft", tmp_path / "run", evaluation={"num_samples": 1})
    succeed(arguments)
    (tmp_path / "run/sft").rename(tmp_path / "elsewhere")
    (tmp_path / "run/sft").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert "skipped" in succeed(arguments)
    before = crash.outcome(tmp_path / "elsewhere")
    message = refused(config_in("sft", tmp_path / "run"), "--restart")
    assert f"{tmp_path}/run/sft: is a symbolic link" in message
    assert not (tmp_path / "run/.sft.partial").exists()
    same(crash.outcome(tmp_path / "elsewhere"), before)


def test_a_stage_directory_that_is_a_mount_point_is_refused_at_the_start(config_in, tmp_path, monkeypatch):
    """It could not be renamed at the end."""
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "run/sft")
    assert f"{tmp_path}/run/sft: is a mount point" in refused(config_in("sft", tmp_path / "run"))


# ------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried ..."),
        MemoryError(),
    ],
)
def test_out_of_memory_names_the_allocation_and_the_key_to_lower(error, stopped, monkeypatch, tmp_path):
    arguments = stopped("sft", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(sft_stage, "_accumulate", lambda *_: (_ for _ in ()).throw(error))
        message = refused(arguments, code=1)
    assert "out of memory" in message
    assert "3 rows of at most 96 tokens" in message
    assert "Lower training.tokens_per_microbatch below 288" in message
    output = succeed(arguments, "--set", "training.tokens_per_microbatch=100")
    assert "resuming with a different training.tokens_per_microbatch" in output
    assert "at most 100 tokens per microbatch" in output
    assert "resuming after step 4" in output


@pytest.mark.parametrize("error", ["can't start new thread", "Unknown error: Failed to launch worker thread"])
def test_a_system_without_threads_is_reported_in_one_line(error, config_in, monkeypatch, tmp_path):
    """As under `ulimit -v`: Python and pyarrow raise different exceptions."""
    monkeypatch.setattr(sft_stage, "tokenise", lambda *_, **__: (_ for _ in ()).throw(Exception(error)))
    message = refused(config_in("sft", tmp_path), code=1)
    assert f"the system refused to start a thread ({error}). Raise its limit of memory or processes" in message


def test_out_of_memory_in_ppo(stopped, monkeypatch, tmp_path):
    from stages import ppo as ppo_stage

    arguments = stopped("ppo", tmp_path)
    monkeypatch.setattr(ppo_stage, "_update", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA ...")))
    message = refused(arguments, code=1)
    assert "4 responses of at most 520 tokens and 2048 tokens in total" in message
    assert "Lower ppo.tokens_per_microbatch below 2048" in message
