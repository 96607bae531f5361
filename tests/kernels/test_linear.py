"""Products by oneDNN equal torch's, in value and gradient, and are used only where intended."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from rlhf_cli.kernels import linear as module
from rlhf_cli.kernels.linear import (
    FastConv1D,
    FastLinear,
    fixed_linear,
    fixed_weight,
    linear,
    multiplies_bfloat16,
    prefers_onednn,
    use_fast_linear,
)
from support.tiny import tiny_model

needs_onednn = pytest.mark.skipif(not prefers_onednn(), reason="MKL is as fast on this processor, so it is used")


@pytest.mark.parametrize("shape", [(7,), (2, 5, 7), (1, 700, 7)])
@pytest.mark.parametrize("outputs", [3, 11])
@pytest.mark.parametrize("has_bias", [True, False])
def test_values_and_gradients_equal_those_of_torch(shape, outputs, has_bias):
    torch.manual_seed(0)
    sizes = (shape, (outputs, 7), *([(outputs,)] if has_bias else []))
    inputs = [torch.randn(size, requires_grad=True) for size in sizes]
    ours, theirs = linear(*inputs), F.linear(*inputs)
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(theirs)
    for a, b in zip(torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(theirs, inputs, grad), strict=True):
        assert a.shape == b.shape
        assert a.is_contiguous()  # Autograd keeps it, and the optimizer reads it in the order of the parameter.
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-4)


def test_any_strides_are_accepted():
    torch.manual_seed(0)
    x, weight = torch.randn(7, 9).t(), torch.randn(7, 5).t()
    assert torch.allclose(linear(x, weight), F.linear(x, weight), rtol=1e-5, atol=1e-5)
    assert torch.allclose(linear(x[:, ::2], weight[:, ::2]), F.linear(x[:, ::2], weight[:, ::2]), atol=1e-5)
    assert linear(torch.randn(0, 7), weight).shape == (0, 5)


@pytest.mark.parametrize("rows", [1, 5, 64, 300])
def test_a_bfloat16_weight_in_onednns_order_gives_torchs_product(rows):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, 40), torch.randn(24, 40), torch.randn(24)
    x, weight, bias = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
    fixed = fixed_weight(weight)
    assert fixed.is_mkldnn == multiplies_bfloat16()
    for of_bias in (None, bias):
        found, exact = fixed_linear(x, fixed, of_bias), x.float() @ weight.float().t()
        exact = exact if of_bias is None else exact + of_bias
        assert found.dtype == torch.bfloat16
        assert torch.allclose(found.float(), exact, rtol=1e-2, atol=5e-2)


@needs_onednn
def test_only_float32_without_autocast_uses_onednn(monkeypatch):
    def never(*_args):
        raise AssertionError("oneDNN was asked")

    monkeypatch.setattr(module, "_product", never)
    x, weight = torch.randn(5, 7), torch.randn(3, 7)
    with pytest.raises(AssertionError, match="oneDNN was asked"):
        linear(x, weight)
    assert linear(x.double(), weight.double()).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16


@needs_onednn
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_changes_by_rounding_only(kind):
    plain = tiny_model(kind)
    fast = copy.deepcopy(plain)
    use_fast_linear(fast)
    kinds = {type(layer) for layer in fast.modules()}
    assert FastLinear in kinds
    assert (FastConv1D in kinds) == (kind == "gpt2")
    assert list(fast.state_dict()) == list(plain.state_dict())
    ids = torch.arange(24).view(2, 12) % 50
    losses = [model(input_ids=ids, labels=ids).loss for model in (plain, fast)]
    assert torch.allclose(losses[0], losses[1], rtol=1e-5)
    for loss in losses:
        loss.backward()
    for (name, a), b in zip(plain.named_parameters(), fast.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize(
    ("maker", "capability"), [("GenuineIntel", "AVX512"), ("", "AVX512"), ("AuthenticAMD", "AVX2")]
)
def test_other_processors_use_torch(maker, capability, monkeypatch):
    monkeypatch.setattr(module, "maker", lambda: maker)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert not prefers_onednn.__wrapped__()


@pytest.mark.parametrize(
    "context", [FakeTensorMode, lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.device("meta")]
)
def test_the_choice_does_not_depend_on_who_asks_first(context, monkeypatch):
    """`rlhf plan` asks among fake tensors, a head under autocast."""
    monkeypatch.setattr(module, "maker", lambda: "AuthenticAMD")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    expected = prefers_onednn.__wrapped__()
    with context():
        assert prefers_onednn.__wrapped__() == expected
