"""Frozen weights: in 16 bits they compute the bits of float32 under autocast, and `freeze` names them by patterns."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from rlhf_cli.config.models import Lora
from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.models.adapter_files import BaseModel, save_adapter
from rlhf_cli.models.adapters import add_lora
from rlhf_cli.models.deferred import is_deferred, place_of
from rlhf_cli.models.forward import autocast, held_precision
from rlhf_cli.models.frozen import freeze, hold_base, hold_frozen, hold_trained
from rlhf_cli.models.load import (
    load_policy,
    load_reward_model,
    load_value_model,
    new_reward_model,
    new_value_model,
    prepare,
)
from support.tiny import CPU, encoder, tiny_model

IDS = torch.tensor([[5, 6, 7, 8, 9]])
TWO_WEIGHTS = 2 * 4 * 300 * 64  # bytes of two float32 copies of the largest weight in `files`
ENCODER_DECODERS = ("t5", "bart")
FAMILIES = ("llama", "gpt2", "bloom", "opt", "gemma2", "gpt_neox", *ENCODER_DECODERS)


def made(name, *, tied=True):
    auto = AutoModelForSeq2SeqLM if name in ENCODER_DECODERS else AutoModelForCausalLM
    model = tiny_model(name, auto, vocab_size=300, decoder_start_token_id=0, tie_word_embeddings=tied)
    return model.requires_grad_(False)


@torch.no_grad()
def logits(model, precision):
    decoder = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with autocast(CPU, precision):
        return model(input_ids=IDS, **decoder).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_held_weights_compute_the_same_bits(name):
    """Rounded, and those that are bfloat16 numbers, which includes the embeddings. Gemma's and BART's embeddings read
    their weight's number format, and their head is tied to it."""
    for tied in (True, False):
        for exact in (True, False):
            model = made(name, tied=tied)
            if exact:
                model = model.bfloat16().float()
            for precision in ("bfloat16", "float16"):
                held = copy.deepcopy(model)
                hold_frozen(held, CPU, precision, exact=exact)
                assert torch.equal(logits(held, precision), logits(model, precision)), (tied, exact, precision)
                assert exact or held_precision(held) == precision


def test_a_held_model_gets_the_same_attention():
    for name in ("llama", "gpt2", "bloom"):
        plain, held = made(name), made(name)
        hold_frozen(held, CPU, "bfloat16", exact=False)
        assert held_precision(held) == "bfloat16"
        assert prepare(held, CPU) == prepare(plain, CPU)
        assert held.config._attn_implementation == plain.config._attn_implementation


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_trained_matrices_in_bfloat16_compute_as_rounded_ones(name):
    model = made(name).requires_grad_(True)
    expected = copy.deepcopy(model)
    hold_trained(model)
    kept = {n: p for n, p in model.named_parameters() if p.dtype == torch.float32}
    assert all(p.ndim == 1 for n, p in kept.items() if name != "gemma2" or "embed" not in n)
    with torch.no_grad():
        for parameter, held in zip(expected.parameters(), model.parameters(), strict=True):
            parameter.copy_(held.float())
    assert torch.equal(logits(model, "bfloat16"), logits(expected, "bfloat16"))


class PeakOfTensors(TorchDispatchMode):
    """The most bytes that tensors had at the same time, of those that an operation read or wrote."""

    def __init__(self):
        super().__init__()
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        num_before = len(self.live)
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage._cdata not in self.live:
                    self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        if len(self.live) > num_before:
            self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
            self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A function: number format -> a directory with a model of 6 layers, in which no weight is a large part."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_key_value_heads": 4}
    model = tiny_model("llama", vocab_size=300, tie_word_embeddings=False, **sizes)
    folder = tmp_path_factory.mktemp("files")
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype).save_pretrained(folder / str(dtype))
    return folder


