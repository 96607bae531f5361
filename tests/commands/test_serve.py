"""`rlhf serve`: a model of ours by OpenAI's client."""

import asyncio
import itertools
import json
import re
import socket
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx2
import openai
import pytest
from starlette.exceptions import HTTPException

from rlhf_cli.commands.serve import ChatAPI, _TextAsk, name_of, parse
from rlhf_cli.commands.serving import ModelThread, bind
from rlhf_cli.config.ppo import Rollout
from rlhf_cli.data.records import Message
from rlhf_cli.rollout.sampling import sampling_of
from rlhf_cli.rollout.speaker import PromptForm
from rlhf_cli.trained.locate import StageModel, locate
from support import crash
from support.projects import refused, rlhf
from support.speaking import reply as chat_reply
from support.speaking import speaker_at
from support.tiny import read_jsonl, write_jsonl

PROMPTS = ["the tent is", "the lamp", "a map and a tent"]


def one_error(*arguments):
    return refused("serve", *arguments)


# --------------------------------------------------------------------------- the application, in process


def requests(model, ask, token="x"):
    """Run `ask` with OpenAI's client against the application with this model, whose token is x."""

    async def run():
        transport = httpx2.ASGITransport(app=ChatAPI(listener, "mine", model, "x").app)
        async with httpx2.AsyncClient(transport=transport) as http:
            url = "http://server/v1"
            await ask(openai.AsyncOpenAI(base_url=url, api_key=token, max_retries=0, http_client=http))

    with bind(None, 0) as listener:
        asyncio.run(run())


@pytest.fixture
def model(chat_model):
    return replace(speaker_at(chat_model), max_new_tokens=12)


async def text_of(chunks):
    """The text of a streamed response."""
    pieces = []
    async for chunk in chunks:
        choice = chunk.choices[0]
        pieces.append((choice.delta.content if hasattr(choice, "delta") else choice.text) or "")
    return "".join(pieces)


def test_replies_are_those_of_the_chat_and_end_where_its_settings_say(model, monkeypatch):
    clock = itertools.count(1)
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))

    def failing(*_):
        raise HTTPException(503, "128 requests are waiting")

    messages = [{"role": "user", "content": "the tent"}]

    def shown(text):
        return text.strip().rstrip("\ufffd")  # a stream does not end in half a character

    def greedy(longest):
        return shown(chat_reply(model, [Message("user", "the tent")], temperature=0, max_new_tokens=longest).text)

    lowest = sampling_of(Rollout(temperature=1e-45), model.model, model.tokenizer).temperature
    assert lowest == 1e-6, "its inverse is a float32"
    found = re.search("[!-~]{2}", greedy(40)[3:])
    stop = found.group()

    async def ask(client):
        async def reply(**fields):
            answer = await client.chat.completions.create(model="mine", messages=messages, **fields)
            return shown(await text_of(answer) if fields.get("stream") else answer.choices[0].message.content)

        answer = await client.chat.completions.create(model="mine", messages=messages, temperature=0)
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 12)
        for stream in (False, True):
            for temperature in (0, 1e-45, 1e-7):
                assert await reply(temperature=temperature, stream=stream, top_p=0.9) == greedy(12)
            cut = await reply(temperature=0, stream=stream, max_tokens=40, stop=stop)
            assert cut == shown(greedy(40).partition(stop)[0])
        assert await reply(seed=1) == await reply(seed=1) != await reply(seed=2)
        stream = await client.chat.completions.create(model="mine", messages=messages, stream=True)
        assert len({(chunk.id, chunk.created) async for chunk in stream}) == 1
        assert [one.id for one in (await client.models.list()).data] == ["mine"]
        assert (await client.models.retrieve("mine")).id == "mine"
        with pytest.raises(openai.NotFoundError, match="this server has mine and no other"):
            await client.models.retrieve("owner/other")
        monkeypatch.setattr(ModelThread, "stream", failing)
        with pytest.raises(openai.InternalServerError) as caught:
            await reply()
        assert caught.value.type == "server_error"

    requests(model, ask)


