"""`rlhf rm serve`: a reward model behind an HTTP endpoint, so that other machines can use it.

    POST /get_reward (or /)  {"query": [text, ...], "prompts": [...], "ended": [...]}  ->  {"rewards": [number, ...]}
    GET  /health             {"status": "ok"}

`type: http` of a PPO config posts to it (docs/rewards.md), and so do OpenRLHF's clients. The server is meant for your
own machines. To expose it to others, put a proxy with TLS and rate limits in front of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rlhf_cli.commands.options import Device, Host, Port, TokenEnv
from rlhf_cli.commands.serving import Server, bind, json_line
from rlhf_cli.config.rewards import ModelReward
from rlhf_cli.errors import ConfigError, RewardError
from rlhf_cli.printing import is_utf8, say
from rlhf_cli.rewards.http_client import key_from_environment
from rlhf_cli.run.artifacts import reward_model_stage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_cli.rewards.models import RewardModel

MAX_WAITING = 32
"""Requests that wait for the model. Further ones are answered 503, and the six attempts of `type: http` span 31 s."""
MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_TEXT_LENGTH = 400_000
"""Characters of a text: more than the context of any reward model, and few enough to tokenise in a second."""
MAX_CHARACTERS = 4_000_000  # characters of all texts and prompts of a request, so that none holds the model for long


@dataclass(frozen=True)
class RewardModelOptions:
    model: Annotated[str, typer.Argument(help="A model directory, a finished rm stage, or a run's directory.")]
    raw: Annotated[bool, typer.Option("--raw", help="Return scores without normalisation.")] = False
    label: Annotated[
        str | None, typer.Option("--label", help="For a classifier: the label whose output is the score.")
    ] = None
    probability: Annotated[
        bool, typer.Option("--probability", help="For a classifier: return its probability, not its logit.")
    ] = False
    template: Annotated[
        str | None, typer.Option("--template", help="How texts are written: chat, or {prompt} and {response}.")
    ] = None
    device: Device = "auto"

    def load(
        self, path: str, tokenizer: PreTrainedTokenizerBase | None, *, keep_special: bool
    ) -> tuple[RewardModel, list[str]]:
        """The model at `path`, ready to score, and notes for the user. Raises ConfigError for an invalid template."""
        from rlhf_cli.plan.budget import forward_budget
        from rlhf_cli.processes import distributed
        from rlhf_cli.rewards.models import load_reward_source

        response_only = self.template not in (None, "chat") and "{prompt}" not in str(self.template)
        try:
            reward = ModelReward(
                type="reward_model",
                path=path,
                label=self.label,
                output="probability" if self.probability else "logit",
                template=self.template,
                reads="response" if response_only else "prompt_and_response",
                normalize=not self.raw,
            )
        except ValidationError as error:
            raise ConfigError(f"--template: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
        device = distributed.start(self.device).device
        load = partial(load_reward_source, reward, path, tokenizer, device, "auto", name=self.model, key="--model")
        try:
            source, notes = load(keep_special=keep_special)
        except ConfigError as error:
            raise ConfigError(str(error).replace("--model.", "--")) from None
        source.budget = forward_budget(source.model, device, "auto")
        return source, notes


@dataclass(frozen=True)
class RewardServerOptions(RewardModelOptions):
    host: Host = "127.0.0.1"
    port: Port = 5000
    token_env: TokenEnv = None
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="Maximum texts per request.")] = 1024
    keep_special: Annotated[
        bool, typer.Option("--keep-special", help="Read special tokens in texts as special, not as plain text.")
    ] = False


class RewardServer(Server):
    def __init__(self, options: RewardServerOptions):
        """Bind the port and load the reward model; raises ConfigError as `bind` does."""
        token = key_from_environment(options.token_env, "--token-env")
        listener = bind(options.host, options.port, token)
        stage = reward_model_stage(options.model)
        self.source, notes = options.load(stage, None, keep_special=options.keep_special)
        self.source.prompts_are_rendered, self.max_batch = True, options.max_batch
        for note in notes:
            say(note, error=True)
        routes = [Route(path, self.get_reward, methods=["POST"]) for path in ("/", "/get_reward")]
        super().__init__(listener, routes, token, lambda text, _: {"error": text}, max_waiting=MAX_WAITING)

    async def get_reward(self, request: Request) -> Response:
        texts = parse_request(await self.read(request, MAX_BODY_BYTES), self.max_batch)
        try:
            rewards = await self.until_left(request, self.model.run(lambda _: self.rewards(*texts)))
        except RewardError as error:
            # The chat template refuses a text: another try would not help.
            raise HTTPException(422 if error.__cause__ is not None else 500, str(error)) from None
        return json_line({"rewards": rewards})

    def rewards(self, queries: list[str], prompts: list[str], ended: list[bool]) -> list[float]:
        """The model's scores. A query is a prompt with its response; without its prompt it counts as a response."""
        from rlhf_cli.rewards.base import Samples

        before = [prompt if query.startswith(prompt) else "" for prompt, query in zip(prompts, queries, strict=True)]
        responses = [query.removeprefix(prompt) for prompt, query in zip(before, queries, strict=True)]
        samples = Samples(before, responses, [], [], ended, [{} for _ in queries])
        scores: list[float] = self.source.score(samples).tolist()
        return scores


def parse_request(body: bytes, max_batch: int) -> tuple[list[str], list[str], list[bool]]:
    """(queries, prompts, whether each response ended) from a request's body; raises HTTPException.

    >>> parse_request(b'{"query": ["Hi! Hello."], "prompts": ["Hi!"]}', 8)
    (['Hi! Hello.'], ['Hi!'], [True])
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not JSON") from None
    if not isinstance(value, dict) or "query" not in value:
        raise HTTPException(400, 'the body must be an object with a list "query"')
    queries = value["query"]
    if not isinstance(queries, list):
        raise HTTPException(400, '"query" must be a list of texts')
    if len(queries) > max_batch:
        raise HTTPException(413, f"{len(queries)} texts, at most {max_batch} are scored per request. Send fewer")

    def checked(key: str, default: Any, is_valid: Callable[[Any], bool], name: str) -> list[Any]:
        items = value.get(key)
        items = [default] * len(queries) if items is None else items
        if not isinstance(items, list) or len(items) != len(queries) or not all(map(is_valid, items)):
            raise HTTPException(400, f'"{key}" must be a list of {name}, one for each item of "query"')
        return items

    def is_text(item: Any) -> bool:
        return isinstance(item, str) and is_utf8(item)

    texts, prompts = checked("query", None, is_text, "texts"), checked("prompts", "", is_text, "texts")
    longest = max(map(len, (*texts, *prompts)), default=0)
    if longest > MAX_TEXT_LENGTH:
        raise HTTPException(413, f"a text has {longest} characters, at most {MAX_TEXT_LENGTH} are read. Shorten it")
    total = sum(map(len, (*texts, *prompts)))
    if total > MAX_CHARACTERS:
        raise HTTPException(
            413, f"the texts have {total} characters, at most {MAX_CHARACTERS} are read. Send fewer texts"
        )
    return texts, prompts, checked("ended", True, lambda item: isinstance(item, bool), "true and false")


def serve(options: RewardServerOptions) -> None:
    """Serve a reward model over HTTP, for `type: http` rewards and for OpenRLHF."""
    server = RewardServer(options)
    server.run_until_signal(f"serving {options.model} at {server.url}/get_reward")
    say("stopped", flush=True)
