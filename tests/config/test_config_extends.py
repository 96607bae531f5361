"""`extends`, keys in braces, and messages that translate a key or a value: with the real schemas."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.config.by_stage import load_stage_config, stage_of
from rlhf_cli.config.yaml_text import dump_config
from rlhf_cli.errors import ConfigError
from rlhf_cli.program import command
from support.paths import ROOT

BASE = """\
artifacts: artifacts/base
model: {path: m}
data:
  train:
    path: a.jsonl
    limit: 5
training:
  num_epochs: 2
  minibatch_size: 8
optimizer:
  learning_rate: 1e-3
  betas: [0.8, 0.9]
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def load(path: Path, *overrides: str, stage: str = "sft") -> Any:
    return load_stage_config(stage, path, overrides)


def extending(folder: Path, text: str, base: str = BASE) -> Path:
    """A config of SFT that extends `base` and says `text` on its lines from 2 on."""
    write(folder / "base.yaml", base)
    return write(folder / "sft.yaml", f"extends: base.yaml\n{text}")


def error_lines(path: Path, *overrides: str, stage: str = "sft") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, *overrides, stage=stage)
    return str(caught.value).replace(f"{path.parent}/", "").split("\n")


# ------------------------------------------------------------------------------------------ extends


def test_mappings_are_merged_and_lists_replaced(tmp_path: Path) -> None:
    write(tmp_path / "base/sft.yaml", BASE)
    write(tmp_path / "base/middle.yaml", "extends: sft.yaml\nseed: 2\nartifacts: artifacts/middle\n")
    child = write(
        tmp_path / "small/sft.yaml",
        "extends: ../base/middle.yaml\nartifacts: artifacts/small\ndata: {train: {path: b.jsonl}}\n"
        "training: {num_epochs: null, num_steps: 3}\noptimizer: {betas: [0.1, 0.2]}\n",
    )
    config = load(child)
    assert (config.artifacts, config.seed) == ("artifacts/small", 2)
    assert (config.data.train[0].path, config.data.train[0].limit) == ("b.jsonl", 5)
    assert (config.training.num_epochs, config.training.num_steps, config.training.minibatch_size) == (None, 3, 8)
    assert (config.optimizer.learning_rate, config.optimizer.betas) == (1e-3, (0.1, 0.2))


def test_a_plain_value_replaces_a_section_and_a_section_a_plain_value(tmp_path: Path) -> None:
    assert load(extending(tmp_path, "data: {train: b.jsonl}\n")).data.train[0].limit is None
    plain = BASE.replace("  train:\n    path: a.jsonl\n    limit: 5\n", "  train: a.jsonl\n")
    assert load(extending(tmp_path, "data: {train: {path: b.jsonl, limit: 2}}\n", plain)).data.train[0].limit == 2


def test_an_error_names_the_file_and_the_line_where_the_key_is(tmp_path: Path) -> None:
    base = BASE.replace("minibatch_size: 8", "minibatch_size: eight")
    assert error_lines(extending(tmp_path, "\noptimizer:\n  betas: [1]\n", base)) == [
        "sft.yaml:4: optimizer.betas.0: found the whole number 1, must be less than 1",
        "sft.yaml:4: optimizer.betas.1: required item is missing",
        "base.yaml:9: training.minibatch_size: found the text 'eight', must be a whole number",
    ]
    replaced = load(extending(tmp_path, "training: {minibatch_size: 4}\n", base))
    assert replaced.training.minibatch_size == 4, "a wrong value that is replaced is no error"


def test_a_missing_key_is_reported_in_the_file_that_is_run(tmp_path: Path) -> None:
    child = extending(tmp_path, "\noptimizer:\n  eps: 1e-8\n", BASE.replace("  learning_rate: 1e-3\n", ""))
    assert error_lines(child) == ["sft.yaml:3: optimizer.learning_rate: required key is missing"]


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("no.yaml", "sft.yaml:2: extends: no.yaml: no such file, must be a YAML config"),
        (".", "is a directory, must be a YAML config"),
        ("sft.yaml", "sft.yaml:2: extends: sft.yaml extends this file in turn. Remove one `extends`"),
        ("back.yaml", "back.yaml:1: extends: sft.yaml extends this file in turn. Remove one `extends`"),
        ("3", "sft.yaml:2: extends: found the whole number 3, must be the path of a YAML file, relative to this one"),
        ("", "found nothing (null), must be the path of a YAML file"),
        ("list.yaml", "list.yaml:1: found a list, must be a mapping"),
        ("broken.yaml", "broken.yaml:2: column 5: not valid YAML"),
    ],
)
def test_extends_that_cannot_work(tmp_path: Path, value: str, line: str) -> None:
    write(tmp_path / "back.yaml", "extends: ./sft.yaml\n")
    write(tmp_path / "list.yaml", "- a\n")
    write(tmp_path / "broken.yaml", "\na: b: c\n")
    child = write(tmp_path / "sft.yaml", f"artifacts: a\nextends: {value}\n")
    (error,) = error_lines(child)
    assert line in error


def test_extends_counts_towards_the_bound_on_values(tmp_path: Path) -> None:
    bomb = "a: &a [" + "x, " * 99 + "x]\nb: &b [" + "*a, " * 99 + "*a]\nc: [" + "*b, " * 5 + "*b]\n"
    (error,) = error_lines(extending(tmp_path, bomb, bomb.replace("\nc:", "\nd:")))
    assert "expands to more than 100000 values" in error


