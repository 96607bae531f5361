"""Mutated configs: each is either valid or refused with readable messages, quickly and in little memory.

    PYTHONPATH=.:tests python tests/config/test_fuzz_config.py FIRST COUNT     print the problems of these cases as JSON
    PYTHONPATH=.:tests python tests/config/test_fuzz_config.py FIRST           print the case itself

The number of a case determines it, so you can run a failing case alone. The cases run in a separate process, limited to
`MEMORY` bytes and to `SECONDS` of processor time per case.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import gzip
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.config.by_stage import CONFIGS
from rlhf_cli.config.loader import load_config
from rlhf_cli.config.stage import STAGES, Stage
from rlhf_cli.config.yaml_text import dump_config
from rlhf_cli.errors import ConfigError, UserError
from rlhf_cli.run.identity import identity, require_files, require_inputs
from rlhf_cli.run.launch import explained
from support.paths import ROOT, TESTS

SECONDS = 10
MEMORY = 2**30
LONGEST_LINE = 500
Case = tuple[str, bytes, list[str]]
"""A stage, the bytes of its config file, and the overrides."""


# ------------------------------------------------------------------------------------------------ cases


def case(number: int) -> Case:
    """The stage, file and overrides of a case."""
    draw = random.Random(f"config {number}")
    stage, text, tree = draw.choice(bases())
    kind = draw.choices(["tree", "text", "bytes", "large"], [55, 30, 9, 6])[0]
    if kind == "tree":
        file = changed_tree(copy.deepcopy(tree), draw)
    elif kind == "text":
        file = changed_text(text, draw).encode("utf-8", "surrogatepass")
    elif kind == "bytes":
        file = changed_bytes(text, draw)
    else:
        file = large(text, draw)
    return stage, file, draw.sample(OVERRIDES, draw.choice([0] * 8 + [1, 2]))


@cache
def bases() -> list[tuple[str, str, dict[str, Any]]]:
    """Every shipped config twice, as shipped and with all defaults written out: stage, text, values."""
    configs = []
    for path in sorted((ROOT / "configs").glob("*/*.yaml")):
        stage = next(s for s in STAGES if path.stem.startswith(s))
        config: Stage = load_config(path, CONFIGS[stage])
        configs.append((stage, path.read_text(encoding="utf-8"), config.model_dump(mode="json", exclude_unset=True)))
        configs.append((stage, dump_config(config), config.model_dump(mode="json")))
    return configs


VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 1000, 3.0, 0.5, -0.5, 1e-5, 1e308, 5e-324, 2**31, 2**63, 2**64, -(2**64),
    10**30, math.inf, -math.inf, math.nan, "", " ", "x", "3", "1e-5", "true", "null", "~", "no", "=", "<<", "auto",
    "chat", "{prompt}", "{prompt} {prompt}", "cosine", "linear", "gae", "rloo", "adaptive", "loss", "shared", "cpu",
    "mse", "penalty", "0/10", "9/3", "1/0", "a.py:f", ".py:", "../x", "./x", "~x", "org/name", "a b/c", "-x", "x=y",
    "ünï 😀", "\u202ex", "\u2028", "\x85", "a\nb", "a\tb", "\r", "\x07", "\0", "a\0b", "\x1b[31m", "\ud800", "\ufffe",
    "x" * 300, "x" * 5000, "é" * 3000, "x" * 100_000, "x\n" * 500, [], {}, [1, 2], ["a"], [[[]]], [None], {"path": "p"},
    {"path": "p", "select": "0/2"}, {"type": "reward_model"}, {"type": "function", "function": "a.py:f"}, {"r": 4},
    {"a": {"b": {"c": 1}}}, {1: 2}, {None: 1}, {"": 1}, {"x" * 500: 1}, b"bytes", {"a", "b"},
    datetime.date(2024, 1, 1), list(range(2000)), {f"k{i}": i for i in range(300)},
]  # fmt: skip
KEYS: list[Any] = [
    "path", "train", "type", "num_step", "lr", "a.b", "Seed", "ppo", "lora", "ü", " ", "k" * 200, 3, None,
]  # fmt: skip


def changed_tree(tree: dict[str, Any], draw: random.Random) -> bytes:
    """Replace, move, drop, wrap or scale values, and write the tree as YAML."""
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        positions = list(nodes(tree))
        holder, key = draw.choice(positions)
        match draw.randrange(10):
            case 0 | 1:
                holder[key] = draw.choice(VALUES)
            case 2 | 8 | 9:
                holder[key] = altered(holder[key], draw)
            case 3:
                holder[key] = draw.choice([[holder[key]], {"a": holder[key]}, str(holder[key]), None])
            case 4:
                del holder[key]
            case 5:
                other, name = draw.choice(positions)
                if name in other if isinstance(other, dict) else name < len(other):
                    # YAML writes an object that occurs twice as an anchor and an alias, even inside itself.
                    holder[key] = other[name]
            case 6:
                if isinstance(holder, dict):
                    holder[draw.choice(KEYS)] = holder.pop(key)
            case 7:
                if isinstance(holder, dict):
                    holder[draw.choice(KEYS)] = draw.choice(VALUES)
        if not list(nodes(tree)):
            break
    written = yaml.safe_dump(tree, allow_unicode=draw.random() < 0.5, sort_keys=False, default_flow_style=None)
    return written.encode("utf-8", "surrogatepass")


def altered(value: Any, draw: random.Random) -> Any:
    """Another value of the same type, which may be valid."""
    if isinstance(value, bool) or value is None:
        return draw.choice([True, False, None])
    if isinstance(value, int):
        return draw.choice([value + 1, value * 2, value // 2, -value])
    if isinstance(value, float):
        return draw.choice([value * 2, value / 3, value / 1e6, -value])
    if isinstance(value, str):
        return value + draw.choice(["x", " ", "/../x", "ü😀", "\n", "\x1b[31m", "\0", "é" * 200])
    return value


def nodes(tree: Any) -> list[tuple[Any, Any]]:
    """Every (mapping or list, key or index) of a tree. A node that contains itself is visited once."""
    result: list[tuple[Any, Any]] = []
    seen: set[int] = set()
    pending = [tree]
    while pending:
        node = pending.pop()
        if not isinstance(node, dict | list) or id(node) in seen or any(node is value for value in VALUES):
            continue
        seen.add(id(node))
        keys = list(node) if isinstance(node, dict) else range(len(node))
        result += [(node, key) for key in keys]
        pending += [node[key] for key in keys]
    return result


PIECES = [
    "null", "true", "no", "3", "-1", "1e-5", ".nan", "-.inf", "1e999", "'3'", '"\\uD800"', '"\\0"', '"\\e[31m"',
    "9" * 30, "0o17", "1:30", "1_000", "text", "ü😀", "\u2028", "\x85", "\ufeff", "\x00", "\x01", "\x1b", "\x7f",
    "\t", "\r", "\r\n", "\n", "\n\n", "  ", " ", "[", "]", "{", "}", "[]", "{}", "[[1, 2], [3]]", "{a: {b: c}}", "&a",
    "&a ", "*a", "*undefined", "<<: *a", "<<: [*a, *a]", "<<: 3", "<<", "!!int", "!!str", "!foo", "!!binary aGk=",
    "!!set {a}", "!!omap [a: 1]", "!!timestamp 2024-01-01", "!!python/object/apply:os.system [echo]",
    "!!python/name:os.system", "!<tag:x>", "? ", "? [a]\n: b", ": ", "- ", "# ", "|\n", ">-\n", "|9\n", "%YAML 1.1\n",
    "%TAG ! x\n", "---\n", "...\n", ",", "'", '"', "\\", "@", "`", "type: function", "path: x", "seed: 1",
    "num_steps: 3", "training: {num_steps: 1}", "optimizer: *a",
]  # fmt: skip


def changed_text(text: str, draw: random.Random) -> str:
    """Insert, remove, double and swap lines and characters; add tabs, anchors, tags and documents."""
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        lines = text.split("\n")
        row = draw.randrange(len(lines))
        line, piece = lines[row], draw.choice(PIECES)
        column = draw.randint(0, len(line))
        key, colon, rest = line.partition(": ")
        match draw.randrange(12):
            case 0 | 1:
                lines[row] = f"{key}{colon or ': '}{piece}"
            case 2:
                lines[row] = line[:column] + piece + line[column:]
            case 3:
                del lines[row]
            case 4:
                lines.insert(draw.randrange(len(lines) + 1), line)
            case 5:
                lines[row] = draw.choice(["  ", "    ", " ", "- ", "\t"]) + line
            case 6:
                lines[row] = line[:column] + line[column + 1 :]
            case 7:
                lines[row] = key + colon + draw.choice(lines).partition(": ")[2]
            case 8:
                lines[row] = f"{key}{colon or ': '}" + draw.choice("[{-") * draw.randint(1, 60) + "1"
            case 9:
                lines[row] = f"{key}{colon or ': '}&a {rest}"
                lines.insert(draw.randint(row + 1, len(lines)), draw.choice(["  <<: *a", "<<: *a", "x: *a", "  y: *a"]))
            case 10:
                lines[row] = line.lstrip()
            case 11:
                draw.shuffle(lines)
        text = "\n".join(lines) or "\n"
    return text


def changed_bytes(text: str, draw: random.Random) -> bytes:
    """Change the encoding, the line ends, bits or bytes; truncate the file; or write bytes that are not text."""
    data = text.encode()
    match draw.randrange(9):
        case 0:
            name = draw.choice(["utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7", "cp037", "latin-1"])
            return text.encode(name, "replace")
        case 1:
            return text.replace("\n", draw.choice(["\r\n", "\r", "\x85", "\u2028", "\0", "\n\n"])).encode()
        case 2:
            return data[: draw.randrange(len(data))]
        case 3:
            return gzip.compress(data, mtime=0)
        case 4:
            return draw.randbytes(draw.choice([0, 1, 7, 400, 20_000]))
        case 5:
            return bytes([draw.choice([0, 9, 32, 255])]) * draw.choice([1, 100, 5000])
        case 6:
            return data * draw.choice([2, 30])
        case _:
            for _ in range(draw.choice([1, 2, 20])):
                at = draw.randrange(len(data))
                data = data[:at] + bytes([data[at] ^ 1 << draw.randrange(4)]) + data[at + 1 :]
            return data


def large(text: str, draw: random.Random) -> bytes:
    """Write alias bombs, deep nesting, long scalars and names, many keys, many errors, or cycles."""
    n = draw.choice([10, 300, 3000])
    wide, deep = draw.randint(2, 12), draw.randint(2, 30)
    one = draw.choice(["[{}]", "{{<<: [{}]}}", "{{k: [{}]}}"])
    laughs = "a0: &a0 {x: 1}\n" + "".join(
        f"a{i}: &a{i} {one.format(', '.join([f'*a{i - 1}'] * wide))}\n" for i in range(1, deep)
    )
    word = draw.choice(["x", "é", "1", "_", "- ", "? ", "'", '"', "\\", "[", "{", "a: "])
    more = [
        laughs,
        text + laughs,
        draw.choice(["[", "{", "- ", "? ", "a: {", "[{a: "]) * n,
        "\n".join(" " * i + "a:" for i in range(n // 5)),
        text.replace("seed: 0", f"seed: {word * n}"),
        text + f"{word * n}: 1\n",
        text + f"x: *{'a' * n}\n",
        text + f"x: !{'a' * n} 1\ny: &{'b' * n} 1\n",
        text + 'x: "' + "\\u0041" * n + '"\n',
        text + "".join(f"key{i}: {i}\n" for i in range(n)),
        text + "".join(f"seed: {i}\n" for i in range(n)),
        text.replace("optimizer:\n", "optimizer:\n" + "".join(f"  learning_rat{i}: 1\n" for i in range(n))),
        "---\n".join([text] * draw.randint(2, 5)),
        text + "x: &a [*a]\n",
        text + "x: &a {<<: *a}\n",
        text + "x: &a {y: &b {<<: *a, z: *b}}\n",
        text + "#" * n * 10 + "\n",
        text + "x: |\n" + "  line\n" * n,
        text + f"x: {{{', '.join(f'{{a: {i}}}' for i in range(n))}}}\n",
    ]
    return draw.choice(more).encode()


OVERRIDES = [
    "seed=3", "seed=x", "seed", "=1", "", "x=1", "a=[", "a=*b", "artifacts=a", "data.train=x.jsonl",
    "data.train.path=x",
    "optimizer.betas.0=0.5", "optimizer.betas.5=1", "optimizer.betas=[0.1, 0.2]", "rewards.0.weight=2", "rewards={}",
    "model.path=null", "evaluation={}", "data=null", "data=\ud800", "\udc80=1", "seed=\x00", "artifacts=\"\\0\"",
    "ppo.kl_coef=.nan", "training=*a", "a." * 60 + "b=1", "seed." * 3000 + "b=1",
    "model.scratch.config." + "x" * 3000 + "=1",
    "seed=" + "9" * 5000, "0.0=1", "seed=!!python/name:os.system", "artifacts=" + "y" * 5000,
]  # fmt: skip


# --------------------------------------------------------------------------------------------- verdicts


class TooLong(BaseException):
    """A case used up its processor time. The tested code does not catch a BaseException."""


def verdict(number: int, path: Path) -> str:
    """ "valid", "refused", or what is wrong with the way a case is loaded, or used before a model or data is."""
    stage, file, overrides = case(number)
    path.write_bytes(file)
    try:
        config: Stage = load_config(path, CONFIGS[stage], overrides)
    except ConfigError as error:
        return unreadable(str(error), path) or "refused"
    for check in (require_inputs, require_files, identity):
        with contextlib.suppress(UserError), explained(path, config.artifacts):
            check(config)
    path.write_text(dump_config(config), encoding="utf-8")
    return "valid" if load_config(path, CONFIGS[stage]) == config else "differs after it is written and read again"


def unreadable(message: str, path: Path) -> str:
    """The problem of an error message, which must have one readable line per error; "" if there is none."""
    for line in message.split("\n"):
        if not line.startswith((f"{path}:", "--set ")):
            return f"does not name the file or the override: {line[:200]}"
        if not line.isprintable():
            return f"is not printable: {line[:200]!r}"
        if not 15 < len(line.removeprefix(str(path))) <= LONGEST_LINE:
            return f"{len(line)} characters long: {line[:200]}"
    return "is a traceback" if "Traceback" in message else ""


def work(first: int, count: int) -> dict[str, Any]:
    """The verdicts of some cases in this process, with a limit on its memory and on the time of each case."""
    bases()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    def raise_too_long(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        raise TooLong

    signal.signal(signal.SIGVTALRM, raise_too_long)
    verdicts = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("data").symlink_to(ROOT / "data")
        for number in range(first, first + count):
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
            try:
                verdicts[number] = verdict(number, Path(folder) / "config.yaml")
            except BaseException:
                verdicts[number] = traceback.format_exc(limit=-2)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    counts = Counter(verdicts.values())
    return {
        "valid": counts["valid"],
        "problems": {number: found for number, found in verdicts.items() if found not in ("valid", "refused")},
        "heavy": sorted({"torch", "transformers", "datasets", "numpy"} & set(sys.modules)),
    }


def separately(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A program of Python in a process of its own."""
    path = os.pathsep.join([str(ROOT), str(TESTS), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, **variables}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=900, env=env, check=False
    )


