"""Held-out figures are those of the held-out rows, which here differ from the training rows, by plain transformers."""

from __future__ import annotations

import itertools
import re
import statistics

import pytest
import torch
from torch.nn.functional import cross_entropy, linear
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_cli.config.loader import load_config
from rlhf_cli.config.sft_rm import SFTConfig
from rlhf_cli.data.encode import RowText
from rlhf_cli.data.records import Answer, Record
from rlhf_cli.data.splits import Drawn
from rlhf_cli.models.load import load_policy, load_tokenizer
from rlhf_cli.models.save import save
from rlhf_cli.rollout.sampling import Sampling, draw_uniforms, sample
from rlhf_cli.run.artifacts import read_manifest
from stages import sft
from support.tiny import STOP, read_jsonl, training_examples, write_jsonl


@pytest.fixture
def split(data, tmp_path):
    """A function: kind of rows -> (rows, config changes, held-out rows). Two thirds of the rows are for training."""

    def make(kind):
        rows = read_jsonl(data[kind])
        train, test = rows[:16], rows[16:]
        paths = [write_jsonl(tmp_path / f"{name}.jsonl", part) for name, part in (("train", train), ("test", test))]
        return train, {"train": str(paths[0]), "test": str(paths[1])}, test

    return make


@torch.no_grad()
def sft_figures(model, tokenizer, rows):
    """(mean loss, share of likeliest tokens) over the target tokens of all rows."""
    losses, correct = [], []
    demonstrations = [Record(row["prompt"], "row", (Answer(row["response"]),)) for row in rows]
    for example in training_examples(tokenizer, demonstrations, None, learn_all=False):
        logits = model(input_ids=torch.tensor([example.ids])).logits[0, :-1]
        targets, mask = torch.tensor(example.ids[1:]), torch.tensor(example.loss_mask[1:])
        losses += cross_entropy(logits, targets, reduction="none")[mask].tolist()
        correct += (logits.argmax(-1) == targets)[mask].tolist()
    return statistics.fmean(losses), statistics.fmean(correct)


@torch.no_grad()
def score(model, ids):
    hidden = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
    return linear(hidden, model.score.weight).item()


def rm_figures(model, tokenizer, rows):
    """(mean margin, accuracy) of pairs."""
    margins = []
    for row in rows:
        answers = [Record(row["prompt"], "row", (Answer(row[side]),)) for side in ("chosen", "rejected")]
        chosen, rejected = (ids for ids, _ in RowText(tokenizer).answer_ids(answers))
        margins.append(score(model, chosen) - score(model, rejected))
    return statistics.fmean(margins), statistics.fmean(m > 0 for m in margins)


def test_the_figures_of_rm_are_those_of_the_held_out_rows(make_model, run_stage, split, tmp_path):
    train, changes, test = split("preferences")
    path = str(make_model("llama"))
    run_stage("rm", tmp_path, model={"path": path}, data=changes, evaluation={"num_normalization_samples": 0})
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm/model")
    figures = read_manifest(tmp_path / "rm").metrics
    margin, accuracy = rm_figures(model, load_tokenizer(path), test)
    assert figures["eval/margin"] == pytest.approx(margin, abs=1e-4)
    assert figures["eval/accuracy"] == pytest.approx(accuracy, abs=1e-6)
    assert abs(rm_figures(model, load_tokenizer(path), train)[0] - margin) > 1e-3


