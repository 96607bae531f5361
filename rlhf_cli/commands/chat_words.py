"""A reply of `rlhf chat` on the screen while it grows."""

from __future__ import annotations

import re

from rich.cells import cell_len

from rlhf_cli.printing import printable, say

LONGEST_WORD = 20
"""Columns after which a word is printed before its end: some languages write without spaces."""


class Words:
    """Prints a growing text word by word, so that no word is broken at the right edge of the terminal."""

    def __init__(self, width: int | None):
        """width: columns of the terminal; None does not break lines."""
        self.width = width
        self.taken = 0
        self.word = ""
        self.column = 0

    def grow(self, text: str) -> None:
        """The whole text so far."""
        pieces = re.findall(r"\S+|\s", self.word + text[self.taken :])
        self.taken = max(self.taken, len(text))
        is_open = pieces and not pieces[-1].isspace() and cell_len(pieces[-1]) < LONGEST_WORD
        self.word = pieces.pop() if is_open else ""
        for piece in pieces:
            self._put(piece)

    def end(self) -> None:
        """The text is complete."""
        if self.word:
            self._put(self.word)
        if self.taken:
            say("", flush=True)

    def _put(self, piece: str) -> None:
        if piece == "\n":
            self.column = 0
            say("")
            return
        piece = piece.replace("\t", "    ")
        cells = cell_len(printable(piece))
        if self.width is not None and self.column and self.column + cells > self.width:
            say("")
            self.column = 0
            if piece.isspace():
                return
        say(piece, end="", flush=True)
        self.column += cells
