"""Forward passes over packed batches: logits, hidden states or scores at chosen positions.

A model that uses transformers' AttentionInterface runs on the packed row. One with its own attention (Bloom's ALiBi, an
encoder) runs on padded batches; `choose_attention` detects it by a comparison.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.data.batches import Budget
from rlhf_cli.data.encode import Example
from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.kernels import attention
from rlhf_cli.kernels.head import linear_logprobs
from rlhf_cli.kernels.linear import prefers_onednn
from rlhf_cli.models import seq2seq
from rlhf_cli.models.seq2seq import is_seq2seq, last_hidden_state, with_prompts
from rlhf_cli.packing import PackedBatch, end_to_end, pack, send
from rlhf_cli.processes.microbatches import over_microbatches
from rlhf_cli.processes.sharding import device_of, gathered
from rlhf_cli.processes.threads import is_out_of_memory
from rlhf_cli.tensor_ops import length_mask, token_logprobs

TOLERANCE = 1e-4
BFLOAT16_TOLERANCE = 3e-2
"""Largest difference that counts as rounding, relative to the largest number, in float32 and in bfloat16."""
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_LOGITS = 1 << 28
"""Logits that are held at the same time: 1 GB in float32."""
ROWS = 64
"""The packed row, and the hidden states that are read, are rounded up to a multiple where oneDNN computes. In bfloat16
a step with about 1,000 tokens then takes 0.6 of the time for a model of 1 million weights, 0.8 for 23 million."""
_has_plain_head: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()


def is_packed(model: PreTrainedModel) -> bool:
    """Whether this model runs on packed rows, in which sequences may share a prefix."""
    return model.config._attn_implementation in attention.PACKED


@gathered
def logits_at(model: PreTrainedModel, batch: PackedBatch, positions: Tensor) -> Tensor:
    """Next-token logits at `positions` of the packed row: [n] -> [n, V].

    The head runs on these positions only, unless the model runs on padded batches and scales or caps its logits.
    """
    if is_packed(model):
        output = model(**_packed_inputs(batch), logits_to_keep=positions, use_cache=False)
        return output.logits[0]
    if is_seq2seq(model) or _head_is_plain(model, batch):
        return logits_and_hidden_at(model, batch, positions)[0]
    return _padded_logits(model, batch)[positions]


def _padded_logits(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    """The logits at every token of a padded batch, end to end: [N, V]."""
    ids, real_mask = _padded_inputs(batch)
    output = model(input_ids=ids, attention_mask=real_mask, use_cache=False)
    logits: Tensor = output.logits[real_mask]
    return logits


@gathered
def logprobs_at(
    model: PreTrainedModel, batch: PackedBatch, positions: Tensor, ids: Tensor, temperature: float = 1.0
) -> Tensor:
    """Log-probability of each of `ids` [n] as the next token at `positions` [n] of the packed row: [n] float32."""
    if is_seq2seq(model) or not _head_is_plain(model, batch):
        return token_logprobs(logits_at(model, batch, positions), ids, temperature=temperature)
    head = model.get_output_embeddings()
    hidden = _rows_at(model, batch, positions) if is_packed(model) else hidden_at(model, batch, positions)
    every = F.pad(ids, (0, len(hidden) - len(ids)))
    return linear_logprobs(hidden, head.weight, head.bias, every, temperature=temperature)[: len(ids)]


@gathered
def check_head(model: PreTrainedModel) -> None:
    """Find out now how the logits are computed: the processes of a sharded model must make the same passes."""
    if isinstance(model.get_output_embeddings(), torch.nn.Linear):
        _head_is_plain(model, pack([[0, 1]], device_of(model)))


@torch.no_grad()
def _head_is_plain(model: PreTrainedModel, batch: PackedBatch) -> bool:
    """Whether the logits are ``hidden @ head.weight.T + head.bias``: checked once, with a few tokens of the batch."""
    if model not in _has_plain_head:
        head, batch = model.get_output_embeddings(), _computed(batch)
        few = pack([batch.ids[: min(8, batch.lengths[0])].tolist()], batch.ids.device)
        positions = torch.arange(len(few.ids), device=few.ids.device)
        logits = logits_at(model, few, positions) if is_packed(model) else _padded_logits(model, few)
        # A layer of another class may hold 4 bits, or adapters.
        is_linear = isinstance(head, torch.nn.Linear) and head.weight.shape[1:] == (head.in_features,)
        hidden = hidden_at(model, few, positions)
        of_head = F.linear(hidden, head.weight, head.bias) if is_linear else torch.inf
        gap = (of_head - logits).abs().max()
        _has_plain_head[model] = bool(gap <= TOLERANCE * logits.abs().max().clamp_min(1.0))
    return _has_plain_head[model]


def target_logits(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], target_mask: Sequence[Sequence[bool]]
) -> tuple[Tensor, Tensor]:
    """The logits that predict each target token of some sequences, and those tokens: ([n, V], [n])."""
    batch, targets = _pack_targets(model, sequences, target_mask)
    return logits_at(model, batch, targets - 1), batch.ids[targets]


def target_logprobs(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], target_mask: Sequence[Sequence[bool]]
) -> Tensor:
    """The log-probability of each target token of some sequences: [n] float32."""
    batch, targets = _pack_targets(model, sequences, target_mask)
    return logprobs_at(model, batch, targets - 1, batch.ids[targets])


def _pack_targets(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], target_mask: Sequence[Sequence[bool]]
) -> tuple[PackedBatch, Tensor]:
    """The packed sequences, and the indices [n] of the target tokens in the row. Index j is predicted at j - 1."""
    batch = pack(sequences, device_of(model))
    if is_seq2seq(model):
        batch = with_prompts(batch, [row.index(True) for row in target_mask])
    return batch, send(end_to_end(target_mask).nonzero()[:, 0], batch.ids.device)


def budget_of_logits(model: PreTrainedModel, budget: Budget) -> Budget:
    """The budget of passes that hold all logits (MAX_LOGITS), which training never does (kernels/head.py)."""
    return replace(budget, tokens=max(1, min(budget.tokens, MAX_LOGITS // vocabulary_rows(model))))


def scored_targets(
    model: PreTrainedModel, rows: Sequence[Example], budget: Budget, precision: str
) -> list[tuple[Sequence[int], Tensor, Tensor]]:
    """By microbatch: its row numbers, and of its targets the log-probability, and if it is the mode: [N] float64."""
    device = device_of(model)

    def score(numbers: Sequence[int]) -> tuple[Sequence[int], Tensor, Tensor]:
        with autocast(device, precision):  # [N, V] and [N]
            logits, targets = target_logits(model, [rows[i].ids for i in numbers], [rows[i].loss_mask for i in numbers])
        return numbers, token_logprobs(logits, targets).cpu().double(), (logits.argmax(-1) == targets).cpu().double()

    microbatches = budget_of_logits(model, budget).cut([len(row.ids) for row in rows])
    return over_microbatches(microbatches, score, models=[model])


@gathered
def logits_and_hidden_at(model: PreTrainedModel, batch: PackedBatch, positions: Tensor) -> tuple[Tensor, Tensor]:
    """`logits_at` and `hidden_at` of a language model from one forward pass: ([n, V], [n, H])."""
    if is_seq2seq(model):
        return seq2seq.logits_and_hidden_at(model, batch, positions)
    if _head_is_plain(model, batch):
        hidden = hidden_at(model, batch, positions)
        return model.get_output_embeddings()(hidden), hidden
    with last_hidden_state(model.base_model) as captured:
        logits = logits_at(model, batch, positions)
    if is_packed(model):
        return logits, captured[-1][0][positions]
    _, real_mask = _padded_inputs(batch)
    return logits, captured[-1][real_mask][positions]


@gathered
def hidden_at(model: PreTrainedModel, batch: PackedBatch, positions: Tensor) -> Tensor:
    """Last hidden states (after the final norm) at `positions` of the packed row: [n] -> [n, H]."""
    if is_packed(model):
        return _rows_at(model, batch, positions)[: len(positions)]
    if is_seq2seq(model):
        return seq2seq.hidden_at(model, batch, positions)
    ids, real_mask = _padded_inputs(batch)
    output = model.base_model(input_ids=ids, attention_mask=real_mask, use_cache=False)
    return output.last_hidden_state[real_mask][positions]


def _rows_at(model: PreTrainedModel, batch: PackedBatch, positions: Tensor) -> Tensor:
    """`hidden_at` of a model on packed rows, with rows after the n wanted ones if they save time: [n or more, H]."""
    batch, missing = _computed(batch), 0
    if _rounds_rows(batch.ids.device):
        keeps_last = replace(batch, kept=positions).keeps_last
        batch = batch.rounded_up(ROWS)
        # With one row for each sequence, attention computes the last tokens only.
        missing = len(batch.segments) - len(positions) if keeps_last else -len(positions) % ROWS
    rows = F.pad(positions, (0, missing), value=len(batch.ids) - 1)
    if 0 < len(rows) < len(batch.ids):
        batch = replace(batch, kept=rows)
    hidden: Tensor = model.base_model(**_packed_inputs(batch), use_cache=False).last_hidden_state[0]
    # The last layer may have left out the others.
    return hidden if batch.kept is not None and len(hidden) == len(rows) else hidden[rows]


def _rounds_rows(device: torch.device) -> bool:
    """Whether oneDNN computes the products: for each new number of rows it generates code."""
    return device.type == "cpu" and (torch.is_autocast_enabled("cpu") or prefers_onednn())


def scalar_head(head: Any, hidden: Tensor) -> Tensor:
    """A linear head in float32, [n, H] -> [n, labels]. bfloat16 would round away the differences between scores."""
    with torch.autocast(hidden.device.type, enabled=False):
        scores: Tensor = head(hidden.to(head.weight.dtype))
    return scores


def _computed(batch: PackedBatch) -> PackedBatch:
    """The batch, or two tokens that nothing reads if it is empty: so every weight has a gradient, which is then 0."""
    return batch if batch.segments else pack([[0, 0]], batch.ids.device)


def _packed_inputs(batch: PackedBatch) -> dict[str, Any]:
    batch = _computed(batch)
    if _rounds_rows(batch.ids.device):
        batch = batch.rounded_up(ROWS)
    return {"input_ids": batch.ids[None], "position_ids": batch.position_ids[None], "packed": batch}


def _padded_inputs(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Ids and mask of real tokens, padded on the right: [B, T] each. A model counts positions: RoBERTa from 2."""
    batch = _computed(batch)
    assert sum(batch.lengths) == len(batch.ids), "a padded batch cannot share prefixes"
    ids = pad_sequence(list(batch.ids.split(batch.lengths)), batch_first=True)
    return ids, length_mask(torch.tensor(batch.lengths, device=ids.device), ids.shape[1])


