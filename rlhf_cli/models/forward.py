"""Forward passes over packed batches: logits or hidden states at the positions that count.

A model that honours AttentionInterface runs on the packed row. One that doesn't (its attention is its own:
Bloom's ALiBi, an encoder) is found out by `choose_attention`, which compares the two, and runs padded.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from rlhf_cli.errors import ArtifactError
from rlhf_cli.kernels import attention
from rlhf_cli.kernels.head import MOST_LOGITS, linear_logprobs
from rlhf_cli.packing import PackedBatch, end_to_end, pack, send
from rlhf_cli.tensor_ops import token_logprobs

TOLERANCE = 1e-4
_plain_heads: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()


BFLOAT16_TOLERANCE = 3e-2


def is_packed(model: PreTrainedModel) -> bool:
    """Does this model take packed rows as they are?"""
    return model.config._attn_implementation in attention.PACKED


def shares_prefixes(model: PreTrainedModel) -> bool:
    """Does this model take rows in which a prefix that several sequences share stands once?"""
    return model.config._attn_implementation in attention.SHARED


def logits_at(model: PreTrainedModel, batch: PackedBatch, positions: torch.Tensor) -> torch.Tensor:
    """Next-token logits at `positions` of the packed row: [n] -> [n, V].

    The head runs on these positions only, through the model's own `logits_to_keep`, so that what a family
    does to its logits (scaling, soft-capping) is done here too. On padded batches it does where it does nothing.
    """
    if is_packed(model):
        output = model(**_packed_inputs(batch), logits_to_keep=positions, use_cache=False)
        return output.logits[0]
    if _head_is_plain(model, batch):
        logits: torch.Tensor = model.get_output_embeddings()(hidden_at(model, batch, positions))
        return logits
    return _padded_logits(model, batch)[positions]


def _padded_logits(model: PreTrainedModel, batch: PackedBatch) -> torch.Tensor:
    """The logits at every token of a padded batch, end to end: [N, V]."""
    ids, mask, position_ids = _padded_inputs(batch)
    output = model(input_ids=ids, attention_mask=mask, position_ids=position_ids, use_cache=False)
    logits: torch.Tensor = output.logits[mask]
    return logits


def logprobs_at(
    model: PreTrainedModel, batch: PackedBatch, positions: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probability of each of `ids` [n] as the next token at `positions` [n] of the packed row: [n] float32.

    Where [n, V] logits would be large they are never held at once (`linear_logprobs`).
    """
    if len(ids) * vocabulary_rows(model) <= MOST_LOGITS or not _head_is_plain(model, batch):
        return token_logprobs(logits_at(model, batch, positions), ids, temperature=temperature)
    head = model.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear)
    hidden = hidden_at(model, batch, positions)
    return linear_logprobs(hidden, head.weight, head.bias, ids, temperature=temperature)


@torch.no_grad()
def _head_is_plain(model: PreTrainedModel, batch: PackedBatch) -> bool:
    """Are the model's logits its head's product and nothing else? Some families scale or cap them behind it.

    A model is asked once, by a few tokens of the batch.
    """
    if model not in _plain_heads:
        head = model.get_output_embeddings()
        some = pack([batch.ids[: min(8, batch.lengths[0])].tolist()], batch.ids.device)
        at = torch.arange(len(some.ids), device=some.ids.device)
        logits = logits_at(model, some, at) if is_packed(model) else _padded_logits(model, some)
        _plain_heads[model] = isinstance(head, torch.nn.Linear) and bool(
            (head(hidden_at(model, some, at)) - logits).abs().max() <= TOLERANCE * logits.abs().max().clamp_min(1.0)
        )
    return _plain_heads[model]


