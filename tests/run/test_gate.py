"""The gate before PPO: `require` holds figures of earlier stages against limits."""

import json
import math
import shutil

import pytest
import torch
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.commands import pipeline
from rlhf_cli.config.loader import load_values
from rlhf_cli.config.ppo import FIGURES as FIGURE_NAMES
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.data.records import Answer, Record
from rlhf_cli.errors import ConfigError, RunError
from rlhf_cli.evaluation.agreement import answer_metrics, ranking_figures
from rlhf_cli.run import launch
from rlhf_cli.run.launch import check_requirements
from support.projects import write_manifest

FIGURES = {
    "eval/accuracy": 0.62,
    "eval/accuracy_low95": 0.57,
    "eval/accuracy_high95": 0.67,
    "eval/num_rows": 400,
    "eval/margin": 0.8,
    "probe/rude": 0.9,
    "probe/odd": math.nan,
    "rm/sft_score_mean": 0.1,
}


@pytest.fixture
def config(tmp_path, configs):
    """A function: the `require` of a PPO config, and what else differs -> the config."""
    write_manifest(tmp_path / "run" / "sft", "sft", metrics={"eval/loss": 0.4})
    write_manifest(tmp_path / "run" / "rm", "rm", metrics=FIGURES)

    def load(require, **changes):
        values = {"artifacts": str(tmp_path / "run"), **configs["ppo"], "require": require, **changes}
        return load_values(values, PPOConfig, [], "ppo.yaml")

    return load


@pytest.mark.parametrize(
    ("name", "limits", "is_met"),
    [
        ("rm/accuracy", {"above": 0.6}, True),
        ("rm/accuracy", {"above": 0.6, "interval": "lower"}, False),
        ("rm/accuracy", {"above": 0.56, "interval": "lower"}, True),
        ("rm/accuracy", {"below": 0.65, "interval": "upper"}, False),
        ("rm/accuracy", {"above": 0.62}, False),
        ("rm/accuracy", {"above": 0.5, "below": 0.6}, False),
        ("rm/probe/rude", {"above": 0.8}, True),
        ("rm/probe/odd", {"above": -9.0}, False),
        ("rm/probe/odd", {"below": 9.0}, False),
        ("sft/loss", {"below": 0.5}, True),
    ],
)
def test_a_figure_is_compared_with_its_limit(config, name, limits, is_met):
    if is_met:
        (line,) = check_requirements(config({name: limits}))
        assert line.startswith(f"require: {name} of ")
    else:
        with pytest.raises(RunError, match=f"require: {name} of .* must be .*PPO was not started"):
            check_requirements(config({name: limits}))


