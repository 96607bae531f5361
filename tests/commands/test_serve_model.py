"""`rlhf serve`: transformers' server with a model of ours, by OpenAI's client; vLLM's command line as text."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.commands import serve_model
from rlhf_cli.commands.serve_model import ServeOptions, name_of, vllm_command
from rlhf_cli.commands.serve_token import VARIABLE, RequireToken
from rlhf_cli.data.records import Message
from rlhf_cli.errors import ArtifactError
from rlhf_cli.evaluation.conversation import ChatModel, Drawing, open_models
from rlhf_cli.evaluation.trained import find_model
from rlhf_cli.evaluation.transformers_app import _Held, build_app
from support import crash
from support.tiny import read_jsonl, write_jsonl

PROMPTS = ["the tent is", "the lamp", "a map and a tent"]


def one_error(*arguments: object) -> str:
    """The only line of a `rlhf serve` that was refused."""
    result = CliRunner().invoke(app, ["serve", *map(str, arguments)])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line.removeprefix("error: ")


# --------------------------------------------------------------------------- the application, in process


def requests(
    model: ChatModel, ask: Callable[[openai.AsyncOpenAI], Coroutine[Any, Any, None]], token: str = "x"
) -> None:
    """Run `ask` with OpenAI's client against the application with this model, whose token is x."""

    async def run() -> None:
        application = build_app("mine", model)
        application.add_middleware(RequireToken, token="x")
        transport = httpx2.ASGITransport(app=application)
        async with httpx2.AsyncClient(transport=transport) as http:
            url = "http://server/v1"
            await ask(openai.AsyncOpenAI(base_url=url, api_key=token, max_retries=0, http_client=http))

    asyncio.run(run())


@pytest.fixture
def model(chat_model: Path) -> ChatModel:
    (opened,) = open_models(str(chat_model), None, "cpu")
    return replace(opened, max_new_tokens=12)


async def text_of(chunks: AsyncIterator[Any]) -> str:
    """The text of a streamed response."""
    pieces = []
    async for chunk in chunks:
        choice = chunk.choices[0]
        pieces.append((choice.delta.content if hasattr(choice, "delta") else choice.text) or "")
    return "".join(pieces)


def test_replies_are_those_of_the_chat_and_end_where_its_settings_say(model: ChatModel) -> None:
    messages = [{"role": "user", "content": "the tent"}]

    def shown(text: str) -> str:
        return text.strip().rstrip("\ufffd")  # a stream does not end in half a character

    def greedy(longest: int) -> str:
        drawing = Drawing(temperature=0, max_new_tokens=longest)
        return shown(model.reply([Message("user", "the tent")], drawing, 0, len).text)

    found = re.search("[!-~]{2}", greedy(40)[3:])
    assert found is not None
    stop = found.group()

    async def ask(client: openai.AsyncOpenAI) -> None:
        async def reply(**fields: Any) -> str:
            answer: Any = await client.chat.completions.create(model="mine", messages=messages, **fields)  # type: ignore[arg-type]
            return shown(await text_of(answer) if fields.get("stream") else answer.choices[0].message.content)

        answer = await client.chat.completions.create(model="mine", messages=messages, temperature=0)  # type: ignore[arg-type]
        assert answer.usage is not None
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 12)
        for stream in (False, True):
            assert await reply(temperature=0, stream=stream) == greedy(12)
            cut = await reply(temperature=0, stream=stream, max_tokens=40, stop=stop)
            assert cut == shown(greedy(40).partition(stop)[0])
        assert await reply(seed=1) == await reply(seed=1) != await reply(seed=2)
        assert [one.id for one in (await client.models.list()).data] == ["mine"]

    requests(model, ask)


