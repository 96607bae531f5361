"""The page about 8 to 1,024 GPUs against its generator, and the generator against hand computation."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from support.paths import ROOT

PAGE = ROOT / "docs" / "scale.md"
SEVEN_B = 6_738_415_616
"""Parameters of Llama 2 7B, as published."""


@pytest.fixture(scope="module")
def page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scale", PAGE.with_suffix(".py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("gpus", [8, 1024])
def test_a_step_of_7_b_by_hand(page: ModuleType, gpus: int) -> None:
    plan = page.planned("7 B", gpus)
    shape = plan.models[0].shape
    assert shape.weights == SEVEN_B
    parts = plan.peak.parts
    assert parts["weights"] + parts["optimizer"] == pytest.approx(12 * SEVEN_B / gpus)
    ends = 2 * 32000 * 4096
    # Norms are counted with the ends.
    by_hand = (2 * (2 * (SEVEN_B - ends) + 4 * ends) + 4 * SEVEN_B) * (gpus - 1) / gpus
    sent, computes, sends = page.step(plan, gpus)
    assert sent == pytest.approx(by_hand, rel=1e-4)
    row = f"| 7 B | {gpus:,} | {plan.peak.total / 1e9:.0f} | {sent / 1e9:.0f} | {computes:.1f} | {sends:.1f} |"
    assert row in PAGE.read_text(encoding="utf-8"), "run python docs/scale.py"


def test_the_page_holds_an_rl_step_of_7_b_against_others(page: ModuleType) -> None:
    shape = page.planned("7 B", 8).models[0].shape
    tokens, peak = 1024 * 2048 / 16, 0.4 * 312e12
    computing = (2 + 2 * 4 + 8 * 2) * SEVEN_B * tokens / peak
    cache = 64 * 1536 * 2 * (2 * 32 * 4096)
    by_hand = computing + 1024 * (2 * SEVEN_B + cache) / 2.0e12
    seconds = page.rl_step(shape, "A800", 16, 1024, 1024, 1024, trained_models=2, passes=4)
    assert seconds == pytest.approx(by_hand)
    text = PAGE.read_text(encoding="utf-8")
    assert f"| 471, 855 | {seconds:.0f} |" in text, "run python docs/scale.py"
    assert all(f"| {name} | {gpus:,} |" in text for name in page.SIZES for gpus in page.GPUS)
