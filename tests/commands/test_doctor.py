"""`rlhf doctor` finds and names what is wrong, reads nothing outside the directory and changes nothing."""

import importlib.metadata
import json
import os
import platform
import re
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.commands import doctor as module
from rlhf_cli.commands.doctor import Result
from rlhf_cli.report.progress import Console
from rlhf_cli.run.artifacts import digest_file, partial_directory, read_manifest
from rlhf_cli.run.checkpoint_files import checkpoints_directory, new_checkpoint
from rlhf_cli.run.lock import Lock
from support.projects import digests, rlhf


def examined(directory):
    """Exit code, lines and stderr of `rlhf doctor DIRECTORY`."""
    result = CliRunner().invoke(app, ["doctor", str(directory)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout.splitlines(), result.stderr


def words(lines):
    return [line.word for line in lines]


def only(lines, word):
    """The text of the one line with this word."""
    (text,) = (line.text for line in lines if line.word == word)
    return text


@pytest.fixture
def stage(project):
    """A finished SFT stage, made from the data beside it."""
    rlhf("sft", "--config", project / "sft.yaml", "--quiet")
    return project / "run" / "sft"


# ------------------------------------------------------------------------------------------- the whole


def test_a_good_run_has_no_problem_and_is_not_touched(project):
    rlhf("pipeline", project, "--quiet")
    run = project / "run"
    before = {path: (path.stat().st_mtime_ns, path.is_dir()) for path in project.rglob("*")}
    bytes_before = digests(project)
    code, lines, stderr = examined(run)
    assert (code, stderr) == (0, "")
    assert {line.split()[0] for line in lines} <= {"ok", "warning"}
    for what in ("python", "torch", "transformers", "packages", "device", "disk"):
        assert any(line.split()[1] == what for line in lines), what
    for name in ("sft", "rm", "ppo"):
        about = [line for line in lines if line.split()[1] == name]
        assert [line.split()[0] for line in about] == ["ok", "ok"]
        assert "all unchanged since they were written" in about[0]
        assert "its data and inputs are unchanged" in about[1]
    assert {path: (path.stat().st_mtime_ns, path.is_dir()) for path in project.rglob("*")} == before
    assert digests(project) == bytes_before


def test_problems_are_counted_and_the_exit_code_is_2(project):
    run = project / "run"
    (run / "sft" / "model" / "config.json").unlink()
    (run / "rm" / "metrics.jsonl").write_text("{}")
    code, lines, stderr = examined(run)
    assert code == 2
    assert stderr == "error: 2 problems, see above\n"
    assert sum(line.startswith("problem ") for line in lines) == 2
    assert any(
        line.startswith("problem sft") and line.endswith("replaced by a link: model/config.json") for line in lines
    )
    assert any("modified after they were written: metrics.jsonl" in line for line in lines)


def test_the_directory_of_one_stage_anywhere(stage, tmp_path):
    for directory in (stage, Path(shutil.copytree(stage, tmp_path / "downloaded" / "a-model"))):
        code, lines, _ = examined(directory)
        assert code == 0
        assert sum(f"{directory.name}" in line and "all unchanged since" in line for line in lines) == 1


def test_a_folder_of_runs_names_them(project, tmp_path):
    code, lines, _ = examined(project)
    assert code == 2
    assert f"is not a run, but contains runs: {project / 'run'}." in lines[-1]
    (tmp_path / "empty").mkdir()
    code, lines, _ = examined(tmp_path / "empty")
    assert code == 2
    assert lines[-1].endswith("is not a run. Give the `artifacts` directory of your configs")


# ------------------------------------------------------------------------------------------ the machine


def test_versions_are_the_required_ones():
    lines = list(module.versions())
    assert words(lines) == ["ok"] * len(lines)
    assert lines[0] == Result("ok", "python", platform.python_version())
    assert Result("ok", "torch", importlib.metadata.version("torch")) in lines


def test_a_wrong_or_missing_package_is_a_problem_with_the_command_that_fixes_it():
    checked = module.packages(
        [
            "torch>=999",
            "transformers>=1",
            "rich<1",
            "no-such-package-as-this>=1.5",
            "for-tests-only>=1; extra == 'dev'",
            "typer>=0.1",
            "for-old-pythons; python_version < '3'",
        ]
    )
    lines = {line.what: line for line in checked}
    assert set(lines) == {"torch", "transformers", "rich", "no-such-package-as-this", "packages"}
    assert [lines[name].word for name in ("torch", "rich", "no-such-package-as-this")] == ["problem"] * 3
    assert lines["torch"].text == f"{torch.__version__} is installed, >=999 is required. Run: pip install 'torch>=999'"
    assert "pip install 'no-such-package-as-this>=1.5'" in lines["no-such-package-as-this"].text
    assert lines["packages"].text.startswith("typer ")


# ------------------------------------------------------------------------------------ finished stages


def test_every_flipped_bit_and_every_missing_file_is_named(stage):
    manifest = read_manifest(stage)
    assert manifest is not None
    assert words(module.finished(stage, "sft")) == ["ok", "ok"]
    for name in manifest.files:
        path = stage / name
        content = path.read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :] if content else b"x"
        for broken in (flipped, content + b"\0", *([content[:-1]] if content else [])):
            path.write_bytes(broken)
            if name.endswith(".md"):  # a model card may be edited
                assert words(module.finished(stage, "sft")) == ["ok", "ok"]
                continue
            line = only(module.finished(stage, "sft"), "problem")
            assert line == f"{stage}: modified after they were written: {name}"
        path.unlink()
        assert only(module.finished(stage, "sft"), "problem").endswith(f"missing, or replaced by a link: {name}")
        path.write_bytes(content)
    assert words(module.finished(stage, "sft")) == ["ok", "ok"]


def test_files_that_the_stage_did_not_write_are_named(stage, tmp_path):
    for name in ("notes.txt", "model/modeling.py", *(f"x{number}" for number in range(5))):
        (stage / name).write_text("")
    (stage / "elsewhere").symlink_to(tmp_path, target_is_directory=True)
    lines = list(module.finished(stage, "sft"))
    assert "problem" not in words(lines)
    assert only(lines, "warning").endswith("stage: elsewhere, model/modeling.py, notes.txt, x0, x1 and 3 more")


def test_names_that_lead_outside_the_stage_and_links_are_not_read(stage, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("not yours")
    (stage / "link.txt").symlink_to(secret)
    (stage / "folder").symlink_to(tmp_path, target_is_directory=True)
    os.mkfifo(stage / "pipe")
    names = ["../secret.txt", str(secret), "..", "", "a\0b", "link.txt", "folder/secret.txt", "pipe"]
    path = stage / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "files": dict.fromkeys(names, digest_file(secret)) | manifest["files"]}))
    lines = list(module.finished(stage, "sft"))
    missing = f"missing, or replaced by a link: {', '.join(names[:5])} and 3 more"
    assert [line.text for line in lines if line.word == "problem"] == [f"{stage}: {missing}"]
    path.unlink()
    os.mkfifo(path)
    assert "has no manifest.json" in only(module.finished(stage, "sft"), "problem")


