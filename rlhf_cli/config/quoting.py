"""How messages quote keys and values: on one line, cut to a length, printable in any terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

Keys = tuple[str | int, ...]
"""The path to a value: ("rewards", 0, "weight")."""

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
