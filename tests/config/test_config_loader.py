"""The YAML loader: the values that it reads, and the exact message for each error."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from rlhf_cli.config.loader import load_config
from rlhf_cli.config.yaml_text import dump_config
from rlhf_cli.errors import ConfigError

NO_CHARACTER = (
    "Python int too large to convert to C int" if sys.version_info < (3, 13) else "chr() arg not in range(0x110000)"
)
"""What Python says of chr(0xFFFFFFFF)."""


class Base(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Source(Base):
    path: str = Field(min_length=1)
    """Where the rows are."""
    split: Literal["train", "test"] = "train"
    ratio: float = Field(1.0, gt=0, le=1)

    @model_validator(mode="after")
    def check_path(self) -> Source:
        if self.path == "bad":
            raise ValueError("path is bad,\nmust be good")
        return self


class ModelReward(Base):
    type: Literal["model"]
    model: str  # on purpose named as the tag's value: pydantic's `loc` holds both
    weight: float = 1.0


class FunctionReward(Base):
    type: Literal["function"]
    name: Literal["length", "regex"]
    span: tuple[float, float] = (0.0, 1.0)


Reward = Annotated[ModelReward | FunctionReward, Field(discriminator="type")]


class Training(Base):
    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate."""
    num_steps: int = Field(10, ge=1)
    betas: tuple[float, float] = (0.9, 0.95)
    bf16: bool = False
    seed: int | Literal["auto"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    layers: list[int] = Field([1, 2], min_length=1)


Rows = Annotated[Source, BeforeValidator(lambda value: {"path": value} if isinstance(value, str) else value)]


class Data(Base):
    train: Rows
    evals: dict[str, Rows] = {}
    files: list[str] | None = None
    weights: dict[Literal["a", "b"], float] = {}


class Config(Base):
    model: str
    data: Data
    training: Training = Training()
    warm: Training | None = None
    rewards: list[Reward] = []
    main: ModelReward | FunctionReward | None = Field(None, discriminator="type")


GOOD = """\
model: m
data:
  train: t.jsonl
training:
  num_steps: 5
"""


def load(tmp_path: Path, text: str | bytes, *overrides: str, schema: Any = Config) -> Any:
    path = tmp_path / "x.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_config(path, schema, overrides)


def error_lines(tmp_path: Path, text: str | bytes, *overrides: str, schema: Any = Config) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides, schema=schema)
    return str(caught.value).replace(str(tmp_path / "x.yaml"), "x.yaml").split("\n")


# -- values that are read ------------------------------------------------------------------------------------------
def test_defaults_sections_and_types(tmp_path):
    config = load(tmp_path, GOOD)
    assert config == Config(model="m", data=Data(train=Source(path="t.jsonl")), training=Training(num_steps=5))
    assert load_config(str(tmp_path / "x.yaml"), Config) == config


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5), ("1E5", 1e5), (".5e-3", 5e-4), ("+1e3", 1e3), ("1.", 1.0), ("-.5", -0.5),
        ("1_000", 1000), ("-0", 0), ("+3", 3), ("1_0.5", 10.5), ("18446744073709551615", 2**64 - 1),
        ("true", True), ("True", True), ("TRUE", True), ("false", False), ("tRue", "tRue"),
        ("yes", "yes"), ("no", "no"), ("on", "on"), ("Off", "Off"), ("y", "y"),
        ("~", None), ("null", None), ("", None), ("''", ""), ("'null'", "null"), ("=", "="),
        ("0o17", "0o17"), ("017", "017"), ("0x1F", "0x1F"), ("0b11", "0b11"), ("1:30", "1:30"),
        ("1:30.5", "1:30.5"), ("2024-01-01", "2024-01-01"), ("1__0", "1__0"), ("1.2.3", "1.2.3"),
        ("nan", "nan"), ("inf", "inf"), ("e5", "e5"), ("1e", "1e"), (".", "."), ("'3'", "3"),
        ("!!str 3", "3"),
        ("!!float 3", 3.0), ("!!int '3'", 3), ("<<", "<<"), ("$HOME", "$HOME"), ("ünï 😀", "ünï 😀"),
    ],
)  # fmt: skip
def test_scalars(tmp_path, text, value):
    read = load(tmp_path, f"v: {text}\n", schema=create_model("Anything", __base__=Base, v=(Any, ...))).v
    assert read == value
    assert type(read) is type(value)


