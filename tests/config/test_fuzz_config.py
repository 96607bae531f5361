"""Mutated configs: each is either valid or refused with readable messages, quickly."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import subprocess
import sys
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.config.by_stage import CONFIGS
from rlhf_cli.config.loader import load_config
from rlhf_cli.config.stage import STAGES, Stage
from rlhf_cli.config.yaml_text import dump_config
from rlhf_cli.errors import ConfigError, UserError
from rlhf_cli.run.identity import identity, require_files, require_inputs
from rlhf_cli.run.launch import explained
from support.paths import ROOT

FUZZ = settings(
    max_examples=80, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@cache
def bases() -> list[tuple[str, str]]:
    """Every shipped config with all defaults written out, and as shipped if it extends no other: stage, text."""
    configs = []
    for path in sorted((ROOT / "configs").glob("*/*.yaml")):
        stage = next(s for s in STAGES if path.stem.startswith(s))
        if "extends: " not in (text := path.read_text(encoding="utf-8")):
            configs.append((stage, text))
        configs.append((stage, dump_config(load_config(path, CONFIGS[stage]))))
    return configs


VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 3.0, 0.5, -0.5, 1e-5, 1e308, 5e-324, 2**64, 10**30, math.inf, math.nan, "", " ",
    "x", "3", "null", "no", "<<", "auto", "chat", "{prompt}", "{prompt} {prompt}", "linear", "rloo", "adaptive", "loss",
    "shared", "mse", "penalty", "9/3", "a.py:f", ".py:", "../x", "~x", "org/name", "a b/c", "-x", "ünï 😀", "\u202ex",
    "\u2028", "\x85", "a\nb", "\r", "\x07", "\0", "\x1b[31m", "\ud800", "\ufffe", "x" * 300, "é" * 3000, "x\n" * 500,
    [], {}, [1, 2], ["a"], [[[]]], [None], {"path": "p"}, {"path": "p", "select": "0/2"}, {"type": "reward_model"},
    {"type": "function", "function": "a.py:f"}, {"r": 4}, {"a": {"b": {"c": 1}}}, {1: 2}, {None: 1}, {"": 1},
    {"x" * 500: 1}, b"bytes", {"a", "b"}, list(range(2000)), {f"k{i}": i for i in range(300)},
]  # fmt: skip
KEYS: list[Any] = ["path", "train", "type", "num_step", "lr", "a.b", "Seed", "ppo", "lora", "ü", "k" * 200, 3, None]
PIECES = [
    "1e-5", ".nan", "-.inf", "1e999", '"\\uD800"', '"\\0"', "9" * 30, "0o17", "1:30", "ü😀", "\u2028", "\x85",
    "\ufeff", "\x00", "\x1b", "\t", "\r", "\r\n", "\n", "  ", " ", "[", "]", "{", "}", "{a: {b: c}}",
    "*a", "<<: *a", "<<: 3", "!!int", "!foo", "!!binary aGk=", "!!set {a}", "!!timestamp 2024-01-01", "? [a]\n: b",
    "!!python/name:os.system", ": ", "- ", "# ", "|\n", ">-\n", "|9\n", "%YAML 1.1\n", "---\n", "...\n", ",", "'", '"',
    "\\", "@", "`", "type: function", "seed: 1", "num_steps: 3", "[{a: " * 300, "x" * 5000, "a: &a [*a]\n",
]  # fmt: skip
OVERRIDES = [
    "seed=3", "seed=x", "seed", "=1", "x=1", "a=[", "artifacts=a", "data.train.path=x", "optimizer.betas.0=0.5",
    "optimizer.betas.5=1", "rewards.0.weight=2", "rewards={}", "model.path=null", "data=\ud800", "\udc80=1",
    "a." * 60 + "b=1", "model.scratch.config." + "x" * 3000 + "=1", "seed=" + "9" * 5000, "artifacts=" + "y" * 5000,
]  # fmt: skip


def nodes(tree: Any) -> list[tuple[Any, Any]]:
    """Every (mapping or list, key or index) of a tree."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else []
    return [(tree, key) for key in keys] + [inner for key in keys for inner in nodes(tree[key])]


def verdict(stage: str, overrides: list[str], path: Path) -> str:
    """ "valid" or "refused": the way a config is loaded, and used before a model or data is."""
    start = time.process_time()
    try:
        config: Stage = load_config(path, CONFIGS[stage], overrides)
    except ConfigError as error:
        for line in str(error).split("\n"):
            assert line.startswith((f"{path}:", "--set ")), line[:200]
            assert line.isprintable(), line[:200]
            assert 15 < len(line.removeprefix(str(path))) <= 500, line[:200]
        return "refused"
    finally:
        assert time.process_time() - start < 5
    for check in (require_inputs, require_files, identity):
        with contextlib.suppress(UserError), explained(path, config.artifacts):
            check(config)
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path, CONFIGS[stage]) == config, "differs after it is written and read again"
    return "valid"


