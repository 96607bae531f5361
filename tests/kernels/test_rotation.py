"""The fast rotation and its attention layers equal those of transformers, in value and gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from rlhf_cli.config.models import Lora
from rlhf_cli.kernels import layers as module
from rlhf_cli.kernels.layers import WINDOWS, FastAttention, rotate, use_fast_attention
from rlhf_cli.models.adapters import add_lora
from rlhf_cli.models.forward import hidden_at
from rlhf_cli.models.load import prepare
from rlhf_cli.models.passes import recompute_layers
from rlhf_cli.packing import pack
from support.compare import adapt
from support.tiny import CPU, tiny_model

CONFIGS = {
    "LlamaAttention": ("llama", {"attention_bias": True}),
    "MistralAttention": ("mistral", {"sliding_window": 4}),
    "Qwen2Attention": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "Qwen3Attention": ("qwen3", {"head_dim": 16}),
}
ROWS = [[3, 4, 5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15] * 7]


def two(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A random model of transformers, and a prepared copy."""
    name, changes = CONFIGS[family]
    plain = tiny_model(name, **changes)
    for parameter in plain.parameters():  # Biases start at zero and norms at one, which would hide their loss.
        torch.nn.init.normal_(parameter, std=0.3)
    fast = copy.deepcopy(plain)
    assert prepare(fast, CPU) is None
    kinds = {type(layer).__name__ for layer in fast.modules()}
    assert f"Fast{family}" in kinds
    assert family not in kinds
    assert list(fast.state_dict()) == list(plain.state_dict())
    return plain.train(), fast.train()


def of_rows(model: PreTrainedModel) -> torch.Tensor:
    """Hidden states of ROWS, one plain forward each. With a mask, because packed attention would drop the window."""
    inputs = [torch.tensor([row]) for row in ROWS]
    outputs = [model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids)) for ids in inputs]
    return torch.cat([output.last_hidden_state[0] for output in outputs])


def packed(model: PreTrainedModel) -> torch.Tensor:
    batch = pack(ROWS)
    return hidden_at(model, batch, torch.arange(len(batch.ids)))


def gradients(model: PreTrainedModel, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(hidden, list(trained.values()), torch.randn_like(hidden), allow_unused=True)
    return {name: grad for name, grad in zip(trained, found, strict=True) if grad is not None}


def assert_same(ours: PreTrainedModel, found: torch.Tensor, theirs: PreTrainedModel, wanted: torch.Tensor) -> None:
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)
    a, b = gradients(ours, found), gradients(theirs, wanted)
    assert list(a) == list(b)
    assert len(a) > 4
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=1e-4, atol=1e-4 * b[name].abs().max().item()), name


def test_all_families_are_tested_here():
    assert set(CONFIGS) == set(WINDOWS)


@pytest.mark.parametrize("heads", [2, 3])
def test_a_rotation_equals_that_of_transformers(heads: int):
    torch.manual_seed(0)
    x, grad = torch.randn(2, 5, heads, 8).transpose(1, 2), torch.randn(2, heads, 5, 8)
    angles = torch.randn(2, 5, 4)
    cos, sin = (torch.cat([half, half], -1) for half in (angles.cos(), angles.sin()))
    found = []
    for of in (rotate, lambda q, cos, sin: apply_rotary_pos_emb(q, q, cos, sin)[0]):
        own = x.clone().requires_grad_()
        rotated = of(own, cos, sin)
        found.append((rotated, *torch.autograd.grad(rotated, own, grad)))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    assert found[0][0].stride() == x.stride()


@pytest.mark.parametrize("how", ["as it is", "recomputed", "with adapters"])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_changes_by_rounding_only(family: str, how: str):
    plain, fast = two(family)
    if how == "recomputed":
        recompute_layers(fast)
    if how == "with adapters":
        pytest.importorskip("peft")
        for model in (plain, fast):
            add_lora(model, Lora(r=2, alpha=4), "lora", seed=0)
            adapt(model, std=0.3)
    wanted = of_rows(plain)
    assert_same(fast, packed(fast), plain, wanted)
    assert_same(fast, of_rows(fast), plain, of_rows(plain))
    with torch.no_grad():
        assert torch.allclose(packed(fast.eval()), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_cache_changes_by_rounding_only(family: str):
    plain, fast = two(family)
    ids = torch.tensor([ROWS[0]])
    with torch.no_grad():
        seen = torch.ones_like(ids)
        wanted = plain.eval()(input_ids=ids).logits
        first = fast.eval()(input_ids=ids[:, :6], attention_mask=seen[:, :6], use_cache=True)
        rest = fast(input_ids=ids[:, 6:], attention_mask=seen, past_key_values=first.past_key_values).logits
    assert torch.allclose(torch.cat([first.logits, rest], 1), wanted, rtol=1e-4, atol=1e-4)


def test_autocast_eager_attention_and_float64_use_transformers_forward(monkeypatch: pytest.MonkeyPatch):
    def never(*_args: object) -> None:
        raise AssertionError("rotated here")

    plain, fast = two("LlamaAttention")
    monkeypatch.setattr(module, "rotate", never)
    with pytest.raises(AssertionError, match="rotated here"):
        of_rows(fast)
    with torch.autocast("cpu", torch.bfloat16):
        # Without rotation the mean difference is 4e-3.
        assert (of_rows(fast) - of_rows(plain)).abs().mean() < 5e-4
    ids = torch.tensor([ROWS[0]])
    fast.set_attn_implementation("eager")
    plain.set_attn_implementation("eager")
    found, wanted = (model(input_ids=ids, output_attentions=True).attentions for model in (fast, plain))
    assert torch.allclose(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    assert torch.allclose(of_rows(fast.double()), of_rows(plain.double()))


@pytest.mark.parametrize("fault", ["rotation", "cache"])
def test_a_layer_whose_output_would_change_keeps_its_class(fault: str, monkeypatch: pytest.MonkeyPatch):
    model = tiny_model("llama", attention_bias=True)
    if fault == "rotation":
        monkeypatch.setattr(module, "rotate", lambda x, cos, _sin: x * cos[:, None])
    else:  # transformers gives its cache another name
        own, named = FastAttention.forward, ("cache", "past_key_values")
        ignoring = lambda self, **given: own(self, **{name: given[name] for name in given if name not in named})  # noqa: E731
        monkeypatch.setattr(FastAttention, "forward", ignoring)
    line = use_fast_attention(model)
    assert line is not None
    assert line.startswith("LlamaAttention: FastLlamaAttention differs from it by ")
    assert not any(isinstance(layer, FastAttention) for layer in model.modules())
