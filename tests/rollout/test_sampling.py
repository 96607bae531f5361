"""Filters, stop strings and minimum lengths, against a slow float64 oracle and against decoding the whole text.

Nothing here is scripted: where a test needs a certain response, it looks up the uniforms at which the model's
own distribution gives it, and the real sampler draws it.
"""

from __future__ import annotations

import copy
import doctest
import math
import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rlhf_cli.decoders.cpu import FastDecoder
from rlhf_cli.decoders.plain import PlainDecoder
from rlhf_cli.models.load import load_policy, prepare
from rlhf_cli.rollout import distribution
from rlhf_cli.rollout import sampling as sampling_module
from rlhf_cli.rollout.distribution import Response, Sampling, allowed_logits, kept_tokens
from rlhf_cli.rollout.sampling import draw, draw_uniforms, response_text, sample
from rlhf_cli.rollout.stop_strings import stop_string_start
from rlhf_cli.tensor_ops import token_entropy, token_logprobs

CPU = torch.device("cpu")
STOP = frozenset(range(10, 40))
FILTERS = {
    "plain": Sampling(),
    "temperature": Sampling(0.6),
    "top_k": Sampling(1.4, top_k=9),
    "greedy": Sampling(top_k=1),
    "top_p": Sampling(0.8, top_p=0.7),
    "min_p": Sampling(1.3, min_p=0.1),
    "min_new_tokens": Sampling(min_new_tokens=6, stop=STOP),
    "wide": Sampling(top_k=299, min_new_tokens=6, stop=STOP),  # with room for the stop tokens, if they could be
    "all": Sampling(1.2, top_k=40, top_p=0.8, min_p=0.05, min_new_tokens=5, stop=STOP),
}
LONGEST = 12


def random_ids(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 256, (n,), generator=generator).tolist() for n in lengths]


PROMPTS = random_ids(1, 7, 3, 12, 5, 2, 9, 4, seed=1)


@pytest.fixture(scope="module", params=["llama", "gpt2", "gpt_neox"])
def arch(request):
    """Two models that the fast decoder supports, and one that it does not."""
    return request.param


@pytest.fixture(scope="module")
def plain(arch, make_model):
    """The model as transformers loads it."""
    return load_policy(str(make_model(arch))).eval()


@pytest.fixture(scope="module")
def policy(arch, make_model):
    model = load_policy(str(make_model(arch))).eval()
    assert prepare(model, CPU) is None
    return model


@pytest.fixture(scope="module")
def double(plain):
    return copy.deepcopy(plain).double()


@pytest.fixture(scope="module")
def tok(arch, tokenizer, eos_only_tokenizer):
    return eos_only_tokenizer if arch == "gpt2" else tokenizer


@pytest.fixture(scope="module")
def table():
    return draw_uniforms(0, "test sampling", 0, len(PROMPTS), LONGEST)


@torch.no_grad()
def logits_of(model, prompt, ids):
    """[len(ids), V] logits that each of ids was drawn from, by one forward pass over the sequence."""
    return model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]


def oracle(logits, t, how):
    """The ids that token t could be, with their probabilities, step by step in float64."""
    left = {v: x / how.temperature for v, x in enumerate(logits.double().tolist()) if x > -math.inf}
    if t + 1 < how.min_new_tokens:
        left = {v: x for v, x in left.items() if v not in how.stop}

    def likeliest_first():
        total = math.fsum(math.exp(x) for x in left.values())
        return [(v, math.exp(left[v]) / total) for v in sorted(left, key=lambda v: (-left[v], v))]

    if how.top_k is not None:
        left = {v: left[v] for v, _ in likeliest_first()[: how.top_k]}
    if how.top_p is not None and how.top_p < 1:
        some, mass = {}, 0.0
        for v, p in likeliest_first():
            some[v] = left[v]
            mass += p
            if mass >= how.top_p:
                break
        left = some
    if how.min_p is not None:
        ranked = likeliest_first()
        left = {v: left[v] for v, p in ranked if p >= how.min_p * ranked[0][1]}
    probabilities = dict(likeliest_first())
    return sorted(probabilities), probabilities


