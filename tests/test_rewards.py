"""Sources of rewards: rules held against numbers worked by hand, functions, models with a text of their own, and an
endpoint that misbehaves in every way. What is real runs for real: the servers listen, the runs are runs of PPO."""

from __future__ import annotations

import doctest
import http.server
import importlib
import inspect
import itertools
import json
import math
import random
import re
import socket
import threading
import time
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import yaml
from conftest import merged, read_jsonl, sentence, write_jsonl
from pydantic import TypeAdapter, ValidationError
from test_stages import encoder, word_piece
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_cli import http_client
from rlhf_cli.config.loader import load_config
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.rewards import ModelReward, Reward, reward_names
from rlhf_cli.data.records import Message
from rlhf_cli.errors import ConfigError, DataError, RewardError
from rlhf_cli.models.load import load_reward_model, load_tokenizer, save
from rlhf_cli.rewards import models, rules
from rlhf_cli.rewards.base import Samples
from rlhf_cli.rewards.functions import call, named_numbers
from rlhf_cli.rewards.models import encode_whole, load_reward_source, score_sequences
from rlhf_cli.rewards.sources import check_rows, load_rewards, total_score

__all__ = ["word_piece"]
FIXTURES = Path(__file__).parent / "fixtures" / "rewards"
CPU = torch.device("cpu")


def batch(responses, rows=None, *, ended=True, ids=None, prompts=None, messages=()):
    """Responses as a source sees them; prompt i is `p<i>` and of row i + 3 of a file."""
    several = range(len(responses))
    return Samples(
        prompts or [f"p{i} " for i in several],
        list(responses),
        [[7] for _ in several],
        ids or [[1] * (len(r.split()) + 1) for r in responses],
        [ended] * len(responses),
        rows or [{"n": i} for i in several],
        where=[f"rows.jsonl:{i + 3}" for i in several],
        messages=list(messages),
    )


def source_of(reward, **settings):
    """The one source that a mapping of a config gives."""
    (source,), _ = load_rewards(
        [TypeAdapter(Reward).validate_python({**reward, **settings})], "none", None, CPU, "float32"
    )
    return source


def scores_of(reward, responses, rows=None, **settings):
    return total_score([source_of(reward, **settings)], batch(responses, rows)).total.tolist()


# ------------------------------------------------------------------------------------------ examples


@pytest.mark.parametrize("module", ["base", "rules", "models", "endpoint", "functions"])
def test_the_examples_of_the_docstrings_run(module):
    found = importlib.import_module(f"rlhf_cli.rewards.{module}")
    failed, _ = doctest.testmod(found)
    assert not failed


def test_every_rule_has_an_example():
    functions = [f for f in vars(rules).values() if inspect.isfunction(f) and f.__module__ == rules.__name__]
    public = [f for f in functions if not f.__name__.startswith("_") and f is not rules.units]
    assert len(public) > 8
    assert [f.__name__ for f in public if ">>>" not in (f.__doc__ or "")] == []


# --------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        # "", "one", "a b c", "ééé ü": words 0 1 3 2, characters 0 3 5 5, tokens (EOS is one) 1 2 4 3.
        ({"target": 2, "unit": "words"}, [-2.0, -1.0, -1.0, 0.0]),
        ({"target": 0, "unit": "words"}, [0.0, -1.0, -3.0, -2.0]),
        ({"min": 4, "unit": "characters"}, [-4.0, -1.0, 0.0, 0.0]),
        ({"max": 2, "unit": "tokens"}, [0.0, 0.0, -2.0, -1.0]),
        ({"min": 2, "max": 3}, [-1.0, 0.0, -1.0, 0.0]),
    ],
)
def test_length_costs_the_distance_to_a_range(settings, wanted):
    assert scores_of({"type": "length"}, ["", "one", "a b c", "ééé ü"], **settings) == wanted


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"pattern": "ab"}, [1.0, 1.0, 0.0, 0.0]),
        ({"pattern": "ab", "full": True}, [1.0, 0.0, 0.0, 0.0]),
        ({"pattern": "(?i)^AB$"}, [1.0, 0.0, 0.0, 1.0]),
        ({"pattern": "(?s)x.*b"}, [0.0, 1.0, 0.0, 0.0]),
        ({"pattern": "x.*b"}, [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_regex_is_one_where_it_is_found(settings, wanted):
    assert scores_of({"type": "regex"}, ["ab", "x\ncab", "", "Ab"], **settings) == wanted


def test_a_pattern_that_would_take_years_is_given_up():
    """(a|aa)+$ has more than 10^20 ways through 100 a's."""
    reward = {"type": "regex", "pattern": "(a|aa)+$", "timeout_s": 0.2}
    texts = ["aa", "a" * 100 + "b"]
    started = time.monotonic()
    with pytest.raises(RewardError, match=r"rows.jsonl:4: reward regex, response 2: its pattern took longer"):
        scores_of(reward, texts)
    scores = total_score([source_of(reward, on_error="zero")], batch(texts))
    assert scores.total.tolist() == [1.0, 0.0]
    assert scores.errors == {"regex": 1}
    assert time.monotonic() - started < 5
    answer = {"type": "answer_match", "column": "a", "pattern": "(a|aa)+$", "timeout_s": 0.2, "on_error": "zero"}
    assert total_score([source_of(answer)], batch(texts[1:], [{"a": 1}])).errors == {"answer_match": 1}


@pytest.mark.parametrize("row", read_jsonl(FIXTURES / "answers.jsonl"), ids=lambda row: row["response"][:30])
def test_numeric_answers(row):
    reward = {"type": "answer_match", "column": "truth"}
    assert scores_of(reward, [row["response"]], [row]) == [float(row["right"])]


def test_numbers_are_read_as_they_are_written():
    """Random fractions in each of the ways that people write numbers, inside of a sentence."""
    rng = random.Random(0)
    for _ in range(500):
        whole, cents = rng.randint(0, 10**9), rng.randint(0, 99)
        negative, divisor = rng.random() < 0.5, rng.randint(1, 99)
        sign = -1 if negative else 1
        minus = rng.choice(["-", "−"]) if negative else ""
        currency = rng.choice(["", "$", "€", "£", "¥"])
        written = {
            f"{minus}{currency}{whole:,}.{cents:02}": Fraction(whole * 100 + cents, 100),
            f"{currency}{minus}{whole}.{cents:02}": Fraction(whole * 100 + cents, 100),
            f"{minus}{whole}/{divisor}": Fraction(whole, divisor),
            f"{minus}{currency}{whole}": Fraction(whole),
        }
        for text, value in written.items():
            for sentence_of in (f"12 and 7: {text}.", f"so {text}", f"= {text} apples!", f"3 #### {text}\n9"):
                assert rules.numeric_answer(sentence_of) == sign * value, sentence_of


def test_a_number_without_end_costs_nothing():
    started = time.monotonic()
    for text in ("9" * 200_000, "1," * 100_000, "9" * 200_000 + "e999", "-" * 100_000 + "1", "1/" * 50_000):
        rules.numeric_answer(text)
        rules.is_json(text)
    assert rules.last_number("9" * 5000) is None
    assert rules.is_json("9" * 5000)
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"mode": "exact"}, [1.0, 1.0, 0.0, 0.0]),
        ({"mode": "exact", "pattern": r"is (\w+)"}, [0.0, 0.0, 1.0, 0.0]),
        ({"mode": "exact", "pattern": r"\b[A-Z]\w+"}, [1.0, 0.0, 1.0, 0.0]),
    ],
)
def test_exact_answers(settings, wanted):
    texts = [" Paris\n", "Nice? No. #### Paris \nBye", "It is Paris, it is Paris", "paris"]
    rows = [{"city": truth} for truth in ("Paris", "In France. #### Paris", " Paris ", "Paris")]
    assert scores_of({"type": "answer_match", "column": "city"}, texts, rows, **settings) == wanted


