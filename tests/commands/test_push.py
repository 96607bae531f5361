"""`rlhf push`: what is shown, what is refused, and what a hub on loopback gets."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save_file

from rlhf_cli.commands import push
from support.projects import refused, rlhf
from support.servers import Scripted

TOKEN = "hf_" + "A" * 34


def pushed(*arguments, code=0):
    return rlhf("push", *arguments, code=code)


class Hub(Scripted):
    """The routes of the hub that an upload of small files needs. `commits` has the files of each commit."""

    path = ""

    def __init__(self):
        self.commits: list[dict[str, bytes]] = []
        self.status = 200
        super().__init__(self.play)

    def play(self, number, body):
        assert self.headers[number]["Authorization"] == f"Bearer {TOKEN}"
        path, status = self.paths[number], 200
        answer = {"errors": [], "warnings": []}  # about the card's metadata
        if path == "/api/repos/create":
            answer = {"url": f"{self.url}/me/model"} if self.status == 200 else {"error": "not yours"}
            status = self.status
        elif path == "/api/models/me/model/preupload/main":
            about = {"uploadMode": "regular", "shouldIgnore": False}
            answer = {"files": [{"path": file["path"], **about} for file in body["files"]]}
        elif path == "/api/models/me/model/commit/main":
            files = [line["value"] for line in body if line["key"] == "file"]
            self.commits.append({file["path"]: base64.b64decode(file["content"]) for file in files})
            answer = {"commitUrl": f"{self.url}/me/model/commit/1", "commitOid": "1", "success": True}
        return status, {"Content-Type": "application/json"}, answer


@pytest.fixture
def hub(monkeypatch):
    with Hub() as made:
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(push, "is_offline", lambda: False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield made


@pytest.fixture
def model(finished, tmp_path):
    """A model outside of its run, which a test may change."""
    return Path(shutil.copytree(finished / "run" / "sft" / "model", tmp_path / "model"))


def test_a_dry_run_shows_the_files_and_sends_nothing(finished, hub):
    result = pushed(finished / "run", "me/model")
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    first, *lines = result.stdout.splitlines()
    assert first == "run-ppo to me/model, which is uploaded with --yes"
    shown = [line.split()[-1] for line in lines if line.startswith("  ")][:-1]
    assert shown == sorted(path.name for path in (finished / "run" / "ppo" / "model").iterdir())
    assert "licence: not named; write `license:` at the top of README.md" in lines
    assert hub.requests == []


def test_the_hub_gets_the_model_and_nothing_else(model, hub):
    kept = {path.name: path.read_bytes() for path in model.iterdir()}
    card = model / "README.md"
    card.write_text(card.read_text().replace("---\n", "---\nlicense: mit\nbase_model: owner/base\n", 1))
    kept["README.md"] = card.read_bytes()
    templates = model / "additional_chat_templates"
    templates.mkdir()
    for name in ("tool_use.jinja", "rows.jsonl", "more.safetensors"):
        (templates / name).write_text("{{ tools }}")
    kept["additional_chat_templates/tool_use.jinja"] = b"{{ tools }}"
    for name in (".env", "samples.jsonl", "metrics.jsonl", "rows.csv", "training_args.bin", "token"):
        (model / name).write_text(TOKEN)
    (model / "checkpoints").mkdir()
    (model / "checkpoints" / "model.safetensors").write_text("x")
    result = pushed(model, "me/model", "--yes")
    assert hub.commits == [kept]
    lines = result.stdout.splitlines()
    assert lines[-1] == f"{hub.url}/me/model/commit/1"
    assert {"licence: mit", "base model: owner/base"} <= set(lines)
    left_out = "not uploaded: .env, checkpoints/, metrics.jsonl, rows.csv, samples.jsonl, token, training_args.bin"
    assert left_out in lines
    pushed(model, "me/model", "--yes", "--public")
    created = [body["visibility"] for body in hub.requests if "visibility" in body]
    assert created == ["private", "public"]


@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("README.md", f"Download with {TOKEN}.", "a Hugging Face token"),
        ("README.md", "git clone https://me:geheim@host/x", "a URL with a password"),
        ("README.md", 'curl -H "Authorization: Bearer geheim1234567890abc"', "a bearer token"),
        ("README.md", "eyJhbGciOiJIUzI1.eyJzdWIiOiJnZWhl.geheim", "a JSON web token"),
        ("NOTICE", "export WANDB_API_KEY=geheim0123456789abcdef", "a variable with a secret"),
        ("extra.safetensors", '{"prompt": "geheim"}', "has no weights in it"),
        ("extra.gguf", "geheim", "has no weights in it"),
        ("LICENSE.txt", "-----BEGIN OPENSSH PRIVATE KEY-----", "a private key"),
        ("LICENSE", f"Mod\xe8le {TOKEN}".encode("latin-1"), "a Hugging Face token"),
        ("README.md", "# Mod\xe8le".encode("latin-1"), "README.md: the text or the metadata"),
        ("additional_chat_templates/tools.jinja", f"{{{{ tools }}}} {TOKEN}", "a Hugging Face token"),
        ("config.json", '{"a": [{"api_key": "geheim"}]}', "a secret in the key api_key"),
        ("config.json", "{", "is not JSON"),
        ("config.json", b'{"a": "\xe8"}', "is not JSON"),
        ("README.md", "---\na: [\n---\n", "cannot be read"),
    ],
)
def test_a_secret_stops_the_upload_and_is_not_shown(model, hub, file, text, found):
    (model / file).parent.mkdir(exist_ok=True)
    (model / file).write_bytes(text.encode() if isinstance(text, str) else text)
    line = refused("push", model, "me/model", "--yes")
    assert hub.requests == []
    assert found in line
    assert "geheim" not in line
    assert TOKEN not in line


def test_weights_may_carry_no_secret_and_words_about_tokens_are_none(model, hub):
    card = model / "README.md"
    card.write_text(
        card.read_text() + "Set HF_TOKEN=<your token>. EOS_TOKEN: <|endoftext|>. Bearer tokens are secret.\n"
    )
    pushed(model, "me/model")
    save_file({"a": np.zeros(1)}, model / "extra.safetensors", metadata={"note": TOKEN})
    assert "contains a Hugging Face token" in refused("push", model, "me/model", "--yes")
    assert hub.requests == []


@pytest.mark.parametrize(
    ("kind", "rule", "name"),
    [
        ("link", "is a link to", "LICENSE.txt"),
        ("pipe", "is no regular file", "generation_config.json"),
        ("link to nothing", "is no regular file", "extra.safetensors"),
        ("folder", "is a link to", "additional_chat_templates/a.jinja"),
    ],
)
def test_a_link_to_another_folder_and_a_pipe_stop_the_upload(model, hub, kind, rule, name):
    (model.parent / "private").mkdir()
    (model.parent / "private/a.jinja").write_text("geheim")
    (model / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(model / name)
    elif kind == "folder":
        (model / name).parent.symlink_to("../private")
    else:
        (model / name).symlink_to("../private/a.jinja" if kind == "link" else "gone")
    assert f"{name}: {rule}" in refused("push", model, "me/model", "--yes")
    assert hub.requests == []


def test_a_gguf_file_is_uploaded_with_its_card(tmp_path, hub):
    """The folder that `rlhf export --format gguf` writes. No other command reads it."""
    folder = tmp_path / "gguf"
    folder.mkdir()
    files = {"m-Q8_0.gguf": b"GGUF and more", "README.md": b"---\nlicense: mit\n---\n# m\n"}
    for name, content in {**files, "export.json": b"{}"}.items():
        (folder / name).write_bytes(content)
    pushed(folder, "me/model", "--yes")
    assert hub.commits == [files]
    for arguments in (["chat", folder], ["serve", folder], ["rm", "serve", folder]):
        assert "gguf: has no config.json" in refused(*arguments)
    assert "gguf: has no config.json" in refused("export", folder, "--out", tmp_path / "out", "--no-check")


def test_a_snapshot_in_the_cache_of_the_hub_is_uploaded(model, hub):
    blobs, snapshot = model.parent / "blobs", model.parent / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for path in list(model.iterdir()):
        path.rename(blobs / f"{path.name}-digest")
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}-digest")
    (snapshot / "additional_chat_templates").mkdir()
    (blobs / "template-digest").write_text("{{ tools }}")
    (snapshot / "additional_chat_templates/tools.jinja").symlink_to("../../../blobs/template-digest")
    pushed(snapshot, "me/model", "--yes")
    assert {"model.safetensors", "additional_chat_templates/tools.jinja"} <= hub.commits[0].keys()


def test_adapters_are_uploaded_without_the_folder_of_their_base(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "someone/model"}))
    save_file({"a": np.zeros(1)}, tmp_path / "adapter_model.safetensors")
    about = {"path": "someone/model", "relative_path": "../../home/me/hub/models--someone--model/snapshots/1"}
    (tmp_path / "base_model.json").write_text(json.dumps(about))
    sent = push.collect(str(tmp_path), None).contents["base_model.json"]
    assert isinstance(sent, bytes)
    assert json.loads(sent) == {**about, "relative_path": None}


def test_what_cannot_be_uploaded_is_one_line(finished, model, tmp_path, hub, monkeypatch):
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(model)}))
    save_file({"a": np.zeros(1)}, adapters / "adapter_model.safetensors")
    unreadable = Path(shutil.copytree(adapters, tmp_path / "unreadable"))
    (unreadable / "adapter_config.json").write_text("[]")
    damaged = tmp_path / "damaged"
    shutil.copytree(finished / "run", damaged)
    (damaged / "ppo" / "model" / "config.json").write_text("{}")
    cases = [
        ([tmp_path / "none", "me/model"], "no such directory"),
        ([model, "me/my model"], "is not the name of a repository"),
        ([adapters, "me/model"], "which others lack. Run: "),
        ([unreadable, "me/model"], "base of the adapters is not named in adapter_config.json"),
        ([damaged, "me/model"], "config.json was modified after the stage was finished"),
    ]
    for arguments, message in cases:
        assert message in refused("push", *arguments, "--yes")
    hub.status = 403
    result = pushed(model, "me/model", "--yes", code=1)
    assert "the hub refused (" in result.stderr.splitlines()[-1]
    with monkeypatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        result = pushed(model, "me/model", "--yes", code=1)
    assert re.search(r"the upload failed \(.*\). Run the same command to continue$", result.stderr)
    monkeypatch.setattr(push, "is_offline", lambda: True)
    result = pushed(model, "me/model", "--yes", code=1)
    assert "cannot be reached, or HF_HUB_OFFLINE is set" in result.stderr
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    assert "there is no token for the hub" in pushed(model, "me/model", "--yes", code=2).stderr
    assert hub.commits == []
