"""A reward model is read at one token: EOS, also where the chat template writes a newline behind it (ChatML)."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.commands import rm_serve
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.data.answers import answer_encoder
from rlhf_cli.data.cache import tokenise
from rlhf_cli.data.encode import RowText
from rlhf_cli.data.encoders import DemonstrationEncoder
from rlhf_cli.data.records import Message, Record
from rlhf_cli.data.stage_rows import rm_rows, sft_rows
from rlhf_cli.models.load import load_policy, load_reward_model, load_tokenizer
from rlhf_cli.models.save import save
from support.rewards import batch, source_of
from support.setup import config_of
from support.tiny import read_jsonl, write_jsonl

CHATML = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def chats(tmp_path_factory, data):
    """A file of conversations with a better and a worse answer."""
    rows = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "chosen": [{"role": "assistant", "content": row["chosen"].strip()}],
            "rejected": [{"role": "assistant", "content": row["rejected"].strip()}],
        }
        for row in read_jsonl(data["preferences"])
    ]
    return write_jsonl(tmp_path_factory.mktemp("chats") / "chats.jsonl", rows)


@pytest.fixture(scope="module")
def run(tmp_path_factory, make_model, chats, run_stage):
    """The root of a run whose rm stage was trained on the conversations; `start` is its language model."""
    root = tmp_path_factory.mktemp("chatml")
    own = copy.deepcopy(load_tokenizer(str(make_model("llama"))))
    own.chat_template = CHATML
    save(load_policy(str(make_model("llama"))), own, root / "start")
    files = {"train": str(chats), "test": {"path": str(chats), "limit": 7}}
    run_stage("rm", root, model={"path": str(root / "start"), "head_std": 1.0}, data=files)
    return root


def conversations(chats):
    """(messages before the answer, answer) of each answer of the held-out rows, the better one first."""
    return [
        ((Message("user", row["prompt"][0]["content"]),), row[side][0]["content"])
        for row in read_jsonl(chats)[:7]
        for side in ("chosen", "rejected")
    ]


def plain_scores(root, chats):
    """Scores by transformers at the EOS of each conversation."""
    model = AutoModelForSequenceClassification.from_pretrained(root / "rm/model")
    tokenizer = load_tokenizer(str(root / "rm/model"))
    found = []
    for before, answer in conversations(chats):
        turns = [*({"role": m.role, "content": m.content} for m in before), {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(turns, return_dict=False)
        assert ids[-1] != tokenizer.eos_token_id == ids[-2]
        with torch.no_grad():
            found.append(model(torch.tensor([ids[:-1]])).logits.item())
    return found


def test_every_stage_ends_a_conversation_with_eos(run, chats, write_config, tmp_path):
    """SFT and RM train on the same tokens, and PPO's prompts with an answer are these tokens."""
    tokenizer = load_tokenizer(str(run / "start"))
    settings = {"data": {"train": str(chats), "test": None, "test_fraction": 0}}
    sft = config_of(write_config, "sft", SFTConfig, tmp_path, model={"path": "x"}, **settings)
    rm = config_of(write_config, "rm", RMConfig, tmp_path, model={"path": "x"}, **settings)
    learned = [example.ids for example in tokenise(DemonstrationEncoder(tokenizer, sft_rows(sft))).train]
    scored = [item.answers for item in tokenise(answer_encoder(tokenizer, rm_rows(rm), reads_last_token=True)).train]
    assert learned == [answers[0] for answers in scored]
    assert {ids[-1] for answers in scored for ids in answers} == {tokenizer.eos_token_id}
    for row, (chosen, _) in zip(read_jsonl(chats), scored, strict=True):
        before = (Message("user", row["prompt"][0]["content"]),)
        (prompt,) = RowText(tokenizer).prompt_ids([Record("", "row", messages=before)])
        answer = tokenizer(row["chosen"][0]["content"], add_special_tokens=False)["input_ids"]
        assert chosen == [*prompt, *answer, tokenizer.eos_token_id]


