"""LoRA in the SFT and RM stages: what is trained, what is saved, who can load it, and how a run resumes."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    MixtralConfig,
    MixtralForCausalLM,
)

from rlhf_cli.config.models import Lora
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.models import deferred, exporting, frozen
from rlhf_cli.models.adapter_files import BaseModel, save_adapter
from rlhf_cli.models.adapters import add_lora
from rlhf_cli.models.deferred import place_of
from rlhf_cli.models.exporting import write_adapter
from rlhf_cli.models.frozen import hold_frozen
from rlhf_cli.models.load import (
    is_language_model,
    load_policy,
    load_reward_model,
    load_tokenizer,
    new_reward_model,
    new_value_model,
)
from rlhf_cli.models.lora import has_adapters_of
from rlhf_cli.models.save import plain_weights, save
from rlhf_cli.ppo.setup import load_setup
from rlhf_cli.run.stage_run import StageRun
from stages import rm, sft
from support.compare import adapt, logits_of, merged_copy
from support.compare import close_in_size as close
from support.projects import refused, rlhf
from support.setup import config_of
from support.tiny import CPU, tiny_model

BF16 = torch.bfloat16
FAST = {"optimizer": {"learning_rate": 3e-2}}


@pytest.fixture
def trained(run_stage, monkeypatch):
    """A function: stage, root, model keys -> the model as it was trained, with its adapters, and its stage."""

    def run(stage, root, **changes):
        program, models = {"sft": sft, "rm": rm}[stage], []
        save = program.save_trained

        def observed(model, *others):
            models.append(model)
            save(model, *others)

        with monkeypatch.context() as patch:
            patch.setattr(program, "save_trained", observed)
            return_value = run_stage(stage, root, **FAST, **changes)
        return models[-1].eval(), return_value

    return run


def logits(model):
    model.set_attn_implementation("eager")
    return logits_of(model)


def by_hand(base, adapter, *, scale, transposed):
    """The oracle: ``W + scale * B @ A`` in float64, with DoRA ``magnitude * that / norm of its rows``."""
    weights = {name: w.double() for name, w in load_file(base / "model.safetensors").items()}
    lora = {k.removeprefix("base_model.model."): w for k, w in load_file(adapter / "adapter_model.safetensors").items()}
    for key in [key for key in lora if key.endswith(".lora_A.weight")]:
        layer = key.removesuffix(".lora_A.weight")
        weight = weights[f"{layer}.weight"].T if transposed else weights[f"{layer}.weight"]
        weight = weight + scale * (lora[f"{layer}.lora_B.weight"].double() @ lora[key].double())
        magnitude = lora.get(f"{layer}.lora_magnitude_vector")
        if magnitude is not None:
            weight = weight * (magnitude.double() / weight.norm(dim=1))[:, None]
        weights[f"{layer}.weight"] = weight.T if transposed else weight
    return weights


@pytest.mark.parametrize(
    ("architecture", "lora", "scale"),
    [
        ("llama", {"r": 3, "alpha": 5}, 5 / 3),
        ("gpt2", {"r": 2, "alpha": 4, "rslora": True}, 4 / math.sqrt(2)),
        ("qwen2", {"r": 2, "alpha": 4, "dora": True, "target_modules": ["q_proj", "down_proj"]}, 2.0),
    ],
    ids=["all linear", "rslora gpt2", "dora"],
)
def test_sft_trains_adapters_only_and_saves_them_merged(trained, make_model, tmp_path, architecture, lora, scale):
    base = make_model(architecture)
    before = (base / "model.safetensors").read_bytes()
    model, stage = trained("sft", tmp_path, model={"path": str(base), "lora": lora})
    assert (base / "model.safetensors").read_bytes() == before
    assert all(".lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    start = load_policy(str(base)).state_dict()
    for name, weight in model.state_dict().items():
        if ".lora_" not in name:
            assert torch.equal(weight, start[name.replace(".base_layer", "")]), "a frozen weight changed"

    merged = load_file(stage / "model/model.safetensors")
    expected = by_hand(base, stage / "model/adapter", scale=scale, transposed=architecture == "gpt2")
    assert merged.keys() == expected.keys()
    for name in merged:
        close(merged[name].double(), expected[name])
    plain = AutoModelForCausalLM.from_pretrained(stage / "model")
    close(logits(plain), logits(model))
    assert (logits(plain) - logits(load_policy(str(base)))).abs().max() > 1e-2, "training changed something"
    adapted = {name.split(".base_layer")[0].split(".")[-1] for name in model.state_dict() if ".base_layer" in name}
    assert adapted == set(lora.get("target_modules") or adapted)
    assert "lm_head" not in adapted


def test_adapters_name_no_folder_of_this_machine_and_others_load_them_from_the_project(
    trained, make_model, tmp_path, monkeypatch
):
    """transformers, PEFT and our own loader give the logits of the trained model. A copy of a run uses its own base,
    also while the first one is still there with other weights."""
    project = tmp_path / "project"
    base = Path(shutil.copytree(make_model("llama"), project / "run/base"))
    monkeypatch.chdir(project)
    model, stage = trained("sft", Path("run"), model={"path": str(base), "lora": {"r": 2, "save": "adapter"}})
    folder = project / stage / "model"
    assert not list(folder.glob("model*.safetensors"))
    assert not (folder / "config.json").exists()
    for file in folder.glob("*.json"):
        assert str(tmp_path) not in file.read_text(), file.name
    assert len(json.loads((folder / "base_model.json").read_text())["digest"]) == 64
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == load_tokenizer(str(base)).get_vocab()
    assert is_language_model(str(stage / "model"))
    expected = logits(model)
    close(logits(load_policy(str(stage / "model"))), expected)
    close(logits(AutoModelForCausalLM.from_pretrained(stage / "model")), expected)
    close(logits(AutoPeftModelForCausalLM.from_pretrained(stage / "model").base_model.model), expected)
    with_base = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), stage / "model")
    close(logits(with_base.base_model.model), expected)
    (stage / "exported").mkdir()
    write_adapter(str(stage / "model"), stage / "exported", None, stage / "exported")
    close(logits(AutoPeftModelForCausalLM.from_pretrained(stage / "exported").base_model.model), expected)
    copied = shutil.copytree(project, tmp_path / "copy") / stage
    shutil.copy(make_model("qwen2") / "model.safetensors", base / "model.safetensors")
    for name in ("model", "exported"):
        close(logits(load_policy(str(copied / name))), expected)
    with pytest.raises(ArtifactError, match="other weights"):
        load_policy(str(folder))


def test_an_export_never_has_the_model_in_float32(trained, make_model, tmp_path, monkeypatch):
    _, stage = trained("sft", tmp_path, model={"path": str(make_model("llama")), "lora": {"r": 2, "save": "adapter"}})
    expected = load_policy(str(stage / "model")).bfloat16().state_dict()
    models = []
    in_float32 = []

    def take(weight):
        in_float32.append(sum(p.numel() for p in models[0].parameters() if place_of(p) is None and p.dtype != BF16))
        return deferred.take(weight)

    def load(*args, **options):
        models.append(load_policy(*args, **options))
        return models[-1]

    monkeypatch.setattr(exporting, "take", take)
    monkeypatch.setattr(exporting, "load_policy", load)
    model = exporting.load_model(str(stage / "model"), "bfloat16")
    assert in_float32 == [0] * len(list(model.parameters()))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_the_base_in_the_cache_of_the_hub_is_named_by_its_hub_id(make_model, tmp_path, monkeypatch):
    revision = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "hub/models--someone--a--model/snapshots" / revision
    shutil.copytree(make_model("llama"), cached)
    assert BaseModel(str(cached)).recorded() == BaseModel("someone/a--model", revision)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(make_model("llama"), tmp_path / "mine/model")
    assert BaseModel("mine/model").recorded() == BaseModel("./mine/model"), "PEFT would take mine/model for a hub id"
    assert BaseModel("someone/model", "main").recorded() == BaseModel("someone/model", "main")


def test_rm_trains_adapters_and_the_head(trained, pipeline, tmp_path):
    """Both forms of the reward model give the scores of the trained one, and keep the statistics of the score."""
    base = pipeline("llama") / "sft/model"
    scores = {}
    for form in ("merged", "adapter"):
        lora = {"r": 2, "save": form}
        model, stage = trained("rm", tmp_path / form, model={"path": str(base), "lora": lora})
        free = {name for name, p in model.named_parameters() if p.requires_grad}
        assert {name for name in free if ".lora_" not in name} == {"score.weight"}
        loaded = load_reward_model(str(stage / "model"))
        assert loaded.config.num_labels == 1
        assert loaded.config.score_std > 0
        close(logits(loaded), logits(model))
        scores[form] = logits(loaded)
        value = new_value_model(str(stage / "model"), None)
        assert value.score.weight.abs().max() == 0
        assert not hasattr(value.config, "score_mean")
    close(scores["merged"], scores["adapter"])
    folder = tmp_path / "adapter/rm/model"
    close(logits(AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)), scores["adapter"])
    with pytest.raises(ArtifactError, match="adapters of a classifier"):
        load_policy(str(folder))
    assert "score_mean" in (folder / "README.md").read_text()


def test_later_stages_read_adapters(run_stage, make_model, tmp_path):
    base = str(make_model("llama"))
    lora = {"path": base, "lora": {"r": 2, "save": "adapter"}}
    run_stage("sft", tmp_path, model=lora)
    run_stage("rm", tmp_path, model=lora)
    run_stage("ppo", tmp_path, policy={"lora": {"r": 2}}, value_model={"lora": {"r": 2}}, ppo={"num_iterations": 1})
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "ppo/model").config.model_type == "llama"
    assert (tmp_path / "ppo/value_model/adapter/adapter_model.safetensors").is_file()
    with pytest.raises(ConfigError, match=r"policy\.lora\.save: adapter needs a base of plain weights.* merge "):
        run_stage("ppo", tmp_path, policy={"lora": {"save": "adapter"}})


def test_a_reward_model_without_a_padding_token_is_saved_as_an_adapter_if_one_is_meant_for_it(
    run_stage, make_model, tmp_path
):
    """A new embedding would be lost with the adapters. Llama 3 has a token for padding, which is no pad_token."""
    lora = {"r": 2, "save": "adapter"}
    with pytest.raises(ConfigError, match=r"model\.lora\.save: adapter: .*no padding token"):
        run_stage("rm", tmp_path, model={"path": str(make_model("gpt2")), "lora": lora})
    tokenizer, model = load_tokenizer(str(make_model("gpt2"))), load_policy(str(make_model("gpt2")))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|finetune_right_pad_id|>"]})
    model.resize_token_embeddings(len(tokenizer))
    save(model, tokenizer, tmp_path / "base")
    folder = run_stage("rm", tmp_path, model={"path": str(tmp_path / "base"), "lora": lora}) / "model"
    assert load_tokenizer(str(folder)).pad_token == "<|finetune_right_pad_id|>"
    assert load_reward_model(str(folder)).config.pad_token_id == len(tokenizer) - 1
    merged = run_stage("rm", tmp_path / "merged", model={"path": str(make_model("gpt2")), "lora": {"r": 2}}) / "model"
    out = tmp_path / "out"
    line = refused("export", merged, "--format", "adapter", "--out", out)
    assert "has a padding token that its base lacks, and adapters have no embeddings" in line
    load_tokenizer(str(merged)).save_pretrained(merged / "adapter")
    assert "they belong to different models" in refused("merge", merged / "adapter", out)
    assert not out.exists()


@pytest.fixture
def bfloat16_base(make_model, tmp_path):
    model, tokenizer = load_policy(str(make_model("llama"))), load_tokenizer(str(make_model("llama")))
    save(model.bfloat16().float(), tokenizer, tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("name", ["sft", "rm"])
def test_frozen_weights_are_held_in_the_precision_of_the_passes(name, trained, bfloat16_base, tmp_path, monkeypatch):
    """In bfloat16 they take half the memory, with the same bits of every result; nothing is lost in what is saved.

    SFT samples answers from its model.
    """
    model = {"path": str(bfloat16_base), "lora": {"r": 2}}
    held, stage = trained(name, tmp_path / "held", model=model, precision="bfloat16")
    dtypes = {weight: p.dtype for weight, p in held.named_parameters()}
    halves = {name for name in dtypes if any(part in name for part in (".base_layer.", "embed_tokens", "lm_head"))}
    assert {dtypes[weight] for weight in halves} == {torch.bfloat16}
    assert [weight for weight in dtypes.keys() - halves if dtypes[weight] != torch.float32] == []
    monkeypatch.setattr(frozen, "compute_dtype", lambda *_: torch.float32)
    _, other = trained(name, tmp_path / "float32", model=model, precision="bfloat16")
    assert (stage / "samples.jsonl").read_text() == (other / "samples.jsonl").read_text()
    for file in ("model/model.safetensors", "model/adapter/adapter_model.safetensors"):
        assert (stage / file).read_bytes() == (other / file).read_bytes()


def test_weights_that_are_no_bfloat16_numbers_stay_in_float32_if_they_are_saved(make_model):
    model = load_policy(str(make_model("llama"))).requires_grad_(False)
    hold_frozen(model, CPU, "float32", exact=False)
    hold_frozen(model, CPU, "bfloat16", exact=True)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    first = model.model.layers[0].mlp.up_proj.weight
    hold_frozen(model, CPU, "bfloat16", exact=False, others=[first])
    halves = {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16}
    assert len(halves) == 2 * 7 - 1 + 1  # the linear layers and the head
    assert "lm_head.weight" in halves
    assert first.dtype == torch.float32


PICKLED = {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type: LOHA, not LORA"),
        ({"bias": "all"}, "sets bias, which is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: pissa"),
        ({"base_model_name_or_path": None}, "names no base model"),
        ({"base_model_name_or_path": "adapter"}, "names this folder as its own base model"),
        ({"r": 3}, "does not fit"),
        ({"target_modules": ["q_proj"]}, "does not fit"),
        ([], "adapter_config.json: is not a JSON object"),
        (PICKLED, "Pickled adapters are never read"),
    ],
)
def test_adapters_that_would_compute_something_else_are_refused(adapters, tmp_path, change, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(adapters, tmp_path / "adapter", ignore=shutil.ignore_patterns("base_model.json"))
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change if isinstance(change, dict) else change))
    if change is PICKLED:
        path.with_name("adapter_model.safetensors").rename(path.with_name("adapter_model.bin"))
    with pytest.raises(ArtifactError, match=message):
        load_policy(str(path.parent))


def test_whole_weights_beside_adapters_are_refused_whatever_is_loaded(make_model, tmp_path):
    """As PEFT saves them for `modules_to_save` and for a larger vocabulary. Of a classifier, they may be the head."""
    for kind, auto in (("CAUSAL_LM", AutoModelForCausalLM), ("SEQ_CLS", AutoModelForSequenceClassification)):
        model = auto.from_pretrained(make_model("llama"))
        lora = LoraConfig(r=2, task_type=kind, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
        get_peft_model(model, lora).save_pretrained(tmp_path / kind)
    line = r"has the whole weight model\.embed_tokens\.weight beside the adapters, which is not supported\. Merge"
    for load, kind in ((load_policy, "CAUSAL_LM"), (load_reward_model, "SEQ_CLS")):
        with pytest.raises(ArtifactError, match=line):
            load(str(tmp_path / kind))
        with pytest.raises(ArtifactError, match=line):
            new_value_model(str(tmp_path / kind), None)


@pytest.mark.parametrize("is_deferred", [False, True])
def test_adapters_on_a_head_that_shares_its_weight_with_the_embeddings_are_refused(tokenizer, tmp_path, is_deferred):
    """Merged into one tensor they would change both. On a head of its own they are merged as PEFT does."""
    for name, is_tied in (("own", False), ("tied", True)):
        save(tiny_model("llama", vocab_size=len(tokenizer), tie_word_embeddings=is_tied), tokenizer, tmp_path / name)
        lora = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["lm_head"])
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / name), lora)
        adapt(model)
        model.save_pretrained(tmp_path / f"{name}-adapter", save_embedding_layers=False)
        if not is_tied:
            loaded = load_policy(str(tmp_path / "own-adapter"), deferred=is_deferred)
            deferred.read_deferred(loaded)
            close(logits(loaded), logits(model.base_model.model))
    with pytest.raises(ArtifactError, match="a target shares its weight with the embeddings"):
        load_policy(str(tmp_path / "tied-adapter"), deferred=is_deferred)


@pytest.mark.parametrize("family", ["roberta", "electra", "distilbert"])
def test_adapters_with_a_head_of_two_layers_are_read_again(family, tokenizer, tmp_path):
    """The number of labels is that of the last layer."""
    start = tiny_model(family, AutoModelForSequenceClassification, vocab_size=len(tokenizer), num_labels=1)
    save(start, tokenizer, tmp_path / "base")
    model, _ = new_reward_model(str(tmp_path / "base"), None, seed=0, head_std=None)
    add_lora(model, Lora(r=2), "model.lora", seed=0)
    adapt(model)
    save_adapter(model, tmp_path / "adapter", BaseModel(str(tmp_path / "base")))
    close(logits_of(load_reward_model(str(tmp_path / "adapter"))), logits_of(model))


def test_an_index_counts_no_adapters(make_model, tmp_path):
    model, tokenizer = load_policy(str(make_model("llama"))), load_tokenizer(str(make_model("llama")))
    number = model.num_parameters()
    add_lora(model, Lora(r=2), "lora", seed=0)
    save(model, tokenizer, tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_parameters"] == number


def test_merge_writes_plain_weights(trained, pipeline, tmp_path):
    base = pipeline("llama") / "sft/model"
    for stage, auto in (("sft", AutoModelForCausalLM), ("rm", AutoModelForSequenceClassification)):
        model, folder = trained(stage, tmp_path, model={"path": str(base), "lora": {"r": 2, "save": "adapter"}})
        out = tmp_path / f"{stage}-merged"
        rlhf("merge", folder, out)
        plain = auto.from_pretrained(out)
        close(logits(plain), logits(model))
    assert plain.config.score_std > 0
    rlhf("merge", folder, tmp_path / "half", "--dtype", "bfloat16")
    weights, half = load_file(out / "model.safetensors"), load_file(tmp_path / "half/model.safetensors")
    assert torch.equal(half.pop("score.weight"), weights["score.weight"]), "the head keeps its float32 numbers"
    assert not torch.equal(weights["score.weight"], weights["score.weight"].to(BF16).float())
    assert all(torch.equal(weight, weights[name].to(BF16)) for name, weight in half.items())
    gone, new = shutil.copytree(folder / "model", tmp_path / "gone"), tmp_path / "new"
    (gone / "base_model.json").unlink()
    config = json.loads((gone / "adapter_config.json").read_text())
    (gone / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "/no/base"}))
    cases = [
        (folder, out, "exists"),
        (base, new, "has no adapters (adapter_config.json) to merge. Use the model as it is, or give --out OUT"),
        (tmp_path / "nope", new, "nope: no such directory"),
        (gone, new, "/no/base: no such directory"),
    ]
    for directory, target, message in cases:
        assert message in refused("merge", directory, target)


def test_merge_keeps_the_format_of_a_base_that_is_not_downloaded_yet(
    bfloat16_base, tokenizer, adapters, tmp_path, monkeypatch
):
    """Its config.json says it. Of a sharded model, the index alone does not."""
    snapshot = tmp_path / "hub/models--me--base/snapshots/abc"
    save(load_policy(str(bfloat16_base)), tokenizer, snapshot, "bfloat16", max_shard_size="20KB")
    (tmp_path / "hub/models--me--base/refs").mkdir()
    (tmp_path / "hub/models--me--base/refs/main").write_text("abc")
    remote = shutil.copytree(snapshot, tmp_path / "remote")
    for file in snapshot.glob("*.safetensors"):
        file.unlink()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    load = exporting.load_model

    def download(*args, **options):
        shutil.copytree(remote, snapshot, dirs_exist_ok=True)
        return load(*args, **options)

    monkeypatch.setattr(exporting, "load_model", download)
    folder = shutil.copytree(adapters, tmp_path / "adapter")
    (folder / "base_model.json").unlink()
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "me/base"}))
    assert "me/base with the adapters" in " ".join(rlhf("merge", folder, tmp_path / "out").stdout.split())
    assert {weight.dtype for weight in load_file(tmp_path / "out/model.safetensors").values()} == {BF16}


@pytest.fixture(scope="module")
def adapters(run_stage, make_model, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    lora = {"r": 2, "target_modules": ["q_proj", "v_proj"], "save": "adapter"}
    return run_stage("sft", root, model={"path": str(make_model("llama")), "lora": lora}) / "model"


def test_adapters_without_a_tokenizer_take_that_of_their_base(make_model, pipeline, write_config, tmp_path):
    """A folder of PEFT, and `model/adapter` of our own stages, in `rlhf merge`, `rlhf chat` and as PPO's policy."""
    base, folder = make_model("llama"), tmp_path / "peft"
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules=["q_proj"]))
    adapt(model)
    model.save_pretrained(folder)
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors", ".md"}
    rlhf("merge", folder, tmp_path / "merged")
    close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), logits(model.base_model.model))
    assert load_tokenizer(str(tmp_path / "merged")).get_vocab() == load_tokenizer(str(base)).get_vocab()
    rlhf("chat", folder, "--max-new-tokens", "4", input="the tent\n")
    keys = {"policy": {"path": str(folder)}}
    keys["rewards"] = [{"type": "reward_model", "path": str(pipeline("llama") / "rm")}]
    config = config_of(write_config, "ppo", PPOConfig, tmp_path / "run", **keys)
    with StageRun("ppo", config, quiet=True) as stage:
        setup = load_setup(config, stage)
    close(logits(setup.models.policy), logits(model.base_model.model))


def test_adapters_of_experts_are_merged_one_layer_at_a_time(tmp_path):
    """Their weights are no linear layers, and peft gives a layer one wrapper for each of them."""
    config = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(**config, vocab_size=1000, intermediate_size=32, num_local_experts=4))
    add_lora(model, Lora(r=2), "lora", seed=0)
    adapt(model)
    expected = dict(merged_copy(model).named_parameters())
    read = {name: weight() for name, (_, weight) in plain_weights(model).items()}
    assert list(read) == list(expected)
    for name in read:
        close(read[name], expected[name])
    save(model, SimpleNamespace(save_pretrained=lambda _: None), tmp_path)
    close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_adapters_fit_a_config_of_the_same_sizes_and_layers(make_model):
    """PPO copies those of the reward model into a value model on the same backbone only then."""
    model = load_policy(str(make_model("llama")))
    add_lora(model, Lora(r=2, target_modules=["q_proj"]), "lora", seed=0)
    assert has_adapters_of(model, Lora(r=2, target_modules=["q_proj"]))
    for other in (Lora(r=2), Lora(r=3, target_modules=["q_proj"]), Lora(r=2, target_modules=["v_proj"])):
        assert not has_adapters_of(model, other)
