"""`rlhf data check`, `show` and `convert`: every figure on rows counted by hand, the marks, what is read back."""

import gzip
import json
import random
import re
from collections import Counter

import pytest
import yaml
from transformers import AutoTokenizer, BertConfig
from typer.testing import CliRunner

from rlhf_cli.algorithms.statistics import wilson_interval
from rlhf_cli.cli import app
from rlhf_cli.commands.data_check import encoder_of, in_tokens, rows_of_source
from rlhf_cli.commands.data_show import pieces
from rlhf_cli.config.data import DataSource, Rows
from rlhf_cli.data.encode import RowText, Skipped
from rlhf_cli.data.formats import FORMATS, read_record, recognise
from rlhf_cli.data.read import read_records
from rlhf_cli.data.records import Answer, Record, Row
from rlhf_cli.data.row_counts import DUPLICATE, Report
from rlhf_cli.data.stage_rows import StageRows, records
from rlhf_cli.errors import DataError
from support import projects
from support.paths import ROOT, TESTS
from support.tiny import metaspace, seen_of, training_examples, write_jsonl

FIXTURES = TESTS / "fixtures" / "formats"


def rlhf(*arguments, code=0):
    return projects.rlhf("data", *arguments, code=code)


def checked(*arguments, code=0):
    """What `rlhf data check --json` says."""
    return json.loads(rlhf("check", *arguments, "--json", code=code).stdout)


def words(count):
    return " ".join(["word"] * count)


def pair(prompt, chosen, rejected):
    """Answers with the given numbers of words; answers of equal length differ."""
    return {"prompt": prompt, "chosen": f"yes {words(chosen - 1)}", "rejected": f"no {words(rejected - 1)}"}


PAIRS = [
    pair("a b c", 4, 2),  # chosen longer
    pair("a b c", 4, 2),  # the same row again
    pair("a b c", 6, 2),  # the same prompt, another answer; longer
    pair("d", 1, 5),  # shorter
    pair("", 3, 3),  # no prompt, equally long
    {"prompt": "e f", "chosen": "same", "rejected": "same"},  # no preference
    {"prompt": "e f", "chosen": "good", "rejected": 7},  # bad
    {"prompt": "e f", "chosen": "good"},  # bad
    pair("g h", 20, 1),  # longer, 22 words together
]


# --------------------------------------------------------------------------------------- check: counts


def test_every_count_equals_the_hand_count(tmp_path):
    path = write_jsonl(tmp_path / "pairs.jsonl", PAIRS)
    found = checked(path, "--for", "rm", "--max-length", 21, code=1)
    side = found["sides"]["train"]
    assert (found["for"], found["unit"], found["formats"]) == ("rm pairs", "words", {str(path): "preference"})
    assert (side["read"], side["bad"], side["used"]) == (9, 2, 6)
    assert side["skipped"] == {"its answers are equal": 1}
    assert side["duplicates"] == {"rows": 1, "first": [f"{path}:2"], "example": None}
    assert side["prompts_of_several_rows"] == {"prompts": 1, "rows": 2}
    assert (side["empty_prompts"], side["max_length"], side["too_long"]) == (1, 21, 1)
    assert side["answers_of_a_row"] == {"2": 6}
    assert (side["lengths"]["whole"]["p1"], side["lengths"]["whole"]["max"]) == (3, 22)  # with the longest answer
    assert found["bad_rows"]["number"] == 2
    seventh, eighth = found["bad_rows"]["first"]
    assert seventh.startswith(f"{path}:7: `rejected` is ")
    assert eighth.startswith(f"{path}:8: found the keys prompt, chosen, every row needs `rejected`")
    assert "leaks" not in found


def test_a_row_of_exactly_max_length_is_not_too_long(tmp_path):
    path = write_jsonl(tmp_path / "pairs.jsonl", [PAIRS[0], PAIRS[-1]])
    for limit, too_long in ((22, 0), (21, 1), (7, 1), (6, 2)):
        assert checked(path, "--for", "rm", "--max-length", limit)["sides"]["train"]["too_long"] == too_long
    # A ranking is skipped as a whole, scored answers one by one.
    row = {"prompt": "p", "answers": [words(2), words(5), words(9)], "scores": [1, 2, 3]}
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    for for_, too_long in (("rm-scores", 2), ("rm", 1)):
        assert checked(path, "--for", for_, "--max-length", 5)["sides"]["train"]["too_long"] == too_long


def test_length_bias_equals_the_hand_count(tmp_path):
    path = write_jsonl(tmp_path / "pairs.jsonl", [row for row in PAIRS if isinstance(row.get("rejected"), str)])
    bias = checked(path, "--for", "rm")["sides"]["train"]["length_bias"]
    low, high = wilson_interval(4.5, 6)
    means = {"mean_chosen": (4 + 4 + 6 + 1 + 3 + 20) / 6, "mean_rejected": (2 + 2 + 2 + 5 + 3 + 1) / 6}
    shares = {"chosen_longer": 4 / 6, "as_long": 1 / 6, "longer_is_right": 4.5 / 6, "low95": low, "high95": high}
    assert bias == pytest.approx(means | shares, rel=1e-12)


