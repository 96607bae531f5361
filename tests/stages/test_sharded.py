"""Sharded models (`distributed.shard`) on processes of their own: the result of one process that holds everything."""

from __future__ import annotations

import pytest

from rlhf_cli.run.artifacts import read_manifest
from support.compare import same_runs
from support.runs import run_forked

SHARDED = {"distributed": {"shard": True}}
STEPS = {"training": {"minibatch_size": 5, "num_steps": 5}, "optimizer": {"eps": 1e-3}}
BEST = {"evaluation": {"every_steps": 2, "keep_best": True}}


def same_results(stage, changes, write_config, run_stage, root):
    """Run a stage on one process and sharded on two; assert the same figures in each row, files and weights."""
    run_stage(stage, root / "one", **changes)
    run_forked(2, stage, write_config(stage, root / "two", **changes, **SHARDED))
    one, two = root / "one" / stage, root / "two" / stage
    same_runs(one, two)
    files = [{str(path.relative_to(place)) for path in place.rglob("*")} for place in (one, two)]
    assert files[0] == files[1]
    assert read_manifest(two).num_processes == 2


def test_a_sharded_run_is_the_run_of_one_process(make_model, write_config, run_stage, tmp_path):
    """With layers that are recomputed in the backward pass."""
    changes = {"model": {"path": str(make_model("llama"))}, "gradient_checkpointing": True, **STEPS}
    same_results("sft", changes, write_config, run_stage, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{"r": 4}, {"r": 4, "save": "adapter", "dora": True}], ids=["merged", "adapter"])
def test_sharded_adapters_are_those_of_one_process(lora, make_model, write_config, run_stage, tmp_path):
    changes = {"model": {"path": str(make_model("llama")), "lora": lora}, **STEPS, **BEST}
    same_results("sft", changes, write_config, run_stage, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "lora"), [("llama", None), ("gpt2", None), ("llama", {"r": 4})])
def test_a_sharded_reward_model_has_the_scores_and_the_normalisation_of_one_process(
    architecture, lora, pipeline, write_config, run_stage, tmp_path
):
    """The held-out rows don't divide evenly, and the SFT model is sampled from. GPT-2 gets a padding token."""
    changes = {"model": {"path": str(pipeline(architecture) / "sft"), "lora": lora}, **STEPS, **BEST}
    same_results("rm", changes, write_config, run_stage, tmp_path)
