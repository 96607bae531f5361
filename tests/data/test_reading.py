"""Which rows a stage reads, on which side they are, how they are cut, and how tokens are cached on disk."""

from __future__ import annotations

import errno
import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rlhf_cli.config.data import DataSource, Rows
from rlhf_cli.data import cache
from rlhf_cli.data.answers import RankedIds
from rlhf_cli.data.cache import Table, TableWriter, tokenise
from rlhf_cli.data.encode import Example, LengthLimits, Skipped, fit, fit_prompt
from rlhf_cli.data.encoders import DemonstrationEncoder
from rlhf_cli.data.records import Answer, Message, Record, batched
from rlhf_cli.data.row_counts import DUPLICATE, Report
from rlhf_cli.data.splits import Drawn
from rlhf_cli.data.stage_rows import StageRows, records
from rlhf_cli.errors import DataError
from support.forked import Forked
from support.paths import ROOT
from support.tiny import training_examples


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def numbered(count, *, name="question", start=0):
    return [{"prompt": f"{name} {i}", "response": f" answer {i}"} for i in range(start, start + count)]


def sides(data, purpose="sft", **more):
    prompts = {"train": [], "test": []}
    for side, record in records(StageRows(data, purpose), Report(), **more):
        prompts[side].append(record.prompt)
    return prompts


# ------------------------------------------------------------------------------------------- sides


def test_given_test_rows_are_the_only_ones_held_out_and_one_side_alone_is_that_side(tmp_path):
    train, test = write(tmp_path / "a.jsonl", numbered(50)), write(tmp_path / "b.jsonl", numbered(5, name="other"))
    for data in (Rows(train=train, test=test, test_fraction=0.5), Rows(train=train, test_fraction=0.3)):
        both = sides(data)
        assert data.test is None or (len(both["train"]), len(both["test"])) == (50, 5)
        for side in ("train", "test"):
            assert sides(data, only=side) == {"train": [], "test": [], side: both[side]}


def test_shares_of_the_stages_have_no_row_in_common_and_leave_none_out(tmp_path):
    rows = [*numbered(3000), *numbered(100)]
    path = write(tmp_path / "a.jsonl", rows)
    data = Rows(train=path, split=[2, 4, 4], test_fraction=0.1)
    by_stage = {purpose: sides(data, purpose) for purpose in ("sft", "ppo")}
    pairs = [{"prompt": row["prompt"], "chosen": " a", "rejected": " b"} for row in rows]
    rm = Rows(train=write(tmp_path / "pairs.jsonl", pairs), split=[2, 4, 4], test_fraction=0.1)
    by_stage["rm"] = sides(rm, "rm pairs")
    prompts = {name: side["train"] + side["test"] for name, side in by_stage.items()}
    assert sum(map(len, prompts.values())) == len(rows)
    assert not any(set(prompts[a]) & set(prompts[b]) for a, b in (("sft", "rm"), ("sft", "ppo"), ("rm", "ppo")))
    # 3,100 draws: three standard deviations are 67 of 620 and 82 of 1,240.
    assert len(prompts["sft"]) == pytest.approx(620, abs=67)
    assert len(prompts["rm"]) == pytest.approx(1240, abs=82)
    assert all(0.05 < len(side["test"]) / len(side["train"]) < 0.18 for side in by_stage.values())


def test_weights_say_how_often_an_epoch_has_a_row(tmp_path):
    a, b, c = (write(tmp_path / f"{name}.jsonl", numbered(400, name=name)) for name in ("whole", "often", "seldom"))
    train = [{"path": a}, {"path": b, "weight": 2.5}, {"path": c, "weight": 0.25}]
    report = Report()
    data = Rows.model_validate({"train": train, "test_fraction": 0.1})
    counts = {"train": Counter(), "test": Counter()}
    for side, record in records(StageRows(data, "sft"), report):
        counts[side][record.prompt] += 1
    copies = {name: Counter(n for p, n in counts["train"].items() if p.startswith(name)) for name in ("whole", "often")}
    assert set(copies["whole"]) == {1}
    assert set(copies["often"]) == {2, 3}
    assert copies["often"][3] / copies["often"].total() == pytest.approx(0.5, abs=0.08)
    kept = sum(p.startswith("seldom") for p in counts["train"])
    assert kept == pytest.approx(0.25 * 360, abs=26)
    assert set(counts["test"].values()) == {1}, "a held-out row is there once, whatever its weight"
    assert not set(counts["train"]) & set(counts["test"])
    assert report.rows["train"] == counts["train"].total()
    assert any("seldom.jsonl" in line and "rows of" in line for line in report.lines())


