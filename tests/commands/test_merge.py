"""`rlhf merge RM RM --out DIR`: the mean of the weights of reward models."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_cli.models.load import load_reward_model, load_tokenizer
from support.projects import refused, rlhf


def averaged(out, *models):
    return " ".join(rlhf("merge", *models, "--out", out).output.split())


@pytest.fixture(scope="module")
def rm(pipeline, run_stage, tmp_path_factory):
    """A stage with two members."""
    root = tmp_path_factory.mktemp("members")
    shutil.copytree(pipeline("llama") / "sft", root / "sft")
    return run_stage("rm", root, members=2)


def test_the_mean_of_equal_models_has_their_bytes(rm, tmp_path):
    averaged(tmp_path / "mean", rm, rm / "model", rm)
    weights = [folder / "model.safetensors" for folder in (rm / "model", tmp_path / "mean")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_the_mean_of_two_models_is_measured_on_the_rows_of_their_run(rm, tmp_path):
    said = averaged(tmp_path / "mean", rm, rm / "members/1")
    one, two, mean = (
        load_file(folder / "model.safetensors") for folder in (rm / "model", rm / "members/1", tmp_path / "mean")
    )
    assert mean.keys() == one.keys()
    for name, weight in mean.items():
        wanted = (one[name].double() + two[name].double()) / 2
        torch.testing.assert_close(weight.double(), wanted, rtol=1e-6, atol=1e-8)
    facts = [json.loads((folder / "config.json").read_text()) for folder in (rm / "model", tmp_path / "mean")]
    assert facts[1]["score_std"] > 0
    assert facts[1]["score_std"] != facts[0]["score_std"], "it is measured, not taken over"
    assert facts[1]["rlhf_max_length"] == facts[0]["rlhf_max_length"]
    assert "held-out accuracy" in said
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    rlhf("rm", "score", tmp_path / "mean", rows)


def test_models_outside_of_a_run_get_no_scale(rm, tmp_path):
    copies = [shutil.copytree(rm / name, tmp_path / name.replace("/", "-")) for name in ("model", "members/1")]
    assert "belongs to no run" in averaged(tmp_path / "mean", *copies)
    assert not hasattr(load_reward_model(str(tmp_path / "mean")).config, "score_std")


def test_models_whose_mean_is_none_are_refused(rm, pipeline, tmp_path):
    own = shutil.copytree(rm / "model", tmp_path / "tokens")
    tokenizer = load_tokenizer(str(own))
    tokenizer.add_tokens(["<|new|>"])
    tokenizer.save_pretrained(own)
    cut = shutil.copytree(rm / "model", tmp_path / "cut")
    config = json.loads((cut / "config.json").read_text())
    (cut / "config.json").write_text(json.dumps({**config, "rlhf_max_length": 7}))
    other = shutil.copytree(rm / "model", tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    drawn = torch.Generator().manual_seed(1)
    mixed = {name: w[torch.randperm(len(w), generator=drawn)] for name, w in weights.items()}
    save_file(mixed, other / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "out"
    for model, message in (
        (pipeline("gpt2") / "rm", "have weights of other names or shapes"),
        (own, "have other tokenizers"),
        (cut, "cut texts to other lengths"),
        (other, "so they were not trained from one model"),
    ):
        assert message in refused("merge", rm, model, "--out", out)
    refused("merge", rm, "--out", out)
    refused("merge", rm, rm, rm)
    assert not out.exists()
