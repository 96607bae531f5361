"""SFT against PPO: on held-out prompts, with the same draws, the KL to ref_policy, and the row of each prompt."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf_cli.ppo.held_out import HeldOut
from rlhf_cli.training.best import Best
from support.setup import reward_calls
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
    assert is_other == [True, False, *[True] * (len(evaluations) - 1), False]
    drawn = calls[-1]["prompts"]
    assert set(drawn) <= set(test)
    assert drawn != test[:5], "not the first ones"
    assert (found["num_prompts"], found["of_prompts"]) == (5, 7)
    assert [example["prompt"] for example in found["examples"]] == drawn
    assert found["ppo"]["score_mean"] == pytest.approx(statistics.fmean(calls[-1]["values"]), abs=1e-5)
    assert found["validation"]["ppo"]["score_mean"] == pytest.approx(statistics.fmean(calls[-2]["values"]), abs=1e-5)
    assert evaluations[-1]["score_mean"] == found["validation"]["ppo"]["score_mean"]
    assert found["best"]["value"] == max(row["score_mean"] for row in evaluations[1:])
    for name, part in (("one", rows[12:16]), ("two", rows[16:19])):
        own = {row["prompt"] for row in part}
        values = [v for v, prompt in zip(calls[-1]["values"], drawn, strict=True) if prompt in own]
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
