"""A run that cannot be lost: it ends with the very same bytes, whatever stopped it and how often."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import crash
import pytest
import torch
import yaml
from conftest import merged, read_jsonl
from crash import wait_for
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from rlhf_cli import artifacts
from rlhf_cli.artifacts import digest_file
from rlhf_cli.cli import app
from rlhf_cli.errors import ArtifactError
from rlhf_cli.program import program
from rlhf_cli.training import checkpoint, checkpoint_files
from rlhf_cli.training.checkpoint import Checkpoints, State
from rlhf_cli.training.stage_run import StageRun
from stages import sft as sft_stage

ALL = bool(os.environ.get("RLHF_ALL_KILLS"))
"""Every fault point and 300 kills; otherwise a sample of them."""
KILLS = 100 if ALL else 8
"""Of each stage."""
ROOT = Path(__file__).resolve().parent.parent
STEPS = {"sft": 6, "rm": 6, "ppo": 4}
OPTIMIZER = {"schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1}
TRAINING = {"training": {"num_steps": 6, "microbatch_size": 3}, "evaluation": {"every_steps": 2}}
PPO_CARRIES: dict[str, Any] = {
    "ppo": {
        "num_iterations": 4,
        "kl_controller": "adaptive",
        "kl_target": 0.5,
        "kl_horizon": 50,
        "score_normalization": "running",
        "ema_decay": 0.9,
        "num_rollouts_per_update": 2,
    },
    "value_model": {"warmup_iterations": 1},
    "evaluation": {"every_iterations": 1, "best_metric": "score_mean"},
    "num_logged_samples": 3,
}
"""Everything at once that a step leaves to the next."""


@pytest.fixture(scope="module")
def changes(pipeline) -> dict[str, dict[str, Any]]:
    """What each stage's config has beside conftest's, by case; the word before the first blank is the stage."""
    root = pipeline("llama")
    often = {"checkpoints": {"every_steps": 2, "every_minutes": None}, "optimizer": OPTIMIZER}
    ppo = often | {"policy": {"path": str(root / "sft")}, "rewards": [{"type": "reward_model", "path": f"{root}/rm"}]}
    lora = {"lora": {"r": 2, "alpha": 4, "target_modules": ["q_proj", "up_proj"]}}
    cases = {
        "sft": (often, {"model": {"path": str(root / "sft/model")}, **TRAINING}),
        "sft scratch": (often, {"model": {"scratch": {"architecture": "llama", "config": TINY}}, **TRAINING}),
        "rm": (often, TRAINING),
        "ppo": (ppo, PPO_CARRIES),
        "ppo lora penalty": (
            ppo,
            {
                "policy": lora,
                "value_model": lora,
                "ppo": {
                    "num_iterations": 4,
                    "objective": "penalty",
                    "policy_kl_target": 0.001,
                    "score_normalization": "reference",
                    "num_reference_samples": 8,
                    "ema_decay": 0.5,
                },
            },
        ),
        "ppo shared filters": (
            ppo,
            {
                "value_model": {"init": "shared"},
                "rollout": {"top_k": 30, "min_new_tokens": 2, "temperature": 0.9},
                "ppo": {"num_iterations": 4, "num_rollouts_per_update": 3, "kl_in": "loss", "entropy_coef": 0.01},
                "ptx": {"train": str(root.parent), "coef": 0.5},
            },
        ),
        "ppo groups": (
            ppo,
            {
                "rollout": {"samples_per_prompt": 2},
                "ppo": {"num_iterations": 4, "advantage_estimator": "rloo", "score_normalization": "running"},
                "evaluation": {"every_iterations": 2, "best_metric": "-kl"},
            },
        ),
    }
    return {name: merged(*both) for name, both in cases.items()}


TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
CASES = ("sft", "sft scratch", "rm", "ppo", "ppo lora penalty", "ppo shared filters", "ppo groups")


# ------------------------------------------------------------------------------------------ running


@pytest.fixture(autouse=True)
def _no_attempt_is_left():
    yield
    crash.end_all()


@pytest.fixture(scope="module")
def config_in(write_config, changes, pipeline, data) -> Callable[..., list[str]]:
    """A function: case, artifact root, more changes -> the arguments that run it there."""

    def prepare(case: str, root: Path, **more: Any) -> list[str]:
        stage = case.split()[0]
        if stage == "rm" and not (root / "sft").is_dir():
            shutil.copytree(pipeline("llama") / "sft", root / "sft")
        own = merged(changes[case], more)
        if "ptx" in own:
            own["ptx"]["train"] = str(data["demonstrations"])
        return [stage, "--config", str(write_config(stage, root, **own))]

    return prepare


def rlhf(arguments: list[str], *more: str) -> Result:
    """The command in this process."""
    return CliRunner().invoke(app, [*arguments, *more])


def succeed(arguments: list[str], *more: str) -> str:
    result = rlhf(arguments, *more)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def refused(arguments: list[str], *more: str, code: int = 2) -> str:
    """What is said where it can't be done: one line, and no traceback."""
    result = rlhf(arguments, "--quiet", *more)
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    return result.stderr


@pytest.fixture
def at_step(monkeypatch) -> Callable[[int, Callable[[StageRun], object]], None]:
    """A function: have something happen when a step has been done, before it is saved."""
    real = StageRun.finish_step

    def arrange(step: int, happens: Callable[[StageRun], object]) -> None:
        def finish(self: StageRun, done: int, total: int) -> None:
            if done == step:
                happens(self)
            real(self, done, total)

        monkeypatch.setattr(StageRun, "finish_step", finish)

    return arrange


def ask_to_stop(_: StageRun) -> None:
    signal.raise_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def undisturbed(config_in, tmp_path_factory) -> Callable[[str], dict[str, Any]]:
    """A function: case -> what it comes to when nothing stops it."""
    known: dict[str, dict[str, Any]] = {}

    def run(case: str) -> dict[str, Any]:
        if case not in known:
            root = tmp_path_factory.mktemp("undisturbed") / "run"
            succeed(config_in(case, root), "--quiet")
            known[case] = crash.outcome(root / case.split()[0])
        return known[case]

    return run


