"""Config files: YAML text to plain values, each with the place where it was written, and back to text.

file --yaml.compose--> nodes --Tree.fill--> plain values + the place of each
`extends`: the values of the file it names, where this file has none
--set: values written over both

A problem that leaves no value to go on with is raised at once. The others are noted and raised together. Rules that
differ from PyYAML's own, because a config must mean what it looks like:

- ``1e-5``, ``.5e-3``, ``+1e3`` and ``1_000`` are numbers; ``017``, ``0o17``, ``0x1F``, ``1:30`` are text.
- Only ``true`` and ``false`` (``True``, ``TRUE``, ...) are booleans: ``no``, ``on`` and dates are text.
- A number is never read from quotes, from a boolean, or (for a whole number) from ``3.0``.
- ``nan``, infinities, and whole numbers that do not fit in 64 bits are refused everywhere.
- Anchors and aliases work, within bounds; ``<<`` merges, and tags other than ``!!str`` and its like, do not.
"""

from __future__ import annotations

import functools
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel

from rlhf_cli.config.base import expand_home
from rlhf_cli.errors import ConfigError
from rlhf_cli.printing import Keys, clipped, dotted, found, is_utf8, printable, shown

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


# ------------------------------------------------------------------- nodes to plain values and their places


MAX_NODES = 100_000  # after aliases are expanded; 64 characters of text count as one more
MAX_PROBLEMS = 40


class Place(NamedTuple):
    """Where a value was written. Places sort in the order in which problems are reported."""

    source: int
    """0 for the file, 1, 2, ... for the files it extends, OVERRIDE for a `--set`."""
    number: int
    """The line in the file (0 for values without one), or the number of the `--set`."""

    def of(self, node: yaml.Node) -> Place:
        """The place of a node of this file, or this `--set`."""
        return self if self.source == OVERRIDE else Place(self.source, node.start_mark.line + 1)


OVERRIDE = sys.maxsize