def test_prompts_on_both_sides_are_found_and_named(tmp_path):
    train = write_jsonl(tmp_path / "train.jsonl", [{"prompt": f"question {n}"} for n in range(20)])
    tests = [{"prompt": "new"}, {"prompt": "question 3"}, {"prompt": "question 7 "}, {"prompt": "question 3"}]
    test = write_jsonl(tmp_path / "test.jsonl", tests)
    found = checked(train, "--for", "ppo", "--test", test)
    assert found["leaks"] == {"rows": 3, "prompts": 2, "first": [f"{test}:2", f"{test}:3", f"{test}:4"]}
    assert {name: side["read"] for name, side in found["sides"].items()} == {"train": 20, "test": 4}
    assert "Prompts on both sides: 2, in 3 test rows" in rlhf("check", train, "--for", "ppo", "--test", test).stdout
    blank = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "", "response": f"answer {n}"} for n in range(4)])
    found = checked(blank, "--for", "sft", "--test", blank)
    assert found["leaks"]["rows"] == found["sides"]["train"]["prompts_of_several_rows"]["prompts"] == 0
    rows = [{"prompt": f"question {n}", "response": "yes"} for n in range(6)]
    names = {"train": rows[:4], "validation": rows[3:5], "test": rows[5:]}
    data = {name: str(write_jsonl(tmp_path / f"{name}.jsonl", part)) for name, part in names.items()}
    config = written(tmp_path, sft_config(data))
    found = checked("--config", config)
    assert found["unit"] == "words", "the model is not on this disk"
    assert {name: side["read"] for name, side in found["sides"].items()} == {"train": 4, "validation": 2, "test": 1}
    assert found["validation_leaks"] == {"rows": 1, "prompts": 1, "first": [f"{data['validation']}:1"]}
    assert found["leaks"]["rows"] == 0
    assert "Prompts of training and validation: 1, in 1 validation rows" in rlhf("check", "--config", config).stdout


def test_a_ranking_is_one_trial_of_all_its_pairs(tmp_path):
    rows = [
        {"prompt": "a", "answers": [words(3), words(2), words(2) + ".", words(5)]},  # 2 wins, 1 tie of 6 pairs
        {"prompt": "b", "answers": [words(2), words(1)]},
    ]
    side = checked(write_jsonl(tmp_path / "a.jsonl", rows), "--for", "rm")["sides"]["train"]
    assert side["answers_of_a_row"] == {"2": 1, "4": 1}
    assert side["length_bias"]["longer_is_right"] == pytest.approx((2.5 / 6 + 1) / 2, rel=1e-12)
    assert (side["length_bias"]["chosen_longer"], side["lengths"]["rejected"]["max"]) == (0.5, 5)


def test_percentiles_are_lengths_of_rows(tmp_path):
    """The smallest length that p per cent of the rows do not exceed, by counting. More rows than one chunk."""
    rng = random.Random(2)
    lengths = [rng.randint(1, 90) for _ in range(2200)]
    rows = [{"prompt": f"{n}", "response": words(length)} for n, length in enumerate(lengths)]
    side = checked(write_jsonl(tmp_path / "a.jsonl", rows), "--for", "sft")["sides"]["train"]
    for p in (1, 10, 50, 90, 99):
        slow = sorted(lengths)[-(-p * len(lengths) // 100) - 1]
        assert side["lengths"]["answer"][f"p{p}"] == slow
        assert side["lengths"]["whole"][f"p{p}"] == slow + 1
    assert side["lengths"]["answer"]["max"] == max(lengths)
    assert side["lengths"]["answer"]["mean"] == pytest.approx(sum(lengths) / len(lengths), rel=1e-12)
    assert side["lengths"]["prompt"]["p99"] == 1


def test_labels_are_counted_and_many_scores_are_summarised(tmp_path):
    labelled = [{"text": f"text {n}", "label": int(n < 3)} for n in range(8)]
    found = checked(write_jsonl(tmp_path / "a.jsonl", labelled), "--for", "rm")
    assert found["for"] == "rm scores"
    scores = found["sides"]["train"]["scores"]
    assert scores.pop("counts") == {"0": 5, "1": 3}
    assert scores == pytest.approx({"number": 8, "mean": 3 / 8, "std": (15 / 64) ** 0.5}, rel=1e-12)
    kto = [{"prompt": f"{n}", "completion": "x", "label": n != 1} for n in range(4)]
    path = write_jsonl(tmp_path / "b.jsonl", kto)
    assert checked(path, "--for", "rm")["sides"]["train"]["scores"]["counts"] == {"0": 1, "1": 3}
    assert checked(path, "--for", "sft")["sides"]["train"]["skipped"] == {"no answer to learn from": 1}
    thirds = [{"text": f"text {n}", "label": label} for n, label in enumerate((1, 1 / 3, 0.33333333, 0.33333333))]
    path = write_jsonl(tmp_path / "d.jsonl", thirds)
    assert checked(path, "--for", "rm")["sides"]["train"]["scores"]["counts"] == {"0.333333": 3, "1": 1}
    scored = [{"prompt": "p", "response": f"{n}", "score": n / 2 if n < 11 else None} for n in range(12)]
    side = checked(write_jsonl(tmp_path / "c.jsonl", scored), "--for", "rm")["sides"]["train"]
    assert side["skipped"] == {"no answer with a score": 1}
    assert (side["scores"]["min"], side["scores"]["median"], side["scores"]["max"]) == (0.0, 2.5, 5.0)
    assert side["scores"]["mean"] == pytest.approx(2.5, rel=1e-12)


def test_rm_reads_pairs_if_it_can_else_scores(tmp_path):
    both = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "answers": ["a", "b"], "scores": [1, 2]}])
    assert checked(both, "--for", "rm")["for"] == "rm pairs"
    assert checked(both, "--for", "rm-scores")["for"] == "rm scores"
    neither = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "p", "response": "a"}])
    assert "rm pairs needs rows with" in rlhf("check", neither, "--for", "rm", code=2).stderr


# -------------------------------------------------------------------------- check: bad rows, exit codes


def test_the_first_ten_bad_rows_are_named_and_all_are_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = ['{"prompt": "p", "response": "r"}'] + ['{"prompt": "p", "response": }'] * 13 + ["", "[1]"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    result = rlhf("check", path, "--for", "sft", code=1)
    assert "Bad rows: 14, the first 10" in result.stdout
    named = re.findall(rf"{re.escape(str(path))}:(\d+): not JSON", result.stdout)
    assert named == [str(n) for n in range(2, 12)]
    assert result.stderr == "error: 14 bad rows. Fix or remove them, or set data.on_bad_row: skip\n"
    assert checked(path, "--for", "sft", code=1)["bad_rows"]["first"] == [
        line.strip() for line in result.stdout.splitlines() if "not JSON" in line
    ]


def test_a_source_without_one_good_row_is_refused_and_its_bad_rows_are_shown(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "response": 1}] * 3)
    result = rlhf("check", path, "--for", "sft", code=2)
    assert "Bad rows: 3" in result.stdout
    assert "no row is left to train on" in result.stderr