def test_the_last_match_of_a_pattern_is_the_answer():
    reward = {"type": "answer_match", "column": "a", "pattern": r"\\boxed\{([^}]*)\}"}
    texts = [r"\boxed{3} no, \boxed{4,000} and 7", r"\boxed{}", "4000"]
    assert scores_of(reward, texts, [{"a": 4000}] * 3) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"b": 1}, "its row has no column 'a'; it has b"),
        ({"a": None}, "'a' is None, it must be a number or text"),
        ({"a": True}, "'a' is True, it must be a number or text"),
        ({"a": [1]}, r"'a' is \[1\]"),
        ({"a": "none"}, "'a' is 'none', it must contain a number"),
        ({"a": math.nan}, "'a' is nan, it must contain a number"),
    ],
)
def test_a_row_without_the_truth_is_named(row, message):
    reward = {"type": "answer_match", "column": "a"}
    with pytest.raises(RewardError, match=f"rows.jsonl:4: reward answer_match, response 2: {message}"):
        scores_of(reward, ["1", "1"], [{"a": 1}, row])
    with pytest.raises(DataError, match=f"x:9: reward answer_match: {message}"):
        check_rows([source_of(reward)], [("x:8", {"a": "#### 1"}), ("x:9", row)])
    zero = source_of(reward, on_error="zero")
    check_rows([zero], [("x:9", row)])
    scores = total_score([zero], batch(["1", "1"], [{"a": 1}, row]))
    assert scores.total.tolist() == [1.0, 0.0]
    assert scores.errors == {"answer_match": 1}
    assert "1 scores failed and counted as 0.0. First failure: rows.jsonl:4: reward answer_match" in zero.report()


def slow_repetition(words, n):
    """Each n-gram is looked for among all that came before it."""
    grams = [words[i : i + n] for i in range(len(words) - n + 1)]
    seen = sum(any(grams[i] == grams[j] for j in range(i)) for i in range(len(grams)))
    return -seen / len(grams) if grams else 0.0


def test_repetition_is_the_share_of_n_grams_that_came_before():
    texts = ["a b a b a", "a a a a", "a b c d", "a", ""]
    # ab ba ab ba; aa aa aa; ab bc cd; none; none
    assert scores_of({"type": "repetition", "n": 2}, texts) == pytest.approx([-1 / 2, -2 / 3, 0.0, 0.0, 0.0])
    rng = random.Random(1)
    texts = [" ".join(rng.choices("abc", k=rng.randint(0, 30))) for _ in range(50)]
    for n in (1, 2, 3):
        wanted = [slow_repetition(text.split(), n) for text in texts]
        assert scores_of({"type": "repetition", "n": n}, texts) == pytest.approx(wanted, abs=1e-6)
    ids = [[1, 2, 1, 2, 3]]
    scores = total_score([source_of({"type": "repetition", "n": 2, "unit": "tokens"})], batch(["x"], ids=ids))
    assert scores.total.tolist() == [-0.25]


@pytest.mark.parametrize(
    ("text", "valid", "has_a"),
    [
        ('{"a": 1}', 1, 1), (' {"a": {"b": [1, 2.5e3, null]}}\n', 1, 1), ('{"b": {"a": 1}}', 1, 0), ("[1]", 1, 0),
        ('["a"]', 1, 0), ('"a"', 1, 0), ("7", 1, 0), ("", 0, 0), ("{'a': 1}", 0, 0), ('{"a": 1,}', 0, 0),
        ('{"a": NaN}', 0, 0), ("-Infinity", 0, 0), ('```json\n{"a": 1}\n```', 0, 0), ('{"a": 1} {"a": 1}', 0, 0),
        ("[" * 100_000, 0, 0), ('{"a":' * 50_000, 0, 0), ('{"a": "\\ud800"}', 1, 1), ("\x00", 0, 0),
    ],
)  # fmt: skip
def test_json_is_valid_or_not(text, valid, has_a):
    assert scores_of({"type": "json"}, [text]) == [float(valid)]
    assert scores_of({"type": "json", "required": ["a"]}, [text]) == [float(has_a)]


# -------------------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"type": "length"}, "give target, or min and max"),
        ({"type": "length", "target": 1, "max": 2}, "give target, or min and max"),
        ({"type": "length", "min": 3, "max": 2}, "min 3 is above max 2"),
        ({"type": "length", "target": -1}, "greater than or equal to 0"),
        ({"type": "regex", "pattern": "(a"}, "no regular expression"),
        ({"type": "regex", "pattern": ""}, "at least 1 character"),
        ({"type": "repetition", "n": 0}, "greater than 0"),
        ({"type": "answer_match", "column": "a", "pattern": "[a"}, "no regular expression"),
        ({"type": "reward_model", "template": "{prompt}"}, "must be `chat` or hold"),
        ({"type": "reward_model", "template": "{response}"}, r"template has no \{prompt\}, and reads is prompt_and"),
        ({"type": "reward_model", "template": "chat", "reads": "response"}, "a place for the prompt, and reads is"),
        ({"type": "function", "function": "f.py:f", "concurrency": 2}, "concurrency does nothing without batch_size"),
        ({"type": "http", "url": "localhost:5000"}, "must be http"),
        ({"type": "http", "url": "file:///etc/passwd"}, "must be http"),
        ({"type": "http", "url": "http://:5000/"}, "must be http"),
        ({"type": "http", "url": "http://a:70000/"}, "must be http"),
        ({"type": "http", "url": "http://a/\nHost: b"}, "must be http"),
        ({"type": "http", "url": "http://user@a/"}, "Take api_key_env"),
        ({"type": "http", "url": "http://a/", "api_key_env": "a key"}, "should match pattern"),
        ({"type": "json", "name": "two words"}, "should match pattern"),
        ({"type": "json", "on_error": "skip"}, "'stop' or 'zero'"),
    ],
)
def test_what_a_config_may_not_say(reward, message):
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(Reward).validate_python(reward)


