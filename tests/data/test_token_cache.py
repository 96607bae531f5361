"""The cache of tokens is verified when it is read."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.config.data import Rows
from rlhf_cli.data.cache import cache_directory, tokenise
from rlhf_cli.data.encoders import DemonstrationEncoder
from rlhf_cli.data.stage_rows import StageRows
from support.tiny import write_jsonl

ROWS = [{"prompt": f"question {n}", "response": f" the lamp is late {n * n}"} for n in range(60)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> Any:
    """A function that tokenises the rows with a cache of this test's own."""
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    data = Rows.model_validate({"train": str(write_jsonl(tmp_path / "rows.jsonl", ROWS)), "test_fraction": 0.1})
    return lambda: tokenise(DemonstrationEncoder(tokenizer, StageRows(data, "sft")))


def entry_of() -> Path:
    (entry,) = (path for path in cache_directory().iterdir() if path.is_dir())
    return entry


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(("train.arrow", damage) for damage in ("bit", "random", "longer", "empty", "gone")),
        *(("test.arrow", "bit"), ("facts.json", "random"), ("facts.json", "gone")),
    ],
)
def test_a_changed_byte_rebuilds_the_entry_and_says_so(run: Any, name: str, damage: str) -> None:
    first = run()
    rows, lines = [list(first.train), list(first.test)], first.lines
    file = entry_of() / name
    before = file.read_bytes()
    draw = random.Random(name)
    for _ in range(12 if damage == "bit" else 1):
        broken = bytearray(before)
        if damage == "bit":
            broken[draw.randrange(len(broken))] ^= 1 << draw.randrange(8)
        changed = {"bit": bytes(broken), "random": draw.randbytes(len(before)), "longer": before + b"\0", "empty": b""}
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes(changed[damage])
        again = run()
        assert [list(again.train), list(again.test)] == rows
        assert again.lines == [f"{entry_of()}: the cached tokens are damaged, the rows are tokenised again", *lines]
        assert file.read_bytes() == before
    assert run().lines == lines
