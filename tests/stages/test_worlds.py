"""SFT and RM on two processes, as threads, against one; test_bad_steps.py has what ends all of them."""

from __future__ import annotations

import pytest

from rlhf_cli.rollout import speaker
from rlhf_cli.rollout.sampling import sample
from rlhf_cli.run.artifacts import read_manifest
from support.compare import same_runs
from support.worlds import run_in_threads


@pytest.mark.parametrize(("stage", "more"), [("sft", {}), ("rm", {}), ("rm", {"members": 2})])
def test_two_processes_give_the_weights_and_figures_of_one(
    stage, more, pipeline, make_model, write_config, run_stage, tmp_path
):
    """Five rows per step: three on one process and two on the other. The loss is divided by what all have together.

    A large eps makes the size of a gradient visible in Adam's first steps.
    """
    path = make_model("llama") if stage == "sft" else pipeline("llama") / "sft"
    training = {"minibatch_size": 5, "num_steps": 5}
    changes = {"model": {"path": str(path)}, "training": training, "optimizer": {"eps": 1e-3}} | more
    run_stage(stage, tmp_path / "one", **changes)
    run_in_threads(2, stage, write_config(stage, tmp_path / "two", **changes))
    one, two = (tmp_path / name / stage for name in ("one", "two"))
    assert [read_manifest(folder).num_processes for folder in (one, two)] == [1, 2]
    same_runs(one, two)


def test_the_samples_that_normalise_scores_are_shared_out(pipeline, write_config, monkeypatch, tmp_path) -> None:
    shares = []

    def counted(policy, prompts, *given, **options):
        shares.append(len(prompts))
        return sample(policy, prompts, *given, **options)

    monkeypatch.setattr(speaker, "sample", counted)
    changes = {"model": {"path": str(pipeline("llama") / "sft")}, "evaluation": {"num_normalization_samples": 5}}
    run_in_threads(2, "rm", write_config("rm", tmp_path, **changes))
    assert sorted(shares) == [2, 3]
