"""Reward models with their own tokenizer and template, and how they cut long text."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_cli.config.rewards import ModelReward
from rlhf_cli.data.records import Message
from rlhf_cli.errors import ConfigError, RewardError
from rlhf_cli.models.load import load_reward_model, load_tokenizer
from rlhf_cli.rewards import models
from rlhf_cli.rewards.base import Samples, total_score
from rlhf_cli.rewards.models import encode_whole, load_reward_source, score_sequences
from support.rewards import CHAT, CPU, batch
from support.tiny import encoder, read_jsonl

# -------------------------------------------------------------------------------------- reward models


def own_text(example, side):
    return example["prompt"], example[side]["reply"]


TEMPLATES = {
    "none": (None, "{prompt}{response}"),
    "own": ("Q {prompt} R {response} E", "Q {own} R {response} E"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_distilbert_scores_a_llama_with_its_own_tokenizer_and_template(
    make_model, word_piece, run_stage, tmp_path, name
):
    """In a PPO run, its scores equal those of plain transformers for the texts."""
    template, plainly = TEMPLATES[name]
    classifier = encoder(tmp_path / "bert", word_piece)
    run_stage(
        "ppo",
        tmp_path,
        policy={"path": str(make_model("llama"))},
        rewards=[{"type": "reward_model", "path": str(tmp_path / "bert"), "template": template}],
        data={"prompt_template": "Say: {prompt} Now:"},
        ppo={"num_iterations": 1},
        num_logged_samples=8,
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bert")
    evaluation = json.loads((tmp_path / "ppo/evaluation.json").read_text())
    pairs = [(*own_text(e, side), e[side]["score"]) for e in evaluation["examples"] for side in ("sft", "ppo")]
    pairs += [(row["prompt"], row["response"], row["score"]) for row in read_jsonl(tmp_path / "ppo/samples.jsonl")]
    assert len(pairs) == 18
    for prompt, response, score in pairs:
        own = prompt.removeprefix("Say: ").removesuffix(" Now:")
        assert own != prompt
        text = plainly.replace("{prompt}", prompt).replace("{own}", own).replace("{response}", response)
        with torch.no_grad():
            wanted = classifier(**tokenizer(text, return_tensors="pt")).logits[0, 0].item()
        assert score == pytest.approx(wanted, abs=1e-5)
    assert len({round(score, 4) for *_, score in pairs}) > 5
    (row,) = read_jsonl(tmp_path / "ppo/metrics.jsonl")
    assert row["reward/reward_model_cut"] == 0


def load_model(path, policy_tokenizer=None, **settings):
    reward = ModelReward(type="reward_model", path=str(path), **settings)
    return load_reward_source(reward, str(path), policy_tokenizer, CPU, "float32", name="rm", key="rewards.0")


def test_a_chat_template_renders_the_scored_text(chat_reward_model, tokenizer):
    """The row's messages if it is a conversation, else one user message; the score is read at the last token."""
    path = chat_reward_model()
    source, notes = load_model(path, tokenizer, template="chat")
    assert not source.reads_policy_tokens
    assert any("scores text with its own tokenizer" in note for note in notes)
    turns = (
        Message("system", "be late"),
        Message("user", "lamp"),
        Message("assistant", "map"),
        Message("user", "tent"),
    )
    samples = batch([" thank you", "radio"], prompts=["templated", "map is"], messages=[turns, ()])
    samples = Samples(**{**vars(samples), "own_prompts": ["lamp ... tent", "map"]})
    model = AutoModelForSequenceClassification.from_pretrained(path)
    own = AutoTokenizer.from_pretrained(path)
    wanted = []
    for messages in (
        [*[{"role": m.role, "content": m.content} for m in turns], {"role": "assistant", "content": " thank you"}],
        [{"role": "user", "content": "map"}, {"role": "assistant", "content": "radio"}],
    ):
        ids = own.apply_chat_template(messages, return_tensors="pt", return_dict=True)["input_ids"]
        with torch.no_grad():
            wanted.append(model.score(model.model(ids).last_hidden_state[0, -1]).item())
    assert source.score(samples).tolist() == pytest.approx(wanted, abs=1e-5)


