"""The number format of saved weights: that of the weights a stage started from, unless the config says otherwise."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_cli.files import stored_dtype
from rlhf_cli.models.load import load_policy, load_reward_model, load_tokenizer, prepare
from rlhf_cli.models.save import save
from rlhf_cli.run.artifacts import read_manifest
from support.projects import rlhf


@pytest.fixture(scope="module")
def bfloat16_model(make_model, tmp_path_factory):
    """A directory whose file has bfloat16 weights, as most published models."""
    folder = tmp_path_factory.mktemp("bfloat16") / "model"
    save(load_policy(str(make_model("llama"))), load_tokenizer(str(make_model("llama"))), folder, "bfloat16")
    return folder


def dtypes(folder):
    return {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()}


def test_a_stage_saves_what_it_started_from(run_stage, bfloat16_model, tmp_path):
    assert dtypes(bfloat16_model) == {torch.bfloat16}
    assert json.loads((bfloat16_model / "config.json").read_text())["dtype"] == "bfloat16"
    best = {"keep_best": True, "every_steps": 1}
    sft = run_stage("sft", tmp_path, model={"path": str(bfloat16_model)}, evaluation=best)
    assert read_manifest(sft).dtypes == {"model": "bfloat16", "best_model": "bfloat16"}
    rm = run_stage("rm", tmp_path)
    weights = load_file(rm / "model/model.safetensors")
    head = weights.pop("score.weight")
    assert head.dtype == torch.float32
    assert not torch.equal(head, head.bfloat16().float())
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert torch.equal(load_reward_model(str(rm / "model")).score.weight, head)
    ppo = run_stage("ppo", tmp_path, rewards=[{"type": "reward_model"}])
    assert read_manifest(ppo).dtypes == {"model": "bfloat16", "value_model": "bfloat16"}
    assert dtypes(ppo / "model") == {torch.bfloat16}


def test_the_figures_are_those_of_the_saved_model(run_stage, bfloat16_model, tmp_path):
    """Held-out loss of the run against that of a run of no steps on the saved weights."""
    first = run_stage("sft", tmp_path / "first", model={"path": str(bfloat16_model)}, optimizer={"learning_rate": 1e-2})
    model = {"path": str(first / "model")}
    again = run_stage("sft", tmp_path / "again", model=model, optimizer={"learning_rate": 1e-30})
    assert read_manifest(again).metrics["eval/loss"] == read_manifest(first).metrics["eval/loss"]


def test_another_format_on_request(run_stage, make_model, bfloat16_model, tmp_path):
    wide = run_stage("sft", tmp_path / "wide", model={"path": str(bfloat16_model)}, save_dtype="float32")
    assert dtypes(wide / "model") == {torch.float32}
    plain = {"path": str(make_model("llama"))}
    assert read_manifest(run_stage("sft", tmp_path / "plain", model=plain)).dtypes == {"model": "float32"}
    narrow = run_stage("sft", tmp_path / "narrow", model=plain, save_dtype="bfloat16")
    assert dtypes(narrow / "model") == {torch.bfloat16}


def test_adapters_are_merged_into_the_format_of_their_base(run_stage, bfloat16_model, tmp_path):
    model = {"path": str(bfloat16_model), "lora": {"r": 2, "save": "adapter"}}
    stage = run_stage("sft", tmp_path / "run", model=model)
    assert read_manifest(stage).dtypes == {"model": "float32"}  # of the adapters
    for name, options in {"bfloat16": [], "float32": ["--dtype", "float32"]}.items():
        result = rlhf("merge", stage, tmp_path / name, *options)
        assert f"parameters in {name}" in result.output.replace("\n", " ")
        assert stored_dtype(tmp_path / name) == name


def test_a_header_that_cannot_be_read_gives_no_format(tmp_path):
    assert stored_dtype(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    assert stored_dtype(tmp_path) is None


def test_the_format_is_that_of_most_numbers_and_not_of_most_tensors(tmp_path):
    norms = {name: torch.zeros(2) for name in ("a", "b", "c")}
    save_file({**norms, "matrix": torch.zeros(4, 4, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    assert stored_dtype(tmp_path) == "bfloat16"


@pytest.mark.parametrize("longer", [0, 8])
def test_weights_do_not_lie_where_the_header_of_their_file_puts_them(longer, make_model, tmp_path):
    """On some processors the last digit of a product depends on it."""
    shutil.copytree(make_model("llama"), tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = (length + longer).to_bytes(8, "little") + content[8 : 8 + length] + b" " * longer
    file.write_bytes(header + content[8 + length :])
    model = load_policy(str(tmp_path / "model"))
    prepare(model, torch.device("cpu"))
    assert {weight.data_ptr() % 64 for weight in model.parameters()} == {0}
