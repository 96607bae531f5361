"""The two writers: a local model compared with plain forward passes, and chat servers on loopback.

`ChatServer` is a test server that can misbehave; `transformers serve` is another project's real one.
"""

import re
import threading
import time
from dataclasses import replace
from email.utils import formatdate

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_cli.commands import writer as writer_module
from rlhf_cli.commands.writer import Failure, LocalWriter, Request, ServerWriter, WriterOptions, Written
from rlhf_cli.data.records import Message
from rlhf_cli.errors import ConfigError
from rlhf_cli.rewards.http_client import JSONClient, retry_after
from rlhf_cli.seeding import derived_seed
from support.servers import KEY, ChatServer, ask, completion, transformers_serve
from support.tiny import WORDS
from support.writers import local


def server_writer(server, **settings):
    url = server if isinstance(server, str) else server.url
    fast = {"max_new_tokens": 8, "backoff_s": 0.01, "timeout_s": 60.0, "retries": 2}
    return ServerWriter(WriterOptions("some-model", url, **{**fast, **settings}))


# ------------------------------------------------------------------------------------------ a model here


def by_hand(place, text, drawing, counters):
    """One full forward pass per token. The token is where the cumulative softmax exceeds the uniform."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    ids = tokenizer(text, add_special_tokens=not text.startswith("<"))["input_ids"]
    seed = derived_seed(drawing.seed, "writer", *counters)
    uniforms = torch.rand(drawing.max_new_tokens, generator=torch.Generator().manual_seed(seed))
    new = []
    for u in uniforms.tolist():
        with torch.no_grad():
            logits = model(torch.tensor([ids + new])).logits[0, -1].double()
        if drawing.temperature == 0:
            token = int(logits.argmax())
        else:
            cumulative, token = 0.0, 0
            for p in (logits / drawing.temperature).softmax(0).tolist():
                cumulative += p
                if cumulative > u:
                    break
                token += 1
        new.append(token)
        if token == tokenizer.eos_token_id:
            break
    return tokenizer.decode(new, skip_special_tokens=True), new[-1] == tokenizer.eos_token_id


PROMPTS = ["the tent is", "radio", "the map is late broken please help thank", "lamp lamp", "please"]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_local_answer_equals_plain_forward_passes(make_model, temperature):
    place = make_model("llama")
    drawing = local(place, batch_size=2, temperature=temperature, max_new_tokens=10, seed=4)
    answers = LocalWriter(drawing).write([ask(text, n) for n, text in enumerate(PROMPTS)])
    for n, (text, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        assert (answer.text, answer.ended) == by_hand(place, text, drawing, (n,))


def test_the_chat_template_is_used_if_the_tokenizer_has_one(chat_model, make_model):
    turns = (Message("user", "the tent"), Message("assistant", "is late"), Message("user", "please help"))
    drawing = local(chat_model, max_new_tokens=10)
    [answer] = LocalWriter(drawing).write([Request(turns, (7, 1))])
    text = "<user>the tent\n<assistant>is late\n<user>please help\n<assistant>"
    assert (answer.text, answer.ended) == by_hand(chat_model, text, drawing, (7, 1))
    plain = make_model("llama")
    [answer] = LocalWriter(local(plain, max_new_tokens=10)).write([Request(turns, (7, 1))])
    text = "\n\nHuman: the tent\n\nAssistant: is late\n\nHuman: please help\n\nAssistant:"
    assert (answer.text, answer.ended) == by_hand(plain, text, drawing, (7, 1))


def test_an_answer_depends_only_on_its_own_counters(make_model):
    options = local(make_model("llama"), max_new_tokens=12, batch_size=5)
    requests = [ask(text, n, 0) for n, text in enumerate(PROMPTS)]
    several = LocalWriter(options)
    one = LocalWriter(replace(options, batch_size=1))
    answers = several.write(requests)
    assert one.write(requests) == answers
    assert several.write(requests[::-1]) == answers[::-1]
    assert several.write([ask(text, n, 1) for n, text in enumerate(PROMPTS)]) != answers
    other_seed = LocalWriter(replace(options, seed=1))
    assert other_seed.write(requests) != answers


def test_a_request_that_the_local_model_cannot_take_fails_alone(make_model, chat_model):
    long, short = ask(" ".join(WORDS * 3)), ask("the tent")
    first, second = LocalWriter(local(make_model("llama"), max_new_tokens=100)).write([long, short])
    assert not first.fatal
    assert "100 new tokens do not fit the model's 128 positions" in first.reason
    assert isinstance(second, Written)

    writer = LocalWriter(local(chat_model, max_new_tokens=4))
    writer.speaker.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    [failure] = writer.write([short])
    assert "roles must alternate" in failure.reason


# ------------------------------------------------------------------------------------------- a server


def test_the_request_to_a_server_and_the_result_of_its_answer(monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY + "\n")
    turns = (Message("system", "be kind"), Message("user", "hi"))

    def answer(call):
        return 200, {}, completion(f" answer {call.number} \ud83d", "length" if call.number else "stop")

    with ChatServer(answer) as server:
        drawing = {"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 7, "seed": 3}
        writer = server_writer(server, api_key_env="MY_KEY", **drawing)
        assert writer.write([Request(turns, (5, 2))]) == [Written(" answer 0 ?", True)]
        assert writer.write([Request(turns, (5, 2))]) == [Written(" answer 1 ?", False)]
        writer.write([Request(turns, (5, 3))])
    assert server.paths[0] == "/v1/chat/completions"
    seed = derived_seed(3, "writer", 5, 2) >> 32
    assert server.requests[0] == server.requests[1]
    assert server.requests[0] == {
        "model": "some-model",
        "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}],
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 7,
        "seed": seed,
        "stream": False,
    }
    assert 0 <= seed < 2**31
    assert server.requests[2]["seed"] != seed
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"


def test_answers_keep_the_order_of_requests_and_concurrency_is_limited():
    together = threading.Barrier(3, timeout=120)

    def slow_first(call):
        if call.number < 3:
            together.wait()
        time.sleep(0.1 if call.number < 2 else 0.01)
        return 200, {}, completion(call.text)

    with ChatServer(slow_first) as server:
        texts = [str(n) for n in range(12)]
        answers = server_writer(server, concurrency=3).write([ask(text, n) for n, text in enumerate(texts)])
    assert answers == [Written(text, True) for text in texts]
    assert server.most == 3


BAD_ANSWERS = {  # those of every server are in tests/rewards/test_endpoint.py
    b"<html>hello</html>": "is not JSON: ",
    b"{}": "has no choices[0].message: ",
    b'{"choices": []}': "has no choices[0].message: ",
    b'{"choices": [null]}': "has no choices[0].message: ",
    b'{"choices": [{"message": "hello"}]}': "has no choices[0].message: ",
    completion(["a"]): "has a list in choices[0].message.content",
}


@pytest.mark.parametrize("body", BAD_ANSWERS)
def test_bad_answers_are_retried_and_then_reported(body):
    """A writer that gave up can be used again."""
    with ChatServer(lambda call: (200, {}, body if call.number < 5 else completion("fine"))) as server:
        writer = server_writer(server)
        [failure] = writer.write([ask("hi")])
        assert writer.write([ask("hi")]) == [Written("fine", True)]
    assert failure.fatal
    assert failure.reason.startswith(f"{server.url}/chat/completions answered 200, but the answer {BAD_ANSWERS[body]}")
    assert re.search(
        r", after 3 attempts in \d+ s\. Rows written so far are kept; run the same command without --restart",
        failure.reason,
    )
    assert len(server.requests) == 6
    assert server.requests[0] == server.requests[5]


def test_retry_after_pauses_all_requests(monkeypatch):
    """Those beside the first one are answered when the client knows of the pause."""
    is_known, refusal = threading.Event(), JSONClient._refusal

    def noted(self, *given):
        problem = refusal(self, *given)
        is_known.set()
        return problem

    monkeypatch.setattr(JSONClient, "_refusal", noted)

    def busy(call):
        assert call.number == 0 or is_known.wait(120)
        return (429, {"Retry-After": "1"}, b"") if call.number == 0 else (200, {}, completion("x"))

    with ChatServer(busy) as server:
        server_writer(server, concurrency=2).write([ask(str(n)) for n in range(6)])
    late = [t - server.times[0] for t in server.times[2:]]
    assert len(late) == 5
    assert min(late) >= 1.0, "one was sent in the pause that another was asked for"


def test_a_very_long_retry_after_ends_the_run():
    with ChatServer(lambda _: (429, {"Retry-After": "7200"}, b"quota")) as server:
        [failure] = server_writer(server).write([ask("hi")])
    assert failure.fatal
    assert "answered 429: 'quota', and asks for a pause of 7200 s (Retry-After). Rows written" in failure.reason
    assert len(server.requests) == 1


def test_a_date_in_retry_after_is_waited_for_and_an_odd_one_is_not(monkeypatch):
    """A number is the function's example."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    date = formatdate(time.time() + 30, usegmt=True)
    assert 20 < retry_after(date) <= 30
    assert 20 < retry_after(date.removesuffix(" GMT")) <= 30, "a date without a zone is in UTC"
    monkeypatch.undo()
    time.tzset()
    past, late = "Wed, 21 Oct 2015 07:28:00 GMT", "Fri, 31 Dec 9999 23:59:59 -2359"
    for odd in ("", "-5", "1e3", "nan", past, past.replace("21", "99")):
        assert retry_after(odd) == 0.0, odd
    assert retry_after(late) >= 0.0


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_request_fails_alone(status):
    refused = (status, {}, b'{"error": "too long"}')
    with ChatServer(lambda call: refused if call.text == "long" else (200, {}, completion("fine"))) as server:
        answers = server_writer(server).write([ask("short"), ask("long"), ask("short")])
    reason = f'{server.url}/chat/completions answered {status}: \'{{"error": "too long"}}\''
    assert answers == [Written("fine", True), Failure(reason), Written("fine", True)]
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("status", "hint"),
    [
        (401, "Check the key in $MY_KEY"),
        (403, "Check the key in $MY_KEY"),
        (404, "Check that --server is the base URL (often it ends in /v1) and serves a model named some-model"),
        (405, "run the same command without --restart to resume"),
    ],
)
def test_a_permanent_error_stops_further_requests(status, hint, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)
    echo = f"wrong key: Bearer {KEY}\n\x1b[31mred\x1b[0m".encode()
    with ChatServer(lambda _: (status, {}, echo)) as server:
        writer = server_writer(server, api_key_env="MY_KEY", concurrency=2)
        answers = writer.write([ask(str(n)) for n in range(50)])
    assert len(server.requests) <= 2
    assert all(isinstance(answer, Failure) and answer.fatal for answer in answers)
    [reason] = {answer.reason for answer in answers if isinstance(answer, Failure)}
    assert reason.startswith(f"{server.url}/chat/completions answered {status}: 'wrong key: Bearer *** [31mred [0m'")
    assert reason.endswith(hint)
    assert KEY not in reason
    assert reason.isprintable()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://me:hidden@127.0.0.1/v1", "contains a user or a password"),
        (
            "http://127.0.0.1/v1?key=hidden",
            "contains a ? or a #, a base URL has neither. Give a key with --api-key-env NAME",
        ),
        ("http://127.0.0.1/v1#hidden", "contains a ? or a #"),
        ("http://127.0.0.1:hidden/v1", "must be http://host:port/path or https://..."),
    ],
)
def test_invalid_urls_are_refused_without_showing_them(url, said):
    with pytest.raises(ConfigError) as error:
        server_writer(url)
    assert str(error.value).startswith(f"--server: {said}"), str(error.value)
    assert "hidden" not in str(error.value)