@torch.no_grad()
@gathered
def choose_attention(model: PreTrainedModel, precisions: Sequence[str] = ()) -> str | None:
    """Let the model run on packed rows if that gives the results of one plain forward pass per sequence.

    Compares the hidden states of three short sequences, two with a common prefix, to 1e-4 of their size, in each of
    `precisions` (by default all that the device computes in). `attention.watched_masks` checks separately that a
    sliding window, which is longer, reaches the attention.

    Returns a line if the model runs without the faster attention of a GPU, or without packed rows. Raises ArtifactError
    if the backbone cannot be called with token ids alone.
    """
    if is_seq2seq(model):
        return f"{type(model).__name__}: an encoder-decoder; it runs on padded batches (slower, as exact)"
    default = model.config._attn_implementation
    device, vocab = device_of(model), vocabulary_rows(model)
    rows = [[(7 * i + 3) % vocab for i in range(n)] for n in (9, 5)]
    sequences = [*rows, rows[0][:6] + [(5 * i + 2) % vocab for i in range(3)]]
    if (held := held_precision(model)) is not None:
        precisions = [held]  # float32 passes cannot use such weights
    elif not precisions:
        precisions = ["float32", "bfloat16"] if compute_dtype(device, "auto") == torch.bfloat16 else ["float32"]
    plain = {precision: _plain_hidden(model, sequences, precision) for precision in precisions}
    reasons = []
    for name in (attention.ROW, attention.EACH) if device.type == "cuda" else (attention.EACH,):
        model.set_attn_implementation(default)
        if not (why_not := _why_not_packed(model, name, sequences, plain)):
            manner = "with one attention call per sequence"
            break
        reasons.append(why_not)
    else:
        model.set_attn_implementation(default)
        manner = "on padded batches"
    return f"{type(model).__name__}: {reasons[0]}; it runs {manner} (slower, as exact)" if reasons else None


