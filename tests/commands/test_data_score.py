"""`rlhf data score`: from the judge's answers to rows, and runs that resume."""

import math
from collections import Counter

import numpy as np
import pytest

from rlhf_cli.commands import data_score
from rlhf_cli.commands.data_score import letter_in, number_in
from rlhf_cli.data.stage_rows import ranking
from rlhf_cli.errors import ConfigError, DataError
from support.projects import rlhf
from support.servers import ChatServer, completion
from support.tiny import read_jsonl, write_jsonl
from support.writers import read_back, remote, run_command


def run(source, out, writer, **settings):
    run_command(data_score.data_score, source, out, writer=writer, **settings)


def dropped(out):
    return read_jsonl(out.with_name(out.name + ".dropped"))


def says(answer):
    """A judge whose answer depends on the question."""
    return lambda call: (200, {}, completion(answer(call.text)))


# ------------------------------------------------------------------------------------------------ parsing


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("4", 4.0),
        (" 0\n", 0.0),
        ("Score: 0.", 0.0),
        ("-0", 0.0),
        ("4/5", 4.0),
        ("I give it 3.5 of 5.", 3.5),
        ("10, no, 5", 5.0),
        ("1.2.3 and then 2", 2.0),
    ],
)
def test_the_first_number_in_range_is_the_score(answer, number):
    assert repr(number_in(answer, 0, 5)) == repr(number)
    assert [number_in(str(n), -1, 1) for n in (-2, -1, 0, 1, 2)] == [None, -1.0, 0.0, 1.0, None]


@pytest.mark.parametrize(
    "answer",
    ["-1", "−1", "5.1", "", "GPT4 says", "the 4th", "3.5%", "4,5", "1.2.3", "nan inf", "٤", "4" * 5000],
)
def test_an_answer_without_a_number_in_range_has_no_score(answer):
    assert number_in(answer, 0, 5) is None


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("A", "first"),
        ("[[B]]", "second"),
        ("Response A is better", "first"),
        ("A, since A is right", "first"),
    ],
)
def test_exactly_one_letter_is_a_verdict(answer, verdict):
    assert letter_in(answer) == verdict
    assert [letter_in(unclear) for unclear in (f"{answer}, but A, or B", "Both", "AB", "")] == [None] * 4


# ------------------------------------------------------------------------------------------------ numbers


def test_rows_keep_their_columns_and_get_a_score_and_the_judges_name(tmp_path):
    names = ("id", "question", "answer", "score", "scores", "judge")
    values = [(1, "Name a river.", "The Rhine.", 1.0, [9], "Ann"), (2, "Name a city.", "Long.", 0.5, [9], "Bob")]
    rows = [dict(zip(names, each, strict=True)) for each in values]
    source, out = write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "out" / "out.jsonl"
    with ChatServer(says(lambda text: "Score: 5" if "Rhine" in text else "0")) as server:
        run(source, out, remote(server, concurrency=1, max_new_tokens=16, temperature=0.2))
        assert "score: 2 scores by judge-7b, mean 2.500\n" in command(
            source, out, server, "--concurrency", "1", "--max-new-tokens", "16", "--temperature", "0.2"
        )
    body = server.requests[0]
    assert (body["max_tokens"], body["temperature"]) == (16, 0.2)
    [message] = body["messages"]
    assert "Request:\nName a river.\n\nResponse:\nThe Rhine.\n\nAnswer with the number" in message["content"]
    assert "a number from 0 to 5" in message["content"]
    kept, before = ("id", "question", "answer"), ("score", "scores", "judge")
    for row, written, number in zip(rows, read_jsonl(out), (5.0, 0.0), strict=True):
        old = {name: row[name] for name in kept} | {f"{name}_before": row[name] for name in before}
        new = {"prompt": row["question"], "response": row["answer"], "score": number, "judge": "judge-7b"}
        assert written == old | new
    assert [record.scores for record in read_back(out, "rm scores")] == [(5.0,), (0.0,)]