HOLDS = {
    "rounded": lambda model: hold_frozen(model, CPU, "bfloat16", exact=False),
    "exact": lambda model: hold_base(model, Lora(r=2), "lora", CPU, "bfloat16"),
    "nf4": lambda model: hold_base(model, Lora(r=2, quantize="nf4"), "lora", CPU, "float32"),
    "nf4 in bfloat16": lambda model: hold_base(model, Lora(r=2, quantize="nf4_double"), "lora", CPU, "bfloat16"),
}
LOADS = {
    "policy": load_policy,
    "reward model": lambda path, **more: new_reward_model(path, None, seed=0, head_std=None, **more)[0],
}


@pytest.mark.parametrize(
    ("dtype", "form", "kind"),
    [
        ("float32", "rounded", "policy"),
        ("float32", "exact", "policy"),
        ("bfloat16", "exact", "reward model"),
        ("float32", "nf4", "reward model"),
        ("bfloat16", "nf4 in bfloat16", "policy"),
    ],
)
def test_a_frozen_model_is_read_a_weight_at_a_time(dtype, form, kind, files):
    size, in_float32 = read_twice(LOADS[kind], str(files / f"torch.{dtype}"), HOLDS[form])
    if form != "exact" or dtype == "bfloat16":
        assert size + TWO_WEIGHTS < 0.75 * in_float32, "the bound says nothing otherwise"


def read_twice(load, path, hold):
    """Compare a load in float32 with one a weight at a time, which takes what is held, and two copies of the largest
    weight. Returns the bytes of what is held, and of the same in float32."""
    adapters = Path(path) / "adapter_model.safetensors"
    # Adapters take their own bytes, too, and DoRA's norms more copies of a layer.
    more = adapters.stat().st_size + 3 * 4 * 64 * 128 if adapters.is_file() else 0
    expected = load(path).requires_grad_(False)
    in_float32 = sum(weight.nbytes for weight in expected.parameters())
    hold(expected)
    with PeakOfTensors() as tensors:
        model = load(path, deferred=True).requires_grad_(False)
        assert is_deferred(model)
        hold(model)
    assert not is_deferred(model)
    assert not model.training
    held, wanted = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (model, expected))
    assert held.keys() == wanted.keys()
    for name, weight in held.items():
        assert weight.dtype == wanted[name].dtype, name
        assert torch.equal(weight, wanted[name]), name
    size = sum(weight.nbytes for weight in held.values())
    assert tensors.peak < size + TWO_WEIGHTS + more
    return size, in_float32


def test_a_weight_that_is_not_finite_and_a_model_that_cannot_compute_are_refused(files, tmp_path):
    path = str(files / "torch.float32")
    model = load_policy(path)
    model.model.layers[3].mlp.up_proj.weight.data[1, 1] = torch.nan
    model.save_pretrained(tmp_path / "nan")
    with pytest.raises(ArtifactError, match=r"layers\.3\.mlp\.up_proj\.weight contains NaN or inf"):
        HOLDS["rounded"](load_policy(str(tmp_path / "nan"), deferred=True).requires_grad_(False))
    model = load_policy(path, deferred=True).requires_grad_(False)
    model.model.layers[2].mlp.up_proj = torch.nn.Linear(65, 128)
    with pytest.raises(ArtifactError, match=f"{path}: a model with its config.json cannot compute"):
        HOLDS["exact"](model)


ADAPTERS = {
    "lora": Lora(r=2, alpha=6),
    "rslora on some layers": Lora(r=3, rslora=True, target_modules=["q_proj", "down_proj"]),
    "dora": Lora(r=2, dora=True),
    "nf4": Lora(r=2, quantize="nf4"),
    "dora on some layers in nf4_double": Lora(r=2, dora=True, quantize="nf4_double", target_modules=["up_proj"]),
}


