"""Sampling for every architecture. Responses and log-probabilities do not depend on the batch."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_cli.rollout.sampling import draw
from support.compare import close
from support.oracles import check_sampled_logprobs

# -------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_equal_those_of_a_plain_forward(policy, plain, uniforms, temperature):
    """[7, 12, 13] Left padding, cache and compaction, compared with one forward pass over the whole sequence."""
    check_sampled_logprobs(policy, plain, uniforms, temperature)


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