def test_every_answer_of_a_row_is_scored_and_makes_a_ranking(tmp_path):
    answers = ["worst", "best", "odd", "middle"]
    row = {"prompt": "p", "responses": answers, "scores": [None] * 4, "n": 7}
    source, out = write_jsonl(tmp_path / "rows.jsonl", [row]), tmp_path / "out" / "out.jsonl"
    numbers = {"worst": "0", "best": "5", "odd": "no idea", "middle": "2.5"}
    with ChatServer(says(lambda text: numbers[text.split("Response:\n")[1].split("\n")[0]])) as server:
        run(source, out, remote(server))
    assert read_jsonl(out) == [
        {"n": 7, "prompt": "p", "responses": answers, "scores": [0.0, 5.0, None, 2.5], "judge": "judge-7b"}
    ]
    assert len(server.requests) == 4 + 2, "what is not a number is asked two times more"
    [record] = read_back(out, "rm pairs")
    ranked = ranking(record)
    assert ranked.texts == ("best", "middle", "worst")


def test_other_formats_are_scored_too(tmp_path):
    """A conversation, a pair, an Alpaca row: all are written with scores that can be read back."""
    turns = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    cases = [
        ({"messages": [*turns, {"role": "assistant", "content": "hello"}]}, "hello", turns),
        ({"prompt": "p", "chosen": "c", "rejected": "r"}, "c", "p"),
        ({"system_prompt": "be kind", "prompt": "hi", "response": "hello"}, "hello", turns),
    ]
    for n, (row, first, prompt) in enumerate(cases):
        source, out = write_jsonl(tmp_path / f"{n}.jsonl", [row]), tmp_path / "out" / f"{n}.jsonl"
        with ChatServer(says(lambda _: "3")) as server:
            run(source, out, remote(server))
        [written] = read_jsonl(out)
        assert written["prompt"] == prompt
        assert "hello" in server.requests[0]["messages"][0]["content"] or first == "c"
        [record] = read_back(out, "rm scores", format="scored")
        assert record.answers[0].text.strip() == first
        assert record.scores == (3.0,) * len(record.answers)
        if isinstance(prompt, list):
            assert [m.content for m in record.messages] == ["be kind", "hi"]


def test_unclear_answers_are_asked_again_and_then_dropped(tmp_path):
    rows = [{"prompt": f"p{n}", "response": f"r{n}"} for n in range(4)]
    source, out = write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "out" / "out.jsonl"
    asked = Counter()

    def judge(call):
        which = next(row["prompt"] for row in rows if f"\n{row['prompt']}\n" in call.text)
        asked[which] += 1
        answer = {"p0": "4", "p1": "hm" if asked[which] < 3 else "0", "p2": "I can't say, perhaps 9"}.get(which)
        return (400, {}, b"too long") if answer is None else (200, {}, completion(answer))

    with ChatServer(judge) as server:
        run(source, out, remote(server, concurrency=1))
    assert asked == {"p0": 1, "p1": 3, "p2": 3, "p3": 1}
    assert [(row["prompt"], row["score"]) for row in read_jsonl(out)] == [("p0", 4.0), ("p1", 0.0)]
    url = f"{server.url}/chat/completions"
    assert dropped(out) == [
        {"reason": "no clear answer", "where": f"{source}:3", "answer": "I can't say, perhaps 9"},
        {"reason": "no answer", "where": f"{source}:4", "detail": f"{url} answered 400: 'too long'"},
    ]
    seeds = [body["seed"] for body in server.requests if "\np1\n" in body["messages"][0]["content"]]
    assert len(set(seeds)) == 3
    with ChatServer(judge) as server:
        asked.clear()
        run(source, tmp_path / "out" / "one.jsonl", remote(server, concurrency=1), attempts=1)
    assert asked == {"p0": 1, "p1": 1, "p2": 1, "p3": 1}


def test_the_template_and_the_range_can_be_set(tmp_path):
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "{response}", "response": "{prompt}"}])
    template = tmp_path / "judge.txt"
    template.write_text("{min}..{max} {{x}}: {prompt} / {response}")
    with ChatServer(says(lambda _: "0 or 7.5")) as server:
        run(source, tmp_path / "out" / "a.jsonl", remote(server), template=template, lowest=1, highest=10)
    assert server.requests[0]["messages"] == [{"role": "user", "content": "1..10 {{x}}: {response} / {prompt}"}]
    assert read_jsonl(tmp_path / "out" / "a.jsonl")[0]["score"] == 7.5
    for compare, said in ((False, r"lacks \{prompt\} and \{response\}"), (True, r"lacks \{prompt\} and \{a\} and")):
        template.write_text("Say something")
        with pytest.raises(ConfigError, match=said):
            run(source, tmp_path / "out" / "b.jsonl", remote(server), template=template, compare=compare)
    with pytest.raises(ConfigError, match="--min 5 --max 5"):
        run(source, tmp_path / "out" / "b.jsonl", remote(server), lowest=5, highest=5)


