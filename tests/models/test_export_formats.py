"""Exports that other libraries write: int8 by torchao, and GGUF by llama.cpp's converter. `make test-slow` has both."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_cli.config.models import ScratchModel
from rlhf_cli.models.exporting import load_exported
from rlhf_cli.models.save import save
from rlhf_cli.models.scratch import new_model
from support.compare import close, logits_of
from support.projects import rlhf
from support.tiny import SETTINGS

pytestmark = pytest.mark.slow
LLAMA_CPP = Path(sys.executable).parent.parent / "llama.cpp"
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
needs_llama_cpp = pytest.mark.skipif(
    not (LLAMA_CPP / "convert_hf_to_gguf.py").is_file() or importlib.util.find_spec("gguf") is None,
    reason="llama.cpp's converter is not installed",
)


def export(directory, out, *options):
    rlhf("export", directory, "--out", out, *options)
    return json.loads((out / "export.json").read_text())


@needs_torchao
def test_int8_is_read_by_transformers_and_its_cost_is_measured(pipeline, tmp_path):
    root = pipeline("llama")
    facts = export(root, tmp_path / "ppo", "--quantize", "int8")
    assert facts["written_as"] == "int8 with float32"
    assert 0 < facts["difference"]["kl_per_token"]["value"] < 1e-3
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ppo")
    original = AutoModelForCausalLM.from_pretrained(root / "ppo" / "model")
    weights = dict(original.named_parameters())
    quantized = {name for name, weight in model.named_parameters() if type(weight).__name__ == "Int8Tensor"}
    assert quantized == {f"model.layers.{i}.{part}.weight" for i in range(2) for part in LINEAR}
    for name in quantized:
        step = weights[name].abs().amax(1, keepdim=True) / 127
        assert ((model.get_parameter(name).dequantize() - weights[name]).abs() <= 0.51 * step).all()
    assert 0 < (logits_of(model) - logits_of(original)).abs().max() < 0.1 * logits_of(original).abs().max()
    export(root, tmp_path / "rm", "--stage", "rm", "--quantize", "int8", "--max-shard-size", "20KB")
    assert len(list((tmp_path / "rm").glob("model-*.safetensors"))) > 1
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    original = AutoModelForSequenceClassification.from_pretrained(root / "rm" / "model")
    assert torch.equal(model.score.weight, original.score.weight)
    assert model.config.score_std == original.config.score_std
    assert 0 < (logits_of(model) - logits_of(original)).abs().max() < 0.1


LINEAR = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


@needs_torchao
def test_int8_and_int4_are_refused_where_torchao_cannot_write_them(make_model, tmp_path):
    cases = [("gpt2", "int8", "this GPT2LMHeadModel has none")]
    if not torch.cuda.is_available():
        cases.append(("llama", "int4", "need a CUDA GPU and the package mslk"))
    for architecture, kind, message in cases:
        command = ["export", str(make_model(architecture)), "--out", str(tmp_path / "out"), "--quantize", kind]
        result = rlhf(*command, code=2)
        assert message in result.stderr.splitlines()[-1]
        assert not (tmp_path / "out").exists()


@needs_llama_cpp
@pytest.mark.parametrize(("architecture", "tied"), [("llama", False), ("qwen2", True), ("gpt2", True)])
def test_gguf_has_the_tensors_and_the_tokenizer_of_the_model(
    architecture, tied, tokenizer, eos_only_tokenizer, tmp_path, monkeypatch
):
    import gguf

    monkeypatch.setenv("PATH", f"{LLAMA_CPP}{os.pathsep}{os.environ['PATH']}")
    own = eos_only_tokenizer if architecture == "gpt2" else tokenizer
    config = {**SETTINGS[architecture], "tie_word_embeddings": tied}
    save(new_model(ScratchModel(architecture=architecture, config=config), own, seed=4), own, tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", "--format", "gguf")
    [path] = (tmp_path / "out").glob("*.gguf")
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == architecture
    # transformers gives every tokenizer of a Qwen2 the splitting of the released ones.
    assert fields["tokenizer.ggml.pre"] == {"llama": "smollm", "qwen2": "qwen2", "gpt2": "gpt-2"}[architecture]
    assert fields["tokenizer.ggml.eos_token_id"] == own.eos_token_id
    assert fields["tokenizer.ggml.tokens"] == own.convert_ids_to_tokens(range(len(own)))
    if architecture != "gpt2":
        assert fields["tokenizer.ggml.add_bos_token"] is True
    assert ("output.weight" in {tensor.name for tensor in reader.tensors}) == (not tied)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    close(logits_of(load_exported(tmp_path / "out", plain, gguf_file=path.name)), logits_of(plain))


@needs_llama_cpp
def test_a_model_that_llama_cpp_has_not_is_refused_with_its_reason(pipeline, tmp_path, monkeypatch):
    root = pipeline("llama")
    monkeypatch.setenv("PATH", f"{LLAMA_CPP}{os.pathsep}{os.environ['PATH']}")
    command = ["export", str(root), "--stage", "rm", "--out", str(tmp_path / "rm"), "--format", "gguf"]
    result = rlhf(*command, code=2)
    assert "failed (Model LlamaForSequenceClassification is not supported)" in result.stderr
    facts = export(root, tmp_path / "ppo", "--format", "gguf", "--quantize", "q8_0")
    assert facts["written_as"] == "GGUF q8_0"
    assert 0 < facts["difference"]["kl_per_token"]["value"] < 1e-3
    assert sorted(path.suffix for path in (tmp_path / "ppo").iterdir()) == [".gguf", ".json", ".md"]
