"""A language model that writes text for us: one from a directory here, or one behind an OpenAI-compatible server.

Both are asked with `write`: requests in, as many answers out, in the same order. What can't be answered comes back
as a Failure, so that one prompt that is too long ends no run.
"""

from __future__ import annotations

import email.utils
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2
import torch
from huggingface_hub import InferenceClient, constants, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, InferenceTimeoutError, OfflineModeIsEnabled

from rlhf_cli.artifacts import model_directory
from rlhf_cli.data.encode import encode_rows, require_eos
from rlhf_cli.data.records import Message, Prompt, transcript
from rlhf_cli.errors import ConfigError, DataError
from rlhf_cli.models.limits import positions
from rlhf_cli.models.load import check_vocabulary, load_policy, load_tokenizer, prepare
from rlhf_cli.rollout.distribution import Sampling
from rlhf_cli.rollout.sampling import response_text, sample, stop_ids
from rlhf_cli.seeding import derived_seed, generator
from rlhf_cli.training.distributed import start

REFUSED = (400, 413, 422)
"""Statuses that speak of one request (a prompt too long, say): it gets no answer, and the others do."""
LONGEST_BACKOFF_S = 60.0
LONGEST_WAIT_S = 600.0
"""A server that asks for a longer pause than this is left alone."""
NO_KEY = "none"
"""Sent where no key is given. Without one huggingface_hub would send the user's own token of the hub."""


@dataclass(frozen=True)
class Drawing:
    """How answers are drawn, by either writer."""

    temperature: float = 1.0
    """0 takes the likeliest token each time."""
    top_p: float | None = None
    """Draw from the smallest set of likeliest tokens whose probability reaches p."""
    max_new_tokens: int = 256
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """What the model is asked."""

    messages: tuple[Message, ...]
    """A conversation that ends before the answer."""
    counters: tuple[int, ...]
    """The draw's own numbers (row, sample, attempt): equal ones draw the same answer, whatever else is asked."""


@dataclass(frozen=True)
class Written:
    """An answer."""

    text: str
    ended: bool
    """The model ended it; else it was cut at `max_new_tokens`."""


@dataclass(frozen=True)
class Failure:
    """A request without an answer, and why."""

    reason: str
    fatal: bool = False
    """No request is answered any more: the run has to stop."""


# ------------------------------------------------------------------------------------------ a model here


class LocalWriter:
    """A Hugging Face directory, or a finished stage's, as the writer.

    Messages are written in the tokenizer's chat template where it has one. Else one message stands as it is, and
    several as a transcript. An answer's uniforms are seeded by (seed, its counters), so that it does not depend on
    how requests are cut into batches, but for the rounding of sums.

    Raises ArtifactError for what is no language model that can be loaded.
    """

    def __init__(self, path: str, drawing: Drawing, *, batch_size: int = 16, device: str = "auto"):
        self.name, self.drawing, self.batch_size = path, drawing, batch_size
        directory = model_directory(path)
        self.tokenizer = load_tokenizer(directory)
        require_eos(self.tokenizer, path)
        self.model = load_policy(directory)
        check_vocabulary(self.model, self.tokenizer, path)
        prepare(self.model, start(device).device)
        greedy = drawing.temperature == 0
        self.sampling = Sampling(
            temperature=1.0 if greedy else drawing.temperature,
            top_k=1 if greedy else None,
            top_p=drawing.top_p,
            stop=frozenset(stop_ids(self.model, self.tokenizer)),
        )

    def write(self, requests: Sequence[Request]) -> list[Written | Failure]:
        """The answer to each request; a Failure where it has no room in the model or no chat template for it."""
        answers: list[Written | Failure] = []
        for first in range(0, len(requests), self.batch_size):
            answers += self._batch(requests[first : first + self.batch_size])
        return answers

    def _batch(self, requests: Sequence[Request]) -> list[Written | Failure]:
        encoded = [self._encode(request) for request in requests]
        possible = [n for n, ids in enumerate(encoded) if not isinstance(ids, Failure)]
        answers: list[Any] = list(encoded)
        if possible:
            columns, seed = self.drawing.max_new_tokens, self.drawing.seed
            table = torch.stack(
                [torch.rand(columns, generator=generator(seed, "writer", *requests[n].counters)) for n in possible]
            )
            responses = sample(self.model, [answers[n] for n in possible], table, self.sampling)
            for n, response in zip(possible, responses, strict=True):
                answers[n] = Written(response_text(self.tokenizer, response, self.sampling), response.ended)
        return answers

    def _encode(self, request: Request) -> list[int] | Failure:
        messages = request.messages
        text = messages[0].content if len(messages) == 1 else transcript(messages)
        try:
            ids = encode_rows(self.tokenizer, [Prompt(text, "a prompt", messages=messages)], None)[0]
        except DataError as error:  # The chat template does not take this conversation.
            return Failure(str(error))
        new, room = self.drawing.max_new_tokens, positions(self.model)
        if len(ids) + new > room:
            return Failure(f"{len(ids)} tokens of the prompt and {new} new ones, the model has {room} positions")
        return ids


