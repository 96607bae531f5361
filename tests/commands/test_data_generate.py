"""`rlhf data generate`: its rows, and interrupted runs that resume to the same file."""

import itertools
import json
import os
import random
import re
import signal
import threading
from dataclasses import replace
from unittest import mock

import pytest
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.commands import data_generate as module
from rlhf_cli.commands import output
from rlhf_cli.commands.data_generate import data_generate, near_duplicate, prompts_in
from rlhf_cli.commands.output import refuse_own_output
from rlhf_cli.commands.writer import LocalWriter, WriterOptions
from rlhf_cli.config.data import DataSource
from rlhf_cli.data.stage_rows import demonstration, ranking
from rlhf_cli.data.words import words
from rlhf_cli.errors import ArtifactError, ConfigError, DataError, Interrupted, RunError
from support.projects import largest_file, rlhf
from support.servers import KEY, ChatServer, ask, completion
from support.tiny import WORDS, read_jsonl, write_jsonl
from support.writers import contents, failing_after, local, read_back, remote, run_command


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    rng = random.Random(2)
    rows = [{"prompt": f"Q: {' '.join(rng.choices(WORDS, k=4))} {n}\nA:", "n": n} for n in range(21)]
    return write_jsonl(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", rows)


def run(source, task, out, writer, **settings):
    run_command(data_generate, source, out, task=task, writer=writer, **settings)


# ------------------------------------------------------------------------------------------ what is written


def test_demonstrations_are_the_model_answers_in_order(make_model, prompts, tmp_path):
    out = tmp_path / "new" / "demos.jsonl"
    writer = local(make_model("llama"), seed=3)
    run(prompts, "demonstrations", out, writer, num=10)
    one_by_one = LocalWriter(replace(writer, batch_size=1))
    expected = []
    for n, row in enumerate(read_jsonl(prompts)[:10]):
        [answer] = one_by_one.write([ask(row["prompt"], n, 0)])
        drawn = {"model": writer.model, "temperature": 1.0, "seed": 3}
        expected.append({"prompt": row["prompt"], "response": answer.text, "ended": answer.ended, **drawn})
    assert read_jsonl(out) == expected
    assert contents(out)[1] == b""


def test_samples_are_k_draws_and_not_a_ranking_until_scored(make_model, prompts, tmp_path):
    out = tmp_path / "samples.jsonl"
    run(prompts, "samples", out, local(make_model("llama")), num=6, samples=3)
    rows = read_jsonl(out)
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in read_jsonl(prompts)[:6]]
    for row in rows:
        assert len(row["responses"]) == len(set(row["responses"])) == len(row["ended"]) == 3
        assert row["scores"] == [None] * 3
        assert (row["temperature"], row["seed"]) == (1.0, 0)
    for record, row in zip(read_back(out, "rm pairs"), rows, strict=True):
        assert list(record.texts) == row["responses"]
        assert ranking(record) is None, "not scored yet"


def test_conversations_stay_conversations_and_the_template_makes_one_message(chat_model, tmp_path):
    turns = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "the tent is late"}]
    source = write_jsonl(tmp_path / "chats.jsonl", [{"messages": turns}])
    with ChatServer() as server:
        run(source, "demonstrations", tmp_path / "a.jsonl", remote(server))
        template = tmp_path / "template.txt"
        template.write_text("Answer as a pirate: {prompt} {unknown}", encoding="utf-8-sig")  # with a byte order mark
        run(source, "demonstrations", tmp_path / "b.jsonl", remote(server), template=template)
    assert server.requests[0]["messages"] == turns
    text = "\n\nSystem: be kind\n\nHuman: the tent is late\n\nAssistant:"
    assert server.requests[1]["messages"] == [{"role": "user", "content": f"Answer as a pirate: {text} {{unknown}}"}]
    [row] = read_jsonl(tmp_path / "a.jsonl")
    assert row["prompt"] == turns
    assert row["response"] == "echo the tent is late"
    [record] = read_back(tmp_path / "a.jsonl", "sft")
    learned = demonstration(record)
    assert [m.content for m in learned.turns] == ["be kind", "the tent is late", "echo the tent is late"]

    run(source, "demonstrations", tmp_path / "c.jsonl", local(chat_model))
    assert [row["prompt"] for row in read_jsonl(tmp_path / "c.jsonl")] == [turns]


