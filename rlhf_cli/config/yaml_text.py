"""The text of a config file: reading and writing it, PyYAML's loader with our scalars, and the values of scalars.

Rules that differ from PyYAML's own, because a config must mean what it looks like:

- ``1e-5``, ``.5e-3``, ``+1e3`` and ``1_000`` are numbers; ``017``, ``0o17``, ``0x1F``, ``1:30`` are text.
- Only ``true`` and ``false`` (``True``, ``TRUE``, ...) are booleans: ``no``, ``on`` and dates are text.
- A number is never read from quotes, from a boolean, or (for a whole number) from ``3.0``.
- ``nan``, infinities, and whole numbers that do not fit in 64 bits are refused everywhere.
- Anchors and aliases work, within bounds; ``<<`` merges, and tags other than ``!!str`` and its like, do not.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from rlhf_cli.errors import ConfigError
from rlhf_cli.printing import is_utf8, shown

MAX_BYTES = 256 * 1024  # PyYAML reads about 100 kB a second
MAX_DEPTH = 40

TAG = "tag:yaml.org,2002:"
_DIGITS = r"[0-9](?:_?[0-9])*"
_EXPONENT = r"[eE][-+]?[0-9]+"
SCALARS = {
    "null": re.compile(r"(?:~|null|Null|NULL|)\Z"),
    "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"),
    "int": re.compile(r"[-+]?(?:0|[1-9](?:_?[0-9])*)\Z"),
    "float": re.compile(
        rf"[-+]?(?:(?:{_DIGITS})?\.[0-9]+(?:{_EXPONENT})?|{_DIGITS}\.(?:{_EXPONENT})?|{_DIGITS}{_EXPONENT}"
        r"|\.(?:inf|Inf|INF))\Z|\.(?:nan|NaN|NAN)\Z"
    ),
}


class ConfigLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of this module and a bound on nesting. Only composes."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem=f"nested more than {MAX_DEPTH} deep", problem_mark=mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


ConfigLoader.yaml_implicit_resolvers = {}
for _name, _pattern in SCALARS.items():
    ConfigLoader.add_implicit_resolver(TAG + _name, _pattern, None)


def config_text(path: str | Path) -> str:
    """The text of a config file. The size is bounded, so that a wrong path (a checkpoint, /dev/zero) fails quickly."""
    try:
        # A pipe of the shell, `<(command)`, has a writer; a pipe with a name may have none, and would block.
        if Path(path).is_fifo() and not str(path).startswith("/dev/"):
            raise ConfigError(f"{path}: is a named pipe, must be a YAML config")
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file, must be a YAML config") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory, must be a YAML config") from None
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{path}: cannot be read ({reason})") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: more than {MAX_BYTES // 1024} kB, too large for a config")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: byte 0x{data[error.start]:02x}, must be UTF-8 text") from None


def indentation_hint(reason: str) -> str:
    """What to do about PyYAML's messages for wrong indentation, which do not name it."""
    if "'\\t'" in reason:
        return "; indent with spaces"
    if "expected <block end>" in reason:
        return "; the indentation differs from the lines above: indent the keys of one section by the same spaces"
    if "mapping values are not allowed here" in reason:
        return "; the line is indented too far, or its text has a colon and needs quotes"
    return ""


def scalar(node: yaml.ScalarNode) -> Any:
    """The value of a scalar by its written or resolved tag; raises ValueError if the text does not fit it."""
    text, kind = node.value, node.tag.removeprefix(TAG)
    if kind == "str":
        if not is_utf8(text):
            raise ValueError("half of a surrogate pair, must be Unicode text")
        if "\0" in text:
            raise ValueError("a null character, which no path can hold")
        return text
    if kind not in SCALARS:
        raise ValueError(f"tag {shown_tag(node.tag)} is not allowed")
    if not SCALARS[kind].match(text) and not (kind == "float" and SCALARS["int"].match(text)):
        raise ValueError(f"the text {shown(text)} does not fit its tag {shown_tag(node.tag)}")
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    digits = text.replace("_", "")
    if kind == "int":
        if len(digits) > 21 or abs(int(digits)) >= 2**64:
            raise ValueError(f"found the whole number {shown(text)[1:-1]}, must fit in 64 bits")
        return int(digits)
    number = float(digits.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if not math.isfinite(number):
        raise ValueError(f"found {shown(text)[1:-1]}, must be a finite number; text goes in quotes")
    return number


def shown_tag(tag: str) -> str:
    return shown(tag.replace(TAG, "!!"))[1:-1]


class Dumper(yaml.SafeDumper):
    """Writes block style without aliases. Quotes text that this loader, or one for YAML 1.1, would read otherwise."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Escape line breaks that PyYAML would fold when it reads them, which needs double quotes."""
        return self.represent_scalar(TAG + "str", text, style='"' if re.search("[\x85\u2028\u2029]", text) else None)


Dumper.add_representer(str, Dumper.represent_text)
for _name, _pattern in SCALARS.items():
    Dumper.add_implicit_resolver(TAG + _name, _pattern, None)


def dump_config(config: BaseModel) -> str:
    """``config`` as YAML text: every field in schema order. :func:`load_config` reads it back as equal."""
    values = config.model_dump(mode="json", round_trip=True)
    return yaml.dump(values, Dumper=Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=100)
