"""Data options as the stages use them: mixtures, shares, cuts, rankings, conversations, labels."""

from __future__ import annotations

import copy
import json
from functools import partial

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.commands.data_check import encoder_of
from rlhf_cli.commands.data_score import _Comparison
from rlhf_cli.config.by_stage import CONFIGS
from rlhf_cli.config.data import Rows
from rlhf_cli.config.loader import load_config
from rlhf_cli.data.answers import LabelledPairs, RankedIds, answer_encoder
from rlhf_cli.data.cache import tokenise
from rlhf_cli.data.encode import RowText, Skipped
from rlhf_cli.data.encoders import DemonstrationEncoder, PromptEncoder
from rlhf_cli.data.records import Answer, Message, Record
from rlhf_cli.data.stage_rows import StageRows, ppo_rows, probe_rows, ptx_rows, rm_rows, sft_rows
from rlhf_cli.errors import ConfigError, DataError
from rlhf_cli.models.load import load_tokenizer
from rlhf_cli.seeding import generator
from rlhf_cli.training.best import Best
from support.rewards import CHAT
from support.tiny import encoder as distilbert
from support.tiny import read_jsonl, seen_of, training_examples, write_jsonl


def config_of(write_config, stage, root, **changes):
    return load_config(write_config(stage, root, **changes), CONFIGS[stage])


# ------------------------------------------------------------------------------------------ cutting


@pytest.fixture
def encoder(make_model, write_config, tmp_path):
    """A function: keys of RM's data to its encoder."""

    def make(*, reads_last_token=True, tokenizer=None, **data):
        config = config_of(write_config, "rm", tmp_path, data={"test": None, "test_fraction": 0, **data})
        used_tokenizer = load_tokenizer(str(make_model("llama"))) if tokenizer is None else tokenizer
        return answer_encoder(used_tokenizer, rm_rows(config), reads_last_token=reads_last_token)

    return make


PAIRS = [
    {"prompt": "please", "chosen": " we will help you", "rejected": " no"},
    {"prompt": "please", "chosen": " yes" * 30 + " good", "rejected": " yes" * 30 + " bad"},
    {"prompt": "the tent " * 20, "chosen": " it is here", "rejected": " it is late"},
]


@pytest.mark.parametrize(
    ("truncation", "kept", "reason"),
    [
        ("drop", [0], {"longer than 24 tokens": 2}),
        (
            "right",
            [0],
            {"the part in which its answers differ was cut off": 1, "longer than 24 tokens before its answer": 1},
        ),
        ("left", [0, 2], {"longer than 24 tokens, and so is its answer": 1}),
    ],
)
def test_a_pair_whose_difference_was_cut_off_is_skipped_and_counted(encoder, tmp_path, truncation, kept, reason):
    path = str(write_jsonl(tmp_path / "pairs.jsonl", PAIRS))
    rows = tokenise(encoder(train=path, truncation=truncation, max_length=24))
    assert [item.row.where for item in rows.train] == [f"{path}:{i + 1}" for i in kept]
    assert all(len(ids) <= 24 for item in rows.train for ids in item.answers)
    assert {f"data.train: {n} of 3 rows skipped: {why}" for why, n in reason.items()} <= set(rows.lines)
    uncut = {item.row.where: item.answers for item in tokenise(encoder(train=path, max_length=500)).train}
    for item in rows.train:
        for ids, full in zip(item.answers, uncut[item.row.where], strict=True):
            assert ids == (full[:24] if truncation == "right" or len(full) <= 24 else [full[0], *full[-23:]])


def test_the_advised_limit_keeps_a_ranking_and_its_difference(encoder):
    row = Record("the tent " * 20, "row", (Answer(" it is here"), Answer(" it is late")), ranked=True)
    (skipped,) = encoder(truncation="right", max_length=24).encode([row])
    for change, kind in ((0, RankedIds), (-1, Skipped)):
        (item,) = encoder(truncation="right", max_length=skipped.needs + change).encode([row])
        assert isinstance(item, kind)