def test_training_evaluation_ppo_and_serve_give_one_score(run, chats):
    """The readings of the same conversations: the stage's own evaluation, PPO's tokens, text, chat text, and HTTP."""
    tokenizer, pairs = load_tokenizer(str(run / "rm/model")), conversations(chats)
    wanted = plain_scores(run, chats)
    metrics = json.loads((run / "rm/manifest.json").read_text())["metrics"]
    leads = [a - b for a, b in zip(wanted[::2], wanted[1::2], strict=True)]
    assert metrics["eval/margin"] == pytest.approx(sum(leads) / 7, abs=1e-4)
    assert metrics["eval/accuracy"] == pytest.approx(sum(lead > 0 for lead in leads) / 7, abs=1e-5)

    reward = {"type": "reward_model", "path": str(run / "rm"), "normalize": False}
    before = [messages for messages, _ in pairs]
    text, asked = RowText(tokenizer), [Record("", "row", messages=messages) for messages in before]
    prompts = list(map(text.prompt, asked))
    answers = [answer for _, answer in pairs]
    prompt_ids = text.prompt_ids(asked)
    ids = [[*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for answer in answers]
    samples = batch(answers, prompts=prompts, ids=ids, messages=before)
    samples.prompt_ids[:] = prompt_ids
    tokens = source_of(reward, tokenizer)
    assert tokens.reads_policy_tokens
    assert tokens.score(samples).tolist() == pytest.approx(wanted, abs=1e-4)
    assert source_of(reward).score(samples).tolist() == pytest.approx(wanted, abs=1e-4)
    assert source_of(reward, template="chat").score(samples).tolist() == pytest.approx(wanted, abs=1e-4)

    settings = rm_serve.RewardServerOptions(str(run), port=0, raw=True, keep_special=True)
    server = rm_serve.RewardServer(settings)
    queries = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    whole = [f"{query}<eos>\n" for query in queries]
    try:
        for texts in (queries, whole):
            assert server.rewards(texts, prompts, [True] * 14) == pytest.approx(wanted, abs=1e-4)
    finally:
        server.listener.close()


def test_rm_score_gives_that_score_too(run, chats):
    result = CliRunner().invoke(app, ["rm", "score", str(run), str(chats), "--num", "7", "--raw"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    scores = [row[key] for row in rows for key in ("chosen_score", "rejected_score")]
    assert scores == pytest.approx(plain_scores(run, chats), abs=1e-4)


def test_a_foreign_model_is_read_where_its_chat_template_ends(run, tmp_path):
    """A model that another library trained has learned to judge at the last token of the template."""
    model = load_reward_model(str(run / "rm/model"))
    for key in ("rlhf_max_length", "rlhf_truncation"):
        vars(model.config).pop(key)
    save(model, load_tokenizer(str(run / "rm/model")), tmp_path)
    reward = {"type": "reward_model", "normalize": False, "template": "chat"}
    samples = batch(["we will"], prompts=["please"])
    ours, theirs = (source_of(reward, path=str(path)).score(samples).item() for path in (run / "rm", tmp_path))
    assert abs(ours - theirs) > 1e-3
    text = "<bos><user>please<eos>\n<assistant>we will<eos>\n"
    ids = load_tokenizer(str(tmp_path))(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        assert theirs == pytest.approx(model(torch.tensor([ids])).logits.item(), abs=1e-4)


@pytest.mark.parametrize("ids", [[5, 6, 2], [5, 6]])
def test_a_response_that_another_stop_token_ended_is_scored_with_eos(run, ids):
    """Gemma's answers end with <end_of_turn>, and its EOS is another token."""
    tokenizer = load_tokenizer(str(run / "rm/model"))
    source = source_of({"type": "reward_model", "path": str(run / "rm"), "normalize": False}, tokenizer)
    closed, cut = (source.score(batch(["x"], ids=[ids], ended=ended)).item() for ended in (True, False))
    with torch.no_grad():
        wanted = source.model(torch.tensor([[7, 5, 6, 2]])).logits.item()
    assert closed == pytest.approx(wanted, abs=1e-5)
    assert (cut == pytest.approx(wanted, abs=1e-5)) == (ids[-1] == 2)
