"""Filters, stop strings and minimum lengths, compared with a slow float64 oracle and with decoding the whole text.

No sampler is replaced. A test that needs a certain response computes the uniforms at which the model draws it.
"""

from __future__ import annotations

import copy
import math
import random
import sys

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from rlhf_cli.decoders.paged import PagedDecoder
from rlhf_cli.decoders.plain import PlainDecoder
from rlhf_cli.rollout import sampling as sampling_module
from rlhf_cli.rollout.sampling import (
    Response,
    Sampling,
    allowed_logits,
    draw,
    draw_uniforms,
    generation_config,
    kept_tokens,
    response_text,
    sample,
    stop_string_start,
)
from rlhf_cli.tensor_ops import token_entropy, token_logprobs
from support.tiny import VOCAB, random_ids

STOP = frozenset(range(10, 40))
FILTERS = {
    "plain": Sampling(),
    "temperature": Sampling(0.6),
    "top_k": Sampling(1.4, top_k=9),
    "greedy": Sampling(top_k=1),
    "top_p": Sampling(0.8, top_p=0.7),
    "min_p": Sampling(1.3, min_p=0.1),
    "min_new_tokens": Sampling(min_new_tokens=6, stop=STOP),
    "wide": Sampling(top_k=299, min_new_tokens=6, stop=STOP),  # wide enough for stop tokens, if they were allowed
    "all": Sampling(1.2, top_k=40, top_p=0.8, min_p=0.05, min_new_tokens=5, stop=STOP),
}
LONGEST = 12


PROMPTS = random_ids(1, 7, 3, 12, 5, 2, 9, 4, seed=1)


@pytest.fixture(scope="module", params=["llama", "gpt2", "gpt_neox"])
def arch(request):
    """Two models that the fast decoder supports, and one that it does not."""
    return request.param


@pytest.fixture(scope="module")
def double(plain):
    return copy.deepcopy(plain).double()


@pytest.fixture(scope="module")
def tok(arch, tokenizer, eos_only_tokenizer):
    return eos_only_tokenizer if arch == "gpt2" else tokenizer


@pytest.fixture(scope="module")
def uniforms():
    return draw_uniforms(0, "test sampling", 0, len(PROMPTS), LONGEST)


@torch.no_grad()
def logits_of(model, prompt, ids):
    """[len(ids), V] the logits that each of `ids` was drawn from, in one forward pass over the sequence."""
    return model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]


def oracle(logits, t, sampling):
    """Apply the filters one by one in float64. Returns (ids that token t can have, probability of each)."""
    remaining = {v: x / sampling.temperature for v, x in enumerate(logits.double().tolist()) if x > -math.inf}
    if t + 1 < sampling.min_new_tokens:
        remaining = {v: x for v, x in remaining.items() if v not in sampling.stop}

    def likeliest_first():
        total = math.fsum(math.exp(x) for x in remaining.values())
        return [(v, math.exp(remaining[v]) / total) for v in sorted(remaining, key=lambda v: (-remaining[v], v))]

    if sampling.top_k is not None:
        remaining = {v: remaining[v] for v, _ in likeliest_first()[: sampling.top_k]}
    if sampling.top_p is not None and sampling.top_p < 1:
        nucleus, mass = {}, 0.0
        for v, p in likeliest_first():
            nucleus[v] = remaining[v]
            mass += p
            if mass >= sampling.top_p:
                break
        remaining = nucleus
    if sampling.min_p is not None:
        ranked = likeliest_first()
        remaining = {v: remaining[v] for v, p in ranked if p >= sampling.min_p * ranked[0][1]}
    probabilities = dict(likeliest_first())
    return sorted(probabilities), probabilities


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(torch.as_tensor(actual), torch.as_tensor(expected), rtol=tolerance, atol=tolerance)


# -------------------------------------------------------------------------------------------- filters


