"""Another engine that samples: what the probe after a transfer lets pass, what it stops, and what it names."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_cli.config.models import Lora
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.errors import RunError
from rlhf_cli.health.history import GAP_TOLERANCE
from rlhf_cli.models.adapters import add_lora
from rlhf_cli.models.load import prepare
from rlhf_cli.models.quantized import quantize
from rlhf_cli.rollout.distribution import Sampling
from rlhf_cli.rollout.engine import SyncedEngine, different_tensors
from rlhf_cli.rollout.sampling import draw_uniforms
from rlhf_cli.rollout.vllm_engine import VllmEngine, seed_of
from support.compare import close, merged_copy
from support.engines import CopyEngine, fake_vllm, weights_of
from support.gpu import needs_gpu
from support.tiny import CPU, PROMPTS, SETTINGS, STOP

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def new_policy(*, tied=True, lora=None):
    """A policy with a vocabulary of odd size."""
    torch.manual_seed(0)
    settings = {**SETTINGS["llama"], "hidden_size": 64 if lora is not None and lora.quantize else 32}
    config = LlamaConfig(**settings, vocab_size=261, tie_word_embeddings=tied)
    policy = LlamaForCausalLM(config)
    prepare(policy, CPU)
    if lora is not None:
        if lora.quantize is not None:
            quantize(policy, lora.quantize, "policy.lora.quantize")
        add_lora(policy, lora, "policy.lora", seed=0)
    return policy.eval()


@torch.no_grad()
def update(policy, size=0.1):
    """Change every trained weight, as an optimizer step does."""
    noise = torch.Generator().manual_seed(1)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.add_(size * torch.randn(parameter.shape, generator=noise))


def synced(engine, precision="float32", max_staleness=0):
    prompts = [PromptRow("", ids, None) for ids in PROMPTS]
    limits = {"tolerance": GAP_TOLERANCE[precision], "max_staleness": max_staleness}
    return SyncedEngine(engine, prompts, max_new_tokens=24, precision=precision, **limits)


def rollout(engine, policy):
    return engine.sample(policy, PROMPTS, draw_uniforms(0, "test", 0, len(PROMPTS), 8), Sampling(stop=STOP))


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize(
    ("tied", "lora"),
    [(True, None), (False, None), (True, Lora(r=4)), (True, Lora(r=4, dora=True, target_modules=["q_proj"]))],
)
def test_a_healthy_engine_passes(tied, lora, precision):
    policy = new_policy(tied=tied, lora=lora)
    engine = synced(CopyEngine(policy, TYPES[precision]), precision)
    for _ in range(3):
        responses = rollout(engine, policy)
        assert 0 < engine.gap <= GAP_TOLERANCE[precision]
        assert [len(r.ids) for r in responses] == [len(r.logprobs) for r in responses]
        update(policy, 0.03)
    assert engine.engine.log == ["wake", "load", "sample", "sample", "sleep"] * 3


@pytest.mark.parametrize("lora", [Lora(r=4), Lora(r=4, rslora=True, target_modules=["q_proj"], quantize="nf4")])
def test_the_weights_that_are_sent_are_those_of_the_merged_model(lora):
    policy = new_policy(lora=lora)
    update(policy)
    sent, expected = weights_of(policy), dict(merged_copy(policy).named_parameters())
    assert list(sent) == list(expected)
    for name, weight in sent.items():
        close(weight, expected[name], 0.0)


FAULTS = {
    "tied head": ({"kept": lambda name: name == HEAD}, [f"{HEAD} (tied to {EMBEDDING})"]),
    "one block": (
        {"kept": lambda name: ".layers.1." in name},
        [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkvo"],
    ),
    "the version before": ({"late": True}, [f"{HEAD} (tied to {EMBEDDING})", EMBEDDING]),
    "permuted vocabulary": ({"permuted": True}, [f"{HEAD} (tied to {EMBEDDING})", EMBEDDING + "."]),
}


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_an_engine_with_other_weights_is_stopped_and_the_tensors_are_named(fault, precision):
    """The engine reports nothing. Its first weights are the policy's, so most faults show after the first update."""
    policy = new_policy()
    options, names = FAULTS[fault]
    engine = synced(CopyEngine(policy, TYPES[precision], **options), precision)
    if fault != "permuted vocabulary":
        rollout(engine, policy)
        update(policy)
    with pytest.raises(RunError, match="copy does not hold the weights of the policy") as raised:
        rollout(engine, policy)
    message = str(raised.value)
    assert engine.gap > GAP_TOLERANCE[precision], "also without its tensors"
    assert f"These tensors differ: {', '.join(names)}" in message
    assert ("more" in message) == (fault in ("one block", "the version before"))
    assert "layers.0" not in message or fault == "the version before"


