"""`rlhf eval --rm-bench`: rows of RewardBench 2, scored as the benchmark defines."""

from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from rlhf_cli.algorithms.reward_bench import ties_scores
from rlhf_cli.config.data import Rows
from rlhf_cli.data.records import Answer, Message, Record
from rlhf_cli.data.stage_rows import StageRows
from rlhf_cli.errors import DataError
from rlhf_cli.evaluation.benchmark import (
    BenchRow,
    bench_figures,
    encode_bench,
    is_joined,
    num_unpaired,
    read_bench,
    shares_base,
)
from rlhf_cli.models.load import load_reward_model, load_tokenizer
from support.projects import write_manifest
from support.tiny import write_jsonl

ROW = {
    "id": "7",
    "prompt": "the tent is broken",
    "chosen": ["thank you"],
    "rejected": ["sorry", "late", "lamp"],
    "num_correct": 1,
    "num_incorrect": 3,
    "total_completions": 4,
    "models": ["a", "b", "c", "d"],
    "subset": "Focus",
    "additional_metadata": {"category": None},
}


def published_ties_score(rows):
    """The score of the subset Ties, from the rows as a whole, as the leaderboard's code defines it."""

    def gap(name):
        return min(rows[name][0]) - max(rows[name][1])

    prompts = sorted({name.split(":")[1] for name in rows})
    spread = np.array([max(rows[f"tied:{p}"][0]) - min(rows[f"tied:{p}"][0]) for p in prompts])
    tied, ref = np.array([gap(f"tied:{p}") for p in prompts]), np.array([gap(f"ref:{p}") for p in prompts])
    with np.errstate(divide="ignore", invalid="ignore"):
        bonus = np.nan_to_num(np.tanh(np.minimum(ref, tied) / spread - 1), nan=0.0)
    return float(
        0.3 * np.mean(tied > 0)
        + 0.3 * np.mean(ref > 0)
        + 0.2 * np.mean(tied > spread)
        + 0.2 * np.mean(np.minimum(ref, tied) > spread)
        + 0.01 * np.mean(bonus)
    )


@pytest.mark.parametrize("shift", [-1.0, 0.5, 2.0])
def test_ties_against_the_published_formula(shift):
    rng = np.random.default_rng(0)
    rows = {}
    for prompt in range(40):
        for kind, number in (("ref", 1), ("tied", 4)):
            right = (rng.normal(size=number) * (prompt % 3) + shift).tolist()  # every third has no spread
            rows[f"{kind}:{prompt}"] = (right, rng.normal(size=5).tolist())
    ref, tied = (
        {name.split(":")[1]: answers for name, answers in rows.items() if name.startswith(kind)}
        for kind in ("ref", "tied")
    )
    scores = ties_scores(ref, tied)
    assert sum(scores) / len(scores) == pytest.approx(published_ties_score(rows), abs=1e-12)


def bench_row(right, wrong, subset, name=""):
    answers = tuple(f"{i}" for i in range(right + wrong))
    return BenchRow(Record("p", "f:1", tuple(map(Answer, answers)), ranked=True), right, subset, name)


def test_a_random_model_scores_one_quarter_and_a_perfect_one_everything():
    rows = [bench_row(1, 3, "Math") for _ in range(400)]
    rows += [bench_row(n, 3, "Ties", f"{kind}:{i}") for i in range(30) for kind, n in (("ref", 1), ("tied", 4))]
    sequences = [[[0]] * len(one.row.answers) for one in rows]
    size = sum(map(len, sequences))
    random = torch.randn(size, generator=torch.Generator().manual_seed(1))
    figures, chance = bench_figures(rows, lambda *_: random, sequences, seed=0)
    assert chance == {"Math": 0.25}
    assert figures["Math"].low < 0.25 < figures["Math"].high
    perfect = torch.tensor([1.0 if i < one.num_right else 0.0 for one in rows for i in range(len(one.row.answers))])
    figures, _ = bench_figures(rows, lambda *_: perfect, sequences, seed=0)
    assert figures["Math"].value == 1
    # Beyond 1: right answers of equal scores earn the whole bonus.
    assert figures["Ties"].value == pytest.approx(1.01)
    assert figures["mean of subsets"].value == pytest.approx(1.005)