def close(found, wanted, tolerance=1e-5):
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(wanted), rtol=tolerance, atol=tolerance)


def test_the_examples_run():
    results = [doctest.testmod(module) for module in (sampling_module, distribution)]
    assert [result.failed for result in results] == [0, 0]
    assert sum(result.attempted for result in results) > 8


# -------------------------------------------------------------------------------------------- filters


@pytest.mark.parametrize("name", FILTERS)
def test_tokens_come_as_often_as_the_filtered_softmax_says(plain, double, name):
    """Uniforms at the n midpoints of [0, 1): each token comes n * p times, to one draw. At the first token and,
    through the cache, at the second."""
    how, n = FILTERS[name], 1500
    prompt = PROMPTS[1]
    midpoints = (torch.arange(n) + 0.5) / n
    first = sample(plain, [prompt] * n, midpoints[:, None], how)
    (head,) = sample(plain, [prompt], torch.tensor([[0.31]]), how)
    assert not how.stop or how.min_new_tokens > 2, "else the second token would not always come"
    second = sample(plain, [prompt] * n, torch.stack([torch.full((n,), 0.31), midpoints], 1), how)
    for t, drawn in ((0, [r.ids[0] for r in first]), (1, [r.ids[1] for r in second])):
        before = prompt + head.ids[:t]
        kept, p = oracle(logits_of(double, before, [0])[0], t, how)
        counts = torch.bincount(torch.tensor(drawn), minlength=300)
        assert set(drawn) <= set(kept)
        assert all(abs(counts[v].item() - n * p[v]) <= 1.01 for v in kept)


@pytest.mark.parametrize("name", FILTERS)
def test_logprobs_and_kept_sets_are_those_of_a_plain_forward_and_a_slow_filter(policy, double, table, name):
    """Left padding, cache, compaction and every filter, against one float64 forward of each response."""
    how = FILTERS[name]
    sizes = set()
    for prompt, response in zip(PROMPTS, sample(policy, PROMPTS, table, how), strict=True):
        assert (response.allowed_ids is None) == (not how.filters)
        assert len(response.logprobs) == len(response.ids)
        assert response.allowed_ids is None or len(response.allowed_ids) == len(response.ids)
        for t, logits in enumerate(logits_of(double, prompt, response.ids)):
            kept, p = oracle(logits, t, how)
            token = response.ids[t]
            assert token in p
            close(response.logprobs[t], math.log(p[token]))
            if response.allowed_ids is not None:
                assert response.allowed_ids[t] == kept
                sizes.add(len(kept))
    if name in ("top_p", "min_p", "all"):
        assert len(sizes) > 3, "else a fixed number would do"
        assert max(sizes) < 300
    if name == "top_k":
        assert sizes == {9}


@pytest.mark.parametrize("name", FILTERS)
def test_the_trainer_sees_the_sampled_logprobs(policy, plain, table, name):
    how = FILTERS[name]
    responses = sample(policy, PROMPTS, table, how)
    logits = torch.cat([logits_of(plain, p, r.ids) for p, r in zip(PROMPTS, responses, strict=True)])
    allowed = allowed_logits(logits, responses, how)
    assert (allowed is logits) == (name in ("plain", "temperature"))
    ids = torch.tensor([i for r in responses for i in r.ids])
    found = token_logprobs(allowed, ids, temperature=how.temperature)
    close(found, [x for r in responses for x in r.logprobs])
    if allowed is not logits and name != "greedy":
        free = token_logprobs(logits, ids, temperature=how.temperature)
        assert (found - free).max() > 0.05, "the restriction is seen at all"
    assert token_entropy(allowed, temperature=how.temperature).isfinite().all()


