"""SFT and RM on two processes, as threads, against one; and what ends all processes together."""

from __future__ import annotations

import threading

import pytest
import torch

from rlhf_cli.config.by_stage import CONFIGS
from rlhf_cli.config.loader import load_config
from rlhf_cli.errors import RunError
from rlhf_cli.processes import distributed
from rlhf_cli.rollout import speaker
from rlhf_cli.rollout.sampling import sample
from rlhf_cli.run.artifacts import read_manifest
from support.compare import same_runs
from support.worlds import PROGRAMS, in_each_process, run_in_threads


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


OVERFLOWS = {"sft": "target_logprobs", "rm": "pairwise_loss", "ppo": "policy_loss"}
"""The function of each stage whose result is infinite on one process."""


@pytest.mark.parametrize("stage", PROGRAMS)
def test_a_loss_that_is_infinite_on_one_process_stops_all(stage, pipeline, write_config, monkeypatch, tmp_path):
    """With the same message, and no process waits for another. Only the second process has such a loss."""
    program, name = PROGRAMS[stage], OVERFLOWS[stage]
    computed = getattr(program, name)
    worlds = {}

    def overflows(*args, **kwargs):
        found = computed(*args, **kwargs)
        if worlds[threading.get_ident()].is_main:
            return found
        return (found[0] * torch.inf, *found[1:]) if isinstance(found, tuple) else found * torch.inf

    root = pipeline("llama")
    monkeypatch.setattr(program, name, overflows)
    monkeypatch.setattr(distributed, "start", lambda *_: worlds[threading.get_ident()])
    changes = {"policy": {"path": str(root / "sft")}} if stage == "ppo" else {"model": {"path": str(root / "sft")}}
    if stage == "ppo":
        changes["rewards"] = [{"type": "reward_model", "path": str(root / "rm")}]
    config = write_config(stage, tmp_path, **changes)

    def run(world):
        worlds[threading.get_ident()] = world
        with pytest.raises(RunError) as stopped:
            program.run(load_config(config, CONFIGS[stage]), quiet=True)
        return str(stopped.value)

    one, two = in_each_process(2, run)
    assert "the step was skipped" in one
    assert one == two