def test_a_row_that_the_chat_template_refuses_is_named(chat_reward_model):
    path = chat_reward_model("{% if messages|length > 2 %}{{ raise_exception('too many turns') }}{% endif %}" + CHAT)
    turns = (Message("user", "a"), Message("assistant", "b"), Message("user", "c"))
    samples = batch(["tent", "lamp", "map"], messages=[(), turns, ()])
    with pytest.raises(
        RewardError, match=r"rows.jsonl:4: reward model rm, response 2: its chat template failed: too man"
    ):
        load_model(path, template="chat")[0].score(samples)
    scores = total_score([load_model(path, template="chat", on_error="zero")[0]], samples)
    assert scores.errors == {"rm": 1}
    assert scores.total[1] == 0.0
    assert (scores.total[[0, 2]] != 0).all()


def test_template_chat_needs_a_chat_template(chat_reward_model):
    path = chat_reward_model(None)
    with pytest.raises(ConfigError, match=r"rewards.0.template: is chat, but the tokenizer of .* has no chat template"):
        load_model(path, template="chat")


def test_a_score_is_the_logit_minus_the_mean_in_standard_deviations(chat_reward_model, tokenizer, monkeypatch):
    """Logits of 5, 1 and -3 with a mean of 2 and a standard deviation of 4: 0.75, -0.25 and -1.25."""
    path = chat_reward_model()
    facts = {"score_mean": 2.0, "score_std": 4.0}
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | facts))
    monkeypatch.setattr(models, "scores_and_features", lambda *_, **__: (torch.tensor([5.0, 1.0, -3.0]), None))
    scores = {}
    for normalize in (True, False):
        source, _ = load_model(path, tokenizer, normalize=normalize)
        scores[normalize] = source.score(batch(["a", "b", "c"], ids=[[5], [6], [7]])).tolist()
    assert scores == {True: [0.75, -0.25, -1.25], False: [5.0, 1.0, -3.0]}


def test_a_template_makes_a_decoder_score_text(chat_reward_model, tokenizer):
    path = chat_reward_model(None)
    assert load_model(path, tokenizer)[0].reads_policy_tokens
    source = load_model(path, tokenizer, template="A {prompt} B {response}")[0]
    assert not source.reads_policy_tokens
    model, own = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    samples = batch(["tent lamp", "{prompt} map"], prompts=["is {response}", "late"])
    found = source.score(samples).tolist()
    for text, score in zip(["A is {response} B tent lamp", "A late B {prompt} map"], found, strict=True):
        ids = [*own(text)["input_ids"], own.eos_token_id]
        with torch.no_grad():
            wanted = model.score(model.model(torch.tensor([ids])).last_hidden_state[0, -1]).item()
        assert score == pytest.approx(wanted, abs=1e-5)


def test_a_batch_without_responses_does_not_have_the_features_of_the_one_before(chat_reward_model, tokenizer):
    source = load_model(chat_reward_model(), tokenizer)[0]
    assert len(total_score([source], batch(["tent", "lamp"])).features) == 2
    assert total_score([source], batch([])).features is None


def test_a_model_with_non_finite_scores_is_named(chat_reward_model):
    source = load_model(chat_reward_model())[0]
    with torch.no_grad():
        source.model.get_input_embeddings().weight[source.tokenizer("lamp")["input_ids"][-1]] = math.nan
    samples = batch(["tent", "lamp", "map"], prompts=["", "", ""])
    with pytest.raises(RewardError, match=r"rows.jsonl:4: reward model rm, response 2: returned nan, it must be a fin"):
        source.score(samples)
    source.on_error = "zero"
    assert total_score([source], samples).errors == {"rm": 1}


# ------------------------------------------------------------------------------------------- too long