@pytest.mark.parametrize("name", ["top_p", "min_new_tokens", "all"])
def test_another_policy_uses_the_tokens_that_the_rollout_kept(policy, plain, table, name):
    """Its own probabilities would keep other tokens. Its probabilities sum to 1 over the kept ones."""
    how = FILTERS[name]
    responses = sample(policy, PROMPTS, table, how)
    other = copy.deepcopy(plain)
    with torch.no_grad():
        for i, weight in enumerate(other.parameters()):
            weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(i))
    logits = torch.cat([logits_of(other, p, r.ids) for p, r in zip(PROMPTS, responses, strict=True)])
    allowed = allowed_logits(logits, responses, how)
    places = [(r, t) for r in responses for t in range(len(r.ids))]
    own = 0
    for row, (r, t), before in zip(allowed, places, logits, strict=True):
        kept, _ = oracle(before, t, how)
        if r.allowed_ids is None:
            wanted = kept
        else:
            wanted = r.allowed_ids[t]
            own += kept != wanted
        assert (row > -math.inf).nonzero()[:, 0].tolist() == wanted
        assert torch.equal(row[wanted], before[wanted])
    assert name == "min_new_tokens" or own > len(places) / 2, "the other policy would keep other tokens"
    ids = torch.arange(logits.shape[1]).expand(len(logits), -1)
    each = token_logprobs(allowed[:, None].expand(-1, logits.shape[1], -1), ids, temperature=how.temperature)
    close(each.exp().sum(1), torch.ones(len(logits)))


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "min_new_tokens", "all", "greedy"])
def test_gradients_are_finite_and_zero_on_what_was_not_allowed(policy, plain, table, name):
    how = FILTERS[name]
    responses = sample(policy, PROMPTS, table, how)
    logits = torch.cat([logits_of(plain, p, r.ids) for p, r in zip(PROMPTS, responses, strict=True)])
    ids = torch.tensor([i for r in responses for i in r.ids])
    logits = logits.double().requires_grad_()
    allowed = allowed_logits(logits, responses, how)
    weights = torch.linspace(-1, 2, len(ids), dtype=torch.float64)
    loss = (token_logprobs(allowed, ids, temperature=how.temperature) * weights).sum()
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    forbidden = allowed == -math.inf
    assert gradient.isfinite().all()
    assert (gradient[forbidden] == 0).all()
    # d logprob / d logit = (1[v is the token] - p) / temperature
    p = torch.zeros_like(gradient)
    places = [(r, t) for r in responses for t in range(len(r.ids))]
    for n, (r, t) in enumerate(places):
        some = r.allowed_ids[t] if r.allowed_ids is not None else oracle(logits[n].detach(), t, how)[0]
        p[n, some] = (logits[n, some].detach() / how.temperature).softmax(0)
    one_hot = torch.nn.functional.one_hot(ids, logits.shape[1])
    close(gradient, weights[:, None] * (one_hot - p) / how.temperature, 1e-9)
    (of_entropy,) = torch.autograd.grad(token_entropy(allowed, temperature=how.temperature).sum(), logits)
    assert of_entropy.isfinite().all()
    assert (of_entropy[forbidden] == 0).all()
    assert name == "greedy" or of_entropy.abs().max() > 1e-3


def test_allowed_logits_checks_the_number_of_tokens():
    how = Sampling(top_k=2)
    response = Response([1, 2], [0.0, 0.0], False, [[1, 3], [0, 2]])
    with pytest.raises(ValueError, match="found 1 rows of logits for 2 response tokens"):
        allowed_logits(torch.zeros(1, 4), [response], how)
    with pytest.raises(ValueError, match="found allowed_ids for 2 of 4 response tokens"):
        allowed_logits(torch.zeros(4, 4), [response, Response([1, 2], [0.0, 0.0], False)], how)


def random_restriction(rng, odds):
    """Random filters over integer weights. No sum of weights equals top_p, so rounding cannot matter."""
    top_k = rng.choice([None, 1, 2, 5, len(odds), len(odds) + 3])
    ranked = sorted(odds, reverse=True)[:top_k]
    top_p = rng.choice([None, 1.0, (rng.randrange(sum(ranked)) + 0.5) / sum(ranked)])
    min_p = rng.choice([None, (rng.randrange(max(odds)) + 0.5) / max(odds)])
    return Sampling(top_k=top_k, top_p=top_p, min_p=min_p)