class Tree:
    """Plain values under validation, the place where each was written, and the problems so far."""

    def __init__(self, overrides: Sequence[str] = ()) -> None:
        self.overrides = overrides
        self.files: list[str] = []
        self.value: Any = {}
        self.places: dict[Keys, Place] = {}
        self.problems: list[tuple[Place, str]] = []
        self.num_nodes = 0

    def error(self) -> ConfigError:
        lines = []
        for (source, number), message in sorted(self.problems, key=lambda problem: problem[0]):
            if source == OVERRIDE:
                name = f"--set {clipped(self.overrides[number])}"
            else:
                name = f"{self.files[source]}:{number}" if number else self.files[source]
            lines.append(printable(" ".join(f"{name}: {message}".splitlines())))
        lines = list(dict.fromkeys(lines))
        if len(lines) > MAX_PROBLEMS:
            lines[MAX_PROBLEMS:] = [f"{self.files[0]}: and {len(lines) - MAX_PROBLEMS} more problems"]
        return ConfigError("\n".join(lines))

    def failure(self, place: Place, message: str, keys: Keys = ()) -> ConfigError:
        """The error of a problem after which reading cannot go on, with those noted before it."""
        self.report(place, keys, message)
        return self.error()

    def report(self, place: Place, keys: Keys, message: str) -> None:
        """Note a problem; the key is omitted where the ``--set`` in front names it."""
        is_override = place.source == OVERRIDE
        named = is_override and self.overrides[place.number].partition("=")[0].strip() == dotted(keys)
        self.problems.append((place, f"{dotted(keys)}: {message}" if keys and not named else message))

    def report_invalid(self, keys: Keys, message: str, at: Keys) -> None:
        """Note what validation found at ``keys``, with the place of ``at`` or of the section around it."""
        place = next(self.places[at[:n]] for n in range(len(at), -1, -1) if at[:n] in self.places)
        self.report(place, keys, message)

    def take(self, values: dict[str, Any], name: str) -> None:
        """Use ``values`` that come from no file. Messages call them ``name``."""
        self.files, self.value, self.places = [name], values, {(): Place(0, 0)}

    def load(self, path: str | Path) -> None:
        """Read the file at ``path``, and where it has no value, the files it extends; each must be a mapping."""
        text, chain = config_text(path), [Path(path).resolve()]
        while True:
            start = Place(len(self.files), 1)
            self.files.append(str(path))
            self.places.setdefault((), start)
            node = self.compose(text, start)
            if node is None or (node.tag == TAG + "null" and not node.value):
                raise self.failure(start, "the file is empty, must be a mapping of keys to values")
            if not isinstance(node, yaml.MappingNode) or node.tag != TAG + "map":
                what = found(self.read(node, (), start, ()))
                if self.problems:
                    raise self.error()
                raise self.failure(start.of(node), f"found {what}, must be a mapping")
            self.fill(self.value, node, (), start, (id(node),))
            if "extends" not in self.value:
                return
            place = self.places.pop(("extends",))
            try:
                path = _extended(path, self.value.pop("extends"), chain)
                text = config_text(path)
            except (ConfigError, ValueError) as error:
                raise self.failure(place, str(error), ("extends",)) from None
            chain.append(path.resolve())

    def compose(self, text: str, start: Place) -> Any:
        """The node of ``text``, a file or the value of a ``--set``; None if it is blank. Raises if it is not YAML."""
        try:
            return _compose(text)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            reason = ", ".join(part for part in (error.context, error.problem) if part)
            line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
            message = f"column {column}: not valid YAML, {clipped(reason)}{indentation_hint(reason)}"
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            character = error.character if isinstance(error.character, int) else ord(error.character)
            message = f"not valid YAML, character U+{character:04X} is not allowed"
        except (ValueError, OverflowError) as error:  # PyYAML lets "\UFFFFFFFF" and the like through
            line, message = 1, f"not valid YAML, {error}"
        raise self.failure(start if start.source == OVERRIDE else Place(start.source, line), message)

    def fill(self, values: dict[str, Any], node: Any, keys: Keys, start: Place, above: tuple[int, ...]) -> None:
        """Give ``values`` the keys of a mapping node that they lack. ``above`` are the nodes around its values."""
        written: dict[str, Place] = {}
        for key_node, child in node.value:
            place, key = start.of(key_node), key_node.value
            if key_node.tag != TAG + "str" or not isinstance(key_node, yaml.ScalarNode):
                what = shown(str(key)) if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
                hint = "; put it in quotes" if key_node.tag.removeprefix(TAG) in SCALARS else ""
                self.report(place, keys, f"the key is {what}, must be text{hint}")
            elif key in written:
                both = f"first on line {written[key].number}" if start.source != OVERRIDE else "in one mapping"
                self.report(place, (*keys, key), f"written twice, {both}; keep one")
            elif not is_utf8(key):
                self.report(place, keys, "the key has half of a surrogate pair, must be Unicode text")
            else:
                written[key] = place
                if key not in values:
                    self.places[*keys, key] = place
                    values[key] = self.read(child, (*keys, key), start, above)
                elif isinstance(values[key], dict) and isinstance(child, yaml.MappingNode):
                    self.fill(values[key], child, (*keys, key), start, (*above, id(child)))

    def read(self, node: Any, keys: Keys, start: Place, above: tuple[int, ...]) -> Any:
        """The plain value of ``node``, which belongs at ``keys``. ``above`` are the nodes that contain it."""
        place = self.places.setdefault(keys, start.of(node))
        self.count(node, place)
        if id(node) in above:
            return self.report(place, keys, f"alias on line {node.start_mark.line + 1} contains itself")
        above = (*above, id(node))
        if isinstance(node, yaml.MappingNode) and node.tag == TAG + "map":
            values: dict[str, Any] = {}
            self.fill(values, node, keys, start, above)
            return values
        if isinstance(node, yaml.SequenceNode) and node.tag == TAG + "seq":
            return [self.read(child, (*keys, i), start, above) for i, child in enumerate(node.value)]
        message = f"tag {shown_tag(node.tag)} is not allowed"
        if isinstance(node, yaml.ScalarNode):
            try:
                return scalar(node)
            except ValueError as error:
                message = str(error)
        return self.report(place, keys, message)

    def count(self, node: Any, place: Place) -> None:
        """Stop as soon as aliases expand a small file to more than ``MAX_NODES`` values."""
        self.num_nodes += 1 + (len(node.value) // 64 if isinstance(node, yaml.ScalarNode) else 0)
        if self.num_nodes > MAX_NODES:
            self.problems = []
            raise self.failure(place, f"expands to more than {MAX_NODES} values, too many for a config")

    def override(self, number: int, text: str) -> None:
        """Set the value that ``key.sub=value`` names."""
        place = Place(OVERRIDE, number)
        name_text, equals, value_text = text.partition("=")
        names = [name.strip() for name in name_text.split(".")]
        if not equals:
            raise self.failure(place, "no equals sign, must be key=value")
        if not all(names):
            raise self.failure(place, "the key has an empty part, must be key=value or a.b=value")
        if not is_utf8(name_text):
            raise self.failure(place, "the key has half of a surrogate pair, must be Unicode text")
        node = self.compose(value_text, place)
        parent: Any = self.value
        keys: Keys = ()
        for depth, name in enumerate(names, 1):
            key: Any = name
            if isinstance(parent, list):
                if not re.fullmatch("[0-9]{1,9}", name) or int(name) > len(parent):
                    rule = f"{shown(name)} must be an index, at most {len(parent)} (which appends)"
                    raise self.failure(place, f"{dotted(keys)} has {len(parent)} items, {rule}")
                key = int(name)
                parent += [None] if key == len(parent) else []
            keys = (*keys, key)
            if depth == len(names):
                self.forget(keys)
                self.places[keys] = place
                parent[key] = None if node is None else self.read(node, keys, place, ())
                return
            child = parent[key] if isinstance(parent, list) else parent.get(key)
            if not isinstance(child, dict | list):
                parent[key] = [] if child is None and names[depth].isdecimal() else {}
                self.forget(keys)
                self.places[keys] = place
            parent = parent[key]

    def unset(self, keys: Keys) -> bool:
        """Remove a null that a ``--set``, or a file that extends another, gave to a key; returns whether there was one.

        ``--set key=`` with nothing behind it does not mean null: an empty shell variable leaves that, too.
        """
        place = self.places.get(keys)
        if place is None or place.source == len(self.files) - 1:
            return False
        if place.source == OVERRIDE and not self.overrides[place.number].partition("=")[2].strip():
            return False
        return functools.reduce(lambda value, key: value[key], keys, self.value) is None and self.remove(keys)

    def remove(self, keys: Keys) -> bool:
        """Remove a key of a mapping; returns whether it was there."""
        above = functools.reduce(lambda value, key: value[key], keys[:-1], self.value)
        if not isinstance(above, dict) or keys[-1] not in above:
            return False
        del above[keys[-1]]
        self.forget(keys)
        return True

    def forget(self, keys: Keys) -> None:
        """Drop the places at and below ``keys``, because the value there is being replaced."""
        self.places = {k: place for k, place in self.places.items() if k[: len(keys)] != keys}


@functools.lru_cache(maxsize=64)
def _compose(text: str) -> Any:
    """The node of `text`, which no caller changes. Parsing is slow, and a command reads the same file several times."""
    return yaml.compose(text, Loader=ConfigLoader)


def _extended(path: str | Path, base: Any, chain: Sequence[Path]) -> Path:
    """The file that ``extends: base`` in the file ``path`` names. ``chain`` are the files that led here."""
    if not isinstance(base, str) or not base:
        raise ConfigError(f"found {found(base)}, must be the path of a YAML file, relative to this one")
    target = Path(os.path.normpath(Path(path).parent / expand_home(base)))
    if target.resolve() in chain:
        raise ConfigError(f"{target} extends this file in turn. Remove one `extends`")
    return target


# ------------------------------------------------------------------------------------------------ writing


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


def as_override(key: str, text: str) -> str:
    """The override that sets a key to this text, in quotes if YAML would read something else."""
    written = yaml.dump(text, Dumper=Dumper, allow_unicode=True, width=math.inf)
    return f"{key}={written.strip().removesuffix('...').rstrip()}"
