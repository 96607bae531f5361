"""HTTP servers on loopback that answer as a test tells them, and `transformers serve`."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.data.records import Message
from rlhf_cli.processes.launcher import free_port
from rlhf_cli.rollout.requests import Request


class Scripted:
    """A server whose answers a test decides: `play(number of the request, body)` returns (status, headers, body),
    raw bytes to send, or None to close the connection."""

    def __init__(self, play):
        self.requests, self.headers, self.paths, self.times, self.play = [], [], [], [], play
        self.now, self.most, self.lock = 0, 0, threading.Lock()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else the body waits 40 ms for the client to acknowledge the headers

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    number = len(outer.requests)
                    outer.requests.append(body)
                    outer.headers.append(dict(self.headers))
                    outer.paths.append(self.path)
                    outer.times.append(time.monotonic())
                    outer.now += 1
                    outer.most = max(outer.most, outer.now)
                answer = outer.play(number, body)
                with outer.lock:
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

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda *_: None
        self.url = f"http://127.0.0.1:{self.server.server_port}/get_reward"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


KEY = "sk-very-secret-0123456789"


def ask(text: str, *counters: int) -> Request:
    return Request((Message("user", text),), counters or (0,))


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


class ChatServer:
    """An OpenAI-compatible server on loopback; `reply` returns the answer to a request."""

    def __init__(self, reply: Callable[[Call], Reply] | None = None, port: int = 0):
        self.reply = reply or (lambda call: (200, {}, completion(f"echo {call.text}")))
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.times: list[float] = []
        self.most_at_once = self.at_once = 0
        lock, server = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else the body waits 40 ms for the client to acknowledge the headers

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with lock:
                    number = len(server.bodies)
                    server.bodies.append(body)
                    server.headers.append({k.lower(): v for k, v in self.headers.items()})
                    server.paths.append(self.path)
                    server.times.append(time.monotonic())
                    server.at_once += 1
                    server.most_at_once = max(server.most_at_once, server.at_once)
                try:
                    answer = server.reply(Call(number, body))
                finally:
                    with lock:
                        server.at_once -= 1
                if answer is None:
                    self.close_connection = True
                    return
                status, headers, content = answer
                with contextlib.suppress(OSError):  # The client may have timed out.
                    self.send_response(status)
                    for name, value in {"content-length": str(len(content)), **headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                """Print nothing when a client disconnects."""

        self._server = Server(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def __enter__(self) -> ChatServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def transformers_serve(model: Path, log: Path) -> Iterator[str]:
    """Run `transformers serve` with one model on a free port; yield its base URL."""
    missing = [name for name in ("fastapi", "uvicorn", "openai") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"`transformers serve` needs {', '.join(missing)}: pip install -e '.[dev]'")
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