@pytest.mark.parametrize("name", FILTERS)
def test_token_frequencies_are_those_of_the_filtered_softmax(plain, double, name):
    """With uniforms at the n midpoints of [0, 1), each token comes n * p times, plus or minus 1.

    This holds for the first token, and for the second one, which is computed from the cache.
    """
    sampling, n = FILTERS[name], 1500
    prompt = PROMPTS[1]
    midpoints = (torch.arange(n) + 0.5) / n
    first = sample(plain, [prompt] * n, midpoints[:, None], sampling)
    (head,) = sample(plain, [prompt], torch.tensor([[0.31]]), sampling)
    assert not sampling.stop or sampling.min_new_tokens > 2, "otherwise some responses would have no second token"
    second = sample(plain, [prompt] * n, torch.stack([torch.full((n,), 0.31), midpoints], 1), sampling)
    for t, drawn in ((0, [r.ids[0] for r in first]), (1, [r.ids[1] for r in second])):
        before = prompt + head.ids[:t]
        kept, p = oracle(logits_of(double, before, [0])[0], t, sampling)
        counts = torch.bincount(torch.tensor(drawn), minlength=300)
        assert set(drawn) <= set(kept)
        assert all(abs(counts[v].item() - n * p[v]) <= 1.01 for v in kept)


@pytest.mark.parametrize("name", FILTERS)
def test_logprobs_and_kept_ids_equal_those_of_a_plain_forward_and_a_slow_filter(policy, double, uniforms, name):
    """Left padding, cache, compaction and every filter, compared with one float64 forward pass per response."""
    sampling = FILTERS[name]
    sizes = set()
    for prompt, response in zip(PROMPTS, sample(policy, PROMPTS, uniforms, sampling), strict=True):
        assert (response.allowed_ids is None) == (not sampling.filters)
        assert len(response.logprobs) == len(response.ids)
        assert response.allowed_ids is None or len(response.allowed_ids) == len(response.ids)
        for t, logits in enumerate(logits_of(double, prompt, response.ids)):
            kept, p = oracle(logits, t, sampling)
            token = response.ids[t]
            assert token in p
            close(response.logprobs[t], math.log(p[token]))
            if response.allowed_ids is not None:
                assert list(response.allowed_ids[t]) == kept
                assert sys.getsizeof(response.allowed_ids[t]) < 100 + 5 * len(kept), "an id takes four bytes"
                sizes.add(len(kept))
    if name in ("top_p", "min_p", "all"):
        assert len(sizes) > 3, "otherwise a filter with a fixed number of ids would pass"
        assert max(sizes) < 300
    if name == "top_k":
        assert sizes == {9}


@pytest.mark.parametrize("name", FILTERS)
def test_the_trainer_sees_the_sampled_logprobs(policy, plain, uniforms, name):
    sampling = FILTERS[name]
    responses = sample(policy, PROMPTS, uniforms, sampling)
    logits = torch.cat([logits_of(plain, p, r.ids) for p, r in zip(PROMPTS, responses, strict=True)])
    allowed = allowed_logits(logits, responses, sampling)
    assert (allowed is logits) == (name in ("plain", "temperature"))
    ids = torch.tensor([i for r in responses for i in r.ids])
    trained = token_logprobs(allowed, ids, temperature=sampling.temperature)
    close(trained, [x for r in responses for x in r.logprobs])
    if allowed is not logits and name != "greedy":
        unfiltered = token_logprobs(logits, ids, temperature=sampling.temperature)
        assert (trained - unfiltered).max() > 0.05, "the filters change the log-probabilities"
    assert token_entropy(allowed, temperature=sampling.temperature).isfinite().all()


@pytest.mark.parametrize(
    "sampling", [Sampling(top_k=2), Sampling(min_new_tokens=2, stop=frozenset({1})), Sampling(no_repeat_ngram_size=2)]
)
def test_a_pass_over_no_responses_restricts_nothing(sampling):
    logits = torch.zeros(0, 4, requires_grad=True)
    allowed_logits(logits, [], sampling).sum().backward()
    assert logits.grad is not None


