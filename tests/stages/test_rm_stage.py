"""The RM stage: heads that are kept, losses on labels, and what it says about its own figures."""

from __future__ import annotations

import gc
import itertools
import json
import random
from functools import partial
from types import MethodType
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import binary_cross_entropy_with_logits
from typer.testing import CliRunner

from rlhf_cli.algorithms.statistics import wilson_interval
from rlhf_cli.cli import app
from rlhf_cli.data.records import Answer, Record
from rlhf_cli.errors import ArtifactError, ConfigError, DataError
from rlhf_cli.evaluation import normalization
from rlhf_cli.evaluation.agreement import answer_metrics
from rlhf_cli.evaluation.reward_model import Scorer
from rlhf_cli.health.baselines import held_out_verdict, weak_reward
from rlhf_cli.models.forward import autocast
from rlhf_cli.models.load import load_policy, load_reward_model, load_tokenizer, new_reward_model, prepare
from rlhf_cli.rollout import speaker
from rlhf_cli.rollout.sampling import sample
from rlhf_cli.run.artifacts import read_manifest, require_intact
from rlhf_cli.trained.run import open_run
from stages import rm as rm_stage
from support.tiny import BAD, CPU, GOOD, encoder, read_jsonl, sentence, write_jsonl

# ------------------------------------------------------------------------------------------- heads


def test_a_finished_reward_model_keeps_its_head(pipeline, run_stage, tmp_path):
    """Training that changes nothing leaves its held-out figures as they were."""
    before = pipeline("llama") / "rm"
    again = run_stage("rm", tmp_path, model={"path": str(before)}, optimizer={"learning_rate": 1e-12})
    for key in ("eval/accuracy", "eval/margin"):
        assert read_manifest(again).metrics[key] == pytest.approx(read_manifest(before).metrics[key], abs=1e-4)
    weights = [load_file(root / "model/model.safetensors")["score.weight"] for root in (before, again)]
    assert torch.allclose(*weights, atol=1e-6)
    assert weights[0].abs().max() > 1e-3
    with pytest.raises(ConfigError, match=r"model\.head_std: .* has a trained head with one label, which is kept"):
        run_stage("rm", tmp_path / "other", model={"path": str(before), "head_std": 0.1})


def test_new_parameters_are_named(pipeline, make_model, word_piece, tmp_path):
    """A language model has no head, and a head of two labels gives no score."""
    _, new = new_reward_model(str(make_model("llama")), None, seed=0, head_std=None)
    assert new == ["score.weight"]
    _, new = new_reward_model(str(pipeline("gpt2") / "rm/model"), None, seed=0, head_std=None)
    assert new == []
    two = encoder(tmp_path / "two", word_piece, 2)
    model, new = new_reward_model(str(tmp_path / "two"), None, seed=0, head_std=None)
    assert new == ["classifier.bias", "classifier.weight"]
    assert model.classifier.out_features == 1
    assert torch.equal(model.pre_classifier.weight, two.pre_classifier.weight), "only the last layer depends on labels"
    one = encoder(tmp_path / "one", word_piece, 1)
    model, new = new_reward_model(str(tmp_path / "one"), None, seed=0, head_std=None)
    assert new == []
    assert torch.equal(model.classifier.weight, one.classifier.weight)


@pytest.mark.parametrize("name", ["rm/model", "ppo/value_model"])
def test_a_classifier_is_no_language_model(pipeline, run_stage, tmp_path, name):
    """GPT-2 ties its head to its embeddings, so its classifier would load as a language model without a word."""
    path = str(pipeline("gpt2") / name)
    with pytest.raises(ArtifactError, match=r"is a GPT2ForSequenceClassification .* not a language model"):
        load_policy(path)
    with pytest.raises(ArtifactError, match="not a language model"):
        run_stage("ppo", tmp_path, policy={"path": path}, rewards=[{"type": "json"}])


# ------------------------------------------------------------------------------------- labels and figures


def labelled(folder, number=24, **changes):
    """KTO rows with true and false labels, as many good as bad."""
    rng = random.Random(0)
    rows = [
        {
            "prompt": f"Q: {sentence(rng, 1, 4)} {n}\nA:",
            "completion": f" {sentence(rng, 1, 5)} {GOOD if n % 2 else BAD}",
            "label": bool(n % 2),
            **changes,
        }
        for n in range(number)
    ]
    return str(write_jsonl(folder / "labelled.jsonl", rows))