@pytest.fixture(scope="module")
def stopped(config_in, tmp_path_factory) -> Callable[[str, Path], list[str]]:
    """A function: case, new artifact root -> the arguments that go on with what was stopped there, after four
    steps (PPO: three iterations) of which the checkpoints of two are left."""
    known: dict[str, Path] = {}

    def copy(case: str, root: Path) -> list[str]:
        stage = case.split()[0]
        if case not in known:
            known[case] = tmp_path_factory.mktemp("stopped") / "run"
            with pytest.MonkeyPatch.context() as patch:
                real = StageRun.finish_step

                def finish(self: StageRun, done: int, total: int) -> None:
                    if done == {"sft": 4, "rm": 4, "ppo": 3}[stage]:
                        ask_to_stop(self)
                    real(self, done, total)

                patch.setattr(StageRun, "finish_step", finish)
                assert rlhf(config_in(case, known[case]), "--quiet").exit_code == 143
        shutil.copytree(known[case], root, dirs_exist_ok=True)
        return config_in(case, root)

    return copy


def same(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one.keys() == two.keys()
    for name in one:
        assert one[name] == two[name], name


def checkpoints(root: Path, stage: str) -> list[Path]:
    return checkpoint_files.found(checkpoint_files.checkpoints_directory(root, stage))


def state_of(whole: Checkpoints) -> dict[str, Any]:
    """Each part's tensors, copied, and numbers."""
    found = {}
    for name, part in whole.parts.items():
        tensors, numbers = part.state()
        found[name] = ({key: value.clone() for key, value in tensors.items()}, json.loads(json.dumps(numbers)))
    return found


# ------------------------------------------------------------------------------------- exact resume


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_goes_on_is_the_undisturbed_run(case, config_in, undisturbed, at_step, monkeypatch, tmp_path):
    """Weights by their bytes, rows and figures but for their times; and every part's state is as it was."""
    stage, states = case.split()[0], {}
    arguments = config_in(case, tmp_path)
    save, restore = Checkpoints.save, Checkpoints.restore

    def saves(self: Checkpoints, step: int) -> float:
        states["saved"] = state_of(self)
        return save(self, step)

    def restores(self: Checkpoints, path: Path) -> int:
        step = restore(self, path)
        states["restored"] = state_of(self)
        return step

    monkeypatch.setattr(Checkpoints, "save", saves)
    at_step(STEPS[stage] // 2, ask_to_stop)
    assert rlhf(arguments, "--quiet").exit_code == 143
    monkeypatch.setattr(Checkpoints, "save", save)
    monkeypatch.setattr(Checkpoints, "restore", restores)
    at_step(0, ask_to_stop)
    assert f"goes on after step {STEPS[stage] // 2} of {STEPS[stage]}" in succeed(arguments)
    same(crash.outcome(tmp_path / stage), undisturbed(case))
    assert states["saved"].keys() == states["restored"].keys()
    for part, (tensors, numbers) in states["saved"].items():
        again, numbers_again = states["restored"][part]
        assert numbers.pop("seconds", 0) <= numbers_again.pop("seconds", 0)
        assert numbers == numbers_again, part
        assert tensors.keys() == again.keys()
        assert all(torch.equal(tensors[key], again[key]) for key in tensors), part


def test_a_run_that_is_stopped_after_every_step(config_in, undisturbed, monkeypatch, tmp_path):
    arguments, real = config_in("ppo", tmp_path), StageRun.finish_step

    def finish(self: StageRun, done: int, total: int) -> None:
        ask_to_stop(self)
        real(self, done, total)

    monkeypatch.setattr(StageRun, "finish_step", finish)
    codes = [rlhf(arguments, "--quiet").exit_code for _ in range(STEPS["ppo"] + 1)]
    assert codes == [143] * STEPS["ppo"] + [0]
    same(crash.outcome(tmp_path / "ppo"), undisturbed("ppo"))


def test_checkpoints_by_the_clock(config_in, undisturbed, tmp_path, monkeypatch):
    """After every step where the minutes are hardly any; a clock of the day that goes backwards changes nothing."""
    day = iter(range(2_000_000_000, 0, -7919))
    monkeypatch.setattr("time.time", lambda: float(next(day)))
    saved = []
    real = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", lambda self, step: saved.append(step) or real(self, step))
    succeed(config_in("sft", tmp_path, checkpoints={"every_steps": None, "every_minutes": 1e-9}))
    assert saved == [1, 2, 3, 4, 5]
    assert crash.outcome(tmp_path / "sft")["model/model.safetensors"] == undisturbed("sft")["model/model.safetensors"]


def test_minutes_are_counted_from_the_last_checkpoint(config_in, at_step, tmp_path, monkeypatch):
    saved = []
    real = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", lambda self, step: saved.append(step) or real(self, step))
    at_step(3, lambda stage: setattr(stage, "_last_checkpoint", stage._last_checkpoint - 660))
    succeed(config_in("sft", tmp_path, checkpoints={"every_steps": None, "every_minutes": 10}))
    assert saved == [3]


def test_the_time_of_what_was_done_before_counts(stopped, tmp_path):
    arguments = stopped("sft", tmp_path)
    before = read_jsonl(tmp_path / ".sft.partial/metrics.jsonl")
    succeed(arguments)
    times = [row["time/elapsed_s"] for row in read_jsonl(tmp_path / "sft/metrics.jsonl")]
    assert times == sorted(times)
    assert times[len(before)] > before[-1]["time/elapsed_s"]
    assert artifacts.read_manifest(tmp_path / "sft").seconds >= round(times[-1], 1)


def test_the_last_ones_are_kept_and_gone_when_the_stage_is_finished(config_in, at_step, tmp_path):
    arguments = config_in("sft", tmp_path, checkpoints={"every_steps": 1, "keep": 3})
    at_step(5, ask_to_stop)
    assert rlhf(arguments).exit_code == 143
    assert [path.name for path in checkpoints(tmp_path, "sft")] == [f"step-0000000{n}" for n in (3, 4, 5)]
    pauses = read_jsonl(tmp_path / ".sft.partial/checkpoints.jsonl")
    assert [row["step"] for row in pauses] == [1, 2, 3, 4, 5]
    assert all(0 <= row["pause_s"] < 10 for row in pauses)
    succeed(arguments)
    assert {path.name for path in tmp_path.iterdir()} == {"sft", "sft.yaml"}


class Counter:
    """A part of which the checkpoint must hold what it was when it was saved."""

    def __init__(self) -> None:
        self.count = torch.zeros(3)

    def state(self) -> State:
        return {"count": self.count}, {"count": self.count[0].item()}

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:  # noqa: ARG002
        self.count = tensors["count"]


def test_training_goes_on_while_a_checkpoint_is_written_and_waits_for_the_one_before(tmp_path, monkeypatch):
    goes_on = threading.Event()
    monkeypatch.setattr(checkpoint, "save_file", lambda *args: goes_on.wait(60) and save_file(*args))
    counter, whole = Counter(), Checkpoints(tmp_path, keep=2, writes=True)
    whole.parts = {"counter": counter}
    whole.save(1)
    counter.count += 1
    second = threading.Thread(target=whole.save, args=(2,))
    second.start()
    second.join(0.2)
    assert second.is_alive(), "two at a time would pile up in memory"
    assert checkpoint_files.found(tmp_path) == []
    goes_on.set()
    second.join()
    whole.wait()
    for step, path in enumerate(checkpoint_files.found(tmp_path), 1):
        assert whole.restore(path) == step
        assert counter.count.tolist() == [step - 1] * 3


def test_what_goes_wrong_with_a_checkpoint_is_told_by_the_next(tmp_path, monkeypatch):
    whole = Checkpoints(tmp_path, keep=2, writes=True)
    for error, told in ((OSError(28, "No space left"), ArtifactError), (ValueError("a bug"), ValueError)):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "save_file", lambda *_, error=error: (_ for _ in ()).throw(error))
            whole.save(1)
            with pytest.raises(told):
                whole.save(2)
    whole.wait()
    assert list(tmp_path.iterdir()) == []


def test_without_memory_for_a_copy_a_checkpoint_is_written_in_the_foreground(
    config_in, undisturbed, tmp_path, monkeypatch
):
    """And is the same one: the run that goes on from it ends as the undisturbed one."""
    failed = []

    def no_memory(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        failed.append(len(tensors))
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried ..."
        )

    monkeypatch.setattr(checkpoint, "copied", no_memory)
    finish = StageRun.finish_step

    def stop(self: StageRun, done: int, total: int) -> None:
        if done in (2, 3):
            ask_to_stop(self)
        finish(self, done, total)
        assert self.checkpoints._writer is None

    with monkeypatch.context() as patch:
        patch.setattr(StageRun, "finish_step", stop)
        assert [rlhf(config_in("ppo", tmp_path)).exit_code for _ in range(2)] == [143, 143]
    assert [path.name for path in checkpoints(tmp_path, "ppo")] == ["step-00000002", "step-00000003"]
    assert len(failed) == 2
    assert "goes on after step 3" in succeed(config_in("ppo", tmp_path))
    same(crash.outcome(tmp_path / "ppo"), undisturbed("ppo"))
    monkeypatch.setattr(checkpoint, "copied", lambda _: (_ for _ in ()).throw(RuntimeError("another error")))
    with pytest.raises(RuntimeError, match="another error"):
        Checkpoints(tmp_path, keep=2, writes=True).save(1)


def test_all_is_on_the_disk_before_it_is_renamed_into_its_place(config_in, tmp_path):
    """As the order of the file operations says: a kill can't show it, only a power cut could."""
    root = tmp_path / "run"
    watch = crash.Watch(str(root), record=str(tmp_path / "points"))
    assert crash.Attempt(config_in("sft", root), tmp_path / "log", watch).wait() == 0
    points = [line.rpartition(" #")[0] for line in (tmp_path / "points").read_text().splitlines()]

    def synced(names: set[str], renamed: str, after: str) -> None:
        start, end = points.index(after), points.index(f"rename {renamed}")
        assert {f"fsync {name}" for name in names} <= set(points[start:end]), renamed

    for step in (2, 4):
        folder = f".sft.checkpoints/.step-0000000{step}.writing"
        files = {f"{folder}/{name}" for name in ("state.safetensors", "numbers.json", ".manifest.json.writing")}
        rows = {".sft.partial/metrics.jsonl", ".sft.partial/samples.jsonl", ".sft.partial"}
        synced({*files, folder, *rows}, folder, after="half .sft.partial/metrics.jsonl")
        assert "fsync .sft.checkpoints" in points[points.index(f"rename {folder}") :]
    made = json.loads((root / "sft/manifest.json").read_text())["files"]
    files = {f".sft.partial/{name}" for name in [*made, "manifest.json"]}
    synced({*files, ".sft.partial", ".sft.partial/model"}, ".sft.partial", after="open .sft.partial/manifest.json")
    after = points[points.index("rename .sft.partial") :]
    assert after.index("fsync ") < after.index("rmdir .sft.checkpoints")


# ------------------------------------------------------------------------------- damaged checkpoints


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 3] ^= 4
    path.write_bytes(whole)


