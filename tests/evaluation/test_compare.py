"""`rlhf compare`: the same policy twice, other rewards, other prompts, other configs."""

import io
import json
import math
import shutil

import pytest
import torch
from rich.console import Console

from rlhf_cli.algorithms.comparison import bradley_terry
from rlhf_cli.algorithms.statistics import bootstrap_interval
from rlhf_cli.evaluation.between_runs import STRENGTH_RESAMPLES, Compared, difference, show_wins, strength_figures
from rlhf_cli.files import digest_file
from rlhf_cli.report.progress import Display
from support.projects import refused, rlhf


def compare(*roots, width=160):
    return rlhf("compare", *roots, env={"COLUMNS": str(width)}).output


@pytest.fixture(scope="module")
def evaluated(pipeline, tmp_path_factory):
    root = tmp_path_factory.mktemp("compared") / "one"
    shutil.copytree(pipeline("llama"), root)
    rlhf("eval", root, "--stage", "ppo", "--samples", 0, "--quiet")
    return root


@pytest.fixture
def two(evaluated, tmp_path):
    shutil.copytree(evaluated, tmp_path / "one")
    shutil.copytree(evaluated, tmp_path / "two")
    return tmp_path / "one", tmp_path / "two"


def change(path, **keys):
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | keys))


def test_a_run_beside_itself_differs_in_nothing(two):
    output = compare(*two)
    assert "0.00 [0.00, 0.00]" in output
    assert "the configs are equal" in output
    assert "0.00 [0.00, 0.00]" in output.partition("Bradley-Terry")[2]
    assert compare(*two, width=60).count("[0.00, 0.00]") >= 3, "intervals in one piece"


@pytest.mark.parametrize(("key", "value"), [("a", "x" * 60), ("b", [{"c": 1, "d": "y"}])])
def test_a_key_that_differs_late_or_in_a_list_is_shown(two, key, value):
    other = json.loads(json.dumps(value).replace("1", "2")) if key == "b" else f"{value}y"
    for root, one in zip(two, (value, other), strict=True):
        manifest = json.loads((root / "ppo/manifest.json").read_text())
        manifest["identity"]["config"][key] = one
        (root / "ppo/manifest.json").write_text(json.dumps(manifest))
        change(root / "eval/ppo/evaluation.json", manifest=digest_file(root / "ppo/manifest.json"))
    output = compare(*two)
    assert "the configs are equal" not in output
    assert {"a": "ppo: a", "b": "ppo: b.0.c"}[key] in output


def judge(path, points):
    """Write what a judge gave PPO's replies, None without a clear answer."""
    replies = json.loads(path.read_text())["replies"]
    for row, point in zip(replies, points, strict=True):
        if point is not None:
            row["judge"] = point
    change(path, replies=replies)


def test_runs_that_a_judge_compared_with_the_same_sft_replies_get_strengths(two):
    files = [root / "eval" / "ppo" / "evaluation.json" for root in two]
    judge(files[0], [1, 1, 0.5, 1, None])
    judge(files[1], [0, 1, 0, None, 1])
    table = compare(*two).partition("By the judge")[2].splitlines()
    strengths = {
        line.split()[0]: float(line.split()[-3]) for line in table if line.split()[:1] in (["SFT"], ["one"], ["two"])
    }
    # Three prompts count. Half a win is added for each side: 3 of 4 and 1.5 of 4.
    assert strengths["one"] - strengths["SFT"] == pytest.approx(math.log(3 / 1), abs=0.02)
    assert strengths["two"] - strengths["SFT"] == pytest.approx(math.log(1.5 / 2.5), abs=0.02)
    replies = json.loads(files[1].read_text())["replies"]
    change(files[1], replies=[{**row, "sft": {**row["sft"], "reply": "other"}} for row in replies])
    assert "By the judge" not in compare(*two)


def test_keys_that_differ_are_listed_and_replies_of_an_earlier_policy_are_refused(two):
    manifest = two[1] / "ppo" / "manifest.json"
    identity = json.loads(manifest.read_text())["identity"]
    identity["config"]["ppo"]["kl_coef"] = 0.7
    identity["inputs"]["rewards.0"] = "another"
    change(manifest, identity=identity)
    assert "is older than the stage. Run: rlhf eval" in refused("compare", *two)
    change(two[1] / "eval" / "ppo" / "evaluation.json", manifest=digest_file(manifest))
    output = compare(*two)
    (line,) = [line for line in output.splitlines() if "ppo: ppo.kl_coef" in line]
    assert line.split()[-1] == "0.7"
    assert "other rewards" in output
    assert "By score" not in output, "scores of other rewards are not compared"