def test_labels_are_learned_as_labels(make_model, run_stage, tmp_path, capsys):
    """KTO rows: the loss of the first step is that of the labels, and the figures are those of a classifier."""
    path = labelled(tmp_path)
    data = {"train": path, "test": {"path": path, "limit": 10}}
    training = {"num_steps": 12, "minibatch_size": 12}
    model = {"path": str(make_model("llama")), "head_std": 1.0}
    rm = run_stage(
        "rm", tmp_path, model=model, data=data, loss="bce", training=training, optimizer={"learning_rate": 1e-2}
    )
    rows = read_jsonl(rm / "metrics.jsonl")
    assert rows[10]["loss/rm"] < 0.3 < rows[0]["loss/rm"]
    assert rows[10]["rm/accuracy"] > 0.9
    found = read_manifest(rm).metrics
    assert found["eval/num_rows"] == 10
    assert found["eval/base_rate"] == found["eval/brier_baseline"] * 2 == 0.5
    assert found["eval/accuracy"] > 0.8
    assert found["eval/brier"] < 0.2
    assert "held-out accuracy" in capsys.readouterr().out or found["eval/accuracy_low95"] > 0.5
    # `rlhf eval` measures the same on the saved model.
    result = CliRunner().invoke(app, ["eval", str(tmp_path), "--stage", "rm"])
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "eval/rm/evaluation.json").read_text())["figures"]
    for name in ("accuracy", "base_rate", "brier", "calibration_error", "pair_accuracy"):
        assert figures[name]["value"] == pytest.approx(found[f"eval/{name}"], abs=1e-4), name


@pytest.mark.parametrize(
    ("loss", "label", "message"),
    [
        ("bce", 4, r":1: the label is 4, loss: bce needs labels from 0 \(bad\) to 1 \(good\)"),
        ("bce", 1, "every label .* is 1"),
        ("mse", 0.1, r"every score of the training rows is 0\.1, so there is nothing to learn"),
    ],
)
def test_scores_from_which_nothing_can_be_learned_are_refused(make_model, run_stage, tmp_path, loss, label, message):
    rows = [{"prompt": f"Q{n}", "response": " a", "score": label} for n in range(8)]
    data = {"train": str(write_jsonl(tmp_path / "rows.jsonl", rows)), "test": None, "test_fraction": 0}
    with pytest.raises(DataError, match=message):
        run_stage("rm", tmp_path, model={"path": str(make_model("llama"))}, data=data, loss=loss)


def rows_of(lengths):
    return [Record("", "row", (Answer("x" * n, 0.0),)) for n in lengths]


def test_figures_of_labels_equal_numbers_worked_by_hand():
    score, label = torch.tensor([2.0, -1.0, 0.5, 3.0]), torch.tensor([1.0, 0.0, 0.0, 1.0])
    found = answer_metrics(score, label, rows_of([9, 1, 2, 3]), "bce")
    p = score.sigmoid()
    assert found["eval/accuracy"] == 0.75
    assert (found["eval/accuracy_low95"], found["eval/accuracy_high95"]) == wilson_interval(3.0, 4)
    assert (found["eval/num_rows"], found["eval/base_rate"], found["eval/brier_baseline"]) == (4, 0.5, 0.25)
    assert found["eval/brier"] == pytest.approx(((p - label) ** 2).mean().item())
    assert found["eval/calibration_error"] == pytest.approx(
        (abs(p[0] - 1) + p[1] + p[2] + abs(p[3] - 1)).item() / 4, abs=1e-6
    ), "each probability is in a bin of its own"
    assert found["eval/pair_accuracy"] == 1.0
    assert (found["eval/length_baseline"], found["eval/shorter_baseline"]) == (1.0, 0.0)
    assert binary_cross_entropy_with_logits(score, label) < 0.5


def test_figures_of_scores_have_an_interval_and_baselines():
    target = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    found = answer_metrics(target + torch.tensor([0.1, -0.1, 0.3, -0.3]), target, rows_of([4, 3, 2, 1]), "mse")
    assert found["eval/num_rows"] == 4
    assert found["eval/mse"] == pytest.approx(0.05)
    assert 0.0099 < found["eval/mse_low95"] < 0.05 < found["eval/mse_high95"] < 0.0901
    assert (found["eval/length_baseline"], found["eval/shorter_baseline"]) == (0.0, 1.0)
    single = answer_metrics(target[:1], target[1:2], rows_of([1]), "mse")
    assert "eval/mse_low95" not in single


