"""`rlhf plan`: training rows, steps, tokens and time."""

from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.commands.plan import length_lines
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.data.answers import LabelledPairs, answer_encoder
from rlhf_cli.data.cache import tokenise
from rlhf_cli.data.encoders import DemonstrationEncoder
from rlhf_cli.data.stage_rows import rm_rows, sft_rows
from rlhf_cli.errors import ArtifactError
from rlhf_cli.plan import run_length as plan_length
from rlhf_cli.plan.run_length import length_of, training_rows
from rlhf_cli.seeding import generator
from support.tiny import write_jsonl

TRAINING = {"training": {"num_epochs": 2, "minibatch_size": 4}, "optimizer": {"learning_rate": 1e-3}}
HALF = {"select": "0/3,1/3", "weight": 2.5}
ANSWERS = [{"prompt": f"say {n}", "responses": ["one", "two", "three"], "scores": [1, 2, n]} for n in range(40)]
LABELLED = [{"text": f"{'word ' * (n % 9 + 1)}{n}", "label": n % 3 // 2} for n in range(60)]


def sft(path, model, **data):
    return SFTConfig(artifacts="nowhere", model={"path": model}, data={"train": path, **data}, **TRAINING)


def rm(path, model, loss="logsigmoid", **data):
    data = {"train": path, "max_length": 24, **data}
    return RMConfig(artifacts="nowhere", model={"path": model}, data=data, loss=loss, **TRAINING)


def as_trained(config, tokenizer):
    """The training rows and their sequences, as the stage has them."""
    if isinstance(config, SFTConfig):
        return [[row.ids] for row in tokenise(DemonstrationEncoder(tokenizer, sft_rows(config))).train]
    spec = rm_rows(config)
    train = tokenise(answer_encoder(tokenizer, spec, reads_last_token=True)).train
    is_labelled = config.is_pairwise and spec.purpose == "rm scores"
    return [row.sequences for row in (LabelledPairs(train, generator(0, "pairs")) if is_labelled else train)]


@pytest.mark.parametrize("kind", ["sft", "parts", "pairs", "scores", "labels"])
def test_rows_and_tokens_are_those_that_the_stage_trains_on(data, tokenizer, make_model, tmp_path, kind):
    config = {
        "sft": lambda: sft(data["demonstrations"].as_posix(), str(make_model("llama")), max_length=24, test_fraction=0),
        "parts": lambda: sft({"path": str(data["demonstrations"]), **HALF}, str(make_model("llama")), split=[3, 1, 1]),
        "pairs": lambda: rm(str(data["preferences"]), str(make_model("llama")), max_length=48),
        "scores": lambda: rm(str(data["scored"]), str(make_model("llama")), "mse", min_response_length=5),
        "labels": lambda: rm(
            str(write_jsonl(tmp_path / "labelled.jsonl", LABELLED)), str(make_model("llama")), max_length=96
        ),
    }[kind]()
    rows, trained = training_rows(config, {}, None), as_trained(config, tokenizer)
    assert rows.num == len(trained) > 3
    lengths = [sum(map(len, sequences)) for sequences in trained]
    # A text with a label is in several pairs, as the seed decides; without seeing them the mean of a text is taken.
    assert rows.tokens == pytest.approx(sum(lengths) / len(lengths), rel=0.1 if kind == "labels" else 1e-9)
    assert rows.sequences == len(trained[0])
    schedule = length_of("sft" if kind in ("sft", "parts") else "rm", {"sft": config, "rm": config}, 50.0, None)
    assert schedule.steps == config.training.total_steps(len(trained))
    assert schedule.tokens == round(schedule.steps * 4 * rows.tokens)
    assert not schedule.is_bound
    assert schedule.hours == pytest.approx(schedule.tokens / 50 / 3600)
    assert length_lines(schedule)[-1].startswith("  time: about ")


def test_of_many_rows_a_sample_is_tokenised(data, make_model, monkeypatch):
    config = sft(str(data["demonstrations"]), str(make_model("llama")), max_length=24, test_fraction=0)
    exact = training_rows(config, {}, None)
    monkeypatch.setattr(plan_length, "SAMPLE", 12)
    about = training_rows(config, {}, None)
    assert about.num == pytest.approx(exact.num, rel=0.4)
    assert about.tokens == pytest.approx(exact.tokens, rel=0.2)
    assert (about.num, about.tokens) != (exact.num, exact.tokens)


def test_without_a_tokenizer_rows_are_counted_as_full(data):
    rows = training_rows(rm(str(data["preferences"]), "nobody/nothing"), {}, None)
    assert (rows.tokens, rows.sequences) == (None, 2)
    config = rm(str(data["preferences"]), "nobody/nothing")
    schedule = length_of("rm", {"rm": config}, None, None)
    assert schedule.tokens == schedule.steps * 4 * 2 * 24
    assert "too long ones included" in length_lines(schedule)[0]
    assert f"at most {schedule.tokens:,} tokens (all rows full)" in length_lines(schedule)[1]
    assert length_lines(length_of("rm", {"rm": config}, schedule.tokens / 3600, None))[-1] == "  time: at most 1:00:00"


@pytest.mark.parametrize("kind", ["demonstrations", "preferences", "answers", "labels"])
def test_rows_are_counted_without_a_tokenizer(data, tmp_path, kind, tokenizer, make_model):
    rows = {"answers": ANSWERS, "labels": LABELLED}
    path = data[kind] if kind in data else write_jsonl(tmp_path / "rows.jsonl", rows[kind])
    make = sft if kind == "demonstrations" else rm
    loss = ["mse"] if kind == "answers" else []
    plain, full = (
        make(str(path), model, *loss, max_length=500) for model in ("nobody/nothing", str(make_model("llama")))
    )
    rows, trained = training_rows(plain, {}, None), as_trained(full, tokenizer)
    assert (rows.num, rows.sequences) == (len(trained), len(trained[0]))


def test_a_tokenizer_without_eos_is_refused_as_by_the_stage(data, make_model, tmp_path):
    model = shutil.copytree(make_model("llama"), tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": None}))
    with pytest.raises(ArtifactError, match="the tokenizer has no EOS token, so answers could not end"):
        training_rows(sft(str(data["demonstrations"]), str(model)), {}, None)


def test_rows_that_are_not_here_are_given_with_an_option():
    file = ["configs/support/rm.yaml", "--set", "training.num_steps=null", "--set", "training.num_epochs=2"]
    hub = [*file, "--set", "data.train=owner/name"]
    said = " ".join(CliRunner().invoke(app, ["plan", *hub]).stdout.split())
    reason = "owner/name: the rows of the hub are not counted"
    assert f"rows: not known ({reason}). Add --rows N for steps and time" in said
    found = CliRunner().invoke(app, ["plan", *hub, "--rows", "4000", "--json", "--tokens-per-s", "1000"])
    (rm_stage,) = json.loads(found.stdout)["stages"]
    assert (rm_stage["rows"], rm_stage["steps"]) == (4000, 2 * 4000 // 8)
    assert rm_stage["hours"] == pytest.approx(rm_stage["tokens"] / 1000 / 3600)
    ppo = CliRunner().invoke(app, ["plan", "configs/support/ppo.yaml", "--rows", "4000"])
    assert (ppo.exit_code, ppo.stderr.count("--rows: is for SFT and RM")) == (2, 1)


def test_members_take_their_time_one_after_the_other(data, make_model):
    config = rm(str(data["preferences"]), str(make_model("llama")), max_length=48)
    one, four = (length_of("rm", {"rm": config.model_copy(update={"members": n})}, 1000.0, None) for n in (1, 4))
    assert (four.steps, four.tokens) == (one.steps, 4 * one.tokens)
    assert four.hours == pytest.approx(4 * one.hours)
    assert f"{one.steps} optimizer steps for each of 4 members, one after the other" in " ".join(length_lines(four))