@pytest.mark.parametrize(
    "change",
    [
        {"files": ["a"]}, {"files": {"a": 1}}, {"files": None}, {"identity": []}, {"identity": {"data": {}}},
        {"identity": {"data": [], "inputs": {}}}, {"stage": "../sft"}, {"stage": 3}, {"finished": None},
    ],
)  # fmt: skip
def test_a_manifest_with_values_of_wrong_types_is_a_problem(stage, change):
    path = stage / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    (line,) = module.finished(stage, "sft")
    assert line.word == "problem"
    assert line.text.startswith(f"{path}: ")
    assert line.text.endswith(". Run the stage again with --restart")


def test_changed_and_missing_data_of_a_stage(stage, project):
    with (project / "sft.jsonl").open("a") as file:
        file.write("\n")
    assert only(module.finished(stage, "sft"), "warning") == "stale, changed since: data train"
    (project / "sft.jsonl").rename(project / "moved.jsonl")
    text = only(module.finished(stage, "sft"), "warning")
    assert text == f"not found from {Path.cwd()}: data train ({project / 'sft.jsonl'})"
    (stage / "config.yaml").write_text("written: by another version\n")
    lines = list(module.finished(stage, "sft"))
    assert "this version of rlhf cannot read its config.yaml" in only(lines, "warning")
    assert "config.yaml" in only(lines, "problem")


