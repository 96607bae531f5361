"""Advantages and returns of whole runs, compared with slow loops from the raw scores, for every option.

Numbers in brackets are rows of the list of bugs in other implementations (docs of the project).
"""

from __future__ import annotations

import itertools
import statistics

import pytest

from support.oracles import check_update_batch, mean_std
from support.tiny import merged

# ------------------------------------------------------------- from raw scores to advantages and returns


GROUPS = {"rollout": {"samples_per_prompt": 4}}
KL = {"kl_coef": 0.3}
CLIPPED = {"score_normalization": "running", "score_clip": 0.8}
PENALTIES = {"missing_eos_penalty": 0.3, "length_penalty": 0.05, "overlong_buffer": 3, "overlong_penalty": 2.0}
EXPERIENCES = {
    "defaults": {"ppo": KL},
    "value_lambda": {"ppo": {**KL, "gae_lambda": 0.8, "value_lambda": 1.0, "gamma": 0.9}},
    "monte_carlo": {"ppo": {**KL, "advantage_estimator": "monte_carlo", "gamma": 0.9}},
    "reinforce": {"ppo": {**KL, "advantage_estimator": "reinforce", "gamma": 0.9}},
    "reinforce_pp": {"ppo": {**KL, "advantage_estimator": "reinforce_pp"}},
    "reinforce_pp_baseline": {"ppo": {**KL, "advantage_estimator": "reinforce_pp_baseline"}, **GROUPS},
    "rloo": {"ppo": {**KL, "advantage_estimator": "rloo"}, **GROUPS},
    "grpo": {"ppo": {**KL, "advantage_estimator": "grpo"}, **GROUPS},
    "dr_grpo": {"ppo": {**KL, "advantage_estimator": "dr_grpo"}, **GROUPS},
    "groups with values": {"ppo": KL, **GROUPS},
    "whiten_rewards": {"ppo": {**KL, "whiten_rewards": True, "whiten_advantages": False}},
    "k3": {"ppo": {**KL, "kl_estimator": "k3"}},
    "full": {"ppo": {**KL, "kl_estimator": "full"}, "rollout": {"top_k": 40, "temperature": 0.7}},
    "kl in the loss": {"ppo": {**KL, "kl_in": "loss"}},
    "kl in the loss, reinforce_pp": {"ppo": {**KL, "kl_in": "loss", "advantage_estimator": "reinforce_pp"}},
    "adaptive": {"ppo": {"kl_coef": 0.3, "kl_controller": "adaptive", "kl_target": 0.5, "kl_horizon": 20}},
    "running_std": {"ppo": {**KL, "score_normalization": "running_std"}},
    "reference_std": {
        "ppo": {**KL, "score_normalization": "reference_std", "num_reference_samples": 12, "missing_eos_penalty": 0.0}
    },
    "penalties": {
        "ppo": {**KL, **PENALTIES, "missing_eos_penalty": 0.7, "overlong_buffer": 5, "overlong_penalty": 0.9}
    },
    "a dense reward": {"ppo": KL, "rewards": [("tokens", 0.5, True)]},
    "two dense and two sparse rewards": {
        "ppo": {**KL, **CLIPPED, "missing_eos_penalty": 0.3},
        "rewards": [("letters", 0.7, False), ("tokens", 2.0, True), ("ends", -1.5, False), ("tokens", -0.5, True)],
    },
    "all shaping": {"ppo": {**KL, **CLIPPED, **PENALTIES, "whiten_rewards": True}},
}


@pytest.mark.parametrize("name", EXPERIENCES)
def test_update_batches_equal_slow_loops_over_raw_scores(name, watch, pipeline, functions):
    """[1, 2, 3, 17, 20, 33, 42] Two iterations, starting from a policy that differs from ref_policy."""
    changes = {key: value for key, value in EXPERIENCES[name].items() if key != "rewards"}
    extra = {"ref_policy": {"path": str(pipeline("llama") / "sft")}}
    if "rewards" in EXPERIENCES[name]:
        extra["rewards"] = [
            {"type": "function", "function": f"{functions}:{function}", "weight": weight, "per_token": per_token}
            for function, weight, per_token in EXPERIENCES[name]["rewards"]
        ]
    calls = 2 if changes["ppo"].get("score_normalization", "").startswith("reference") else 0  # 12 samples, 8 at a time
    run = watch(**merged(extra, changes))
    iterations = check_update_batch(run, num_reference_calls=calls)
    assert len(iterations) == 2
    ppo, n = run.setup.config.ppo, run.setup.config.rollout.samples_per_prompt

    # The options have something to act on.
    assert all(abs(row["objective/kl"]) > 1e-3 for row in run.metrics)
    assert run.metrics[0]["policy/first_ratio"] == pytest.approx(1.0, abs=1e-5), (
        "[17] the ratio is to the sampling policy, not to ref_policy"
    )
    lengths = [len(r.ids) for rollout in run.rollouts for r in rollout.responses]
    endings = {r.ended for rollout in run.rollouts for r in rollout.responses}
    assert endings == {True, False}
    assert len(set(lengths)) > 3
    if ppo.score_clip is not None:
        assert any(abs(x) > 1.5 * ppo.score_clip for iteration in iterations for x in iteration.raw)
    if ppo.kl_controller == "adaptive":
        assert run.metrics[1]["objective/kl_coef"] != run.metrics[0]["objective/kl_coef"]

    has_values = ppo.advantage_estimator in ("gae", "monte_carlo")
    assert (run.stage_dir / "value_model").is_dir() == has_values
    value_keys = [key for row in run.metrics for key in row if key.startswith("value/") or key == "loss/value"]
    assert bool(value_keys) == has_values
    for rollout in run.rollouts:
        for at in range(0, 8, n):
            assert len({prompt.text for prompt in rollout.prompts[at : at + n]}) == 1, (
                "the rows of a prompt are adjacent"
            )
            assert n == 1 or len({tuple(r.ids) for r in rollout.responses[at : at + n]}) > 1
        assert len({prompt.text for prompt in rollout.prompts}) == 8 // n
    if ppo.whiten_rewards:
        for iteration in iterations:
            mean, std = mean_std(list(itertools.chain(*iteration.rewards)))
            assert mean == pytest.approx(statistics.fmean(itertools.chain(*iteration.unwhitened)), abs=1e-4), (
                "whitening of rewards keeps the mean"
            )
            assert std == pytest.approx(1.0, abs=1e-4)
