"""Weights held in 16 bits compute the same bits as float32 weights under autocast, in every family."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from rlhf_cli.models.forward import autocast, held_precision
from rlhf_cli.models.frozen import hold_frozen, hold_trained
from rlhf_cli.models.load import prepare, set_dropout_off
from support.tiny import CPU, SETTINGS

IDS = torch.tensor([[5, 6, 7, 8, 9]])
ENCODER_DECODERS = {
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    "bart": {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
    },
}
FAMILIES = {name: SETTINGS[name] for name in ("llama", "gpt2", "bloom", "opt", "gemma2", "gpt_neox")} | ENCODER_DECODERS


def made(name, *, tied=True):
    config = AutoConfig.for_model(
        name, **FAMILIES[name], vocab_size=300, pad_token_id=0, decoder_start_token_id=0, tie_word_embeddings=tied
    )
    torch.manual_seed(0)
    auto = AutoModelForSeq2SeqLM if name in ENCODER_DECODERS else AutoModelForCausalLM
    model = auto.from_config(config).float().eval().requires_grad_(False)
    set_dropout_off(model)
    return model


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
    """`prepare` compares packed rows with plain ones in the precision in which the model is held."""
    for name in ("llama", "gpt2", "bloom"):
        plain, held = made(name), made(name)
        hold_frozen(held, CPU, "bfloat16", exact=False)
        assert held_precision(held) == "bfloat16"
        assert prepare(held, CPU) == prepare(plain, CPU)
        assert held.config._attn_implementation == plain.config._attn_implementation


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_trained_matrices_in_bfloat16_compute_as_rounded_ones(name):
    """The residual stream stays in float32: the embeddings return float32."""
    model = made(name).requires_grad_(True)
    expected = copy.deepcopy(model)
    hold_trained(model)
    kept = {n: p for n, p in model.named_parameters() if p.dtype == torch.float32}
    assert all(p.ndim == 1 for n, p in kept.items() if name != "gemma2" or "embed" not in n)
    with torch.no_grad():
        for parameter, held in zip(expected.parameters(), model.parameters(), strict=True):
            parameter.copy_(held.float())
    assert torch.equal(logits(model, "bfloat16"), logits(expected, "bfloat16"))
