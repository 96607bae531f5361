"""`rlhf config check`, `show`, `docs` and `schema`, without importing torch."""

from __future__ import annotations

import difflib
import functools
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

from rlhf_cli.commands.options import Overrides, StageOfFile
from rlhf_cli.commands.pipeline import require_lora
from rlhf_cli.config.by_stage import CONFIGS, AnyConfig, load_stage_config, stage_of
from rlhf_cli.config.explain import KEY_SYNONYMS
from rlhf_cli.config.loader import config_schema
from rlhf_cli.config.yaml_text import dump_config
from rlhf_cli.errors import ConfigError, UserError
from rlhf_cli.printing import plain, say


def check(
    files: Annotated[list[Path], typer.Argument(help="YAML files, or folders with YAML files.")],
    stage: StageOfFile = None,
    overrides: Overrides = None,
) -> None:
    """Read config files and report every mistake."""
    problems, loaded = [], list[tuple[Path, str, AnyConfig]]()
    for place in files:
        inside = (sorted(place.glob("*.yaml")) or sorted(place.glob("*/*.yaml"))) if place.is_dir() else [place]
        if not inside:
            raise ConfigError(f"{place}: contains no .yaml file")
        for file in inside:
            try:
                name = stage_of(file, stage)
                loaded.append((file, name, load_stage_config(name, file, overrides or [])))
            except ConfigError as error:
                problems.append(str(error))
    for file, name, config in loaded:
        beside = {other: one for path, other, one in loaded if path.parent == file.parent}
        try:
            require_lora(name, {**beside, name: config}, here=False)
        except UserError as error:
            problems.append(f"{file}: {error}")
        else:
            say(f"{file}: valid {name} config")
    if problems:
        raise ConfigError("\n".join(problems))


def show(
    file: Annotated[Path, typer.Argument(help="A YAML file.")], stage: StageOfFile = None, overrides: Overrides = None
) -> None:
    """Print a config with every default filled in."""
    # Not `say`: YAML escapes control characters itself, and the output is a file that is read again, so it is UTF-8.
    sys.stdout.buffer.write(dump_config(load_stage_config(stage_of(file, stage), file, overrides or [])).encode())


def schema(
    stage: Annotated[Literal["sft", "rm", "ppo"] | None, typer.Argument(help="All three by default.")] = None,
) -> None:
    """Print the JSON Schema of a stage's config, for completion in editors."""
    schemas = {name: config_schema(config) for name, config in CONFIGS.items()}
    say(json.dumps(schemas if stage is None else schemas[stage], indent=2))


class Entry(NamedTuple):
    """A key of a stage's config."""

    name: str
    """The path in the YAML file. For rewards it includes the type: `rewards.http.url`."""
    schema: dict[str, Any]
    """The JSON Schema of its values."""
    is_required: bool
    about: str
    """The description of the section that it holds, if that is one."""

    @property
    def facts(self) -> str:
        """The values that it takes, and its default."""
        return f"{_type(self.schema)}; {_default(self)}"


def docs(
    key: Annotated[
        str,
        typer.Argument(
            help="A stage, a section or a key: ppo, ppo.rollout, rm.loss.",
            autocompletion=lambda incomplete: [key for key in all_keys() if key.startswith(incomplete)],
        ),
    ],
) -> None:
    """Explain a key, or every key of a section."""
    path = ".".join(part for part in key.strip().split(".") if part)
    stage, _, rest = path.partition(".")
    # `rm.loss` begins with a stage. Without one (`loss`, `rollout.top_p`) the first stage that has the key is used.
    places = [(stage, rest)] if stage in CONFIGS else []
    for stage, name in [*places, *((stage, path) for stage in CONFIGS)]:
        chosen = [entry for entry in entries(stage) if f"{entry.name}.".startswith(name and f"{name}.")]
        if path and chosen:
            width = min(100, shutil.get_terminal_size().columns)
            say("\n\n".join(_text(stage, entry, width) for entry in chosen))
            return
    raise ConfigError(f"{key}: no such key{_similar(key)}")


