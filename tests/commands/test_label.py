"""`rlhf label`: keys become preference rows, blind, shuffled and resumed; agreement of two labellers; the page."""

import contextlib
import errno
import itertools
import json
import os
import subprocess
import sys
import threading
from collections import Counter

import httpx2
import pytest

from rlhf_cli.commands import label as label_command
from rlhf_cli.commands.label import Labelling, Page, label, labels_in, pairs_of, show_agreement
from rlhf_cli.commands.options import SourceOptions
from rlhf_cli.commands.output import Output, items
from rlhf_cli.config.data import DataSource
from rlhf_cli.data.stage_rows import ranking
from rlhf_cli.errors import ArtifactError, ConfigError, DataError
from support.paths import ROOT
from support.projects import refused
from support.tiny import read_jsonl, write_jsonl
from support.writers import contents, failing_after

NUM = 40


@pytest.fixture
def source(tmp_path):
    """Pairs of two models, as `rlhf generate --compare sft` writes them."""
    texts = [{"prompt": f"Question {n}?", "response": f" Yes {n}.", "sft_response": f" No {n}."} for n in range(NUM)]
    return write_jsonl(tmp_path / "replies.jsonl", [{**row, "ended": n % 5 > 0} for n, row in enumerate(texts)])


@pytest.fixture
def ask(monkeypatch):
    """Label with these keys; returns the pairs that were shown."""

    def run(keys, path, out=None, **options):
        shown = []

        def answer(labelling, _port):
            for key in [*"".join(keys.split()), "q"]:
                if labelling.current is not None:
                    shown.append(labelling.current)
                if key == "q":
                    return
                labelling.take(key)

        monkeypatch.setattr(label_command, "serve", answer)
        label(str(path), SourceOptions(), out, **options)
        return shown

    return run


# ------------------------------------------------------------------------------------------- rows