def test_a_password_in_a_url_is_refused_and_not_shown(write_config, tmp_path):
    rewards = [{"type": "http", "url": "https://me:hunter2@host/score"}]
    with pytest.raises(ConfigError, match="would stand in logs and artifacts") as caught:
        load_config(write_config("ppo", tmp_path, rewards=rewards), PPOConfig)
    assert "hunter2" not in str(caught.value)


def test_sources_have_names(write_config, tmp_path):
    def names(*rewards):
        return reward_names([TypeAdapter(Reward).validate_python(r) for r in rewards])

    function = {"type": "function", "function": "a/b.py:judge"}
    assert names(function) == ["judge"]
    assert names({"type": "json"}, function, {"type": "json", "name": "form"}) == ["json_0", "judge_1", "form"]
    for clash in (["a", "a"], ["a", "a_errors"], ["json_1", None]):
        rewards = [{"type": "json", "name": name} for name in clash]
        with pytest.raises(ConfigError, match="name of two figures"):
            load_config(write_config("ppo", tmp_path, rewards=rewards), PPOConfig)


# ----------------------------------------------------------------------------------------- functions


@pytest.fixture
def function(tmp_path):
    """A function: the body of one of the user's, plain or async, to the mapping of a config."""

    def write(body, *, is_async=False, **settings):
        path = tmp_path / f"f{len(list(tmp_path.glob('f*.py')))}.py"
        head = "import asyncio, math, time\nCALLS, NOW, MOST = [], [], []\n"
        define = f"{'async ' if is_async else ''}def f(prompts, responses, rows):\n"
        path.write_text(head + define + "".join(f"    {line}\n" for line in body.splitlines()), encoding="utf-8")
        return {"type": "function", "function": f"{path}:f", **settings}

    return write


def test_a_function_is_called_in_pieces(function):
    body = "CALLS.append((prompts, responses, rows))\nreturn [row['n'] + 0.5 for row in rows]"
    whole, pieces = source_of(function(body)), source_of(function(body, batch_size=3))
    judged = batch(["a", "b", "c", "d", "e", "f", "g"])
    assert whole.score(judged).tolist() == pieces.score(judged).tolist() == [i + 0.5 for i in range(7)]
    calls = pieces.function.__globals__["CALLS"]
    assert [call[1] for call in calls] == [["a", "b", "c"], ["d", "e", "f"], ["g"]]
    assert [call[0] for call in calls] == [["p0 ", "p1 ", "p2 "], ["p3 ", "p4 ", "p5 "], ["p6 "]]
    assert calls[2][2] == [{"n": 6, "ended": True}]
    assert len(whole.function.__globals__["CALLS"]) == 1


def test_an_async_function_has_so_many_calls_at_once_and_one_event_loop(function):
    body = (
        "NOW.append(1); MOST.append(len(NOW)); CALLS.append(asyncio.get_running_loop())\n"
        "await asyncio.sleep(0.02 * (3 - rows[0]['n'] % 4))\n"  # the first piece is the last to return
        "NOW.pop()\n"
        "return [row['n'] for row in rows]"
    )
    source = source_of(function(body, is_async=True, batch_size=2, concurrency=3))
    for _ in range(2):
        assert source.score(batch(["x"] * 14)).tolist() == list(range(14))
    seen = source.function.__globals__
    assert max(seen["MOST"]) == 3
    assert len(seen["MOST"]) == 14
    assert len(set(map(id, seen["CALLS"]))) == 1, "a client that it opens stays usable"
    one_call = source_of(function(body, is_async=True))
    one_call.score(batch(["x"] * 14))
    assert len(one_call.function.__globals__["MOST"]) == 1


BAD_VALUES = {
    "nan": "float('nan')",
    "inf": "-math.inf",
    "None": "None",
    "text": "'1.0'",
    "list": "[1.0]",
    "too large for float32": "1e39",
}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("name", BAD_VALUES)
def test_a_value_that_is_no_number_names_the_row(function, name, is_async):
    body = f"return [{BAD_VALUES[name]} if row['n'] == 4 else 1.0 for row in rows]"
    stops = source_of(function(body, is_async=is_async, batch_size=2))
    with pytest.raises(RewardError, match=r"rows.jsonl:7: reward function f, response 5: returned .*, it must be"):
        stops.score(batch(["x"] * 7))
    counts = source_of(function(body, is_async=is_async, batch_size=2, on_error="zero"))
    scores = total_score([counts], batch(["x"] * 7))
    assert scores.total.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    assert scores.errors == {"f": 1}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise KeyError('answer')", r"raised KeyError: 'answer' \(f0.py:4\)"),
        ("return [1.0]", "returned 1 values for 2 responses"),
        ("return None", "raised TypeError: 'NoneType' object is not iterable"),
        ("raise ValueError('one\\ntwo ' + 'x' * 999)", r"raised ValueError: one two x{190,200}\.\.\. \(f0.py:4\)"),
    ],
)
def test_a_piece_that_fails_is_that_piece_alone(function, fault, message, is_async):
    body = f"if rows[0]['n'] == 2: {fault}\nreturn [1.0 for _ in rows]"
    settings = {"is_async": is_async, "batch_size": 2}
    with pytest.raises(RewardError) as caught:
        source_of(function(body, **settings)).score(batch(["x"] * 5))
    assert re.search(
        rf"^rows.jsonl:5 and 1 more rows: reward function f, responses 3 to 4: {message}", str(caught.value)
    )
    assert "\n" not in str(caught.value)
    source = source_of(function(body, on_error="zero", **settings))
    scores = total_score([source], batch(["x"] * 5))
    assert scores.total.tolist() == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert scores.errors == {"f": 2}
    assert total_score([source], batch(["x"] * 5)).errors == {"f": 2}, "of this batch"
    assert source.report().startswith("f: 4 scores failed and counted as 0.0. First failure: rows.jsonl:5 and 1 more")


