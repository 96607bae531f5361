"""What all decoders share: their interface, the choice among them, the check against the model's own forward."""

from __future__ import annotations

import functools
import math
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, assert_never

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_cli.config.ppo import DecoderName
from rlhf_cli.errors import ConfigError
from rlhf_cli.models.forward import autocast, held_precision, logits_at, positions, vocabulary_rows
from rlhf_cli.models.seq2seq import is_seq2seq, with_prompts
from rlhf_cli.packing import pack, response_positions
from rlhf_cli.processes.sharding import device_of, is_sharded, join
from rlhf_cli.processes.threads import is_out_of_memory

T = TypeVar("T")
LEAVES_BELOW = 0.75
"""Finished rows leave once at most this share of the rows is unfinished."""


class UnsupportedError(Exception):
    """Why a fast decoder does not support this model, or this text length."""


class Decoder(ABC):
    """Computes next-token logits of live rows: prompts with the tokens that were drawn for them."""

    admits_beside_others = False
    """Whether new rows can enter while others are unfinished."""

    @abstractmethod
    def admit(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Add a row for each prompt behind the live rows; return the logits of their first tokens [prompts, V]."""

    @abstractmethod
    def step(self, ids: Tensor) -> Tensor:
        """Append one token to each live row, ids [B]; return the logits of the next tokens [B, V]."""

    @abstractmethod
    def keep(self, rows: Tensor) -> None:
        """Drop all live rows except those with these indices, and put those in this order."""

    def leave(self, rows: int, unfinished: int) -> bool:
        """Whether its finished rows should leave now. That copies the cache; to stay wastes a row in every step."""
        return unfinished <= LEAVES_BELOW * rows

    def apart(self, rows: int) -> Sequence[Callable[[], Decoder]]:  # noqa: ARG002
        """Makers of decoders of these weights for `rows` rows, in a thread each; one if that is slower or not exact."""
        return [lambda: self]


def cast_format(model: PreTrainedModel) -> torch.dtype | None:
    """The format to which autocast casts what the model's linear layers multiply; None if it is off."""
    device = device_of(model).type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def once_per_model(check: Callable[[PreTrainedModel], T]) -> Callable[[PreTrainedModel], T]:
    """Keep the result of a check for each model and number format of autocast.

    It runs again once modules have been replaced, as by adapters.
    """
    results: weakref.WeakKeyDictionary[PreTrainedModel, dict[Any, T]] = weakref.WeakKeyDictionary()

    @functools.wraps(check)
    def kept(model: PreTrainedModel) -> T:
        key = cast_format(model), *(type(module) for module in model.modules())
        of_model = results.setdefault(model, {})
        if key not in of_model:
            of_model[key] = check(model)
        return of_model[key]

    return kept


def gap_to_forward(
    model: PreTrainedModel, new_decoder: Callable[[int], Decoder], *, lengths: Sequence[int] = (9, 5, 5)
) -> float:
    """The largest difference to the logits of one pass per text, relative to the largest or to 1; a row leaves on the
    way.

    0 if the model's own logits are NaN or infinite: then no decoder is at fault.
    """
    steps, device = 4, device_of(model)
    lengths = [min(n, positions(model) - steps) for n in lengths]
    texts = [[((7 + row) * i + 3) % vocabulary_rows(model) for i in range(n + steps)] for row, n in enumerate(lengths)]
    live, differences, decoder = [0, 1, 2], list[Tensor](), new_decoder(max(map(len, texts)))  # it may refuse the model
    alone = [_own_logits(model, text, n).float() for text, n in zip(texts, lengths, strict=True)]
    largest = max(logits.abs().max().item() for logits in alone)
    logits = decoder.admit([text[:n] for text, n in zip(texts, lengths, strict=True)])
    for step in range(steps):
        differences += [(logits[i].float() - alone[row][step]).abs().max() for i, row in enumerate(live)]
        if step == 1:
            live = [0, 2]
            decoder.keep(torch.tensor(live, device=device))
        logits = decoder.step(torch.tensor([texts[row][lengths[row] + step] for row in live], device=device))
    return torch.stack(differences).max().item() / max(largest, 1.0) if math.isfinite(largest) else 0.0


def exact_gap(model: PreTrainedModel, new_decoder: Callable[[int], Decoder], **options: Any) -> float:
    """`gap_to_forward` in float32, or in the 16 bits in which the model is held."""
    with autocast(device_of(model), held_precision(model) or "float32"):
        return gap_to_forward(model, new_decoder, **options)


def _own_logits(model: PreTrainedModel, text: list[int], prompt_length: int) -> Tensor:
    """The logits that predict each token behind a prompt, by one forward pass: [n, V]."""
    device = device_of(model)
    if is_seq2seq(model):
        batch = with_prompts(pack([text], device), [prompt_length])
        return logits_at(model, batch, response_positions(batch, [prompt_length]))
    logits: Tensor = model(input_ids=torch.tensor([text], device=device), use_cache=False).logits
    return logits[0, prompt_length - 1 :]


OWN_FORWARD: tuple[DecoderName, ...] = ("plain", "sharded")
"""The names of the decoder that runs the model's own forward."""


def choose_decoder(model: PreTrainedModel, longest: int, name: DecoderName = "auto") -> Decoder:
    """The decoder for rows of at most `longest` tokens: with ``auto`` the fast one of the device, if that is possible.

    Raises ConfigError if a decoder that was asked for by name does not support the model.
    """
    try:
        return _decoder(model, longest, name)
    except UnsupportedError as reason:
        if name == "auto":
            return _decoder(model, longest, "plain")
        raise ConfigError(
            f"rollout.decoder: {name} cannot sample from this {type(model).__name__}: {reason}. Set it to auto or plain"
        ) from None


def decoder_notes(model: PreTrainedModel, longest: int, name: DecoderName = "auto") -> list[str]:
    """Lines for the user if sampling is slower than it could be. Raises ConfigError as `choose_decoder` does."""
    notes = []
    if name == "auto":
        try:
            _decoder(model, longest, name)
        except UnsupportedError as reason:
            notes.append(f"{type(model).__name__}: {reason}; sampling uses the model's own forward (slower, as exact)")
    elif name not in OWN_FORWARD:
        choose_decoder(model, longest, name)
    if (notes or name in OWN_FORWARD) and not is_seq2seq(model):
        from rlhf_cli.decoders.plain import takes_padding

        if not takes_padding(model):
            what = "padding or a cache changes its logits, so the whole text is read again for every token"
            notes.append(f"{type(model).__name__}: {what} (slower, as exact)")
    return notes


def _decoder(model: PreTrainedModel, longest: int, name: DecoderName) -> Decoder:
    from rlhf_cli.decoders import graphed, paged, plain

    if is_sharded(model) and name not in OWN_FORWARD:
        raise UnsupportedError("its weights are sharded among the processes")
    if is_seq2seq(model):
        if name not in ("auto", *OWN_FORWARD):
            raise UnsupportedError("it is an encoder-decoder")
        plain.require_own_logits(model)
        return plain.Seq2SeqDecoder(model)
    match name:
        case "auto" if device_of(model).type == "cuda":
            return graphed.graphed_decoder(model, longest)
        case "auto" | "paged":
            return paged.paged_decoder(model, longest)
        case "plain" | "sharded":
            return plain.PlainDecoder(model)
        case _:
            assert_never(name)


@torch.no_grad()
def join_sampling(model: PreTrainedModel) -> None:
    """Make the passes of a sharded model that other processes need until each has sampled its last token.

    All processes must call this after their own sampling.
    """
    if is_sharded(model):
        from rlhf_cli.decoders.plain import takes_padding

        takes_padding(model)  # a collective operation at the first use
        ids = torch.tensor([[0, 0]], device=device_of(model))
        join(model, lambda: model(input_ids=ids, use_cache=False, logits_to_keep=1))


# ------------------------------------------------------------------ functions of tensors that torch runs without Python
#
# A decoding step is hundreds of operations of a few microseconds, between which threads wait for Python. So a function
# is recorded once as a graph, which runs as one call. torch.jit is deprecated: where it is missing or fails, and if the
# graph gives other bytes, callers use the function itself.


_warnings_are_off = threading.Lock()


def recorded(function: Callable[..., Any], *examples: tuple[Any, ...]) -> Callable[..., Any] | None:
    """`function` as a graph; None if it cannot be recorded, or gives other bytes for one of the examples.

    Arguments are tensors, and lists and tuples of them. What does not come from a tensor is a constant of the graph, so
    give examples that differ in all that may vary.
    """
    # torch keeps the function that it has traced. This one lets go of the weights that `function` was made for.
    held = [function]

    def named(*inputs: Any) -> Any:
        return held[0](*inputs)

    try:
        with _warnings_are_off, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated, and names what becomes a constant
            graph = torch.jit.trace(named, examples[0], check_trace=False)
        held.clear()

        def run(*inputs: Any) -> Any:
            # Optimizing the graph takes longer than the calls of a rollout.
            with torch.jit.optimized_execution(False):
                return graph(*inputs)

        same = all(_same(run(*example), function(*example)) for example in examples)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        return None
    return run if same else None


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else all(map(_same, a, b))