def random_restriction(rng, odds):
    """Random filters over integer weights. No sum of weights equals top_p, so rounding cannot matter."""
    top_k = rng.choice([None, 1, 2, 5, len(odds), len(odds) + 3])
    ranked = sorted(odds, reverse=True)[:top_k]
    top_p = rng.choice([None, 1.0, (rng.randrange(sum(ranked)) + 0.5) / sum(ranked)])
    min_p = rng.choice([None, (rng.randrange(max(odds)) + 0.5) / max(odds)])
    return Sampling(top_k=top_k, top_p=top_p, min_p=min_p)


@pytest.mark.parametrize("first_look", [1, 3, 1024])
def test_filters_keep_what_the_slow_filter_keeps(monkeypatch, first_look):
    """There are few distinct probabilities, so nearly every cut is between equally likely tokens."""
    monkeypatch.setattr(sampling_module, "FIRST_LOOK", first_look)
    rng = random.Random(0)
    cut_in_a_tie = 0
    for _ in range(300):
        odds = [rng.choice([0, 1, 1, 2, 3, 7]) for _ in range(rng.randint(2, 30))] + [rng.randint(1, 9)]
        shuffled = rng.sample(odds, len(odds))
        sampling = random_restriction(rng, odds)
        logits = torch.tensor([odds, shuffled], dtype=torch.float32).log()
        kept_rows = kept_tokens(logits, sampling)
        for row, kept_row, weights in zip(logits, kept_rows, (odds, shuffled), strict=True):
            kept = kept_row.nonzero()[:, 0].tolist()
            assert kept == oracle(row, 0, sampling)[0], (weights, sampling)
            cut_in_a_tie += bool(
                {weights[v] for v in kept} & {weights[v] for v in range(len(weights)) if v not in kept}
            )
    assert cut_in_a_tie > 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_never_draws_a_token_that_was_not_kept(dtype):
    """This includes the smallest and the largest uniforms, and one that rounds to 1 in float32."""
    ends = [0.0, 2.0**-24, 1 - 2.0**-24] + ([1 - 2.0**-40] if dtype == torch.float64 else [])
    for vocabulary in (5, 300, 20_000):
        for seed in range(4):
            row = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
            for sampling in (Sampling(top_k=2), Sampling(top_p=0.4), Sampling(min_p=0.3)):
                keep = kept_tokens(row, sampling)
                allowed = row.masked_fill(~keep, -math.inf).expand(len(ends), -1)
                ids, logprobs = draw(allowed, torch.tensor(ends, dtype=dtype), 1.0)
                assert keep[0, ids].all()
                assert logprobs.isfinite().all()


# ------------------------------------------------------------------------------------------ stop tokens


def ids_of(responses):
    return [r.ids for r in responses]


def test_a_stop_token_in_the_prompt_ends_nothing(policy, uniforms):
    """[36] Every prompt begins and ends with one."""
    stop = frozenset(range(VOCAB, 300))
    prompts = [[min(stop), *prompt, max(stop)] for prompt in PROMPTS]
    free = sample(policy, prompts, uniforms, Sampling())
    stopped = sample(policy, prompts, uniforms, Sampling(stop=stop))
    for a, b in zip(free, stopped, strict=True):
        ends = [i for i, token in enumerate(a.ids) if token in stop]
        assert b.ids == (a.ids[: ends[0] + 1] if ends else a.ids)
        assert b.ended == bool(ends)
    assert max(len(r.ids) for r in stopped) > 1
    assert not all(r.ended for r in sample(policy, prompts, uniforms[:, :2], Sampling(stop=stop)))


# ------------------------------------------------------------------------------------ minimum length, batches


