"""Several processes as threads: the harness itself, and SFT and RM on two processes against one."""

from __future__ import annotations

import threading

import pytest
import torch

from rlhf_cli.artifacts import read_manifest
from rlhf_cli.config.by_stage import CONFIGS
from rlhf_cli.config.loader import load_config
from rlhf_cli.errors import RunError
from rlhf_cli.evaluation import normalization
from rlhf_cli.processes import distributed
from rlhf_cli.rollout.sampling import sample
from support.compare import same_runs
from support.worlds import PROGRAMS, EndedError, in_each_process, run_in_threads


def test_processes_exchange_items_in_order_of_rank() -> None:
    def program(world):
        sums = world.sum_floats({"a": 1.0 + world.rank, "b": 10.0})
        total = world.sum(torch.tensor([world.rank, 1]))
        world.barrier()
        return world.gather(f"of {world.rank}"), sums, total.tolist(), world.first_failure("bad" * world.rank)

    results = in_each_process(3, program)
    assert results == [(["of 0", "of 1", "of 2"], {"a": 6.0, "b": 30.0}, [3, 3], "bad")] * 3


def test_a_process_that_ends_does_not_leave_the_others_waiting() -> None:
    def communicates_once_more(world):
        for _ in range(1 + world.rank):
            world.barrier()

    with pytest.raises(EndedError, match="process 1 waits for one that has ended"):
        in_each_process(2, communicates_once_more)

    def fails(world):
        if world.rank == 1:
            raise ValueError("of the second process")
        world.barrier()

    with pytest.raises(ValueError, match="of the second process"):
        in_each_process(2, fails)


@pytest.mark.parametrize("stage", ["sft", "rm"])
def test_two_processes_give_the_weights_and_figures_of_one(
    stage, pipeline, make_model, write_config, run_stage, tmp_path
):
    """Five rows per step: three on one process and two on the other. The loss is divided by what all have together.

    A large eps makes the size of a gradient visible in Adam's first steps.
    """
    path = make_model("llama") if stage == "sft" else pipeline("llama") / "sft"
    training = {"minibatch_size": 5, "num_steps": 5}
    changes = {"model": {"path": str(path)}, "training": training, "optimizer": {"eps": 1e-3}}
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

    monkeypatch.setattr(normalization, "sample", counted)
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
