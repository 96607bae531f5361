"""The shipped data: files of their generators, a split without leaks, a judge that agrees with hand counts, configs.

The stories demo needs a public model that is not part of the project: `models/babyllama` beside the folder of data that
RLHF_REAL_DATA names, by default `../shared/data`.
"""

from __future__ import annotations

import gzip
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_cli.config.by_stage import CONFIGS
from rlhf_cli.config.loader import load_config
from support.forked import Forked
from support.paths import ROOT
from support.source import module_at

FOLDER = ROOT / "data" / "support"
TRAINING = ["sft_train", "pref_train", "scored_train", "prompts_train"]
TESTS = ["sft_test", "pref_test", "scored_test", "prompts_test", "probes_test"]
PROMPT = "Human: Hello, Felix here. I want to return the tent. Order T5.\n\nAssistant:"


gold = module_at(FOLDER / "gold.py")
"""The judge, loaded by path as the evaluation loads it."""


def name_of(file):
    """The file name. Training files are gzipped."""
    return f"{file}.jsonl.gz" if file in TRAINING else f"{file}.jsonl"


def text_of(path):
    """The text of a file, decompressed if it is gzipped."""
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def read(file):
    """The rows of one shipped file."""
    return [json.loads(line) for line in text_of(FOLDER / name_of(file)).splitlines()]


def mean(values):
    return sum(values) / len(values)


@pytest.fixture(scope="module")
def files():
    return {file: read(file) for file in TRAINING + TESTS}


@pytest.mark.slow
def test_regenerating_gives_the_shipped_text(tmp_path):
    """Plain files have the same bytes. Gzipped ones have the same text, since builds of zlib compress differently.

    tests/commands/test_init.py, which is not slow, compares six of the files.
    """
    script = str(FOLDER / "generate.py")
    subprocess.run([sys.executable, "-B", script, "--out", str(tmp_path)], check=True, capture_output=True)
    again = {path.name: path for path in tmp_path.iterdir()}
    shipped = {path.name: path for path in FOLDER.glob("*.jsonl*")}
    assert shipped.keys() == again.keys() == {name_of(file) for file in TRAINING + TESTS}
    assert [name for name in shipped if text_of(shipped[name]) != text_of(again[name])] == []


def test_a_longer_training_file_begins_with_the_shipped_one(files, monkeypatch):
    """--scale depends on this. Another seed gives other rows."""
    monkeypatch.syspath_prepend(str(FOLDER))
    generator = importlib.import_module("generate")
    rows = files["sft_train"]
    longer = list(generator.draw_rows(7, "sft_train", 6100, generator.sft_row))
    assert longer[:6000] == rows
    assert len({row["prompt"] for row in longer}) == 6100
    assert next(generator.draw_rows(11, "sft_train", 1, generator.sft_row)) != rows[0]


def test_no_held_out_pair_or_prompt_is_in_the_training_files(files):
    def pairs(names):
        prompts = {row["prompt"] for name in names for row in files[name]}
        return {(slots["product"], slots["issue"]) for slots in map(gold.read_prompt, prompts)}

    trained, tested = pairs(TRAINING), pairs(TESTS)
    assert trained & tested == set()
    num_pairs = len(gold.PRODUCTS) * len(gold.PHRASINGS)
    assert num_pairs == 328
    assert len(tested) == num_pairs // 8
    assert len(trained) == num_pairs - num_pairs // 8
    assert {issue for _, issue in tested} == set(gold.PHRASINGS)

    seen = {row["prompt"] for name in TRAINING for row in files[name]}
    assert [row["prompt"] for name in TESTS for row in files[name] if row["prompt"] in seen] == []


