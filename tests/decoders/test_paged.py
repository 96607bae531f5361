"""The paged decoder against plain forward passes, token by token, and the models that it refuses."""

import copy
import gc
import math
import weakref
from dataclasses import replace

import pytest
import torch

from rlhf_cli.config.models import Lora
from rlhf_cli.decoders import network, paged_cache
from rlhf_cli.decoders import paged as paged_module
from rlhf_cli.decoders.decoder import UnsupportedError, choose_decoder, decoder_notes, recorded
from rlhf_cli.decoders.paged import PagedDecoder, paged_decoder
from rlhf_cli.decoders.paged_cache import PAGE, PagedCache
from rlhf_cli.decoders.plain import PlainDecoder
from rlhf_cli.kernels import linear
from rlhf_cli.models.adapters import adapters_off, add_lora
from rlhf_cli.models.frozen import give_float32, hold_frozen
from rlhf_cli.rollout import sampling as sampling_module
from rlhf_cli.rollout.sampling import Sampling, draw, draw_uniforms, sample
from support.compare import adapt
from support.decoders import (
    FAST,
    LONGEST,
    PROMPTS,
    SAMPLINGS,
    UNIFORMS,
    UNSUPPORTED,
    compare_steps,
    made,
    plain_logits,
    plain_responses,
    random_ids,
    same,
)
from support.tiny import CPU, tiny_model


def why_not(model, longest=1):
    """Why the paged decoder refuses a model; None if it takes it."""
    try:
        paged_decoder(model, longest)
    except UnsupportedError as reason:
        return str(reason)
    return None


def sampled_by(model, prompts, uniforms, sampling, name, monkeypatch, **settings):
    """Responses that were certainly sampled by the decoder of this name."""
    used = []
    with monkeypatch.context() as patch:
        patch.setattr(sampling_module, "choose_decoder", lambda *args: used.append(choose_decoder(*args)) or used[-1])
        responses = sample(model, prompts, uniforms, replace(sampling, decoder=name), **settings)
    assert [type(decoder) for decoder in used] == [{"plain": PlainDecoder, "paged": PagedDecoder}[name]]
    return responses


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize(("read_tokens", "new"), [(1024, paged_decoder), (40, PagedDecoder)], ids=["recorded", "not"])
@torch.no_grad()
def test_the_logits_of_every_step_equal_a_plain_forward(name, read_tokens, new, monkeypatch):
    monkeypatch.setattr(paged_module, "READ_TOKENS", read_tokens)
    model = made(name)
    decoder = new(model, 160)
    assert (decoder._recorded is not None) == (new is paged_decoder)
    assert compare_steps(decoder, model, 70) > 300
    decoder.keep(torch.tensor([], dtype=torch.int64))
    assert sorted(decoder.cache.clean + decoder.cache.unused) == list(range(len(decoder.cache.users))), (
        "every page is free again"
    )
    assert set(decoder.cache.users) == {0}


def test_rows_with_the_same_prompt_share_its_full_pages_only():
    cache = PagedCache(1, heads=2, kv_heads=1, head_dim=4)
    prompt = list(range(2 * PAGE + 3))
    cache.open_rows([prompt, [1, 2]], [[0, 2, 3], [1]])
    first, other, second, third = cache.pages
    assert first[:2] == second[:2] == third[:2]
    assert len({first[2], second[2], third[2], *other}) == 4
    assert [cache.users[page] for page in (*first, *other)] == [3, 3, 1, 1]
    cache.keep([2, 1])
    assert [cache.users[page] for page in first] == [1, 1, 0]
    assert cache.pages == [second, other]


def test_a_new_row_does_not_read_values_of_an_old_one(monkeypatch):
    """The pages of a row of NaN are used again. Slots not written yet have weight 0, and 0 * NaN is NaN."""
    monkeypatch.setattr(paged_cache, "FEWEST_CLEANED", 1)
    cache = PagedCache(1, heads=2, kv_heads=1, head_dim=4)
    cache.open_rows([[1] * 40], [[0]])
    for pool in (*cache.keys, *cache.values):
        pool[cache.pages[0]] = math.nan
    used = set(cache.pages[0])
    cache.keep([])
    cache.open_rows([[1]], [[0]])
    positions, places = cache.add_token()
    assert set(cache.pages[0]) <= used
    query, key = torch.ones(1, 2, 4), torch.ones(1, 1, 4)
    pools, now, bias = (cache.keys[0], cache.values[0]), places.at(positions), places.bias(positions)
    assert paged_cache.attend(now, bias, *pools, query, key, key, 1.0).isfinite().all()


