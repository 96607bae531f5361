"""PPO with sharded models (`distributed.shard`) is the PPO of one process: the same responses, losses and weights."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_cli.errors import RewardError
from rlhf_cli.ppo import scores
from rlhf_cli.ppo.scores import or_failure
from rlhf_cli.processes import distributed, microbatches
from rlhf_cli.rewards import base, models
from rlhf_cli.rewards.base import Samples
from rlhf_cli.rewards.models import RewardModel
from support.compare import same_runs, same_weights
from support.runs import run_forked
from support.tiny import merged, read_jsonl
from support.worlds import in_each_process

SHARDED = {"distributed": {"shard": True}}
LEARNS = {
    "ppo": {"num_iterations": 3, "rollout_batch_size": 6, "minibatch_size": 3, "microbatch_size": 2},
    "optimizer": {"eps": 1e-3},
    "num_logged_samples": 6,
    "evaluation": {"num_prompts": 5, "num_examples": 5},
}
"""Three rows a minibatch on two processes: one makes two passes, the other one."""


@pytest.fixture(scope="module")
def whole(run_stage, tmp_path_factory):
    """A function: config changes -> the PPO run of one process, made once."""
    runs: dict[str, Any] = {}

    def run(changes):
        key = json.dumps(changes, sort_keys=True)
        if key not in runs:
            runs[key] = run_stage("ppo", tmp_path_factory.mktemp("one"), **changes)
        return runs[key]

    return run


@pytest.fixture
def learns(pipeline):
    """LEARNS with the policy and the reward of a finished pipeline."""
    root = pipeline("llama")
    rewards = [{"type": "reward_model", "path": str(root / "rm")}]
    return {"policy": {"path": str(root / "sft")}, "rewards": rewards, **LEARNS}


@pytest.fixture
def compare(learns, write_config, whole, tmp_path):
    """A function: run PPO whole on one process, and sharded on `count`; compare everything that they write."""

    def run(changes, count=2, sharded=None, per_node=None):
        changes = merged(learns, changes)
        one = whole(changes)
        config = write_config("ppo", tmp_path, **merged(changes, sharded or SHARDED))
        run_forked(count, "ppo", config, per_node)
        same_runs(one, tmp_path / "ppo")
        return one

    return run


def test_sharded_ppo_is_the_ppo_of_one_process(compare):
    """Policy, reference, value model and reward model are sharded; scores are normalised by 17 samples in two chunks
    on one process and one on the other. Both know how unfamiliar the replies are."""
    scores = {"score_normalization": "reference", "num_reference_samples": 17, "ema_decay": 0.9}
    one = compare({"ppo": scores, "data": {"test": {"limit": 24}}, "evaluation": {"num_prompts": 24}})
    assert all("response/unfamiliarity" in row for row in read_jsonl(one / "metrics.jsonl"))


FROM_SHARDS = {"distributed": {"shard": True}, "rollout": {"decoder": "sharded"}}
OFFLOADED = {"distributed": {"shard": True, "offload": True}}
CASES = {
    "lora, offload": (
        {"policy": {"lora": {"r": 4}}, "value_model": {"lora": {"r": 4}}},
        {**SHARDED, "offload": ["optimizer", "frozen"]},
    ),
    "replay, value head on the policy": (
        {
            "ppo": {"num_rollouts_per_update": 2, "kl_in": "loss", "entropy_coef": 0.01},
            "value_model": {"init": "shared", "warmup_iterations": 1},
        },
        SHARDED,
    ),
    "grpo, rows on the CPU": (
        {"rollout": {"samples_per_prompt": 3, "top_k": 20}, "ppo": {"advantage_estimator": "grpo"}},
        OFFLOADED,
    ),
    "some whole": ({}, {"distributed": {"shard": True, "keep_whole": ["policy", "rewards"]}}),
    "sampled from the shards": ({"rollout": {"max_live_rows": 2}, "evaluation": {"num_prompts": 1}}, FROM_SHARDS),
    "sampled from rows on the CPU": ({}, merged(OFFLOADED, FROM_SHARDS)),
    "policy alone": ({}, {"distributed": {"shard": True, "keep_whole": ["ref_policy", "value_model", "rewards"]}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_sharded_ppo_is_the_ppo_of_one_process_with(name, compare):
    changes, sharded = CASES[name]
    compare(changes, sharded=sharded)


@pytest.mark.slow
def test_the_copy_that_samples_is_exact_in_bfloat16(learns, write_config, run_stage, tmp_path):
    """Its weights are bfloat16 numbers in the first rollout."""
    one_iteration = {"num_iterations": 1, "rollout_batch_size": 6, "minibatch_size": 6}
    changes = merged(learns, {"precision": "bfloat16", "ppo": one_iteration})
    run_stage("ppo", tmp_path / "one", **changes)
    run_forked(2, "ppo", write_config("ppo", tmp_path / "two", **merged(changes, SHARDED)))
    one, two = (read_jsonl(tmp_path / name / "ppo/samples.jsonl") for name in ("one", "two"))
    assert len(one) == 6
    assert [row["response"] for row in one] == [row["response"] for row in two]


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["auto", "sharded"])
def test_two_machines_that_hold_the_same_shards(compare, pipeline, decoder):
    """`hybrid`: two processes of each machine shard the models. Two have no row of a minibatch. Without a copy of the
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


