"""`rlhf data score` against servers that send too much. `tests/rewards/test_endpoint.py` has the other faults."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rlhf_cli.cli import app
from rlhf_cli.rewards import http_client
from support.servers import KEY, ChatServer, completion
from support.tiny import write_jsonl


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("MY_KEY", KEY)
    monkeypatch.setattr(http_client, "MAX_ANSWER_BYTES", 1_000_000)


def command(url: str, tmp_path: Path) -> Result:
    """The result of a command that asks the server, with a key, and must write no row."""
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "response": "b"}])
    out = tmp_path / "out" / "rows.jsonl"
    arguments = ["data", "score", str(source), "--out", str(out), "--model", "m", "--server", url]
    result = CliRunner().invoke(app, [*arguments, "--api-key-env", "MY_KEY", "--retries", "0"])
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 1
    assert not out.exists()
    assert len(result.stderr.splitlines()) == 1
    return result


class Flood(http.server.BaseHTTPRequestHandler):
    """Gives an answer that never ends, and counts the bytes that were taken from it."""

    taken = 0

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            while Flood.taken < 10**10:
                Flood.taken += self.wfile.write(b"x" * 65536)

    def log_message(self, *_: Any) -> None:
        pass


def test_an_answer_without_an_end_is_cut_off(tmp_path: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Flood) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        result = command(f"http://127.0.0.1:{server.server_address[1]}/v1", tmp_path)
        server.shutdown()
    assert "answered 200 with more than 1000000 bytes" in result.stderr
    assert Flood.taken < 50_000_000, "what the sockets hold, and not the 10 GB that were offered"


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
        result = command(server.url, tmp_path)
    assert "answered 200 with more than 1000000 bytes" in result.stderr
    assert len(largest) == 1
