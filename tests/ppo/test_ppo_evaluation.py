"""SFT against PPO on the held-out prompts, and how far PPO's replies are from the SFT model's."""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhf_cli.algorithms.mahalanobis import shrunk_gaussian, squared_shift, whitened
from rlhf_cli.ppo import held_out
from rlhf_cli.ppo.held_out import LEAST, Evaluation, HeldOut, Home, home_of
from rlhf_cli.training.best import Best
from support.setup import ALONE, reward_calls
from support.tiny import merged, read_jsonl, write_jsonl
from support.worlds import run_in_threads


@pytest.fixture
def split(data, tmp_path):
    """(training prompts, held-out prompts, config changes): 18 prompts and 6 others."""
    rows = read_jsonl(data["prompts"])
    train, test = rows[:18], rows[18:]
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", part) for name, part in (("train", train), ("test", test))]
    texts = [[row["prompt"] for row in part] for part in (train, test)]
    return *texts, {"data": {"train": str(paths[0]), "test": str(paths[1])}}


def evaluation_of(run):
    return json.loads((run.stage_dir / "evaluation.json").read_text(encoding="utf-8"))


def test_replies_are_to_held_out_prompts_and_training_never_sees_these(watch, split):
    train, test, changes = split
    run = watch(**merged(changes, {"ppo": {"score_normalization": "reference", "num_reference_samples": 8}}))
    before, reference, *rollouts, after = (call["prompts"] for call in reward_calls(run.setup))
    assert before == after == test
    assert len(rollouts) == 2
    assert set(itertools.chain(reference, *rollouts)) <= set(train)
    assert [example["prompt"] for example in evaluation_of(run)["examples"]] == test[:5]
    assert all("response/unfamiliarity" not in row for row in run.metrics), "no reward model, and few prompts"


def test_validation_prompts_are_watched_and_test_prompts_drawn(watch, data, tmp_path):
    """SFT and PPO are compared on test prompts; evaluations of the run, and the best one, are of validation prompts."""
    rows = read_jsonl(data["prompts"])
    parts = {"train": rows[:12], "one": rows[12:16], "two": rows[16:19], "other": rows[19:]}
    paths = {name: str(write_jsonl(tmp_path / f"{name}.jsonl", part)) for name, part in parts.items()}
    changes = {"train": paths["train"], "test": [paths["one"], paths["two"]], "validation": paths["other"]}
    run = watch(data=changes, evaluation={"num_prompts": 5, "every_iterations": 1, "best_metric": "score_mean"})
    found, evaluations = evaluation_of(run), read_jsonl(run.stage_dir / "evaluations.jsonl")
    calls = [call for call in reward_calls(run.setup) if len(call["prompts"]) == 5]
    test, other = ([row["prompt"] for row in part] for part in (rows[12:19], rows[19:]))
    is_other = [set(call["prompts"]) <= set(other) for call in calls]
    assert is_other == [True, False, *[True] * (len(evaluations) - 2), False, True]
    drawn = calls[-2]["prompts"]
    assert set(drawn) <= set(test)
    assert drawn != test[:5], "not the first ones"
    assert (found["num_prompts"], found["of_prompts"]) == (5, 7)
    assert [example["prompt"] for example in found["examples"]] == drawn
    assert found["ppo"]["score_mean"] == pytest.approx(statistics.fmean(calls[-2]["values"]), abs=1e-5)
    assert found["validation"]["ppo"]["score_mean"] == pytest.approx(statistics.fmean(calls[-1]["values"]), abs=1e-5)
    assert evaluations[-1]["score_mean"] == found["validation"]["ppo"]["score_mean"]
    assert found["best"]["value"] == max(row["score_mean"] for row in evaluations[1:])
    for name, part in (("one", rows[12:16]), ("two", rows[16:19])):
        own = {row["prompt"] for row in part}
        values = [v for v, prompt in zip(calls[-2]["values"], drawn, strict=True) if prompt in own]
        assert found["ppo"][f"score_mean/{name}"] == pytest.approx(statistics.fmean(values), abs=1e-5)


