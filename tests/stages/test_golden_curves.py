"""Metrics of whole runs on a tiny model, against stored curves: a refactoring must not change them.

The curves are rows of metrics.jsonl that this code wrote, not reference values from elsewhere. If a change is meant to
change them, write them again and say in the commit why:

    RLHF_WRITE_CURVES=1 python -m pytest tests/stages/test_golden_curves.py
"""

from __future__ import annotations

import json
import os

import pytest

from support.paths import OF_THE_MACHINE, TESTS
from support.tiny import read_jsonl

CURVES = TESTS / "golden" / "curves"
NOT_KEPT = (*OF_THE_MACHINE, "policy/sampler_gap", "policy/first_ratio_error")
"""Durations, and metrics that consist of rounding errors."""
TOLERANCE = 2e-3
"""Relative tolerance. Processors round differently, and a few steps of Adam turn 1e-7 into about 1e-4."""
FUNCTION = """
def letters(prompts, responses, rows):
    return [r.count("e") - 0.1 * len(r) for r in responses]
"""
GROUPS = {"rollout": {"samples_per_prompt": 4}}
RUNS = {
    "ppo": {},
    "ppo-adaptive-kl": {"ppo": {"kl_controller": "adaptive", "kl_target": 0.01, "kl_horizon": 40}},
    "ppo-penalty": {"ppo": {"objective": "penalty", "policy_kl_target": 0.001, "entropy_coef": 0.01}},
    "ppo-shared-value": {"value_model": {"init": "shared", "warmup_iterations": 1}},
    "ppo-replay": {"ppo": {"num_rollouts_per_update": 2, "dual_clip": 3.0, "clip_range_high": 0.28}},
    "monte-carlo-filters": {
        "ppo": {"advantage_estimator": "monte_carlo", "whiten_rewards": True},
        "rollout": {"top_k": 20, "top_p": 0.9, "min_new_tokens": 3},
    },
    "reinforce-pp": {"ppo": {"advantage_estimator": "reinforce_pp", "score_normalization": "running"}},
    "rloo-sequence-k2": {"ppo": {"advantage_estimator": "rloo", "kl_in": "loss"}, **GROUPS},
    "grpo": {"ppo": {"advantage_estimator": "grpo", "loss_aggregation": "sequence"}, **GROUPS},
    "dr-grpo-full-kl": {
        "ppo": {
            "advantage_estimator": "dr_grpo",
            "loss_aggregation": "constant",
            "kl_in": "loss",
            "kl_estimator": "full",
        },
        **GROUPS,
    },
}


def kept(rows):
    return [{key: value for key, value in row.items() if not key.startswith(NOT_KEPT)} for row in rows]


def check(name, rows):
    path = CURVES / f"{name}.jsonl"
    if os.environ.get("RLHF_WRITE_CURVES"):
        path.parent.mkdir(exist_ok=True)
        rounded = [{key: float(f"{value:.6g}") for key, value in row.items()} for row in kept(rows)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rounded), encoding="utf-8")
    expected = read_jsonl(path)
    assert len(rows) == len(expected)
    for actual, row in zip(kept(rows), expected, strict=True):
        assert actual.keys() == row.keys()
        wrong = {
            key: (actual[key], value)
            for key, value in row.items()
            if actual[key] != pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE * 1e-2)
        }
        assert not wrong, f"{name}, step {row['step']}: found, kept: {wrong}"


@pytest.mark.parametrize("stage", ["sft", "rm"])
def test_metrics_of_a_stage_equal_the_recorded_curve(stage, pipeline):
    check(stage, read_jsonl(pipeline("llama") / stage / "metrics.jsonl"))


@pytest.mark.parametrize("name", RUNS)
def test_metrics_of_ppo_equal_the_recorded_curve(name, pipeline, run_stage, tmp_path):
    root = pipeline("llama")
    reward = tmp_path / "reward.py"
    reward.write_text(FUNCTION, encoding="utf-8")
    rewards = [
        {"type": "reward_model", "path": str(root / "rm")},
        {"type": "function", "function": f"{reward}:letters", "weight": 0.5},
    ]
    changes = {
        "policy": {"path": str(root / "sft")},
        "rewards": rewards,
        "data": {"test": None, "test_fraction": 0},
        **RUNS[name],
        "ppo": {"num_iterations": 3, "microbatch_size": 3, **RUNS[name].get("ppo", {})},
    }
    run_stage("ppo", tmp_path, **changes)
    check(name, read_jsonl(tmp_path / "ppo/metrics.jsonl"))
