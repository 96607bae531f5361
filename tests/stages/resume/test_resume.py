"""A resumed run gives the same bytes as one that was never stopped: stops, damaged checkpoints, changed configs."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlhf_cli.errors import ArtifactError, RunError
from rlhf_cli.evaluation import normalization
from rlhf_cli.ppo.scores import ReferenceReplies
from rlhf_cli.program import program
from rlhf_cli.run import artifacts, checkpoint, checkpoint_files
from rlhf_cli.run.checkpoint import CheckpointStore, State
from rlhf_cli.run.stage_run import StageRun
from rlhf_cli.training.best import Best
from stages import rm as rm_stage
from support import crash, resume
from support.resume import STEPS, ask_to_stop, checkpoints, refused, same, status, stopped_after, succeed, truncate
from support.tiny import read_jsonl

CASES = ("sft", "sft scratch", "rm", "ppo", "ppo lora penalty", "ppo shared filters", "ppo groups bfloat16")
OTHER_WEIGHTS = ("sft dora", "rm lora", pytest.param("ppo 8bit", marks=pytest.mark.slow))


# ------------------------------------------------------------------------------------- exact resume


@pytest.mark.parametrize("case", [*CASES, *OTHER_WEIGHTS])
def test_a_resumed_run_gives_the_same_bytes(case, config_in, undisturbed, monkeypatch, tmp_path):
    """Weights have the same bytes, metrics the same values except durations, and every part the same state."""
    stage, states = case.split()[0], {}
    arguments = config_in(case, tmp_path)
    save, restore = CheckpointStore.save, CheckpointStore.restore

    def saves(self: CheckpointStore, step: int) -> None:
        states["saved"] = resume.state_of(self)
        save(self, step)

    def restores(self: CheckpointStore, path: Path) -> None:
        restore(self, path)
        states["restored"] = resume.state_of(self)

    monkeypatch.setattr(CheckpointStore, "save", saves)
    stopped_after(STEPS[stage] // 2, arguments, "--quiet")
    monkeypatch.setattr(CheckpointStore, "save", save)
    monkeypatch.setattr(CheckpointStore, "restore", restores)
    with monkeypatch.context() as patch:
        patch.setattr(normalization, "_draw", None)  # the first run has kept its samples
        patch.setattr(ReferenceReplies, "_sample", None)
        assert f"resuming after step {STEPS[stage] // 2} of {STEPS[stage]}" in succeed(arguments)
    same(crash.outcome(tmp_path / stage), undisturbed(case))
    assert states["saved"].keys() == states["restored"].keys()
    for part, (tensors, numbers) in states["saved"].items():
        again, numbers_again = states["restored"][part]
        assert numbers.pop("seconds", 0) <= numbers_again.pop("seconds", 0)
        assert numbers == numbers_again, part
        assert tensors.keys() == again.keys()
        assert all(torch.equal(tensors[key], again[key]) for key in tensors), part
    if case in ("sft dora", "rm lora"):
        names = {name for name in states["saved"]["model"][0] if ".lora_" not in name}
        assert names == ({"score.weight"} if stage == "rm" else set()), "frozen weights are not in a checkpoint"


def test_members_resume_where_they_were(config_in, undisturbed, monkeypatch, tmp_path):
    """Stopped in each of three members, once after its last step: no step is repeated, and the bytes are the same."""
    arguments, taken, finish_step = config_in("rm members", tmp_path), [], StageRun.finish_step

    def finish(self: StageRun, done: int, total: int) -> None:
        taken.append(done)
        if len(taken) in (4, 6, 9, 15):
            ask_to_stop(self)
        finish_step(self, done, total)

    monkeypatch.setattr(StageRun, "finish_step", finish)
    for step in (4, 6, 3, 3):
        assert resume.rlhf(arguments, "--quiet").exit_code == 143
        (tmp_path / ".rm.checkpoints/members/.DS_Store").touch()
        assert f"saved after step {step} of 6" in status(tmp_path)
    assert "members/accuracy_mean" in succeed(arguments)
    assert taken == [1, 2, 3, 4, 5, 6] * 3
    same(crash.outcome(tmp_path / "rm"), undisturbed("rm members"))
    weights = {part: undisturbed("rm members")[f"{part}/model.safetensors"] for part in ("members/1", "members/2")}
    assert len({*weights.values(), undisturbed("rm")["model/model.safetensors"]}) == 3
    assert undisturbed("rm members")["model/model.safetensors"] == undisturbed("rm")["model/model.safetensors"]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_finished_member_is_trained_again_only_if_it_was_changed(
    damaged, config_in, undisturbed, monkeypatch, tmp_path
):
    """The run ends between two members, when no checkpoint has weights."""
    arguments, trained, train = config_in("rm members", tmp_path), [], rm_stage._train

    def trains(config: Any, number: int, rows: Any, best: Any, folder: Path, stage: StageRun) -> Any:
        trained.append(folder.name)
        if trained == ["1", "2"]:
            raise RunError("the second member cannot begin")
        return train(config, number, rows, best, folder, stage)

    monkeypatch.setattr(rm_stage, "_train", trains)
    assert "cannot begin" in refused(arguments, code=1)
    (kept,) = checkpoint_files.resumable_checkpoints(tmp_path, "rm")
    assert kept.parent.name == "1"
    if damaged:
        truncate(tmp_path / ".rm.partial/members/1/model.safetensors")
    succeed(arguments)
    assert trained[2:] == (["1", "2", "model"] if damaged else ["2", "model"])
    same(crash.outcome(tmp_path / "rm"), undisturbed("rm members"))


def test_a_run_stopped_after_its_first_and_its_last_step_gives_the_same_bytes(config_in, finish, tmp_path):
    arguments = config_in("ppo", tmp_path)
    for step in (1, STEPS["ppo"]):
        stopped_after(step, arguments, "--quiet")
    finish(arguments)


@pytest.mark.parametrize(("minutes", "expected"), [(1e-9, [1, 2, 3, 4, 5]), (10, [3])])
def test_minutes_are_counted_from_the_last_checkpoint(minutes, expected, config_in, at_step, tmp_path, monkeypatch):
    """A wall clock that goes backwards changes nothing. Before step 3 eleven minutes pass."""
    day, saved, save = iter(range(2_000_000_000, 0, -7919)), [], CheckpointStore.save
    monkeypatch.setattr("time.time", lambda: float(next(day)))
    monkeypatch.setattr(CheckpointStore, "save", lambda self, step: saved.append(step) or save(self, step))
    at_step(3, lambda stage: setattr(stage, "_last_checkpoint", stage._last_checkpoint - 660))
    succeed(config_in("sft", tmp_path, checkpoints={"every_steps": None, "every_minutes": minutes}))
    assert saved == expected


def test_seconds_before_the_stop_are_included(stopped, tmp_path):
    arguments = stopped("sft", tmp_path)
    before = read_jsonl(tmp_path / ".sft.partial/metrics.jsonl")
    succeed(arguments)
    times = [row["time/elapsed_s"] for row in read_jsonl(tmp_path / "sft/metrics.jsonl")]
    assert times == sorted(times)
    assert times[len(before)] > before[-1]["time/elapsed_s"]
    assert artifacts.read_manifest(tmp_path / "sft").seconds >= round(times[-1], 1)


def test_the_last_checkpoints_are_kept_until_the_stage_is_finished(config_in, tmp_path):
    arguments = config_in("sft", tmp_path, checkpoints={"every_steps": 1, "keep": 3})
    stopped_after(5, arguments)
    assert [path.name for path in checkpoints(tmp_path, "sft")] == [f"step-0000000{n}" for n in (3, 4, 5)]
    succeed(arguments)
    assert {path.name for path in tmp_path.iterdir()} == {"sft", "sft.yaml"}


class Counter:
    """A part that changes after the save: the checkpoint must contain its state at the save."""

    def __init__(self) -> None:
        self.count = torch.zeros(3)

    def state(self) -> State:
        return {"count": self.count}, {"count": self.count[0].item()}

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:  # noqa: ARG002
        self.count = tensors["count"]


def test_checkpoints_are_written_in_the_background_one_at_a_time(tmp_path, monkeypatch):
    may_write = threading.Event()
    monkeypatch.setattr(checkpoint, "save_file", lambda *args: may_write.wait(120) and save_file(*args))
    counter, store = Counter(), CheckpointStore(tmp_path, keep=2)
    store.parts = {"counter": counter}
    store.save(1)
    counter.count += 1
    second = threading.Thread(target=store.save, args=(2,))
    second.start()
    second.join(0.2)
    assert second.is_alive(), "two at a time would fill the memory"
    assert checkpoint_files.list_checkpoints(tmp_path) == []
    may_write.set()
    second.join()
    store.wait()
    for step, path in enumerate(checkpoint_files.list_checkpoints(tmp_path), 1):
        store.restore(path)
        assert (checkpoint_files.step_of(path), counter.count.tolist()) == (step, [step - 1] * 3)


def test_a_failed_checkpoint_is_reported_at_the_next_one(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep=2)
    for error, expected in ((OSError(28, "No space left"), ArtifactError), (ValueError("a bug"), ValueError)):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "save_file", lambda *_, error=error: (_ for _ in ()).throw(error))
            store.save(1)
            with pytest.raises(expected):
                store.save(2)
    store.wait()
    assert list(tmp_path.iterdir()) == []


def test_files_are_synced_before_they_are_renamed(config_in, tmp_path):
    """Checked by the order of file operations. Only a power cut, not a kill, could show a mistake."""
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
    manifest_files = json.loads((root / "sft/manifest.json").read_text())["files"]
    files = {f".sft.partial/{name}" for name in [*manifest_files, "manifest.json"]}
    synced({*files, ".sft.partial", ".sft.partial/model"}, ".sft.partial", after="open .sft.partial/manifest.json")
    after = points[points.index("rename .sft.partial") :]
    assert after.index("fsync ") < after.index("rmdir .sft.checkpoints")


# ------------------------------------------------------------------------------- damaged checkpoints


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


DAMAGES = {"truncated": truncate, "flipped": flip_a_bit, "missing": Path.unlink, "empty": lambda p: os.truncate(p, 0)}


def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used(stopped, finish, tmp_path):
    arguments = stopped("sft", tmp_path)
    before, newest = checkpoints(tmp_path, "sft")
    for name in ("state.safetensors", "numbers.json", "manifest.json"):
        for damage, do in DAMAGES.items():
            damaged = Path(shutil.copytree(newest, tmp_path / f"{damage} {name}" / newest.name))
            do(damaged / name)
            # A flipped bit in the manifest may change the digest of another file.
            expected = "" if (name, damage) == ("manifest.json", "flipped") else name
            assert expected in checkpoint_files.damage_of(damaged), (name, damage)
            shutil.rmtree(damaged.parent)
    (before / "more.safetensors").touch()
    assert checkpoint_files.damage_of(before) == "its manifest.json was modified"
    (before / "more.safetensors").unlink()
    flip_a_bit(newest / "state.safetensors")
    output = finish(arguments)
    assert f"warning: {newest}: cannot be used, state.safetensors was modified" in output
    assert f"resuming after step 2 of 6, from {before}" in output


def test_a_damaged_checkpoint_does_not_replace_a_good_one(stopped, finish, tmp_path):
    """Pruning keeps the last checkpoints by name. A damaged one with a later name must not push a good one out."""
    arguments = stopped("sft", tmp_path)
    truncate(checkpoints(tmp_path, "sft")[-1] / "state.safetensors")
    stopped_after(3, arguments, "--set", "checkpoints.keep=1")
    assert [path.name for path in checkpoints(tmp_path, "sft")] == ["step-00000003"]
    assert "resuming after step 3" in finish(arguments)


@pytest.mark.parametrize("case", ["sft", "ppo"])
def test_resume_removes_what_was_written_after_the_checkpoint(case, stopped, finish, tmp_path):
    """Rows, half a row, a new file of rows, half a model, and the manifest of an interrupted publication. All
    checkpoints of SFT are damaged, so it starts over."""
    arguments = stopped(case, tmp_path)
    built = tmp_path / f".{case}.partial"
    for name in ("metrics", "samples", "evaluations", "later"):
        with (built / f"{name}.jsonl").open("a") as file:
            file.write('{"step": 99}\n{"st')
    for name in ("model", "ema_model", "value_model", "another"):
        (built / name).mkdir()
        (built / name / ".tmpLeftover").write_text("of a save that was cut off")
    (built / "manifest.json").write_text("{}")
    (built / "evaluation.json").write_text("{}")
    for path in checkpoints(tmp_path, case) if case == "sft" else ():
        truncate(path / "state.safetensors")
    output = finish(arguments)
    assert output.count("cannot be used, state.safetensors was modified; starting over") == (2 if case == "sft" else 0)


def change_a_row(number: int, root: Path) -> None:
    path = root / ".sft.partial/metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number] = lines[number].replace(b'"step": ', b'"step":\t')
    path.write_bytes(b"".join(lines))


ROWS = "cannot be used, metrics.jsonl was modified after it was saved"
CHANGES = {
    "no rows": ("sft", lambda root: (root / ".sft.partial/metrics.jsonl").unlink(), ["metrics.jsonl is missing"]),
    "no folder": ("sft", lambda root: shutil.rmtree(root / ".sft.partial"), []),
    "first row": ("sft", partial(change_a_row, 0), [ROWS, "starting over"]),
    "last row": ("sft", partial(change_a_row, -1), [ROWS, "using an older one"]),
    "best model": (
        "ppo",
        lambda root: flip_a_bit(root / ".ppo.partial/best_model/model.safetensors"),
        ["cannot be used, best_model/model.safetensors was modified after it was saved"],
    ),
    "identity": (
        "sft",
        lambda root: truncate(root / ".sft.checkpoints/run.json"),
        ["run.json: cannot be read", "starting over"],
    ),
}


@pytest.mark.parametrize(("case", "change", "says"), CHANGES.values(), ids=CHANGES)
def test_a_change_beside_the_checkpoints_is_reported(case, change, says, stopped, finish, tmp_path):
    """Else it would be published. A checkpoint that is older than a changed row can be used."""
    arguments = stopped(case, tmp_path)
    change(tmp_path)
    output = finish(arguments)
    assert [words for words in says if words not in output] == []
    assert ("resuming" in output) is ("using an older one" in output)


REPLACED = {"evaluation": {"keep_best": True, "every_steps": 1}, "checkpoints": {"every_steps": None}}


@pytest.mark.parametrize(
    ("case", "more"),
    [
        ("sft", REPLACED),
        ("rm", REPLACED | {"training": {"save_every": "epoch", "minibatch_size": 12}}),
        ("ppo", {**REPLACED, "evaluation": {"best_metric": "score_mean", "every_iterations": 1}}),
    ],
)
def test_a_crash_after_the_best_model_was_replaced_costs_no_checkpoint(case, more, config_in, monkeypatch, tmp_path):
    """Nor one after RM has written statistics into the models that it saved before the checkpoint."""

    def is_better(self, step, figures):
        self.step, self.value = step, figures[self.metric]
        return True

    def crashes(*_):
        raise RuntimeError("a crash before the stage is published")

    monkeypatch.setattr(Best, "is_better", is_better)
    whole, arguments = (config_in(case, tmp_path / name, **more) for name in ("whole", "run"))
    succeed(whole, "--quiet")
    stopped_after(STEPS[case] - 1, arguments, "--quiet")
    models = sorted(path.parent.name for path in (tmp_path / f"run/.{case}.partial").glob("*/config.json"))
    assert models == (["best_model", "epoch_1", "epoch_2"] if case == "rm" else ["best_model"])
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(StageRun, "publish", crashes)
            assert "a crash before" in str(resume.rlhf(arguments, "--quiet").exception)
    assert f"resuming after step {STEPS[case] - 1} of {STEPS[case]}" in succeed(arguments)
    same(crash.outcome(tmp_path / "run" / case), crash.outcome(tmp_path / "whole" / case))


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
def test_a_changed_config_is_refused_with_the_changed_keys(case, override, key, stopped, finish, tmp_path):
    arguments = stopped(case, tmp_path)
    message = refused(arguments, "--set", override, "--set", "seed=5")
    assert f"was started with a different {', '.join(sorted([key, 'seed']))}. Restore it" in message
    assert "--restart" in message
    if case == "rm":
        finish(arguments)


def test_changed_data_is_refused(stopped, data, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(data["demonstrations"].read_text() + json.dumps({"prompt": "a", "response": " new one"}) + "\n")
    assert "data.train" in refused(stopped("sft", tmp_path / "run"), "--set", f"data.train={rows}")


@pytest.mark.parametrize(
    ("case", "overrides"),
    [
        ("sft", ["training.num_steps=8", "evaluation.every_steps=3", "evaluation.num_samples=1", "warn_loss_above=9"]),
        ("rm", ["training.num_steps=8", "checkpoints.every_steps=1", "device=cpu", "threads=2"]),
        ("ppo", ["ppo.num_iterations=5", "evaluation.every_iterations=2", "num_logged_samples=1"]),
    ],
)
def test_more_steps_and_other_logging_are_accepted(case, overrides, stopped, tmp_path):
    arguments = stopped(case, tmp_path)
    output = succeed(arguments, *(part for text in overrides for part in ("--set", text)))
    assert "resuming with a different " in output
    main = {"sft": "loss/sft", "rm": "loss/rm", "ppo": "objective/score"}[case]
    total = {"sft": 8, "rm": 8, "ppo": 5}[case]
    rows = [row["step"] for row in read_jsonl(tmp_path / case / "metrics.jsonl") if main in row]
    assert rows == list(range(1, total + 1))


def test_an_extended_run_equals_one_that_was_long_from_the_start(config_in, tmp_path):
    """With a schedule that does not depend on the length of the run."""
    constant = {"optimizer": {"schedule": "constant"}}
    long = {"training": {"num_steps": 9}}
    succeed(config_in("sft", tmp_path / "long", **constant, **long))
    stopped_after(5, config_in("sft", tmp_path / "short", **constant))
    output = succeed(config_in("sft", tmp_path / "short", **constant, **long))
    assert "resuming with a different training.num_steps" in output
    same(crash.outcome(tmp_path / "short/sft"), crash.outcome(tmp_path / "long/sft"))


def test_fewer_steps_than_completed_are_refused_and_restart_reports_what_it_discards(stopped, finish, tmp_path):
    arguments = stopped("sft", tmp_path)
    assert "has done 4 steps, more than the 3 of this config" in refused(arguments, "--set", "training.num_steps=3")
    output = finish(arguments, "--restart")
    assert "--restart: discarding an unfinished run (2 checkpoints, the last " in output
    assert "resuming" not in output


def test_a_stopped_restart_of_a_finished_stage_is_resumed(config_in, finish, tmp_path):
    """By the same command without --restart, as the message says, though a finished stage exists."""
    arguments = config_in("sft", tmp_path)
    succeed(arguments)
    result = stopped_after(4, arguments, "--restart", "--quiet")
    assert f"To resume: {program()} sft --config {arguments[2]}" in result.stderr
    assert "a new run of it is interrupted (saved after step 4" in status(tmp_path)
    assert "resuming after step 4" in finish(arguments)
    assert "skipped" in succeed(arguments)


def test_a_resumed_run_ends_with_the_findings_of_the_whole_run(config_in, tmp_path):
    """It does not repeat the warning that is given once."""
    arguments = [*config_in("sft", tmp_path), "--set", "warn_loss_above=0.01"]
    assert ", high_loss: The loss is" in stopped_after(4, arguments).output
    output = succeed(arguments)
    assert ", high_loss: The loss is" not in output
    assert "sft: this run had 1 kind of warning: high_loss, step " in output