@pytest.mark.parametrize(
    ("name", "limits", "says"),
    [
        ("rm/mse", {"above": 0.6}, "no such figure; .* has rm/accuracy, rm/margin, rm/probe/rude, rm/probe/odd$"),
        ("rm/margin", {"above": 0.6, "interval": "lower"}, "no 95 % interval of it. Set interval: mean"),
    ],
)
def test_an_unknown_figure_gets_one_line_with_the_known_ones(config, name, limits, says):
    with pytest.raises(ConfigError, match=says) as error:
        check_requirements(config({name: limits}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("require", "says"),
    [
        ({"accuracy": {"above": 0.5}}, "must be sft/ or rm/ and the name"),
        ({"rm/accurcy": {"above": 0.6}}, "no such figure; rm has accuracy, .*; did you mean accuracy"),
        ({"sft/probe/rude": {"above": 0.6}}, "no such figure; sft has loss, perplexity, token_accuracy"),
        ({"rm/accuracy": {}}, "has no limit. Set above, below or both"),
        ({"rm/accuracy": {"above": 0.6, "below": 0.6}}, "no figure is above 0.6 and below 0.6"),
        ({"rm/accuracy": {"above": 0.5, "interval": "low"}}, "did you mean lower"),
    ],
)
def test_a_requirement_that_cannot_be_met_is_refused(config, require, says):
    with pytest.raises(ConfigError, match=says):
        config(require)


def test_every_reward_model_must_meet_the_limit_and_one_must_exist(config, tmp_path):
    write_manifest(tmp_path / "other" / "rm", "rm", metrics={"eval/accuracy": 0.5})
    rewards = [{"type": "reward_model", "path": str(tmp_path / "other" / "rm")}, {"type": "reward_model", "name": "b"}]
    with pytest.raises(RunError, match=r"other/rm is 0\.5,"):
        check_requirements(config({"rm/accuracy": {"above": 0.6}}, rewards=rewards))
    with pytest.raises(ConfigError, match="reads no finished rm stage"):
        check_requirements(config({"rm/accuracy": {"above": 0.6}}, rewards=[{"type": "length", "target": 5}]))


def invoke(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.mark.parametrize("command", [["pipeline", "."], ["ppo", "ppo.yaml"]])
def test_ppo_stops_before_it_loads_anything(project, monkeypatch, command):
    monkeypatch.chdir(project)
    shutil.rmtree(project / "run" / "ppo")
    load = launch.load_stage
    for module in (launch, pipeline):
        monkeypatch.setattr(
            module, "load_stage", lambda stage: pytest.fail("loaded") if stage == "ppo" else load(stage)
        )
    prefix = "ppo:" if command[0] == "pipeline" else ""
    result = invoke(*command, "--set", f"{prefix}require.rm/margin.above=1e9", "--quiet")
    assert result.exit_code == 1, result.output
    assert "error: require: rm/margin of " in result.output


def test_a_limit_added_later_is_read_and_does_not_run_ppo_again(finished):
    """Also if it cannot be met: a gate that nobody reads would pass everything."""
    for command in ("ppo", "pipeline"):
        where = [command, finished / "ppo.yaml" if command == "ppo" else finished]
        prefix = "ppo:" if command == "pipeline" else ""
        met = invoke(*where, "--set", f"{prefix}require.rm/margin.above=-1e9")
        assert met.exit_code == 0, met.output
        assert "ppo: skipped" in met.output
        missed = invoke(*where, "--set", f"{prefix}require.rm/margin.above=1e9")
        assert missed.exit_code == 1
        assert "the finished ppo stage stays as it is. improve the rm" in " ".join(missed.output.lower().split())


def test_the_known_figures_are_those_that_the_stages_write(finished):
    scores, rows = (
        torch.tensor([1.0, 2.0, 0.0]),
        [Record("p", "x:1", (Answer("r" * i, float(i > 0)),)) for i in range(3)],
    )
    labels = torch.tensor([0.0, 1.0, 1.0])
    pairs = ranking_figures(scores, [3], [1.0], [1.0])
    written = pairs | answer_metrics(scores, labels, rows, "mse") | answer_metrics(scores, labels, rows, "bce")
    short = {key.removeprefix("eval/").removesuffix("_low95").removesuffix("_high95") for key in written}
    assert short == set(FIGURE_NAMES["rm"])
    manifest = json.loads((finished / "run" / "sft" / "manifest.json").read_text())
    assert {f"eval/{name}" for name in FIGURE_NAMES["sft"]} == {k for k in manifest["metrics"] if k.startswith("eval/")}


def test_figures_of_validation_rows_decide_where_a_stage_has_some(tmp_path, config):
    metrics = FIGURES | {"validation/accuracy": 0.55, "eval/accuracy/hard": 0.4}
    write_manifest(tmp_path / "run" / "rm", "rm", metrics=metrics)
    with pytest.raises(RunError, match=r"rm/accuracy of .* is 0.55"):
        check_requirements(config({"rm/accuracy": {"above": 0.6}}))
    (line,) = check_requirements(config({"rm/accuracy/hard": {"above": 0.3}}))
    assert "is 0.4" in line
    with pytest.raises(ConfigError, match=r"rm/probe/odd, rm/accuracy/hard$"):
        check_requirements(config({"rm/accuracy/none": {"above": 0.6}}))
