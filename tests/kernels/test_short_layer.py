"""The last layer computes only the tokens that are read: with the results and the gradients of all tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from rlhf_cli.kernels.layers import LAYERS, ShortLayer, use_fast_attention, use_short_layer
from rlhf_cli.models.forward import autocast, choose_attention, hidden_at
from rlhf_cli.models.load import prepare
from rlhf_cli.models.passes import recompute_layers, recomputing
from rlhf_cli.packing import pack, response_positions
from support.tiny import CPU, tiny_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SEQUENCES = [[*PROMPT, 7, 8], [*PROMPT, 9], [2, 7, 1, 8, 2, 8]]


FAMILIES = {name: (name, {}) for name in ("llama", "mistral", "qwen2", "qwen3")}
FAMILIES["mistral with a window"] = ("mistral", {"sliding_window": 9})  # shorter than the longest sequence


def made(family: str) -> tuple[Any, Any]:
    """A model, and the same one with a short last layer."""
    name, settings = FAMILIES[family]
    model = tiny_model(name, num_hidden_layers=3, **settings)
    choose_attention(model)
    short = copy.deepcopy(model)
    assert use_fast_attention(short) is use_short_layer(short) is None
    return model, short


def read(
    model: Any, positions: torch.Tensor, precision: str = "float32"
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The hidden states at the positions of the packed sequences, and the gradients of the sum of their cubes."""
    batch = pack(SEQUENCES, groups=[0, 0, 1])
    with autocast(CPU, precision):
        hidden = hidden_at(model, batch, positions)
    hidden.float().pow(3).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return hidden.detach(), gradients


BATCH = pack(SEQUENCES, groups=[0, 0, 1])
POSITIONS = {
    "last": BATCH.last,
    "responses": response_positions(BATCH, [8, 8, 2]),  # the prompt's last token is read twice
    "unordered": torch.tensor([7, 2, 2, 11]),
    "as many as sequences": torch.tensor([1, 9, 12]),
}


@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_read_tokens_and_all_gradients_are_those_of_a_whole_pass(family: str, where: str) -> None:
    model, short = made(family)
    (hidden, gradients), (found, of_short) = read(model, POSITIONS[where]), read(short, POSITIONS[where])
    torch.testing.assert_close(found, hidden, rtol=1e-5, atol=1e-5)
    assert of_short.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (of_short[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


def test_the_families_of_the_table_are_tested() -> None:
    assert {type(made(family)[0].model.layers[0]).__name__ for family in FAMILIES} == LAYERS


def tokens_of(part: str, model: Any, positions: torch.Tensor) -> list[int]:
    """The tokens that a part of each layer computes."""
    rows: list[int] = []
    parts = [layer.get_submodule(part) for layer in model.model.layers]
    hooks = [module.register_forward_hook(lambda _m, x, _y: rows.append(x[0].shape[1])) for module in parts]
    read(model, positions)
    for hook in hooks:
        hook.remove()
    return rows


def test_only_the_last_layer_leaves_tokens_out() -> None:
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
def test_recomputed_layers_have_the_same_gradients(precision: str) -> None:
    _, short = made("llama")
    expected = read(short, BATCH.last, precision)
    recompute_layers(short)
    with recomputing(short):
        hidden, gradients = read(short, BATCH.last, precision)
    assert torch.equal(hidden, expected[0])
    assert all(torch.equal(gradients[name], gradient) for name, gradient in expected[1].items())


def test_a_model_of_one_layer_can_be_prepared_twice() -> None:
    """A value model may share the layers of the policy."""
    model = tiny_model("llama", num_hidden_layers=1)
    assert prepare(model, CPU) is prepare(model, CPU) is None
    assert tokens_of("mlp", model, BATCH.last) == [3]


def test_a_layer_that_computes_something_else_stays() -> None:
    model, _ = made("llama")
    plain = type(model.model.layers[0])

    def scaled(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return 1.1 * plain.forward(self, hidden_states, **kwargs)

    for layer in model.model.layers:
        layer.__class__ = type(plain.__name__, (plain,), {"forward": scaled})
    kept = [type(layer) for layer in model.model.layers]
    assert "LlamaDecoderLayer: ShortLayer differs from it" in str(use_short_layer(model))
    assert [type(layer) for layer in model.model.layers] == kept


def test_a_model_without_packed_rows_keeps_its_layers() -> None:
    model, _ = made("llama")
    model.set_attn_implementation("sdpa")
    assert use_short_layer(model) is None
    assert not any(isinstance(layer, ShortLayer) for layer in model.modules())
