"""Frozen weights in 4 bits under adapters: equal to the dequantized weights, in training and outside of it."""

import copy
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from rlhf_cli.config.models import Lora, ScratchModel
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.decoders.decoder import choose_decoder
from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.models import quantized
from rlhf_cli.models.adapter_files import BaseModel, save_adapter
from rlhf_cli.models.adapters import add_lora
from rlhf_cli.models.frozen import frozen_policy
from rlhf_cli.models.load import load_policy, load_reward_model, load_tokenizer, prepare
from rlhf_cli.models.quantized import dequantize, quantize, quantized_layers
from rlhf_cli.models.save import save
from rlhf_cli.models.scratch import new_model
from rlhf_cli.ppo.setup import load_setup
from rlhf_cli.run.stage_run import StageRun
from rlhf_cli.tensor_ops import num_weights
from support.compare import adapt, close_in_size, merged_copy
from support.gpu import DEVICES
from support.projects import refused
from support.setup import config_of
from support.tiny import CPU, SETTINGS, random_ids

pytest.importorskip("bitsandbytes", reason="NF4 needs bitsandbytes (extra qlora)")
IDS = torch.tensor(random_ids(11))
TOLERANCE = {"cpu": 1e-5, "cuda": 3e-3}
"""A GPU's kernel for few rows may sum in TF32. Merging into 4 bits would be off by ten times more."""


def logits(model):
    return model(input_ids=IDS.to(model.device)).logits


def close(a, b, tolerance=1e-5):
    close_in_size(a.cpu(), b.cpu(), tolerance)  # merged weights are made on the CPU


@pytest.fixture(scope="module")
def base(tokenizer, tmp_path_factory):
    """A language model whose layers have 64 and 128 inputs, some with biases."""
    config = {**SETTINGS["llama"], "hidden_size": 64, "intermediate_size": 128, "attention_bias": True}
    folder = tmp_path_factory.mktemp("wide") / "model"
    model = new_model(ScratchModel(architecture="llama", config=config), tokenizer, seed=3)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    save(model, tokenizer, folder)
    return folder


@pytest.fixture
def pair(base):
    """A function: quantization -> a quantized model with adapters that are not zero, and the same dequantized.

    The head and the embeddings of both are plain. As in a run, the weights are quantized on the CPU and then moved.
    """

    def make(quantization="nf4", device="cpu"):
        model = load_policy(str(base))
        assert prepare(model, CPU) is None
        quantize(model, quantization, "lora.quantize")
        add_lora(model, Lora(r=2, alpha=4), "lora", seed=0)
        adapt(model, std=1.0)
        model = model.to(device)
        plain = copy.deepcopy(model)
        dequantize(plain)
        return model, plain

    return make


@pytest.mark.parametrize("quantization", ["nf4", "nf4_double"])
@pytest.mark.parametrize("device", DEVICES)
def test_quantized_weights_compute_what_the_dequantized_ones_do(pair, base, quantization, device):
    model, plain = pair(quantization, device)
    assert {p.device.type for p in model.parameters()} == {device}
    start, blocks = load_policy(str(base)).state_dict(), (-1, 64)
    for name, weight in plain.state_dict().items():
        if name.endswith("base_layer.weight"):
            exact = start[name.replace(".base_layer", "")]
            errors = (weight.cpu() - exact).abs().reshape(blocks).amax(1) / exact.abs().reshape(blocks).amax(1)
            assert 0.1 < errors.max().item() < 0.16, "half of NF4's widest gap is 0.152"
    close(logits(model), logits(plain), TOLERANCE[device])
    for network in (model, plain):
        logits(network).square().mean().backward()
    by_name = dict(plain.named_parameters())
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    for name, parameter in trained:
        close(parameter.grad, by_name[name].grad, TOLERANCE[device])


def test_layers_of_any_number_of_outputs_answer(tokenizer, tmp_path):
    """The shop's model has 336. bitsandbytes' own product for AVX512-BF16 takes only multiples of 32."""
    config = {**SETTINGS["llama"], "hidden_size": 64, "intermediate_size": 336}
    save(new_model(ScratchModel(architecture="llama", config=config), tokenizer, seed=3), tokenizer, tmp_path)
    model, rounded = frozen_policy(str(tmp_path), None, CPU, "float32", "nf4"), load_policy(str(tmp_path))
    quantize(rounded, "nf4", "lora.quantize")
    dequantize(rounded)
    for _ in range(2):  # the first pass may repack the weights
        with torch.no_grad():
            close(logits(model), logits(rounded), 2e-2)