def test_a_growing_pool_keeps_its_values_and_touches_only_the_pages_in_use(monkeypatch):
    """Memory that nothing has touched takes no room."""
    monkeypatch.setattr(paged_cache, "FEWEST_CLEANED", 1)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *shape: self.new_full(shape, math.nan))
    cache = PagedCache(2, heads=2, kv_heads=1, head_dim=4)
    (place,) = cache.open_rows([[1] * 40], [[0]])
    key, value = torch.randn(2, 40, 1, 4, generator=torch.Generator().manual_seed(1))
    cache.write_prompts(1, key, value, place)
    before = [pool[cache.pages[0]] for pool in (cache.keys[1], cache.values[1])]
    pages = len(cache.users)
    cache.open_rows([[1] * 40 * pages], [[0]])
    assert len(cache.users) > pages
    for pool, written in zip((cache.keys[1], cache.values[1]), before, strict=True):
        assert torch.equal(pool[cache.pages[0]], written)
        assert cache.unused
        assert pool[cache.unused].isnan().all()


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "plain") for name in FAST] + [(name, kind) for name in ("qwen2", "gpt2") for kind in SAMPLINGS],
)
def test_the_plain_decoder_draws_the_same_tokens(name, kind, monkeypatch):
    model = made(name)
    fast = sampled_by(model, PROMPTS, UNIFORMS, SAMPLINGS[kind], "paged", monkeypatch)
    same(fast, plain_responses(name, kind))
    if kind == "plain":
        assert len({len(r.ids) for r in fast}) > 3
        assert any(r.ended and 1 < len(r.ids) < LONGEST for r in fast)


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
@pytest.mark.parametrize(("kind", "max_live_rows"), [("plain", 1), ("filters", 3), ("min_new_tokens", 7)])
def test_a_limit_on_live_rows_changes_no_response(name, kind, max_live_rows, monkeypatch):
    tier = "plain" if name in UNSUPPORTED else "paged"
    model, most = made(name), []
    whole = plain_responses(name, kind)
    for decoder in (PagedDecoder, PlainDecoder):
        step = decoder.step
        monkeypatch.setattr(decoder, "step", lambda self, ids, step=step: most.append(len(ids)) or step(self, ids))
    same(sampled_by(model, PROMPTS, UNIFORMS, SAMPLINGS[kind], tier, monkeypatch, max_live_rows=max_live_rows), whole)
    assert max(most) <= max_live_rows
    if tier == "paged" and max_live_rows == 3:
        waves = -(-len(PROMPTS) // 3) * max(len(r.ids) for r in whole)
        assert len(most) < waves, "rows enter while others continue"


def test_the_last_prompts_do_not_wait_for_the_end_of_all_others(monkeypatch):
    """They are fewer than the share of the live rows from which waiting prompts enter."""
    model, live, step = made("llama"), [], PagedDecoder.step
    assert why_not(model) is None, "the check has run"
    monkeypatch.setattr(PagedDecoder, "step", lambda self, ids: live.append(len(ids)) or step(self, ids))
    prompts, uniforms = random_ids(*[3] * 17, seed=8), draw_uniforms(0, "last", 0, 17, 20)
    limits = [5] * 8 + [20] * 9
    responses = sample(model, prompts, uniforms, Sampling(), limits=limits, max_live_rows=16)
    assert [len(r.ids) for r in responses] == limits
    assert len(live) == 5 + 19, "the last one enters when the first eight have ended"


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_a_new_decoder_samples_from_the_new_weights(name, monkeypatch):
    model = copy.deepcopy(made(name))
    before = sampled_by(model, PROMPTS, UNIFORMS, SAMPLINGS["plain"], "paged", monkeypatch)
    for number in range(len(list(model.parameters()))):
        moved = list(model.parameters())[number]
        with torch.no_grad():
            moved += 0.1 * torch.randn(moved.shape, generator=torch.Generator().manual_seed(number))
    after = sampled_by(model, PROMPTS, UNIFORMS, SAMPLINGS["plain"], "paged", monkeypatch)
    assert [r.ids for r in after] != [r.ids for r in before]
    same(after, sampled_by(model, PROMPTS, UNIFORMS, SAMPLINGS["plain"], "plain", monkeypatch))


@pytest.mark.parametrize(("name", "targets"), [("llama", "all"), ("qwen3", "some"), ("gpt2", "all"), ("gpt2", "some")])
def test_adapters_count_and_can_be_disabled(name, targets, monkeypatch):
    model, plain = copy.deepcopy(made(name)), plain_responses(name, "plain")
    some = ["c_attn"] if name == "gpt2" else ["q_proj", "down_proj"]
    add_lora(model, Lora(r=4, target_modules=None if targets == "all" else some), "policy.lora", seed=0)
    same(sampled_by(model, PROMPTS, UNIFORMS, SAMPLINGS["plain"], "paged", monkeypatch), plain)
    adapt(model, std=0.3)
    adapted = sampled_by(model, PROMPTS, UNIFORMS, SAMPLINGS["plain"], "paged", monkeypatch)
    same(adapted, sampled_by(model, PROMPTS, UNIFORMS, SAMPLINGS["plain"], "plain", monkeypatch))
    assert [r.ids for r in adapted] != [r.ids for r in plain]
    with adapters_off(model):
        same(sampled_by(model, PROMPTS, UNIFORMS, SAMPLINGS["plain"], "paged", monkeypatch), plain)


def test_responses_are_the_same_with_and_without_onednn(monkeypatch):
    for name in ("llama biases", "gpt2"):
        found = []
        for onednn in (False, True):
            model = copy.deepcopy(made(name))  # which has no recorded step
            monkeypatch.setattr(linear, "prefers_onednn", lambda onednn=onednn: onednn)
            found.append(sampled_by(model, PROMPTS, UNIFORMS, SAMPLINGS["plain"], "paged", monkeypatch))
            assert paged_module._recorded_step(model) is not None
        same(*found)


@torch.no_grad()
def test_a_recorded_step_gives_the_bytes_of_the_step_itself():
    """Of other weights, rows and lengths than it was recorded with."""
    for name in ("llama one key head", "qwen3", "gpt2"):
        model = copy.deepcopy(made(name))
        first = paged_decoder(model, 160)
        for weight in model.parameters():
            weight *= 1.5
        decoder, itself = paged_decoder(model, 160), PagedDecoder(model, 160)
        assert decoder._recorded is first._recorded is not None
        logits = [one.admit(PROMPTS) for one in (decoder, itself)]
        for step in range(40):
            ids = logits[0].argmax(1)
            logits = [one.step(ids) for one in (decoder, itself)]
            assert torch.equal(*logits)
            if step % 10 == 5:
                for one in (decoder, itself):
                    one.keep(torch.arange(1, len(ids)))
                logits = [x[1:] for x in logits]


def test_a_model_that_has_sampled_is_freed():
    """The recorded step, which is kept for the model, must not keep the model and the decoder's copy of its weights."""
    model = copy.deepcopy(made("llama"))
    decoder = paged_decoder(model, 160)
    copies = [weakref.ref(weight) for weight in decoder.network.weights]
    del decoder
    gc.collect()
    of_model = weakref.ref(model)
    del model
    gc.collect()
    assert of_model() is None
    assert all(weight() is None for weight in copies)


def test_what_a_graph_would_keep_is_not_recorded(monkeypatch):
    """A number that differs between the examples; a module of unknown class; a torch without torch.jit."""
    assert recorded(lambda x: (x.cumsum(0), x + 1), (torch.ones(2),), (torch.ones(3),)) is not None
    assert recorded(lambda x: x * len(x), (torch.ones(2),), (torch.ones(3),)) is None
    model = copy.deepcopy(made("llama"))
    model.model.layers[0].mlp.act_fn = torch.nn.PReLU().requires_grad_(False)
    assert paged_module._recorded_step(model) is None
    monkeypatch.delattr(torch.jit, "trace")
    assert paged_module._recorded_step(copy.deepcopy(made("llama"))) is None


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_other_families_are_refused_with_a_reason(name):
    model, reason = made(name), UNSUPPORTED[name][2]
    assert reason in why_not(model)
    (line,) = decoder_notes(model, 1)
    assert line.startswith(f"{type(model).__name__}: ")
    assert line.endswith("sampling uses the model's own forward (slower, as exact)")
    assert sample(model, PROMPTS[:2], UNIFORMS[:2, :3], Sampling())


def test_texts_longer_than_the_sliding_window_use_the_plain_decoder(monkeypatch):
    """Up to the window every token attends to all others; one token more would not."""
    model = tiny_model("mistral", sliding_window=48)
    prompts = random_ids(3, 28, seed=6)
    same(
        sampled_by(model, prompts, UNIFORMS[:2, :20], Sampling(), "paged", monkeypatch),
        sampled_by(model, prompts, UNIFORMS[:2, :20], Sampling(), "plain", monkeypatch),
    )
    assert "sliding window of 48" in why_not(model, 49)
    longer = sampled_by(model, prompts, UNIFORMS[:2, :40], Sampling(), "plain", monkeypatch)
    same(sample(model, prompts, UNIFORMS[:2, :40], Sampling()), longer)


@pytest.mark.parametrize("wrong", ["rotate", "causal_attention"])
def test_a_decoder_that_differs_from_the_model_is_refused(wrong, monkeypatch):
    """As with a release of transformers that computes something else."""
    model = copy.deepcopy(made("llama"))
    right = {"rotate": lambda x, _: x, "causal_attention": lambda query, *_: query.flatten(1)}
    monkeypatch.setattr(paged_module if wrong == "causal_attention" else network, wrong, right[wrong])
    with pytest.raises(UnsupportedError, match="differs from a plain forward by"):
        paged_decoder(model, 100)
    assert isinstance(choose_decoder(model, 100), PlainDecoder)


def test_a_model_with_replaced_modules_is_checked_again():
    model = copy.deepcopy(made("llama"))
    assert why_not(model) is None
    model.model.layers[0].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Tanh())
    assert why_not(model) is None, "another module is called as it is"
    block = model.model.layers[0]
    handle = block.register_forward_hook(lambda *_: None)
    block.extra = torch.nn.Identity()
    assert "hooks" in why_not(model)
    handle.remove()
    block.forward = lambda hidden, *_, **__: 2 * hidden
    block.other = torch.nn.Identity()
    assert "differs" in why_not(model)


