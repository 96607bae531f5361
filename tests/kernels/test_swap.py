"""A layer's class is replaced only by one that computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_cli.kernels import layers as norm_module
from rlhf_cli.kernels import linear as linear_module
from rlhf_cli.kernels.layers import use_fast_norm
from rlhf_cli.kernels.linear import SWAP_TOLERANCE, swap_class, use_fast_linear
from support.tiny import tiny_model


class Scaled(torch.nn.Linear):
    """A linear layer whose output is off by a factor."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * super().forward(x)


def probe(layer: Any) -> torch.Tensor:
    output: torch.Tensor = layer(torch.ones(2, 3))
    return output


def layers() -> list[torch.nn.Module]:
    torch.manual_seed(0)
    return [torch.nn.Linear(3, 4) for _ in range(3)]


@pytest.mark.parametrize("error", [0.0, 0.5 * SWAP_TOLERANCE])
def test_all_layers_get_the_class_if_the_first_computes_the_same(error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scaled, "factor", 1 + error)
    swapped = layers()
    weights = [layer.state_dict() for layer in swapped]
    assert swap_class(swapped, Scaled, probe) is None
    assert {type(layer) for layer in swapped} == {Scaled}
    for layer, before in zip(swapped, weights, strict=True):
        assert all(torch.equal(layer.state_dict()[name], weight) for name, weight in before.items())


@pytest.mark.parametrize("factor", [1 + 2 * SWAP_TOLERANCE, -1.0, float("nan")])
def test_no_layer_gets_the_class_if_the_first_computes_something_else(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scaled, "factor", factor)
    kept = layers()
    line = swap_class(kept, Scaled, probe)
    assert line is not None
    assert line.startswith("Linear: Scaled differs from it by ")
    assert {type(layer) for layer in kept} == {torch.nn.Linear}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_product_that_differs_is_reported_and_not_used(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(kind)
    plain = [type(layer) for layer in model.modules()]
    monkeypatch.setattr(linear_module, "prefers_onednn", lambda: True)
    monkeypatch.setattr(linear_module, "_product", lambda x, weight, _bias: x @ weight.t() + 1)
    line = use_fast_linear(model)
    assert line is not None
    assert f"{'Linear: FastLinear' if kind == 'llama' else 'Conv1D: FastConv1D'} differs from it by" in line
    assert [type(layer) for layer in model.modules()] == plain


def test_layers_in_bfloat16_are_compared_in_bfloat16() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    assert use_fast_norm(model) is None
    assert any(isinstance(layer, norm_module.FastRMSNorm) for layer in model.modules())
