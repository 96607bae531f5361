"""Which decoder `rollout.decoder` chooses, and what it refuses."""

import copy
from dataclasses import replace
from typing import get_args

import pytest
import torch

from rlhf_cli.config.loader import load_config
from rlhf_cli.config.ppo import DecoderName, PPOConfig
from rlhf_cli.decoders.decoder import UnsupportedError, choose_decoder, decoder_notes, recorded
from rlhf_cli.decoders.graphed import graphed_decoder
from rlhf_cli.decoders.paged import PagedDecoder, paged_decoder
from rlhf_cli.decoders.plain import PlainDecoder, takes_padding
from rlhf_cli.errors import ConfigError
from rlhf_cli.models.forward import choose_attention
from rlhf_cli.rollout import sampling as sampling_module
from rlhf_cli.rollout.sampling import sample
from support.decoders import PROMPTS, SAMPLINGS, UNIFORMS, made, same


def test_auto_takes_the_paged_decoder_where_it_can_and_a_named_one_is_taken():
    assert isinstance(choose_decoder(made("gpt_neox"), 50), PlainDecoder)
    for name, kind in {"auto": PagedDecoder, "paged": PagedDecoder, "plain": PlainDecoder}.items():
        assert isinstance(choose_decoder(made("llama"), 50, name), kind)
        assert decoder_notes(made("llama"), 50, name) == []


@pytest.mark.parametrize("call", [choose_decoder, decoder_notes])
def test_a_named_decoder_that_cannot_sample_is_one_line(call):
    with pytest.raises(ConfigError, match=r"^rollout.decoder: paged cannot .* GPTNeoXForCausalLM: .*Set it to auto or"):
        call(made("gpt_neox"), 50, "paged")


@pytest.mark.parametrize("name", ["gpt_neox", "dynamic"])
def test_a_model_that_is_refused_is_refused_without_a_pass(name, monkeypatch):
    model = copy.deepcopy(made(name))
    monkeypatch.setattr(model, "forward", lambda **_: pytest.fail("a forward pass"))
    for _ in range(2):
        with pytest.raises(UnsupportedError):
            paged_decoder(model, 50)


def no_memory(*_):
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")


@pytest.mark.parametrize(
    ("choose", "lacks"),
    [
        (takes_padding, "torch.nn.functional.silu"),
        (lambda model: paged_decoder(model, 50), "torch.nn.functional.silu"),
        (lambda model: graphed_decoder(model, 20), "torch.nn.functional.silu"),
        (lambda model: choose_attention(model) is None, "rlhf_cli.models.forward.hidden_at"),
    ],
)
def test_a_lack_of_memory_says_nothing_about_the_model(choose, lacks, monkeypatch):
    model = copy.deepcopy(made("llama"))
    with monkeypatch.context() as patch:
        patch.setattr(lacks, no_memory)
        with pytest.raises(RuntimeError, match="allocate"):
            choose(model)
    assert choose(model)
    with pytest.raises(RuntimeError, match="allocate"):
        recorded(no_memory, (torch.ones(2),))


@pytest.fixture
def used(monkeypatch):
    """The decoders that the sampler used."""
    decoders = []
    monkeypatch.setattr(
        sampling_module, "choose_decoder", lambda *args: decoders.append(choose_decoder(*args)) or decoders[-1]
    )
    return decoders


def test_the_sampler_uses_the_named_decoder_and_every_decoder_draws_the_same_tokens(used):
    names = ["auto", "paged", "plain", "sharded"]
    assert set(names) == set(get_args(DecoderName))
    responses = [sample(made("qwen2"), PROMPTS, UNIFORMS, replace(SAMPLINGS["plain"], decoder=name)) for name in names]
    assert [type(decoder) for decoder in used] == [PagedDecoder] * 2 + [PlainDecoder] * 2
    for other in responses[1:]:
        same(other, responses[0])


def test_the_config_names_the_decoder_of_a_run(make_model, run_stage, tmp_path, used):
    models = {"policy": {"path": str(make_model("llama"))}, "rewards": [{"type": "length", "target": 5}]}
    run_stage("ppo", tmp_path, **models, value_model={"init": "policy"}, rollout={"decoder": "plain"})
    assert {type(decoder) for decoder in used} == {PlainDecoder}


@pytest.mark.parametrize(
    ("decoder", "settings", "message"),
    [
        ("static", [], "must be one of auto, paged, plain, sharded; this decoder does not exist any more, say plain"),
        ("paged", ["device=cuda"], "paged needs a CPU, and device is cuda"),
        ("paged", ["precision=float16"], "paged does not compute in float16"),
        ("sharded", [], "sharded samples from a sharded policy, and this one is whole"),
        ("sharded", ["distributed.shard=true", "distributed.keep_whole=[policy]"], "this one is whole. Set it to auto"),
    ],
)
def test_a_decoder_that_can_never_run_is_refused_by_the_config(decoder, settings, message, write_config, tmp_path):
    path = write_config("ppo", tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_config(path, PPOConfig, [f"rollout.decoder={decoder}", *settings])