def test_a_request_that_cannot_be_answered_is_status_400_in_one_line(model: ChatModel) -> None:
    """In a stream too, where transformers would begin to answer."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"prompt": "the tent " * 600}, "tokens and the model reads 512, response included. Shorten the prompt"),
        ({"prompt": "the tent " * 600, "stream": True}, "the model reads 512"),
        ({"prompt": "the tent", "n": 2}, "n is not supported by this server"),
        ({"prompt": "the tent", "temperature": -1}, "temperature"),
        ({"prompt": "the tent", "max_tokens": 0}, "max_new_tokens"),
        ({"prompt": ["the tent"]}, "prompt must be a string"),
        ({"prompt": "the tent", "model": "another"}, "pinned to 'mine'"),
    ]

    async def ask(client: openai.AsyncOpenAI) -> None:
        for fields, message in wrong:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(**{"model": "mine", **fields})
            assert message in str(caught.value)
            assert "\n" not in str(caught.value)
        with pytest.raises(openai.BadRequestError, match="messages"):
            await client.post("/chat/completions", body={"model": "mine"}, cast_to=object)
        for body in (b"{", b"[]"):
            headers = {"Authorization": "Bearer x", "Content-Type": "application/json"}
            answer = await client._client.post(f"{client.base_url}completions", content=body, headers=headers)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith("the request is not valid: ")
        model.tokenizer.chat_template = None
        with pytest.raises(openai.BadRequestError, match="the model was not trained on chats"):
            await client.chat.completions.create(model="mine", messages=[{"role": "user", "content": "hi"}])
        long = await client.completions.create(model="mine", prompt="the tent " * 250, max_tokens=100)
        assert long.usage is not None
        assert long.usage.total_tokens <= 512

    requests(model, ask)


def test_every_route_but_health_needs_the_token_and_loads_no_other_model(model: ChatModel) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        for call in (client.models.list(), client.completions.create(model="mine", prompt="the tent")):
            with pytest.raises(openai.AuthenticationError, match="the token is missing or wrong"):
                await call
        server = client.with_options(base_url="http://server")
        assert await server.get("/health", cast_to=object) == {"status": "ok"}
        for path in ("/load_model", "/reset", "/v1/responses", "/v1/audio/transcriptions", "/docs"):
            with pytest.raises(openai.NotFoundError):
                await server.with_options(api_key="x").post(path, body={"model": "owner/name"}, cast_to=object)

    requests(model, ask, token="y")


def test_vllm_gets_the_same_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes the middleware without arguments, and has websockets."""
    monkeypatch.setenv(VARIABLE, "x")
    seen: list[Any] = []

    async def inner(scope: Any, _receive: Any, _send: Any) -> None:
        seen.append(scope["path"])

    async def send(event: Any) -> None:
        seen.append((event["type"], event.get("status")))

    guard = RequireToken(inner)
    for kind, given in (("websocket", b"Bearer y"), ("websocket", b"Bearer x"), ("http", b"x"), ("http", b"Bearer x")):
        scope = {"type": kind, "path": "/invocations", "headers": [(b"authorization", given)]}
        asyncio.run(guard(scope, None, send))  # type: ignore[arg-type]
    assert seen == [
        ("websocket.close", None),
        "/invocations",
        ("http.response.start", 401),
        ("http.response.body", None),
        "/invocations",
    ]


@pytest.mark.parametrize("end", [["o", "n", "e<", "s>x"], ["one", "<", "s", "t"], ["one<s>", "two<s"], ["<s><s>"]])
def test_what_may_begin_a_stop_string_is_held_back(end: list[str]) -> None:
    async def run() -> list[str]:
        queue: asyncio.Queue[Any] = asyncio.Queue()
        held = _Held(queue, ["<s>", "st"])
        pieces = []
        for item in (*end, None):
            queue.put_nowait(item)
            with contextlib.suppress(asyncio.QueueEmpty):
                while (piece := held.get_nowait()) is not None:
                    pieces.append(piece)
        return pieces

    whole = "".join(end)
    assert "".join(asyncio.run(run())) == whole[: min(i for i in (whole.find("<s>"), whole.find("st"), 99) if i >= 0)]


# ------------------------------------------------------------------------------------- refusals, vLLM


def test_what_cannot_be_served_is_one_line(
    finished: Path, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished / "run"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = one_error(run, "--engine", "transformers", "--port", port)
        assert message == f"--host 127.0.0.1 --port {port}: cannot be bound (Address already in use). Choose another"
        assert "Address already in use" in one_error(run, "--stage", "rm", "--port", port)
    for host in ("0.0.0.0", "::", "example.org"):
        assert "other machines could use this model without a token" in one_error(run, "--host", host)
        assert "without a token" in one_error(run, "--host", host, "--stage", "rm")
    assert "NOPE is not set or is empty. Set it to the token" in one_error(run, "--token-env", "NOPE")
    assert "vLLM chooses its device" in one_error(run, "--dry-run", "--device", "cpu")
    assert "without --engine" in one_error(run, "--stage", "rm", "--engine", "vllm")
    assert "no stage is finished" in one_error(tmp_path)
    assert "is a model and not a run" in one_error(chat_model, "--stage", "sft", "--port", 0)
    assert "prints the command line of vLLM" in one_error(run, "--engine", "transformers", "--dry-run")
    assert "--engine vllm: needs vllm. Run: " in one_error(run, "--engine", "vllm")
    monkeypatch.setattr(serve_model, "missing_modules", lambda engine: [engine])
    assert re.search(r"needs transformers' server or vLLM. Run: .*\[serve\]' or, .*\[vllm\]'$", one_error(run))


def test_vllm_is_started_with_the_name_the_dtype_and_the_sampling_of_the_run(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, started = finished / "run", list[Any]()
    arguments = ["serve", str(run), "--host", "0.0.0.0", "--port", "8124", "--token-env", "MINE"]
    monkeypatch.setenv("MINE", "s3cret")
    printed = CliRunner().invoke(app, [*arguments, "--dry-run"])
    assert printed.exit_code == 0, printed.output
    words = ["vllm", "serve", str(run / "ppo" / "model"), "--host", "0.0.0.0", "--port", "8124"]
    words += ["--served-model-name", "run-ppo", "--dtype", "bfloat16"]
    words += ["--override-generation-config", '{"temperature": 1.0}']
    words += ["--middleware", "rlhf_cli.commands.serve_token.RequireToken"]
    assert shlex.split(printed.stdout) == [f"{VARIABLE}=$MINE", *words]
    monkeypatch.setattr(serve_model, "missing_modules", lambda _: [])
    monkeypatch.setattr(serve_model, "vllm_program", lambda: "/bin/vllm")
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given))
    CliRunner().invoke(app, arguments)
    ((program, started_words, environment),) = started
    assert (Path(program).name, started_words, environment[VARIABLE]) == ("vllm", words, "s3cret")


