"""PPO with another engine: the seam, its weights on advantages, staleness, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.errors import ConfigError, RunError
from rlhf_cli.models.load import load_policy
from rlhf_cli.rollout import engine as engine_module
from rlhf_cli.rollout.engine import require_engine
from support.engines import CopyEngine, fake_vllm
from support.oracles import check_update_batch, slow_importance
from support.setup import ALONE, config_of
from support.tiny import merged

ENGINE = {"rollout": {"engine": "vllm"}}


@pytest.fixture
def copied(monkeypatch):
    """`rollout.engine: vllm` gives a copy of the policy on the CPU, with the given faults. Returns the engines used."""
    engines = []

    def use(**faults):
        def new_engine(config, policy, dtype, longest):
            assert longest > config.rollout.max_new_tokens
            engines.append(CopyEngine(policy, dtype, **faults))
            return engines[-1]

        monkeypatch.setattr(engine_module, "new_engine", new_engine)
        monkeypatch.setattr(engine_module, "require_engine", lambda *_: None)
        return engines

    return use


def test_another_engine_draws_what_the_policy_draws(watch, copied):
    copied()
    own, run = watch("own"), watch("copy", **ENGINE)
    assert [[r.ids for r in rollout.responses] for rollout in run.rollouts] == [
        [r.ids for r in rollout.responses] for rollout in own.rollouts
    ]
    check_update_batch(run)
    for row in run.metrics:
        assert row["policy/first_ratio_error"] < 1e-5
        assert 0 < row["policy/probe_gap"] < 1e-5
        assert 0 < row["policy/sampler_gap_mean"] < 1e-5
        assert row["policy/importance_capped"] == 0.0


def test_responses_of_an_older_policy_are_weighted(watch, copied):
    """With max_staleness 1 every second rollout comes from the weights before the last update."""
    engines = copied()
    stale = {"rollout": {"max_staleness": 1}, "ppo": {"num_iterations": 3}, "optimizer": {"learning_rate": 1e-2}}
    run = watch(**merged(ENGINE, stale))
    assert engines[0].log.count("load") == 2
    iterations = check_update_batch(run)
    assert len(iterations) == 3
    gaps = [row["policy/sampler_gap_mean"] for row in run.metrics]
    assert gaps[1] > 1e-2 > 1e-4 > max(gaps[0], gaps[2])
    second = run.rollouts[1]
    lengths = [len(r.ids) for r in second.responses]
    logprobs = [row[:n] for row, n in zip(second.logprobs.tolist(), lengths, strict=True)]
    assert max(map(max, slow_importance(logprobs, second.responses, 2.0))) > 1.05


def test_held_out_replies_come_from_the_policy_as_it_is(watch, copied, data):
    engines = copied()
    changes = {
        "data": {"test": str(data["prompts"])},
        "evaluation": {"num_prompts": 4},
        "rollout": {"max_staleness": 9},
    }
    watch(**merged(ENGINE, changes))
    assert engines[0].log.count("load") == 2, "before training and at the end"


def test_an_engine_that_loses_a_transfer_stops_the_run(watch, copied):
    copied(late=True)
    with pytest.raises(RunError, match=r"rollout\.engine: copy does not hold .* These tensors differ: lm_head\.weight"):
        watch(**ENGINE)


@pytest.mark.parametrize(
    ("installed", "world", "message"),
    [
        (False, {}, r"vllm is not installed\. Run: .*\[vllm\]"),
        (True, {}, "vllm needs a GPU, and there is none. Set it to own"),
        (True, {"size": 2, "device": torch.device("cuda")}, "one process so far, and this run has 2. Set it to own"),
    ],
)
def test_an_engine_that_cannot_run_here_is_refused(
    monkeypatch, write_config, base, tmp_path, installed, world, message
):
    config = config_of(write_config, "ppo", PPOConfig, tmp_path, **merged(base, ENGINE))
    found = object() if installed else None
    monkeypatch.setattr(engine_module.importlib.util, "find_spec", lambda _: found)
    with pytest.raises(ConfigError, match=message):
        require_engine(config, replace(ALONE, **world))


@pytest.mark.parametrize(
    ("changes", "level"), [({"engine_memory": 0.25}, 2), ({"engine_memory": 0.7, "max_staleness": 1}, 1)]
)
def test_vllm_gets_its_share_of_the_memory_and_keeps_weights_that_are_needed(
    monkeypatch, make_model, write_config, tmp_path, changes, level
):
    fake_vllm(monkeypatch)
    config = config_of(write_config, "ppo", PPOConfig, tmp_path, **merged(ENGINE, {"rollout": changes}))
    engine = engine_module.new_engine(config, load_policy(str(make_model("llama"))), torch.bfloat16, 64)
    assert engine._llm.options["gpu_memory_utilization"] == changes["engine_memory"]
    assert engine._level == level
