"""Names, files and configs made to break a command: markup, terminal escapes, names without end, pipes, wrong types."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import yaml
from pydantic import BaseModel, TypeAdapter

from rlhf_cli.config.by_stage import CONFIGS, load_stage_config
from rlhf_cli.config.explain import alternatives
from rlhf_cli.config.yaml_text import as_override
from rlhf_cli.errors import ConfigError
from rlhf_cli.printing import printable, say
from rlhf_cli.report.progress import Console, Display
from rlhf_cli.trained.run import open_run
from support.paths import ROOT
from support.projects import rlhf
from support.tiny import CPU, write_jsonl

ESCAPE = "\x1b[2J\x1b]0;title\x07\x9b31m\r"
"""Clears the screen, sets the title, rings, colours, and returns to the start of the line."""


def controls(text):
    return "".join(character for character in text if not character.isprintable() and character != "\n")


# ------------------------------------------------------------------------------------------ markup, escapes


@pytest.mark.parametrize("name", ["[/b]x", "[bold]x[/bold]", ":smile:", f"a{ESCAPE}b"])
def test_status_shows_any_name_as_text(name, tmp_path):
    (tmp_path / name / ".sft.partial").mkdir(parents=True)
    result = rlhf("status", tmp_path / name)
    assert printable(re.sub("[\x07\r]", "", name)) in result.stdout.replace("\n", "")  # rich drops these two
    assert controls(result.stdout) == ""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_display_prints_no_control_characters_but_its_own(is_terminal):
    file = io.StringIO()
    display = Display("ppo", quiet=False, console=Console(file=file, width=80, force_terminal=is_terminal))
    display.note(f"note {ESCAPE}")
    display.warn(f"warning {ESCAPE}[/red]")
    display.block(f"title {ESCAPE}", [(f"name {ESCAPE}", f"line {ESCAPE}")])
    display.table(f"[/b]{ESCAPE}", [f"column {ESCAPE}", "x"], [[f"cell {ESCAPE}", f"[/i]{ESCAPE}"]])
    display.exchange(f"prompt {ESCAPE}", {f"PPO {ESCAPE}": f"reply {ESCAPE}"})
    display.begin(1, "step")
    display.step(1, [f"figure {ESCAPE}"])
    display.end()
    written = file.getvalue()
    for word in ("note", "warning", "title", "name", "line", "column", "cell", "prompt", "PPO", "reply"):
        assert word in written
    assert "\x07" not in written
    assert "\x9b" not in written
    assert "\x1b[2J" not in written
    assert "\x1b]0" not in written
    assert written.count("[/b]") == 1, "markup in a name is text"
    assert is_terminal or controls(written) == ""


def test_a_message_is_printed_without_control_characters(capsys):
    say(f"two\nlines {ESCAPE}")
    say(ConfigError(ESCAPE), error=True)
    out, err = capsys.readouterr()
    assert out.count("\n") == 2
    assert controls(out + err) == ""
    assert printable("Grüße, 東京　駅 ❤") == "Grüße, 東京　駅 ❤"


def test_everything_is_printed_through_one_place():
    """`say` and our Console. YAML of `config show` escapes control characters itself."""
    elsewhere = []
    for path in sorted([*(ROOT / "rlhf_cli").rglob("*.py"), *(ROOT / "stages").glob("*.py")]):
        if path.name in ("printing.py", "progress.py") or path.parent.name == "templates":
            continue
        code = re.sub(r'"""(.|\n)*?"""', "", path.read_text(encoding="utf-8"))
        found = re.findall(r"(?<![\w.])print\(|rich\.console import Console\b(?! as)|stderr\.write|typer\.echo", code)
        elsewhere += [f"{path.name}: {text}" for text in found]
    assert elsewhere == []


# ------------------------------------------------------------------------------------------ names and pipes


LONG = "n" * 300
COMMANDS = (
    "status LONG",
    "init LONG",
    "pipeline LONG",
    "rm LONG",
    "config check LONG.yaml --stage sft",
    "data check LONG.jsonl --for sft",
    "data convert rows.jsonl --for sft --out LONG.jsonl",
    "data score rows.jsonl --model m --server http://127.0.0.1:1 --out LONG.jsonl",
    "rm serve LONG",
)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_name_that_is_too_long_is_one_line(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "response": "b"}])
    result = rlhf(*line.replace("LONG", LONG).split(), code=2)
    assert "Traceback" not in result.output
    assert LONG[:40] in result.stderr


@pytest.mark.parametrize("name", ["2024", "run #1", "r-{seed}", "r-{x}", "a: b", "true", " lead"])
def test_the_directory_of_a_run_may_have_any_name(name, finished, tmp_path, monkeypatch):
    """Also one that YAML would read as a number, a mapping or a comment."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).symlink_to(finished / "run")
    run = open_run(Path(name), stage=None, device=CPU, seed=0)
    assert {config.artifacts for config in (run.sft, run.rm, run.ppo)} == {name}
    rlhf("export", name, "--out", "exported", "--no-check", "--quiet")
    assert "Try: " in rlhf("diagnose", name, code=2).stdout
    if "{" not in name:  # braces in a config name other keys
        assert load_stage_config("sft", finished / "sft.yaml", [as_override("artifacts", name)]).artifacts == name


