"""Steps with a NaN or infinite loss or gradient: the step is skipped and its batch saved, and too many stop the run.

The values come from real input. SFT: the attention of a model overflows at one token, which some rows contain. RM:
the margin of some rows is beyond float32. PPO: a reward is so large that the value loss overflows.
"""

from __future__ import annotations

import copy
import json
import math
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rlhf_cli.config.models import ScratchModel
from rlhf_cli.data.batches import stream
from rlhf_cli.errors import RunError
from rlhf_cli.models.save import save
from rlhf_cli.models.scratch import new_model
from rlhf_cli.run import checkpoint_files
from rlhf_cli.run.stage_run import StageRun
from rlhf_cli.training.bad_steps import append_new
from rlhf_cli.training.optimizer import Stepper
from support import crash
from support.compare import same_weights
from support.resume import checkpoints, refused, rlhf, stopped_after, succeed
from support.tiny import SETTINGS, merged, read_jsonl, write_jsonl
from support.worlds import run_in_threads

STAGES = ("sft", "rm", "ppo")
TOKEN = "%"
"""A token that only the bad rows contain."""
NUM_STEPS = {"sft": 6, "rm": 6, "ppo": 3}
BAD = {"sft": [3, 4], "rm": [3, 4], "ppo": [2]}
"""Steps (PPO: iterations) with bad batches; the iteration of PPO has four steps, all bad."""
IN_A_ROW = {"sft": 2, "rm": 2, "ppo": 4}
ORDER = {"sft": "sft order", "rm": "rm order", "ppo": "ppo prompts"}
LOSS = {"sft": "loss/sft", "rm": "loss/rm", "ppo": "loss/policy"}
COUNT = {"sft": "sft/bad_steps", "rm": "rm/bad_steps", "ppo": "policy/bad_steps"}
REWARD = """
def score(prompts, responses, rows):
    return [1e30 if row["number"] in {numbers} else float(len(r)) for r, row in zip(responses, rows)]
"""


@pytest.fixture(scope="module")
def poisoned_model(tokenizer, tmp_path_factory) -> Path:
    """A tiny OPT whose attention reads embeddings without a norm before it; one embedding is very large."""
    settings = SETTINGS["opt"] | {"do_layer_norm_before": False, "tie_word_embeddings": False}
    model = new_model(ScratchModel(architecture="opt", config=settings), tokenizer, seed=3)
    [token] = tokenizer(TOKEN, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = 1e30
    directory = tmp_path_factory.mktemp("poisoned") / "model"
    save(model, tokenizer, directory)
    return directory


def poison(stage: str, rows: list[dict[str, Any]], bad: list[int]) -> list[int]:
    """Make the batches of these steps bad; return the numbers of the rows that were changed."""
    size = 8 if stage == "ppo" else 4
    batches = [stream(len(rows), size, step - 1, 0, ORDER[stage]) for step in bad]
    if stage == "ppo":
        return [number for batch in batches for number in batch]
    for batch in batches:
        if stage == "sft":
            rows[batch[1]]["response"] += TOKEN
        else:
            rows[batch[1]]["margin"] = 1e300
    return [batch[1] for batch in batches]


@pytest.fixture(scope="module")
def config_in(write_config, data, poisoned_model, make_model) -> Callable[..., list[str]]:
    """A function: stage, artifact root, bad steps, config changes -> the command-line arguments of the run."""

    def prepare(stage: str, root: Path, bad: list[int] | None = None, **more: Any) -> list[str]:
        root.mkdir(parents=True, exist_ok=True)
        name = {"sft": "demonstrations", "rm": "preferences", "ppo": "prompts"}[stage]
        rows = copy.deepcopy(read_jsonl(data[name]))
        numbers = poison(stage, rows, BAD[stage] if bad is None else bad)
        changes: dict[str, Any] = {
            "data": {"train": str(write_jsonl(root / f"{stage}.jsonl", rows))},
            "optimizer": {"schedule": "linear", "warmup_steps": 1, "max_bad_steps": 5},
            "checkpoints": {"every_steps": 1, "every_minutes": None, "keep": 9},
        }
        if stage == "ppo":
            (root / "reward.py").write_text(REWARD.format(numbers=set(numbers) or "()"), encoding="utf-8")
            changes |= {
                "policy": {"path": str(make_model("llama"))},
                "rewards": [{"type": "function", "function": f"{root}/reward.py:score"}],
                "ppo": {"num_iterations": 3},
            }
            changes["data"] |= {"test": None, "test_fraction": 0}
        else:
            model = poisoned_model if stage == "sft" else make_model("llama")
            changes |= {"model": {"path": str(model)}, "training": {"num_steps": 6, "microbatch_size": 3}}
        if stage == "rm":
            changes["evaluation"] = {"num_normalization_samples": 0}
            changes["data"]["margin_column"] = "margin"
            for row in rows:
                row.setdefault("margin", 0.0)
            write_jsonl(root / "rm.jsonl", rows)
        return [stage, "--config", str(write_config(stage, root, **merged(changes, more)))]

    return prepare


stops = partial(refused, code=1)


def saved_steps(root: Path, stage: str) -> list[int]:
    assert all(checkpoint_files.damage_of(path) is None for path in checkpoints(root, stage))
    return [checkpoint_files.step_of(path) for path in checkpoints(root, stage)]


def step_rows(directory: Path, stage: str) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(directory / "metrics.jsonl") if COUNT[stage] in row]


