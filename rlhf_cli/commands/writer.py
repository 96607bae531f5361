"""The model that writes for `rlhf data generate` and `rlhf data score`: what it is asked, and what it answers.

Imports torch only for a model on this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf_cli.commands.options import Device, Seed, TopP
from rlhf_cli.commands.output import Failure
from rlhf_cli.config.ppo import Rollout
from rlhf_cli.config.rewards import check_url
from rlhf_cli.data.records import PLACEHOLDER, Message, Record, batched, transcript, turns_of
from rlhf_cli.errors import ConfigError
from rlhf_cli.files import read_text
from rlhf_cli.rewards.chat_client import OF_DATA, OptionNames, Written, completion_in, completions_url
from rlhf_cli.rewards.http_client import JSONClient, NoAnswer, key_from_environment
from rlhf_cli.run.artifacts import fingerprint, model_directory
from rlhf_cli.seeding import derived_seed

Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the most likely token.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Maximum tokens of an answer.")]
REFUSED = (400, 413, 422)
"""Statuses about a single request, for example a prompt that is too long. The other requests continue."""


@dataclass(frozen=True)
class Request:
    """One prompt for the model."""

    messages: tuple[Message, ...]
    """A conversation that ends before the answer."""
    counters: tuple[int, ...]
    """Identify the draw (row, sample, attempt): the same counters draw the same answer, whatever else is asked."""

    @classmethod
    def of(cls, text: str, *counters: int) -> Request:
        """A request of one message."""
        return cls((Message("user", text),), counters)


@dataclass(frozen=True)
class WriterOptions:
    """A model from a directory or, with `server`, the model of that name on a chat server."""

    model: Annotated[
        str,
        typer.Option("--model", help="A model directory or hub id; with --server, a name there.", show_default=False),
    ]
    server: Annotated[str | None, typer.Option("--server", help="Base URL of an OpenAI-compatible server.")] = None
    api_key_env: Annotated[
        str | None, typer.Option("--api-key-env", metavar="NAME", help="Environment variable with the server's key.")
    ] = None
    temperature: Temperature = 1.0
    top_p: TopP = None
    max_new_tokens: MaxNewTokens = 256
    seed: Seed = 0
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Answers per batch of a local model.")] = 16
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, max=64, help="Concurrent requests to a server.")
    ] = 8
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Maximum seconds without an answer of the server.")
    ] = 120.0
    retries: Annotated[int, typer.Option("--retries", min=0, help="Maximum retries of a failed request.")] = 5
    device: Device = "auto"
    keep_special: Annotated[
        bool,
        typer.Option("--keep-special", help="Read special tokens in rows and in --template as special tokens."),
    ] = False
    backoff_s: float = 1.0
    """Seconds before the first retry. No option sets it."""

    @property
    def chunk(self) -> int:
        """Items per call. A chunk begins at a multiple of it, so a resumed local model sees the same batches."""
        return 4 * self.concurrency if self.server else self.batch_size

    @property
    def origin(self) -> dict[str, Any]:
        """The columns of a row that say where its text comes from."""
        return {"model": self.model, "temperature": self.temperature, "seed": self.seed}

    def settings(self) -> dict[str, Any]:
        """Everything that decides the text. The server's address does not: a resumed job may use another one."""
        if self.server:
            model = {"name": self.model}
        else:
            model = {"path": self.model, "digest": fingerprint(model_directory(self.model))}
        drawing = {name: getattr(self, name) for name in ("temperature", "top_p", "max_new_tokens", "seed")}
        return {"model": model, **drawing, **({"keep_special": True} if self.keep_special else {})}

    def open(self) -> Writer:
        """The writer. A local model is loaded now; a server is contacted at the first request."""
        if self.server is None:
            return LocalWriter(self)
        if self.keep_special:
            raise ConfigError("--keep-special: is for a local model, a server encodes texts by itself. Remove it")
        return ServerWriter(self)


