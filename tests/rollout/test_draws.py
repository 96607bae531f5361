"""Sampling for every architecture. Responses and log-probabilities do not depend on the batch."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_cli.rollout.distribution import Sampling
from rlhf_cli.rollout.sampling import draw, draw_uniforms, sample
from support.compare import close
from support.oracles import check_sampled_logprobs
from support.tiny import LONGEST, PROMPTS, STOP, VOCAB

# -------------------------------------------------------------------------------------------- sampling


@pytest.fixture(scope="module")
def responses(policy, uniforms):
    return sample(policy, PROMPTS, uniforms, Sampling(stop=STOP))


def ids_of(responses):
    return [r.ids for r in responses]


def test_the_fixture_has_responses_of_several_lengths(responses):
    lengths = {len(r.ids) for r in responses}
    assert len(lengths) > 3
    assert any(r.ended for r in responses)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_equal_those_of_a_plain_forward(policy, plain, uniforms, temperature):
    """[7, 12, 13] Left padding, cache and compaction, compared with one forward pass over the whole sequence."""
    check_sampled_logprobs(policy, plain, uniforms, temperature)


def test_responses_end_with_the_first_stop_token(policy, uniforms, responses):
    """The expected responses use the same uniforms without stop tokens and are truncated by hand."""
    free = sample(policy, PROMPTS, uniforms, Sampling())
    assert all(len(r.ids) == LONGEST and not r.ended for r in free)
    for full, response in zip(free, responses, strict=True):
        stops = [i for i, token in enumerate(full.ids) if token in STOP]
        assert response.ended == bool(stops)
        assert response.ids == (full.ids[: stops[0] + 1] if stops else full.ids)
        assert len(response.logprobs) == len(response.ids)


def test_each_of_several_stop_tokens_ends_a_response(policy, uniforms):
    free = ids_of(sample(policy, PROMPTS, uniforms, Sampling()))
    first, second = free[0][3], free[2][5]
    one = sample(policy, PROMPTS, uniforms, Sampling(stop=frozenset({first})))
    both = sample(policy, PROMPTS, uniforms, Sampling(stop=frozenset({first, second})))
    assert one[0].ids[-1] == first
    assert one[2].ids != both[2].ids
    assert both[2].ids[-1] == second
    assert both[2].ended
    assert both[0] == one[0]


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


def test_one_uniform_per_row_gives_responses_of_one_token(policy, uniforms):
    one = sample(policy, PROMPTS, uniforms[:, :1], Sampling(stop=STOP))
    assert [len(r.ids) for r in one] == [1] * len(PROMPTS)
    assert [r.ended for r in one] == [r.ids[-1] in STOP for r in one]


def test_iterations_and_rows_get_different_uniforms(policy):
    """[15, 27] Equal uniforms give equal responses."""
    prompts = [PROMPTS[2]] * 4
    first, second = (draw_uniforms(0, "ppo rollout", i, 4, LONGEST) for i in (0, 1))
    a, b = (ids_of(sample(policy, prompts, t, Sampling())) for t in (first, second))
    assert len({tuple(ids) for ids in a}) == 4, "four rows of uniforms, four responses"
    assert all(x != y for x, y in zip(a, b, strict=True))
    assert torch.equal(first, draw_uniforms(0, "ppo rollout", 0, 4, LONGEST))
    same = first[:1].expand(4, -1).contiguous()
    assert len({tuple(ids) for ids in ids_of(sample(policy, prompts, same, Sampling()))}) == 1


# -------------------------------------------------------------------------------------------- draw, without a model


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_draws_follow_the_softmax(temperature):
    logits = torch.tensor([0.3, -1.0, 2.0, -math.inf, 0.0, 1.1, -2.5])
    n = 200_000
    u = torch.rand(n, generator=torch.Generator().manual_seed(3))
    ids, logprobs = draw(logits.expand(n, -1), u, temperature)
    p = (logits.double() / temperature).softmax(0)
    counts = torch.bincount(ids, minlength=len(logits)).double()
    assert counts[3] == 0
    possible = p > 0
    chi_square = ((counts - n * p)[possible].square() / (n * p[possible])).sum()
    assert chi_square < 22.5, "5 degrees of freedom: exceeded by chance in 1 of 2,000 seeds, and the seed is fixed"
    close(logprobs, p.log()[ids].float())


def test_impossible_tokens_are_never_drawn():
    """They are at both ends of the row. The uniforms include the smallest and the largest value of torch.rand."""
    last = 1 - 2.0**-24
    inside = torch.tensor([-math.inf, -math.inf, 0.2, -math.inf, 1.0, -3.0, -math.inf, -math.inf])
    u = torch.cat([torch.tensor([0.0, last, 2.0**-24]), torch.rand(5000)])
    ids, logprobs = draw(inside.expand(len(u), -1), u, 1.0)
    assert set(ids.tolist()) <= {2, 4, 5}
    assert ids[0] == 2
    assert ids[1] == 5
    assert logprobs.isfinite().all()
    for vocabulary in (7, 1000, 50_000):
        wide = torch.randn(64, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
        wide[:, -3:] = -math.inf
        ids, logprobs = draw(wide, torch.full((64,), last), 1.0)
        assert ids.max() < vocabulary - 3
        assert logprobs.isfinite().all()