def test_extends_below_the_top_level_is_an_unknown_key(tmp_path: Path) -> None:
    (error,) = error_lines(write(tmp_path / "sft.yaml", BASE + "  extends: base.yaml\n"))
    assert "optimizer.extends: unknown key" in error


# ------------------------------------------------------------------------------------------ braces


@pytest.mark.parametrize(
    ("artifacts", "resolved"),
    [
        ("artifacts/run-{seed}", "artifacts/run-3"),
        ("artifacts/{seed}/{optimizer.learning_rate}-{seed}", "artifacts/3/0.001-3"),
        ("artifacts/{model.path}", "artifacts/Org-name-v1.5"),
        ("artifacts/{data.train.0.limit}", "artifacts/5"),
        ("artifacts/{gradient_checkpointing}", "artifacts/false"),
        ("artifacts/e{evaluation.max_rows}", "artifacts/e1000"),
        ("artifacts/{", "artifacts/{"),
    ],
)
def test_keys_in_braces(tmp_path: Path, artifacts: str, resolved: str) -> None:
    path = write(tmp_path / "sft.yaml", BASE.replace("path: m", "path: Org/name-v1.5"))
    config = load(path, f"artifacts={artifacts}", "seed=3")
    assert config.artifacts == resolved
    assert f"artifacts: {resolved}\n" in dump_config(config) or resolved.endswith("{")


@pytest.mark.parametrize(
    ("artifacts", "message"),
    [
        ("a/{sed}", "sft.yaml:1: artifacts: {sed} is not a key of this config; did you mean seed?"),
        ("a/{ppo.kl_coef}", "sft.yaml:1: artifacts: {ppo.kl_coef} is not a key of this config"),
        ("a/{artifacts}", "{artifacts} is not a key of this config"),
        ("a/{data}", "{data} is a section or a list, must be a plain value"),
        ("a/{data.test}", "{data.test} is null, must be a plain value"),
        ("a/{}", "{} is not a key of this config"),
    ],
)
def test_unknown_keys_in_braces(tmp_path: Path, artifacts: str, message: str) -> None:
    path = write(tmp_path / "sft.yaml", BASE.replace("artifacts/base", f"'{artifacts}'"))
    (error,) = error_lines(path)
    assert message in error


# ----------------------------------------------------------------------- words from other places


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("device=gpu", "found the text 'gpu', must be one of auto, cpu, cuda, mps; say cuda"),
        ("precision=bf16", "; say bfloat16"),
        ("optimizer.lr=1", "unknown key; say learning_rate"),
        ("optimizer.precise=1", "unknown key; did you mean precision?"),
        ("optimizer.seed=1", "unknown key here; did you mean seed at the top level?"),
        ("lr=1", "unknown key here; did you mean optimizer.learning_rate?"),
        ("num_samples=1", "unknown key here; did you mean evaluation.num_samples?"),
        ("training.vocab=1", "unknown key; valid here: "),
    ],
)
def test_a_word_from_another_library_or_another_section(tmp_path: Path, override: str, message: str) -> None:
    (error,) = error_lines(write(tmp_path / "sft.yaml", BASE), override)
    assert message in error


@pytest.mark.parametrize(("written_for", "given_to"), [("ppo", "sft"), ("ppo", "rm"), ("sft", "ppo"), ("rm", "sft")])
def test_a_file_for_another_stage_is_named_in_one_line(tmp_path: Path, written_for: str, given_to: str) -> None:
    text = (ROOT / "configs" / "support" / f"{written_for}.yaml").read_text(encoding="utf-8")
    for name in (f"{written_for}.yaml", "my own.yaml"):
        path = write(tmp_path / name, text)
        expected = f"{path}: is a config for the stage {written_for}, not {given_to}. Run: "
        expected += command(written_for, "--config", str(path), "--set", "seed=3")
        with pytest.raises(ConfigError, match=f"^{re.escape(expected)}$"):
            load(path, "seed=3", stage=given_to)
    if written_for == "ppo":
        path.write_text(text.replace("num_iterations", "iterations"), encoding="utf-8")
        with pytest.raises(ConfigError, match=f"^{re.escape(expected)}$"):  # also with a mistake in it
            load(path, "seed=3", stage=given_to)


def test_a_mistake_in_a_file_with_the_stages_own_name_is_that_mistake(tmp_path: Path) -> None:
    """Without the name, `data.prompt_words` and no key of its own, this file would pass as one for SFT."""
    text = BASE + "  weight_decay: 0.1\n"
    path = write(tmp_path / "rm.yaml", text.replace("data:\n", "data:\n  loss_on: all\n"))
    (error,) = error_lines(path, stage="rm")
    assert "data.loss_on: unknown key" in error


def test_the_stage_of_a_file(tmp_path: Path) -> None:
    assert stage_of(Path("x/rm_scores.yaml"), None) == "rm"
    assert stage_of(Path("x/my-ppo.yaml"), None) == "ppo"
    assert stage_of(Path("x/a.yaml"), "sft") == "sft"
    for path, message in ((tmp_path / "none.yaml", "no such file"), (write(tmp_path / "a.yaml", BASE), "Give --stage")):
        with pytest.raises(ConfigError, match=message):
            stage_of(path, None)
