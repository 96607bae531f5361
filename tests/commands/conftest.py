"""A tiny model with a chat template, a run of a tiny llama, and prompts for it."""

import copy

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
def chat_model(tmp_path_factory, tokenizer):
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
def run(pipeline):
    """A run of the three stages with a tiny llama of 128 positions."""
    return pipeline("llama")


@pytest.fixture(scope="module")
def prompts(data, tmp_path_factory):
    """A file of nine prompts, of which the fifth is too long for the run's models."""
    rows = read_jsonl(data["prompts"])[:9]
    rows[4] = {"prompt": "the tent " * 80, "number": 4}
    return write_jsonl(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", rows)
