"""The base of all servers: who may ask, the limits of a request, and one thread for the model.

uvicorn limits the connections. The size of a body, the time in which it must arrive and the requests that wait for the
model are limited here.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hmac
import json
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rlhf_cli.errors import ConfigError
from rlhf_cli.printing import say
from rlhf_cli.rewards.http_client import is_loopback

MAX_CONNECTIONS = 512  # a request that comes while so many connections are open is answered 503
IDLE_S = 60.0  # seconds without a request after which a connection is closed
BODY_S = 20.0  # seconds in which a body must arrive
LAST_REQUESTS_S = 10.0  # seconds that running requests may take to finish when the server stops
SIGNAL_S = 0.1  # seconds after which a signal is noticed at the latest

T = TypeVar("T")
Put = Callable[[Any], None]  # sends on a piece of a result. Raises Left if nobody waits for it any more.


def json_line(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(value) + "\n", status, headers, "application/json")


class Server:
    """The routes of one server with its limits. `run` serves until `stop`, and can run in any thread.

    Without a token it answers only requests that are sent to an address of this machine, and none that the page of
    another site sends: its name may point here.
    """

    def __init__(
        self,
        listener: socket.socket,
        routes: Sequence[Route],
        token: str | None,
        error: Callable[[str, int], Any],
        *,
        max_waiting: int = 0,
    ):
        """error: the JSON for a client, of text and status. max_waiting: the requests that may wait for the model."""
        self.listener, self.port = listener, listener.getsockname()[1]
        self.model = ModelThread(max_waiting)
        self._error, self._expected = error, None if token is None else f"Bearer {token}".encode()
        self._routes = Starlette(
            routes=[Route("/health", _health), *routes],
            exception_handlers={
                HTTPException: self._refused,
                ClientDisconnect: self._refused,
                Exception: self._failed,
            },
        )
        config = uvicorn.Config(
            self.app,
            interface="asgi3",
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # print nothing that a client sends
            access_log=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=int(IDLE_S),
            timeout_graceful_shutdown=int(LAST_REQUESTS_S),
        )
        self._uvicorn = uvicorn.Server(config)

    @property
    def url(self) -> str:
        host = self.listener.getsockname()[0]
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def run(self) -> None:
        """Serve until `stop`, then finish the running requests."""
        self._uvicorn.run(sockets=[self.listener])
        self.model.jobs.put(None)

    def stop(self) -> None:
        """Let `run` return; may be called from another thread."""
        self._uvicorn.should_exit = True

    def run_until_signal(self, line: str, ended: threading.Event | None = None) -> None:
        """Print the line, serve until SIGTERM, SIGINT or `ended`, and finish the running requests, unless another
        signal comes."""
        stop = ended or threading.Event()

        def end(*_: object) -> None:
            self._uvicorn.force_exit = stop.is_set()
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)
        # In a thread, because uvicorn in the main thread ends with the signal's own exit code instead of 0.
        thread = threading.Thread(target=self.run, daemon=True)
        thread.start()
        say(line, flush=True)
        # Not `stop.wait`: the handler could interrupt it while it holds the lock that `set` waits for.
        while not stop.is_set():
            time.sleep(SIGNAL_S)
        self.stop()
        thread.join()

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application: the routes, for a request that has the token or, without one, comes from here."""
        headers = dict(scope["headers"])
        answer: ASGIApp = self._routes
        if self._expected is None:
            host, origin = (headers.get(name, b"").decode("latin-1") for name in (b"host", b"origin"))
            if not _is_here(f"//{host}") or (b"origin" in headers and not _is_here(origin)):
                problem = "the Host or the Origin header names another machine. Start the server with --token-env"
                answer = json_line(self._error(problem, 403), 403)
        elif scope["path"] != "/health" and not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            message = "the token is missing or wrong. Send it as Authorization: Bearer TOKEN"
            error = {"message": message, "type": "invalid_request_error", "code": "invalid_api_key"}
            answer = json_line({"error": error}, 401, {"WWW-Authenticate": "Bearer"})
        try:
            await answer(scope, receive, send)
        except asyncio.CancelledError:  # uvicorn's, when LAST_REQUESTS_S are over. Raises if the answer has begun
            await json_line(self._error("the server has stopped", 503), 503)(scope, receive, send)

    async def read(self, request: Request, most: int) -> bytes:
        """The body of a request, of at most this many bytes. Raises HTTPException."""
        length = request.headers.get("Content-Length", "")
        if not length or "Transfer-Encoding" in request.headers:
            raise HTTPException(411, "a Content-Length is required")
        if int(length) > most:  # h11 accepts digits only
            raise HTTPException(413, f"the body has {length} bytes, at most {most} are read. Send less at a time")
        try:
            async with asyncio.timeout(BODY_S):
                return await request.body()
        except TimeoutError:
            message = f"the body came too slowly. It must arrive within {BODY_S:g} s"
            raise HTTPException(408, message, {"Connection": "close"}) from None

    @staticmethod
    async def until_left(request: Request, answer: Awaitable[T]) -> T:
        """Await an answer, and cancel it if its client leaves. Raises ClientDisconnect then."""

        async def left() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        work, gone = asyncio.ensure_future(answer), asyncio.ensure_future(left())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientDisconnect
            return work.result()
        finally:
            gone.cancel()
            work.cancel()

    # ------------------------------------------------------------------------------------------- errors

    async def _refused(self, _request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):  # the client left
            return Response(status_code=400)
        return json_line(self._error(error.detail, error.status_code), error.status_code, error.headers)

    async def _failed(self, _request: Request, error: Exception) -> Response:
        # For example out of memory: the next request may be smaller, so the server continues.
        traceback.print_exception(error)
        return json_line(self._error(f"the model failed ({type(error).__name__}); see the server's log", 500), 500)


