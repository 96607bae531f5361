"""`length_correction`: a planted length bias leaves the scores, wherever they are read."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
from transformers import AutoModelForSequenceClassification
from typer.testing import CliRunner

from rlhf_cli.algorithms.length import LengthCurve, regression_on_length, value_at
from rlhf_cli.algorithms.statistics import pearson
from rlhf_cli.cli import app
from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.models.load import load_reward_model, load_tokenizer, new_reward_model
from rlhf_cli.rewards.base import total_score
from rlhf_cli.rewards.models import length_curve
from rlhf_cli.run.artifacts import read_manifest
from support.compare import same_figures, same_weights
from support.rewards import batch, source_of
from support.tiny import BAD, GOOD, WORDS, read_jsonl, write_jsonl
from support.worlds import run_in_threads

# ------------------------------------------------------------------------------------- the formula


def test_the_regression_equals_a_slow_one() -> None:
    """Weighted least squares of each point by itself, with numbers that repeat."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (120,), generator=draw).double()
    scores = (lengths / 10).sin() + torch.randn(120, generator=draw, dtype=torch.float64) / 5
    curve = regression_on_length(lengths, scores, span=0.4)
    wanted = []
    for x in curve.lengths.tolist():
        far = (lengths - x).abs()
        width = far.sort().values[47] * 1.001 + 1e-9
        root = ((1 - (far / width).clamp(max=1) ** 3) ** 3).sqrt()
        rows = torch.stack([root, root * (lengths - x)], 1)
        wanted.append(torch.linalg.lstsq(rows, (root * scores)[:, None]).solution[0, 0])
    level = value_at(LengthCurve(curve.lengths, torch.stack(wanted)), lengths).mean()
    torch.testing.assert_close(curve.values, torch.stack(wanted) - level)


def test_a_line_is_taken_out_whole_and_the_mean_stays() -> None:
    lengths = torch.tensor([1.0, 4.0, 4.0, 9.0, 30.0])
    scores = 3 - 2 * lengths
    without = scores - value_at(regression_on_length(lengths, scores), lengths)
    torch.testing.assert_close(without, scores.double().mean().expand(5))


@pytest.mark.parametrize("lengths", [[7.0], [7.0, 7.0, 7.0], [7.0, 8.0]])
def test_few_lengths_have_a_curve(lengths) -> None:
    scores = torch.arange(float(len(lengths)))
    curve = regression_on_length(torch.tensor(lengths), scores)
    assert value_at(curve, torch.tensor([0.0, 7.0, 100.0])).isfinite().all()
    assert value_at(curve, torch.tensor(lengths)).mean().abs() < 1e-12


# ------------------------------------------------------------------------------------- the stage


def words(rng: random.Random, number: int, *extra: str) -> str:
    found = [rng.choice(WORDS[:10]) for _ in range(number)] + list(extra)
    rng.shuffle(found)
    return " " + " ".join(found)


@pytest.fixture(scope="session")
def biased(tmp_path_factory):
    """Training pairs whose better answer is often only longer, and held-out pairs where length says nothing."""
    folder, rng = tmp_path_factory.mktemp("biased"), random.Random(3)

    def pair(i: int, is_biased: bool) -> dict[str, str]:
        a, b = rng.sample(range(1, 14), 2)
        if is_biased:
            word = rng.choice([GOOD, BAD])
            longer, shorter = words(rng, max(a, b), word), words(rng, min(a, b), word)
            return {"prompt": f"Q {i}\nA:", "chosen": longer, "rejected": shorter}
        return {"prompt": f"Q {i}\nA:", "chosen": words(rng, a, GOOD), "rejected": words(rng, b, BAD)}

    return {
        "train": str(write_jsonl(folder / "train.jsonl", [pair(i, i % 2 == 0) for i in range(400)])),
        "test": str(write_jsonl(folder / "test.jsonl", [pair(i, False) for i in range(150)])),
    }


def settings(model, biased):
    return {
        "model": {"path": str(model)},
        "data": biased,
        "training": {"num_steps": 60, "minibatch_size": 16},
        "optimizer": {"learning_rate": 5e-3},
    }


@pytest.fixture(scope="session")
def runs(make_model, run_stage, biased, tmp_path_factory):
    """The artifact roots of the same reward model without and with the correction."""
    found = []
    for corrected in (False, True):
        root = tmp_path_factory.mktemp("rm")
        run_stage("rm", root, **settings(make_model("llama"), biased), length_correction=corrected)
        found.append(root)
    return found


