"""The cost model on models without weights, and the page that says which model size fits which machine."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from rlhf_cli.models.cost import activation_bytes, cache_bytes, static_bytes, token_bytes
from support.paths import ROOT

PAGE = ROOT / "docs" / "model_sizes.md"
SETTINGS = {
    "llama": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
    "qwen2": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
}


@pytest.fixture(scope="module")
def page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("model_sizes", PAGE.with_suffix(".py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Where dataclasses look up annotations.
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("family", SETTINGS)
def test_costs_on_the_meta_device_are_close_to_those_on_a_cpu(family: str) -> None:
    config = AutoConfig.for_model(family, vocab_size=50, **SETTINGS[family])
    real = AutoModelForCausalLM.from_config(config)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config)
    # On the meta device attention keeps a little more than on a CPU.
    assert 1 <= activation_bytes(shapes, "float32") / activation_bytes(real, "float32") < 1.3
    assert static_bytes([shapes], [shapes]) == 20 * real.num_parameters()
    assert token_bytes([real], "float32") == activation_bytes(real, "float32") + 4 * 4 * 50


@pytest.mark.parametrize("family", SETTINGS)
def test_cache_bytes_equal_those_that_a_forward_pass_writes(family: str) -> None:
    config = AutoConfig.for_model(family, vocab_size=50, **SETTINGS[family])
    model, cache = AutoModelForCausalLM.from_config(config), DynamicCache(config=config)
    model(input_ids=torch.tensor([[1, 2, 3, 4, 5]]), past_key_values=cache)
    written = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert cache_bytes(model, 5) == written
    assert cache_bytes(model, 5, 2) == written / 2


def test_the_memory_of_a_run_follows_from_its_models(page: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    size = {"hidden": 64, "mlp": 128, "layers": 2, "heads": 4, "kv": 2, "vocab": 500}
    monkeypatch.setattr(page, "MODELS", {"small": ("llama", size)})
    gigabytes = {method: page.needed(make("small")) for method, make in page.METHODS.items() if "LoRA" not in method}
    assert gigabytes["GRPO, reward function"] < gigabytes["PPO"]
    assert gigabytes["SFT"] < gigabytes["GRPO, reward function"]
    weights = page.language_model("small").num_parameters()
    run = page.METHODS["PPO"]("small")
    head = page.language_model("small", head=True).num_parameters()
    assert static_bytes(run.trained, run.frozen) == 20 * (weights + head)


def test_adapters_need_no_moments_of_the_frozen_weights(page: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    size = {"hidden": 64, "mlp": 128, "layers": 2, "heads": 4, "kv": 2, "vocab": 5000}
    monkeypatch.setattr(page, "MODELS", {"small": ("llama", size)})
    run = page.METHODS["PPO, LoRA"]("small")
    weights = page.language_model("small").num_parameters()
    assert static_bytes(run.trained[:1], []) < 6 * weights
    assert page.needed(run) < page.needed(page.METHODS["PPO"]("small"))


def test_the_largest_model_is_the_last_that_fits(page: ModuleType) -> None:
    needs = {"small": {"SFT": 3.0}, "large": {"SFT": 15.0}}
    assert page.largest(needs, "SFT", 16) == "small"
    assert page.largest(needs, "SFT", 16.5) == "large"
    assert page.largest(needs, "SFT", 4) == "none of these"


def test_the_page_matches_its_script(page: ModuleType) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page.MEASUREMENT in text
    assert f"{page.TOKENS:,} tokens" in text
    for name in (*page.MODELS, *page.METHODS, *page.MACHINES):
        assert f"| {name} |" in text
