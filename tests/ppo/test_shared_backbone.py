"""One backbone in memory serves policy, reference, value model and reward model, if all of them are adapters on it."""

from __future__ import annotations

import pytest
import torch

from rlhf_cli.config.models import Lora
from rlhf_cli.models import frozen
from rlhf_cli.models.adapter_files import BaseModel, save_adapter
from rlhf_cli.models.adapters import add_lora
from rlhf_cli.models.load import load_policy, load_reward_model, new_reward_model, new_value_model
from rlhf_cli.models.lora import Backbone
from rlhf_cli.plan.memory import Setting
from rlhf_cli.plan.origins import ModelOrigins
from rlhf_cli.plan.stages import models_of
from support.paths import OF_THE_MACHINE
from support.tiny import random_ids, read_jsonl

LORA = {"r": 2, "alpha": 4}
SEQUENCES = random_ids(9, 4, 13)


@pytest.fixture(scope="module")
def adapters(run_stage, make_model, tmp_path_factory):
    """A function: architecture -> a reward model that is adapters on the fixture's language model, trained once."""
    folders = {}

    def make(architecture):
        if architecture not in folders:
            root = tmp_path_factory.mktemp(f"rm_{architecture}")
            model = {"path": str(make_model(architecture)), "lora": {**LORA, "save": "adapter"}}
            folders[architecture] = run_stage("rm", root, model=model, optimizer={"learning_rate": 3e-2}) / "model"
        return folders[architecture]

    return make


def storages(*models):
    """Bytes of the distinct storages of all parameters."""
    found = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for m in models for p in m.parameters()}
    return sum(found.values())


def changes(make_model, reward_model, architecture="llama", **value_model):
    return {
        "policy": {"path": str(make_model(architecture)), "lora": LORA},
        "rewards": [{"type": "reward_model", "path": str(reward_model)}],
        "value_model": value_model,
    }


@torch.no_grad()
def scores(model):
    """By transformers' own forward pass, one sequence at a time."""
    model.set_attn_implementation("eager")
    return torch.cat([model(input_ids=torch.tensor([ids])).logits[0] for ids in SEQUENCES])


def test_adapters_of_another_base_or_quantization_are_not_attached(make_model, tmp_path):
    """They were trained on other numbers, so their scores would be wrong."""
    model = load_policy(str(make_model("llama")))
    own, other = BaseModel(str(make_model("llama"))), BaseModel(str(make_model("qwen2")))
    trained, _ = new_reward_model(own.path, None, seed=0, head_std=None)
    add_lora(trained, Lora(**LORA), "lora", seed=0)
    for name, base, kind in (("own", own, None), ("other", other, None), ("nf4", own, "nf4")):
        save_adapter(trained, tmp_path / name, base, kind)
    paths = {name: str(tmp_path / name) for name in ("own", "other", "nf4")}
    assert Backbone(model, own).reward_model(paths["own"]) is not None
    assert Backbone(model, own).reward_model(paths["other"]) is None
    assert Backbone(model, other).reward_model(paths["own"]) is None
    assert Backbone(model, own).reward_model(paths["nf4"]) is None
    assert Backbone(model, own, "nf4").reward_model(paths["own"]) is None


