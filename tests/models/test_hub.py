"""Without a connection a hub id fails in one line after one request, and a local path is never taken for a hub id."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from rlhf_cli import hub
from rlhf_cli.cli import app


def write_config(folder: Path, model: str, train: str = "rows.jsonl") -> Path:
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n", encoding="utf-8")
    config = folder / "sft.yaml"
    config.write_text(
        f"artifacts: run\nmodel: {{path: {model}}}\ndata: {{train: {train}, test_fraction: 0}}\n"
        "training: {num_steps: 1}\noptimizer: {learning_rate: 1e-4}\n",
        encoding="utf-8",
    )
    return config


@contextmanager
def closing_server() -> Iterator[tuple[str, list[int]]]:
    """(its URL, the list of connections so far) of a server that closes each connection without an answer."""
    connections: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
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
def online(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process does not know yet whether the hub can be reached."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    ask = hub._reachable
    ask.cache_clear()
    yield
    ask.cache_clear()


@pytest.mark.usefixtures("online")
def test_a_hub_model_without_a_connection_is_one_line_after_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """huggingface_hub by itself would retry for half a minute."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    write_config(tmp_path, "gpt2")
    with closing_server() as (url, connections):
        monkeypatch.setattr(constants, "ENDPOINT", url)
        result = CliRunner().invoke(app, ["sft", "sft.yaml"])
    assert result.exit_code == 2
    assert len(connections) == 1
    assert result.stderr.count("\n") == 1, result.stderr
    assert "gpt2: no such directory, and the Hugging Face hub cannot be reached" in result.stderr
    assert "HF_HUB_OFFLINE=1" in result.stderr
    assert "local model directory" in result.stderr
    assert "Retry" not in result.stdout + result.stderr


def test_chosen_offline_mode_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    write_config(tmp_path, "gpt2")
    result = CliRunner().invoke(app, ["sft", "sft.yaml"])
    assert result.exit_code == 2
    assert "gpt2: no such directory, and HF_HUB_OFFLINE is set" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.usefixtures("online")
def test_hub_data_without_a_connection_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_reachable", lambda: False)
    result = CliRunner().invoke(app, ["data", "check", "someone/something", "--for", "sft"])
    assert result.exit_code == 2
    assert "The hub cannot be reached" in result.stderr
    assert result.stderr.count("\n") == 1, result.stderr


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize("path", ["artifacts/nope", "run/nope", "./nope", "/nope", "a/b/c"])
def test_a_mistyped_local_path_is_not_a_hub_id(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(hub, "_reachable", lambda: asked.append(path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    served = CliRunner().invoke(app, ["rm", "serve", path])
    assert served.exit_code == 2
    assert f"{path}: no such directory" in served.stderr
    assert "not a hub id" in served.stderr
    assert served.stderr.count("\n") == 1
    write_config(tmp_path, path)
    trained = CliRunner().invoke(app, ["sft", "sft.yaml"])
    assert trained.exit_code == 2
    assert f"{path}: no such directory" in trained.stderr
    assert asked == []


@pytest.mark.usefixtures("online")
def test_a_cached_model_is_used_without_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_reachable", lambda: False)
    monkeypatch.setattr(hub, "_is_cached", lambda *_: True)
    hub.require_hub_model("gpt2")
    assert constants.HF_HUB_OFFLINE, "the libraries use their cache, without retries"
