"""What `rlhf data check` says about texts: blank answers, missing spaces, special tokens, lengths that would fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.config.data import Rows
from rlhf_cli.data.encoders import DemonstrationEncoder
from rlhf_cli.data.tokens import tokenise
from rlhf_cli.data.views import StageRows
from support.tiny import encoder, read_jsonl, write_jsonl


def rlhf(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["data", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def checked(*arguments: object, code: int = 0) -> dict[str, Any]:
    """What `rlhf data check --json` says."""
    found: dict[str, Any] = json.loads(rlhf("check", *arguments, "--json", code=code).stdout)
    return found


def write_config(path: Path, model: Path, data: dict[str, Any]) -> Path:
    """The config of a stage with this data."""
    training = {"training": {"num_steps": 1, "minibatch_size": 1}, "optimizer": {"learning_rate": 1e-3}}
    config = {"artifacts": str(path.parent), "model": {"path": str(model)}, "data": data, **training}
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


# ----------------------------------------------------------------------------------------- blank answers

HH = [
    {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello", "rejected": "\n\nHuman: Hi\n\nAssistant: No"},
    {"chosen": "\n\nHuman: Hi\n\nAssistant:", "rejected": "\n\nHuman: Hi\n\nAssistant: No"},
    {"chosen": "\n\nHuman: Ho\n\nAssistant: \n", "rejected": "\n\nHuman: Ho\n\nAssistant: No"},
    {"chosen": "\n\nHuman: Ho\n\nAssistant: Yes", "rejected": "\n\nHuman: Ho\n\nAssistant: "},
]


@pytest.mark.parametrize(("for_", "used"), [("sft", 2), ("rm", 1)])
def test_a_blank_answer_is_skipped_and_counted_everywhere(tmp_path: Path, tokenizer: Any, for_: str, used: int) -> None:
    """The stage, `data check` and `data convert` use the same rows. SFT reads the chosen answer only."""
    path = write_jsonl(tmp_path / "hh.jsonl", HH)
    side = checked(path, "--for", for_)["sides"]["train"]
    assert (side["used"], side["skipped"]) == (used, {"an answer is blank": 4 - used})
    out = tmp_path / "out.jsonl"
    output = rlhf("convert", path, "--for", for_, "--out", out).stdout
    assert f"{4 - used} of 4 rows skipped: an answer is blank" in output
    assert len(read_jsonl(out)) == used
    assert checked(out, "--for", for_)["sides"]["train"]["used"] == used
    if for_ == "sft":
        data = Rows.model_validate({"train": str(path), "test_fraction": 0})
        rows = tokenise(DemonstrationEncoder(tokenizer, StageRows(data, "sft")))
        assert len(rows.train) == used
        assert "data.train: 2 of 4 rows skipped: an answer is blank" in rows.lines


# ------------------------------------------------------------------------------------------ missing spaces


def test_a_missing_space_between_prompt_and_answer_is_named_with_its_remedy(tmp_path: Path) -> None:
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
    config = write_config(tmp_path / "sft.yaml", tmp_path, data)
    assert checked("--config", config, "--for", "sft")["sides"]["train"]["glued"]["rows"] == 0


def test_a_few_missing_spaces_are_counted_without_a_warning(tmp_path: Path) -> None:
    rows = [{"prompt": f"Q{n}:", "chosen": " yes", "rejected": " no"} for n in range(30)]
    rows[4]["prompt"], rows[4]["rejected"] = "Q4.", "no"
    found = checked(write_jsonl(tmp_path / "rows.jsonl", rows), "--for", "rm")
    assert found["sides"]["train"]["glued"]["rows"] == 1
    assert found["warnings"] == []


# ------------------------------------------------------------------------------------------ special tokens


def test_special_tokens_in_texts_are_counted(tmp_path: Path, make_model: Any) -> None:
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


# ------------------------------------------------------------------------------------------------ lengths


@pytest.mark.parametrize("for_", ["sft", "rm", "rm-scores", "ppo"])
def test_a_file_of_long_rows_names_the_length_that_would_keep_95_percent(
    tmp_path: Path, make_model: Any, for_: str
) -> None:
    rows = [
        {"prompt": "please " * 40, "chosen": " we will " + "x" * n, "rejected": " no"}
        if for_ == "rm"
        else {"prompt": "please " * 40, "response": " we will " + "x" * n, "score": n}
        for n in range(20)
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    found = checked(path, "--for", for_, "--tokenizer", make_model("llama"), "--max-length", 30)
    (warning,) = found["warnings"]
    advised = int(warning.partition("--max-length: ")[2].split()[0])
    found = checked(path, "--for", for_, "--tokenizer", make_model("llama"), "--max-length", advised)
    assert found["sides"]["train"]["used"] >= 19


@pytest.mark.parametrize("reads_last_token", [True, False])
def test_min_response_length_counts_for_every_kind_of_reward_model(
    tmp_path: Path, make_model: Any, word_piece: Any, reads_last_token: bool
) -> None:
    rows = [
        {"prompt": "the tent", "chosen": " is late please help", "rejected": " is broken please help"},
        {"prompt": "the tent", "chosen": " a", "rejected": " b c d e f g h"},
    ]
    model = make_model("llama") if reads_last_token else tmp_path / "bert"
    if not reads_last_token:
        encoder(model, word_piece)
    data = {"train": str(write_jsonl(tmp_path / "rows.jsonl", rows)), "test_fraction": 0, "min_response_length": 4}
    config = write_config(tmp_path / "rm.yaml", model, data)
    side = checked("--config", config, "--for", "rm")["sides"]["train"]
    assert (side["used"], side["too_short"]) == (1, 1)
    assert side["skipped"] == {"answers of fewer than 4 tokens": 1}
