"""The bytes that autograd keeps for each token of a training pass, counted on the very layers that run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel
from transformers.integrations import moe

from rlhf_cli.errors import ConfigError
from rlhf_cli.kernels import attention
from rlhf_cli.kernels.layers import use_fast_attention, use_fast_norm
from rlhf_cli.kernels.linear import use_fast_linear
from rlhf_cli.models.forward import autocast, hidden_at, is_packed
from rlhf_cli.models.load import reason_of
from rlhf_cli.packing import PackedBatch, pack
from rlhf_cli.processes.sharding import gathered

ROW, COUNT = 16, 4
"""Tokens of each sequence in a pass whose memory is counted, and sequences: together a multiple of forward.ROWS."""
UNFIT = (TypeError, ValueError, RuntimeError, AssertionError, AttributeError, KeyError)
"""What a model raises whose attention does not take packed rows."""


def activation_bytes(model: PreTrainedModel, precision: str) -> float:
    """Bytes for each token that autograd keeps in the backbone: of 2 * COUNT rows of ROW tokens minus of COUNT.

    0 for a model of which nothing is trained. All processes must call this for a sharded model.

    For a Llama in float32 the result is about ``4 * layers * (7 * hidden + 2 * key_value_width + 4 * intermediate)``.
    Each layer keeps the inputs and outputs of two norms; query, key and value; the output of attention twice (as
    computed, and as the next product reads it); the gate, its activation, the up projection and their product.
    Attention that keeps its N x N weights needs more than this for long rows.
    """
    if not any(p.requires_grad for p in model.parameters()):
        return 0.0
    device = next(model.parameters()).device

    def kept(rows: int) -> int:
        batch = pack([[1] * ROW] * rows, device)

        def compute() -> object:
            with autocast(device, precision):
                return _hidden(model, batch)

        return kept_bytes(compute)

    return (kept(2 * COUNT) - kept(COUNT)) / (COUNT * ROW)


@gathered
def _hidden(model: PreTrainedModel, batch: PackedBatch) -> object:
    """A forward pass of the backbone over rows of ROW tokens."""
    if is_packed(model):
        return hidden_at(model, batch, torch.arange(len(batch.ids), device=batch.ids.device))
    ids = batch.ids.view(-1, ROW)
    inputs = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return model.base_model(input_ids=ids, **inputs)


def kept_bytes(compute: Callable[[], object]) -> int:
    """Bytes of the storages that autograd keeps for a computation. Each storage counts once."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # The address of the storage object: data_ptr() is 0 for every tensor without numbers (meta, fake).
        kept[storage._cdata] = storage.nbytes()
        # An operation that keeps its own output would form a cycle, which Python cannot free. The weights are in it.
        return tensor.detach()

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # All storages live as long as the output, so no two of them have the same address.
        output = compute()
    del output
    return sum(kept.values())


def fake_activation_bytes(model: PreTrainedModel, precision: str, device: str, key: str) -> float:
    """`activation_bytes` of a model on the meta device, whose layers become those that the stages use on a `device`.

    Its weights become fake tensors (`FakeTensorMode`). They have shapes and a device but no storage, and torch runs the
    same operations on them as on real ones, autocast included. Raises ConfigError, naming the config `key`, for a model
    that cannot run so.
    """
    if not any(p.requires_grad for p in model.parameters()):
        return 0.0
    with FakeTensorMode(allow_non_fake_inputs=True), _fake_experts():
        _make_fake(model)
        for use in (use_fast_linear, use_fast_norm, *[use_fast_attention] * (device == "cpu")):
            use(model)
        default = model.config._attn_implementation
        with contextlib.suppress(*UNFIT):
            model.set_attn_implementation(attention.EACH)
            return activation_bytes(model, precision)
        model.set_attn_implementation(default)
        try:
            return activation_bytes(model, precision)
        except Exception as error:
            # A layer may choose by numbers, which a fake tensor does not have.
            raise ConfigError(
                f"{key}: rlhf plan cannot count the activations of a {type(model).__name__} ({reason_of(error)})"
            ) from None


@contextlib.contextmanager
def _fake_experts() -> Iterator[None]:
    """Let experts compute by a product with the same shapes, which keeps what torch's `grouped_mm` keeps.

    torch refuses fake tensors in float32 there.
    """

    def product_of_first(rows: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
        """All rows [S, in] times the first of [experts, in, out]: [S, out], as `grouped_mm` outside of autocast."""
        with torch.autocast(rows.device.type, enabled=False):
            return rows.to(weight.dtype) @ weight[0]

    grouped = moe._grouped_mm
    moe._grouped_mm = product_of_first  # type: ignore[assignment]
    try:
        yield
    finally:
        moe._grouped_mm = grouped


def _make_fake(model: PreTrainedModel) -> None:
    """Turn the weights and buffers of a model on the meta device into fake tensors on the CPU."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None:
                    continue
                if id(old) not in made:
                    new, is_weight = torch.empty(old.shape, dtype=old.dtype), isinstance(old, nn.Parameter)
                    made[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad) if is_weight else new
                tensors[name] = made[id(old)]  # type: ignore[assignment]