def outcome(root: Path, stage: str) -> dict[str, str]:
    """The files of a finished stage and its failed batches, without the path of `root` in them."""
    found = crash.results(root / stage) | {"failed": (root / f"{stage}.failed_batch.jsonl").read_text()}
    return {name: str(text).replace(str(root), "") for name, text in found.items()}


# ------------------------------------------------------------------------------------- a skipped step


@pytest.fixture
def watched(monkeypatch) -> list[tuple[bool, bool, bool, int]]:
    """For each step: may it move, did a weight change, did an optimizer moment change, and the schedule's position."""
    seen: list[tuple[bool, bool, bool, int]] = []
    advance = Stepper.advance

    def copies(stepper: Stepper) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        moments = [t for state in stepper.optimizer.state.values() for t in state.values()]
        return [p.detach().clone() for p in stepper.model.parameters()], [t.clone() for t in moments]

    def changed(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
        return len(one) != len(two) or any(not torch.equal(a, b) for a, b in zip(one, two, strict=True))

    def watch(self: Stepper, *, move: bool = True) -> None:
        before, at = copies(self), self.steps
        advance(self, move=move)
        after = copies(self)
        seen.append((move, changed(before[0], after[0]), changed(before[1], after[1]), self.steps - at))

    monkeypatch.setattr(Stepper, "advance", watch)
    return seen


@pytest.mark.parametrize("stage", STAGES)
def test_a_bad_step_changes_nothing_and_is_saved_and_counted(stage, config_in, watched, tmp_path):
    output = succeed(config_in(stage, tmp_path))
    rows = step_rows(tmp_path / stage, stage)
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS[stage] + 1))
    bad, counted = BAD[stage], 4.0 if stage == "ppo" else 1.0
    assert [row[COUNT[stage]] for row in rows] == [counted * (row["step"] in bad) for row in rows]

    # Neither weights nor moments of either PPO model change, and the schedule advances. The first rate is 0.
    steppers, steps = (2, 4) if stage == "ppo" else (1, 1)
    assert len(watched) == NUM_STEPS[stage] * steps * steppers
    for number, (moves, weights, moments, ahead) in enumerate(watched):
        step = number // (steps * steppers) + 1
        assert (moves, moments, ahead) == (step not in bad, step not in bad, 1), number
        assert weights == (step not in bad) or number < steppers

    # Metrics that could not be computed are missing or null; the others are present.
    for row in rows:
        if row["step"] in bad:
            assert row.get(LOSS[stage]) is None or row[f"{stage}/grad_norm"] is None
        else:
            assert all(isinstance(value, int | float) for value in row.values())
    rate = "policy/learning_rate" if stage == "ppo" else f"{stage}/learning_rate"
    scale = 4 if stage == "ppo" else 1
    total = NUM_STEPS[stage] * scale
    for row in rows:
        at = (row["step"] - 1) * scale
        assert row[rate] == pytest.approx(1e-3 * (min(at, 1) if at <= 1 else (total - at) / (total - 1)))

    # Each batch is saved once. There is one message for the two consecutive ones, and one at the end.
    failed = read_jsonl(tmp_path / f"{stage}.failed_batch.jsonl")
    assert sorted({row["step"] for row in failed}) == bad
    train = read_jsonl(tmp_path / f"{stage}.jsonl")
    for step in bad:
        batch = [row for row in failed if row["step"] == step]
        numbers = stream(len(train), 8 if stage == "ppo" else 4, step - 1, 0, ORDER[stage])
        if stage == "ppo":
            # Two epochs of two minibatches: each response twice.
            assert sorted(row["prompt"] for row in batch) == sorted(2 * [train[n]["prompt"] for n in numbers])
            assert sorted(row["optimizer_step"] for row in batch) == sorted(4 * [5, 6, 7, 8])
            assert all(row["response_ids"] and len(row["returns"]) == len(row["response_ids"]) for row in batch)
        elif stage == "sft":
            assert [row["where"] for row in batch] == [f"{tmp_path}/sft.jsonl:{n + 1}" for n in numbers]
            assert [train[n]["response"] in row["text"] for n, row in zip(numbers, batch, strict=True)] == [True] * 4
        else:
            assert [row["row"]["where"] for row in batch] == [f"{tmp_path}/rm.jsonl:{n + 1}" for n in numbers]
            assert [row["row"]["answers"][0]["text"] for row in batch] == [train[n]["chosen"] for n in numbers]
    findings = [f for row in read_jsonl(tmp_path / stage / "health.jsonl") for f in row["findings"]]
    assert [f["severity"] for f in findings if f["name"] == "bad_step"] == ["warning"]
    assert output.count("bad_step: ") == 1
    assert f"{int(counted) * len(bad)} steps were skipped" in output
    for path in (tmp_path / stage).rglob("*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(path).values()), path


def test_a_bad_minibatch_does_not_stop_the_good_ones_of_its_iteration(config_in, tmp_path):
    """The metrics of an iteration with good and bad steps are means over the good ones."""
    arguments = config_in("ppo", tmp_path, bad=[])
    [number] = stream(24, 8, 1, 0, ORDER["ppo"])[3:4]
    (tmp_path / "reward.py").write_text(REWARD.format(numbers={number}), encoding="utf-8")
    succeed(arguments, "--set", "ppo.whiten_advantages=false")
    row = step_rows(tmp_path / "ppo", "ppo")[1]
    assert row["policy/bad_steps"] == 2.0, "one of two minibatches, in two epochs"
    assert all(isinstance(value, float) and math.isfinite(value) for key, value in row.items() if key != "step")
    assert abs(row["loss/value"]) < 1e6


def test_score_statistics_survive_an_infinite_score(config_in, tmp_path):
    arguments = config_in("ppo", tmp_path, ppo={"score_normalization": "running"})
    # The function returns a finite float32, but its weighted sum is infinite.
    succeed([*arguments, "--set", "rewards.0.weight=1e10"])
    rows = step_rows(tmp_path / "ppo", "ppo")
    assert [row["policy/bad_steps"] for row in rows] == [0.0, 4.0, 0.0]
    assert rows[1]["objective/score"] is None
    assert all(math.isfinite(row["objective/reward"]) for row in (rows[0], rows[2]))
    assert all(len(f["findings"]) == 0 or f["step"] == 2 for f in read_jsonl(tmp_path / "ppo/health.jsonl"))


# ------------------------------------------------------------------------------------- too many in a row


@pytest.mark.parametrize("stage", STAGES)
def test_too_many_consecutive_bad_steps_stop_at_the_last_good_checkpoint(stage, config_in, tmp_path):
    """The same command stops there again. One that allows more resumes and ends with the same bytes."""
    more = {"optimizer": {"max_bad_steps": IN_A_ROW[stage]}}
    arguments = config_in(stage, tmp_path / "run", **more)
    message = stops(arguments)
    first = BAD[stage][0]
    step = "ppo iteration 2, step 8: " if stage == "ppo" else f"{stage} step {BAD[stage][-1]}: "
    assert message.startswith(f"error: {step}")
    assert " is nan" in message or " is inf" in message
    assert "the step was skipped" in message
    assert str(tmp_path / f"run/{stage}.failed_batch.jsonl") in message
    assert f"These were {IN_A_ROW[stage]} bad steps in a row, the limit (optimizer.max_bad_steps)" in message
    assert f"The checkpoint of step {first - 1} is intact" in message
    assert not (tmp_path / "run" / stage).exists()
    assert saved_steps(tmp_path / "run", stage) == list(range(1, first)), "no checkpoint between bad steps"
    failed = (tmp_path / f"run/{stage}.failed_batch.jsonl").read_bytes()
    assert stops(arguments) == message
    assert (tmp_path / f"run/{stage}.failed_batch.jsonl").read_bytes() == failed, "not doubled"

    output = succeed(arguments, "--set", "optimizer.max_bad_steps=5")
    assert f"resuming after step {first - 1}" in output
    assert (tmp_path / f"run/{stage}.failed_batch.jsonl").read_bytes() == failed
    succeed(config_in(stage, tmp_path / "whole"), "--quiet")
    one, two = (outcome(tmp_path / name, stage) for name in ("run", "whole"))
    assert one | {"health.jsonl": "", "failed": ""} == two | {"health.jsonl": "", "failed": ""}
    assert "skipped" in succeed(arguments), "max_bad_steps is not part of the identity of a run"


@pytest.mark.parametrize("stage", STAGES)
def test_by_default_the_first_bad_step_stops_the_run(stage, config_in, tmp_path):
    arguments = config_in(stage, tmp_path)
    config = yaml.safe_load(Path(arguments[2]).read_text())
    del config["optimizer"]["max_bad_steps"]
    Path(arguments[2]).write_text(yaml.safe_dump(config))
    message = stops(arguments)
    assert "ppo iteration 2, step 5: " in message if stage == "ppo" else f"{stage} step 3: " in message
    assert "in a row" not in message
    assert {row["step"] for row in read_jsonl(tmp_path / f"{stage}.failed_batch.jsonl")} == {BAD[stage][0]}


# -------------------------------------------------------------------------------- weights that are not finite


@pytest.mark.parametrize("stage", STAGES)
def test_weights_that_are_not_finite_are_neither_saved_nor_published(stage, config_in, tmp_path):
    """A learning rate of 1e39 overflows float32 weights, though loss and gradient were finite."""
    long = {"training": {"num_steps": 1}} if stage != "ppo" else {"ppo": {"num_iterations": 1}}
    rate = {"optimizer": {"learning_rate": 1e39, "warmup_steps": 0, "max_bad_steps": 99}}
    for name, changes in (("checkpoint", {}), ("last step", long)):
        root = tmp_path / name
        message = stops(config_in(stage, root, bad=[], **merged(rate, changes)))
        assert f"{stage} step 1: weight " in message
        assert "contains NaN or inf; nothing was saved from this step" in message
        assert "There is no earlier checkpoint" in message
        assert saved_steps(root, stage) == []
        assert not (root / stage).exists()


# ------------------------------------------------------------------------------------------ resume


@pytest.mark.parametrize("stage", STAGES)
def test_the_count_of_consecutive_bad_steps_is_resumed(stage, config_in, tmp_path):
    """Five consecutive bad steps are allowed. Three come before the stop and three after it."""
    bad = [2, 3, 4, 5, 6] if stage != "ppo" else [2, 3]
    arguments = config_in(stage, tmp_path, bad=bad)
    stopped_after(4 if stage != "ppo" else 2, arguments, "--quiet")
    message = stops(arguments)
    assert message.startswith("error: ppo iteration 3, step 9: " if stage == "ppo" else f"error: {stage} step 6: ")
    assert "These were 5 bad steps in a row" in message


def test_a_checkpoint_of_another_version_is_ignored(config_in, monkeypatch, tmp_path):
    """Its parts differ from those of this version: the run says so and starts over."""
    arguments, finish = config_in("sft", tmp_path), StageRun.finish_step

    def stop(self: StageRun, done: int, total: int) -> None:
        del self.checkpoints.parts["bad_steps"]
        signal.raise_signal(signal.SIGTERM)
        finish(self, done, total)

    with monkeypatch.context() as patch:
        patch.setattr(StageRun, "finish_step", stop)
        assert rlhf(arguments, "--quiet").exit_code == 143
    assert "cannot be used, another version of rlhf wrote it (bad_steps); starting over" in succeed(arguments)


@pytest.mark.parametrize("point", ["open", "fsync"])
def test_a_kill_while_a_batch_is_written_loses_nothing(point, config_in, tmp_path):
    """Killed before the file is opened, and when it is written but not synced."""
    succeed(config_in("sft", tmp_path / "whole"), "--quiet")
    root = tmp_path / "run"
    arguments = config_in("sft", root)
    watch = crash.Watch(str(root), signals={f"{point} sft.failed_batch.jsonl #1": signal.SIGKILL})
    assert crash.Attempt(arguments, tmp_path / "log", watch).wait() == crash.KILLED
    succeed(arguments)
    assert outcome(root, "sft") == outcome(tmp_path / "whole", "sft")


# ------------------------------------------------------------------------------------------- the parts


def test_rows_are_appended_once_and_a_partial_row_is_removed(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_new(path, [{"step": 1, "x": "ä"}, {"step": 1, "x": "\ud800"}])
    complete = path.read_bytes()
    append_new(path, [{"step": 1, "x": "ä"}])
    assert path.read_bytes() == complete
    path.write_bytes(complete + b'{"step": 2, "x')
    append_new(path, [{"step": 2, "x": float("nan"), "p": Path("p")}])
    assert path.read_bytes().startswith(complete)
    lines = path.read_bytes().decode("utf-8", "surrogatepass").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 1, 2]


# ----------------------------------------------------------------------------------------- processes


@pytest.mark.parametrize("stage", STAGES)
def test_all_processes_skip_a_bad_step_together(stage, config_in, tmp_path, monkeypatch):
    """One process has the bad row: the other must not step alone, and by default both stop with the same message."""
    # Adam must not amplify rounding where a gradient is nearly 0: see `eps` in tests/stages/test_stages.py.
    one, two = (config_in(stage, tmp_path / name, optimizer={"eps": 1e-3}) for name in ("one", "two"))
    succeed(one)
    run_in_threads(2, stage, Path(two[2]))
    runs = [tmp_path / name / stage for name in ("one", "two")]
    same_weights(*runs)
    counts = [[row[COUNT[stage]] for row in step_rows(run, stage)] for run in runs]
    assert counts[0] == counts[1]
    rows = [
        sorted((row["step"], str(row.get("where", row.get("prompt"))).replace("/one/", "/two/")) for row in failed)
        for failed in (read_jsonl(tmp_path / name / f"{stage}.failed_batch.jsonl") for name in ("one", "two"))
    ]
    assert rows[0] == rows[1]
    # One process may find the last checkpoint before it is written.
    monkeypatch.setattr(checkpoint_files, "last_step_in_words", lambda *_: f"Found by {threading.get_ident()}.")
    with pytest.raises(RunError, match="the step was skipped"):
        run_in_threads(2, stage, Path(config_in(stage, tmp_path / "stops", optimizer={"max_bad_steps": 1})[2]))
