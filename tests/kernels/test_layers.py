"""Fast layers compute the same as those of transformers, in value and gradient, or they are not used."""

import copy
import importlib

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from rlhf_cli.config.models import Lora
from rlhf_cli.kernels import attention
from rlhf_cli.kernels import layers as fast_layers
from rlhf_cli.kernels import linear as linear_module
from rlhf_cli.kernels.layers import (
    ATTENTIONS,
    LAYERS,
    NORMS,
    FastAttention,
    FastRMSNorm,
    ShortLayer,
    use_fast_attention,
    use_fast_norm,
    use_short_layer,
)
from rlhf_cli.kernels.linear import SWAP_TOLERANCE, swap_class, use_fast_linear
from rlhf_cli.models import forward
from rlhf_cli.models.adapters import add_lora
from rlhf_cli.models.forward import autocast, choose_attention, hidden_at
from rlhf_cli.models.load import prepare
from rlhf_cli.models.passes import recompute_layers, recomputing
from rlhf_cli.packing import pack, response_positions
from support.compare import adapt
from support.gpu import DEVICES
from support.tiny import CPU, tiny_model


class Scaled(torch.nn.Linear):
    """A linear layer whose output is off by a factor."""

    factor = 1.0

    def forward(self, x):
        return self.factor * super().forward(x)


@pytest.mark.parametrize("factor", [1 + 0.5 * SWAP_TOLERANCE, 1 + 2 * SWAP_TOLERANCE, -1.0, float("nan")])
def test_all_layers_get_the_class_if_the_first_then_computes_the_same(factor, monkeypatch):
    monkeypatch.setattr(Scaled, "factor", factor)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 4) for _ in range(3)]
    line = swap_class(layers, Scaled, lambda layer: layer(torch.ones(2, 3)))
    if 1 < factor < 1 + SWAP_TOLERANCE:
        assert line is None
        assert {type(layer) for layer in layers} == {Scaled}
    else:
        assert str(line).startswith("Linear: Scaled differs from it by ")
        assert {type(layer) for layer in layers} == {torch.nn.Linear}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_product_that_differs_is_reported_and_not_used(kind, monkeypatch):
    model = tiny_model(kind)
    plain = [type(layer) for layer in model.modules()]
    monkeypatch.setattr(linear_module, "prefers_onednn", lambda: True)
    monkeypatch.setattr(linear_module, "_product", lambda x, weight, _bias: x @ weight.t() + 1)
    line = use_fast_linear(model)
    assert f"{'Linear: FastLinear' if kind == 'llama' else 'Conv1D: FastConv1D'} differs from it by" in line
    assert [type(layer) for layer in model.modules()] == plain


def test_layers_in_bfloat16_are_compared_in_bfloat16():
    model = tiny_model("llama").to(torch.bfloat16)
    assert use_fast_norm(model) is None
    assert any(isinstance(layer, fast_layers.FastRMSNorm) for layer in model.modules())


@pytest.mark.parametrize("name", sorted(NORMS))
@pytest.mark.parametrize("shape", [(6,), (2, 3, 6)])
@pytest.mark.parametrize("device", DEVICES)
def test_values_and_gradients_equal_those_of_transformers(name, shape, device):
    torch.manual_seed(0)
    family = name.removesuffix("RMSNorm").lower()
    layer = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)(6, eps=1e-3)
    torch.nn.init.normal_(layer.weight)
    fast = copy.deepcopy(layer.to(device))
    use_fast_norm(fast)
    assert type(fast) is FastRMSNorm
    x, grad = (0.1 * torch.randn(shape)).to(device), torch.randn(shape).to(device)
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


CONFIGS = {
    "LlamaAttention": ("llama", {"attention_bias": True}),
    "MistralAttention": ("mistral", {"sliding_window": 4}),
    "Qwen2Attention": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "Qwen3Attention": ("qwen3", {"head_dim": 16}),
}
ROWS = [[3, 4, 5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15] * 7]


def two(family):
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


def of_rows(model):
    """Hidden states of ROWS, one plain forward each. With a mask, because packed attention would drop the window."""
    inputs = [torch.tensor([row]) for row in ROWS]
    outputs = [model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids)) for ids in inputs]
    return torch.cat([output.last_hidden_state[0] for output in outputs])


def packed(model):
    batch = pack(ROWS)
    return hidden_at(model, batch, torch.arange(len(batch.ids)))


def gradients(model, hidden):
    """The gradients of the sum of the cubes."""
    hidden.float().pow(3).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_same(ours, found, theirs, wanted):
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)
    a, b = gradients(ours, found), gradients(theirs, wanted)
    assert list(a) == list(b)
    assert len(a) > 4
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=1e-4, atol=1e-4 * b[name].abs().max().item()), name