@pytest.fixture
def adapters(files, tmp_path):
    """A function: name, is it a reward model -> a directory of adapters that are not zero, and its base."""

    def make(name, *, is_reward=False):
        base = str(files / ("torch.bfloat16" if "nf4" in name else "torch.float32"))
        model = LOADS["reward model"](base) if is_reward else load_policy(base)
        hold_base(model, ADAPTERS[name], "lora", CPU, "float32")
        add_lora(model, ADAPTERS[name], "lora", seed=0)
        with torch.no_grad():
            for weight in (p for p in model.parameters() if p.requires_grad):
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) / 10)
        save_adapter(model, tmp_path / "adapter", BaseModel(base), ADAPTERS[name].quantize)
        return str(tmp_path / "adapter"), base

    return make


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_are_merged_a_weight_at_a_time(name, adapters):
    path, base = adapters(name)
    size, in_float32 = read_twice(load_policy, path, HOLDS["rounded"])
    assert size + TWO_WEIGHTS < 0.75 * in_float32, "the bound says nothing otherwise"
    changed = 0
    weights = [load_policy(p, deferred=later).parameters() for p, later in ((path, False), (base, False), (path, True))]
    for merged, plain, later in zip(*weights, strict=True):
        changed += not torch.equal(merged, plain)
        for _ in range(2):  # the layer that adds the adapter does not keep the sum
            assert torch.equal(place_of(later).read(1, 2), merged[1:3]), "the rows of one process"
    assert changed > 0


@pytest.mark.parametrize(
    ("load", "name"),
    [(load_reward_model, "dora"), (lambda p, **o: new_value_model(p, None, **o), "nf4"), (load_value_model, "lora")],
    ids=["reward model", "new value model", "value model"],
)
def test_the_head_beside_adapters_is_read_with_them(load, name, adapters):
    path, _ = adapters(name, is_reward=True)
    read_twice(load, path, HOLDS["nf4" if name == "lora" else "rounded"])
    score = load(path, deferred=True).score.weight
    assert (score.abs().max() == 0) == (name == "nf4")


def test_a_head_with_other_labels_beside_adapters_gives_way_to_a_new_one(adapters):
    path, _ = adapters("lora", is_reward=True)
    file = Path(path, "adapter_model.safetensors")
    weights = load_file(file)
    weights["base_model.model.score.weight"] = weights["base_model.model.score.weight"].repeat(2, 1)
    save_file(weights, file, metadata={"format": "pt"})
    model, new = new_reward_model(path, None, seed=0, head_std=None)
    assert (model.config.num_labels, new) == (1, ["score.weight"])
    assert load_reward_model(path).score.weight.shape == (2, 64)


def test_adapters_on_adapters_and_a_trained_head_in_the_base(adapters, tmp_path):
    """Each adapter adds to what the one before gave. A head in the base gives way to that beside the adapters."""
    path, _ = adapters("lora")
    model = load_policy(path)
    add_lora(model, Lora(r=2), "lora", seed=1)
    with torch.no_grad():
        for weight in (p for p in model.parameters() if p.requires_grad):
            weight.add_(0.01)
    save_adapter(model, tmp_path / "second", BaseModel(path))
    read_twice(load_policy, str(tmp_path / "second"), HOLDS["rounded"])

    path, _ = adapters("lora", is_reward=True)
    load_reward_model(path).save_pretrained(tmp_path / "classifier")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    (tmp_path / "adapter/base_model.json").unlink()
    config["base_model_name_or_path"] = str(tmp_path / "classifier")
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    read_twice(load_reward_model, path, HOLDS["rounded"])


EMBEDDINGS = {"llama": "embed_tokens", "gpt2": "wte", "gpt_neox": "embed_in", "bloom": "word_embeddings"}
FIRST_LAYER = {"llama": "layers.0.", "gpt2": "h.0.", "gpt_neox": "layers.0.", "bloom": "h.0."}


def frozen(model):
    return {name for name, p in model.named_parameters() if not p.requires_grad}


@pytest.mark.parametrize("family", EMBEDDINGS)
def test_embeddings_and_layers_have_one_name_in_every_family(make_model, family):
    model = load_policy(str(make_model(family)))
    names = {name for name, _ in model.named_parameters()}
    line = freeze(model, ["embeddings", "layers.0-0"], "model.freeze")
    assert frozen(model) == {n for n in names if FIRST_LAYER[family] in n or f"{EMBEDDINGS[family]}.weight" in n}
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert line.startswith(f"model.freeze: {trained:,} of {sum(p.numel() for p in model.parameters()):,} weights are")
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert ("the output head shares the embeddings" in line) == tied