def test_each_source_of_a_mixture_has_its_own_limit_and_format(tmp_path):
    a = write(tmp_path / "a.jsonl", numbered(30))
    reply = {"role": "assistant", "content": "ho"}
    b = write(tmp_path / "b.jsonl", [{"messages": [{"role": "user", "content": f"hi {i}"}, reply]} for i in range(30)])
    data = Rows.model_validate({"train": [{"path": a, "limit": 7}, {"path": b, "limit": 5}], "test_fraction": 0})
    report = Report()
    assert len(list(records(StageRows(data, "sft"), report))) == 12
    assert (report.rows[a], report.rows[b]) == (7, 5)
    assert report.kinds == {a: "prompt_response", b: "messages"}


def test_duplicates_are_skipped_and_counted(tmp_path):
    rows = [*numbered(10), *numbered(4), {"prompt": "question 1", "response": " another answer"}]
    data = Rows(train=write(tmp_path / "a.jsonl", rows), test_fraction=0, deduplicate=True)
    report = Report()
    assert len(list(records(StageRows(data, "sft"), report))) == 11
    assert report.skipped == {"train": {DUPLICATE: 4}}
    assert len(sides(data.model_copy(update={"deduplicate": False}))["train"]) == 15


def test_select_cuts_a_file_into_parts_without_loss(tmp_path):
    path = write(tmp_path / "a.jsonl", numbered(300))
    parts = [sides(Rows(train=[DataSource(path=path, select=f"{k}/4")], test_fraction=0))["train"] for k in range(4)]
    assert sorted(prompt for part in parts for prompt in part) == sorted(row["prompt"] for row in numbered(300))
    assert all(40 < len(part) < 120 for part in parts)
    two = sides(Rows(train=[DataSource(path=path, select="0/4,2/4")], test_fraction=0))["train"]
    assert two == [row["prompt"] for row in numbered(300) if row["prompt"] in parts[0] + parts[2]]


# ---------------------------------------------------------------------------------------- bad rows


BAD = [
    *numbered(3),
    {"prompt": "question 3", "response": 7},
    *numbered(2, start=4),
    {"prompt": "question 6"},
    {"prompt": "question 7", "response": " \ud800"},
]


def test_bad_rows_stop_the_run_or_are_skipped_and_named(tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, BAD)
    with path.open("a") as file:
        file.write("{this is not JSON\n")
    with pytest.raises(DataError, match=rf"^{path}:4: .*$"):
        sides(Rows(train=str(path), test_fraction=0))
    report = Report()
    data = Rows(train=str(path), test_fraction=0, on_bad_row="skip")
    prompts = [record.prompt for _, record in records(StageRows(data, "sft"), report)]
    assert prompts == [f"question {i}" for i in (0, 1, 2, 4, 5)]
    lines = report.lines()
    assert report.skipped == {"train": {"can't be read": 4}}
    assert [line.split(": ")[1] for line in lines if line.startswith("skipped: ")] == [f"{path}:{n}" for n in (4, 7, 8)]


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"prompt": "p", "response": 7}, {}, "no row is left to train on.*5 rows: can't be read"),
        ({"colour": "red"}, {}, "found the keys colour, sft needs rows with"),  # skipping does not hide the wrong file
        ({"prompt": "p", "response": "r"}, {"split": [0, 1, 1]}, "no row is left to train on"),
    ],
)
def test_a_file_without_a_row_to_train_on_says_so(tmp_path, row, settings, message):
    data = Rows(train=write(tmp_path / "a.jsonl", [row] * 5), test_fraction=0, on_bad_row="skip", **settings)
    with pytest.raises(DataError, match=message):
        sides(data)


# --------------------------------------------------------------------------------------------- cut


