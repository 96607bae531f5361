"""`rlhf generate`: responses of a run's stages and of any model, resumed, divided, compared and chosen by score."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.commands import generate as module
from rlhf_cli.commands.generate import Generator, ResponseOptions, generate
from rlhf_cli.config.rewards import FunctionReward, NamedReward
from rlhf_cli.data.records import Record
from rlhf_cli.errors import ArtifactError, ConfigError, RunError, UserError
from rlhf_cli.models.load import load_tokenizer
from rlhf_cli.processes import distributed, launcher
from rlhf_cli.rewards.sources import load_rewards
from rlhf_cli.trained.model import RewardSet, find_model
from support.paths import ROOT
from support.projects import rlhf
from support.tiny import CPU, encoder, read_jsonl, write_jsonl
from support.worlds import in_each_process
from support.writers import contents, failing_after, run_command


def write(directory, source, out, **settings):
    names = {field.name for field in fields(ResponseOptions)} & settings.keys()
    options = ResponseOptions(**{"device": "cpu", "batch_size": 3, **{name: settings.pop(name) for name in names}})
    run_command(functools.partial(generate, None, str(directory)), source, out, options=options, **settings)
    return read_jsonl(out)


def test_a_row_has_its_columns_and_the_response_of_the_last_stage(run, prompts, tmp_path):
    rows = write(run, prompts, tmp_path / "out.jsonl")
    source = read_jsonl(prompts)
    assert [(row["prompt"], row["number"]) for row in rows] == [
        (row["prompt"], row["number"]) for row in source if row["number"] != 4
    ]
    assert [list(row) for row in rows] == [["number", "prompt", "response", "ended"]] * 8
    assert len({row["response"] for row in rows}) > 4
    for n, directory in enumerate((run / "ppo", run / "ppo" / "model")):
        assert write(directory, prompts, tmp_path / f"{n}.jsonl") == rows, "a stage's directory is that stage"
    assert write(run, prompts, tmp_path / "sft.jsonl", stage="sft") != rows
    [dropped] = read_jsonl(tmp_path / "out.jsonl.dropped")
    assert (dropped["reason"], dropped["where"]) == ("prompt too long", f"{prompts}:5")
    assert "do not fit the model's 128 positions" in dropped["detail"]


def test_a_response_depends_on_seed_and_row_alone(run, prompts, tmp_path):
    rows = write(run, prompts, tmp_path / "together.jsonl")
    assert write(run, prompts, tmp_path / "alone.jsonl", batch_size=1) == rows
    first, second, third = (write(run, prompts, tmp_path / f"{n}.jsonl", shard=f"{n}/3") for n in (1, 2, 3))
    assert [row["number"] for row in second] == [1, 7], "row 4 is too long"
    assert sorted(first + second + third, key=lambda row: row["number"]) == rows
    row = read_jsonl(prompts)[7]
    generator = Generator(find_model(str(run)), ResponseOptions(max_new_tokens=8), None, CPU)
    assert generator.respond([(7, Record(row["prompt"], "here"))]) == [{k: rows[6][k] for k in ("response", "ended")}]
    other = write(run, prompts, tmp_path / "seed.jsonl", batch_size=3, seed=1)
    assert [row["response"] for row in other] != [row["response"] for row in rows]


def test_shards_are_put_together_by_the_line_in_the_docs(run, prompts, tmp_path):
    for n in (1, 2, 3):
        write(run, prompts, tmp_path / f"shard-{n}.jsonl", shard=f"{n}/3", num=4)
    (line,) = (line for line in (ROOT / "docs/use.md").read_text().splitlines() if line.startswith("paste "))
    line = line.replace("out/shard-2.jsonl", "out/shard-2.jsonl out/shard-3.jsonl").replace("out/", "")
    subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True)
    once = write(run, prompts, tmp_path / "once.jsonl", num=4)
    assert read_jsonl(tmp_path / "replies.jsonl") == once


def test_a_line_of_plain_text_is_a_prompt(run, tmp_path):
    text = tmp_path / "prompts.txt"
    text.write_text("the tent is\nthe lamp\n", encoding="utf-8")
    rows = write(run, text, tmp_path / "text.jsonl")
    assert [row["prompt"] for row in rows] == ["the tent is", "the lamp"]
    same = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": row["prompt"]} for row in rows])
    assert [row["response"] for row in write(run, same, tmp_path / "json.jsonl")] == [row["response"] for row in rows]


def test_a_stage_that_was_trained_on_messages_reads_a_prompt_as_a_message(run, chat_model, tmp_path):
    model = find_model(str(run), "sft")
    moved = replace(model, path=str(chat_model), run=replace(model.run, root=tmp_path))
    (tmp_path / "sft").mkdir()
    for logged, text in (("<user>the tent\n<assistant>", "<user>hi\n<assistant>"), ("the tent is", "hi")):
        write_jsonl(tmp_path / "sft" / "samples.jsonl", [{"prompt": logged}])
        speaker = Generator(moved, ResponseOptions(), None, CPU).speaker
        ids = speaker.encode(Record("hi", "here"))
        assert ids == speaker.tokenizer(text, add_special_tokens=text == "hi")["input_ids"]


def test_the_base_model_is_what_the_run_started_from(run):
    model = find_model(str(run))
    for path, base in ((str(run / "ppo"), str(run / "ppo" / "model")), ("owner/name", "owner/name")):
        section = model.run.sft.model.model_copy(update={"path": path})
        sft = model.run.sft.model_copy(update={"model": section})
        assert replace(model, run=replace(model.run, sft=sft)).compared("base").path == base


def test_a_model_that_cannot_be_had_is_one_line_without_retries(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ArtifactError, match="nobody/nothing: no such directory, and HF_HUB_OFFLINE is set"):
        find_model("nobody/nothing").rollout()


def test_another_seed_or_model_does_not_continue_the_rows(run, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    rows = write(run, prompts, out, num=2)
    with pytest.raises(ConfigError, match=r"other settings: seed \(0, now 1\)"):
        write(run, prompts, out, seed=1)
    with pytest.raises(ConfigError, match="other settings: models"):
        write(run, prompts, out, stage="sft")
    assert read_jsonl(out) == rows


def test_prompts_that_are_all_too_long_leave_nothing_that_refuses_the_next_run(run, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    with pytest.raises(RunError, match=r"no row was written; 9 dropped \(9 prompt too long\)"):
        write(run, prompts, out, max_new_tokens=128)
    assert len(write(run, prompts, out, max_new_tokens=4)) == 8
    assert len(read_jsonl(tmp_path / "out.jsonl.dropped")) == 1


def test_the_default_length_takes_what_fits_and_a_given_length_is_refused(tmp_path, make_model):
    """Outside of a run the default is 256 new tokens, and the model has 128 positions."""
    model = make_model("gpt2")
    tokenizer = load_tokenizer(str(model))
    ids = tokenizer("the tent lamp " * 80)["input_ids"]
    texts = [tokenizer.decode(ids[:length]) for length in (120, 124, 128)]
    rooms = [128 - len(tokenizer(text)["input_ids"]) for text in texts]
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": text} for text in texts])
    rows = write(model, prompts, tmp_path / "out.jsonl")
    assert len(rows) == 2
    assert not all(row["ended"] for row in rows)
    for n, (row, room) in enumerate(zip(rows, rooms, strict=False)):
        alone = write(model, prompts, tmp_path / f"{n}.jsonl", shard=f"{n + 1}/3", max_new_tokens=room)
        assert alone[0] == row
    [dropped] = read_jsonl(tmp_path / "out.jsonl.dropped")
    assert dropped["detail"].endswith("tokens and the model reads 128, reply included. Shorten the prompt")
    with pytest.raises(RunError, match=r"no row was written; 3 dropped \(3 prompt too long\)"):
        write(model, prompts, tmp_path / "given.jsonl", max_new_tokens=256)


def test_weights_are_held_in_the_format_of_the_passes(run):
    """tests/models/test_frozen.py compares what they compute."""
    trained = find_model(str(run))
    in_16_bits = replace(trained, config=trained.config.model_copy(update={"precision": "bfloat16"}))
    layers = [module for module in in_16_bits.speaker(CPU).model.modules() if isinstance(module, torch.nn.Linear)]
    assert {layer.weight.dtype for layer in layers} == {torch.bfloat16}
    assert {p.dtype for p in trained.speaker(CPU).model.parameters()} == {torch.float32}


def test_compared_models_write_what_they_write_alone(run, prompts, tmp_path, make_model):
    both = write(run, prompts, tmp_path / "both.jsonl", compared="sft")
    ppo, sft = (write(run, prompts, tmp_path / f"{name}.jsonl", stage=name) for name in ("ppo", "sft"))
    assert [row["response"] for row in both] == [row["response"] for row in ppo]
    assert [(row["sft_response"], row["sft_ended"]) for row in both] == [(r["response"], r["ended"]) for r in sft]
    both = write(run, prompts, tmp_path / "base.jsonl", compared="base")
    base = write(make_model("llama"), prompts, tmp_path / "model.jsonl", max_new_tokens=8)
    assert [row["base_response"] for row in both] == [row["response"] for row in base]


def test_best_of_n_is_the_sample_with_the_highest_score(run, prompts, tmp_path):
    rows = write(run, prompts, tmp_path / "best.jsonl", batch_size=8, best_of=4)
    scores = [row["score"] for row in rows]
    firsts = write(run, prompts, tmp_path / "first.jsonl", batch_size=64, reward_model=str(run))  # of the four, scored
    assert all(best >= row["score"] for best, row in zip(scores, firsts, strict=True))
    assert any(best > row["score"] for best, row in zip(scores, firsts, strict=True))
    again = write(run, prompts, tmp_path / "again.jsonl", best_of=4, reward_model=str(run / "rm"))
    assert [row["response"] for row in again] == [row["response"] for row in rows]
    result = CliRunner().invoke(app, ["rm", "score", str(run), str(tmp_path / "best.jsonl")])
    scored = [json.loads(line) for line in result.stdout.splitlines()]
    ended = [n for n, row in enumerate(rows) if row["ended"]]
    assert [scored[n]["score"] for n in ended] == pytest.approx([scores[n] for n in ended], abs=1e-4)


def test_a_label_of_a_classifier_chooses_a_response(run, prompts, tmp_path, word_piece):
    encoder(tmp_path / "labels", word_piece, 2)
    given = {"best_of": 2, "reward_model": str(tmp_path / "labels")}
    with pytest.raises(ConfigError, match=r"^--label: is missing, the model has the labels LABEL_0, LABEL_1\. Name"):
        write(run, prompts, tmp_path / "best.jsonl", **given)
    rows = write(run, prompts, tmp_path / "best.jsonl", label="LABEL_1", **given)
    firsts = write(run, prompts, tmp_path / "first.jsonl", label="LABEL_1", **given | {"best_of": 1})
    gains = [row["score"] - first["score"] for row, first in zip(rows, firsts, strict=True)]
    assert min(gains) > -1e-4  # other rows in a batch, other rounding
    assert max(gains) > 0.0
    assert [row["response"] for row in rows] != [first["response"] for first in firsts]
    with pytest.raises(ConfigError, match=r"^--label: needs --reward-model"):
        write(run, prompts, tmp_path / "other.jsonl", best_of=2, label="LABEL_1")


def test_greedy_responses_are_those_of_transformers(run, prompts, tmp_path):
    rows = write(run, prompts, tmp_path / "out.jsonl", temperature=0.0, num=4)
    path = str(run / "ppo" / "model")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), load_tokenizer(path)
    for row in rows:
        inputs = tokenizer(row["prompt"], return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        response = output[0, inputs["input_ids"].shape[1] :]
        assert row["response"] == tokenizer.decode(response, skip_special_tokens=True)
        assert row["ended"] == (tokenizer.eos_token_id in response.tolist())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stage": "sft", "directory": "MODEL"}, "--stage: .* is a model and not a run"),
        ({"compared": "base", "directory": "MODEL"}, "--compare: .* is a model and not a run"),
        ({"compared": "sft", "stage": "sft"}, "--compare sft: the responses are those of sft already"),
        ({"shard": "0/3"}, "--shard: 0/3, must be"),
        ({"shard": "two"}, "--shard: two, must be"),
        ({"directory": "RM"}, "stage rm is a reward model"),
        ({"best_of": 2, "directory": "MODEL"}, "--best-of: .* has no rewards"),
        ({"best_of": 2, "temperature": 0.0}, "--best-of: all samples are equal at --temperature 0"),
        ({"top_p": 0.5, "temperature": 0.0}, "--top-p: does nothing at --temperature 0"),
    ],
)
def test_wrong_options_are_one_line_and_write_nothing(run, prompts, tmp_path, make_model, settings, message):
    directories = {"MODEL": make_model("llama"), "RM": run / "rm"}
    directory = directories.get(settings.pop("directory", ""), run)
    with pytest.raises(UserError, match=message) as caught:
        write(directory, prompts, tmp_path / "out.jsonl", **settings)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_shard_without_rows_is_an_empty_file(run, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    assert len(write(run, prompts, out, num=3, shard="3/4")) == 1
    assert write(run, prompts, out, num=3, shard="4/4", restart=True) == []
    assert contents(out) == (b"", b"")
    with pytest.raises(RunError, match="no row was written; 1 dropped"):
        write(run, prompts, tmp_path / "dropped.jsonl", num=5, shard="5/5")


def test_notes_and_failures_of_the_rewards_are_shown(run, prompts, tmp_path, monkeypatch):
    (tmp_path / "f.py").write_text("def f(prompts, responses, rows):\n    return [1.0] * (len(rows) - 1) + [None]\n")
    own = FunctionReward(type="function", function=f"{tmp_path}/f.py:f", on_error="zero")
    rewards = RewardSet([NamedReward("rewards.0", "f", own)])
    monkeypatch.setattr(RewardSet, "load", lambda self, *a: (load_rewards(self.rewards, "", *a)[0], ["a note"]))
    monkeypatch.setattr(ResponseOptions, "rewards", lambda *_: rewards)
    shown = " ".join(rlhf("generate", run, "--prompts", prompts, "--out", tmp_path / "out.jsonl").stdout.split())
    assert "generate: a note" in shown
    assert re.search(r"out.jsonl: 8 rows, \d responses cut at 8 tokens .*; 1 dropped \(1 prompt too long\)", shown)
    assert "generate: warning: f: 1 scores failed and counted as 0.0. First failure: " in shown


def test_a_quantized_model_responds_and_another_does_not_continue_its_rows(run, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    rows = write(run, prompts, out, quantization="int8")
    generator = Generator(find_model(str(run)), ResponseOptions(batch_size=3), None, CPU)
    generator.speaker = find_model(str(run)).speaker(CPU, "int8")
    numbered = [(n, Record(row["prompt"], "")) for n, row in enumerate(read_jsonl(prompts)) if n != 4]
    assert [row["response"] for row in rows] == [columns["response"] for columns in generator.respond(numbered)]
    arguments = ["generate", str(run), "--prompts", str(prompts), "--out", str(out), "--device", "cpu"]
    result = CliRunner().invoke(app, [*arguments, "--batch-size", "3"])
    assert "other settings" in result.output or "--restart" in result.output, result.output
    rlhf(*arguments, "--batch-size", "3", "--quantize", "int8")


def test_a_refused_run_leaves_nothing_behind(run, prompts, tmp_path):
    """Rows from before outlive a refused --restart."""
    model = Path(shutil.copytree(run / "sft/model", tmp_path / "model"))
    out = tmp_path / "new/folder/out.jsonl"
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-8])
    with pytest.raises(ArtifactError, match="cannot load a model"):
        write(model, prompts, out, max_new_tokens=8)
    assert not list(out.parent.iterdir())

    (model / "model.safetensors").write_bytes(weights)
    write(model, prompts, out, max_new_tokens=8)
    before = {file.name: file.read_bytes() for file in out.parent.iterdir()}
    assert len(before) == 3
    (model / "model.safetensors").write_bytes(weights[:-8])
    with pytest.raises(ArtifactError, match="cannot load a model"):
        write(model, prompts, out, max_new_tokens=8, restart=True)
    assert {file.name: file.read_bytes() for file in out.parent.iterdir()} == before


# ------------------------------------------------------------------------------------- several processes

RLHF = (sys.executable, "-m", "rlhf_cli")


def write_in(size, run, prompts, out, **choice):
    """Generate in `size` processes; returns the bytes of the rows and of the dropped items."""
    options = ResponseOptions(device="cpu", batch_size=2, **choice)
    worlds = {}

    def program(world):
        worlds[threading.get_ident()] = world
        run_command(functools.partial(generate, None, str(run)), prompts, out, options=options, nproc=size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "start", lambda *_: worlds[threading.get_ident()])
        patch.setattr(module, "is_worker", lambda: True)
        patch.setattr(module, "is_first_worker", lambda: worlds[threading.get_ident()].is_main)
        in_each_process(size, program)
    return contents(out)


@pytest.mark.parametrize("choice", [{"seed": 3}, {"temperature": 0.0}])
def test_the_rows_are_those_of_one_process(run, prompts, tmp_path, choice):
    alone = write_in(1, run, prompts, tmp_path / "1.jsonl", **choice)
    assert len(alone[0].splitlines()) == 8
    for size in (2, 3):
        assert write_in(size, run, prompts, tmp_path / f"{size}.jsonl", **choice) == alone
    assert write_in(2, run, prompts, tmp_path / "2.jsonl", **choice) == alone, "nothing is left to do"


def test_another_number_of_processes_resumes_a_run_that_was_killed(run, prompts, tmp_path, monkeypatch):
    alone, out = write_in(1, run, prompts, tmp_path / "alone.jsonl"), tmp_path / "out.jsonl"
    with failing_after(monkeypatch, 3):
        write_in(3, run, prompts, out)
    assert contents(out) != alone
    assert write_in(2, run, prompts, out) == alone


def test_a_process_that_fails_leaves_whole_rows_from_the_beginning(run, prompts, tmp_path, monkeypatch):
    alone, out = write_in(1, run, prompts, tmp_path / "alone.jsonl"), tmp_path / "out.jsonl"
    respond = Generator.respond

    def fail(self, numbered):
        if any(number == 7 for number, _ in numbered):
            raise RunError("a score is NaN")
        return respond(self, numbered)

    with monkeypatch.context() as patch:
        patch.setattr(Generator, "respond", fail)
        with pytest.raises(RunError, match="a score is NaN"):
            write_in(2, run, prompts, out)
    assert alone[0].startswith(out.read_bytes())
    assert len(read_jsonl(out)) == 4
    assert write_in(2, run, prompts, out) == alone


def test_the_command_starts_itself_with_the_same_options(run, prompts, tmp_path, monkeypatch):
    started = []

    def run_processes(command, count, resume_command):
        started.append((command, count, resume_command))
        return 7

    monkeypatch.setattr(launcher, "run_processes", run_processes)
    arguments = ["generate", str(run), "--prompts", str(prompts), "--out", str(tmp_path / "out"), "--nproc", "2"]
    rlhf(*arguments, code=7)
    ((words, count, _),) = started
    assert (words, count) == ([*RLHF, *arguments], 2)


@pytest.mark.slow
def test_two_real_processes_write_the_bytes_of_one_after_a_kill(run, prompts, tmp_path):
    many = write_jsonl(tmp_path / "many.jsonl", read_jsonl(prompts) * 40)
    alone, out = write_in(1, run, many, tmp_path / "alone.jsonl"), tmp_path / "out.jsonl"
    arguments = ["generate", str(run), "--prompts", str(many), "--out", str(out), "--device", "cpu"]
    command = [*RLHF, *arguments, "--batch-size", "2", "--quiet", "--nproc", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not (out.exists() and out.stat().st_size > 0):
            time.sleep(0.05)
        workers = subprocess.run(["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, check=True)
        os.kill(int(sorted(workers.stdout.split(), key=int)[-1]), signal.SIGKILL)
        error = process.stderr.read()
    assert process.returncode == 1
    assert error.startswith("error: generate: process 0 waited for the "), error
    # Signs of life come once a second, so the last one may be older than the first responses.
    assert re.search(
        r"of all 2 processes, but process 1 \(last seen at (start|generate)\) ended without a message", error
    )
    assert len(error.splitlines()) == 1
    assert alone[0].startswith(out.read_bytes())
    assert write_in(2, run, many, out) == alone
