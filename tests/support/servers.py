"""HTTP servers on loopback that answer as a test tells them, and `transformers serve`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import pytest

from rlhf_cli.commands.writer import Request
from rlhf_cli.processes.launcher import free_port


class Scripted:
    """A server on loopback whose answers a test decides: `play(number of the request, body)` returns (status, headers,
    body), raw bytes to send, or None to close the connection."""

    path = "/get_reward"

    def __init__(self, play: Callable[[int, Any], Any], port: int = 0):
        self.requests: list[Any] = []
        self.headers: list[Message] = []
        self.paths: list[str] = []
        self.times: list[float] = []
        self.now, self.most, lock, outer = 0, 0, threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else the body waits 40 ms for the client to acknowledge the headers

            def do_POST(self) -> None:
                lines = self.rfile.read(int(self.headers["Content-Length"])).splitlines()
                body = json.loads(lines[0]) if len(lines) == 1 else list(map(json.loads, lines))
                with lock:
                    number = len(outer.requests)
                    outer.requests.append(body)
                    outer.headers.append(self.headers)
                    outer.paths.append(self.path)
                    outer.times.append(time.monotonic())
                    outer.now += 1
                    outer.most = max(outer.most, outer.now)
                try:
                    answer = play(number, body)
                finally:
                    with lock:
                        outer.now -= 1
                if isinstance(answer, tuple):
                    status, headers, content = answer
                    content = content if isinstance(content, bytes) else json.dumps(content).encode()
                    self.send_response(status)
                    for name, text in {"Content-Length": len(content), **headers}.items():
                        self.send_header(name, str(text))
                    self.end_headers()
                    self.wfile.write(content)
                else:
                    self.close_connection = True
                    self.wfile.write(answer or b"")

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.url = f"http://127.0.0.1:{self.server.server_port}{self.path}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


KEY = "sk-very-secret-0123456789"


def ask(text: str, *counters: int) -> Request:
    return Request.of(text, *(counters or (0,)))


def completion(text: Any, finish_reason: str = "stop") -> bytes:
    message = {"role": "assistant", "content": text}
    return json.dumps({"choices": [{"index": 0, "finish_reason": finish_reason, "message": message}]}).encode()


Reply = tuple[int, dict[str, str], bytes] | None
"""Status, headers and body, or None to close the connection without an answer."""


@dataclass(frozen=True)
class Call:
    """A request: its number, from 0, and its body."""

    number: int
    body: dict[str, Any]

    @property
    def text(self) -> str:
        return str(self.body["messages"][-1]["content"])


class ChatServer(Scripted):
    """An OpenAI-compatible server; `reply` returns the answer to a request."""

    path = "/v1"

    def __init__(self, reply: Callable[[Call], Reply] | None = None):
        reply = reply or (lambda call: (200, {}, completion(f"echo {call.text}")))
        super().__init__(lambda number, body: reply(Call(number, body)))


@contextlib.contextmanager
def transformers_serve(model: Path, log: Path) -> Iterator[str]:
    """Run `transformers serve` with one model on a free port; yield its base URL."""
    pytest.importorskip("fastapi", reason="`transformers serve` needs it: pip install -e '.[dev]'")
    port = free_port()
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(model), "--device", "cpu"]
    with log.open("wb") as out:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=out, stderr=out, env=environment
        )
    try:
        deadline = time.monotonic() + 120
        while True:
            assert process.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < deadline, log.read_text(errors="replace")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=120):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()
