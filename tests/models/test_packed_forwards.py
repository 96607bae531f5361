"""Packed forward passes equal plain ones of each sequence, for every architecture."""

from __future__ import annotations

import pytest
import torch

from rlhf_cli.models.forward import hidden_at, is_packed, logits_at
from rlhf_cli.models.load import load_policy, prepare
from rlhf_cli.models.loading import set_dropout_off
from rlhf_cli.packing import PackedBatch, Segment, pack
from support.compare import close, grads, same_gradients
from support.oracles import check_sampled_logprobs
from support.tiny import ARCHITECTURES, CPU, LENGTHS, random_ids


def check_forwards(model, plain):
    sequences = random_ids(*LENGTHS)
    batch = pack(sequences)
    weights = torch.randn(len(batch.ids), 1, generator=torch.Generator().manual_seed(1))
    everywhere = torch.arange(len(batch.ids))
    some = torch.tensor([0, 6, 7, 20, 34, 46])
    wanted_logits = torch.cat([plain(input_ids=torch.tensor([s])).logits[0] for s in sequences])
    wanted_hidden = torch.cat([plain.base_model(input_ids=torch.tensor([s])).last_hidden_state[0] for s in sequences])
    close(logits_at(model, batch, everywhere), wanted_logits)
    close(hidden_at(model, batch, everywhere), wanted_hidden)
    close(logits_at(model, batch, some), wanted_logits[some])
    close(hidden_at(model, batch, some), wanted_hidden[some])

    for one in (model, plain):
        one.zero_grad()
    (logits_at(model, batch, everywhere).log_softmax(-1)[:, :9] * weights).sum().backward()
    (wanted_logits.log_softmax(-1)[:, :9] * weights).sum().backward()
    same_gradients(grads(model), grads(plain), 1e-5)
    for one in (model, plain):
        one.zero_grad()


def test_a_packed_forward_equals_a_plain_forward_of_each_sequence(policy, plain):
    assert is_packed(policy)
    assert not is_packed(plain)
    check_forwards(policy, plain)


@pytest.mark.parametrize("name", ["bloom", "gemma2"])
def test_a_model_that_cannot_pack_runs_padded(make_model, uniforms, name):
    """Bloom has its own attention, and Gemma 2 a softcap that SDPA does not offer."""
    path = str(make_model(name))
    model, plain = load_policy(path), load_policy(path)
    plain.set_attn_implementation("eager")
    prepare(model, CPU)
    assert not is_packed(model)
    check_forwards(model, plain)
    check_sampled_logprobs(model, plain, uniforms, 1.0)


@pytest.mark.parametrize("name", ["bloom", "gemma2"])
def test_prepare_reports_a_model_that_cannot_pack(make_model, name):
    note = prepare(load_policy(str(make_model(name))), CPU)
    assert note is not None
    assert "ForCausalLM" in note
    assert "padded" in note


def test_prepare_detects_attention_across_sequences(make_model, monkeypatch):
    """A model whose packed rows attend across sequences must be refused."""
    from rlhf_cli.kernels import attention

    model = load_policy(str(make_model("llama")))
    real = attention.packed_attention

    def leaky(*args, packed=None, **kwargs):
        whole = packed and PackedBatch(packed.ids, packed.position_ids, [Segment(0, len(packed.ids))])
        return real(*args, packed=whole, **kwargs)

    for name in (attention.EACH, attention.EACH_UNSHARED):
        monkeypatch.setitem(attention.AttentionInterface._global_mapping, name, leaky)
    assert "differ" in prepare(model, CPU)
    assert not is_packed(model)


@pytest.mark.parametrize("name", [*ARCHITECTURES, "bloom", "opt"])
def test_dropout_is_off_in_train_mode(make_model, name):
    """[14] Families keep dropout in modules, in floats, and under different names."""
    model = load_policy(str(make_model(name)))
    ids = torch.tensor(random_ids(12))
    with torch.no_grad():
        evaluated = model.eval()(input_ids=ids).logits
        trained = model.train()(input_ids=ids).logits
    assert torch.equal(evaluated, trained)


def test_dropout_of_a_fixture_model_would_change_its_logits(make_model):
    """The test above can fail: dropout changes the logits of these models."""
    model = load_policy(str(make_model("gpt2")))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    ids = torch.tensor(random_ids(12))
    assert not torch.equal(model.train()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    set_dropout_off(model)
    assert torch.equal(model.train()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