def test_a_row_that_only_the_stage_rejects_is_bad(tmp_path):
    rows = [{"prompt": "p", "response": "r"}, {"prompt": " ", "response": "r"}]
    found = checked(write_jsonl(tmp_path / "a.jsonl", rows), "--for", "ppo", code=1)
    assert "the prompt is empty" in found["bad_rows"]["first"][0]
    assert (found["sides"]["train"]["read"], found["sides"]["train"]["used"]) == (2, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either SOURCE and --for, or --config"),
        (["a.jsonl", "--config", "sft.yaml", "--for", "sft"], "give either SOURCE and --for, or --config"),
        (["a.jsonl"], "--for: is missing"),
        (["a.jsonl", "--for", "sft"], "no such file"),
        (["a.jsonl", "--for", "sft", "--set", "limt=1"], "--set limt=1: unknown key; did you mean limit?"),
        (["a.jsonl", "--for", "sft", "--set", "limit=many"], "--set limit=many: found the text 'many'"),
        (["a.jsonl", "--for", "sft", "--data-dir=x"], "--data-dir: is a key of the source. Write --set data_dir=VALUE"),
        (["a.jsonl", "--for", "sft", "--streaming"], "Write --set streaming=true"),
        (["a.jsonl", "--for", "sft", "--weights", "a=1"], "Write --set weights.NAME=NUMBER"),
        (["--config", "configs/support/sft.yaml", "--format", "hh"], "--format: does not go with --config"),
        (["--config", "configs/support/sft.yaml", "--test", "x"], "--test: does not go with --config"),
    ],
)
def test_misuse_is_one_line_and_exit_code_2(arguments, message):
    result = rlhf("check", *arguments, code=2)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


# --------------------------------------------------------------------------------- check: what is printed


