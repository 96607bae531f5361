"""The page of `rlhf label`, on this machine.

    GET  /TOKEN/         the page, one HTML file
    GET  /TOKEN/state    the current pair
    POST /TOKEN/answer   {"done": number of answers that the page knows of, "key": "1"}  ->  the next pair

The server listens on the loopback address only. TOKEN is random, so other users of the machine cannot read or answer.
A page of another site can neither: the Host header must be an address of this machine, and the Origin, if there is one.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import asdict
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlhf_cli.commands.label import KEYS, Labelling
from rlhf_cli.commands.serving import Server, bind
from rlhf_cli.errors import ArtifactError
from rlhf_cli.files import json_object

MAX_BODY_BYTES = 1024
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Page(Server):
    """The page of one labeller."""

    def __init__(self, labelling: Labelling, port: int):
        self.labelling, self.token = labelling, secrets.token_urlsafe(16)
        self.ended = threading.Event()
        self.error: ArtifactError | None = None
        """Why answers cannot be written any more."""
        place = f"/{self.token}/"
        routes = [Route(place, page), Route(f"{place}state", self.show)]
        routes.append(Route(f"{place}answer", self.answer, methods=["POST"]))
        super().__init__(bind(None, port), routes, None, lambda text: {"error": text})

    async def show(self, _request: Request) -> Response:
        """The current pair."""
        return self.state()

    async def answer(self, request: Request) -> Response:
        """Take a key, if the page knows of all answers; else only send it the current pair."""
        body = json_object(await self.read(request, MAX_BODY_BYTES)) or {}
        key, done = body.get("key"), body.get("done")
        if not isinstance(key, str) or key not in KEYS:
            return self.state(400, error="no such key")
        if key == "q":
            self.ended.set()
            return self.state(ended=True)
        if done != self.labelling.done:
            return self.state(409, error="another window has answered this pair")
        try:
            taken = self.labelling.take(key)
        except ArtifactError as error:
            self.error = error
            self.ended.set()
            return JSONResponse({"error": str(error), "ended": True}, 507, HEADERS)
        return self.state() if taken else self.state(400, error="no such answer here")

    def state(self, status: int = 200, **more: Any) -> Response:
        """The current pair and the counts."""
        labelling, shown = self.labelling, self.labelling.current
        pair = asdict(shown) if shown is not None else {"number": None, "prompt": "", "replies": ["", ""]}
        state = {**pair, "done": labelling.done, "total": labelling.total, "counts": labelling.counts()}
        return JSONResponse({"state": state, **more}, status, HEADERS)


async def page(_request: Request) -> Response:
    """The HTML file. Only its own script and style run, by a nonce."""
    nonce = secrets.token_urlsafe(16)
    text = (resources.files("rlhf_cli.commands") / "label_page.html").read_text(encoding="utf-8")
    headers = {**HEADERS, "Content-Security-Policy": POLICY.format(nonce=nonce)}
    return Response(text.replace("NONCE", nonce), media_type="text/html", headers=headers)


def serve(labelling: Labelling, port: int) -> None:
    """Serve the page until its `q`, SIGINT or SIGTERM.

    Raises ConfigError for a port that cannot be bound, ArtifactError when an answer cannot be written.
    """
    server = Page(labelling, port)
    line = f"label: open {server.url}/{server.token}/ in a browser on this machine; Ctrl-C ends"
    server.run_until_signal(line, server.ended)
    if server.error is not None:
        raise server.error
