"""Log-probabilities in chunks equal those from full logits, in value and gradient."""

import copy

import pytest
import torch

from rlhf_cli.kernels import head
from rlhf_cli.kernels.head import linear_logprobs
from rlhf_cli.models import forward
from rlhf_cli.models.forward import logits_at, logprobs_at
from rlhf_cli.models.load import prepare
from rlhf_cli.packing import pack
from rlhf_cli.tensor_ops import token_logprobs
from support.tiny import tiny_model

KINDS = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    **{name: (name, {}) for name in ("qwen2", "gpt2", "gpt_neox", "mixtral")},
    "scaled": ("cohere", {"logit_scale": 0.25}),
    "capped": ("gemma2", {"final_logit_softcapping": 0.5}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("keeps", [True, False])
def test_values_and_gradients_equal_those_of_full_logits(monkeypatch, keeps, has_bias, temperature, dtype):
    monkeypatch.setattr(head, "CHUNK", 3 * 11)  # three tokens at a time
    monkeypatch.setattr(head, "MOST_LOGITS", 10 * 11 if keeps else 10 * 11 - 1)
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 6, dtype=dtype).mul_(3).requires_grad_() for n in (10, 11))
    bias = torch.randn(11, dtype=dtype, requires_grad=True) if has_bias else None
    ids, grad = torch.randint(11, (10,)), torch.randn(10, dtype=dtype)
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    logits = torch.nn.functional.linear(hidden, weight, bias)
    whole = (logits / temperature).log_softmax(1).gather(1, ids[:, None])[:, 0]
    parts = linear_logprobs(hidden, weight, bias, ids, temperature=temperature)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(parts, whole, **tolerance)
    with torch.no_grad():
        assert torch.equal(linear_logprobs(hidden, weight, bias, ids, temperature=temperature), parts)
    found, wanted = (torch.autograd.grad(x, inputs, grad) for x in (parts, whole))
    torch.testing.assert_close(found, wanted, **tolerance)


def test_one_tensor_of_the_size_of_the_logits_is_kept_and_only_for_a_gradient(monkeypatch):
    real, chunks = head._of_chunk, []

    def watched(*given, derive):
        chunks.append((given[5] is not None, derive))
        return real(*given, derive=derive)

    monkeypatch.setattr(head, "_of_chunk", watched)
    weight, hidden, ids = torch.randn(400, 4, requires_grad=True), torch.randn(300, 4), torch.arange(300)

    def kept():
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            linear_logprobs(hidden, weight, None, ids)
        return sorted(sizes)[-2:]

    assert kept() == [weight.numel(), 300 * 400]
    assert set(chunks) == {(True, True)}
    chunks.clear()
    with torch.no_grad():
        linear_logprobs(hidden, weight, None, ids)
    assert set(chunks) == {(False, False)}


def test_autocast_computes_the_products_in_bfloat16():
    torch.manual_seed(0)
    hidden, weight, ids = torch.randn(4, 64), torch.randn(11, 64, requires_grad=True), torch.arange(4)
    with torch.autocast("cpu", torch.bfloat16):
        parts = linear_logprobs(hidden, weight, None, ids)
        whole = token_logprobs(torch.nn.functional.linear(hidden, weight), ids)
    assert parts.dtype == torch.float32
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=0.0)
    (a,), (b,) = (torch.autograd.grad(x.sum(), weight) for x in (parts, whole))
    assert a.dtype == torch.float32
    assert torch.allclose(a, b, atol=2e-2 * b.abs().max())


def test_gradients_of_many_chunks_in_bfloat16_are_not_rounded_away(monkeypatch):
    """A thousand small gradients, one per chunk. Summed in bfloat16 they would stop growing after 256."""
    hidden, weight = torch.ones(1000, 8), torch.zeros(4, 8, requires_grad=True)
    ids = torch.zeros(1000, dtype=torch.int64)
    monkeypatch.setattr(head, "CHUNK", 4)
    monkeypatch.setattr(head, "MOST_LOGITS", 0)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = torch.autograd.grad(linear_logprobs(hidden, weight, None, ids).sum(), weight)
    wanted = torch.tensor([750.0, -250.0, -250.0, -250.0])[:, None].expand(4, 8)
    torch.testing.assert_close(found, wanted, rtol=4e-3, atol=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_gives_the_same_log_probabilities_with_chunks(monkeypatch, kind):
    """A family that changes its logits after the head keeps full logits."""
    chunked = []
    real = forward.linear_logprobs
    monkeypatch.setattr(forward, "linear_logprobs", lambda *a, **k: chunked.append(1) or real(*a, **k))
    monkeypatch.setattr(head, "CHUNK", 4 * 50)
    family, config = KINDS[kind]
    model = tiny_model(family, vocab_size=50, **config)
    prepare(model, torch.device("cpu"))
    other = copy.deepcopy(model)
    batch = pack([[1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 6, 5]])
    at = torch.tensor([0, 1, 2, 3, 4, 5, 7, 8, 9, 10])
    whole = token_logprobs(logits_at(model, batch, at), batch.ids[at + 1], temperature=0.8)
    parts = logprobs_at(other, batch, at, batch.ids[at + 1], 0.8)
    assert bool(chunked) == (kind not in ("scaled", "capped"))
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)
    grad = torch.randn(len(at))
    whole.backward(grad)
    parts.backward(grad)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert a.grad is not None, name  # two missing gradients would be equal
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-5, atol=1e-5, msg=name)


def test_the_gradient_of_the_head_is_added_in_parts(monkeypatch):
    """The product of a chunk would be a second [V, H], 0.6 GB for a vocabulary of 150,000."""
    sizes, linear = [], head.linear
    monkeypatch.setattr(head, "CHUNK", 64)
    monkeypatch.setattr(head, "MOST_LOGITS", 0)
    monkeypatch.setattr(head, "linear", lambda *given: (sizes.append((out := linear(*given)).numel()), out)[1])
    torch.manual_seed(0)
    weight = torch.randn(50, 8, requires_grad=True)
    linear_logprobs(torch.randn(4, 8), weight, None, torch.arange(4)).sum().backward()
    assert max(sizes) <= 64
