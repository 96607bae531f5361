"""Answers from an OpenAI-compatible server, for `rlhf data generate` and `rlhf data score`. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rlhf_cli.commands.writer import Failure, Request, WriterOptions
from rlhf_cli.data.records import turns_of
from rlhf_cli.rewards.chat_client import OF_DATA, OptionNames, Written, check_base_url, completion_in, completions_url
from rlhf_cli.rewards.concurrency import for_each
from rlhf_cli.rewards.http_client import JSONClient, NoAnswer, key_from_environment
from rlhf_cli.seeding import derived_seed

REFUSED = (400, 413, 422)
"""Statuses about a single request, for example a prompt that is too long. The other requests continue."""


class ServerWriter:
    """A model behind an OpenAI-compatible `chat/completions` endpoint.

    At most `options.concurrency` requests are under way; `rlhf_cli.rewards.http_client` says how they are retried and
    limited. After a request that used up its retries, or a status that no retry can mend, nothing more is sent, and
    every missing answer is a fatal Failure.

    Raises ConfigError for an unusable URL or key.
    """

    def __init__(self, options: WriterOptions, names: OptionNames = OF_DATA):
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