def test_empty_and_refused_answers_are_dropped_with_their_rows_and_reasons(prompts, tmp_path):
    special = {1: (200, {}, completion(" \n")), 2: (400, {}, b"too long"), 3: (200, {}, completion(None))}

    def answer(call):
        number = int(call.text.split()[-2])
        return special.get(number, (200, {}, completion(f"answer {number}")))

    out = tmp_path / "out.jsonl"
    with ChatServer(answer) as server:
        run(prompts, "demonstrations", out, remote(server), num=6)
    assert [row["response"] for row in read_jsonl(out)] == ["answer 0", "answer 4", "answer 5"]
    url = f"{server.url}/chat/completions"
    assert read_jsonl(out.with_name("out.jsonl.dropped")) == [
        {"reason": "empty answers", "where": f"{prompts}:2"},
        {"reason": "no answer", "where": f"{prompts}:3", "detail": f"{url} answered 400: 'too long'"},
        {"reason": "no answer", "where": f"{prompts}:4", "detail": f"{url} sent an answer without text"},
    ]


def test_a_sample_that_is_empty_or_refused_leaves_the_others(prompts, tmp_path):
    counters = itertools.count()
    some = [(200, {}, completion("one")), (200, {}, completion("")), (400, {}, b""), (200, {}, completion("two"))]

    def answer(_):
        return some[next(counters) % 4]

    out = tmp_path / "out.jsonl"
    with ChatServer(answer) as server:
        run(prompts, "samples", out, remote(server, concurrency=1), num=1, samples=4)
        [row] = read_jsonl(out)
        assert (row["responses"], row["scores"]) == (["one", "two"], [None, None])
        run(prompts, "samples", tmp_path / "b.jsonl", remote(server, concurrency=1), num=1, samples=4)
        counters = itertools.count(1)
        with pytest.raises(RunError, match=r"none of the first 1 rows was answered: http\S+ answered 400"):
            run(prompts, "samples", tmp_path / "c.jsonl", remote(server, concurrency=1), num=1, samples=2)
    assert not list(tmp_path.glob("c.jsonl*")), "nothing is dropped for good where it was not the row's fault"


def test_empty_samples_are_counted_also_after_a_resume(prompts, tmp_path):
    counters = itertools.count()

    def answer(_):
        return 200, {}, completion("" if next(counters) % 4 == 1 else "fine")

    out = tmp_path / "out.jsonl"
    command = ["data", "generate", str(prompts), "--task", "samples", "--samples", "4", "--out", str(out)]
    with ChatServer(answer) as server:
        for num, lost in (("2", 2), ("5", 5)):
            options = ["--model", "m", "--server", server.url, "--concurrency", "1", "--num", num]
            result = rlhf(*command, *options)
            said = f"{num} rows, {lost} answers missing in rows with others (they were empty or refused)\n"
            assert result.stdout.replace("\n", " ").count(said.strip()) == 1, result.stdout
            assert "  dropped 0  " in result.stdout, "a figure of the progress line is one text"
            assert re.search(r"\d (prompts|rows)/s|s/(prompt|row)\b", result.stdout)


