"""No n-gram twice: the sampler, and the models that compute log-probabilities, against transformers' own processor."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, NoRepeatNGramLogitsProcessor

from rlhf_cli.rollout.sampling import Sampling, allowed_logits, draw, draw_uniforms, sample
from rlhf_cli.tensor_ops import token_logprobs
from support.tiny import STOP, random_ids

LONGEST = 20
# Prompts that repeat themselves, so that the first tokens of a response already complete n-grams.
PROMPTS = [ids * 3 for ids in random_ids(1, 4, 2, 6, 3, seed=2)]
UNIFORMS = draw_uniforms(0, "n-grams", 0, len(PROMPTS), LONGEST)
COLD = Sampling(0.08)
"""At this temperature a tiny model repeats itself."""
ENDS = frozenset(range(0, 300, 12))


@pytest.fixture(scope="module", params=["llama", "gpt_neox"])
def arch(request):
    """A model of the fast decoder, and one of the general decoder."""
    return request.param


def repeats(sequence, size):
    """The tokens that transformers would not draw after the sequence."""
    return NoRepeatNGramLogitsProcessor(size)(torch.tensor([sequence]), torch.zeros(1, 300)) == -torch.inf


@torch.no_grad()
def slow_response(model, prompt, uniforms, sampling):
    """One response by a forward pass over the whole sequence and transformers' processor for each token."""
    ids, logprobs = [], []
    for u in uniforms:
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[:, -1]
        logits = logits.masked_fill(repeats(prompt + ids, sampling.no_repeat_ngram_size), -torch.inf)
        token, logprob = draw(logits, u[None], sampling.temperature)
        ids.append(token.item())
        logprobs.append(logprob.item())
        if ids[-1] in sampling.stop:
            break
    return ids, logprobs


@torch.no_grad()
def logits_of(model, responses):
    """[sum of R_b, V] logits that predict the tokens of the responses, one forward pass per sequence."""
    pairs = [(torch.tensor([prompt + r.ids]), len(prompt)) for prompt, r in zip(PROMPTS, responses, strict=True)]
    return torch.cat([model(input_ids=ids).logits[0, start - 1 : -1] for ids, start in pairs])


@pytest.mark.parametrize(("size", "max_live_rows"), [(1, None), (2, 2), (3, None)])
def test_responses_are_those_of_a_slow_loop_with_transformers_processor(plain, policy, size, max_live_rows):
    """Rows that have ended stay beside the others for some steps in the plain decoder."""
    sampling = replace(COLD, no_repeat_ngram_size=size, stop=ENDS)
    responses = sample(policy, PROMPTS, UNIFORMS, sampling, max_live_rows=max_live_rows)
    assert len({len(r.ids) for r in responses}) > 2
    for prompt, uniforms, response in zip(PROMPTS, UNIFORMS, responses, strict=True):
        ids, logprobs = slow_response(plain, prompt, uniforms, sampling)
        assert response.ids == ids
        assert response.logprobs == pytest.approx(logprobs, abs=1e-4)
        for t, forbidden in enumerate(response.forbidden_ids):
            assert forbidden == repeats(prompt + ids[:t], size).nonzero()[:, 1].tolist()
    free = sample(policy, PROMPTS, UNIFORMS, replace(COLD, stop=ENDS))
    assert [r.ids for r in responses] != [r.ids for r in free], "without the filter the model repeats itself"
    assert all(r.forbidden_ids is None for r in free)


@pytest.mark.parametrize(
    "others", [{}, {"stop": STOP, "min_new_tokens": 6}, {"top_k": 9}, {"top_p": 0.9, "min_p": 0.01}], ids=str
)
def test_the_trainer_sees_the_sampled_distribution(plain, policy, others):
    """The log-probabilities of any model take the filter as it was at sampling: for its own, and for another policy."""
    sampling = replace(COLD, no_repeat_ngram_size=2, **others)
    responses = sample(policy, PROMPTS, UNIFORMS, sampling)
    assert all((r.forbidden_ids is None) == sampling.filters for r in responses)
    ids = torch.tensor([i for r in responses for i in r.ids])
    allowed = allowed_logits(logits_of(plain, responses), responses, sampling)
    logprobs = token_logprobs(allowed, ids, temperature=sampling.temperature)
    torch.testing.assert_close(logprobs, torch.tensor([x for r in responses for x in r.logprobs]), rtol=0, atol=1e-4)
    other = copy.deepcopy(plain)
    with torch.no_grad():
        other.get_output_embeddings().weight.mul_(0.5)
    masked = allowed_logits(logits_of(other, responses), responses, sampling) == -torch.inf
    assert torch.equal(masked, allowed == -torch.inf)
    sequences = [p + r.ids[:t] for p, r in zip(PROMPTS, responses, strict=True) for t in range(len(r.ids))]
    repeated = torch.cat([repeats(sequence, 2) for sequence in sequences])
    assert repeated.any()
    assert masked[repeated].all()
    assert others or torch.equal(masked, repeated)


def test_where_every_token_would_repeat_an_n_gram_none_is_forbidden():
    torch.manual_seed(0)
    settings = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=4, **settings)).eval()
    (response,) = sample(model, [[0, 1]], draw_uniforms(0, "few tokens", 0, 1, 8), Sampling(no_repeat_ngram_size=1))
    assert response.forbidden_ids[0] == [0, 1]
    assert sorted(response.ids[:2]) == [2, 3]
    assert response.forbidden_ids[2:] == [[]] * 6
    assert torch.tensor(response.logprobs).isfinite().all()
