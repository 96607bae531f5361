"""All stages on a GPU give the figures and the samples of a CPU, and their memory is that of the plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from support.gpu import MARKS, needs_gpu
from support.paths import ROOT
from support.tiny import read_jsonl

FIGURES = {
    "sft": ("loss/sft", "sft/grad_norm"),
    "rm": ("loss/rm", "rm/grad_norm"),
    "ppo": ("objective/score", "objective/kl", "loss/value", "policy/grad_norm"),
}


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=MARKS)])
def test_the_stages_compute_what_they_do_on_a_cpu(run_stage, make_model, tmp_path, device):
    """In float32, each stage from the models of the CPU. Its sums are in another order, so only figures are equal."""
    cpu = tmp_path / "on the cpu"
    sft, rm = {"path": str(cpu / "sft")}, [{"type": "reward_model", "path": str(cpu / "rm")}]
    models = {
        "sft": {"model": {"path": str(make_model("llama"))}},
        "rm": {"model": sft},
        "ppo": {"policy": sft, "rewards": rm},
    }
    for stage, keys in models.items():
        here = run_stage(stage, cpu, **keys, device="cpu", precision="float32")
        there = run_stage(stage, tmp_path, **keys, device=device, precision="float32")
        rows, expected = (read_jsonl(folder / "metrics.jsonl") for folder in (there, here))
        for name in FIGURES[stage]:
            figures = [[row[name] for row in run if name in row] for run in (rows, expected)]
            assert figures[0] == pytest.approx(figures[1], rel=1e-3, abs=1e-4), name
            assert len(figures[0]) > 1, name
    samples = [[row["response"] for row in read_jsonl(folder / "samples.jsonl")] for folder in (there, here)]
    assert samples[0] == samples[1]


@needs_gpu
@pytest.mark.parametrize("what", ["SFT full", "SFT LoRA", "RM full", "PPO full", "PPO NF4"])
def test_the_peak_is_within_15_percent_of_the_plan(what, tmp_path):
    """At 25 million parameters in bfloat16, by the script of the benchmark."""
    file = tmp_path / "part.json"
    script = [sys.executable, ROOT / "benchmarks/gpu.py", "--work", tmp_path]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(
        [*script, "--part", f"memory 25 M {what}", "--part-file", file], env=environment, cwd=ROOT, check=True
    )
    result = json.loads(file.read_text(encoding="utf-8"))
    planned = max(sum(parts.values()) for parts in result["planned"].values())
    assert 0.85 <= planned / max(result["allocated"].values()) <= 1.15, result["rows"]
