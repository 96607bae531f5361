"""A tiny model with a chat template, a run of a tiny llama, and prompts for it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.config.models import ScratchModel
from rlhf_cli.models.save import save
from rlhf_cli.models.scratch import new_model
from support.tiny import SETTINGS, read_jsonl, write_jsonl

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A tiny llama with a chat template, room for 512 tokens, that samples by itself."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = CHAT
    settings = {**SETTINGS["llama"], "max_position_embeddings": 512}
    model = new_model(ScratchModel(architecture="llama", config=settings), own, seed=5)
    model.generation_config.do_sample = True
    place = tmp_path_factory.mktemp("chat") / "model"
    save(model, own, place)
    return place


@pytest.fixture(scope="module")
def run(pipeline: Any) -> Path:
    """A run of the three stages with a tiny llama of 128 positions."""
    root: Path = pipeline("llama")
    return root


@pytest.fixture(scope="module")
def prompts(data: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of nine prompts, of which the fifth is too long for the run's models."""
    rows = read_jsonl(data["prompts"])[:9]
    rows[4] = {"prompt": "the tent " * 80, "number": 4}
    return write_jsonl(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", rows)
