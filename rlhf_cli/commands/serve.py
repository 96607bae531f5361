"""`rlhf serve`: OpenAI's chat and completions over a model that was trained.

    POST /v1/chat/completions   POST /v1/completions   GET /v1/models   GET /health

One request at a time uses the model. A field that would change the answer and that is not supported is refused.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import time
import traceback
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from rlhf_cli.commands.options import Device, Host, Port, Quantized, StageOfRun, TokenEnv
from rlhf_cli.commands.serving import Put, Server, bind, json_line
from rlhf_cli.data.records import Message, Record
from rlhf_cli.errors import ConfigError, DataError
from rlhf_cli.printing import say
from rlhf_cli.program import command
from rlhf_cli.rewards.http_client import key_from_environment
from rlhf_cli.trained.locate import StageModel, locate

if TYPE_CHECKING:
    from rlhf_cli.rollout.speaker import Reply, Speaker

MAX_WAITING = 128  # requests that wait for the model. Further ones are answered 503.
MAX_BODY_BYTES = 4 * 2**20
CHARACTERS_PER_TOKEN = 16
"""A prompt with more characters for each position of the model cannot fit, and tokenising it would take long."""
MAX_NEW_TOKENS = 1_000_000
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "suffix": ("",),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Fields that are not supported -> the values that change nothing."""
ABOUT_THE_CALLER = ("user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier")
"""Fields that no answer depends on."""


def serve_command(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A run's directory, or that of a model.")],
    stage: StageOfRun = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    token_env: TokenEnv = None,
    name: Annotated[
        str | None, typer.Option("--name", help="The model's name in requests; RUN-STAGE by default.")
    ] = None,
    device: Device = "auto",
    quantize: Quantized = None,
) -> None:
    """Serve a trained model with OpenAI's API: chat and completions."""
    located = locate(directory, stage, ("ppo", "sft", "rm"))
    if located is not None and located.stage == "rm":
        raise ConfigError(f"{directory}: a reward model has other routes. Run: {command('rm', 'serve', directory)}")
    token = key_from_environment(token_env, "--token-env")
    listener = bind(host, port, token)  # before the model is loaded, which takes longer
    from rlhf_cli.processes.distributed import start
    from rlhf_cli.trained.model import find_model

    name = name or name_of(directory, located)
    speaker = find_model(directory, stage).speaker(start(device).device, quantize)
    say(f"prompts: {speaker.form.sentence}", error=True)
    if speaker.form.kind == "single":
        say("use /v1/completions with the prompt as text; the model was not trained on chats", error=True)
    if stops := speaker.sampling.stop_strings:
        say(f"stop strings of the run: {json.dumps(list(stops))}", error=True)
    server = ChatAPI(listener, name, speaker, token)
    server.run_until_signal(f"serving {name} at {server.url}/v1")
    say("stopped", flush=True)


def name_of(directory: str, located: StageModel | None) -> str:
    """The name of a model in requests: run and stage, or the directory's name. It has no @ and no colon."""
    path = Path(directory)
    name = located.title if located is not None else path.resolve().name if path.is_dir() else directory
    return re.sub(r"[@:\s]", "-", name)


# -------------------------------------------------------------------------------------------- requests


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Part(_Strict):
    type: Literal["text"]
    text: str


