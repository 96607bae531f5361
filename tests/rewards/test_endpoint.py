"""Rewards of an HTTP server: requests, retries, failures and secrets."""

from __future__ import annotations

import gzip
import itertools
import os
import random
import signal
import socket
import threading
import time
from dataclasses import replace

import pytest
from pydantic import TypeAdapter, ValidationError
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.config.rewards import Reward, named_rewards
from rlhf_cli.errors import ConfigError, DataError, RewardError
from rlhf_cli.processes.signals import StopRequests, stop_requested
from rlhf_cli.rewards import endpoint, http_client
from rlhf_cli.rewards.base import total_score
from rlhf_cli.rewards.http_client import JSONClient
from rlhf_cli.rewards.sources import check_rows, load_rewards
from rlhf_cli.run.checkpoint_files import last_step
from support.rewards import CPU, asks, batch, lengths, source_of

# ------------------------------------------------------------------------------------------ endpoints


def test_request_and_answer(scripted, monkeypatch):
    """The interface of OpenRLHF's remote reward model. The hub's token is not for this server."""
    monkeypatch.setenv("HF_TOKEN", "hf_private")
    server = scripted(lengths)
    samples = batch(["a", "bb", "ccc"], [{"n": 0, "answer": "x"}, {"n": 1, "answer": None}, {"n": 2, "answer": 7}])
    scores = total_score([asks(server)], samples)
    assert scores.total.tolist() == [4.0, 5.0, 6.0]
    assert list(scores.each) == ["http"]
    (request,) = server.requests
    assert request == {
        "query": ["p0 a", "p1 bb", "p2 ccc"],
        "prompts": ["p0 ", "p1 ", "p2 "],
        "labels": ["", "", ""],
        "ended": [True] * 3,
    }
    assert server.headers[0]["Content-Type"] == "application/json"
    assert "Authorization" not in server.headers[0]
    bare = scripted(lambda *_: (200, {}, [1, 2.5, 0]))
    assert total_score([asks(bare, label_column="answer")], samples).total.tolist() == [1.0, 2.5, 0.0]
    assert bare.requests[0]["labels"] == ["x", None, 7]


def test_texts_are_sent_in_batches_and_scores_keep_their_order(scripted):
    """The first three requests wait for each other, so the server sees them at the same time."""
    rng, together = random.Random(0), threading.Barrier(3, timeout=120)

    def play(number, body):
        if number < 3:
            together.wait()
        time.sleep(rng.random() * 0.02)
        return lengths(number, body)

    server = scripted(play)
    samples = batch(["x" * i for i in range(41)], [{"answer": n} for n in range(41)])
    samples = replace(samples, ended=[n % 3 == 0 for n in range(41)])
    scores = asks(server, batch_size=4, concurrency=3, label_column="answer").score(samples)
    assert scores.tolist() == [float(len(f"p{i} ") + i) for i in range(41)]
    requests = sorted(server.requests, key=lambda request: request["labels"])
    assert [request["labels"] for request in requests] == [list(range(i, min(i + 4, 41))) for i in range(0, 41, 4)]
    for request in requests:
        assert request["prompts"] == [f"p{n} " for n in request["labels"]]
        assert request["ended"] == [n % 3 == 0 for n in request["labels"]]
    assert server.most == 3


def test_429_and_then_200(scripted, monkeypatch):
    """Retry-After sets the wait; without it the waits double."""
    waits, pause = [], JSONClient._pause
    monkeypatch.setattr(JSONClient, "_pause", lambda self, *given: waits.append(given[0]) or pause(self, *given))

    def play(number, body):
        return (429, {"Retry-After": "1"} if number == 0 else {}, "slow down") if number < 3 else lengths(number, body)

    server = scripted(play)
    assert asks(server, retries=3, backoff_s=0.1).score(batch(["a"])).tolist() == [4.0]
    gaps = [b - a for a, b in itertools.pairwise(server.times)]
    assert waits == [0.0, 0.1, 0.2, 0.4]
    assert all(gap >= wait for gap, wait in zip(gaps, [1.0, 0.2, 0.4], strict=True))