def test_a_model_whose_norms_are_in_bfloat16_uses_the_plain_decoder(monkeypatch):
    model = copy.deepcopy(made("llama")).to(torch.bfloat16)
    assert "float32" in why_not(model)
    responses = sampled_by(model, PROMPTS, UNIFORMS, SAMPLINGS["plain"], "plain", monkeypatch)
    same(sample(model, PROMPTS, UNIFORMS, SAMPLINGS["plain"]), responses)


@pytest.mark.parametrize("name", FAST)
@torch.no_grad()
def test_bfloat16_rounds_less_than_the_models_own_forward(name):
    """The mean error against float32, of logits of prompts and of steps."""
    model, texts = made(name), random_ids(*range(20, 37), seed=3)
    exact = torch.cat([plain_logits(model, text)[-4:] for text in texts])
    with torch.autocast("cpu", torch.bfloat16):
        decoder, itself = paged_decoder(model, 160), PagedDecoder(model, 160)
        plain = torch.cat([plain_logits(model, text)[-4:].float() for text in texts])
        found = []
        for one in (decoder, itself):
            logits = [one.admit([text[:-3] for text in texts])]
            logits += [one.step(torch.tensor([text[i] for text in texts])) for i in (-3, -2, -1)]
            found.append(torch.stack(logits, 1).flatten(0, 1))
    assert decoder._recorded is not None
    assert torch.equal(*found)
    assert found[0].dtype == torch.float32
    assert 0 < (found[0] - exact).abs().mean() < 1.1 * (plain - exact).abs().mean()