def test_a_bug_is_raised_instead_of_becoming_a_failure(monkeypatch):
    def broken(_output):
        raise KeyError("ours")

    monkeypatch.setattr(writer_module, "completion_in", broken)
    with ChatServer() as server:
        with pytest.raises(KeyError, match="ours"):
            server_writer(server, concurrency=2).write([ask(str(n)) for n in range(20)])
    assert len(server.requests) <= 4


# ------------------------------------------------------------------------------------ transformers serve


@pytest.mark.slow
def test_transformers_serve_writes(chat_model, tmp_path):
    with transformers_serve(chat_model, tmp_path / "log") as url:
        options = WriterOptions(str(chat_model), url, max_new_tokens=8, retries=0)
        served = ServerWriter(replace(options, temperature=0, concurrency=2))
        here = LocalWriter(local(chat_model, temperature=0))
        requests = [ask(text, n) for n, text in enumerate(PROMPTS)]
        assert served.write(requests) == here.write(requests), "the likeliest tokens are the same, wherever they run"

        drawn = ServerWriter(replace(options, concurrency=1))
        answers = drawn.write([ask("the tent", n) for n in range(4)])
        assert len({answer.text for answer in answers if isinstance(answer, Written)}) == 4
        assert drawn.write([ask("the tent", n) for n in range(4)]) == answers, "a request's seed is its draw's"

        [failure] = ServerWriter(replace(options, model="another")).write([ask("hi")])
        assert "answered 400" in failure.reason
        assert "pinned" in failure.reason