def test_an_async_call_that_takes_too_long_is_given_up(function):
    body = "await asyncio.sleep(30 if rows[0]['n'] == 2 else 0)\nreturn [1.0 for _ in rows]"
    settings = {"is_async": True, "batch_size": 2, "timeout_s": 0.2}
    started = time.monotonic()
    with pytest.raises(RewardError, match=r"responses 3 to 4: did not return within 0.2 s \(timeout_s\)"):
        source_of(function(body, **settings)).score(batch(["x"] * 5))
    scores = total_score([source_of(function(body, on_error="zero", **settings))], batch(["x"] * 5))
    assert scores.total.tolist() == [1.0, 1.0, 0.0, 0.0, 1.0]
    own = "raise TimeoutError('mine')"
    with pytest.raises(RewardError, match="raised TimeoutError: mine"):
        source_of(function(own, **settings)).score(batch(["x"]))
    assert time.monotonic() - started < 10


def test_the_first_failure_stops_the_other_calls(function):
    body = "CALLS.append(1)\nawait asyncio.sleep(0 if rows[0]['n'] == 0 else 20)\nraise ValueError"
    source = source_of(function(body, is_async=True, batch_size=1, concurrency=2))
    started = time.monotonic()
    with pytest.raises(RewardError):
        source.score(batch(["x"] * 9))
    assert time.monotonic() - started < 10
    assert len(source.function.__globals__["CALLS"]) <= 3


def test_what_a_plain_function_has_no_use_for_is_refused(function):
    for key, value in (("timeout_s", 1.0), ("concurrency", 2)):
        with pytest.raises(ConfigError, match=rf"rewards.0.{key}: applies to an `async def`"):
            source_of(function("return rows", batch_size=1, **{key: value}))


def test_a_dense_reward_that_fails_counts_as_zeros(function):
    body = "return [[0.5] * (len(row['tokens']) + (row['n'] == 1)) if row['n'] != 3 else 'no' for row in rows]"
    texts = ["a b", "c", "d e f", "g", "h"]
    judged = batch(texts)
    judged = Samples(**{**vars(judged), "tokens": [["t"] * len(ids) for ids in judged.response_ids]})
    with pytest.raises(RewardError, match=r"rows.jsonl:6: reward function f, response 4: returned 'no', it must be"):
        total_score([source_of(function(body, per_token=True))], judged)
    dense = source_of(function(body, per_token=True, on_error="zero", weight=2.0))
    other = source_of({"type": "length", "target": 0, "unit": "words", "weight": 10.0, "name": "words"})
    scores = total_score([dense, other], judged)
    assert scores.dense == [[1.0] * 3, [0.0] * 2, [1.0] * 4, [0.0] * 2, [1.0] * 2]
    assert scores.each["f"].tolist() == [1.5, 0.0, 2.0, 0.0, 1.0]
    assert scores.total.tolist() == [3.0 - 20, 0.0 - 10, 4.0 - 30, 0.0 - 10, 2.0 - 10]
    assert scores.errors == {"f": 2, "words": 0}


def test_a_judge_that_fails_names_the_row(function):
    path = function("return [{'good': 1.0, 'long': None if row['n'] == 1 else 2} for row in rows]")["function"]
    from rlhf_cli.rewards.functions import load_function

    with pytest.raises(RewardError, match=r"rows.jsonl:4: reward function gold, response 2: long: returned None"):
        call("gold", load_function(path), batch(["x", "y"]), named_numbers)
    one = call("gold", load_function(path), batch(["x"]), named_numbers)
    assert one == [{"good": 1.0, "long": 2.0}]


# -------------------------------------------------------------------------------------- reward models


def own_text(example, side):
    return example["prompt"], example[side]["reply"]


