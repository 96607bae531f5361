"""A YAML file and ``--set`` overrides to a typed config. An error names the file, the line and the key.

`yaml_text` reads the text, pydantic checks the values in strict JSON mode, `explain` words its errors.

For authors of schemas: a union has a discriminator or consists of plain values. Below a validator with
``mode="before"`` the values are Python's, so strict mode refuses a list for a tuple.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rlhf_cli.config.base import REMOVED, UnreadError
from rlhf_cli.config.explain import explain
from rlhf_cli.config.stage import Stage
from rlhf_cli.config.yaml_text import Tree
from rlhf_cli.printing import did_you_mean

M = TypeVar("M", bound=BaseModel)

EXTENDS = (
    "Another YAML file, relative to this one. Its values are taken where this file has none: mappings are merged, "
    "lists and plain values are replaced."
)


def load_config(path: str | Path, schema: type[M], overrides: Sequence[str] = ()) -> M:
    """Read the YAML file at ``path`` with the files that it extends, and apply ``overrides``.

    Each override is ``dotted.key=value``. The value is YAML, so ``a.b=null``, ``a=[1, 2]`` and ``a={b: 1}`` work.
    Overrides apply in order, before validation:

    - A list item is named by its index; the index one past the end appends.
    - Null unsets a key that has no null in the schema, so that its default applies.
    - An absent or null section is created, as a list where the next part is an index. A list that exists only as
      the schema's default cannot be changed in part: ``rewards.0.weight=2`` needs ``rewards`` in the file.
    - Setting below a plain value replaces it by a mapping: ``train.path=x`` on ``train: file.jsonl``.

    A stage's ``artifacts`` may name other keys in braces: ``artifacts/run-{seed}``.

    Raises:
        ConfigError: one line for each problem, in the order of the file, of the files it extends, of ``overrides``.
    """
    tree = Tree(overrides)
    tree.load(path)
    return _validated(tree, schema)


def load_values(values: dict[str, Any], schema: type[M], overrides: Sequence[str], name: str) -> M:
    """Plain values with ``overrides`` as a ``schema``. Errors call the values ``name``."""
    tree = Tree(overrides)
    tree.take(values, name)
    return _validated(tree, schema)


def _validated(tree: Tree, schema: type[M]) -> M:
    """Apply the overrides of ``tree``, check its values, and fill keys in braces; raises ConfigError."""
    for number, override in enumerate(tree.overrides):
        tree.override(number, override)
    if tree.problems:
        raise tree.error()
    for name, value in REMOVED.items():
        *section, key = name.split(".")
        values = tree.value.get(section[0]) if section else tree.value
        if isinstance(values, dict) and values.get(key) == value:
            tree.remove((*section, key))
    while True:
        try:
            config = schema.model_validate_json(json.dumps(tree.value), strict=True)
            break
        except ValidationError as error:
            if not _without_unread(tree, schema, error):
                raise tree.error() from None
    config = _filled(config, tree)
    if tree.problems:
        raise tree.error()
    return config


def _without_unread(tree: Tree, schema: type[BaseModel], error: ValidationError) -> bool:
    """Note the problems of ``tree``; returns whether keys were removed, so that it must be validated again.

    A null of a ``--set``, or of a file that extends another, is removed where the schema has no null. A key that
    nothing reads is removed too, because its section hides the problems of the sections around it.
    """
    details = error.errors(include_url=False)
    causes = [detail.get("ctx", {}).get("error") for detail in details]
    unread = {str(cause): cause.messages for cause in causes if isinstance(cause, UnreadError)}
    problems = list(explain(schema, tree.value, details))
    if any(tree.unset(keys) for keys, _ in problems):
        return True
    is_changed = False
    for keys, message in problems:
        if message not in unread:
            tree.report_invalid(keys, message, at=keys)
        for name, line in unread.get(message, {}).items():
            tree.report_invalid(keys, line, at=(*keys, name))
            is_changed |= tree.remove((*keys, name))
    return is_changed


def config_schema(schema: type[BaseModel]) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of ``schema``, from which an editor completes and explains keys.

    It accepts slightly more than :func:`load_config`: JSON Schema takes ``3.0`` for a whole number, for example.
    """
    described = schema.model_json_schema()
    described["properties"] = {"extends": {"type": "string", "description": EXTENDS}, **described["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}


def _filled(config: M, tree: Tree) -> M:
    """Replace ``{key}`` in a stage's ``artifacts`` by the values of other keys. A problem is noted in ``tree``."""
    if not isinstance(config, Stage):
        return config
    values = config.model_dump(mode="json", exclude={"artifacts"})
    try:
        text = re.sub(r"\{([^{}]*)\}", lambda match: _filling(values, match[1]), config.artifacts)
    except ValueError as error:
        tree.report_invalid(("artifacts",), str(error), at=("artifacts",))
        return config
    return config.model_copy(update={"artifacts": text})


def _filling(value: Any, key: str) -> str:
    """The value of the dotted ``key`` in ``value`` as part of a path; raises ValueError if it has none."""
    for part in key.strip().split("."):
        keys = {str(i): item for i, item in enumerate(value)} if isinstance(value, list) else value
        if not isinstance(keys, dict) or part not in keys:
            options = keys if isinstance(keys, dict) else ()
            raise ValueError(f"{{{key}}} is not a key of this config{did_you_mean(part, options)}")
        value = keys[part]
    if value is None or isinstance(value, dict | list):
        what = "is null" if value is None else "is a section or a list"
        raise ValueError(f"{{{key}}} {what}, must be a plain value")
    return re.sub(r"[^\w.+=-]+", "-", value if isinstance(value, str) else json.dumps(value))
