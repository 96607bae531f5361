"""`rlhf config check`, `show` and `schema`, without importing torch. `config_docs` has `rlhf config docs`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_cli.commands.pipeline import require_lora
from rlhf_cli.config.by_stage import CONFIGS, known_stage, load_stage_config, stage_of
from rlhf_cli.config.loader import config_schema, dump_config
from rlhf_cli.config.stage import Stage
from rlhf_cli.errors import ConfigError, UserError
from rlhf_cli.printing import say


def check(files: Sequence[Path], stage: str | None, overrides: Sequence[str]) -> None:
    """Print a line for each valid file. Raise one ConfigError with every mistake of all files.

    Adapters are checked against their model, if that is on this machine or another file of the folder describes it.
    """
    problems, loaded = [], list[tuple[Path, str, Stage]]()
    for file in _expand(files):
        try:
            name = stage_of(file, stage)
            loaded.append((file, name, load_stage_config(name, file, overrides)))
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


def show(file: Path, stage: str | None, overrides: Sequence[str]) -> None:
    """Print the resolved config as YAML."""
    # Not `say`: YAML escapes control characters itself, and the output is a file that is read again.
    sys.stdout.write(dump_config(load_stage_config(stage_of(file, stage), file, overrides)))


def schema(stage: str | None) -> None:
    """Print the JSON Schema of a stage, or of all stages by name."""
    if stage is not None:
        say(json.dumps(config_schema(CONFIGS[known_stage(stage)]), indent=2))
    else:
        say(json.dumps({name: config_schema(config) for name, config in CONFIGS.items()}, indent=2))


def _expand(files: Sequence[Path]) -> list[Path]:
    found = []
    for file in files:
        inside = (sorted(file.glob("*.yaml")) or sorted(file.glob("*/*.yaml"))) if file.is_dir() else []
        if file.is_dir() and not inside:
            raise ConfigError(f"{file}: contains no .yaml file")
        found += inside or [file]
    return found