@pytest.mark.parametrize("first_look", [1, 3, 1024])
def test_filters_keep_what_the_slow_filter_keeps(monkeypatch, first_look):
    """There are few distinct probabilities, so nearly every cut goes through equally likely tokens."""
    monkeypatch.setattr(distribution, "FIRST_LOOK", first_look)
    rng = random.Random(0)
    cut_in_a_tie = 0
    for _ in range(300):
        odds = [rng.choice([0, 1, 1, 2, 3, 7]) for _ in range(rng.randint(2, 30))] + [rng.randint(1, 9)]
        other = rng.sample(odds, len(odds))
        how = random_restriction(rng, odds)
        logits = torch.tensor([odds, other], dtype=torch.float32).log()
        keep = kept_tokens(logits, how)
        for row, some, p in zip(logits, keep, (odds, other), strict=True):
            kept = some.nonzero()[:, 0].tolist()
            assert kept == oracle(row, 0, how)[0], (p, how)
            cut_in_a_tie += bool({p[v] for v in kept} & {p[v] for v in range(len(p)) if v not in kept})
    assert cut_in_a_tie > 100


@pytest.mark.parametrize("vocabulary", [1023, 1024, 1025, 9000])
@pytest.mark.parametrize("top_p", [0.05, 0.6, 0.999])
def test_top_p_looks_as_far_as_it_must(vocabulary, top_p):
    """A peaked row beside a flat row whose nucleus has thousands of tokens."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(2, vocabulary, generator=generator) * torch.tensor([[5.0], [0.1]])
    keep = kept_tokens(logits, Sampling(top_p=top_p))
    for row, some in zip(logits, keep, strict=True):
        ranked = row.double().softmax(0).sort(descending=True)
        before = torch.cat([torch.zeros(1), ranked.values.cumsum(0)[:-1]])
        # Float32 may be off by a token where the sum crosses p.
        slack = 1e-5
        surely, maybe = (before < top_p - slack).sum(), (before < top_p + slack).sum()
        assert surely <= some.sum() <= maybe
        assert torch.equal(some.nonzero()[:, 0], ranked.indices[: some.sum()].sort().values)


def test_the_likeliest_token_is_always_kept():
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(2)) * 8
    for how in (Sampling(top_k=1), Sampling(top_p=1e-9), Sampling(min_p=1.0)):
        keep = kept_tokens(logits, how)
        assert torch.equal(keep.sum(1), torch.ones(64, dtype=torch.int64))
        assert torch.equal(keep.int().argmax(1), logits.argmax(1))
    equal = torch.zeros(1, 6)
    assert kept_tokens(equal, Sampling(min_p=1.0)).all()
    assert kept_tokens(equal, Sampling(top_k=1)).nonzero().tolist() == [[0, 0]], "the lowest id of equals"


def test_filters_that_keep_everything_change_nothing(policy, table):
    free = sample(policy, PROMPTS, table, Sampling())
    assert sample(policy, PROMPTS, table, Sampling(top_p=1.0)) == free
    for how in (Sampling(top_k=10_000), Sampling(min_p=1e-30)):
        loose = sample(policy, PROMPTS, table, how)
        assert [r.ids for r in loose] == [r.ids for r in free]
        assert [r.logprobs for r in loose] == [r.logprobs for r in free]
        assert all(ids == list(range(300)) for r in loose for ids in r.allowed_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_rounding_draws_what_was_not_kept(dtype):
    """The smallest and the largest uniforms, including those that round to 1 in float32."""
    ends = [0.0, 2.0**-24, 1 - 2.0**-24] + ([1 - 2.0**-40] if dtype == torch.float64 else [])
    for vocabulary in (5, 300, 20_000):
        for seed in range(4):
            row = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
            for how in (Sampling(top_k=2), Sampling(top_p=0.4), Sampling(min_p=0.3)):
                keep = kept_tokens(row, how)
                allowed = row.masked_fill(~keep, -math.inf).expand(len(ends), -1)
                ids, logprobs = draw(allowed, torch.tensor(ends, dtype=dtype), 1.0)
                assert keep[0, ids].all()
                assert logprobs.isfinite().all()


def test_greedy_is_greedy_whatever_the_uniforms(policy, double):
    noise = [sample(policy, PROMPTS, draw_uniforms(s, "greedy", 0, len(PROMPTS), 6), Sampling(top_k=1)) for s in (0, 1)]
    assert noise[0] == noise[1]
    for prompt, response in zip(PROMPTS, noise[0], strict=True):
        assert response.ids == logits_of(double, prompt, response.ids).argmax(1).tolist()
        assert response.logprobs == [0.0] * 6


# ------------------------------------------------------------------------------------ ends and batches


@pytest.mark.parametrize("least", [0, 1, 2, 6, LONGEST, LONGEST + 3])
def test_no_response_ends_before_min_new_tokens(policy, table, least):
    """Nearly every token is a stop token, so a response ends as early as possible."""
    stop = frozenset(range(30, 300))
    responses = sample(policy, PROMPTS, table, Sampling(stop=stop, min_new_tokens=least))
    lengths = [len(r.ids) for r in responses]
    assert min(lengths) == min(max(least, 1), LONGEST)
    for response in responses:
        assert not set(response.ids[:-1]) & stop
        assert response.ended == (response.ids[-1] in stop)
        assert response.ended or len(response.ids) == LONGEST
    assert any(r.ended for r in responses) == (least <= LONGEST)


def test_a_stop_id_beyond_the_vocabulary_is_ignored(policy, table):
    how = Sampling(min_new_tokens=3, stop=frozenset({5, 100_000}))
    responses = sample(policy, PROMPTS, table, how)
    assert all(len(r.ids) >= 3 for r in responses)
    allowed = allowed_logits(torch.zeros(sum(len(r.ids) for r in responses), 300), responses, how)
    assert (allowed == -math.inf).sum() == 2 * len(responses)


EVERYTHING = Sampling(
    1.3, top_k=120, top_p=0.9, min_p=0.001, min_new_tokens=3, stop=STOP, stop_strings=("e", "th", " re")
)


@pytest.fixture(scope="module")
def everything(policy, table, tok):
    responses = sample(policy, PROMPTS, table, EVERYTHING, tok)
    assert len({len(r.ids) for r in responses}) > 2
    assert {r.ended for r in responses} == {True, False} or all(r.ended for r in responses)
    assert any(r.ids[-1] in STOP for r in responses)
    assert any(r.ended and r.ids[-1] not in STOP for r in responses)
    return responses


def same(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert (a.ids, a.ended, a.allowed_ids) == (b.ids, b.ended, b.allowed_ids)
        close(a.logprobs, b.logprobs)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_a_response_does_not_depend_on_how_the_batch_was_cut(policy, table, tok, everything, size):
    parts = [
        response
        for at in range(0, len(PROMPTS), size)
        for response in sample(policy, PROMPTS[at : at + size], table[at : at + size], EVERYTHING, tok)
    ]
    same(parts, everything)


def test_other_prompts_in_the_batch_change_nothing(policy, table, tok, everything):
    longer = torch.cat([draw_uniforms(7, "strangers", 0, 3, LONGEST), table])
    beside = sample(policy, random_ids(60, 1, 30, seed=9) + PROMPTS, longer, EVERYTHING, tok)
    same(beside[3:], everything)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_when_finished_rows_leave_changes_nothing(policy, table, tok, everything, monkeypatch, share):
    for tier in (FastDecoder, PlainDecoder):
        monkeypatch.setattr(tier, "leaves_below", share)
    same(sample(policy, PROMPTS, table, EVERYTHING, tok), everything)


# --------------------------------------------------------------------------------------- stop strings


def forced(model, prompt, ids, how):
    """Uniforms [1, len(ids)] that make the model draw ids: the middle of each token's interval of the CDF."""
    logits = logits_of(model, prompt, ids).double()
    logits[: max(0, how.min_new_tokens - 1), sorted(how.stop)] = -math.inf
    p = logits.softmax(1)
    cdf = p.cumsum(1)
    at = torch.tensor(ids)[:, None]
    share = p.gather(1, at)
    assert share.min() > 1e-6, "too narrow for a float32 uniform"
    return (cdf.gather(1, at) - share / 2).float().T


