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


def close(found, wanted, tolerance=1e-5):
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def grads(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same_gradients(found, wanted, tolerance):
    """Assert that all gradients agree, to `tolerance` times the largest entry of any of them."""
    assert found.keys() == wanted.keys()
    assert found
    size = max(g.abs().max() for g in wanted.values())
    assert size > 0
    gap = max((found[name] - wanted[name]).abs().max() for name in wanted)
    assert gap <= tolerance * size, f"relative difference {gap / size:.1e}"