def test_keys_write_rows_that_the_reward_model_reads(source, ask, tmp_path):
    keys = ("1 2t\ns" * NUM)[: 6 * NUM // 4 * 4]
    shown = ask(keys, source)
    out = tmp_path / "replies.labels.jsonl"
    rows, drops = read_jsonl(out), read_jsonl(tmp_path / "replies.labels.jsonl.dropped")
    assert len(shown) == NUM
    assert (len(rows), Counter(drop["reason"] for drop in drops)) == (NUM // 2, {"tie": NUM // 4, "skipped": NUM // 4})
    before = {row["prompt"]: row for row in read_jsonl(source)}
    for row in rows:
        pair, input_row = shown[row["number"]], before[row["prompt"]]
        assert pair["replies"][row["side"] - 1] == row["chosen"], "the key names the side of the screen"
        assert set(pair["replies"]) == {row["chosen"], row["rejected"]}
        assert row["chosen"] == input_row[row["chosen_column"]]
        assert row["rejected"] == input_row[row["rejected_column"]]
        ended = {"response": input_row["ended"], "sft_response": True}
        expected = [ended[row["chosen_column"]], ended[row["rejected_column"]]]
        assert row.get("ended", [True, True]) == expected
    read = [ranking(item) for item in items(DataSource(path=str(out)), "rm pairs", "error")]
    assert [(r.prompt, *r.texts) for r in read if r] == [
        (row["prompt"], row["chosen"], row["rejected"]) for row in rows
    ]


def test_the_labeller_is_blind_and_sees_shuffled_rows_and_sides(source, ask, tmp_path):
    def order(name, **options):
        shown = ask("s" * NUM, source, tmp_path / f"{name}.jsonl", **options)
        assert all(list(pair) == ["number", "prompt", "replies"] for pair in shown)
        return [pair["prompt"] for pair in shown], [pair["replies"][0].startswith(" Yes") for pair in shown]

    prompts, sides = order("a")
    assert prompts != sorted(prompts, key=lambda prompt: int(prompt.split()[1][:-1]))
    assert NUM / 4 < sum(sides) < NUM * 3 / 4
    assert order("again") == (prompts, sides)
    same_order, other_sides = order("ada", labeller="ada")
    assert same_order == prompts, "two labellers who stop early have pairs in common"
    assert other_sides != sides, "a habit of taking the first reply is no agreement"
    assert order("seed", seed=1)[0] != prompts


def test_every_kind_of_pairs_is_read(tmp_path):
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    kinds = {
        "samples": (
            {"prompt": "A?", "responses": [" a", " b", " c", " d", " e"], "scores": [None] * 5},
            [("reply 1", "reply 2"), ("reply 3", "reply 4")],
        ),
        "preferences": ({"prompt": "A?", "chosen": " a", "rejected": " b"}, [("chosen", "rejected")]),
        "base": ({"prompt": turns, "response": "a", "base_response": "b"}, [("response", "base_response")]),
        "messages": ({"prompt": turns, "chosen": "a", "rejected": "b"}, [("chosen", "rejected")]),
    }
    for name, (row, columns) in kinds.items():
        pairs, unseen = pairs_of(DataSource(path=str(write_jsonl(tmp_path / f"{name}.jsonl", [row]))), "error")
        assert [tuple(reply.column for reply in pair.replies) for pair in pairs] == columns
        assert not unseen
        expected = turns if isinstance(row["prompt"], list) else "A?"
        assert {json.dumps(pair.prompt_column) for pair in pairs} == {json.dumps(expected)}
        texts = [reply.text for pair in pairs for reply in pair.replies]
        assert texts == (["a", "b"] if expected == turns else [" a", " b", " c", " d"])[: len(texts)]
    mapped = DataSource(path=str(tmp_path / "base.jsonl"), keys={"chosen": "response", "rejected": "base_response"})
    [pair], _ = pairs_of(mapped, "error")
    assert [reply.column for reply in pair.replies] == ["response", "base_response"]


def test_pairs_that_teach_nothing_are_not_shown(tmp_path):
    rows = [{"prompt": "A?", "response": " a", "sft_response": text} for text in (" b", "a ", " ", "")]
    pairs, unseen = pairs_of(DataSource(path=str(write_jsonl(tmp_path / "rows.jsonl", rows))), "error")
    assert (len(pairs), unseen) == (1, {"the replies are equal": 1, "a reply is blank": 2})
    single = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "A?", "response": "a"}])
    with pytest.raises(DataError, match=r"rows.jsonl:1: the row has 1 reply, a pair needs two. Write two with"):
        pairs_of(DataSource(path=str(single)), "error")


# ------------------------------------------------------------------------------------------- resuming


KEYS_OF_10 = "12ts21t12s"


def test_a_run_that_is_killed_in_a_line_resumes_with_the_same_pair(source, ask, tmp_path, monkeypatch):
    expected, out = tmp_path / "expected.jsonl", tmp_path / "out.jsonl"
    every = ask(KEYS_OF_10, source, expected, num=10)
    for lines in range(10):
        with failing_after(monkeypatch, lines):
            ask(KEYS_OF_10, source, out, num=10)
        shown = ask(KEYS_OF_10[lines:], source, out, num=10)
        assert shown == every[lines:]
        assert contents(out) == contents(expected)
        ask("", source, out, num=10, restart=True)
        assert contents(out) == contents(expected), "a restart that is ended before its first answer discards nothing"
        for path in tmp_path.glob("out.*"):
            path.unlink()
    [first, *_] = ask("q", source, out)
    assert first == every[0]


def test_back_takes_answers_back_also_those_of_an_earlier_session(source, ask, tmp_path):
    expected, out = tmp_path / "expected.jsonl", tmp_path / "out.jsonl"
    ask(KEYS_OF_10, source, expected)
    ask("b 11s bb 2", source, out)  # the first `b` has nothing to take back
    assert [row["side"] for row in read_jsonl(out)] == [1, 2]
    ask("bbb" + KEYS_OF_10, source, out)
    assert contents(out) == contents(expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labeller": "小王"}, r'made with other settings: labeller \("ada", now "小王"\)'),
        ({"seed": 1}, r"made with other settings: seed \(0, now 1\)"),
        ("a row", "made with other settings: data.rows"),
        ("dropped", "1 answers are in it and in out.jsonl.dropped, but the last one is number 2"),
    ],
)
def test_answers_to_other_pairs_are_not_continued(source, ask, tmp_path, change, message):
    out = tmp_path / "out.jsonl"
    ask("t1", source, out, labeller="ada")
    before = out.read_bytes()
    if change == "a row":
        write_jsonl(source, read_jsonl(source)[1:])
    if change == "dropped":
        out.with_name("out.jsonl.dropped").unlink()
    with pytest.raises((ArtifactError, ConfigError), match=message):
        ask("1", source, out, **{"labeller": "ada"} | (change if isinstance(change, dict) else {}))
    assert out.read_bytes() == before


