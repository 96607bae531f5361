"""Shaping by replies of ref_policy, and limits on a source: known answers, and runs on one and on two processes.

tests/ppo/test_optimum.py compares the multiplier and the policy with those of the constrained optimum.
"""

from __future__ import annotations

import json
import math
import statistics

import pytest
import torch

from rlhf_cli.algorithms.score_transforms import log_sigmoid_score, next_lambda, preference_score
from rlhf_cli.config.loader import load_config
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.rewards import Limit
from rlhf_cli.errors import ConfigError, Interrupted
from rlhf_cli.health.running import Health
from rlhf_cli.ppo.scores import Limits
from rlhf_cli.processes.distributed import ALONE
from rlhf_cli.run.stage_run import StageRun
from support.paths import ROOT
from support.resume import stopping_after
from support.rewards import refused
from support.tiny import merged, read_jsonl

PAR = {"kind": "par", "num_references": 3}
LOG = {"kind": "log_sigmoid", "num_references": 2, "quantile": 0.5}


def test_the_sum_of_logs_is_the_log_of_being_good_by_all() -> None:
    scores, references = torch.randn(2, 5, dtype=torch.float64), torch.randn(2, 5, 4, dtype=torch.float64)
    good = [1 / (1 + torch.exp(r.median(1).values - s)) for s, r in zip(scores, references[:, :, :3], strict=True)]
    each = [log_sigmoid_score(s, r, quantile=0.5) for s, r in zip(scores, references[:, :, :3], strict=True)]
    torch.testing.assert_close(sum(each).exp(), good[0] * good[1])


def test_preference_as_reward_is_the_share_of_wins_of_far_scores() -> None:
    references = torch.tensor([[0.0, 100.0, 200.0, 300.0]])
    assert [preference_score(torch.tensor([x]), references).item() for x in (-99.0, 150.0, 999.0)] == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"shaping": {}}, "kind"),
        ({"shaping": {**PAR, "quantile": 0.5}}, "quantile does nothing with kind: par"),
        ({"shaping": {**PAR, "num_references": 0}}, "greater than 0"),
        ({"shaping": PAR, "limit": {"above": 0.0}}, "shaping does nothing with limit"),
        ({"type": "function", "function": "a.py:f", "per_token": True, "shaping": PAR}, "single tokens"),
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
    refused({"type": "reward_model", **reward}, message)


