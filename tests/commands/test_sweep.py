"""A sweep computes what differs, shares what is equal, names what fails, and resumes."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from rlhf_cli.commands import pipeline
from rlhf_cli.commands.sweep import Sweep, members_of, sweep
from rlhf_cli.config.loader import load_config
from rlhf_cli.errors import ConfigError, Interrupted, RunError
from rlhf_cli.report.charts import frontier_charts
from rlhf_cli.report.run_data import read_run
from rlhf_cli.run import artifacts
from rlhf_cli.run.identity import identity
from support.projects import FACTS


class Stages:
    """Takes the place of the three programs: publishes a stage with figures that follow from its config."""

    def __init__(self):
        self.ran: list[tuple[str, str]] = []
        self.fails: dict[str, Exception] = {}

    def load(self, stage):
        def run(config, **_):
            name = Path(config.artifacts).name
            self.ran.append((name, stage))
            if stage == "ppo" and name in self.fails:
                raise self.fails[name]
            directory = artifacts.open_partial(config.artifacts, stage)
            (directory / "model").mkdir()
            (directory / "model" / "weights").write_text(f"{stage} of {name}")
            (directory / "metrics.jsonl").write_text('{"step": 1, "objective/score": 1.0}\n')
            metrics = {}
            if stage == "ppo":
                metrics = {"ppo/score_mean": 2 - config.ppo.kl_coef + config.seed, "ppo/kl": 1.0, "sft/score_mean": 0.5}
            facts = FACTS | {"identity": identity(config), "metrics": metrics, "seed": config.seed}
            artifacts.publish(config.artifacts, stage, **facts)

        return run


@pytest.fixture
def stages(monkeypatch):
    stages = Stages()
    monkeypatch.setattr(pipeline, "load_stage", stages.load)
    return stages


@pytest.fixture
def folder(tmp_path, write_config, make_model, monkeypatch):
    """A folder with the three configs, and no drawing of the results."""
    write_config("sft", tmp_path / "base", model={"path": str(make_model("llama"))})
    write_config("rm", tmp_path / "base")
    write_config("ppo", tmp_path / "base")
    monkeypatch.setattr(pipeline, "write_report", lambda *_: None)
    return tmp_path / "base"


def write(folder, grid, **more):
    path = folder.parent / "sweep.yaml"
    values = {"base": str(folder), "artifacts": str(folder.parent / "runs"), "grid": grid, **more}
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


GRID = {"ppo.kl_coef": [0.05, 0.2], "ppo:seed": [0, 1]}
NAMES = ["kl_coef=0.05_seed=0", "kl_coef=0.05_seed=1", "kl_coef=0.2_seed=0", "kl_coef=0.2_seed=1"]


def test_stages_that_no_setting_touches_run_once(folder, stages, capsys):
    path = write(folder, GRID)
    sweep(path)
    assert stages.ran == [(NAMES[0], "sft"), (NAMES[0], "rm"), *((name, "ppo") for name in NAMES)]
    weights = [folder.parent / "runs" / name / "sft" / "model" / "weights" for name in NAMES]
    assert len({path.stat().st_ino for path in weights}) == 1, "links, not copies"
    output = capsys.readouterr().out
    assert "kl_coef=0.05" in output
    assert "2.45 [-3.90, 8.80]" in output  # 1.95 and 2.95: the mean, and 12.7 standard errors on each side
    stages.ran.clear()
    sweep(path)
    assert stages.ran == [], "a second call runs nothing"


@pytest.mark.usefixtures("stages")
def test_a_report_that_cannot_be_drawn_hides_no_run_that_failed(folder, stages, capsys, monkeypatch):
    monkeypatch.setattr(pipeline, "write_report", lambda *_: (_ for _ in ()).throw(OSError("full")))
    stages.fails = {NAMES[1]: RunError("ppo: loss is NaN")}
    with pytest.raises(RunError, match=rf"1 of 4 runs failed: {NAMES[1]}\."):
        sweep(write(folder, GRID), quiet=True)
    assert "report.html: not written (OSError: full)" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.usefixtures("stages")
def test_a_stage_of_an_earlier_version_is_finished_if_only_a_key_without_a_value_is_new(folder, capsys):
    path = write(folder, GRID)
    sweep(path, quiet=True)
    manifest = folder.parent / "runs" / NAMES[0] / "ppo" / "manifest.json"
    values = json.loads(manifest.read_text())
    assert values["identity"]["config"]["ppo"].pop("score_clip", "missing") is None
    manifest.write_text(json.dumps(values))
    sweep(path)
    assert capsys.readouterr().out.count(": finished") == 4


def test_a_seed_for_every_stage_runs_every_stage_once_per_seed(folder, stages):
    sweep(write(folder, {"ppo.kl_coef": [0.05, 0.2], "seed": [0, 1]}), quiet=True)
    assert Counter(stage for _, stage in stages.ran) == {"sft": 2, "rm": 2, "ppo": 4}


def test_finished_stages_of_the_folders_own_run_are_shared(folder, stages):
    pipeline.pipeline(folder, quiet=True)
    stages.ran.clear()
    sweep(write(folder, GRID), quiet=True)
    assert {stage for _, stage in stages.ran} == {"ppo"}


def test_a_finished_stage_that_is_out_of_date_runs_again_in_its_place(folder, stages):
    sweep(write(folder, GRID, set={"sft:optimizer.learning_rate": 0.5}), quiet=True)
    pipeline.pipeline(folder, quiet=True)
    stages.ran.clear()
    sweep(write(folder, GRID), quiet=True)
    assert (NAMES[0], "sft") in stages.ran


def test_a_run_that_fails_is_named_and_the_others_run(folder, stages, capsys):
    path = write(folder, GRID)
    stages.fails = {NAMES[1]: RunError("ppo: loss is NaN")}
    with pytest.raises(RunError, match=rf"1 of 4 runs failed: {NAMES[1]}\."):
        sweep(path, quiet=True)
    assert f"sweep: {NAMES[1]}: error: ppo: loss is NaN" in capsys.readouterr().err
    assert [name for name, stage in stages.ran if stage == "ppo"] == NAMES
    stages.ran.clear()
    stages.fails = {NAMES[1]: ConfigError("a wrong key")}
    with pytest.raises(ConfigError, match="1 of 4 runs failed"):
        sweep(path, quiet=True)
    assert stages.ran == [(NAMES[1], "ppo")]


def test_a_signal_ends_the_sweep_and_the_same_command_resumes(folder, stages):
    path = write(folder, GRID)
    stages.fails = {NAMES[1]: Interrupted("ppo: SIGINT", 130)}
    with pytest.raises(Interrupted, match=r"To resume the sweep: .*sweep .*sweep\.yaml") as stop:
        sweep(path, quiet=True)
    assert stop.value.exit_code == 130
    stages.ran.clear()
    stages.fails = {}
    sweep(path, quiet=True)
    assert stages.ran == [(name, "ppo") for name in NAMES[1:]]


def test_a_dry_run_lists_what_each_run_would_do(folder, stages, capsys):
    path = write(folder, GRID, set={"sft:training.num_steps": 2})
    text = (folder / "sft.yaml").read_text()
    (folder / "sft.yaml").write_text(re.sub(" *num_steps: .*\n", "", text))  # by itself not valid
    sweep(path, dry_run=True)
    assert stages.ran == []
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if "kl_coef" in line}
    assert rows == {name: ["shared", "shared", "runs"] for name in NAMES} | {NAMES[0]: ["runs", "runs", "runs"]}
    sweep(path, quiet=True)
    sweep(path, dry_run=True)
    assert capsys.readouterr().out.count("finished") == 12


@pytest.mark.parametrize(
    ("grid", "more", "says"),
    [
        ({"ppo.kl_coeff": [1]}, {}, "no config in .* can have this key"),
        ({"rm:ppo.kl_coef": [1]}, {}, "no config in .* can have this key"),
        ({"ppo.kl_coef": [0.1, 0.1]}, {}, "two runs would have the directory kl_coef=0.1"),
        ({"ppo.kl_coef": []}, {}, r"sweep.yaml:\d+: grid.'ppo.kl_coef': found an empty list"),
        ({"artifacts": ["/elsewhere"]}, {}, "grid: artifacts: each run gets its own directory. Remove the key"),
        ({"ppo:artifacts": ["../elsewhere"]}, {}, "grid: ppo:artifacts: each run gets its own directory"),
        ({"ppo.kl_coef": [1]}, {"set": {"artifacts": "x"}}, "set: artifacts: each run gets its own directory"),
        ({"ppo.kl_coef": [-1]}, {}, "kl_coef=-1: --set ppo.kl_coef=-1"),
        ({"ppo.kl_coef": [1]}, {"seeds": 2}, "seeds: unknown key"),
    ],
)
def test_a_mistake_is_reported_before_the_first_run(folder, stages, grid, more, says):
    with pytest.raises(ConfigError, match=says):
        sweep(write(folder, grid, **more))
    assert stages.ran == []


def test_a_key_applies_to_the_stages_that_have_it(folder):
    path = write(folder, {"optimizer.learning_rate": [1e-3], "training.num_steps": [2]}, set={"ppo.kl_coef": 0.3})
    (member,) = members_of(load_config(path, Sweep), path)
    assert member.overrides[1:] == [
        "ppo:ppo.kl_coef=0.3",
        *(f"{stage}:optimizer.learning_rate=0.001" for stage in ("sft", "rm", "ppo")),
        *(f"{stage}:training.num_steps=2" for stage in ("sft", "rm")),
    ]


@pytest.mark.usefixtures("stages")
def test_the_frontier_has_a_point_per_run_named_by_its_setting(folder):
    sweep(write(folder, GRID), quiet=True)
    runs = [read_run(folder.parent / "runs" / name, name) for name in NAMES]
    (chart,) = frontier_charts(runs)
    line, points, _ = (layer["data"]["values"] for layer in chart.spec["layer"])
    assert [(row["setting"], row["value"]) for row in points] == [
        ("kl_coef 0.05", 1.95),
        ("kl_coef 0.05", 2.95),
        ("kl_coef 0.2", 1.8),
        ("kl_coef 0.2", 2.8),
    ]
    assert [(row["setting"], row["value"]) for row in line] == [
        ("SFT", 0.5),
        ("kl_coef 0.05", pytest.approx(2.45)),
        ("kl_coef 0.2", pytest.approx(2.3)),
    ]
    assert json.dumps(chart.spec)