def encoded(tok, text):
    return tok(text, add_special_tokens=False)["input_ids"]


def said(model, tok, ids, prompt=(7, 8, 9), **how):
    """The response with the uniforms that make the model draw ids."""
    how = Sampling(**{name: tuple(x) if name == "stop_strings" else x for name, x in how.items()})
    (response,) = sample(model, [list(prompt)], forced(model, list(prompt), ids, how), how, tok)
    assert response.ids == ids[: len(response.ids)]
    return response, response_text(tok, response, how)


TALK = "please send\nthe lamp\n\nHuman: thank you\n\nHuman: sorry"


@pytest.mark.parametrize(
    ("stop_strings", "shown"),
    [
        (["\n"], "please send"),
        (["\n\nHuman:"], "please send\nthe lamp"),
        (["mp\n\nHu"], "please send\nthe la"),
        (["leas"], "p"),
        (["please"], ""),
        (["sorry"], TALK.removesuffix("sorry")),
        (["never", "\n\nHuman:", "lamp"], "please send\nthe "),
        (["lamp\n", "amp\n", "p\n"], "please send\nthe "),
        (["p\n", "lamp\n"], "please send\nthe "),
    ],
)
def test_a_stop_string_ends_a_response_however_it_is_tokenised(plain, tok, stop_strings, shown):
    ids = encoded(tok, TALK)
    response, text = said(plain, tok, ids, stop_strings=stop_strings)
    assert text == shown
    assert response.ended
    ends = [tok.decode(ids[:n]) for n in range(len(ids) + 1)]
    first = next(n for n, text in enumerate(ends) if any(s in text for s in stop_strings))
    assert len(response.ids) == len(response.logprobs) == first, "the token that completes it is the last"


