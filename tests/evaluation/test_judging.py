"""`rlhf eval --judge`: a judge model over HTTP, asked in both orders; ties, unclear answers and failures."""

import io

import pytest
from rich.console import Console

from rlhf_cli.commands.eval import EvalJudgeOptions, ServerJudge, judge_of
from rlhf_cli.errors import ConfigError, RunError
from rlhf_cli.evaluation.evaluate import judge_replies
from rlhf_cli.evaluation.figures import Sentences
from rlhf_cli.report.progress import Display
from support.servers import KEY, ChatServer, completion


def report(number=12):
    """PPO says "good" in two of three replies; the others are equal."""
    rows = [
        {
            "prompt": f"<user> {i}",
            "question": f"q{i}",
            "sft": {"reply": "bad thing", "length": 5},
            "ppo": {"reply": "bad thing" if i % 3 == 0 else "good thing", "length": 5 + i % 2},
        }
        for i in range(number)
    ]
    return {"replies": rows, "win_rate": {"score": {"value": 1.0}}, "sentences": ["first"]}


def verdict(text):
    """A judge who prefers the reply with the word "good"."""
    return "A" if text.index("good") < text.index("bad thing") else "B"


@pytest.fixture
def judged(monkeypatch):
    """A function: reply of the server to a question's text, options -> (report, requests of the server)."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def run(answer, **options):
        with ChatServer(lambda call: (200, {}, completion(answer(call.text)))) as server:
            judge = ServerJudge(EvalJudgeOptions(**options), server.url, "wise")
            found = report()
            display = Display("eval", quiet=False, console=Console(file=io.StringIO(), width=200))
            judge_replies(found, judge.name, judge.compare, Sentences(display))
            return found, server

    return run


def test_the_better_reply_wins_in_both_orders_and_equal_texts_are_ties(judged):
    found, server = judged(verdict)
    rates = found["win_rate"]
    assert rates["judge"]["value"] == pytest.approx((8 + 4 * 0.5) / 12)
    assert rates["judge_ties"]["value"] == pytest.approx(4 / 12)
    assert rates["judge_first_position"]["value"] == 0.5
    assert rates["judge"]["low"] < rates["judge"]["value"] < rates["judge"]["high"]
    assert "judge_equal_length" in rates
    assert "score" in rates
    assert [row["judge"] for row in found["replies"]] == [0.5, 1, 1] * 4
    assert len(server.requests) == 2 * 8, "equal texts are not asked"
    assert {body["temperature"] for body in server.requests} == {0}
    contents = [body["messages"][0]["content"] for body in server.requests]  # asked at the same time, in any order
    assert sum("q1\n" in content for content in contents) == 2
    assert not any("<user>" in content for content in contents)
    assert found["sentences"][0] == "first"
    assert "The judge wise prefers PPO's reply in 83.3% of 12 prompts" in found["sentences"][1]


def test_a_judge_that_always_takes_the_first_decides_nothing(judged):
    found, _ = judged(lambda _: "A")
    rates = found["win_rate"]
    assert (rates["judge"]["value"], rates["judge_ties"]["value"]) == (0.5, 1)
    first = rates["judge_first_position"]
    assert (first["value"], first["rows"]) == (1, 8), "a pair counts once"


def test_pairs_without_a_clear_answer_are_left_out_and_counted(judged):
    found, server = judged(lambda text: "hm" if "q1\n" in text else verdict(text))
    assert found["judge"] == {"name": "wise", "pairs": 11, "unclear": 1}
    assert "judge" not in found["replies"][1]
    assert "gave no clear answer on 1 of 12 prompts" in found["sentences"][2]
    assert len(server.requests) == 2 * 8 + 2 * 2, "an unclear answer is asked three times"


def test_a_judge_without_any_clear_answer_ends_in_one_line(judged):
    with pytest.raises(RunError, match=r"wise gave no clear answer on any of 8 pairs\. Raise --judge-tokens"):
        judged(lambda _: "A or B", attempts=1)


def test_the_question_comes_from_the_template(judged, tmp_path):
    path = tmp_path / "ask.txt"
    path.write_text("{prompt}|{a}|{b}", encoding="utf-8")
    _, server = judged(verdict, template=path)
    texts = {body["messages"][0]["content"] for body in server.requests}
    assert "q1|good thing|bad thing" in texts
    assert "q1|bad thing|good thing" in texts
    path.write_text("{prompt}|{a}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--judge-template: .* lacks \{b\}"):
        judged(verdict, template=path)


def test_a_server_that_refuses_ends_in_one_line_without_the_key(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("MY_KEY", KEY)
    with ChatServer(lambda _: (401, {}, f"wrong key {KEY}".encode())) as server:
        judge = ServerJudge(EvalJudgeOptions(key_env="MY_KEY"), server.url, "wise")
        with pytest.raises(RunError, match=r"--judge: http://127.* answered 401.*Check the key in \$MY_KEY") as error:
            judge.compare([("p", "a", "b")])
        assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    assert KEY not in str(error.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"url": "http://127.0.0.1:1"}, "--judge-model: is missing"),
        ({"model": "wise"}, "--judge: is missing"),
        ({"max_new_tokens": 99}, "--judge: is missing"),
        ({"url": "ftp://x", "model": "wise"}, "--judge: must be http"),
        ({"url": "http://u:p@x", "model": "wise"}, "--judge: contains a user .* Use --judge-key-env NAME"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_measured(options, says):
    with pytest.raises(ConfigError, match=says):
        judge_of(EvalJudgeOptions(**options))
    assert judge_of(EvalJudgeOptions()) is None, "without a judge nothing is asked"
