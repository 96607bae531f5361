"""PPO on two processes gives the same result as on one.

The two processes are threads that take turns (`support.worlds`), but in two slow tests, which start real ones.
"""

from __future__ import annotations

import itertools

import pytest

from support.compare import same_runs
from support.setup import learning
from support.tiny import merged
from support.worlds import run_in_threads


def compare_one_and_two_processes(watch, write_config, base, tmp_path, changes):
    """Run on one process and on two, compare all that they write, and return the record of the first run."""
    changes = merged({"optimizer": {"eps": 1e-3}}, changes)
    one = watch("one", **changes)
    run_in_threads(2, "ppo", write_config("ppo", tmp_path / "two", **merged(base, changes)))
    same_runs(one.stage_dir, tmp_path / "two/ppo")
    return one


def limits(run):
    """Values of (max_approx_kl, max_ratio) that some steps of this run clearly exceed and others do not."""
    limits_found = []
    for key in ("policy/approx_kl", "policy/ratio"):
        values = sorted(step[key] for step in run.steps)
        gaps = [b - a for a, b in itertools.pairwise(values)]
        at = max(range(len(gaps) // 2, len(gaps)), key=gaps.__getitem__)
        limits_found.append((values[at] + values[at + 1]) / 2)
    return limits_found


def test_groups_may_be_split_over_processes_and_all_processes_stop_early_together(
    watch, write_config, base, tmp_path, data
):
    """[37] Three responses per prompt, one or two of them on each process. No process waits forever."""
    changes = {
        "rollout": {"samples_per_prompt": 3},
        "ppo": {
            "rollout_batch_size": 9,
            "minibatch_size": 3,
            "ppo_epochs": 3,
            "advantage_estimator": "grpo",
            "kl_in": "loss",
            "num_rollouts_per_update": 2,
            "entropy_coef": 0.02,
            "ema_decay": 0.8,
        },
        "ptx": {"train": str(data["demonstrations"]), "coef": 0.3, "minibatch_size": 5, "max_length": 96},
        "optimizer": {"learning_rate": 2e-2, "eps": 1e-3},
    }
    limit, _ = limits(watch("free", **changes))
    run = compare_one_and_two_processes(
        watch, write_config, base, tmp_path, merged(changes, {"ppo": {"max_approx_kl": limit}})
    )
    assert any(row["policy/stopped_early"] for row in run.metrics)
    assert {move for _, move in run.moves} == {True, False}


SPLIT = {
    "reinforce_pp_baseline": {
        "rollout": {"samples_per_prompt": 4},
        "ppo": {"advantage_estimator": "reinforce_pp_baseline", "whiten_rewards": True},
    },
    "rloo": {"rollout": {"samples_per_prompt": 2}, "ppo": {"advantage_estimator": "rloo"}},
    "dr_grpo": {
        "rollout": {"samples_per_prompt": 4},
        "ppo": {"advantage_estimator": "dr_grpo", "loss_aggregation": "constant", "minibatch_size": 2},
    },
    "scores": {
        "ppo": {
            "score_normalization": "running",
            "kl_controller": "adaptive",
            "kl_target": 0.1,
            "kl_horizon": 100,
            "whiten_rewards": True,
            "loss_aggregation": "sequence",
        }
    },
    "reference": {"ppo": {"score_normalization": "reference", "num_reference_samples": 17}},  # two chunks and one
    "penalty": {"ppo": {"objective": "penalty", "policy_kl_target": 1e-5, "num_iterations": 3}},
    "shared": {
        "value_model": {"init": "shared", "warmup_iterations": 1},
        "ppo": {"minibatch_size": 2, "num_iterations": 3},
    },
    "lora": {"policy": {"lora": {"r": 4}}},
    "dense": {"ppo": {"whiten_advantages": False}},
}


DEFAULT = ("scores", "reference")
"""Cases of SPLIT that are not slow: each statistic of scores and rewards is one of both processes."""


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in SPLIT]
)
def test_two_processes_give_the_result_of_one_with(name, watch, write_config, base, functions, tmp_path):
    changes = SPLIT[name]
    if name == "dense":
        rewards = [{"type": "function", "function": f"{functions}:tokens", "per_token": True}]
        changes = merged(changes, {"rewards": rewards})
    run = compare_one_and_two_processes(watch, write_config, base, tmp_path, changes)
    assert run.metrics[-1]["objective/kl"] != 0.0


@pytest.mark.slow
def test_all_processes_skip_the_same_steps(watch, write_config, base, tmp_path):
    """[37] max_ratio is exceeded in some steps."""
    changes = merged(learning(num_iterations=2), {"optimizer": {"eps": 1e-3}})
    _, limit = limits(watch("free", **changes))
    run = compare_one_and_two_processes(
        watch, write_config, base, tmp_path, merged(changes, {"ppo": {"max_ratio": limit}})
    )
    assert 0 < sum(row["policy/skipped_steps"] for row in run.metrics) < 24
