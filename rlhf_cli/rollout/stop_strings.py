"""Stop strings: texts that end a response, searched in its decoded tokens."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

MARGIN = 8
"""Characters at the start of a decoded tail that may differ from the same characters of the full text: the tokenizer
may strip or add a space there, or the tail may begin inside a multi-byte character."""


def stop_string_start(tokenizer: PreTrainedTokenizerBase, ids: list[int], stop_strings: Sequence[str]) -> int | None:
    """Return where the stop string that the last token completes begins in the decoded ids, or None.

    If the last token completes several, the one that begins first counts. A stop string that was complete before the
    last token does not count. The text of the last token is whatever differs from the text decoded without it, so a
    token that adds only the last byte of a character counts too.

    Only a tail of the ids is decoded. The tail doubles until it shows enough text before the last token, because one
    token can decode to nothing or to 20 characters.
    """
    longest = max(map(len, stop_strings))
    width = longest + MARGIN
    while width < len(ids):
        text, new = _text_and_new(tokenizer, ids[-width:])
        # A tail that begins inside a character decodes to leading U+FFFD. They are not reliable text.
        if new - (len(text) - len(text.lstrip("\ufffd"))) >= longest + MARGIN:
            if _first_ending_after(text, new, stop_strings) is None:
                return None
            break
        width *= 2
    text, new = _text_and_new(tokenizer, ids)
    return _first_ending_after(text, new, stop_strings)


def _text_and_new(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> tuple[str, int]:
    """The decoded ids, and the index of the first character that the last token added."""
    before, text = (str(tokenizer.decode(some, skip_special_tokens=True)) for some in (ids[:-1], ids))
    differs = (i for i, (old, now) in enumerate(zip(before, text, strict=False)) if old != now)
    return text, next(differs, min(len(before), len(text)))


def _first_ending_after(text: str, new: int, stop_strings: Sequence[str]) -> int | None:
    """The smallest start among the stop strings that end after character `new`."""
    starts = [text.find(string, max(0, new - len(string) + 1)) for string in stop_strings]
    return min((start for start in starts if start >= 0), default=None)