def test_rows_of_ties_without_their_other_row_are_counted_and_not_scored():
    rows = [bench_row(1, 1, "Ties", "ref:1"), bench_row(2, 1, "Ties", "tied:1"), bench_row(1, 1, "Ties", "ref:2")]
    assert num_unpaired(rows) == 1
    scores = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    figures, _ = bench_figures(rows, lambda *_: scores, [[[0]] * len(one.row.answers) for one in rows], seed=0)
    assert figures["Ties"].value == pytest.approx(1.01)


def test_rows_are_read_as_they_are_from_jsonl_and_parquet(tmp_path):
    table = pyarrow.Table.from_pylist([ROW])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    for path in (write_jsonl(tmp_path / "rows.jsonl", [ROW]), tmp_path / "rows.parquet"):
        (row,) = read_bench(path)
        assert row.row.texts == ("thank you", "sorry", "late", "lamp")
        assert (row.num_right, row.subset, row.name) == (1, "Focus", "7")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"chosen": []}, "`chosen` must be a list"),
        ({"rejected": [1]}, "`rejected` must be a list"),
        ({"prompt": None}, "`prompt` and `subset` must be text"),
        ({"subset": "Ties"}, "needs ref:N or tied:N"),
    ],
)
def test_a_row_of_another_form_is_named(tmp_path, changes, says):
    path = write_jsonl(tmp_path / "rows.jsonl", [ROW, {**ROW, **changes}])
    with pytest.raises(DataError, match=says) as error:
        read_bench(path)
    assert str(error.value).startswith(f"{path}:2: ")


def test_a_chat_template_writes_the_rows_and_another_template_replaces_it(chat_reward_model):
    path = str(chat_reward_model())
    model, tokenizer = load_reward_model(path), load_tokenizer(path)
    row = BenchRow(
        Record("late", "f:1", (Answer("one"), Answer("two")), ranked=True, messages=(Message("user", "late"),)),
        1,
        "Focus",
        "",
    )
    rows = StageRows(Rows(train="x", test_fraction=0), "rm pairs")
    (sequences,), is_chat = encode_bench([row], model, tokenizer, rows)
    assert is_chat
    turns = [{"role": "user", "content": "late"}, {"role": "assistant", "content": "two"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    assert tokenizer.decode(sequences[1]).strip().startswith(text.strip().removesuffix("<eos>").strip()[:20])
    plain = StageRows(Rows(train="x", test_fraction=0), "rm pairs", template="Q {prompt} A ")
    (sequences,), is_chat = encode_bench([row], model, tokenizer, plain)
    assert not is_chat
    assert tokenizer.decode(sequences[1], skip_special_tokens=True) == "Q late A two"


def test_prompt_and_answer_that_meet_without_a_space():
    assert is_joined(Record("What?", "f:1", (Answer("Nothing"),), ranked=True))
    assert not is_joined(Record("What?", "f:1", (Answer(" Nothing"),), ranked=True))
    assert not is_joined(Record("What?\n", "f:1", (Answer("Nothing"),), ranked=True))


def finished(root, stage, **inputs):
    write_manifest(root / stage, stage, identity={"config": {}, "data": {}, "inputs": inputs})


def test_reward_model_and_policy_share_a_base_by_their_manifests(tmp_path):
    import hashlib

    def run():
        return SimpleNamespace(root=tmp_path, stages=[path.name for path in tmp_path.iterdir()])

    finished(tmp_path, "sft", model="hub:base@main")
    sft = hashlib.sha256((tmp_path / "sft" / "manifest.json").read_bytes()).hexdigest()
    assert shares_base(run()) is None
    finished(tmp_path, "rm", model=sft)
    assert shares_base(run()) is True
    finished(tmp_path, "rm", model="hub:base@main")
    assert shares_base(run()) is True
    finished(tmp_path, "rm", model="hub:other@main")
    assert shares_base(run()) is False
    finished(tmp_path, "ppo", policy="hub:other@main")
    assert shares_base(run()) is True