class _Turn(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[_Part], BeforeValidator(lambda x: x if isinstance(x, list) else [{"type": "text", "text": x}])
    ]

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Clients send back an answer with fields that are null."""
        return {k: v for k, v in value.items() if v is not None or k == "content"} if isinstance(value, dict) else value

    def message(self) -> Message:
        text = "\n".join(part.text for part in self.content)
        return Message("system" if self.role == "developer" else self.role, text)


class _StreamOptions(_Strict):
    include_usage: bool = False


class _Ask(_Strict):
    """The fields that both routes read. None leaves a value to the run."""

    model: str | None = None
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    min_p: float | None = Field(None, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1, le=MAX_NEW_TOKENS)
    seed: int | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1000)]],
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    ] = Field([], max_length=16)
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()

    def drawn(self, speaker: Speaker) -> Speaker:
        given = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        stops = (*speaker.sampling.stop_strings, *self.stop)
        speaker = replace(speaker, sampling=replace(speaker.sampling, stop_strings=stops, **changes))
        return speaker.at(self.temperature)  # at last: greedy replaces top_k


class _ChatAsk(_Ask):
    messages: list[_Turn] = Field(min_length=1, max_length=1000)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_NEW_TOKENS)

    @property
    def num_characters(self) -> int:
        return sum(len(turn.message().content) for turn in self.messages)

    def ids(self, speaker: Speaker) -> list[int]:
        if speaker.form.kind == "single":
            raise HTTPException(400, "the model was not trained on chats. Send its prompt as text to /v1/completions")
        if self.messages[-1].role == "assistant":
            raise HTTPException(400, "messages: the last one is the assistant's. End with the user's")
        return speaker.form.encode(speaker.tokenizer, [turn.message() for turn in self.messages])


class _TextAsk(_Ask):
    prompt: str

    @property
    def num_characters(self) -> int:
        return len(self.prompt)

    def ids(self, speaker: Speaker) -> list[int]:
        from rlhf_cli.data.encode import RowText

        return RowText(speaker.tokenizer, keep_special=True).prompt_ids([Record(self.prompt, "the prompt")])[0]


Ask = _ChatAsk | _TextAsk


def parse(body: bytes, kind: type[Ask], name: str) -> Ask:
    try:
        value = json.loads(body)
        json.dumps(value, ensure_ascii=False).encode()  # half a character cannot be tokenised
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not JSON") from None
    if not isinstance(value, dict):
        raise HTTPException(400, "the body must be a JSON object")
    for field, given in list(value.items()):
        says_nothing = given is None and field not in ("prompt", "messages")
        without_effect = map(repr, WITHOUT_EFFECT.get(field, ()))  # repr, because Python's 0 equals False
        if says_nothing or field in ABOUT_THE_CALLER or repr(given) in without_effect:
            del value[field]
    try:
        ask = kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise HTTPException(400, f"{where[:200]} is not supported by this server. Remove the field") from None
        raise HTTPException(400, f"{where[:200]}: {first['msg']}") from None
    if ask.model not in (None, name):
        raise HTTPException(400, f"model: this server has {name} and no other")
    return ask


class ChatAPI(Server):
    def __init__(self, listener: socket.socket, name: str, speaker: Speaker, token: str | None):
        from rlhf_cli.models.forward import positions

        self.name, self.speaker, self.started = name, speaker, int(time.time())
        self.max_characters = CHARACTERS_PER_TOKEN * positions(speaker.model)
        self.seed, self.num_requests = secrets.randbits(62), 0  # what a request without a seed draws from
        routes = [
            Route("/v1/chat/completions", partial(self.answer, kind=_ChatAsk), methods=["POST"]),
            Route("/v1/completions", partial(self.answer, kind=_TextAsk), methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
        ]
        super().__init__(listener, routes, token, _error, max_waiting=MAX_WAITING)

    async def models(self, request: Request) -> Response:
        model = {"id": self.name, "object": "model", "created": self.started, "owned_by": "rlhf"}
        asked = request.path_params.get("name")
        if asked not in (None, self.name):
            raise HTTPException(404, f"model: this server has {self.name} and no other")
        return json_line({"object": "list", "data": [model]} if asked is None else model)

    async def answer(self, request: Request, *, kind: type[Ask]) -> Response:
        """The reply to a conversation, or the text that follows a prompt."""
        ask = parse(await self.read(request, MAX_BODY_BYTES), kind, self.name)
        rule = f"at most {self.max_characters} are read. Shorten it"
        if ask.num_characters > self.max_characters:
            raise HTTPException(400, f"the prompt has {ask.num_characters} characters, {rule}")
        number = self.num_requests = self.num_requests + 1
        if ask.stream:
            pieces = self.model.stream(lambda put: self.speak(ask, number, put))
            await self.until_left(request, anext(pieces))  # a prompt that is refused begins no stream
            return StreamingResponse(self._events(ask, pieces), media_type="text/event-stream")
        answer = self.model.run(lambda put: self.speak(ask, number, put))
        length, reply = await self.until_left(request, answer)
        return json_line({**self._about(ask), **_choice(ask, reply.text, reply), "usage": _usage(length, reply)})

    def speak(self, ask: Ask, number: int, put: Put) -> tuple[int, Reply]:
        """Put "" once the prompt is read, then the growing text; returns the prompt's length and the reply."""
        from rlhf_cli.rollout.sampling import draw_uniforms

        try:
            ids = ask.ids(self.speaker)
            room = self.speaker.room(ids)
        except DataError as error:
            raise HTTPException(400, str(error)) from None
        put("")
        given = ask.max_tokens or getattr(ask, "max_completion_tokens", None) or self.speaker.max_new_tokens
        seed, number = (ask.seed, 0) if ask.seed is not None else (self.seed, number)
        uniforms = draw_uniforms(seed, "serve", number, 1, min(given, room))
        return len(ids), ask.drawn(self.speaker).stream(ids, uniforms, put, as_message=isinstance(ask, _ChatAsk))

    # ---------------------------------------------------------------------------------------- answers

    async def _events(self, ask: Ask, pieces: AsyncIterator[Any]) -> AsyncIterator[str]:
        about, first, sent = self._about(ask), _choice(ask, "", None), 0
        if isinstance(ask, _ChatAsk):
            first["choices"][0]["delta"]["role"] = "assistant"
        yield _event({**about, **first})
        try:
            async for item in pieces:
                text, reply = (item, None) if isinstance(item, str) else (item[1].text, item[1])
                if len(text) > sent or reply is not None:
                    yield _event({**about, **_choice(ask, text[sent:], reply)})
                    sent = len(text)
                if reply is not None and ask.stream_options.include_usage:
                    yield _event({**about, "choices": [], "usage": _usage(item[0], reply)})
            yield "data: [DONE]\n\n"
        except Exception as error:
            traceback.print_exception(error)
            # The head is sent, so the error is an event.
            yield _event(_error(f"the model failed ({type(error).__name__})", 500))
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]

    def _about(self, ask: Ask) -> dict[str, Any]:
        """What all events of an answer have in common."""
        kind = "chat.completion" + ".chunk" * ask.stream if isinstance(ask, _ChatAsk) else "text_completion"
        return {"id": f"rlhf-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": self.name}


def _choice(ask: Ask, text: str, reply: Reply | None) -> dict[str, Any]:
    """The text of an answer or of an event. The last event has the reply."""
    end = None if reply is None else "stop" if reply.response.ended else "length"
    message = {"content": text} if ask.stream else {"role": "assistant", "content": text}
    own = {"delta" if ask.stream else "message": message} if isinstance(ask, _ChatAsk) else {"text": text}
    return {"choices": [{"index": 0, "logprobs": None, "finish_reason": end, **own}]}


def _error(text: str, status: int) -> dict[str, Any]:
    return {"error": {"message": text, "type": "server_error" if status >= 500 else "invalid_request_error"}}


def _usage(prompt_tokens: int, reply: Reply) -> dict[str, int]:
    new = len(reply.response.ids)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": new, "total_tokens": prompt_tokens + new}


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