DAMAGES = {"truncated": truncate, "flipped": flip_a_bit, "missing": Path.unlink, "empty": lambda p: os.truncate(p, 0)}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["state.safetensors", "numbers.json", "manifest.json"])
def test_a_damaged_checkpoint_is_said_and_the_one_before_is_taken(name, damage, stopped, undisturbed, tmp_path):
    arguments = stopped("sft", tmp_path)
    before, newest = checkpoints(tmp_path, "sft")
    DAMAGES[damage](newest / name)
    said = succeed(arguments)
    assert f"warning: {newest}: can't be used, " in said
    # A flipped bit of the manifest may be in the digest of another file.
    assert name in said or (name, damage) == ("manifest.json", "flipped")
    assert f"goes on after step 2 of 6, from {before}" in said
    same(crash.outcome(tmp_path / "sft"), undisturbed("sft"))


def test_any_flipped_bit_of_a_small_file_is_found(stopped, tmp_path):
    """The manifest has no digest of its own: it is compared with what it would have to be."""
    stopped("sft", tmp_path)
    newest = checkpoints(tmp_path, "sft")[-1]
    assert checkpoint_files.what_is_wrong(newest) is None
    for name in ("manifest.json", "numbers.json"):
        whole = (newest / name).read_bytes()
        for number in range(len(whole)):
            for bit in (0, 5):
                spoilt = bytearray(whole)
                spoilt[number] ^= 1 << bit
                (newest / name).write_bytes(spoilt)
                assert checkpoint_files.what_is_wrong(newest) is not None, (name, number, bit)
        (newest / name).write_bytes(whole)
    (newest / "more").write_text("")
    assert checkpoint_files.what_is_wrong(newest) is not None
    (newest / "more").unlink()
    assert checkpoint_files.what_is_wrong(newest) is None