TEMPLATES = {
    "none": (None, "{prompt}{response}"),
    "own": ("Q {prompt} R {response} E", "Q {own} R {response} E"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_distilbert_judges_a_llama_with_its_own_tokenizer_and_template(
    make_model, word_piece, run_stage, tmp_path, name
):
    """In a run of PPO, its scores are those that plain transformers gives for the texts."""
    template, plainly = TEMPLATES[name]
    classifier = encoder(tmp_path / "bert", word_piece)
    run_stage(
        "ppo",
        tmp_path,
        policy={"path": str(make_model("llama"))},
        rewards=[{"type": "reward_model", "path": str(tmp_path / "bert"), "template": template}],
        data={"prompt_template": "Say: {prompt} Now:"},
        ppo={"num_iterations": 1},
        num_logged_samples=8,
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bert")
    evaluation = json.loads((tmp_path / "ppo/evaluation.json").read_text())
    pairs = [(*own_text(e, side), e[side]["score"]) for e in evaluation["examples"] for side in ("sft", "ppo")]
    pairs += [(row["prompt"], row["response"], row["score"]) for row in read_jsonl(tmp_path / "ppo/samples.jsonl")]
    assert len(pairs) == 18
    for prompt, response, score in pairs:
        own = prompt.removeprefix("Say: ").removesuffix(" Now:")
        assert own != prompt
        text = plainly.replace("{prompt}", prompt).replace("{own}", own).replace("{response}", response)
        with torch.no_grad():
            wanted = classifier(**tokenizer(text, return_tensors="pt")).logits[0, 0].item()
        assert score == pytest.approx(wanted, abs=1e-5)
    assert len({round(score, 4) for *_, score in pairs}) > 5
    (row,) = read_jsonl(tmp_path / "ppo/metrics.jsonl")
    assert row["reward/reward_model_cut"] == 0


CHAT = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@pytest.fixture
def chat_model(make_model, tmp_path):
    """A directory of a decoder that judges, whose tokenizer has a chat template."""

    def make(template=CHAT):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(make_model("llama"), num_labels=1).eval()
        tokenizer = load_tokenizer(str(make_model("llama")))
        model.config.pad_token_id = tokenizer.pad_token_id
        tokenizer.chat_template = template
        save(model, tokenizer, tmp_path / "chat")
        return tmp_path / "chat"

    return make


def load_model(path, policy_tokenizer=None, **settings):
    reward = ModelReward(type="reward_model", path=str(path), **settings)
    return load_reward_source(reward, str(path), policy_tokenizer, CPU, "float32", name="rm", key="rewards.0")


def test_a_chat_template_writes_what_is_judged(chat_model, tokenizer):
    """The row's own messages where it is a conversation, else one of the user's; read at the last token."""
    path = chat_model()
    source, notes = load_model(path, tokenizer, template="chat")
    assert not source.reads_policy_tokens
    assert any("scores text with its own tokenizer" in note for note in notes)
    turns = (
        Message("system", "be late"),
        Message("user", "lamp"),
        Message("assistant", "map"),
        Message("user", "tent"),
    )
    judged = batch([" thank you", "radio"], prompts=["templated", "map is"], messages=[turns, ()])
    judged = Samples(**{**vars(judged), "own_prompts": ["lamp ... tent", "map"]})
    model = AutoModelForSequenceClassification.from_pretrained(path)
    own = AutoTokenizer.from_pretrained(path)
    wanted = []
    for messages in (
        [*[{"role": m.role, "content": m.content} for m in turns], {"role": "assistant", "content": " thank you"}],
        [{"role": "user", "content": "map"}, {"role": "assistant", "content": "radio"}],
    ):
        ids = own.apply_chat_template(messages, return_tensors="pt", return_dict=True)["input_ids"]
        with torch.no_grad():
            wanted.append(model.score(model.model(ids).last_hidden_state[0, -1]).item())
    assert source.score(judged).tolist() == pytest.approx(wanted, abs=1e-5)


def test_a_chat_template_that_refuses_a_row_is_said_of_that_row(chat_model):
    path = chat_model("{% if messages|length > 2 %}{{ raise_exception('too many turns') }}{% endif %}" + CHAT)
    turns = (Message("user", "a"), Message("assistant", "b"), Message("user", "c"))
    judged = batch(["tent", "lamp", "map"], messages=[(), turns, ()])
    with pytest.raises(
        RewardError, match=r"rows.jsonl:4: reward model rm, response 2: its chat template failed: too man"
    ):
        load_model(path, template="chat")[0].score(judged)
    scores = total_score([load_model(path, template="chat", on_error="zero")[0]], judged)
    assert scores.errors == {"rm": 1}
    assert scores.total[1] == 0.0
    assert (scores.total[[0, 2]] != 0).all()


def test_chat_without_a_chat_template_is_refused(chat_model):
    path = chat_model(None)
    with pytest.raises(ConfigError, match=r"rewards.0.template: is chat, but the tokenizer of .* has no chat template"):
        load_model(path, template="chat")


def test_a_decoder_with_a_template_reads_text_though_it_shares_the_tokenizer(chat_model, tokenizer):
    path = chat_model(None)
    assert load_model(path, tokenizer)[0].reads_policy_tokens
    source = load_model(path, tokenizer, template="A {prompt} B {response}")[0]
    assert not source.reads_policy_tokens
    model, own = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    judged = batch(["tent lamp", "{prompt} map"], prompts=["is {response}", "late"])
    found = source.score(judged).tolist()
    for text, score in zip(["A is {response} B tent lamp", "A late B {prompt} map"], found, strict=True):
        ids = [*own(text)["input_ids"], own.eos_token_id]
        with torch.no_grad():
            wanted = model.score(model.model(torch.tensor([ids])).last_hidden_state[0, -1]).item()
        assert score == pytest.approx(wanted, abs=1e-5)


def test_a_model_that_gives_no_number_is_named(chat_model):
    source = load_model(chat_model())[0]
    with torch.no_grad():
        source.model.get_input_embeddings().weight[source.tokenizer("lamp")["input_ids"][-1]] = math.nan
    judged = batch(["tent", "lamp", "map"], prompts=["", "", ""])
    with pytest.raises(RewardError, match=r"rows.jsonl:4: reward model rm, response 2: returned nan, it must be a fin"):
        source.score(judged)
    source.on_error = "zero"
    assert total_score([source], judged).errors == {"rm": 1}


# ------------------------------------------------------------------------------------------- too long


def trained_at(path, **facts):
    """A copy of a model's config with what the RM stage wrote of its training."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | facts))
    return path


def without_beginning(longest):
    """What is left of a text on the left: BOS, which stands first, and the end."""
    return lambda ids: ids if len(ids) <= longest else [ids[0], *ids[1 - longest :]]


@pytest.mark.parametrize(
    ("facts", "keeps"),
    [
        ({}, without_beginning(128)),
        ({"rlhf_max_length": 9, "rlhf_truncation": "left"}, without_beginning(9)),
        ({"rlhf_max_length": 9, "rlhf_truncation": "right"}, lambda ids: ids[:9]),
        ({"rlhf_max_length": 9, "rlhf_truncation": "drop"}, without_beginning(128)),
        ({"rlhf_max_length": 999, "rlhf_truncation": "right"}, lambda ids: ids[:128]),
    ],
)
def test_a_decoder_cuts_long_text_as_its_training_did_and_counts_it(chat_model, facts, keeps):
    """The last of 5 texts is longer than the 128 positions, two are longer than 9 tokens, one has 9 exactly."""
    path = trained_at(chat_model(None), **facts)
    words = ["tent", "tent lamp", "lamp " * 8, "map " * 9, "radio " * 140]
    own = load_tokenizer(str(path))
    assert own("tent")["input_ids"][0] == own.bos_token_id
    while len(own(words[2])["input_ids"]) + 1 != 9:
        words[2] = words[2][:-1]
    source = load_model(path)[0]
    judged = batch(words, prompts=[""] * 5)
    model = load_reward_model(str(path))
    whole = [[*own(word)["input_ids"], own.eos_token_id] for word in words]
    wanted = score_sequences(model, [keeps(ids) for ids in whole], "float32")
    scores = total_score([source], judged)
    assert scores.total.tolist() == pytest.approx(wanted.tolist(), abs=1e-5)
    num_cut = sum(keeps(ids) != ids for ids in whole)
    assert num_cut == (2 if len(keeps(whole[4])) == 9 else 1)
    assert scores.cut == {"rm": num_cut}
    assert total_score([source], batch(words[:3], prompts=[""] * 3)).cut == {"rm": 0}, "of this batch"
    side, longest = ("end" if "right" in facts.values() else "beginning"), len(keeps(whole[4]))
    assert source.report() == f"rm: cut the {side} of {num_cut} texts to the model's limit of {longest} tokens"
    if len(keeps(whole[4])) == 9:
        bare = score_sequences(model, whole[:4], "float32")
        assert (scores.total[3] - bare[3]).abs() > 1e-3, "it matters"


@pytest.mark.parametrize(
    ("facts", "keeps"),
    [
        ({}, lambda ids: ids),
        ({"rlhf_max_length": 5, "rlhf_truncation": "left"}, lambda ids: ids[-5:]),
        ({"rlhf_max_length": 5, "rlhf_truncation": "right"}, lambda ids: ids[:5]),
        ({"rlhf_max_length": 5, "rlhf_truncation": "drop"}, lambda ids: ids),
    ],
)
def test_the_policys_own_tokens_are_cut_alike(chat_model, tokenizer, facts, keeps):
    path = trained_at(chat_model(None), **facts)
    source = load_model(path, tokenizer)[0]
    ids = [[5, 6], [5, 6, 7, 8], [9, 8, 7, 6, 5, 4]]
    scores = total_score([source], batch(["x"] * 3, ids=ids))
    wanted = score_sequences(load_reward_model(str(path)), [keeps([7, *r]) for r in ids], "float32")
    assert scores.total.tolist() == pytest.approx(wanted.tolist(), abs=1e-5)
    assert scores.cut == {"rm": 1 if keeps(list(range(9))) != list(range(9)) else 0}


def test_bos_stays_where_the_beginning_is_cut():
    """As in the RM stage's own cutting."""
    from rlhf_cli.data.encode import Limits, fit

    rng = random.Random(2)
    for _ in range(200):
        ids = [rng.randint(0, 3) for _ in range(rng.randint(2, 12))]
        side, longest, bos = rng.choice(["left", "right"]), rng.randint(2, 10), rng.choice([0, None])
        trained = fit(ids, [False] * (len(ids) - 1) + [True], Limits(longest, side), bos)
        if isinstance(trained, tuple):
            assert models.cut_all([ids], longest, side, bos)[0] == [trained[0]]


@pytest.mark.parametrize(
    ("facts", "longest", "side"),
    [
        ({}, 128, "left"),
        ({"rlhf_max_length": 12, "rlhf_truncation": "left"}, 12, "left"),
        ({"rlhf_max_length": 12, "rlhf_truncation": "right"}, 12, "right"),
        ({"rlhf_max_length": 12, "rlhf_truncation": "drop"}, 128, "left"),
    ],
)
def test_an_encoder_keeps_its_special_tokens_when_it_cuts(word_piece, tmp_path, facts, longest, side):
    encoder(tmp_path, word_piece)
    trained_at(tmp_path, **facts)
    model, tokenizer = load_reward_model(str(tmp_path)), load_tokenizer(str(tmp_path))
    texts = ["tent", "lamp map " * 5, "lamp map " * 100]
    sequences, num_cut = encode_whole(model, tokenizer, texts, [True] * 3)
    for text, ids in zip(texts, sequences, strict=True):
        bare = tokenizer(text, add_special_tokens=False)["input_ids"]
        room = longest - 2
        kept = bare if len(bare) <= room else bare[-room:] if side == "left" else bare[:room]
        assert ids == [tokenizer.cls_token_id, *kept, tokenizer.sep_token_id]
    assert num_cut == sum(len(tokenizer(text)["input_ids"]) > longest for text in texts)


# ------------------------------------------------------------------------------------------ endpoints


class Scripted:
    """A server that does what a test says: `play(number of the request, its body)` is (status, headers, body), or
    bytes that are sent as they are, or None for a connection that is closed."""

    def __init__(self, play):
        self.requests, self.headers, self.paths, self.times, self.play = [], [], [], [], play
        self.now, self.most, self.lock = 0, 0, threading.Lock()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    number = len(outer.requests)
                    outer.requests.append(body)
                    outer.headers.append(dict(self.headers))
                    outer.paths.append(self.path)
                    outer.times.append(time.monotonic())
                    outer.now += 1
                    outer.most = max(outer.most, outer.now)
                answer = outer.play(number, body)
                with outer.lock:
                    outer.now -= 1
                if isinstance(answer, tuple):
                    status, headers, content = answer
                    content = content if isinstance(content, bytes) else json.dumps(content).encode()
                    self.send_response(status)
                    for name, text in {"Content-Length": len(content), **headers}.items():
                        self.send_header(name, str(text))
                    self.end_headers()
                    self.wfile.write(content)
                else:
                    self.close_connection = True
                    self.wfile.write(answer or b"")

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda *_: None
        self.url = f"http://127.0.0.1:{self.server.server_port}/get_reward"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def scripted():
    servers = []

    def start(play):
        servers.append(Scripted(play))
        return servers[-1]

    yield start
    for server in servers:
        server.server.shutdown()
        server.server.server_close()


def lengths(number, body):  # noqa: ARG001
    return 200, {}, {"rewards": [float(len(text)) for text in body["query"]]}


def asks(server, **settings):
    reward = {"type": "http", "url": server.url, "timeout_s": 10.0, "backoff_s": 0.01, "retries": 2}
    return source_of(merged(reward, settings))


def test_what_is_sent_and_what_comes_back(scripted):
    """The shape of OpenRLHF's remote reward model."""
    server = scripted(lengths)
    judged = batch(["a", "bb", "ccc"], [{"n": 0, "answer": "x"}, {"n": 1, "answer": None}, {"n": 2, "answer": 7}])
    scores = total_score([asks(server)], judged)
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
    total_score([asks(server, label_column="answer")], judged)
    assert server.requests[1]["labels"] == ["x", None, 7]


def test_a_bare_list_is_an_answer_too(scripted):
    server = scripted(lambda *_: (200, {}, [1, 2.5, 0]))
    assert asks(server).score(batch(["a", "b", "c"])).tolist() == [1.0, 2.5, 0.0]


def test_texts_go_out_in_pieces_some_at_once_and_come_back_in_order(scripted):
    rng = random.Random(0)

    def play(number, body):
        time.sleep(rng.random() * 0.05)
        return lengths(number, body)

    server = scripted(play)
    texts = ["x" * i for i in range(41)]
    scores = asks(server, batch_size=4, concurrency=3).score(batch(texts))
    assert scores.tolist() == [float(len(f"p{i} ") + i) for i in range(41)]
    assert sorted(len(r["query"]) for r in server.requests) == [1] + [4] * 10
    assert server.most == 3


def test_a_text_of_any_kind_arrives(scripted):
    texts = ["\x00", "é\u2028", '"\\', "\ud800 half a character", "x" * 100_000, ""]
    server = scripted(lengths)
    asks(server).score(batch(texts))
    assert [q.removeprefix(p) for q, p in zip(*map(server.requests[0].get, ("query", "prompts")), strict=True)] == texts


def test_429_and_then_200(scripted):
    """Retry-After says when; without it the waits are doubled."""

    def play(number, body):
        return (429, {"Retry-After": "1"} if number == 0 else {}, "slow down") if number < 3 else lengths(number, body)

    server = scripted(play)
    assert asks(server, retries=3, backoff_s=0.1).score(batch(["a"])).tolist() == [4.0]
    gaps = [b - a for a, b in itertools.pairwise(server.times)]
    assert 1.0 <= gaps[0] < 1.7
    assert 0.2 <= gaps[1] < 0.4
    assert 0.4 <= gaps[2] < 0.8


FAULTS = {
    "500 always": ((500, {}, b"<h1>no\nmodel</h1>"), "answered 500: '<h1>no model</h1>', after 3 attempts in ", 3),
    "503 always": ((503, {"Retry-After": "0"}, b""), "answered 503: '', after 3 attempts", 3),
    "408 always": ((408, {}, b"late"), "answered 408: 'late', after 3 attempts", 3),
    "400": ((400, {}, b"bad"), "answered 400: 'bad'. Check", 1),
    "404": ((404, {}, b"x" * 5000), "answered 404: '" + "x" * 200 + "...'. Check", 1),
    "401": ((401, {}, b""), "answered 401: ''. Check", 1),
    "garbage": ((200, {}, b"\xff\xfe{"), "answered 200, but the answer is not JSON: '\ufffd\ufffd{'", 1),
    "a page": ((200, {}, b"<html>hello"), "answered 200, but the answer is not JSON: '<html>hello'", 1),
    "empty": ((200, {}, b""), "answered 200, but the answer is not JSON: ''", 1),
    "deep": ((200, {}, b"[" * 100_000), "answered 200, but the answer is not JSON: '[[[[", 1),
    "another object": ((200, {}, {"error": "x"}), "has no list of rewards: '{\"error\": \"x\"}'", 1),
    "no list": ((200, {}, {"rewards": 1.0}), "has no list of rewards", 1),
    "too few": ((200, {}, {"rewards": [1.0]}), "has 1 rewards for 2 texts: '{\"rewards\": [1.0]}'", 1),
    "too many": ((200, {}, [1.0] * 3), "has 3 rewards for 2 texts", 1),
    "204": ((204, {}, b""), "answered 204, but the answer is not JSON", 1),
    "closed": (None, "sent no valid HTTP answer (", 3),
    "no HTTP": (b"SSH-2.0\r\n\r\n", "sent no valid HTTP answer (", 3),
    "half an answer": (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n[1", "sent no valid HTTP answer (", 3),
    "no gzip": ((200, {"Content-Encoding": "gzip"}, b"[1, 2]"), "sent no valid HTTP answer (", 3),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_server_that_fails_is_named_with_what_it_said(scripted, name):
    """Pieces of two; only those of rows 3 and 4 fail."""
    answer, message, attempts = FAULTS[name]

    def mixed(number, body):
        return answer if body["prompts"][0] == "p2 " else lengths(number, body)

    server = scripted(mixed)
    with pytest.raises(RewardError) as caught:
        asks(server, batch_size=2).score(batch(["x"] * 5))
    text = str(caught.value)
    assert text.startswith(f"rows.jsonl:5 and 1 more rows: reward http, responses 3 to 4: {server.url} ")
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
def test_a_reward_that_is_no_number_names_its_row(scripted, value):
    server = scripted(lambda *_: (200, {}, f'{{"rewards": [1.0, {value}, 2.0]}}'.encode()))
    with pytest.raises(
        RewardError,
        match=r"rows.jsonl:4: reward http, response 2: .*/get_reward returned .*, it must be a finite number",
    ):
        asks(server).score(batch(["x"] * 3))
    scores = total_score([asks(server, on_error="zero")], batch(["x"] * 3))
    assert scores.total.tolist() == [1.0, 0.0, 2.0]
    assert scores.errors == {"http": 1}


def drip(connection, content=b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"):
    """A byte every 50 ms, for ever."""
    try:
        for byte in content + b" " * 1000:
            connection.sendall(bytes([byte]))
            time.sleep(0.05)
    except OSError:
        connection.close()


@pytest.mark.parametrize("how", ["silent", "drips", "never accepts"])
def test_a_server_that_hangs_is_given_up(how):
    """The clock runs over the whole request, however it passes."""
    with socket.create_server(("127.0.0.1", 0), backlog=0 if how == "never accepts" else 16) as listener:
        open_ones = []

        def accept():
            while how != "never accepts":
                try:
                    open_ones.append(listener.accept()[0])
                except OSError:
                    return
                if how == "drips":
                    threading.Thread(target=drip, args=(open_ones[-1],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        source = source_of({"type": "http", "url": url, "timeout_s": 0.3, "retries": 1, "backoff_s": 0.01})
        started = time.monotonic()
        with pytest.raises(RewardError, match=r"did not answer within 0.3 s \(timeout_s\), after 2 attempts"):
            source.score(batch(["x"]))
        assert 0.6 <= time.monotonic() - started < 3
        for connection in open_ones:
            connection.close()


def test_a_server_that_is_not_there():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    source = source_of({"type": "http", "url": f"http://127.0.0.1:{port}/x?key=secret", "retries": 0})
    with pytest.raises(RewardError, match=rf"http://127.0.0.1:{port}/x cannot be reached") as caught:
        source.score(batch(["x"]))
    assert "secret" not in str(caught.value)
    assert ", after" not in str(caught.value)


def test_an_answer_without_end_is_refused(scripted, monkeypatch):
    monkeypatch.setattr(http_client, "MAX_ANSWER_BYTES", 1000)
    server = scripted(lambda *_: (200, {}, b"[" + b"1," * 1000 + b"1]"))
    with pytest.raises(RewardError, match="answered 200 with more than 1000 bytes"):
        asks(server).score(batch(["x"]))


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(scripted, status):
    other = scripted(lengths)
    server = scripted(lambda *_: (status, {"Location": f"{other.url}?key=secret"}, b""))
    with pytest.raises(
        RewardError, match=rf"answered {status}: '', a redirect to {other.url}. Redirects are not foll"
    ) as e:
        asks(server).score(batch(["x"]))
    assert other.requests == []
    assert "secret" not in str(e.value)


def test_a_token_comes_from_the_environment_and_is_told_to_nobody(
    scripted, monkeypatch, run_stage, make_model, tmp_path
):
    monkeypatch.setenv("RLHF_TEST_TOKEN", " t0ken-4711\n")
    server = scripted(lengths)
    rewards = [{"type": "http", "url": server.url, "api_key_env": "RLHF_TEST_TOKEN"}]
    policy = {"path": str(make_model("llama"))}
    run_stage("ppo", tmp_path, policy=policy, rewards=rewards, ppo={"num_iterations": 1})
    assert {h["Authorization"] for h in server.headers} == {"Bearer t0ken-4711"}
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 8
    assert not [path for path in written if b"t0ken-4711" in path.read_bytes()]
    echoes = scripted(lambda *_: (403, {}, b"no such token: t0ken-4711"))
    source = asks(echoes, api_key_env="RLHF_TEST_TOKEN")
    assert "4711" not in repr(source)
    with pytest.raises(RewardError, match=r"no such token: \*\*\*") as caught:
        source.score(batch(["x"]))
    assert "4711" not in str(caught.value)
    for value in ("", "two words", "ünicode", "a\x07b"):
        monkeypatch.setenv("RLHF_TEST_TOKEN", value)
        with pytest.raises(ConfigError, match="RLHF_TEST_TOKEN") as refused:
            asks(server, api_key_env="RLHF_TEST_TOKEN")
        assert not value or value not in str(refused.value)


def test_a_token_in_the_clear_is_remarked(monkeypatch):
    monkeypatch.setenv("RLHF_TEST_TOKEN", "x")
    for url, said in (("http://example.org/s", True), ("https://example.org/s", False), ("http://127.0.0.1:1/", False)):
        reward = TypeAdapter(Reward).validate_python({"type": "http", "url": url, "api_key_env": "RLHF_TEST_TOKEN"})
        notes = load_rewards([reward], "none", None, CPU, "float32")[1]
        assert bool(notes) == said


def test_a_proxy_is_not_asked_for_this_machine(scripted, monkeypatch):
    proxy, server = scripted(lambda *_: (200, {}, [99.0])), scripted(lengths)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy.url.removesuffix("/get_reward"))
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert asks(server).score(batch(["x"])).tolist() == [4.0]
    assert proxy.requests == []


def test_a_row_without_the_label_is_named_before_anything_is_trained(scripted):
    source = asks(scripted(lengths), label_column="answer")
    with pytest.raises(DataError, match="x:2: reward http: its row has no column 'answer'; it has n"):
        check_rows([source], [("x:1", {"answer": 1}), ("x:2", {"n": 1})])


# ----------------------------------------------------------------------------------------- whole runs


def test_every_source_is_a_figure_of_its_own(scripted, function, make_model, word_piece, run_stage, tmp_path):
    """All kinds at once: the score is the weighted sum of what each says, in every row of metrics.jsonl."""
    encoder(tmp_path / "bert", word_piece)
    failing = function("return [1.0 if row['n'] % 2 else None for row in rows]", on_error="zero", weight=-1.0)
    rng, rows = random.Random(0), tmp_path / "rows.jsonl"
    write_jsonl(
        rows, [{"prompt": f"Q: {sentence(rng, 1, 6)} {i}\nA:", "n": i, "answer": f"#### {i}"} for i in range(16)]
    )
    server = scripted(lengths)
    rewards = [
        {"type": "reward_model", "path": str(tmp_path / "bert"), "weight": 0.5},
        failing,
        {"type": "http", "url": server.url, "weight": 0.1, "name": "remote", "batch_size": 3},
        {"type": "length", "unit": "words", "max": 2, "weight": 0.2},
        {"type": "regex", "pattern": "[aeiou]", "weight": 0.3, "name": "vowel"},
        {"type": "answer_match", "column": "answer"},
        {"type": "repetition", "n": 1, "unit": "tokens", "weight": 0.4},
        {"type": "json", "weight": 2.0},
    ]
    place = run_stage(
        "ppo",
        tmp_path,
        policy={"path": str(make_model("llama"))},
        rewards=rewards,
        data={"train": str(rows), "test": {"path": str(rows), "limit": 3}},
    )
    names = ["reward_model_0", "f_1", "remote", "length_3", "vowel", "answer_match_5", "repetition_6", "json_7"]
    for row in read_jsonl(place / "metrics.jsonl")[:2]:
        figures = {key for key in row if key.startswith("reward/")}
        assert figures == {f"reward/{name}" for name in [*names, "reward_model_0_cut", "f_1_errors"]}
        total = sum(r.get("weight", 1.0) * row[f"reward/{name}"] for r, name in zip(rewards, names, strict=True))
        assert row["objective/score"] == pytest.approx(total, abs=1e-5)
        assert row["reward/reward_model_0_cut"] == 0
    metrics = read_jsonl(place / "metrics.jsonl")
    errors, ones = (
        sum(row[key] * size for row in metrics[:2]) for key, size in (("reward/f_1_errors", 1), ("reward/f_1", 8))
    )
    assert errors == 16 - ones
    assert 0 < errors < 16


def test_a_column_that_a_reward_needs_is_missed_before_anything_is_trained(make_model, run_stage, tmp_path):
    rewards = [{"type": "answer_match", "column": "answer"}]
    with pytest.raises(
        DataError, match=r"prompts.jsonl:\d+: reward answer_match: its row has no column 'answer'; it has prompt"
    ):
        run_stage("ppo", tmp_path, policy={"path": str(make_model("llama"))}, rewards=rewards)
    number = [{"type": "answer_match", "column": "number", "name": "right"}]
    run_stage("ppo", tmp_path, policy={"path": str(make_model("llama"))}, rewards=number, ppo={"num_iterations": 1})


# --------------------------------------------------------------------------------------- docs/rewards.md

DOCS = (Path(__file__).parent.parent / "docs" / "rewards.md").read_text(encoding="utf-8")


def test_every_example_of_the_documentation_is_a_config():
    """And every type of source and each of its keys is in it."""
    blocks = re.findall(r"```yaml\n(rewards:.*?)```", DOCS, re.DOTALL)
    examples = [item for block in blocks for item in yaml.safe_load(block)["rewards"]]
    examples += [yaml.safe_load(line) for line in re.findall(r"`(\{type: .*?\})`", DOCS)]
    assert len(examples) > 16
    sections = {type(TypeAdapter(Reward).validate_python(item)) for item in examples}
    assert {e["type"] for e in examples} == {s.model_fields["type"].annotation.__args__[0] for s in sections}
    assert len(sections) == 8
    for section in sections:
        for key in section.model_fields:
            assert re.search(rf"`[^`\n]*\b{key}\b[^`\n]*`", DOCS), key


def test_the_numbers_of_the_documentation_are_those_of_the_code():
    from rlhf_cli.commands import serve

    http = TypeAdapter(Reward).validate_python({"type": "http", "url": "http://a/"})
    for key in ("batch_size", "concurrency", "timeout_s", "retries", "backoff_s"):
        assert f"| `{key}` | {getattr(http, key):g} |" in DOCS
    assert f"{serve.MAX_WAITING} may wait" in DOCS
    assert f"`--max-batch` texts ({serve.Settings('m').max_batch})" in DOCS
    assert serve.MAX_BODY_BYTES == 16 * 2**20
    assert (http_client.LONGEST_BACKOFF_S, http_client.LONGEST_WAIT_S) == (60, 600)
