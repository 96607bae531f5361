"""`rlhf rm serve`: a reward model behind an HTTP endpoint, so that one machine can judge for another.

    POST /get_reward (or /)  {"query": [text, ...], "prompts": [...], "ended": [...]}  ->  {"rewards": [number, ...]}
    GET  /health             {"status": "ok"}

It is what `type: http` of a PPO config asks (docs/rewards.md), and answers OpenRLHF's clients too. The server is the
standard library's: there is one endpoint, the model is asked for one request at a time, and what a web framework
would bring beside that is not needed. It is made for one's own machines: where strangers can reach it, put a proxy
with TLS and limits of its own before it.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import signal
import socket
import socketserver
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rlhf_cli.artifacts import MANIFEST
from rlhf_cli.config.rewards import ModelReward
from rlhf_cli.errors import ConfigError, RewardError

if TYPE_CHECKING:
    from rlhf_cli.rewards.models import RewardModel

PATHS = ("/", "/get_reward")
MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_WAITING = 32
"""Requests that are read or wait for the model at once; one more is told to come again."""
IDLE_S = 60.0
"""Seconds without a byte after which a connection is closed."""
LAST_REQUESTS_S = 30.0
"""Seconds that requests under way get to end when the server is stopped."""
DRAIN_S = 2.0


@dataclass(frozen=True)
class Settings:
    """What is served, and where."""

    model: str
    """A model directory or hub id, a finished `rm` stage, or an artifact root with one."""
    host: str = "127.0.0.1"
    port: int = 5000
    """0 takes a free one."""
    token_env: str | None = None
    """The environment variable that holds the token that a request must bring."""
    max_batch: int = 1024
    """Texts of one request."""
    raw: bool = False
    """Scores as the model gives them, and not by the stored mean and standard deviation."""
    label: str | None = None
    probability: bool = False
    template: str | None = None
    device: str = "auto"


class BadRequestError(Exception):
    """What is wrong with a request, in one line, and the status that says so."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Server(ThreadingHTTPServer):
    """The endpoint of one reward model: a thread a connection, and one of them at the model."""

    daemon_threads = True
    request_queue_size = 128  # connections that wait to be accepted; the library's 5 would reset the others

    def __init__(self, host: str, port: int, source: RewardModel, *, token: str | None, max_batch: int):
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.source, self.token, self.max_batch = source, token, max_batch
        self.model_lock = threading.Lock()
        self.places = threading.BoundedSemaphore(MAX_WAITING)
        super().__init__((host, port), Handler)

    def server_bind(self) -> None:
        # Without the look-up of the host's full name, which can take seconds and which nothing here needs.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """A connection that broke is nobody's fault; anything else is ours, and the server goes on."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            traceback.print_exc()

    def rewards(self, queries: list[str], prompts: list[str], ended: list[bool]) -> list[float]:
        """The model's scores of prompts and responses, one batch at a time."""
        from rlhf_cli.rewards.base import Samples

        if not queries:
            return []
        # A query is prompt and response; without its prompt it is a response to nothing.
        pairs = [(p, q[len(p) :]) if q.startswith(p) else ("", q) for p, q in zip(prompts, queries, strict=True)]
        before, responses = map(list, zip(*pairs, strict=True))
        judged = Samples(before, responses, [], [], ended, [{} for _ in queries])
        with self.model_lock:
            found: list[float] = self.source.score(judged).tolist()
        return found

    def finish(self) -> None:
        """Stop, when the requests under way are answered, or a while after."""
        self.shutdown()
        until = time.monotonic() + LAST_REQUESTS_S
        for _ in range(MAX_WAITING):
            self.places.acquire(timeout=max(0.0, until - time.monotonic()))
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    """One connection; every answer is JSON in one line."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "rlhf", ""
    timeout = IDLE_S

    def do_GET(self) -> None:
        if self.path == "/health":
            self._reply(200, {"status": "ok"})
        else:
            self.send_error(404, "there are GET /health and POST /get_reward")

    def do_POST(self) -> None:
        try:
            self._require_token()
            if self.path not in PATHS:
                raise BadRequestError(404, "there are GET /health and POST /get_reward")
            length = self._length()
        except BadRequestError as error:
            challenge = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
            self._refuse(error.status, str(error), challenge)
            return
        if not self.server.places.acquire(blocking=False):
            self._refuse(503, f"{MAX_WAITING} requests are under way", {"Retry-After": "1"})
            return
        try:
            self._judge(length)
        finally:
            self.server.places.release()

    def _judge(self, length: int) -> None:
        """Read the body and answer it."""
        body = self.rfile.read(length)
        try:
            request = read_request(body, length, self.server.max_batch)
            rewards = self.server.rewards(*request)
        except BadRequestError as error:
            self._reply(error.status, {"error": str(error)})
        except RewardError as error:
            self._reply(500, {"error": str(error)})
        except Exception as error:
            # Out of memory, say: told here and there, and the next request may be a smaller one.
            traceback.print_exc()
            self._reply(500, {"error": f"the model fails ({type(error).__name__}), the server's own log says more"})
        else:
            self._reply(200, {"rewards": rewards})

    def _require_token(self) -> None:
        token = self.server.token
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise BadRequestError(401, "the token is missing or wrong. Send it as Authorization: Bearer TOKEN")

    def _length(self) -> int:
        """How many bytes of a body follow."""
        lengths = self.headers.get_all("Content-Length", [])
        text = lengths[0] if len(lengths) == 1 and "Transfer-Encoding" not in self.headers else ""
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise BadRequestError(411, "one Content-Length is needed")
        if int(text) > MAX_BODY_BYTES:
            raise BadRequestError(413, f"{text} bytes, at most {MAX_BODY_BYTES} are read. Send fewer texts at once")
        return int(text)

    def _reply(self, status: int, value: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode() + b"\n"
        self.send_response(status)
        for name, text in {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, text)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        """Answer before the body is read, and close."""
        self.close_connection = True
        self._reply(status, {"error": message}, headers)
        # What is still being sent is let in for a moment: a connection that is reset loses the answer.
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(DRAIN_S)
            until = time.monotonic() + DRAIN_S
            while time.monotonic() < until and self.connection.recv(65536):
                pass

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """What the standard library refuses (no HTTP, headers too long, another method), as ours is said."""
        self.close_connection = True
        self.request_version = self.protocol_version  # what is no HTTP is answered in HTTP all the same
        self._reply(code, {"error": message or "not understood"})

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing of what a client sends is printed."""