class _Connection(H11Protocol):
    """A connection that is closed after IDLE_S without a first request. uvicorn does so only between two requests."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(IDLE_S, lambda: None if self.cycle else transport.close())


class Left(Exception):
    """The client does not wait for the rest of its answer."""


class ModelThread:
    """The only thread that uses the model. A daemon: a model that computes cannot keep a stopped server alive."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting, self.num_waiting = max_waiting, 0
        """Requests that may wait for the model or use it, and those that do."""
        self.jobs: queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]] | None]
        self.jobs = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    async def stream(self, work: Callable[[Put], Any]) -> AsyncIterator[Any]:
        """Yield the pieces that `work` puts, and at last its result. It waits behind the work of others.

        Raises HTTPException if too many wait. What was not begun is dropped when the iteration ends early.
        """
        if self.num_waiting >= self.max_waiting:
            raise HTTPException(503, f"{self.num_waiting} requests are waiting", {"Retry-After": "1"})
        loop, left = asyncio.get_running_loop(), threading.Event()
        pieces: asyncio.Queue[Any] = asyncio.Queue()

        def put(piece: Any) -> None:
            if left.is_set():
                raise Left
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        job: concurrent.futures.Future[Any] = concurrent.futures.Future()
        result = asyncio.wrap_future(job)
        result.add_done_callback(pieces.put_nowait)
        self.num_waiting += 1
        self.jobs.put((job, lambda: work(put)))
        try:
            while (piece := await pieces.get()) is not result:
                yield piece
            yield result.result()
        finally:
            self.num_waiting -= 1
            left.set()
            result.cancel()

    async def run(self, work: Callable[[Put], T]) -> T:
        async for piece in self.stream(work):
            last = piece  # the others are not kept: a reply puts its whole text after each token
        result: T = last
        return result

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            future, work = job
            if not future.set_running_or_notify_cancel():  # its client left
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)


async def _health(_request: Request) -> Response:
    return json_line({"status": "ok"})


def _is_here(url: str) -> bool:
    """True for a URL that names this machine by its loopback address.

    >>> _is_here("//localhost:8000"), _is_here("http://[::1]:80"), _is_here("//localhost.example.org"), _is_here("null")
    (True, True, False, False)
    """
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False


def bind(host: str | None, port: int, token: str | None = None) -> socket.socket:
    """A socket that listens there; None is this machine alone, of a command without --host.

    Raises ConfigError for a host that others can reach without a token, and for one that cannot be bound.
    """
    place = host or "127.0.0.1"
    if token is None and not is_loopback(place):
        raise ConfigError(
            f"--host {host}: other machines could use this model without a token. Name the environment variable with "
            "a token in --token-env, or use --host 127.0.0.1"
        )
    try:
        listener = socket.create_server((place, port), family=socket.AF_INET6 if ":" in place else socket.AF_INET)
        # Connections inherit it: one whose client has vanished is closed, and does not count any more.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return listener
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        reason = str(reason).partition(" (while attempting")[0]  # create_server repeats the address
        option = f"--host {host} --port {port}" if host is not None else f"--port {port}"
        raise ConfigError(f"{option}: cannot be bound ({reason}). Choose another") from None