# ----------------------------------------------------------------------------------------- a server


class ServerWriter:
    """Any OpenAI-compatible server's chat completions, asked by huggingface_hub's InferenceClient.

    `url` is the base URL (http://localhost:8000/v1), `model` its name there. The key comes from the environment
    variable `api_key_env`, and is in no message. At most `concurrency` requests are under way. One that fails by a
    connection, a time-out, an answer that is none, or status 408, 429 or 5xx is sent again up to `retries` times,
    after `backoff_s` seconds, then twice as many and so on, and not before the server wants it (Retry-After). When
    that is used up nothing more is sent, and every answer that is missing is a fatal Failure.

    Raises ConfigError for a URL or a key that can't be used.
    """

    def __init__(
        self,
        url: str,
        model: str,
        drawing: Drawing,
        *,
        api_key_env: str | None = None,
        concurrency: int = 8,
        timeout_s: float = 120.0,
        retries: int = 5,
        backoff_s: float = 1.0,
    ):
        self.name, self.drawing = model, drawing
        self.host = _host(url)
        self.concurrency, self.timeout_s, self.retries, self.backoff_s = concurrency, timeout_s, retries, backoff_s
        self._api_key_env = api_key_env
        self._key = _key(api_key_env)
        set_client_factory(_session)
        self._client = InferenceClient(base_url=url, api_key=self._key or NO_KEY, timeout=timeout_s)
        self._stop = threading.Event()
        self._why = ""
        self._not_before = 0.0

    def write(self, requests: Sequence[Request]) -> list[Written | Failure]:
        """The answer to each request, in order; a Failure where the server refuses one, a fatal one as above."""
        self._stop.clear()
        answers: list[Written | Failure | BaseException | None] = [None] * len(requests)
        numbers = iter(range(len(requests)))
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    n = next(numbers, None)
                if n is None:
                    return
                try:
                    answers[n] = self._answer(requests[n])
                except BaseException as error:
                    answers[n] = error
                    self._stop.set()

        # Not a ThreadPoolExecutor: at the end of the program it waits for what is under way, and Ctrl-C would too.
        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(self.concurrency, len(requests)))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:
            self._stop.set()
            raise
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if isinstance(answer, Written | Failure)]

    def _answer(self, request: Request) -> Written | Failure:
        drawing, said, begun = self.drawing, "", time.monotonic()
        seed = derived_seed(drawing.seed, "writer", *request.counters) >> 32
        wait = 0.0
        for attempt in range(self.retries + 1):
            if self._pause(wait):
                return Failure(self._why, fatal=True)
            wait = min(self.backoff_s * 2**attempt, LONGEST_BACKOFF_S)
            try:
                output = self._client.chat_completion(
                    [{"role": m.role, "content": m.content} for m in request.messages],
                    model=self.name,
                    max_tokens=drawing.max_new_tokens,
                    temperature=drawing.temperature,
                    top_p=drawing.top_p,
                    seed=seed,
                )
                written = _written(output)
            except InferenceTimeoutError:
                said = f"said nothing for {self.timeout_s:g} s"
            except HfHubHTTPError as error:
                status, said = error.response.status_code, self._said(error)
                if status in REFUSED:
                    return Failure(f"{self.host}: {said}")
                if status < 500 and status not in (408, 429):
                    return self._give_up(f"{said}.{self._hint(status)}")
                asked = retry_after(error.response.headers.get("retry-after"))
                if asked is not None and asked > LONGEST_WAIT_S:
                    return self._give_up(f"{said}, asks for a pause of {asked:.0f} s. Run the same command after it")
                if asked is not None:
                    # Whoever else is about to send waits too.
                    self._not_before = max(self._not_before, time.monotonic() + asked)
            except httpx2.RequestError as error:
                said = f"no connection ({self._clean(str(error)) or type(error).__name__})"
            except (ValueError, RecursionError) as error:
                said = f"answered what is no chat completion ({self._clean(str(error))})"
            else:
                if written is None:
                    return Failure(f"{self.host}: the answer has no text")
                return written
        tries = f"{self.retries + 1} tries in {time.monotonic() - begun:.0f} s"
        return self._give_up(f"{said}, {tries}. What is written stands, and the same command goes on")

    def _pause(self, seconds: float) -> bool:
        """Wait so long, and until the server wants to be asked again; True where everything stops meanwhile."""
        until = time.monotonic() + seconds
        while not self._stop.is_set():
            left = max(until, self._not_before) - time.monotonic()
            if left <= 0:
                return False
            self._stop.wait(left)
        return True

    def _give_up(self, said: str) -> Failure:
        self._why = self._why if self._stop.is_set() else f"{self.host}: {said}"
        self._stop.set()
        return Failure(self._why, fatal=True)

    def _said(self, error: HfHubHTTPError) -> str:
        try:
            body = error.response.text
        except httpx2.StreamError:  # The body was never read.
            body = ""
        return f"HTTP {error.response.status_code} ({self._clean(body) or 'nothing else'})"

    def _hint(self, status: int) -> str:
        if status in (401, 403):
            return f" Is the key in ${self._api_key_env} right?" if self._api_key_env else " Give --api-key-env"
        if status == 404:
            return f" Is --server the base URL (it often ends in /v1), and is a model called {self.name} there?"
        return ""

    def _clean(self, text: str) -> str:
        """A part of what came from elsewhere, on one line, without the key and what a terminal would obey."""
        text = text.replace(self._key, "***") if self._key else text
        text = " ".join("".join(c if c.isprintable() else " " for c in text[:1000]).split())
        return text if len(text) <= 200 else text[:200] + "..."


