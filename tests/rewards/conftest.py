"""Fixtures of the rewards' tests: a reward function in a file, and a scripted HTTP server."""

from __future__ import annotations

import contextlib

import pytest

from support.servers import Scripted


@pytest.fixture
def function(tmp_path):
    """A function that turns the body of a user's function, plain or async, into the entry of a config."""

    def write(body, *, is_async=False, **settings):
        path = tmp_path / f"f{len(list(tmp_path.glob('f*.py')))}.py"
        head = "import asyncio, math, time\nCALLS, NOW, MOST = [], [], []\n"
        define = f"{'async ' if is_async else ''}def f(prompts, responses, rows):\n"
        path.write_text(head + define + "".join(f"    {line}\n" for line in body.splitlines()), encoding="utf-8")
        return {"type": "function", "function": f"{path}:f", **settings}

    return write


@pytest.fixture
def scripted():
    with contextlib.ExitStack() as servers:
        yield lambda play: servers.enter_context(Scripted(play))