@pytest.mark.parametrize("min_new_tokens", [0, 1, 2, 6, LONGEST, LONGEST + 3])
def test_no_response_ends_before_min_new_tokens(policy, uniforms, min_new_tokens):
    """Nearly every token is a stop token, so a response ends as early as it can."""
    stop = frozenset(range(30, 300))
    responses = sample(policy, PROMPTS, uniforms, Sampling(stop=stop, min_new_tokens=min_new_tokens))
    lengths = [len(r.ids) for r in responses]
    assert min(lengths) == min(max(min_new_tokens, 1), LONGEST)
    for response in responses:
        assert not set(response.ids[:-1]) & stop
        assert response.ended == (response.ids[-1] in stop)
        assert response.ended or len(response.ids) == LONGEST
    assert any(r.ended for r in responses) == (min_new_tokens <= LONGEST)


def test_a_stop_id_beyond_the_vocabulary_is_ignored(policy, uniforms):
    sampling = Sampling(min_new_tokens=3, stop=frozenset({5, 100_000}))
    responses = sample(policy, PROMPTS, uniforms, sampling)
    assert all(len(r.ids) >= 3 for r in responses)
    allowed = allowed_logits(torch.zeros(sum(len(r.ids) for r in responses), 300), responses, sampling)
    assert (allowed == -math.inf).sum() == 2 * len(responses)


EVERYTHING = Sampling(
    1.3, top_k=120, top_p=0.9, min_p=0.001, min_new_tokens=3, stop=STOP, stop_strings=("e", "th", " re")
)


@pytest.fixture(scope="module")
def all_responses(policy, uniforms, tok):
    responses = sample(policy, PROMPTS, uniforms, EVERYTHING, tok)
    assert len({len(r.ids) for r in responses}) > 2
    assert {r.ended for r in responses} == {True, False} or all(r.ended for r in responses)
    assert any(r.ids[-1] in STOP for r in responses)
    assert any(r.ended and r.ids[-1] not in STOP for r in responses)
    return responses


def same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert (a.ids, a.ended, a.allowed_ids) == (b.ids, b.ended, b.allowed_ids)
        close(a.logprobs, b.logprobs)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_a_response_does_not_depend_on_the_split_into_batches(policy, uniforms, tok, all_responses, size):
    parts = [
        response
        for at in range(0, len(PROMPTS), size)
        for response in sample(policy, PROMPTS[at : at + size], uniforms[at : at + size], EVERYTHING, tok)
    ]
    same(parts, all_responses)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("max_live_rows", [None, 3])
def test_responses_do_not_depend_on_when_finished_rows_leave(
    policy, uniforms, tok, all_responses, monkeypatch, share, max_live_rows
):
    """What is drawn for a finished row that stays is ignored, also if it is a stop token."""
    for decoder in (PagedDecoder, PlainDecoder):
        monkeypatch.setattr(decoder, "leave", lambda _, rows, unfinished: unfinished <= share * rows)
    same(sample(policy, PROMPTS, uniforms, EVERYTHING, tok, max_live_rows=max_live_rows), all_responses)
    stop = frozenset({0, *range(10, 25)})
    some_ended = sample(policy, PROMPTS, uniforms, Sampling(stop=stop), max_live_rows=max_live_rows)
    assert [r.ended for r in some_ended] == [r.ids[-1] in stop for r in some_ended]
    assert {r.ended for r in some_ended} == {True, False}


# --------------------------------------------------------------------------------------- stop strings


def uniforms_for(model, prompt, ids, sampling):
    """Uniforms [1, len(ids)] at which the model draws `ids`: the middle of each token's interval of the CDF."""
    logits = logits_of(model, prompt, ids).double()
    logits[: max(0, sampling.min_new_tokens - 1), sorted(sampling.stop)] = -math.inf
    p = logits.softmax(1)
    cdf = p.cumsum(1)
    column = torch.tensor(ids)[:, None]
    probability = p.gather(1, column)
    assert probability.min() > 1e-6, "the interval is too narrow for a float32 uniform"
    return (cdf.gather(1, column) - probability / 2).float().T


def encoded(tok, text):
    return tok(text, add_special_tokens=False)["input_ids"]


