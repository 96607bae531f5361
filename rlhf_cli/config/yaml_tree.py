"""YAML text to plain values, each with the place where it was written.

file --yaml.compose--> nodes --Tree.read--> plain values + the place of each
`extends`: the values of the file it names, under this file's own
--set: values written over both
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
from rlhf_cli.config.yaml_text import (
    MAX_DEPTH,
    SCALARS,
    TAG,
    ConfigLoader,
    config_text,
    indentation_hint,
    scalar,
    shown_tag,
)
from rlhf_cli.errors import ConfigError
from rlhf_cli.printing import Keys, clipped, dotted, found, is_utf8, printable, shown

MAX_NODES = 100_000  # after aliases are expanded; 64 characters of text count as one more
MAX_PROBLEMS = 40
MAX_EXTENDS = 10  # files in a chain of `extends`


class Place(NamedTuple):
    """Where a value was written. Places sort in the order in which problems are reported."""

    source: int
    """0 for the file, 1, 2, ... for the files it extends, OVERRIDE for a `--set`."""
    number: int
    """The line in the file (0 for values without one), or the number of the `--set`."""


OVERRIDE = sys.maxsize


class Tree:
    """Plain values under validation, the place where each was written, and the problems so far."""

    def __init__(self, overrides: Sequence[str] = ()) -> None:
        self.overrides = overrides
        self.files: list[str] = []
        self.value: Any = None
        self.places: dict[Keys, Place] = {}
        self.problems: list[tuple[Place, str]] = []
        self.unread: list[Keys] = []  # values with a problem already: further errors there are noise
        self.num_nodes = 0

    def error(self) -> ConfigError:
        """One line for each problem; after ``MAX_PROBLEMS`` the rest is counted."""
        lines = []
        for place, message in sorted(self.problems, key=lambda problem: problem[0]):
            lines.append(printable(" ".join(f"{self.name(place)}: {message}".splitlines())))
        lines = list(dict.fromkeys(lines))
        if len(lines) > MAX_PROBLEMS:
            lines[MAX_PROBLEMS:] = [f"{self.files[0]}: and {len(lines) - MAX_PROBLEMS} more problems"]
        return ConfigError("\n".join(lines))

    def name(self, place: Place) -> str:
        """The place as messages name it: ``file:line`` or ``--set key=value``."""
        if place.source == OVERRIDE:
            return f"--set {clipped(self.overrides[place.number])}"
        file = self.files[place.source]
        return f"{file}:{place.number}" if place.number else file

    def report(self, place: Place, keys: Keys, message: str) -> None:
        """Note a problem; the key is omitted where the ``--set`` in front names it."""
        is_override = place.source == OVERRIDE
        named = is_override and self.overrides[place.number].partition("=")[0].strip() == dotted(keys)
        self.problems.append((place, f"{dotted(keys)}: {message}" if keys and not named else message))

    def report_invalid(self, keys: Keys, message: str, at: Keys | None = None) -> None:
        """Note what validation found at ``keys``, unless it follows from a problem that is noted already.

        ``at`` are the keys whose place is named, if it is another one.
        """
        if any(keys[: len(bad)] == bad or bad[: len(keys)] == keys for bad in self.unread):
            return
        at = at or keys
        place = next(self.places[at[:n]] for n in range(len(at), -1, -1) if at[:n] in self.places)
        self.report(place, keys, message)

    def take(self, values: dict[str, Any], name: str) -> None:
        """Use ``values`` that come from no file. Messages call them ``name``."""
        self.files, self.value, self.places = [name], values, {(): Place(0, 0)}

    def load(self, path: str | Path) -> None:
        """Read the file at ``path`` and the files it extends; raises if one of them is not a mapping."""
        self.value = self._load(path, ())

    def _load(self, path: str | Path, chain: tuple[Path, ...]) -> dict[str, Any]:
        """The values of a file over the values of the file it extends. ``chain`` are the files that led here."""
        text = config_text(path)
        source = len(self.files)
        self.files.append(str(path))
        self.places, self.unread = {(): Place(source, 1)}, []
        values = self._mapping(text, source)
        if "extends" not in values:
            return values
        place, base = self.places.pop(("extends",)), values.pop("extends")
        places, unread = self.places, self.unread
        merged = self._extended(path, base, place, (*chain, Path(path).resolve()))
        self._overlay(merged, values, ())
        self.places |= places
        self.unread += unread
        return merged

    def _extended(self, path: str | Path, base: Any, place: Place, chain: tuple[Path, ...]) -> dict[str, Any]:
        """The values of the file that ``extends: base``, written at ``place`` of the file ``path``, names."""
        if not isinstance(base, str) or not base:
            message = f"found {found(base)}, must be the path of a YAML file, relative to this one"
            self.report(place, ("extends",), message)
            raise self.error()
        try:
            target = Path(os.path.normpath(Path(path).parent / expand_home(base)))
        except ValueError as error:
            self.report(place, ("extends",), str(error))
            raise self.error() from None
        if target.resolve() in chain:
            self.report(place, ("extends",), f"{target} extends this file in turn. Remove one `extends`")
            raise self.error()
        if len(chain) > MAX_EXTENDS:
            self.report(place, ("extends",), f"a chain of more than {MAX_EXTENDS} files. Merge some of them")
            raise self.error()
        try:
            return self._load(target, chain)
        except ConfigError as error:
            if self.files[-1] == str(target) or len(self.files) > place.source + 2:
                raise
            self.report(place, ("extends",), str(error))  # the file cannot be read
            raise self.error() from None

    def _overlay(self, below: dict[str, Any], above: dict[str, Any], keys: Keys) -> None:
        """Write ``above`` over ``below``: mappings are merged, lists and plain values replaced."""
        for key, value in above.items():
            if isinstance(value, dict) and isinstance(below.get(key), dict):
                self._overlay(below[key], value, (*keys, key))
            else:
                self.forget((*keys, key))
                below[key] = value

    def _mapping(self, text: str, source: int) -> dict[str, Any]:
        """The mapping that a file consists of; raises if it is something else."""
        start = Place(source, 1)
        node = self.compose(text, start)
        if isinstance(node, yaml.MappingNode):
            values = self.read(node, (), start, ())
            if isinstance(values, dict):
                return values
        elif node is None or (not node.value and node.tag == TAG + "null"):
            if not self.problems:
                self.problems.append((start, "the file is empty, must be a mapping of keys to values"))
        else:
            what = found(self.read(node, (), start, ()))
            if not self.problems:
                self.problems.append((Place(source, node.start_mark.line + 1), f"found {what}, must be a mapping"))
        raise self.error()

    def compose(self, text: str, start: Place) -> Any:
        """The node of ``text``, a file or the value of a ``--set``; None, with the problem noted, if it is not YAML."""
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
        self.problems.append((start if start.source == OVERRIDE else Place(start.source, line), message))
        return None

    def read(self, node: Any, keys: Keys, start: Place, above: tuple[int, ...]) -> Any:
        """The plain value of ``node``, which belongs at ``keys``. ``above`` are the nodes that contain it."""
        here = _place(node, start)
        place = self.places.setdefault(keys, here)
        self.count(node, place)
        if id(node) in above:
            self.unread.append(keys)
            return self.report(place, keys, f"alias on line {node.start_mark.line + 1} contains itself")
        above = (*above, id(node))
        if isinstance(node, yaml.MappingNode) and node.tag == TAG + "map":
            values = {}
            for key, (at, child) in self.pairs(node, keys, start, above).items():
                self.places[*keys, key] = at
                values[key] = self.read(child, (*keys, key), start, above)
            return values
        if isinstance(node, yaml.SequenceNode) and node.tag == TAG + "seq":
            return [self.read(child, (*keys, i), start, above) for i, child in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            try:
                return scalar(node)
            except ValueError as error:
                message = str(error)
        else:
            message = f"tag {shown_tag(node.tag)} is not allowed"
        self.unread.append(keys)
        return self.report(place, keys, message)

    def count(self, node: Any, place: Place) -> None:
        """Stop as soon as aliases expand a small file to more than ``MAX_NODES`` values."""
        self.num_nodes += 1 + (len(node.value) // 64 if isinstance(node, yaml.ScalarNode) else 0)
        if self.num_nodes > MAX_NODES:
            self.problems = [(place, f"expands to more than {MAX_NODES} values, too many for a config")]
            raise self.error()

    def pairs(self, node: Any, keys: Keys, start: Place, above: tuple[int, ...]) -> dict[str, tuple[Place, Any]]:
        """Each key of a mapping with its place and value node; the mapping's own keys win over merged ones."""
        pairs: dict[str, tuple[Place, Any]] = {}
        merges: list[Any] = []
        merge_place: Place | None = None
        for key_node, child in node.value:
            place = _place(key_node, start)
            if key_node.tag == TAG + "merge":
                if merge_place is not None:
                    twice = f"written twice, first on line {merge_place.number}; use <<: [*a, *b]"
                    self.report(place, (*keys, "<<"), twice)
                merge_place = place
                merges += child.value if isinstance(child, yaml.SequenceNode) else [child]
            elif key_node.tag != TAG + "str" or not isinstance(key_node, yaml.ScalarNode):
                is_scalar = isinstance(key_node, yaml.ScalarNode)
                what = shown(str(key_node.value)) if is_scalar else "a list or mapping"
                hint = "; put it in quotes" if key_node.tag.removeprefix(TAG) in SCALARS else ""
                self.report(place, keys, f"the key is {what}, must be text{hint}")
            elif key_node.value in pairs:
                first = pairs[key_node.value][0]
                both = f"first on line {first.number}" if start.source != OVERRIDE else "in one mapping"
                self.report(place, (*keys, key_node.value), f"written twice, {both}; keep one")
            elif not is_utf8(key_node.value):
                self.report(place, keys, "the key has half of a surrogate pair, must be Unicode text")
            else:
                pairs[key_node.value] = (place, child)
        for merged in merges:
            assert merge_place is not None
            self.count(merged, merge_place)
            if not isinstance(merged, yaml.MappingNode):
                self.report(merge_place, (*keys, "<<"), "must be an alias of a mapping, or a list of them")
            elif id(merged) in above:
                self.report(merge_place, (*keys, "<<"), "the mapping merges itself")
            else:
                for key, pair in self.pairs(merged, keys, start, (*above, id(merged))).items():
                    pairs.setdefault(key, pair)
        return pairs

    def override(self, number: int, text: str) -> None:
        """Set the value that ``key.sub=value`` names. A problem with it is noted, and the override is skipped."""
        place = Place(OVERRIDE, number)
        name_text, equals, value_text = text.partition("=")
        names = [name.strip() for name in name_text.split(".")]
        if not equals:
            return self.problems.append((place, "no equals sign, must be key=value"))
        if not all(names):
            return self.problems.append((place, "the key has an empty part, must be key=value or a.b=value"))
        if not is_utf8(name_text):
            return self.problems.append((place, "the key has half of a surrogate pair, must be Unicode text"))
        if len(names) > MAX_DEPTH:
            return self.problems.append((place, f"nested more than {MAX_DEPTH} deep"))
        node = self.compose(value_text, place)
        if self.problems and self.problems[-1][0] == place:
            return None
        parent: Any = None
        container: Any = self.value
        keys: Keys = ()
        for name in names:
            if not isinstance(container, dict | list):
                container = [] if container is None and name.isdecimal() else {}
                parent[keys[-1]] = container
                self.forget(keys)
                self.places[keys] = place
            if isinstance(container, list):
                size = len(container)
                if not re.fullmatch("[0-9]{1,9}", name) or int(name) > size:
                    rule = f"{shown(name)} must be an index, at most {size} (which appends)"
                    self.unread.append(keys)
                    return self.problems.append((place, f"{dotted(keys)} has {size} items, {rule}"))
                keys = (*keys, int(name))
                container += [None] if int(name) == size else []
            else:
                keys = (*keys, name)
                container.setdefault(name, None)
            parent, container = container, container[keys[-1]]
            self.places.setdefault(keys, place)
        self.forget(keys)
        self.places[keys] = place
        parent[keys[-1]] = None if node is None else self.read(node, keys, place, ())
        return None

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
        self.unread = [bad for bad in self.unread if bad[: len(keys)] != keys]
        self.places = {k: place for k, place in self.places.items() if k[: len(keys)] != keys}


@functools.lru_cache(maxsize=64)
def _compose(text: str) -> Any:
    """The node of `text`, which no caller changes. Parsing is slow, and a command reads the same file several times."""
    return yaml.compose(text, Loader=ConfigLoader)


def _place(node: Any, start: Place) -> Place:
    """Where ``node`` was written: its line of the file, or the ``--set`` that it came from."""
    return start if start.source == OVERRIDE else Place(start.source, node.start_mark.line + 1)
