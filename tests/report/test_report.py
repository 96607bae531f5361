"""`rlhf report`: one page that needs nothing else, from the files of a run alone."""

import html
import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import replace
from importlib import resources

import pytest
import vl_convert

from rlhf_cli.commands import pipeline as pipeline_module
from rlhf_cli.files import digest_file
from rlhf_cli.health import ranking
from rlhf_cli.report.charts import (
    BETTER,
    GRAY,
    HELD_OUT_COLOR,
    TRAINING,
    WORSE,
    curve_charts,
    distance_charts,
    findings_chart,
    shared_runs,
)
from rlhf_cli.report.page import javascript, picture, run_charts
from rlhf_cli.report.run_data import CURVES, HELD_OUT, MOST_POINTS, SETTING, curves, read_run
from rlhf_cli.report.tables import tables_of
from rlhf_cli.report.verdict import headline, verdict
from support.projects import refused, rlhf
from support.tiny import write_jsonl as write

HOSTILE = "</script><script>alert(1)</script><b>&amp; \u2028 {{ 7 * 7 }}"


def figure(value, width=0.1):
    return {"value": value, "low": value - width, "high": value + width, "rows": 9}


EVALUATIONS = {
    "sft": {
        "before": {"loss": figure(3.5), "token_accuracy": figure(0.25)},
        "figures": {"loss": figure(1.5), "token_accuracy": figure(0.75)},
        "difference": {"loss": figure(-2.0), "token_accuracy": figure(0.5)},
    },
    "rm": {
        "figures": {"accuracy": figure(0.83), "longer_wins": figure(0.6), "margin": figure(1.7)},
        "chance": {"accuracy": {"value": 0.5}},
        "groups": {"probe": {"rude": {**figure(0.71), "rows": 21}, "vague": {**figure(0.64), "rows": 22}}},
        "groups_longer_wins": {"probe": {"rude": {"value": 0.31}, "vague": {"value": 0.32}}},
        "reliability": [
            {"low": 0.5, "high": 0.6, "count": 3, "confidence": 0.56, "frequency": 0.41},
            {"low": 0.9, "high": 1.0, "count": 5, "confidence": 0.93, "frequency": 0.87},
        ],
        "scores": {"better": [2.0, 3.0, 3.0], "worse": [-1.0, 0.0]},
        "distributions": {
            "better": {"mean": 2.6, "std": 0.4, "rows": 31.0},
            "worse": {"mean": -0.6, "std": 0.7, "rows": 32.0},
            "SFT": {"mean": 0.8, "std": 1.1, "rows": 33.0},
            "PPO": {"mean": 1.9, "std": 1.2, "rows": 34.0},
        },
        "bench": {"file": "rb2.jsonl", "figures": {"Math": {**figure(0.77), "rows": 23}}, "chance": {"Math": 0.25}},
        "sentences": ["rm: scores say <little>"],
        "worst": [
            {"prompt": "p", "better": "b", "worse": HOSTILE, "better_score": -1.0, "worse_score": 2.0, "where": "f:1"}
        ],
    },
    "ppo": {
        "sft": {"score": figure(0.2), "gold": figure(1.6), "kl": figure(0.0)},
        "ppo": {"score": figure(2.4), "gold": figure(4.7), "kl": figure(3.7)},
        "difference": {"score": figure(2.2), "gold": figure(3.1), "kl": figure(3.9)},
        "win_rate": {"score": figure(0.91), "gold": figure(0.86)},
        "alignment_tax": figure(0.33),
        "best_of_n": {
            "prompts": 12,
            "of_prompts": 25,
            "rows": [
                {"n": 1, "score": figure(0.3), "gold": figure(1.8), "length": figure(9), "kl": 0.1, "kl_bound": 0.0},
                {"n": 64, "score": figure(2.1), "gold": figure(4.4), "length": figure(8), "kl": 3.2, "kl_bound": 3.3},
            ],
            "n_for_ppo_score": 48,
            "ppo": {"score": 2.5, "gold": 4.8, "kl": 2.9},
            "at_ppo_kl": {
                "n": 40.0,
                "best_of_n": {"score": figure(1.4), "gold": figure(4.1)},
                "ppo": {"score": figure(2.55), "gold": figure(4.85)},
                "difference": {"score": figure(1.15), "gold": figure(0.75)},
            },
            "tilt_curve": [{"kl": 0.5, "beta": 2.0, "score": 0.6, "gold": 2.6}],
        },
        "replies": [
            {
                "prompt": HOSTILE,
                "sft": {"reply": "s", "score": -0.5, "gold": 1.0, "kl": 0.0, "length": 11},
                "ppo": {"reply": "t", "score": 1.5, "gold": 3.0, "kl": 2.0, "length": 14}
                | {"tokens": ["go", "od"], "token_kl": [1.5, 0.5]},
            }
        ],
        "gold_curve": {"start": 1.65, "a": figure(1.8), "b": figure(0.9), "points": [{"d": 1.5, "gold": 3.0}]},
    },
}
"""Figures of `rlhf eval` that are all different, so that one in the place of another shows."""


