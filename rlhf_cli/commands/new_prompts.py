"""Extract prompts from a model's answers, and recognise near-duplicates."""

from __future__ import annotations

import math
import re

from rlhf_cli.data.words import words

ROUNDING = 1e-9
LIST_MARK = re.compile(r"(?:\d+\s*[.):]|[-*•])(?:\s+|$)")


def prompts_in(answer: str, *, ended: bool = True) -> list[str]:
    """The prompts in an answer, one per line. If any line has a list mark, only lines with one count.

    The last line of an answer that was cut is incomplete and is dropped.

    >>> prompts_in("Sure!\\n1. Write a poem.\\n2) Name two rivers.")
    ['Write a poem.', 'Name two rivers.']
    >>> prompts_in("- Name a fish\\n- Name a bi", ended=False)
    ['Name a fish']
    """
    lines = [line.strip() for line in answer.splitlines()]
    if not ended:
        lines = lines[:-1]
    marked = [LIST_MARK.sub("", line, count=1).strip() for line in lines if LIST_MARK.match(line)]
    return [line for line in marked or lines if line]


class KnownPrompts:
    """A set of prompts that finds near-duplicates.

    A and B are near-duplicates if the Jaccard similarity of their sets of `words`, |A and B| / |A or B|, is
    at least `threshold`. Order and repetition do not count.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold
        self._known: list[tuple[frozenset[str], str]] = []
        self._by_word: dict[str, list[int]] = {}

    def add(self, text: str) -> None:
        """Compare later prompts with this one too."""
        word_set = words(text)
        for word in self._index_words(word_set):
            self._by_word.setdefault(word, []).append(len(self._known))
        self._known.append((word_set, text))

    def similar(self, text: str) -> str | None:
        """The first known prompt that `text` nearly duplicates, or None."""
        word_set = words(text)
        for n in sorted({n for word in self._index_words(word_set) for n in self._by_word.get(word, ())}):
            other, known = self._known[n]
            if len(word_set & other) >= self.threshold * len(word_set | other) - ROUNDING:
                return known
        return None

    def _index_words(self, word_set: frozenset[str]) -> list[str]:
        """The words under which a set is indexed. Two similar sets share at least one of them (Bayardo et al. 2007).

        Of n words a similar set lacks at most n - ceil(threshold * n). With both sets in the same order, a common
        word is therefore among the first n - ceil(threshold * n) + 1 of each. Long words come first: they are rare.
        """
        length = len(word_set) - math.ceil(self.threshold * len(word_set) - ROUNDING) + 1
        return sorted(word_set, key=lambda word: (-len(word), word))[:length]