def of_pairs(low: float, longer: float) -> dict[str, float]:
    """An accuracy of 0.6 with this lower end, and the accuracy of choosing the longer answer."""
    found = {"eval/accuracy": 0.6, "eval/accuracy_high95": 0.66, "eval/num_rows": 300, "eval/accuracy_low95": low}
    return found | {"eval/length_baseline": longer, "eval/shorter_baseline": 1 - longer}


def of_scores(mse: float, high: float | None = None, longer: float = 0.4) -> dict[str, float]:
    """An error beside a variance of 1, perhaps with an interval up to `high`."""
    found = {"eval/num_rows": 50, "eval/target_variance": 1.0, "eval/pair_accuracy": 0.7, "eval/mse": mse}
    found |= {} if high is None else {"eval/mse_low95": 0.6, "eval/mse_high95": high}
    return found | {"eval/length_baseline": longer}


@pytest.mark.parametrize(
    ("figures", "says", "is_better"),
    [
        (of_pairs(0.54, 0.53), "above chance (0.500) and choosing the longer answer (0.530)", True),
        (of_pairs(0.54, 0.41), "above chance (0.500), but not above choosing the shorter answer (0.590)", False),
        (of_pairs(0.49, 0.52), "not above chance (0.500) or choosing the longer answer (0.520)", False),
        (
            of_pairs(0.54, 0.53) | {"eval/base_rate": 0.62},
            "not above giving every answer the more frequent label (0.620)",
            False,
        ),
        (of_scores(0.8, 0.95), "below the variance", True),
        (of_scores(0.9, 1.2), "not clearly below", False),
        (of_scores(1.5), "above the variance of the targets, so predicting their mean", False),
        (of_scores(0.8, longer=0.75), "the length alone 0.750", False),
    ],
)
def test_the_verdict_names_what_a_model_does_not_beat(figures, says, is_better):
    sentence, better = held_out_verdict(figures)
    assert says in sentence
    assert better == is_better
    assert (weak_reward("rm", figures) is None) == is_better, "PPO judges by the same rule"


@pytest.mark.parametrize("loss", ["logsigmoid", "mse"])
def test_a_model_at_chance_is_called_so(make_model, run_stage, data, tmp_path, capsys, loss):
    """Also when quiet. The manifest has what a later stage needs to say it again."""
    changes = {"train": str(data["scored"]), "test": str(data["scored"])} if loss == "mse" else {}
    model = {"path": str(make_model("llama"))}
    rm = run_stage("rm", tmp_path, model=model, data=changes, loss=loss, optimizer={"learning_rate": 1e-9})
    sentence, is_better = held_out_verdict(read_manifest(rm).metrics)
    assert not is_better
    printed = " ".join(capsys.readouterr().out.split())
    assert "rm: warning: held-out" in printed
    assert sentence.split("(")[0].strip() in printed


# ------------------------------------------------------------------------------------- members


def test_members_start_from_other_models_and_are_compared(pipeline, make_model, run_stage, tmp_path):
    """Three members, the second from another model: the figures are those of the saved models, worked out here."""
    root, other = pipeline("llama"), make_model("llama")
    model = {"path": str(root / "sft")}
    frozen = {"freeze": ["embeddings", "layers"]}
    rm = run_stage("rm", tmp_path, model=model | frozen, members=3, member_models=[str(other), model["path"]])
    metrics = read_manifest(rm).metrics
    folders = [rm / "model", rm / "members/1", rm / "members/2"]
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    norm = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(weights[0][norm], weights[2][norm])
    assert not torch.equal(weights[0][norm], weights[1][norm]), "the second starts from another model"
    heads = [one["score.weight"] for one in weights]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(heads, 2))

    run = open_run(tmp_path, stage="rm", device=CPU, seed=0)
    margins = []
    for folder in folders:
        scorer = Scorer(run, run.rm, load_reward_model(str(folder)), load_tokenizer(str(folder)))
        rows = scorer.held_out_rows()
        scores = scorer.score_items(rows)
        margins.append((scores[0::2] - scores[1::2]) / scorer.model.config.score_std)
    accuracy = [(m.sign() + 1).mean().item() / 2 for m in [*margins, sum(margins)]]
    names = [f"members/accuracy_{name}" for name in (0, 1, 2, "mean")]
    assert [metrics[name] for name in names] == pytest.approx(accuracy, abs=1e-6)
    assert metrics["members/accuracy_0"] == metrics["eval/accuracy"]
    pairs = list(itertools.combinations(margins, 2))
    alike = sum((a.sign() == b.sign()).float().mean().item() for a, b in pairs) / 3
    assert metrics["members/agreement"] == pytest.approx(alike, abs=1e-6)
    correlation = sum(torch.corrcoef(torch.stack(pair))[0, 1].item() for pair in pairs) / 3
    assert metrics["members/correlation"] == pytest.approx(correlation, abs=1e-4)

    with (folders[1] / "config.json").open("a") as file:
        file.write(" ")
    for path in (rm, folders[1]):
        with pytest.raises(ArtifactError, match=r"members/1/config\.json was modified"):
            require_intact(path)