def test_a_cut_sequence_keeps_its_answer_mask_and_needs_is_the_smallest_limit():
    """Random sequences of prompts, answers and turns. Each id equals its position."""
    random.seed(0)
    counts = Counter()
    for _ in range(3000):
        length, longest = random.randint(1, 30), random.randint(1, 30)
        ids = list(range(length))
        turns = [random.random() < 0.5 for _ in range(length)]
        answer = [False] + [turns[i // 4] for i in range(1, length)]
        side = random.choice(["drop", "left", "right"])
        bos = random.choice([0, None])
        fitted = fit(ids, answer, LengthLimits(longest, side), bos)
        if length <= longest:
            assert fitted == (ids, answer)
        elif side == "drop":
            assert fitted == Skipped(f"longer than {longest} tokens", needs=length)
        elif isinstance(fitted, Skipped):
            counts[f"{side} skipped"] += 1
            assert not isinstance(fit(ids, answer, LengthLimits(fitted.needs, side), bos), Skipped)
            assert isinstance(fit(ids, answer, LengthLimits(fitted.needs - 1, side), bos), Skipped)
            last = length - next((n for n, a in enumerate(reversed(answer)) if not a), length)
            if side == "right":
                assert not any(answer[:longest])
            elif longest > 1:
                # The last answer with a token before it does not fit.
                assert length - last + 1 > longest or not any(answer)
        else:
            kept, marks = fitted
            assert len(kept) == len(marks) == longest
            num_first = int(side == "left" and bos == 0 and longest > 1)
            expected = ids[:longest] if side == "right" else [0] * num_first + ids[num_first - longest :]
            assert kept == expected
            assert marks[1:] == [answer[i] for i in kept[1:]]
            counts[side] += 1
    assert min(counts[name] for name in ("left", "right", "left skipped", "right skipped")) > 50, counts


def test_a_short_answer_is_skipped():
    row = [1, 2, 3], [False, True, True]
    assert fit(*row, LengthLimits(9, min_response_length=2), None) == row
    skipped = Skipped("answers of fewer than 3 tokens")
    assert fit(*row, LengthLimits(9, min_response_length=3), None) == skipped


def test_prompts_are_cut_on_the_configured_side():
    assert fit_prompt([5, 6, 7], LengthLimits(3), None) == [5, 6, 7]
    assert fit_prompt([5, 6, 7, 8], LengthLimits(3), None) == Skipped("prompts longer than 3 tokens", needs=4)
    assert fit_prompt([5, 6, 7, 8], LengthLimits(3, "right"), 5) == [5, 6, 7]
    assert fit_prompt([5, 6, 7, 8], LengthLimits(3, "left"), None) == [6, 7, 8]
    assert fit_prompt([5, 6, 7, 8], LengthLimits(3, "left"), 5) == [5, 7, 8]


# ------------------------------------------------------------------------------------------- table


@dataclass(frozen=True)
class Thing:
    ids: list[int]
    learned: list[bool]
    answers: list[list[int]]
    score: float
    where: str
    row: Record
    columns: dict[str, Any] = field(default_factory=dict)


def things(count):
    random.seed(1)
    return [
        Thing(
            [random.randrange(100_000) for _ in range(i % 7)],
            [random.random() < 0.5 for _ in range(i % 5)],
            [[i, j] for j in range(i % 4)],
            i / 3,
            f"file:{i}",
            Record(f"p{i}", f"file:{i}", (Answer(" r\n\0é\u2028"),), messages=(Message("user", "hi"),) * (i % 3)),
            {"a": [1, {"b": None}], "half a character": "\ud800", "n": i},
        )
        for i in range(count)
    ]


def build(path, rows, kind, batch=1000):
    writer = TableWriter(path, kind)
    for some in batched(rows, batch):
        writer.write(some)
    writer.close()
    return Table(path, kind)


@pytest.mark.parametrize("batch", [1, 3, 1000])
def test_a_table_returns_the_rows_that_were_written(tmp_path, batch):
    rows = things(25)
    built = build(tmp_path / "a.arrow", rows, Thing, batch)
    assert len(built) == 25
    assert list(built) == rows
    assert built[-1] == rows[-1]
    assert built[3:20:4] == rows[3:20:4]
    assert built.lengths("ids").tolist() == [len(row.ids) for row in rows]
    assert built.numbers("score").tolist() == [row.score for row in rows]
    for index in (25, -26):
        with pytest.raises(IndexError):
            built[index]


def test_a_table_is_memory_mapped(tmp_path):
    """40 MB of tokens: opening the table and reading a hundred rows adds little to the process's memory."""
    build(tmp_path / "a.arrow", [Example(list(range(2000)), [True] * 2000, "w")] * 5_000, Example)
    assert (tmp_path / "a.arrow").stat().st_size > 40_000_000
    program = (
        "import sys; from pathlib import Path; from rlhf_cli.data.cache import Table; "
        "from rlhf_cli.data.encode import Example\n"
        "status = lambda: open('/proc/self/status')\n"
        "def anonymous(): return int(next(l for l in status() if l.startswith('RssAnon')).split()[1])\n"
        "before = anonymous(); t = Table(Path(sys.argv[1]), Example)\n"
        "assert t[4999].ids[-1] == 1999 and len(t) == 5000 and sum(len(t[i].ids) for i in range(0, 5000, 50))\n"
        "print(anonymous() - before)"
    )
    code, output = Forked(program, str(tmp_path / "a.arrow"), folder=ROOT, log=tmp_path / "log").wait()
    assert code == 0, output
    assert int(output) < 10_000, "kB"


# ------------------------------------------------------------------------------------------- cache


class Counting(DemonstrationEncoder):
    """Encodes demonstrations and counts the rows."""

    num_rows = 0

    def sequences(self, rows):
        self.num_rows += len(rows)
        return super().sequences(rows)


@pytest.fixture
def cached(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))

    def run(data, *, tokenizer=tokenizer, **more):
        encoder = Counting(tokenizer, StageRows(data, "sft", limits=LengthLimits(500), **more))
        return tokenise(encoder), encoder.num_rows

    return run


def entries(tmp_path):
    """The folders of the cache entries."""
    return [path for path in (tmp_path / "cache" / cache.FOLDER).iterdir() if path.is_dir()]


def test_rows_are_tokenised_once(tmp_path, cached, tokenizer):
    data = Rows(train=write(tmp_path / "a.jsonl", numbered(2500)), test_fraction=0.1)
    first, encoded = cached(data)
    assert encoded == 2500 == len(first.train) + len(first.test)
    again, encoded = cached(data)
    assert encoded == 0
    assert list(again.train) == list(first.train)
    assert list(again.test) == list(first.test)
    assert again.lines == first.lines
    train_prompts = sides(data)["train"]
    wanted = [d for d in numbered(2500) if d["prompt"] in train_prompts]
    plain = training_examples(tokenizer, [Record(d["prompt"], "", (Answer(d["response"]),)) for d in wanted])
    assert [e.ids for e in first.train] == [e.ids for e in plain]


def test_a_change_of_data_settings_or_code_makes_a_new_cache_entry(tmp_path, cached, tokenizer, monkeypatch):
    path = write(tmp_path / "a.jsonl", numbered(20))
    data = Rows(train=path, test_fraction=0.1)
    cached(data)
    import copy

    other = copy.deepcopy(tokenizer)
    other.add_tokens(["question"])
    assert cached(data, tokenizer=other)[1] == 20
    assert cached(data, template="Q: {prompt}")[1] == 20
    assert cached(data, prompt_words=2)[1] == 20
    assert cached(Rows(train=path, test_fraction=0.2))[1] == 20
    with monkeypatch.context() as changed:
        changed.setattr(cache, "_digest_code", lambda: "other code")
        assert cached(data)[1] == 20
    assert cached(data)[1] == 0
    write(tmp_path / "a.jsonl", numbered(21))
    assert cached(data)[1] == 21


def test_a_cache_without_room_for_a_folder_is_one_line(tmp_path, cached, monkeypatch):
    data = Rows(train=write(tmp_path / "a.jsonl", numbered(5)), test_fraction=0)
    make = Path.mkdir

    def full(self, *arguments, **options):
        if self.suffix == ".partial":
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        make(self, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(
        DataError, match=r"could not write the tokenised rows \(Disk quota exceeded\)\. Free disk space"
    ):
        cached(data)


def test_a_bad_row_leaves_no_cache_entry(tmp_path, cached):
    data = Rows(train=write(tmp_path / "a.jsonl", BAD), test_fraction=0)
    with pytest.raises(DataError):
        cached(data)
    assert not entries(tmp_path)


@pytest.mark.parametrize("fault", ["not writable", "no locks"])
def test_a_cache_that_cannot_be_used_does_not_stop_the_run(tmp_path, cached, monkeypatch, fault):
    if fault == "no locks":  # Lustre without them
        monkeypatch.setattr(cache.fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOSYS, "not implemented")))
    else:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "file" / "cache"))
    rows, num_encoded = cached(Rows(train=write(tmp_path / "a.jsonl", numbered(50)), test_fraction=0))
    assert num_encoded == 50 == len(rows.train)
    assert rows.train[0].where.endswith(":1")