@pytest.mark.parametrize("fails", [False, True])
def test_processes_meet_after_each_scored_rollout_and_fail_together(monkeypatch, fails):
    """Nine prompts, two at a time: three rollouts on one process, two on the other. The next rollout begins with a
    collective operation of all processes, so it must not begin while one still scores."""
    events: list[tuple[str, int]] = []
    worlds: dict[int, Any] = {}

    def log(event):
        events.append((event, worlds[threading.get_ident()].rank))

    def ask(*_):
        log("scored")
        if fails and worlds[threading.get_ident()].rank == 1:
            raise RewardError("no answer")
        return [], SimpleNamespace()

    for module in (microbatches, scores):
        monkeypatch.setattr(module, "is_sharded", lambda _: True)
    monkeypatch.setattr(microbatches, "most", lambda count: max(worlds[threading.get_ident()].gather(count)))
    monkeypatch.setattr(scores, "collect", lambda *_, **__: log("sampled") or SimpleNamespace(responses=[], prompts=[]))
    monkeypatch.setattr(scores, "ask_rewards", ask)

    def program(world):
        worlds[threading.get_ident()] = world
        config = SimpleNamespace(
            ppo=SimpleNamespace(rollout_batch_size=4), precision="float32", rollout=SimpleNamespace(max_live_rows=None)
        )
        setup: Any = SimpleNamespace(config=config, world=world, sampling=None, tokenizer=None, budget=None, rewards=[])
        models: Any = SimpleNamespace(with_weights=[torch.nn.Module()])
        prompts: Any = range(9)
        uniforms = torch.zeros(9, 1)
        try:
            return len(scores.sampled_and_scored(setup, models, prompts, uniforms, lambda *_: [1], with_kl=False))
        except RewardError as error:
            return str(error)

    results = in_each_process(2, program)
    steps = [sorted(event for event, rank in events if rank == r) for r in (0, 1)]
    if fails:
        assert [result.partition(", ")[2] for result in results] == ["process 1 of 2: no answer"] * 2
        assert steps == [["sampled", "scored"]] * 2
        return
    assert results == [3, 2]
    assert steps == [["sampled"] * 3 + ["scored"] * 3] * 2
    sampled, scored = ([i for i, (event, _) in enumerate(events) if event == name] for name in ("sampled", "scored"))
    assert sampled[2] > scored[1], "both have scored the first rollout before one samples the second"
    assert sampled[4] > scored[3]


def test_processes_fail_together_if_the_first_of_two_sharded_reward_models_fails_on_one(monkeypatch):
    """The others then make the passes of the second one, which are collective operations."""
    worlds: dict[int, Any] = {}

    def world():
        return worlds[threading.get_ident()]

    class Fails(RewardModel):
        def _sequences(self, samples):  # noqa: ARG002
            if self.name == "first" and world().rank == 1:
                raise RewardError("its chat template failed")
            return [0], [[1]]

    def passes(model, sequences, *_, **__):
        assert world().gather(id(model)) == [id(model)] * 2, "all processes make the passes of the same model"
        return torch.zeros(len(sequences)), None

    monkeypatch.setattr(models, "is_sharded", lambda _: True)
    monkeypatch.setattr(models, "scores_and_features", passes)
    settings: Any = {
        "tokenizer": SimpleNamespace(eos_token=None),
        "reads_policy_tokens": False,
        "reads_prompt": True,
        "template": "chat",
    }
    settings |= {"label": 0, "as_probability": False, "mean": 0.0, "std": 1.0, "precision": "float32"}
    rewards = [Fails(name=name, model=torch.nn.Module(), **settings) for name in ("first", "second")]

    saved = []

    def program(this):
        worlds[threading.get_ident()] = this
        distributed.at_step("ppo step 7")
        with pytest.raises(RewardError, match=r"^ppo step 7, process 1 of 2: its chat template failed$"):
            or_failure(
                this,
                lambda: or_failure(this, lambda: base.total_score(rewards, Samples([], ["a"], [], [], [], []))),
                save=lambda: saved.append(this.rank),
            )

    in_each_process(2, program)
    assert sorted(saved) == [0, 1]


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
def test_a_sharded_run_of_two_processes_resumes_on_four(learns, write_config, run_stage, tmp_path):
    """With moments, the moving average, recent rollouts and score statistics."""
    flag = tmp_path / "flag"
    (tmp_path / "reward.py").write_text(FAILS.format(flag=flag))
    changes = merged(
        learns,
        {
            "rewards": [*learns["rewards"], {"type": "function", "function": f"{tmp_path}/reward.py:score"}],
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
    run_forked(4, "ppo", config)
    assert len(read_jsonl(tmp_path / "two/ppo/metrics.jsonl")) == 3
    same_weights(tmp_path / "one/ppo", tmp_path / "two/ppo")