def test_rows_without_answers_are_named(tmp_path):
    with ChatServer(says(lambda _: "1")) as server:
        source = write_jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}])
        with pytest.raises(DataError, match=r"a.jsonl:1: the row has no answer to score"):
            run(source, tmp_path / "out" / "a.jsonl", remote(server))
        source = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "p", "response": "r"}])
        with pytest.raises(DataError, match=r"b.jsonl:1: the row has 1 answers, --compare needs exactly two"):
            run(source, tmp_path / "out" / "b.jsonl", remote(server), compare=True)
    assert server.requests == []


# ------------------------------------------------------------------------------------------------ pairs


PAIRS = [
    {"prompt": "p0", "chosen": "good 0", "rejected": "bad 0"},
    {"prompt": "p1", "chosen": "bad 1", "rejected": "good 1"},
    {"prompt": "p2", "chosen": "same 2", "rejected": "same 2b"},
    {"prompt": "p3", "chosen": "late 3", "rejected": "late 3b"},
    {"prompt": "p4", "chosen": "twin 4", "rejected": "twin 4"},
    {"prompt": "p5", "chosen": "odd 5", "rejected": "odd 5b"},
    {"prompt": "p6", "chosen": "good 6", "rejected": "bad 6"},
]


def by_kind(call):
    """Prefers good to bad, the first of equal answers, the second of late ones; gives no letter for odd ones."""
    a = call.text.split("Response A:\n")[1]
    answers = {"g": "A", "b": "B", "s": "A", "l": "B", "o": "neither A nor B"}
    return 200, {}, completion(answers[a[0]])


def test_the_answer_preferred_in_both_orders_is_chosen(tmp_path):
    source, out = write_jsonl(tmp_path / "pairs.jsonl", PAIRS), tmp_path / "out" / "out.jsonl"
    with ChatServer(by_kind) as server:
        run(source, out, remote(server, concurrency=1), compare=True)
    agree, swapped = ["first", "second"], ["second", "first"]
    assert read_jsonl(out) == [
        {
            "chosen_before": PAIRS[n]["chosen"],
            "rejected_before": PAIRS[n]["rejected"],
            "prompt": f"p{n}",
            "chosen": f"good {n}",
            "rejected": f"bad {n}",
            "judge": "judge-7b",
            "verdicts": verdicts,
        }
        for n, verdicts in ((0, agree), (1, swapped), (6, agree))
    ]
    assert dropped(out) == [
        {"reason": "tie", "where": f"{source}:3", "verdicts": ["first", "first"]},
        {"reason": "tie", "where": f"{source}:4", "verdicts": ["second", "second"]},
        {"reason": "both answers are the same text", "where": f"{source}:5"},
        {"reason": "no clear answer", "where": f"{source}:6", "answer": "neither A nor B"},
    ]
    asked = Counter(body["messages"][0]["content"].split("Request:\n")[1][:2] for body in server.requests)
    assert asked == {"p0": 2, "p1": 2, "p2": 2, "p3": 2, "p5": 6, "p6": 2}
    rankings = map(ranking, read_back(out, "rm pairs"))
    assert [r.response for r in rankings if r] == ["good 0", "good 1", "good 6"]


def test_ties_can_be_kept_without_becoming_preferences(tmp_path):
    source, out = write_jsonl(tmp_path / "pairs.jsonl", PAIRS[:4]), tmp_path / "out" / "out.jsonl"
    with ChatServer(by_kind) as server:
        run(source, out, remote(server), compare=True, ties="keep")
    rows = read_jsonl(out)
    assert [row["scores"] for row in rows] == [[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.5, 0.5]]
    assert [row["responses"] for row in rows] == [[pair["chosen"], pair["rejected"]] for pair in PAIRS[:4]]
    rankings = map(ranking, read_back(out, "rm pairs"))
    assert [r.response if r else None for r in rankings] == ["good 0", "good 1", None, None]


# --------------------------------------------------------------------------------------- the command line


def command(source, out, server, *more):
    arguments = ["data", "score", str(source), "--out", str(out), "--server", server.url, "--model", "judge-7b"]
    result = rlhf(*arguments, *more)
    return result.output