def test_an_int_becomes_a_float_and_a_list_a_tuple(tmp_path):
    training = load(tmp_path, GOOD + "  learning_rate: 1\n  betas: [0, 1e-1]\n  dtype: bfloat16\n").training
    assert (training.learning_rate, training.betas, training.dtype) == (1.0, (0.0, 0.1), "bfloat16")
    assert type(training.learning_rate) is float
    assert type(training.betas[0]) is float


def test_anchors_and_aliases(tmp_path):
    text = "model: &m m\ndata: {train: *m}\ntraining: &t {num_steps: 5, bf16: true}\nwarm: *t\n"
    config = load(tmp_path, text)
    assert config.data.train.path == "m"
    assert config.warm == Training(num_steps=5, bf16=True)
    changed = load(tmp_path, text, "training.num_steps=6", "warm.bf16=false")
    assert (changed.training.num_steps, changed.warm) == (6, Training(num_steps=5))


def test_unions(tmp_path):
    text = GOOD + "rewards:\n- {type: model, model: a}\n- {type: function, name: length, span: [1, 2]}\n"
    assert load(tmp_path, text).rewards == [
        ModelReward(type="model", model="a"),
        FunctionReward(type="function", name="length", span=(1.0, 2.0)),
    ]
    assert load(tmp_path, GOOD.replace("t.jsonl", "{path: p}")).data.train == Source(path="p")


def test_byte_order_mark_and_line_ends(tmp_path):
    assert load(tmp_path, b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode()) == load(tmp_path, GOOD)


# -- files and YAML ----------------------------------------------------------------------------------------
def test_files_that_cannot_be_read(tmp_path):
    def error_for(path: Path | str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(path, Config)
        return str(caught.value)

    assert error_for(tmp_path / "no.yaml") == f"{tmp_path}/no.yaml: no such file, must be a YAML config"
    assert error_for(tmp_path) == f"{tmp_path}: is a directory, must be a YAML config"
    assert error_for("a\0b.yaml").endswith("cannot be read (embedded null byte)")
    assert error_for("a" * 5000).endswith("cannot be read (File name too long)")
    assert error_for("/dev/zero") == "/dev/zero: more than 256 kB, too large for a config"
    assert error_lines(tmp_path, b"model: m\ndata: \xff\n") == ["x.yaml:2: byte 0xff, must be UTF-8 text"]
    assert error_lines(tmp_path, GOOD.encode("utf-16")) == ["x.yaml:1: byte 0xff, must be UTF-8 text"]
    assert "expected a single document" in error_lines(tmp_path, GOOD + "---\na: 3\n")[0]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "1: the file is empty, must be a mapping of keys to values"),
        ("# only this\n", "1: the file is empty, must be a mapping of keys to values"),
        ("\n- a\n", "2: found a list, must be a mapping"),
        ("word\n", "1: found the text 'word', must be a mapping"),
        ("a: [1\nb: 2",
         "2: column 2: not valid YAML, while parsing a flow sequence, expected ',' or ']', but got ':'"),
        ("a:\n  b: 1\n   c: 2", "3: column 5: not valid YAML, mapping values are not allowed here; "
         "the line is indented too far, or its text has a colon and needs quotes"),
        ("a:\n  b: 1\n c: 2", "3: column 2: not valid YAML, while parsing a block mapping, expected <block end>, "
         "but found '<block mapping start>'; the indentation differs from the lines above: "
         "indent the keys of one section by the same spaces"),
        ("a:\n\tb: 2", "2: column 1: not valid YAML, while scanning for the next token, "
         "found character '\\t' that cannot start any token; indent with spaces"),
        ("a: *b", "1: column 4: not valid YAML, found undefined alias 'b'"),
        ("a: 1\n\n'\x01'", "3: not valid YAML, character U+0001 is not allowed"),
        ('a: "\\U7FFFFFFF"', "1: not valid YAML, chr() arg not in range(0x110000)"),
        ('a: "\\UFFFFFFFF"', f"1: not valid YAML, {NO_CHARACTER}"),
        ("[" * 5000, "1: column 41: not valid YAML, nested more than 40 deep"),
    ],
)  # fmt: skip
def test_yaml_that_cannot_be_read(tmp_path, text, line):
    assert error_lines(tmp_path, text) == [f"x.yaml:{line}"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("warm: !!python/object/apply:os.system [echo]",
         "warm: tag !!python/object/apply:os.system is not allowed"),
        ("warm: !foo {a: 1}", "warm: tag !foo is not allowed"),
        ("warm: !!int ten", "warm: the text 'ten' does not fit its tag !!int"),
        ("warm: !!bool yes", "warm: the text 'yes' does not fit its tag !!bool"),
        ("1: x", "the key is '1', must be text; put it in quotes"),
        ("? [a]\n: x", "the key is a list or mapping, must be text"),
        ("!!python/name:os.system a: x", "the key is 'a', must be text"),
        ("warm: &a [*a]", "warm.0: alias on line 6 contains itself"),
        ("warm: {<<: {seed: 3}}", "warm.<<: mappings are not merged in a file. Write the keys out, or take them from "
         "another file by `extends`"),
        ("warm: {bf16: .nan}", "warm.bf16: found .nan, must be a finite number; text goes in quotes"),
        ("model2: -.INF", "model2: found -.INF, must be a finite number; text goes in quotes"),
        ("model2: 18446744073709551616",
         "model2: found the whole number 18446744073709551616, must fit in 64 bits"),
        (f"model2: {'9' * 10_000}", f"model2: found the whole number {'9' * 57}..., must fit in 64 bits"),
        ('model2: "\\uD800"', "model2: half of a surrogate pair, must be Unicode text"),
        ('"\\uD800": 1', "the key has half of a surrogate pair, must be Unicode text"),
        # Tagged unions and sections.
        ("rewards: 3", "rewards: found the whole number 3, must be a list"),
        ("rewards: [3]", "rewards.0: found the whole number 3, must be a mapping"),
        ("rewards: [{type: modle}]",
         "rewards.0.type: found the text 'modle', must be one of model, function; did you mean model?"),
        ("rewards: [{type: [a]}]", "rewards.0.type: found a list, must be one of model, function"),
        ("rewards: [{model: a}]", "rewards.0.type: required key is missing, must be one of model, function"),
        ("rewards: [{type: model}]", "rewards.0.model: required key is missing"),
        ("rewards: [{type: function, name: lenght}]",
         "rewards.0.name: found the text 'lenght', must be one of length, regex; did you mean length?"),
        ("main: {type: model, model: x, wieght: 1}", "main.wieght: unknown key; did you mean weight?"),
        ("main: {type: function, name: regex, span: [1, a]}",
         "main.span.1: found the text 'a', must be a number"),
        ("main: text", "main: found the text 'text', must be a mapping"),
    ],
)  # fmt: skip
def test_a_line_that_is_refused(tmp_path, text, line):
    assert error_lines(tmp_path, GOOD + text + "\n") == [f"x.yaml:6: {line}"]


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize("text", [BOMB, "a: &a " + "x" * 100_000 + "\nb: [" + "*a, " * 1000 + "]\n"])
def test_alias_bombs_are_refused_quickly(tmp_path, text):
    start = time.process_time()
    lines = error_lines(tmp_path, text)
    assert len(lines) == 1
    assert lines[0].endswith("expands to more than 100000 values, too many for a config")
    assert time.process_time() - start < 3