def test_bad_rows_are_reported_before_the_model_is_asked(tmp_path):
    lines = ['{"prompt": "a"}', '{"prompt": 7}', "{broken", '{"prompt": "b"}']
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(lines) + "\n")
    out = tmp_path / "out" / "out.jsonl"
    with ChatServer() as server:
        with pytest.raises(DataError, match=r"rows.jsonl:2: `prompt` is a number"):
            run(source, "demonstrations", out, remote(server))
        assert server.requests == []
        texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": "a story"}])
        with pytest.raises(DataError, match=r"texts.jsonl:1: the row has no prompt"):
            run(texts, "demonstrations", tmp_path / "out" / "texts.jsonl", remote(server))
        assert server.requests == []
        run(source, "demonstrations", out, remote(server), on_bad_row="skip")
    assert [row["response"] for row in read_jsonl(out)] == ["echo a", "echo b"]
    dropped = read_jsonl(out.with_name("out.jsonl.dropped"))
    assert [drop["reason"] for drop in dropped] == ["cannot be read"] * 2
    assert "rows.jsonl:2" in dropped[0]["detail"]
    assert "rows.jsonl:3" in dropped[1]["detail"]


# ------------------------------------------------------------------------------------------- new prompts


def numbered(*texts):
    return completion("\n".join(f"{n}. {text}" for n, text in enumerate(texts, 1)))


def test_new_prompts_come_from_answers_and_near_duplicates_do_not(tmp_path):
    seeds = ["Name three\n rivers of France", "Write a poem about the sea", "Translate cat into German"]
    source = write_jsonl(tmp_path / "seeds.jsonl", [{"prompt": text} for text in seeds])
    answers = [
        numbered("write a poem, about THE sea!", "Explain how a kettle works"),
        numbered("Explain how a kettle works today", "List the colours of a rainbow"),
        completion("I would rather not."),
        completion("1. Draw a cat\n2. Cook an eg", "length"),
    ]
    out = tmp_path / "out" / "new.jsonl"
    with ChatServer(lambda call: (200, {}, answers[min(call.number, 3)])) as server:
        run(source, "prompts", out, remote(server, concurrency=1), num=4, seeds=2)
    assert [(row["prompt"], row["round"]) for row in read_jsonl(out)] == [
        ("Explain how a kettle works", 0),
        ("List the colours of a rainbow", 1),
        ("I would rather not.", 2),
        ("Draw a cat", 3),
    ]
    names = ("reason", "round", "prompt", "other")
    assert [tuple(drop[name] for name in names) for drop in read_jsonl(out.with_name("new.jsonl.dropped"))] == [
        ("too similar to another", 0, "write a poem, about THE sea!", seeds[1]),
        ("too similar to another", 1, "Explain how a kettle works today", "Explain how a kettle works"),
    ]
    shown = [body["messages"][0]["content"] for body in server.requests]
    for text in shown:
        lines = [line for line in text.splitlines() if line[:2] in ("1.", "2.", "3.")]
        assert len(lines) == 2
        assert {line[3:] for line in lines} <= {" ".join(seed.split()) for seed in seeds}
        assert "Write 5 more requests" in text
    assert len(set(shown)) > 1, "every round draws its own seeds"


@pytest.mark.parametrize(
    ("known", "near", "far"),
    [
        ("请给我写一首关于春天的短诗", "请给我写一首关于春天的诗", "请解释一下光合作用的过程"),
        ("日本の首都について短く説明してください", "日本の首都について説明してください", "美味しいカレーの作り方は?"),
        ("ช่วยแต่งกลอนเกี่ยวกับฤดูใบไม้ผลิให้หน่อย", "ช่วยแต่งกลอนเกี่ยวกับฤดูใบไม้ผลิหน่อย", "อธิบายการสังเคราะห์ด้วยแสงให้หน่อย"),
    ],
)
def test_near_duplicates_in_scripts_without_spaces(known, near, far):
    assert near_duplicate(near, [(words(known), known)], 0.7) == known
    assert near_duplicate(far, [(words(known), known)], 0.7) is None


def test_other_scripts_are_still_compared_by_words():
    assert words("Ein Über-Satz mit GPT4 und 3,5") == frozenset({"ein", "über", "satz", "mit", "gpt4", "und", "3", "5"})
    assert words("나는 학교에") == frozenset({"나는", "학교에"})
    assert words("用Python写") == frozenset({"用", "python", "写"})


