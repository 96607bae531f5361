"""Sharded models (`distributed.shard`) on processes of their own: the result of one process that holds everything."""

from __future__ import annotations

import pytest

from rlhf_cli.artifacts import read_manifest
from support.compare import same_weights
from support.runs import run_forked
from support.tiny import read_jsonl

SHARDED = {"distributed": {"shard": True}}
STEPS = {"training": {"minibatch_size": 5, "num_steps": 5}, "optimizer": {"eps": 1e-3}}


def same_run(one, two, stage, tolerance=1e-5):
    """Assert that two runs have the same losses and figures in each row, and the same weights."""
    same_weights(one / stage / "model", two / stage / "model", tolerance)
    for a, b in zip(*(read_jsonl(root / stage / "metrics.jsonl") for root in (one, two)), strict=True):
        for key in a:
            if key.startswith(("loss/", f"{stage}/", "eval/")):
                assert b[key] == pytest.approx(a[key], rel=tolerance, abs=tolerance), key


def test_a_sharded_run_is_the_run_of_one_process(make_model, write_config, run_stage, tmp_path):
    changes = {"model": {"path": str(make_model("llama"))}, **STEPS}
    run_stage("sft", tmp_path / "one", **changes)
    run_forked(2, "sft", write_config("sft", tmp_path / "two", **changes, **SHARDED))
    same_run(tmp_path / "one", tmp_path / "two", "sft")
    assert read_manifest(tmp_path / "two" / "sft").num_processes == 2


@pytest.mark.slow
def test_a_sharded_reward_model_has_the_scores_and_the_normalisation_of_one_process(
    pipeline, write_config, run_stage, tmp_path
):
    """The rows of a step and the held-out rows don't divide evenly, and the SFT model is sampled from."""
    changes = {"model": {"path": str(pipeline("llama") / "sft")}, **STEPS}
    run_stage("rm", tmp_path / "one", **changes)
    run_forked(2, "rm", write_config("rm", tmp_path / "two", **changes, **SHARDED))
    same_run(tmp_path / "one", tmp_path / "two", "rm")
    one, two = (read_manifest(tmp_path / name / "rm").metrics for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-4, abs=1e-5)
