"""Reward functions: how they are called, and what happens when one fails."""

from __future__ import annotations

import re

import pytest

from rlhf_cli.errors import ConfigError, RewardError
from rlhf_cli.rewards.base import Samples, total_score
from rlhf_cli.rewards.sources import load_judge
from support.rewards import batch, source_of

# ----------------------------------------------------------------------------------------- functions


def test_a_function_is_called_in_batches(function):
    body = "CALLS.append((prompts, responses, rows))\nreturn [row['n'] + 0.5 for row in rows]"
    whole, pieces = source_of(function(body)), source_of(function(body, batch_size=3))
    samples = batch(["a", "b", "c", "d", "e", "f", "g"])
    assert whole.score(samples).tolist() == pieces.score(samples).tolist() == [i + 0.5 for i in range(7)]
    calls = pieces.function.__globals__["CALLS"]
    assert [call[1] for call in calls] == [["a", "b", "c"], ["d", "e", "f"], ["g"]]
    assert [call[0] for call in calls] == [["p0 ", "p1 ", "p2 "], ["p3 ", "p4 ", "p5 "], ["p6 "]]
    assert calls[2][2] == [{"n": 6, "ended": True}]
    assert len(whole.function.__globals__["CALLS"]) == 1


def test_an_async_function_has_limited_concurrency_and_one_event_loop(function):
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
def test_a_non_finite_value_names_the_row(function, name, is_async):
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
def test_a_failing_batch_does_not_affect_others(function, fault, message, is_async):
    body = f"if rows[0]['n'] == 2: {fault}\nreturn [1.0 for _ in rows]"
    settings = {"is_async": is_async, "batch_size": 2}
    with pytest.raises(RewardError) as caught:
        source_of(function(body, **settings)).score(batch(["x"] * 5))
    assert re.search(
        rf"^rows.jsonl:5 and 1 more row: reward function f, responses 3 to 4: {message}", str(caught.value)
    )
    assert "\n" not in str(caught.value)
    source = source_of(function(body, on_error="zero", **settings))
    scores = total_score([source], batch(["x"] * 5))
    assert scores.total.tolist() == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert scores.errors == {"f": 2}
    assert total_score([source], batch(["x"] * 5)).errors == {"f": 2}, "of this batch"
    assert source.report().startswith("f: 4 scores failed and counted as 0.0. First failure: rows.jsonl:5 and 1 more")


def test_an_async_call_times_out(function):
    body = "await asyncio.sleep(3600 if rows[0]['n'] == 2 else 0)\nreturn [1.0 for _ in rows]"
    settings = {"is_async": True, "batch_size": 2, "timeout_s": 0.2}
    with pytest.raises(RewardError, match=r"responses 3 to 4: did not return within 0.2 s \(timeout_s\)"):
        source_of(function(body, **settings)).score(batch(["x"] * 5))
    scores = total_score([source_of(function(body, on_error="zero", **settings))], batch(["x"] * 5))
    assert scores.total.tolist() == [1.0, 1.0, 0.0, 0.0, 1.0]
    own = "raise TimeoutError('mine')"
    with pytest.raises(RewardError, match="raised TimeoutError: mine"):
        source_of(function(own, **settings)).score(batch(["x"]))


def test_the_first_failure_stops_the_other_calls(function):
    body = "CALLS.append(1)\nawait asyncio.sleep(0 if rows[0]['n'] == 0 else 3600)\nraise ValueError"
    source = source_of(function(body, is_async=True, batch_size=1, concurrency=2))
    with pytest.raises(RewardError):
        source.score(batch(["x"] * 9))
    assert len(source.function.__globals__["CALLS"]) <= 3


def test_async_options_are_refused_for_a_plain_function(function):
    for key, value in (("timeout_s", 1.0), ("concurrency", 2)):
        with pytest.raises(ConfigError, match=rf"rewards.0.{key}: applies to an `async def`"):
            source_of(function("return rows", batch_size=1, **{key: value}))


def test_several_per_token_rewards_add_up_at_each_token(function):
    """1 at each token with weight 2, and its number with weight 10; the totals are the sums over the tokens."""
    bodies = {"ones": "[1.0] * len(row['tokens'])", "numbers": "[float(n) for n in range(len(row['tokens']))]"}
    sources = [
        source_of(function(f"return [{body} for row in rows]", per_token=True, weight=weight, name=name))
        for (name, body), weight in zip(bodies.items(), (2.0, 10.0), strict=True)
    ]
    samples = batch(["a b", "c"])
    samples = Samples(**{**vars(samples), "tokens": [["t"] * len(ids) for ids in samples.response_ids]})
    scores = total_score(sources, samples)
    assert scores.dense == [[2.0, 12.0, 22.0], [2.0, 12.0]]
    assert scores.total.tolist() == [36.0, 14.0]


def test_a_failed_per_token_reward_counts_as_zeros(function):
    body = "return [[0.5] * (len(row['tokens']) + (row['n'] == 1)) if row['n'] != 3 else 'no' for row in rows]"
    texts = ["a b", "c", "d e f", "g", "h"]
    samples = batch(texts)
    samples = Samples(**{**vars(samples), "tokens": [["t"] * len(ids) for ids in samples.response_ids]})
    with pytest.raises(RewardError, match=r"rows.jsonl:6: reward function f, response 4: returned 'no', it must be"):
        total_score([source_of(function(body, per_token=True))], samples)
    dense = source_of(function(body, per_token=True, on_error="zero", weight=2.0))
    other = source_of({"type": "length", "target": 0, "unit": "words", "weight": 10.0, "name": "words"})
    scores = total_score([dense, other], samples)
    assert scores.dense == [[1.0] * 3, [0.0] * 2, [1.0] * 4, [0.0] * 2, [1.0] * 2]
    assert scores.each["f"].tolist() == [1.5, 0.0, 2.0, 0.0, 1.0]
    assert scores.total.tolist() == [3.0 - 20, 0.0 - 10, 4.0 - 30, 0.0 - 10, 2.0 - 10]
    assert scores.errors == {"f": 2, "words": 0}


def test_a_failing_gold_function_names_the_row(function):
    path = function("return [{'good': 1.0, 'long': None if row['n'] == 1 else 2} for row in rows]")["function"]
    judge = load_judge(path, "Mend it")
    with pytest.raises(
        RewardError, match=r"rows.jsonl:4: reward function evaluation.gold \(.*\), response 2: long: r.*Mend"
    ):
        judge(batch(["x", "y"]))
    assert judge(batch(["x"])) == [{"good": 1.0, "long": 2.0}]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("[{'a': 1.0}, {'b': 1.0}]", "response 2: has the numbers b, and the first one a"),
        ("[{'a': 1.0}, {}]", "response 2: no number"),
        ("[{}, {'a': 1.0}]", "response 1: no number"),
        ("[{'gold': 1.0, 'kl': 0.0}, {}]", "response 1: 'kl' is the name of another held-out figure"),
    ],
)
def test_a_gold_function_names_the_same_numbers_for_each_reply(function, rows, words):
    judge = load_judge(function(f"return {rows}[:len(rows)]")["function"])
    with pytest.raises(RewardError, match=words):
        judge(batch(["x", "y"]))