def trained_at(path, **facts):
    """Add what the RM stage stores about training to a model's config."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | facts))
    return path


def without_beginning(longest):
    """A text cut on the left: BOS and the end."""
    return lambda ids: ids if len(ids) <= longest else [ids[0], *ids[1 - longest :]]


@pytest.mark.parametrize(
    ("facts", "keeps"),
    [
        ({}, without_beginning(128)),
        ({"rlhf_max_length": 9, "rlhf_truncation": "left"}, without_beginning(9)),
        ({"rlhf_max_length": 9, "rlhf_truncation": "right"}, lambda ids: ids[:9]),
        ({"rlhf_max_length": 9, "rlhf_truncation": "drop"}, without_beginning(128)),
        ({"rlhf_max_length": 999, "rlhf_truncation": "right"}, lambda ids: ids[:128]),
    ],
)
def test_a_decoder_cuts_long_text_as_its_training_did_and_counts_it(chat_reward_model, facts, keeps):
    """The last of 5 texts is longer than the 128 positions, two are longer than 9 tokens, one has 9 exactly."""
    path = trained_at(chat_reward_model(None), **facts)
    words = ["tent", "tent lamp", "lamp " * 8, "map " * 9, "radio " * 140]
    own = load_tokenizer(str(path))
    assert own("tent")["input_ids"][0] == own.bos_token_id
    while len(own(words[2])["input_ids"]) + 1 != 9:
        words[2] = words[2][:-1]
    source = load_model(path)[0]
    samples = batch(words, prompts=[""] * 5)
    model = load_reward_model(str(path))
    whole = [[*own(word)["input_ids"], own.eos_token_id] for word in words]
    wanted = score_sequences(model, [keeps(ids) for ids in whole], "float32")
    scores = total_score([source], samples)
    assert scores.total.tolist() == pytest.approx(wanted.tolist(), abs=1e-5)
    num_cut = sum(keeps(ids) != ids for ids in whole)
    assert num_cut == (2 if len(keeps(whole[4])) == 9 else 1)
    assert scores.cut == {"rm": num_cut}
    assert total_score([source], batch(words[:3], prompts=[""] * 3)).cut == {"rm": 0}, "of this batch"
    side, longest = ("end" if "right" in facts.values() else "beginning"), len(keeps(whole[4]))
    assert source.report() == f"rm: cut the {side} of {num_cut} texts to the model's limit of {longest} tokens"
    if len(keeps(whole[4])) == 9:
        bare = score_sequences(model, whole[:4], "float32")
        assert (scores.total[3] - bare[3]).abs() > 1e-3, "it matters"


@pytest.mark.parametrize(
    ("facts", "keeps"),
    [
        ({}, lambda ids: ids),
        ({"rlhf_max_length": 5, "rlhf_truncation": "left"}, lambda ids: ids[-5:]),
        ({"rlhf_max_length": 5, "rlhf_truncation": "right"}, lambda ids: ids[:5]),
        ({"rlhf_max_length": 5, "rlhf_truncation": "drop"}, lambda ids: ids),
    ],
)
def test_policy_tokens_are_cut_like_text(chat_reward_model, tokenizer, facts, keeps):
    path = trained_at(chat_reward_model(None), **facts)
    source = load_model(path, tokenizer)[0]
    ids = [[5, 6], [5, 6, 7, 8], [9, 8, 7, 6, 5, 4]]
    scores = total_score([source], batch(["x"] * 3, ids=ids, ended=False))
    wanted = score_sequences(load_reward_model(str(path)), [keeps([7, *r]) for r in ids], "float32")
    assert scores.total.tolist() == pytest.approx(wanted.tolist(), abs=1e-5)
    assert scores.cut == {"rm": 1 if keeps(list(range(9))) != list(range(9)) else 0}


@pytest.mark.parametrize(
    ("facts", "longest", "side"),
    [
        ({}, 128, "left"),
        ({"rlhf_max_length": 12, "rlhf_truncation": "left"}, 12, "left"),
        ({"rlhf_max_length": 12, "rlhf_truncation": "right"}, 12, "right"),
        ({"rlhf_max_length": 12, "rlhf_truncation": "drop"}, 128, "left"),
    ],
)
def test_an_encoder_keeps_its_special_tokens_when_it_cuts(word_piece, tmp_path, facts, longest, side):
    encoder(tmp_path, word_piece)
    trained_at(tmp_path, **facts)
    model, tokenizer = load_reward_model(str(tmp_path)), load_tokenizer(str(tmp_path))
    texts = ["tent", "lamp map " * 5, "lamp map " * 100]
    sequences, num_cut = encode_whole(model, tokenizer, texts, [True] * 3)
    for text, ids in zip(texts, sequences, strict=True):
        bare = tokenizer(text, add_special_tokens=False)["input_ids"]
        room = longest - 2
        kept = bare if len(bare) <= room else bare[-room:] if side == "left" else bare[:room]
        assert ids == [tokenizer.cls_token_id, *kept, tokenizer.sep_token_id]
    assert num_cut == sum(len(tokenizer(text)["input_ids"]) > longest for text in texts)
