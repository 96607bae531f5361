"""Compare tensors, gradients and saved weights."""

from __future__ import annotations

import torch
from safetensors.torch import load_file


def weights_of(directory):
    return {
        f"{path.parent.name}/{name}": tensor
        for path in sorted(directory.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def same_weights(one, two, tolerance=1e-5):
    a, b = weights_of(one), weights_of(two)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(b[name], a[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def grads(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same_gradients(actual, expected, tolerance):
    """Assert that all gradients agree to within `tolerance` times the largest entry."""
    assert actual.keys() == expected.keys()
    assert actual
    size = max(g.abs().max() for g in expected.values())
    assert size > 0
    gap = max((actual[name] - expected[name]).abs().max() for name in expected)
    assert gap <= tolerance * size, f"relative difference {gap / size:.1e}"