def test_a_token_that_continues_after_the_stop_string_is_kept(plain, tok):
    ids = encoded(tok, " please")
    assert len(ids) == 1, "one token of the fixtures"
    response, text = said(plain, tok, [*ids, *ids], stop_strings=["le"])
    assert (response.ids, text, response.ended) == (ids, " p", True)


def test_without_the_stop_string_nothing_ends(plain, tok):
    ids = encoded(tok, TALK)
    response, text = said(plain, tok, ids, stop_strings=["human", "Human :"])
    assert (response.ids, text, response.ended) == (ids, TALK, False)


MULTI_BYTE = "a né 日本 🙂🙃 z"


@pytest.mark.parametrize("stop", ["é", "né", "日", "本", "日本", " 🙂", "🙂", "🙃", "🙂🙃", "🙃 z"])
def test_characters_of_several_tokens(plain, tok, stop):
    ids = encoded(tok, MULTI_BYTE)
    assert len(ids) > len(MULTI_BYTE), "bytes are tokens of their own"
    response, text = said(plain, tok, ids, stop_strings=[stop])
    assert response.ended
    assert text == MULTI_BYTE[: MULTI_BYTE.index(stop)]
    assert tok.decode(response.ids) == MULTI_BYTE[: MULTI_BYTE.index(stop) + len(stop)]


def test_half_a_character_is_not_the_character(plain, tok):
    """🙃 and 🙂 begin with the same bytes."""
    ids = encoded(tok, "ab🙃ab")
    assert not said(plain, tok, ids, stop_strings=["🙂"])[0].ended


def test_a_stop_string_in_the_prompt_or_begun_there_ends_nothing(plain, tok):
    prompt = encoded(tok, "lamp\n\nHuman: a\n\nHu")
    ids = encoded(tok, "man: map")
    response, text = said(plain, tok, ids, prompt, stop_strings=["\n\nHuman:", "lamp"])
    assert (response.ids, text, response.ended) == (ids, "man: map", False)


@pytest.mark.parametrize("between", [1, 40])
def test_special_tokens_inside_a_stop_string_are_ignored(plain, tok, between):
    """Forty tokens decode to nothing, so no fixed number of tokens is enough to look back."""
    a, b = encoded(tok, "a"), encoded(tok, "b")
    ids = [*encoded(tok, "map"), *a, *[tok.pad_token_id] * between, *b, *a]
    response, text = said(plain, tok, ids, stop_strings=["ab"])
    assert response.ids == ids[:-1]
    assert text == "map"