class LocalWriter:
    """A Hugging Face directory or a finished stage that writes answers.

    Without a chat template, a single message is used as it is and several become a transcript. The uniforms of an
    answer are seeded by (seed, its counters), so it does not depend on its batch, except for rounding.

    Raises ArtifactError for a directory without a language model.
    """

    def __init__(self, options: WriterOptions):
        from rlhf_cli.data.encode import require_eos
        from rlhf_cli.models.load import check_vocabulary, load_policy, load_tokenizer, prepare
        from rlhf_cli.processes.distributed import start
        from rlhf_cli.rollout.speaker import PromptForm, Speaker

        self.options = options
        directory = model_directory(options.model)
        tokenizer = load_tokenizer(directory)
        require_eos(tokenizer, options.model)
        model = load_policy(directory)
        check_vocabulary(model, tokenizer, options.model)
        prepare(model, start(options.device).device)
        rollout = Rollout(top_p=options.top_p, max_new_tokens=options.max_new_tokens)
        form = PromptForm(keep_special=options.keep_special)
        self.speaker = Speaker.of(rollout, model, tokenizer, "float32", form).at(options.temperature)

    def write(self, requests: Sequence[Request]) -> list[Written | Failure]:
        """One answer for each request, in order; a Failure for one that the model cannot take."""
        return [answer for batch in batched(requests, self.options.batch_size) for answer in self._batch(batch)]

    def _batch(self, requests: Sequence[Request]) -> list[Written | Failure]:
        import torch

        from rlhf_cli.rollout.speaker import PromptRefused
        from rlhf_cli.seeding import generator

        columns, seed = self.options.max_new_tokens, self.options.seed
        answers: list[Written | Failure | None] = []
        prompts, draws = [], []
        for request in requests:
            messages = request.messages
            text = messages[0].content if len(messages) == 1 else transcript(messages)
            try:
                prompts.append(self.speaker.encode(Record(text, "a prompt", messages=messages)))
            except PromptRefused as error:
                answers.append(Failure(str(error)))
                continue
            draws.append(torch.rand(columns, generator=generator(seed, "writer", *request.counters)))
            answers.append(None)
        responses = self.speaker.respond(prompts, torch.stack(draws)) if prompts else []
        written = (Written(self.speaker.text(response), response.ended) for response in responses)
        return [answer or next(written) for answer in answers]


class ServerWriter:
    """A model behind an OpenAI-compatible `chat/completions` endpoint.

    At most `options.concurrency` requests are under way; `rlhf_cli.rewards.http_client` says how they are retried and
    limited. After a request that used up its retries, or a status that no retry can mend, no other request is begun,
    and every missing answer is a fatal Failure.

    Raises ConfigError for an unusable URL or key.
    """

    def __init__(self, options: WriterOptions, names: OptionNames = OF_DATA):
        self.options, self.names = options, names
        self._fatal: Failure | None = None
        assert options.server is not None
        try:
            if "?" in options.server or "#" in options.server:
                raise ValueError("contains a ? or a #, a base URL has neither. Give a key with api_key_env")
            check_url(options.server)
        except ValueError as error:
            raise ConfigError(f"{names.server}: {str(error).replace('api_key_env', f'{names.key} NAME')}") from None
        self._client = JSONClient(
            completions_url(options.server),
            key=key_from_environment(options.api_key_env, names.key),
            timeout_s=options.timeout_s,
            retries=options.retries,
            backoff_s=options.backoff_s,
            retry_malformed=True,  # a proxy's error page, or an answer that was cut
            timeout_option="--timeout",
        )

    def write(self, requests: Sequence[Request]) -> list[Written | Failure]:
        """One answer for each request, in order; a Failure for one that the server cannot take."""
        self._fatal = None
        return self._client.for_each(requests, self._answer, self.options.concurrency)

    async def _answer(self, request: Request) -> Written | Failure:
        if self._fatal is not None:
            return self._fatal
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
            self._fatal = self._fatal or Failure(f"{error}. {self._hint(error.status)}", fatal=True)
            return self._fatal
        return written or Failure(f"{self._client.url} sent an answer without text")

    def _hint(self, status: int | None) -> str:
        if status in (401, 403):
            variable = self.options.api_key_env
            return f"Check the key in ${variable}" if variable else f"Give a key with {self.names.key}"
        if status == 404:
            advice = f"Check that {self.names.server} is the base URL (often it ends in /v1)"
            return f"{advice} and serves a model named {self.options.model}"
        return self.names.after_failure


Writer = LocalWriter | ServerWriter


def read_template(path: Path | None, needed: Sequence[str], option: str = "--template") -> str | None:
    """The text of a template file; raises ConfigError if it cannot be read or lacks one of the placeholders."""
    if path is None:
        return None
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigError(f"{option}: cannot read {path} ({reason})") from None
    missing = [f"{{{name}}}" for name in needed if name not in PLACEHOLDER.findall(text)]
    if missing:
        raise ConfigError(f"{option}: {path} lacks {' and '.join(missing)}. Put each where its text should go")
    return text
