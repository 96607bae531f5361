"""The speed benchmark: how it counts work, and how it computes ratios from seconds."""

import doctest
import importlib
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from support.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Import a script of benchmarks/ as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == BENCHMARKS:
            del sys.modules[name]


@pytest.mark.parametrize(
    "name", ["speed_inputs", "speed_limits", "speed_report", "growth", "gpu_memory", "speedrun", "real_model"]
)
def test_the_docstring_examples_of_the_benchmarks_run(load, name):
    failures, tests = doctest.testmod(load(name))
    assert tests > 0
    assert failures == 0


def test_the_functions_that_begin_a_phase_exist(load):
    for phases in load("gpu_memory").FUNCTIONS.values():
        for owner, functions in phases.items():
            for name in functions:
                assert callable(resolve_name(f"{owner}.{name}"))


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_forward_operations_equal_those_that_torch_counts(load, kv_heads):
    limits, inputs = load("speed_limits"), load("speed_inputs")
    size = inputs.Size(32, 40, 2, 4, 50, ppo_batch=1, steps=0, learning_rate=0.0, kv_heads=kv_heads)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        vocab_size=50,
    )
    model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    # One token at a time, so that torch multiplies no masked pair.
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        cache = None
        for token in range(7):
            cache = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).past_key_values
    assert limits.forward(size, 7, 7).flops == counter.get_total_flops()
    shared = limits.forward(size, 3, 0) + limits.forward(size, 7, 7, start=3)
    assert shared.flops == limits.forward(size, 7, 7).flops


def test_rollout_operations_and_bytes_by_hand(load):
    limits, inputs = load("speed_limits"), load("speed_inputs")
    size = inputs.MODELS["a"]
    work = limits.rollout_work(size, [5, 3], [2, 4])
    assert work.flops == limits.forward(size, 6, 2).flops + limits.forward(size, 6, 4).flops
    weights = size.layers * (4 * 128**2 + 3 * 128 * 344) + 128 * 2048
    # A step over a row of n tokens reads n keys and n values of 128 numbers in each of 4 layers.
    cached = 2 * 4 * 128 * (5 + 6 + 3 + 4 + 5 + 6)
    assert work.bytes == 4 * (4 * weights + cached)


def result(ours, trl):
    """The result of one task in speed.py, from pairs of units and seconds."""
    task = {"name": "SFT a", "kind": "sft", "model": "a", "unit": "real tokens/s"}
    task |= {"floor": 2.2, "goal": 3.0, "epochs": 1}
    steps = {
        side: [
            {"units": units, "wall_s": wall, "cpu_s": wall, "peak_rss": 1e6, "work": [[9, 4], [8, 3]], "computed": 20}
            for units, wall in pairs
        ]
        for side, pairs in (("ours", ours), ("trl", trl))
    }
    run = {
        "code": "abc",
        "packing": False,
        "precision": "float32",
        "threads": 1,
        "warmup": 1,
        "checks": {},
        "microbatch": None,
    }
    return {"task": task, **run, **steps}


def test_ratios_are_of_rates_pair_by_pair_without_warm_up(load):
    report = load("speed_report")
    task = result(ours=[(1, 99.0), (10, 2.0), (10, 1.0)], trl=[(1, 1.0), (5, 2.0), (10, 4.0)])
    assert report.ratios(task, "wall_s") == [2.0, 4.0]
    assert report.rate(task, "ours") == 20 / 3
    assert report.rate(task, "trl") == 15 / 6


def test_the_report_lists_slow_and_missing_measurements(load, tmp_path):
    report, speed = load("speed_report"), load("speed")
    speed.write_json(tmp_path / "SFT a, 1.json", result(ours=[(17, 1.0)] * 4, trl=[(17, 1.5)] * 4))
    report.write(tmp_path, tmp_path / "RESULTS.md")
    text = (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    assert "| SFT a | float32 | 1 | real tokens/s | 11.33 | 17 | **1.50 (1.50-1.50)** |" in text
    assert "BELOW THE FLOOR" in text
    assert "See [GPU.md](GPU.md)." in text
    assert "## Growth\n\nNot measured." in text


@pytest.mark.parametrize(
    ("ours", "trl", "step", "complaint"),
    [
        ({"batch": "x", "loss": 2.0}, {"batch": "y", "loss": 2.0}, 0, "different tokens"),
        ({"batch": "x", "loss": 2.0}, {"batch": "x", "loss": 2.001}, 0, "first loss differs by 0.0005"),
        ({"batch": "x", "loss": 2.0}, {"batch": "x", "loss": float("nan")}, 0, "first loss differs by nan"),
        ({"batch": "x", "loss": 2.0}, {"batch": "x", "loss": 2.2}, 5, "last loss differs"),
    ],
)
def test_different_results_of_the_two_sides_stop_the_benchmark(load, ours, trl, step, complaint):
    speed = load("speed")
    with pytest.raises(SystemExit, match=complaint):
        speed.compare(speed.TASKS[0], ours, trl, step)
