"""The one HTTP client: JSON in, JSON out, with retries. `type: http` rewards, `data generate` and `data score` use it.

- A request has one time limit, from connecting to the last byte of the answer.
- Connection errors, time-outs and status 408, 429 and 5xx are retried, with a wait that doubles each time.
- Retry-After pauses every request of the client. A signal that asks the run to stop ends a pause.
- Redirects are not followed: they would carry texts and the key to a host that the user did not name.
- The API key appears in no message, also where the server repeats it.
- Proxies of the environment are used, except for servers on this machine.
"""

from __future__ import annotations

import asyncio
import email.utils
import ipaddress
import json
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC
from typing import Any, TypeVar
from urllib.parse import quote, quote_plus, urlsplit

import httpx2

from rlhf_cli.errors import ConfigError
from rlhf_cli.printing import say
from rlhf_cli.rewards.concurrency import for_each

LONGEST_BACKOFF_S = 60.0
LONGEST_WAIT_S = 600.0  # longest Retry-After that is waited for
PRINTED_WAIT_S = 5.0  # a pause of this length or more is printed
POLL_S = 0.25  # seconds between two looks at `stop_requested` during a pause
MAX_ANSWER_BYTES = 16 * 1024 * 1024
MAX_QUOTED = 200  # characters of a server's answer that a message quotes

S = TypeVar("S")
T = TypeVar("T")


class NoAnswer(Exception):
    """The server gave no usable answer. The text names the URL and the problem; `transient`: another try may help."""

    def __init__(self, text: str, status: int | None = None, *, transient: bool = False):
        super().__init__(text)
        self.status, self.transient = status, transient


class StopRequestedError(NoAnswer):
    """A signal asked the run to stop while the client waited for the server."""


class Malformed(Exception):
    """Raised by a parser for JSON of the wrong shape; the text follows "the answer "."""


