"""Invariants of the stages: gradients do not depend on the cut of a batch, and each token counts exactly once.

Numbers in brackets are rows of the list of bugs found in other implementations. Each was planted here once, and a
test below failed.
"""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, linear, logsigmoid

from rlhf_cli.algorithms.statistics import wilson_interval
from rlhf_cli.config.sft_rm import RMConfig
from rlhf_cli.config.stage import Optimizer
from rlhf_cli.data.answers import RankedIds, ScoredIds
from rlhf_cli.data.encode import RowText
from rlhf_cli.data.records import Answer, Message, Record
from rlhf_cli.data.splits import Drawn
from rlhf_cli.models.forward import logits_at
from rlhf_cli.models.load import load_policy, load_tokenizer, new_reward_model, prepare
from rlhf_cli.packing import pack
from rlhf_cli.training.optimizer import build_stepper
from stages import rm as rm_stage
from stages import sft as sft_stage
from support.compare import grads, same_gradients
from support.setup import ALONE, BUDGETS, STAGE, config_of
from support.tiny import CPU, double, random_ids, read_jsonl, training_examples, write_jsonl


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def arch(request):
    """Two are enough for what the stages do with a model: GPT-2's config has dropout, and its positions are learned."""
    return request.param


# ---------------------------------------------------------------------------- gradients


@pytest.fixture(scope="module")
def examples(arch, make_model, data):
    """Eight demonstrations of unequal length."""
    tokenizer = load_tokenizer(str(make_model(arch)))
    rows = [Record(r["prompt"], "row", (Answer(r["response"]),)) for r in read_jsonl(data["demonstrations"])[:8]]
    encoded = training_examples(tokenizer, rows, None, learn_all=False)
    assert len({sum(e.loss_mask) for e in encoded}) > 3
    return encoded


def test_sft_gradient_is_the_token_mean_for_every_cut(policy, plain, examples):
    """[23] To 1e-6 in float64, against a slow loop of plain forwards."""
    wanted_model, model = double(plain), double(policy)
    total = sum(
        cross_entropy(
            wanted_model(input_ids=torch.tensor([e.ids])).logits[0, :-1][torch.tensor(e.loss_mask[1:])],
            torch.tensor(e.ids[1:])[torch.tensor(e.loss_mask[1:])],
            reduction="sum",
        )
        for e in examples
    )
    loss = total / sum(sum(e.loss_mask) for e in examples)
    loss.backward()
    for budget in BUDGETS:
        model.zero_grad()
        actual_loss = sft_stage._accumulate(model, examples, budget, "float32", STAGE)
        assert actual_loss == pytest.approx(loss.item(), rel=1e-9)
        same_gradients(grads(model), grads(wanted_model), 1e-6)


@pytest.fixture(scope="module")
def rankings(arch, make_model, data):
    """Pairs, and two rankings of three and four answers."""
    tokenizer = load_tokenizer(str(make_model(arch)))
    preferences = read_jsonl(data["preferences"])
    rows = [
        Record(r["prompt"], "row", (Answer(r["chosen"]), Answer(r["rejected"])), ranked=True, margin=0.1 * i)
        for i, r in enumerate(preferences[:6])
    ]
    more = [answer for r in preferences[6:12] for answer in (r["chosen"], r["rejected"] + " " + r["chosen"])]
    rows.insert(2, Record("please", "row", tuple(map(Answer, more[:3])), ranked=True, margin=0.7))
    rows.append(Record("again", "row", tuple(map(Answer, more[3:7])), ranked=True))
    items = []
    for row in rows:
        answers = RowText(tokenizer).answer_ids(row.each())
        items.append(RankedIds([ids for ids, _ in answers], row))
    return items


@pytest.fixture(scope="module")
def classifiers(arch, make_model):
    """A new reward model on packed rows, and the same model as transformers runs it."""
    models = [new_reward_model(str(make_model(arch)), None, seed=1, head_std=0.5)[0] for _ in range(2)]
    assert prepare(models[0], CPU) is None
    return models


def plain_score(model, ids):
    return linear(model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1:], model.score.weight)[0, 0]