def test_a_layer_gives_what_autocast_gives(pair):
    """bfloat16, as a plain layer does, and not the format of its input: activations would take twice the memory."""
    model, _ = pair()
    x, layers = torch.ones(2, 64), [layer for _, _, layer in quantized_layers(model)]
    layer = next(layer for layer in layers if layer.in_features == 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer(x).dtype == torch.float32


def test_a_pass_without_gradients_does_not_repack_the_weights(pair):
    """On CPUs with AVX512-BF16 bitsandbytes would repack in place, silently."""
    model, plain = pair()
    before = [layer.weight.data.clone() for _, _, layer in quantized_layers(model)]
    model.eval()
    with torch.no_grad():
        close(logits(model), logits(plain))
    assert all(map(torch.equal, [layer.weight.data for _, _, layer in quantized_layers(model)], before))
    model.train()
    logits(model).square().mean().backward()
    lowest = next(p for name, p in model.named_parameters() if "layers.0" in name and "lora_A" in name)
    assert lowest.grad.abs().max() > 0


@pytest.mark.parametrize("device", DEVICES)
def test_merging_dequantizes(pair, device):
    """The merged weights give the logits of the adapters on 4 bits; peft alone would round them to 4 bits again."""
    model, _ = pair(device=device)
    expected = logits(model)
    plain = merged_copy(model)
    assert not quantized_layers(plain)
    assert all(p.is_floating_point() for p in plain.parameters())
    close(logits(plain), expected, TOLERANCE[device])
    close(logits(model), expected, TOLERANCE[device])


def test_weights_are_counted_by_their_shapes(pair, base):
    """Not by packed bytes, which hold two weights each."""
    model, plain = pair()
    small = sum(p.numel() for name, p in model.named_parameters() if ".lora_" in name)
    whole = sum(p.numel() for p in load_policy(str(base)).parameters())
    assert sum(map(num_weights, model.parameters())) == whole + small
    layers = [layer.weight for _, _, layer in quantized_layers(model)]
    assert sum(w.nbytes for w in layers) * 2 == sum(map(num_weights, layers))
    assert len(layers) == sum(name.endswith("base_layer.weight") for name, _ in plain.named_parameters())


def test_layers_that_cannot_be_quantized_and_a_missing_package_are_refused(base, make_model, monkeypatch):
    """bitsandbytes dequantizes rows of 32 with the scales of other blocks: errors of 0.8 instead of 0.15."""
    weight_of = quantized._weight_of
    for architecture in ("gpt2", "llama"):
        with pytest.raises(ConfigError, match=r"lora\.quantize: no layer of this \w+ can be quantized"):
            quantize(load_policy(str(make_model(architecture))), "nf4", "lora.quantize")
    with monkeypatch.context() as patch:
        patch.setattr(quantized, "_weight_of", lambda layer: weight_of(layer).roll(1))
        with pytest.raises(ConfigError, match="computes wrong weights on this cpu"):
            quantize(load_policy(str(base)), "nf4", "lora.quantize")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"needs the package bitsandbytes \(extra qlora\)"):
        quantize(load_policy(str(base)), "nf4", "lora.quantize")


@pytest.mark.slow
def test_a_quantized_run_through_all_stages(run_stage, base, tmp_path):
    """SFT merges, the reward model stays an adapter, PPO shares its backbone; every loaded model is the trained one."""
    lora = {"r": 2, "quantize": "nf4_double"}
    sft = run_stage("sft", tmp_path, model={"path": str(base), "lora": lora})
    assert {str(w.dtype) for w in load_file(sft / "model/model.safetensors").values()} == {"torch.float32"}
    close(logits(load_policy(str(sft / "model"))), logits(load_policy(str(sft / "model/adapter"))))
    run_stage("rm", tmp_path, model={"lora": {**lora, "save": "adapter"}})
    ppo = run_stage("ppo", tmp_path, policy={"lora": lora}, value_model={"lora": lora}, ppo={"num_iterations": 1})
    assert "nf4_double" in (ppo / "model/adapter/base_model.json").read_text()
    close(logits(load_policy(str(ppo / "model"))), logits(load_policy(str(ppo / "model/adapter"))))


