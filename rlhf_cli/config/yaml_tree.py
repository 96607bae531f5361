"""YAML text to plain values, each with the place where it was written.

file --yaml.compose--> nodes --Tree.fill--> plain values + the place of each
`extends`: the values of the file it names, where this file has none
--set: values written over both

A problem that leaves no value to go on with is raised at once. The others are noted and raised together.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rlhf_cli.config.base import expand_home
from rlhf_cli.config.yaml_text import SCALARS, TAG, ConfigLoader, config_text, indentation_hint, scalar, shown_tag
from rlhf_cli.errors import ConfigError
from rlhf_cli.printing import Keys, clipped, dotted, found, is_utf8, printable, shown

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

    # -------------------------------------------------------------------------------------- problems

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

    # ----------------------------------------------------------------------------------------- files

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

    # ----------------------------------------------------------------------------------------- --set

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
