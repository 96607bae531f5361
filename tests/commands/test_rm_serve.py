"""`rlhf rm serve`: the real server with real models, tested by sockets, by `type: http` rewards and by PPO runs."""

import http.client
import json
import math
import os
import re
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_cli.commands import rm_serve, serving
from rlhf_cli.commands.rm_serve import RewardServerOptions
from rlhf_cli.errors import ConfigError
from rlhf_cli.rewards.http_client import JSONClient
from rlhf_cli.run.artifacts import digest_file
from support import crash
from support.projects import refused, rlhf
from support.rewards import batch, source_of
from support.tiny import encoder, read_jsonl

GUARD_S = 120  # a wait that takes longer than this hangs


@contextmanager
def served(model, **settings):
    """A server in a thread; the result has a `url`."""
    server = rm_serve.RewardServer(RewardServerOptions(str(model), **{"port": 0, **settings}))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield SimpleNamespace(server=server, thread=thread, port=server.port, url=f"http://127.0.0.1:{server.port}/")
    finally:
        server.stop()
        thread.join(GUARD_S)


@contextmanager
def busy_model(server):
    """The model does not answer before the block ends."""
    score, free = server.source.score, threading.Event()
    server.source.score = lambda samples: (free.wait(10 * GUARD_S), score(samples))[1]
    try:
        yield
    finally:
        free.set()


@pytest.fixture(scope="module")
def reward_model(pipeline):
    """A reward model of another architecture than the policy's, with its own tokenizer."""
    return pipeline("gpt2") / "rm"


def ask(port, body=None, *, method="POST", path="/get_reward", headers=None):
    """(status, parsed answer, headers) of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GUARD_S)
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, content, headers or {})
    response = connection.getresponse()
    text = response.read()
    connection.close()
    assert text.count(b"\n") == 1, "one line"
    return response.status, json.loads(text), response.headers


def talk(port, data):
    """The answer to these bytes: (status, text); (None, "") if the server closes the connection without one."""
    with socket.create_connection(("127.0.0.1", port), timeout=GUARD_S) as connection:
        try:
            connection.sendall(data)
            response = http.client.HTTPResponse(connection)
            response.begin()
            return response.status, response.read().decode()
        except (ConnectionError, http.client.RemoteDisconnected):
            return None, ""


def plain_scores(place, texts, ended):
    """Scores by plain transformers: the logit at the last token; EOS follows a response that ended."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    found = []
    for text, end in zip(texts, ended, strict=True):
        ids = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] * end
        with torch.no_grad():
            hidden = model.base_model(torch.tensor([ids])).last_hidden_state[0, -1]
            found.append(model.score(hidden).item())
    return found, model.config


TEXTS = ["Q: tent lamp\nA: thank you", "Q: map\nA:", "sorry", "a" * 300]


# --------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize("path", ["/get_reward", "/"])
def test_scores_equal_normalized_scores_of_plain_transformers(reward_model, path):
    ended = [True, False, True, True]
    wanted, config = plain_scores(reward_model / "model", TEXTS[:3], ended[:3])
    assert config.score_std != 1.0
    with served(reward_model.parent) as at:  # the artifact root
        status, answer, _ = ask(at.port, {"query": TEXTS[:3], "ended": ended[:3]}, path=path)
    assert status == 200
    assert answer["rewards"] == pytest.approx([(w - config.score_mean) / config.score_std for w in wanted], abs=1e-4)
    with served(reward_model, raw=True) as at:  # the stage
        raw = ask(at.port, {"query": TEXTS[:3], "ended": ended[:3]}, path=path)[1]["rewards"]
        all_ended = ask(at.port, {"query": TEXTS[:3], "labels": ["a", None, 3], "prompts": None}, path=path)[1]
        prompt = f"Q: map{at.server.source.tokenizer.eos_token}"  # as a client's template writes it
        rendered = ask(at.port, {"query": [prompt + "A: yes"], "prompts": [prompt]}, path=path)[1]["rewards"]
    assert rendered == pytest.approx(plain_scores(reward_model / "model", [prompt + "A: yes"], [True])[0], abs=1e-4)
    assert raw == pytest.approx(wanted, abs=1e-4)
    assert all_ended["rewards"][1] != pytest.approx(raw[1], abs=1e-3)
    assert all_ended["rewards"][2] == pytest.approx(raw[2], abs=1e-6)


def test_an_overlong_text_is_cut_and_scored(reward_model):
    with served(reward_model / "model") as at:
        assert math.isfinite(ask(at.port, {"query": ["tent " * 5000]})[1]["rewards"][0])
        assert at.server.source.num_cut == 1


