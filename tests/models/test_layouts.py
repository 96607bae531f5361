"""The layout of exported models: what transformers, vLLM and llama.cpp find in them.

What vLLM's loaders expect is written down here, from vllm/model_executor/models/llama.py, qwen2.py, gpt2.py
(`load_weights` and the modules) and adapters.py (`as_seq_cls_model`), because vLLM needs a GPU.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.config.models import ScratchModel
from rlhf_cli.models.load import align, load_policy, new_reward_model, prepare
from rlhf_cli.models.save import save
from rlhf_cli.models.scratch import new_model
from support.compare import logits_of
from support.tiny import SETTINGS

STACKED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""vLLM's parameters that hold several of the file's tensors, one above the other."""
LLAMA_LAYER = ["input_layernorm", "post_attention_layernorm", "self_attn.qkv_proj", "self_attn.o_proj"]
LLAMA_LAYER += ["mlp.gate_up_proj", "mlp.down_proj"]
GPT2_LAYER = ["ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
MODELS = [(name, tied) for name in ("llama", "qwen2", "gpt2") for tied in (True, False)]


def parameters(architecture: str, layers: int) -> list[str]:
    """The parameters of vLLM's class, without the head."""
    if architecture == "gpt2":
        names = [
            f"transformer.h.{i}.{name}.{kind}"
            for i in range(layers)
            for name in GPT2_LAYER
            for kind in ("weight", "bias")
        ]
        ends = ["transformer.ln_f.weight", "transformer.ln_f.bias"]
        return ["transformer.wte.weight", "transformer.wpe.weight", *names, *ends]
    names = [f"model.layers.{i}.{name}.weight" for i in range(layers) for name in LLAMA_LAYER]
    if architecture == "qwen2":
        names += [f"model.layers.{i}.self_attn.qkv_proj.bias" for i in range(layers)]
    return ["model.embed_tokens.weight", *names, "model.norm.weight"]


def tensors_for(parameter: str) -> list[str]:
    """The names under which vLLM looks for a parameter's tensors in the files."""
    for name, parts in STACKED.items():
        if name in parameter:
            return [parameter.replace(name, part) for part in parts]
    return [parameter]


@pytest.fixture(scope="module", params=MODELS, ids=lambda value: f"{value[0]} {'tied' if value[1] else 'untied'}")
def exported(
    request: Any, tokenizer: Any, eos_only_tokenizer: Any, tmp_path_factory: Any
) -> tuple[str, bool, Path, Path]:
    """(architecture, tied, a random model, its export in float32)."""
    architecture, tied = request.param
    folder = tmp_path_factory.mktemp("layout")
    config = {**SETTINGS[architecture], "tie_word_embeddings": tied}
    own = eos_only_tokenizer if architecture == "gpt2" else tokenizer
    save(new_model(ScratchModel(architecture=architecture, config=config), own, seed=4), own, folder / "model")
    result = CliRunner().invoke(app, ["export", str(folder / "model"), "--out", str(folder / "out")])
    assert result.exit_code == 0, result.output
    return architecture, tied, folder / "model", folder / "out"


def logits(model: Any) -> torch.Tensor:
    align(model)
    return logits_of(model)


def test_transformers_computes_the_same_logits(exported: tuple[str, bool, Path, Path]) -> None:
    _, tied, model, out = exported
    plain = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits(plain), logits(AutoModelForCausalLM.from_pretrained(model)))
    assert (plain.get_output_embeddings().weight is plain.get_input_embeddings().weight) == tied


def test_vllm_finds_every_tensor_under_its_name(exported: tuple[str, bool, Path, Path]) -> None:
    architecture, tied, _, out = exported
    tensors, config = load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())
    expected = [name for parameter in parameters(architecture, 2) for name in tensors_for(parameter)]
    # vLLM before 0.10 skips the output layer of an untied GPT-2.
    assert set(tensors) == {*expected, *(() if tied else ("lm_head.weight",))}
    classes = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "gpt2": "GPT2LMHeadModel"}
    assert config["architectures"] == [classes[architecture]]
    assert (config["model_type"], config["tie_word_embeddings"], config["dtype"]) == (architecture, tied, "float32")
    rows = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if architecture == "gpt2":
        # vLLM transposes the layers of GPT-2, whose files have [in, out].
        assert rows["transformer.h.0.attn.c_attn.weight"] == [32, 96]
        assert rows["transformer.wte.weight"][0] == config["vocab_size"]
        return
    size = config["hidden_size"] // config["num_attention_heads"]
    heads = [config["num_attention_heads"], config["num_key_value_heads"], config["num_key_value_heads"]]
    names = tensors_for("model.layers.0.self_attn.qkv_proj.weight")
    assert [rows[name] for name in names] == [[count * size, config["hidden_size"]] for count in heads]
    assert rows["model.embed_tokens.weight"] == [config["vocab_size"], config["hidden_size"]]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2"])
def test_vllm_finds_the_head_of_a_reward_model(
    architecture: str, make_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """A layer `score` without bias at the top, and one label."""
    model, _ = new_reward_model(str(make_model(architecture)), None, seed=1, head_std=None)
    model.config.pad_token_id = 0
    save(model, tokenizer, tmp_path / "model")
    result = CliRunner().invoke(app, ["export", str(tmp_path / "model"), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    tensors, config = (
        load_file(tmp_path / "out/model.safetensors"),
        json.loads((tmp_path / "out/config.json").read_text()),
    )
    expected = [name for parameter in parameters(architecture, 2) for name in tensors_for(parameter)]
    assert set(tensors) == {*expected, "score.weight"}
    assert list(tensors["score.weight"].shape) == [1, 32]
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert (config["architectures"], plain.config.num_labels) == ([type(plain).__name__], 1)
    assert config["architectures"][0].endswith("ForSequenceClassification")
    assert torch.equal(logits(plain), logits(model))


@pytest.mark.parametrize("longer", [0, 8])
def test_weights_do_not_lie_where_the_header_of_their_file_puts_them(
    longer: int, make_model: Any, tmp_path: Path
) -> None:
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
