"""How messages quote keys and values: on one line and cut to a length; and the option that a value is most like."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

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