def test_similarity_is_the_fraction_of_common_words():
    known = [(words(text), text) for text in ("radio", "The tent, tent is LATE")]
    for threshold, found in ((0.61, None), (0.6, "The tent, tent is LATE"), (0.01, "The tent, tent is LATE")):
        assert near_duplicate("is the tent broken?", known, threshold) == found, "three of five words are common"
    assert words("¡¡!!") == frozenset({"¡¡!!"})


def test_a_list_in_an_answer_is_read_line_by_line():
    text = "Sure, here:\n\n 1. One thing\n2) Another\n3: third\n- fourth\n* fifth\nBye"
    assert prompts_in(text) == ["One thing", "Another", "third", "fourth", "fifth"]
    assert prompts_in("What is 3.5 times 2?\nName 10. Now.") == ["What is 3.5 times 2?", "Name 10. Now."]
    assert prompts_in("1.\n2.  ") == []
    assert prompts_in("") == prompts_in("half", ended=False) == []


def test_a_model_without_new_prompts_ends_the_run(tmp_path):
    source = write_jsonl(tmp_path / "seeds.jsonl", [{"prompt": "Name a river"}])
    with ChatServer(lambda _: (200, {}, numbered("Name a river", "Name a city"))) as server:
        with pytest.raises(RunError, match=r"no new prompt in the last 40 answers; 1 of 5 are written"):
            run(source, "prompts", tmp_path / "out" / "new.jsonl", remote(server, concurrency=1), num=5)
    assert len(server.requests) == 44


# --------------------------------------------------------------------------------------------- resume


TASKS = {
    "demonstrations": {"on_bad_row": "skip"},
    "samples": {"samples": 3, "on_bad_row": "skip", "num": 7},
    "prompts": {"num": 9},
}


@pytest.mark.parametrize("task", TASKS)
def test_killed_at_any_line_and_resumed_gives_the_same_bytes(task, make_model, tmp_path, monkeypatch):
    """The source has unreadable, overlong and similar rows, so that both files grow."""
    rng = random.Random(3)
    texts = [f"{' '.join(rng.choices(WORDS, k=3))} {n}" for n in range(12)]
    texts[4] = texts[5] = texts[9] = "lamp " * 130
    rows = [json.dumps({"prompt": text}) for text in texts]
    rows[7] = "{broken"
    rows = rows[:3] if task == "prompts" else rows
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(rows) + "\n")
    template = tmp_path / "template.txt"
    template.write_text("{seeds}\n4." if task == "prompts" else "{prompt}")
    writer = local(make_model("llama"), max_new_tokens=16)
    settings = {**TASKS[task], "template": template}
    # A random model writes no lists, and never the same twice.
    monkeypatch.setattr(module, "prompts_in", lambda answer, **_: re.findall(r"[a-z]", answer)[:2])

    whole = tmp_path / "whole" / "out.jsonl"
    run(source, task, whole, writer, **settings)
    expected = contents(whole)
    lines = [content.count(b"\n") for content in expected]
    assert min(lines) > 1, "both files are put to the test"
    for died_at in range(0, sum(lines), 3 if task == "prompts" else 2):
        out = tmp_path / str(died_at) / "out.jsonl"
        with failing_after(monkeypatch, died_at):
            run(source, task, out, writer, **settings)
        assert sum(content.count(b"\n") for content in contents(out)) == died_at
        run(source, task, out, writer, **settings)
        assert contents(out) == expected, f"died at line {died_at}"


def test_a_finished_file_is_unchanged_and_more_rows_are_appended(make_model, prompts, tmp_path, monkeypatch):
    out, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    writer = local(make_model("llama"))
    run(prompts, "demonstrations", whole, writer)
    run(prompts, "demonstrations", out, writer, num=6)
    assert contents(out)[0] == b"".join(contents(whole)[0].splitlines(keepends=True)[:6])
    run(prompts, "demonstrations", out, writer)
    assert contents(out) == contents(whole)

    monkeypatch.setattr(WriterOptions, "open", mock.Mock(side_effect=AssertionError("a finished file needs no model")))
    run(prompts, "demonstrations", out, writer)
    run(prompts, "demonstrations", out, writer, num=3)
    assert contents(out) == contents(whole)


