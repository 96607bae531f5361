"""Families of models with special attention, positions or state: `prepare` detects them, and results are correct.

Each is compared with an unprepared copy that runs one sequence at a time.
"""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, DynamicCache

from rlhf_cli.decoders import plain as plain_decoder
from rlhf_cli.decoders.decoder import decoder_notes
from rlhf_cli.decoders.plain import PlainDecoder, takes_padding
from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.kernels import attention
from rlhf_cli.models.cost import work_of
from rlhf_cli.models.forward import (
    check_positions,
    compute_dtype,
    hidden_at,
    is_packed,
    logits_and_hidden_at,
    logits_at,
    positions,
    target_logits,
    target_logprobs,
)
from rlhf_cli.models.heads import value_model_like
from rlhf_cli.models.load import load_policy, prepare, set_dropout_off
from rlhf_cli.models.save import save
from rlhf_cli.packing import pack
from rlhf_cli.plan.activations import activation_bytes
from rlhf_cli.rewards.models import sequence_scores
from rlhf_cli.rollout.sampling import Sampling, draw_uniforms, sample
from rlhf_cli.tensor_ops import token_logprobs
from support.tiny import ARCHITECTURES, CPU
from support.tiny import tiny_model as tiny

VOCAB, WINDOW = 97, 12
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED_EXPERT = {**EXPERTS, "shared_expert_intermediate_size": 16}
WINDOWED = {"sliding_window": WINDOW}
HALF = {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}


def ids(length, seed):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


SEQUENCES = [ids(40, 1), ids(17, 2), ids(5, 3)]


@torch.no_grad()
def plain_logits(plain, sequence):
    return plain(input_ids=torch.tensor([sequence]), use_cache=False).logits[0]


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


IN_MASK_ONLY = {
    "phimoe": ("phimoe", {**WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2}, "its attention window of 12"),
    "doge": ("doge", WINDOWED, "its attention builds its own masks"),
    "qwen2_moe": ("qwen2_moe", {**WINDOWED, **SHARED_EXPERT, **HALF}, "its attention window of 12"),
}
HANDED_ON = {
    "mistral": ("mistral", WINDOWED),
    "gemma3": ("gemma3_text", {**WINDOWED, "head_dim": 8, "layer_types": HALF["layer_types"]}),
    "qwen2": ("qwen2", {**WINDOWED, **HALF}),
    "mixtral": ("mixtral", WINDOWED),
    "qwen2_moe without": ("qwen2_moe", SHARED_EXPERT),
}


@pytest.mark.parametrize("name", [*IN_MASK_ONLY, *HANDED_ON])
def test_texts_longer_than_the_window(name):
    family, config, *reason = {**IN_MASK_ONLY, **HANDED_ON}[name]
    plain = tiny(family, **config)
    model = copy.deepcopy(plain)
    note = prepare(model, CPU)
    assert is_packed(model) == (not reason)
    assert note is None if not reason else note.startswith(f"{type(model).__name__}: {reason[0]}")
    batch = pack(SEQUENCES)
    with torch.no_grad():
        found = logits_at(model, batch, torch.arange(len(batch.ids)))
    wanted = [plain_logits(plain, sequence) for sequence in SEQUENCES]
    close(found, torch.cat(wanted))
    if "without" not in name:
        changed = plain_logits(plain, [5, *SEQUENCES[0][1:]])
        assert (changed - wanted[0])[:WINDOW].abs().max() > 0.1
        unwindowed = copy.deepcopy(plain)
        unwindowed.set_attn_implementation(attention.EACH)
        with torch.no_grad():
            lost = hidden_at(unwindowed, batch, torch.arange(len(batch.ids)))
            kept = torch.cat([plain.base_model(input_ids=torch.tensor([s])).last_hidden_state[0] for s in SEQUENCES])
        assert ((lost - kept).abs().max() > 0.01) == bool(reason), "otherwise the window would not matter"


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
@pytest.mark.parametrize("cached", [False, True], ids=["one call", "two calls"])
def test_a_prepared_model_called_directly_equals_the_plain_one(name, cached):
    """Without a mask and without `packed`, as other code of transformers may call it."""
    family, config = HANDED_ON[name]
    plain = tiny(family, **config)
    model = copy.deepcopy(plain)
    assert prepare(model, CPU) is None
    text = torch.tensor([SEQUENCES[0]])
    with torch.no_grad():
        if cached:
            cache = DynamicCache(config=model.config)
            parts = [model(input_ids=part, past_key_values=cache).logits[0] for part in text.split([15, 25], 1)]
            found = torch.cat(parts)
        else:
            found = model(input_ids=text).logits[0]
    close(found, plain_logits(plain, SEQUENCES[0]))


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 32,
}