def test_the_report_fits_into_80_columns_and_shows_the_figures(tmp_path):
    rng = random.Random(1)
    rows = [pair(f"{words(rng.randint(1, 90))} {n}", rng.randint(1, 300), rng.randint(1, 90)) for n in range(150)]
    rows += [rows[3], {"prompt": "p", "chosen": 1, "rejected": 2}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    output = rlhf("check", path, "--for", "rm", "--max-length", 200, code=1).stdout
    assert "\x1b" not in output
    figures = [line for line in output.splitlines() if str(tmp_path) not in line]
    assert max(map(len, figures)) <= 80
    assert "a word is one token or more" in output
    assert "a word is one token or more" not in rlhf("check", path, "--for", "rm", code=1).stdout
    side = checked(path, "--for", "rm", "--max-length", 200, code=1)["sides"]["train"]
    table = {line[2:38].strip(): line[38:].strip() for line in figures if line.startswith("  ")}
    assert table["read"] == "152"
    assert table["bad"] == table["exact duplicates"] == "1"
    assert table["longer than 200 words"] == str(side["too_long"])
    scale = max(lengths["p99"] for lengths in side["lengths"].values())
    for name in ("prompt", "chosen", "rejected", "whole"):
        line = next(line for line in figures if line.split()[:1] == [{"whole": "together"}.get(name, name)])
        values = side["lengths"][name]
        assert line.split()[1:7] == [str(values[key]) for key in ("p1", "p10", "p50", "p90", "p99", "max")]
        # The bars agree with the figures, on one scale from 0 to the largest p99.
        p1, p10, p50, p90, p99 = (round(values[key] / scale * 23) for key in ("p1", "p10", "p50", "p90", "p99"))
        bar = "".join("━" if p10 <= i <= p90 else "─" if p1 <= i else " " for i in range(p99 + 1))
        assert line[56:] == bar[:p50] + "┃" + bar[p50 + 1 :]
    bias = side["length_bias"]
    share, low, high = (f"{100 * bias[key]:.1f} %" for key in ("longer_is_right", "low95", "high95"))
    assert f"would be right in {share} of pairs\n  (95 % interval: {low} to {high})" in output


def test_ascii_output_loses_nothing(tmp_path):
    rows = [{"prompt": "naïve\x1b[31m", "response": "日本"}, {"prompt": "p", "response": 3}]
    path = write_jsonl(tmp_path / "naïve.jsonl", rows)
    for command, code in (("check", 1), ("show", 0)):
        result = CliRunner(charset="ascii").invoke(app, ["data", command, str(path), "--for", "sft"])
        assert result.exit_code == code, result.output
        assert "na\\xefve" in result.stdout
        assert result.stdout.isascii()
        assert "\x1b" not in result.stdout
    assert "\\x1b[31m[[\\u65e5\\u672c]]" in result.stdout


# ------------------------------------------------------------------------------------- check: by a config


def sft_config(data, **more):
    return {
        "artifacts": "artifacts/x",
        "model": {"path": "org/model-of-the-hub"},
        "data": data,
        "training": {"num_steps": 1},
        "optimizer": {"learning_rate": 0.001},
        **more,
    }


def written(tmp_path, config, stage="sft"):
    """The file of a config."""
    path = tmp_path / f"{stage}.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def test_a_config_sets_sides_limits_template_and_tokenizer(tmp_path, make_model, tokenizer):
    values = [{"prompt": f"the tent {n}", "response": " is late"} for n in range(30)]
    path = write_jsonl(tmp_path / "a.jsonl", [*values, *values[:7]])
    data = {
        "train": {"path": str(path), "select": "0/2", "weight": 3},
        "test": {"path": str(path), "select": "1/2"},
        "prompt_template": "please help: {prompt}",
        "max_length": 12,
        "min_response_length": 60,
        "deduplicate": True,
    }
    config = written(tmp_path, sft_config(data, model={"path": str(make_model("llama"))}))
    found = checked("--config", config)
    train, test = found["sides"]["train"], found["sides"]["test"]
    assert train["read"] + test["read"] == 37
    # `deduplicate` does not hide duplicates, and a weight of 3 does not create any.
    assert train["duplicates"]["rows"] + test["duplicates"]["rows"] == 7
    assert found["unit"] == "tokens"
    rows = [Record(row["prompt"], "", (Answer(row["response"]),)) for row in [*values, *values[:7]]]
    lengths = [len(ids) for ids, _ in RowText(tokenizer, "please help: {prompt}").answer_ids(rows)]
    different = lengths[:30]
    assert train["too_long"] + test["too_long"] == sum(length > 12 for length in different) > 0
    # All rows are too short, and `deduplicate` skips seven before they are measured.
    assert train["too_short"] + test["too_short"] == 30
    skipped = Counter(train["skipped"]) + Counter(test["skipped"])
    assert skipped == {DUPLICATE: 7, "answers of fewer than 60 tokens": 30}
    assert train["used"] + test["used"] == 0
    assert max(side["lengths"]["whole"]["max"] for side in (train, test)) == max(lengths)
    shorter = checked("--config", config, "--set", "data.max_length=1000")
    assert shorter["sides"]["train"]["too_long"] == 0
    assert rlhf("check", "--config", config).stdout.count("longer than 12 tokens") == 1


def test_probes_and_ptx_are_checked(tmp_path):
    pairs = write_jsonl(tmp_path / "pairs.jsonl", [pair(f"p {n}", 2, 3) for n in range(4)])
    probes = write_jsonl(tmp_path / "probes.jsonl", [{**pair("q", 2, 3), "probe": "length"}, pair("q", 3, 2)])
    rm = sft_config({"train": str(pairs), "test_fraction": 0, "probes": str(probes)}, model={"path": "org/model"})
    config = written(tmp_path, rm, "rm")
    found = checked("--config", config, code=1)
    read = {name: (side["read"], side["bad"]) for name, side in found["sides"].items()}
    assert read == {"train": (4, 0), "probes": (2, 1)}
    assert "needs a text column `probe`" in found["bad_rows"]["first"][0]
    ppo = {
        "artifacts": "artifacts/x",
        "policy": {"path": "org/model"},
        "rewards": [{"type": "reward_model"}],
        "data": {"train": str(pairs), "test_fraction": 0},
        "ptx": {"train": str(pairs), "coef": 1.0, "max_length": 3},
        "ppo": {"num_iterations": 1, "rollout_batch_size": 2, "minibatch_size": 2},
        "optimizer": {"learning_rate": 0.001},
    }
    config = written(tmp_path, ppo, "ppo")
    found = checked("--config", config)
    assert (found["sides"]["ptx"]["too_long"], found["sides"]["train"]["too_long"]) == (4, 0)
    shorter = checked("--config", config, "--set", "data.max_prompt_length=1")
    assert (shorter["sides"]["ptx"]["too_long"], shorter["sides"]["train"]["too_long"]) == (4, 4)
    assert list(found["sides"]["train"]["lengths"]) == ["prompt"]


# ---------------------------------------------------------------------------------- check: lengths in tokens


@pytest.fixture(scope="session")
def metaspace_tokenizer(texts):
    """A blank goes before every text, so an answer by itself has other tokens than behind a prompt."""
    return metaspace(texts, "always")


def rows_seen(purpose, count=60):
    rng = random.Random(4)
    found = []
    for n in range(count):
        num = {"sft": 1, "rm pairs": 2 + n % 3, "rm scores": 1 + n % 2, "ppo": 0}[purpose]
        answers = [f"{' ' * (n % 2)}{words(rng.randint(1, 9))} {k} late." for k in range(num)]
        said = f"Q: the tent {words(rng.randint(0, 9))}\nA:" if n % 10 or purpose == "ppo" else ""
        own = {
            "sft": {"response": answers and answers[0]},
            "rm pairs": {"answers": answers},
            "rm scores": {"answers": answers, "scores": [*range(num)]},
            "ppo": {},
        }[purpose]
        found.append(seen_of({"prompt": said, **own}, purpose))
    return found


@pytest.mark.parametrize("name", ["tokenizer", "eos_only_tokenizer", "metaspace_tokenizer"])
@pytest.mark.parametrize("purpose", ["sft", "rm pairs", "rm scores", "ppo"])
@pytest.mark.parametrize("template", [None, "help: {prompt}"])
def test_lengths_in_tokens_equal_those_of_the_stage(request, name, purpose, template):
    tokenizer = request.getfixturevalue(name)
    rows = rows_seen(purpose)
    encoder = encoder_of(StageRows(Rows(train=["x"]), purpose, template=template), tokenizer, "x")
    for row, found in zip(rows, in_tokens(encoder, rows), strict=True):
        if purpose == "ppo":
            assert found.prompt == len(RowText(tokenizer, template).prompt_ids([Record(row.prompt, "")])[0])
        of_prompt = 0
        for answer, length in zip(row.texts, found.answers, strict=True):
            demonstrations = [Record(row.prompt, "", (Answer(answer),))]
            ids, is_answer = RowText(tokenizer, template).answer_ids(demonstrations, start=purpose == "sft")[0]
            of_prompt = len(ids) - sum(is_answer)
            assert length == sum(is_answer)
        assert purpose == "ppo" or found.prompt == of_prompt


CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


TURNS = [("user", "the tent"), ("assistant", "is late"), ("user", "please")]
TALK = [{"role": role, "content": content} for role, content in TURNS]


@pytest.mark.parametrize("purpose", ["sft", "rm pairs"])
def test_sft_learns_every_turn_of_a_conversation_and_rm_judges_the_last(purpose, texts):
    from rlhf_cli.config.models import TokenizerTraining
    from rlhf_cli.models.scratch import train_tokenizer

    tokenizer = train_tokenizer(texts, TokenizerTraining(vocab_size=300))
    tokenizer.chat_template = CHAT_TEMPLATE
    row = {"prompt": TALK, "chosen": "thank you", "rejected": "sorry sorry sorry"}
    encoder = encoder_of(StageRows(Rows(train=["x"]), purpose), tokenizer, "x")
    (found,) = in_tokens(encoder, [seen_of(row, purpose)])
    of_prompt, of_answers = found.prompt, found.answers
    count = {text: len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (
        "<user>the tent\n<assistant>", "is late<eos>\n", "<user>please\n<assistant>", "thank you<eos>",
        "sorry sorry sorry<eos>",
    )}  # fmt: skip
    before = count["<user>the tent\n<assistant>"] + count["<user>please\n<assistant>"]
    if purpose == "sft":
        assert (of_prompt, of_answers) == (before, [count["is late<eos>\n"] + count["thank you<eos>"]])
    else:
        assert of_prompt == before + count["is late<eos>\n"]
        assert of_answers == [count["thank you<eos>"], count["sorry sorry sorry<eos>"]]


# ----------------------------------------------------------------------------------- check: blank answers

HH = [
    {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello", "rejected": "\n\nHuman: Hi\n\nAssistant: No"},
    {"chosen": "\n\nHuman: Hi\n\nAssistant:", "rejected": "\n\nHuman: Hi\n\nAssistant: No"},
    {"chosen": "\n\nHuman: Ho\n\nAssistant: \n", "rejected": "\n\nHuman: Ho\n\nAssistant: No"},
    {"chosen": "\n\nHuman: Ho\n\nAssistant: Yes", "rejected": "\n\nHuman: Ho\n\nAssistant: "},
]


@pytest.mark.parametrize(("for_", "used"), [("sft", 2), ("rm", 1)])
def test_a_blank_answer_is_skipped_and_counted(tmp_path, for_, used):
    """`data check` and `data convert` use the same rows. SFT reads the chosen answer only."""
    path, out = write_jsonl(tmp_path / "hh.jsonl", HH), tmp_path / "out.jsonl"
    side = checked(path, "--for", for_)["sides"]["train"]
    assert (side["used"], side["skipped"]) == (used, {"an answer is blank": 4 - used})
    output = rlhf("convert", path, "--for", for_, "--out", out).stdout
    assert f"{4 - used} of 4 rows skipped: an answer is blank" in output
    assert checked(out, "--for", for_)["sides"]["train"]["used"] == used


# ---------------------------------------------------------------------------------- check: missing spaces


def test_a_missing_space_between_prompt_and_answer_is_named_with_its_remedy(tmp_path):
    few = [{"prompt": f"Q{n}{'.' if n == 4 else ':'}", "response": "yes"} for n in range(30)]
    found = checked(write_jsonl(tmp_path / "few.jsonl", few), "--for", "sft")
    assert (found["sides"]["train"]["glued"]["rows"], found["warnings"]) == (1, [])
    rows = [{"prompt": f"Describe weatherman {n}.", "response": "He tells the weather."} for n in range(9)]
    path = write_jsonl(tmp_path / "rows.jsonl", [*rows, {"prompt": "Answer:", "response": "Yes."}])
    found = checked(path, "--for", "sft")
    glued = found["sides"]["train"]["glued"]
    assert glued == {"rows": 9, "first": [f"{path}:{n}" for n in (1, 2, 3)], "example": "0.He"}
    (warning,) = found["warnings"]
    assert warning == (
        "train: prompt and answer meet without a space in 9 of 10 rows (0.He). "
        r'data.prompt_template: "{prompt}\n" would separate them'
    )
    output = " ".join(rlhf("check", path, "--for", "sft").stdout.split())
    assert "answer meets prompt without space 9" in output
    template = json.loads(warning.partition("data.prompt_template: ")[2].removesuffix(" would separate them"))
    data = {"train": str(path), "prompt_template": template, "test_fraction": 0}
    config = written(tmp_path, sft_config(data))
    assert checked("--config", config, "--for", "sft")["sides"]["train"]["glued"]["rows"] == 0


# ---------------------------------------------------------------------------------- check: special tokens


def test_special_tokens_in_texts_are_counted(tmp_path, make_model):
    rows = [{"prompt": f"please {n}", "chosen": " we will", "rejected": " no"} for n in range(20)]
    rows[3]["rejected"] = " no<eos>thank you"
    rows[7]["prompt"] = "<bos>please"
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    side = checked(path, "--for", "rm", "--tokenizer", make_model("llama"))["sides"]["train"]
    assert side["special_tokens"] == {"rows": 2, "first": [f"{path}:4", f"{path}:8"], "example": "<eos>"}
    output = rlhf("check", path, "--for", "rm", "--tokenizer", make_model("llama")).stdout
    assert "special tokens in the text" in output
    assert "rows.jsonl:4, 8 (<eos>)" in output
    assert checked(path, "--for", "rm")["sides"]["train"]["special_tokens"]["rows"] == 0, "without a tokenizer"


# ----------------------------------------------------------------------------------------- check: lengths


def test_a_file_of_long_rows_names_the_length_that_would_keep_95_percent(tmp_path, make_model):
    rows = [{"prompt": "please " * 40, "response": " we will " + "x" * n} for n in range(20)]
    path, model = write_jsonl(tmp_path / "rows.jsonl", rows), make_model("llama")
    (warning,) = checked(path, "--for", "sft", "--tokenizer", model, "--max-length", 30)["warnings"]
    advised = warning.partition("--max-length: ")[2].split()[0]
    found = checked(path, "--for", "sft", "--tokenizer", model, "--max-length", advised)
    assert found["sides"]["train"]["used"] >= 19


# ------------------------------------------------------------------------------------------------- show


def test_trained_tokens_are_between_marks(tmp_path, make_model):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "the tent", "response": " is\nlate"}] * 5)
    model = make_model("llama")
    output = rlhf("show", path, "--for", "sft", "--tokenizer", model, "-n", 2).stdout
    assert output.count("<bos>the tent⟦ is\n  late<eos>⟧\n") == 2
    rows = [Record("the tent", "", (Answer(" is\nlate"),))]
    (example,) = training_examples(AutoTokenizer.from_pretrained(model), rows)
    told = f"{len(example.ids)} tokens, {sum(example.loss_mask)} trained on\n"
    assert output.startswith(f"{path}: rows of prompt_response, read for sft\n⟦trained on⟧\n\n{path}:1  {told}")
    config = written(tmp_path, sft_config({"train": str(path), "loss_on": "all"}, model={"path": str(model)}))
    assert "<bos>⟦the tent is\n  late<eos>⟧\n" in rlhf("show", "--config", config, "-n", 1).stdout