def make_old(folder):
    old = time.time() - 31 * 86400
    for path in sorted(folder.rglob("*")):
        os.utime(path, (old, old))


def test_entries_unused_for_a_month_are_deleted_and_nothing_else(tmp_path, cached):
    """Other files in the directory that RLHF_CACHE names, in our folder, and in an entry, all a month old."""
    data = Rows(train=write(tmp_path / "a.jsonl", numbered(5)), test_fraction=0)
    cached(data)
    folder = tmp_path / "cache"
    (entry,) = entries(tmp_path)
    os.utime(entry, (0, time.time() - 29 * 86400))
    assert cached(data)[1] == 0
    assert time.time() - entry.stat().st_mtime < 3600, "the time of the last use"
    kept = [folder / "thesis.tex", folder / ("0" * 32) / "facts.json", folder / "photos" / "deep" / "one.jpg"]
    kept += [entry.parent / "notes.txt", entry.parent / "work" / "facts.json", entry / "mine.txt"]
    elsewhere = tmp_path / "elsewhere" / "facts.json"
    for path in (*kept, elsewhere):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    (entry.parent / ("1" * 32)).symlink_to(elsewhere.parent)
    make_old(tmp_path)
    cached(Rows(train=write(tmp_path / "b.jsonl", numbered(6)), test_fraction=0))
    assert [path.read_text() for path in (*kept, elsewhere)] == ["mine"] * 7
    assert not (entry / "facts.json").exists(), "the entry itself is deleted"


