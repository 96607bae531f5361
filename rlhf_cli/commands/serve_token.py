"""An ASGI middleware that asks every request for a token. vLLM takes it with `--middleware`. Does not import torch."""

from __future__ import annotations

import hmac
import json
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

VARIABLE = "RLHF_SERVE_TOKEN"
"""The environment variable that vLLM's processes read the token from."""
OPEN = ("/health",)
"""Paths that need no token."""
ANSWER = {
    "error": {
        "message": "the token is missing or wrong. Send it as Authorization: Bearer TOKEN",
        "type": "invalid_request_error",
        "code": "invalid_api_key",
    }
}


class RequireToken:
    """Answers 401 to requests without `Authorization: Bearer TOKEN`.

    vLLM's own `--api-key` protects only some of its paths (vLLM's page "Security"). Without an argument the token is
    that of the environment, and a missing one is an error.
    """

    def __init__(self, app: ASGIApp, token: str | None = None):
        self.app, self.expected = app, f"Bearer {token or os.environ[VARIABLE]}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN or self._is_right(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = json.dumps(ANSWER).encode() + b"\n"
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            headers.append((b"content-length", str(len(body)).encode()))
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _is_right(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self.expected)
