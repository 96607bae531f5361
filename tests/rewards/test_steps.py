"""Process reward models: steps of a response, their scores, and the policy's tokens that get them."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoModelForTokenClassification, AutoTokenizer

from rlhf_cli.errors import ArtifactError, ConfigError, RewardError
from rlhf_cli.rewards.base import Samples, total_score
from rlhf_cli.rewards.process_reward import split_steps, token_ends
from support import rewards
from support.tiny import character_tokenizer, tiny_model

LETTERS = ["<e>", *"abcdefgh.;? QA:\n"]


def saved(folder, family="llama", tokenizer=None, num_labels=1):
    """A token classifier with random weights, in a folder."""
    tokenizer = tokenizer or character_tokenizer(LETTERS)
    more = {"vocab_size": len(tokenizer), "num_labels": num_labels, "pad_token_id": 0, "initializer_range": 0.2}
    model = tiny_model(family, AutoModelForTokenClassification, **more).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def source_of(path, policy_tokenizer, *, steps=None, **settings):
    reward = {"type": "reward_model", "path": str(path), "steps": {"separator": ";", "average": False, **(steps or {})}}
    return rewards.source_of(reward, policy_tokenizer, **settings)


def samples_of(tokenizer, texts, *, ended=True, prompt="Q", eos=True):
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    if ended and eos:
        ids = [[*one, tokenizer.eos_token_id] for one in ids]
    return Samples([prompt] * len(ids), list(texts), [[1]] * len(ids), ids, [ended] * len(ids), [{}] * len(ids))


# --------------------------------------------------------------------------------------- steps and tokens


def test_texts_without_a_step() -> None:
    for text in ("", "  ", ";", " ; ;\n;"):
        assert split_steps(text, ";", True) == []
    assert split_steps("ab", ";", False) == []
    assert split_steps(";a;;b;", ";", False) == [("a", 4), ("b", 6)]


def test_a_step_that_ends_within_a_token_ends_with_it(eos_only_tokenizer) -> None:
    """Merged tokens, characters of several bytes in several tokens, and EOS behind the last step."""
    tokenizer = eos_only_tokenizer
    text = "é the tent; is late é; sorry — 🙂; thank you 日本;"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = [tokenizer.decode(ids[: n + 1]) for n in range(len(ids))]
    for end in range(1, len(text)):
        (token,) = token_ends(tokenizer, ids, [end])
        assert pieces[token].startswith(text[:end])
        assert token == 0 or not pieces[token - 1].startswith(text[:end]), "no earlier token has the whole step"
    assert token_ends(tokenizer, [*ids, tokenizer.eos_token_id], [len(text), len(text) + 1]) == [len(ids) - 1, len(ids)]


# --------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize("family", ["llama", "gpt2", "distilbert"])
@pytest.mark.parametrize("num_labels", [1, 2])
def test_scores_equal_those_of_transformers(family, num_labels, tmp_path):
    """One by one, while ours are read together. The policy has other tokens than the model."""
    model = saved(tmp_path, family, num_labels=num_labels)
    own = AutoTokenizer.from_pretrained(tmp_path)
    policy = character_tokenizer(["</s>", *reversed(LETTERS[1:])])
    label = {} if num_labels == 1 else {"label": "LABEL_1"}
    texts = ["ab;cd.;e", "a", "", "h h h;", "abcdefgh;" * 5]
    scores = total_score([source_of(tmp_path, policy, output="probability", **label)], samples_of(policy, texts))
    for text, dense in zip(texts, scores.dense, strict=True):
        ids = own("Q", add_special_tokens=False)["input_ids"]
        wanted = [0.0] * (len(text) + 1)
        ends = []
        for step, end in split_steps(text, ";", True):
            ids = ids + own(step + ";", add_special_tokens=False)["input_ids"]
            ends.append((len(ids) - 1, end - 1))
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        good = logits.sigmoid()[:, 0] if num_labels == 1 else logits.softmax(-1)[:, 1]
        for read, at in ends:
            wanted[at] += good[read].item()
        assert dense == pytest.approx(wanted, abs=1e-5), text
    assert scores.total.tolist() == pytest.approx([sum(row) for row in scores.dense], abs=1e-5)


CHAIN = "abcd"


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A model that was trained on chains whose k-th right step is the k-th letter, right or wrong at each separator."""
    folder = tmp_path_factory.mktemp("chain")
    model, tokenizer = saved(folder), AutoTokenizer.from_pretrained(folder)
    marker, letters = tokenizer.convert_tokens_to_ids([";", *CHAIN])[0], tokenizer.convert_tokens_to_ids(list(CHAIN))
    draw, optimizer = torch.Generator().manual_seed(0), torch.optim.Adam(model.parameters(), 5e-3)
    right = torch.tensor(letters)
    for _ in range(150):
        steps = right[torch.randint(4, (32, 4), generator=draw)]
        steps = torch.where(torch.rand(32, 4, generator=draw) < 0.5, right, steps)
        ids = torch.stack([steps, torch.full_like(steps, marker)], 2).flatten(1)
        ids = torch.cat([torch.full((32, 1), tokenizer.convert_tokens_to_ids("Q")), ids], 1)
        loss = binary_cross_entropy_with_logits(model(ids).logits[:, 2::2, 0], (steps == right).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.01
    model.save_pretrained(folder)
    return folder


def test_a_chain_with_known_best_steps(chain):
    """Every wrong step loses its own reward, at the policy's token that ends it, and no other step's."""
    policy = character_tokenizer(["</s>", *reversed(LETTERS[1:])])
    source = source_of(chain, policy, output="probability")
    texts = ["a;b;c;d;", "a;c;c;d;", "d;b;c;a;", "a;b;c;d"]
    scores = total_score([source], samples_of(policy, texts))
    wanted = [[1, 1, 1, 1], [1, 0, 1, 1], [0, 1, 1, 0]]
    for dense, right in zip(scores.dense, wanted, strict=False):
        assert dense[1::2][:4] == pytest.approx(right, abs=0.05)
        assert dense[0::2] == [0.0] * 5
    assert scores.dense[3] == pytest.approx([0, 1, 0, 1, 0, 1, 0, 1], abs=0.05), "EOS ends the last step"
    averaged = total_score(
        [source_of(chain, policy, output="probability", steps={"average": True})],
        samples_of(policy, [*texts, "a;b;", "", ";;"]),
    )
    assert averaged.total.tolist() == pytest.approx([1, 0.75, 0.5, 1, 1, 0, 0], abs=0.05), "more steps do not pay"
    weighted = total_score([source_of(chain, policy, output="probability", weight=0.5)], samples_of(policy, texts))
    assert weighted.total.tolist() == pytest.approx((scores.total / 2).tolist(), abs=1e-6)


def test_an_unfinished_step_has_no_score(chain):
    policy = character_tokenizer(LETTERS)
    scores = total_score([source_of(chain, policy, output="probability")], samples_of(policy, ["a;b;c"], ended=False))
    assert scores.dense[0] == pytest.approx([0, 1, 0, 1, 0], abs=0.05)


def test_a_long_text_loses_its_last_steps(chain, tmp_path):
    shutil.copytree(chain, tmp_path / "short")
    config = json.loads((chain / "config.json").read_text())
    (tmp_path / "short/config.json").write_text(json.dumps(config | {"max_position_embeddings": 6}))
    policy = character_tokenizer(LETTERS)
    source = source_of(tmp_path / "short", policy, output="probability")
    scores = total_score([source], samples_of(policy, ["a;b;c;d;", "a;b;"]))
    assert scores.dense[0] == pytest.approx([0, 1, 0, 1, 0, 0, 0, 0, 0], abs=0.05)
    assert scores.cut == {"reward_model": 1}
    assert source.report() == "reward_model: the last steps of 1 texts have no score, beyond the model's 6 tokens"


def test_a_marker_in_a_response_is_text(tmp_path):
    """A special token as marker: the same characters in a response do not read as one."""
    tokenizer = character_tokenizer([*LETTERS, "<", "s", ">"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<s>"]})
    saved(tmp_path, tokenizer=tokenizer)
    policy = character_tokenizer(["</s>", *LETTERS, "<", "s", ">"])
    source = source_of(tmp_path, policy, steps={"marker": "<s>"})
    ids, ends = source._tokens(samples_of(policy, ["a<s>b;c"]), 0, ["a<s>b", "c"])
    marker = tokenizer.convert_tokens_to_ids("<s>")
    assert [i for i, one in enumerate(ids) if one == marker] == ends
    assert len(ends) == 2


def test_a_score_that_is_no_number_stops_or_counts(tmp_path):
    saved(tmp_path)
    policy = character_tokenizer(LETTERS)
    source = source_of(tmp_path, policy)
    with torch.no_grad():
        source.model.score.weight.mul_(float("inf"))
    with pytest.raises(RewardError, match=r"step reward model reward_model, response 1: returned \[.*finite numbers"):
        total_score([source], samples_of(policy, ["a;"]))
    source.on_error = "zero"
    scores = total_score([source], samples_of(policy, ["a;", ""]))
    assert (scores.total.tolist(), scores.errors) == ([0.0, 0.0], {"reward_model": 1})


# --------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": None}, "the run's own rm stage scores whole responses"),
        ({"path": "x", "reads": "response"}, "reads does nothing with steps"),
        ({"path": "x", "normalize": False}, "normalize does nothing with steps"),
        ({"path": "x", "template": "chat"}, "steps needs a template that ends with"),
        ({"path": "x", "template": "{prompt}{response}!"}, "steps needs a template that ends with"),
        ({"path": "x", "steps": {"separator": ""}}, "separator"),
    ],
)
def test_keys_that_do_nothing_are_refused(settings, message) -> None:
    rewards.refused({"type": "reward_model", "steps": {}, **settings}, message)


def test_other_models_are_refused(make_model, tmp_path, tokenizer):
    with pytest.raises(ArtifactError, match="weights of LlamaForTokenClassification are not in the file"):
        source_of(make_model("llama"), tokenizer)
    saved(tmp_path, num_labels=2)
    with pytest.raises(ConfigError, match=r"rewards\.0\.label: is missing, the model has the labels LABEL_0, LABEL_1"):
        source_of(tmp_path, tokenizer)