def test_a_damaged_checkpoint_does_not_outlive_the_good_one_before(stopped, at_step, undisturbed, tmp_path):
    """Pruning counts the last ones by their names: a damaged one with a later name must not push a good one out."""
    arguments = stopped("sft", tmp_path)
    truncate(checkpoints(tmp_path, "sft")[-1] / "state.safetensors")
    at_step(3, ask_to_stop)
    assert rlhf(arguments, "--set", "checkpoints.keep=1").exit_code == 143
    assert [path.name for path in checkpoints(tmp_path, "sft")] == ["step-00000003"]
    at_step(0, ask_to_stop)
    assert "goes on after step 3" in succeed(arguments)
    same(crash.outcome(tmp_path / "sft"), undisturbed("sft"))


@pytest.mark.parametrize("case", ["sft", "ppo"])
def test_where_all_are_damaged_the_run_begins_anew(case, stopped, undisturbed, tmp_path):
    """Not one row or model of the first try is left in the second."""
    arguments = stopped(case, tmp_path)
    partial = tmp_path / f".{case}.partial"
    (partial / "model").mkdir()
    (partial / "model/.tmpLeftover").write_text("of a save that was cut off")
    for path in checkpoints(tmp_path, case):
        truncate(path / "state.safetensors")
    said = succeed(arguments)
    assert said.count("can't be used, state.safetensors is not as it was written") == 2
    assert "begins anew" in said
    same(crash.outcome(tmp_path / case), undisturbed(case))


def test_what_was_written_after_the_checkpoint_is_taken_back(stopped, undisturbed, tmp_path):
    """Rows, half a row, a table that was begun since, half a model, the manifest of a publication cut off."""
    arguments = stopped("ppo", tmp_path)
    partial = tmp_path / ".ppo.partial"
    for name in ("metrics", "samples", "evaluations", "later"):
        with (partial / f"{name}.jsonl").open("a") as file:
            file.write('{"step": 99}\n{"st')
    for name in ("model", "ema_model", "value_model", "another"):
        (partial / name).mkdir()
        (partial / name / ".tmpLeftover").write_text("of a save that was cut off")
    (partial / "manifest.json").write_text("{}")
    (partial / "evaluation.json").write_text("{}")
    succeed(arguments)
    same(crash.outcome(tmp_path / "ppo"), undisturbed("ppo"))


@pytest.mark.parametrize("gone", ["metrics.jsonl", "."])
def test_a_checkpoint_whose_rows_are_gone_is_said(gone, stopped, undisturbed, tmp_path):
    arguments = stopped("sft", tmp_path)
    path = tmp_path / ".sft.partial" / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    said = succeed(arguments)
    assert "goes on" not in said
    same(crash.outcome(tmp_path / "sft"), undisturbed("sft"))


def test_the_identity_of_the_run_that_cannot_be_read_is_said(stopped, undisturbed, tmp_path):
    arguments = stopped("sft", tmp_path)
    truncate(tmp_path / ".sft.checkpoints/run.json")
    said = succeed(arguments)
    assert "run.json: can't be read" in said
    assert "begins anew" in said
    same(crash.outcome(tmp_path / "sft"), undisturbed("sft"))


# ----------------------------------------------------------------------------------- changed config


@pytest.mark.parametrize(
    ("case", "override", "key"),
    [
        ("sft", "optimizer.learning_rate=2e-3", "optimizer.learning_rate"),
        ("sft", "training.minibatch_size=5", "training.minibatch_size"),
        ("rm", "loss=logexp", "loss"),
        ("ppo", "ppo.kl_target=0.4", "ppo.kl_target"),
        ("ppo", "evaluation.best_metric=-kl", "evaluation.best_metric"),
    ],
)
def test_a_changed_config_is_refused_by_its_keys(case, override, key, stopped, undisturbed, tmp_path):
    arguments = stopped(case, tmp_path)
    message = refused(arguments, "--set", override, "--set", "seed=5")
    assert f"was made with another {key}, seed." in message.replace("seed, ", "") or key in message
    assert "seed" in message
    assert "--restart" in message
    succeed(arguments)
    same(crash.outcome(tmp_path / case), undisturbed(case))


def test_changed_data_is_refused(stopped, data, tmp_path):
    rows = tmp_path / "rows.jsonl"
    shutil.copy(data["demonstrations"], rows)
    where = ["--set", f"data.train={rows}"]
    arguments = stopped("sft", tmp_path / "run")
    assert "data.train" in refused(arguments, *where)
    with rows.open("a") as file:
        file.write(json.dumps({"prompt": "a", "response": " new one"}) + "\n")
    assert "data.train" in refused(arguments, *where)


@pytest.mark.parametrize(
    ("case", "overrides"),
    [
        ("sft", ["training.num_steps=8", "evaluation.every_steps=3", "evaluation.num_samples=1", "warn_loss_above=9"]),
        ("rm", ["training.num_steps=8", "checkpoints.every_steps=1", "device=cpu"]),
        ("ppo", ["ppo.num_iterations=5", "evaluation.every_iterations=2", "num_logged_samples=1"]),
    ],
)
def test_more_steps_and_other_logging_are_accepted(case, overrides, stopped, tmp_path):
    arguments = stopped(case, tmp_path)
    said = succeed(arguments, *(part for text in overrides for part in ("--set", text)))
    assert "goes on with another " in said
    main = {"sft": "loss/sft", "rm": "loss/rm", "ppo": "objective/score"}[case]
    total = {"sft": 8, "rm": 8, "ppo": 5}[case]
    rows = [row["step"] for row in read_jsonl(tmp_path / case / "metrics.jsonl") if main in row]
    assert rows == list(range(1, total + 1))


def test_a_longer_run_is_the_one_that_was_long_from_the_start(config_in, at_step, tmp_path):
    """Where the schedule does not depend on the length."""
    constant = {"optimizer": {"schedule": "constant"}}
    long = {"training": {"num_steps": 9}}
    succeed(config_in("sft", tmp_path / "long", **constant, **long))
    at_step(5, ask_to_stop)
    assert rlhf(config_in("sft", tmp_path / "short", **constant)).exit_code == 143
    at_step(0, ask_to_stop)
    assert "goes on with another training.num_steps" in succeed(
        config_in("sft", tmp_path / "short", **constant, **long)
    )
    same(crash.outcome(tmp_path / "short/sft"), crash.outcome(tmp_path / "long/sft"))


def test_fewer_steps_than_are_done_are_refused(stopped, undisturbed, tmp_path):
    arguments = stopped("sft", tmp_path)
    assert "4 steps behind it, and now asks for 3" in refused(arguments, "--set", "training.num_steps=3")
    succeed(arguments)
    same(crash.outcome(tmp_path / "sft"), undisturbed("sft"))


