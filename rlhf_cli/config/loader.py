"""YAML to a typed config and back, with errors that name the file, the line and the dotted key.

    text --yaml.compose--> nodes --_Tree.read--> plain values + the place of each
         --overrides-->    plain values          --pydantic--> the model, or lines that tell what to mend

Rules that differ from PyYAML's own, because a config must mean what it looks like:

- ``1e-5``, ``.5e-3``, ``+1e3`` and ``1_000`` are numbers; ``017``, ``0o17``, ``0x1F``, ``1:30`` are text.
- Only ``true`` and ``false`` (``True``, ``TRUE``, ...) are booleans: ``no``, ``on`` and dates are text.
- A number is never read from quotes, from a boolean, or (for a whole number) from ``3.0``.
- ``nan`` and infinities, and whole numbers that don't fit in 64 bits, are refused everywhere.
- Anchors, aliases and ``<<`` merges work, within bounds; tags other than ``!!str`` and its like don't.

Values are checked by pydantic in strict JSON mode. One edge for who writes schemas: below a validator with
``mode="before"`` the values are Python's, where strict mode refuses a list for a tuple; that is a TypeError.
"""

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from rlhf_cli.errors import ConfigError

M = TypeVar("M", bound=BaseModel)
Keys = tuple[str | int, ...]  # the way to a value: ("rewards", 0, "weight")
Place = tuple[int, int]  # (0, line of the file) or (1, number of the --set): sorts as it is reported
Errors = list[tuple[Keys, Any]]  # pydantic's errors, each with what is left of its `loc`

MAX_BYTES = 256 * 1024  # PyYAML reads some 100 kB a second
MAX_DEPTH = 40
MAX_NODES = 100_000  # after aliases are expanded; 64 characters of text count as one more
MAX_PROBLEMS = 40
MAX_SHOWN = 160  # characters of anything in a message
FEW_KEYS = 12  # so many valid keys can be listed in one line

_TAG = "tag:yaml.org,2002:"
_DIGITS = r"[0-9](?:_?[0-9])*"
_EXPONENT = r"[eE][-+]?[0-9]+"
_SCALARS = {
    "null": re.compile(r"(?:~|null|Null|NULL|)\Z"),
    "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"),
    "int": re.compile(r"[-+]?(?:0|[1-9](?:_?[0-9])*)\Z"),
    "float": re.compile(
        rf"[-+]?(?:(?:{_DIGITS})?\.[0-9]+(?:{_EXPONENT})?|{_DIGITS}\.(?:{_EXPONENT})?|{_DIGITS}{_EXPONENT}"
        r"|\.(?:inf|Inf|INF))\Z|\.(?:nan|NaN|NAN)\Z"
    ),
    "merge": re.compile(r"<<\Z"),
}


class _Loader(yaml.SafeLoader):
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


class _Dumper(yaml.SafeDumper):
    """Writes block style and no aliases; quotes what this loader, or one for YAML 1.1, reads as no text."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Line breaks that PyYAML would fold on the way back are escaped, which needs double quotes."""
        return self.represent_scalar(_TAG + "str", text, style='"' if re.search("[\x85\u2028\u2029]", text) else None)


_Dumper.add_representer(str, _Dumper.represent_text)
_Loader.yaml_implicit_resolvers = {}
for _name, _pattern in _SCALARS.items():
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, None)
    _Dumper.add_implicit_resolver(_TAG + _name, _pattern, None)


def load_config(path: str | Path, schema: type[M], overrides: Sequence[str] = ()) -> M:
    """Read the YAML file at ``path``, apply ``overrides``, and return it as a ``schema``.

    Each override is ``dotted.key=value``, the value read by the same YAML rules, so that ``a.b=null``,
    ``a=[1, 2]`` and ``a={b: 1}`` work. They apply in order, before validation:

    - A list item is named by its index; the index one past the end appends.
    - An absent or null section is created, as a list where the next part is an index. The defaults that
      the schema gives to a list are not there to be changed: ``rewards.0.weight=2`` needs it in the file.
    - Setting below a plain value replaces it by a mapping: ``train.path=x`` on ``train: file.jsonl``.

    Raises:
        ConfigError: with one line for each problem found, in the order of the file, then of ``overrides``.
    """
    tree = _Tree(str(path), overrides)
    tree.load(_read_text(path))
    for number, override in enumerate(overrides):
        tree.override(number, override)
    config = None
    try:
        config = schema.model_validate_json(json.dumps(tree.value), strict=True)
    except ValidationError as error:
        errors: Errors = [(details["loc"], details) for details in error.errors(include_url=False)]
        for keys, message in _explain(schema, tree.value, errors, ()):
            tree.report_invalid(keys, message)
    if config is None or tree.problems:
        raise tree.error()
    return config


