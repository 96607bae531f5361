"""The model card in each model directory, as huggingface_hub reads it."""

import json

import pytest
from huggingface_hub import ModelCard

from rlhf_cli.config.loader import load_config
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.run.model_card import Origin, base_model, card, license_of
from support.projects import write_manifest

VERSIONS = {"rlhf": "0.9.0"}


@pytest.mark.parametrize("stage", ["sft", "rm", "ppo"])
def test_every_model_directory_has_a_card_that_the_hub_reads(pipeline, stage):
    root = pipeline("llama")
    manifest = json.loads((root / stage / "manifest.json").read_text())
    folders = [path.parent for path in (root / stage).glob("*/config.json")]
    assert folders
    for folder in folders:
        assert f"{folder.name}/README.md" in manifest["files"]
        found = ModelCard.load(folder / "README.md")
        assert found.data.library_name == "transformers"
        assert stage in found.data.tags
    data = ModelCard.load(root / stage / "model" / "README.md").data
    values = {result.metric_name: result.metric_value for result in data.eval_results}
    key, name = {
        "sft": ("eval/loss", "loss, nats per token"),
        "rm": ("eval/loss", "loss"),
        "ppo": ("ppo/kl", "KL to the initial policy, nats per reply"),
    }[stage]
    assert values[name] == pytest.approx(manifest["metrics"][key], abs=1e-5)


def test_a_reward_models_card_has_the_formula_of_its_score(pipeline):
    folder = pipeline("llama") / "rm" / "model"
    config = json.loads((folder / "config.json").read_text())
    text = (folder / "README.md").read_text()
    assert f"`score_mean` {config['score_mean']:.6g}" in text
    assert "(logit - score_mean) / score_std" in text


def config_of(tmp_path, schema, **keys):
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps({"artifacts": "artifacts/mine", "optimizer": {"learning_rate": 1e-3}, **keys}))
    return load_config(path, schema)


TRAINING = {"num_steps": 1}


def test_a_hub_model_is_the_base_model_and_hub_data_are_its_datasets(tmp_path):
    data = {"train": ["Anthropic/hh-rlhf", str(tmp_path / "own.jsonl"), "rows.txt", "rows.tsv", "rows.jsonl.zst"]}
    config = config_of(tmp_path, SFTConfig, model={"path": "openai-community/gpt2"}, data=data, training=TRAINING)
    base = base_model(config, tmp_path)
    found = ModelCard(card("sft", "model", config, {"eval/loss": 2.0}, VERSIONS, None, base=base))
    assert found.data.base_model_relation == "finetune"
    assert found.data.base_model == "openai-community/gpt2"
    assert found.data.datasets == ["Anthropic/hh-rlhf"]
    assert found.data.model_name == "mine-sft"


def test_a_local_model_is_no_base_model_and_no_figures_give_no_index(tmp_path):
    data = {"train": str(tmp_path / "own.jsonl")}
    config = config_of(tmp_path, RMConfig, model={"path": str(tmp_path)}, data=data, training=TRAINING)
    base = base_model(config, tmp_path)
    found = ModelCard(card("rm", "model", config, {}, VERSIONS, None, base=base))
    assert found.data.base_model is None
    assert found.data.datasets is None
    assert found.data.eval_results is None
    assert "The score" not in found.text


@pytest.fixture
def finished_sft(tmp_path):
    """A run with the manifest of an SFT stage that started from a hub model."""

    def write(path, root=tmp_path / "artifacts" / "mine"):
        (root / "sft" / "model").mkdir(parents=True)
        config = {"model": {"path": path, "revision": "v1"}}
        write_manifest(root / "sft", "sft", identity={"config": config, "data": {}, "inputs": {}})
        return root

    return write


@pytest.mark.parametrize("path", [None, "sft", "sft/model"])
def test_later_stages_name_the_base_model_of_the_sft_stage(tmp_path, finished_sft, path):
    root = finished_sft("openai-community/gpt2")
    data = {"train": str(tmp_path / "own.jsonl")}
    model = {"path": None if path is None else str(root / path)}
    config = config_of(tmp_path, RMConfig, model=model, data=data, training=TRAINING)
    base = base_model(config, root if path is None else tmp_path)
    assert base == Origin("openai-community/gpt2", "v1")
    text = card("rm", "model", config, {}, VERSIONS, None, base=base, stages=["sft", "rm"], is_adapter=True)
    found = ModelCard(text).data
    assert (found.base_model, found.base_model_relation) == ("openai-community/gpt2", "adapter")
    assert found.library_name == "peft"
    commands = [line.split()[1] for line in text.splitlines() if line.startswith("rlhf ")]
    assert commands == ["sft", "rm", "eval", "report"]


def test_the_licence_is_that_of_the_base_models_card(tmp_path, finished_sft):
    base = tmp_path / "downloaded"
    base.mkdir()
    root = finished_sft(str(base))
    config = config_of(tmp_path, RMConfig, data={"train": str(tmp_path / "own.jsonl")}, training=TRAINING)
    found = base_model(config, root)
    assert found == Origin(str(base), "v1")
    assert license_of(found) is None
    assert "Licence: that of the data and of the base model" in card("rm", "model", config, {}, {}, None, base=found)
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    text = card("rm", "model", config, {}, {}, None, base=found)
    assert ModelCard(text).data.license == "apache-2.0"
    assert "Licence:" not in text
    (base / "README.md").write_text("---\nlicense: [\n---\n")
    assert license_of(found) is None