def test_a_planted_bias_leaves_the_scores(runs, biased, tmp_path):
    """By the scores that `rlhf rm score` gives to held-out pairs, whose lengths say nothing."""
    correlations, accuracies = [], []
    for number, root in enumerate(runs):
        out = tmp_path / f"{number}.jsonl"
        assert CliRunner().invoke(app, ["rm", "score", str(root), biased["test"], "--out", str(out)]).exit_code == 0
        texts = [(row[side], row[f"{side}_score"]) for row in read_jsonl(out) for side in ("chosen", "rejected")]
        scores = torch.tensor([score for _, score in texts], dtype=torch.float64)
        correlations.append(pearson(scores, torch.tensor([float(len(text)) for text, _ in texts]).double()))
        accuracies.append((scores[0::2] > scores[1::2]).double().mean().item())
    assert correlations[0] > 0.4
    assert abs(correlations[1]) < 0.05
    assert accuracies[1] > accuracies[0] - 0.01
    plain, corrected = (read_manifest(root / "rm").metrics for root in runs)
    assert plain["eval/accuracy"] == corrected["eval/accuracy"] == accuracies[0]
    for found in (plain, corrected):
        assert found["rm/accuracy_without_length"] == accuracies[1]
        assert abs(found["rm/length_accuracy"] - 0.5) < 0.1, "the held-out labels do not depend on the length"


def test_ppo_reads_the_corrected_score_and_other_libraries_the_logit(runs):
    path = str(runs[1] / "rm/model")
    source = source_of({"type": "reward_model", "path": path})
    replies = [" tent is late thank", " lamp radio map is late broken please help sorry"]
    (found,) = total_score([source], batch(replies, prompts=["Q 1\nA:"] * 2)).each.values()
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), load_tokenizer(path)
    texts = [f"Q 1\nA:{reply}{tokenizer.eos_token}" for reply in replies]
    logits = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits[0] for text in texts]).detach()
    points = torch.tensor(model.config.length_curve).T.contiguous()
    value = value_at(LengthCurve(*points), torch.tensor([len(reply.strip()) for reply in replies]))
    torch.testing.assert_close(found, ((logits - value) / model.config.score_std).float() - source.mean / source.std)
    assert (value.diff() > 1).all(), "the longer reply loses more"


def test_every_saved_model_has_its_own_curve_whatever_the_processes(
    make_model, run_stage, write_config, biased, tmp_path
):
    changes = settings(make_model("llama"), biased) | {
        "training": {"num_steps": 6, "minibatch_size": 8},
        "evaluation": {"every_steps": 3, "keep_best": True, "max_rows": 40},
        "length_correction": True,
        "members": 2,
    }
    run_stage("rm", tmp_path / "one", **changes)
    run_in_threads(2, "rm", write_config("rm", tmp_path / "two", **changes))
    same_figures(tmp_path / "one/rm", tmp_path / "two/rm")
    same_weights(tmp_path / "one/rm", tmp_path / "two/rm", 1e-4)  # AdamW enlarges the rounding of a gradient near 0
    folders = [tmp_path / "one/rm" / name for name in ("model", "best_model", "members/1")]
    curves = [json.loads((folder / "config.json").read_text())["length_curve"] for folder in folders]
    assert curves[0] != curves[2]
    assert CliRunner().invoke(app, ["merge", *map(str, folders[::2]), "--out", str(tmp_path / "mean")]).exit_code == 0
    mean = json.loads((tmp_path / "mean/config.json").read_text())["length_curve"]
    assert mean not in curves
    # Trained further, it is another model.
    model, _ = new_reward_model(str(folders[0]), None, seed=0, head_std=None)
    assert length_curve(model) is None


# ------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("curve", [[], 3, [[1, 2], [1, 3]], [[1, float("nan")]], [[1, 2, 3]], [["a", 1]], {"a": 1}])
def test_a_broken_curve_is_refused(runs, tmp_path, curve):
    shutil.copytree(runs[1] / "rm/model", tmp_path / "rm")
    config = json.loads((tmp_path / "rm/config.json").read_text())
    (tmp_path / "rm/config.json").write_text(json.dumps(config | {"length_curve": curve}))
    with pytest.raises(ArtifactError, match=r"config\.json has length_curve: .* not a list of \[length, value\]"):
        load_reward_model(str(tmp_path / "rm"))


def test_it_needs_pairs_and_held_out_rows(make_model, run_stage, biased, tmp_path):
    with pytest.raises(ConfigError, match="length_correction is for scores that compare answers"):
        run_stage("rm", tmp_path, loss="mse", length_correction=True)
    changes = settings(make_model("llama"), biased | {"test": None, "test_fraction": 0})
    with pytest.raises(ConfigError, match="length_correction: is fitted on held-out test rows, and there are none"):
        run_stage("rm", tmp_path, **changes, length_correction=True)
