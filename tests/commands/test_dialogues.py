"""`rlhf data generate --task dialogues`: two models talk, and SFT reads what they wrote."""

import itertools

import pytest

from rlhf_cli.commands.data_generate import data_generate
from rlhf_cli.data.stage_rows import demonstration
from rlhf_cli.errors import ConfigError, RunError
from support.projects import rlhf
from support.servers import ChatServer, completion
from support.tiny import read_jsonl, write_jsonl
from support.writers import contents, failing_after, local, read_back, remote, run_command


@pytest.fixture
def source(tmp_path):
    rows = [{"prompt": "Where is my tent?"}, {"prompt": "My lamp is broken."}]
    return write_jsonl(tmp_path / "prompts.jsonl", rows)


def run(source, out, writer, user=None, **settings):
    if user is not None:
        settings |= {"user_model": "judge-7b", "user_server": user.url}
    run_command(data_generate, source, out, task="dialogues", writer=writer, **settings)


def answers(call):
    """The assistant: how many messages it was given."""
    return 200, {}, completion(f" answer to {len(call.body['messages'])}")


def asks(call):
    """The user: one message, with a name before it and an answer after it, which is cut."""
    return 200, {}, completion(f"Person: remark {call.text.count('Assistant:')}\nAssistant: of cou", "length")


def turns(row):
    return [(message["role"], message["content"]) for message in row["messages"]]


def test_two_models_talk_in_turn_and_each_sees_the_whole_dialogue(source, tmp_path):
    out = tmp_path / "dialogues.jsonl"
    with ChatServer(answers) as assistant, ChatServer(asks) as user:
        run(source, out, remote(assistant, concurrency=1), user=user, turns=3)
    rows = read_jsonl(out)
    dialogue = [("assistant", "answer to 1"), ("user", "remark 1"), ("assistant", "answer to 3"), ("user", "remark 2")]
    dialogue.append(("assistant", "answer to 5"))
    assert [turns(row) for row in rows] == [
        [("user", "Where is my tent?"), *dialogue],
        [("user", "My lamp is broken."), *dialogue],
    ]
    assert all(row["ended"] for row in rows)
    assert [(m.role, m.content) for m in demonstration(read_back(out, "sft")[0]).turns] == turns(rows[0])
    assert {(row["model"], row["user_model"]) for row in rows} == {("judge-7b", "judge-7b")}
    assert [message["content"] for message in assistant.requests[-1]["messages"]] == [
        text for _, text in turns(rows[1])[:-1]
    ]
    (message,) = user.requests[-1]["messages"]
    assert "Person: My lamp is broken.\n\nAssistant: answer to 1\n\nPerson: remark 1" in message["content"]
    assert len({body["seed"] for body in [*assistant.requests, *user.requests]}) == 10, (
        "every message is a draw of its own"
    )


ENDINGS = {
    "the user says nothing": (answers, lambda _: (200, {}, completion(" \n")), 2, True),
    "the user is cut": (answers, lambda _: (200, {}, completion("and then", "length")), 2, True),
    "the user's request is refused": (answers, lambda _: (400, {}, b"too long"), 2, True),
    "an answer is cut": (lambda _: (200, {}, completion("it is", "length")), asks, 2, False),
    "a later answer is empty": (
        lambda call: (200, {}, completion("fine" if len(call.body["messages"]) == 1 else "")), asks, 2, True,
    ),
    "a later answer is refused": (
        lambda call: (200, {}, completion("fine")) if len(call.body["messages"]) == 1 else (400, {}, b""),
        asks, 2, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDINGS)
def test_a_dialogue_ends_with_its_last_whole_exchange(name, source, tmp_path):
    assistant_says, user_says, length, ended = ENDINGS[name]
    out = tmp_path / "dialogues.jsonl"
    with ChatServer(assistant_says) as assistant, ChatServer(user_says) as user:
        run(source, out, remote(assistant), user=user, turns=3)
    for row in read_jsonl(out):
        assert len(row["messages"]) == length
        assert row["messages"][-1]["role"] == "assistant"
        assert row["ended"] is ended


def test_a_dialogue_without_an_answer_is_dropped_and_a_dead_server_ends_the_run(source, tmp_path):
    counter = itertools.count()
    with ChatServer(lambda _: (200, {}, completion("" if next(counter) else "fine"))) as assistant:
        run(source, tmp_path / "a.jsonl", remote(assistant, concurrency=1), turns=1)
    assert len(read_jsonl(tmp_path / "a.jsonl")) == 1
    assert [drop["reason"] for drop in read_jsonl(tmp_path / "a.jsonl.dropped")] == ["empty answers"]
    with ChatServer(answers) as assistant, ChatServer(lambda _: (500, {}, b"")) as user:
        with pytest.raises(RunError, match="answered 500"):
            run(source, tmp_path / "b.jsonl", remote(assistant), user=user)


def test_local_models_talk_and_resume_to_the_same_bytes(make_model, chat_model, data, tmp_path, monkeypatch):
    template = tmp_path / "user.txt"
    template.write_text("{dialogue}\n\nPerson:")
    settings = {"num": 8, "turns": 2, "template": template, "user_model": str(make_model("llama"))}
    writer = local(chat_model, batch_size=3)
    run(data["prompts"], tmp_path / "a.jsonl", writer, **settings)
    with failing_after(monkeypatch, 4):
        run(data["prompts"], tmp_path / "b.jsonl", writer, **settings)
    run(data["prompts"], tmp_path / "b.jsonl", writer, **settings)
    assert contents(tmp_path / "b.jsonl") == contents(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match=r"other settings: .*user"):
        run(data["prompts"], tmp_path / "b.jsonl", writer, **{**settings, "user_model": str(make_model("qwen2"))})


def test_the_options_of_the_user_go_with_dialogues_only(source, tmp_path):
    def refused(*arguments):
        command = ["data", "generate", str(source), "--out", str(tmp_path / "x.jsonl"), "--model", "m", *arguments]
        result = rlhf(*command, code=2)
        return result.stderr

    assert "--user-model: does nothing with --task samples" in refused("--task", "samples", "--user-model", "n")
    assert "--user-model: is missing" in refused("--task", "dialogues", "--user-server", "http://127.0.0.1:1/v1")
    template = tmp_path / "template.txt"
    template.write_text("{prompt}")
    assert "lacks {dialogue}" in refused("--task", "dialogues", "--template", str(template))
