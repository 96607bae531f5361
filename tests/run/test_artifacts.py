"""The artifact directory: complete or not there, and never worse than before."""

import json

import pytest

from rlhf_cli.errors import ArtifactError
from rlhf_cli.run import artifacts
from rlhf_cli.run.lock import Lock
from support.projects import FACTS


def make(root, text="weights"):
    partial = artifacts.open_partial(root, "sft")
    (partial / "model").mkdir()
    (partial / "model" / "model.safetensors").write_text(text)
    return artifacts.publish(root, "sft", **FACTS)


def test_a_published_stage_lists_every_file_with_its_digest(tmp_path):
    manifest = make(tmp_path)
    directory = artifacts.stage_directory(tmp_path, "sft")
    assert manifest.files == {"model/model.safetensors": artifacts.digest_file(directory / "model/model.safetensors")}
    assert artifacts.read_manifest(directory) == manifest
    assert not artifacts.partial_directory(tmp_path, "sft").exists()
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