def forced_response(model, tok, ids, prompt=(7, 8, 9), **options):
    """Sample with the uniforms at which the model draws `ids`. Returns (response, its text)."""
    sampling = Sampling(**{name: tuple(x) if name == "stop_strings" else x for name, x in options.items()})
    (response,) = sample(model, [list(prompt)], uniforms_for(model, list(prompt), ids, sampling), sampling, tok)
    assert response.ids == ids[: len(response.ids)]
    return response, response_text(tok, response, sampling)


TALK = "please send\nthe lamp\n\nHuman: thank you\n\nHuman: sorry"


@pytest.mark.parametrize(
    ("text", "stop_strings", "shown"),
    [
        (" please please", ["le"], " p"),  # the token that completes it is kept whole
        (TALK, ["never", "\n\nHuman:", "lamp"], "please send\nthe "),
        (TALK, ["human", "Human :"], None),
        ("ab🙃ab", ["🙂"], None),  # it begins with the same bytes
        ("the map", ["map"], "the "),  # at the last possible token
        ("the map", ["map "], None),
    ],
)
def test_a_response_ends_with_the_token_that_completes_a_stop_string(plain, tok, text, stop_strings, shown):
    ids = encoded(tok, text)
    response, found = forced_response(plain, tok, ids, stop_strings=stop_strings)
    assert (found, response.ended) == (tok.decode(ids) if shown is None else shown, shown is not None)
    assert shown is None or not any(s in tok.decode(response.ids[:-1]) for s in stop_strings)


def test_a_stop_string_that_is_or_starts_in_the_prompt_ends_nothing(plain, tok):
    prompt = encoded(tok, "lamp\n\nHuman: a\n\nHu")
    ids = encoded(tok, "man: map")
    response, text = forced_response(plain, tok, ids, prompt, stop_strings=["\n\nHuman:", "lamp"])
    assert (response.ids, text, response.ended) == (ids, "man: map", False)


@pytest.mark.parametrize("between", [1, 40])
def test_special_tokens_inside_a_stop_string_are_ignored(plain, tok, between):
    """40 tokens that decode to nothing: it is not enough to look back over a fixed number of tokens."""
    a, b = encoded(tok, "a"), encoded(tok, "b")
    ids = [*encoded(tok, "map"), *a, *[tok.pad_token_id] * between, *b, *a]
    response, text = forced_response(plain, tok, ids, stop_strings=["ab"])
    assert response.ids == ids[:-1]
    assert text == "map"


def test_a_stop_string_before_min_new_tokens_ends_nothing(plain, tok):
    ids = encoded(tok, TALK)
    texts = [tok.decode(ids[:n]) for n in range(len(ids) + 1)]
    first = next(n for n, text in enumerate(texts) if "Human:" in text)
    second = next(n for n, text in enumerate(texts) if text.count("Human:") == 2)
    for min_new_tokens, length in ((first, first), (first + 1, second), (second, second)):
        response, text = forced_response(plain, tok, ids, stop_strings=["Human:"], min_new_tokens=min_new_tokens)
        assert len(response.ids) == length
        assert response.ended
        assert text == TALK[: TALK.index("Human:") if length == first else TALK.rindex("Human:")]
    response, text = forced_response(plain, tok, ids, stop_strings=["Human:"], min_new_tokens=second + 1)
    assert (response.ids, text, response.ended) == (ids, TALK, False)