def test_a_request_that_cannot_be_answered_is_status_400_in_one_line(model):
    """In a stream too, where transformers would begin to answer."""
    wrong = [
        ({"prompt": "the tent " * 600}, "tokens and the model reads 512, reply included. Shorten the prompt"),
        ({"prompt": "the tent " * 600, "stream": True}, "the model reads 512"),
        ({"prompt": "x" * 8193}, "the prompt has 8193 characters, at most 8192 are read"),
        ({"n": 2}, "n is not supported by this server. Remove the field"),
        ({"logprobs": 3}, "logprobs is not supported"),
        ({"logprobs": 0}, "logprobs is not supported"),
        ({"tools": [{"type": "function"}]}, "tools is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"top_p": 2}, "top_p: Input should be less than or equal to 1"),
        ({"temprature": 1}, "temprature is not supported"),
        ({"temperature": -1}, "temperature: Input should be greater than or equal to 0"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
        ({"max_tokens": 10**12}, "max_tokens: Input should be less than"),
        ({"stop": [1]}, "stop.0: Input should be a valid string"),
        ({"stop": [""]}, "stop.0: String should have at least 1 character"),
        ({"stop": ["x"] * 17}, "stop: List should have at most 16 items"),
        ({"prompt": ["the tent"]}, "prompt: Input should be a valid string"),
        ({"model": "another"}, "model: this server has mine and no other"),
    ]
    user = {"role": "user", "content": "hi"}
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    wrong_chats = [
        ([], "messages: List should have at least 1 item"),
        (None, "messages: Input should be a valid list"),
        ([user, {"role": "user", "content": None}], "messages.1.content.0.text: Input should be a valid string"),
        ([{"role": "user", "content": [picture]}], "messages.0.content.0.type: Input should be 'text'"),
        ([{"role": "tool", "content": "hi"}], "messages.0.role: Input should be 'system', 'developer', 'user' or"),
        ([user, {"role": "assistant", "content": "hi"}], "the last one is the assistant's"),
        ([{"role": "user", "content": "x" * 5000}] * 2, "the prompt has 10000 characters"),
        ([user] * 1001, "messages: List should have at most 1000 items"),
    ]

    async def ask(client):
        for fields, message in wrong:
            body = {"model": "mine", "prompt": "the tent", **fields}
            with pytest.raises(openai.BadRequestError) as caught:
                await client.post("/completions", body=body, cast_to=object)
            assert message in str(caught.value)
            assert "\n" not in str(caught.value)
            assert list(caught.value.body) == ["message", "type"]
        for messages, message in wrong_chats:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.post("/chat/completions", body={"model": "mine", "messages": messages}, cast_to=object)
            assert message in str(caught.value)
        for content in (b"{", b"[]", b"[" * 100_000, b'{"prompt": "\\ud800"}', b'{"prompt": "\xff"}'):
            headers = {"Authorization": "Bearer x", "Content-Type": "application/json"}
            answer = await client._client.post(f"{client.base_url}completions", content=content, headers=headers)
            assert answer.status_code == 400
            assert answer.json()["error"]["type"] == "invalid_request_error"
        huge = await client._client.post(f"{client.base_url}completions", content=b" " * 2**23, headers=headers)
        assert (huge.status_code, "at most 4194304 are read" in huge.text) == (413, True)
        long = await client.completions.create(model="mine", prompt="the tent " * 250, max_tokens=100)
        assert long.usage.total_tokens <= 512
        ignored = {
            "user": "me",
            "n": 1,
            "tools": [],
            "logprobs": False,
            "presence_penalty": 0.0,
            "response_format": {"type": "text"},
        }
        parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}], "refusal": None}]
        body = {"model": "mine", "messages": parts, "max_tokens": 1, **ignored}
        await client.post("/chat/completions", body=body, cast_to=object)

    async def chat(client):
        with pytest.raises(openai.BadRequestError, match="the model was not trained on chats"):
            await client.chat.completions.create(model="mine", messages=[user])

    requests(model, ask)
    requests(replace(model, form=PromptForm("single")), chat)


def test_the_server_answers_others_while_the_tokenizer_works(model, monkeypatch):
    reading, read = threading.Event(), threading.Event()
    encode = PromptForm.encode

    def slow(*arguments):
        reading.set()
        assert read.wait(60)
        return encode(*arguments)

    monkeypatch.setattr(PromptForm, "encode", slow)

    async def ask(client):
        chat = client.chat.completions.create(model="mine", messages=[{"role": "user", "content": "hi"}])
        first = asyncio.create_task(chat)
        await asyncio.to_thread(reading.wait, 60)
        assert [one.id for one in (await client.models.list()).data] == ["mine"]
        read.set()
        assert (await first).choices[0].message.content

    requests(model, ask)


def test_a_reply_that_grows_is_held_once():
    class Text:
        pass

    def work(put):
        text, gone = Text(), threading.Event()
        weakref.finalize(text, gone.set)
        put(text)
        del text
        put("longer")
        return gone.wait(30)

    assert asyncio.run(ModelThread(1).run(work))


