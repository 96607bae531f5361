"""Texts as the token sequences that a reward model reads, cut to the length that it accepts and was trained on."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.data.encode import Side, cut, encode_for_classifier
from rlhf_cli.data.special_tokens import cut_behind_eos, special_tokens_of
from rlhf_cli.models.forward import longest_input
from rlhf_cli.models.heads import reads_last_token


def written(template: str, prompt: str, response: str) -> str:
    """The template with `{prompt}` and `{response}` filled in; braces within the texts are left alone.

    >>> written("Q: {prompt} A: {response}", "a {response}?", "b")
    'Q: a {response}? A: b'
    """
    texts = {"{prompt}": prompt, "{response}": response}
    return re.sub(r"\{prompt\}|\{response\}", lambda match: texts[match.group()], template)


def closed(response_ids: list[int], ended: bool, eos: int | None) -> list[int]:
    """A response with EOS behind it if another stop token or a stop string ended it: scores are read at EOS.

    >>> closed([5, 9], True, eos=2), closed([5, 2], True, eos=2), closed([5, 9], False, eos=2)
    ([5, 9, 2], [5, 2], [5, 9])
    """
    return [*response_ids, eos] if ended and eos is not None and response_ids[-1:] != [eos] else response_ids


def trained_limit(model: PreTrainedModel) -> tuple[int, Side]:
    """(longest sequence, side that is cut) from the model's training; no limit if training did not cut.

    The RM stage stores both in the model's config as `rlhf_max_length` and `rlhf_truncation`. With truncation "drop"
    training cut no sequence, so scoring cuts none.
    """
    longest, side = (getattr(model.config, figure, None) for figure in ("rlhf_max_length", "rlhf_truncation"))
    if isinstance(longest, int) and longest > 0 and side in ("left", "right"):
        return longest, "left" if side == "left" else "right"
    return sys.maxsize, "left"


def length_limit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, Side]:
    """`trained_limit`, or the longest input of the model if that is shorter."""
    longest, side = trained_limit(model)
    return min(longest, longest_input(model, tokenizer)), side


def cut_all(sequences: Sequence[list[int]], longest: int, side: Side, bos: int | None) -> tuple[list[list[int]], int]:
    """The sequences cut to at most `longest` tokens, and how many were cut.

    A leading `bos` token is kept, as in training.

    >>> cut_all([[1, 2, 3, 4], [1, 2]], 3, "left", None)
    ([[2, 3, 4], [1, 2]], 1)
    """
    return [cut(ids, longest, side, bos) for ids in sequences], sum(len(ids) > longest for ids in sequences)


def encode_whole(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    ended: Sequence[bool],
    *,
    is_chat: bool = False,
) -> tuple[list[list[int]], int]:
    """(ids of each text, number of texts cut), within the lengths that the model accepts and was trained on.

    A causal model gets EOS after a response that ended. An encoder gets its tokenizer's special tokens. A text from
    a chat template already contains them. A model of our RM stage reads it up to EOS, as in its training.
    """
    if not texts:
        return [], 0
    longest, side = length_limit(model, tokenizer)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if is_chat:
        encoded = special_tokens_of(tokenizer).encode(texts, add_special_tokens=False)
        if eos is not None and reads_last_token(model) and hasattr(model.config, "rlhf_max_length"):
            encoded = [cut_behind_eos(ids, int(eos)) for ids in encoded]
        return cut_all(encoded, longest, side, bos)
    sequences = encode_for_classifier(tokenizer, texts, None)
    if not reads_last_token(model) or eos is None:
        # The tokenizer cuts, so that it keeps its special tokens.
        long = [i for i, ids in enumerate(sequences) if len(ids) > longest]
        shorter = encode_for_classifier(tokenizer, [texts[i] for i in long], longest, side)
        for i, ids in zip(long, shorter, strict=True):
            sequences[i] = ids
        return sequences, len(long)
    whole = []
    for ids, end in zip(sequences, ended, strict=True):
        # A prompt in a chat template has its BOS, and the tokenizer adds another.
        kept = cut_behind_eos(ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids, int(eos))
        bare = kept[:-1] if kept[-1:] == [int(eos)] else kept
        whole.append([*bare, int(eos)] if end or not bare else bare)
    return cut_all(whole, longest, side, bos)
