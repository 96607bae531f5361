"""`rlhf data generate` and `data score` against servers that send too much, point elsewhere, or repeat the key."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import json
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rlhf_cli import http_client
from rlhf_cli.cli import app
from support.servers import KEY, ChatServer, completion
from support.tiny import write_jsonl


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("MY_KEY", KEY)
    monkeypatch.setattr(http_client, "MAX_ANSWER_BYTES", 1_000_000)


COMMANDS = {"generate": ("--task", "demonstrations"), "score": ()}


def command(name: str, url: str, tmp_path: Path) -> Result:
    """The result of a command that asks the server, with a key, and must write no row."""
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "response": "b"}])
    out = tmp_path / "out" / "rows.jsonl"
    arguments = ["data", name, str(source), *COMMANDS[name], "--out", str(out), "--model", "m", "--server", url]
    result = CliRunner().invoke(app, [*arguments, "--api-key-env", "MY_KEY", "--retries", "0"])
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 1
    assert not out.exists()
    assert len(result.stderr.splitlines()) == 1
    return result


class Flood:
    """A server whose answer never ends. Counts the bytes that were taken from it."""

    def __init__(self, piece: bytes, encoding: str):
        flood, self.taken = self, 0

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.send_response(200)
                self.send_header("Content-Encoding", encoding)
                self.end_headers()
                with contextlib.suppress(OSError):
                    while flood.taken < 10**10:
                        flood.taken += self.wfile.write(piece)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
            daemon_threads = True

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextlib.contextmanager
def flood(piece: bytes, encoding: str) -> Iterator[Flood]:
    server = Flood(piece, encoding)
    try:
        yield server
    finally:
        server.close()


@pytest.mark.parametrize("name", COMMANDS)
def test_an_answer_without_an_end_is_cut_off(name: str, tmp_path: Path) -> None:
    with flood(b"x" * 65536, "identity") as server:
        result = command(name, server.url, tmp_path)
    assert "answered 200 with more than 1000000 bytes" in result.stderr
    assert server.taken < 50_000_000, "what the sockets hold, and not the 10 GB that were offered"


@pytest.mark.parametrize("encoding", ["gzip", "gzip, gzip", "gzip, gzip, gzip"])
def test_a_compression_bomb_is_cut_off(encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes after each layer are counted, and none is decompressed as a whole."""
    bomb = completion("x" * 30_000_000)
    for _ in encoding.split(","):
        bomb = gzip.compress(bomb, 1)
    largest = []
    post = http_client.JSONClient._post

    async def observed(self: http_client.JSONClient, content: bytes) -> Any:
        try:
            return await post(self, content)
        except http_client.NoAnswer as error:
            largest.append(error)
            raise

    monkeypatch.setattr(http_client.JSONClient, "_post", observed)
    with ChatServer(lambda _: (200, {"Content-Encoding": encoding}, bomb)) as server:
        result = command("generate", server.url, tmp_path)
    assert "answered 200 with more than 1000000 bytes" in result.stderr
    assert len(largest) == 1


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("status", [301, 307])
def test_a_redirect_is_not_followed_and_gives_no_row(name: str, status: int, tmp_path: Path) -> None:
    with ChatServer() as other:
        location = f"{other.url}/{KEY}/chat?key={KEY}"
        with ChatServer(lambda _: (status, {"Location": location}, b"")) as server:
            result = command(name, server.url, tmp_path)
    assert other.bodies == []
    assert f"a redirect to {other.url}/***/chat. Redirects are not followed" in result.stderr
    assert KEY not in result.output


ECHOES = {
    "as it is": (401, {}, f"no such key: {KEY}".encode()),
    "in JSON": (200, {}, json.dumps({"error": KEY}).encode()),
    "as a type": (200, {}, json.dumps({"choices": [{"message": {"content": [KEY]}}]}).encode()),
    "in a header": (302, {"Location": f"/{KEY}"}, b""),
    "in a header that is invalid": (200, {"X-Key\x01": KEY}, b""),
    "in the encoding": (200, {"Content-Encoding": KEY}, b"{}"),
}


@pytest.mark.parametrize("name", ECHOES)
def test_a_key_that_the_server_repeats_is_in_no_message(name: str, tmp_path: Path) -> None:
    with ChatServer(lambda _: ECHOES[name]) as server:
        assert KEY not in command("generate", server.url, tmp_path).output