@pytest.mark.parametrize("loss_name", ["logsigmoid", "logexp", "plackett_luce", "mse", "bce"])
def test_rm_gradient_is_the_same_for_every_cut(classifiers, rankings, write_config, tmp_path, loss_name):
    """[23, 29] A ranking counts as one row, with the mean over its pairs."""
    model, wanted_model = map(double, classifiers)
    scale = rm_stage.TargetScale(0.5, 2.0)
    batch, losses, changes = rankings, [], {}
    if loss_name in ("mse", "bce"):
        targets = [0.3 * i - 1 if loss_name == "mse" else float(i % 2) for i in range(len(rankings))]
        row = Record("", "row", (Answer("", 0.0),))
        batch = [ScoredIds(item.answers[0], target, row) for item, target in zip(rankings, targets, strict=True)]
        scores = torch.stack([plain_score(wanted_model, item.ids) for item in batch])
        if loss_name == "mse":
            losses = (scores - (scores.new_tensor(targets) - 0.5) / 2).square()
        else:
            scale = rm_stage.TargetScale(0.0, 1.0)
            losses = binary_cross_entropy_with_logits(scores, scores.new_tensor(targets), reduction="none")
    elif loss_name == "plackett_luce":
        for item in rankings:
            scores = torch.stack([plain_score(wanted_model, ids) for ids in item.answers])
            losses.append(-sum(scores[k:].log_softmax(0)[0] for k in range(len(scores) - 1)) / (len(scores) - 1))
    else:
        for item in rankings:
            scores = [plain_score(wanted_model, ids) for ids in item.answers]
            of_pairs = []
            for i, better in enumerate(scores):
                for j in range(i + 1, len(scores)):
                    margin = item.row.margin if (i, j) == (0, len(scores) - 1) else 0.0
                    lead = better - scores[j]
                    nll = -1.5 * logsigmoid(lead - margin) + 0.5 * logsigmoid(-lead - margin)
                    of_pairs.append(nll + 0.1 * (better + scores[j]) ** 2)
            losses.append(sum(of_pairs) / len(of_pairs))
        assert max(len(item.answers) for item in rankings) == 4
        changes = {"zero_mean_coef": 0.1, "flip_rate": 0.25}
    wanted = sum(losses) / len(losses)
    wanted.backward()
    config = config_of(write_config, "rm", RMConfig, tmp_path, loss=loss_name, **changes)
    for budget in BUDGETS:
        model.zero_grad()
        stats = rm_stage._accumulate(model, batch, scale, budget, config, STAGE)
        assert stats["loss/rm"] == pytest.approx(wanted.item(), rel=1e-9)
        # These classifiers of transformers have no head bias. Every weight of the backbone must agree.
        same_gradients(grads(model), grads(wanted_model), 1e-6)


@pytest.mark.parametrize(("limit", "scale"), [(0.25, 1.0), (None, 1e6)])
def test_the_norm_of_the_gradient_is_measured_and_limited(make_model, limit, scale):
    """[24] The clip comes before the step, and the reported norm is the one before it. No limit keeps every bit."""
    model = load_policy(str(make_model("llama")))
    stepper = build_stepper(model, Optimizer(learning_rate=1e-3, max_grad_norm=limit), 4)
    logits_at(model, pack([[5, 6, 7]]), torch.tensor([0, 1])).square().sum().mul(scale).backward()
    before = [p.grad.clone() for p in model.parameters()]
    norm = torch.stack([gradient.double().norm() for gradient in before]).norm().item()
    assert norm > scale
    assert stepper.clip(ALONE) == pytest.approx(norm, rel=1e-5)
    after = [p.grad for p in model.parameters()]
    if limit is None:
        assert all(map(torch.equal, after, before))
    else:
        assert torch.stack([gradient.norm() for gradient in after]).norm().item() == pytest.approx(limit, rel=1e-3)


# ------------------------------------------------------------------------- one architecture is enough


CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def chat_tokenizer(tokenizer):
    with_template = copy.deepcopy(tokenizer)
    with_template.chat_template = CHAT
    return with_template


