"""`rlhf report`: one self-contained HTML file about one or several runs."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import itertools
import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from rlhf_cli.config.stage import STAGES
from rlhf_cli.errors import ArtifactError
from rlhf_cli.files import cache_root
from rlhf_cli.health.recap import unit_of
from rlhf_cli.report.charts import (
    DISTANCE,
    SMOOTHING,
    Chart,
    curve_charts,
    distance_charts,
    evaluation_charts,
    findings_chart,
    frontier_charts,
    same_stage,
)
from rlhf_cli.report.run_data import COLORS, RunData, names_of, read_run
from rlhf_cli.report.tables import TITLES, side_by_side, tables_of
from rlhf_cli.report.verdict import headline, verdict
from rlhf_cli.run.artifacts import repeat_commands
from rlhf_cli.run.state import state_of, unfinished_stages

MAIN = (
    "sft-sft-loss",
    "rm-rm-accuracy",
    "ppo-score",
    "ppo-kl-to-the-sft-model",
    "ppo-gold-score-on-held-out-prompts",
    "ppo-reply-length",
    "ppo-entropy",
)
"""Curves of `--png`, the most important first."""
MOST_IN_PICTURE = 6
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
"""Names the language of a specification; nothing is fetched from there."""
FOLDER = "rlhf-report"  # the folder in the cache directory that holds the JavaScript


def write_report(roots: Sequence[Path], out: Path, png: Path | None = None) -> None:
    """Write the page to `out`, and its main curves to `png`.

    Raises ArtifactError for a directory without a run, and for a file that cannot be written.
    """
    runs = [read_run(root, name) for root, name in zip(roots, names_of(roots), strict=True)]
    runs = [replace(run, color=COLORS[i % len(COLORS)]) for i, run in enumerate(runs)]
    text = page(runs, javascript())
    _write(out, text.encode("utf-8", "replace"))  # a folder's name may hold bytes that are not UTF-8
    if png is not None:
        import vl_convert

        light = resources.files("rlhf_cli.report").joinpath("page.css").read_text(encoding="utf-8").partition("}")[0]
        colors = dict(re.findall(r"(--[\w-]+): (#\w+)", light))
        drawn = re.sub(r"var\((--[\w-]+)\)", lambda variable: colors[variable[1]], json.dumps(picture(runs)))
        _write(png, vl_convert.vegalite_to_png(drawn, scale=2))


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written ({error.strerror or error})") from None


def javascript() -> str:
    """The JavaScript of Vega, Vega-Lite and vega-embed, which vl-convert brings.

    vl-convert needs 1.5 s to bundle it, so the bundle is kept in the cache directory, by version of vl-convert. Without
    a cache that can be written, it is bundled each time.
    """
    import vl_convert

    path = cache_root() / FOLDER / f"vl-convert-{importlib.metadata.version('vl-convert-python')}.js"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8")
    text: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # the stub of 1.9 has no default
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    return text


def page(runs: Sequence[RunData], bundle: str) -> str:
    """The HTML page. `bundle` is the JavaScript of Vega, Vega-Lite and vega-embed."""
    import jinja2

    loader = jinja2.PackageLoader("rlhf_cli.report", "")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":"), "allow_nan": False}
    charts = [*curve_charts(runs), *distance_charts(runs), *frontier_charts(runs)]
    charts += [chart for run in runs for chart in run_charts(run)]
    curves = {TITLES[stage]: [chart for chart in charts if chart.section == f"curves-{stage}"] for stage in STAGES}
    replies = [row for run in runs for row in replies_of(run)]
    specs = {
        chart.id: {"spec": {"$schema": SCHEMA, **chart.spec}, "curve": chart.section.startswith("curves-")}
        for chart in charts
    }
    # The same run gives the same page, whenever it is written.
    manifests = [data.manifest for run in runs for data in run.stages.values() if data.manifest is not None]
    date = "not finished"
    if manifests and not any(unfinished_stages(run.root) for run in runs):
        last = datetime.datetime.fromisoformat(max(manifest.finished for manifest in manifests))
        date = f"finished on {last.day} {last:%B %Y at %H:%M} UTC"
    return environment.get_template("page.html").render(
        title=" and ".join(run.name for run in runs),
        date=date,
        bundle=bundle,
        data={"charts": specs, "replies": replies},
        smoothing=SMOOTHING,
        titles=TITLES,
        unit_of=unit_of,
        runs=_views(runs),
        curves={title: shown for title, shown in curves.items() if shown},
        distance=[chart for chart in charts if chart.section == DISTANCE],
        together=side_by_side(runs) if len(runs) > 1 else [],
        sections=_sections(runs, charts),
        lacks_evaluation=[str(run.root) for run in runs if not any(d.evaluation for d in run.stages.values())],
        has_replies=bool(replies),
        has_gold=any("gold" in row["sft"] for row in replies),
    )


def run_charts(run: RunData) -> list[Chart]:
    """The charts of one run alone: health findings and the figures of `rlhf eval`."""
    findings = [findings_chart(run, data) for data in run.stages.values()]
    return [*(chart for chart in findings if chart is not None), *evaluation_charts(run)]


def _views(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """The texts of each run. A sentence of the verdict on one run is not said again of the next."""
    views = []
    said: list[str] = []
    for run in runs:
        new = [sentence for sentence in verdict(run) if sentence not in said]
        said += new
        views.append(
            {
                "name": run.name,
                "has_figures": bool(verdict(run) or headline(run)),
                "unfinished": [text for _, text in unfinished_stages(run.root)],
                "headline": headline(run),
                "verdict": new,
                "stages": [(data, state_of(run.root, stage).name) for stage, data in run.stages.items()],
                "commands": repeat_commands(run.root, [stage for stage, data in run.stages.items() if data.manifest]),
            }
        )
    return views


def _sections(runs: Sequence[RunData], charts: Sequence[Chart]) -> list[dict[str, Any]]:
    """A section per stage that has figures, charts or findings. Runs that share a stage share its section."""
    found: list[dict[str, Any]] = []
    for stage, run in itertools.product(STAGES, runs):
        if (data := run.stages.get(stage)) is None:
            continue
        for section in found:
            other = section["stage"]
            if stage != "ppo" and same_stage(other, data) and other.evaluation == data.evaluation:
                section["runs"].append(run.name)
                break
        else:
            own = [chart for chart in charts if chart.run == run.name and chart.section == stage]
            tables = tables_of(data)
            if own or tables or data.findings or stage == "ppo":
                section = {"id": f"{run.name}-{stage}", "runs": [run.name], "stage": data, "charts": own}
                found.append({**section, "tables": tables})
    return found


def replies_of(run: RunData) -> list[dict[str, Any]]:
    """The rows of the samples browser: a prompt with the replies of SFT and PPO."""
    if (stage := run.stages.get("ppo")) is None:
        return []
    rows = stage.evaluation.get("replies") or stage.own_evaluation.get("examples", [])
    return [{"run": run.name, **row} for row in rows]


def picture(runs: Sequence[RunData]) -> dict[str, Any]:
    """The main curves as one Vega-Lite specification, for a PNG."""
    by_id = {chart.id: chart for chart in curve_charts(runs)}
    chosen = [by_id[name] for name in MAIN if name in by_id][:MOST_IN_PICTURE]
    cells = [
        {
            "title": f"{chart.title} ({chart.note})",
            "width": 300,
            "height": 180,
            **{key: chart.spec[key] for key in ("data", "transform", "encoding")},
            # The layer with a parameter serves the pointer only.
            "layer": [layer for layer in chart.spec["layer"] if "params" not in layer],
        }
        for chart in chosen
    ]
    config = {"range": {"category": COLORS}, "view": {"stroke": None}, "mark": {"color": COLORS[0]}}
    # Else all charts have the colours of the first one, whose runs may share the stage.
    own = {"scale": {"color": "independent", "strokeDash": "independent"}}
    page = {"$schema": SCHEMA, "background": "white", "columns": 3, "concat": cells}
    return {**page, "resolve": own, "config": config}
