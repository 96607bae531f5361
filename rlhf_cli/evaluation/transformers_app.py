"""The server of transformers (`transformers serve`) with one trained model in it.

Its routes, its streaming and the thread that runs the model are those of `transformers.cli.serving`. Three things are
ours: the model is loaded, and draws by default, as in `rlhf chat`; what a client sends and the model cannot read is
answered with status 400 in one line; and a stop string is no part of the text, as in OpenAI's own API.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from jinja2 import TemplateError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import BaseHandler, GenerateManager, GenerationState

from rlhf_cli.evaluation.conversation import ChatModel
from rlhf_cli.models.forward import autocast
from rlhf_cli.models.limits import positions
from rlhf_cli.rollout.sampling import generation_settings

if TYPE_CHECKING:
    from fastapi import FastAPI

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health")
"""The routes that are kept. The others load other models or unload this one."""
ONLY = {"n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (False, 0), "suffix": ()}
"""Fields that transformers ignores, or that need a model of another kind -> the values that change nothing."""


def build_app(name: str, chat_model: ChatModel) -> FastAPI:
    """The application that serves a loaded model under a name."""
    model, tokenizer = chat_model.model, chat_model.tokenizer
    tokenizer.chat_template = chat_model.form.chat_template(tokenizer)
    assert model.generation_config is not None
    model.generation_config.update(
        **generation_settings(chat_model.sampling),
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )
    model.generate = _in_precision(chat_model, model.generate)  # type: ignore[assignment, arg-type]
    manager, state = _OneModel(name, chat_model), _State(positions(model))
    app: FastAPI = build_server(
        manager,
        _Chat(manager, state),
        completion_handler=_Completion(manager, state),
        response_handler=None,  # type: ignore[arg-type]  # its route is removed, as those of the next two
        transcription_handler=None,  # type: ignore[arg-type]
        systemone_handler=None,  # type: ignore[arg-type]
        generation_state=state,
    )
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") in PATHS]
    for kind in (HTTPException, RequestValidationError, ValueError, TypeError, KeyError, TemplateError):
        app.add_exception_handler(kind, _refuse)
    return app


async def _refuse(_request: Request, error: Exception) -> JSONResponse:
    """Answer a request that a route, the model, its chat template or its tokenizer refuses, as OpenAI's API does."""
    status = 400
    message = " ".join(str(error).split())[:500] or type(error).__name__
    if isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, RequestValidationError):  # the body is not JSON, or not an object
        message = "; ".join(f"the request is not valid: {each['msg']}" for each in error.errors())
    elif isinstance(error, KeyError):
        message = f"the field {message} is missing"
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status)


class _OneModel(ModelManager):
    """Holds the model that is loaded already, under its name."""

    def __init__(self, name: str, chat_model: ChatModel):
        self.name, self.chat_model, self.started = name, chat_model, int(time.time())
        super().__init__(device="cpu", force_model=name)  # the device is for models that it loads itself

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """The name as it is; that of the base class has a revision."""
        return model_id

    def _load_processor(self, *_: Any, **__: Any) -> Any:
        return self.chat_model.tokenizer

    def _load_model(self, *_: Any, **__: Any) -> Any:
        return self.chat_model.model

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:  # type: ignore[override]  # noqa: ARG002
        """The list of /v1/models."""
        return [{"id": self.name, "object": "model", "created": self.started, "owned_by": "rlhf"}]


def _in_precision(chat_model: ChatModel, generate: Callable[..., Any]) -> Callable[..., Any]:
    """`generate` in the number format of the run."""
    device = next(chat_model.model.parameters()).device

    def in_precision(**arguments: Any) -> Any:
        with autocast(device, chat_model.precision):
            return generate(**arguments)

    return in_precision


# ------------------------------------------------------------------------------------------- requests


