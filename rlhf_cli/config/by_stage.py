"""The schema of each stage's config file, and which stage a file is for."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf_cli.config.loader import load_config
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.config.stage import STAGES
from rlhf_cli.config.yaml_text import Tree
from rlhf_cli.errors import ConfigError
from rlhf_cli.program import command, set_options

AnyConfig = SFTConfig | RMConfig | PPOConfig
CONFIGS: dict[str, type[AnyConfig]] = {"sft": SFTConfig, "rm": RMConfig, "ppo": PPOConfig}


def load_stage_config(stage: str, path: str | Path, overrides: Sequence[str] = ()) -> AnyConfig:
    """The checked config of a stage. A file written for another stage is refused in one line."""
    try:
        return load_config(path, CONFIGS[stage], overrides)
    except ConfigError:
        other = _other_stage(stage, Path(path), overrides)
        if other is None:
            raise
        run = command(other, "--config", str(path), *set_options(overrides))
        raise ConfigError(f"{path}: is a config for the stage {other}, not {stage}. Run: {run}") from None


def stage_files(folder: Path, place: str = "") -> dict[str, Path]:
    """The configs in a folder by stage; raises ConfigError without any. `place` is where the folder was named."""
    files = {stage: folder / f"{stage}.yaml" for stage in STAGES if (folder / f"{stage}.yaml").is_file()}
    if not files:
        raise ConfigError(f"{place}{folder}: has no sft.yaml, rm.yaml or ppo.yaml. Give a folder that has at least one")
    return files


def stage_of(file: Path, stage: str | None) -> str:
    """`stage` if it is given, else the stage in the file's name: sft.yaml, rm_scores.yaml, my-ppo.yaml."""
    if stage is not None:
        return stage
    named = _stages_in_name(file)
    if len(named) != 1:
        if not file.exists():
            raise ConfigError(f"{file}: no such file, must be a YAML config")
        raise ConfigError(f"{file}: its name does not say which stage it is for. Give --stage sft, rm or ppo")
    return named[0]


def _stages_in_name(file: Path) -> list[str]:
    return [stage for stage in STAGES if stage in file.stem.replace("-", "_").split("_")]


def _other_stage(stage: str, path: Path, overrides: Sequence[str]) -> str | None:
    """The stage whose config this file is instead of `stage`'s, or None.

    A file that is named after `stage` is one of its own, whatever is wrong with it. Another one belongs to the
    stage that reads it without a problem, or else that alone has all of its top-level keys.
    """
    if stage in _stages_in_name(path):
        return None
    for other in STAGES:
        with contextlib.suppress(ConfigError):
            load_config(path, CONFIGS[other], overrides)
            return other
    tree = Tree()
    try:
        tree.load(path)
    except ConfigError:
        return None
    fitting = [other for other, schema in CONFIGS.items() if tree.value.keys() <= schema.model_fields.keys()]
    return fitting[0] if len(fitting) == 1 and fitting != [stage] else None


def overrides_for(stage: str, overrides: Sequence[str]) -> list[str]:
    """The overrides that apply to a stage, without their `STAGE:` prefix."""
    return [rest for prefix, rest in map(split_prefix, overrides) if prefix in (None, stage)]


def require_stages(overrides: Sequence[str], files: Mapping[str, Path]) -> None:
    """Raise ConfigError for an override with the prefix of a stage that is not in `files`."""
    for text in overrides:
        stage, _ = split_prefix(text)
        if stage not in (None, *files):
            folder = next(iter(files.values())).parent
            raise ConfigError(
                f"--set {text}: {folder} has no {stage}.yaml that is read here, so this would have no effect. Add the "
                "file or remove the option"
            )


def split_prefix(text: str) -> tuple[str | None, str]:
    """(`sft`, `rm`, `ppo` or None, the override without it). Raises ConfigError for another prefix."""
    prefix, colon, rest = text.partition(":")
    if not colon or not prefix.isalpha():
        return None, text
    if prefix not in STAGES:
        raise ConfigError(f"--set {text}: unknown prefix {prefix}:, the prefix is sft:, rm: or ppo:")
    return prefix, rest
