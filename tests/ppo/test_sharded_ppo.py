"""PPO with sharded models (`distributed.shard`) is the PPO of one process: the same responses, losses and weights."""

from __future__ import annotations

import pytest

from support.compare import same_runs, same_weights
from support.runs import run_forked
from support.tiny import merged, read_jsonl

SHARDED = {"distributed": {"shard": True}}
LEARNS = {
    "ppo": {"num_iterations": 3, "rollout_batch_size": 6, "minibatch_size": 3, "microbatch_size": 2},
    "optimizer": {"eps": 1e-3},
    "num_logged_samples": 6,
    "evaluation": {"num_prompts": 5, "num_examples": 5},
}
"""Three rows a minibatch on two processes: one makes two passes, the other one."""
ONE_ITERATION = {"ppo": {"num_iterations": 1, "rollout_batch_size": 6, "minibatch_size": 6}}


@pytest.fixture
def compare(pipeline, write_config, run_stage, tmp_path):
    """A function: run PPO whole on one process, and sharded on `count`; compare everything that they write."""

    def run(changes, count=2, sharded=None, per_node=None):
        root = pipeline("llama")
        changes = merged(
            {
                "policy": {"path": str(root / "sft")},
                "rewards": [{"type": "reward_model", "path": str(root / "rm")}],
                **LEARNS,
            },
            changes,
        )
        run_stage("ppo", tmp_path / "one", **changes)
        config = write_config("ppo", tmp_path / "two", **merged(changes, sharded or SHARDED))
        run_forked(count, "ppo", config, per_node)
        one, two = tmp_path / "one/ppo", tmp_path / "two/ppo"
        same_runs(one, two)
        return one, two

    return run


def test_sharded_ppo_is_the_ppo_of_one_process(compare):
    """Policy, reference, value model and reward model are divided; scores are normalised by 17 samples in two chunks
    on one process and one on the other."""
    compare({"ppo": {"score_normalization": "reference", "num_reference_samples": 17, "ema_decay": 0.9}})


FROM_SHARDS = {"distributed": {"shard": True}, "rollout": {"decoder": "sharded"}}
OFFLOADED = {"distributed": {"shard": True, "offload": True}}
CASES = {
    "lora": ({"policy": {"lora": {"r": 4}}, "value_model": {"lora": {"r": 4}}}, SHARDED),
    "replay": ({"ppo": {"num_rollouts_per_update": 2, "kl_in": "loss", "entropy_coef": 0.01}}, SHARDED),
    "grpo": ({"rollout": {"samples_per_prompt": 3, "top_k": 20}, "ppo": {"advantage_estimator": "grpo"}}, SHARDED),
    "some whole": ({}, {"distributed": {"shard": True, "keep_whole": ["policy", "rewards"]}}),
    "sampled from the shards": ({"rollout": {"max_live_rows": 2}, "evaluation": {"num_prompts": 1}}, FROM_SHARDS),
    "sampled from the shards, lora": ({"policy": {"lora": {"r": 4}}, "value_model": {"lora": {"r": 4}}}, FROM_SHARDS),
    "rows on the CPU": ({}, OFFLOADED),
    "sampled from rows on the CPU": ({}, merged(OFFLOADED, FROM_SHARDS)),
    "offload": ({}, {**SHARDED, "offload": ["optimizer", "frozen"]}),
    "policy alone": ({}, {"distributed": {"shard": True, "keep_whole": ["ref_policy", "value_model", "rewards"]}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_sharded_ppo_is_the_ppo_of_one_process_with(name, compare):
    changes, sharded = CASES[name]
    compare(changes, sharded=sharded)


@pytest.mark.slow
def test_the_copy_that_samples_is_exact_in_bfloat16(pipeline, write_config, run_stage, tmp_path):
    """Its weights are bfloat16 numbers in the first rollout."""
    root = pipeline("llama")
    changes = merged(LEARNS, {"policy": {"path": str(root / "sft")}, "precision": "bfloat16"})
    changes = merged(changes, {"rewards": [{"type": "reward_model", "path": str(root / "rm")}], **ONE_ITERATION})
    run_stage("ppo", tmp_path / "one", **changes)
    run_forked(2, "ppo", write_config("ppo", tmp_path / "two", **merged(changes, SHARDED)))
    one, two = (read_jsonl(tmp_path / name / "ppo/samples.jsonl") for name in ("one", "two"))
    assert len(one) == 6
    assert [row["response"] for row in one] == [row["response"] for row in two]


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["auto", "sharded"])
def test_two_machines_that_hold_the_same_shards(compare, pipeline, decoder):
    """`hybrid`: two processes of each machine divide the models. Two have no row of a minibatch. Without a copy of the
    policy the reference policy is sampled from its shards, too."""
    compare(
        {
            "ref_policy": {"path": str(pipeline("llama") / "sft")},
            "ppo": {
                "rollout_batch_size": 8,
                "minibatch_size": 4,
                "microbatch_size": 1,
                "score_normalization": "reference",
                "num_reference_samples": 17,
                "ema_decay": 0.9,
            },
        },
        count=4,
        sharded={"distributed": {"shard": "hybrid"}, "rollout": {"decoder": decoder}},
        per_node=2,
    )


FAILS = """
import os
calls = 0

def score(prompts, responses, rows):
    global calls
    calls += 1
    if os.path.exists("{flag}") and calls == 4:  # one evaluation and two iterations were scored
        raise ValueError("no more")
    return [len(response) / 10 for response in responses]
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_sharded_run_of_two_processes_resumes_on_another_number(pipeline, write_config, run_stage, tmp_path, count):
    """With moments, the moving average, recent rollouts and score statistics."""
    root, flag = pipeline("llama"), tmp_path / "flag"
    (tmp_path / "reward.py").write_text(FAILS.format(flag=flag))
    changes = merged(
        {
            "policy": {"path": str(root / "sft")},
            "rewards": [
                {"type": "reward_model", "path": str(root / "rm")},
                {"type": "function", "function": f"{tmp_path}/reward.py:score"},
            ],
            **LEARNS,
        },
        {
            "ppo": {
                "rollout_batch_size": 8,
                "minibatch_size": 4,
                "ema_decay": 0.9,
                "num_rollouts_per_update": 2,
                "score_normalization": "running",
            },
            "checkpoints": {"every_steps": 1},
        },
    )
    run_stage("ppo", tmp_path / "one", **changes)
    flag.touch()
    config = write_config("ppo", tmp_path / "two", **merged(changes, SHARDED))
    with pytest.raises(AssertionError, match="no more"):
        run_forked(2, "ppo", config)
    flag.unlink()
    [*_, newest] = sorted((tmp_path / "two/.ppo.checkpoints").glob("step-*"))
    assert newest.name == "step-00000002"
    assert len(list(newest.glob("state-*-of-00002.safetensors"))) == 2
    run_forked(count, "ppo", config)
    assert len(read_jsonl(tmp_path / "two/ppo/metrics.jsonl")) == 3
    same_weights(tmp_path / "one/ppo", tmp_path / "two/ppo")
