"""The file of `rlhf sweep`, and the runs that it describes. Does not import torch."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from rlhf_cli.config.base import EXPANDED, LocalPath, Section
from rlhf_cli.config.by_stage import CONFIGS
from rlhf_cli.config.explain import alternatives, child_kind
from rlhf_cli.config.loader import load_config
from rlhf_cli.errors import ConfigError

Key = Annotated[str, Field(min_length=1)]


class Sweep(Section):
    """A few settings of one pipeline, each run in a directory of its own."""

    base: LocalPath
    """The folder with the configs of the stages, for example configs/support."""
    artifacts: Annotated[str, Field(min_length=1), EXPANDED]
    """The directory of the sweep; each run gets a directory inside it, named after its values."""
    grid: Annotated[dict[Key, Annotated[list[Any], Field(min_length=1)]], Field(min_length=1)]
    """The values of each key; every combination is a run. A key applies to each stage that has it. `ppo:seed` is the
    seed of PPO only, so SFT and the reward model are shared."""
    set: dict[Key, Any] = {}
    """Keys that have the same value in every run and another one in the folder's configs."""


@dataclass(frozen=True)
class Member:
    """One run of a sweep."""

    name: str
    values: dict[str, Any]
    """The values of the grid's keys."""
    root: Path
    overrides: list[str]
    """As after `--set` of `rlhf pipeline`."""

    @property
    def setting(self) -> str:
        """The name without the seeds."""
        return _name({key: value for key, value in self.values.items() if not is_seed(key)}) or "all runs"


def load_sweep(path: Path) -> Sweep:
    """The checked file of a sweep; raises ConfigError."""
    return load_config(path, Sweep)


def members_of(sweep: Sweep, path: Path) -> list[Member]:
    """The runs of a sweep, in the order of the grid. Raises ConfigError for a key that no stage of the folder has."""
    folder = Path(sweep.base)
    stages = [stage for stage in CONFIGS if (folder / f"{stage}.yaml").is_file()]
    if not stages:
        raise ConfigError(f"{path}: base: {folder} has no sft.yaml, rm.yaml or ppo.yaml. Name a folder with configs")
    for section, keys in (("set", sweep.set), ("grid", sweep.grid)):
        for key in keys:
            if re.split("[.:]", key)[-1] == "artifacts":
                raise ConfigError(f"{path}: {section}: {key}: each run gets its own directory. Remove the key")
            if not _stages_with(key, stages):
                raise ConfigError(f"{path}: {section}: {key}: no config in {folder} can have this key")
    members = []
    for combination in itertools.product(*sweep.grid.values()):
        values = dict(zip(sweep.grid, combination, strict=True))
        root = Path(sweep.artifacts) / _name(values)
        overrides = [f"artifacts={json.dumps(str(root))}"]
        for key, value in (sweep.set | values).items():
            bare = key.partition(":")[2] or key
            text = json.dumps(value, ensure_ascii=False)
            overrides += [f"{stage}:{bare}={text}" for stage in _stages_with(key, stages)]
        members.append(Member(root.name, values, root, overrides))
    names = [member.name for member in members]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{path}: grid: two runs would have the directory {twice}. Remove the repeated value")
    return members


def is_seed(key: str) -> bool:
    """Whether a key of the grid is a seed, over which figures are averaged.

    >>> is_seed("seed"), is_seed("ppo:seed"), is_seed("ppo.kl_coef")
    (True, True, False)
    """
    return key.partition(":")[2] == "seed" or key == "seed"


def _stages_with(key: str, stages: Sequence[str]) -> list[str]:
    """The stages that a key applies to: the one in front of its colon, or all whose config can have it."""
    stage, colon, bare = key.partition(":")
    if colon:
        return [stage] if stage in stages and _has(CONFIGS[stage], bare) else []
    return [stage for stage in stages if _has(CONFIGS[stage], key)]


def _has(kind: Any, key: str) -> bool:
    """Whether a config can have this dotted key. Values that are checked later, such as an index, are accepted."""
    first, _, rest = key.partition(".")
    children = [child for member in alternatives(kind)[0] for child in _children(member, first)]
    return bool(children) and (not rest or any(_has(child, rest) for child in children))


def _children(member: Any, key: str) -> Iterator[Any]:
    child = child_kind(member, int(key) if key.isdecimal() else key)
    if child is not None:
        yield child


def _name(values: dict[str, Any]) -> str:
    """The name of a run's directory: the last part of each key, or the complete key where two have the same.

    >>> _name({"ppo.kl_coef": 0.1, "ppo:seed": 1}), _name({"ppo:optimizer.eps": 1, "rm:optimizer.eps": 2})
    ('kl_coef=0.1_seed=1', 'ppo-optimizer.eps=1_rm-optimizer.eps=2')
    """
    last = [re.split("[.:]", key)[-1] for key in values]
    words = last if len(set(last)) == len(last) else list(values)
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values.values()]
    pairs = [f"{word}={text}" for word, text in zip(words, texts, strict=True)]
    return "_".join(re.sub(r"[^\w.+=-]+", "-", pair) for pair in pairs)
