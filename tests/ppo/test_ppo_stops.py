"""PPO stops before it learns from values that are not finite, or from the wrong temperature or dropout."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rlhf_cli.errors import RunError
from rlhf_cli.models import load
from rlhf_cli.models.load import load_policy
from rlhf_cli.rollout import rollout as rollout_module
from stages import ppo as ppo_stage
from support.tiny import read_jsonl


def set_weight_to_nan(setup, iteration):
    """Do it between the first and the second iteration."""
    if iteration == 1:
        with torch.no_grad():
            setup.models.policy.base_model.norm.weight[3] = math.nan


def test_filters_with_a_nan_policy_fail_with_one_line(watch, tmp_path):
    """NaN compares as false, so the filters keep no token. The error is one line and not a traceback."""
    rollout = {"top_k": 20, "top_p": 0.9, "min_p": 0.01}
    with pytest.raises(RunError) as error:
        watch(before_rollout=set_weight_to_nan, rollout=rollout, ppo={"num_iterations": 3})
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run/ppo").exists()


def stop_findings(root):
    rows = read_jsonl(root / ".ppo.partial/health.jsonl")
    return [f["name"] for f in rows[-1]["findings"] if f["severity"] == "stop"]


def test_a_wrong_temperature_in_training_stops_the_run(watch, tmp_path, monkeypatch):
    """[13] PPO publishes nothing."""
    real = ppo_stage.score_tokens

    def colder(models, prompts, responses, sampling, precision, **options):
        return real(models, prompts, responses, replace(sampling, temperature=0.7), precision, **options)

    monkeypatch.setattr(ppo_stage, "score_tokens", colder)
    with pytest.raises(RunError, match=r"ppo iteration 1: ratio_not_one: .*temperature"):
        watch()
    assert stop_findings(tmp_path / "run") == ["ratio_not_one"]
    assert not (tmp_path / "run/ppo").exists()


def test_a_wrong_temperature_for_ref_policy_stops_the_run(watch, tmp_path, monkeypatch):
    real = rollout_module.response_logprobs

    def warmer(model, prompts, responses, sampling, precision):
        """The scoring before the update has no gradients."""
        temperature = sampling.temperature if torch.is_grad_enabled() else 1.3
        return real(model, prompts, responses, replace(sampling, temperature=temperature), precision)

    monkeypatch.setattr(rollout_module, "response_logprobs", warmer)
    with pytest.raises(RunError, match="ppo iteration 1: kl_not_zero: objective/kl is"):
        watch()
    assert stop_findings(tmp_path / "run") == ["kl_not_zero"]
    assert not (tmp_path / "run/ppo").exists()


def test_dropout_left_on_stops_the_run(watch, tmp_path, make_model, monkeypatch):
    """[14] The config of GPT-2 enables dropout. This test keeps it on, with the policy in train mode."""
    monkeypatch.setattr(load, "set_dropout_off", lambda model: None)  # noqa: ARG005
    monkeypatch.setattr(
        "rlhf_cli.ppo.setup.load_policy", lambda path, revision, **more: load_policy(path, revision, **more).train()
    )
    with pytest.raises(RunError, match=r"ppo iteration 1: ratio_not_one: .*[Dd]ropout"):
        watch(policy={"path": str(make_model("gpt2"))}, rollout={"stop_tokens": []})
    assert not (tmp_path / "run/ppo").exists()
