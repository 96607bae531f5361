"""Limits on a source: what the config refuses, the multiplier, and PPO on one and on several processes.

tests/ppo/test_optimum.py compares the multiplier and the policy with those of the constrained optimum.
"""

from __future__ import annotations

import json

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from rlhf_cli.algorithms.score_transforms import next_lambda
from rlhf_cli.config.loader import load_config
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.rewards import Limit, Reward
from rlhf_cli.errors import ConfigError
from rlhf_cli.health.running import Health
from rlhf_cli.ppo.scores import Limits
from rlhf_cli.processes.distributed import ALONE
from support.compare import same_runs
from support.paths import ROOT
from support.tiny import read_jsonl
from support.worlds import run_in_threads

LENGTH = {"type": "length", "max": 3, "limit": {"above": -2.5, "learning_rate": 0.05}}


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"limit": {}}, "above or below"),
        ({"limit": {"above": 1.0, "below": 2.0}}, "above or below"),
        ({"limit": {"above": 1.0}, "weight": 2.0}, "weight does nothing with limit"),
        ({"limit": {"above": 1.0, "learning_rate": 0.0}}, "greater than 0"),
        ({"type": "function", "function": "a.py:f", "per_token": True, "limit": {"above": 1.0}}, "single tokens"),
        ({"path": "x", "steps": {}, "limit": {"above": 1.0}}, "single tokens"),
        ({"type": "ensemble", "members": 2, "limit": {"above": 1.0}, "weight": 2.0}, "weight does nothing"),
    ],
)
def test_refused(reward, message) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(Reward).validate_python({"type": "reward_model", **reward})


def test_limits_alone_are_no_score(write_config, tmp_path) -> None:
    with pytest.raises(ConfigError, match="every source has a limit"):
        load_config(write_config("ppo", tmp_path, rewards=[LENGTH]), PPOConfig)


def test_the_multiplier_stays_within_its_range() -> None:
    """The unit is the standard deviation of the first scores, 1 if they are all equal."""
    limits = Limits({"a": Limit(above=0.5), "b": Limit(below=0.5)})
    limits.measure({"a": torch.tensor([1.0, -1.0]), "b": torch.tensor([2.0])}, ALONE)
    limits.measure({"a": torch.tensor([9.0, -1.0]), "b": torch.tensor([2.0, 5.0])}, ALONE)
    seen = []
    for _ in range(50):
        limits.adapt({"reward/a": -9.0, "reward/b": -9.0, "policy/grad_norm": 1.0})
        seen.append(dict(limits.lambdas))
    assert limits.figures() == {"lambda/a": 1000.0, "lambda/b": pytest.approx(0.0082, abs=1e-4)}
    assert seen[0] == {"a": next_lambda(1.0, 9.5, learning_rate=0.3), "b": next_lambda(1.0, -9.5, learning_rate=0.3)}
    before = dict(limits.lambdas)
    limits.adapt({"reward/a": 9.0, "reward/b": 9.0})  # the value model warms up
    assert limits.lambdas == before


def test_a_limit_that_holds_at_the_start_hardly_counts() -> None:
    limits = Limits({"held": Limit(above=0.5), "missed": Limit(below=0.5)})
    limits.measure({"held": torch.tensor([0.0, 2.0]), "missed": torch.tensor([0.0, 2.0])}, ALONE)
    assert limits.lambdas == {"held": 0.1, "missed": 1.0}
    limits.measure({"held": torch.tensor([-9.0]), "missed": torch.tensor([-9.0])}, ALONE)
    assert limits.lambdas == {"held": 0.1, "missed": 1.0}


def test_both_sides_and_the_dense_share() -> None:
    limits = Limits({"a": Limit(above=1.0), "b": Limit(below=1.0)})
    limits.lambdas, limits.units = {"a": 2.0, "b": 1.0}, {"a": 0.5, "b": 4.0}
    found = limits.apply(torch.tensor([4.0]), {"a": torch.tensor([0.0]), "b": torch.tensor([3.0])})
    assert found.tolist() == [(4.0 - 2.0 * 1.0 / 0.5 - 1.0 * 2.0 / 4.0) / 4]
    assert limits.score_share == 0.25


@pytest.mark.parametrize(("mean", "lam", "is_missed"), [(-3.0, 150.0, True), (-3.0, 99.0, False), (-2.0, 150.0, False)])
def test_health_says_that_a_limit_cannot_be_met(mean, lam, is_missed) -> None:
    limits = [None, {"above": -2.5}, {"below": 2.0}]
    rewards = json.dumps([{"type": "length", "target": 9, "limit": limit} for limit in limits])
    config = load_config(ROOT / "configs/hh/ppo.yaml", PPOConfig, [f"rewards={rewards}"])
    metrics = {"reward/length_1": mean, "lambda/length_1": lam, "reward/length_2": 1.0, "lambda/length_2": lam}
    found = Health(config).check(40, metrics)
    assert [one.name for one in found] == (["limit_missed"] if is_missed else [])
    assert all("length_1 is -3, must be above -2.5" in one.message and "length_2" not in one.message for one in found)


def test_ppo_with_a_limit_on_one_and_on_two_processes(pipeline, write_config, run_stage, tmp_path) -> None:
    """The KL, the penalties and a score without a limit keep their units."""
    root = pipeline("llama")
    changes = {
        "policy": {"path": str(root / "sft")},
        "rewards": [{"type": "reward_model", "path": str(root / "rm")}, LENGTH],
        "ppo": {"num_iterations": 3, "rollout_batch_size": 6, "minibatch_size": 3, "missing_eos_penalty": 0.5},
        "optimizer": {"eps": 1e-3},
        "num_logged_samples": 6,
    }
    run_stage("ppo", tmp_path / "one", **changes)
    run_in_threads(2, "ppo", write_config("ppo", tmp_path / "two", **changes))
    same_runs(tmp_path / "one/ppo", tmp_path / "two/ppo")
    rows = read_jsonl(tmp_path / "one/ppo/metrics.jsonl")
    # The unit is known from the first iteration, whose excess is the only unknown.
    lam, unit = 1.0, None
    for row in rows:
        assert row["lambda/length_1"] == pytest.approx(lam)
        assert row["objective/score"] == pytest.approx(row["reward/reward_model_0"], abs=1e-6)
        excess = -2.5 - row["reward/length_1"]
        penalties = 0.5 * (1 - row["response/eos_fraction"]) + row["objective/kl_coef"] * row["objective/kl"]
        unit = unit or excess / (row["objective/score"] - (1 + lam) * (row["objective/reward"] + penalties))
        mixed = (row["objective/score"] - lam * excess / unit) / (1 + lam)
        assert row["objective/reward"] == pytest.approx(mixed - penalties, abs=1e-4)
        lam = next_lambda(lam, excess / unit, learning_rate=0.05)
    assert lam != 1.0