def test_runs_with_other_seeds_get_the_same_uniforms(two):
    """The same policy in a run with another seed gives the same replies."""
    config = two[1] / "ppo" / "config.yaml"
    text = config.read_text()
    assert "\nseed: 0\n" in text
    config.write_text(text.replace("\nseed: 0\n", "\nseed: 7\n"))
    rlhf("eval", two[1], "--stage", "ppo", "--samples", 0, "--quiet")
    assert "0.00 [0.00, 0.00]" in compare(*two)
    change(two[1] / "eval" / "ppo" / "evaluation.json", seed=1)
    assert "was evaluated with --seed 1" in refused("compare", *two)


def test_long_names_become_numbers_with_a_legend(evaluated, tmp_path):
    names = [f"kl_coef={number}_seed=0" for number in (0.05, 0.1, 0.2)]
    for name in names:
        shutil.copytree(evaluated, tmp_path / name)
    lines = compare(*(tmp_path / name for name in names), width=80).splitlines()
    for number, name in enumerate(names, 1):
        assert any(line.endswith(f"{number}: {name}") for line in lines)
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("3 ") for line in lines) >= 3, "a table names the run by its number"
    assert any("beats 1" in line and "beats 3" in line for line in lines)


def test_what_cannot_be_compared_gets_one_line(two):
    assert "two directories or more" in refused("compare", two[0])
    path = two[1] / "eval" / "ppo" / "evaluation.json"
    change(path, replies=json.loads(path.read_text())["replies"][:-1])
    assert "other held-out prompts" in refused("compare", *two)
    path.unlink()
    assert "Run: rlhf eval" in refused("compare", *two)
    shutil.rmtree(two[1] / "ppo")
    assert "stage ppo is not finished" in refused("compare", *two)
    assert "no stage is finished" in refused("compare", two[0], two[1] / "nowhere")


def made(name, scores):
    return Compared(name, None, [{"prompt": str(i), "ppo": {"score": s}} for i, s in enumerate(scores)], {})


def test_differences_are_paired_by_prompt():
    base = torch.randn(200, generator=torch.Generator().manual_seed(0)) * 5
    figure = difference(made("a", base.tolist()), made("b", (base + 0.5).tolist()), "score")
    assert figure.value == pytest.approx(0.5)
    assert figure.high - figure.low < 1e-4  # Unpaired it would be about 2.


def test_wins_and_strengths_order_three_runs():
    out = io.StringIO()
    runs = [made("a", [3, 3, 3, 0]), made("b", [2, 2, 4, 1]), made("c", [1, 1, 1, 2])]
    show_wins(runs, "score", Display("compare", quiet=False, console=Console(file=out, width=200)))
    cells = {
        line[0]: line[1:] for line in map(str.split, out.getvalue().splitlines()) if line[:1] in (["a"], ["b"], ["c"])
    }
    # a beats b in two of four prompts; its own cell is empty, and each other one is a rate with its interval.
    assert cells["a"][0] == "0.50"
    strength = {name: float(row[-3]) for name, row in cells.items()}
    assert strength["c"] < min(strength["a"], strength["b"])


def test_strengths_have_the_interval_of_the_win_rate():
    """Of two players the strength is half the log odds of a win, so that the ends of the two intervals correspond."""
    win = (torch.rand(300, generator=torch.Generator().manual_seed(1)) < 0.7).double()
    won = torch.zeros(300, 2, 2, dtype=torch.float64)
    won[:, 0, 1], won[:, 1, 0] = win, 1 - win
    first, second = strength_figures(won, lambda total: bradley_terry(total, prior=0.0))
    low, high = bootstrap_interval(lambda rows: rows.mean(-1), win, seed=0, num_resamples=STRENGTH_RESAMPLES)
    assert first.value == pytest.approx(math.log(win.mean() / (1 - win.mean())) / 2)
    assert first.low == pytest.approx(math.log(low / (1 - low)) / 2, abs=1e-3)
    assert first.high == pytest.approx(math.log(high / (1 - high)) / 2, abs=1e-3)
    assert (second.low, second.high) == pytest.approx((-first.high, -first.low), abs=1e-3)