FAULTS = {
    "500 always": ((500, {}, b"<h1>no\nmodel</h1>"), "answered 500: '<h1>no model</h1>', after 3 attempts in ", 3),
    "408 always": ((408, {}, b"late"), "answered 408: 'late', after 3 attempts", 3),
    "400": ((400, {}, b"bad"), "answered 400: 'bad'. Check", 1),
    "404": ((404, {}, b"x" * 5000), "answered 404: '" + "x" * 200 + "...'. Check", 1),
    "garbage": ((200, {}, b"\xff\xfe{"), "answered 200, but the answer is not JSON: '\ufffd\ufffd{'", 1),
    "deep": ((200, {}, b"[" * 100_000), "answered 200, but the answer is not JSON: '[[[[", 1),
    "another object": ((200, {}, {"error": "x"}), "has no list of rewards: '{\"error\": \"x\"}'", 1),
    "no list": ((200, {}, {"rewards": 1.0}), "has no list of rewards", 1),
    "too few": ((200, {}, {"rewards": [1.0]}), "has 1 rewards for 2 texts: '{\"rewards\": [1.0]}'", 1),
    "closed": (None, "sent no valid HTTP answer (", 3),
    "no HTTP": (b"SSH-2.0\r\n\r\n", "sent no valid HTTP answer (", 3),
    "half an answer": (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n[1", "sent no valid HTTP answer (", 3),
    "no gzip": ((200, {"Content-Encoding": "gzip"}, b"[1, 2]"), "sent no valid HTTP answer (", 3),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_failing_server_is_reported_with_its_answer(scripted, name):
    """Batches of two; only the one with rows 3 and 4 fails."""
    answer, message, attempts = FAULTS[name]

    def mixed(number, body):
        return answer if body["prompts"][0] == "p2 " else lengths(number, body)

    server = scripted(mixed)
    with pytest.raises(RewardError) as caught:
        asks(server, batch_size=2).score(batch(["x"] * 5))
    text = str(caught.value)
    assert text.startswith(f"rows.jsonl:5 and 1 more row: reward http, responses 3 to 4: {server.url} ")
    assert message in text
    assert "\n" not in text
    assert len(text) < 600
    assert sum(r["prompts"][0] == "p2 " for r in server.requests) == attempts
    zero = asks(server, batch_size=2, on_error="zero")
    scores = total_score([zero], batch(["x"] * 5))
    assert scores.total.tolist() == [4.0, 4.0, 0.0, 0.0, 4.0]
    assert scores.errors == {"http": 2}
    assert message.split(". Check")[0] in zero.report()


@pytest.mark.parametrize("value", ["NaN", "Infinity", "null", '"1.0"', "[1.0]", "1e39", "{}"])
def test_a_non_finite_reward_names_its_row(scripted, value):
    server = scripted(lambda *_: (200, {}, f'{{"rewards": [1.0, {value}, 2.0]}}'.encode()))
    said = r"rows.jsonl:4: reward http, response 2: .*/get_reward returned .*, it must be a finite number"
    with pytest.raises(RewardError, match=said):
        asks(server).score(batch(["x"] * 3))
    scores = total_score([asks(server, on_error="zero")], batch(["x"] * 3))
    assert scores.total.tolist() == [1.0, 0.0, 2.0]
    assert scores.errors == {"http": 1}


def drip(connection, content=b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"):
    """Send a byte every 50 ms until the client disconnects."""
    try:
        for byte in itertools.chain(content, itertools.repeat(ord(" "))):
            connection.sendall(bytes([byte]))
            time.sleep(0.05)
    except OSError:
        connection.close()


@pytest.mark.parametrize("behaviour", ["silent", "drips"])
def test_a_server_that_hangs_times_out(behaviour):
    """The time limit covers the whole request: without one, each of these servers would hold the client forever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        open_ones = []

        def accept():
            while True:
                try:
                    open_ones.append(listener.accept()[0])
                except OSError:
                    return
                if behaviour == "drips":
                    threading.Thread(target=drip, args=(open_ones[-1],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        source = source_of({"type": "http", "url": url, "timeout_s": 0.3, "retries": 1, "backoff_s": 0.01})
        started = time.monotonic()
        with pytest.raises(RewardError, match=r"did not answer within 0.3 s \(timeout_s\), after 2 attempts"):
            source.score(batch(["x"]))
        assert time.monotonic() - started >= 0.6
        for connection in open_ones:
            connection.close()


def test_an_unreachable_server_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    source = source_of({"type": "http", "url": f"http://127.0.0.1:{port}/x?name=secret", "retries": 0})
    with pytest.raises(RewardError, match=rf"http://127.0.0.1:{port}/x cannot be reached") as caught:
        source.score(batch(["x"]))
    assert "secret" not in str(caught.value)
    assert ", after" not in str(caught.value)


@pytest.mark.parametrize("layers", [0, 2])
def test_an_oversized_answer_is_refused(scripted, monkeypatch, layers):
    """The bytes after each layer of compression are counted."""
    monkeypatch.setattr(http_client, "MAX_ANSWER_BYTES", 1_000_000)
    answer = b"[" + b"1," * 2_000_000 + b"1]"
    for _ in range(layers):
        answer = gzip.compress(answer, 1)
    server = scripted(lambda *_: (200, {"Content-Encoding": ", ".join(["gzip"] * layers)} if layers else {}, answer))
    with pytest.raises(RewardError, match="answered 200 with more than 1000000 bytes"):
        asks(server).score(batch(["x"]))


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(scripted, status):
    other = scripted(lengths)
    server = scripted(lambda *_: (status, {"Location": f"{other.url}?key=secret"}, b""))
    said = rf"answered {status}: '', a redirect to {other.url}. Redirects are not foll"
    with pytest.raises(RewardError, match=said) as caught:
        asks(server).score(batch(["x"]))
    assert other.requests == []
    assert "secret" not in str(caught.value)


def test_the_token_comes_from_the_environment_and_is_never_shown(
    scripted, monkeypatch, run_stage, make_model, tmp_path
):
    monkeypatch.setenv("RLHF_TEST_TOKEN", " t0ken-k7j1\n")
    server = scripted(lengths)
    rewards = [{"type": "http", "url": server.url, "api_key_env": "RLHF_TEST_TOKEN"}]
    policy = {"path": str(make_model("llama"))}
    run_stage("ppo", tmp_path, policy=policy, rewards=rewards, ppo={"num_iterations": 1})
    assert {h["Authorization"] for h in server.headers} == {"Bearer t0ken-k7j1"}
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 8
    assert not [path for path in written if b"t0ken-k7j1" in path.read_bytes()]
    echoes = scripted(lambda *_: (403, {}, b"no such token: t0ken-k7j1"))
    source = asks(echoes, api_key_env="RLHF_TEST_TOKEN")
    assert "k7j1" not in repr(source)
    with pytest.raises(RewardError, match=r"no such token: \*\*\*") as caught:
        source.score(batch(["x"]))
    assert "k7j1" not in str(caught.value)
    for value in ("", "two words", "ünicode", "a\x07b"):
        monkeypatch.setenv("RLHF_TEST_TOKEN", value)
        with pytest.raises(ConfigError, match="RLHF_TEST_TOKEN") as refused:
            asks(server, api_key_env="RLHF_TEST_TOKEN")
        assert not value or value not in str(refused.value)


ECHOES = {
    "a reward": (200, {}, {"rewards": ["Bearer t0ken/k7j1+"]}),
    "a reward, cut in the middle": (200, {}, {"rewards": ["x" * 193 + "t0ken/k7j1+"]}),
    "a list": (200, {}, {"rewards": [["t0ken/k7j1+"]]}),
    "JSON with escapes": (200, {}, b'{"error": "t0ken\\/k7j1+"}'),
    "the path of a redirect": (302, {"Location": "/login/t0ken%2Fk7j1%2B/x"}, b""),
    "the path in lower case": (302, {"Location": "/login/t0ken%2fk7j1%2b/x"}, b""),
    "a header": (200, {"Bad\x01": "t0ken/k7j1+"}, b""),
    "the encoding": (200, {"Content-Encoding": "t0ken/k7j1+"}, b"{}"),
    "the reason": b"HTTP/1.1 t0ken/k7j1+ OK\r\n\r\n",
}


@pytest.mark.parametrize("name", ECHOES)
def test_a_token_that_the_server_repeats_is_in_no_message(scripted, monkeypatch, name):
    monkeypatch.setenv("RLHF_TEST_TOKEN", "t0ken/k7j1+")
    server = scripted(lambda *_: ECHOES[name])
    stops, zero = (
        asks(server, api_key_env="RLHF_TEST_TOKEN", on_error=on_error, retries=0) for on_error in ("stop", "zero")
    )
    with pytest.raises(RewardError) as caught:
        stops.score(batch(["x"]))
    zero.score(batch(["x"]))
    for text in (f"{caught.value} {caught.value.__cause__}", zero.report()):
        assert "get_reward" in text
        assert "k7j1" not in text
        assert "t0ken" not in text


@pytest.mark.parametrize(
    "query",
    ["key=s3cret", "api_key=s3cret", "accessToken=s3cret", "a=1&X-Amz-Signature=s3cret", "code=s3cret", "TOKEN="],
)
def test_a_secret_in_the_query_of_a_url_is_refused_and_not_shown(query):
    """config.yaml and the manifest would keep it."""
    with pytest.raises(ValidationError, match="its query contains a parameter like") as caught:
        source_of({"type": "http", "url": f"https://example.org/score?{query}"})
    assert "s3cret" not in caught.value.errors()[0]["msg"]


def test_a_pause_is_printed_once_and_a_signal_ends_it(scripted, capsys, monkeypatch):
    """The server asks for ten minutes. `on_error: zero` must not turn an interrupted wait into a score."""
    looks = itertools.count()

    def stop_at_the_ninth_look():
        if next(looks) == 8:  # each of the four requests has looked at least once, unless an answer is very late
            os.kill(os.getpid(), signal.SIGTERM)
        return stop_requested()

    monkeypatch.setattr(endpoint, "stop_requested", stop_at_the_ninth_look)
    requests, server = StopRequests(), scripted(lambda *_: (429, {"Retry-After": "600"}, b""))
    source = asks(server, batch_size=1, concurrency=4, on_error="zero")
    requests.install()
    try:
        with pytest.raises(RewardError, match=r"answered 429: ''; stopped in a pause of \d+ s"):
            source.score(batch(["x"] * 4))
    finally:
        requests.remove()
    assert requests.received == signal.SIGTERM
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"{server.url} answered 429: ''; trying again in 600 s"
    assert source.num_errors == 0


def test_a_signal_during_a_pause_saves_the_run(scripted, make_model, tmp_path, write_config):
    """The server answers the first iteration, and then asks for ten minutes."""
    calls = itertools.count()

    def play(number, body):
        if next(calls) < 2:
            return lengths(number, body)
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        return 503, {"Retry-After": "600"}, b""

    reward = {"type": "http", "url": scripted(play).url}
    changes = {"policy": {"path": str(make_model("llama"))}, "ppo": {"num_iterations": 4}, "rewards": [reward]}
    changes["data"] = {"test": None, "test_fraction": 0.0}
    config = write_config("ppo", tmp_path, **changes)
    result = CliRunner().invoke(app, ["ppo", "--config", str(config), "--quiet"])
    assert result.exit_code == 143, result.output
    assert "SIGTERM" in result.stderr
    assert "stopped in a pause" in result.stderr
    assert "To resume: " in result.stderr
    assert last_step(tmp_path, "ppo") == 2


def test_an_unencrypted_token_is_a_note(monkeypatch):
    monkeypatch.setenv("RLHF_TEST_TOKEN", "x")
    known = {"http://example.org/s?name=hidden": True, "https://example.org/s": False, "http://127.0.0.1:1/": False}
    for url, said in known.items():
        reward = TypeAdapter(Reward).validate_python({"type": "http", "url": url, "api_key_env": "RLHF_TEST_TOKEN"})
        notes = load_rewards(named_rewards([reward], "none", 0.1), "none", None, CPU, "float32")[1]
        assert bool(notes) == said
        assert "hidden" not in str(notes)


def test_proxies_are_not_used_for_this_machine(scripted, monkeypatch):
    proxy, server = scripted(lambda *_: (200, {}, [99.0])), scripted(lengths)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy.url.removesuffix("/get_reward"))
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert asks(server).score(batch(["x"])).tolist() == [4.0]
    assert proxy.requests == []


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:1", "Using SOCKS proxy, but the 'socksio' package is not installed"),
        ("ALL_PROXY", "ftp://127.0.0.1", "Unknown scheme for proxy URL"),
        ("SSL_CERT_FILE", "/missing", "No such file or directory"),
    ],
)
def test_an_environment_that_no_client_can_use_is_one_line(name, value, found, monkeypatch):
    monkeypatch.setenv(name, value)
    source = source_of({"type": "http", "url": "https://example.org/get_reward"})
    with pytest.raises(ConfigError, match=rf"of the environment cannot be used: .*{found}[^\n]*\. Change or unset it$"):
        source.score(batch(["x"]))


def test_a_row_without_the_label_is_named_before_training(scripted):
    source = asks(scripted(lengths), label_column="answer")
    with pytest.raises(DataError, match="x:2: reward http: its row has no column 'answer'; it has n"):
        check_rows([source], [("x:1", {"answer": 1}), ("x:2", {"n": 1})])