def check(write: Any, changes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(ROOT / "data")
    ends: Counter[str] = Counter()

    @FUZZ
    @given(st.sampled_from(bases()), changes, st.just([]) | st.lists(st.sampled_from(OVERRIDES), max_size=2))
    def load(base: tuple[str, str], changed: Any, overrides: list[str]) -> None:
        path = tmp_path / "config.yaml"
        path.write_bytes(write(base[1], changed))
        ends[verdict(base[0], overrides, path)] += 1

    load()
    assert min(ends["valid"], ends["refused"]) > 3, ends


def test_mutated_values_are_usable_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = st.sampled_from(["replaced", "scaled", "scaled", "removed", "renamed", "wrapped"])

    def write(text: str, changes: list[Any]) -> bytes:
        tree = yaml.safe_load(text)
        for at, kind, value, name in changes:
            if not (places := nodes(tree)):
                break
            holder, key = places[at % len(places)]
            old = holder[key]
            if kind == "removed":
                del holder[key]
            elif kind == "renamed" and isinstance(holder, dict):
                holder[name] = holder.pop(key)
            elif kind == "wrapped":
                holder[key] = [old]
            elif kind == "scaled" and isinstance(old, bool | int | float | str):
                holder[key] = not old if isinstance(old, bool) else old * 2
            else:
                holder[key] = copy.deepcopy(value)
        return yaml.safe_dump(tree, allow_unicode=True, sort_keys=False).encode("utf-8", "surrogatepass")

    changes = st.tuples(st.integers(0, 9999), kinds, st.sampled_from(VALUES), st.sampled_from(KEYS))
    check(write, st.lists(changes, min_size=1, max_size=3), tmp_path, monkeypatch)


def test_mutated_text_is_usable_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of YAML and bytes come in, lines go, and the encoding changes."""

    def write(text: str, changed: Any) -> bytes:
        changes, encoding = changed
        for at, gone, piece in changes:
            place = at % (len(text) + 1)
            text = text[:place] + piece + text[place + gone :]
        return text.encode(encoding, "surrogatepass" if encoding.startswith("utf") else "replace")

    piece = st.sampled_from(PIECES) | st.text(max_size=5)
    change = st.tuples(st.integers(0, 99_999), st.sampled_from([0, 0, 1, 9, 80, 99_999]), piece)
    encodings = st.sampled_from(["utf-8"] * 9 + ["utf-16", "utf-8-sig", "latin-1", "cp037"])
    check(write, st.tuples(st.lists(change, max_size=2), encodings), tmp_path, monkeypatch)


JUDGED = ["policy.path=.", "rewards=[{type: function, function: data/support/gold.py:judge}]"]


@pytest.mark.parametrize(
    ("stage", "overrides"),
    [
        ("rm", ["artifacts={name}"]),
        ("rm", ["artifacts={folder}", "model.path={name}"]),
        ("rm", ["artifacts={folder}", "model.path=.", "data.train={name}"]),
        ("ppo", ["artifacts={folder}", *JUDGED, "evaluation.gold={name}.py:f"]),
    ],
)
def test_a_name_that_is_too_long_for_a_file_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, overrides: list[str]
) -> None:
    """Few of the mutated configs have such a name."""
    monkeypatch.chdir(ROOT)
    filled = [text.replace("{name}", "x" * 300).replace("{folder}", f"{tmp_path}/run") for text in overrides]
    options = [part for text in filled for part in ("--set", text)]
    result = CliRunner().invoke(app, [stage, "--config", f"configs/support/{stage}.yaml", *options])
    assert result.exit_code == 2, result.exception
    assert len(result.stderr.splitlines()) == 1


def test_a_config_is_refused_in_a_terminal_that_cannot_show_its_text(tmp_path: Path) -> None:
    """A character that the terminal cannot encode must not end in a traceback."""
    path = tmp_path / "sft.yaml"
    path.write_text("artifacts: ünï 😀\nseed: ünï 😀\n", encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii:backslashreplace"}
    command = [sys.executable, "-m", "rlhf_cli", "config", "check", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    with pytest.raises(ConfigError) as error:
        load_config(path, CONFIGS["sft"])
    expected = f"error: {error.value}\n".encode("ascii", "backslashreplace").decode()
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)