def test_a_classifier_with_labels_is_served(word_piece, tmp_path):
    model = encoder(tmp_path, word_piece, 2, id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1})
    for unknown in (None, "great"):
        with pytest.raises(ConfigError, match="bad, good"):
            rm_serve.RewardServer(RewardServerOptions(str(tmp_path), port=0, label=unknown))
    request = {"query": ["p tent", "q map", "lamp"], "prompts": ["p", "q", "another"]}
    for settings, texts in (
        ({}, ["p tent", "q map", "lamp"]),
        ({"template": "{response} to {prompt}"}, [" tent to p", " map to q", "lamp to "]),
        ({"template": "only {response}"}, ["only  tent", "only  map", "only lamp"]),
    ):
        with served(tmp_path, label="good", probability=True, **settings) as at:
            found = ask(at.port, request)[1]["rewards"]
        with torch.no_grad():
            wanted = [model(**word_piece(t, return_tensors="pt")).logits[0].softmax(0)[1].item() for t in texts]
        assert found == pytest.approx(wanted, abs=1e-5)


# ------------------------------------------------------------------------------------------- requests


QUERY = {"query": ["a"]}
BAD = {
    "no JSON": (b"{", 400, "the body is not JSON"),
    "no UTF-8": (b'{"query": ["\xff"]}', 400, "the body is not JSON"),
    "deep": (b'{"query": ' + b"[" * 100_000, 400, "the body is not JSON"),
    "no query": ({"texts": ["a"]}, 400, "an object with a list"),
    "query is text": ({"query": "a"}, 400, '"query" must be a list of texts'),
    "a number among texts": ({"query": ["a", 1]}, 400, '"query" must be a list of texts, one for each'),
    "half a character": (b'{"query": ["\\ud800"]}', 400, '"query" must be a list of texts'),
    "prompts of another length": ({**QUERY, "prompts": []}, 400, '"prompts" must be a list of texts, one for each'),
    "ended of numbers": ({**QUERY, "ended": [1]}, 400, '"ended" must be a list of true and false'),
    "too many": ({"query": ["a"] * 9}, 413, "9 texts, at most 8 are scored per request. Send fewer"),
}


@pytest.fixture(scope="module")
def small(reward_model):
    with served(reward_model, max_batch=8) as at:
        yield at


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_gets_an_error_and_the_server_continues(small, name):
    body, status, message = BAD[name]
    found, answer, _ = ask(small.port, body)
    assert found == status
    assert message in answer["error"]
    assert ask(small.port, QUERY)[0] == 200


