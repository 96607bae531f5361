"""Printing text that may come from a file or a server: control characters appear as their escapes.

A prompt or a manifest can contain sequences that clear a terminal, change its title or hide what follows. So print by
`say` or `rlhf_cli.report.progress`; ruff refuses `print` in the package.
"""

from __future__ import annotations

import os
import sys
import textwrap
import unicodedata
from typing import TextIO


def printable(text: str, *, keep: str = "") -> str:
    """Replace control characters, and characters that cannot be encoded, by their escapes, except those in `keep`.

    >>> print(printable("a\\x1b[2J\\n"), printable("a\\tb", keep="\\t") == "a\\tb")
    a\\x1b[2J\\n True
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in text
    )


def is_utf8(text: str) -> bool:
    """Whether a text can be written as UTF-8: it has no half of a surrogate pair, which "\\ud800" in JSON gives."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def say(text: object, *, error: bool = False, flush: bool = False, end: str = "\n") -> None:
    """Print a text of one or more lines, and `end` behind it, to stdout or, with `error`, to stderr.

    On a terminal a line on stderr that is too long is broken between words. Elsewhere it stays one line.
    """
    shown, file = printable(str(text), keep="\n"), sys.stderr if error else sys.stdout
    width = _columns(file) if error else None
    if width is not None:
        shown = "\n".join(_broken(line, width) if len(line) > width else line for line in shown.split("\n"))
    print(shown, file=file, flush=flush, end=end)


def _columns(file: TextIO) -> int | None:
    """The columns of the terminal behind a file such as stderr; None if the file is no terminal."""
    try:
        return (os.get_terminal_size(file.fileno()).columns or None) if file.isatty() else None
    except (OSError, ValueError):
        return None


def _broken(line: str, width: int) -> str:
    """A line in parts that are indented as it is. A longer word, such as a path, stays whole."""
    indent = line[: len(line) - len(line.lstrip(" "))]
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def size(count: float) -> str:
    """Bytes in decimal units.

    >>> size(999), size(20_600_000)
    ('999 B', '20.6 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
