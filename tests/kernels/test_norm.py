"""The fast RMSNorm equals that of transformers, in value and gradient, and does not replace Gemma's."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from rlhf_cli.kernels.layers import NORMS, FastRMSNorm, use_fast_norm

ALL = (LlamaRMSNorm, MistralRMSNorm, MixtralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)


def test_all_kinds_are_tested_here():
    assert {kind.__name__ for kind in ALL} == NORMS


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6)])
def test_values_and_gradients_equal_those_of_transformers(kind: type, shape: tuple[int, ...]):
    torch.manual_seed(0)
    layer = kind(6, eps=1e-3)
    torch.nn.init.normal_(layer.weight)
    fast = kind(6, eps=1e-3)
    fast.load_state_dict(layer.state_dict())
    use_fast_norm(fast)
    assert type(fast) is FastRMSNorm
    x, grad = 0.1 * torch.randn(shape), torch.randn(shape)
    found = []
    for module in (layer, fast):
        own = x.clone().requires_grad_()
        y = module(own)
        found.append((y, *torch.autograd.grad(y, (own, module.weight), grad)))
    for a, b in zip(*found, strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_other_types_and_layers_do_not_change():
    x = torch.randn(2, 4, dtype=torch.bfloat16)
    layer = LlamaRMSNorm(4)
    expected = layer(x)
    use_fast_norm(layer)
    assert torch.equal(layer(x), expected)
    gemma = GemmaRMSNorm(4)
    use_fast_norm(gemma)
    assert type(gemma) is GemmaRMSNorm
