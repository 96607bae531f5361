"""Encoder-decoder policies: the logits, samples, values and stages are those of transformers' own forward pass."""

import copy
import json
import shutil

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.data.records import Record
from rlhf_cli.errors import ArtifactError, ConfigError, DataError
from rlhf_cli.models import load
from rlhf_cli.models.deferred import read_deferred
from rlhf_cli.models.forward import autocast, target_logprobs
from rlhf_cli.models.frozen import frozen_policy, hold_frozen
from rlhf_cli.models.load import load_policy, load_value_model, new_reward_model, new_value_model, prepare
from rlhf_cli.models.save import save
from rlhf_cli.rewards.models import sequence_scores
from rlhf_cli.rollout.rollout import response_values
from rlhf_cli.rollout.sampling import Response, Sampling, draw_uniforms, sample
from rlhf_cli.tensor_ops import token_logprobs
from support.compare import close
from support.projects import rlhf
from support.tiny import CPU, SETTINGS, read_jsonl, write_jsonl

PROMPTS = [[5, 9, 13, 20, 7, 40], [6, 8], [11, 12, 13, 14]]
RESPONSES = [[21, 22, 1], [30], [31, 17, 18, 19, 1]]
FAMILIES = ("t5", "t5-untied", "bart")


def new(family, tokenizer):
    """A tiny random encoder-decoder; dropout stays on, so that tests detect code that does not turn it off."""
    torch.manual_seed(0)
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    own = {
        "t5": {"tie_word_embeddings": True, "initializer_factor": 2.0},
        "t5-untied": {"tie_word_embeddings": False, "initializer_factor": 0.3, "feed_forward_proj": "gated-gelu"},
        "bart": {"bos_token_id": bos, "forced_bos_token_id": None, "forced_eos_token_id": None},
    }[family]
    start = {"decoder_start_token_id": eos if family == "bart" else pad}
    ids = start | {"vocab_size": len(tokenizer), "pad_token_id": pad, "eos_token_id": eos}
    name = family.removesuffix("-untied")
    return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(name, **SETTINGS[name], **ids, **own))


@pytest.fixture(scope="module")
def make_seq2seq(tmp_path_factory, tokenizer):
    """A function: family -> directory of a tiny encoder-decoder with a tokenizer that appends EOS, as T5's does."""
    own = copy.deepcopy(tokenizer)
    eos = own.eos_token
    own.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {eos}", pair=f"$A $B {eos}", special_tokens=[(eos, own.eos_token_id)]
    )
    directories = {}

    def make(family):
        if family not in directories:
            directories[family] = tmp_path_factory.mktemp(family) / "model"
            save(new(family, own), own, directories[family])
        return directories[family]

    return make


@pytest.fixture(params=FAMILIES)
def policy(request, make_seq2seq):
    model = load_policy(str(make_seq2seq(request.param)))
    assert "an encoder-decoder" in prepare(model, CPU)
    return model


def plain_logprobs(model, prompt, response):
    """The oracle: transformers' forward of one text, with the labels shifted by transformers: [R]."""
    ids, labels = torch.tensor([[*prompt, model.config.eos_token_id]]), torch.tensor([response])
    return token_logprobs(model(input_ids=ids, labels=labels).logits[0], labels[0])


def test_logprobs_and_gradients_are_those_of_one_forward_pass_per_text(policy):
    sequences = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    masks = [[False] * len(p) + [True] * len(r) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    logprobs = target_logprobs(policy, sequences, masks)
    logprobs.sum().backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters()}
    policy.zero_grad()
    expected = torch.cat([plain_logprobs(policy, p, r) for p, r in zip(PROMPTS, RESPONSES, strict=True)])
    expected.sum().backward()
    close(logprobs, expected)
    for name, p in policy.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.2)])
