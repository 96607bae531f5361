"""Mistakes about adapters are errors before rows are read, samples drawn or anything is written."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import yaml
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.config.models import Lora
from rlhf_cli.models import quantized
from rlhf_cli.models.adapter_files import BaseModel, save_adapter
from rlhf_cli.models.adapters import add_lora
from rlhf_cli.models.load import load_policy
from support.paths import ROOT
from support.projects import rlhf

NO_LAYER = (
    "target_modules: found nonsense, which is no layer of this {}. Name some of its linear layers (down_proj, "
    "gate_proj, k_proj, {}o_proj, q_proj, up_proj, v_proj), or remove the key to adapt all of them"
)
LANGUAGE_MODEL, CLASSIFIER = (
    NO_LAYER.format("LlamaForCausalLM", "lm_head, "),
    NO_LAYER.format("LlamaForSequenceClassification", ""),
)


def refused(arguments):
    """The one line of the error."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 2, result.output + result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")


@pytest.fixture
def run(tmp_path):
    """A function: stage, its changed keys -> the error of the command of the stage, which writes nothing."""

    def error(stage, **changes):
        config = yaml.safe_load((ROOT / f"configs/support/{stage}.yaml").read_text())
        config |= {"artifacts": str(tmp_path / "run"), **changes}
        file = tmp_path / f"{stage}.yaml"
        file.write_text(yaml.safe_dump(config))
        line = refused([stage, "--config", file])
        assert not (tmp_path / "run").exists() or not any((tmp_path / "run").iterdir()), "something was written"
        return line

    return error


@pytest.mark.parametrize(
    ("stage", "key", "message"),
    [("sft", "model", LANGUAGE_MODEL), ("rm", "model", CLASSIFIER), ("ppo", "policy", LANGUAGE_MODEL)],
)
def test_a_target_that_is_no_layer(stage, key, message, run, make_model):
    lora = {"path": str(make_model("llama")), "lora": {"target_modules": ["q_proj", "nonsense"]}}
    more = {"rewards": [{"type": "length", "target": 10}]} if stage == "ppo" else {}
    assert run(stage, **{key: lora}, **more) == f"{key}.lora.{message}"


def test_the_value_model_and_other_mistakes(run, make_model, monkeypatch):
    base = str(make_model("llama"))
    rewards = {"rewards": [{"type": "length", "target": 10}]}
    value = {"value_model": {"lora": {"target_modules": ["nonsense"]}}, "policy": {"path": base}}
    assert run("ppo", **value, **rewards) == f"value_model.lora.{CLASSIFIER}"

    def rm(**lora):
        return run("rm", model={"path": base, "lora": lora})

    assert "found embed_tokens, which is not a linear layer of this" in rm(target_modules=["embed_tokens"])
    assert "found score, which is no layer of this" in rm(target_modules=["score"])
    assert rm(quantize="nf4").startswith("model.lora.quantize: no layer of this LlamaForSequenceClassification can be")
    monkeypatch.setattr(quantized, "BLOCK", 16)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert rm(quantize="nf4").startswith("model.lora.quantize: needs the package bitsandbytes (extra qlora). Install")
    monkeypatch.setitem(sys.modules, "peft", None)
    assert rm().startswith("model.lora: needs the package peft (extra lora). Install it:")


def test_adapters_that_could_not_be_loaded_again(run, make_model, tmp_path):
    lora = {"lora": {"save": "adapter"}}
    found = run("rm", model={"path": str(make_model("gpt2")), **lora})
    assert "model.lora.save: adapter:" in found
    assert "no padding token" in found
    adapter = adapters(make_model("llama"), tmp_path / "adapter")
    assert "needs a base of plain weights" in run("sft", model={"path": str(adapter), **lora, "scratch": None})


def test_a_reward_model_of_adapters_that_cannot_be_read(run, make_model, tmp_path):
    adapter = adapters(make_model("llama"), tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "bias": "all"}))
    rewards = [{"type": "reward_model", "path": str(adapter)}]
    assert "sets bias, which is not supported" in run("ppo", policy={"path": str(make_model("llama"))}, rewards=rewards)


def test_adapters_need_peft_in_a_run_and_not_in_its_plan(run, make_model, tmp_path, monkeypatch):
    adapter = adapters(make_model("llama"), tmp_path / "adapter")
    monkeypatch.setitem(sys.modules, "peft", None)
    rewards = [{"type": "reward_model", "path": str(adapter)}]
    error = run("ppo", policy={"path": str(make_model("llama"))}, rewards=rewards)
    assert error.startswith(f"{adapter}: needs the package peft")
    assert "reward model" in rlhf("plan", tmp_path / "ppo.yaml").stdout


@pytest.mark.parametrize("command", [["plan"], ["config", "check"], ["pipeline"]], ids=" ".join)
def test_a_command_over_all_stages_finds_it_before_the_first_one_runs(command, tmp_path):
    """RM's model is the one that the SFT stage of the same folder will train."""
    folder = shutil.copytree(ROOT / "configs/support", tmp_path / "configs")
    for stage in ("sft", "rm", "ppo"):
        text = (folder / f"{stage}.yaml").read_text().replace("artifacts/support", str(tmp_path / "run"))
        more = "model:\n  lora: {target_modules: [nonsense]}\n" if stage == "rm" else ""
        (folder / f"{stage}.yaml").write_text(text + more)
    assert f"model.lora.{CLASSIFIER}" in refused([*command, folder])
    assert not (tmp_path / "run").exists()


def test_a_target_may_name_some_layers_by_their_number(make_model):
    model = load_policy(str(make_model("llama")))
    line = add_lora(model, Lora(r=2, target_modules=["1.mlp.up_proj"]), "model.lora", seed=0)
    assert line.startswith("model.lora: 160 of ")


def adapters(base, folder):
    model = load_policy(str(base))
    add_lora(model, Lora(r=2), "lora", seed=0)
    save_adapter(model, folder, BaseModel(str(base)))
    return folder