def _plain_hidden(model: PreTrainedModel, sequences: list[list[int]], precision: str) -> Tensor:
    """Hidden states of one plain forward pass per sequence, end to end: [sum of lengths, H]."""
    device = device_of(model)
    try:
        with autocast(device, precision):
            outputs = [model.base_model(input_ids=torch.tensor([s], device=device)) for s in sequences]
        return torch.cat([output.last_hidden_state[0] for output in outputs])
    except (AttributeError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{type(model).__name__}: its backbone cannot be called with token ids alone "
            f"({type(error).__name__}: {str(error)[:100]}). Use a model of another family"
        ) from None


def _why_not_packed(model: PreTrainedModel, name: str, sequences: list[list[int]], plain: dict[str, Tensor]) -> str:
    """Why the model cannot run on packed rows with this attention, which it keeps; "" if it can."""
    try:
        model.set_attn_implementation(name)
        if not is_packed(model):
            raise ValueError("transformers keeps this model's own attention")
        batch = pack(sequences, device_of(model), groups=[0, 1, 0], shortest_prefix=1)
        everywhere = batch.indices([0] * len(sequences), batch.lengths)
        for precision, expected in plain.items():
            with autocast(batch.ids.device, precision):
                hidden = hidden_at(model, batch, everywhere)
            gap = ((hidden - expected).abs().max() / expected.abs().max().clamp_min(1.0)).item()
            if not gap <= (TOLERANCE if precision == "float32" else BFLOAT16_TOLERANCE):
                return f"packed rows with a shared prompt differ from a plain forward by {gap:.1e} in {precision}"
        with attention.watched_masks() as losses, autocast(batch.ids.device, next(iter(plain))):
            hidden_at(model, batch, everywhere)
        return losses[0] if losses else ""
    except (TypeError, ValueError, RuntimeError, AssertionError, AttributeError, KeyError, ImportError) as error:
        if is_out_of_memory(error):
            raise
        return "its attention does not take packed rows"


