"""Weights that a stage does not train: `freeze` names them by parts of their names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from transformers import PreTrainedModel

from rlhf_cli.errors import ConfigError
from rlhf_cli.models.heads import scalar_heads

EMBEDDINGS, LAYERS = "embeddings", "layers"
"""Names that every family has: the input embeddings, and the stack of layers."""
RANGE = re.compile(r"(\d{1,5})-(\d{1,5})")
NUM_NAMES = 12
"""Names that a message lists at most."""

Weights = list[tuple[str, torch.nn.Parameter]]
"""Weights by name. A weight may have several names."""


def freeze(model: PreTrainedModel, patterns: Sequence[str], key: str) -> str | None:
    """Exclude the weights that match a pattern from training; returns a line for the user, or None without patterns.

    A pattern consists of parts separated by dots. It matches a weight whose name contains these parts one after
    another. `*` in a part matches any text, and a part such as `0-3` the numbers 0 to 3. `embeddings` names the input
    embeddings and `layers` the stack of layers, whatever the family calls them (`wte` and `h` in GPT-2). An output head
    that shares a frozen weight is frozen too. The scalar head of a classifier is always trained.

    Raises ConfigError, naming the config `key`, for a pattern or an end of a range that matches nothing, and if no
    weight is left to train.
    """
    if not patterns:
        return None
    weights = _weights(model)
    for pattern in patterns:
        for form in (RANGE.sub(r"\1", pattern), RANGE.sub(r"\2", pattern), pattern):
            if not any(matches(name, form) for name, _ in weights):
                text = f"{form!r} matches no weight of this {type(model).__name__}"
                raise ConfigError(f"{key}: {text}{_advice(form, [name for name, _ in weights])}")
    for name, weight in weights:
        if any(matches(name, pattern) for pattern in patterns):
            weight.requires_grad_(False)
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if trained == 0:
        raise ConfigError(f"{key}: matches all {total:,} weights, so nothing would be trained. Remove a pattern")
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings().weight
    shared = head is not None and head.weight is embeddings and not embeddings.requires_grad
    also = " (the output head shares the embeddings, so it is frozen too)" if shared else ""
    return f"{key}: {trained:,} of {total:,} weights are trained{also}"


def matches(name: str, pattern: str) -> bool:
    """Whether a name contains the parts of the pattern one after another.

    >>> name = "model.layers.2.mlp.up_proj.weight"
    >>> [matches(name, pattern) for pattern in ("layers.0-2", "layers.3", "mlp.*", "layer", "*_proj", "0-9")]
    [True, False, True, False, True, True]
    """
    parts, wanted = name.split("."), pattern.split(".")
    return any(
        all(map(_is_part, parts[start : start + len(wanted)], wanted)) for start in range(len(parts) - len(wanted) + 1)
    )


def _is_part(part: str, wanted: str) -> bool:
    ends = RANGE.fullmatch(wanted)
    if ends is None:
        return fnmatchcase(part, wanted)
    return part.isdecimal() and int(ends[1]) <= int(part) <= int(ends[2])


def _weights(model: PreTrainedModel) -> Weights:
    """Every weight outside the scalar heads under all of its names, `embeddings` and `layers.<number>...` included."""
    heads = {id(weight) for head in scalar_heads(model).values() for weight in head.parameters()}
    named = [(name, p) for name, p in model.named_parameters(remove_duplicate=False) if id(p) not in heads]
    stacks = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == model.config.get_text_config().num_hidden_layers
    ]
    if stacks:
        prefix = f"{stacks[0]}."
        named += [(f"{LAYERS}.{name.removeprefix(prefix)}", p) for name, p in named if name.startswith(prefix)]
    return [*((EMBEDDINGS, p) for p in model.get_input_embeddings().parameters()), *named]


def _advice(form: str, names: Sequence[str]) -> str:
    """The end of a message: the pattern with each part replaced by the most similar one, or the names that exist."""
    numbers = [int(number) for number in re.findall(rf"^{LAYERS}\.(\d+)", "\n".join(names), re.MULTILINE)]
    if re.fullmatch(rf"{LAYERS}\.\d+", form) and numbers:
        return f"; its layers are 0 to {max(numbers)}"
    parts = list(dict.fromkeys(part for name in names for part in name.split(".") if not part.isdecimal()))
    close = ".".join(
        part if part in parts else next(iter(difflib.get_close_matches(part, parts, 1)), part)
        for part in form.split(".")
    )
    if any(matches(name, close) for name in names):
        return f"; did you mean {close}?"
    return f"; parts of its names are {', '.join(parts[:NUM_NAMES])}{', ...' if len(parts) > NUM_NAMES else ''}"