def test_refused_in_a_config(write_config, tmp_path) -> None:
    shaped = {"rewards": [{"type": "reward_model", "shaping": PAR}], "ppo": {"score_normalization": "reference"}}
    for changes, message in (
        (shaped, "measures scores before their shaping"),
        ({"rewards": [LENGTH]}, "every source has a limit"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(write_config("ppo", tmp_path, **changes), PPOConfig)


@pytest.fixture
def changes(pipeline):
    """An ensemble, a rule and a reward model, two of them shaped; the prompts of the third iteration are new."""
    root = pipeline("llama")
    return {
        "policy": {"path": str(root / "sft")},
        "rewards": [
            {"type": "ensemble", "members": [f"{root}/rm", f"{root}/rm"], "shaping": PAR, "weight": 2.0},
            {"type": "length", "unit": "characters", "max": 3, "shaping": LOG, "weight": 0.5},
            {"type": "reward_model", "path": f"{root}/rm"},
        ],
        "rollout": {"samples_per_prompt": 2},
        "ppo": {"num_iterations": 3, "rollout_batch_size": 6, "minibatch_size": 3, "kl_coef": 0.0},
        "optimizer": {"eps": 1e-3},
        "num_logged_samples": 6,
    }


def score(text: str) -> int:
    """By the rule of the config."""
    return -max(0, len(text) - 3)


ADAPTERS = {"policy": {"lora": {"r": 2}}, "value_model": {"lora": {"r": 2}}}


@pytest.mark.parametrize(
    "more", [{}, pytest.param(ADAPTERS, marks=pytest.mark.slow)], ids=["weights", "adapters, from the shards"]
)
def test_ppo_compares_with_the_references_on_one_and_on_two_processes(more, changes, compare_processes, tmp_path):
    sharded = {"distributed": {"shard": True}, "rollout": {"decoder": "sharded"}} if more else {}
    ppo = compare_processes("ppo", merged(changes, more), sharded, forked=bool(more))
    one, two = (read_jsonl(tmp_path / name / "ppo/references.jsonl") for name in ("one", "two"))
    assert [(row["number"], row["replies"]) for row in one] == [(row["number"], row["replies"]) for row in two]
    assert len(one) == 9
    assert all(len(row["replies"]) == len(row["scores"]["ensemble_0"]) == 3 for row in one)
    samples, replies = read_jsonl(ppo / "samples.jsonl"), {row["prompt"]: row["replies"][:2] for row in one}
    for row in read_jsonl(ppo / "metrics.jsonl"):
        own = [sample for sample in samples if sample["step"] == row["step"]]
        lengths = [(score(s["response"]), [score(text) for text in replies[s["prompt"]]]) for s in own]
        expected = statistics.fmean(-math.log(1 + math.exp(statistics.fmean(r) - s)) for s, r in lengths)
        assert row["reward/length_1_shaped"] == pytest.approx(expected, abs=1e-5)
        assert 0 < row["reward/ensemble_0_shaped"] < 1
        assert row["reward/length_1_shaped"] < 0
        raw = 2 * row["reward/ensemble_0"] + 0.5 * row["reward/length_1"] + row["reward/reward_model_2"]
        assert row["objective/score"] == pytest.approx(raw, abs=1e-5)
        penalty = 1 - row["response/eos_fraction"]
        shaped = 2 * row["reward/ensemble_0_shaped"] + 0.5 * row["reward/length_1_shaped"]
        assert row["objective/reward"] == pytest.approx(shaped + row["reward/reward_model_2"] - penalty, abs=1e-5)
    # In the first iteration the policy is ref_policy: its replies win half of the comparisons.
    assert read_jsonl(ppo / "metrics.jsonl")[0]["reward/ensemble_0_shaped"] == pytest.approx(0.5, abs=0.35)


def test_the_references_are_replies_of_the_reference_policy_to_the_uniforms_of_their_prompt(
    changes, run_stage, tmp_path
):
    """Whatever other prompts the run has: a longer run and another batch have the same replies."""
    short = merged(changes, {"rewards": changes["rewards"][1:], "policy": {"lora": {"r": 2}}})
    few = run_stage("ppo", tmp_path / "few", **merged(short, {"ppo": {"num_iterations": 1}}))
    many = run_stage("ppo", tmp_path / "many", **merged(short, {"ppo": {"rollout_batch_size": 12}}))
    rows = {row["number"]: row for row in read_jsonl(many / "references.jsonl")}
    found = read_jsonl(few / "references.jsonl")
    assert 0 < len(found) < len(rows)
    assert all(rows[row["number"]]["replies"] == row["replies"] for row in found)


def test_a_run_that_is_made_longer_samples_the_new_prompts_before_it_resumes(changes, run_stage, tmp_path, monkeypatch):
    changes = merged(changes, {"rewards": changes["rewards"][1:]})
    whole = run_stage("ppo", tmp_path / "whole", **changes)
    with monkeypatch.context() as patch:
        patch.setattr(StageRun, "finish_step", stopping_after(1))
        with pytest.raises(Interrupted):
            run_stage("ppo", tmp_path / "resumed", **merged(changes, {"ppo": {"num_iterations": 2}}))
    resumed = run_stage("ppo", tmp_path / "resumed", **changes)
    rows = [{row["number"]: row for row in read_jsonl(ppo / "references.jsonl")} for ppo in (whole, resumed)]
    assert len(rows[0]) == 9
    assert rows[0] == rows[1]


# --------------------------------------------------------------------------------------------------------------- limits


LENGTH = {"type": "length", "max": 3, "limit": {"above": -2.5, "learning_rate": 0.05}}


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


def test_ppo_with_a_limit_on_one_and_on_two_processes(pipeline, compare_processes) -> None:
    """The KL, the penalties and a score without a limit keep their units."""
    root = pipeline("llama")
    changes = {
        "policy": {"path": str(root / "sft")},
        "rewards": [{"type": "reward_model", "path": str(root / "rm")}, LENGTH],
        "ppo": {"num_iterations": 3, "rollout_batch_size": 6, "minibatch_size": 3, "missing_eos_penalty": 0.5},
        "optimizer": {"eps": 1e-3},
        "num_logged_samples": 6,
    }
    rows = read_jsonl(compare_processes("ppo", changes) / "metrics.jsonl")
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