def test_a_rotation_that_depends_on_the_longest_text_is_fixed():
    model = tiny("phi3", original_max_position_embeddings=32, rope_parameters=LONGROPE)
    kinds = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": LONGROPE}
    each_has_its_own = tiny("gemma3_text", **WINDOWED, head_dim=8, rope_parameters=kinds)
    assert [positions(one) for one in (model, each_has_its_own, tiny("llama"))] == [32, 32, 128]
    check_positions(model, 32, "data.max_length")
    with pytest.raises(ConfigError, match=r"32 positions before its rotary embedding \(longrope\) changes with the"):
        check_positions(model, 33, "data.max_length")
    prepare(model, CPU)
    short = ids(20, 1)
    at = torch.arange(len(short))

    def beside(length):
        with torch.no_grad():
            return logits_at(model, pack([short, ids(length, 2)]), at)

    close(beside(32), plain_logits(model, short))
    assert (beside(33) - plain_logits(model, short)).abs().max() > 0.01, "otherwise more could be accepted"


SAMPLED = {
    **{name: ({}, True) for name in ("llama", "gpt2", "bloom", "jamba", "mamba")},
    "mistral": (WINDOWED, True),
    "gemma2": ({"final_logit_softcapping": 2.0}, True),
    **{name: ({}, False) for name in ("bart", "rwkv")},
    "roberta": ({"is_decoder": True}, False),  # its first position is 1 plus the id of the padding
}
"""Changes of the config, and whether the family takes padding and a cache."""
PROMPTS = [ids(n, n) for n in (20, 3, 1, 9, 3)]
STOP = Sampling(stop=frozenset(range(2, 40)))


@functools.cache
def pair(name):
    """(a model as transformers creates it, the same model prepared)."""
    plain = tiny(name, **SAMPLED[name][0])
    model = copy.deepcopy(plain)
    prepare(model, CPU)
    return plain, model


def sampled_gap(plain, responses):
    """The largest difference between a sampled log-probability and that of one forward per sequence, in nats."""
    gap = 0.0
    for prompt, response in zip(PROMPTS, responses, strict=True):
        logits = plain_logits(plain, prompt + response.ids)[len(prompt) - 1 : -1]
        wanted = token_logprobs(logits, torch.tensor(response.ids))
        gap = max(gap, (wanted - torch.tensor(response.logprobs)).abs().max().item())
    return gap


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_logprobs_equal_those_of_one_forward_per_sequence(name, monkeypatch):
    plain, model = pair(name)
    monkeypatch.setattr("rlhf_cli.rollout.sampling.choose_decoder", lambda model, *_: PlainDecoder(model))
    responses = sample(model, PROMPTS, draw_uniforms(0, "families", 0, len(PROMPTS), 9), STOP)
    # Mamba's scan always runs in float32, so it rounds more.
    assert sampled_gap(plain, responses) < (5e-4 if name == "mamba" else 1e-4)
    assert len({len(response.ids) for response in responses}) > 1, "some rows end while others continue"
    assert takes_padding(model) == SAMPLED[name][1]
    slower = [line for line in decoder_notes(model, 20, "plain") if "the whole text is read again" in line]
    assert len(slower) == (not SAMPLED[name][1])


def test_a_model_whose_results_depend_on_the_batch_is_refused(monkeypatch):
    monkeypatch.setattr(plain_decoder, "_gap", lambda _, padded: 2.0 if padded else 1e-3)
    with pytest.raises(ArtifactError, match=r"LlamaForCausalLM: its logits for several texts differ .* by 1\.0e-03"):
        takes_padding(tiny("llama"))
    assert not takes_padding(tiny("llama").bfloat16()), "which is rounding in 16 bits"