def test_the_layers_are_the_outermost_stack():
    """A block of a T5 has two layers, as many as the model has blocks here."""
    model = made("t5").requires_grad_(True)
    freeze(model, ["layers.0"], "model.freeze")
    assert frozen(model) == {name for name, _ in model.named_parameters() if name.startswith("encoder.block.0.")}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["mlp"], {f"model.layers.{n}.mlp.{x}_proj.weight" for n in (0, 1) for x in ("gate", "up", "down")}),
        (["layers.1.self_attn.?_proj"], {f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkvo"}),
        (["model.norm", "lm_head"], {"model.norm.weight", "lm_head.weight"}),
        (["layers.1.*norm"], {f"model.layers.1.{x}_layernorm.weight" for x in ("input", "post_attention")}),
        ([], set()),
    ],
    ids=["part", "wildcard within a part", "two patterns", "wildcard over parts", "none"],
)
def test_a_pattern_is_parts_of_a_name(make_model, patterns, expected):
    model = load_policy(str(make_model("llama")))
    assert (freeze(model, patterns, "model.freeze") is None) == (not patterns)
    assert frozen(model) == expected


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layer.0", "layer.0' matches no weight of this LlamaForCausalLM; did you mean layers.0?"),
        ("embedings", "; did you mean embeddings?"),
        ("layers.0.self_atn.q_prj", "; did you mean layers.0.self_attn.q_proj?"),
        ("layers.0-7", "layers.7' matches no weight of this LlamaForCausalLM; its layers are 0 to 1"),
        ("layers.1-0", "layers.1-0' matches no weight"),
        ("proj", "; did you mean v_proj?"),
        ("zzz", "; parts of its names are embeddings, model, embed_tokens, weight, layers, self_attn, "),
    ],
)
def test_a_pattern_without_a_match_is_an_error_with_near_names(make_model, pattern, message):
    model = load_policy(str(make_model("llama")))
    with pytest.raises(ConfigError, match=f"^model.freeze: '.*{re.escape(message)}"):
        freeze(model, ["embeddings", pattern], "model.freeze")
    assert not frozen(model), "nothing is frozen by half"


def test_a_model_of_which_nothing_is_trained_is_refused(make_model):
    with pytest.raises(ConfigError, match=r"model.freeze: matches all .* weights, so nothing would be trained"):
        freeze(load_policy(str(make_model("gpt2"))), ["embeddings", "wpe", "layers", "ln_f"], "model.freeze")


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_the_head_of_a_classifier_is_always_trained(make_model, tokenizer, tmp_path, kind):
    model = LOADS["reward model"](str(make_model("llama"))) if kind == "decoder" else encoder(tmp_path, tokenizer)
    freeze(model, ["*"], "model.freeze")
    left = {name for name, p in model.named_parameters() if p.requires_grad}
    assert left == ({"score.weight"} if kind == "decoder" else {"classifier.weight", "classifier.bias"})


def changed_weights(before, after):
    old, new = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    return {name for name in new if name not in old or not torch.equal(old[name], new[name])}


def trained(names):
    return {name for name in names if "embed_tokens" not in name and ".layers.0." not in name}


def test_the_three_stages_train_only_the_other_weights(make_model, run_stage, tmp_path):
    start, freezes = make_model("llama"), ["embeddings", "layers.0"]
    sft = run_stage("sft", tmp_path, model={"path": str(start), "freeze": freezes})
    names = load_file(start / "model.safetensors").keys()
    assert changed_weights(start, sft / "model") == trained(names)

    rm = run_stage("rm", tmp_path, model={"freeze": ["model"]})
    assert changed_weights(sft / "model", rm / "model") == {"score.weight"}

    ppo = run_stage("ppo", tmp_path, policy={"freeze": ["layers.1", "lm_head"]}, value_model={"freeze": freezes})
    changed = changed_weights(sft / "model", ppo / "model")
    assert changed == {name for name in names if ".layers.1." not in name and name != "lm_head.weight"}
    value = load_file(ppo / "value_model/model.safetensors").keys()
    assert changed_weights(rm / "model", ppo / "value_model") == trained(value)