def test_an_encoder_model_reads_the_rest_of_a_cut_text(encoder, tmp_path):
    """A model that reads whole texts: its own tokenizer cuts them, on the side that the config names."""
    path = str(write_jsonl(tmp_path / "pairs.jsonl", PAIRS))
    full = {i.row.where: i.answers for i in tokenise(encoder(reads_last_token=False, train=path, max_length=500)).train}
    assert len(full) == 3
    cut = list(tokenise(encoder(reads_last_token=False, train=path, max_length=24, truncation="left")).train)
    for item in cut:
        # A cut text keeps its first token.
        assert item.answers == [ids if len(ids) <= 24 else [ids[0], *ids[-23:]] for ids in full[item.row.where]]
    assert len(cut) == 3
    cut = list(tokenise(encoder(reads_last_token=False, train=path, max_length=24, truncation="right")).train)
    assert [item.row.where for item in cut] == [f"{path}:1"]
    assert len(tokenise(encoder(reads_last_token=False, train=path, max_length=24)).train) == 1


def test_short_answers_are_skipped_if_the_config_says_so(encoder, tmp_path):
    path = str(write_jsonl(tmp_path / "pairs.jsonl", PAIRS))
    rows = tokenise(encoder(train=path, max_length=500, min_response_length=5))
    assert [item.row.where for item in rows.train] == [f"{path}:2", f"{path}:3"]
    assert "data.train: 1 of 3 rows skipped: answers of fewer than 5 tokens" in rows.lines


@pytest.mark.parametrize("reads_last_token", [True, False])
def test_a_short_answer_behind_a_long_one_is_skipped(encoder, tokenizer, reads_last_token):
    """A reward model judges the last answer of a conversation, whatever was said before."""
    chat = copy.deepcopy(tokenizer)
    chat.chat_template = CHAT
    before = (Message("user", "hello"), Message("assistant", "the tent is late " * 9), Message("user", "thank you"))
    row = Record("", "row", (Answer(" yes"), Answer(" no")), ranked=True, messages=before)
    (item,) = encoder(tokenizer=chat, reads_last_token=reads_last_token, min_response_length=20).encode([row])
    assert item == Skipped("answers of fewer than 20 tokens")


def test_sft_and_ppo_cut_the_same_side(write_config, make_model, tmp_path):
    """A judge of PPO's texts reads the prompt as it was cut."""
    model = {"path": str(make_model("llama"))}
    tokenizer = load_tokenizer(model["path"])
    rows = [{"prompt": "the tent " * 20 + word, "response": " it is here"} for word in ("now", "then", "later")]
    data = {"train": str(write_jsonl(tmp_path / "rows.jsonl", rows)), "test": None, "test_fraction": 0}

    def examples(**cut):
        config = config_of(write_config, "sft", tmp_path, model=model, data={**data, **cut})
        return list(tokenise(DemonstrationEncoder(tokenizer, sft_rows(config))).train)

    cut, full = examples(max_length=20, truncation="left"), examples(max_length=500)
    assert [e.ids for e in cut] == [[e.ids[0], *e.ids[-19:]] for e in full]
    assert [sum(e.loss_mask) for e in cut] == [sum(e.loss_mask) for e in full]
    ppo = config_of(write_config, "ppo", tmp_path, data={**data, "max_prompt_length": 10, "truncation": "left"})
    prompts = tokenise(PromptEncoder(tokenizer, ppo_rows(ppo))).train
    uncut = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    assert [prompt.ids for prompt in prompts] == [[ids[0], *ids[-9:]] for ids in uncut]
    assert [prompt.text for prompt in prompts] == [tokenizer.decode(ids[-9:]) for ids in uncut]


# ------------------------------------------------------------------------- the same text as the same tokens


TALK = tuple(Message(*turn) for turn in (("user", "hello"), ("assistant", "hi"), ("user", "the tent is late")))


@pytest.mark.parametrize("template", [None, "User: {prompt}\nBot:", "chat"])
@pytest.mark.parametrize("kind", ["text", "conversation"])
def test_every_stage_reads_a_prompt_as_the_same_tokens(write_config, tokenizer, tmp_path, template, kind):
    """The ids before the answer in SFT, ptx, RM, its scores and its probes are those that a rollout starts from."""
    if template == "chat" or kind == "conversation":
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = CHAT
    rows = str(write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "p", "chosen": " a", "rejected": " b", "probe": "x"}]))
    data = {"test": None, "test_fraction": 0, "prompt_template": template}
    make = partial(config_of, write_config)
    sft = make("sft", tmp_path, data=data, model={"path": "not/read"})
    ppo = make("ppo", tmp_path, data=data, ptx={"train": rows, "coef": 0.5, "max_length": 96})
    pairs = make("rm", tmp_path, data={**data, "probes": rows})
    scores = make("rm", tmp_path, data=data, loss="mse")
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


