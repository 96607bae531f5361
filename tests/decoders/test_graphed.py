"""The graphed decoder against plain forward passes, token by token: step by step on a CPU, as CUDA graphs on a GPU."""

import copy

import pytest
import torch

from rlhf_cli.config.models import Lora
from rlhf_cli.decoders.decoder import UnsupportedError, choose_decoder, decoder_notes, gap_to_forward
from rlhf_cli.decoders.graphed import GraphedDecoder, graphed_decoder
from rlhf_cli.decoders.plain import PlainDecoder
from rlhf_cli.models.adapters import adapters_off, add_lora
from rlhf_cli.models.forward import autocast
from rlhf_cli.models.quantized import quantize, quantized_layers
from rlhf_cli.rollout.sampling import Sampling, draw_uniforms, sample
from support.compare import adapt
from support.decoders import (
    FAST,
    PROMPTS,
    SAMPLINGS,
    UNIFORMS,
    VOCAB,
    compare_steps,
    made,
    plain_logits,
    plain_responses,
    random_ids,
    same,
)
from support.gpu import DEVICES, needs_gpu
from support.tiny import tiny_model


def on(device, name):
    return copy.deepcopy(made(name)).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FAST)
@torch.no_grad()
def test_the_logits_of_every_step_equal_a_plain_forward(name, device, monkeypatch):
    monkeypatch.setattr("rlhf_cli.decoders.graphed.READ_TOKENS", 200)
    decoder = GraphedDecoder(on(device, name), 157)
    assert compare_steps(decoder, made(name), 60, flipped=True) > 300
    assert (decoder._graph is not None) == (device == "cuda")


@torch.no_grad()
def decoded(model, text, prompt_length):
    """The logits after each token of a text from the last one of its prompt on: [n, V] float32 on the CPU."""
    device = model.device
    decoder = GraphedDecoder(model, len(text) + 1)
    logits = [decoder.admit([text[:prompt_length]])]
    for token in text[prompt_length:]:
        logits.append(decoder.step(torch.tensor([token], device=device)).clone())
    return torch.cat(logits).float().cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("held", [False, True], ids=["autocast", "held"])
@pytest.mark.parametrize("name", FAST)
def test_in_bfloat16_it_is_as_close_to_float32_as_the_model(name, held, device):
    model, (text,) = on(device, name), random_ids(60, seed=3)
    if held:
        model = model.to(torch.bfloat16)
    exact = plain_logits(made(name), text)[9:]
    with torch.no_grad(), autocast(torch.device(device), "bfloat16"):
        assert GraphedDecoder(model, 20).keys[0].dtype == torch.bfloat16
        own = model(input_ids=torch.tensor([text], device=device)).logits[0, 9:].float().cpu()
        ours = decoded(model, text, 10)
    errors = [(logits - exact).pow(2).mean().sqrt() for logits in (ours, own)]
    assert 0 < errors[0] < 1.2 * errors[1], errors


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@torch.no_grad()
def test_adapters_are_added_to_the_weights(name, dora, device):
    """Also none while they are switched off. DoRA changes the norm of the weights, so it is called as it is."""
    model, without = copy.deepcopy(made(name)), on(device, name)
    add_lora(model, Lora(r=4, dora=dora), "policy.lora", seed=0)
    adapt(model)
    model = model.to(device)

    def decoder(longest):
        return GraphedDecoder(model, longest)

    assert gap_to_forward(model, decoder) < 1e-4
    assert gap_to_forward(without, decoder) > 1e-2
    with adapters_off(model):
        assert gap_to_forward(without, decoder) < 1e-4


@pytest.mark.parametrize("device", DEVICES)
def test_layers_in_4_bits_are_called_as_they_are(monkeypatch, device):
    pytest.importorskip("bitsandbytes")
    model = tiny_model("llama", hidden_size=64, intermediate_size=128)
    quantize(model, "nf4", "model.lora")
    calls, kind = [], type(quantized_layers(model)[0][2])
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda layer, x: calls.append(layer) or forward(layer, x))
    model, (text,) = model.to(device), random_ids(30, seed=3)
    with torch.no_grad(), autocast(torch.device(device), "bfloat16"):
        own = model(input_ids=torch.tensor([text], device=device)).logits[0, 9:].float().cpu()
        of_own = len(calls)
        ours = decoded(model, text, 10)
    assert len(calls) > of_own
    assert (ours - own).norm() < 3e-2 * own.norm()


def test_a_decoder_that_differs_is_refused(monkeypatch):
    assert isinstance(graphed_decoder(on("cpu", "llama"), 21), GraphedDecoder)
    monkeypatch.setattr(GraphedDecoder, "step", lambda _, ids: torch.zeros(len(ids), VOCAB))
    with pytest.raises(UnsupportedError, match=r"the graphed decoder differs from a plain forward by \d"):
        graphed_decoder(on("cpu", "llama"), 21)


@pytest.fixture
def steps(monkeypatch):
    """The number of rows of each step of the sampler, which decodes by it also on a CPU."""
    counts = []

    class Counting(GraphedDecoder):
        def step(self, ids):
            counts.append(len(ids))
            return super().step(ids)

    monkeypatch.setattr("rlhf_cli.rollout.sampling.choose_decoder", lambda model, longest, _: Counting(model, longest))
    return counts


OFTEN = Sampling(stop=frozenset(range(0, VOCAB, 9)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 6, 40])
def test_no_step_is_computed_after_the_last_row_has_ended(steps, rows, device):
    """Its tokens would be shown as part of the reply (`Speaker.stream`)."""
    tokens, uniforms = [], draw_uniforms(0, "x", 0, rows, 100)
    responses = sample(on(device, "llama"), [[1, 2, 3]] * rows, uniforms, OFTEN, on_tokens=tokens.append)
    assert all(response.ended for response in responses)
    assert len(steps) == max(len(response.ids) for response in responses) - 1
    assert len(tokens) == len(steps) + 1


@pytest.mark.parametrize("device", DEVICES)
def test_waiting_prompts_enter_once_half_of_few_rows_have_ended(steps, device):
    model = on(device, "llama")
    responses = sample(model, [[1, 2, 3]] * 40, draw_uniforms(0, "x", 0, 40, 100), OFTEN, max_live_rows=8)
    assert len(steps) < 2 * sum(len(response.ids) for response in responses) / 8
    for kind in ("plain", "filters"):
        same(sample(model, PROMPTS, UNIFORMS, SAMPLINGS[kind], max_live_rows=4), plain_responses("llama", kind))


@needs_gpu
def test_auto_takes_it_on_a_gpu_and_draws_the_tokens_of_a_cpu():
    model, other = on("cuda", "qwen2"), on("cuda", "gpt_neox")
    assert isinstance(choose_decoder(model, 50), GraphedDecoder)
    assert isinstance(choose_decoder(other, 50), PlainDecoder)
    assert decoder_notes(model, 50) == []
    for kind in ("plain", "filters", "min_new_tokens"):
        same(sample(model, PROMPTS, UNIFORMS, SAMPLINGS[kind]), plain_responses("qwen2", kind))
        same(sample(model, PROMPTS, UNIFORMS, SAMPLINGS[kind], max_live_rows=4), plain_responses("qwen2", kind))