def test_a_stop_string_before_min_new_tokens_ends_nothing(plain, tok):
    ids = encoded(tok, TALK)
    texts = [tok.decode(ids[:n]) for n in range(len(ids) + 1)]
    first = next(n for n, text in enumerate(texts) if "Human:" in text)
    second = next(n for n, text in enumerate(texts) if text.count("Human:") == 2)
    for least, length in ((first, first), (first + 1, second), (second, second)):
        response, text = said(plain, tok, ids, stop_strings=["Human:"], min_new_tokens=least)
        assert len(response.ids) == length
        assert response.ended
        assert text == TALK[: TALK.index("Human:") if length == first else TALK.rindex("Human:")]
    response, text = said(plain, tok, ids, stop_strings=["Human:"], min_new_tokens=second + 1)
    assert (response.ids, text, response.ended) == (ids, TALK, False)


def test_a_stop_string_that_ended_nothing_stays_in_the_text(plain, tok):
    ids = [*encoded(tok, "the map is"), tok.eos_token_id]
    stop = frozenset({tok.eos_token_id})
    response, text = said(plain, tok, ids, stop_strings=["map"], min_new_tokens=len(ids), stop=stop)
    assert (response.ids, text, response.ended) == (ids, "the map is", True)
    response, text = said(plain, tok, ids, stop_strings=["map"], stop=stop)
    assert text == "the "


def test_a_stop_string_at_the_last_possible_token_ends_the_response(plain, tok):
    ids = encoded(tok, "the map")
    assert said(plain, tok, ids, stop_strings=["map"])[0].ended
    assert said(plain, tok, ids, stop_strings=["map "])[0].ended is False


def test_stop_strings_need_a_tokenizer(plain, table):
    with pytest.raises(ValueError, match="tokenizer"):
        sample(plain, PROMPTS, table, Sampling(stop_strings=("a",)))


def test_free_responses_end_where_their_text_first_holds_a_stop_string(policy, tok):
    """Compare with the same draws without stop strings, truncated by hand."""
    strings = ("e", "th", " re", "o")
    longer = draw_uniforms(3, "free", 0, len(PROMPTS), 40)
    free = sample(policy, PROMPTS, longer, Sampling())
    stopped = sample(policy, PROMPTS, longer, Sampling(stop_strings=strings), tok)
    lengths = set()
    for whole, response in zip(free, stopped, strict=True):
        texts = [tok.decode(whole.ids[: n + 1], skip_special_tokens=True) for n in range(40)]
        ends = [n + 1 for n, text in enumerate(texts) if any(s in text for s in strings)]
        assert response.ids == whole.ids[: ends[0] if ends else 40]
        assert response.ended == bool(ends)
        close(response.logprobs, whole.logprobs[: len(response.ids)])
        shown = response_text(tok, response, Sampling(stop_strings=strings))
        text = texts[len(response.ids) - 1]
        assert shown == text[: min((text.index(s) for s in strings if s in text), default=None)]
        lengths.add(len(response.ids))
    assert len(lengths) > 3


def test_response_text_drops_special_tokens_and_keeps_other_stop_tokens(tok):
    ids = [*encoded(tok, "thank you"), *encoded(tok, "\n")]
    how = Sampling(stop=frozenset({ids[-1], tok.eos_token_id}))
    assert response_text(tok, Response(ids, [0.0] * len(ids), True), how) == "thank you\n"
    ids[-1] = tok.eos_token_id
    assert response_text(tok, Response(ids, [0.0] * len(ids), True), how) == "thank you"


# ------------------------------------------------------------------- reading back, for any tokenizer


@pytest.fixture(scope="module")
def byte_fallback_tokenizer():
    """Like Llama 2's: ▁ for a space, the first of which is stripped, and bytes for what the vocabulary lacks; a
    run of bytes that is no UTF-8 is decoded as so many U+FFFD, good characters in it included."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abc.", "▁ab", "bc", "▁a", "é"]
    bpe = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def word_piece_tokenizer():
    """Like BERT's: words are joined by spaces, and the decoder takes some of them away again."""
    pieces = ["[UNK]", "[PAD]", "a", "b", "##a", "##b", "##c", ".", ",", "n", "'", "t", "do", "##é"]
    words = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece("##", cleanup=True)
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]")