def test_named_pipes_do_not_block(project, tmp_path):
    """Nothing ever writes into these pipes, so opening one the usual way would never return."""
    run = project / "run"
    pipes = [tmp_path / "sft.yaml", tmp_path / "rows.jsonl", tmp_path / "template", tmp_path / "out.jsonl"]
    pipes += [run / "rm" / "manifest.json", run / ".ppo.lock", tmp_path / "other.jsonl.settings"]
    (run / "rm" / "manifest.json").unlink()
    for pipe in pipes:
        os.mkfifo(pipe)
    rows = str(write_jsonl(tmp_path / "good.jsonl", [{"prompt": "a", "response": "b"}]))
    generate = ("data", "generate", rows, "--task", "demonstrations", "--model", "m", "--server", "http://127.0.0.1:1")
    (tmp_path / "other.jsonl").write_text("{}\n")
    commands = [
        ("config", "check", pipes[0]),
        ("sft", pipes[0]),
        ("data", "check", pipes[1], "--for", "sft"),
        (*generate, "--out", tmp_path / "x.jsonl", "--template", pipes[2]),
        (*generate, "--out", pipes[3]),
        (*generate, "--out", tmp_path / "other.jsonl"),
        ("pipeline", project, "--quiet"),
    ]
    for command in commands:
        rlhf(*command, code=2)
    result = rlhf("status", run, env={"COLUMNS": "200"})
    assert "broken" in result.stdout
    assert "not a regular file" in " ".join(result.stdout.split()), "the table may break the line"


def test_the_pipe_of_a_shell_is_a_config(project):
    """`<(command)` is a pipe, too, and has a writer."""
    shell = f"{sys.executable} -m rlhf_cli config check --stage sft <(cat {project}/sft.yaml)"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("config show sft.yaml >&-", 0),
        ("status nowhere 2>&-", 2),
        ("rm score run pref.jsonl --quiet >&- <&-", 0),
        ("chat run <&- >&-", 0),
    ],
)
def test_closed_standard_streams_are_like_dev_null(arguments, code, finished, tmp_path):
    shell = f"cd {finished} && {sys.executable} -m rlhf_cli {arguments}"
    with (tmp_path / "output").open("w+") as output:
        done = subprocess.run(["bash", "-c", shell], stdout=output, stderr=output, check=False)
        assert (done.returncode, "Traceback" in (tmp_path / "output").read_text()) == (code, False)


def test_a_working_directory_that_was_removed_is_one_line(tmp_path):
    shell = f"cd {tmp_path} && rmdir {tmp_path} && {sys.executable} -m rlhf_cli sft -x"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False, env=environment)
    assert done.stderr == "error: the working directory was removed. Change to a directory that exists\n"
    assert done.returncode == 2


# ------------------------------------------------------------------------------------------ configs


BOMBS = ["((a{1000}){1000}){1000}", "(?:(?:[ab]{999}){999}){999}", "((a{500,}){500,900}){500}", "\\p{L}{9999999}"]
HARMLESS = ["a{1000}", ".{200,}-.{200,}-.{200,}", "\\{9999\\}{3}", "[{99999999}]{9}", "((a{1,500}){1,500}){1,500}"]


MINIMAL = {
    "artifacts": "run",
    "data": {"train": "x.jsonl"},
    "ppo": {"num_iterations": 1, "rollout_batch_size": 4, "minibatch_size": 4},
    "optimizer": {"learning_rate": 1e-3},
}


@pytest.mark.parametrize(("pattern", "code"), [*((bomb, 2) for bomb in BOMBS), *((one, 0) for one in HARMLESS)])
def test_a_pattern_that_would_never_compile_is_refused(pattern, code, tmp_path):
    reward = {"type": "regex", "pattern": pattern}
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump({**MINIMAL, "rewards": [reward]}))
    result = rlhf("config", "check", tmp_path / "ppo.yaml", code=code)
    assert ("rewards.0.pattern: its repeats multiply to" in result.stderr) == bool(code)


def fields(schema, name):
    for key, field in schema.model_fields.items():
        yield f"{name}.{key}", field
        for member in alternatives(field.annotation)[0]:
            for inner in [member, *getattr(member, "__args__", ())]:
                for kind in alternatives(inner)[0]:
                    if isinstance(kind, type) and issubclass(kind, BaseModel):
                        yield from fields(kind, f"{name}.{key}")


def test_every_key_with_a_path_expands_the_home_directory():
    """A new key with a path belongs into the set below, and gets the type of paths."""
    seen = set()
    for stage, schema in CONFIGS.items():
        for name, field in fields(schema, stage):
            if name.rpartition(".")[2] in ("artifacts", "path", "function", "gold"):
                seen.add(name)
                kind = TypeAdapter(Annotated[field.annotation, "a path", *field.metadata])
                assert not kind.validate_python("~/x.py:f").startswith("~"), name
    assert len(seen) >= 12, seen


def test_extends_may_start_with_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(MINIMAL))
    (tmp_path / "deep").mkdir()
    path = tmp_path / "deep" / "ppo.yaml"
    path.write_text("extends: ~/base.yaml\nseed: 4\n")
    assert load_stage_config("ppo", path).seed == 4
    path.write_text("extends: ~nobody-of-that-name/base.yaml\n")
    with pytest.raises(ConfigError, match="the home directory is not known"):
        load_stage_config("ppo", path)