BYTES = {
    "no HTTP": (b"hello\r\n\r\n", 400),
    "no length": (b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 411),
    "chunks": (b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
    "huge length": (b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\n", 413),
    "elsewhere": (b"POST /admin HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\n\r\n{}", 404),
    "GET": (b"GET /get_reward HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 405),
}


@pytest.mark.parametrize("name", BYTES)
def test_invalid_http_is_refused_and_the_server_continues(small, name, capfd):
    data, status = BYTES[name]
    found, answer = talk(small.port, data)
    assert found == status
    assert answer.count("\n") <= 1
    assert ask(small.port, QUERY)[0] == 200
    err = capfd.readouterr().err
    assert "Traceback" not in err, err


def test_a_page_of_another_site_cannot_ask(small):
    """Its name may point to this machine."""
    for named in ({"Host": "example.org"}, {"Host": "a:5000"}, {"Origin": "http://a"}, {"Origin": "null"}):
        status, answer, _ = ask(small.port, QUERY, headers=named)
        assert status == 403, named
        assert answer["error"].startswith("the Host or the Origin header names another machine")
    for own in ("localhost", "[::1]:80", "127.0.0.1:9"):
        assert ask(small.port, QUERY, headers={"Host": own, "Origin": f"http://{own}"})[0] == 200


def test_an_oversized_body_is_answered_while_it_is_sent(small, monkeypatch):
    monkeypatch.setattr(rm_serve, "MAX_BODY_BYTES", 1_000_000)
    for _ in range(3):
        status, answer, _ = ask(small.port, {"query": ["x" * 40_000_000]})
        assert status == 413
        assert "at most 1000000 are read" in answer["error"]


def test_a_client_that_stops_sending_is_disconnected(reward_model, monkeypatch):
    """It takes no place of those that wait. A body that comes in two pieces is read."""
    monkeypatch.setattr(serving, "BODY_S", 1)
    monkeypatch.setattr(rm_serve, "MAX_WAITING", 1)
    with served(reward_model) as at:
        body = json.dumps(QUERY).encode()
        begin = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:5]
        silent, honest = (socket.create_connection(("127.0.0.1", at.port), timeout=GUARD_S) for _ in range(2))
        started = time.monotonic()
        for connection in (silent, honest):
            connection.sendall(begin)
        time.sleep(0.2)
        honest.sendall(body[5:])
        assert honest.recv(12) == b"HTTP/1.1 200"
        assert b"".join(iter(lambda: silent.recv(65536), b"")).startswith(b"HTTP/1.1 408 "), "and it is closed"
        assert time.monotonic() - started > 0.9
        honest.close()
        silent.close()


def test_a_request_beyond_the_open_connections_gets_503(reward_model, monkeypatch):
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 3)
    with served(reward_model) as at:
        idle = [socket.create_connection(("127.0.0.1", at.port), timeout=GUARD_S) for _ in range(3)]
        until(lambda: talk(at.port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")[0] == 503)
        for connection in idle:
            connection.close()
        until(lambda: talk(at.port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")[0] == 200)
        assert at.server.listener.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), "vanished clients are noticed"


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_connection_without_a_whole_request_is_closed(reward_model, monkeypatch, sent):
    monkeypatch.setattr(serving, "IDLE_S", 1)
    with served(reward_model) as at, socket.create_connection(("127.0.0.1", at.port), timeout=GUARD_S) as idle:
        idle.sendall(sent)
        assert (b'{"status": "ok"}' in b"".join(iter(lambda: idle.recv(65536), b""))) == (len(sent) > 9)


@pytest.mark.parametrize("key", ["query", "prompts"])
def test_a_text_that_is_too_long_is_refused_before_it_is_tokenised(small, monkeypatch, key):
    monkeypatch.setattr(rm_serve, "MAX_TEXT_LENGTH", 1000)
    monkeypatch.setattr(small.server.source, "score", None)
    status, answer, _ = ask(small.port, {"query": ["a", "b"], key: ["a", "x" * 1001]})
    assert status == 413
    assert answer["error"] == "a text has 1001 characters, at most 1000 are read. Shorten it"
    monkeypatch.setattr(rm_serve, "MAX_CHARACTERS", 3000)
    status, answer, _ = ask(small.port, {"query": ["x" * 1000] * 2, "prompts": ["x" * 501] * 2})
    assert status == 413
    assert answer["error"] == "the texts have 3002 characters, at most 3000 are read. Send fewer texts"


def test_stopping_waits_for_the_model_only_for_a_limited_time(reward_model, monkeypatch):
    monkeypatch.setattr(serving, "LAST_REQUESTS_S", 1)
    with served(reward_model) as at, busy_model(at.server):
        data = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 16\r\n\r\n" + json.dumps(QUERY).encode()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(talk, at.port, data)
            until(lambda: at.server.model.num_waiting == 1)
            at.server.stop()
            at.thread.join(GUARD_S)
            assert not at.thread.is_alive()
            assert asked.result() == (503, '{"error": "the server has stopped"}\n')


def test_a_second_signal_ends_the_server_at_once(reward_model, monkeypatch):
    monkeypatch.setattr(serving, "LAST_REQUESTS_S", 10 * GUARD_S)
    server = rm_serve.RewardServer(RewardServerOptions(str(reward_model), port=0))

    def ask_and_interrupt():
        data = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 16\r\n\r\n" + json.dumps(QUERY).encode()
        asks = threading.Thread(target=talk, args=(server.port, data))
        asks.start()
        until(lambda: server.model.num_waiting == 1)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            until(lambda: server._uvicorn.should_exit)
        asks.join(GUARD_S)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with busy_model(server), ThreadPoolExecutor(1) as pool:
            done = pool.submit(ask_and_interrupt)
            started = time.monotonic()
            server.run_until_signal("serving")
            assert time.monotonic() - started < GUARD_S
            done.result()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_a_failing_model_is_status_500_and_the_server_continues(reward_model, capfd):
    with served(reward_model) as at:
        model = at.server.source.model
        at.server.source.model = None
        status, answer, _ = ask(at.port, QUERY)
        assert (status, list(answer)) == (500, ["error"])
        assert "Traceback" in capfd.readouterr().err
        at.server.source.model = model
        assert ask(at.port, QUERY)[0] == 200
        with torch.no_grad():
            model.score.weight[0, 0] = math.nan
        status, answer, _ = ask(at.port, QUERY)
        assert status == 500
        assert "response 1: returned nan" in answer["error"]


def test_a_text_that_the_template_refuses_is_status_422(reward_model, tmp_path):
    """A client would send it again after a status 500."""
    model = shutil.copytree(reward_model / "model", tmp_path / "model")
    template = "{% for m in messages %}{{ raise_exception('no') if 'bad' in m.content else m.content }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    with served(model, template="chat") as at:
        assert ask(at.port, QUERY)[0] == 200
        status, answer, _ = ask(at.port, {"query": ["good", "bad"]})
    assert (status, "response 2: its chat template failed: no" in answer["error"]) == (422, True)


def test_concurrent_requests_get_their_own_scores(reward_model):
    texts = [f"tent {'lamp ' * (i % 5)}{i}" for i in range(30)]
    with served(reward_model) as at:
        assert ask(at.port, {"query": []})[1] == {"rewards": []}
        one_by_one = [ask(at.port, {"query": [text]})[1]["rewards"][0] for text in texts]
        with ThreadPoolExecutor(30) as pool:
            found = list(pool.map(lambda text: ask(at.port, {"query": [text]})[1]["rewards"][0], texts))
    assert found == pytest.approx(one_by_one, abs=1e-5)
    assert len({round(score, 4) for score in one_by_one}) > 20


def until(condition):
    end = time.monotonic() + GUARD_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_requests_beyond_the_limit_get_503_and_are_retried(reward_model, monkeypatch):
    """The http source retries."""
    is_refused, refusal = threading.Event(), JSONClient._refusal
    monkeypatch.setattr(JSONClient, "_refusal", lambda *given: (refusal(*given), is_refused.set())[0])
    monkeypatch.setattr(rm_serve, "MAX_WAITING", 2)
    with served(reward_model) as at:
        with ThreadPoolExecutor(3) as pool, busy_model(at.server):
            waiting = [pool.submit(ask, at.port, QUERY) for _ in range(2)]
            until(lambda: at.server.model.num_waiting == 2)
            status, answer, headers = ask(at.port, QUERY)
            assert (status, headers["Retry-After"]) == (503, "1")
            assert "2 requests are waiting" in answer["error"]
            source = source_of({"type": "http", "url": at.url, "backoff_s": 0.05})
            retried = pool.submit(source.score, batch(["a"]))
            assert is_refused.wait(GUARD_S)
    assert [one.result()[0] for one in waiting] == [200, 200]
    assert retried.result().isfinite().all()


def test_running_requests_are_answered_before_the_server_stops(reward_model):
    with served(reward_model) as at, ThreadPoolExecutor(1) as pool:
        with busy_model(at.server):
            asked = pool.submit(ask, at.port, QUERY)
            until(lambda: at.server.model.num_waiting == 1)
            at.server.stop()
            time.sleep(0.5)
            assert at.thread.is_alive()
        at.thread.join(GUARD_S)
        assert asked.result()[0] == 200
        with pytest.raises(ConnectionRefusedError):
            ask(at.port, QUERY)


# ----------------------------------------------------------------------------------------------- token


def test_requests_need_the_token(reward_model, monkeypatch):
    monkeypatch.setenv("RLHF_TEST_TOKEN", "4711")
    with served(reward_model, token_env="RLHF_TEST_TOKEN", host="0.0.0.0") as at:
        for given in (None, "4711", "Bearer 471", "Bearer 47111", "Bearer", "bearer 4711", "Basic 4711", "Bearer é"):
            headers = {} if given is None else {"Authorization": given.encode()}
            status, answer, back = ask(at.port, QUERY, headers=headers)
            assert status == 401, given
            assert back["WWW-Authenticate"] == "Bearer"
            assert "4711" not in json.dumps(answer)
        assert ask(at.port, QUERY, headers={"Authorization": "Bearer 4711"})[0] == 200
        assert ask(at.port, {"query": 7}, path="/elsewhere")[0] == 401, "nothing is told before it"
        assert ask(at.port, method="GET", path="/health")[0] == 200
        right = source_of({"type": "http", "url": at.url, "api_key_env": "RLHF_TEST_TOKEN"})
        assert right.score(batch(["a"])).isfinite().all()


REFUSED = {
    "elsewhere without a token": (["--host", "::"], "other machines could use this model without a token"),
    "no such token": (["--token-env", "RLHF_NO_TOKEN"], "the environment variable RLHF_NO_TOKEN is not set"),
    "no such address": (["--host", "127.0.0.1.2", "--token-env", "HOME"], "cannot be bound"),
    "bad template": (["--template", "x"], "--template: must be `chat` or contain"),
    "label": (["--label", "good"], "error: --label: the model has a single score"),
    "no chat template": (["--template", "chat"], "error: --template: is chat, but the tokenizer"),
    "device": (["--device", "cuda"], "torch finds no GPU"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_cannot_be_served_are_refused_in_one_line(reward_model, name):
    arguments, message = REFUSED[name]
    if name == "device" and torch.cuda.is_available():
        pytest.skip("there is one")
    result = rlhf("rm", "serve", reward_model, "--port", 0, *arguments, code=2)
    assert message in result.stderr
    assert len(result.stderr.splitlines()) <= 2  # and what is remarked of the model


def test_a_port_in_use_and_a_missing_model_are_refused(reward_model, small, tmp_path):
    for path, port in ((reward_model, small.port), (tmp_path, 0), (reward_model.parent / "sft", 0), ("/nowhere", 0)):
        result = rlhf("rm", "serve", path, "--port", port, code=2)
        assert ("Address already in use" in result.stderr) == (port > 0)


# ------------------------------------------------------------------------------------- command line


def test_a_signal_stops_the_server_with_exit_code_0(reward_model, tmp_path):
    wanted, config = plain_scores(reward_model / "model", TEXTS[:2], [True, True])
    arguments = ["rm", "serve", str(reward_model), "--port", "0", "--token-env", "TOKEN"]
    running = crash.Attempt(arguments, tmp_path / "log", TOKEN="s3cret")
    try:
        crash.wait_for(lambda: re.search("^(serving|error:) .*\n", running.output, re.M))
        port = urlsplit(running.output.split()[-1]).port
        assert ask(port, {"query": TEXTS[:2]})[0] == 401
        answer = ask(port, {"query": TEXTS[:2]}, headers={"Authorization": "Bearer s3cret"})[1]["rewards"]
        assert answer == pytest.approx([(w - config.score_mean) / config.score_std for w in wanted], abs=1e-4)
        running.send(signal.SIGTERM)
        assert running.wait(GUARD_S) == 0
    finally:
        crash.end_all()
    assert running.output.endswith("\nstopped\n")
    assert "s3cret" not in running.output
    assert "Traceback" not in running.output


# ------------------------------------------------------------------------------- a server that goes away


def weights(root):
    return {path.relative_to(root): digest_file(path) for path in root.glob("ppo/*/*.safetensors")}


def test_a_run_whose_server_stopped_resumes_to_the_same_bytes(reward_model, make_model, write_config, tmp_path):
    """The server answers twice and stops. The run ends with one line, and the same command finishes it."""
    changes = {"policy": {"path": str(make_model("llama"))}, "ppo": {"num_iterations": 4}}
    changes["data"] = {"test": None, "test_fraction": 0.0}
    with served(reward_model) as at:
        port = at.port
        reward = {"type": "http", "url": at.url, "retries": 1, "backoff_s": 0.05, "name": "remote"}
        command = {
            name: ["ppo", "--config", str(write_config("ppo", tmp_path / name, rewards=[reward], **changes)), "--quiet"]
            for name in ("undisturbed", "stopped")
        }
        rlhf(*command["undisturbed"])
        score, calls = at.server.source.score, []

        def mortal(samples):
            calls.append(1)
            if len(calls) == 2:
                at.server.stop()
                until(lambda: socket.socket().connect_ex(("127.0.0.1", port)))  # it still answers this request
            return score(samples)

        at.server.source.score = mortal
        line = refused(*command["stopped"], code=1)
    assert f": reward remote, responses 1 to 8: {reward['url']} cannot be reached" in line
    assert "prompts.jsonl:" in line
    assert len(calls) == 2
    assert not (tmp_path / "stopped/ppo").exists()
    with served(reward_model, port=port) as at:
        score, calls = at.server.source.score, []
        at.server.source.score = lambda samples: (calls.append(1), score(samples))[1]
        rlhf(*command["stopped"])
    assert len(calls) == 2, "it went on from the second of four iterations, which was saved before it stopped"
    steps = [row["step"] for row in read_jsonl(tmp_path / "stopped/ppo/metrics.jsonl")]
    assert steps == [1, 2, 3, 4]
    assert weights(tmp_path / "stopped") == weights(tmp_path / "undisturbed")
    assert len(weights(tmp_path / "stopped")) >= 2