def test_a_server_that_dies_and_comes_back_gives_every_row_once(prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    with ChatServer(lambda call: (200, {}, completion(f"x {call.text}")) if call.number < 11 else None) as server:
        with pytest.raises(
            RunError, match=r"prompts.jsonl:\d+: http\S+ sent no valid .* same command without --restart to resume"
        ):
            run(prompts, "demonstrations", out, remote(server))
    written = read_jsonl(out)
    assert 8 <= len(written) <= 11
    with ChatServer(lambda call: (200, {}, completion(f"y {call.text}"))) as server:  # On another port.
        run(prompts, "demonstrations", out, remote(server))
        rows = read_jsonl(out)
        assert rows[: len(written)] == written
        assert [row["prompt"] for row in rows] == [row["prompt"] for row in read_jsonl(prompts)]
        assert [row["response"][0] for row in rows] == ["x"] * len(written) + ["y"] * (21 - len(written))
        assert len(server.requests) == 21 - len(written), "what was answered is not paid for again"
        run(prompts, "demonstrations", out, remote(server))
        assert len(server.requests) == 21 - len(written)


def test_new_prompts_from_a_server_resume_with_new_answers(tmp_path):
    source = write_jsonl(tmp_path / "seeds.jsonl", [{"prompt": "Name a river"}])
    out = tmp_path / "out" / "new.jsonl"

    def unheard_of(call):
        return (200, {}, numbered(f"w{call.number} v{call.number}")) if call.number < 6 else None

    with ChatServer(unheard_of) as server, pytest.raises(RunError):
        run(source, "prompts", out, remote(server, concurrency=1), num=10)
    before = read_jsonl(out)
    assert [row["round"] for row in before] == [0, 1, 2, 3, 4, 5]
    with ChatServer(lambda call: (200, {}, numbered(f"a{call.number} b{call.number}"))) as server:
        run(source, "prompts", out, remote(server, concurrency=1), num=10)
    rows = read_jsonl(out)
    assert rows[:6] == before
    assert [row["round"] for row in rows[6:]] == [8, 9, 10, 11], "rounds of a new chunk, with seeds of their own"


def test_changed_settings_are_refused_by_name_and_restart_starts_over(make_model, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    writer = local(make_model("llama"))
    run(prompts, "demonstrations", out, writer, num=3)
    first = contents(out)
    changed = [
        (r"temperature \(1.0, now 0.5\)", {"temperature": 0.5}),
        (r"seed \(0, now 1\)", {"seed": 1}),
        (r"top_p \(null, now 0.5\)", {"top_p": 0.5}),
        (r"max_new_tokens \(8, now 9\)", {"max_new_tokens": 9}),
        (r"model.digest, model.path", {"model": str(make_model("qwen2"))}),
        (r'num_answers \(1, now 4\), task \("demonstrations", now "samples"\)', {}),
    ]
    for said, change in changed:
        with pytest.raises(ConfigError, match=f"was made with other settings: {said}.*--restart to start over"):
            run(prompts, "demonstrations" if change else "samples", out, replace(writer, **change))
        assert contents(out) == first
    lines = prompts.read_bytes()
    copy = tmp_path / "data" / "copy.jsonl"
    copy.parent.mkdir()
    copy.write_bytes(lines)
    run(copy, "demonstrations", out, writer, num=3)  # The same rows from another place.
    copy.write_bytes(lines.replace(b"tent", b"lamp"))
    with pytest.raises(ConfigError, match=r"other settings: data.rows"):
        run(copy, "demonstrations", out, writer, num=3)
    run(prompts, "demonstrations", out, local(make_model("llama"), batch_size=3), num=4)  # May change.
    assert len(read_jsonl(out)) == 4
    run(prompts, "demonstrations", out, local(make_model("llama"), seed=1), num=2, restart=True)
    rows = read_jsonl(out)
    assert [row["seed"] for row in rows] == [1, 1]


def test_files_of_other_programs_are_never_overwritten(make_model, prompts, tmp_path):
    writer = local(make_model("llama"))
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"precious": 1}\n')
    for restart in (False, True):
        with pytest.raises(ArtifactError, match=r"mine.jsonl: already exists"):
            run(prompts, "demonstrations", mine, writer, restart=restart)
    assert mine.read_text() == '{"precious": 1}\n'
    link = tmp_path / "link.jsonl"
    link.symlink_to(mine)
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    for one in (link, tmp_path / "loop.jsonl"):
        with pytest.raises(ArtifactError, match=f"{one}: is a link. Give the file itself$"):
            run(prompts, "demonstrations", one, writer, restart=True)
    assert mine.read_text() == '{"precious": 1}\n'
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "around").symlink_to(prompts.parent)
    folder, own = prompts.parent, "would be one of the files of"
    refused = [
        (folder, folder / "new.jsonl", own),
        (tmp_path / "around", folder / "new.jsonl", own),
        (folder, tmp_path / ".." / folder / "sub" / ".." / "new.jsonl", own),
        (f"{folder}/*.jsonl", folder / "new.jsonl", own),
        (f"{folder}/**/*.jsonl", folder / "new.jsonl", own),
        (f"{folder}/**/*.jsonl", folder / "a" / "b" / "new.jsonl", own),
        (prompts, prompts, own),
        (prompts, tmp_path / "out.csv", "must end in .jsonl"),
        (prompts, mine / "out.jsonl", "cannot be written"),
        (prompts, tmp_path / "folder.jsonl", "cannot be written"),
    ]
    for source, out, said in refused:
        with pytest.raises((ConfigError, ArtifactError), match=said):
            run(source, "demonstrations", out, writer)
    for out in (folder / "below" / "new.jsonl", folder / "new.txt.jsonl"):
        refuse_own_output(DataSource(path=f"{folder}/p*.jsonl"), out)  # no file of the glob