def test_a_client_that_leaves_ends_its_response(model):
    """What waits behind it is answered, and nothing is drawn for one that left before."""
    spoken = []

    def ask(server, body):
        wanted = parse(json.dumps({"prompt": "the", **body}).encode(), _TextAsk, "mine")

        def counted(put):
            spoken.append(0)

            def counting(text):
                spoken[-1] += 1
                put(text)

            return server.speak(wanted, 1, counting)

        return server.model.stream(counted)

    async def run(server):
        for _ in range(2):
            texts = ask(server, {"max_tokens": 500})
            await anext(texts)
            waits = asyncio.ensure_future(anext(ask(server, {})))
            await asyncio.sleep(0)
            waits.cancel()
            await texts.aclose()
            assert [text async for text in ask(server, {"max_tokens": 3})][-1][1].response.ids
        assert server.model.num_waiting == 0

    endless = replace(model, sampling=replace(model.sampling, stop=frozenset()))
    with bind(None, 0) as listener:
        asyncio.run(run(ChatAPI(listener, "mine", endless, None)))
    assert len(spoken) == 4, "two that waited were dropped"
    assert max(spoken[0::2]) < 400
    assert spoken[1::2] == [5, 5]


def test_every_route_but_health_needs_the_token_and_loads_no_other_model(model):
    async def ask(client):
        for call in (client.models.list(), client.completions.create(model="mine", prompt="the tent")):
            with pytest.raises(openai.AuthenticationError, match="the token is missing or wrong"):
                await call
        server = client.with_options(base_url="http://server")
        assert await server.get("/health", cast_to=object) == {"status": "ok"}
        for path in ("/load_model", "/reset", "/v1/responses", "/v1/audio/transcriptions", "/docs"):
            with pytest.raises(openai.NotFoundError):
                await server.with_options(api_key="x").post(path, body={"model": "owner/name"}, cast_to=object)

    requests(model, ask, token="y")


# ------------------------------------------------------------------------------------- refusals


def test_what_cannot_be_served_is_one_line(finished, chat_model, tmp_path):
    run = finished / "run"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = one_error(run, "--port", port)
        assert message == f"--host 127.0.0.1 --port {port}: cannot be bound (Address already in use). Choose another"
    assert "other machines could use this model without a token" in one_error(run, "--host", "0.0.0.0")
    assert "NOPE is not set or is empty. Set it to the token" in one_error(run, "--token-env", "NOPE")
    assert f"rm serve {run / 'rm'}" in one_error(run / "rm")
    error = one_error(run, "--quantize", "nf4", "--port", "0")
    assert "--quantize nf4: no layer of this LlamaForCausalLM can be quantized" in error
    assert "no stage is finished" in one_error(tmp_path)
    assert "is a model and not a run" in one_error(chat_model, "--stage", "sft", "--port", 0)
    assert "--engine: does not exist any more. For vLLM: rlhf export DIR" in one_error(run, "--engine", "vllm")


def test_names_are_those_of_run_and_stage(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(finished / "run" / "sft")
    for directory in (".", "model"):
        assert name_of(directory, locate(directory)) == "run-sft"
    assert name_of("run", StageModel(finished / "run", "sft", "best_model")) == "run-sft-best_model"
    monkeypatch.chdir(tmp_path)
    assert name_of(".", None) == tmp_path.name
    assert name_of("owner/name", None) == "owner/name"


# ------------------------------------------------------------------------------------- the real server


@pytest.mark.slow
def test_the_real_server_answers_100_requests_at_the_same_time_and_survives_killed_clients(finished, tmp_path):
    run, rows = finished / "run", [{"prompt": PROMPTS[n % 3] + " tent" * (n % 7)} for n in range(100)]
    prompts, out = write_jsonl(tmp_path / "prompts.jsonl", rows), tmp_path / "out.jsonl"
    arguments = ["generate", str(run), "--prompts", str(prompts), "--out", str(out), "--temperature", "0"]
    rlhf(*arguments)
    wanted = [row["response"] for row in read_jsonl(out)]
    command = ["serve", str(run), "--port", "0", "--token-env", "TOKEN"]
    running = crash.Attempt(command, tmp_path / "log", TOKEN="s3cret")
    try:
        crash.wait_for(lambda: re.search("^(serving|error:) .*\n", running.output, re.M))
        url = running.output.split()[-1]
        client = openai.OpenAI(base_url=url, api_key="s3cret", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()

        def ask(n):
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
    finally:
        crash.end_all()
    assert "Traceback" not in running.output
