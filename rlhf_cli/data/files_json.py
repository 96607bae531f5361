"""Rows of JSON: what is wrong with one, and the rows of a list, read through a window, so that the file need not fit
into memory.

Not ijson: it replaces lone surrogates by "?", refuses NaN, and numbers beyond 64 bits as floats; one byte that is not
UTF-8 costs it all later rows; its errors have no line; one item may fill the memory.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, BinaryIO

from rlhf_cli.data.records import BadRow, Row
from rlhf_cli.errors import DataError
from rlhf_cli.printing import is_utf8

BLOCK = 2**20
"""Bytes per read."""
MAX_ROW = 2**26
"""Longest line, or item of a JSON list, in bytes or characters. An endless line, or a few kilobytes of gzip that unpack
into gigabytes, must not fill the memory."""
MAX_DEPTH = 200
"""Deepest nesting of a JSON row. Deeper ones would overflow the stack of code that copies or writes the row."""

DECODER = json.JSONDecoder()
_CONTAINERS = {dict, list}
_SPACE = re.compile(r"[ \t\n\r]*")


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


class _JsonText:
    """The text of a JSON file, with a window in memory: the part that was read but not yet consumed.

    Bytes that are not UTF-8 become lone surrogates (surrogateescape), so that only their own row is lost.
    """

    def __init__(self, file: BinaryIO):
        self._read = file.read
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self.window = ""
        self.at = 0
        self.lines = 0
        """Line ends before the window."""

    def grow(self) -> bool:
        """Drop the consumed part and read at least a block; False at the end of the file.

        The window doubles, so that the decoder restarts a long value only a few times.
        """
        self.lines += self.window.count("\n", 0, self.at)
        self.window, self.at = self.window[self.at :], 0
        block = self._read(max(BLOCK, len(self.window)))
        more = self._decode(block, final=not block)
        self.window += more
        return bool(block or more)  # at the end an incomplete character may still come out

    def line(self, at: int) -> int:
        """The line number of a position in the window."""
        return self.lines + self.window.count("\n", 0, at) + 1

    def next_sign(self) -> str:
        """The next character that is not white space, without consuming it; "" at the end."""
        while True:
            self.at = _SPACE.match(self.window, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.window):
                return self.window[self.at]
            if not self.grow():
                return ""

    def take_value(self) -> tuple[Any, int, int]:
        """Consume the next value; returns it with its start and end in the window. Raises Fault."""
        self.next_sign()
        while True:
            try:
                value, end = DECODER.raw_decode(self.window, self.at)
            except json.JSONDecodeError as error:
                self._grow_or_fail(error)
            except (ValueError, RecursionError) as error:
                raise Fault(f"not JSON ({json_fault(error)} in line {self.line(self.at)})") from None
            else:
                start = self.at
                if end > len(self.window) - 16 and not isinstance(value, dict):
                    if self.grow():
                        continue  # a number may continue, and so may `1.`
                    end, start = end - start, 0
                self.at = end
                return value, start, end

    def _grow_or_fail(self, error: json.JSONDecodeError) -> None:
        """Read on if the error may be due to the window's end, else raise Fault."""
        fault = f"{json_message(error)} in line {self.line(error.pos)}"
        at_end = error.msg.startswith("Unterminated") or not self.window[error.pos :].strip()
        # A literal or an escape that the window cuts in two fails a few characters before its end.
        if not at_end and error.pos < len(self.window) - 16:
            raise Fault(f"not JSON ({fault})") from None
        if len(self.window) - self.at > MAX_ROW:
            raise Fault(f"longer than {MAX_ROW >> 20} MiB, the limit for a row ({fault})") from None
        if not self.grow():
            found = "the file ends inside it" if at_end else "not JSON"
            raise Fault(f"{found} ({fault})") from None


def json_rows(name: str, file: io.BufferedReader) -> Iterator[Row | BadRow]:
    """The objects of a JSON list; raises DataError for a fault after which rows cannot be told apart."""
    text = _JsonText(file)
    number = 0
    sign = text.next_sign()
    if sign == "":
        return
    if sign != "[":
        raise DataError(f"{name}: {_not_a_list(text)}")
    text.at += 1
    if text.next_sign() == "]":
        text.at += 1
    else:
        while sign != "]":
            number += 1
            where = f"{name} row {number}"
            try:
                value, start, end = text.take_value()
            except Fault as fault:
                raise DataError(f"{where}: {fault}. Fix it: the rows after it cannot be separated from it") from None
            if type(value) is not dict or is_deep(value, text.window, start, end):
                yield BadRow(where, f"{object_fault(value)}. Fix or remove it")
            elif not is_utf8(text.window[start:end]):
                yield BadRow(where, "not UTF-8, all text must be. Convert the file, or fix or remove the row")
            else:
                yield Row(value, where)
            sign = text.next_sign()
            if sign not in (",", "]"):
                found = f"{sign!r} in line {text.line(text.at)}" if sign else "the end of the file"
                raise DataError(f"{where}: {found} follows, it must be a comma or the end of the list. Fix the file")
            text.at += 1
    if text.next_sign():
        raise DataError(f"{name}: text after the end of the list, line {text.line(text.at)}. Put all rows in one list")


def _not_a_list(text: _JsonText) -> str:
    """What a .json file contains that does not begin with a list, and what to do."""
    try:
        value, _, _ = text.take_value()
    except Fault as fault:
        return f"not a list of objects: {fault}. Fix it"
    if isinstance(value, dict):
        if text.next_sign():
            return "contains several JSON values, as .jsonl files do. Rename it to .jsonl"
        lists = [key for key, rows in islice(value.items(), 100) if isinstance(rows, list)]
        rows = f"extract the list: jq '.[{json.dumps(lists[0][:40])}]'" if lists else "put [ ] around it"
        return f"contains one JSON object, it must be a list of objects. If it is the only row, {rows}"
    return f"contains {object_fault(value).split(',')[0]}, it must be a list of objects"
