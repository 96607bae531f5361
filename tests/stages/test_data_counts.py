"""`rlhf data check` and the stages count the same rows as kept and as skipped; warnings about rows and their advice."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.config.by_stage import CONFIGS
from rlhf_cli.config.loader import load_config
from rlhf_cli.data.row_counts import DUPLICATE, Report
from rlhf_cli.errors import DataError
from rlhf_cli.training.supervised import warnings
from stages import ppo, rm, sft
from support.tiny import encoder, write_jsonl

PROGRAMS: dict[str, Any] = {"sft": sft, "rm": rm, "ppo": ppo}
SKIPPED = re.compile(r"data\.(train|test): (\d+) of (\d+) rows skipped: (.*)")

# ------------------------------------------------------------------------------------------- awkward rows


def awkward(stage: str) -> list[dict[str, Any]]:
    """Good rows, long ones, short answers, duplicates, rows without use, and bad ones."""
    long = " the tent lamp" * 30
    if stage == "sft":
        good = [{"prompt": f"question {n}", "response": " it is here today"} for n in range(30)]
        return [
            *good,
            *good[:4],
            {"prompt": "long answer", "response": long},
            {"prompt": f"long prompt {long}", "response": " it is late today"},
            {"prompt": "short", "response": " a"},
            {"prompt": "bad", "response": 7},
            {"prompt": "missing"},
        ]
    if stage == "ppo":
        good = [{"prompt": f"question {n}"} for n in range(30)]
        return [
            *good,
            *good[:4],
            {"prompt": f"long {long}"},
            {"prompt": " "},
            {"prompt": 7},
            {"prompt": "\n\nHuman: \n\nAssistant:"},
        ]
    if stage == "rm mse":
        good = [{"prompt": f"question {n}", "answers": [" yes", f" no {long}"], "scores": [n, 1]} for n in range(20)]
        none = {"prompt": "none", "answers": [" a", " b"], "scores": [None, None]}
        bad = {"prompt": "bad", "answers": [" a", " b"], "scores": ["x", 1]}
        return [*good, *good[:3], none, bad]
    if stage == "rm labels":
        texts = [{"text": f"it is {'good' if n % 3 else 'bad'} {n}", "label": n % 3} for n in range(30)]
        return [*texts, *texts[:3], {"text": f"long {long}", "label": 0}, {"text": "bad", "label": "none"}]
    good = [{"prompt": f"question {n}", "chosen": " it is here", "rejected": " it is late"} for n in range(30)]
    same = " yes" * 90
    return [
        *good,
        *good[:4],
        {"prompt": "equal", "chosen": " same", "rejected": " same"},
        {"prompt": "long", "chosen": long, "rejected": " it is late today"},
        {"prompt": "cut", "chosen": f"{same} good", "rejected": f"{same} bad"},
        {"prompt": "short", "chosen": " a", "rejected": " it is late today"},
        {"prompt": "bad", "chosen": 7, "rejected": " b"},
    ]


@pytest.mark.parametrize(
    ("architecture", "name", "options"),
    [
        ("llama", "sft", {"deduplicate": True}),
        ("llama", "sft", {"min_response_length": 4, "truncation": "left"}),
        ("llama", "rm", {"min_response_length": 3, "truncation": "left"}),
        ("llama", "rm mse", {"deduplicate": True}),
        ("llama", "ppo", {}),
        ("llama", "ppo", {"truncation": "left"}),
        ("encoder", "rm", {"truncation": "right"}),
        ("encoder", "rm labels", {}),
    ],
)
def test_data_check_and_the_stage_count_the_same_rows(
    architecture, name, options, make_model, word_piece, write_config, tmp_path, capsys
):
    stage = name.split()[0]
    path = str(make_model("llama"))
    if architecture == "encoder":
        path = str(tmp_path / "encoder")
        encoder(Path(path), word_piece)
    train = str(write_jsonl(tmp_path / "rows.jsonl", awkward(name)))
    rows = {"train": train, "test": None, "test_fraction": 0.2, "on_bad_row": "skip"}
    longest = {"max_prompt_length" if stage == "ppo" else "max_length": 40}
    changes: dict[str, Any] = {"data": rows | longest | options}
    if stage == "ppo":
        changes |= {"policy": {"path": path}, "rewards": [{"type": "function", "function": str(reward(tmp_path))}]}
        changes |= {"ppo": {"num_iterations": 1, "rollout_batch_size": 4}}
    else:
        changes |= {"model": {"path": path}, "training": {"num_steps": 1}}
    if stage == "rm":
        # Samples of the SFT model are no part of this test.
        changes["evaluation"] = {"num_normalization_samples": 0}
    if name == "rm mse":
        changes["loss"] = "mse"
    config = write_config(stage, tmp_path / "run", **changes)
    PROGRAMS[stage].run(load_config(config, CONFIGS[stage]))
    output = capsys.readouterr().out
    of_stage: dict[str, Counter[str]] = {"train": Counter(), "test": Counter()}
    totals: dict[str, int] = {}
    for side, number, total, reason in SKIPPED.findall(output):
        of_stage[side][reason], totals[side] = int(number), int(total)
    result = CliRunner().invoke(app, ["data", "check", "--config", str(config), "--json"])
    sides = json.loads(result.stdout)["sides"]
    for side, skipped in of_stage.items():
        of_check = Counter(sides[side]["skipped"])
        if sides[side]["bad"]:
            of_check["can't be read"] += sides[side]["bad"]
        assert of_check == skipped, output
        if side in totals:
            assert sides[side]["used"] == totals[side] - skipped.total()
    (used,) = re.findall(r"(\d+) (?:training rows|of \d+ tokens on average)", output)
    assert int(used) == sides["train"]["used"] or name == "rm labels"
    assert sum(counts.total() for counts in of_stage.values()) >= 2
    assert (DUPLICATE in of_stage["train"] + of_stage["test"]) is ("deduplicate" in options)


def reward(folder: Path) -> str:
    path = folder / "reward.py"
    path.write_text("def score(prompts, responses, rows):\n    return [float(len(r)) for r in responses]\n")
    return f"{path}:score"


# --------------------------------------------------------------------------------------- the length to keep


def test_a_tenth_of_skipped_rows_gives_no_warning() -> None:
    """More than a tenth does. Duplicates that you asked to skip do not count."""
    report = Report()
    report.kept["train"] = 90
    for _ in range(10):
        report.skip("train", "longer than 5 tokens", needs=7)
    assert report.warnings("data", "data.max_length") == []
    report.skip("train", DUPLICATE)
    assert report.warnings("data", "data.max_length") == []
    for _ in range(2):
        report.skip("train", "no answer to learn from")
    assert report.warnings("data", "data.max_length") == [
        "data.train: 12 of 103 rows (12 %) are skipped, 90 are used. data.max_length: 7 would keep 95 %"
    ]


def test_if_all_rows_are_too_long_the_error_names_the_length_to_set(make_model, run_stage, tmp_path):
    rows = [{"prompt": "lamp " * 50, "response": f" answer {n}"} for n in range(20)]
    data = {"train": str(write_jsonl(tmp_path / "a.jsonl", rows)), "test": None, "test_fraction": 0, "max_length": 9}
    model = {"path": str(make_model("llama"))}
    message = (
        r"data.train: none of 20 rows can be used: 20 longer than 9 tokens. data.max_length: (\d+) would keep 95 %"
    )
    with pytest.raises(DataError, match=message) as error:
        run_stage("sft", tmp_path, model=model, data=data)
    length = int(re.search(r"max_length: (\d+)", str(error.value)).group(1))
    run_stage("sft", tmp_path, model=model, data=data | {"max_length": length}, evaluation={"num_samples": 0})


def test_data_check_takes_the_tokenizer_of_a_stage_directory_and_measures_as_its_model_reads(word_piece, tmp_path):
    """`--tokenizer RUN/rm` takes RUN/rm/model. That is an encoder, so texts are measured whole, with special tokens."""
    folder = tmp_path / "rm"
    tokenizer = copy.deepcopy(word_piece)
    tokenizer.eos_token = "[SEP]"
    encoder(folder / "model", tokenizer)
    (folder / "manifest.json").write_text("{}")
    rows = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "the tent", "chosen": " is late", "rejected": " lamp"}])
    result = CliRunner().invoke(app, ["data", "check", str(rows), "--for", "rm", "--tokenizer", str(folder), "--json"])
    side = json.loads(result.stdout)["sides"]["train"]
    assert side["lengths"]["whole"]["max"] == len(tokenizer("the tent is late")["input_ids"])
    # A causal model would count [CLS] as a token of the prompt.
    assert side["lengths"]["prompt"]["max"] == len(tokenizer("the tent", add_special_tokens=False)["input_ids"])


# --------------------------------------------------------------------------------------- few rows, many times


@pytest.mark.parametrize(
    ("training", "rows", "warned"),
    [
        ({"num_epochs": 10}, 64, None),
        ({"num_epochs": 10.5}, 64, "lower training.num_epochs"),
        ({"num_steps": 40}, 64, None),
        ({"num_steps": 41}, 64, "lower training.num_steps"),
        ({"num_epochs": 1}, 1, "lower training.num_epochs or training.minibatch_size"),
    ],
)
def test_more_than_ten_epochs_give_a_warning(training, rows, warned, write_config, tmp_path):
    changes = {"model": {"path": "org/model"}, "training": {"num_steps": None, "minibatch_size": 16, **training}}
    config = load_config(write_config("sft", tmp_path, **changes), CONFIGS["sft"])
    messages = warnings(config, config.training.total_steps(rows), rows)
    assert (not messages) if warned is None else messages[0].endswith(warned)


# --------------------------------------------------------------------------------------- figures with counts


def test_every_figure_of_rm_is_printed_with_its_number_of_rows(make_model, write_config, tmp_path, capsys):
    pair = {"prompt": "p", "chosen": " thank", "rejected": " sorry"}
    rows = [pair | {"probe": "tone" if n % 3 else "length"} for n in range(10)]
    probes = write_jsonl(tmp_path / "probes.jsonl", rows)
    keys = {"model": {"path": str(make_model("llama"))}, "data": {"probes": str(probes)}}
    config = write_config("rm", tmp_path, **keys, evaluation={"num_normalization_samples": 0})
    rm.run(load_config(config, CONFIGS["rm"]))
    output = capsys.readouterr().out
    cells = [line.split() for line in output.splitlines() if line.strip().startswith(("eval/", "probe/"))]
    counts = {row[0]: row[-1] for row in cells}
    assert counts["eval/accuracy"] == counts["eval/accuracy_low95"] == "7"
    assert (counts["probe/tone"], counts["probe/length"]) == ("6", "4")
