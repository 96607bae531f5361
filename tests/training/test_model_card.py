"""The model card in each model directory, as huggingface_hub reads it."""

import json

import pytest
from huggingface_hub import ModelCard

from rlhf_cli.config.loader import load_config
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.training.model_card import card

VERSIONS = {"rlhf": "0.1.0"}


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
        "rm": ("eval/accuracy", "pairs in the right order"),
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
    data = {"train": ["Anthropic/hh-rlhf", str(tmp_path / "own.jsonl")]}
    config = config_of(tmp_path, SFTConfig, model={"path": "openai-community/gpt2"}, data=data, training=TRAINING)
    found = ModelCard(card("sft", "model", config, {"eval/loss": 2.0}, VERSIONS, None))
    assert found.data.base_model == "openai-community/gpt2"
    assert found.data.datasets == ["Anthropic/hh-rlhf"]
    assert found.data.model_name == "mine-sft"


def test_a_local_model_is_no_base_model_and_no_figures_give_no_index(tmp_path):
    data = {"train": str(tmp_path / "own.jsonl")}
    config = config_of(tmp_path, RMConfig, model={"path": str(tmp_path)}, data=data, training=TRAINING)
    found = ModelCard(card("rm", "model", config, {}, VERSIONS, None))
    assert found.data.base_model is None
    assert found.data.datasets is None
    assert found.data.eval_results is None
    assert "The score" not in found.text


def test_before_and_after_stand_in_the_card_of_the_policy_alone(tmp_path):
    keys = {
        "data": {"train": str(tmp_path / "p.jsonl")},
        "rewards": [{"type": "length", "target": 10}],
        "rollout": {"max_new_tokens": 8},
        "ppo": {"num_iterations": 1, "rollout_batch_size": 2, "minibatch_size": 2},
    }
    config = config_of(tmp_path, PPOConfig, **keys)
    metrics = {"sft/gold": 1.0, "ppo/gold": 2.5, "sft/kl": 0.0, "ppo/kl": 3.0}
    assert "| gold | 1 | 2.5 |" in card("ppo", "model", config, metrics, VERSIONS, None)
    value = card("ppo", "value_model", config, metrics, VERSIONS, None)
    assert "| gold |" not in value
    assert "predicts the return" in value