def test_responses_end_where_their_text_first_contains_a_stop_string(policy, tok):
    """The expected responses use the same uniforms without stop strings and are truncated by hand."""
    strings = ("e", "th", " re", "o")
    uniforms = draw_uniforms(3, "free", 0, len(PROMPTS), 40)
    free = sample(policy, PROMPTS, uniforms, Sampling())
    stopped = sample(policy, PROMPTS, uniforms, Sampling(stop_strings=strings), tok)
    lengths = set()
    for full, response in zip(free, stopped, strict=True):
        texts = [tok.decode(full.ids[: n + 1], skip_special_tokens=True) for n in range(40)]
        ends = [n + 1 for n, text in enumerate(texts) if any(s in text for s in strings)]
        assert response.ids == full.ids[: ends[0] if ends else 40]
        assert response.ended == bool(ends)
        close(response.logprobs, full.logprobs[: len(response.ids)])
        shown = response_text(tok, response, Sampling(stop_strings=strings))
        text = texts[len(response.ids) - 1]
        assert shown == text[: min((text.index(s) for s in strings if s in text), default=None)]
        lengths.add(len(response.ids))
    assert len(lengths) > 3


def test_response_text_drops_special_tokens_and_keeps_other_stop_tokens(tok):
    ids = [*encoded(tok, "thank you"), *encoded(tok, "\n")]
    sampling = Sampling(stop=frozenset({ids[-1], tok.eos_token_id}))
    assert response_text(tok, Response(ids, [0.0] * len(ids), True), sampling) == "thank you\n"
    ids[-1] = tok.eos_token_id
    assert response_text(tok, Response(ids, [0.0] * len(ids), True), sampling) == "thank you"


# ------------------------------------------------------------------- search in the last tokens, for any tokenizer


@pytest.fixture(scope="module")
def byte_fallback_tokenizer():
    """Like Llama 2's: ▁ is a space, the first space is stripped, and bytes replace characters without a token.

    If a run of bytes is not valid UTF-8, each of its bytes decodes to U+FFFD, even those of valid characters.
    """
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abc.", "▁ab", "bc", "▁a", "é"]
    bpe = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def word_piece_tokenizer():
    """Like BERT's: the decoder joins words with spaces and then removes some of them."""
    pieces = ["[UNK]", "[PAD]", "a", "b", "##a", "##b", "##c", ".", ",", "n", "'", "t", "do", "##é"]
    words = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece("##", cleanup=True)
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]")


def pool_of(name, tok):
    """Token ids that decode to a few letters, to parts of characters, or to nothing."""
    if name == "word_piece_tokenizer":
        return list(range(len(tok)))
    special = [tok.eos_token_id] * 3
    if name == "byte_fallback_tokenizer":
        byte_ids = [3 + b for b in "é日🙂".encode()]
        return special + byte_ids + list(range(259, len(tok)))
    return special + [i for c in "abc .é日🙂" for i in encoded(tok, c)] + encoded(tok, " please")


@pytest.mark.parametrize("name", ["tokenizer", "eos_only_tokenizer", "byte_fallback_tokenizer", "word_piece_tokenizer"])
def test_the_last_tokens_give_the_same_stop_string_as_the_whole_text(request, name):
    """The tokens are random; some are parts of characters or decode to nothing. Stop strings come from their text."""
    tok = request.getfixturevalue(name)
    pool, rng = pool_of(name, tok), random.Random(3)
    num_found = 0
    for _ in range(1500):
        choices = rng.choices(pool, k=rng.randint(1, 4)) if rng.random() < 0.3 else pool
        ids = rng.choices(choices, k=rng.randint(1, 90))
        if rng.random() < 0.3:
            at = rng.randrange(len(ids))
            ids[at:at] = [tok.pad_token_id or tok.eos_token_id] * 30
        before, text = (tok.decode(x, skip_special_tokens=True) for x in (ids[:-1], ids))
        unchanged = len(text)
        for i in range(len(text)):
            if before[: i + 1] != text[: i + 1]:
                unchanged = i
                break
        end = rng.randint(min(unchanged, len(text)), len(text))
        from_text = text[max(0, end - rng.randint(1, 9)) : end]
        strings = [s for s in (from_text, rng.choice([".", "ab", "é", "🙂"])) if s and "\ufffd" not in s]
        if not strings:
            continue
        starts = [at for s in strings for at in range(len(text)) if text.startswith(s, at) and at + len(s) > unchanged]
        assert stop_string_start(tok, ids, strings) == min(starts, default=None), (text, strings)
        num_found += bool(starts)
    assert num_found > 150