@functools.cache
def entries(stage: str) -> list[Entry]:
    """Every key of a stage's config: a section first, then the keys below it."""
    schema = CONFIGS[stage].model_json_schema(mode="serialization")

    def sections(value: dict[str, Any]) -> list[dict[str, Any]]:
        """The sections that a value can be, directly or in a list or mapping."""
        if "$ref" in value:
            return [schema["$defs"][value["$ref"].rpartition("/")[2]]]
        inner = [*value.get("anyOf", value.get("oneOf", ())), value.get("items"), value.get("additionalProperties")]
        return [section for one in inner if isinstance(one, dict) for section in sections(one)]

    def below(section: dict[str, Any], above: str) -> Iterator[Entry]:
        for name, value in section["properties"].items():
            inside = sections(value)
            about = inside[0].get("description", "") if len(inside) == 1 else ""
            yield Entry(above + name, value, name in section.get("required", ()), about)
            for one in inside:
                kind = f"{one['properties']['type']['const']}." if len(inside) > 1 else ""
                yield from below(one, f"{above}{name}.{kind}")

    return list(below(schema, ""))


def all_keys() -> list[str]:
    return [*CONFIGS, *(f"{stage}.{entry.name}" for stage in CONFIGS for entry in entries(stage))]


def _text(stage: str, entry: Entry, width: int) -> str:
    doc, about = (" ".join(text.split()) for text in (entry.schema.get("description", ""), entry.about))
    wrap = textwrap.TextWrapper(width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    lines = [f"{entry.name}  ({stage}.yaml)", *wrap.wrap(entry.facts), *wrap.wrap(doc)]
    return "\n".join([*lines, *(wrap.wrap(about) if about != doc else [])])


def _default(entry: Entry) -> str:
    if entry.is_required:
        return "required"
    if "$ref" in entry.schema:
        return "optional"
    default = entry.schema["default"]
    if isinstance(default, list) and any(isinstance(item, dict) for item in default):
        items = ", ".join(f"{{type: {item['type']}}}" for item in default)
        return f"default [{items}]"
    return f"default {plain(default) if str(default).strip() else json.dumps(default)}"


def _type(schema: dict[str, Any]) -> str:
    """The values that a JSON Schema allows, in words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type, schema["anyOf"])))
    if "const" in schema:
        return plain(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(map(plain, schema["enum"]))
    if "prefixItems" in schema:
        return f"a list of {len(schema['prefixItems'])}, each {_type(schema['prefixItems'][0])}"
    if schema.get("type") == "array":
        item = _type(schema["items"])
        for one in ("mapping", "text", "number", "whole number"):  # of mappings, of numbers above 0
            if item.removeprefix("a ").startswith(one):
                return f"a list of {one}s{item.removeprefix('a ').removeprefix(one)}"
        return f"a list whose items are each {item}"
    if {"$ref", "oneOf", "properties", "additionalProperties"} & {*schema}:
        return "a mapping"
    names = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text"}
    bounds = {"exclusiveMinimum": "above", "minimum": "at least", "exclusiveMaximum": "below", "maximum": "at most"}
    limits = [f" {word} {schema[name]:g}" for name, word in bounds.items() if name in schema]
    return names.get(schema.get("type", ""), schema.get("type", "any value")) + " and".join(limits)


def _similar(key: str) -> str:
    """The key most like ``key``, as the end of a message."""
    names: dict[str, str] = {}
    for stage in CONFIGS:
        for entry in entries(stage):
            for name in (entry.name, entry.name.rpartition(".")[2]):
                names.setdefault(f"{stage}.{name}", f"{stage}.{entry.name}")
                names.setdefault(name, f"{stage}.{entry.name}")
    head, _, last = key.rpartition(".")
    synonym = KEY_SYNONYMS.get(last.lower(), last)
    wanted = [name for name in (f"{head}.{synonym}".lstrip("."), synonym) if name in names]
    close = wanted or difflib.get_close_matches(key, names, n=1)
    if not close:
        return f". List all keys of a stage with: rlhf config docs {' | '.join(CONFIGS)}"
    return f"; did you mean {names[close[0]]}?"
