"""The artifact directory: complete or not there, and never worse than before."""

import errno
import json
import os

import pytest
from safetensors import SafetensorError

from rlhf_cli.errors import ArtifactError
from rlhf_cli.run import artifacts
from rlhf_cli.run.launch import explained
from rlhf_cli.run.lock import Lock
from support.projects import FACTS


def make(root, text="weights"):
    partial = artifacts.open_partial(root, "sft")
    (partial / "model").mkdir()
    (partial / "model" / "model.safetensors").write_text(text)
    (partial / "model" / "model.safetensors").chmod(0o600)  # as safetensors writes it
    return artifacts.publish(root, "sft", **FACTS)


def test_a_published_stage_lists_every_file_with_its_digest(tmp_path):
    manifest = make(tmp_path)
    directory = artifacts.stage_directory(tmp_path, "sft")
    assert manifest.files == {"model/model.safetensors": artifacts.digest_file(directory / "model/model.safetensors")}
    assert artifacts.read_manifest(directory) == manifest
    assert not artifacts.partial_directory(tmp_path, "sft").exists()
    weights, written = (directory / "model/model.safetensors").stat(), (directory / "manifest.json").stat()
    assert weights.st_mode == written.st_mode, "another user reads the weights, too"
    assert weights.st_ctime_ns <= written.st_ctime_ns, "else each command would read them to find a change"
    assert artifacts.require_stage(tmp_path, "sft") == directory
    assert artifacts.model_directory(str(directory)) == str(directory / "model")
    assert artifacts.model_directory(str(directory / "model")) == str(directory / "model")


def test_a_stage_is_built_in_an_empty_folder_unless_it_is_resumed(tmp_path):
    (artifacts.open_partial(tmp_path, "rm") / "members").mkdir()
    assert (artifacts.open_partial(tmp_path, "rm", keep=True) / "members").is_dir()
    assert list(artifacts.open_partial(tmp_path, "rm").iterdir()) == []


def test_a_publication_cut_off_between_its_renames_is_undone(tmp_path):
    make(tmp_path, "old")
    (tmp_path / "sft").rename(tmp_path / ".sft.old")
    lock = Lock(tmp_path, "sft")
    lock.acquire()  # as a process does that publishes, whose next rename must not fail
    with pytest.raises(artifacts.MissingStageError):
        artifacts.require_stage(tmp_path, "sft")
    lock.release()
    assert artifacts.require_stage(tmp_path, "sft") == tmp_path / "sft"
    assert (tmp_path / "sft" / "model" / "model.safetensors").read_text() == "old"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"contract": 99}', '{"contract": 1}'])
def test_a_broken_manifest_is_refused(tmp_path, text):
    make(tmp_path)
    (tmp_path / "sft" / "manifest.json").write_text(text)
    with pytest.raises(ArtifactError, match="Run the stage again with --restart"):
        artifacts.read_manifest(tmp_path / "sft")


def test_a_folder_that_may_not_be_entered_is_one_line(tmp_path):
    (tmp_path / "closed").mkdir(mode=0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    line = r"out: cannot be written \(Permission denied\)\. Choose another folder$"
    try:
        with pytest.raises(ArtifactError, match=line), artifacts.new_folder(tmp_path / "closed/out"):
            pass
    finally:
        os.seteuid(user)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "Free disk space"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "Free disk space"),
        (Exception("File too large (os error 27)"), r"Raise the limit .*`\)"),  # as tokenizers raise it
    ],
)
def test_errors_of_writing_say_what_helps_and_leave_nothing(tmp_path, error, advice):
    line = rf"out: cannot be written \(.*\)\. {advice}$"
    with pytest.raises(ArtifactError, match=line), artifacts.new_folder(tmp_path / "out"):
        raise error
    assert not list(tmp_path.iterdir())


def test_a_model_that_may_not_be_read_is_not_said_to_be_unwritable():
    error = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "m/config.json")
    with pytest.raises(ArtifactError, match=r"^m/config.json: cannot be read or written \(Permission denied\)"):
        with explained("sft.yaml", "run"):
            raise error


def test_fingerprints_change_with_the_content(tmp_path):
    file, folder = tmp_path / "a.jsonl", tmp_path / "model"
    file.write_text("1")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    before = [artifacts.fingerprint(str(path)) for path in (file, folder)]
    assert before == [artifacts.fingerprint(str(path)) for path in (file, folder)]
    file.write_text("2")
    (folder / "model.safetensors").write_text("w")
    after = [artifacts.fingerprint(str(path)) for path in (file, folder)]
    assert all(a != b for a, b in zip(before, after, strict=True))
    assert artifacts.fingerprint("org/name", "v1") == "hub:org/name@v1"
    make(tmp_path)
    stage = artifacts.fingerprint(str(tmp_path / "sft"))
    manifest = json.loads((tmp_path / "sft" / "manifest.json").read_text())
    (tmp_path / "sft" / "manifest.json").write_text(json.dumps({**manifest, "seed": 5}))
    assert artifacts.fingerprint(str(tmp_path / "sft")) != stage