def test_score_statistics_are_those_of_fresh_samples_read_at_their_last_token(make_model, run_stage, split, tmp_path):
    """The mean and the population standard deviation, as the finished model's config has them.

    Many tokens end a response of this model, so most samples are shorter than the limit.
    """
    _, changes, test = split("preferences")
    policy, tokenizer = load_policy(str(make_model("llama"))), load_tokenizer(str(make_model("llama")))
    policy.generation_config.eos_token_id = sorted({tokenizer.eos_token_id, *STOP})
    save(policy, tokenizer, tmp_path / "policy")
    settings = {"num_normalization_samples": 12, "max_new_tokens": 10}
    run_stage("rm", tmp_path, model={"path": str(tmp_path / "policy")}, data=changes, evaluation=settings)

    prompts = [tokenizer(row["prompt"])["input_ids"] for row in itertools.islice(itertools.cycle(test), 12)]
    stop = Sampling(stop=frozenset({tokenizer.eos_token_id, *STOP}))
    responses = sample(policy, prompts, draw_uniforms(0, "rm normalization", 0, 12, 10), stop)
    assert sum(len(response.ids) < 10 for response in responses) > 6
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm/model")
    scores = []
    for prompt, response in zip(prompts, responses, strict=True):
        is_closed = not response.ended or response.ids[-1] == tokenizer.eos_token_id
        scores.append(score(model, prompt + response.ids + ([] if is_closed else [tokenizer.eos_token_id])))
    assert model.config.score_mean == pytest.approx(statistics.fmean(scores), abs=1e-5)
    assert model.config.score_std == pytest.approx(statistics.pstdev(scores), abs=1e-5)
    shown = [row["response"] for row in read_jsonl(tmp_path / "rm/samples.jsonl")]
    assert shown == [tokenizer.decode(response.ids, skip_special_tokens=True) for response in responses[:8]]


# ------------------------------------------------------------------------- rows that are drawn, and validation rows


@pytest.fixture
def sources(data, tmp_path):
    """A function: kind of rows -> (config changes, rows of the two test files, validation rows)."""

    def make(kind):
        rows = read_jsonl(data[kind])
        parts = {"train": rows[:8], "one": rows[8:14], "two": rows[14:19], "other": rows[19:]}
        paths = {name: str(write_jsonl(tmp_path / f"{name}.jsonl", part)) for name, part in parts.items()}
        changes = {"train": paths["train"], "test": [paths["one"], paths["two"]], "validation": paths["other"]}
        return changes, (parts["one"], parts["two"]), parts["other"]

    return make


def test_sft_measures_drawn_test_rows_at_the_end_and_validation_rows_on_the_way(
    make_model, run_stage, sources, tmp_path
):
    changes, (one, two), other = sources("demonstrations")
    path = str(make_model("llama"))
    settings = {"num_samples": 0, "max_rows": 6, "every_steps": 1, "keep_best": True}
    write_jsonl(tmp_path / "more.jsonl", other)
    changes["validation"] = [changes["validation"], str(tmp_path / "more.jsonl")]
    run_stage("sft", tmp_path, model={"path": path}, data=changes, evaluation=settings)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "sft/model"), load_tokenizer(path)
    figures = read_manifest(tmp_path / "sft").metrics

    def drawn(rows):
        demonstrations = [Record(row["prompt"], "row", (Answer(row["response"]),)) for row in rows]
        examples = training_examples(tokenizer, demonstrations, None, learn_all=False)
        return [rows[i] for i in Drawn(examples, 6, seed=0).numbers]

    rows = drawn(one + two)
    assert rows != (one + two)[:6]
    loss, accuracy = sft_figures(model, tokenizer, rows)
    assert figures["eval/loss"] == pytest.approx(loss, abs=1e-5)
    assert figures["eval/token_accuracy"] == pytest.approx(accuracy, abs=1e-6)
    for name, part in (("one", one), ("two", two)):
        loss = sft_figures(model, tokenizer, [row for row in rows if row in part])[0]
        assert figures[f"eval/loss/{name}"] == pytest.approx(loss, abs=1e-5)
    watched = sft_figures(model, tokenizer, drawn(other * 2))[0]
    assert figures["validation/loss"] == pytest.approx(watched, abs=1e-5)
    metrics = [row for row in read_jsonl(tmp_path / "sft/metrics.jsonl") if "validation/loss" in row]
    assert ["eval/loss" in row for row in metrics] == [False] * (len(metrics) - 1) + [True]
    lowest = min(metrics, key=lambda row: row["validation/loss"])
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "sft/best_model")
    assert sft_figures(best, tokenizer, drawn(other * 2))[0] == pytest.approx(lowest["validation/loss"], abs=1e-5)