def test_mutated_configs_are_usable_or_refused() -> None:
    """The files and inputs of a valid one exist, or a UserError names the missing ones."""
    count = 250
    process = separately(__file__, "0", str(count))
    assert process.returncode == 0, process.stderr[-3000:]
    found = json.loads(process.stdout)
    assert found["problems"] == {}
    # Mutations that leave too few or too many configs valid would find nothing.
    assert 0.1 * count < found["valid"] < 0.5 * count
    assert found["heavy"] == []


@pytest.mark.parametrize(
    ("stage", "key", "others"),
    [
        ("rm", "artifacts", []),
        ("rm", "model.path", []),
        ("rm", "data.train", ["model.path=."]),
        (
            "ppo",
            "evaluation.gold",
            ["policy.path=.", "rewards=[{type: function, function: data/support/gold.py:judge}]"],
        ),
    ],
)
def test_a_name_that_is_too_long_for_a_file_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, key: str, others: list[str]
) -> None:
    """Few of the mutated configs have such a name."""
    monkeypatch.chdir(ROOT)
    name = "x" * 300 + (".py:f" if key == "evaluation.gold" else "")
    overrides = [f"artifacts={tmp_path}/run", *others, f"{key}={name}"]
    options = [part for text in overrides for part in ("--set", text)]
    result = CliRunner().invoke(app, [stage, "--config", f"configs/support/{stage}.yaml", *options])
    assert result.exit_code == 2, result.exception
    assert len(result.stderr.splitlines()) == 1


def test_a_config_is_refused_in_a_terminal_that_cannot_show_its_text(tmp_path: Path) -> None:
    """A character that the terminal cannot encode must not end in a traceback."""
    path = tmp_path / "sft.yaml"
    path.write_text("artifacts: ünï 😀\nseed: ünï 😀\n", encoding="utf-8")
    done = separately("-m", "rlhf_cli", "config", "check", str(path), PYTHONIOENCODING="ascii:backslashreplace")
    with pytest.raises(ConfigError) as error:
        load_config(path, CONFIGS["sft"])
    expected = f"error: {error.value}\n".encode("ascii", "backslashreplace").decode()
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        name, file, overrides = case(int(sys.argv[1]))
        print(name, overrides)
        print(file.decode("utf-8", "backslashreplace"))
    else:
        json.dump(work(int(sys.argv[1]), int(sys.argv[2])), sys.stdout, indent=1)
