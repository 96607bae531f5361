"""All stages read the same text as the same tokens: SFT, RM and PPO a prompt."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_cli.config.by_stage import CONFIGS
from rlhf_cli.config.loader import load_config
from rlhf_cli.data.answers import answer_encoder
from rlhf_cli.data.encode import RowText
from rlhf_cli.data.encoders import DemonstrationEncoder, PromptEncoder
from rlhf_cli.data.records import Answer, Message, Record
from rlhf_cli.data.stage_rows import ppo_rows, probe_rows, ptx_rows, rm_rows, sft_rows
from support.tiny import write_jsonl

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = tuple(Message(*turn) for turn in (("user", "hello"), ("assistant", "hi"), ("user", "the tent is late")))


@pytest.fixture
def chat_tokenizer(tokenizer: Any) -> Any:
    with_template = copy.deepcopy(tokenizer)
    with_template.chat_template = CHAT
    return with_template


@pytest.fixture
def config_of(write_config: Any, tmp_path: Path) -> Any:
    """A function: stage, keys of its data -> the config."""

    def make(stage: str, data: dict[str, Any], **changes: Any) -> Any:
        changes["data"] = {"test": None, "test_fraction": 0, **data}
        if stage == "sft":
            changes["model"] = {"path": "not/read"}
        return load_config(write_config(stage, tmp_path, **changes), CONFIGS[stage])

    return make


@pytest.mark.parametrize("template", [None, "User: {prompt}\nBot:", "chat"])
@pytest.mark.parametrize("kind", ["text", "conversation"])
def test_every_stage_reads_a_prompt_as_the_same_tokens(
    config_of: Any, tokenizer: Any, chat_tokenizer: Any, tmp_path: Path, template: str | None, kind: str
) -> None:
    """The ids before the answer in SFT, ptx, RM, its scores and its probes are those that a rollout starts from."""
    tokenizer = chat_tokenizer if template == "chat" or kind == "conversation" else tokenizer
    rows = str(write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "p", "chosen": " a", "rejected": " b", "probe": "x"}]))
    data = {"prompt_template": template}
    sft, ppo = config_of("sft", data), config_of("ppo", data, ptx={"train": rows, "coef": 0.5, "max_length": 96})
    pairs, scores = config_of("rm", {**data, "probes": rows}), config_of("rm", data, loss="mse")
    prompt, messages, answers = "please help", TALK if kind == "conversation" else (), (" thank you", " we will")

    (start,) = PromptEncoder(tokenizer, ppo_rows(ppo)).encode([Record(prompt, "row", messages=messages)])
    shown = Record(prompt, "row", (Answer(answers[0]),), messages=messages)
    ranking = Record(prompt, "row", tuple(map(Answer, answers)), ranked=True, messages=messages)
    scored = Record(prompt, "row", (Answer(answers[0], 1.0),), messages=messages)
    sequences = {}
    for name, spec in (("sft", sft_rows(sft)), ("ptx", ptx_rows(ppo))):
        (example,) = DemonstrationEncoder(tokenizer, spec).encode([shown])
        sequences[name] = example.ids
        assert example.loss_mask[len(start.ids) :] == [True] * (len(example.ids) - len(start.ids)), name
        assert not example.loss_mask[len(start.ids) - 1], name
    for name, spec in (("pairs", rm_rows(pairs)), ("probes", probe_rows(pairs))):
        (item,) = answer_encoder(tokenizer, spec, reads_last_token=True).encode([ranking])
        sequences[name], sequences[f"{name}, worse"] = item.answers
    (item,) = answer_encoder(tokenizer, rm_rows(scores), reads_last_token=True).encode([scored])
    sequences["scores"] = item.ids

    assert len(start.ids) > 3
    for name, ids in sequences.items():
        answer = answers["worse" in name]
        assert ids[: len(start.ids)] == start.ids, name
        assert tokenizer.decode(ids[len(start.ids) :]).strip() == f"{answer}<eos>".strip(), name
    assert sequences["sft"] == sequences["ptx"] == sequences["pairs"] == sequences["probes"] == sequences["scores"]


@pytest.fixture
def word_start_tokenizer() -> PreTrainedTokenizerFast:
    """Like Llama 2's: ▁ marks each space and the start of a text, so a text alone has one ▁ more."""
    pieces = ["<unk>", "<eos>", "▁", *"Q:helpus!"]
    bpe = Tokenizer(models.BPE({piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, [], unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    bpe.decoder = decoders.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>", eos_token="<eos>")


def test_an_answer_is_tokenised_after_its_prompt(word_start_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = word_start_tokenizer
    rows = [Record("Q:", "row", (Answer("help us!"),)), Record("Q: ", "row", (Answer("help!"),))]
    encoded = RowText(tokenizer).answer_ids(rows)
    for (ids, _), text in zip(encoded, ["Q:help us!", "Q: help!"], strict=True):
        assert ids == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    answer = [i for i, is_answer in zip(*encoded[0], strict=True) if is_answer]
    alone = tokenizer("help us!")["input_ids"]
    assert [*alone, tokenizer.eos_token_id] != answer
    assert tokenizer.convert_ids_to_tokens(alone[:2]) == ["▁", "h"]