@pytest.mark.parametrize("kind", ["preferences", "scored"])
def test_rm_reports_each_source_and_validation_rows(make_model, run_stage, sources, tmp_path, kind):
    changes, (one, two), other = sources(kind)
    loss = {"preferences": "logsigmoid", "scored": "mse"}[kind]
    settings = {"num_normalization_samples": 0}
    run_stage("rm", tmp_path, model={"path": str(make_model("llama"))}, data=changes, evaluation=settings, loss=loss)
    figures = read_manifest(tmp_path / "rm").metrics
    main = {"preferences": "accuracy", "scored": "mse"}[kind]
    sizes = {"one": len(one), "two": len(two)}
    mean = sum(figures[f"eval/{main}/{name}"] * size for name, size in sizes.items()) / sum(sizes.values())
    assert mean == pytest.approx(figures[f"eval/{main}"])
    assert figures[f"eval/{main}/one_low95"] <= figures[f"eval/{main}/one"] <= figures[f"eval/{main}/one_high95"]
    assert figures["eval/num_rows"] == sum(sizes.values())
    assert figures["validation/num_rows"] == len(other)


def test_one_set_that_chooses_and_reports_is_named(make_model, write_config, split, tmp_path, capsys):
    _, changes, test = split("demonstrations")
    changes |= {"validation": changes["train"]}
    settings = {"num_samples": 0, "every_steps": 1, "keep_best": True, "max_rows": 3}
    words = "evaluation.keep_best chooses by the test rows"
    for data, is_named in ((changes, False), (changes | {"validation": None}, True)):
        keys = {"model": {"path": str(make_model("llama"))}, "data": data, "evaluation": settings}
        path = write_config("sft", tmp_path / str(is_named), **keys, training={"num_steps": 1})
        sft.run(load_config(path, SFTConfig))
        output = " ".join(capsys.readouterr().out.split())
        assert (words in output) is is_named
        assert f"data.test: 3 of {len(test)} rows are measured, drawn by a hash" in output
        assert re.search(rf"SFT on 3 of {len(test)} held-out rows, \d+ target tokens", output)


def test_a_model_is_saved_after_each_epoch(make_model, run_stage, split, tmp_path):
    """The weights after the first pass are those of a run that ends there, and a reward model has its score's scale."""
    _, changes, _ = split("preferences")
    settings = {"num_normalization_samples": 4, "max_new_tokens": 3}
    common = {"model": {"path": str(make_model("llama"))}, "data": changes, "evaluation": settings}
    optimizer = {"schedule": "constant"}
    run_stage("rm", tmp_path / "one", **common, optimizer=optimizer, training={"num_steps": 2, "minibatch_size": 8})
    training = {"num_steps": 5, "minibatch_size": 8, "save_every": "epoch"}
    run_stage("rm", tmp_path / "all", **common, optimizer=optimizer, training=training)
    folders = sorted(path.name for path in (tmp_path / "all/rm").iterdir() if path.is_dir())
    assert folders == ["epoch_1", "epoch_2", "model"], "16 rows: after steps 2 and 4"
    load = AutoModelForSequenceClassification.from_pretrained
    saved, alone, last = (load(tmp_path / path) for path in ("all/rm/epoch_1", "one/rm/model", "all/rm/model"))
    for (name, a), b, c in zip(saved.named_parameters(), alone.parameters(), last.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert name.endswith("weight") <= bool((a != c).any())
    assert saved.config.score_std == pytest.approx(alone.config.score_std)
    assert saved.config.score_std != pytest.approx(last.config.score_std)
