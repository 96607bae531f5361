"""What `rlhf rm serve` adds to uvicorn: its HTTP connection, and a thread for the model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable
from typing import TypeVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

DRAIN_S = 2.0
"""Seconds that the rest of a refused request is read: closing earlier would reset the connection, losing the answer."""

T = TypeVar("T")


class Connection(H11Protocol):
    """uvicorn's HTTP connection with three additions: errors as JSON, an idle limit, and half-closed connections."""

    refused = False
    idle_since: float | None = None
    """When the server began to wait for the head of a request; None while a request is answered."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit_idle_time()

    def data_received(self, data: bytes) -> None:
        if self.refused:
            return
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            # uvicorn limits the time between requests, but not that of a request's head.
            self._limit_idle_time()
        else:
            self.idle_since = None

    def _limit_idle_time(self) -> None:
        self._unset_keepalive_if_required()
        if self.idle_since is None:
            self.idle_since = self.loop.time()
        deadline = self.idle_since + self.timeout_keep_alive  # also for a head that arrives byte by byte
        self.timeout_keep_alive_task = self.loop.call_at(deadline, self.timeout_keep_alive_handler)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Answer a request whose client sends no more but still reads (`nc -N`); uvicorn would close."""
        if self.cycle is None or self.cycle.response_complete:
            return None
        self.cycle.more_body = self.cycle.keep_alive = False
        self.cycle.message_event.set()
        return True

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not valid HTTP."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps({"error": msg}).encode() + b"\n"
            headers = [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
            ]
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.write_eof()
        self.refused = True
        self.loop.call_later(DRAIN_S, self.transport.close)


async def in_thread(work: Callable[[], T]) -> T:
    """Await `work` in a daemon thread, which unlike an executor's thread cannot keep a stopped server alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server stopped before the model answered
            loop.call_soon_threadsafe(finish, result, failure)

    threading.Thread(target=run, daemon=True).start()
    return await done