def _host(url: str) -> str:
    """`host:port` of a base URL; raises ConfigError for what is none, or has a secret in it."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (raises for a port that is no number)
        httpx2.URL(url)
    except (ValueError, httpx2.InvalidURL):
        raise ConfigError("--server: is no URL. Give one like http://localhost:8000/v1") from None
    if parts.username is not None or parts.password is not None:
        raise ConfigError("--server: has a user or a password in it, which would be shown. Give --api-key-env VARIABLE")
    if parts.scheme not in ("http", "https") or not parts.hostname or any(c.isspace() for c in url):
        raise ConfigError("--server: is no http or https URL. Give one like http://localhost:8000/v1")
    if parts.query or parts.fragment:
        raise ConfigError("--server: has a ? or a # in it, a base URL has none. Give a key by --api-key-env VARIABLE")
    return parts.netloc


def _key(variable: str | None) -> str | None:
    """The key in an environment variable; raises ConfigError, which never shows it."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"--api-key-env: the environment variable {variable} is not set, or is empty")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(f"--api-key-env: what is in {variable} is no key, it has blanks or other odd characters")
    return key


def retry_after(value: str | None) -> float | None:
    """Seconds from now that a Retry-After header asks for, as seconds or as a date; None for anything else.

    >>> retry_after("2"), retry_after("soon"), retry_after("Wed, 21 Oct 2015 07:28:00 GMT")
    (2.0, None, 0.0)
    """
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _written(output: dict[str, Any]) -> Written | None:
    """The text of a chat completion, None where it has none (a refusal, a call of a tool); ValueError for others."""
    choices = output.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict) or not isinstance(choice.get("message"), dict):
        raise ValueError("there is no choices[0].message in it")
    content = choice["message"].get("content")
    if content is None:
        return None
    if not isinstance(content, str):
        raise ValueError(f"choices[0].message.content is a {type(content).__name__}")
    # JSON can hold halves of characters, a file can't.
    return Written(content.encode("utf-8", "replace").decode(), choice.get("finish_reason") != "length")


def _session() -> httpx2.Client:
    """huggingface_hub's session as it makes it itself, only that HF_HUB_OFFLINE shuts the hub off, and not a server
    that the user names."""
    return httpx2.Client(event_hooks={"request": [_hub_stays_offline]}, follow_redirects=True, timeout=None)


def _hub_stays_offline(request: httpx2.Request) -> None:
    if constants.is_offline_mode() and request.url.host == urlsplit(constants.ENDPOINT).hostname:
        raise OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