def test_a_key_written_twice(tmp_path):
    text = "model: a\ndata: {train: x, train: y}\n# between\nmodel: b\n"
    assert error_lines(tmp_path, text) == [
        "x.yaml:2: data.train: written twice, first on line 2; keep one",
        "x.yaml:4: model: written twice, first on line 1; keep one",
    ]


# -- values ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("lerning_rate: 1", "lerning_rate: unknown key; did you mean learning_rate?"),
        ("BF16: true", "BF16: unknown key; did you mean bf16?"),
        ("zzz: 1", "zzz: unknown key; valid here: "
         "learning_rate, num_steps, betas, bf16, seed, dtype, layers"),
        ("'a b\\n': 1", "'a b\\\\n': unknown key; valid here: "
         "learning_rate, num_steps, betas, bf16, seed, dtype, layers"),
        ("num_steps: ten", "num_steps: found the text 'ten', must be a whole number"),
        ("num_steps: '3'", "num_steps: found the text '3', must be a whole number; remove the quotes"),
        ("num_steps: 3.0", "num_steps: found the number 3.0, must be a whole number; write 3"),
        ("num_steps: 3.5", "num_steps: found the number 3.5, must be a whole number"),
        ("num_steps: true", "num_steps: found the boolean true, must be a whole number"),
        ("num_steps: [3]", "num_steps: found a list, must be a whole number"),
        ("num_steps:", "num_steps: found nothing (null), must be a whole number"),
        ("num_steps: 0", "num_steps: found the whole number 0, must be at least 1"),
        ("learning_rate: 0", "learning_rate: found the whole number 0, must be greater than 0"),
        ("learning_rate: -1e-5", "learning_rate: found the number -1e-05, must be greater than 0"),
        ("learning_rate: '1e-5'",
         "learning_rate: found the text '1e-5', must be a number; remove the quotes"),
        ("bf16: yes", "bf16: found the text 'yes', must be true or false"),
        ("bf16: 'true'", "bf16: found the text 'true', must be true or false; remove the quotes"),
        ("dtype: float23", "dtype: found the text 'float23', must be one of float32, bfloat16; "
         "did you mean float32?"),
        ("seed: x", "seed: found the text 'x', must be a whole number or auto"),
        ("seed: autp", "seed: found the text 'autp', must be a whole number or auto; did you mean auto?"),
        ("betas: [0.9]", "betas.1: required item is missing"),
        ("betas: [0.9, 0.9, 0.9]", "betas: found a list, must be at most 2 long"),
        ("betas: 0.9", "betas: found the number 0.9, must be a list"),
        ("layers: []", "layers: found an empty list, must be at least 1 long"),
    ],
)  # fmt: skip
def test_values_that_are_refused(tmp_path, text, line):
    assert error_lines(tmp_path, "model: m\ndata: {train: x}\ntraining:\n  " + text) == [f"x.yaml:4: training.{line}"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train: 3", "train: found the whole number 3, must be a mapping"),
        ("train: ''", "train.path: found the text '', must be at least 1 characters long"),
        ("train: {}", "train.path: required key is missing"),
        ("train: {path: 3}", "train.path: found the whole number 3, must be text; put it in quotes"),
        ("train: {path: x, raito: 1}", "train.raito: unknown key; did you mean ratio?"),
        ("train: {path: x, ratio: 2}", "train.ratio: found the whole number 2, must be at most 1"),
        ("train: {path: bad}", "train: path is bad, must be good"),
        ("{train: x, evals: {a: x, b: 3}}", "evals.b: found the whole number 3, must be a mapping"),
        ("{train: x, evals: {a.b: {path: bad}}}", "evals.'a.b': path is bad, must be good"),
        ("{train: x, files: [a, 1]}", "files.1: found the whole number 1, must be text; put it in quotes"),
        ("{train: x, weights: {c: 1}}", "weights.c: as a key, found the text 'c', must be one of 'a' or 'b'"),
    ],
)  # fmt: skip
def test_an_error_in_a_section_that_may_be_written_as_text(tmp_path, text, line):
    assert error_lines(tmp_path, f"model: m\ndata:\n  {text}\n") == [f"x.yaml:3: data.{line}"]