@pytest.mark.parametrize("how", ["as it is", "recomputed", "with adapters"])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_changes_by_rounding_only(family, how):
    plain, fast = two(family)
    if how == "recomputed":
        recompute_layers(fast)
    if how == "with adapters":
        for model in (plain, fast):
            add_lora(model, Lora(r=2, alpha=4), "lora", seed=0)
            adapt(model, std=0.3)
    wanted = of_rows(plain)
    assert_same(fast, packed(fast), plain, wanted)
    assert_same(fast, of_rows(fast), plain, of_rows(plain))
    with torch.no_grad():
        assert torch.allclose(packed(fast.eval()), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("shortest", [1, 512])
def test_packed_rows_under_autocast_round_less_than_transformers_layer(family, shortest, monkeypatch):
    """The error of hidden states and gradients against float32. Long texts attend in bfloat16."""
    monkeypatch.setattr(fast_layers, "BFLOAT16_KEYS", shortest)
    plain, fast = two(family)
    choose_attention(plain)
    exact = packed(plain)
    of_exact = gradients(plain, exact)
    errors = []
    with torch.autocast("cpu", torch.bfloat16):
        for model in (plain, fast):
            hidden = packed(model)
            of_model = gradients(model, hidden)
            assert list(of_model) == list(of_exact)
            relative = [((of_model[n] - of_exact[n]).abs().mean() / of_exact[n].abs().mean()).item() for n in of_exact]
            errors.append([(hidden - exact).abs().mean().item(), sum(relative)])
    for theirs, ours in zip(*errors, strict=True):
        assert 0 < ours < 1.2 * theirs


@pytest.mark.parametrize("family", CONFIGS)
def test_a_norm_that_only_products_read_is_cast_once_under_autocast(family):
    _, fast = two(family)
    seen = {}
    for name, module in fast.named_modules():
        if isinstance(module, FastRMSNorm):
            module.register_forward_hook(lambda _module, _input, output, name=name: seen.update({name: output.dtype}))
    packed(fast)
    assert set(seen.values()) == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        packed(fast)
    narrow = {name for name, dtype in seen.items() if dtype == torch.bfloat16}
    assert narrow == {name for name in seen if name.endswith(("input_layernorm", "post_attention_layernorm"))}
    assert narrow < set(seen)


@pytest.mark.parametrize(("length", "is_half"), [(99, False), (100, True)])
def test_only_long_texts_attend_in_bfloat16(length, is_half, monkeypatch):
    monkeypatch.setattr(fast_layers, "BFLOAT16_KEYS", 100)
    _, fast = two("LlamaAttention")
    attend, seen = attention.F.scaled_dot_product_attention, []

    def watched(query, *rest, **options):
        seen.append((query.dtype, torch.is_autocast_enabled("cpu")))
        return attend(query, *rest, **options)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", watched)
    with torch.autocast("cpu", torch.bfloat16):
        hidden_at(fast, pack([[1] * length, [2] * 3]), torch.arange(length + 3))
    assert set(seen) == {(torch.float32, is_half)}


def test_autocast_eager_attention_and_float64_use_transformers_forward(monkeypatch):
    def never(*_args):
        raise AssertionError("rotated here")

    plain, fast = two("LlamaAttention")
    monkeypatch.setattr(fast_layers, "rotate", never)
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
def test_a_layer_whose_output_would_change_keeps_its_class(fault, monkeypatch):
    model = tiny_model("llama", attention_bias=True)
    if fault == "rotation":
        monkeypatch.setattr(fast_layers, "rotate", lambda x, cos, _sin: x * cos[:, None])
    else:  # transformers gives its cache another name
        own, named = FastAttention.forward, ("cache", "past_key_values")
        ignoring = lambda self, **given: own(self, **{name: given[name] for name in given if name not in named})  # noqa: E731
        monkeypatch.setattr(FastAttention, "forward", ignoring)
    line = use_fast_attention(model)
    assert line.startswith("LlamaAttention: FastLlamaAttention differs from it by ")
    assert not any(isinstance(layer, FastAttention) for layer in model.modules())


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SEQUENCES = [[*PROMPT, 7, 8], [*PROMPT, 9], [2, 7, 1, 8, 2, 8]]


FAMILIES = {name: (name, {}) for name in ("llama", "mistral", "qwen2", "qwen3")}
FAMILIES["mistral with a window"] = ("mistral", {"sliding_window": 9})  # shorter than the longest sequence


def made(family):
    """A model, and the same one with a short last layer."""
    name, settings = FAMILIES[family]
    model = tiny_model(name, num_hidden_layers=3, **settings)
    choose_attention(model)
    short = copy.deepcopy(model)
    assert use_fast_attention(short) is use_short_layer(short) is None
    return model, short


def read(model, positions, precision="float32"):
    """The hidden states at the positions of the packed sequences, and their gradients."""
    with autocast(CPU, precision):
        hidden = hidden_at(model, pack(SEQUENCES, groups=[0, 0, 1]), positions)
    return hidden.detach(), gradients(model, hidden)


BATCH = pack(SEQUENCES, groups=[0, 0, 1])
POSITIONS = {
    "last": BATCH.last,
    "responses": response_positions(BATCH, [8, 8, 2]),  # the prompt's last token is read twice
    "unordered": torch.tensor([7, 2, 2, 11]),
    "as many as sequences": torch.tensor([1, 9, 12]),
}


@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_read_tokens_and_all_gradients_are_those_of_a_whole_pass(family, where):
    model, short = made(family)
    (hidden, of_model), (found, of_short) = read(model, POSITIONS[where]), read(short, POSITIONS[where])
    torch.testing.assert_close(found, hidden, rtol=1e-5, atol=1e-5)
    assert of_short.keys() == of_model.keys()
    for name, gradient in of_model.items():
        assert (of_short[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


def test_the_layers_of_all_tables_are_tested_here():
    assert set(CONFIGS) == ATTENTIONS
    assert {type(made(family)[0].model.layers[0]).__name__ for family in FAMILIES} == LAYERS


def tokens_of(part, model, positions):
    """The tokens that a part of each layer computes."""
    rows = []
    parts = [layer.get_submodule(part) for layer in model.model.layers]
    hooks = [module.register_forward_hook(lambda _m, x, _y: rows.append(x[0].shape[1])) for module in parts]
    read(model, positions)
    for hook in hooks:
        hook.remove()
    return rows


@pytest.fixture
def unrounded(monkeypatch):
    """Rows are not rounded up, as they are where oneDNN multiplies."""
    monkeypatch.setattr(forward, "_rounds_rows", lambda _: False)


@pytest.mark.usefixtures("unrounded")
def test_only_the_last_layer_leaves_tokens_out():
    _, short = made("llama")
    total, responses = len(BATCH.ids), POSITIONS["responses"]
    for part in ("mlp", "self_attn.o_proj"):
        assert tokens_of(part, short, BATCH.last) == [total, total, 3]
        assert tokens_of(part, short, responses) == [total, total, len(responses)]
        assert tokens_of(part, short, torch.arange(total)) == [total, total, total]
    # All tokens are keys. The last tokens alone need no other queries.
    assert tokens_of("self_attn.k_proj", short, BATCH.last) == [total, total, total]
    assert tokens_of("self_attn.q_proj", short, BATCH.last) == [total, total, 3]
    assert tokens_of("self_attn.q_proj", short, responses) == [total, total, total]
    assert [isinstance(layer, ShortLayer) for layer in short.model.layers] == [False, False, True]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_recomputed_layers_have_the_same_gradients(precision):
    _, short = made("llama")
    expected = read(short, BATCH.last, precision)
    recompute_layers(short)
    with recomputing(short):
        hidden, of_short = read(short, BATCH.last, precision)
    assert torch.equal(hidden, expected[0])
    assert all(torch.equal(of_short[name], gradient) for name, gradient in expected[1].items())


@pytest.mark.usefixtures("unrounded")
def test_a_model_of_one_layer_can_be_prepared_twice():
    """A value model may share the layers of the policy."""
    model = tiny_model("llama", num_hidden_layers=1)
    assert prepare(model, CPU) is prepare(model, CPU) is None
    assert tokens_of("mlp", model, BATCH.last) == [3]


def test_a_layer_that_computes_something_else_stays():
    model, _ = made("llama")
    plain = type(model.model.layers[0])

    def scaled(self, hidden_states, **kwargs):
        return 1.1 * plain.forward(self, hidden_states, **kwargs)

    for layer in model.model.layers:
        layer.__class__ = type(plain.__name__, (plain,), {"forward": scaled})
    kept = [type(layer) for layer in model.model.layers]
    assert "LlamaDecoderLayer: ShortLayer differs from it" in str(use_short_layer(model))
    assert [type(layer) for layer in model.model.layers] == kept


def test_a_model_without_packed_rows_keeps_its_layers():
    model, _ = made("llama")
    model.set_attn_implementation("sdpa")
    assert use_short_layer(model) is None
    assert not any(isinstance(layer, ShortLayer) for layer in model.modules())