def test_the_chat_template_that_a_config_names_must_exist(tokenizer):
    with pytest.raises(DataError, match=r"data.prompt_template: chat, but the tokenizer has no chat template"):
        RowText(tokenizer, "chat").prompt_ids([Record("please help", "row")])


ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHAT
)


@pytest.mark.parametrize("purpose", ["sft", "rm pairs", "ppo"])
def test_a_conversation_that_the_chat_template_refuses_is_a_bad_row(tokenizer, tmp_path, purpose):
    """As Gemma's and Mistral's templates do, here with one row of a thousand."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = ALTERNATING
    user, reply = {"role": "user", "content": "please help"}, {"role": "assistant", "content": "we will"}
    turns = [[user] if n != 700 else [user, user] for n in range(1000)]
    rows = [{"prompt": prompt, "chosen": "thank you", "rejected": reply["content"]} for prompt in turns]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)

    def encoder(on_bad_row):
        rows = Rows(train=[str(path)], test_fraction=0, on_bad_row=on_bad_row)
        return encoder_of(StageRows(rows, purpose), tokenizer, "x")

    said = f"{path}:701: the tokenizer's chat template fails: roles must alternate. Correct the conversation"
    with pytest.raises(DataError, match=f"^{said}"):
        tokenise(encoder("error"))
    found = tokenise(encoder("skip"))
    assert len(found.train) == 999
    assert "data.train: 1 of 1,000 rows skipped: can't be read" in found.lines
    assert any(line.startswith(f"skipped: {said}") for line in found.lines)


@pytest.fixture
def word_start_tokenizer():
    """Like Llama 2's: ▁ marks each space and the start of a text, so a text alone has one ▁ more."""
    pieces = ["<unk>", "<eos>", "▁", *"Q:helpus!"]
    bpe = Tokenizer(models.BPE({piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, [], unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    bpe.decoder = decoders.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>", eos_token="<eos>")


def test_an_answer_is_tokenised_after_its_prompt(word_start_tokenizer):
    tokenizer = word_start_tokenizer
    rows = [Record("Q:", "row", (Answer("help us!"),)), Record("Q: ", "row", (Answer("help!"),))]
    encoded = RowText(tokenizer).answer_ids(rows)
    for (ids, _), text in zip(encoded, ["Q:help us!", "Q: help!"], strict=True):
        assert ids == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    answer = [i for i, is_answer in zip(*encoded[0], strict=True) if is_answer]
    alone = tokenizer("help us!")["input_ids"]
    assert [*alone, tokenizer.eos_token_id] != answer
    assert tokenizer.convert_ids_to_tokens(alone[:2]) == ["▁", "h"]


# --------------------------------------------------- answers that were cut before their end: `ended: false`, no EOS


ONE = {"prompt": "a", "response": " b"}
TWO = {"prompt": "a", "chosen": " b", "rejected": " c"}
SCORED = {"prompt": "a", "responses": [" b", " c"], "scores": [0, 1], "ended": [True, False]}
CHATTED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
CUT_ROWS = [
    (ONE | {"ended": False}, "sft", [False]),
    (ONE | {"ended": True}, "sft", [True]),
    (ONE, "sft", [True]),
    ({"messages": CHATTED, "ended": False}, "sft", [False]),
    (TWO | {"ended": [True, False]}, "rm pairs", [True, False]),
    # The better answer comes first, with its own flag.
    (SCORED, "rm pairs", [False, True]),
    (SCORED, "rm scores", [True, False]),
    # A column with another meaning.
    (ONE | {"ended": "2020"}, "sft", [True]),
    (TWO | {"ended": [False]}, "rm pairs", [True, True]),
]


@pytest.mark.parametrize(("values", "purpose", "ended"), CUT_ROWS)
def test_a_row_says_which_of_its_answers_ended(values, purpose, ended):
    assert [answer.ended for answer in seen_of(values, purpose).answers] == ended


@pytest.mark.parametrize("learn_all", [False, True])
def test_sft_learns_no_end_behind_a_cut_answer(tokenizer, learn_all):
    rows = [Record("please help", "row", (Answer(" we will", ended=ended),)) for ended in (True, False)]
    whole, cut = training_examples(tokenizer, rows, None, learn_all=learn_all)
    assert whole.ids == [*cut.ids, tokenizer.eos_token_id]
    assert whole.loss_mask == [*cut.loss_mask, True]


def test_no_token_predicts_the_first_one(tokenizer):
    (example,) = training_examples(tokenizer, [Record("please help", "row", (Answer(" we will"),))], learn_all=True)
    assert example.loss_mask == [False] + [True] * (len(example.ids) - 1)


@pytest.mark.parametrize("template", [CHAT, CHAT.replace("m['content']", "(m['content'] | trim)")])
def test_a_cut_turn_of_a_conversation_ends_with_its_text(tokenizer, template):
    chat = copy.deepcopy(tokenizer)
    chat.chat_template = template
    turns = [("user", "please"), ("assistant", "we will"), ("user", "today"), ("assistant", "the lamp is")]
    messages = tuple(Message(*turn) for turn in turns)
    rows = [
        Record("", "row", (Answer(" the lamp is", ended=ended),), messages=messages[:-1]) for ended in (True, False)
    ]
    (whole, whole_mask), (cut, cut_mask) = RowText(chat).answer_ids(rows)
    assert whole == [*cut, chat.eos_token_id]
    assert whole_mask == [*cut_mask, True]
    assert cut.count(chat.eos_token_id) == 3, "those of the turns before"


@pytest.mark.parametrize("reads_last_token", [True, False])
def test_a_reward_model_reads_a_cut_answer_without_eos(tokenizer, reads_last_token):
    """As PPO scores it. An encoder model reads whole texts without EOS anyway."""
    seen = seen_of(TWO | {"ended": [True, False]}, "rm pairs")
    rows = StageRows(Rows.model_validate({"train": "x"}), "rm pairs")
    encoder = answer_encoder(tokenizer, rows, reads_last_token=reads_last_token)
    (item,) = encoder.encode([seen])
    chosen, rejected = item.answers
    eos = tokenizer.eos_token_id
    assert (chosen[-1] == eos, rejected[-1] == eos) == (reads_last_token, False)


@pytest.mark.parametrize(
    ("row", "for_", "written"),
    [
        (ONE | {"ended": False}, "sft", [False]),
        (SCORED, "sft", [False]),
        (SCORED, "rm", [[False, True]]),
        (SCORED, "rm-scores", [True, False]),
        (ONE | {"ended": "2020"}, "sft", [None]),
    ],
)
def test_convert_keeps_which_answers_ended(tmp_path, row, for_, written):
    path, out = write_jsonl(tmp_path / "rows.jsonl", [row]), tmp_path / "out.jsonl"
    result = CliRunner().invoke(app, ["data", "convert", str(path), "--for", for_, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert [line.get("ended") for line in read_jsonl(out)] == written
    assert ("columns not copied: ended" in result.output) == (written == [None])


def test_a_comparison_by_a_judge_puts_the_flags_in_the_order_of_the_answers():
    columns = {"prompt": "a", "responses": [" b", " c"], "scores": [None, None], "ended": [True, False]}
    record = Record("a", "file:1", (Answer(" b"), Answer(" c", ended=False)), "a", columns=columns)
    row = _Comparison("{prompt}{a}{b}", "drop", "judge").outcome(record, ["second", "first"])
    assert (row["chosen"], row["rejected"], row["ended"]) == (" c", " b", [False, True])
    assert "ended_before" not in json.dumps(row)


# ----------------------------------------------------------------------------------------- rankings


def test_labelled_texts_are_paired_as_whole_texts(encoder, tmp_path):
    rows = [{"text": f"it is {'good' if i % 3 else 'bad'} {i}", "label": i % 3} for i in range(30)]
    scored = {"prompt": "it is", "response": " fine", "score": 2}  # in a source of its own
    paths = [str(write_jsonl(tmp_path / f"{n}.jsonl", some)) for n, some in enumerate((rows, [scored]))]
    rows.append({"text": "it is fine", "label": 2})
    encode = encoder(train=paths)
    labelled = tokenise(encode)
    train, test = (LabelledPairs(side, generator(0, "pairs")) for side in (labelled.train, labelled.test))
    assert len(train) == 11, "those of label 2, each against one of 0 or 1"
    assert not test
    assert any("labelled" in line for line in labelled.lines)
    single = [Record("", "", (Answer(row["text"]),)) for row in rows]
    full_texts = [encode.cut(row, tokens) for row, tokens in zip(single, encode.encode_rows(single), strict=True)]
    assert not any(isinstance(ids, Skipped) for ids in full_texts)
    for item in train:
        higher, lower = (full_texts.index(ids) for ids in item.answers)
        assert rows[higher]["label"] == 2
        assert rows[lower]["label"] < 2
        assert item.row.texts == (rows[higher]["text"], rows[lower]["text"])


# --------------------------------------------------------------------------------- the best one kept


@pytest.mark.parametrize("stage", ["sft", "rm", "rm mse"])
def test_best_model_is_the_model_with_the_best_held_out_figure(stage, tmp_path, run_stage, make_model):
    """The learning rate ends far too high, so the best model is not the last. It has the weights of its own step."""
    name, _, kind = stage.partition(" ")
    metric, lower = {"sft": ("eval/loss", True), "rm": ("eval/accuracy", False), "rm mse": ("eval/mse", True)}[stage]
    changes = {
        "model": {"path": str(make_model("llama"))},
        "training": {"num_steps": 8, "minibatch_size": 4},
        "optimizer": {"learning_rate": 3.0 if name == "sft" else 0.3, "schedule": "constant", "warmup_steps": 6},
        "evaluation": {"every_steps": 2, "keep_best": True, "num_samples": 0},
    }
    if name == "rm":
        changes["evaluation"].pop("num_samples")
    if kind:
        rows = [{"prompt": f"question {i}", "response": f" it is {i % 5}", "score": float(i % 5)} for i in range(60)]
        path = str(write_jsonl(tmp_path / "rows.jsonl", rows))
        changes |= {"loss": "mse", "data": {"train": path, "test": None, "test_fraction": 0.3}}
    run_stage(name, tmp_path, **changes)
    figures = {row["step"]: row[metric] for row in read_jsonl(tmp_path / name / "metrics.jsonl") if metric in row}
    assert list(figures) == [2, 4, 6, 8]
    wanted = (min if lower else max)(figures, key=lambda step: figures[step])
    assert wanted != 8, figures
    model_config = json.loads((tmp_path / name / "best_model/config.json").read_text())
    # A run that stops at the best step has the same weights.
    changes["training"] = {"num_steps": wanted, "minibatch_size": 4}
    run_stage(name, tmp_path / "short", **changes)
    best = (tmp_path / name / "best_model/model.safetensors").read_bytes()
    assert best == (tmp_path / "short" / name / "model/model.safetensors").read_bytes()
    assert best != (tmp_path / name / "model/model.safetensors").read_bytes()
    if name == "rm":
        short = json.loads((tmp_path / "short/rm/model/config.json").read_text())
        for key in ("score_mean", "score_std", "rlhf_max_length"):
            assert model_config[key] == pytest.approx(short[key], rel=1e-4)


def test_keep_best_needs_held_out_rows(tmp_path, run_stage, make_model):
    changes = {"model": {"path": str(make_model("llama"))}, "data": {"test": None, "test_fraction": 0}}
    with pytest.raises(ConfigError, match="no held-out rows"):
        run_stage("sft", tmp_path, **changes, evaluation={"every_steps": 1, "keep_best": True})
    with pytest.raises(ConfigError, match="keep_best needs every_steps"):
        run_stage("sft", tmp_path, **changes, evaluation={"keep_best": True})


def test_the_best_figure_survives_a_checkpoint():
    before, after = Best("x", lower=False), Best("x", lower=False)
    after.restore(*before.state())
    assert before.is_better(3, {"x": 1.0})
    after.restore(*before.state())
    assert not after.is_better(4, {"x": 0.5})
    assert (after.step, after.value) == (3, 1.0)
    assert after.is_better(5, {"x": 2.0})


def test_a_saved_tokenizer_cuts_nothing_whether_the_tokens_were_cached_or_not(run_stage, word_piece, tmp_path):
    """Of an encoder model the tokenizer cuts rows, and would keep that setting in its file."""
    distilbert(tmp_path / "encoder", word_piece)
    rows = write_jsonl(tmp_path / "rows.jsonl", [row for row in PAIRS for _ in range(3)])
    data = {"train": str(rows), "test": None, "test_fraction": 0, "max_length": 24, "truncation": "left"}
    for name in ("one", "two"):  # the second one reads the cache
        run_stage("rm", tmp_path / name, model={"path": str(tmp_path / "encoder")}, data=data)
    one, two = ((tmp_path / name / "rm/model/tokenizer.json").read_text() for name in ("one", "two"))
    assert one == two
    assert json.loads(one)["truncation"] is None