@pytest.mark.parametrize("template", [None, "User: {prompt}\nBot:"])
@pytest.mark.parametrize("name", ["tokenizer", "eos_only_tokenizer"])
def test_sft_learns_answers_and_their_eos_but_not_prompts(request, name, template, data):
    """[5, 6] Also where pad is EOS, and to a prompt without text."""
    tokenizer = request.getfixturevalue(name)
    rows = [Record(r["prompt"], "row", (Answer(r["response"]),)) for r in read_jsonl(data["demonstrations"])]
    rows.append(Record("", "row", (Answer("thank you"),)))
    for row, example in zip(rows, training_examples(tokenizer, rows, template, learn_all=False), strict=True):
        learned = [i for i, yes in zip(example.ids, example.loss_mask, strict=True) if yes]
        prompt = RowText(tokenizer, template).prompt_ids([row])[0]
        assert learned[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(learned[:-1]) == row.response
        assert example.ids[: len(prompt)] == prompt, "a rollout starts from the same ids"
        assert example.loss_mask == [False] * len(prompt) + [True] * (len(example.ids) - len(prompt))
        assert example.ids[len(prompt) :].count(tokenizer.eos_token_id) == 1


def conversation(*contents):
    roles = ("user", "assistant") * len(contents)
    messages = tuple(Message(role, content) for role, content in zip(roles, contents, strict=False))
    return Record("", "row", (Answer(" " + contents[-1]),), messages=messages[:-1])


@pytest.mark.parametrize("template", [None, "chat"])
def test_only_assistant_turns_are_learned(chat_tokenizer, template):
    """[6]"""
    row = conversation("please help", "we will send a lamp", "today", "sorry")
    (example,) = training_examples(chat_tokenizer, [row], template, learn_all=False)
    pieces, last = [], None
    for token, yes in zip(example.ids, example.loss_mask, strict=True):
        if yes != last:
            pieces.append((yes, []))
            last = yes
        pieces[-1][1].append(token)
    text = [(yes, chat_tokenizer.decode(ids)) for yes, ids in pieces]
    assert text == [
        (False, "<user>please help\n<assistant>"),
        (True, "we will send a lamp<eos>\n"),
        (False, "<user>today\n<assistant>"),
        (True, "sorry<eos>"),
    ]
    eos = chat_tokenizer.eos_token_id
    assert [yes for token, yes in zip(example.ids, example.loss_mask, strict=True) if token == eos] == [True, True]
    (all_of_it,) = training_examples(chat_tokenizer, [row], template, learn_all=True)
    assert all_of_it.loss_mask == [False] + [True] * (len(example.ids) - 1)


def test_a_chat_template_without_eos_gets_one(chat_tokenizer):
    without_eos = copy.deepcopy(chat_tokenizer)
    without_eos.chat_template = CHAT.replace("<eos>", "<end>")
    (example,) = training_examples(without_eos, [conversation("please", "we will")], "chat", learn_all=False)
    assert example.ids[-1] == without_eos.eos_token_id
    assert example.loss_mask[-1]


def held_out_figures(model, test, budget, config):
    """The figures of the RM stage for some held-out rows."""
    scores = rm_stage._scores(model.eval(), test, budget, config, ALONE)
    return rm_stage._figures(test, scores, rm_stage.TargetScale(0.0, 1.0), config)


def test_a_ranking_counts_once_in_the_accuracy_and_its_interval(make_model, write_config, tmp_path):
    """[31] Accuracy, margin and length baseline of rankings of 2 to 5 answers, and of a tie, equal those of loops."""
    model, _ = new_reward_model(str(make_model("llama")), None, seed=0, head_std=1.0)
    prepare(model, CPU)
    ids = random_ids(*range(3, 17), seed=4)
    answers = [ids[0:2], ids[2:5][::-1], ids[5:9], ids[9:14], [ids[13], ids[13]]]
    items = [RankedIds(each, Record("", "row", (), ranked=True)) for each in answers]
    accuracy, margin, longer = [], [], []
    for item in items:
        with torch.no_grad():
            scores = [plain_score(model, one).item() for one in item.answers]
        pairs = [(i, j) for i in range(len(scores)) for j in range(i + 1, len(scores))]
        accuracy.append(sum((scores[i] > scores[j]) + (scores[i] == scores[j]) / 2 for i, j in pairs) / len(pairs))
        margin.append(sum(scores[i] - scores[j] for i, j in pairs) / len(pairs))
        longer.append(sum(len(item.answers[i]) > len(item.answers[j]) for i, j in pairs) / len(pairs))
    assert 0 < sum(accuracy) < 5
    config = config_of(write_config, "rm", RMConfig, tmp_path)
    for budget in (BUDGETS[0], BUDGETS[-1]):
        metrics = held_out_figures(model, Drawn(items, len(items), 0), budget, config)
        assert metrics["eval/accuracy"] == pytest.approx(sum(accuracy) / 5, abs=1e-6)
        assert metrics["eval/margin"] == pytest.approx(sum(margin) / 5, abs=1e-5)
    assert metrics["eval/length_baseline"] == pytest.approx((sum(longer) + 0.5) / 5)
    assert metrics["eval/shorter_baseline"] == pytest.approx(1 - (sum(longer) + 0.5) / 5)
    assert metrics["eval/num_rows"] == 5
    low, high = wilson_interval(sum(accuracy), 5)
    assert (metrics["eval/accuracy_low95"], metrics["eval/accuracy_high95"]) == pytest.approx((low, high), abs=1e-6)


def test_one_scored_row_of_zero_reaches_the_loss(run_stage, make_model, tmp_path):
    """[39] All scores but one are 0: the mean squared target before the first step is 1, so every row counts."""
    rows = [{"prompt": "p", "response": f" r{i}", "score": 0.0 if i else 8.0} for i in range(8)]
    data = {"train": str(write_jsonl(tmp_path / "rows.jsonl", rows)), "test": None, "test_fraction": 0}
    keys = {"model": {"path": str(make_model("llama")), "head_std": 1e-9}, "data": data, "loss": "mse"}
    run_stage("rm", tmp_path, **keys, training={"num_steps": 1, "minibatch_size": 8})
    assert read_jsonl(tmp_path / "rm/metrics.jsonl")[0]["loss/rm"] == pytest.approx(1.0, abs=1e-4)
    config = json.loads((tmp_path / "rm/model/config.json").read_text())
    assert (config["target_mean"], config["target_std"]) == (1.0, pytest.approx(7**0.5))
    assert config["score_std"] > 0
