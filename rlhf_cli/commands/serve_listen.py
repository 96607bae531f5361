"""What every server of this program does: refuse strangers, bind its port, and run until a signal."""

from __future__ import annotations

import signal
import socket
import threading

import uvicorn

from rlhf_cli.errors import ConfigError
from rlhf_cli.http_client import is_loopback, key_from_environment
from rlhf_cli.printing import say

BACKLOG = 128
"""Connections that the system keeps until they are accepted."""


def required_token(host: str, variable: str | None) -> str | None:
    """The token in an environment variable, or None without one.

    Raises ConfigError for a variable that is not set, and for a host that others can reach without a token.
    """
    token = key_from_environment(variable, "--token-env") if variable is not None else None
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host}: other machines could use this model without a token. Name the environment variable with "
            "a token in --token-env, or use --host 127.0.0.1"
        )
    return token


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises ConfigError for a port that is taken and for another machine's address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        reason = str(reason).partition(" (while attempting")[0]  # create_server repeats the address
        raise ConfigError(f"--host {host} --port {port}: cannot be bound ({reason}). Choose another") from None


def address(listener: socket.socket) -> str:
    """The URL of a socket that listens."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_until_signal(server: uvicorn.Server, listener: socket.socket, line: str) -> None:
    """Print the line and serve until SIGTERM or SIGINT, then answer the running requests."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    # In a thread, because uvicorn in the main thread ends with the signal's own exit code instead of 0.
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    say(line, flush=True)
    stop.wait()
    server.should_exit = True
    thread.join()
    say("stopped", flush=True)