class _Defaults(BaseHandler):
    """Checks a request before transformers does, and fills in what the run decides."""

    model_manager: _OneModel

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        for field, values in ONLY.items():
            if body.get(field) is not None and body[field] not in values:
                message = f"{field} is not supported by this server. Remove the field, or serve with --engine vllm"
                raise HTTPException(400, message)
        chat_model = self.model_manager.chat_model
        if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
            body["max_tokens"] = chat_model.max_new_tokens
        given = body.get("stop") or []
        stops = [*chat_model.sampling.stop_strings, *([given] if isinstance(given, str) else given)]
        body["stop"] = stops or None


class _Completion(_Defaults, CompletionHandler):
    """/v1/completions."""


class _Chat(_Defaults, ChatCompletionHandler):
    """/v1/chat/completions."""

    def _validate_request(self, body: dict[str, Any]) -> None:
        if not self.model_manager.chat_model.tokenizer.chat_template:
            raise HTTPException(400, "the model was not trained on chats. Send its prompt as text to /v1/completions")
        super()._validate_request(body)


# ------------------------------------------------------------------------------------------ responses


class _State(GenerationState):
    """Gives the model a manager that knows its length."""

    def __init__(self, longest: int):
        super().__init__()
        self.longest = longest

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:  # noqa: ARG002
        return self._generate_managers.setdefault(model_id, _Manager(self.longest))


class _Manager(GenerateManager):
    """The sequential manager of transformers, within the model's positions and without stop strings in the text."""

    def __init__(self, longest: int):
        super().__init__()
        self.longest = longest

    def generate_streaming(self, *arguments: Any, **more: Any) -> Any:
        stops = self._prepare(*arguments)
        queue, streamer = super().generate_streaming(*arguments, **more)
        return (_Held(queue, stops) if stops else queue), streamer

    async def generate_non_streaming(self, *arguments: Any, **more: Any) -> Any:
        stops = self._prepare(*arguments)
        text, length, ids = await super().generate_non_streaming(*arguments, **more)
        return before_stop(text, stops), length, ids

    def _prepare(self, _model: Any, _processor: Any, inputs: Any, config: Any, *_: Any) -> list[str]:
        """Check the prompt's length before anything is sent, limit the response's, and return the stop strings."""
        length = inputs["input_ids"].shape[-1]
        if length == 0:
            raise ValueError("the prompt is empty, and the tokenizer adds no token")
        if length >= self.longest:
            rule = f"the model reads {self.longest}, response included. Shorten the prompt"
            raise ValueError(f"the prompt has {length} tokens and {rule}")
        config.max_new_tokens = min(config.max_new_tokens, self.longest - length)
        inputs.pop("token_type_ids", None)  # no stage uses them
        return config.stop_strings or []


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the stop string that begins first.

    >>> before_stop("one, two; three", [";", ","])
    'one'
    """
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


class _Held:
    """A queue of pieces of text that holds back what may be the beginning of a stop string."""

    def __init__(self, queue: Any, stops: Sequence[str]):
        self.queue, self.stops = queue, stops
        self.ready: deque[Any] = deque()
        self.text = ""
        self.sent = 0

    async def get(self) -> Any:
        """The next piece, an error, or None at the end."""
        while not self.ready:
            self._take(await self.queue.get())
        return self.ready.popleft()

    def get_nowait(self) -> Any:
        """The next piece if there is one; raises asyncio.QueueEmpty."""
        while not self.ready:
            self._take(self.queue.get_nowait())
        return self.ready.popleft()

    def _take(self, item: Any) -> None:
        at_end = type(item) is not str
        if not at_end:
            self.text += item
        safe = before_stop(self.text, self.stops)
        if not at_end and len(safe) == len(self.text):
            begun = (n for stop in self.stops for n in range(1, len(stop)) if safe.endswith(stop[:n]))
            safe = safe[: len(safe) - max(begun, default=0)]
        if len(safe) > self.sent:
            self.ready.append(safe[self.sent :])
            self.sent = len(safe)
        if at_end:
            self.ready.append(item)
