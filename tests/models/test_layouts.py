"""The layout of exported models: what transformers, and so vLLM and llama.cpp, find in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.config.models import ScratchModel
from rlhf_cli.models.load import align, load_policy, prepare
from rlhf_cli.models.save import save
from rlhf_cli.models.scratch import new_model
from support.compare import logits_of
from support.tiny import SETTINGS

MODELS = [(name, tied) for name in ("llama", "qwen2", "gpt2") for tied in (True, False)]


@pytest.fixture(scope="module", params=MODELS, ids=lambda value: f"{value[0]} {'tied' if value[1] else 'untied'}")
def exported(
    request: Any, tokenizer: Any, eos_only_tokenizer: Any, tmp_path_factory: Any
) -> tuple[str, bool, Path, Path]:
    """(architecture, tied, a random model, its export in float32)."""
    architecture, tied = request.param
    folder = tmp_path_factory.mktemp("layout")
    config = {**SETTINGS[architecture], "tie_word_embeddings": tied}
    own = eos_only_tokenizer if architecture == "gpt2" else tokenizer
    save(new_model(ScratchModel(architecture=architecture, config=config), own, seed=4), own, folder / "model")
    result = CliRunner().invoke(app, ["export", str(folder / "model"), "--out", str(folder / "out")])
    assert result.exit_code == 0, result.output
    return architecture, tied, folder / "model", folder / "out"


def logits(model: Any) -> torch.Tensor:
    align(model)
    return logits_of(model)


def test_transformers_computes_the_same_logits(exported: tuple[str, bool, Path, Path]) -> None:
    _, tied, model, out = exported
    plain = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits(plain), logits(AutoModelForCausalLM.from_pretrained(model)))
    assert (plain.get_output_embeddings().weight is plain.get_input_embeddings().weight) == tied


def test_the_file_has_the_names_of_transformers_which_other_libraries_look_for(exported: Any) -> None:
    architecture, tied, _, out = exported
    config = json.loads((out / "config.json").read_text())
    plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out))
    assert set(load_file(out / "model.safetensors")) == set(plain.state_dict()) - (
        {"lm_head.weight"} if tied else set()
    )
    assert config["architectures"] == [type(plain).__name__]
    assert (config["model_type"], config["tie_word_embeddings"], config["dtype"]) == (architecture, tied, "float32")


@pytest.mark.parametrize("longer", [0, 8])
def test_weights_do_not_lie_where_the_header_of_their_file_puts_them(
    longer: int, make_model: Any, tmp_path: Path
) -> None:
    """On some processors the last digit of a product depends on it."""
    shutil.copytree(make_model("llama"), tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = (length + longer).to_bytes(8, "little") + content[8 : 8 + length] + b" " * longer
    file.write_bytes(header + content[8 + length :])
    model = load_policy(str(tmp_path / "model"))
    prepare(model, torch.device("cpu"))
    assert {weight.data_ptr() % 64 for weight in model.parameters()} == {0}
