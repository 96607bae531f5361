"""Ensembles of reward models: their score, in PPO with the members of a stage, sharded, and on a shared backbone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pydantic import TypeAdapter

from rlhf_cli.algorithms.score_transforms import pessimistic_score
from rlhf_cli.config.loader import load_config
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.rewards import Reward, named_rewards
from rlhf_cli.errors import ArtifactError
from rlhf_cli.plan.memory import Setting
from rlhf_cli.plan.origins import ModelOrigins
from rlhf_cli.plan.stages import models_of
from rlhf_cli.rewards.base import total_score
from rlhf_cli.rewards.sources import load_rewards
from support.rewards import batch, refused
from support.tiny import CPU, read_jsonl

SCORES = torch.tensor([[1.0, -2.0, 0.3], [0.5, 2.0, 0.3], [-0.7, 1.0, 0.3]])


@pytest.mark.parametrize("beta", [0.05, 0.5, 3.0])
def test_its_optimum_is_the_harmonic_mean_of_the_members_tilts(beta: float) -> None:
    """exp(score / beta) is what the policy with the best score - beta * KL multiplies the reference by."""
    tilts = (SCORES.double() / beta).exp()
    torch.testing.assert_close((pessimistic_score(SCORES.double(), beta) / beta).exp(), 1 / (1 / tilts).mean(0))


def test_between_the_lowest_score_and_the_mean() -> None:
    assert pessimistic_score(SCORES, 0.0).equal(SCORES.min(0).values)
    torch.testing.assert_close(pessimistic_score(SCORES, 1e-30), SCORES.min(0).values)
    torch.testing.assert_close(pessimistic_score(SCORES, torch.inf), SCORES.mean(0))
    torch.testing.assert_close(pessimistic_score(SCORES, 1e12), SCORES.mean(0))
    second_order = SCORES.mean(0) - SCORES.var(0, correction=0) / (2 * 100.0)
    torch.testing.assert_close(pessimistic_score(SCORES, 100.0), second_order, atol=2e-4, rtol=0)


def test_ppo_is_rewarded_by_the_members_of_its_run(pipeline, run_stage, write_config, tmp_path):
    sft = {"path": str(pipeline("llama") / "sft")}
    rm = run_stage("rm", tmp_path, model=sft, members=3)
    ensemble = {"type": "ensemble", "members": 3, "weight": 2.0}
    short = {"num_iterations": 1, "kl_coef": 0.3}
    ppo = run_stage("ppo", tmp_path, policy=sft, rewards=[ensemble], ppo=short)
    metrics = read_jsonl(ppo / "metrics.jsonl")[0]
    members = [metrics[f"reward/ensemble_{k}"] for k in range(3)]
    assert min(members) - 3 * metrics["reward/ensemble_std"] < metrics["reward/ensemble"] < sum(members) / 3
    assert metrics["reward/ensemble_std"] > 0
    assert metrics["objective/score"] == pytest.approx(2 * metrics["reward/ensemble"], abs=1e-5)

    config = load_config(write_config("ppo", tmp_path, policy=sft, rewards=[ensemble], ppo=short), PPOConfig)
    sources, _ = load_rewards(config.named_rewards, config.artifacts, None, CPU, "float32")
    samples = batch(["a reply", "another", "a third one"])
    found = total_score(sources, samples)
    each = torch.stack([found.each[f"ensemble_{k}"] for k in range(3)])
    torch.testing.assert_close(found.total, 2 * pessimistic_score(each, 0.3))
    torch.testing.assert_close(found.each["ensemble_std"], each.std(0))
    for beta, whole in (("mean", each.mean(0)), (1e12, each.mean(0)), (0, each.min(0).values)):
        ends = load_config(write_config("ppo", tmp_path, rewards=[ensemble | {"beta": beta}]), PPOConfig).named_rewards
        own = [replace(source, ensemble=named.ensemble) for source, named in zip(sources, ends, strict=True)]
        torch.testing.assert_close(total_score(own, samples).total, 2 * whole, atol=0, rtol=0 if beta != 1e12 else 1e-6)
    assert [str(path) for path, _ in list(config.inputs.values())[-3:]] == [
        str(rm),
        str(rm / "members/1"),
        str(rm / "members/2"),
    ]
    held = models_of(config, ModelOrigins({}), Setting(CPU))
    assert [one.name for one in held if one.name.startswith("reward")] == [f"reward model {k}" for k in (1, 2, 3)]
    with pytest.raises(ArtifactError, match="rm/members/3"):
        run_stage("ppo", tmp_path, policy=sft, rewards=[ensemble | {"members": 4}], ppo=short)


def test_sharded_members_on_two_processes(pipeline, compare_processes, run_stage, tmp_path):
    sft = {"path": str(pipeline("llama") / "sft")}
    rm = run_stage("rm", tmp_path, model=sft, members=2)
    changes = {
        "policy": sft,
        "rewards": [{"type": "ensemble", "members": [str(rm), str(rm / "members/1")], "beta": 0.0}],
        "ppo": {"num_iterations": 2, "rollout_batch_size": 6, "minibatch_size": 3},
        "optimizer": {"eps": 1e-3},
        "num_logged_samples": 6,
    }
    compare_processes("ppo", changes, {"distributed": {"shard": True}}, forked=True)


@pytest.mark.parametrize("members", [1, ["one"], [], 0])
def test_one_member_is_no_ensemble(members) -> None:
    refused({"type": "ensemble", "members": members}, "members")


def test_names_and_keys_of_members() -> None:
    rewards = TypeAdapter(list[Reward]).validate_python(
        [{"type": "length", "target": 3}, {"type": "ensemble", "name": "four", "members": 2, "on_error": "zero"}]
    )
    found = named_rewards(rewards, "runs/x", 0.02)
    assert [(one.key, one.name) for one in found] == [
        ("rewards.0", "length_0"),
        ("rewards.1.members.0", "four_0"),
        ("rewards.1.members.1", "four_1"),
    ]
    assert [getattr(one.reward, "path", "") for one in found] == ["", None, "runs/x/rm/members/1"]
    assert found[1].ensemble == ("four", 1.0, 0.02)
    assert found[2].reward.on_error == "zero"