@pytest.fixture
def run(tmp_path):
    """The files of a run whose figures are all different; PPO had one kind of finding in two stretches."""
    root = tmp_path / "run"
    for stage, evaluation in EVALUATIONS.items():
        write(root / "eval" / stage / "evaluation.json", [evaluation])
        names = dict.fromkeys(name for curve in CURVES if curve.stage == stage for name in curve.metrics)
        values = {name: 10.0 * number for number, name in enumerate(names, 1) if ":" not in name}
        rows = [{"step": step, **{name: value + step for name, value in values.items()}} for step in range(1, 20)]
        write(root / stage / "metrics.jsonl", rows)
    (root / "ppo" / "config.yaml").write_text("ppo: {kl_target: 3.25}\n", encoding="utf-8")
    start = {"score_mean": 0.15, "gold": 1.65, "kl": -1e-4}
    ends = {"score_mean_low95": 1.9, "score_mean_high95": 2.1, "gold_low95": 4.1, "gold_high95": 4.3, "kl_low95": 2.6}
    middle = {"score_mean": 2.0, "gold": 4.2, "kl": 2.8, "kl_high95": 3.0, **ends}
    end = {"score_mean": 2.3, "gold": 3.1, "kl": 3.6}
    infinite = {"step": 60, "score_mean": None, "gold": None, "kl": None}
    write(root / "ppo" / "evaluations.jsonl", [{"step": 45, **middle}, infinite, {"step": 90, **end}])
    write(root / "ppo" / "evaluation.json", [{"sft": start, "ppo": end}])
    finding = {"name": "kl_runaway", "message": HOSTILE, "advice": "raise ppo.kl_coef"}
    steps = [{"step": i, "line": "", "findings": [finding] if i in (4, 5, 6, 11) else []} for i in range(1, 20)]
    worse = {"name": "overoptimisation", "message": "gold fell", "advice": "stop earlier"}
    steps.append({"step": 20, "line": "", "findings": [worse]})
    write(root / "ppo" / "health.jsonl", steps)
    return root


@pytest.fixture
def read(run):
    return read_run(run, "run")


@pytest.fixture
def page(run):
    """The text of the run's page, as the command writes it."""
    assert str(run / "report.html") in rlhf("report", run).output.replace("\n", "")
    return (run / "report.html").read_text(encoding="utf-8")


def data_of(page):
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(match[1])


def test_the_page_holds_curves_tables_samples_and_findings(page):
    found = data_of(page)
    charts = {"sft-sft-loss", "rm-rm-accuracy", "ppo-score", "run-reliability", "run-ppo-findings", "path-score-run"}
    assert charts | {"frontier-gold-run", "path-gold-run"} <= set(found["charts"])
    assert {name for name, chart in found["charts"].items() if chart["curve"]} == {
        name for name in found["charts"] if name.startswith(("sft-", "rm-", "ppo-"))
    }, "smoothing and a logarithmic scale apply to curves over steps"
    assert all(chart["spec"]["$schema"].endswith("/vega-lite/v6.json") for chart in found["charts"].values())
    for name in found["charts"]:
        assert f'data-chart="{name}"' in page
    assert found["replies"][0]["ppo"]["token_kl"] == [1.5, 0.5]
    assert "0.83 [0.73, 0.93]" in page
    assert "above chance (0.500) and choosing the longer answer (0.600)" in page
    for text in ("scores say &lt;little&gt;", "Benchmark rb2.jsonl", "Along the run", "Raw scores of answers"):
        assert text in page
    assert page.split("<script>")[0].count("raise ppo.kl_coef") == 1
    assert "PPO and best-of-n at PPO&#39;s KL on the same prompts" in page
    assert "1.15 [1.05, 1.25]" in page
    assert "Over-optimisation: gold was highest at iteration 45 (4.20) and ended at 3.10" in page


