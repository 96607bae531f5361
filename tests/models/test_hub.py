"""Without a connection a hub id fails in one line after one request, and a local path is never taken for a hub id."""

import json
import socket
import threading
from contextlib import contextmanager

import pytest
from huggingface_hub import constants

from rlhf_cli import hub
from support.projects import rlhf


def write_config(folder, model):
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n", encoding="utf-8")
    (folder / "sft.yaml").write_text(
        f"artifacts: run\nmodel: {{path: {model}}}\ndata: {{train: rows.jsonl, test_fraction: 0}}\n"
        "training: {num_steps: 1}\noptimizer: {learning_rate: 1e-4}\n",
        encoding="utf-8",
    )


def refused(*command):
    """The error line of a command."""
    result = rlhf(*command, code=2)
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


@contextmanager
def closing_server():
    """(its URL, the list of connections so far) of a server that closes each connection without an answer."""
    connections = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connections.append(len(connections))
                connection.close()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", connections


@pytest.fixture
def online(monkeypatch):
    """This process does not know yet whether the hub can be reached."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    ask = hub._reachable
    ask.cache_clear()
    yield
    ask.cache_clear()


@pytest.mark.usefixtures("online")
def test_a_hub_model_without_a_connection_is_one_line_after_one_request(tmp_path, monkeypatch):
    """huggingface_hub by itself would retry for half a minute. With AMX, the model's size decides the precision."""
    monkeypatch.setattr("rlhf_cli.plan.origins.has_amx", lambda: True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    write_config(tmp_path, "gpt2")
    with closing_server() as (url, connections):
        monkeypatch.setattr(constants, "ENDPOINT", url)
        line = refused("sft", "sft.yaml")
    assert len(connections) == 1
    assert "gpt2: no such directory, and the Hugging Face hub cannot be reached" in line
    assert "HF_HUB_OFFLINE=1" in line
    assert "local model directory" in line


def test_chosen_offline_mode_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    write_config(tmp_path, "gpt2")
    assert "gpt2: no such directory, and HF_HUB_OFFLINE is set" in refused("sft", "sft.yaml")


@pytest.mark.usefixtures("online")
def test_hub_data_without_a_connection_is_one_line(monkeypatch):
    monkeypatch.setattr(hub, "_reachable", lambda: False)
    assert "The hub cannot be reached" in refused("data", "check", "someone/something", "--for", "sft")


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize("path", ["artifacts/nope", "run/nope", "./nope", "/nope", "a/b/c"])
def test_a_mistyped_local_path_is_not_a_hub_id(path, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(hub, "_reachable", lambda: asked.append(path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    write_config(tmp_path, path)
    for line in (refused("rm", "serve", path), refused("sft", "sft.yaml")):
        assert f"{path}: no such directory" in line
        assert "not a hub id" in line
    assert asked == []


@pytest.mark.usefixtures("online")
def test_a_cached_model_is_used_without_a_connection(monkeypatch):
    monkeypatch.setattr(hub, "_reachable", lambda: False)
    monkeypatch.setattr(hub, "cached", lambda *_: "config.json")
    hub.require_hub_model("gpt2")
    assert constants.HF_HUB_OFFLINE, "the libraries use their cache, without retries"