def vocabulary_rows(model: PreTrainedModel) -> int:
    """The number of token ids that the model has an embedding for."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def tolerance_of(model: PreTrainedModel) -> float:
    """The largest difference that counts as rounding in a float32 pass, whose weights may be held in 16 bits."""
    return TOLERANCE if held_precision(model) is None else BFLOAT16_TOLERANCE


def compute_dtype(device: torch.device, precision: str) -> torch.dtype:
    """The number format of products in forward passes. `auto` is bfloat16 on a GPU with instructions for it.

    >>> compute_dtype(torch.device("cpu"), "auto"), compute_dtype(torch.device("cpu"), "bfloat16")
    (torch.float32, torch.bfloat16)
    """
    if precision == "auto":
        is_fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if is_fast else torch.float32
    return PRECISIONS[precision]


def held_precision(model: PreTrainedModel) -> str | None:
    """The 16-bit format in which weights are held, or quantized layers or sharded blocks compute; None for float32."""
    if (precision := vars(model).get("block_precision")) is not None:
        return str(precision)
    dtypes = {p.dtype for p in model.parameters()} | {vars(m).get("compute_dtype") for m in model.modules()}
    return next((name for name, dtype in PRECISIONS.items() if dtype in dtypes and dtype != torch.float32), None)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The autocast context of every forward pass."""
    dtype = compute_dtype(device, precision)
    enabled = dtype != torch.float32
    return torch.autocast(device.type, dtype if enabled else torch.bfloat16, enabled=enabled)


def check_positions(model: PreTrainedModel, longest: int, key: str) -> None:
    """Raise ConfigError if prompt and response together can be longer than the model's positions."""
    why = " before its rotary embedding (longrope) changes with the longest sequence of a batch"
    check_length(longest, positions(model), key, why if _before_stretching(model) else "")


def positions(model: PreTrainedModel) -> int:
    """The longest sequence that a model supports, in tokens; sys.maxsize if its config does not say.

    With `longrope` rotary embeddings (Phi-3's 128k) this is the length before stretching: if one sequence of a batch is
    longer, transformers rotates all of them differently.
    """
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    return min([most, *_before_stretching(model)])


def _before_stretching(model: PreTrainedModel) -> list[int]:
    """The length before stretching of each `longrope` in the config, which may have one for each type of layer."""
    ropes = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    each = [ropes] if "rope_type" in ropes else [rope for rope in ropes.values() if isinstance(rope, dict)]
    return [rope["original_max_position_embeddings"] for rope in each if rope.get("rope_type") == "longrope"]


def check_length(longest: int, limit: int, key: str, why: str = "") -> None:
    """Raise ConfigError if sequences can be longer than `limit`, the model's positions."""
    if longest > limit:
        raise ConfigError(
            f"{key}: prompt and response together can have {longest} tokens, and the model has {limit} positions{why}. "
            f"Lower {key} or the longest prompt"
        )


def longest_input(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Maximum tokens of a classifier's input. RoBERTa has 514 positions and uses 512 of them."""
    return min(positions(model), tokenizer.model_max_length or sys.maxsize)
