"""float16 with a scaled loss: overflows, bad steps, checkpoints, and the quality of training."""

import math

import pytest
import torch

from rlhf_cli.errors import Interrupted, RunError
from rlhf_cli.run.stage_run import StageRun
from rlhf_cli.training.bad_steps import BadSteps, LossScale
from support.gpu import DEVICES
from support.paths import OF_THE_MACHINE
from support.resume import stopping_after
from support.tiny import CPU, read_jsonl

FIRST = 65536.0


def test_gradients_are_those_of_the_loss_and_an_overflow_halves_the_scale():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer, scale = torch.optim.AdamW([weight]), LossScale(CPU, "float16")
    for factor, finite, expected in ((2.0, True, FIRST), (1e38, False, FIRST / 2), (2.0, True, FIRST / 2)):
        weight.grad = None
        scale.scaled((weight * factor).sum()).backward()
        scale.unscale(optimizer)
        assert weight.grad.isfinite().all() == finite
        if finite:
            assert weight.grad.tolist() == [factor] * 3
        scale.update()
        assert scale.scale == expected
    scale.update()  # a step without a backward pass, as behind a stop for KL
    assert scale.scale == FIRST / 2
    restored = LossScale(CPU, "float16")
    restored.restore({}, scale.state()[1])
    assert restored.state() == scale.state()
    assert restored.scale == FIRST / 2


def test_other_precisions_compute_nothing():
    weight = torch.nn.Parameter(torch.ones(3))
    for precision in ("float32", "bfloat16", "auto"):
        scale = LossScale(CPU, precision)
        scale.scaled((weight * 2).sum()).backward()
        assert (scale.parts(), scale.figures("sft"), scale.scale) == ({}, {}, 1.0)
        assert not scale.explains({"sft/grad_norm": math.inf})
    assert weight.grad.tolist() == [6.0] * 3


def test_the_scale_explains_infinite_gradients_until_it_cannot_fall():
    """A loss that is NaN is a bad step in any case."""
    scale, bad = LossScale(CPU, "float16"), BadSteps(1)
    overflow = {"loss/sft": 2.0, "sft/grad_norm": math.inf}
    assert scale.explains(overflow)
    assert not scale.explains({"loss/sft": 2.0, "sft/grad_norm": 1.0})
    assert not scale.explains({"loss/sft": math.nan, "sft/grad_norm": math.nan})
    bad.count(overflow, is_excused=True)
    assert (bad.total, bad.in_a_row) == (1, 0)
    scale.restore({}, scale.state()[1] | {"scale": 1.0})
    assert not scale.explains(overflow)


@pytest.fixture
def float16(run_stage, make_model):
    """A function: root, changes -> the rows of an SFT run of 25 steps in float16."""

    def run(root, **changes):
        settings = {
            "model": {"path": str(make_model("llama"))},
            "training": {"num_steps": 25, "minibatch_size": 8},
            "optimizer": {"learning_rate": 5e-3},
            "precision": "float16",
        }
        stage = run_stage("sft", root, **settings | changes)
        rows = read_jsonl(stage / "metrics.jsonl")
        return [{k: v for k, v in row.items() if not k.startswith(OF_THE_MACHINE)} for row in rows]

    return run


def overflowing(patch, steps, counter):
    """Let the gradients of these steps overflow, by a loss scale of 2**127."""
    plain = LossScale.scaled

    def scaled(self, loss):
        counter.append(None)
        return plain(self, loss * 2.0**125 if len(counter) in steps else loss)

    patch.setattr(LossScale, "scaled", scaled)


@pytest.mark.parametrize("device", DEVICES)
def test_an_overflow_is_skipped_counted_and_no_reason_to_stop(float16, tmp_path, monkeypatch, device):
    """With max_bad_steps: 1. The scale halves, the row counts the step, and no batch is written as failed."""
    with monkeypatch.context() as patch:
        overflowing(patch, {2, 3}, [])
        training = {"num_steps": 4, "minibatch_size": 8, "microbatch_size": 8}
        rows = float16(tmp_path, training=training, device=device)
    assert [row["sft/bad_steps"] for row in rows if "loss/sft" in row] == [0.0, 1.0, 1.0, 0.0]
    assert [row["sft/loss_scale"] for row in rows if "loss/sft" in row] == [FIRST, FIRST, FIRST / 2, FIRST / 4]
    assert not list(tmp_path.glob("*.failed_batch.jsonl"))


def test_a_gradient_that_stays_infinite_stops_the_run(float16, tmp_path, monkeypatch):
    """After 16 halvings the scale is 1 and explains nothing."""
    monkeypatch.setattr(LossScale, "scaled", lambda self, loss: self._scaler.scale(loss * math.inf))
    with pytest.raises(RunError, match=r"sft step 17: sft/grad_norm is (inf|nan); the step was skipped"):
        float16(tmp_path)


def test_a_resumed_run_keeps_its_scale(float16, tmp_path, monkeypatch):
    """Stopped after an overflow: the same rows, scale included."""
    training = {"num_steps": 4, "minibatch_size": 8, "microbatch_size": 8}
    with monkeypatch.context() as patch:
        overflowing(patch, {1}, [])
        whole = float16(tmp_path / "whole", training=training)
    with monkeypatch.context() as patch:
        overflowing(patch, {1}, [])
        patch.setattr(StageRun, "finish_step", stopping_after(2))
        with pytest.raises(Interrupted):
            float16(tmp_path / "cut", training=training)
    assert float16(tmp_path / "cut", training=training) == whole
    weights = {(tmp_path / name / "sft/model/model.safetensors").read_bytes() for name in ("whole", "cut")}
    assert len(weights) == 1
    assert [row["sft/loss_scale"] for row in whole if "loss/sft" in row] == [FIRST] + [FIRST / 2] * 3


@pytest.mark.parametrize("init", ["auto", "shared"])
def test_all_stages_run_in_float16(run_stage, make_model, tmp_path, init):
    """RM, and PPO with a value model and with a shared head: finite weights, and no step is skipped."""
    model = {"path": str(make_model("llama"))}
    if init == "auto":
        run_stage("rm", tmp_path, model=model, precision="float16")
    rewards = [{"type": "reward_model"}] if init == "auto" else [{"type": "length", "target": 5}]
    keys = {"policy": model, "rewards": rewards, "value_model": {"init": init}, "precision": "float16"}
    rows = read_jsonl(run_stage("ppo", tmp_path, **keys) / "metrics.jsonl")
    assert [row["policy/bad_steps"] for row in rows if "policy/bad_steps" in row] == [0.0, 0.0]
    assert [row["policy/loss_scale"] for row in rows if "policy/loss_scale" in row] == [FIRST, FIRST]
    assert all(row["policy/first_ratio_error"] == 0.0 for row in rows if "policy/first_ratio_error" in row)