def dump_config(config: BaseModel) -> str:
    """``config`` as YAML text, every field in schema order, that :func:`load_config` reads back as equal."""
    values = config.model_dump(mode="json", round_trip=True)
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=100)


def config_schema(schema: type[BaseModel]) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of ``schema``, from which an editor completes and explains keys.

    It is a little wider than :func:`load_config`: JSON Schema takes ``3.0`` for a whole number, say.
    """
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema.model_json_schema()}


def _read_text(path: str | Path) -> str:
    """The text of a config file; bounded, so that a wrong path (a checkpoint, /dev/zero) fails at once."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file, must be a YAML config") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory, must be a YAML config") from None
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{path}: can't be read ({reason})") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: more than {MAX_BYTES // 1024} kB, too large for a config")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: byte 0x{data[error.start]:02x}, must be UTF-8 text") from None


class _Tree:
    """Plain values under validation, the place where each was written, and the problems so far."""

    def __init__(self, file: str, overrides: Sequence[str]) -> None:
        self.file = file
        self.overrides = overrides
        self.value: Any = None
        self.places: dict[Keys, Place] = {(): (0, 1)}
        self.problems: list[tuple[Place, str]] = []
        self.unread: list[Keys] = []  # values with a problem already: what pydantic says there is noise
        self.num_nodes = 0

    def error(self) -> ConfigError:
        """One line for each problem; past ``MAX_PROBLEMS`` the rest is counted."""
        lines = []
        for (is_override, number), message in sorted(self.problems, key=lambda problem: problem[0]):
            where = f"--set {_clipped(self.overrides[number])}" if is_override else f"{self.file}:{number}"
            lines.append(_printable(" ".join(f"{where}: {message}".splitlines())))
        lines = list(dict.fromkeys(lines))
        if len(lines) > MAX_PROBLEMS:
            lines[MAX_PROBLEMS:] = [f"{self.file}: and {len(lines) - MAX_PROBLEMS} more problems"]
        return ConfigError("\n".join(lines))

    def report(self, place: Place, keys: Keys, message: str) -> None:
        """Note a problem; the key is left out where a ``--set`` has just named it."""
        named = place[0] and self.overrides[place[1]].partition("=")[0].strip() == _dotted(keys)
        self.problems.append((place, f"{_dotted(keys)}: {message}" if keys and not named else message))

    def report_invalid(self, keys: Keys, message: str) -> None:
        """Note what validation found at ``keys``, unless it follows from a problem that is noted already."""
        if any(keys[: len(bad)] == bad or bad[: len(keys)] == keys for bad in self.unread):
            return
        place = next(self.places[keys[:n]] for n in range(len(keys), -1, -1) if keys[:n] in self.places)
        self.report(place, keys, message)

    def load(self, text: str) -> None:
        """Read the file's own text; raises at once if there is no mapping to go on with."""
        node = self.compose(text, None)
        if isinstance(node, yaml.MappingNode):
            self.value = self.read(node, (), None, ())
            return
        if not self.problems and (node is None or (not node.value and node.tag == _TAG + "null")):
            self.problems.append(((0, 1), "the file is empty, must be a mapping of keys to values"))
        elif not self.problems:
            found = _found(self.read(node, (), None, ()))
            self.problems.append(((0, node.start_mark.line + 1), f"found {found}, must be a mapping"))
        raise self.error()

    def compose(self, text: str, override: Place | None) -> Any:
        """The node of ``text``; None, with the problem noted, if it isn't YAML."""
        try:
            return yaml.compose(text, Loader=_Loader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            reason = ", ".join(part for part in (error.context, error.problem) if part)
            hint = "; indent with spaces" if "'\\t'" in reason else ""
            line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
            message = f"column {column}: not valid YAML, {_clipped(reason)}{hint}"
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            character = error.character if isinstance(error.character, int) else ord(error.character)
            message = f"not valid YAML, character U+{character:04X} is not allowed"
        except (ValueError, OverflowError) as error:  # PyYAML lets "\UFFFFFFFF" and the like through
            line, message = 1, f"not valid YAML, {error}"
        self.problems.append((override or (0, line), message))
        return None

    def read(self, node: Any, keys: Keys, override: Place | None, above: tuple[int, ...]) -> Any:
        """The plain value of ``node``, which is to stand at ``keys``; ``above`` are the nodes it is in."""
        here = override or (0, node.start_mark.line + 1)
        place = self.places.setdefault(keys, here)
        self.count(node, place)
        if id(node) in above:
            self.unread.append(keys)
            return self.report(place, keys, f"alias on line {here[1]} contains itself")
        above = (*above, id(node))
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            values = {}
            for key, (line, child) in self.pairs(node, keys, override, above).items():
                self.places[*keys, key] = override or (0, line)
                values[key] = self.read(child, (*keys, key), override, above)
            return values
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.read(child, (*keys, i), override, above) for i, child in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            try:
                return _scalar(node)
            except ValueError as error:
                message = str(error)
        else:
            message = f"tag {_shown_tag(node.tag)} is not allowed"
        self.unread.append(keys)
        return self.report(place, keys, message)

    def count(self, node: Any, place: Place) -> None:
        """Stop at once when aliases have made a small file expand to more than ``MAX_NODES`` values."""
        self.num_nodes += 1 + (len(node.value) // 64 if isinstance(node, yaml.ScalarNode) else 0)
        if self.num_nodes > MAX_NODES:
            self.problems = [(place, f"expands to more than {MAX_NODES} values, too many for a config")]
            raise self.error()

    def pairs(
        self, node: Any, keys: Keys, override: Place | None, above: tuple[int, ...]
    ) -> dict[str, tuple[int, Any]]:
        """Each key of a mapping with its line and value node; the mapping's own keys win over merged ones."""
        found: dict[str, tuple[int, Any]] = {}
        merges: list[Any] = []
        merge_line = 0
        for key_node, child in node.value:
            line = key_node.start_mark.line + 1
            place = override or (0, line)
            if key_node.tag == _TAG + "merge":
                if merge_line:
                    twice = f"written twice, first on line {merge_line}; use <<: [*a, *b]"
                    self.report(place, (*keys, "<<"), twice)
                merge_line = line
                merges += child.value if isinstance(child, yaml.SequenceNode) else [child]
            elif key_node.tag != _TAG + "str" or not isinstance(key_node, yaml.ScalarNode):
                is_scalar = isinstance(key_node, yaml.ScalarNode)
                shown = _shown(str(key_node.value)) if is_scalar else "a list or mapping"
                hint = "; put it in quotes" if key_node.tag.removeprefix(_TAG) in _SCALARS else ""
                self.report(place, keys, f"the key is {shown}, must be text{hint}")
            elif key_node.value in found:
                first = found[key_node.value][0]
                both = f"first on line {first}" if not override else "in one mapping"
                self.report(place, (*keys, key_node.value), f"written twice, {both}; keep one")
            elif not _is_unicode(key_node.value):
                self.report(place, keys, "the key has half of a surrogate pair, must be Unicode text")
            else:
                found[key_node.value] = (line, child)
        for merged in merges:
            place = override or (0, merge_line)
            self.count(merged, place)
            if not isinstance(merged, yaml.MappingNode):
                self.report(place, (*keys, "<<"), "must be an alias of a mapping, or a list of them")
            elif id(merged) in above:
                self.report(place, (*keys, "<<"), "the mapping merges itself")
            else:
                for key, pair in self.pairs(merged, keys, override, (*above, id(merged))).items():
                    found.setdefault(key, pair)
        return found

    def override(self, number: int, text: str) -> None:
        """Set the value that ``key.sub=value`` names; what is wrong with it is noted, and it is left out."""
        place = (1, number)
        dotted, equals, value_text = text.partition("=")
        names = [name.strip() for name in dotted.split(".")]
        if not equals:
            return self.problems.append((place, "no equals sign, must be key=value"))
        if not all(names):
            return self.problems.append((place, "the key has an empty part, must be key=value or a.b=value"))
        if not _is_unicode(dotted):
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
                    rule = f"{_shown(name)} must be an index, at most {size} (which appends)"
                    self.unread.append(keys)
                    return self.problems.append((place, f"{_dotted(keys)} has {size} items, {rule}"))
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

    def forget(self, keys: Keys) -> None:
        """Drop the places at and below ``keys``: the value there is being replaced."""
        self.unread = [bad for bad in self.unread if bad[: len(keys)] != keys]
        self.places = {k: place for k, place in self.places.items() if k[: len(keys)] != keys}


def _scalar(node: yaml.ScalarNode) -> Any:
    """The value of a scalar by its tag, written or resolved; ValueError says what is wrong with it."""
    text, kind = node.value, node.tag.removeprefix(_TAG)
    if kind in ("str", "merge"):
        if not _is_unicode(text):
            raise ValueError("half of a surrogate pair, must be Unicode text")
        if "\0" in text:
            raise ValueError("a null character, which no path can hold")
        return text
    if kind not in _SCALARS:
        raise ValueError(f"tag {_shown_tag(node.tag)} is not allowed")
    if not _SCALARS[kind].match(text) and not (kind == "float" and _SCALARS["int"].match(text)):
        raise ValueError(f"the text {_shown(text)} does not fit its tag {_shown_tag(node.tag)}")
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    digits = text.replace("_", "")
    if kind == "int":
        if len(digits) > 21 or abs(int(digits)) >= 2**64:
            raise ValueError(f"found the whole number {_shown(text)[1:-1]}, must fit in 64 bits")
        return int(digits)
    number = float(digits.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if not math.isfinite(number):
        raise ValueError(f"found {_shown(text)[1:-1]}, must be a finite number; text goes in quotes")
    return number


def _explain(kind: Any, value: Any, errors: Errors, keys: Keys) -> Iterator[tuple[Keys, str]]:
    """What pydantic's ``errors`` about ``value``, annotated as ``kind``, say to a user.

    Goes down annotation, value and ``loc`` together, since a ``loc`` alone doesn't tell the name of a
    union's branch from a key. Of a union the branch that the value was meant for is explained.
    """
    members, tag = _alternatives(kind)
    groups: dict[str | int, Errors] = {}
    for loc, error in errors:
        if loc[:1] == ("[key]",):
            yield keys, f"as a key, {_message(error, None, keys[-1])}"
        elif loc:
            groups.setdefault(loc[0], []).append((loc[1:], error))
        elif error["type"] in ("union_tag_invalid", "union_tag_not_found"):
            yield _explain_tag(members, str(tag), value, keys)
        elif error["type"] == "missing":
            yield keys, f"required {'item' if isinstance(keys[-1], int) else 'key'} is missing"
        else:
            yield keys, _message(error, members[0], value)
    if len(members) > 1 and tag:
        for label, group in groups.items():
            member = next((m for m in members if label in _tag_values(m, tag)), None)
            yield from _explain(member, value, group, keys)
    elif len(members) > 1 and groups:
        yield from _explain_union(members, value, groups, keys)
    else:
        for key, group in groups.items():
            if group[0][1]["type"] == "extra_forbidden" and not group[0][0]:
                yield (*keys, key), _unknown_key(str(key), _fields(members[0]))
                continue
            if isinstance(key, int) and not isinstance(value, list):
                # A validator has made a list of one value, which stands where the list would.
                yield from _explain(_child_kind(members[0], key), value, group, keys)
                continue
            child = group[0][1]["input"]  # right where a validator has made a mapping of another value
            if isinstance(value, Mapping):
                child = value.get(key)
            elif isinstance(value, list) and isinstance(key, int) and key < len(value):
                child = value[key]
            yield from _explain(_child_kind(members[0], key), child, group, (*keys, key))


def _explain_union(
    members: list[Any], value: Any, groups: dict[str | int, Errors], keys: Keys
) -> Iterator[tuple[Keys, str]]:
    """A union without a tag: the branch that got inside a mapping or list, else all rules in one line."""
    inside = {
        label: group
        for label, group in groups.items()
        if isinstance(value, Mapping | list) and (group[0][0] or group[0][1]["type"] not in _KIND_RULES)
    }
    if inside:
        label = min(inside, key=lambda label: len(inside[label]))
        yield from _explain(_named_member(members, str(label)), value, inside[label], keys)
        return
    rules, hints, told = [], [], []
    for label, group in groups.items():
        kind, error = _named_member(members, str(label)), group[0][1]
        rule = _rule(error, kind)
        rules += [rule] if rule else []
        told += [] if rule else [_message(error, kind, value)]
        hints.append(_hint(error, kind, value))
    hint = next(filter(None, hints), "")
    rules = list(dict.fromkeys(rules))
    yield keys, told[0] if told else f"found {_found(value)}, must be {' or '.join(rules)}{hint}"


def _explain_tag(members: list[Any], tag: str, value: Any, keys: Keys) -> tuple[Keys, str]:
    """A tagged union whose tag is missing or none of those known."""
    options = [option for member in members for option in _tag_values(member, tag)]
    rule = "one of " + ", ".join(map(_plain, options))
    if not isinstance(value, Mapping) or tag not in value:
        return (*keys, tag), f"required key is missing, must be {rule}"
    return (*keys, tag), f"found {_found(value[tag])}, must be {rule}{_did_you_mean(value[tag], options)}"


def _message(error: Any, kind: Any, value: Any) -> str:
    """One of pydantic's errors as ``found ..., must be ...; what to do``."""
    if error["type"] in ("value_error", "assertion_error"):
        return str(error["ctx"]["error"]) or "not valid"
    rule = _rule(error, kind)
    if rule == "a list" and isinstance(value, list):
        raise TypeError(f"schema: {kind} stands below a mode='before' validator; use a list or mode='after'")
    if not rule:
        return f"found {_found(value)}, {error['msg'][:1].lower()}{error['msg'][1:]}"
    return f"found {_found(value)}, must be {rule}{_hint(error, kind, value)}"


def _rule(error: Any, kind: Any) -> str:
    """What the value must be, by the type of pydantic's error; empty if that is not such an error."""
    code, ctx = error["type"], dict(error.get("ctx", {}))
    for name, bound in ctx.items():  # "greater than 0", though pydantic made the bound of a float 0.0
        ctx[name] = int(bound) if isinstance(bound, float) and bound.is_integer() else bound
    if code in ("literal_error", "enum"):
        options = ", ".join(map(_plain, _options(kind))) or str(ctx["expected"])
        return f"one of {options}" if "," in options or " or " in options else options
    if code in _KIND_RULES:
        return _KIND_RULES[code]
    return _BOUND_RULES[code].format(**ctx) if code in _BOUND_RULES else ""


_KIND_RULES = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("string_type", "path_type"), "text"),
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type", "mapping_type"), "a mapping"),
    **dict.fromkeys(("list_type", "tuple_type", "set_type", "frozen_set_type", "iterable_type"), "a list"),
    "none_required": "null",
    "literal_error": "",  # these two are told by _rule
    "enum": "",
}
_BOUND_RULES = {
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "too_short": "at least {min_length} long",
    "too_long": "at most {max_length} long",
    "string_too_short": "at least {min_length} characters long",
    "string_too_long": "at most {max_length} characters long",
    "string_pattern_mismatch": "text that matches {pattern}",
}


def _hint(error: Any, kind: Any, value: Any) -> str:
    """What to do about a mistyped value, where that can be told."""
    rule = _rule(error, kind)
    if error["type"] in ("literal_error", "enum"):
        return _did_you_mean(value, _options(kind))
    if rule == "a whole number" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if isinstance(value, str) and rule in ("a whole number", "a number"):
        is_number = _SCALARS["int"].match(value) or (rule == "a number" and _SCALARS["float"].match(value))
        return "; remove the quotes" if is_number else ""
    if isinstance(value, str) and rule == "true or false":
        return "; remove the quotes" if _SCALARS["bool"].match(value) else ""
    if rule == "text" and isinstance(value, bool | int | float):
        return "; put it in quotes"
    return ""


def _unknown_key(key: str, valid: Iterable[str]) -> str:
    """The error for a key that its section doesn't have."""
    valid = list(valid)
    close = _did_you_mean(key, valid)
    if close or not valid:
        return f"unknown key{close}"
    if len(valid) <= FEW_KEYS:
        return f"unknown key; valid here: {', '.join(valid)}"
    return f"unknown key; none of the {len(valid)} keys valid here is like it"


def _did_you_mean(value: Any, options: Iterable[Any]) -> str:
    """The option most like ``value``, as the end of a message; letter case doesn't count."""
    if not isinstance(value, str):
        return ""
    by_folded = {option.lower(): option for option in options if isinstance(option, str)}
    close = difflib.get_close_matches(value.lower()[:80], by_folded, n=1, cutoff=0.65)
    return f"; did you mean {by_folded[close[0]]}?" if close else ""


def _alternatives(kind: Any) -> tuple[list[Any], str | None]:
    """The types that an annotation allows, null aside, and the key that tells them apart if one does."""
    tag = None
    while True:
        if get_origin(kind) is Annotated:
            kind, *notes = get_args(kind)
            tags = [note.discriminator for note in notes if isinstance(note, FieldInfo)]
            tag = next((name for name in tags if isinstance(name, str)), tag)
        elif get_origin(kind) in (Union, UnionType):
            members = [member for member in get_args(kind) if member is not NoneType]
            if len(members) > 1:
                return members, tag
            kind = members[0]
        else:
            return [kind], tag


def _child_kind(kind: Any, key: str | int) -> Any:
    """The annotation of what ``key`` names inside a value of ``kind``; None if that isn't known."""
    field = _fields(kind).get(str(key))
    if field is not None:
        return Annotated[field.annotation, field]
    arguments = get_args(kind)
    if get_origin(kind) is tuple and Ellipsis not in arguments and isinstance(key, int):
        return arguments[key] if key < len(arguments) else None
    if get_origin(kind) is Literal or not arguments:
        return None
    return arguments[0] if isinstance(key, int) else arguments[-1]


def _fields(kind: Any) -> dict[str, FieldInfo]:
    return kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else {}


def _tag_values(member: Any, tag: str) -> list[Any]:
    """The values of ``tag`` that choose this member of a tagged union."""
    field = _fields(_alternatives(member)[0][0]).get(tag)
    return _options(field.annotation) if field else []


def _options(kind: Any) -> list[Any]:
    """The values that a Literal or an Enum allows."""
    kind = _alternatives(kind)[0][0]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [member.value for member in kind]
    return list(get_args(kind)) if get_origin(kind) is Literal else []


def _named_member(members: list[Any], label: str) -> Any:
    """The union's member that pydantic calls ``Name``, ``list[Name]`` or ``function-after[f(), Name]``."""
    kinds = {getattr(_alternatives(member)[0][0], "__name__", "").lower(): member for member in members}
    first_word, *_ = label.lower().split("[")
    words = [first_word, *re.findall(r"\w+", label.lower())[::-1]]
    return next((kinds[word] for word in words if word in kinds), None)


def _found(value: Any) -> str:
    """A value as YAML's writer knows it: ``the text 'ten'``, ``the whole number 3``, ``a list``."""
    if isinstance(value, str):
        return f"the text {_shown(value)}"
    if isinstance(value, Mapping | list):
        name = "mapping" if isinstance(value, Mapping) else "list"
        return f"a {name}" if value else f"an empty {name}"
    names = {bool: "the boolean", int: "the whole number", float: "the number"}
    return f"{names[type(value)]} {_plain(value)}" if type(value) in names else "nothing (null)"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _shown(text: str) -> str:
    """Text in quotes on one line, cut when it is long."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _shown_tag(tag: str) -> str:
    return _shown(tag.replace(_TAG, "!!"))[1:-1]


def _dotted(keys: Keys) -> str:
    """``rewards.0.weight``; a key that isn't a plain word stands in quotes."""
    parts = (str(key) if re.fullmatch(r"[\w<-]{1,60}", str(key)) else _shown(str(key)) for key in keys)
    return _clipped(".".join(parts))


def _printable(text: str) -> str:
    """What a terminal would act on, and what can't be written to it, as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _clipped(text: str) -> str:
    """The beginning and the end of what is too long to be read in a message."""
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN // 2]} ... {text[-MAX_SHOWN // 2 :]}"


def _is_unicode(text: str) -> bool:
    """False if a ``"\\uD800"`` left half of a surrogate pair, which neither JSON nor a file can hold."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