def test_all_errors_are_reported_together_with_missing_keys(tmp_path):
    assert error_lines(tmp_path, "\ntraining:\n\n  num_steps: 0\nwarm:\n  sed: 3\ndata:\n  evals: {}\n") == [
        "x.yaml:1: model: required key is missing",
        "x.yaml:4: training.num_steps: found the whole number 0, must be at least 1",
        "x.yaml:6: warm.sed: unknown key; did you mean seed?",
        "x.yaml:7: data.train: required key is missing",
    ]


def test_many_keys_and_many_problems(tmp_path):
    wide: Any = create_model("Wide", __base__=Base, **dict.fromkeys("abcdefghijklm", (int, 0)))
    lines = error_lines(tmp_path, "".join(f"zzzzzz{n}: 0\n" for n in range(100)), schema=wide)
    assert lines[0] == "x.yaml:1: zzzzzz0: unknown key; none of the 13 keys valid here is like it"
    assert lines[40:] == ["x.yaml: and 60 more problems"]


def test_an_error_in_an_alias_is_reported_at_its_key(tmp_path):
    assert error_lines(tmp_path, "model: &m 3\ndata:\n  train: a\nwarm:\n  num_steps: *m\n  seed: x\n") == [
        "x.yaml:1: model: found the whole number 3, must be text; put it in quotes",
        "x.yaml:6: warm.seed: found the text 'x', must be a whole number or auto",
    ]
    assert error_lines(tmp_path, "model: &m m\ndata:\n  train: a\nwarm:\n  num_steps: *m\n") == [
        "x.yaml:5: warm.num_steps: found the text 'm', must be a whole number"
    ]


