"""Random batches with padding, finite differences and comparisons for the tests of formulas."""

from __future__ import annotations

import itertools
import math

import torch

from rlhf_cli.tensor_ops import length_mask

GARBAGE = [1e6, -1e30, math.inf, -math.inf, math.nan]
LENGTHS = [5, 1, 3, 4]  # one row has a single token, one fills the width
EPS = 1e-6  # step of the central differences, which gives an error of about 1e-9


def draw(*shape, seed, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def response_batch(names, scale=1.0):
    """A tensor [B, R] for each name, and the mask of LENGTHS."""
    batch = {name: draw(len(LENGTHS), max(LENGTHS), seed=seed, scale=scale) for seed, name in enumerate(names)}
    return batch, length_mask(LENGTHS)


def close(actual, expected, tolerance=1e-12):
    actual, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (actual, expected))
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=tolerance, atol=tolerance)


def finite_differences(function, x):
    gradient = torch.zeros_like(x)
    for index in itertools.product(*map(range, x.shape)):
        up, down = x.detach().clone(), x.detach().clone()
        up[index] += EPS
        down[index] -= EPS
        gradient[index] = (function(up) - function(down)) / (2 * EPS)
    return gradient


def gradient_of(function, x):
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(function(x), x)[0]


def padded_with(batch, mask, garbage):
    """The batch with garbage under its padding, and with two more columns of garbage on the right."""
    wide_mask = torch.nn.functional.pad(mask, (0, 2))
    wide = {name: torch.nn.functional.pad(x, (0, 2)).masked_fill(~wide_mask, garbage) for name, x in batch.items()}
    return wide, wide_mask


def gae_by_sums(rewards, values, mask, gamma, gae_lambda):
    """GAE, equation 16: sum of (gamma * lambda)^k * delta over this and later real tokens."""
    advantages = torch.zeros(mask.shape, dtype=torch.float64)
    for b in range(mask.shape[0]):
        positions = [t for t in range(mask.shape[1]) if mask[b, t]]
        r, v = ([float(x[b, t]) for t in positions] for x in (rewards, values))
        v.append(0.0)
        deltas = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(positions))]
        for i, t in enumerate(positions):
            advantages[b, t] = sum((gamma * gae_lambda) ** (k - i) * deltas[k] for k in range(i, len(positions)))
    return advantages