def read_request(body: bytes, length: int, max_batch: int) -> tuple[list[str], list[str], list[bool]]:
    """(queries, prompts, whether each ended) of a request's body; raises BadRequestError.

    >>> read_request(b'{"query": ["Hi! Hello."], "prompts": ["Hi!"]}', 45, 8)
    (['Hi! Hello.'], ['Hi!'], [True])
    """
    if len(body) < length:
        raise BadRequestError(400, f"{len(body)} of {length} bytes came")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequestError(400, "the body is no JSON") from None
    if not isinstance(value, dict) or "query" not in value:
        raise BadRequestError(400, 'an object with a list "query" is needed')
    queries = value["query"]
    if not isinstance(queries, list):
        raise BadRequestError(400, '"query" must be a list of texts')
    if len(queries) > max_batch:
        raise BadRequestError(413, f"{len(queries)} texts, at most {max_batch} are scored at once. Send fewer")

    def checked(key: str, default: Any, kind: Callable[[Any], bool], name: str) -> list[Any]:
        items = value.get(key)
        items = [default] * len(queries) if items is None else items
        if not isinstance(items, list) or len(items) != len(queries) or not all(map(kind, items)):
            raise BadRequestError(400, f'"{key}" must be a list of {name}, one for each of "query"')
        return items

    return (
        checked("query", None, is_text, "texts"),
        checked("prompts", "", is_text, "texts"),
        checked("ended", True, lambda item: isinstance(item, bool), "true and false"),
    )


def is_text(value: Any) -> bool:
    """Is it text that a tokenizer can read, without half a character (a lone surrogate)?"""
    if not isinstance(value, str):
        return False
    with contextlib.suppress(UnicodeEncodeError):
        value.encode()
        return True
    return False


def start(settings: Settings) -> Server:
    """The server of a reward model, bound to its port.

    Raises ConfigError where it could be reached from elsewhere without a token, or the port can't be had.
    """
    from rlhf_cli.http_client import is_loopback, key_from_environment
    from rlhf_cli.rewards.models import load_reward_source
    from rlhf_cli.training import distributed

    host, port, variable = settings.host, settings.port, settings.token_env
    token = key_from_environment(variable, "--token-env") if variable is not None else None
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host}: others could ask this model without a token. Name the environment variable that holds "
            "one with --token-env, or stay on 127.0.0.1"
        )
    place = Path(settings.model)
    path = str(place / "rm") if (place / "rm" / MANIFEST).is_file() else settings.model
    device = distributed.start(settings.device).device
    reward = as_reward(settings, path)
    source, notes = load_reward_source(reward, path, None, device, "auto", name=settings.model, key="--model")
    for note in notes:
        print(note, file=sys.stderr)
    try:
        return Server(host, port, source, token=token, max_batch=settings.max_batch)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"--host {host} --port {port}: can't be served at ({reason}). Give another") from None


def as_reward(settings: Settings, path: str) -> ModelReward:
    """What a PPO config would say of this model; raises ConfigError for what it could not say."""
    template = settings.template
    alone = template is not None and template != "chat" and "{prompt}" not in template
    try:
        return ModelReward(
            type="reward_model",
            path=path,
            label=settings.label,
            output="probability" if settings.probability else "logit",
            template=template,
            reads="response" if alone else "prompt_and_response",
            normalize=not settings.raw,
        )
    except ValidationError as error:
        raise ConfigError(f"--template: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; what is under way then is answered first."""
    server = start(settings)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host = f"[{server.server_name}]" if ":" in server.server_name else server.server_name
    print(f"{settings.model} judges at http://{host}:{server.server_port}/get_reward", flush=True)
    stop.wait()
    server.finish()
    print("stopped", flush=True)