def test_vllm_applies_adapters_to_their_base(chat_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    folder.mkdir()
    save_file({"a": torch.zeros(1)}, folder / "adapter_model.safetensors")

    def words(**changes: Any) -> list[str]:
        values = {"peft_type": "LORA", "base_model_name_or_path": str(chat_model), "r": 12, **changes}
        (folder / "adapter_config.json").write_text(json.dumps(values), encoding="utf-8")
        return vllm_command(find_model(str(folder)), "mine", ServeOptions(), with_token=False)

    found = words()
    assert found[2] == str(chat_model)
    after = found[found.index("--served-model-name") :]
    lora = ["--enable-lora", "--lora-modules", f"mine={folder}", "--max-lora-rank", "16", "--tokenizer", str(folder)]
    assert after[: 2 + len(lora)] == ["--served-model-name", "mine-base", *lora]
    for changes, reason in (({"use_dora": True}, "are DoRA"), ({"r": 999}, "have rank 999")):
        with pytest.raises(ArtifactError, match=f"{reason}, which vLLM does not serve. Run: .* merge .* merged"):
            words(**changes)


def test_names_are_those_of_run_and_stage(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf_cli.evaluation.locate import locate

    monkeypatch.chdir(finished / "run" / "sft")
    for directory in (".", "model"):
        assert name_of(directory, locate(directory)) == "run-sft"
    assert name_of(str(tmp_path), None) == tmp_path.name
    assert name_of("owner/name", None) == "owner/name"


# ------------------------------------------------------------------------------------- the real server


@contextlib.contextmanager
def served(*arguments: object, log: Path, **environment: str) -> Iterator[str]:
    """`rlhf serve` in its own process; yields its URL."""
    running = crash.Attempt(["serve", *map(str, arguments), "--port", "0"], log, **environment)
    try:
        crash.wait_for(lambda: re.search("^(serving|error:) .*\n", running.output, re.M))
        (url,) = re.findall(r"^serving .* at (\S+)$", running.output, re.M) or [running.output]
        yield url
    finally:
        crash.end_all()


@pytest.mark.slow
def test_the_real_server_answers_100_requests_at_the_same_time_and_survives_killed_clients(
    finished: Path, tmp_path: Path
) -> None:
    run, rows = finished / "run", [{"prompt": PROMPTS[n % 3] + " tent" * (n % 7)} for n in range(100)]
    prompts, out = write_jsonl(tmp_path / "prompts.jsonl", rows), tmp_path / "out.jsonl"
    arguments = ["generate", str(run), "--prompts", str(prompts), "--out", str(out), "--temperature", "0"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    wanted = [row["response"] for row in read_jsonl(out)]
    with served(run, "--engine", "transformers", "--token-env", "TOKEN", log=tmp_path / "log", TOKEN="s3cret") as url:
        client = openai.OpenAI(base_url=url, api_key="s3cret", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()

        def ask(n: int) -> str:
            return client.completions.create(model="run-ppo", prompt=rows[n]["prompt"], temperature=0).choices[0].text

        with ThreadPoolExecutor(100) as pool:
            assert list(pool.map(ask, range(100))) == wanted
        port = int(re.findall(r":(\d+)/v1", url)[0])
        body = json.dumps({"model": "run-ppo", "prompt": "the tent", "stream": True, "max_tokens": 100}).encode()
        lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Authorization: Bearer s3cret"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port)) as killed:
                killed.sendall("\r\n".join(lines).encode() + body)
                assert b"200 OK" in killed.recv(100)
        stream = client.completions.create(model="run-ppo", prompt=rows[0]["prompt"], temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == wanted[0]
    assert "Traceback" not in (tmp_path / "log").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_reward_model_is_served_as_by_rm_serve(finished: Path, tmp_path: Path) -> None:
    with served(finished / "run", "--stage", "rm", log=tmp_path / "log") as url:
        assert url.endswith("/get_reward")
        answer = httpx2.post(url, json={"query": ["the tent is late"]}).json()
    assert len(answer["rewards"]) == 1