def test_a_folder_of_the_same_name_that_rlhf_did_not_make_is_not_used(tmp_path, cached):
    other = tmp_path / "cache" / cache.FOLDER / ("0" * 32) / "facts.json"
    other.parent.mkdir(parents=True)
    other.write_text("mine")
    make_old(tmp_path / "cache")
    assert cached(Rows(train=write(tmp_path / "a.jsonl", numbered(5)), test_fraction=0))[1] == 5
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == [other]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(("train.arrow", damage) for damage in ("bit", "random", "longer", "empty", "gone")),
        *(("test.arrow", "bit"), ("facts.json", "random"), ("facts.json", "gone")),
    ],
)
def test_a_changed_byte_rebuilds_the_entry_and_says_so(tmp_path, cached, name, damage):
    data = Rows(train=write(tmp_path / "a.jsonl", numbered(60)), test_fraction=0.1)
    first, _ = cached(data)
    rows, lines = [list(first.train), list(first.test)], first.lines
    (entry,) = entries(tmp_path)
    file = entry / name
    before = file.read_bytes()
    draw = random.Random(name)
    for _ in range(12 if damage == "bit" else 1):
        broken = bytearray(before)
        if damage == "bit":
            broken[draw.randrange(len(broken))] ^= 1 << draw.randrange(8)
        changed = {"bit": bytes(broken), "random": draw.randbytes(len(before)), "longer": before + b"\0", "empty": b""}
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes(changed[damage])
        again, _ = cached(data)
        assert [list(again.train), list(again.test)] == rows
        assert again.lines == [f"{entry}: the cached tokens are damaged, the rows are tokenised again", *lines]
        assert file.read_bytes() == before
    assert cached(data)[0].lines == lines