def test_the_report_has_counts_and_mean(tmp_path):
    numbers = ["0", "1", "1", "2.4", "2.5", "5", "x", "5"]
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"p{n}.", "response": "r"} for n in range(8)])
    out = tmp_path / "out" / "out.jsonl"
    with ChatServer(says(lambda text: numbers[int(text.split("\np")[1][0])])) as server:
        output = command(source, out, server)
        again = command(source, out, server)
    tail = f"""\
score: {out}: 7 rows; 1 dropped (1 no clear answer), see out.jsonl.dropped
score: 7 scores by judge-7b, mean 2.414
"""
    assert output.endswith(tail), output
    assert again == tail, "a finished run prints the same and sends nothing"
    assert len(server.requests) == 10


def test_scores_are_compared_with_the_input_scores(tmp_path):
    judged, own = [0, 1, 3, 5], [1.0, -1.0, 2.0, 4.0]
    rows = [{"prompt": f"p{n}.", "response": "r", "score": own[n]} for n in range(4)]
    rows += [{"prompt": "p0.", "response": "r", "score": score} for score in (math.nan, math.inf, None)]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    with ChatServer(says(lambda text: str(judged[int(text.split("\np")[1][0])]))) as server:
        output = command(source, tmp_path / "out" / "out.jsonl", server)
    r = np.corrcoef(judged, own)[0, 1]
    assert output.endswith(f"score: correlation with the 4 scores of the input rows: {r:.2f}\n")
    assert 0.5 < r < 0.99


def test_position_bias_is_reported(tmp_path):
    source, out = write_jsonl(tmp_path / "pairs.jsonl", PAIRS), tmp_path / "out" / "out.jsonl"
    start = "\n\nHuman: hi\n\nAssistant:"
    whole = [{"chosen": f"{start} {pair['chosen']}", "rejected": f"{start} {pair['rejected']}"} for pair in PAIRS]
    always_first = write_jsonl(tmp_path / "first.jsonl", [*whole[:2], *whole[2:3] * 3])
    with ChatServer(by_kind) as server:
        output = command(source, out, server, "--compare")
        biased = command(always_first, tmp_path / "out" / "b.jsonl", server, "--compare", "--ties", "keep")
    # p0, p1 and p6 agree, p2 and p3 are a tie each way: 3 + 2 + 0 first places won of 10.
    assert output.endswith(f"""\
score: {out}: 3 rows; 4 dropped (2 tie, 1 both answers are the same text, 1 no clear answer), see out.jsonl.dropped
score: 5 pairs compared by judge-7b, ties dropped
  same answer both times            3 (60.0%)
  ties, always the first position   1 (20.0%)
  ties, always the second position  1 (20.0%)
  wins of the first position        50.0% (50% without position bias)
  agrees with the input rows        2 of 3 rows without ties (66.7%)
"""), output
    assert "ties, always the first position   3 (60.0%)" in biased
    assert "wins of the first position        80.0%" in biased  # (2 + 3 * 2) / 10
    assert "agrees with the input rows        1 of 2 rows without ties (50.0%)" in biased


# --------------------------------------------------------------------------------------------- resume


def test_other_settings_are_refused(tmp_path):
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "p", "response": "r"}] * 2)
    out = tmp_path / "out" / "out.jsonl"
    refused = {
        r"max \(5.0, now 10.0\)": {"highest": 10.0},
        r"attempts \(3, now 2\)": {"attempts": 2},
        r"compare \(false, now true\)": {"compare": True},
    }
    with ChatServer(says(lambda _: "1")) as server:
        run(source, out, remote(server), num=1)
        for said, settings in refused.items():
            with pytest.raises(ConfigError, match=said):
                run(source, out, remote(server), **settings)
        run(source, out, remote(server))
    assert len(read_jsonl(out)) == 2


def test_a_run_that_drops_every_row_fails_each_time(tmp_path):
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "p", "response": "r"}] * 3)
    out = tmp_path / "out.jsonl"
    command = ["data", "score", str(source), "--out", str(out), "--model", "m", "--attempts", "1"]
    with ChatServer(says(lambda _: "no idea")) as server:
        for _ in range(2):
            result = rlhf(*command, "--server", server.url, code=1)
            message = f"error: {out}: no row was written; 3 dropped (3 no clear answer), see out.jsonl.dropped. "
            assert result.stderr.startswith(message)
        assert len(server.requests) == 3, "nothing is asked again without --restart"
        rlhf(*command, "--server", server.url, "--restart", code=1)
    assert len(server.requests) == 6