class Counting:
    """A tokenizer that counts its calls of `decode` and the decoded tokens."""

    def __init__(self, tokenizer):
        self.tokenizer, self.num_calls, self.num_tokens = tokenizer, 0, 0

    def decode(self, ids, **settings):
        self.num_calls, self.num_tokens = self.num_calls + 1, self.num_tokens + len(ids)
        return self.tokenizer.decode(ids, **settings)


def test_an_ended_response_is_not_decoded_again(policy, uniforms, tok, monkeypatch):
    """Not even while it remains in the batch. The long stop string makes each search take two calls of `decode`."""
    for decoder in (PagedDecoder, PlainDecoder):
        monkeypatch.setattr(decoder, "leave", lambda *rows: rows[-1] == 0)
    counting = Counting(tok)
    responses = sample(policy, PROMPTS, uniforms, Sampling(stop=STOP, stop_strings=("e", "a long one")), counting)
    assert len({len(r.ids) for r in responses}) > 2
    assert counting.num_calls == 2 * sum(len(r.ids) for r in responses)


def test_each_token_of_a_long_response_decodes_only_its_end(tokenizer):
    """Otherwise the cost of sampling would be quadratic in the length."""
    counting, ids = Counting(tokenizer), encoded(tokenizer, TALK * 40)
    assert len(ids) > 1000
    for n in range(len(ids) - 200, len(ids)):
        assert stop_string_start(counting, ids[:n], ["\n\nAssistant:"]) is None
    assert counting.num_tokens < 200 * 100


@pytest.mark.parametrize("decoder", ["auto", "plain"])
def test_each_response_ends_at_its_limit_and_at_the_last_position(policy, tok, decoder):
    """A row that stayed beyond its limit would need a position that GPT-2 does not have."""
    prompts = random_ids(110, 126, 4, 121, 127, 40, seed=3)
    limits = [min(20, 128 - len(prompt)) for prompt in prompts]
    uniforms, sampling = draw_uniforms(0, "limits", 0, len(prompts), 20), Sampling(decoder=decoder)
    together = sample(policy, prompts, uniforms, sampling, tok, limits=limits, max_live_rows=4)
    assert [len(response.ids) for response in together] == limits
    for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        (alone,) = sample(policy, [prompt], uniforms[row : row + 1, :limit], sampling, tok)
        assert together[row].ids == alone.ids


# ------------------------------------------------------------------------- the same settings in transformers


@pytest.mark.parametrize("fewest", [0, 1, 2, 5])
def test_transformers_draws_replies_of_the_same_lengths_with_the_saved_settings(fewest):
    """Of a model that always ends at once, although its generation config had a filter of its own."""
    config = GPT2Config(vocab_size=9, n_embd=64, n_layer=1, n_head=1, eos_token_id=3, tie_word_embeddings=False)
    model = GPT2LMHeadModel(config).eval()
    for weight in model.parameters():
        weight.data.zero_()
    model.transformer.ln_f.bias.data.fill_(1.0)
    model.lm_head.weight.data[3] = 1.0  # the logit of the stop token is 64, of the others 0
    settings = Sampling(min_new_tokens=fewest, stop=frozenset({3}))
    (ours,) = sample(model, [[1, 2]], torch.rand(1, 9), settings)
    others = {"repetition_penalty": 1e9, "min_length": 11, "num_beams": 2, "suppress_tokens": [3]}
    base = GenerationConfig(pad_token_id=3, eos_token_id=3, **others)
    model.generation_config = generation_config(settings, base)
    theirs = model.generate(torch.tensor([[1, 2]]), max_new_tokens=9)[0, 2:].tolist()
    assert len(ours.ids) == len(theirs) == max(1, fewest)
    assert {name: getattr(model.generation_config, name) for name in others} == dict.fromkeys(others)