def test_two_processes_share_one_cache_entry(tmp_path, tokenizer_path):
    """Both start at the same time. One encodes; the other waits and reads the result."""
    path = write(tmp_path / "a.jsonl", numbered(3000))
    program = (
        "import sys\n"
        "from transformers import AutoTokenizer\n"
        "from rlhf_cli.config.data import Rows\n"
        "from rlhf_cli.data.encoders import DemonstrationEncoder\n"
        "from rlhf_cli.data.cache import tokenise\n"
        "from rlhf_cli.data.stage_rows import StageRows\n"
        "tokenizer, rows = AutoTokenizer.from_pretrained(sys.argv[2]), []\n"
        "class Counting(DemonstrationEncoder):\n"
        "    def sequences(self, some):\n"
        "        rows.extend(some)\n"
        "        return super().sequences(some)\n"
        "found = tokenise(Counting(tokenizer, StageRows(Rows(train=sys.argv[1]), 'sft')))\n"
        "print(len(rows), len(found.train), sum(map(len, (e.ids for e in found.train))))\n"
    )
    environment = {"RLHF_CACHE": str(tmp_path / "cache")}
    running = [
        Forked(program, path, tokenizer_path, folder=ROOT, log=tmp_path / f"log{i}", environment=environment)
        for i in range(2)
    ]
    outputs = [process.wait()[1].split() for process in running]
    assert sorted(int(line[0]) for line in outputs) == [0, 3000]
    assert outputs[0][1:] == outputs[1][1:]


# --------------------------------------------------------------------------------------- rows that are measured


def pair(number, where, *, swapped):
    answers = ("bad", "good") if swapped else ("good", "bad")
    return RankedIds([[1], [2]], Record(f"question {number}", where, tuple(map(Answer, answers)), ranked=True))


def test_the_rows_that_are_measured_are_drawn_from_the_whole_file():
    """A test set of right pairs, then swapped ones: the first half would say that all of them are right."""
    rows = [pair(i, f"test.jsonl:{i + 1}", swapped=i >= 100) for i in range(200)]
    drawn = Drawn(rows, 100, seed=0)
    swapped = sum(row.row.response == "bad" for row in drawn)
    assert 35 <= swapped <= 65
    assert str(drawn) == "100 of 200"
    assert drawn == [rows[i] for i in drawn.numbers]
    assert drawn.numbers == sorted(drawn.numbers), "in the order of the file"
    elsewhere = [pair(i, f"other.jsonl row {i}", swapped=i >= 100) for i in reversed(range(200))]
    same = Drawn(elsewhere, 100, seed=0)
    assert {(r.row.prompt, r.row.answers) for r in same} == {(r.row.prompt, r.row.answers) for r in drawn}
    assert Drawn(rows, 100, seed=1).numbers != drawn.numbers
    assert Drawn(rows, 200, seed=0) == rows
    assert str(Drawn(rows, 1000, seed=0)) == "200"


def test_measured_rows_are_grouped_by_source(tmp_path):
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test.jsonl").touch()
    sources = [DataSource(path=f"{tmp_path}/{name}") for name in ("a", "b/test.jsonl", "c/*.jsonl")]
    sources.append(DataSource(path="org/set", split="test"))
    where = [f"{tmp_path}/a/test.jsonl:3", f"{tmp_path}/b/test.jsonl row 2", "org/set[test] row 5"]
    rows = [pair(i, where[i % 3], swapped=False) for i in range(6)]
    assert Drawn(rows, 6, 0, sources).by_source == {"a": [0, 3], "test": [1, 4], "set": [2, 5]}
    assert Drawn(rows, 6, 0, sources[:1]).by_source == {}


def test_validation_rows_are_a_side_of_their_own(tmp_path):
    """They are read whole, whatever `test_fraction` holds out of the training rows."""
    rows = [{"prompt": f"question {i}", "response": "yes"} for i in range(100)]
    train = write(tmp_path / "train.jsonl", rows)
    other = write(tmp_path / "other.jsonl", rows[:40])
    data = Rows(train=[train], validation=[{"path": other, "weight": 3}], test_fraction=0.3)
    found = [side for side, _ in records(StageRows(data, "sft"), Report())]
    assert found.count("validation") == 40
    assert found.count("test") + found.count("train") == 100
    assert 15 < found.count("test") < 45
    alone = [side for side, _ in records(StageRows(data, "sft"), Report(), only="validation")]
    assert alone == ["validation"] * 40
    empty = data.model_copy(update={"validation": [DataSource(path=other, select="7/10000")]})
    with pytest.raises(DataError, match=r"data.validation: .*: no row is left to hold out"):
        list(records(StageRows(empty, "sft"), Report()))
