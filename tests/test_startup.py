"""What a stage imports until it is done: what takes long and is not needed stays out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import get_scheduler

from rlhf_cli.config.stage import Optimizer
from rlhf_cli.training.optimizer import build_stepper

ROOT = Path(__file__).resolve().parent.parent
# datasets and what comes with it, pandas, which pyarrow imports, and peft, which transformers' Trainer imports.
HEAVY = (
    "datasets",
    "pandas",
    "pyarrow.compute",
    "pyarrow.dataset",
    "peft",
    "sklearn",
    "scipy",
    "transformers.trainer_utils",
)
RUN = f"""
import json, sys
from rlhf_cli.cli import app
try:
    app(sys.argv[1:])
except SystemExit as stop:
    import gc
    print(json.dumps([stop.code, sorted(set({HEAVY}) & set(sys.modules)), gc.isenabled(), gc.get_freeze_count()]))
"""


@pytest.mark.parametrize("stage", ["sft", "rm", "ppo"])
def test_a_stage_imports_nothing_heavy_that_it_does_not_need(stage, tmp_path: Path, write_config, make_model) -> None:
    """Rows are tokenised (the cache is empty), learnt from, and the model saved."""
    llama = str(make_model("llama"))
    changes = {
        "sft": {"model": {"path": llama}},
        "rm": {"model": {"path": llama}, "training": {"num_steps": 1, "minibatch_size": 4}},
        "ppo": {"policy": {"path": llama}, "rewards": [{"type": "length", "target": 5}], "ppo": {"num_iterations": 1}},
    }
    config = write_config(stage, tmp_path, **changes[stage])
    command = [sys.executable, "-c", RUN, stage, "--config", str(config), "--quiet"]
    environment = {"RLHF_CACHE": str(tmp_path / "cache"), "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    code, heavy, collects, frozen = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stderr
    assert heavy == []
    # The imports' objects are out of the collector's way; it is at work on all that came after.
    assert collects
    assert frozen > 100_000


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup_steps", [0, 4])
def test_the_schedules_are_those_of_transformers(schedule: str, warmup_steps: int) -> None:
    peak, total, least = 3e-3, 17, 0.2
    config = Optimizer(learning_rate=peak, schedule=schedule, warmup_steps=warmup_steps, min_lr_ratio=least)
    stepper = build_stepper(torch.nn.Linear(2, 2), config, total)
    theirs = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters(), lr=peak)
    name, kwargs = {
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": least}),
        "linear": ("polynomial", {"lr_end": least * peak, "power": 1.0}),
        "constant": ("constant_with_warmup", None),
    }[schedule]
    scheduler = get_scheduler(
        name, theirs, num_warmup_steps=warmup_steps, num_training_steps=total, scheduler_specific_kwargs=kwargs
    )
    for _ in range(total + 1):
        assert stepper.learning_rate == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12, abs=1e-18)
        stepper.advance()
        theirs.step()
        scheduler.step()


AT_TORCH = """
import os, runpy, sys
class AtTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, AtTorch())
sys.argv = ["rlhf", "sft", "--config", sys.argv[2]] if sys.argv[1] == "rlhf_cli" else sys.argv[1:]
runpy.run_module({"rlhf": "rlhf_cli"}.get(sys.argv[0], sys.argv[0]), run_name="__main__")
"""


@pytest.mark.parametrize("module", ["rlhf_cli", "stages.sft", "stages.rm", "stages.ppo"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_how_threads_wait_is_set_before_torch_is_imported_and_never_against_the_user(
    module: str, given: dict[str, str], expected: str, tmp_path: Path, write_config, make_model
) -> None:
    config = write_config("sft", tmp_path, model={"path": str(make_model("llama"))})
    command = [sys.executable, "-c", AT_TORCH, module, str(config)]
    environment = {"PATH": "", "PYTHONPATH": str(ROOT), **given}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=environment)
    assert done.stdout.strip() == expected, done.stderr