@dataclass
class JSONClient:
    """Posts JSON to one URL and parses the answer: `for_each` runs functions that call `ask`."""

    url: str
    _: KW_ONLY
    key: str | None = field(default=None, repr=False)
    timeout_s: float
    retries: int
    backoff_s: float
    retry_malformed: bool = False  # also retry answers with status 2xx that the parser refuses
    timeout_option: str = "timeout_s"
    """The name of the option or config key that sets `timeout_s`, for messages."""
    stop_requested: Callable[[], bool] = lambda: False
    """True after a signal whose handler returned: a pause then ends with StopRequestedError."""
    _not_before: float = field(default=0.0, init=False)  # Retry-After of any answer, on the monotonic clock
    _printed_until: float = field(default=0.0, init=False)
    """The end of the last pause that was printed, on the monotonic clock."""

    def for_each(self, items: Iterable[S], work: Callable[[S], Awaitable[T]], concurrency: int) -> list[T]:
        """The results of `work(item)` for every item, in order; see `rlhf_cli.rewards.concurrency`."""
        headers = {"Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            http = httpx2.AsyncClient(
                headers=headers,
                timeout=None,  # `_attempt` limits the whole request
                limits=httpx2.Limits(max_connections=None),  # `concurrency` limits them
                follow_redirects=False,
                trust_env=not is_loopback(urlsplit(self.url).hostname or ""),
            )
        except (OSError, ValueError, ImportError, httpx2.InvalidURL) as error:
            found = "a proxy (ALL_PROXY, HTTPS_PROXY, HTTP_PROXY) or SSL_CERT_FILE of the environment cannot be used"
            raise ConfigError(f"{found}: {str(error).partition('. ')[0]}. Change or unset it") from None

        async def run() -> list[T]:
            async with http as self._http:
                return await for_each(items, work, concurrency)

        return asyncio.run(run())

    async def ask(self, body: dict[str, Any], parse: Callable[[Any], T]) -> T:
        """`parse` of the JSON answer to `body`, or Malformed from it; raises NoAnswer when the retries are used up."""
        content, url = json.dumps(body, default=str).encode(), without_secrets(self.url)
        started, wait, reason, attempt = time.monotonic(), 0.0, url, 0
        while True:  # not a library's retries: all requests of the client share the pause that Retry-After asks for
            await self._pause(wait, reason)
            wait = min(self.backoff_s * 2.0 ** min(attempt, 60), LONGEST_BACKOFF_S)
            attempt += 1
            try:
                return await self._attempt(content, parse)
            except NoAnswer as problem:
                reason = f"{url} {problem}"
                if not problem.transient or attempt > self.retries:
                    tries = f", after {attempt} attempts in {time.monotonic() - started:.0f} s" if attempt > 1 else ""
                    raise NoAnswer(f"{reason}{tries}", problem.status) from None

    async def _pause(self, seconds: float, reason: str) -> None:
        """Wait at least `seconds`, and until the server's Retry-After has passed; raises after a signal."""
        until = time.monotonic() + seconds
        while True:
            until = max(until, self._not_before)
            left = until - time.monotonic()
            if left <= 0:
                return
            if self.stop_requested():
                raise StopRequestedError(f"{reason}; stopped in a pause of {left:.0f} s")
            if left >= PRINTED_WAIT_S and until > self._printed_until + 1:  # once for all requests of the client
                self._printed_until = until
                say(f"{reason}; trying again in {left:.0f} s", error=True)
            await asyncio.sleep(min(left, POLL_S))

    async def _attempt(self, content: bytes, parse: Callable[[Any], T]) -> T:
        """Send one request; raises NoAnswer with the problem alone, without the URL."""
        clock, answer = asyncio.timeout(self.timeout_s), bytearray()
        try:
            async with clock, self._http.stream("POST", self.url, content=content) as response:
                async for piece in response.aiter_bytes():  # decompressed
                    answer += piece
                    if len(answer) > MAX_ANSWER_BYTES:
                        text = f"answered {response.status_code} with more than {MAX_ANSWER_BYTES} bytes"
                        raise NoAnswer(text, response.status_code)
        except (TimeoutError, httpx2.HTTPError) as error:
            text = f"sent no valid HTTP answer ({self.quote(str(error)) or type(error).__name__})"
            if isinstance(error, httpx2.ConnectError):
                text = f"cannot be reached ({self.quote(connect_reason(error))})"
            if clock.expired():
                text = f"did not answer within {self.timeout_s:g} s ({self.timeout_option})"
            raise NoAnswer(text, transient=True) from None
        except httpx2.InvalidURL as error:
            raise NoAnswer(f"is not a valid URL ({self.quote(str(error))})") from None
        if not response.is_success:
            raise self._refusal(response, bytes(answer))
        try:
            value = json.loads(answer)
        except (ValueError, RecursionError):
            problem = "is not JSON"
        else:
            try:
                return parse(value)
            except Malformed as error:
                problem = str(error)
        status = response.status_code
        text = f"answered {status}, but the answer {problem}: {self.quote(bytes(answer))!r}"
        raise NoAnswer(text, status, transient=self.retry_malformed)

    def _refusal(self, response: httpx2.Response, answer: bytes) -> NoAnswer:
        """The problem of a status that is not 2xx. A Retry-After delays every request of this client."""
        status = response.status_code
        text = f"answered {status}: {self.quote(answer)!r}"
        if response.is_redirect:
            target = self.quote(without_secrets(response.headers.get("Location", "")))
            text += f", a redirect to {target}. Redirects are not followed: give that URL"
        transient = status in (408, 429) or status >= 500
        wait = retry_after(response.headers.get("Retry-After")) if transient else 0.0
        if wait > LONGEST_WAIT_S:
            return NoAnswer(f"{text}, and asks for a pause of {wait:.0f} s (Retry-After)", status)
        self._not_before = max(self._not_before, time.monotonic() + wait)
        return NoAnswer(text, status, transient=transient)

    def quote(self, text: str | bytes) -> str:
        """Text from a server, safe to print: on one line, shortened, without control characters and without the key."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        if self.key is not None:
            text = without_key(text, self.key)
        text = " ".join("".join(c if c.isprintable() else " " for c in text[: 5 * MAX_QUOTED]).split())
        return text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + "..."


def without_key(text: str, key: str) -> str:
    """The text with each occurrence of the key replaced by ***, also where it is escaped as in a URL, JSON or Python.

    >>> without_key("/login/a%2fb?a/b", "a/b")
    '/login/***?***'
    """
    forms = {key, quote(key, safe=""), quote_plus(key), json.dumps(key)[1:-1], repr(key)[1:-1], key.replace("/", r"\/")}
    longest_first = sorted(forms, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, longest_first)), "***", text, flags=re.IGNORECASE)


def key_from_environment(variable: str | None, option: str) -> str | None:
    """The key in this environment variable; ConfigError, which never shows it, if it is missing or fits no header."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    what = "token" if "token" in option else "key"
    if not key:
        raise ConfigError(f"{option}: the environment variable {variable} is not set or is empty. Set it to the {what}")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{option}: the value of {variable} contains spaces or characters that an HTTP header cannot carry. Set "
            f"it to the {what} alone"
        )
    return key


def retry_after(value: str | None) -> float:
    """Seconds that a Retry-After header asks to wait (RFC 9110, section 10.2.3: a number or a date); else 0.

    >>> retry_after("7"), retry_after("soon"), retry_after(None)
    (7.0, 0.0, 0.0)
    """
    text = (value or "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        date = email.utils.parsedate_to_datetime(text)
        return max(0.0, date.replace(tzinfo=date.tzinfo or UTC).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def connect_reason(error: BaseException) -> str:
    """The operating system's reason at the root of a connection error."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    if isinstance(error, BaseExceptionGroup):  # one error for each address of the host
        error = error.exceptions[0]
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return str(error)


def without_secrets(url: str) -> str:
    """A URL without user, password, query and fragment, which may be secret.

    >>> without_secrets("http://user:password@[::1]:5000/score?key=secret")
    'http://[::1]:5000/score'
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return "an invalid URL"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.netloc else parts.path


def is_loopback(host: str) -> bool:
    """Does this host name stay on this machine?

    >>> is_loopback("localhost"), is_loopback("127.0.0.2"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
