"""Language models with 8-bit weights: what `rlhf export --quantize int8` writes and `--quantize int8` makes."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_cli.errors import ArtifactError
from rlhf_cli.models.frozen import frozen_policy
from rlhf_cli.models.load import load_policy, load_reward_model, new_reward_model
from rlhf_cli.models.quantized import Int8Linear
from rlhf_cli.trained.model import TrainedLanguageModel
from support.compare import logits_of
from support.tiny import CPU

TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}


def as_torchao_writes_it(model, out, *, shift=0):
    """The folder of an int8 export in two files, and the same weights as plain numbers in another."""
    plain, integers = out / "plain", out / "int8"
    for folder in (plain, integers):
        shutil.copytree(model, folder)
    values, stored, numbers = load_file(model / "model.safetensors"), {}, {}
    for name, weight in values.items():
        if "_proj" not in name:
            stored[name] = numbers[name] = weight
            continue
        layer = name.removesuffix(".weight")
        # As torchao: 255 steps between the largest and its negative, so -128 occurs.
        scale = weight.abs().amax(1, keepdim=True) / 127.5
        whole = (-weight / scale).round().clamp(-128, 127).to(torch.int8)
        stored |= {f"{layer}._weight_qdata": whole, f"{layer}._weight_scale": scale}
        stored[f"{layer}._weight_zero_point"] = torch.full_like(scale, shift, dtype=torch.int8)
        numbers[name] = whole.float() * scale
    assert any((tensor == -128).any() for tensor in stored.values() if tensor.dtype == torch.int8)
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    (integers / "model.safetensors").unlink()
    parts = [{}, {}]
    for number, name in enumerate(sorted(stored)):
        parts[number % 2][name] = stored[name]
    files = [f"model-{n}-of-2.safetensors" for n in (1, 2)]
    for file, part in zip(files, parts, strict=True):
        save_file(part, integers / file, metadata={"format": "pt"})
    where = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    (integers / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config = json.loads((integers / "config.json").read_text())
    (integers / "config.json").write_text(json.dumps(config | {"quantization_config": TORCHAO}))
    return integers, plain


def int8_layers(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Int8Linear)}


def test_an_export_in_int8_is_read_without_torchao(make_model, tmp_path):
    """Training gets its numbers; what only answers keeps the integers of the file."""
    integers, plain = as_torchao_writes_it(make_model("llama"), tmp_path)
    expected = load_policy(str(plain))
    loaded = load_policy(str(integers))
    assert all(torch.equal(weight, loaded.get_parameter(name)) for name, weight in expected.named_parameters())
    assert not hasattr(loaded.config, "quantization_config")
    held = TrainedLanguageModel("mine", str(integers)).speaker(CPU).model
    layers = int8_layers(held)
    assert len(layers) == 2 * 7
    for name, layer in layers.items():
        assert layer.weight.dtype == torch.int8
        assert torch.equal(layer.weight.float() * layer.scale[:, None], expected.get_parameter(f"{name}.weight"))
    assert (logits_of(held) - logits_of(expected)).abs().max() < 1e-5 * logits_of(expected).abs().max()


def test_a_reward_model_in_int8_scores_as_its_numbers_do(make_model, tmp_path):
    model, _ = new_reward_model(str(make_model("llama")), None, seed=0, head_std=None)
    model.save_pretrained(tmp_path / "model")
    integers, plain = as_torchao_writes_it(tmp_path / "model", tmp_path)
    assert torch.equal(logits_of(load_reward_model(str(integers))), logits_of(load_reward_model(str(plain))))


def test_integers_with_a_zero_point_are_refused(make_model, tmp_path):
    integers, _ = as_torchao_writes_it(make_model("llama"), tmp_path, shift=3)
    with pytest.raises(ArtifactError, match="its weights are quantized, and this kind is not read here"):
        load_policy(str(integers))


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen2"])
def test_weights_are_rounded_to_127_steps_of_their_row(architecture, make_model):
    """GPT-2's weights are [in, out] and have biases. Embeddings, norms and the head keep their numbers."""
    exact = load_policy(str(make_model(architecture)))
    held = frozen_policy(str(make_model(architecture)), None, CPU, "float32", "int8")
    layers = int8_layers(held)
    for name, layer in layers.items():
        weight, bias = exact.get_parameter(f"{name}.weight"), getattr(exact.get_submodule(name), "bias", None)
        weight = weight.t() if architecture == "gpt2" else weight
        step = weight.abs().amax(1, keepdim=True) / 127
        error = (layer.weight.float() * layer.scale[:, None] - weight).abs()
        assert (error <= 0.501 * step).all()
        assert error.max() > 0.4 * step.min()
        assert (layer.bias is None) == (bias is None)
        assert (layer.compute_dtype is None) == (layer.in_features % 64 > 0), "torch would read beyond the end of rows"
        x = torch.randn(3, 5, layer.in_features, generator=torch.Generator().manual_seed(0))
        by_hand = x @ (layer.weight.float() * layer.scale[:, None]).t() + (0 if bias is None else bias)
        assert (layer(x) - by_hand).abs().max() < 1e-5 * by_hand.abs().max()
    others = {name: weight for name, weight in held.named_parameters() if name.rpartition(".")[0] not in layers}
    assert all(torch.equal(weight, exact.get_parameter(name)) for name, weight in others.items())
    linear = [m for m in exact.base_model.modules() if type(m).__name__ in ("Linear", "Conv1D")]
    assert len(layers) == len(linear)
    assert len(others) + sum(1 + (layer.bias is not None) for layer in layers.values()) == len([*exact.parameters()])
    difference = (logits_of(held) - logits_of(exact)).abs().max() / logits_of(exact).abs().max()
    assert 0 < difference < 0.05


def test_few_rows_are_rounded_to_bfloat16_and_more_are_not():
    """Each output is off by a rounding of the input and one of the output, 2**-9 each."""
    draw = torch.Generator().manual_seed(0)
    integers, scale = torch.randint(-127, 128, (7, 64), generator=draw, dtype=torch.int8), torch.full((7, 1), 0.3)
    layer = Int8Linear(integers, scale, torch.rand(7), rounds=True)
    x, weight = torch.randn(9, 64, generator=draw), integers.float() * scale
    by_hand, bound = x @ weight.t() + layer.bias, 2**-8 * (x.abs() @ weight.abs().t())
    error = (torch.cat([layer(x[:1]), layer(x[None, 1:])[0]]) - by_hand).abs()
    assert (error <= bound).all()
    assert error.max() > 1e-2
    assert (layer(x) - by_hand).abs().max() < 1e-3


def test_parts_of_a_weight_give_the_product_with_all_of_it(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (7, 8), generator=draw, dtype=torch.int8)
    layer = Int8Linear(weight, torch.rand(7, 1, generator=draw), torch.rand(7, generator=draw))
    x = torch.randn(2, 8, generator=draw)
    whole = layer(x)
    monkeypatch.setattr("rlhf_cli.models.quantized.PART", 16)
    torch.testing.assert_close(layer(x), whole)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        assert (layer(x).float() - whole).abs().max() < 2e-2 * whole.abs().max()