EDITED = [
    b"[" * 100_000,
    b'{"prompt": "\xff"}',
    [],
    {},
    {"number": True},
    {"number": 7},
    {"side": []},
    {"chosen_column": ["x"]},
    {"reason": []},
    {"columns": [1, 2]},
    {"columns": ["response"]},
    {"pair": ["x"]},
]


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.dropped", "out.jsonl.settings"])
@pytest.mark.parametrize("edit", EDITED, ids=lambda edit: str(edit)[:30])
def test_an_answer_edited_by_hand_is_one_line_or_does_no_harm(source, ask, tmp_path, name, edit):
    out, other = tmp_path / "out.jsonl", tmp_path / "other.jsonl"
    ask("1t", source, out, num=3)
    ask("2t1", source, other, num=3)
    path = tmp_path / name
    if name != "out.jsonl.settings" and isinstance(edit, dict):
        (line,) = read_jsonl(path)
        edit = {**line, **edit} if edit else {key: line[key] for key in line if key != "number"}
    content = edit if isinstance(edit, bytes) else json.dumps(edit).encode()
    path.write_bytes(content + b"\n")
    for keys in ("", "b", "bb", "1"):
        with contextlib.suppress(ArtifactError, ConfigError, DataError):
            ask(keys, source, out, num=3)
    path.write_bytes(content + b"\n")
    with contextlib.suppress(ArtifactError, DataError):
        show_agreement(other, out)


def test_a_line_without_its_number_is_named(source, ask, tmp_path):
    out = tmp_path / "out.jsonl"
    ask("12", source, out)
    first, second = read_jsonl(out)
    write_jsonl(out, [first, {key: second[key] for key in second if key != "side"}])
    with pytest.raises(ArtifactError, match=r"out.jsonl:2: has no `side`\. Restore the line as it was written"):
        ask("1", source, out)


def test_a_full_disk_loses_no_answer(source, ask, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"

    def full(_descriptor):
        if len(read_jsonl(out)) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ArtifactError, match=r"out.jsonl: cannot be written \(No space left on device\)"):
            ask("1212", source, out)
    shown = ask("1", source, out)
    assert [row["side"] for row in read_jsonl(out)] == [1, 2, 1, 1]
    assert shown[0]["number"] == 3


