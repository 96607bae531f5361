"""Answers from an OpenAI-compatible server, for `rlhf data generate` and `rlhf data score`. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx2

from rlhf_cli.commands.writer import Failure, Request, WriterOptions, Written
from rlhf_cli.data.records import turns_of
from rlhf_cli.errors import ConfigError
from rlhf_cli.rewards.concurrency import for_each
from rlhf_cli.rewards.http_client import JSONClient, Malformed, NoAnswer, key_from_environment
from rlhf_cli.seeding import derived_seed

REFUSED = (400, 413, 422)
"""Statuses about a single request, for example a prompt that is too long. The other requests continue."""


@dataclass(frozen=True)
class OptionNames:
    """What the options of a command are called, for messages."""

    server: str = "--server"
    key: str = "--api-key-env"
    after_failure: str = "Rows written so far are kept; run the same command to resume"
    """What to do after the server failed."""


class ServerWriter:
    """A model behind an OpenAI-compatible `chat/completions` endpoint.

    At most `options.concurrency` requests are under way; `rlhf_cli.rewards.http_client` says how they are retried and
    limited. After a request that used up its retries, or a status that no retry can mend, nothing more is sent, and
    every missing answer is a fatal Failure.

    Raises ConfigError for an unusable URL or key.
    """

    def __init__(self, options: WriterOptions, names: OptionNames = OptionNames()):
        self.options, self.names = options, names
        assert options.server is not None
        check_base_url(options.server, names)
        variable = options.api_key_env
        self._client = JSONClient(
            completions_url(options.server),
            key=None if variable is None else key_from_environment(variable, names.key),
            timeout_s=options.timeout_s,
            retries=options.retries,
            backoff_s=options.backoff_s,
            retry_malformed=True,  # a proxy's error page, or an answer that was cut
            timeout_option="--timeout",
        )

    def write(self, requests: Sequence[Request]) -> list[Written | Failure]:
        """One answer for each request, in order; a Failure for a request that the server refuses."""
        return asyncio.run(self._write(requests))

    async def _write(self, requests: Sequence[Request]) -> list[Written | Failure]:
        async with self._client:
            return await for_each(requests, self._answer, self.options.concurrency)

    async def _answer(self, request: Request) -> Written | Failure:
        options = self.options
        body = {
            "model": options.model,
            "messages": turns_of(request.messages),
            "temperature": options.temperature,
            "max_tokens": options.max_new_tokens,
            "seed": derived_seed(options.seed, "writer", *request.counters) >> 32,
            "stream": False,
        }
        if options.top_p is not None:
            body["top_p"] = options.top_p
        try:
            written = await self._client.ask(body, completion_in)
        except NoAnswer as error:
            if error.status in REFUSED:
                return Failure(str(error))
            return Failure(self._client.stop(f"{error}. {self._hint(error.status)}"), fatal=True)
        if written is None:
            return Failure(f"{self._client.url} sent an answer without text")
        return written

    def _hint(self, status: int | None) -> str:
        if status in (401, 403):
            variable = self.options.api_key_env
            return f"Check the key in ${variable}" if variable else f"Give a key with {self.names.key}"
        if status == 404:
            return (
                f"Check that {self.names.server} is the base URL (often it ends in /v1) and serves a model named "
                f"{self.options.model}"
            )
        return self.names.after_failure


def completion_in(answer: Any) -> Written | None:
    """The text of a chat completion, None if it has none (a refusal or a tool call); raises Malformed otherwise.

    >>> completion_in({"choices": [{"message": {"content": "Hi"}, "finish_reason": "length"}]})
    Written(text='Hi', ended=False)
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise Malformed("has no choices[0].message")
    content = message.get("content")
    if content is None:
        return None
    if not isinstance(content, str):
        raise Malformed(f"has a {type(content).__name__} in choices[0].message.content, it must be text")
    # JSON can hold lone surrogates, a UTF-8 file cannot.
    return Written(content.encode("utf-8", "replace").decode(), choice.get("finish_reason") != "length")


def completions_url(base_url: str) -> str:
    """The endpoint below a base URL, given with or without `/v1` or the whole path.

    >>> completions_url("http://localhost:8000"), completions_url("https://host/api/v1/")
    ('http://localhost:8000/v1/chat/completions', 'https://host/api/v1/chat/completions')
    """
    parts = urlsplit(base_url)
    path = parts.path.rstrip("/")
    if not path.endswith("/chat/completions"):
        path += "/chat/completions" if path.endswith("/v1") else "/v1/chat/completions"
    return urlunsplit(parts._replace(path=path))


def check_base_url(url: str, names: OptionNames = OptionNames()) -> None:
    """Raise ConfigError, without the URL, for one that is invalid or may contain a secret."""
    option, key = names.server, names.key
    example = "Give one like http://localhost:8000/v1"
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (raises for an invalid port)
        httpx2.URL(url)
    except (ValueError, httpx2.InvalidURL):
        raise ConfigError(f"{option}: is not a URL. {example}") from None
    if parts.username is not None or parts.password is not None:
        raise ConfigError(f"{option}: contains a user or a password, which messages would show. Use {key} NAME")
    if parts.scheme not in ("http", "https") or not parts.hostname or any(c.isspace() for c in url):
        raise ConfigError(f"{option}: is not an http or https URL. {example}")
    if parts.query or parts.fragment:
        raise ConfigError(f"{option}: contains a ? or a #, a base URL has neither. Give a key with {key} NAME")
