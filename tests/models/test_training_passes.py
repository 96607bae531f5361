"""Gradient checkpointing, compiled passes, and the warning about bfloat16."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    T5Config,
)

from rlhf_cli.algorithms.losses import lm_loss
from rlhf_cli.config.models import Lora
from rlhf_cli.config.sft_rm import SFTConfig, SFTModel
from rlhf_cli.errors import ConfigError
from rlhf_cli.models import passes
from rlhf_cli.models.adapters import add_lora
from rlhf_cli.models.forward import check_head, target_logprobs
from rlhf_cli.models.load import load_policy, new_value_model, prepare
from rlhf_cli.models.passes import has_bfloat16, recomputing, set_up_passes
from rlhf_cli.plan import origins
from rlhf_cli.rewards.models import sequence_scores
from support.compare import adapt, same_weights
from support.tiny import CPU, tiny_model

SEQUENCES = [[5, 9, 3, 17, 4], [8, 2, 6], [7, 1, 1, 30, 22, 6, 19]]


def config(**settings):
    given = {"artifacts": "a", "model": {"path": "m"}, "data": {"train": "d.jsonl"}, "training": {"num_steps": 1}}
    return SFTConfig(**given, optimizer={"learning_rate": 1e-3}, **settings)


def gradients(path, *, lora, scores, sequences=SEQUENCES, **settings):
    """The gradient of each weight, and how often a decoder layer ran."""
    model = new_value_model(str(path), None) if scores else load_policy(str(path))
    if scores:
        torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(0))
    prepare(model, CPU)
    if lora:
        add_lora(model, Lora(r=2, alpha=4), "policy.lora", seed=0)
        adapt(model)
    lines, seconds = set_up_passes([model], config(**settings), CPU)
    assert len(lines) == int(seconds > 0)
    check_head(model)
    runs = []
    # The first norm of the first layer: hooks of the layer itself are outside of what is computed again.
    name = next(name for name, _ in model.named_modules() if name.endswith(("0.input_layernorm", "0.ln_1")))
    model.get_submodule(name).register_forward_hook(lambda *_: runs.append(1))
    before = {name: module.training for name, module in model.named_modules()}
    with recomputing(model):
        if scores:
            loss = sequence_scores(model, sequences).square().sum()
        else:
            learned = [[False] + [True] * (len(ids) - 1) for ids in sequences]
            loss, _ = lm_loss(target_logprobs(model, sequences, learned), num_tokens=12)
        loss.backward()
    assert before == {name: module.training for name, module in model.named_modules()}
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, len(runs)


@pytest.mark.parametrize("scores", [False, True], ids=["policy", "value_model"])
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_recomputed_layers_give_the_same_gradient(architecture, lora, scores, make_model):
    path = make_model(architecture)
    plain, once = gradients(path, lora=lora, scores=scores)
    recomputed, twice = gradients(path, lora=lora, scores=scores, gradient_checkpointing=True)
    assert (once, twice) == (1, 2)
    assert plain.keys() == recomputed.keys()
    assert any(gradient.abs().max() > 1e-4 for gradient in plain.values())
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("scores", [False, True], ids=["policy", "value_model"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bloom"])
def test_a_pass_over_no_rows_gives_a_gradient_of_0_to_each_weight(architecture, scores, make_model):
    """Torch sums the gradients of a sharded model only over the weights that have one. Bloom runs on padded batches."""
    path = make_model(architecture)
    (some, once), (none, also_once) = (
        gradients(path, lora=False, scores=scores, sequences=rows) for rows in (SEQUENCES, [])
    )
    assert once == also_once
    assert some.keys() == none.keys()
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in none.values())


def test_sampling_with_a_cache_does_not_recompute(make_model):
    """Outside of `recomputing` the layers keep keys and values."""
    model = load_policy(str(make_model("llama")))
    set_up_passes([model], config(gradient_checkpointing=True), CPU)
    ids = torch.tensor([SEQUENCES[2]])
    with torch.no_grad():
        cache = model(input_ids=ids[:, :-1], use_cache=True).past_key_values
        assert cache.get_seq_length() == ids.shape[1] - 1
        last = model(input_ids=ids[:, -1:], past_key_values=cache).logits[0, -1]
        torch.testing.assert_close(last, model(input_ids=ids).logits[0, -1], rtol=1e-5, atol=1e-6)


def test_a_model_without_gradient_checkpointing_is_refused(make_model):
    model = load_policy(str(make_model("llama")))
    model.supports_gradient_checkpointing = False
    with pytest.raises(ConfigError, match="gradient_checkpointing: transformers does not support it for a Llama"):
        set_up_passes([model], config(gradient_checkpointing=True), CPU)


def test_a_stage_ends_with_the_same_weights(tmp_path, make_model, run_stage):
    changes = {"policy": {"path": str(make_model("llama"))}, "value_model": {"init": "policy"}}
    changes["rewards"] = [{"type": "length", "target": 5}]
    plain, recomputed = (
        run_stage("ppo", tmp_path / str(on), gradient_checkpointing=on, **changes) for on in (False, True)
    )
    same_weights(plain / "model", recomputed / "model", 1e-5)
    start, end = (load_file(path / "model.safetensors") for path in (make_model("llama"), plain / "model"))
    assert max((end[name] - weight).abs().max() for name, weight in start.items()) > 1e-3


def test_a_torch_compile_error_is_one_line(make_model, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("\nno compiler\nmore lines")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    model = load_policy(str(make_model("llama")))
    prepare(model, CPU)
    with pytest.raises(ConfigError, match=r"^compile: torch.compile fails for this LlamaForCausalLM \(no compiler\)"):
        set_up_passes([model], config(compile=True), CPU)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_passes_give_the_same_weights_and_names(tmp_path, make_model, run_stage):
    """A large eps makes the size of a gradient visible in Adam's first steps."""
    changes = {"model": {"path": str(make_model("llama"))}, "optimizer": {"eps": 1e-3}}
    changes["checkpoints"] = {"every_steps": 1}
    plain, compiled = (run_stage("sft", tmp_path / str(on), **changes, compile=on) for on in (False, True))
    same_weights(plain, compiled, 1e-4)
    rows = [json.loads(line) for line in (compiled / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["step"] == 0
    assert rows[0]["time/compile_s"] > 0


@pytest.mark.parametrize(
    ("instructions", "maker", "is_fast"),
    [
        *(([], "AuthenticAMD", False), (["avx512_bf16"], "GenuineIntel", False)),
        *((["avx512_bf16"], "AuthenticAMD", True), (["avx512_bf16", "amx_bf16"], "GenuineIntel", True)),
    ],
)
def test_bfloat16_without_fast_instructions_for_it_is_reported(instructions, maker, is_fast, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(instructions, True))
    monkeypatch.setattr(passes, "maker", lambda: maker)
    assert has_bfloat16(CPU) == is_fast
    line = "precision: bfloat16 is slower than float32 on this cpu, which has no fast bfloat16 instructions"
    for precision in ("bfloat16", "auto", "float32"):
        lines = [line] if precision == "bfloat16" and not is_fast else []
        assert set_up_passes([], config(precision=precision), CPU) == (lines, 0.0)


@pytest.mark.parametrize(
    ("family", "precision", "more", "has", "says"),
    [
        *(("llama", "auto", 0, True, True), ("llama", "auto", 1, True, False), ("llama", "auto", 0, False, False)),
        *(("llama", "float32", 0, True, False), ("t5", "auto", 0, True, False), ("distilbert", "auto", 0, True, False)),
    ],
)
def test_auto_says_when_bfloat16_would_be_faster(family, precision, more, has, says, monkeypatch):
    """An encoder's passes are in float32 whatever the precision, and an encoder-decoder's are not faster."""
    auto = {"t5": AutoModelForSeq2SeqLM, "distilbert": AutoModelForSequenceClassification}
    model = tiny_model(family, auto.get(family, AutoModelForCausalLM))
    monkeypatch.setattr(passes, "FASTER_WEIGHTS", model.num_parameters() + more)
    monkeypatch.setattr(passes, "has_bfloat16", lambda _device: has)
    lines, _ = set_up_passes([model], config(precision=precision), CPU)
    assert [line.startswith("precision: auto is float32 here.") for line in lines] == [True] * says


@pytest.mark.parametrize(
    ("weights", "amx", "taken"), [(1, True, "bfloat16"), (10**6, True, "float32"), (1, False, "float32")]
)
def test_auto_is_bfloat16_for_a_large_model_with_amx(weights, amx, taken, tmp_path, make_model, run_stage, monkeypatch):
    monkeypatch.setattr(origins, "has_amx", lambda: amx)
    monkeypatch.setattr(origins, "FASTER_WEIGHTS", weights)
    model = {"path": str(make_model("llama"))}
    auto = run_stage("sft", tmp_path / "auto", model=model, precision="auto")
    same = run_stage("sft", tmp_path / "same", model=model, precision=taken)
    same_weights(auto, same, 0.0)
    assert [json.loads((run / "manifest.json").read_text())["precision"] for run in (auto, same)] == [taken, taken]
    assert "precision: auto" in (auto / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("model", "settings", "expected"),
    [
        (LlamaConfig(), {}, "bfloat16"),
        (LlamaConfig(), {"precision": "float32"}, "float32"),
        (LlamaConfig(), {"device": "cuda"}, "auto"),
        (T5Config(), {}, "auto"),
        (LlamaConfig(num_hidden_layers=10**7), {}, "auto"),
    ],
)
def test_auto_stays_for_encoder_decoders_gpus_and_endless_models(model, settings, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(origins, "has_amx", lambda: True)
    model.save_pretrained(tmp_path)
    given = config(**settings).model_copy(update={"model": SFTModel(path=str(tmp_path))})
    assert origins.settled_precision(given, origins.ModelOrigins({})) == expected


@pytest.mark.parametrize(("downloads", "is_offline"), [(True, False), (True, True), (False, False)])
def test_only_a_run_downloads_the_config_of_a_hub_model(downloads, is_offline, monkeypatch):
    """Else the first run of a hub model would be in float32, and the second one in bfloat16."""

    def read(_path, *, local_files_only, **_options):
        if local_files_only:
            raise OSError("not in the cache")
        return LlamaConfig()

    monkeypatch.setattr(origins, "has_amx", lambda: True)
    monkeypatch.setattr(origins, "is_offline", lambda: is_offline)
    monkeypatch.setattr(origins.AutoConfig, "from_pretrained", read)
    given = config().model_copy(update={"model": SFTModel(path="someone/model")})
    taken = origins.settled_precision(given, origins.ModelOrigins({}, downloads=downloads))
    assert taken == ("bfloat16" if downloads and not is_offline else "auto")