def test_the_summary_says_who_won_once_all_pairs_have_an_answer(source, ask, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    shown = ask("sssss", source, out, num=5)
    keys = "".join("1" if pair["replies"][0].startswith(" Yes") else "2" for pair in shown[:4]) + "t"
    capsys.readouterr()
    ask(keys[:2], source, out, num=5, restart=True)
    reading = capsys.readouterr().err
    assert "2 of 5 pairs: preferences 2, ties 0, skipped 0" in reading
    assert "was better than" not in reading, "the labeller may resume, so the result stays hidden"
    assert "run the same command without --restart to resume" in reading
    ask("", source, out, num=5, restart=True)
    reading = capsys.readouterr().err
    assert f"no answer, {out} is as it was before" in reading
    assert "run the same command to resume" in reading
    ask(keys[2:], source, out, num=5)
    reading = capsys.readouterr().err
    assert "`response` was better than `sft_response` in 4.5 of 5 (90.0 %" in reading
    assert f"rm YOUR_rm.yaml --set data.train={out}" in reading


def test_a_program_answers_in_place_of_a_person(tmp_path):
    """docs/gold_labeller.py."""
    rows = read_jsonl(ROOT / "data/support/pref_test.jsonl")[:6]
    replies = [{"prompt": row["prompt"], "responses": [row["rejected"], row["chosen"]]} for row in rows]
    pairs, out = write_jsonl(tmp_path / "pairs.jsonl", replies), tmp_path / "labels.jsonl"
    command = [sys.executable, str(ROOT / "docs/gold_labeller.py"), str(pairs), "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert "6 of 6 pairs" in done.stdout
    gold = {row["prompt"]: row["chosen" if row["gold_chosen"] > row["gold_rejected"] else "rejected"] for row in rows}
    labelled = {row["prompt"]: row["chosen"] for row in read_jsonl(out)}
    assert len(labelled) > 3
    assert labelled.items() <= gold.items()


def test_the_file_of_a_labeller_is_beside_the_rows(source, ask, tmp_path):
    for name in ("ada", "小王"):
        ask("1", source, labeller=name)
        out = tmp_path / f"replies.labels.{name}.jsonl"
        assert len(read_jsonl(out)) == 1
        assert f'"labeller": "{name}"' in out.with_name(out.name + ".settings").read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match="--out: is missing"):
        ask("1", tmp_path)
    with pytest.raises(ConfigError, match="--labeller: 'a/b' cannot be part of a file name"):
        ask("1", source, labeller="a/b")


# ------------------------------------------------------------------------------------------- two labellers


def test_the_agreement_of_two_labellers(source, ask, tmp_path, capsys):
    """20 pairs in common. They agree on 10 preferences and 2 ties, and differ on 5 preferences and 1 tie."""
    files = {name: tmp_path / f"{name}.jsonl" for name in ("ada", "ben")}
    shown = {name: ask("s" * NUM, source, file, labeller=name) for name, file in files.items()}
    assert set(labels_in(files["ada"]).values()) == {"skipped"}, "a file without rows has dropped items beside it"

    def keys(name, wanted):
        """Keys for y(es), n(o), t(ie) and s(kip), which may be on either side."""
        first = ["y" if pair["replies"][0].startswith(" Yes") else "n" for pair in shown[name]]
        return "".join(key if key in "ts" else "12"[key != side] for key, side in zip(wanted, first, strict=False))

    wanted = {"ada": "yyyyynnnnn tt yyynn t ss yy", "ben": "yyyyynnnnn tt nnnyy y yss"}
    for name, file in files.items():
        ask(keys(name, wanted[name].replace(" ", "")), source, file, labeller=name, restart=True)
    show_agreement(files["ada"], files["ben"])
    text = capsys.readouterr().out
    assert text.startswith("18 pairs have an answer in both files\n")
    assert "same answer       12 of 18 (66.7 %, 95 % interval 43.7 % to 83.7 %)" in text
    for line in ("opposite          5", "tie in one        1", "tie in both       2"):
        assert f"  {line}" in text
    assert f"not counted: 3 skipped in one, 1 only in {files['ada']}\n" in text
    labels = {name: labels_in(file) for name, file in files.items()}
    both = [(labels["ada"][k], labels["ben"][k]) for k in labels["ada"] if k in labels["ben"]]
    both = [pair for pair in both if "skipped" not in pair]
    chance = sum(a == b for (a, _), (_, b) in itertools.product(both, both)) / len(both) ** 2
    assert f"Cohen's kappa     {(12 / 18 - chance) / (1 - chance):.2f} (95 % interval" in text
    other = write_jsonl(tmp_path / "c.jsonl", [{"prompt": "B", "chosen": "1", "rejected": "2"}])
    with pytest.raises(DataError, match="no pair has an answer both here and in"):
        show_agreement(files["ada"], other)


@pytest.mark.parametrize(
    "option", ["--out x.jsonl", "--seed 4", "--key prompt=q", "--set limit=1", "--format ranking", "--on-bad-row skip"]
)
def test_an_option_that_does_nothing_beside_agreement_is_refused(option, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "chosen": "1", "rejected": "2"}])
    assert f"{option.split()[0]}: does nothing" in refused("label", path, "--agreement", path, *option.split())