# ---------------------------------------------------------------------------------- unfinished runs


def checkpoint(run, stage, step):
    checkpoints = checkpoints_directory(run, stage)
    checkpoints.mkdir(exist_ok=True)
    partial_directory(run, stage).mkdir(exist_ok=True)
    with new_checkpoint(checkpoints, step) as new_directory:
        (new_directory / "state.safetensors").write_bytes(b"tensors" * 100)
        (new_directory / "numbers.json").write_text(json.dumps({"step": step}))
    return checkpoints / f"step-{step:08d}"


def test_checkpoints_good_and_damaged(tmp_path):
    first, second = checkpoint(tmp_path, "sft", 10), checkpoint(tmp_path, "sft", 20)
    assert words(module.unfinished(tmp_path, "sft")) == ["ok"]
    assert "resumes from step-00000020, 2 good" in only(module.unfinished(tmp_path, "sft"), "ok")
    for name in ("state.safetensors", "numbers.json", "manifest.json"):
        path = second / name
        content = path.read_bytes()
        for broken in (content[:-2], bytes([content[0] ^ 1]) + content[1:], None):
            if broken is None:
                path.unlink()
            else:
                path.write_bytes(broken)
            lines = list(module.unfinished(tmp_path, "sft"))
            assert "resumes from step-00000010, 1 good" in only(lines, "ok")
            warning = only(lines, "warning")
            assert "step-00000020" in warning
            assert name in warning
        path.write_bytes(content)
    for path in (first, second):
        (path / "numbers.json").unlink()
    assert "every checkpoint is damaged" in only(module.unfinished(tmp_path, "sft"), "problem")


def test_the_running_process_is_named(tmp_path):
    assert list(module.unfinished(tmp_path, "sft")) == []
    lock = Lock(tmp_path, "sft")
    lock.acquire()
    assert only(module.unfinished(tmp_path, "sft"), "ok").startswith(f"running: process {os.getpid()} on ")
    checkpoint(tmp_path, "sft", 10)
    lines = [line.text for line in module.unfinished(tmp_path, "sft")]
    assert lines[1] == f"1 good checkpoints in {tmp_path / '.sft.checkpoints'}"
    lock.release()
    shutil.rmtree(tmp_path / ".sft.partial")
    assert "left by a finished run" in only(module.unfinished(tmp_path, "sft"), "warning")
    shutil.rmtree(tmp_path / ".sft.checkpoints")
    (tmp_path / ".sft.partial").mkdir()
    assert "stopped before its first checkpoint" in only(module.unfinished(tmp_path, "sft"), "warning")


def test_lines_break_between_words_on_a_terminal(monkeypatch, capsys):
    """At 80 columns, below the text. A file keeps one line for each."""
    text = "supercalifragilistic " * 9
    monkeypatch.setattr(module, "_lines", lambda _: iter([Result("ok", "torch", text.strip())]))
    for is_terminal in (True, False):
        monkeypatch.setattr(
            module, "Console", lambda on=is_terminal, **more: Console(force_terminal=on, width=80, **more)
        )
        module.doctor(None)
        lines = re.sub("\x1b[^m]*m", "", capsys.readouterr().out).splitlines()
        assert len(lines) == (5 if is_terminal else 1)
        assert all(line[:22].strip() == "" for line in lines[1:])
        assert " ".join(" ".join(lines).split()).endswith(text.strip())
