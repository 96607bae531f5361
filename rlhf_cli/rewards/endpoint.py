"""An endpoint that scores texts: `rlhf rm serve`, or another of the shape that OpenRLHF's remote reward model has.

    POST <url>  {"query": [prompt + response, ...], "prompts": [...], "labels": [...], "ended": [...]}
    answer      {"rewards": [number, ...]}, or the bare list

`ended` is ours: whether the response came to its end, which a reward model that reads EOS has to know; others ignore
it. A redirect is not followed: what is sent there would leave the host that the config names.
"""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import ipaddress
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx2
import torch

from rlhf_cli.config.rewards import HTTPReward
from rlhf_cli.data.batches import chunks
from rlhf_cli.errors import ConfigError
from rlhf_cli.rewards.judged import Judged, RewardSource, finite, in_pieces, shown

LONGEST_BACKOFF_S = 60.0
LONGEST_WAIT_S = 300.0
"""However long the server asks for."""
MAX_ANSWER_BYTES = 64 * 1024 * 1024


class NoAnswer(Exception):
    """A request that brought no rewards; the text says what came instead."""


@dataclass(frozen=True)
class Reply:
    """What a server answered."""

    status: int
    text: str
    retry_after: str | None
    location: str | None


@dataclass(kw_only=True)
class Endpoint(RewardSource):
    """A server that is sent texts, some in a request and some requests at once, and sends back a number for each."""

    kind: ClassVar[str] = "reward"
    url: str
    token: str | None = field(default=None, repr=False)
    label_column: str | None = None
    batch_size: int = 64
    concurrency: int = 4
    timeout_s: float = 60.0
    retries: int = 5
    backoff_s: float = 1.0

    def score(self, judged: Judged) -> torch.Tensor:
        """The rewards that the server gives, [B] float32."""
        found = [math.nan] * len(judged.responses)
        asyncio.run(self._ask_all(judged, found))
        return torch.tensor(found)

    async def _ask_all(self, judged: Judged, found: list[float]) -> None:
        headers = {"Content-Type": "application/json"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        # A proxy is for other machines. How long a request may take is counted below, over all of it.
        trusts_proxies = not is_loopback(urlsplit(self.url).hostname or "")
        async with httpx2.AsyncClient(
            headers=headers, timeout=None, follow_redirects=False, trust_env=trusts_proxies
        ) as client:

            async def ask(piece: Sequence[int]) -> None:
                try:
                    rewards = await self._rewards(client, self._body(judged, piece), len(piece))
                except NoAnswer as error:
                    self.fail(judged, piece, f"{bare(self.url)} {error}", error)
                    return
                for row, reward in zip(piece, rewards, strict=True):
                    try:
                        found[row] = finite(reward)
                    except ValueError as error:
                        self.fail(judged, [row], f"{bare(self.url)} {error}", error)

            await in_pieces(list(chunks(range(len(found)), self.batch_size)), ask, self.concurrency)

    def _body(self, judged: Judged, piece: Sequence[int]) -> bytes:
        labels = ["" if self.label_column is None else judged.rows[i].get(self.label_column) for i in piece]
        body = {
            "query": [judged.prompts[i] + judged.responses[i] for i in piece],
            "prompts": [judged.prompts[i] for i in piece],
            "labels": labels,
            "ended": [judged.ended[i] for i in piece],
        }
        return json.dumps(body, default=str).encode()

    async def _rewards(self, client: httpx2.AsyncClient, body: bytes, num_texts: int) -> list[Any]:
        """The rewards of one request, sent again where it helps; raises NoAnswer."""
        attempt = 0
        while True:
            attempt += 1
            wait = min(self.backoff_s * 2 ** (attempt - 1), LONGEST_BACKOFF_S)
            clock = asyncio.timeout(self.timeout_s)
            try:
                async with clock:
                    reply = await post(client, self.url, body)
            except (TimeoutError, httpx2.HTTPError) as error:
                problem = "can't be reached" if isinstance(error, httpx2.ConnectError) else "gave no answer"
                problem += f" ({shown(str(error)) or type(error).__name__})"
                if clock.expired():
                    problem = f"gave no answer within {self.timeout_s:g} s (timeout_s)"
            except httpx2.InvalidURL as error:
                raise NoAnswer(f"is no url ({shown(str(error))})") from None
            else:
                if 200 <= reply.status < 300:
                    return rewards_of(reply, num_texts, self._safe(reply.text))
                problem = f"answered {reply.status}: {self._safe(reply.text)!r}"
                if reply.location is not None:
                    problem += f", a redirect to {bare(reply.location)}, which is not followed. Give that url"
                if reply.status not in (408, 429) and reply.status < 500:
                    raise NoAnswer(problem)
                if reply.status in (429, 503):
                    wait = max(wait, min(seconds(reply.retry_after), LONGEST_WAIT_S))
            if attempt > self.retries:
                raise NoAnswer(f"{problem}, at the last of {attempt} attempts" if self.retries else problem)
            await asyncio.sleep(wait)

    def _safe(self, text: str) -> str:
        """What a server said, for a message, without the token that it was sent."""
        return shown(text.replace(self.token, "***") if self.token is not None else text)

    @property
    def reads_a_column(self) -> bool:
        return self.label_column is not None

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError for a row of the data that has no label to be sent."""
        if self.label_column is not None and self.label_column not in row:
            raise ValueError(f"its row has no {self.label_column!r}, it has {shown(', '.join(map(str, row)))}")


async def post(client: httpx2.AsyncClient, url: str, body: bytes) -> Reply:
    """Send a request; raises NoAnswer for an answer that is too long to be one."""
    async with client.stream("POST", url, content=body) as response:
        content = b""
        async for part in response.aiter_bytes():
            content += part
            if len(content) > MAX_ANSWER_BYTES:
                raise NoAnswer(f"answered {response.status_code} with more than {MAX_ANSWER_BYTES} bytes")
    headers = response.headers
    location = headers.get("Location") if response.is_redirect else None
    return Reply(response.status_code, content.decode("utf-8", "replace"), headers.get("Retry-After"), location)


def rewards_of(reply: Reply, num_texts: int, shown_text: str) -> list[Any]:
    """The list of rewards in an answer, whatever stands in it; raises NoAnswer where it is none of that length.

    >>> rewards_of(Reply(200, '{"rewards": [1.5, null]}', None, None), 2, "")
    [1.5, None]
    """
    try:
        value = json.loads(reply.text)
    except (ValueError, RecursionError):
        raise NoAnswer(f"answered {reply.status} with no JSON: {shown_text!r}") from None
    rewards = value.get("rewards") if isinstance(value, dict) else value
    if not isinstance(rewards, list):
        raise NoAnswer(f"answered {reply.status} without a list of rewards: {shown_text!r}")
    if len(rewards) != num_texts:
        raise NoAnswer(f"gave {len(rewards)} rewards for {num_texts} texts: {shown_text!r}")
    return rewards


def seconds(retry_after: str | None, now: datetime.datetime | None = None) -> float:
    """How long a Retry-After header asks to wait, as seconds or as a date (RFC 9110, section 10.2.3); else 0.

    >>> seconds("7"), seconds("soon"), seconds(None)
    (7.0, 0.0, 0.0)
    >>> noon = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
    >>> seconds("Thu, 01 Jan 2026 12:00:30 GMT", noon)
    30.0
    """
    if retry_after is None:
        return 0.0
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        date = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    if date.tzinfo is None:
        date = date.replace(tzinfo=datetime.UTC)
    return max(0.0, (date - (now or datetime.datetime.now(datetime.UTC))).total_seconds())


def bare(url: str) -> str:
    """A URL without what may be secret in it: user, password and query.

    >>> bare("http://user:password@[::1]:5000/score?key=secret")
    'http://[::1]:5000/score'
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return "another place"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.netloc else parts.path


def is_loopback(host: str) -> bool:
    """Does a host's name stay on this machine?

    >>> is_loopback("localhost"), is_loopback("127.0.0.2"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def load_endpoint(reward: HTTPReward, name: str, key: str) -> tuple[Endpoint, list[str]]:
    """The source that a config names, and the lines that the user should read about it.

    Raises ConfigError where its token is not in the environment.
    """
    notes = []
    token = token_from(reward.api_key_env, f"{key}.api_key_env") if reward.api_key_env is not None else None
    parts = urlsplit(reward.url)
    if token is not None and parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        notes.append(f"{key}: the token goes to {bare(reward.url)} in the clear. Take https")
    source = Endpoint(
        name=name,
        weight=reward.weight,
        on_error=reward.on_error,
        advice="See what the server says of it, or have such scores count as 0.0 with on_error: zero",
        url=reward.url,
        token=token,
        label_column=reward.label_column,
        batch_size=reward.batch_size,
        concurrency=reward.concurrency,
        timeout_s=reward.timeout_s,
        retries=reward.retries,
        backoff_s=reward.backoff_s,
    )
    return source, notes


def token_from(variable: str, key: str) -> str:
    """A token of the environment; raises ConfigError, which does not show it, where there is none that can be sent."""
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ConfigError(f"{key}: the environment has no {variable}. Set it to the token")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{key}: what {variable} holds can't be sent in a header. Set it to the token alone")
    return token