def test_a_file_of_a_judge_or_of_a_data_set_is_a_labeller_too(tmp_path):
    first = [{"prompt": f"{n}?", "chosen": " a", "rejected": f" b{n}"} for n in range(30)]
    second = [{"prompt": f"{n}?", "responses": [f" b{n}", " a"], "scores": [n % 3, 1]} for n in range(30)]
    labels = [labels_in(write_jsonl(tmp_path / f"{n}.jsonl", rows)) for n, rows in enumerate((first, second))]
    assert list(labels[0]) == list(labels[1])
    for n, (a, b) in enumerate(zip(labels[0].values(), labels[1].values(), strict=True)):
        assert b == [a, "tie", {"1": "2", "2": "1"}[a]][n % 3]
    assert 5 < sum(label == "1" for label in labels[0].values()) < 25, "the order is not that of chosen and rejected"


# ------------------------------------------------------------------------------------------- the page


@pytest.fixture
def served(source, tmp_path):
    pairs, _ = pairs_of(DataSource(path=str(source)), "error")
    with Output(tmp_path / "out.jsonl", {}) as output:
        server = Page(Labelling(pairs, output, 0, None, 3), 0)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        headers = {"Origin": f"http://127.0.0.1:{server.port}"}
        with httpx2.Client(base_url=f"{server.url}/{server.token}/", headers=headers) as client:
            yield server, client
        server.stop()
        thread.join()


def test_the_page_takes_keys_and_ends(served, tmp_path):
    server, client = served
    html = client.get("").raise_for_status()
    assert "NONCE" not in html.text
    assert html.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'nonce-")
    state = client.get("state").json()["state"]
    assert sorted(state) == ["counts", "done", "number", "prompt", "replies", "total"], "blind"
    for done, key in enumerate("12t"):
        answer = client.post("answer", json={"done": done, "key": key}).raise_for_status().json()
    assert (answer["state"]["number"], answer["state"]["counts"]) == (None, {"preferences": 2, "ties": 1, "skipped": 0})
    assert client.post("answer", json={"done": 3, "key": "1"}).status_code == 400
    assert client.post("answer", json={"done": 3, "key": "b"}).json()["state"]["number"] == 2
    late = client.post("answer", json={"done": 3, "key": "b"})
    assert (late.status_code, late.json()["state"]["done"]) == (409, 2), "a second window cannot answer unseen pairs"
    assert not server.ended.is_set()
    assert client.post("answer", json={"done": 0, "key": "q"}).json()["ended"]
    assert server.ended.is_set()
    assert [row["side"] for row in read_jsonl(tmp_path / "out.jsonl")] == [1, 2]


def test_other_users_and_other_sites_can_neither_read_nor_answer(served):
    server, client = served
    answer = {"json": {"done": 0, "key": "1"}}
    root = f"http://127.0.0.1:{server.port}"
    assert client.get(f"{root}/wrong/state").status_code == 404, "without the token"
    assert client.get("state", headers={"Host": "evil.example"}).status_code == 403, "DNS rebinding"
    for origin in ("null", "http://evil.example", ""):
        assert client.post("answer", headers={"Origin": origin}, **answer).status_code == 403
    for body in ([], {"done": 0}, {"done": 0, "key": "x"}, {"done": 0, "key": ["1"]}, {"done": 0, "key": "1" * 900}):
        assert client.post("answer", json=body).status_code == 400
    assert client.post("answer", json={"done": 0, "key": "1" * 2000}).status_code == 413
    assert server.labelling.done == 0
    assert server.listener.getsockname()[0] == "127.0.0.1"


def test_the_page_ends_when_an_answer_cannot_be_written(served, monkeypatch):
    server, client = served

    def full(_key):
        raise ArtifactError("out.jsonl: cannot be written")

    monkeypatch.setattr(server.labelling, "take", full)
    refused = client.post("answer", json={"done": 0, "key": "1"})
    assert (refused.status_code, refused.json()) == (507, {"error": "out.jsonl: cannot be written", "ended": True})
    assert server.ended.is_set()
    assert server.error is not None