def test_an_encoder_model_without_eos_shows_its_own_special_tokens(tmp_path, word_piece):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a b", "chosen": " c d", "rejected": " c e"}])
    word_piece.save_pretrained(tmp_path / "model")
    BertConfig(vocab_size=len(word_piece)).save_pretrained(tmp_path / "model")
    output = rlhf("show", path, "--for", "rm", "--tokenizer", tmp_path / "model").stdout
    assert output.replace(str(path), "F").split("\n\n")[1:] == [
        "F:1  chosen, 6 tokens\n  [CLS] a b⟦ c d [SEP]⟧",
        "F:1  rejected, 6 tokens\n  (the same 3 tokens, then)\n  ⟦ c e [SEP]⟧\n",
    ]


def test_overlong_rows_are_cut_or_shown_as_skipped(tmp_path, make_model):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "the tent lamp radio map", "response": " is late"}])
    model = make_model("llama")
    left_out = rlhf("show", path, "--for", "sft", "--tokenizer", model, "--max-length", 5).stdout
    assert re.search(r"skipped: longer than 5 tokens, \d+ tokens\n", left_out), "nothing of it is trained on"
    data = {"train": str(path), "max_length": 5, "truncation": "left", "test_fraction": 0}
    config = written(tmp_path, sft_config(data, model={"path": str(model)}))
    cut = rlhf("show", "--config", config).stdout
    assert re.search(r"5 tokens, cut from \d+, \d trained on\n  <bos>", cut)
    assert cut.rstrip().endswith("<eos>⟧")
    prompts = rlhf("show", path, "--for", "ppo", "--tokenizer", model, "--max-length", 3).stdout
    assert "skipped: prompts longer than 3 tokens" in prompts


