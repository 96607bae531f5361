"""A tiny model with a chat template."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.config.models import ScratchModel
from rlhf_cli.models.save import save
from rlhf_cli.models.scratch import new_model
from support.tiny import SETTINGS

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
