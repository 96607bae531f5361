"""Models without weights: their counts against those of real models, and the bytes that autograd keeps."""

from __future__ import annotations

import time
import weakref

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DynamicCache,
    LlamaConfig,
    MixtralConfig,
)

from rlhf_cli.config.models import Lora
from rlhf_cli.errors import ConfigError
from rlhf_cli.models.adapter_files import BaseModel, save_adapter
from rlhf_cli.models.adapters import add_lora
from rlhf_cli.models.forward import autocast, hidden_at
from rlhf_cli.models.frozen import hold_frozen
from rlhf_cli.models.load import load_policy, prepare, set_dropout_off
from rlhf_cli.packing import pack
from rlhf_cli.plan.activations import ROW, kept_bytes
from rlhf_cli.plan.memory import BUCKET_BYTES, STATES, Batch, Held, Setting
from rlhf_cli.plan.origins import from_path
from rlhf_cli.plan.shapes import shape_of, shape_of_loaded
from support.compare import adapt

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 97}
CONFIGS = {
    "llama tied": ("llama", {**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama": ("llama", {**SMALL, "tie_word_embeddings": False}),
    "qwen2": ("qwen2", {**SMALL, "num_key_value_heads": 2}),
    "mixtral": ("mixtral", {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 32, "mlp_only_layers": [1], "tie_word_embeddings": True},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {**SMALL, "num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 48},
    ),
    "gpt_neox": ("gpt_neox", SMALL),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 97, "bos_token_id": 0, "eos_token_id": 0}),
}


def config_of(name):
    family, settings = CONFIGS[name]
    return AutoConfig.for_model(family, pad_token_id=0, **settings)


@pytest.mark.parametrize(
    ("name", "lora", "is_classifier"),
    [
        ("llama tied", None, False),
        ("llama", Lora(r=4), True),
        ("qwen2", Lora(r=4), False),
        ("gpt_neox", None, False),
        ("gpt2", None, True),
        ("gpt2", Lora(r=4), False),
        ("mixtral", None, False),
        ("mixtral", Lora(r=4), False),
        ("qwen3_moe", None, True),
        ("qwen2_moe", Lora(r=4), False),
    ],
)
def test_a_shape_has_the_counts_and_the_activations_of_the_real_model(name, lora, is_classifier):
    if lora is not None:
        pytest.importorskip("peft")
    config = config_of(name)
    config.num_labels = 1
    build = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    real = build.from_config(config)
    set_dropout_off(real)
    base = real.num_parameters()
    assert prepare(real, torch.device("cpu")) is None
    if lora is not None:
        add_lora(real, lora, "model.lora", seed=0)
    for precision in ("float32", "bfloat16"):
        shape = shape_of(config_of(name), is_classifier, precision, lora=lora)
        assert shape.base == base
        assert shape.trained == sum(p.numel() for p in real.parameters() if p.requires_grad)
        assert shape.weights == sum(p.numel() for p in real.parameters())
        assert shape.largest == max(p.numel() for p in build.from_config(config).parameters())

        def kept(rows, precision=precision):
            batch = pack([[1] * ROW] * rows)

            def compute():
                with autocast(torch.device("cpu"), precision):
                    return hidden_at(real, batch, torch.arange(len(batch.ids)))

            return kept_bytes(compute)

        # GPT-2's linear layers keep a little more for a few tokens than for many.
        rel = 0 if name != "gpt2" else 0.07
        assert shape.kept == pytest.approx((kept(8) - kept(4)) / (4 * ROW), rel=rel)
        assert shape_of_loaded(real, precision) == shape


def test_a_pass_keeps_the_sums_of_adapted_experts_beside_the_weights():
    pytest.importorskip("peft")
    lora = Lora(r=4)
    real = AutoModelForCausalLM.from_config(config_of("mixtral"))
    prepare(real, torch.device("cpu"))
    add_lora(real, lora, "model.lora", seed=0)
    weights, kept = {p.untyped_storage()._cdata for p in real.parameters()}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights and tensor.ndim == 3 and len(tensor) == 4:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    batch = pack([[1] * ROW])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = hidden_at(real, batch, torch.arange(len(batch.ids)))
    shape = shape_of(config_of("mixtral"), False, "float32", lora=lora)
    assert output.requires_grad
    assert shape.adapted_experts == shape.experts == 4 * 4 * 3 * 96 * 64
    assert sum(kept.values()) == pytest.approx(4 * shape.adapted_experts, rel=0.1)


def test_counting_what_autograd_keeps_frees_it():
    weight, refs = torch.nn.Parameter(torch.ones(3)), []

    def compute():
        half = weight.bfloat16()
        output = half.exp()  # whose gradient needs the output itself
        refs.extend([weakref.ref(half), weakref.ref(output)])
        return output

    assert kept_bytes(compute) == 6
    assert [ref() for ref in refs] == [None, None]


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_the_cache_of_a_token_is_what_a_forward_pass_writes(name):
    model, cache = AutoModelForCausalLM.from_config(config_of(name)), DynamicCache(config=config_of(name))
    model(input_ids=torch.tensor([[1, 2, 3, 4, 5]]), past_key_values=cache)
    written = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    shape = shape_of(config_of(name), False, "float32", frozen=None)
    assert 5 * shape.cache == written


def test_frozen_weights_are_counted_by_what_can_hold_them():
    shape = shape_of(config_of("llama"), False, "float32", frozen=["layers.0-1"])
    a_layer = 4 * 64 * 64 + 3 * 64 * 96
    assert shape.frozen == 2 * (a_layer + 2 * 64)
    assert shape.frozen_linear == 2 * a_layer
    tables = shape_of(config_of("llama"), False, "float32", frozen=None)
    assert tables.frozen_tables == 97 * 64
    assert tables.kept == 0
    tied = shape_of(config_of("llama tied"), False, "float32", frozen=None)
    assert tied.frozen_tables == 0


@pytest.mark.parametrize("kept", ["exact", "rounded"])
def test_adapters_are_counted_as_they_are_read(kept, tmp_path):
    """Of bfloat16 weights with adapters only the embeddings and the head stay bfloat16 numbers."""
    pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_config(config_of("llama"), dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    model = load_policy(str(tmp_path / "base"))
    add_lora(model, Lora(r=2), "lora", seed=0)
    adapt(model)
    save_adapter(model, tmp_path / "adapter", BaseModel(str(tmp_path / "base")))

    real = load_policy(str(tmp_path / "adapter"), deferred=True).requires_grad_(False)
    hold_frozen(real, torch.device("cpu"), "bfloat16", exact=kept == "exact")
    source = from_path(str(tmp_path / "adapter"), None, "policy.path")
    shape = shape_of(source.config, False, "bfloat16", frozen=None)
    setting = Setting("cpu", half=True)
    trained = {"lora": Lora(r=2)} if kept == "exact" else {"is_trained": False}
    held = Held("policy", shape, setting, **trained, stored=source.stored, is_merged=source.has_adapters)
    assert held.weight_bytes == sum(p.nbytes for p in real.parameters())
    layers = sum(p.numel() for p in real.model.layers.parameters() if p.ndim == 2)
    assert held.copied_weights == ({"16-bit copies": 2 * layers} if kept == "exact" else {})


@pytest.mark.parametrize(("stored", "copied"), [(2, {}), (4, {"rollout copy": 2 * 97 * 64})])
def test_a_gpu_casts_the_float32_head_beside_4_bit_layers_once_per_rollout(stored, copied):
    pytest.importorskip("peft")
    lora = Lora(r=2, quantize="nf4")
    shape = shape_of(config_of("llama"), False, "bfloat16", lora)
    assert Held("policy", shape, Setting("cuda", half=True), lora=lora, stored=stored).of_decoder == copied


def test_a_cpu_that_samples_in_bfloat16_copies_all_linear_layers():
    shape = shape_of(config_of("llama"), False, "bfloat16")
    weights = AutoModelForCausalLM.from_config(config_of("llama")).named_parameters()
    linear = sum(weight.numel() for name, weight in weights if weight.ndim == 2 and "embed" not in name)
    assert Held("policy", shape, Setting("cpu", half=True)).of_decoder == {"rollout copy": 2 * linear}
    on_gpu = shape_of(config_of("llama"), False, "bfloat16", device="cuda")
    assert on_gpu.kept < shape.kept, "a CPU keeps queries, keys and values in float32"


def test_llama_70b_has_its_published_size_and_takes_seconds():
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    began = time.process_time()
    shape = shape_of(config, False, "bfloat16")
    assert time.process_time() - began < 10
    assert shape.weights == shape.trained == 70_553_706_496
    assert shape.cache == 2 * 80 * 8 * 128
    # Bytes of a layer and token in bfloat16, by hand: norms, projections, the rotation, attention and the gate.
    assert 25 * 8192 < shape.kept / 80 < 60 * 8192


def test_mixtral_8x7b_has_its_published_size_and_its_experts_are_parts_of_its_layers():
    config = MixtralConfig(vocab_size=32000)
    shape = shape_of(config, False, "float32")
    assert shape.weights == shape.trained == 46_702_792_704
    expert = 3 * 14336 * 4096
    assert shape.experts == 32 * 8 * expert
    assert shape.largest_expert == 8 * 2 * 14336 * 4096
    assert shape.widest == 2 * 14336
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024
    assert shape.layer == 8 * expert + attention
    # Both experts of a token keep their input, gate and up projections, what these give, and their output.
    of_experts = 4 * 2 * (2 * 4096 + 4 * 14336)
    assert of_experts < shape.kept / 32 < of_experts + 4 * 12 * 4096


def test_experts_stay_in_float32_whatever_the_optimizer_and_the_passes_hold():
    shape = shape_of(config_of("mixtral"), False, "bfloat16")
    experts = 4 * 4 * (3 * 96 * 64)
    others = shape.weights - experts
    half = Setting("cuda", half=True, states="bfloat16")
    held = Held("model", shape, half)
    assert held.weight_bytes == 2 * others + 4 * experts
    assert held.gradient_bytes == 2 * others + 4 * experts
    assert held.moment_bytes == 4 * others + 8 * experts
    frozen = shape_of(config_of("mixtral"), False, "bfloat16", frozen=None)
    assert Held("model", frozen, half, is_trained=False).weight_bytes > 4 * experts


def test_a_step_of_8_bit_adamw_computes_a_weight_in_float32_on_a_cpu():
    """As measured: 20 bytes for each number of the largest weight, here the embeddings."""
    shape = shape_of(config_of("llama tied"), False, "float32")

    def step(*arguments, **options):
        return Held("model", shape, Setting(*arguments, **options)).step_bytes

    assert step("cpu", states="8bit") == 20 * 97 * 64
    assert step("cpu", sharded=2, states="8bit") == 10 * 97 * 64
    assert step("cuda", states="8bit") == step("cpu") == 0


def test_a_sharded_backward_pass_ends_with_the_gradient_of_the_embeddings_twice():
    config = config_of("llama")
    config.vocab_size = 10_000
    held = Held("model", shape_of(config, True, "float32"), Setting("cpu", processes=2, sharded=2))
    (gradients,) = held.in_training(Batch(1, 0, 1)).values()
    assert gradients == pytest.approx(2 * 4 * 10_000 * 64, rel=0.01)


def test_the_gradients_of_whole_models_are_summed_a_bucket_at_a_time():
    shape = shape_of(config_of("llama"), False, "bfloat16")
    size = {states: Held("model", shape, Setting("cpu", 2, states=states)).communication_bytes for states in STATES}
    assert size["float32"] == size["8bit"] == min(BUCKET_BYTES, 4 * shape.weights)
    assert size["bfloat16"] == 2 * shape.weights
    assert Held("model", shape, Setting("cpu")).communication_bytes == 0
    assert Held("model", shape, Setting("cpu", 2, sharded=2)).communication_bytes == 0


def test_a_config_that_transformers_cannot_build_is_an_error():
    config = config_of("llama")
    config.num_attention_heads = 3
    with pytest.raises(ConfigError, match=r"^policy: transformers refuses this config \("):
        shape_of(config, False, "float32", key="policy")