def test_restart_discards_and_says_what(stopped, undisturbed, tmp_path):
    arguments = stopped("sft", tmp_path)
    said = succeed(arguments, "--restart")
    assert f"--restart: discards an unfinished run of 2 checkpoints, {checkpoints_name(tmp_path)}" in said
    assert "goes on" not in said
    same(crash.outcome(tmp_path / "sft"), undisturbed("sft"))


def checkpoints_name(root: Path) -> str:
    return f"{checkpoint_files.checkpoints_directory(root, 'sft')}/step-00000004"


def test_a_restart_of_what_is_finished_can_be_stopped_and_goes_on(config_in, at_step, undisturbed, tmp_path):
    """The same command without --restart, as the message says, though an equal stage stands there."""
    arguments = config_in("sft", tmp_path)
    succeed(arguments)
    at_step(4, ask_to_stop)
    result = rlhf(arguments, "--restart", "--quiet")
    assert result.exit_code == 143
    assert f"To resume: {program()} sft --config {arguments[2]}" in result.stderr
    assert "a new run of it is interrupted (saved after step 4" in status(tmp_path)
    at_step(0, ask_to_stop)
    assert "goes on after step 4" in succeed(arguments)
    same(crash.outcome(tmp_path / "sft"), undisturbed("sft"))
    assert "skipped" in succeed(arguments)


# ------------------------------------------------------------------------------------------ signals


def status(root: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "400")
        return succeed(["status", str(root)])


@pytest.mark.parametrize(
    ("case", "number", "code"),
    [("sft", signal.SIGUSR1, 143), ("rm", signal.SIGINT, 130), ("ppo", signal.SIGTERM, 143)],
)
def test_a_signal_has_the_step_finished_and_saved(case, number, code, config_in, undisturbed, tmp_path):
    """It comes while the checkpoint of step 2 is written and step 3 is under way."""
    root = tmp_path / "a root"
    arguments = [*config_in(case, root), "--set", "checkpoints.keep=2"]
    when = f"mkdir .{case}.checkpoints/.step-00000002.writing #1"
    attempt = crash.Attempt(arguments, tmp_path / "log", crash.Watch(str(root), signals={when: number}))
    assert attempt.wait() == code, attempt.said
    last = attempt.said.strip().splitlines()[-1]
    name, total = signal.Signals(number).name, STEPS[case]
    assert last.startswith(f"{case}: {name}: stopped after step 3 of {total}, and saved. To resume: "), last
    assert last.endswith(f"rlhf {case} --config '{arguments[2]}' --set checkpoints.keep=2")
    assert [path.name for path in checkpoints(root, case)] == ["step-00000002", "step-00000003"]
    assert "interrupted (saved after step 3; run the same command to resume)" in status(root)
    assert "goes on after step 3" in succeed(arguments)
    same(crash.outcome(root / case), undisturbed(case))


def test_a_second_signal_interrupts_at_once(config_in, undisturbed, tmp_path):
    arguments = config_in("sft", tmp_path)
    signals = {
        "mkdir .sft.checkpoints/.step-00000002.writing #1": signal.SIGINT,
        "half .sft.partial/metrics.jsonl #4": 2,
    }
    attempt = crash.Attempt(arguments, tmp_path / "log", crash.Watch(str(tmp_path), signals=signals))
    assert attempt.wait() == 130, attempt.said
    assert (
        attempt.said.strip()
        .splitlines()[-1]
        .startswith("interrupted; finished stages and the last checkpoint are intact")
    )
    assert "goes on after step 2" in succeed(arguments)
    (tmp_path / "log").unlink()
    same(crash.outcome(tmp_path / "sft"), undisturbed("sft"))


def test_a_signal_after_the_last_step_lets_the_stage_finish_and_stops_the_pipeline(config_in, undisturbed, tmp_path):
    arguments = config_in("sft", tmp_path)
    config_in("rm", tmp_path)
    shutil.rmtree(tmp_path / "sft")
    watch = crash.Watch(str(tmp_path), signals={"open .sft.partial/model/config.json #1": signal.SIGINT})
    attempt = crash.Attempt(["pipeline", str(tmp_path)], tmp_path / "log", watch)
    assert attempt.wait() == 130, attempt.said
    assert attempt.said.strip().splitlines()[-1] == "sft: SIGINT: the stage was done by then, and is finished"
    assert not (tmp_path / "rm").exists()
    assert not (tmp_path / ".rm.partial").exists()
    same(crash.outcome(tmp_path / "sft"), undisturbed("sft"))
    assert "skipped" in succeed(arguments)


# --------------------------------------------------------------------------------------- one writer


def test_two_starts_at_once(config_in, undisturbed, tmp_path):
    """The first is held still in step 5: the second is refused by its name. Killed, it leaves no lock."""
    arguments = config_in("sft", tmp_path)
    # Its seventh row is that of step 5: step 4 is being saved, step 2 has been.
    watch = crash.Watch(str(tmp_path), signals={"half .sft.partial/metrics.jsonl #7": signal.SIGSTOP})
    first = crash.Attempt(arguments, tmp_path / "log", watch)
    first.wait_until_stopped()
    before = {path: digest_file(path) for path in tmp_path.rglob("*.safetensors")}
    for more in ([], ["--restart"]):
        second = crash.Attempt([*arguments, *more], tmp_path / "second")
        assert second.wait() == 2
        assert f"process {first.pid} on {socket.gethostname()}" in second.said
        assert "is writing its sft stage. Wait for it, stop it, or give another `artifacts`" in second.said
        assert len(second.said.strip().splitlines()) == 1
    assert f"process {first.pid} on {socket.gethostname()}" in refused(arguments)
    assert before == {path: digest_file(path) for path in tmp_path.rglob("*.safetensors")}
    assert f"running (process {first.pid} on {socket.gethostname()}" in status(tmp_path)
    assert re.search("; saved after step [24][)]", status(tmp_path))
    first.send(signal.SIGKILL)
    assert first.wait() == crash.KILLED
    assert (tmp_path / ".sft.lock").is_file()
    assert re.search("interrupted [(]saved after step [24]; run the same command to resume[)]", status(tmp_path))
    assert re.search("goes on after step [24]", succeed(arguments))
    assert "finished" in status(tmp_path)
    same(crash.outcome(tmp_path / "sft"), undisturbed("sft"))


