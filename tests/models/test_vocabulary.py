"""`model.add_tokens`: tokens and embeddings, saved and known to later stages; models with other tokens are refused."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_cli.config.models import ScratchModel
from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.models.frozen import freeze
from rlhf_cli.models.load import load_policy, load_tokenizer
from rlhf_cli.models.save import save
from rlhf_cli.models.scratch import new_model
from rlhf_cli.models.vocabulary import add_tokens, embed_tokens, require_same_tokens
from support.projects import rlhf
from support.tiny import SETTINGS, read_jsonl

NEW = ["<|user|>", "<|end|>"]


def grown(path):
    model, tokenizer = load_policy(str(path)), load_tokenizer(str(path))
    add_tokens(tokenizer, NEW, "model.add_tokens")
    return model, tokenizer, embed_tokens(model, tokenizer, NEW, "model.add_tokens")


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "gpt_neox", "opt"])
def test_new_tokens_start_as_the_mean_and_the_other_tokens_keep_their_logits(make_model, family, tmp_path):
    path = make_model(family)
    before, old = load_policy(str(path)), len(load_tokenizer(str(path)))
    model, tokenizer, line = grown(path)
    ids = tokenizer.convert_tokens_to_ids(NEW)
    assert ids == [old, old + 1]
    assert line == f"model.add_tokens: 2 new tokens with the ids {old} to {old + 1}; {old + 2} embeddings"
    for of in ("get_input_embeddings", "get_output_embeddings"):
        table, rows = (getattr(one, of)().weight for one in (model, before))
        assert torch.equal(table[:old], rows)
        torch.testing.assert_close(table[old:], rows.mean(0).expand(2, -1))
    save(model, tokenizer, tmp_path / "saved")
    saved, read = (auto.from_pretrained(tmp_path / "saved") for auto in (AutoModelForCausalLM, AutoTokenizer))
    assert (len(read), saved.config.vocab_size) == (old + 2, old + 2)
    text = "Q<|user|> it is late<|end|>"
    encoded = read(text, add_special_tokens=False)["input_ids"]
    assert [i for i in encoded if i >= old] == ids, "each is one token"
    assert read.decode(encoded, skip_special_tokens=True) == "Q it is late"
    with torch.no_grad():
        prompt = torch.tensor([[5, 6, 7]])
        torch.testing.assert_close(saved(prompt).logits[..., :old], before(prompt).logits, rtol=0, atol=1e-5)


def test_unused_rows_of_the_embeddings_are_taken_first(make_model, tmp_path):
    """Released models often have more rows than tokens."""
    model, tokenizer = load_policy(str(make_model("llama"))), load_tokenizer(str(make_model("llama")))
    num_tokens = len(tokenizer)
    model.resize_token_embeddings(num_tokens + 20)
    save(model, tokenizer, tmp_path / "wide")
    wide, _, line = grown(tmp_path / "wide")
    assert line.endswith(f"; {num_tokens + 20} embeddings")
    rows = wide.get_input_embeddings().weight
    torch.testing.assert_close(rows[num_tokens], rows[:num_tokens].mean(0))
    assert torch.equal(rows[num_tokens + 2 :], model.get_input_embeddings().weight[num_tokens + 2 :])


@pytest.mark.parametrize("tokens", [["<eos>"], ["<a>", "<b>", "<a>"]])
def test_a_token_that_exists_is_refused(make_model, tokens):
    tokenizer = load_tokenizer(str(make_model("llama")))
    with pytest.raises(ConfigError, match=rf"model.add_tokens: '{tokens[0]}' is a token already. Remove it"):
        add_tokens(tokenizer, tokens, "model.add_tokens")


def test_new_tokens_need_embeddings_that_are_trained(make_model):
    model, tokenizer = load_policy(str(make_model("llama"))), load_tokenizer(str(make_model("llama")))
    freeze(model, ["embeddings"], "model.freeze")
    add_tokens(tokenizer, NEW, "model.add_tokens")
    with pytest.raises(ConfigError, match=r"model.add_tokens: the embeddings are frozen"):
        embed_tokens(model, tokenizer, NEW, "model.add_tokens")


def test_a_model_must_know_the_tokens_of_the_policy(tokenizer):
    more = copy.deepcopy(tokenizer)
    add_tokens(more, NEW, "model.add_tokens")
    require_same_tokens(tokenizer, more, "m", "ref_policy.path")
    with pytest.raises(ArtifactError, match=r"ref_policy.path: m does not know 2 of the policy's tokens \('<\|user"):
        require_same_tokens(more, tokenizer, "m", "ref_policy.path")


def test_tokens_of_the_sft_stage_are_known_to_the_later_stages(make_model, run_stage, tmp_path):
    start = make_model("llama")
    template = {"data": {"prompt_template": "<|user|>{prompt}<|end|>"}}
    sft = run_stage("sft", tmp_path, model={"path": str(start), "add_tokens": NEW}, **template)
    rm = run_stage("rm", tmp_path, **template)
    changes = {**template, "rollout": {"stop_tokens": ["<|end|>"]}}
    ppo = run_stage("ppo", tmp_path, **changes)
    vocabularies = [load_tokenizer(str(stage / "model")).get_vocab() for stage in (sft, rm, ppo)]
    assert vocabularies[0] == vocabularies[1] == vocabularies[2]
    assert "<|end|>" in vocabularies[0]
    before, after = load_policy(str(start)).get_input_embeddings().weight, load_policy(str(sft / "model"))
    new = after.get_input_embeddings().weight[len(before) :]
    assert (new - before.mean(0)).abs().max() > 1e-4, "their embeddings are learned"
    assert all("<|" not in row["response"] for row in read_jsonl(ppo / "samples.jsonl"))
    changes |= {"policy": {"path": str(sft)}, "rewards": [{"type": "reward_model", "path": str(rm)}]}
    with pytest.raises(ConfigError, match=r"data.prompt_template: '<\|end\|>' is a token of the reward model"):
        run_stage("ppo", tmp_path / "base", **changes | {"policy": {"path": str(start)}})
    with pytest.raises(ArtifactError, match=r"ref_policy.path: .* does not know 2 of the policy's tokens"):
        run_stage("ppo", tmp_path / "other", **changes, ref_policy={"path": str(start)})


def test_a_new_model_has_the_tokens_of_its_tokenizer_whatever_its_settings_say(tokenizer):
    settings = SETTINGS["llama"] | {"vocab_size": 5, "eos_token_id": 4}
    config = new_model(ScratchModel(architecture="llama", config=settings), tokenizer, seed=0).config
    assert (config.vocab_size, config.eos_token_id) == (len(tokenizer), tokenizer.eos_token_id)


def test_a_new_token_that_no_row_contains_is_said(make_model, write_config, tmp_path):
    model = {"path": str(make_model("llama")), "add_tokens": ["<|end|>", "<|user|>"]}
    config = write_config("sft", tmp_path, model=model, data={"prompt_template": "<|user|>{prompt}"})
    result = rlhf("sft", "--config", config)
    output = " ".join(result.output.split())
    assert "model.add_tokens: '<|end|>' is in no training row, so it is not learned." in output
    assert "'<|user|>' is in no training row" not in output