def test_members_start_from_the_same_new_weights(pipeline, run_stage, monkeypatch, tmp_path):
    """So that their weights can be averaged: the learning rate is too small to change them. Trackers see the first."""
    trackers, rate = Mock(), {"learning_rate": 1e-30}
    monkeypatch.setattr("rlhf_cli.report.trackers.Trackers", trackers)
    model = {"path": str(pipeline("llama") / "sft"), "lora": {"r": 2}}
    rm = run_stage("rm", tmp_path, model=model, members=2, optimizer=rate, trackers=["tensorboard"])
    assert trackers.call_count == 1
    folders = [rm / "model/adapter", rm / "members/1/adapter"]
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    new = [name for name in first if "score" in name or "lora_A" in name]
    assert len(new) > 1
    assert all(torch.equal(first[name], second[name]) for name in new)


def test_members_of_another_tokenizer_are_refused(pipeline, make_model, run_stage, tmp_path):
    model = {"path": str(pipeline("llama") / "sft")}
    with pytest.raises(ConfigError, match="has another tokenizer than the first member"):
        run_stage("rm", tmp_path, model=model, members=2, member_models=[str(make_model("gpt2"))])


# ------------------------------------------------------------------------------------- memory


def weights_in_memory():
    """Every parameter that exists in this process and has memory."""
    found = (thing for thing in gc.get_objects() if isinstance(thing, torch.nn.Parameter))
    return {id(weight): weight for weight in found if weight.device.type != "meta" and weight.numel()}


@pytest.mark.parametrize(("lora", "members"), [(None, 1), (None, 2), ({"r": 4}, 1)], ids=["full", "members", "lora"])
def test_no_second_model_is_in_memory_while_one_is_sampled_from_loaded_or_scored(
    lora, members, pipeline, run_stage, monkeypatch, tmp_path
):
    """The SFT model is held in the precision of the passes, and its samples are those of its float32 weights."""
    root = pipeline("llama")
    known, others, drawn = weights_in_memory(), [], []

    def count(call, allowed=None):
        ours = {id(weight) for weight in allowed.parameters()} if allowed is not None else set()
        found = weights_in_memory()
        others.append((call, sum(w.numel() for i, w in found.items() if i not in known and i not in ours)))

    def watched(name, *given, **options):
        count(name)
        return loads[name](*given, **options)

    def sampled(policy, *given, **options):
        count("sample", policy)
        again = partial(sample, prompts=given[0], uniforms=given[1], sampling=given[2], **options)
        drawn.append((policy.model.layers[0].mlp.up_proj.weight.dtype, again, again(policy)))
        vars(policy)["run_gathered"] = MethodType(sampled, policy)  # as of a sharded model, which refers to itself
        return drawn[-1][-1]

    loads = {"new_reward_model": new_reward_model, "load_reward_model": load_reward_model}
    for program, name in ((rm_stage, "new_reward_model"), (normalization, "load_reward_model")):
        monkeypatch.setattr(program, name, partial(watched, name))
    monkeypatch.setattr(speaker, "sample", sampled)
    model = {"path": str(root / "sft"), "lora": lora}
    evaluation = {"every_steps": 2, "keep_best": True, "max_live_rows": 4}
    run_stage("rm", tmp_path, model=model, evaluation=evaluation, precision="bfloat16", members=members)
    assert {name for name, _ in others} == {"sample", *loads}
    assert [count for _, count in others] == [0] * len(others), others

    ((dtype, again, responses),) = drawn
    assert dtype == torch.bfloat16
    policy = load_policy(str(root / "sft/model"))
    prepare(policy, CPU)
    with autocast(CPU, "bfloat16"):
        assert [r.ids for r in again(policy)] == [r.ids for r in responses]