def shown_figure(value):
    return f"{value:.2f} [{value - 0.1:.2f}, {value + 0.1:.2f}]"


def test_each_cell_of_the_tables_is_the_figure_of_its_row_and_column(read):
    tables = {
        stage: {table["title"]: [table["head"], *table["rows"]] for table in tables_of(data)}
        for stage, data in read.stages.items()
    }
    n = shown_figure
    assert tables["sft"] == {
        "Figures": [
            ["", "before", "SFT", "difference"],
            ["loss", n(3.5), n(1.5), n(-2.0)],
            ["token accuracy", n(0.25), n(0.75), n(0.5)],
        ]
    }
    assert tables["rm"] == {
        "Figures": [
            ["", "value", "chance"],
            ["accuracy", n(0.83), "0.50"],
            ["baseline: longer is better", n(0.6), ""],
            ["margin", n(1.7), ""],
        ],
        "Accuracy by probe": [
            ["", "accuracy", "chance", "longer wins", "rows"],
            ["rude", n(0.71), "0.50", "0.31", "21"],
            ["vague", n(0.64), "0.50", "0.32", "22"],
        ],
        "Raw scores of answers, and of samples of the policies": [
            ["", "mean", "std", "rows"],
            ["better", "2.60", "0.40", "31"],
            ["worse", "-0.60", "0.70", "32"],
            ["SFT", "0.80", "1.10", "33"],
            ["PPO", "1.90", "1.20", "34"],
        ],
        "Benchmark rb2.jsonl": [["subset", "score", "chance", "rows"], ["Math", n(0.77), "0.25", "23"]],
    }
    assert tables["ppo"] == {
        "Figures": [
            ["", "SFT", "PPO", "difference"],
            ["score", n(0.2), n(2.4), n(2.2)],
            ["gold", n(1.6), n(4.7), n(3.1)],
            ["KL to SFT, nats", n(0.0), n(3.7), n(3.9)],
        ],
        "Along the run, held-out prompts": [
            ["iteration", "score", "gold", "KL, nats"],
            ["0", "0.15", "1.65", "0.00"],
            ["45", "2.00 [1.90, 2.10]", "4.20 [4.10, 4.30]", "2.80 [2.60, 3.00]"],
            ["60", "", "", ""],
            ["90", "2.30", "3.10", "3.60"],
        ],
        "How often PPO's reply is better than SFT's": [["by", "win rate"], ["score", n(0.91)], ["gold", n(0.86)]],
        "Alignment tax": [["", "PPO minus SFT, nats"], ["loss on SFT's held-out rows", n(0.33)]],
        "PPO and best-of-n at PPO's KL on the same prompts, 2.90 nats": [
            ["", "best of 40", "PPO", "difference"],
            ["score", n(1.4), n(2.55), n(1.15)],
            ["gold", n(4.1), n(4.85), n(0.75)],
        ],
        "Best-of-n of the SFT model, 12 of the 25 prompts": [
            ["", "score", "gold", "KL, nats"],
            ["best of 1", n(0.3), n(1.8), "0.10"],
            ["best of 64", n(2.1), n(4.4), "3.20"],
            ["PPO", "2.50", "4.80", "2.90"],
        ],
    }


def fields(layer, *names):
    """The values that a layer draws, by its own encoding: ("x", "y") gives the points."""
    keys = [layer["encoding"][name]["field"] for name in names]
    return [tuple(row.get(key) for key in keys) for row in layer["data"]["values"]]


def colors_of(spec):
    scale = spec["encoding"]["color"]["scale"]
    return dict(zip(scale["domain"], scale["range"], strict=True))


