"""Shaping by replies of ref_policy: known answers, the references of a run, on one and two processes, after a stop."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from rlhf_cli.algorithms.score_transforms import log_sigmoid_score, preference_score
from rlhf_cli.config.loader import load_config
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.rewards import Reward
from rlhf_cli.errors import ConfigError, Interrupted
from rlhf_cli.run.stage_run import StageRun
from support.compare import same_runs
from support.resume import stopping_after
from support.runs import run_forked
from support.tiny import merged, read_jsonl
from support.worlds import run_in_threads

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
    ],
)
def test_refused(reward, message) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(Reward).validate_python({"type": "reward_model", **reward})


def test_refused_with_scores_that_are_normalised_before(write_config, tmp_path) -> None:
    changes = {"rewards": [{"type": "reward_model", "shaping": PAR}], "ppo": {"score_normalization": "reference"}}
    with pytest.raises(ConfigError, match="measures scores before their shaping"):
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
    "more",
    [
        {},
        pytest.param(merged(ADAPTERS, {"rollout": {"decoder": "sharded"}}), marks=pytest.mark.slow),
    ],
    ids=["weights", "adapters, from the shards"],
)
def test_ppo_compares_with_the_references_on_one_and_on_two_processes(more, changes, write_config, run_stage, tmp_path):
    one_process = merged(more, {"rollout": {"decoder": "auto"}})
    ppo = run_stage("ppo", tmp_path / "one", **merged(changes, one_process))
    sharded = {"distributed": {"shard": True}} if more else {}
    start = run_forked if sharded else run_in_threads
    start(2, "ppo", write_config("ppo", tmp_path / "two", **merged(merged(changes, more), sharded)))
    same_runs(ppo, tmp_path / "two/ppo")
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
