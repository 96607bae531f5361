"""`rlhf chat`: how models are prompted, streaming, the commands of a conversation."""

import errno
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jinja2 import TemplateError

from rlhf_cli.commands import chat as chat_command
from rlhf_cli.data import encode
from rlhf_cli.data.records import Message
from rlhf_cli.models.load import load_tokenizer
from rlhf_cli.printing import printable
from rlhf_cli.rollout import speaker
from rlhf_cli.rollout.sampling import draw_uniforms, sample
from rlhf_cli.rollout.speaker import PromptForm, prompt_form
from rlhf_cli.trained.model import find_model
from support.projects import refused, rlhf
from support.speaking import reply, session, speaker_at

TURNS = "Human: the tent\n\nAssistant: is late\n\nHuman: the lamp\n\nAssistant:"
ASKED = [Message("user", "the tent"), Message("assistant", "is late"), Message("user", "the lamp")]


def chat(*arguments, lines, code=0):
    return rlhf("chat", *arguments, code=code, input=lines)


def one_error(*arguments):
    return refused("chat", *arguments, input="hi\n")


@pytest.fixture
def read_prompts(monkeypatch):
    """The prompt of every reply, in token ids."""
    prompts = []

    def spy(model, batch, *arguments, **options):
        prompts.extend(batch)
        return sample(model, batch, *arguments, **options)

    monkeypatch.setattr(speaker, "sample", spy)
    return prompts


# -------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    ("template", "has_chat_template", "logged", "kind", "lead"),
    [
        (None, True, [], "chat", ""),
        (None, False, [], "single", ""),
        ("chat", True, ["anything"], "chat", ""),
        (None, True, ["<user>the tent\n<assistant>"], "chat", ""),
        (None, True, ["the tent is"], "single", ""),
        (None, True, ["Human: the tent\n\nAssistant:"], "transcript", ""),
        (None, False, ["\n\nHuman: the tent\n\nAssistant:"], "transcript", "\n\n"),
        (None, False, ["Human: the tent\n\nAssistant:", "the lamp"], "single", ""),
        ("Q: {prompt} A:", True, ["Q: the tent A:"], "single", ""),
        ("Q: {prompt} A:", False, ["Q: Human: the tent\n\nAssistant: A:"], "transcript", ""),
    ],
)
def test_the_form_of_prompts_is_that_of_the_stage(
    chat_model, make_model, template, has_chat_template, logged, kind, lead
):
    tokenizer = load_tokenizer(str(chat_model if has_chat_template else make_model("llama")))
    form = prompt_form(tokenizer, template, logged)
    assert (form.kind, form.lead) == (kind, lead)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (PromptForm("chat"), "<user>the tent\n<assistant>is late\n<user>the lamp\n<assistant>"),
        (PromptForm("transcript"), TURNS),
        (PromptForm("transcript", lead="\n\n"), f"\n\n{TURNS}"),
        (PromptForm("single"), "the lamp"),
        (PromptForm("single", "Q: {prompt} A:"), "Q: the lamp A:"),
    ],
)
def test_a_conversation_is_read_as_its_form_says(chat_model, form, text):
    tokenizer = load_tokenizer(str(chat_model))
    ids = form.encode(tokenizer, ASKED)
    assert form.rows(tokenizer).prompt(form.row(ASKED)) == text
    assert ids == tokenizer(text, add_special_tokens=form.kind != "chat")["input_ids"]


@pytest.mark.parametrize("lead", ["", "\n\n"])
@pytest.mark.parametrize("template", [None, 'Q: "{prompt}"\\ é'])
def test_a_server_reads_a_transcript_as_the_chat_does(chat_model, lead, template):
    tokenizer = load_tokenizer(str(chat_model))
    form = PromptForm("transcript", template, lead)
    wanted = form.encode(tokenizer, [Message("system", "be kind"), *ASKED])
    tokenizer.chat_template = form.chat_template(tokenizer)
    turns = [{"role": m.role, "content": m.content} for m in [Message("system", "be kind"), *ASKED]]
    turns[2]["content"] = f" {turns[2]['content']}"  # as the server answered before
    assert tokenizer.apply_chat_template(turns, return_dict=False) == wanted
    with pytest.raises(TemplateError, match="a role must be"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])