# -- overrides ---------------------------------------------------------------------------------------------
def test_overrides(tmp_path):
    text = GOOD + "warm:\nrewards:\n- {type: model, model: a}\n"
    config = load(
        tmp_path,
        text,
        "training.learning_rate=1e-4",
        "training.seed=null",
        "training.seed=7",
        "warm.bf16=true",
        "rewards.0.weight=2",
        "rewards.1={type: function, name: regex}",
        "rewards.2.type=model",
        "rewards.2.model= b ",
        "data.train.path=x=y",
        "data.evals={a: f}",
        "data.files=[p, q]",
        "model=no",
    )
    assert config == Config(
        model="no",
        data=Data(train=Source(path="x=y"), evals={"a": Source(path="f")}, files=["p", "q"]),
        training=Training(num_steps=5, learning_rate=1e-4, seed=7),
        warm=Training(bf16=True),
        rewards=[
            ModelReward(type="model", model="a", weight=2.0),
            FunctionReward(type="function", name="regex"),
            ModelReward(type="model", model="b"),
        ],
    )


def test_an_override_creates_lists_and_replaces_invalid_values(tmp_path):
    config = load(tmp_path, GOOD, "rewards.0.type=model", "rewards.0.model=a")
    assert config.rewards == [ModelReward(type="model", model="a")]
    assert load(tmp_path, GOOD + "  seed: x\n", "training.seed=1").training.seed == 1
    assert load(tmp_path, GOOD + "warm: text\n", "warm=null").warm is None


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("training", "no equals sign, must be key=value"),
        ("=3", "the key has an empty part, must be key=value or a.b=value"),
        ("training..seed=3", "the key has an empty part, must be key=value or a.b=value"),
        ("training.seed=[", "column 2: not valid YAML, while parsing a flow node, "
         "expected the node content, but found '<stream end>'"),
        ("training.seed=\x01", "not valid YAML, character U+0001 is not allowed"),
        ("training.seed=!x 1", "tag !x is not allowed"),
        ("training.seed=*a", "column 1: not valid YAML, found undefined alias 'a'"),
        ("data.evals={a: x, a: y}", "data.evals.a: written twice, in one mapping; keep one"),
        ("training.num_steps.x=3", "training.num_steps: found a mapping, must be a whole number"),
        ("training.lerning_rate=1", "unknown key; did you mean learning_rate?"),
        ("training={num_steps: 0}", "training.num_steps: found the whole number 0, must be at least 1"),
        ("model=", "found nothing (null), must be text"),
        ("training.num_steps=", "found nothing (null), must be a whole number"),
        ("data.train.split=test", "data.train.path: required key is missing"),
        ("rewards.1.weight=2", "rewards has 0 items, '1' must be an index, at most 0 (which appends)"),
        ("rewards.0.weight=2", "rewards.0.type: required key is missing, must be one of model, function"),
        ("model=\udc80", "not valid YAML, character U+DC80 is not allowed"),
        ("\udc80=1", "the key has half of a surrogate pair, must be Unicode text"),
        ("rewards=[]\nx", "column 1: not valid YAML"),
    ],
)  # fmt: skip
def test_overrides_that_are_refused(tmp_path, override, line):
    (message,) = error_lines(tmp_path, GOOD, override)
    shown = override.replace("\n", " ").replace("\udc80", r"\udc80").replace("\x01", r"\x01")
    assert message.startswith(f"--set {shown}: {line}")
    assert message.endswith(line) or line == "column 1: not valid YAML"


def test_overrides_are_reported_after_the_file(tmp_path):
    text = GOOD + "rewards: [{type: model}]\n"
    assert error_lines(tmp_path, text, "training.seed=x", "model=1") == [
        "x.yaml:6: rewards.0.model: required key is missing",
        "--set training.seed=x: found the text 'x', must be a whole number or auto",
        "--set model=1: found the whole number 1, must be text; put it in quotes",
    ]
    replaced = "rewards=[{type: function}]"
    assert error_lines(tmp_path, text, replaced) == [f"--set {replaced}: rewards.0.name: required key is missing"]
    assert error_lines(tmp_path, text, "training.seed=x", "rewards.x=1") == [
        "--set rewards.x=1: rewards has 1 items, 'x' must be an index, at most 1 (which appends)"
    ], "what cannot be read comes first, alone"


# -- writing -----------------------------------------------------------------------------------------------
def test_dump_reads_back_as_equal(tmp_path):
    config = load(
        tmp_path, GOOD, "training.dtype=bfloat16", "data.train={path: x}", "rewards=[{type: model, model: no}]"
    )
    text = dump_config(config)
    assert load(tmp_path, text) == config
    assert text.startswith("model: m\ndata:\n  train:\n    path: x\n    split: train\n    ratio: 1.0\n")
    assert "  learning_rate: 1.0e-05\n" in text
    assert "  model: 'no'\n" in text
    assert yaml.safe_load(text)["training"]["learning_rate"] == 1e-5  # other readers of YAML agree