def test_weights_that_are_quantized_in_the_file_answer_and_are_not_trained(run_stage, base, tmp_path):
    """As bitsandbytes saves them. A stage would train to its end and could not save the model."""
    in_4_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=in_4_bits)
    for part in (model, load_tokenizer(str(base))):
        part.save_pretrained(tmp_path / "small")
    with torch.no_grad():
        close(logits(frozen_policy(str(tmp_path / "small"), None, CPU, "float32")), logits(model), 2e-2)
    adapter = get_peft_model(load_policy(str(base)), LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"]))
    adapter.peft_config["default"].base_model_name_or_path = str(tmp_path / "small")
    adapter.save_pretrained(tmp_path / "adapter")
    for name, lora in (("small", None), ("adapter", {"r": 2})):
        for stage in ("sft", "rm"):
            with pytest.raises(ArtifactError, match=r"small: its weights are quantized, .* Give the model in 16"):
                run_stage(stage, tmp_path / "run", model={"path": str(tmp_path / name), "lora": lora})
        assert "small: its weights are quantized" in refused(
            "export", tmp_path / name, "--out", tmp_path / "out", "--no-check"
        )


def test_policy_value_and_reward_model_share_quantized_weights(write_config, run_stage, base, tmp_path):
    lora = {"r": 2, "quantize": "nf4"}
    rm = run_stage("rm", tmp_path, model={"path": str(base), "lora": {**lora, "save": "adapter"}})
    keys = {"policy": {"path": str(base), "lora": lora}, "value_model": {"lora": lora}}
    config = config_of(write_config, "ppo", PPOConfig, tmp_path, **keys)
    with StageRun("ppo", config, quiet=True) as stage:
        setup = load_setup(config, stage)
    models = [setup.models.policy, setup.models.value_model, setup.rewards[0].model]
    weights = [[layer.weight.data_ptr() for _, _, layer in quantized_layers(model)] for model in models]
    assert weights[0]
    assert weights[0] == weights[2], "the reward model"
    assert weights[0] == weights[1], "the value model"
    alone = load_reward_model(str(rm / "model"))
    for model in (models[2], alone):
        model.set_attn_implementation("eager")
    close(logits(models[2]), logits(alone))


def test_adapters_that_were_trained_on_rounded_weights_stay_beside_them(pair, base, tmp_path, monkeypatch):
    """Merged and rounded again, their own part of the weights would be lost in the steps of 4 bits."""
    trained, plain = pair()
    expected = logits(plain)
    save_adapter(trained, tmp_path / "adapter", BaseModel(str(base)), "nf4")
    monkeypatch.setattr("rlhf_cli.models.frozen.use_inference_kernel", lambda *_: None)
    model = frozen_policy(str(tmp_path / "adapter"), None, CPU, "float32", "nf4")
    with torch.no_grad():
        close(logits(model), expected)
        again = frozen_policy(str(tmp_path / "adapter"), None, CPU, "float32", "nf4_double")
        assert (logits(again) - expected).abs().max() > 5e-2 * expected.abs().max()
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("quantization", ["nf4", "nf4_double"])
def test_a_model_that_only_answers_computes_with_its_rounded_weights(base, quantization):
    """Also through the product in bfloat16, and in any batch; the head is exact."""
    model = frozen_policy(str(base), None, CPU, "float32", quantization)
    rounded = load_policy(str(base))
    quantize(rounded, quantization, "lora.quantize")
    dequantize(rounded)
    expected = logits(rounded)
    for _ in range(2):  # the first pass may repack the weights
        with torch.no_grad():
            close(logits(model), expected, 2e-2)
    assert logits(load_policy(str(base))).sub(expected).abs().max() > 0.1 * expected.abs().max()
    kinds = {type(module).__name__ for module in model.model.modules()}
    assert "Linear4bit" in kinds
    assert torch.equal(model.lm_head.weight, load_policy(str(base)).lm_head.weight)
    decoder = choose_decoder(model, 20)
    prompts = [[5, 9, 13], [6, 8]]
    with torch.no_grad():
        alone = torch.cat([model(input_ids=torch.tensor([prompt])).logits[:, -1] for prompt in prompts])
        close(decoder.admit(prompts), alone, 2e-2)
