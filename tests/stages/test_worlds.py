"""Stages on several processes, as threads or real ones, whole and sharded, against one; test_bad_steps.py ends them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_cli.rollout import speaker
from rlhf_cli.rollout.sampling import sample
from support.tiny import STOP, tiny_model
from support.worlds import run_in_threads

SHARDED = {"distributed": {"shard": True}}
STEPS = {"training": {"minibatch_size": 5, "num_steps": 5}, "optimizer": {"eps": 1e-3}}
"""Five rows per step: three on one process and two on the other. The loss is divided by the tokens of both.

A large eps makes the size of a gradient visible in Adam's first steps.
"""
BEST = {"evaluation": {"every_steps": 2, "keep_best": True}}


@pytest.mark.parametrize(("stage", "more"), [("sft", {}), ("rm", {}), ("rm", {"members": 2})])
def test_two_processes_give_the_weights_and_figures_of_one(stage, more, pipeline, make_model, compare_processes):
    path = make_model("llama") if stage == "sft" else pipeline("llama") / "sft"
    compare_processes(stage, {"model": {"path": str(path)}, **STEPS, **more})


def test_the_samples_that_normalise_scores_are_shared_out(pipeline, write_config, monkeypatch, tmp_path) -> None:
    shares = []

    def counted(policy, prompts, *given, **options):
        shares.append(len(prompts))
        return sample(policy, prompts, *given, **options)

    monkeypatch.setattr(speaker, "sample", counted)
    changes = {"model": {"path": str(pipeline("llama") / "sft")}, "evaluation": {"num_normalization_samples": 5}}
    run_in_threads(2, "rm", write_config("rm", tmp_path, **changes))
    assert sorted(shares) == [2, 3]


# ------------------------------------------------------------------------------------- sharded (`distributed.shard`)


def same_files(one):
    """The sharded run of `compare_processes` has the files of the other one."""
    places = one, one.parents[1] / "two" / one.name
    files = [{str(path.relative_to(place)) for path in place.rglob("*")} for place in places]
    assert files[0] == files[1]


def test_a_sharded_run_is_the_run_of_one_process(make_model, compare_processes):
    """With layers that are recomputed in the backward pass."""
    changes = {"model": {"path": str(make_model("llama"))}, "gradient_checkpointing": True, **STEPS}
    same_files(compare_processes("sft", changes, SHARDED, forked=True))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{"r": 4}, {"r": 4, "save": "adapter", "dora": True}], ids=["merged", "adapter"])
def test_sharded_adapters_are_those_of_one_process(lora, make_model, compare_processes):
    changes = {"model": {"path": str(make_model("llama")), "lora": lora}, **STEPS, **BEST}
    same_files(compare_processes("sft", changes, SHARDED, forked=True))


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "lora"), [("llama", None), ("gpt2", None), ("llama", {"r": 4})])
def test_a_sharded_reward_model_has_the_scores_and_the_normalisation_of_one_process(
    architecture, lora, pipeline, compare_processes
):
    """The held-out rows don't divide evenly, and the SFT model is sampled from. GPT-2 gets a padding token."""
    changes = {"model": {"path": str(pipeline(architecture) / "sft"), "lora": lora}, **STEPS, **BEST}
    same_files(compare_processes("rm", changes, SHARDED, forked=True))


# ------------------------------------------------------------------------------------- PPO on four


@pytest.fixture(scope="module")
def model_of(tmp_path_factory, tokenizer) -> Callable[..., str]:
    """A function: family -> directory of a tiny random model. All families have one tokenizer."""

    def make(family: str, *, tied: bool) -> str:
        folder: Path = tmp_path_factory.mktemp(family)
        special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
        # Neither 2 nor 4 processes divide the vocabulary.
        tiny_model(family, **special, vocab_size=301, tie_word_embeddings=tied).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("distributed", "policy", "scorer"),
    [({}, {"family": "gpt2", "tied": True}, {"family": "llama", "tied": False}),
     (SHARDED, {"family": "qwen2", "tied": True}, {"family": "gpt2", "tied": True})],
    ids=["whole", "sharded"],
)  # fmt: skip
def test_four_processes_give_the_tokens_and_figures_of_one(
    distributed, policy, scorer, model_of, run_stage, tokenizer, compare_processes, tmp_path
):
    """Shares of one row and of two. Reward and value model are of another family than the policy."""
    rm = run_stage("rm", tmp_path, model={"path": model_of(**scorer)}, training={"num_steps": 1})
    changes = {
        "ppo": {"num_iterations": 3, "ppo_epochs": 1, "tokens_per_microbatch": 60},  # unequal numbers of passes
        "num_logged_samples": 8,
        "optimizer": {"eps": 1e-3},
        "policy": {"path": model_of(**policy)},
        "rewards": [{"type": "reward_model", "path": str(rm)}],
        "rollout": {"stop_tokens": tokenizer.convert_ids_to_tokens(sorted(STOP))},
    }
    compare_processes("ppo", changes, distributed, count=4, forked=True)
