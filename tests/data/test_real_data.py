"""The shipped configs and data scripts, and a few steps of the stories demo on a real model.

The data and the model are public and are not part of the project. RLHF_REAL_DATA names the folder that holds
`sentence-polarity/` and `hh-rlhf/`, with `models/babyllama` beside it. The default is `../shared/data`.
"""

from __future__ import annotations

import gzip
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

DATA = Path(os.environ.get("RLHF_REAL_DATA", str(ROOT.parent / "shared" / "data")))
BABYLLAMA = DATA.parent / "models" / "babyllama"


def test_stages_of_a_folder_share_their_prompts() -> None:
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


def test_story_prompts_are_those_of_the_script(tmp_path: Path) -> None:
    folder = ROOT / "data" / "stories"
    subprocess.run([sys.executable, "-B", folder / "generate.py", "--out", tmp_path], check=True)
    shipped = (folder / "prompts.jsonl").read_bytes()
    assert (tmp_path / "prompts.jsonl").read_bytes() == shipped
    texts = [json.loads(line)["prompt"] for line in shipped.splitlines()]
    assert len(set(texts)) == len(texts) == 400
    assert max(map(len, texts)) <= 64


# ------------------------------------------------------------------------------------- the real data


@pytest.mark.skipif(not BABYLLAMA.exists(), reason=f"{BABYLLAMA} does not exist; set RLHF_REAL_DATA to the data folder")
def test_stories_from_a_pretrained_model(tmp_path: Path) -> None:
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


def test_the_download_script_writes_every_row_of_every_split(tmp_path: Path) -> None:
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
