"""A row as its file has it, before any format is applied, and the faults that all file types share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

BLOCK = 2**20
"""Bytes per read."""
MAX_ROW = 2**26
"""Longest line, or item of a JSON list, in bytes or characters. An endless line, or a few kilobytes of gzip that unpack
into gigabytes, must not fill the memory."""
MAX_DEPTH = 200
"""Deepest nesting of a JSON row. Deeper ones would overflow the stack of code that copies or writes the row."""

DECODER = json.JSONDecoder()
_CONTAINERS = {dict, list}


@dataclass(frozen=True)
class Row:
    """A row's columns and its place for messages: `file:line`, `file row n` or `dataset[split] row n`."""

    values: dict[str, Any]
    where: str


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be read, and why on one line: `f"{where}: {reason}"` is the complete message."""

    where: str
    reason: str


class Fault(Exception):
    """What is wrong with one row."""


def json_fault(error: Exception) -> str:
    """What a JSON decoder's exception says, in our words."""
    if isinstance(error, json.JSONDecodeError):
        return f"{json_message(error)} at column {error.colno}"
    # The decoder's only other failures, without its advice to programmers.
    return "nested too deeply" if isinstance(error, RecursionError) else "a number of more than 4300 digits"


def json_message(error: json.JSONDecodeError) -> str:
    """The decoder's message without the words that lead to the position."""
    return error.msg.rstrip(": ").removesuffix(" at")


def object_fault(value: Any) -> str:
    """Why a JSON value cannot be a row."""
    if isinstance(value, dict):
        return f"nested more than {MAX_DEPTH} deep, the limit for a row"
    names = {list: "list", str: "string", bool: "boolean", type(None): "null"}
    return f"a JSON {names.get(type(value), 'number')}, every row must be an object with named columns"


def is_deep(value: dict[str, Any], text: str, start: int, end: int) -> bool:
    """Is an object that was read from `text[start:end]` nested deeper than MAX_DEPTH?

    Two quick tests answer for most rows: no nested value, or too few opening brackets.
    """
    if _CONTAINERS.isdisjoint(map(type, value.values())):
        return False
    if text.count("{", start, end) + text.count("[", start, end) <= MAX_DEPTH:
        return False
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        children = [child for item in level for child in (item.values() if type(item) is dict else item)]
        level = [child for child in children if type(child) in _CONTAINERS]
    return bool(level)