def test_each_chart_of_an_evaluation_draws_the_figures_of_its_name(read):
    charts = {chart.id: chart.spec for chart in [*distance_charts([read]), *run_charts(read)]}
    diagonal, line, circles = charts["run-reliability"]["layer"]
    assert line["encoding"]["x"]["title"] == "stated confidence"
    assert line["encoding"]["y"]["title"] == "how often it is right"
    assert fields(diagonal, "x", "y") == [(0.5, 0.5), (1, 1)]
    assert fields(line, "x", "y") == [(0.56, 0.41), (0.93, 0.87)]
    assert fields(circles, "x", "y", "size") == [(0.56, 0.41, 3), (0.93, 0.87, 5)]

    answers, policies = {"better": BETTER, "worse": WORSE}, {"SFT": GRAY, "PPO": TRAINING}
    for name, sides in (("run-scores", answers), ("run-policy-scores", policies)):
        assert colors_of(charts[name]) == sides
        assert [row["side"] for row in charts[name]["data"]["values"]] == list(sides)
    svg = vl_convert.vegalite_to_svg(charts["run-scores"])
    bars = re.findall(r"score: (\S+) – \S+; share: (\d+)\.\d+%; side: (\w+)", svg)
    expected = [("2", "33", "better"), ("2.8", "66", "better"), ("−1", "50", "worse"), ("0", "50", "worse")]
    assert bars == expected, "scores 2, 3 and 3, and -1 and 0"

    spec = charts["run-length"]
    assert fields(spec, "x", "y", "color") == [(11, -0.5, "SFT"), (14, 1.5, "PPO")]

    for figure_name, start, path, best, own, tilt in (
        ("score", 0.15, (2.0, 1.9, 2.1, 2.3), (0.3, 2.1), (2.5, 2.55), 0.6),
        ("gold", 1.65, (4.2, 4.1, 4.3, 3.1), (1.8, 4.4), (4.8, 4.85), 2.6),
    ):
        *_, intervals, points, _ = charts[f"path-{figure_name}-run"]["layer"]
        assert fields(points, "x", "y", "order") == [(0.0, start, 0), (2.8, path[0], 45), (3.6, path[3], 90)]
        assert fields(intervals, "x", "y", "y2") == [(2.8, path[1], path[2])]
        band, dashed, line, label, diamond, interval, name = charts[f"frontier-{figure_name}-run"]["layer"]
        assert fields(line, "x", "y") == [(0.1, best[0]), (3.2, best[1])]
        ends = [
            (kl, pytest.approx(value - 0.1), pytest.approx(value + 0.1))
            for kl, value in zip((0.1, 3.2), best, strict=True)
        ]
        assert fields(band, "x", "y", "y2") == ends
        assert fields(dashed, "x", "y") == [(0.5, tilt)]
        assert fields(label, "x", "y", "text") == [(3.2, best[1], "best of 64")]
        assert fields(diamond, "x", "y") == [(2.9, own[0])]
        assert fields(name, "x", "y", "text") == [(2.9, own[0], "PPO")]
        assert fields(interval, "x", "y2") == [(2.9, pytest.approx(own[1] + 0.1))]
        assert line["encoding"]["y"]["title"] == figure_name
    read.stages["ppo"].evaluation["best_of_n"]["ppo"]["kl"] = -0.01
    chart = next(chart for chart in distance_charts([read]) if chart.id == "frontier-gold-run")
    assert fields(chart.spec["layer"][4], "x") == [(0.0,)], "an estimate below 0 has no square root"


def test_each_curve_draws_its_metric_and_what_it_is_compared_with(read):
    charts = {chart.title: chart for chart in curve_charts([read])}
    assert list(charts) == [curve.title for curve in CURVES]
    for curve in CURVES:
        series = {one["series"]: (one["x"], one["y"]) for one in charts[curve.title].spec["data"]["values"]}
        metrics = {label: read.stages[curve.stage].metrics.get(name) for name, label in curve.metrics.items()}
        if curve.title == "Gold score on held-out prompts":
            metrics = {HELD_OUT: ([0, 45, 90], [1.65, 4.2, 3.1])}
        assert series == metrics
        assert colors_of(charts[curve.title].spec) == {
            "training": TRAINING,
            HELD_OUT: HELD_OUT_COLOR,
            SETTING: TRAINING,
        }
    target, _ = [layer for layer in charts["KL to the SFT model"].spec["layer"] if "data" in layer]
    assert [(row["x"], row["target"]) for row in target["data"]["values"]] == [(1, 3.25), (19, 3.25)]
    assert target["encoding"]["y"]["field"] == "target"