def test_a_model_that_cannot_be_called_is_refused_with_the_error(monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr(model, "forward", lambda **_: {}["logits"])
    with pytest.raises(
        ArtifactError, match=r"^LlamaForCausalLM: it does not take the calls \(KeyError: 'logits'\), so"
    ):
        takes_padding(model)


def test_nan_weights_are_not_reported_as_an_unsupported_model():
    model = tiny("llama")
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    assert takes_padding(model)


@pytest.mark.parametrize("name", ["mamba", "rwkv", "jamba", "bart", "roberta"])
def test_cost_and_logprobs_of_every_family(name):
    plain, model = pair(name)
    model = copy.deepcopy(model)
    work = work_of(model)
    assert (work.width == 0) == (name in ("mamba", "rwkv"))
    assert 0 < work.forward([5], 2) < work.training([5], 2)
    assert activation_bytes(model, "float32") > 0
    target_mask = [[False] + [True] * (len(s) - 1) for s in SEQUENCES]
    found = target_logprobs(model, SEQUENCES, target_mask)
    close(found, torch.cat([token_logprobs(plain_logits(plain, s)[:-1], torch.tensor(s[1:])) for s in SEQUENCES]))
    found.sum().backward()


def test_a_model_without_hidden_states_is_refused_in_one_line():
    model = tiny("llama4_text", num_local_experts=2, intermediate_size_mlp=48, head_dim=8)
    with pytest.raises(ArtifactError, match=r"^Llama4ForCausalLM: its backbone cannot be called with token ids.*$"):
        prepare(model, CPU)


@pytest.mark.parametrize("name", ["llama", "jamba", "mamba", "rwkv", "bart"])
def test_a_shared_value_model_that_could_not_be_saved_is_refused_before_training(name, tmp_path):
    _, model = pair(name)
    head, tokenizer = torch.nn.Linear(32, 1, bias=False), SimpleNamespace(save_pretrained=lambda _: None)
    if name != "bart":
        value_model_like(model)
        save(model, tokenizer, tmp_path / "policy")
        save(model, tokenizer, tmp_path / "value", value_head=head)
        policy, value = (load_file(tmp_path / name / "model.safetensors") for name in ("policy", "value"))
        assert torch.equal(value.pop("score.weight"), head.weight)
        assert policy.keys() - value.keys() <= {"lm_head.weight", "head.weight"}
        assert all(torch.equal(weight, policy[name]) for name, weight in value.items())
        return
    with pytest.raises(ArtifactError, match=r"value_model\.init: shared: transformers has no sequence classifier on"):
        value_model_like(model)


def test_the_head_runs_only_at_requested_positions_of_padded_batches():
    plain = tiny("bloom")
    model = copy.deepcopy(plain)
    prepare(model, CPU)
    assert not is_packed(model)
    target_mask = [[False] * 38 + [True] * 2, [False] * 17, [False] * 5]
    target_logits(model, SEQUENCES, target_mask)  # The first call probes what the head does.
    rows = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: rows.append(output.shape.numel() // VOCAB))
    found = token_logprobs(*target_logits(model, SEQUENCES, target_mask))
    assert rows == [2]
    logits = plain(input_ids=torch.tensor([SEQUENCES[0]])).logits[0, 37:39]
    wanted = token_logprobs(logits, torch.tensor(SEQUENCES[0][38:]))
    close(found, wanted)
    for one in (found, wanted):
        one.sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        close(p.grad, q.grad)


@pytest.mark.parametrize("family", ["bloom", "gemma2"])
def test_logits_and_hidden_states_of_a_model_before_it_is_probed(family):
    """Bloom has its own attention. Gemma 2 caps its logits: its head alone would give other logits."""
    plain = tiny(family, **SAMPLED[family][0])
    model = copy.deepcopy(plain)
    assert "padded" in prepare(model, CPU)
    assert not is_packed(model)
    batch = pack(SEQUENCES)
    at = torch.tensor([3, 39, 41, 60])
    with torch.no_grad():
        logits, hidden = logits_and_hidden_at(model, batch, at)
        close(hidden, hidden_at(model, batch, at))
    close(logits, torch.cat([plain_logits(plain, s) for s in SEQUENCES])[at])


def test_auto_precision_ignores_emulated_bfloat16(monkeypatch):
    def like_a_v100(including_emulation=True):
        return including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", like_a_v100)
    gpu = torch.device("cuda")
    assert compute_dtype(gpu, "auto") == torch.float32
    assert compute_dtype(gpu, "bfloat16") == torch.bfloat16
    assert compute_dtype(gpu, "float32") == torch.float32
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)  # noqa: ARG005
    assert compute_dtype(gpu, "auto") == torch.bfloat16
    assert compute_dtype(CPU, "auto") == torch.float32


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "electra", "xlnet"])
def test_a_classifier_that_scores_the_padding_is_refused(family):
    """XLNet reads the last position of a row, where the padding is."""
    model = tiny(family, AutoModelForSequenceClassification, num_labels=1).train()
    if family != "xlnet":
        prepare(model, CPU)
        assert model.training
        model.eval()
        together = sequence_scores(model, SEQUENCES)
        close(together, torch.cat([sequence_scores(model, [one]) for one in SEQUENCES]))
        return
    with pytest.raises(ArtifactError, match=r"padding after a text changes its score by .*another family"):
        prepare(model, CPU)


@pytest.mark.parametrize("name", [*ARCHITECTURES, "bloom", "opt"])
def test_dropout_is_off_in_train_mode(make_model, name):
    """[14] Families keep dropout in modules, in floats, and under different names."""
    model = load_policy(str(make_model(name)))
    text = torch.tensor([ids(12, 0)])

    @torch.no_grad()
    def changes():
        return not torch.equal(model.eval()(input_ids=text).logits, model.train()(input_ids=text).logits)

    assert not changes()
    if name == "gpt2":
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1
        assert changes(), "otherwise dropout would not matter"
        set_dropout_off(model)
        assert not changes()