def pool_of(name, tok):
    """Token ids that decode to a few letters, to broken bytes, or to nothing."""
    if name == "word_piece_tokenizer":
        return list(range(len(tok)))
    special = [tok.eos_token_id] * 3
    if name == "byte_fallback_tokenizer":
        some_bytes = [3 + b for b in "é日🙂".encode()]
        return special + some_bytes + list(range(259, len(tok)))
    return special + [i for c in "abc .é日🙂" for i in encoded(tok, c)] + encoded(tok, " please")


@pytest.mark.parametrize("name", ["tokenizer", "eos_only_tokenizer", "byte_fallback_tokenizer", "word_piece_tokenizer"])
def test_the_tail_finds_the_same_stop_string_as_the_whole_text(request, name):
    """Random tokens, some of which are broken characters or decode to nothing. Stop strings come from their text."""
    tok = request.getfixturevalue(name)
    pool, rng = pool_of(name, tok), random.Random(3)
    found = 0
    for _ in range(1500):
        some = rng.choices(pool, k=rng.randint(1, 4)) if rng.random() < 0.3 else pool
        ids = rng.choices(some, k=rng.randint(1, 90))
        if rng.random() < 0.3:
            at = rng.randrange(len(ids))
            ids[at:at] = [tok.pad_token_id or tok.eos_token_id] * 30
        before, text = (tok.decode(x, skip_special_tokens=True) for x in (ids[:-1], ids))
        same = len(text)
        for i in range(len(text)):
            if before[: i + 1] != text[: i + 1]:
                same = i
                break
        end = rng.randint(min(same, len(text)), len(text))
        own = text[max(0, end - rng.randint(1, 9)) : end]
        strings = [s for s in (own, rng.choice([".", "ab", "é", "🙂"])) if s and "\ufffd" not in s]
        if not strings:
            continue
        starts = [at for s in strings for at in range(len(text)) if text.startswith(s, at) and at + len(s) > same]
        assert stop_string_start(tok, ids, strings) == min(starts, default=None), (text, strings)
        found += bool(starts)
    assert found > 150


@pytest.mark.parametrize("name", ["tokenizer", "eos_only_tokenizer", "byte_fallback_tokenizer"])
@pytest.mark.parametrize("stop", ["終わり", "わり", "り"])
def test_a_tail_that_starts_inside_a_character_is_not_trusted(request, name, stop):
    """A long run of bytes: some tokenizers cannot decode it from the middle of a character."""
    tok = request.getfixturevalue(name)
    for start in ("", "a", "ab", "abc"):
        text = start + "日本語文字" * 6 + "終わり"
        ids = encoded(tok, text)
        assert tok.decode(ids) == text
        assert len(ids) >= 3 * (len(text) - len(start))
        assert stop_string_start(tok, ids, [stop]) == text.index(stop)
        assert stop_string_start(tok, ids[:-1], [stop]) is None


class Counting:
    """A tokenizer that counts what it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.num_calls, self.num_tokens = tokenizer, 0, 0

    def decode(self, ids, **settings):
        self.num_calls, self.num_tokens = self.num_calls + 1, self.num_tokens + len(ids)
        return self.tokenizer.decode(ids, **settings)


def test_an_ended_response_is_not_decoded_again(policy, table, tok, monkeypatch):
    """Also while it stays in the batch. The long stop string limits decoding to one call per token."""
    for tier in (FastDecoder, PlainDecoder):
        monkeypatch.setattr(tier, "leaves_below", 0.0)
    counting = Counting(tok)
    responses = sample(policy, PROMPTS, table, Sampling(stop=STOP, stop_strings=("e", "a long one")), counting)
    assert len({len(r.ids) for r in responses}) > 2
    assert counting.num_calls == 2 * sum(len(r.ids) for r in responses)


def test_a_long_response_is_not_decoded_whole_at_every_token(tokenizer):
    """Otherwise sampling would not be linear in the length."""
    counting, ids = Counting(tokenizer), encoded(tokenizer, TALK * 40)
    assert len(ids) > 1000
    for n in range(len(ids) - 200, len(ids)):
        assert stop_string_start(counting, ids[:n], ["\n\nAssistant:"]) is None
    assert counting.num_tokens < 200 * 100