CHECKS_ROWS = """
def reward(prompts, responses, rows):
    for prompt, row in zip(prompts, rows, strict=True):
        if row["prompt"] != prompt:
            raise ValueError(f"the row of {row['prompt']!r} came with {prompt!r}")
    return [float(len(response)) for response in responses]


def judge(prompts, responses, rows):
    with open(__file__ + ".asked", "a") as file:
        file.write(f"{len(responses)}\\n")
    return [{"gold": value} for value in reward(prompts, responses, rows)]
"""


@pytest.mark.parametrize("num_processes", [1, 2])
def test_rewards_and_judges_get_the_row_of_each_prompt(run_stage, write_config, base, split, tmp_path, num_processes):
    """Both raise an error if a row belongs to another prompt. One process asks the judge, about all replies."""
    path = tmp_path / "rows.py"
    path.write_text(CHECKS_ROWS, encoding="utf-8")
    _, _, changes = split
    changes |= {
        "rewards": [{"type": "function", "function": f"{path}:reward"}],
        "evaluation": {"gold": f"{path}:judge"},
        "rollout": {"samples_per_prompt": 2},
        "ppo": {"num_iterations": 1, "score_normalization": "reference", "num_reference_samples": 10},
    }
    if num_processes == 1:
        run_stage("ppo", tmp_path / "run", **merged(base, changes))
    else:
        run_in_threads(2, "ppo", write_config("ppo", tmp_path / "run", **merged(base, changes)))
    evaluation = evaluation_of(SimpleNamespace(stage_dir=tmp_path / "run/ppo"))
    assert evaluation["ppo"]["gold"] == pytest.approx(evaluation["ppo"]["score_mean"])
    num_prompts = len(read_jsonl(Path(changes["data"]["test"])))
    asked = (tmp_path / "rows.py.asked").read_text().split()
    assert asked == [str(num_prompts)] * 2, "once about the SFT model's replies, once about the policy's"


def test_health_compares_scores_with_the_judges_main_number():
    seen = []
    health = SimpleNamespace(check_evaluation=lambda *given: seen.append(given) or [])
    columns = {"score_mean": [1.0, 2.0], "kl": [0.0, 0.5], "craft": [3.0, 4.0], "gold": [5.0, 6.0]}
    gold = [{"craft": 3.0, "gold": 5.0}, {"craft": 4.0, "gold": 6.0}]
    evaluation = Evaluation({}, ["a", "b"], columns, gold, torch.zeros(2, 0))
    evaluation.check(health, 7)
    replace(evaluation, gold=[]).check(health, 8)
    assert seen == [(7, [1.0, 2.0], [5.0, 6.0]), (8, [1.0, 2.0], None)]


@pytest.mark.parametrize(("lower", "stored"), [(False, 0.25), (True, -0.25)])
def test_the_best_figure_in_a_checkpoint_is_higher_if_it_is_better(lower, stored):
    """As every version stored it, so that their checkpoints load."""
    held_out, resumed = object.__new__(HeldOut), object.__new__(HeldOut)
    held_out.best, held_out.last_step = Best("kl", lower=lower), 4
    held_out.best.is_better(3, {"kl": 0.25})
    assert held_out.state() == {"best": {"step": 3, "value": stored}, "evaluated": 4}
    resumed.best = Best("kl", lower=lower)
    resumed.restore(held_out.state())
    assert (resumed.best.step, resumed.best.value, resumed.last_step) == (3, 0.25, 4)


# ---------------------------------------------------------------------------- how far the replies are from those before


def samples(n, size, seed=0, shift=0.0):
    """Vectors whose coordinates have standard deviations 1 to 3 and correlate."""
    random = torch.Generator().manual_seed(seed)
    scales = torch.linspace(1, 3, size)
    x = torch.randn(n, size, generator=random) * scales
    return x + 0.5 * x.roll(1, dims=1) + shift * scales