def test_the_page_needs_nothing_else_is_small_and_shows_the_text_of_a_run_as_text(page):
    assert len(page.encode()) < 2_000_000
    own = page.split("<script>")[0]  # Behind it is the chart library, which can load pictures but has none here.
    assert not re.search(r"<(?:script|link|img|iframe)[^>]*(?:src|href)\s*=", own)
    assert "@import" not in page
    assert "url(" not in page.split("</style>")[0]
    assert "<script>alert(1)" not in page
    assert page.count("<script") == 3
    assert data_of(page)["replies"][0]["prompt"] == HOSTILE
    assert "{{ 7 * 7 }}" in page


def test_every_chart_is_drawn(run):
    data = read_run(run, "run")
    charts = [*curve_charts([data]), *distance_charts([data]), *run_charts(data)]
    assert len(charts) >= 14
    assert curve_charts([data])[-1].spec["encoding"]["x"]["title"] == "iteration"
    for chart in charts:
        svg = vl_convert.vegalite_to_svg(chart.spec)
        assert svg.count("<path") > 3, chart.id


def test_the_png_shows_the_main_curves_in_colours_without_a_style_sheet(run, tmp_path, monkeypatch):
    drawn, draw = [], vl_convert.vegalite_to_png
    monkeypatch.setattr(vl_convert, "vegalite_to_png", lambda text, **how: drawn.append(text) or draw(text, **how))
    result = rlhf("report", run, "--png", tmp_path / "a" / "curves.png")
    assert str(tmp_path / "a" / "curves.png") in result.output.replace("\n", "")
    assert (tmp_path / "a" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(picture([read_run(run, "run")])["concat"]) >= 4
    (text,) = drawn
    assert "#1d4ed8" in text
    assert "var(" not in text


@pytest.mark.parametrize(("name", "says"), [("missing", "no such directory"), (".", "no stage has metrics yet")])
def test_a_directory_without_a_run_gets_one_line(tmp_path, name, says):
    assert says in refused("report", tmp_path / name)


def test_a_stage_is_not_a_run(run):
    assert f"is a stage. Give its run, {run}" in refused("report", run / "ppo")


def test_a_long_run_is_thinned_with_its_extremes():
    n = 100_000
    values = [0.0] * n
    values[31_415], values[77_777] = 9.0, -9.0
    started = time.process_time()
    (found,) = curves(({"step": i, "x": value} for i, value in enumerate(values)), ["x"]).values()
    assert time.process_time() - started < 3
    assert len(found[0]) <= MOST_POINTS
    assert max(found[1]) == 9.0
    assert min(found[1]) == -9.0
    assert (found[0][0], found[0][-1]) == (0, n - 1)


def test_rows_that_are_damaged_or_not_finite_are_skipped(run):
    with (run / "ppo" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 20, "objective/score": NaN}\n[1]\n{"step": 21, "objec')
    (run / "ppo").rename(run / ".ppo.partial")  # an unfinished stage is read where it is built
    steps, _ = read_run(run, "run").stages["ppo"].metrics["objective/score"]
    assert steps[-1] == 19


def test_a_finding_has_a_bar_for_each_stretch_and_a_line_in_the_page(read, page):
    chart = findings_chart(read, read.stages["ppo"])
    assert fields(chart.spec, "y", "x", "x2") == [
        ("kl_runaway", 4, 7),
        ("kl_runaway", 11, 12),
        ("overoptimisation", 20, 21),
    ]
    score = next(chart for chart in curve_charts([read]) if chart.title == "Score")
    (rules,) = (layer for layer in score.spec["layer"] if layer["mark"]["type"] == "rule")
    assert [(row["name"], row["x"]) for row in rules["data"]["values"]] == [("kl_runaway", 4), ("overoptimisation", 20)]
    for name, when in (("kl_runaway", "4 iterations (4 to 11)"), ("overoptimisation", "iteration 20")):
        assert f"<dt><strong>{name}</strong><br>{when}</dt>" in page


def test_an_evaluation_of_an_earlier_model_is_not_shown(project):
    root = project / "run"
    manifest = root / "rm" / "manifest.json"
    found = {"manifest": digest_file(manifest), **EVALUATIONS["rm"]}
    write(root / "eval" / "rm" / "evaluation.json", [found])
    assert read_run(root, "run").stages["rm"].evaluation == found
    manifest.write_text(manifest.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert read_run(root, "run").stages["rm"].evaluation == {}


def test_runs_with_other_rewards_do_not_share_a_chart_of_the_score(project, tmp_path):
    """A score of another reward model means something else; the gold of the same judge does not."""
    other = tmp_path / "other"
    shutil.copytree(project / "run", other)
    manifest = other / "ppo" / "manifest.json"
    found = json.loads(manifest.read_text(encoding="utf-8"))
    found["identity"]["config"]["rewards"][0]["weight"] = 2.0
    manifest.write_text(json.dumps(found), encoding="utf-8")
    rows = [{"step": i, "kl": i, "gold": i, "score_mean": i} for i in range(1, 4)]
    for root in (project / "run", other):
        write(root / "ppo" / "evaluations.jsonl", rows)
    runs = [read_run(project / "run", "one"), read_run(other, "two")]
    charts = [chart.id for chart in distance_charts(runs) if chart.id.startswith("path")]
    assert charts == ["path-gold-one-two", "path-score-one", "path-score-two"]
    page = (tmp_path / "both.html").resolve()
    rlhf("report", project / "run", other, "--out", page)
    text = page.read_text(encoding="utf-8")
    assert "Config keys that differ" in text
    assert "ppo: rewards" in text
    charts = data_of(text)["charts"]
    colors = colors_of(charts["path-gold-run-other"]["spec"]["layer"][-1])
    assert colors == {"run": "var(--series-1)", "other": "var(--series-2)"}
    series = charts["sft-sft-loss"]["spec"]["data"]["values"]
    assert {one["run"] for one in series} == {"run, other"}, "both have the same SFT stage"
    assert "rlhf eval" in text, "neither has an evaluation; the page says how to get one"


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (
            {"state": "failed", "line": "reward f: row 3: NaN"},
            "ppo: failed after iteration 1 of 9: reward f: row 3: NaN",
        ),
        ({"state": "interrupted", "line": "ppo: SIGINT"}, "ppo: interrupted after iteration 1 of 9: ppo: SIGINT"),
        ({}, "ppo: interrupted after iteration 1 of 9: its process was killed"),
        (None, "ppo: not run"),
    ],
)
def test_a_stage_that_is_not_finished_comes_first_in_report_watch_status_and_diagnose(project, end, says, monkeypatch):
    monkeypatch.chdir(project)
    monkeypatch.setattr(ranking, "rank", lambda _: [])
    root, partial = project / "run", project / "run" / ".ppo.partial"
    (root / "ppo").rename(partial)
    (partial / "manifest.json").unlink()
    write(root / ".ppo.checkpoints" / "total.json", [{"total": 9}])
    if end:
        write(partial / "end.json", [end])
    elif end is None:
        shutil.rmtree(partial)
    rlhf("report", root)
    page = (root / "report.html").read_text(encoding="utf-8")
    assert "finished on" not in page
    assert page.index(f'<p class="state">{says}</p>') < page.index("<p>SFT: held-out loss")
    assert f"{root}/ppo/config.yaml" not in page, "there is no such file"
    assert f"{root}/rm/config.yaml" in page
    codes = {"watch": 0, "status": 0, "diagnose": 0 if end is None else 2}
    words = {
        name: " ".join(rlhf(name, root, code=code, env={"COLUMNS": "200"}).output.split())
        for name, code in codes.items()
    }
    state, _, why = says.partition(": ")[2].partition(": ")
    assert words["watch"].startswith("run sft" if end is None else f"run ppo {state} {why}")
    assert f"run ppo {state}" in words["watch"]
    if end and end["state"] == "failed":
        assert words["status"].startswith(f"status: warning: {root}: {says}")
    assert f"ppo {state.split(' after')[0]}" in words["status"]
    assert words["diagnose"].startswith(says)
    assert "causes shows (" not in words["diagnose"]
    rlhf("diagnose", root, "--files-only", code=codes["diagnose"])


@pytest.mark.parametrize(
    ("difference", "says"),
    [
        (figure(-0.05), "PPO raised gold from 1.60 to 4.70 at 3.7 nats; best-of-40 is as good."),
        (figure(-0.5), "PPO raised gold from 1.60 to 4.70 at 3.7 nats; best-of-40 is better."),
        (figure(0.5), "PPO raised gold from 1.60 to 4.70 at 3.7 nats, more than best-of-40."),
        (None, "PPO raised gold from 1.60 to 4.70 at 3.7 nats; best-of-48 reaches its score."),
    ],
)
def test_the_page_begins_with_the_result_in_one_sentence(run, difference, says):
    path = run / "eval" / "ppo" / "evaluation.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    same = found["best_of_n"]["at_ppo_kl"]["difference"]
    same["gold"] = difference or {}
    write(path, [found])
    assert headline(read_run(run, "r")) == says
    rlhf("report", run)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert page.index(f'<p class="headline">{says}</p>') < page.index("<p>Reward model")
    found["difference"]["gold"], found["ppo"]["kl"] = figure(0.0), figure(-0.01)
    write(path, [found])
    assert headline(read_run(run, "r")).startswith("PPO did not clearly change gold from 1.60 to 4.70 at 0.0 nats")
    for unmeasured in (path, run / "ppo" / "evaluation.json"):
        unmeasured.unlink()
    assert headline(read_run(run, "r")) == ""


def test_a_reward_model_of_labels_is_measured_against_the_more_frequent_label(run):
    figures = {"accuracy": {**figure(0.8), "rows": 40}, "base_rate": {"value": 0.75}}
    write(run / "eval" / "rm" / "evaluation.json", [{"figures": figures}])
    text = " ".join(verdict(read_run(run, "r")))
    assert "Reward model: held-out accuracy 0.800 (95 % interval 0.700 to 0.900, 40 rows): not above giving" in text
    assert "chance" not in text


def test_runs_that_share_a_stage_share_its_curve(project, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(project / "run", other)
    manifest = other / "ppo" / "manifest.json"
    found = json.loads(manifest.read_text(encoding="utf-8"))
    manifest.write_text(json.dumps({**found, "seed": 7}), encoding="utf-8")
    for root in (project / "run", other):
        write(root / "ppo" / "metrics.jsonl", [{"step": step, "objective/score": 10 * step} for step in (1, 2)])
    names = {"one": project / "run", "two": other, "three": other}
    colors = ("#111111", "#222222", "#333333")
    runs = [
        replace(read_run(root, name), color=color) for (name, root), color in zip(names.items(), colors, strict=True)
    ]
    assert list(shared_runs(runs[:2], "sft")) == ["one, two"]
    assert list(shared_runs(runs, "rm")) == ["all 3 runs"]
    assert list(shared_runs(runs[:2], "ppo")) == ["one", "two"]
    drawn = vl_convert.vegalite_to_svg(picture(runs[:2]))
    assert [f'stroke="{color}"' in drawn for color in colors] == [True, True, False], "in a PNG too"
    assert ">2</text>" in drawn
    assert ">1.5</text>" not in drawn, "a step is a whole number"


def test_two_runs_with_the_same_figures_in_folders_of_any_name(project, tmp_path):
    """The figures are said of the first run. A name may hold bytes that are not UTF-8."""
    roots = [tmp_path / "one", tmp_path / os.fsdecode(b"two\xff")]
    for root in roots:
        shutil.copytree(project / "run", root, ignore=shutil.ignore_patterns("ppo"))
    rlhf("report", *roots, "--out", tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert '<h2 class="run-name">two?</h2>' in page
    assert "No stage has held-out figures" not in page


def luminance(color):
    """The relative luminance of #rrggbb or #rgb (WCAG 2)."""
    digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_text_and_curves_have_the_contrast_of_wcag_aa():
    """4.5 for text and 3 for what carries meaning in charts: light, dark and printed."""
    css = resources.files("rlhf_cli.report").joinpath("page.css").read_text(encoding="utf-8")
    themes = [
        dict(re.findall(r"--([\w-]+): (#\w+)", block)) for block in re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    ]
    assert len(themes) == 3
    for theme in themes:
        colors = themes[0] | theme
        series = [name for name in colors if name.startswith("series-")]
        assert len(series) == 6
        for back in ("paper", "card", "chip"):
            for name in ("ink", "soft", "accent"):
                assert contrast(colors[name], colors[back]) >= 4.5, (name, back)
        marks = ["warning", "better", "worse", "soft", *series]
        for name in marks:
            assert contrast(colors[name], colors["card"]) >= 3, name
        assert len({colors[name] for name in marks}) == len(marks), "a colour means one thing"
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


def run_pipeline(project, monkeypatch):
    """`rlhf pipeline` on a finished project, in which no stage has anything to do."""
    monkeypatch.setattr(pipeline_module, "run_stage", lambda *_, **__: False)
    return " ".join(rlhf("pipeline", project).output.split())


def test_a_pipeline_ends_with_its_report(project, monkeypatch):
    run = read_run(project / "run", "r")
    sft, rm, *_ = verdict(run)  # without an evaluation
    assert sft.startswith("SFT: held-out loss")
    assert rm.startswith("Reward model: held-out accuracy")
    assert headline(run).startswith("PPO ")
    page = project / "run" / "report.html"
    page.unlink(missing_ok=True)
    output = run_pipeline(project, monkeypatch)
    assert output.endswith(f"for a browser: {page}")
    *_, evaluate, _ = output.split("pipeline: ")
    assert "rlhf eval" in evaluate
    first = page.read_bytes()
    assert run_pipeline(project, monkeypatch)
    assert page.read_bytes() == first, "the same run gives the same page"

    def fail(*_):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(pipeline_module, "write_report", fail)
    output = run_pipeline(project, monkeypatch)
    assert "warning" in output
    assert "ZeroDivisionError: a bug" in output


def test_the_javascript_is_bundled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path))
    bundle = javascript()
    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda: pytest.fail("bundled again"))
    assert javascript() == bundle
    assert "vegaEmbed" in bundle