def test_a_look_at_the_lock_never_takes_it(tmp_path):
    """`rlhf status` while a stage starts: the start must not be refused."""
    lock = checkpoint_files.Lock(tmp_path, "sft")
    lock.acquire()
    lock.release()
    (tmp_path / ".sft.lock").touch()
    looking = subprocess.Popen(["flock", "--shared", str(tmp_path / ".sft.lock"), "sleep", "0.3"])
    crash.wait_for(lambda: "READ" in Path("/proc/locks").read_text())
    lock.acquire()
    assert looking.wait() == 0
    lock.release()


def test_a_lock_is_given_back_whatever_fails(config_in, tmp_path, monkeypatch):
    """In one process too, where no end of a process frees it."""
    arguments = config_in("sft", tmp_path)
    for name in ("_close", "wait"):
        with monkeypatch.context() as patch:
            where = StageRun if name == "_close" else Checkpoints
            patch.setattr(where, name, lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            assert rlhf(arguments).exit_code == 2
    succeed(arguments)


def test_status_before_the_first_checkpoint(config_in, at_step, tmp_path):
    at_step(1, lambda _: 1 / 0)
    rlhf(config_in("sft", tmp_path))
    assert "interrupted (nothing saved; the next run starts over)" in status(tmp_path)


# --------------------------------------------------------------------------------------------- disk


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Callable[[str], Path]]:
    """A function: size -> a file system of that size; where none can be mounted the test is skipped."""
    places: list[Path] = []

    def mount(size: str) -> Path:
        place = tmp_path / f"disk{len(places)}"
        place.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)], check=False)
        if done.returncode:
            pytest.skip("no file system can be mounted here")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_disk_that_fills_up(small_disk, config_in, undisturbed):
    """The first checkpoint fits and no second one beside it does."""
    disk = small_disk("750k")
    root = disk / "run"
    arguments = config_in("sft", root)
    message = refused(arguments)
    assert "No space left on device" in message
    assert [path.name for path in checkpoints(root, "sft")] == ["step-00000002"]
    assert checkpoint_files.what_is_wrong(checkpoints(root, "sft")[0]) is None
    assert "interrupted (saved after step 2" in status(root)
    assert "No space left on device" in refused(arguments)
    subprocess.run(["mount", "-o", "remount,size=9m", str(disk)], check=True)
    assert "goes on after step 2" in succeed(arguments)
    same(crash.outcome(root / "sft"), undisturbed("sft"))


@pytest.mark.parametrize("size", [f"{n}k" for n in (60, 400, 500, 600, 950)])
def test_a_disk_of_any_size(size, small_disk, config_in, undisturbed):
    """Wherever it is full, rows, checkpoint or model: one line, and once there is room it goes on to the same end."""
    disk = small_disk(size)
    root = disk / "run"
    arguments = config_in("sft", root)
    result = rlhf(arguments, "--quiet")
    assert result.exit_code == 2, result.output
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert "No space left on device" in result.stderr
    assert not (root / "sft").exists()
    subprocess.run(["mount", "-o", "remount,size=9m", str(disk)], check=True)
    succeed(arguments)
    same(crash.outcome(root / "sft"), undisturbed("sft"))


def test_a_disk_without_any_room(small_disk, config_in, undisturbed):
    disk = small_disk("9m")
    arguments = config_in("sft", disk / "run")
    with pytest.raises(OSError, match="No space left"):
        (disk / "ballast").write_bytes(b"\0" * 10_000_000)
    assert "No space left on device" in refused(arguments)
    (disk / "ballast").unlink()
    succeed(arguments)
    same(crash.outcome(disk / "run/sft"), undisturbed("sft"))


def test_a_disk_that_something_else_fills(small_disk, config_in, undisturbed, at_step):
    """A row of metrics finds no room then, or half of it: it is taken back and written again."""
    disk = small_disk("9m")
    arguments = config_in("ppo", disk / "run")

    def fill(stage: StageRun) -> None:
        stage.checkpoints.wait()
        with pytest.raises(OSError, match="No space left"):
            (disk / "ballast").write_bytes(b"\0" * 9_000_000)

    at_step(1, ask_to_stop)
    assert rlhf(arguments).exit_code == 143
    at_step(2, fill)
    assert "metrics.jsonl" in refused(arguments, "--set", "checkpoints.every_steps=null")
    (disk / "ballast").unlink()
    at_step(0, ask_to_stop)
    assert "goes on after step 1" in succeed(arguments)
    same(crash.outcome(disk / "run/ppo"), undisturbed("ppo"))


def test_a_disk_that_is_read_only(small_disk, stopped, undisturbed):
    disk = small_disk("9m")
    arguments = stopped("sft", disk / "run")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert "can't be written (Read-only file system)" in refused(arguments)
    assert "interrupted (saved after step 4" in status(disk / "run")
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert "goes on after step 4" in succeed(arguments)
    same(crash.outcome(disk / "run/sft"), undisturbed("sft"))