@pytest.mark.parametrize(("n", "size"), [(50, 4), (5, 12), (2, 3)])
def test_distances_are_those_by_the_inverse_of_the_shrunk_covariance(n, size):
    """Chen et al., eq. 23, written out; also of fewer samples than numbers, whose own covariance has no inverse."""
    x, others = samples(n, size).double(), samples(7, size, seed=1).double()
    centred = x - x.mean(0)
    covariance = centred.T @ centred / n
    trace, squares = covariance.trace(), (covariance @ covariance).trace()
    above, below = (1 - 2 / size) * squares + trace**2, (n + 1 - 2 / size) * (squares - trace**2 / size)
    rho = min(1.0, (above / below).item())
    shrunk = (1 - rho) * covariance + rho * trace / size * torch.eye(size).double()
    away = others - x.mean(0)
    expected = (away @ shrunk.inverse() * away).sum(1).sqrt()
    torch.testing.assert_close(whitened(others, shrunk_gaussian(x)).norm(dim=1), expected)


def test_the_shift_is_the_mean_over_pairs_and_has_no_bias():
    z = samples(6, 3).double()
    pairs = [torch.dot(z[i], z[j]).item() for i, j in itertools.permutations(range(6), 2)]
    shift = squared_shift(z.sum(0), z.square().sum().item(), 6)
    assert shift == pytest.approx(sum(pairs) / len(pairs))
    random = torch.Generator().manual_seed(0)
    batches = torch.randn(4000, 4, 3, generator=random, dtype=torch.float64) + torch.tensor([2.0, 0.0, 0.0])
    found = [squared_shift(z.sum(0), z.square().sum().item(), 4) for z in batches]
    assert sum(found) / len(found) == pytest.approx(4.0, abs=0.1), "of four vectors, as of infinitely many"


def test_a_batch_from_home_is_near_it_and_a_shifted_one_far():
    home = home_of(samples(400, 16))
    near, far = (home.unfamiliarity(samples(64, 16, 1, shift), ALONE) for shift in (0.0, 3.0))
    assert near["response/unfamiliarity"] < 0.3
    assert far["response/unfamiliarity"] > 1
    failed = torch.cat([samples(64, 16, 1), torch.full((3, 16), torch.nan)])
    assert home.unfamiliarity(failed, ALONE) == near, "scores that failed have no features"
    assert home.unfamiliarity(failed[-3:], ALONE) == home.unfamiliarity(None, ALONE) == {}
    assert home_of(samples(LEAST - 1, 16)) is None
    assert home_of(torch.ones(LEAST, 16)) is None


def test_a_run_measures_the_hidden_states_that_its_scores_are_read_from(watch, pipeline, data, monkeypatch):
    """Of the SFT model's replies to 24 prompts, before training, and of each rollout."""
    root, seen = pipeline("llama"), []
    unfamiliarity = Home.unfamiliarity

    def recorded(self, features, world):
        seen.append((self, features))
        return unfamiliarity(self, features, world)

    monkeypatch.setattr(Home, "unfamiliarity", recorded)
    monkeypatch.setattr(held_out, "home_of", lambda features: seen.append((None, features)) or home_of(features))
    run = watch(
        data={"test": str(data["prompts"])},
        policy={"path": str(root / "sft")},
        rewards=[{"type": "reward_model", "path": str(root / "rm")}],
    )
    source = run.setup.rewards[0]
    (_, of_sft), *of_rollouts = seen
    scores = [((x @ source.model.score.weight.T - source.mean) / source.std).mean().item() for _, x in seen]
    assert [len(x) for _, x in seen] == [24, 8, 8]
    figures = read_jsonl(run.stage_dir / "metrics.jsonl")
    before = json.loads((run.stage_dir / "evaluation.json").read_text())["sft"]["score_mean"]
    assert scores == pytest.approx([before, *(row["objective/score"] for row in figures)], abs=1e-5)
    home = home_of(of_sft)
    expected = [unfamiliarity(home, x, ALONE)["response/unfamiliarity"] for _, x in of_rollouts]
    assert [row["response/unfamiliarity"] for row in figures] == expected