def test_a_pair_shows_both_answers_and_the_prompt_once(tmp_path, make_model):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "the tent", "chosen": " thank you", "rejected": " sorry"}])
    output = rlhf("show", path, "--for", "rm", "--tokenizer", make_model("llama")).stdout
    assert re.search(
        rf"{path}:1  chosen, \d+ tokens\n  <bos>the tent⟦ thank you<eos>⟧\n\n"
        rf"{path}:1  rejected, \d+ tokens\n  \(the same \d+ tokens, then\)\n  ⟦ sorry<eos>⟧\n",
        output,
    )
    scored = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "the tent", "response": " sorry", "score": 0.5}])
    assert "  score 0.5, " in rlhf("show", scored, "--for", "rm", "--tokenizer", make_model("llama")).stdout
    ranked = write_jsonl(tmp_path / "c.jsonl", [{"prompt": "p", "answers": ["one", "two", "three"]}])
    output = rlhf("show", ranked, "--for", "rm").stdout
    assert re.findall(r"rank \d\n  .*", output) == ["rank 1\n  p⟦one⟧", "rank 2\n  ⟦two⟧", "rank 3\n  ⟦three⟧"]


def test_only_the_scored_answer_of_a_conversation_is_marked(tmp_path, make_model):
    tokenizer = AutoTokenizer.from_pretrained(make_model("llama"))
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    pairs = write_jsonl(tmp_path / "a.jsonl", [{"prompt": TALK, "chosen": "thank you", "rejected": "sorry"}])
    output = rlhf("show", pairs, "--for", "rm", "--tokenizer", tmp_path / "model").stdout
    assert "  <user>the tent\n  <assistant>is late<eos>\n  <user>please\n  <assistant>⟦thank you<eos>⟧\n" in output
    output = rlhf("show", pairs, "--for", "sft", "--tokenizer", tmp_path / "model").stdout
    assert "<assistant>⟦is late<eos>\n  ⟧<user>please\n  <assistant>⟦thank you<eos>" in output


def test_a_conversation_that_the_chat_template_refuses_is_bad_in_check_and_show(tmp_path, make_model):
    tokenizer = AutoTokenizer.from_pretrained(make_model("llama"))
    tokenizer.chat_template = (
        CHAT_TEMPLATE + "{% if messages | length > 2 %}{{ raise_exception('too long') }}{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    rows = [{"messages": TALK[:2]}, {"messages": [*TALK, TALK[1]]}, {"messages": TALK[:2]}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    said = f"{path}:2: the tokenizer's chat template fails: too long. Correct the conversation"
    side = (found := checked(path, "--for", "sft", "--tokenizer", tmp_path / "model", code=1))["sides"]["train"]
    assert (side["read"], side["bad"], side["used"]) == (3, 1, 2)
    assert found["bad_rows"]["first"][0].startswith(said)
    shown = rlhf("show", path, "--for", "sft", "--tokenizer", tmp_path / "model").stdout
    assert shown.index(f"{path}:1") < shown.index(said) < shown.index(f"{path}:3")


def test_a_terminal_gets_colours_and_no_marks(tmp_path, make_model, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "the tent", "response": " is late"}])
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    output = rlhf("show", path, "--for", "sft", "--tokenizer", make_model("llama")).stdout
    assert "\x1b[7m<bos>\x1b[0mthe tent\x1b[32m is late\x1b[0m\x1b[7;32m<eos>\x1b[0m" in output
    assert "⟦" not in output
    monkeypatch.setenv("NO_COLOR", "1")
    output = rlhf("show", path, "--for", "sft", "--tokenizer", make_model("llama")).stdout
    assert "⟦ is late" in output


