"""What PPO reports of an iteration, and where it stops: numbers that are not finite, a wrong temperature, dropout."""

from __future__ import annotations

import json
import math
import shutil
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlhf_cli.errors import RewardError, RunError
from rlhf_cli.models import load
from rlhf_cli.models.load import load_policy
from rlhf_cli.ppo.held_out import _own_replies
from rlhf_cli.ppo.scores import ScoreScale, measure_reference_scores
from rlhf_cli.processes.distributed import World
from rlhf_cli.report.progress import Display
from rlhf_cli.rollout import rollout as rollout_module
from stages import ppo as ppo_stage
from support.setup import reward_calls
from support.tiny import CPU, read_jsonl


def test_the_kl_coefficients_wait_until_the_policy_learns(watch):
    """They would follow the KL of a policy that does not move. Targets far above the KL, so both fall after that."""
    ppo = {"objective": "penalty", "policy_kl_coef": 1.0, "policy_kl_target": 1e3, "num_iterations": 4}
    ppo |= {"kl_coef": 0.3, "kl_controller": "adaptive", "kl_target": 100.0, "kl_horizon": 20}
    run = watch(ppo=ppo, value_model={"warmup_iterations": 2})
    assert [row["policy/policy_kl_coef"] for row in run.metrics] == [1.0, 1.0, 1.0, 0.5]
    assert [row["objective/kl_coef"] for row in run.metrics[:3]] == [0.3, 0.3, 0.3]
    assert run.metrics[3]["objective/kl_coef"] < 0.3
    assert [abs(row["policy/kl_after_update"]) < 1e-6 for row in run.metrics] == [True, True, False, False]


# ------------------------------------------------------------------------------------------- several processes


class Counting(World):
    """A process of two that counts what it exchanges. The other process sends the same."""

    def gather(self, item):
        EXCHANGED.append(item)
        return [item, item]


EXCHANGED: list = []


def test_an_evaluation_takes_as_many_rows_at_a_time_as_training(start, data):
    with start(data={"test": str(data["prompts"])}, evaluation={"num_prompts": 20}) as setup:
        stage = SimpleNamespace(world=World(0, 2, CPU), display=setup.stage.display)
        assert len(_own_replies(replace(setup, stage=stage), setup.held_out.test)) == 10
        assert [len(call["responses"]) for call in reward_calls(setup)] == [4, 4, 2]


def test_a_reward_that_fails_on_reference_samples_stops_all_processes(start, functions):
    """The process whose own rewards work learns of the failure too."""
    EXCHANGED.clear()
    changes = {"ppo": {"score_normalization": "reference", "num_reference_samples": 8}}
    with start(rewards=[{"type": "function", "function": f"{functions}:fails"}], **changes) as setup:
        stage = SimpleNamespace(world=Counting(0, 2, CPU), display=setup.stage.display)
        with pytest.raises(RewardError, match="division by zero"):
            measure_reference_scores(replace(setup, stage=stage), ScoreScale(setup.config.ppo))
    assert len(EXCHANGED) == 1, "the failure"


def test_samples_every_prints_the_first_response_of_an_iteration(watch, monkeypatch):
    shown = []
    monkeypatch.setattr(Display, "exchange", lambda _, prompt, answers: shown.append((prompt, answers)))
    run = watch(samples_every=2, num_logged_samples=2, ppo={"num_iterations": 3})
    row = read_jsonl(run.stage_dir / "samples.jsonl")[2]
    name = f"iteration 2 (score {row['score']:+.2f}, KL {row['kl']:.2f})"
    assert shown == [(row["prompt"], {name: row["response"]})]


# ----------------------------------------------------------------------------------------------------- health


def test_a_reward_model_that_may_be_guessing_is_reported_at_the_start(watch, pipeline, tmp_path, monkeypatch):
    """By the held-out figures in its manifest, whether the stage or its model is named. It is said once."""
    good, weak = pipeline("llama") / "rm", tmp_path / "weak"
    shutil.copytree(good, weak)
    manifest = json.loads((good / "manifest.json").read_text())
    manifest["metrics"] |= {"eval/accuracy": 0.47, "eval/accuracy_low95": 0.35, "eval/accuracy_high95": 0.59}
    (weak / "manifest.json").write_text(json.dumps(manifest))
    paths = {"good": good, "stage": weak, "its_model": weak / "model"}
    rewards = [{"type": "reward_model", "name": name, "path": str(path)} for name, path in paths.items()]
    shown = []
    monkeypatch.setattr(Display, "health", lambda _, line: shown.append(line))
    start, *others = read_jsonl(watch(rewards=rewards).stage_dir / "health.jsonl")
    assert (start["step"], start["line"]) == (0, None)
    assert [f["name"] for f in start["findings"]] == ["weak_reward_model"] * 2
    for name, finding in zip(("stage", "its_model"), start["findings"], strict=True):
        measured = "held-out accuracy 0.470 (95 % interval 0.350 to 0.590, "
        assert finding["message"].startswith(f"Reward model {name}: {measured}")
    assert [(row["step"], row["findings"]) for row in others] == [(1, []), (2, [])]
    assert all(row["line"].startswith("weak_reward_model (from the start): score") for row in others)
    assert shown == [row["line"] for row in others]


