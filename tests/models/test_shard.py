"""Sharded models on 2 and 4 processes: losses, gradients, weights and files of one process that holds everything."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig

from rlhf_cli.plan.shapes import shape_of
from support.gpu import MARKS
from support.paths import ROOT
from support.runs import run_forked_code, variables
from support.sharded import CASES, interrupted, make_models, resumed
from support.source import module_at

TOLERANCE = 1e-5
HALF_TOLERANCE = 0.05
EIGHT_BIT_TOLERANCE = 1e-3  # a moment may be rounded to the next of 256 numbers
FEW = ("llama tied", "gpt2 reward lora")
AMONG_FOUR = ("llama tied", "mixtral", "llama 8bit", "llama hybrid", "llama nf4", "reward bfloat16 adamw")
OTHERS = tuple(name for name in CASES if name not in FEW + AMONG_FOUR)


def run(program, count, folder, *arguments):
    """Run a program of `support.sharded` in `count` processes; what it wrote to gaps.json."""
    code = f"import sys\nfrom support.sharded import {program}\n{program}(*sys.argv[1:])"
    run_forked_code(count, code, str(folder), *arguments, log=folder / "log")
    path = folder / "gaps.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def compared(start, count, folder, cases, *device):
    """(name, differences) of each case, as training whole and sharded gives them."""
    make_models(folder, *cases)
    (folder / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    gaps = start("compare", count, folder, *device)
    assert list(gaps) == list(cases)
    for name, found in gaps.items():
        assert found["before"] == 0.0, name
        assert found["moved"] > 1e-3, name
    return gaps.items()


@pytest.mark.parametrize(
    ("count", "cases"),
    [
        pytest.param(2, FEW, id="2, few"),
        pytest.param(2, OTHERS, marks=pytest.mark.slow, id="2, others"),
        pytest.param(4, AMONG_FOUR, marks=pytest.mark.slow, id="4"),
    ],
)
def test_sharded_models_train_as_whole_ones(count, cases, tmp_path):
    """Three steps with unequal rows; in one of them only the first process has any. With their rows in the memory of
    the CPU they train to the same bits."""
    for name, found in compared(run, count, tmp_path, cases):
        assert found.get("offloaded", 1.0) == 1.0, name
        if "float16" in name:  # the norms of the blocks are rounded too
            assert max(found["loss"], found["norm"], found["weights"]) < HALF_TOLERANCE, (name, found)
        else:
            figures = ("loss", "norm", "weights", "saved")
            limit = EIGHT_BIT_TOLERANCE if "8bit" in name else TOLERANCE
            assert max(found[figure] for figure in figures) < limit, (name, found)


ONE_GPU = pytest.param("cuda", 1, marks=MARKS)
TWO_GPUS = pytest.param(
    "cuda", 2, marks=(pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"))
)


@pytest.mark.parametrize(("device", "count"), [pytest.param("cpu", 1, marks=pytest.mark.slow), ONE_GPU, TWO_GPUS])
def test_sharded_models_train_as_whole_ones_by_the_backend_of_the_device(device, count, tmp_path):
    """On GPUs by NCCL. One process exchanges with itself alone. On a GPU sums are not in a fixed order."""
    cases = ("llama tied", "llama lora", "llama bfloat16")
    for name, gaps in compared(run if device == "cpu" else run_anew, count, tmp_path, cases, device):
        tolerance = 0.05 if "bfloat16" in name else TOLERANCE if device == "cpu" else 1e-4
        assert max(gaps["loss"], gaps["norm"], gaps["weights"]) < tolerance, (name, gaps)


def run_anew(program, count, folder, *arguments):
    """`run` in new processes. One that was forked cannot use a GPU if its parent has asked for one."""
    code = f"import sys\nfrom support.sharded import {program}\n{program}(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(folder), *arguments]
    path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    processes = [
        subprocess.Popen(command, env=os.environ | path | own, stderr=subprocess.PIPE, cwd=ROOT, text=True)
        for own in variables(count)
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * count, "\n".join(errors)[-3000:]
    return json.loads((folder / "gaps.json").read_text(encoding="utf-8"))


SLOW = [
    *[("llama tied", *counts) for counts in ((2, 4), (1, 2))],
    *[("llama hybrid", *counts) for counts in ((4, 2), (2, 4))],
    ("llama nf4_double", 2, 2),
    *[("llama bfloat16 adamw", *counts) for counts in ((2, 1), (1, 2))],
    *[("llama 8bit", *counts) for counts in ((2, 1), (1, 4))],
    ("qwen2 8bit tied", 1, 2),
]


@pytest.mark.parametrize(
    ("case", "saves", "resumes"),
    [("llama tied", 2, 1), *(pytest.param(*which, marks=pytest.mark.slow) for which in SLOW)],
)
def test_a_checkpoint_resumes_on_another_number_of_processes(case, saves, resumes, tmp_path):
    """Each process writes its rows, and a run that is not sharded reads them too."""
    make_models(tmp_path, case)
    if saves == 1:
        interrupted(str(tmp_path), case)
    else:
        run("interrupted", saves, tmp_path, case)
    num_files = min(saves, CASES[case].get("per_node", saves))
    assert len(list(tmp_path.glob("step-*/*.safetensors"))) == num_files
    if resumes == 1:
        resumed(str(tmp_path), case)
    else:
        run("resumed", resumes, tmp_path, case)
    difference = json.loads((tmp_path / "gaps.json").read_text(encoding="utf-8"))
    limits = {"float16": HALF_TOLERANCE, "8bit": EIGHT_BIT_TOLERANCE}
    assert difference < next((limit for word, limit in limits.items() if word in case), TOLERANCE)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_that_sample_from_a_sharded_model_draw_the_tokens_of_a_whole_one(count, tmp_path):
    """One has the longest responses and another the shortest. Of four, two have none, and each pair holds the model."""
    make_models(tmp_path, "llama")
    gaps = run("sampled", count, tmp_path)
    assert len(gaps) == 4
    for name, (wrong, gap) in gaps.items():
        assert wrong == 0, name
        assert gap < TOLERANCE, name


@pytest.mark.parametrize(("count", "per_node"), [(2, None), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_the_bytes_that_a_process_sends_are_those_of_the_page_about_scale(count, per_node, tmp_path):
    """benchmarks/scale.py computes them for a step and for a sampled token on GPUs; here they are counted."""
    make_models(tmp_path, "llama")
    figures = run("counted", count, tmp_path, per_node)
    scale = module_at(ROOT / "benchmarks" / "scale.py")
    config = AutoConfig.from_pretrained(tmp_path / "llama")
    shape = shape_of(config, False, "bfloat16")
    # The page takes the norms of a layer, 64 of its 7,744 numbers here, to be exchanged with the embeddings.
    scale.MACHINE, shard = (8, True) if per_node is None else (per_node, "hybrid")
    step = scale.sent_in_step(shape, count, shard)
    assert figures["step"] == pytest.approx(step.inside, rel=0.01)
    assert per_node is None or figures["sum"] * per_node == pytest.approx(step.between, rel=0.01)
    assert figures["sampling"] == pytest.approx(5 * scale.sent_in_pass(shape, count, shard).inside, rel=0.01)


@pytest.mark.slow
def test_a_sharded_model_is_compiled_block_by_block(tmp_path):
    """One process, which exchanges with itself alone: each more would compile the blocks again."""
    make_models(tmp_path, "llama")
    assert run("compiled", 1, tmp_path) < TOLERANCE


@pytest.mark.slow
def test_a_frozen_block_is_kept_in_the_precision_in_which_it_is_exchanged(tmp_path):
    make_models(tmp_path, "llama tied")
    figures = run("frozen", 2, tmp_path, "llama tied")
    assert figures["difference"] == 0.0
    assert figures["bytes"][1] == figures["bytes"][0] / 2


NEVER_SHARDED = {"activations.py", "network.py"}
BEFORE_IT_IS_SHARDED = {"heads.py", "layers.py"}
THE_WHOLE_COPY = {"rollout.py"}


def test_code_that_computes_with_a_sharded_model_asks_for_its_device():
    """Its weights may be on the CPU while it computes on a GPU, which no test here has."""
    asks = re.compile(r"parameters\(\)\)\.device|(model|policy)\.device\b")
    files = (ROOT / "rlhf_cli").rglob("*.py")
    found = {path.name for path in files if asks.search(path.read_text(encoding="utf-8"))}
    assert found == NEVER_SHARDED | BEFORE_IT_IS_SHARDED | THE_WHOLE_COPY