SORRY, CLOSE = " I am so sorry, Felix.", " Have a lovely day."
PICK_UP = " We will pick up the tent from order T5 on Thursday and refund you."
COLLECT = " A driver collects the tent from order T5 and we refund you."
REPLACE = " We will replace the tent from order T5 with a new one."
VAGUE, RUDE = " We will see what can be done.", " That sounds like your own problem."
# Replies, their gold computed by hand, and the marks that must not be 0.
# + polite 1, right remedy 1, right slots 1.5, close 0.5, short and ended 1.
HAND_WORKED = [
    (
        f"{SORRY}{PICK_UP} Please write to us any time.",
        1 + 1 + 1.5 + 0.5 + 1,
        "polite right exact close concise wellformed",
    ),
    (COLLECT, 1 + 1.5 + 1, "right exact concise wellformed"),
    # The right remedy for the wrong order: the remedy counts, the slots do not, and one sentence has a wrong slot.
    (PICK_UP.replace("T5", "T6"), 1 + 1 - 0.5, "right concise wellformed"),
    # A wrong name: no polite opening, and one sentence has a wrong slot.
    (SORRY + CLOSE, 1 + 0.5 + 1, "polite close concise wellformed"),
    (SORRY.replace("Felix", "Nora") + CLOSE, 0.5 + 1 - 0.5, "close concise wellformed"),
    # A remedy for another issue. Then a right and a wrong one: penalties for the wrong one and for a second remedy.
    (SORRY + REPLACE, 1 + 1 - 0.5, "polite concise wellformed"),
    (PICK_UP + REPLACE, 1 + 1.5 + 1 - 0.5 - 0.5, "right exact extra concise wellformed"),
    # Two different openings. Then the same close twice, which is both a repetition and a second close.
    (f"{SORRY} Happy to help you, Felix.", 1 + 1 - 0.5, "polite extra concise wellformed"),
    (CLOSE + CLOSE, 0.5 + 1 - 0.5 - 0.5, "close extra concise wellformed"),
    # A vague answer is in the grammar and earns 0. Filler costs 0.5, and each rude sentence costs 1.
    (VAGUE, 1, "concise wellformed"),
    (f" It is a busy time of year and the phones ring all day long.{VAGUE}", 1 - 0.5, "filler concise wellformed"),
    (f"{COLLECT}{RUDE} This is really not our fault.", 1 + 1.5 + 1 - 1 - 1, "right exact rude concise wellformed"),
    # A negative sum becomes 0.
    (RUDE + REPLACE, 0, "rude concise wellformed"),
    # A sentence that is not in the grammar, because the reply was cut.
    (f"{SORRY} We will pick", 1 + 1 - 0.5, "polite concise"),
    ("", 0, ""),
]


@pytest.mark.parametrize(("reply", "expected", "marks"), HAND_WORKED)
def test_gold_of_hand_worked_replies(reply, expected, marks):
    (judged,) = gold.judge([PROMPT], [reply], [{}])
    assert next(iter(judged)) == "gold"
    assert judged.pop("gold") == expected
    assert judged.pop("unique") == 1
    assert {mark for mark, value in judged.items() if value} == set(marks.split())


def test_a_cut_or_rambling_reply_is_not_concise():
    short = " A driver collects the tent from order T5 and we refund you."
    long = short + " Please wait" * 16 + "."
    cut, rambling = gold.judge([PROMPT] * 2, [short, long], [{"ended": False}, {"ended": True}])
    assert (cut["gold"], cut["concise"], cut["wellformed"]) == (1 + 1.5, 0, 0)
    # Its second sentence is also outside the grammar.
    assert (rambling["gold"], rambling["concise"], rambling["wellformed"]) == (1 + 1.5 - 0.5, 0, 0)


def test_unique_counts_shapes_not_texts():
    other = "Human: My name is Nora. Please cancel the desk. Order K2.\n\nAssistant:"
    replies = [" I am so sorry, Felix.", " I am so sorry, Nora.", " Happy to help you, Nora."]
    judged = gold.judge([PROMPT, other, other], replies, [{}, {}, {}])
    assert [marks["unique"] for marks in judged] == [1, 0, 1]


def test_score_returns_gold_only():
    assert gold.score(
        [PROMPT] * 2, [" We will see what can be done.", " I read your note."], [{}, {"ended": False}]
    ) == [1, 0]


def test_lists_of_different_length_and_foreign_prompts_are_refused():
    with pytest.raises(ValueError):
        gold.judge([PROMPT], [], [{}])
    with pytest.raises(ValueError, match="not a prompt of the support task"):
        gold.judge(["Human: What is the capital of Peru?\n\nAssistant:"], [" Lima."], [{}])


@pytest.mark.parametrize("file", ["pref_train", "pref_test"])
def test_preferences_mostly_agree_with_gold(files, file):
    rows = files[file][:2000]
    prompts = [row["prompt"] for row in rows]
    chosen = gold.score(prompts, [row["chosen"] for row in rows], rows)
    rejected = gold.score(prompts, [row["rejected"] for row in rows], rows)
    gaps = [one - two for one, two in zip(chosen, rejected, strict=True)]
    assert min(abs(gap) for gap in gaps) >= 0.5
    assert 0.955 <= mean([gap > 0 for gap in gaps]) <= 0.98
    if file == "pref_test":
        assert [row["gold_chosen"] for row in rows] == chosen
        assert [row["gold_rejected"] for row in rows] == rejected
    longer = mean([len(row["chosen"]) > len(row["rejected"]) for row in files[file]])
    assert 0.4 < longer < 0.65, "length must not reveal which reply is better"


