"""The page that says which model size fits which machine, against the plan."""

import re

import pytest

from support.paths import ROOT
from support.source import module_at

PAGE = ROOT / "docs" / "model_sizes.md"


@pytest.fixture(scope="module")
def page():
    return module_at(PAGE.with_suffix(".py"))


@pytest.fixture
def small(page, monkeypatch):
    """The name of a model with 11 million parameters."""
    size = {"hidden": 512, "mlp": 1024, "layers": 4, "heads": 4, "kv": 2, "vocab": 4000}
    monkeypatch.setattr(page, "MODELS", {"small": ("llama", size)})
    return "small"


def test_the_memory_of_a_method_follows_from_its_models(page, small):
    pytest.importorskip("peft")
    gpu = page.PLACES[1]
    weights = 4000 * 512 + 4 * (2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 1024 + 2 * 512) + 512
    gigabytes = {method: page.needed(small, method, gpu) for method in ("SFT", "SFT, LoRA", "PPO", "PPO, LoRA", "GRPO")}
    assert gigabytes["SFT"] > 16 * weights / 1e9
    assert gigabytes["SFT"] < gigabytes["GRPO"] < gigabytes["PPO"]
    assert gigabytes["SFT, LoRA"] < gigabytes["SFT"] - 12 * weights / 1e9, "adapters need no moments of frozen weights"
    # Reference, value and reward model have the policy's weights.
    assert gigabytes["PPO, LoRA"] - gigabytes["SFT, LoRA"] < 0.6 * (gigabytes["PPO"] - gigabytes["SFT"])


def test_the_largest_model_is_the_last_that_fits(page):
    needs = {"small": {"SFT": 3.0}, "large": {"SFT": 15.0}}
    assert page.largest(needs, "SFT", 16) == "small"
    assert page.largest(needs, "SFT", 17) == "large"
    assert page.largest(needs, "SFT", 3) == "none of these"


def test_the_page_has_the_figures_of_the_plan(page):
    text = PAGE.read_text(encoding="utf-8")
    assert page.ACCURACY in text
    laptop, gpu = page.PLACES
    for place, method in ((laptop, "SFT"), (laptop, "PPO"), (gpu, "SFT, QLoRA")):
        section = text.partition(f"## {place.title}\n")[2]
        (row,) = re.findall(r"^\| SmolLM2-135M \| (.*) \|$", section.partition("\n## ")[0], re.MULTILINE)
        figure = row.split(" | ")[place.methods.index(method)]
        assert figure == f"{page.needed('SmolLM2-135M', method, place):.1f}", "run python docs/model_sizes.py"
    for name in (*page.MODELS, *(method for place in page.PLACES for method in place.methods)):
        assert f"| {name} |" in text


def test_the_readme_names_what_fits_a_laptop():
    laptop = PAGE.read_text(encoding="utf-8").partition("## On a CPU")[2]
    largest = {
        method: re.search(rf"^\| {method} \| \S*-([\d.]+)([MB]) ", laptop, re.MULTILINE) for method in ("SFT", "PPO")
    }
    billions = {
        method: float(size[1]) / (1000 if size[2] == "M" else 1) for method, size in largest.items() if size is not None
    }
    sentence = f"A laptop with 16 GB fits SFT of {billions['SFT']:.2g} B and PPO of {billions['PPO']:.2g} B"
    assert sentence in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