@torch.no_grad()
def test_weights_held_in_bfloat16_and_adapters_give_the_logits_of_a_plain_forward():
    for name in ("llama", "gpt2"):
        model = copy.deepcopy(made(name))
        with torch.autocast("cpu", torch.bfloat16):
            wanted = paged_decoder(model, 160).admit(PROMPTS)
            hold_frozen(model.requires_grad_(False), CPU, "bfloat16", exact=False, constant=False)
            assert torch.equal(paged_decoder(model, 160).admit(PROMPTS), wanted)
            model.get_input_embeddings().weight.data = model.get_input_embeddings().weight.bfloat16()
            give_float32(model)
            assert paged_decoder(model, 160)._recorded is not None
            assert why_not(model) is None
            add_lora(model, Lora(r=4), "policy.lora", seed=0)
            adapt(model, std=0.1)
            assert why_not(model) is None
        assert "float32" in why_not(model)


def test_float32_and_bfloat16_are_checked_apart(monkeypatch):
    model = copy.deepcopy(made("llama"))
    assert why_not(model) is None
    monkeypatch.setattr(network, "rotate", lambda x, _: x)
    assert why_not(model) is None, "checked before"
    with torch.autocast("cpu", torch.bfloat16):
        assert "differs from a plain forward by" in why_not(model)


@pytest.mark.parametrize("vocabulary", [2, 63, 64, 65, 1000, 50_257])
@pytest.mark.parametrize("temperature", [0.4, 1.0])
def test_a_draw_is_the_first_token_whose_cumulative_probability_exceeds_u(vocabulary, temperature):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(40, vocabulary, generator=generator)
    logits[:, ::5] = -math.inf
    u = torch.rand(40, generator=generator)
    ids, logprobs = draw(logits, u, temperature)
    p = (logits.double() / temperature).softmax(1)
    cdf = p.cumsum(1)
    at = ids[:, None]
    assert (p.gather(1, at) > 0).all()
    assert (cdf.gather(1, at)[:, 0] > u - 1e-6).all()
    assert (cdf.gather(1, at) - p.gather(1, at))[:, 0].le(u + 1e-6).all()
    torch.testing.assert_close(logprobs, p.gather(1, at)[:, 0].log().float(), rtol=1e-5, atol=1e-5)