def test_files_that_may_not_grow(stopped, undisturbed, tmp_path):
    """As under a quota: the next checkpoint can't be written, the one that stands there does."""
    arguments = stopped("sft", tmp_path)
    before = [digest_file(path / "state.safetensors") for path in checkpoints(tmp_path, "sft")]
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))
    try:
        message = refused(arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert "can't be written" in message
    assert before == [digest_file(path / "state.safetensors") for path in checkpoints(tmp_path, "sft")]
    assert "goes on after step 4" in succeed(arguments)
    same(crash.outcome(tmp_path / "sft"), undisturbed("sft"))


@pytest.mark.parametrize("removed", [".", ".sft.partial", ".sft.checkpoints", ".sft.lock"])
@pytest.mark.parametrize("step", [3, 6, None])
def test_a_directory_that_is_deleted_underneath(removed, step, config_in, at_step, undisturbed, tmp_path, monkeypatch):
    """In a step, at the last, or when all is done but published: nothing is put where it was, and the next is whole."""
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
            at_step(step, remove)
        message = refused(arguments)
    assert "removed" in message
    assert not (root / "sft").exists()
    if removed == ".":
        assert not root.exists()
    at_step(0, ask_to_stop)
    succeed(config_in("sft", root))
    same(crash.outcome(root / "sft"), undisturbed("sft"))


def test_a_run_that_fails_or_is_stopped_leaves_the_finished_one(config_in, at_step, undisturbed, tmp_path):
    """A full disk, a stop, a bug; and the one that goes on to its end takes its place."""
    arguments = config_in("sft", tmp_path / "run", seed=1)
    succeed(arguments)
    old = crash.outcome(tmp_path / "run/sft")
    config_in("sft", tmp_path / "run")
    at_step(3, lambda _: 1 / 0)
    assert isinstance(rlhf(arguments).exception, ZeroDivisionError)
    same(crash.outcome(tmp_path / "run/sft"), old)
    at_step(4, ask_to_stop)
    assert rlhf(arguments).exit_code == 143
    same(crash.outcome(tmp_path / "run/sft"), old)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(artifacts, "sync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        assert "can't be published (Input/output error)" in refused(arguments)
    same(crash.outcome(tmp_path / "run/sft"), old)
    at_step(0, ask_to_stop)
    assert "goes on after step 4" in succeed(arguments)
    same(crash.outcome(tmp_path / "run/sft"), undisturbed("sft"))


# ------------------------------------------------------------------------------------------- links


def test_the_root_may_be_a_link(stopped, config_in, undisturbed, tmp_path):
    """To a scratch disk: going on, running again and what a kill leaves are as in a folder, and all of it is there."""
    scratch, root = tmp_path / "scratch", tmp_path / "run"
    stopped("sft", scratch)
    root.symlink_to("scratch", target_is_directory=True)
    arguments = config_in("sft", root)
    assert "goes on after step 4" in succeed(arguments)
    same(crash.outcome(root / "sft"), undisturbed("sft"))
    for _ in range(2):
        succeed(arguments, "--restart")
        same(crash.outcome(scratch / "sft"), undisturbed("sft"))
    assert root.is_symlink()
    assert {path.name for path in scratch.iterdir()} == {"sft", "sft.yaml"}
    watch = crash.Watch(str(root), signals={"rename .sft.partial #1": signal.SIGKILL})
    assert crash.Attempt([*arguments, "--restart"], tmp_path / "log", watch).wait() == crash.KILLED
    assert not (scratch / "sft").exists()
    succeed(arguments)
    same(crash.outcome(scratch / "sft"), undisturbed("sft"))
    assert {path.name for path in scratch.iterdir()} == {"sft", "sft.yaml"}


def test_a_root_that_is_a_link_to_nowhere(config_in, tmp_path):
    arguments = config_in("sft", tmp_path / "other")
    (tmp_path / "run").symlink_to(tmp_path / "unmounted")
    message = refused(arguments, "--set", f"artifacts={tmp_path}/run")
    assert f"{tmp_path}/run: can't be written" in message
    assert not (tmp_path / "unmounted").exists()


@pytest.mark.parametrize("name", ["sft", ".sft.old"])
@pytest.mark.parametrize("target", ["elsewhere", "nowhere"])
def test_a_stage_directory_that_is_a_link_is_refused_at_the_start(name, target, config_in, undisturbed, tmp_path):
    """What it points to is read, by the stages behind it too, and never written, renamed or removed."""
    arguments = config_in("sft", tmp_path / "run", evaluation={"num_samples": 1})
    succeed(arguments)
    (tmp_path / "run/sft").rename(tmp_path / "elsewhere")
    before = {path: digest_file(path) for path in (tmp_path / "elsewhere").rglob("*") if path.is_file()}
    (tmp_path / "run" / name).symlink_to(tmp_path / target, target_is_directory=True)
    if (name, target) == ("sft", "elsewhere"):
        assert "skipped" in succeed(arguments)
        assert "finished" in status(tmp_path / "run")
    config_in("sft", tmp_path / "run")
    for more in ([], ["--restart"]):
        message = refused(arguments, *more)
        assert "is a link, and a finished stage is renamed into its place" in message
        assert f"{tmp_path}/run/" in message
    assert not (tmp_path / "run/.sft.partial").exists()
    assert before == {path: digest_file(path) for path in (tmp_path / "elsewhere").rglob("*") if path.is_file()}
    [link] = [path for path in (tmp_path / "run").iterdir() if path.is_symlink()]
    link.unlink()
    succeed(arguments)
    same(crash.outcome(tmp_path / "run/sft"), undisturbed("sft"))


# ------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried ..."),
        MemoryError(),
    ],
)
def test_out_of_memory_says_what_was_tried_and_what_to_lower(error, stopped, monkeypatch, tmp_path):
    arguments = stopped("sft", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(sft_stage, "_accumulate", lambda *_: (_ for _ in ()).throw(error))
        message = refused(arguments, code=1)
    assert "out of memory" in message
    assert "3 rows of at most 96 tokens" in message
    assert "Lower training.tokens_per_microbatch below 288" in message
    said = succeed(arguments, "--set", "training.tokens_per_microbatch=100")
    assert "goes on with another training.tokens_per_microbatch" in said
    assert "at most 100 tokens at a time" in said
    assert "goes on after step 4" in said


def test_out_of_memory_in_ppo(stopped, monkeypatch, tmp_path):
    from stages import ppo as ppo_stage

    arguments = stopped("ppo", tmp_path)
    monkeypatch.setattr(ppo_stage, "_update", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA ...")))
    message = refused(arguments, code=1)
    assert "4 responses of at most 512 + 8 tokens and 2048 tokens in all" in message
    assert "Lower ppo.tokens_per_microbatch below 2048" in message


# -------------------------------------------------------------------------------------------- kills


@pytest.mark.slow
@pytest.mark.parametrize("case", ["sft", "rm", "ppo"])
def test_killed_at_any_moment(case, config_in, undisturbed, tmp_path):
    """Again and again until it is done, and that until there were enough kills. The moments are drawn from a seed,
    over the time that a whole run takes here."""
    draw, kills, runs = random.Random(f"kills of {case}"), 0, 0
    often = {"checkpoints": {"every_steps": 1}}
    started = time.monotonic()
    assert crash.Attempt(config_in(case, tmp_path / "whole", **often), tmp_path / "log").wait() == 0
    started = time.monotonic()
    assert crash.Attempt([*config_in(case, tmp_path / "whole"), "--restart"], tmp_path / "log").wait() == 0
    whole = time.monotonic() - started
    while kills < KILLS:
        root, runs = tmp_path / f"run{runs}", runs + 1
        arguments = config_in(case, root, **often)
        for _ in range(40):
            attempt = crash.Attempt(arguments, tmp_path / "log")
            code = attempt.kill_after(draw.uniform(0.05, 1) * whole)
            if code == 0:
                break
            assert code == crash.KILLED, attempt.said
            kills += 1
        else:
            succeed(arguments)
        found = crash.outcome(root / case)
        assert found.pop("config.yaml")
        same(found, {name: value for name, value in undisturbed(case).items() if name != "config.yaml"})
        assert {path.name for path in root.iterdir()} <= {"sft", case, "sft.yaml", f"{case}.yaml"}
        shutil.rmtree(root)
    print(f"{case}: {kills} kills in {runs} runs, all equal")


SITUATIONS = ("from the start", "goes on", "goes on from an older one", "restart over a finished one")


@pytest.fixture(scope="module")
def situation(config_in, stopped) -> Callable[[str, str, Path], tuple[list[str], list[str]]]:
    """A function: its name, case, artifact root -> the arguments of an attempt there, and those after it."""

    def arrange(name: str, case: str, root: Path) -> tuple[list[str], list[str]]:
        arguments = config_in(case, root) if name == "from the start" else stopped(case, root)
        if name == "goes on from an older one":
            truncate(checkpoints(root, case)[-1] / "state.safetensors")
        if name != "restart over a finished one":
            return arguments, arguments
        unfinished = [root / f".{case}.{what}" for what in ("checkpoints", "partial")]
        for path in unfinished:
            path.rename(path.with_name(f"kept{path.name}"))
        succeed(arguments, "--quiet", "--set", "seed=1")
        for path in unfinished:
            path.with_name(f"kept{path.name}").rename(path)
        return [*arguments, "--restart"], arguments

    return arrange


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case"),
    [*((name, "sft") for name in SITUATIONS), ("goes on", "rm"), ("from the start", "ppo"), ("goes on", "ppo")],
)
def test_killed_at_every_file_operation(name, case, situation, undisturbed, tmp_path):
    """Those of saving, pruning, restoring, discarding and publishing: before each, and in the middle of weights and
    rows. What was finished before stands until the new one does."""
    arranged = tmp_path / "arranged"
    first, then = situation(name, case, arranged)
    before = crash.outcome(arranged / case) if (arranged / case).is_dir() else None

    def attempt(label: str | None) -> tuple[int, str]:
        root = tmp_path / "run"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(arranged, root)
        config = root / f"{case}.yaml"
        config.write_text(config.read_text().replace(str(arranged), str(root)), encoding="utf-8")
        record = None if label is not None else str(tmp_path / "points")
        watch = crash.Watch(str(root), record, {label: signal.SIGKILL} if label is not None else {})
        started = crash.Attempt([part.replace(str(arranged), str(root)) for part in first], tmp_path / "log", watch)
        return started.wait(), started.said

    code, said = attempt(None)
    assert code == 0, said
    points = (tmp_path / "points").read_text().splitlines()
    assert len(set(points)) == len(points) > 20
    chosen = points if ALL else points[len(points) % 7 :: 7]
    root = tmp_path / "run"
    for point in chosen:
        code, said = attempt(point)
        assert code == crash.KILLED, f"{point}: {said}"
        status(root)
        if before is not None:
            artifacts.require_stage(root, case)
            standing = crash.outcome(root / case)
            assert standing == before or standing == undisturbed(case), point
        succeed([part.replace(str(arranged), str(root)) for part in then])
        assert crash.outcome(root / case) == undisturbed(case), point
        assert {path.name for path in root.iterdir()} <= {"sft", case, "sft.yaml", f"{case}.yaml"}, point
    print(f"{name}, {case}: killed at {len(chosen)} of {len(points)} points, all equal")


# ------------------------------------------------------------------------ another number of processes


@pytest.mark.slow
@pytest.mark.parametrize("begins_with", [2, 1])
def test_a_run_goes_on_with_another_number_of_processes(begins_with, config_in, at_step, tmp_path):
    """Counted right: each prompt once an epoch, none lost and none twice, as a reward of no weight sees them: two to
    the power of its number. And the weights are those of one process, to rounding (see test_stages on eps)."""
    judge = tmp_path / "judge.py"
    judge.write_text("def seen(prompts, responses, rows):\n    return [2.0 ** row['number'] for row in rows]\n")
    changes = merged(PPO_CARRIES, {"ppo": {"num_iterations": 9}, "optimizer": {"eps": 1e-3}})

    def config(name: str) -> list[str]:
        arguments = config_in("ppo", tmp_path / name, **changes, checkpoints={"every_steps": None})
        whole = yaml.safe_load(Path(arguments[2]).read_text())
        whole["rewards"].append({"type": "function", "function": f"{judge}:seen", "weight": 0.0})
        Path(arguments[2]).write_text(yaml.safe_dump(whole))
        return arguments

    def torchrun(arguments: list[str], *, stop: bool) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        log = tmp_path / "log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [*command, "-m", "stages.ppo", *arguments[1:]], cwd=ROOT, env=environment, stdout=file, stderr=file
            )
            rows = Path(arguments[2]).parent / ".ppo.partial/metrics.jsonl"
            if stop:
                wait_for(lambda: rows.is_file() and rows.read_text().count("\n") >= 2)
                process.send_signal(signal.SIGTERM)
            code = process.wait(120)
        assert (code != 0) is stop, log.read_text()[-3000:]
        if stop:
            assert (
                f"To resume: {torchrun()} --nproc-per-node 2 -m stages.ppo --config {arguments[2]}" in log.read_text()
            )

    succeed(config("undisturbed"))
    arguments = config("changed")
    if begins_with == 2:
        torchrun(arguments, stop=True)
        [newest] = checkpoints(tmp_path / "changed", "ppo")
        assert 2 <= checkpoint_files.step_of(newest) < 9
        assert f"goes on after step {checkpoint_files.step_of(newest)}" in succeed(arguments)
    else:
        at_step(4, ask_to_stop)
        assert rlhf(arguments).exit_code == 143
        torchrun(arguments, stop=False)
        assert "goes on after step 4 of 9" in (tmp_path / "log").read_text()
    runs = ("undisturbed", "changed")
    one, two = (read_jsonl(tmp_path / run / "ppo/metrics.jsonl") for run in runs)
    [key] = [key for key in one[0] if key.startswith("reward/") and "seen" in key]
    assert [row["step"] for row in two] == list(range(1, 10))
    assert [row[key] for row in two] == [row[key] for row in one]
    for epoch in range(3):
        assert sum(8 * row[key] for row in two[3 * epoch : 3 * epoch + 3]) == 2**24 - 1
    for row, other in zip(one, two, strict=True):
        assert other["objective/kl_coef"] == pytest.approx(row["objective/kl_coef"], rel=1e-6)
    for name in ("model", "ema_model", "value_model"):
        first, second = (load_file(tmp_path / run / "ppo" / name / "model.safetensors") for run in runs)
        assert first.keys() == second.keys()
        for key in first:
            torch.testing.assert_close(second[key], first[key], rtol=1e-5, atol=1e-5)
