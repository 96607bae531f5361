"""Printing text that may come from a file or a server, and could clear a terminal or hide what follows.

Control characters appear as their escapes. So print by `say` or `rlhf_cli.report.progress`; ruff refuses `print`.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any


def printable(text: str, *, keep: str = "") -> str:
    """Replace characters that cannot be printed or encoded by their escapes, except those in `keep`.

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
    with contextlib.suppress(OSError, ValueError):  # it has no descriptor
        if error and file.isatty() and (width := os.get_terminal_size(file.fileno()).columns):
            # A word that is longer, such as a path, stays whole.
            wrap = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
            lines = shown.split("\n")
            for number, line in enumerate(lines):
                wrap.subsequent_indent = line[: len(line) - len(line.lstrip(" "))]
                lines[number] = wrap.fill(line)
            shown = "\n".join(lines)
    print(shown, file=file, flush=flush, end=end)


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


# ----------------------------------------------------------------------------------- how messages quote keys and values


Keys = tuple[str | int, ...]
"""The path to a value: ("rewards", 0, "weight")."""

VALUE_SYNONYMS = {"gpu": "cuda", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Values from other libraries. A value counts only where its translation is a valid one."""
MAX_SHOWN = 160
"""Maximum characters of any one thing in a message."""


def found(value: Any) -> str:
    """Describe a value in the words of a YAML file: ``the text 'ten'``, ``the whole number 3``, ``a list``."""
    if isinstance(value, str):
        return f"the text {shown(value)}"
    if isinstance(value, Mapping | list):
        name = "mapping" if isinstance(value, Mapping) else "list"
        return f"a {name}" if value else f"an empty {name}"
    names = {bool: "the boolean", int: "the whole number", float: "the number"}
    return f"{names[type(value)]} {plain(value)}" if type(value) in names else "nothing (null)"


def plain(value: Any) -> str:
    """Text without quotes; other values as YAML writes them."""
    return value if isinstance(value, str) else json.dumps(value)


def shown(text: str) -> str:
    """Text in quotes on one line, cut after 57 characters."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def dotted(keys: Keys) -> str:
    """``rewards.0.weight``; a key that is not a plain word is quoted."""
    parts = (str(key) if re.fullmatch(r"[\w<-]{1,60}", str(key)) else shown(str(key)) for key in keys)
    return clipped(".".join(parts))


def clipped(text: str) -> str:
    """Keep the beginning and the end of a text that is too long for a message."""
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN // 2]} ... {text[-MAX_SHOWN // 2 :]}"


def did_you_mean(value: Any, options: Iterable[Any]) -> str:
    """The option most like ``value``, as the end of a message; ignores letter case."""
    if not isinstance(value, str):
        return ""
    by_folded = {option.lower(): option for option in options if isinstance(option, str)}
    synonym = VALUE_SYNONYMS.get(value.lower())
    if synonym in by_folded:
        return f"; say {synonym}"
    longer = [option for option in by_folded if len(value) >= 4 and option.startswith(value.lower())]
    close = sorted(longer, key=len) or difflib.get_close_matches(value.lower()[:80], by_folded, n=1, cutoff=0.65)
    return f"; did you mean {by_folded[close[0]]}?" if close else ""