@pytest.fixture
def grad_is_restored():
    yield
    torch.set_grad_enabled(True)


@pytest.mark.usefixtures("grad_is_restored")
def test_a_gradient_of_exactly_0_stops_the_run(watch, tmp_path):
    with pytest.raises(
        RunError, match=r"ppo iteration 1: no_gradient: policy/grad_norm and value/grad_norm are exactly 0"
    ):
        watch(before_rollout=lambda *_: torch.set_grad_enabled(False))
    (row,) = read_jsonl(tmp_path / "run/.ppo.partial/health.jsonl")
    assert [f["name"] for f in row["findings"]] == ["no_gradient"]
    assert not (tmp_path / "run/ppo").exists()


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_equal_rewards_have_nothing_to_learn_and_do_not_stop_the_run(watch, functions, estimator):
    ppo = {"advantage_estimator": estimator, "missing_eos_penalty": 0.0, "kl_coef": 0.0}
    rewards = [{"type": "function", "function": f"{functions}:constant"}]
    run = watch(ppo=ppo, rewards=rewards, rollout={"samples_per_prompt": 2})
    assert [row["policy/grad_norm"] for row in run.metrics] == [0.0, 0.0]


def test_the_spread_of_the_kl_and_the_largest_ratio_are_figures(watch):
    """The KL of each response is in samples.jsonl. A largest ratio m bounds the k3 of any token: m - 1 - log m."""
    run = watch(num_logged_samples=8, optimizer={"learning_rate": 3e-2})
    rows, samples = (read_jsonl(run.stage_dir / f"{name}.jsonl") for name in ("metrics", "samples"))
    assert len(rows) > 1
    for row in rows:
        kl = [sample["kl"] for sample in samples if sample["step"] == row["step"]]
        assert len(kl) == 8
        assert row["objective/kl_std"] == pytest.approx(statistics.pstdev(kl), abs=1e-3)
        largest = row["policy/largest_ratio"]
        assert row["policy/clip_fraction"] > 0
        assert largest > 1.2
        assert max(largest - 1 - math.log(largest), 1 / largest - 1 + math.log(largest)) >= row["policy/approx_kl"]
    assert rows[-1]["objective/kl_std"] > 0.01


# ------------------------------------------------------------------------------------------------------- where it stops


def set_weight_to_nan(setup, iteration):
    """Do it between the first and the second iteration."""
    if iteration == 1:
        with torch.no_grad():
            setup.models.policy.base_model.norm.weight[3] = math.nan


def test_filters_with_a_nan_policy_fail_with_one_line(watch, tmp_path):
    """NaN compares as false, so the filters keep no token. The error is one line and not a traceback."""
    rollout = {"top_k": 20, "top_p": 0.9, "min_p": 0.01}
    with pytest.raises(RunError) as error:
        watch(before_rollout=set_weight_to_nan, rollout=rollout, ppo={"num_iterations": 3})
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run/ppo").exists()


def stop_findings(root):
    rows = read_jsonl(root / ".ppo.partial/health.jsonl")
    return [f["name"] for f in rows[-1]["findings"] if f["severity"] == "stop"]


@pytest.mark.parametrize(
    ("module", "name", "says"),
    [(ppo_stage, "ratio_not_one", ".*temperature"), (rollout_module, "kl_not_zero", "objective/kl is")],
    ids=["training", "ref_policy"],
)
def test_a_wrong_temperature_stops_the_run(watch, tmp_path, monkeypatch, module, name, says):
    """[13] PPO publishes nothing. Before the update only ref_policy is scored: the sampler knows the policy's."""
    real = module.score_tokens

    def colder(models, prompts, responses, sampling, precision, **options):
        return real(models, prompts, responses, replace(sampling, temperature=0.7), precision, **options)

    monkeypatch.setattr(module, "score_tokens", colder)
    with pytest.raises(RunError, match=f"ppo iteration 1: {name}: {says}"):
        watch()
    assert stop_findings(tmp_path / "run") == [name]
    assert not (tmp_path / "run/ppo").exists()


def test_dropout_left_on_stops_the_run(watch, tmp_path, make_model, monkeypatch):
    """[14] The config of GPT-2 enables dropout. This test keeps it on, with the policy in train mode."""
    monkeypatch.setattr(load, "set_dropout_off", lambda model: None)  # noqa: ARG005
    monkeypatch.setattr("rlhf_cli.decoders.plain.takes_padding", lambda model: True)  # noqa: ARG005  it would refuse
    monkeypatch.setattr(
        "rlhf_cli.ppo.setup.load_policy", lambda path, revision, **more: load_policy(path, revision, **more).train()
    )
    with pytest.raises(RunError, match=r"ppo iteration 1: ratio_not_one: .*[Dd]ropout"):
        watch(policy={"path": str(make_model("gpt2"))}, rollout={"stop_tokens": []})
    assert not (tmp_path / "run/ppo").exists()