def test_a_row_is_found_by_its_number_in_messages(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = ['{"prompt": "one", "response": "1"}', "", '{"prompt": "two", "response": 5}', '{"prompt": }']
    path.write_text("\n".join([*lines, *lines[:1] * 10]))
    assert "one⟦1⟧" in rlhf("show", path, "--for", "sft", "--row", 1).stdout
    bad = rlhf("show", path, "--for", "sft", "--row", 3, code=2)
    assert "prompt: two\nresponse: 5\n" in bad.stdout
    assert f"{path}:3: `response` is " in bad.stderr
    assert f"{path}:4: not JSON" in rlhf("show", path, "--for", "sft", "--row", 4, code=2).stderr
    assert "there is no row 2" in rlhf("show", path, "--for", "sft", "--row", 2, code=2).stderr
    listed = rlhf("show", path, "--for", "sft").stdout
    assert "one⟦1⟧" in listed


def test_bad_and_skipped_rows_are_shown_in_order(tmp_path):
    rows = [pair("a", 1, 2), {"prompt": "b"}, {"prompt": "c", "chosen": "x", "rejected": "x"}, pair("d", 2, 1), {}]
    output = rlhf("show", write_jsonl(tmp_path / "a.jsonl", rows), "--for", "rm", "-n", 9).stdout
    texts = ("a⟦yes", "a.jsonl:2: found the keys", "its answers are equal", "d⟦yes", "a.jsonl:5: found the keys")
    assert [output.index(text) for text in texts] == sorted(output.index(text) for text in texts)


@pytest.mark.parametrize("name", ["tokenizer", "eos_only_tokenizer", "metaspace_tokenizer"])
def test_the_pieces_add_up_to_the_text(request, name):
    tokenizer = request.getfixturevalue(name)
    row = Record("the tent is", "", (Answer(" late please help"),))
    ((ids, learned),) = RowText(tokenizer).answer_ids([row])
    found = pieces(tokenizer, ids, learned)
    assert "".join(text for text, _, _ in found) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert "".join(text for text, is_learned, special in found if is_learned and not special) == row.response
    assert found[-1] == (tokenizer.eos_token, True, True)


# ---------------------------------------------------------------------------------------------- convert


# Texts with a label each are scores to `rm` too, which pairs them afterwards. Plain text asks nothing, so `ppo` refuses
# it without `prompt_words`.
NOT_CONVERTED = [("labelled", "rm pairs"), ("labelled", "ppo"), ("text", "ppo")]
CONVERTED = [
    (name, purpose)
    for name, format_ in FORMATS.items()
    for purpose in format_.purposes
    if (name, purpose) not in NOT_CONVERTED
]


FOR = {"sft": "sft", "rm pairs": "rm", "rm scores": "rm-scores", "ppo": "ppo"}


def meanings(path, purpose, format="auto"):
    """What a stage reads from each row of a file, and the key that splits it; scored answers one by one."""
    source = DataSource(path=str(path), format=format)
    part = rows_of_source(source, "sft", on_bad_row="error")
    for _, record in records(StageRows(part.rows, purpose), Report()):
        try:
            found = StageRows(part.rows, purpose).view(record, "test")
        except DataError:
            continue
        if isinstance(found, Skipped) or not all(text.strip() for text in found.texts):
            continue
        same = (record.prompt, record.messages, record.key)
        if purpose == "rm scores":
            yield from ((*same, answer, score) for answer, score in zip(found.texts, found.scores, strict=True))
        else:
            yield (*same, found.answers)


@pytest.mark.parametrize(("name", "purpose"), CONVERTED)
def test_converted_rows_are_read_back_unchanged(tmp_path, name, purpose):
    """As JSON Lines, plain or packed, and as Parquet, which holds rows of one shape only."""
    fixture = FIXTURES / f"{name}.jsonl"
    before = list(meanings(fixture, purpose, name))
    assert before
    one_shape = len({bool(row[1]) for row in before}) == 1
    written = ["out.jsonl" if purpose == "sft" else "out.jsonl.gz", *(["out.parquet"] if one_shape else [])]
    for out in sorted({"out.parquet", *written}):
        skip = ("--on-bad-row", "skip", "--quiet", "--out", tmp_path / out)
        fits = out in written
        result = rlhf("convert", fixture, "--for", FOR[purpose], "--format", name, *skip, code=0 if fits else 2)
        assert "Write .jsonl" in result.stderr if not fits else list(meanings(tmp_path / out, purpose)) == before
    assert {path.name for path in tmp_path.iterdir()} == set(written)


def test_the_rows_are_in_our_columns(tmp_path):
    expected = {
        ("alpaca", "ppo"): {"prompt"},
        ("messages", "sft"): {"messages"},
        ("shp", "rm"): {"prompt", "chosen", "rejected"},
        ("shp", "rm-scores"): {"prompt", "response", "score"},
        ("ranking", "rm"): {"prompt", "answers"},
        ("kto", "sft"): {"prompt", "response"},
        ("text", "sft"): {"text"},
        ("labelled", "rm"): {"text", "label"},
    }
    for (name, for_), columns in expected.items():
        out = tmp_path / f"{name}-{for_}.jsonl"
        rlhf("convert", FIXTURES / f"{name}.jsonl", "--for", for_, "--format", name, "--out", out, "--quiet")
        assert {key for line in out.read_text().splitlines() for key in json.loads(line)} == columns


def test_named_columns_are_kept(tmp_path):
    rows = [{"question": f"{n}?", "answer": f"#### {n}", "id": n, "odd": "\ud800"} for n in range(3)]
    path, out = write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "out.jsonl"
    output = rlhf("convert", path, "--for", "ppo", "--out", tmp_path / "few.jsonl").stdout
    assert "columns not copied: answer, id, odd." in output
    output = rlhf("convert", path, "--for", "ppo", "--out", out, "--keep", "answer", "--keep", "odd").stdout
    assert "columns not copied: id." in output
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert written == [{"prompt": f"{n}?", "answer": f"#### {n}", "odd": "\ud800"} for n in range(3)]
    more = ("--out", tmp_path / "b.jsonl")
    assert "lacks this column" in rlhf("convert", path, "--for", "ppo", *more, "--keep", "x", code=2).stderr
    refused = rlhf("convert", path, "--for", "ppo", *more, "--keep", "score", code=2).stderr
    assert "one of the columns that are written" in refused
    steer = FIXTURES / "helpsteer.jsonl"
    keep = ("--keep", "helpfulness", "--keep", "correctness", "--set", "weights.verbosity=1")
    assert "the row would be read as helpsteer" in rlhf("convert", steer, "--for", "rm", *more, *keep, code=2).stderr
    assert not (tmp_path / "b.jsonl").exists()


def test_a_bad_row_stops_convert_or_is_skipped_and_counted(tmp_path):
    rows = [{"prompt": "p", "response": "r"}, {"prompt": "p", "response": 1}, {"prompt": "q", "response": "r"}]
    path, out = write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "out.jsonl"
    assert f"{path}:2: `response`" in rlhf("convert", path, "--for", "sft", "--out", out, code=2).stderr
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.jsonl"]
    output = rlhf("convert", path, "--for", "sft", "--out", out, "--on-bad-row", "skip").stdout
    assert "1 of 3 rows skipped: can't be read" in output
    assert [json.loads(line)["prompt"] for line in out.read_text().splitlines()] == ["p", "q"]


def test_existing_files_are_never_overwritten(tmp_path):
    source = FIXTURES / "text.jsonl"
    out = tmp_path / "out.jsonl"
    out.write_text("mine")
    assert "already exists" in rlhf("convert", source, "--for", "sft", "--out", out, code=2).stderr
    dangling, elsewhere = tmp_path / "link.jsonl", tmp_path / "elsewhere"
    dangling.symlink_to(elsewhere)
    assert "already exists" in rlhf("convert", source, "--for", "sft", "--out", dangling, code=2).stderr
    (tmp_path / ".new.jsonl.writing").symlink_to(elsewhere)
    rlhf("convert", source, "--for", "sft", "--out", tmp_path / "new.jsonl")
    assert not elsewhere.exists()
    assert (tmp_path / "new.jsonl").is_file()
    assert "must end in" in rlhf("convert", source, "--for", "sft", "--out", tmp_path / "a.csv", code=2).stderr
    below_a_file = out / "a.jsonl"
    assert "cannot be written" in rlhf("convert", source, "--for", "sft", "--out", below_a_file, code=2).stderr
    rlhf("convert", source, "--for", "sft", "--out", tmp_path / "new" / "folder" / "a.jsonl")
    assert (tmp_path / "new" / "folder" / "a.jsonl").is_file()


def test_compressed_files_are_reproducible(tmp_path):
    out = tmp_path / "a.jsonl.gz"
    rlhf("convert", FIXTURES / "text.jsonl", "--for", "sft", "--out", out)
    packed = out.read_bytes()
    assert packed[3:8] == bytes(5), "its header has no name and no time"
    assert gzip.decompress(packed).count(b"\n") > 1


def test_a_parquet_keeps_a_column_that_the_first_row_lacks_and_names_one_that_comes_too_late(tmp_path):
    rows = [{"prompt": f"{n}", "response": "é"} for n in range(1001)]
    cut = {"prompt": "cut", "response": "é", "ended": False}
    early, late = (write_jsonl(tmp_path / f"{n}.jsonl", [*rows[:n], cut, *rows[n:]]) for n in (1, 1001))
    out = tmp_path / "out.parquet"
    rlhf("convert", early, "--for", "sft", "--out", out)
    records = read_records(DataSource(path=str(out)), "sft")
    assert [one.answers[0].ended for one in records] == [n != 1 for n in range(1002)]
    line = projects.refused("data", "convert", late, "--for", "sft", "--out", tmp_path / "late.parquet")
    assert f"{late}:1002: has the column ended, which the first 1000 rows lack" in line
    assert not (tmp_path / "late.parquet").exists()


# -------------------------------------------------------------------------------------------- docs/data.md


def documented():
    """For each format in docs/data.md: its purposes, its row and its line of YAML."""
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \| `(\{[^|]*)` \| `(train: [^|]*)` \|$", text, re.MULTILINE)
    return {name: (purposes, json.loads(row), yaml.safe_load(line)) for name, purposes, row, line in rows}


def test_docs_have_every_format_with_a_row_and_a_line_that_fit():
    docs = documented()
    assert set(docs) == set(FORMATS)
    stages = {"sft": "SFT", "rm pairs": "RM pairs", "rm scores": "RM scores", "ppo": "PPO"}
    for name, (purposes, row, line) in docs.items():
        format_ = FORMATS[name]
        assert purposes == ", ".join(stages[purpose] for purpose in format_.purposes), name
        (source,) = Rows.model_validate(line).train
        values = Row({source.keys.get(key, key): value for key, value in row.items()}, f"{name}:1")
        for purpose in set(stages) - set(format_.purposes):
            with pytest.raises(DataError, match=rf"^{name}:1: .*{purpose} .*needs rows with"):
                recognise(values, source, purpose)
        for purpose in format_.purposes:
            if source.format != "auto" or name not in ("labelled", "scored") or purpose.startswith("rm"):
                assert recognise(values, source, purpose).name == name
            record = read_record(values, format_, source)
            if (name, purpose) not in NOT_CONVERTED:
                assert isinstance(StageRows(Rows(train=[source]), purpose).view(record, "test"), Record)
