"""`rlhf rm score`: rows of any format in, scores out, good beside bad."""

import json
import math

import pytest

from support.projects import refused, rlhf
from support.tiny import read_jsonl, write_jsonl


@pytest.fixture(scope="module")
def rm(pipeline):
    return pipeline("llama") / "rm"


def score(*arguments, **options):
    return rlhf("rm", "score", *arguments, **options)


def rows_of(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_scores_of_pairs_give_the_accuracy_and_margin_of_the_stage(rm, data, tmp_path):
    """The stage's held-out rows are the first seven of the file."""
    metrics = json.loads((rm / "manifest.json").read_text())["metrics"]
    out = tmp_path / "scored.jsonl"
    printed = score(rm.parent, data["preferences"], "--num", 7, "--raw", "--out", out).stdout
    rows = read_jsonl(out)
    leads = [row["chosen_score"] - row["rejected_score"] for row in rows]
    assert sum(leads) / 7 == pytest.approx(metrics["eval/margin"], abs=1e-5)
    assert sum(lead > 0 for lead in leads) / 7 == pytest.approx(metrics["eval/accuracy"], abs=1e-5)
    source = read_jsonl(data["preferences"])
    assert [(row["prompt"], row["chosen"], row["rejected"]) for row in rows] == [
        (row["prompt"], row["chosen"], row["rejected"]) for row in source[:7]
    ]
    words = " ".join(printed.split())
    assert f"held-out accuracy {metrics['eval/accuracy']:.3f}" in words
    assert "7 rows" in words
    assert f"good ({rows[0]['chosen_score']:+.2f})> {' '.join(source[0]['chosen'].split())}" in words
    assert f"bad ({rows[0]['rejected_score']:+.2f})>" in words


def test_scores_are_normalised_unless_raw_is_asked_for(rm, data):
    raw, normalised = (rows_of(score(rm, data["scored"], *flags)) for flags in (["--raw"], []))
    config = json.loads((rm / "model/config.json").read_text())
    for one, other in zip(raw, normalised, strict=True):
        wanted = (one["score"] - config["score_mean"]) / config["score_std"]
        assert other["score"] == pytest.approx(wanted, abs=1e-4)
    assert raw[3]["score_before"] == read_jsonl(data["scored"])[3]["score"]


def test_rows_of_every_kind_are_scored(rm, tmp_path):
    files = {
        "hh": {"chosen": "\n\nHuman: a lamp\n\nAssistant: thank you", "rejected": "\n\nHuman: a lamp\n\nAssistant: no"},
        "kto": {"prompt": "a lamp", "completion": " thank you", "label": True},
        "text": {"text": "the radio is late", "label": 0},
        "messages": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "thank you"}]},
        "ranking": {"prompt": "a lamp", "answers": [" thank you", " sorry", " no"]},
        "scored pair": {"prompt": "a lamp", "responses": [" sorry", " thank you"], "scores": [0, 1]},
    }
    found = {}
    for name, row in files.items():
        result = score(rm, write_jsonl(tmp_path / "rows.jsonl", [row] * 2), "--raw")
        found[name] = rows_of(result)
        assert "answers of 2 rows" in result.stderr
    assert {"chosen_score", "rejected_score"} <= found["hh"][0].keys()
    assert found["scored pair"][0]["chosen"] == " thank you"
    assert len(found["ranking"][0]["scores"]) == 3
    assert found["ranking"][0]["scores"][0] == pytest.approx(found["scored pair"][0]["chosen_score"], abs=1e-5)
    assert found["kto"][0]["score"] == pytest.approx(found["ranking"][0]["scores"][0], abs=1e-5)
    assert all(isinstance(found[name][0]["score"], float) for name in ("text", "messages"))


@pytest.mark.parametrize(
    ("stage", "row", "arguments", "message"),
    [
        ("rm", {"prompt": "a"}, [], "found the keys prompt"),
        ("rm", {"prompt": "a", "response": " b"}, ["--out", "x.txt"], "must end in .jsonl"),
        ("rm", {"prompt": "a", "response": " b"}, ["--label", "x"], "a label does not apply"),
        ("rm", {"prompt": "a", "response": " b"}, ["--limit", "3"], "Write --set limit=VALUE"),
        ("sft/model", {"prompt": "a", "response": " b"}, [], "score.weight"),
    ],
)
def test_what_cannot_be_scored_is_refused_in_one_line(rm, tmp_path, stage, row, arguments, message):
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    assert message in refused("rm", "score", rm.parent / stage, path, *arguments)


def test_a_bad_row_is_counted_and_skipped(rm, tmp_path):
    rows = [{"prompt": "a", "response": " b"}, {"prompt": "a", "response": 7}]
    result = score(rm, write_jsonl(tmp_path / "rows.jsonl", rows), "--on-bad-row", "skip")
    assert len(rows_of(result)) == 1
    assert "1 rows cannot be read and have no scores" in result.stderr


def test_typed_lines_have_the_scores_of_a_file(rm, tmp_path):
    texts = [("we will send", " a lamp"), ("we will send", " no"), ("", "thank you")]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": p, "response": r} for p, r in texts[:2]])
    wanted = [row["score"] for row in rows_of(score(rm, path))]
    typed = "\ufeff" + "".join(f"{p}\t{answer}\n" for p, answer in texts[:2]) + "\nwe will send\tno\nthank you\n"
    rows = rows_of(score(rm, "-", input=typed))
    assert [row["score"] for row in rows[:2]] == pytest.approx(wanted, abs=1e-5)
    assert rows[2] == rows[1], "a space separates a prompt and an answer that touch"
    assert (rows[3]["prompt"], rows[3]["response"]) == ("", "thank you")
    assert "--num: does not go with SOURCE -" in refused("rm", "score", rm, "-", "--num", 3, input=typed)


def test_the_correlation_needs_no_format(rm, tmp_path):
    """Rows with prompt, response and score are read as demonstrations; their score is compared all the same."""
    rows = [{"prompt": "a", "response": " " + "x " * n, "score": n} for n in range(1, 7)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    words = [" ".join(score(rm, path, *flags).stderr.split()) for flags in ([], ["--format", "scored"])]
    assert "6 rows have a score or label: correlation" in words[0]
    assert words[0].partition("correlation")[2] == words[1].partition("correlation")[2]
    write_jsonl(path, [*rows, {**rows[0], "score": 10**400}, {**rows[0], "score": math.nan}])
    result = score(rm, path)
    assert "6 rows have a score or label: correlation" in " ".join(result.stderr.split()), "finite ones"
    assert rows_of(result)[-1]["score_before"] is None, "JSON has no NaN"


def test_the_better_answer_takes_its_mark_of_a_cut_answer_along(rm, tmp_path):
    row = {"prompt": "a lamp", "responses": [" sorry", " thank you"], "scores": [0, 1], "ended": [False, True]}
    (scored,) = rows_of(score(rm, write_jsonl(tmp_path / "in.jsonl", [row])))
    assert (scored["chosen"], scored["ended"]) == (" thank you", [True, False])
