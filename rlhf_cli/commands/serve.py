"""`rlhf rm serve`: a reward model behind an HTTP endpoint, so that other machines can use it.

    POST /get_reward (or /)  {"query": [text, ...], "prompts": [...], "ended": [...]}  ->  {"rewards": [number, ...]}
    GET  /health             {"status": "ok"}

`type: http` of a PPO config posts to it (docs/rewards.md), and so do OpenRLHF's clients. Starlette routes, uvicorn
speaks HTTP, one thread runs the model. The server is meant for your own machines. To expose it to others, put a
proxy with TLS and rate limits in front of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rlhf_cli.artifacts import reward_model_stage
from rlhf_cli.commands.serve_connection import DRAIN_S, Connection, in_thread
from rlhf_cli.commands.serve_listen import address, bind, required_token, run_until_signal
from rlhf_cli.config.rewards import ModelReward
from rlhf_cli.errors import ConfigError, RewardError
from rlhf_cli.printing import say

if TYPE_CHECKING:
    from rlhf_cli.rewards.models import RewardModel

PATHS = ("/", "/get_reward")
MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_WAITING = 32
"""Maximum requests that are being read or wait for the model. Further ones are answered 503."""
IDLE_S = 60.0
"""Seconds without a request after which a connection is closed."""
BODY_S = 20.0
"""Seconds in which a body must arrive. Slow bodies fill the MAX_WAITING places for no longer than this, and the six
attempts of `type: http` span 31 s, so that other clients get through."""
MAX_TEXT_LENGTH = 400_000
"""Characters of a text: more than the context of any reward model, and few enough to tokenise in a second."""
LAST_REQUESTS_S = 30.0
"""Seconds that running requests may take to finish when the server stops."""


@dataclass(frozen=True)
class Settings:
    """What to serve, and where."""

    model: str
    """A model directory or hub id, a finished `rm` stage, or an artifact root with one."""
    host: str = "127.0.0.1"
    port: int = 5000
    """0 picks a free port."""
    token_env: str | None = None
    """The environment variable with the token that requests must bring."""
    max_batch: int = 1024
    """Maximum texts in a request."""
    raw: bool = False
    """Return scores without normalizing them by the stored mean and standard deviation."""
    label: str | None = None
    probability: bool = False
    template: str | None = None
    device: str = "auto"
    keep_special: bool = False
    """Read special tokens in all texts as special, not as the plain text that they are."""


# ------------------------------------------------------------------------------------------- answers


class JSONLine(Response):
    """An answer of one line of JSON."""

    media_type = "application/json"

    def __init__(self, value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None):
        super().__init__(json.dumps(value).encode() + b"\n", status, headers)


class Refusal(JSONLine):
    """An error that is sent before the body was read; then the connection is closed."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None):
        super().__init__({"error": message}, status, {"Connection": "close", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class BadRequestError(Exception):
    """What is wrong with a request, on one line, and the status to answer."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


# ------------------------------------------------------------------------------------------- the server


class RewardServer:
    """The endpoint of one reward model, bound to its port. `run` serves until `stop`, and can run in any thread."""

    def __init__(self, listener: socket.socket, source: RewardModel, *, token: str | None, max_batch: int):
        self.listener, self.source, self.token, self.max_batch = listener, source, token, max_batch
        self.host, self.port = listener.getsockname()[:2]
        self.num_requests = 0
        """Requests that are being read or wait for the model."""
        self._model_lock = asyncio.Lock()
        app = Starlette(
            routes=[Route("/health", health), Route("/{path:path}", self.get_reward, methods=["POST"])],
            exception_handlers={HTTPException: unknown_route},
        )
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # print nothing that a client sends
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(IDLE_S),
            timeout_graceful_shutdown=int(LAST_REQUESTS_S),
        )
        self.uvicorn = uvicorn.Server(config)

    def run(self) -> None:
        """Serve until `stop`, then finish the running requests."""
        self.uvicorn.run(sockets=[self.listener])

    def stop(self) -> None:
        """Let `run` return; may be called from another thread."""
        self.uvicorn.should_exit = True

    async def get_reward(self, request: Request) -> Response:
        """Check a request before reading its body, then score it."""
        try:
            self._require_token(request)
            if request.url.path not in PATHS:
                raise BadRequestError(404, "unknown path. There are GET /health and POST /get_reward")
            length = content_length(request)
        except BadRequestError as error:
            return Refusal(error.status, str(error), {"WWW-Authenticate": "Bearer"} if error.status == 401 else None)
        if self.num_requests >= MAX_WAITING:
            return Refusal(503, f"{MAX_WAITING} requests are waiting", {"Retry-After": "1"})
        self.num_requests += 1
        try:
            return await self._answer(request, length)
        finally:
            self.num_requests -= 1

    async def _answer(self, request: Request, length: int) -> Response:
        try:
            texts = parse_request(await read_body(request), length, self.max_batch)
            async with self._model_lock:
                return JSONLine({"rewards": await in_thread(lambda: self.rewards(*texts))})
        except TimeoutError:
            return Refusal(408, f"the body did not arrive within {BODY_S:g} s")
        except BadRequestError as error:
            return JSONLine({"error": str(error)}, error.status)
        except RewardError as error:
            return JSONLine({"error": str(error)}, 500)
        except Exception as error:
            # For example out of memory: the next request may be smaller, so the server continues.
            traceback.print_exc()
            return JSONLine({"error": f"the model failed ({type(error).__name__}); see the server's log"}, 500)

    def _require_token(self, request: Request) -> None:
        given = request.headers.get("Authorization", "").encode("latin-1", "replace")
        if self.token is not None and not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            raise BadRequestError(401, "the token is missing or wrong. Send it as Authorization: Bearer TOKEN")

    def rewards(self, queries: list[str], prompts: list[str], ended: list[bool]) -> list[float]:
        """The model's scores. A query is a prompt with its response; without its prompt it counts as a response."""
        from rlhf_cli.rewards.base import Samples

        if not queries:
            return []
        pairs = [(p, q[len(p) :]) if q.startswith(p) else ("", q) for p, q in zip(prompts, queries, strict=True)]
        before, responses = map(list, zip(*pairs, strict=True))
        scores: list[float] = self.source.score(
            Samples(before, responses, [], [], ended, [{} for _ in queries])
        ).tolist()
        return scores


async def health(_request: Request) -> Response:
    """Say that the server runs."""
    return JSONLine({"status": "ok"})


async def unknown_route(_request: Request, error: Exception) -> Response:
    """Answer a path or method that no route takes."""
    assert isinstance(error, HTTPException)
    return Refusal(error.status_code, "unknown path or method. There are GET /health and POST /get_reward")


# ------------------------------------------------------------------------------------------- requests


def content_length(request: Request) -> int:
    """The length of the body that follows; raises BadRequestError without a valid one."""
    text = request.headers.get("Content-Length", "")
    if not text or "Transfer-Encoding" in request.headers:
        raise BadRequestError(411, "a Content-Length is required")
    if int(text) > MAX_BODY_BYTES:  # h11 accepts digits only
        raise BadRequestError(413, f"the body has {text} bytes, at most {MAX_BODY_BYTES} are read. Send fewer texts")
    return int(text)


async def read_body(request: Request) -> bytes:
    """The body; raises TimeoutError if it has not arrived after BODY_S seconds."""
    body = bytearray()
    with contextlib.suppress(ClientDisconnect):
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                body += piece
    return bytes(body)


def parse_request(body: bytes, length: int, max_batch: int) -> tuple[list[str], list[str], list[bool]]:
    """(queries, prompts, whether each response ended) from a request's body; raises BadRequestError.

    >>> parse_request(b'{"query": ["Hi! Hello."], "prompts": ["Hi!"]}', 45, 8)
    (['Hi! Hello.'], ['Hi!'], [True])
    """
    if len(body) < length:
        raise BadRequestError(400, f"the body ended after {len(body)} of {length} bytes")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequestError(400, "the body is not JSON") from None
    if not isinstance(value, dict) or "query" not in value:
        raise BadRequestError(400, 'the body must be an object with a list "query"')
    queries = value["query"]
    if not isinstance(queries, list):
        raise BadRequestError(400, '"query" must be a list of texts')
    if len(queries) > max_batch:
        raise BadRequestError(413, f"{len(queries)} texts, at most {max_batch} are scored per request. Send fewer")

    def checked(key: str, default: Any, is_valid: Callable[[Any], bool], name: str) -> list[Any]:
        items = value.get(key)
        items = [default] * len(queries) if items is None else items
        if not isinstance(items, list) or len(items) != len(queries) or not all(map(is_valid, items)):
            raise BadRequestError(400, f'"{key}" must be a list of {name}, one for each item of "query"')
        return items

    texts, prompts = checked("query", None, is_text, "texts"), checked("prompts", "", is_text, "texts")
    longest = max(map(len, (*texts, *prompts)), default=0)
    if longest > MAX_TEXT_LENGTH:
        raise BadRequestError(413, f"a text has {longest} characters, at most {MAX_TEXT_LENGTH} are read. Shorten it")
    return texts, prompts, checked("ended", True, lambda item: isinstance(item, bool), "true and false")


def is_text(value: Any) -> bool:
    """Is it text that a tokenizer can read, without lone surrogates?"""
    if not isinstance(value, str):
        return False
    with contextlib.suppress(UnicodeEncodeError):
        value.encode()
        return True
    return False


# ------------------------------------------------------------------------------------------- the command


def start(settings: Settings) -> RewardServer:
    """Load the reward model and bind its port.

    Raises ConfigError for a host that others can reach without a token, and for a port that cannot be bound.
    """
    from rlhf_cli.rewards.models import load_reward_source
    from rlhf_cli.training import distributed

    token = required_token(settings.host, settings.token_env)
    path = reward_model_stage(settings.model)
    device = distributed.start(settings.device).device
    reward = as_reward(settings, path)
    source, notes = load_reward_source(
        reward, path, None, device, "auto", name=settings.model, key="--model", keep_special=settings.keep_special
    )
    source.prompts_are_rendered = True
    for note in notes:
        say(note, error=True)
    listener = bind(settings.host, settings.port)
    return RewardServer(listener, source, token=token, max_batch=settings.max_batch)


def as_reward(settings: Settings, path: str) -> ModelReward:
    """The model as an entry of `rewards` in a PPO config; raises ConfigError for an invalid template."""
    template = settings.template
    response_only = template is not None and template != "chat" and "{prompt}" not in template
    try:
        return ModelReward(
            type="reward_model",
            path=path,
            label=settings.label,
            output="probability" if settings.probability else "logit",
            template=template,
            reads="response" if response_only else "prompt_and_response",
            normalize=not settings.raw,
        )
    except ValidationError as error:
        raise ConfigError(f"--template: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then answer the running requests."""
    server = start(settings)
    run_until_signal(
        server.uvicorn, server.listener, f"serving {settings.model} at {address(server.listener)}/get_reward"
    )
