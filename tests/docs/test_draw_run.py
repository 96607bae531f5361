"""docs/draw_run.py: the picture of a run says what its files say."""

from __future__ import annotations

import importlib.util
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.paths import ROOT

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_run", ROOT / "docs" / "draw_run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_run(folder: Path, *, gold: bool = True) -> Path:
    def figures(score: float, kl: float, judged: float) -> dict[str, float]:
        return {"score_mean": score, "kl": kl} | ({"gold": judged} if gold else {})

    reply = {"reply": " Fish & chips <now>.", "gold": 0.5}
    examples = [{"prompt": "Human: What is for lunch?\n\nAssistant:", "sft": reply, "ppo": reply | {"gold": 4.5}}]
    final = {"sft": figures(0.0, 0.0, 2.0), "ppo": figures(1.5, 3.0, 4.0), "examples": examples * 5}
    ppo = folder / "ppo"
    ppo.mkdir(parents=True)
    (ppo / "evaluation.json").write_text(json.dumps(final))
    (ppo / "evaluations.jsonl").write_text(json.dumps({"step": 5, **figures(0.5, 1.0, 3.0)}) + "\n")
    (ppo / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 11)))
    return folder


def elements(svg: str, name: str) -> list[Any]:
    return ElementTree.fromstring(svg).findall(f".//{SVG}{name}")


def test_points_are_placed_to_scale(script: ModuleType, tmp_path: Path) -> None:
    gold = elements(script.draw(write_run(tmp_path / "run")), "polyline")[0].get("points")
    points = [tuple(map(float, point.split(","))) for point in gold.split()]
    assert [x - points[0][0] for x, _ in points] == pytest.approx([0, script.CHART_WIDTH / 2, script.CHART_WIDTH])
    # The axis ends at 4: each unit of gold is a quarter of the height, upwards.
    assert [points[0][1] - y for _, y in points] == pytest.approx([0, 21, 42])


def test_texts_are_escaped_and_numbers_are_shown(script: ModuleType, tmp_path: Path) -> None:
    texts = ["".join(text.itertext()) for text in elements(script.draw(write_run(tmp_path / "run")), "text")]
    assert texts.count("Fish & chips <now>.") == 6
    assert texts.count("What is for lunch?") == 3
    assert {"2.00 → 4.00", "0.00 → 1.50", "0.00 → 3.00", "0.5", "4.5", "iteration 10"} <= set(texts)


def test_the_shipped_picture_is_well_formed_and_has_both_palettes(script: ModuleType) -> None:
    svg = (ROOT / "docs" / "run.svg").read_text(encoding="utf-8")
    assert len(elements(svg, "polyline")) == 3
    style = elements(svg, "style")[0].text
    assert script.stylesheet(script.LIGHT) in style
    assert f"@media (prefers-color-scheme: dark) {{ {script.stylesheet(script.DARK)} }}" in style