@pytest.mark.parametrize("init", ["auto", "policy"])
def test_all_models_share_one_backbone(start, make_model, adapters, init):
    """The memory of policy, reference, value and reward model is one backbone and three sets of adapters."""
    path = adapters("llama")
    alone = load_policy(str(make_model("llama")))
    with start(**changes(make_model, path, lora=LORA, init=init)) as loaded:
        policy, value, reward = loaded.models.policy, loaded.models.value_model, loaded.rewards[0].model
        assert loaded.models.ref_policy is None
        small = sum(
            p.nbytes for m in (policy, value, reward) for n, p in m.named_parameters() if ".lora_" in n or "score" in n
        )
        assert storages(policy, value, reward) == storages(alone) + small
        moments = sum(12 * p.numel() for m in (policy, value) for p in m.parameters() if p.requires_grad)
        named = {"policy": policy, "value model": value, "reward model": reward}
        models = models_of(loaded.config, ModelOrigins({}, named), Setting("cpu"))
        # The plan leaves out the adapters of the reward model: it does not know their size.
        left_out = sum(p.nbytes for n, p in reward.named_parameters() if ".lora_" in n or "score" in n)
        assert sum(m.weight_bytes for m in models) == storages(alone) + small - left_out
        assert sum(m.gradient_bytes + m.moment_bytes for m in models if m.is_trained) == moments
        assert not any(p.requires_grad for p in reward.parameters())

        # What each computes is what it computes alone.
        expected = load_reward_model(str(path))
        gap = (scores(reward) - scores(expected)).abs().max()
        assert gap <= 1e-5 * scores(expected).abs().max().clamp_min(1.0)
        assert reward.config.score_std == expected.config.score_std
        start_of_values = new_value_model(str(path if init == "auto" else make_model("llama")), None)
        for model in (value, start_of_values):
            assert model.score.weight.abs().max() == 0
            torch.nn.init.ones_(model.score.weight)
        expected_values = scores(start_of_values)
        assert (scores(value) - expected_values).abs().max() <= 1e-5 * expected_values.abs().max()


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_training_with_a_shared_backbone(watch, make_model, adapters, architecture):
    """Policy and value model learn, the reward model and the shared weights stay, and each is saved for itself."""
    path = adapters(architecture)
    before = load_policy(str(make_model(architecture))).state_dict()
    more = {} if architecture == "llama" else {"rollout": {"stop_tokens": []}}
    run = watch(**changes(make_model, path, architecture, lora={**LORA, "save": "adapter"}), **more)
    policy, reward = run.setup.models.policy, run.setup.rewards[0].model
    for name, weight in policy.state_dict().items():
        if ".lora_" not in name:
            assert torch.equal(weight, before[name.replace(".base_layer", "")])
    assert abs(run.metrics[0]["objective/kl"]) < 1e-5
    assert abs(run.metrics[1]["objective/kl"]) > 1e-4
    assert run.metrics[1]["value/mean"] != 0.0
    expected = scores(load_reward_model(str(path)))
    assert (scores(reward) - expected).abs().max() <= 1e-5 * expected.abs().max().clamp_min(1.0)
    saved = load_reward_model(str(run.stage_dir / "value_model"))
    value = run.setup.models.value_model.eval()
    assert (scores(saved) - scores(value)).abs().max() <= 1e-5 * scores(value).abs().max().clamp_min(1.0)


def test_references_limits_and_ensembles_are_those_of_models_with_weights_of_their_own(
    watch, make_model, adapters, monkeypatch
):
    path = str(adapters("llama"))
    keys = changes(make_model, path, lora=LORA)
    source = keys["rewards"][0]
    shaping = {"kind": "par", "num_references": 2}
    ensemble = {"type": "ensemble", "members": [path, path], "beta": 0.1}
    keys["rewards"] = [{**source, "shaping": shaping}, {**source, "limit": {"below": -1.0}}, ensemble]
    runs = [watch("shared", **keys)]
    monkeypatch.setattr("rlhf_cli.ppo.setup.Backbone", lambda *_: None)
    runs.append(watch("apart", **keys))
    held = [(run.setup.models.policy, *(source.model for source in run.setup.rewards)) for run in runs]
    assert [storages(*models) < 1.5 * storages(models[0]) for models in held] == [True, False]
    shared, apart = (read_jsonl(run.stage_dir / "references.jsonl") for run in runs)
    assert [row["replies"] for row in shared] == [row["replies"] for row in apart]
    for one, two in zip(runs[0].metrics, runs[1].metrics, strict=True):
        of_sources = ("reward/reward_model_0_shaped", "lambda/reward_model_1", "reward/ensemble_2")
        for name in ("objective/reward", *of_sources):
            assert one[name] == pytest.approx(two[name], rel=1e-3)


def test_other_adapters_get_weights_of_their_own(start, make_model, adapters):
    """A value model with another rank than the reward model cannot start from its adapters."""
    path = adapters("llama")
    with start(**changes(make_model, path, lora={"r": 3})) as loaded:
        policy, value, reward = loaded.models.policy, loaded.models.value_model, loaded.rewards[0].model
        assert storages(policy, reward) < 1.5 * storages(value)
        assert storages(policy, value) > 1.9 * storages(value)
    with start(**{**changes(make_model, path), "policy": {"path": str(make_model("llama"))}}) as loaded:
        assert not hasattr(loaded.rewards[0].model, "peft_config"), "a policy that learns shares nothing"


@pytest.mark.slow
def test_frozen_models_are_held_in_bfloat16_without_a_change(watch, make_model, adapters, monkeypatch):
    """Reference and reward model, in a run whose policy trains all its weights: the same numbers in half the memory."""
    keys = {**changes(make_model, adapters("llama")), "policy": {"path": str(make_model("llama"))}}
    held = watch("held", precision="bfloat16", **keys)
    for model in (held.setup.models.ref_policy, held.setup.rewards[0].model):
        linear = {p.dtype for name, p in model.base_model.named_parameters() if "proj" in name}
        assert linear == {torch.bfloat16}
    assert {p.dtype for p in held.setup.models.policy.parameters()} == {torch.float32}
    monkeypatch.setattr(frozen, "compute_dtype", lambda *_: torch.float32)
    plain = watch("plain", precision="bfloat16", **keys)
    for one, two in zip(held.metrics, plain.metrics, strict=True):
        assert one.keys() == two.keys()
        assert {key for key in one if one[key] != two[key] and not key.startswith(OF_THE_MACHINE)} == set()
