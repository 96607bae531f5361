"""Rules, configs and whole runs of rewards."""

from __future__ import annotations

import math
import random
import re
import time
from fractions import Fraction

import pytest
import torch
import yaml
from pydantic import TypeAdapter

from rlhf_cli.config.loader import load_config
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.rewards import Reward, reward_names
from rlhf_cli.errors import ConfigError, DataError, RewardError
from rlhf_cli.rewards import rules
from rlhf_cli.rewards.base import RewardSource, total_score
from rlhf_cli.rewards.sources import check_rows
from support.paths import ROOT, TESTS
from support.rewards import batch, lengths, refused, scores_of, source_of
from support.tiny import encoder, read_jsonl, sentence, write_jsonl

FIXTURES = TESTS / "fixtures" / "rewards"


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
def test_the_length_reward_is_minus_the_distance_to_the_range(settings, wanted):
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
def test_the_regex_reward_is_1_for_a_match(settings, wanted):
    assert scores_of({"type": "regex"}, ["ab", "x\ncab", "", "Ab"], **settings) == wanted


def test_an_exponential_pattern_times_out():
    """(a|aa)+$ has more than 10^20 ways through 100 a's."""
    reward = {"type": "regex", "pattern": "(a|aa)+$", "timeout_s": 0.2}
    texts = ["aa", "a" * 100 + "b"]
    started = time.process_time()
    with pytest.raises(RewardError, match=r"rows.jsonl:4: reward regex, response 2: its pattern took longer"):
        scores_of(reward, texts)
    scores = total_score([source_of(reward, on_error="zero")], batch(texts))
    assert scores.total.tolist() == [1.0, 0.0]
    assert scores.errors == {"regex": 1}
    assert time.process_time() - started < 5
    answer = {"type": "answer_match", "column": "a", "pattern": "(a|aa)+$", "timeout_s": 0.2, "on_error": "zero"}
    assert total_score([source_of(answer)], batch(texts[1:], [{"a": 1}])).errors == {"answer_match": 1}


@pytest.mark.parametrize("row", read_jsonl(FIXTURES / "answers.jsonl"), ids=lambda row: row["response"][:30])
def test_numeric_answers(row):
    reward = {"type": "answer_match", "column": "truth"}
    assert scores_of(reward, [row["response"]], [row]) == [float(row["right"])]


def test_numbers_are_read_in_every_notation():
    """Random fractions in every notation, within a sentence."""
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


def test_a_very_long_number_is_fast():
    started = time.process_time()
    for text in ("9" * 200_000, "1," * 100_000, "9" * 200_000 + "e999", "-" * 100_000 + "1", "1/" * 50_000):
        rules.numeric_answer(text)
        rules.is_json(text)
    assert rules.last_number("9" * 5000) is None
    assert rules.is_json("9" * 5000)
    assert time.process_time() - started < 2


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
def test_a_row_without_a_correct_answer_is_named(row, message):
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
    """Search each n-gram among all earlier ones."""
    grams = [words[i : i + n] for i in range(len(words) - n + 1)]
    seen = sum(any(grams[i] == grams[j] for j in range(i)) for i in range(len(grams)))
    return -seen / len(grams) if grams else 0.0


def test_repetition_is_the_fraction_of_repeated_n_grams():
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
        ({"type": "length"}, "set target, or min and max"),
        ({"type": "length", "target": 1, "max": 2}, "set target, or min and max"),
        ({"type": "length", "min": 3, "max": 2}, "min 3 is above max 2"),
        ({"type": "length", "target": -1}, "greater than or equal to 0"),
        ({"type": "regex", "pattern": "(a"}, "not a valid regular expression"),
        ({"type": "regex", "pattern": ""}, "at least 1 character"),
        ({"type": "repetition", "n": 0}, "greater than 0"),
        ({"type": "answer_match", "column": "a", "pattern": "[a"}, "not a valid regular expression"),
        ({"type": "reward_model", "template": "{prompt}"}, "must be `chat` or contain"),
        (
            {"type": "reward_model", "template": "{response}"},
            r"template does not contain \{prompt\}, but reads is prompt_and",
        ),
        ({"type": "reward_model", "template": "chat", "reads": "response"}, "contains the prompt, but reads is"),
        ({"type": "function", "function": "f.py:f", "concurrency": 2}, "concurrency does nothing without batch_size"),
        ({"type": "http", "url": "localhost:5000"}, "must be http"),
        ({"type": "http", "url": "file:///etc/passwd"}, "must be http"),
        ({"type": "http", "url": "http://:5000/"}, "must be http"),
        ({"type": "http", "url": "http://a:70000/"}, "must be http"),
        ({"type": "http", "url": "http://a/\nHost: b"}, "must be http"),
        ({"type": "http", "url": "http://user@a/"}, "Use api_key_env"),
        ({"type": "http", "url": "http://a/", "api_key_env": "a key"}, "should match pattern"),
        ({"type": "json", "name": "two words"}, "should match pattern"),
        ({"type": "json", "on_error": "skip"}, "'stop' or 'zero'"),
    ],
)
def test_invalid_reward_configs_are_refused(reward, message):
    refused(reward, message)


def test_a_password_in_a_url_is_refused_and_not_shown(write_config, tmp_path):
    rewards = [{"type": "http", "url": "https://me:hunter2@host/score"}]
    with pytest.raises(ConfigError, match="would appear in logs and artifacts") as caught:
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
        with pytest.raises(ConfigError, match="would name two metrics"):
            load_config(write_config("ppo", tmp_path, rewards=rewards), PPOConfig)


# ----------------------------------------------------------------------------------------- whole runs


def test_every_source_has_its_own_metric(scripted, function, make_model, word_piece, run_stage, tmp_path):
    """All types together: in every row of metrics.jsonl the score is the weighted sum of all sources."""
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


# --------------------------------------------------------------------------------------- docs/rewards.md


DOCS = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")


def test_every_example_of_the_documentation_is_a_config():
    """The page contains every type of source and all of its keys."""
    blocks = re.findall(r"```yaml\n(rewards:.*?)```", DOCS, re.DOTALL)
    examples = [item for block in blocks for item in yaml.safe_load(block)["rewards"]]
    examples += [yaml.safe_load(line) for line in re.findall(r"`(\{type: .*?\})`", DOCS)]
    assert len(examples) > 16
    sections = {type(TypeAdapter(Reward).validate_python(item)) for item in examples}
    assert {e["type"] for e in examples} == {s.model_fields["type"].annotation.__args__[0] for s in sections}
    assert len(sections) == 10
    for section in sections:
        for key in section.model_fields:
            assert re.search(rf"`[^`\n]*\b{key}\b[^`\n]*`", DOCS), key


def test_a_source_whose_passes_all_processes_share_scores_before_one_that_may_fail():
    """Otherwise a process with the failure would not make the passes that the others wait for."""
    scored = []

    class Fails(RewardSource):
        def score(self, samples):  # noqa: ARG002
            raise RewardError("no server")

    class Shared(RewardSource):
        shares_passes = True

        def score(self, samples):
            scored.append(samples.responses)
            return torch.zeros(len(samples.responses))

    with pytest.raises(RewardError, match=r"^no server$"):
        total_score([Fails(name="server"), Shared(name="model")], batch(["x", "y"]))
    assert scored == [["x", "y"]]
