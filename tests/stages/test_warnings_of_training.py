"""What SFT and RM say on the way: a loss above the limit, and a gradient of exactly 0."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_cli.errors import RunError
from rlhf_cli.training.optimizer import Stepper
from stages import rm as rm_stage
from stages import sft as sft_stage
from support.setup import config_of
from support.tiny import read_jsonl

GUESSING = "worse than guessing all tokens with equal probability"


@pytest.fixture
def warnings_of(write_config, make_model, tmp_path, capsys):
    """A function: SFT config changes -> the warnings of a run of three steps about its loss."""

    def run(**changes):
        model = {"model": {"path": str(make_model("llama"))}}
        config = config_of(write_config, "sft", sft_stage.SFTConfig, tmp_path, **model, **changes)
        sft_stage.run(config, quiet=True)
        output = " ".join(capsys.readouterr().out.split())
        return [text for text in output.split("sft: warning: ") if "loss" in text]

    return run


def test_a_loss_above_the_limit_is_reported_once_after_the_warm_up(warnings_of, tmp_path):
    (warning,) = warnings_of(warn_loss_above=0.5, optimizer={"warmup_steps": 1})
    losses = [row["loss/sft"] for row in read_jsonl(tmp_path / "sft/metrics.jsonl") if "loss/sft" in row]
    assert f"step 3, high_loss: The loss is {losses[2]:.2f}, above 0.50 (warn_loss_above)" in warning
    assert (GUESSING in warning) is (losses[2] > math.log(300))


def test_without_a_limit_the_loss_of_guessing_is_the_limit(warnings_of, tmp_path):
    """A tiny random model with large weights is worse than guessing."""
    warnings = warnings_of()
    losses = [row["loss/sft"] for row in read_jsonl(tmp_path / "sft/metrics.jsonl") if "loss/sft" in row]
    assert losses[1] > math.log(300)
    (warning,) = warnings
    assert f"step 2, high_loss: The loss is {losses[1]:.2f}, above {math.log(300):.2f}, {GUESSING}." in warning


@pytest.mark.parametrize("stage", ["sft", "rm"])
def test_a_gradient_of_exactly_0_stops_the_stage(stage, run_stage, make_model, tmp_path, monkeypatch):
    real = Stepper.clip

    def lost(self, world):
        for p in self.model.parameters():
            p.grad = None if p.grad is None else torch.zeros_like(p)
        return real(self, world)

    monkeypatch.setattr(Stepper, "clip", lost)
    with pytest.raises(RunError, match=rf"{stage} step 1: no_gradient: {stage}/grad_norm is exactly 0 in step 1"):
        run_stage(stage, tmp_path, model={"path": str(make_model("llama"))})
    (row,) = read_jsonl(tmp_path / f".{stage}.partial/health.jsonl")
    assert [f["name"] for f in row["findings"]] == ["no_gradient"]


@pytest.mark.parametrize("stage", ["sft", "rm"])
def test_a_stage_that_memorises_its_rows_says_so_once(stage, run_stage, make_model, tmp_path, monkeypatch):
    losses = iter([1.0, 1.2, 1.3, 1.4])
    module, name = (sft_stage, "_evaluate") if stage == "sft" else (rm_stage, "_figures")
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: real(*args) | {"eval/loss": next(losses)})
    changes = {"training": {"num_steps": 12, "minibatch_size": 2}, "evaluation": {"every_steps": 3}}
    run_stage(stage, tmp_path, model={"path": str(make_model("llama"))}, optimizer={"learning_rate": 1e-2}, **changes)
    found = [f for row in read_jsonl(tmp_path / f"{stage}/health.jsonl") for f in row["findings"]]
    (finding,) = [finding for finding in found if finding["name"] == "memorises"]
    assert "20% above the 1 of step 3, and the training loss fell from" in finding["message"]
    assert "keep_best" in finding["advice"]
