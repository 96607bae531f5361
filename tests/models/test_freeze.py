"""`freeze`: which weights the patterns name, what an error says, and what the three stages then train."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_cli.errors import ConfigError
from rlhf_cli.models.frozen import freeze
from rlhf_cli.models.load import load_policy, new_reward_model
from support.tiny import encoder

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
        ("layer.0", "'layer.0' matches no weight of this LlamaForCausalLM; did you mean layers.0?"),
        ("embedings", "; did you mean embeddings?"),
        ("layers.0.self_atn.q_prj", "; did you mean layers.0.self_attn.q_proj?"),
        ("layers.0-7", "'layers.7' matches no weight of this LlamaForCausalLM; its layers are 0 to 1"),
        ("layers.1-0", "'layers.1-0' matches no weight"),
        ("proj", "; did you mean v_proj?"),
        ("zzz", "; parts of its names are embeddings, model, embed_tokens, weight, layers, self_attn, "),
    ],
)
def test_a_pattern_without_a_match_is_an_error_with_near_names(make_model, pattern, message):
    model = load_policy(str(make_model("llama")))
    with pytest.raises(ConfigError) as caught:
        freeze(model, ["embeddings", pattern], "model.freeze")
    assert str(caught.value).startswith("model.freeze: '")
    assert message in str(caught.value)
    assert not frozen(model), "nothing is frozen by half"


def test_a_model_of_which_nothing_is_trained_is_refused(make_model):
    with pytest.raises(ConfigError, match=r"model.freeze: matches all .* weights, so nothing would be trained"):
        freeze(load_policy(str(make_model("gpt2"))), ["embeddings", "wpe", "layers", "ln_f"], "model.freeze")


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_the_head_of_a_classifier_is_always_trained(make_model, tokenizer, tmp_path, kind):
    if kind == "decoder":
        model, _ = new_reward_model(str(make_model("llama")), None, seed=0, head_std=None)
    else:
        model = encoder(tmp_path, tokenizer)
    freeze(model, ["*"], "model.freeze")
    left = {name for name, p in model.named_parameters() if p.requires_grad}
    assert left == ({"score.weight"} if kind == "decoder" else {"classifier.weight", "classifier.bias"})


# ------------------------------------------------------------------------------------------- stages


def changed_weights(before, after):
    """The names of weights that differ between two saved models."""
    old, new = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    return {name for name in new if name not in old or not torch.equal(old[name], new[name])}


def names_of(path, auto=AutoModelForCausalLM):
    return {name for name, _ in auto.from_pretrained(path).named_parameters()}


def kept(name):
    return "embed_tokens" in name or ".layers.0." in name


def test_the_three_stages_train_only_the_other_weights(make_model, run_stage, tmp_path):
    start, freezes = make_model("llama"), ["embeddings", "layers.0"]
    sft = run_stage("sft", tmp_path, model={"path": str(start), "freeze": freezes})
    assert changed_weights(start, sft / "model") == {n for n in names_of(start) if not kept(n)}

    rm = run_stage("rm", tmp_path, model={"freeze": ["model"]})
    assert changed_weights(sft / "model", rm / "model") == {"score.weight"}

    ppo = run_stage("ppo", tmp_path, policy={"freeze": ["layers.1", "lm_head"]}, value_model={"freeze": freezes})
    assert {n for n in names_of(start) if ".layers.1." not in n and n != "lm_head.weight"} == changed_weights(
        sft / "model", ppo / "model"
    )
    value = names_of(ppo / "value_model", AutoModelForSequenceClassification)
    assert changed_weights(rm / "model", ppo / "value_model") == {n for n in value if not kept(n)}