def test_a_change_below_rounding_is_seen_in_the_tensors():
    """A step of a usual size moves log-probabilities by less than bfloat16 rounds."""
    policy = new_policy()
    engine = synced(CopyEngine(policy, torch.bfloat16, kept=lambda name: name == HEAD), "bfloat16")
    rollout(engine, policy)
    update(policy, 1e-3)
    with pytest.raises(RunError, match=f"These tensors differ: {HEAD} "):
        rollout(engine, policy)
    assert engine.gap < GAP_TOLERANCE["bfloat16"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_readable": False, "kept": lambda name: name == HEAD}, "Its weights cannot be read"),
        ({"temperature": 0.7}, "computes with other token ids, positions or precision"),
    ],
)
def test_what_a_probe_cannot_name_is_stopped_too(options, message):
    policy = new_policy()
    engine = synced(CopyEngine(policy, **options))

    def run():
        for _ in range(2):
            rollout(engine, policy)
            update(policy)

    with pytest.raises(RunError, match=message):
        run()


def test_a_gap_that_is_not_finite_stops():
    policy = new_policy()
    engine = synced(CopyEngine(policy, is_readable=False))
    real = engine.engine.load

    def load(policy):
        real(policy)
        engine.engine.model.model.norm.weight.data.fill_(torch.nan)

    engine.engine.load = load
    with pytest.raises(RunError, match="by nan nats"):
        rollout(engine, policy)


def test_weights_are_sent_when_they_changed_more_often_than_max_staleness():
    def loads(engine, *, updates=1):
        before = engine.engine.log.count("load")
        rollout(engine, policy)
        for _ in range(updates):
            update(policy, 1e-3)
        return engine.engine.log.count("load") - before

    policy = new_policy()
    always, second = synced(CopyEngine(policy)), synced(CopyEngine(policy), max_staleness=1)
    assert [loads(always) for _ in range(4)] == [1, 1, 1, 1]
    assert [loads(second) for _ in range(5)] == [1, 0, 1, 0, 1]
    second.require_current()
    assert loads(second) == 1, "an evaluation wants the policy as it is"
    assert [loads(always, updates=0) for _ in range(3)] == [1, 0, 0], "the policy did not change"
    forgets = synced(CopyEngine(policy, forgets=True))
    assert [loads(forgets, updates=0) for _ in range(2)] == [1, 1], "it sleeps without its weights"


@pytest.mark.parametrize(("keeps_weights", "level"), [(False, 2), (True, 1)])
def test_the_calls_of_vllm_are_in_the_order_that_it_documents(monkeypatch, keeps_weights, level):
    """A stand-in with vLLM's interface: it has joined layers and a padded vocabulary, and sleeps at two levels."""
    fake_vllm(monkeypatch)
    policy = new_policy()
    vllm = VllmEngine(policy, dtype=torch.bfloat16, longest=64, memory=0.3, keeps_weights=keeps_weights)
    vllm._llm.copy = CopyEngine(policy, torch.bfloat16)
    engine = synced(vllm, "bfloat16", max_staleness=int(keeps_weights))
    for _ in range(3):
        responses = rollout(engine, policy)
        assert all((r.ids[-1] in STOP) == r.ended for r in responses)
        assert not set(STOP) & {token for r in responses for token in r.ids[:-1]}
        assert len({len(r.ids) for r in responses}) > 1
        update(policy, 0.01)
    loaded = ["load", "reset", "generate", "generate", f"sleep {level}"]
    assert vllm._llm.log[1:] == (loaded + ["generate", "sleep 1"] + loaded if keeps_weights else loaded * 3)
    options = vllm._llm.options
    assert (options["dtype"], options["logprobs_mode"], options["load_format"]) == (
        "bfloat16",
        "processed_logprobs",
        "dummy",
    )
    # Every tensor can be compared, also joined and padded ones, and one that is wrong is named.
    assert different_tensors(policy, vllm.checksums(), torch.bfloat16) != [], "the policy was updated"
    vllm.wake()
    vllm.load(policy)
    assert different_tensors(policy, vllm.checksums(), torch.bfloat16) == []
    vllm._llm.copy.model.model.layers[1].self_attn.k_proj.weight.data[3, 5] += 1
    [names] = different_tensors(policy, vllm.checksums(), torch.bfloat16)
    assert names == tuple(f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv")


def test_seeds_come_from_the_uniforms():
    uniforms = draw_uniforms(0, "seeds", 0, 100, 2)
    seeds = [seed_of(row) for row in uniforms]
    assert len(set(seeds)) == 100
    assert seeds == [seed_of(row) for row in uniforms]
    assert all(0 <= seed < 2**48 for seed in [*seeds, seed_of(uniforms[0, :1])])


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@needs_gpu
@pytest.mark.parametrize("lora", [None, Lora(r=4)])
def test_vllm_follows_the_policy(lora):
    policy = new_policy(lora=lora).cuda()
    options = {"dtype": torch.bfloat16, "longest": 64, "memory": 0.3, "keeps_weights": False}
    engine = synced(VllmEngine(policy, **options), "bfloat16")
    for _ in range(3):
        responses = rollout(engine, policy)
        assert all(0 < len(r.ids) <= 8 for r in responses)
        assert engine.engine.checksums() == {} or engine.gap <= GAP_TOLERANCE["bfloat16"]
        update(policy)