def test_samples_have_the_logprobs_of_the_forward_pass(policy, precision, tolerance):
    """Also of weights that are held in 16 bits."""
    hold_frozen(policy.requires_grad_(False), CPU, precision, exact=False)
    sampling = Sampling(stop=frozenset(range(0, 300, 4)))
    with autocast(CPU, precision):
        responses = sample(policy, PROMPTS, draw_uniforms(0, "test", 0, 3, 12), sampling)
        assert len({len(r.ids) for r in responses}) > 1, "rows leave at different steps"
        for prompt, response in zip(PROMPTS, responses, strict=True):
            close(torch.tensor(response.logprobs), plain_logprobs(policy, prompt, response.ids), tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_model_has_one_value_per_token_and_is_saved_whole(family, make_seq2seq, tmp_path, tokenizer):
    path = str(make_seq2seq(family))
    model, policy = new_value_model(path, None), load_policy(path)
    backbone = policy.get_decoder().state_dict()
    for name, weight in model.get_decoder().state_dict().items():
        assert torch.equal(weight, backbone[name]), name
    torch.nn.init.normal_(model.score.weight)
    prepare(model, CPU)
    responses = [Response(ids, [0.0] * len(ids), ids[-1] == 1, None) for ids in RESPONSES]
    rows = [PromptRow("", ids, Record("", "")) for ids in PROMPTS]
    values = response_values(model, rows, responses, "float32")
    expected = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        ids = torch.tensor([[*prompt, policy.config.eos_token_id]])
        read = torch.tensor([[policy.config.decoder_start_token_id, *response[:-1]]])
        hidden = policy(input_ids=ids, decoder_input_ids=read, output_hidden_states=True).decoder_hidden_states[-1][0]
        expected.append((hidden @ model.score.weight.T)[:, 0])
    close(values, torch.cat(expected), 1e-4)
    save(model, tokenizer, tmp_path / "value")
    for deferred in (False, True):
        again = load_value_model(str(tmp_path / "value"), deferred=deferred)
        read_deferred(again)
        for name, weight in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], weight), name


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_reward_model_scores_each_text_alone(family, make_seq2seq):
    model, _ = new_reward_model(str(make_seq2seq(family)), None, seed=0, head_std=None)
    prepare(model, CPU)
    texts = [[5, 9, 13, 20], [6, 8], [11, 12, 13, 14, 15, 16]]
    eos = model.config.eos_token_id
    alone = [model(input_ids=torch.tensor([[*text, eos]])).logits[0] for text in texts]
    close(sequence_scores(model, texts), torch.stack(alone))


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_the_three_stages_run(family, make_seq2seq, run_stage, tmp_path):
    model = {"path": str(make_seq2seq(family))}
    run_stage("sft", tmp_path, model=model)
    run_stage("rm", tmp_path)
    run_stage("ppo", tmp_path)
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ppo/model")
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm/model")
    first = read_jsonl(tmp_path / "ppo/metrics.jsonl")[0]
    assert abs(first["objective/kl"]) < 1e-4, "at the start the policy is its reference"
    assert first["loss/value"] > 0
    if family == "t5":
        for arguments in (["eval", "--samples", "0"], ["export", "--out", str(tmp_path / "out")]):
            rlhf(arguments[0], tmp_path, *arguments[1:], "--device", "cpu")
        difference = json.loads((tmp_path / "out/export.json").read_text())["difference"]
        assert difference["kl_per_token"]["value"] == difference["loss"]["value"] == 0.0


def test_what_is_refused(make_seq2seq, run_stage, tmp_path):
    model = {"path": str(make_seq2seq("t5"))}
    with pytest.raises(ConfigError, match="--quantize: is not offered for an encoder-decoder"):
        frozen_policy(model["path"], None, CPU, "float32", "int8")
    with pytest.raises(ConfigError, match=r"data\.loss_on: all, but"):
        run_stage("sft", tmp_path / "a", model=model, data={"loss_on": "all"})
    with pytest.raises(ConfigError, match=r"model\.lora: is not offered for an encoder-decoder"):
        run_stage("sft", tmp_path / "b", model={**model, "lora": {"r": 2}})
    roles = [("user", "a b"), ("assistant", "c"), ("user", "d"), ("assistant", "e")]
    chat = [{"role": role, "content": text} for role, text in roles]
    talks = tmp_path / "talks"
    shutil.copytree(model["path"], talks)
    tokenizer = load.load_tokenizer(str(talks))
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(talks)
    data = write_jsonl(tmp_path / "chat.jsonl", [{"messages": chat}])
    with pytest.raises(DataError, match=r"chat\.jsonl:1: has several answers"):
        run_stage("sft", tmp_path / "c", model={"path": str(talks)}, data={"train": str(data), "test": None})
    broken = tmp_path / "broken"
    shutil.copytree(make_seq2seq("t5"), broken)
    config = json.loads((broken / "config.json").read_text())
    del config["decoder_start_token_id"]
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match="has no decoder_start_token_id"):
        load_policy(str(broken))