def test_scores_are_noisy_views_of_gold(files):
    rows = files["scored_test"]
    assert [row["gold"] for row in rows] == gold.score(
        [row["prompt"] for row in rows], [row["response"] for row in rows], rows
    )
    assert 0.3 < mean([abs(row["score"] - row["gold"]) for row in rows]) < 0.6


# --------------------------------------------------------------------- the other data, and the configs of all


DATA = Path(os.environ.get("RLHF_REAL_DATA", str(ROOT.parent / "shared" / "data")))
BABYLLAMA = DATA.parent / "models" / "babyllama"


def test_stages_of_a_folder_share_their_prompts():
    """PPO must format prompts like SFT. Otherwise the policy starts from text that it has never seen."""
    folders = sorted({file.parent for file in (ROOT / "configs").rglob("*.yaml")})
    assert len(folders) >= 7
    for folder in folders:
        sft, ppo = folder / "sft.yaml", folder / "ppo.yaml"
        if not sft.is_file():
            continue
        a, b = (load_config(file, CONFIGS[file.stem]).model_dump()["data"] for file in (sft, ppo))
        for key in ("prompt_words", "prompt_template"):
            assert a[key] == b[key], f"{folder.name}: {key}"


def test_story_prompts_are_those_of_the_script(tmp_path):
    folder = ROOT / "data" / "stories"
    subprocess.run([sys.executable, "-B", folder / "generate.py", "--out", tmp_path / "new"], check=True)
    shipped = (folder / "prompts.jsonl").read_bytes()
    assert (tmp_path / "new" / "prompts.jsonl").read_bytes() == shipped
    texts = [json.loads(line)["prompt"] for line in shipped.splitlines()]
    assert len(set(texts)) == len(texts) == 400
    assert max(map(len, texts)) <= 64


# ------------------------------------------------------------------------------------- the real data


@pytest.mark.skipif(not BABYLLAMA.exists(), reason=f"{BABYLLAMA} does not exist; set RLHF_REAL_DATA to the data folder")
def test_stories_from_a_pretrained_model(tmp_path):
    """In this tokenizer pad is eos, and a story ends with <s>. The saved model must have both as EOS."""
    root = tmp_path / "run"
    settings = [
        *(f"artifacts={root}", f"policy.path={BABYLLAMA}", "ppo.num_iterations=2", "ppo.rollout_batch_size=8"),
        *("ppo.minibatch_size=4", "ppo.microbatch_size=null", "rollout.max_new_tokens=60", "evaluation.num_prompts=8"),
    ]
    arguments = ["pipeline", "configs/stories", *(word for setting in settings for word in ("--set", setting))]
    code = "from rlhf_cli.cli import main\nmain()"
    exit_code, output = Forked(code, *arguments, folder=ROOT, log=tmp_path / "log").wait()
    assert exit_code == 0, output
    saved = json.loads((root / "ppo" / "model" / "generation_config.json").read_text(encoding="utf-8"))
    assert saved["eos_token_id"] == [1, 2]
    for example in json.loads((root / "ppo" / "evaluation.json").read_text(encoding="utf-8"))["examples"]:
        letters = sum(c.isalpha() or c in " .,!?'\"" for c in example["sft"]["reply"])
        assert letters > 0.9 * len(example["sft"]["reply"]), "a story, not noise"
        assert -3.0 <= example["sft"]["score"] <= 4.0


def test_the_download_script_writes_every_row_of_every_split(tmp_path):
    """A stand-in replaces `datasets`. The rows keep their order."""
    (tmp_path / "datasets.py").write_text(
        "def load_dataset(name):\n"
        "    assert name == 'cornell-movie-review-data/rotten_tomatoes'\n"
        "    return {'train': [{'text': 'good', 'label': 1, 'more': 0}], 'test': [{'text': 'bad', 'label': 0}]}\n"
    )
    out = tmp_path / "out.jsonl.gz"
    command = [sys.executable, "-B", ROOT / "data/sentiment/download.py", "--out", out]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert "2 rows" in subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
    rows = [json.loads(line) for line in gzip.decompress(out.read_bytes()).splitlines()]
    assert rows == [{"text": "good", "label": 1}, {"text": "bad", "label": 0}]
