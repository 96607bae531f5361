"""DPO is not a stage here: TRL's DPOTrainer trains from the SFT artifact on rows of `rlhf data convert`.

TRL is no dependency of this project, so it has an environment of its own.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

from rlhf_cli.models.load import load_tokenizer
from support.paths import ROOT
from support.projects import rlhf
from support.tiny import read_jsonl

LINES = re.search(r"^```python\n(.*?DPOTrainer.*?)^```", (ROOT / "docs/other_libraries.md").read_text(), re.M | re.S)
REPORT = """
import json
tok, rows = trainer.processing_class, trainer.train_dataset
report = {"log": trainer.state.log_history}
report["ids"] = [[rows[n]["prompt_ids"], rows[n]["chosen_ids"], rows[n]["rejected_ids"]] for n in range(8)]
print("REPORT" + json.dumps(report))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("trl") is None,
    reason="TRL is not installed: pip install --constraint constraints.txt trl",
)
def test_trls_dpo_trains_from_our_sft_artifact_on_converted_rows(pipeline, data, tmp_path):
    """The lines of the docs, on a tiny model: the loss falls, the margin rises, and the tokens are ours."""
    assert LINES is not None
    root, rows = pipeline("llama"), tmp_path / "dpo.jsonl"
    rlhf("data", "convert", data["preferences"], "--for", "rm", "--out", rows)
    code = LINES[1]
    for here, there in {
        "out/dpo.jsonl": str(rows),
        "artifacts/support/sft/model": str(root / "sft" / "model"),
        "artifacts/dpo": str(tmp_path / "dpo"),
        "max_steps=100": "max_steps=30",
    }.items():
        assert here in code
        code = code.replace(here, there)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, "-c", code + REPORT], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.rpartition("REPORT")[2])
    steps = [entry for entry in report["log"] if "rewards/margins" in entry]
    first, last = steps[0], steps[-1]
    assert last["loss"] < 0.9 * first["loss"]
    assert last["rewards/margins"] > first["rewards/margins"]
    assert last["rewards/accuracies"] > 0.7

    tokenizer = load_tokenizer(str(root / "sft" / "model"))
    by_prompt = {row["prompt"]: row for row in read_jsonl(rows)}
    for prompt_ids, *both in report["ids"]:
        prompt = tokenizer.decode(prompt_ids, skip_special_tokens=True)
        row = next(row for text, row in by_prompt.items() if text.strip() == prompt.strip())
        for ids, answer in zip(both, (row["chosen"], row["rejected"]), strict=True):
            ours = [*tokenizer(row["prompt"] + answer)["input_ids"], tokenizer.eos_token_id]
            assert prompt_ids + ids == ours
    assert (tmp_path / "dpo" / "model.safetensors").is_file()