def test_a_full_disk_is_one_line_and_the_file_can_be_resumed(make_model, prompts, tmp_path):
    writer, out = local(make_model("llama")), tmp_path / "out.jsonl"
    run(prompts, "demonstrations", tmp_path / "whole.jsonl", writer)
    expected = contents(tmp_path / "whole.jsonl")
    with largest_file(len(expected[0]) // 2), pytest.raises(ArtifactError, match=r"be written \(File too large\)"):
        run(prompts, "demonstrations", out, writer)
    assert 0 < len(contents(out)[0]) <= len(expected[0]) // 2
    run(prompts, "demonstrations", out, writer)
    assert contents(out) == expected


def test_two_writers_of_one_file_are_refused(prompts, tmp_path):
    out, inside, resumed_step = tmp_path / "out.jsonl", threading.Event(), threading.Event()

    def wait(_):
        inside.set()
        resumed_step.wait(120)
        return 200, {}, completion("x")

    with ChatServer(wait) as server:
        thread = threading.Thread(target=run, args=(prompts, "demonstrations", out, remote(server)))
        thread.start()
        assert inside.wait(120)
        for restart in (False, True):
            with pytest.raises(ArtifactError, match="another process is writing it"):
                run(prompts, "demonstrations", out, remote(server), restart=restart)
        resumed_step.set()
        thread.join()
    assert len(read_jsonl(out)) == 21


@pytest.mark.parametrize(
    ("number", "restart", "said"),
    [
        (10, False, "interrupted: 8 rows are in OUT. Run the same command to resume"),
        (10, True, "interrupted: 8 rows are in OUT. Run the same command without --restart to resume"),
        (1, True, "interrupted before the first row. Run the same command to resume"),
    ],
)
def test_ctrl_c_says_how_to_resume(number, restart, said, prompts, tmp_path):
    """With --restart the same command would discard the rows. Before its first row, earlier ones are kept."""
    test_is_over = threading.Event()

    def interrupt(call):
        if call.number == number:
            os.kill(os.getpid(), signal.SIGINT)
            test_is_over.wait(120)
        return 200, {}, completion("x")

    out = tmp_path / "out.jsonl"
    if restart:
        with ChatServer(lambda _: (200, {}, completion("old"))) as server:
            run(prompts, "demonstrations", out, remote(server), num=3)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # Background jobs are started without.
    try:
        with ChatServer(interrupt) as server, pytest.raises(Interrupted) as stop:
            run(prompts, "demonstrations", out, remote(server), restart=restart)
    finally:
        test_is_over.set()
        signal.signal(signal.SIGINT, before)
    assert (stop.value.exit_code, str(stop.value)) == (130, said.replace("OUT", str(out)))
    assert [row["response"] for row in read_jsonl(out)] == (["x"] * 8 if number == 10 else ["old"] * 3)


def test_an_interrupted_restart_leaves_no_settings(make_model, prompts, tmp_path, monkeypatch):
    out, writer = tmp_path / "out.jsonl", local(make_model("llama"))
    run(prompts, "demonstrations", out, writer, num=3)

    with monkeypatch.context() as patch:
        patch.setattr(output, "write_text", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(Interrupted):
            run(prompts, "demonstrations", out, local(make_model("llama"), seed=1), num=3, restart=True)
    assert not list(tmp_path.glob("out.jsonl*"))
    run(prompts, "demonstrations", out, writer, num=3)
    assert len(read_jsonl(out)) == 3


# --------------------------------------------------------------------------------------- the command line


def test_the_command_reports_its_result(prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)
    out = tmp_path / "out.jsonl"

    def answer(call):
        return (400, {}, KEY.encode()) if call.number == 3 else (200, {}, completion("x", "length"))

    with ChatServer(answer) as server:
        arguments = ["data", "generate", str(prompts), "--task", "demonstrations", "--out", str(out), "--num", "5"]
        arguments += ["--server", server.url, "--model", "some", "--api-key-env", "MY_KEY", "--temperature", "0.5"]
        done = rlhf(*arguments, "--concurrency", "1", "--max-new-tokens", "9")
        refused = CliRunner().invoke(app, arguments)
    assert done.output.splitlines()[-1] == (
        f"generate: {out}: 4 rows, 4 answers cut at 9 tokens (their `ended` is false); "
        "1 dropped (1 no answer), see out.jsonl.dropped"
    )
    assert server.requests[0]["temperature"] == 0.5
    assert refused.exit_code == 2
    assert refused.output.startswith("error: ")
    everything = done.output + refused.output + "".join(p.read_text() for p in tmp_path.iterdir())
    assert KEY not in everything


@pytest.mark.parametrize("task", ["demonstrations", "prompts"])
def test_a_terminal_has_its_cursor_again_after_an_error(task, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with ChatServer(lambda _: (401, {}, b"")) as server:
        arguments = ["--task", task, "--out", str(tmp_path / "out.jsonl"), "--num", "5", "--server", server.url]
        shown = rlhf("data", "generate", prompts, *arguments, "--model", "some", code=1).stdout
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--task", "prompts"], "--num: is missing"),
        (["--task", "demonstrations", "--format", "nonsense"], "format: "),
        (["--task", "demonstrations", "--key", "prompt"], "--key: must be OURS=THEIRS"),
        (["--task", "demonstrations", "--template", "missing.txt"], "--template: cannot read missing.txt"),
        (["--task", "demonstrations", "--server", "http://a:secret@b/v1"], "--server: contains a user or a password"),
        (["--task", "demonstrations", "--model", "./nowhere"], "./nowhere: no such directory"),
    ],
)
def test_invalid_options_are_refused_in_one_line(arguments, said, prompts, tmp_path):
    basic = ["data", "generate", str(prompts), "--out", str(tmp_path / "out.jsonl"), "--model", "some/model"]
    result = rlhf(*basic, *arguments, code=2)
    assert said in result.output
    assert "Traceback" not in result.output
    assert "secret" not in result.output