def test_training_figures_are_smoothed_and_others_are_not(read):
    chart = next(chart for chart in curve_charts([read]) if chart.title == "SFT loss")
    lines = [layer for layer in chart.spec["layer"] if layer["mark"]["type"] == "line"]
    shown = [(line["transform"][0]["filter"]["equal"], len(line["transform"]) > 1) for line in lines]
    assert shown == [("training", False), ("training", True), (HELD_OUT, False)]
    smoothing = lines[1]["transform"][1]
    assert (smoothing["loess"], smoothing["on"], smoothing["groupby"]) == ("y", "x", ["run", "series"])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium on the PATH")
def test_the_page_in_a_browser_draws_filters_and_has_no_errors(page, tmp_path):
    watch = """<script>const seen = []; addEventListener("error", (event) => seen.push(event.message));
      for (const name of ["warn", "error"]) console[name] = (...words) => seen.push(words.join(" "));</script>"""
    drive = """<script>setInterval(() => { if (!document.body.dataset.drawn) return;
      const search = document.getElementById("search"), count = document.getElementById("count");
      const counts = ["", "no such word"].map((words) => {
        search.value = words; search.dispatchEvent(new Event("input")); return count.textContent; });
      const charts = [...document.querySelectorAll(".chart")].map((chart) => chart.querySelectorAll("svg path").length);
      document.title = JSON.stringify({seen, counts, charts}); }, 50)</script>"""
    path = tmp_path / "driven.html"
    path.write_text(
        page.replace("<head>", f"<head>{watch}", 1).replace("</body>\n", f"{drive}</body>\n"), encoding="utf-8"
    )
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    dump = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, check=True).stdout
    match = re.search(r"<title>(\{.*?\})</title>", dump)
    found = json.loads(html.unescape(match[1]))
    assert found["seen"] == []
    assert found["counts"] == ["1 to 1 of 1", "0 of 0"]
    assert len(found["charts"]) >= 14
    assert min(found["charts"]) > 3


@pytest.mark.parametrize("option", ["--out", "--png"])
def test_a_file_that_cannot_be_written_is_one_line(project, tmp_path, option):
    (tmp_path / "folder").mkdir()
    line = refused("report", project / "run", "--out", tmp_path / "a.html", option, tmp_path / "folder")
    assert "folder: cannot be written (Is a directory)" in line