def target_logits(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], learnt: Sequence[Sequence[bool]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits that predict each learnt token of some sequences, and those tokens: ([n, V], [n])."""
    batch, at = _learnt(model, sequences, learnt)
    return logits_at(model, batch, at - 1), batch.ids[at]


def target_logprobs(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], learnt: Sequence[Sequence[bool]]
) -> torch.Tensor:
    """The log-probability of each learnt token of some sequences: [n] float32."""
    batch, at = _learnt(model, sequences, learnt)
    return logprobs_at(model, batch, at - 1, batch.ids[at])


def _learnt(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], learnt: Sequence[Sequence[bool]]
) -> tuple[PackedBatch, torch.Tensor]:
    """The sequences packed, and where the learnt tokens stand.

    The token at index j is predicted at j - 1; the first of a sequence is never learnt.
    """
    batch = pack(sequences, next(model.parameters()).device)
    return batch, send(end_to_end(learnt).nonzero()[:, 0], batch.ids.device)


def logits_and_hidden_at(
    model: PreTrainedModel, batch: PackedBatch, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`logits_at` and `hidden_at` of a language model from one forward pass: ([n, V], [n, H])."""
    captured: list[torch.Tensor] = []
    handle = model.base_model.register_forward_hook(
        lambda _module, _inputs, output: captured.append(output.last_hidden_state)
    )
    try:
        logits = logits_at(model, batch, positions)
    finally:
        handle.remove()
    # The last: a model that is asked for the first time has been asked about its head before.
    if is_packed(model):
        return logits, captured[-1][0][positions]
    _, mask, _ = _padded_inputs(batch)
    return logits, captured[-1][mask][positions]


def hidden_at(model: PreTrainedModel, batch: PackedBatch, positions: torch.Tensor) -> torch.Tensor:
    """Last hidden states (after the final norm) at `positions` of the packed row: [n] -> [n, H]."""
    if is_packed(model):
        output = model.base_model(**_packed_inputs(batch), use_cache=False)
        return output.last_hidden_state[0][positions]
    ids, mask, position_ids = _padded_inputs(batch)
    output = model.base_model(input_ids=ids, attention_mask=mask, position_ids=position_ids, use_cache=False)
    return output.last_hidden_state[mask][positions]


def _packed_inputs(batch: PackedBatch) -> dict[str, Any]:
    return {
        "input_ids": batch.ids[None],
        "position_ids": batch.position_ids[None],
        "packed": batch,
    }


def _padded_inputs(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert sum(batch.lengths) == len(batch.ids), "padded rows share no prefix"
    ids = pad_sequence(list(batch.ids.split(batch.lengths)), batch_first=True)
    position_ids = pad_sequence(list(batch.position_ids.split(batch.lengths)), batch_first=True)
    lengths = torch.tensor(batch.lengths, device=ids.device)
    mask = torch.arange(ids.shape[1], device=ids.device)[None] < lengths[:, None]
    return ids, mask, position_ids


@torch.no_grad()
def choose_attention(model: PreTrainedModel) -> str | None:
    """Let the model run on packed rows if that gives what one plain forward a sequence gives.

    Returns None where it does as fast as its device allows, and else a line that says what it stays without: shared
    prefixes, the faster attention of a GPU, or packed rows at all. Three short sequences of token ids, two with a
    beginning in common, are compared, hidden state by hidden state, to 1e-4 of their size. They are shorter than any
    real sliding window, so it is looked at, too, if a window reaches the attention (`attention.watched_masks`).

    Raises ArtifactError where the model's backbone can't be called on token ids alone.
    """
    was_training = model.training
    model.eval()
    default = model.config._attn_implementation
    device = next(model.parameters()).device
    vocab = vocabulary_rows(model)
    rows = [[(7 * i + 3) % vocab for i in range(n)] for n in (9, 5)]
    sequences = [*rows, rows[0][:6] + [(5 * i + 2) % vocab for i in range(3)]]
    precisions = ["float32", "bfloat16"] if computes_in_bfloat16(device, "auto") else ["float32"]
    plain = {precision: _plain_hidden(model, sequences, precision) for precision in precisions}
    reason = ""
    for name, how in attention.PACKED.items():
        if device.type != "cuda" and name in (attention.ROW, attention.ROW_UNSHARED):
            continue
        model.set_attn_implementation(default)
        found = _differs(model, name, sequences, plain)
        if not found:
            model.train(was_training)
            return f"{type(model).__name__}: {reason}; it runs {how}, which is slower and as exact" if reason else None
        reason = reason or found
    model.set_attn_implementation(default)
    model.train(was_training)
    return f"{type(model).__name__}: {reason}; it runs on padded batches, which is slower and as exact"


def _plain_hidden(model: PreTrainedModel, sequences: list[list[int]], precision: str) -> torch.Tensor:
    """Hidden states of a plain forward a sequence, end to end: [sum of lengths, H]."""
    device = next(model.parameters()).device
    try:
        with autocast(device, precision):
            outputs = [model.base_model(input_ids=torch.tensor([s], device=device)) for s in sequences]
        return torch.cat([output.last_hidden_state[0] for output in outputs])
    except (AttributeError, TypeError, ValueError) as error:
        # An encoder-decoder that wants tokens for its decoder, a model that transformers finds no backbone in.
        raise ArtifactError(
            f"{type(model).__name__}: its backbone gives no hidden states for token ids alone "
            f"({type(error).__name__}: {str(error)[:100]}). Give a model of another family"
        ) from None


def _differs(model: PreTrainedModel, name: str, sequences: list[list[int]], plain: dict[str, torch.Tensor]) -> str:
    """Why a model can't run on packed rows by this attention, "" where it can; it has that attention afterwards."""
    groups = [0, 1, 0] if name in attention.SHARED else None
    with contextlib.suppress(TypeError, ValueError, RuntimeError, AssertionError, AttributeError, KeyError):
        model.set_attn_implementation(name)
        if not is_packed(model):
            raise ValueError("transformers keeps this model's own attention")
        batch = pack(sequences, next(model.parameters()).device, groups=groups, shortest_prefix=1)
        everywhere = batch.indices([0] * len(sequences), batch.lengths)
        for precision, wanted in plain.items():
            with autocast(batch.ids.device, precision):
                packed = hidden_at(model, batch, everywhere)
            gap = ((packed - wanted).abs().max() / wanted.abs().max().clamp_min(1.0)).item()
            if not gap <= (TOLERANCE if precision == "float32" else BFLOAT16_TOLERANCE):
                what = "packed rows" if groups is None else "packed rows with a shared prompt"
                return f"{what} differ from a plain forward by {gap:.1e} in {precision}"
        with attention.watched_masks() as lost:
            hidden_at(model, batch, everywhere)
        return lost[0] if lost else ""
    return "its attention does not take packed rows"


def vocabulary_rows(model: PreTrainedModel) -> int:
    """How many token ids the model has an embedding for."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0]


def scalar_scores(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """The linear head `score` of a causal sequence classifier: [n, H] -> [n, labels], always in float32."""
    head = model.score
    assert isinstance(head, torch.nn.Linear)
    return scalar_head(head, hidden)


def scalar_head(head: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """A linear head in float32, [n, H] -> [n, labels]: bfloat16 would round the differences of scores away."""
    with torch.autocast(hidden.device.type, enabled=False):
        scores: torch.Tensor = head(hidden.to(head.weight.dtype))
    return scores


def computes_in_bfloat16(device: torch.device, precision: str) -> bool:
    """Are forward passes in bfloat16: asked for, or found with `auto` on a GPU that has instructions for it?"""
    if precision != "auto":
        return precision == "bfloat16"
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context of every forward pass."""
    return torch.autocast(device.type, torch.bfloat16, enabled=computes_in_bfloat16(device, precision))