def test_a_template_that_rewrites_earlier_turns_is_answered(chat_model):
    tokenizer = load_tokenizer(str(chat_model))
    # As templates of reasoning models do: only the last turn is written as it was.
    tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.last %}!{% endif %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    text = "<user>the tent<assistant>is late!<user>the lamp<assistant>"
    assert PromptForm("chat").encode(tokenizer, ASKED) == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_model_reads_the_earlier_turns(chat_model, read_prompts):
    lines = "/system be kind\nthe tent\nthe lamp\n/regenerate\n/clear\n/system\nthe map\n"
    result = chat(chat_model, "--max-new-tokens", 6, lines=lines)
    assert "prompts: the tokenizer's chat template" in result.stderr
    texts = [load_tokenizer(str(chat_model)).decode(ids) for ids in read_prompts]
    first, second, again, cleared = (text.removeprefix("<bos>") for text in texts)
    assert first == "<system>be kind\n<user>the tent\n<assistant>"
    assert second.startswith(first)
    assert second.endswith("\n<user>the lamp\n<assistant>")
    assert again == second
    assert cleared == "<user>the map\n<assistant>"


# ------------------------------------------------------------------------------------------- replies


def test_a_reply_is_that_of_the_runs_own_sampling(finished):
    model, shown = speaker_at(finished / "run"), list[str]()
    found = reply(model, [Message("user", "the tent is")], shown.append, seed=3)
    uniforms = draw_uniforms(3, "chat", 0, 1, 4)
    ids = load_tokenizer(model.tokenizer.name_or_path)("the tent is")["input_ids"]
    (response,) = sample(model.model, [ids], uniforms, model.sampling)
    assert model.name == "ppo"
    assert found.response == response
    assert shown[-1] == found.text
    assert len(shown) == len(response.ids) + 1  # after each token, and the whole


def test_a_seed_repeats_the_conversation_and_0_is_greedy(finished):
    def replies(*options):
        return chat(finished / "run", *options, lines="the tent is\nthe lamp\n").stdout

    assert replies("--seed", 1) == replies("--seed", 1) != replies("--seed", 2)
    assert replies("--temperature", 0) == replies("--temperature", 0, "--seed", 2)


def test_ctrl_c_keeps_what_was_written(chat_model, monkeypatch):
    talk = session(speaker_at(chat_model), interactive=True, max_new_tokens=30)
    assert talk.take("the tent")
    before = list(talk.history)
    printed = []

    def interrupted(text, **_):
        printed.append(text)
        if len(printed) == 8:
            raise KeyboardInterrupt

    monkeypatch.setattr(chat_command, "say", interrupted)
    assert talk.take("the lamp")
    shown = "".join(printed[:8])
    assert talk.history == [*before, Message("user", "the lamp"), Message("assistant", shown)]
    assert shown


# ------------------------------------------------------------------------------------ commands, errors


def test_a_conversation_survives_bad_input(finished, tmp_path):
    saved, existing = tmp_path / "talk.jsonl", tmp_path / "notes.txt"
    existing.write_text("mine", encoding="utf-8")
    bad = [
        "tent " * 200,
        "/nothing",
        "/set temperature warm",
        "/set temperature -1",
        "/set max_new_tokens 0",
        "/set seed " + "1" * 5000,
        "/set top 1",
        "/system be kind",
        "/save",
        f"/save {existing}",
        f"/save {tmp_path / 'missing' / 'x'}",
        "/save " + "x" * 300,
        "/save ~nobody.jsonl",
    ]
    lines = "\n".join(["/regenerate", "the tent is", *bad, f"/save {saved}", ""])
    result = chat(finished / "run", lines=lines, code=2)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(bad) + 2  # /regenerate, and the summary
    assert errors[-1] == f"error: {len(bad) + 1} lines of the input failed, as printed above"
    assert "Traceback" not in result.output
    assert "each message alone, as raw text" in result.stderr
    (row,) = [json.loads(line) for line in saved.read_text(encoding="utf-8").splitlines()]
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
    assert row["messages"][0]["content"] == "the tent is"
    assert printable(row["messages"][1]["content"], keep="\n") == result.stdout.strip()
    assert existing.read_text(encoding="utf-8") == "mine"
    rlhf("data", "check", saved, "--for", "sft")


def test_a_full_disk_leaves_no_half_file_and_the_conversation(chat_model, tmp_path, monkeypatch, capsys):
    talk = session(speaker_at(chat_model), interactive=True, max_new_tokens=4)
    assert talk.take("the tent")
    open_file = Path.open

    def full(self, *arguments, **options):
        open_file(self, *arguments, **options).write("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        assert not talk.take(f"/save {tmp_path / 'talk.jsonl'}")
    assert "No space left on device" in capsys.readouterr().err
    assert talk.take(f"/save {tmp_path / 'talk.jsonl'}")
    assert len(talk.history) == 2


def test_bytes_that_are_no_text_and_long_lines_are_messages(chat_model, read_prompts):
    """A byte-order mark at the start is no part of the first line."""
    lines = b"\xef\xbb\xbf/set seed 1\n\xff tent\n//x\none\\\ntwo\n\n/exit\nnever\n"
    chat(chat_model, "--max-new-tokens", 2, lines=lines)
    texts = [load_tokenizer(str(chat_model)).decode(ids) for ids in read_prompts]
    assert len(texts) == 3
    assert texts[1].endswith("<user>/x\n<assistant>")
    assert texts[2].endswith("<user>one\ntwo\n<assistant>")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_may_send_bytes_that_are_no_text(chat_model, is_terminal):
    """Only replies go to stdout."""
    keyboard, terminal = pty.openpty()
    arguments = [sys.executable, "-m", "rlhf_cli", "chat", str(chat_model), "--max-new-tokens", "2"]
    out = terminal if is_terminal else subprocess.PIPE
    with subprocess.Popen(arguments, stdin=terminal, stdout=out, stderr=subprocess.PIPE) as process:
        os.close(terminal)
        os.write(keyboard, b"\xff tent\n/set max_new_tokens 1000000000000\nthe lamp\n/history\n/exit\n")
        try:
            stdout, stderr = process.communicate(timeout=120)
        finally:
            process.kill()
    os.close(keyboard)
    assert (process.returncode, b"Traceback" in stderr) == (0, False)
    assert "user: \ufffd tent".encode() in stderr
    assert is_terminal or (stderr.count(b"> ") >= 4 and b"> " not in stdout and b"user: " not in stdout)


def test_what_is_not_there_gets_one_line(finished, chat_model, tmp_path):
    shutil.copytree(finished / "run" / "sft", tmp_path / "run" / "sft")
    run = tmp_path / "run"
    assert chat(run, lines="").stderr.startswith("sft: ")
    found = find_model(str(run))
    assert found.rollout().max_new_tokens == found.run.sft.evaluation.max_new_tokens, "as the samples of SFT"
    assert "stage ppo is not finished" in one_error(run, "--stage", "ppo")
    assert "no stage is finished" in one_error(tmp_path)
    for of_rm in ((finished / "run" / "rm",), (finished / "run", "--stage", "rm")):
        assert "stage rm is a reward model" in one_error(*of_rm)
    assert "is a model and not a run" in one_error(chat_model, "--stage", "sft")
    assert "--compare: does not exist any more" in one_error(run, "--compare")
    assert "no such directory" in one_error(tmp_path / "none")


def test_the_directory_of_a_stage_or_of_one_of_its_models_is_that_stage(finished, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(finished / "run", run)
    shutil.copytree(run / "sft" / "model", run / "sft" / "best_model")
    for directory, name in {"sft": "sft", "sft/model": "sft", "sft/best_model": "sft/best_model"}.items():
        model = find_model(str(run / directory))
        assert (model.name, model.rollout().max_new_tokens) == (name, 4)
    assert model.path == str(run / "sft" / "best_model")
    monkeypatch.chdir(run / "sft")
    assert find_model(".").name == "sft"
    assert find_model(".", "ppo").path == str(run / "ppo" / "model")
    monkeypatch.chdir(tmp_path)
    assert find_model("run/sft/model").path == "run/sft/model"


def test_a_model_outside_of_a_run_draws_as_its_generation_config_says(chat_model, tmp_path):
    model = shutil.copytree(chat_model, tmp_path / "model")
    values = {"temperature": 0.5, "top_k": 7, "top_p": 1.0, "min_p": 0.1, "do_sample": True}
    (model / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
    rollout = find_model(str(model)).rollout()
    assert (rollout.temperature, rollout.top_k, rollout.top_p, rollout.min_p) == (0.5, 7, None, 0.1)
    opened = speaker_at(Path(model))
    assert (opened.sampling.temperature, opened.sampling.top_k, opened.sampling.min_p) == (0.5, 7, 0.1)


def test_a_quantized_model_answers_with_its_rounded_weights(chat_model):
    result = chat(chat_model, "--quantize", "int8", "--max-new-tokens", "3", "--temperature", "0", lines="hi\n")
    model = speaker_at(chat_model, quantization="int8")
    assert result.stdout.strip() == reply(model, [Message("user", "hi")], temperature=0.0, max_new_tokens=3).text


PATTERN = {"type": "Split", "pattern": {"Regex": "(a|aa|a*)*(a|aa)+$"}, "behavior": "Isolated", "invert": False}
HOSTILE = {
    "a text without end": ("chat_template.jinja", "{{ 'x' * 99999 * 9999 }}", "it writes or repeats too much"),
    "a loop without end": (
        "chat_template.jinja",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x",
        "it writes or repeats too much",
    ),
    "a pattern that gives up": ("tokenizer.json", {"pre_tokenizer": PATTERN}, "error: the tokenizer fails on a text ("),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_model_that_would_never_answer_is_one_line(chat_model, tmp_path, monkeypatch, name):
    monkeypatch.setattr(encode, "MOST_TEMPLATE_LINES", 50_000)
    monkeypatch.setattr(encode, "MOST_TEMPLATE_CHARACTERS", 50_000)
    file, change, says = HOSTILE[name]
    path = shutil.copytree(chat_model, tmp_path / "model") / file
    path.write_text(change if isinstance(change, str) else json.dumps({**json.loads(path.read_text()), **change}))
    result = chat(path.parent, lines="a" * 40 + "b\n", code=2)
    assert result.stdout == ""
    assert says in result.stderr
