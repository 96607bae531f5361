"""Startup: a stage imports no heavy package it does not need, and imports change no setting of the process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from rlhf_cli.config.stage import STAGES, Optimizer
from rlhf_cli.training.optimizer import build_stepper
from support.paths import ROOT

# datasets and its imports, pandas, which pyarrow imports, and peft, which transformers' Trainer imports.
HEAVY = (
    "datasets",
    "pandas",
    "pyarrow.compute",
    "pyarrow.dataset",
    "peft",
    "sklearn",
    # `make test-slow` installs lm-eval and with it scipy, which transformers imports wherever it finds it.
    *(() if importlib.util.find_spec("lm_eval") else ("scipy",)),
    "transformers.trainer_utils",
)


# One process imports torch and transformers for both tests. A fork of it imports every module, and it then runs stages.
RUN = f"""
import gc, importlib, json, logging, os, pkgutil, sys
import torch, transformers

def settings():
    logs = transformers.utils.logging
    return {{
        # torch sets the one of its compiler itself.
        "environment": {{k: v for k, v in os.environ.items() if not k.startswith("TORCHINDUCTOR_")}},
        "logging": (logs.get_verbosity(), logs.is_progress_bar_enabled(), logging.root.level),
        "torch": (torch.get_num_threads(), torch.backends.mkldnn.enabled, torch.get_default_dtype()),
    }}

sys.stdout.flush()
if os.fork() == 0:
    before, count = settings(), 0
    import rlhf_cli, stages
    for package in (rlhf_cli, stages):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
                count += 1
    after = settings()
    changed = {{name: (str(before[name]), str(after[name])) for name in before if before[name] != after[name]}}
    print(json.dumps({{"modules": count, "changed": changed}}), flush=True)
    os._exit(0)
os.wait()
torch.set_num_threads(1)

from rlhf_cli.cli import app
for config in sys.argv[1:]:
    stage = config.rsplit("/")[-1].removesuffix(".yaml")
    try:
        app([stage, "--config", config, "--quiet"])
    except SystemExit as stop:
        heavy = sorted(set({HEAVY}) & set(sys.modules))
        print(json.dumps([stage, stop.code, heavy, gc.isenabled(), gc.get_freeze_count()]))
"""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, write_config, make_model) -> list[Any]:
    """What RUN printed: one object of all imports, and a list for each stage.

    The runs tokenise rows (the cache is empty), train, and save the model. One process runs them in turn.
    """
    llama, folder = str(make_model("llama")), tmp_path_factory.mktemp("started")
    changes = {
        "sft": {"model": {"path": llama}},
        "rm": {"model": {"path": llama}, "training": {"num_steps": 1, "minibatch_size": 4}},
        "ppo": {"policy": {"path": llama}, "rewards": [{"type": "length", "target": 5}], "ppo": {"num_iterations": 1}},
    }
    configs = [str(write_config(stage, folder / stage, **changes[stage])) for stage in changes]
    command = [sys.executable, "-c", RUN, *configs]
    environment = {"RLHF_CACHE": str(folder / "cache"), "PATH": "", "OMP_NUM_THREADS": "3"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("[", "{"))]


def test_stages_do_not_import_heavy_packages_they_do_not_need(started: list[Any]) -> None:
    stages = started[1:]
    assert [(stage, code, heavy) for stage, code, heavy, _, _ in stages] == [(stage, 0, []) for stage in STAGES]
    for *_, collects, frozen in stages:
        # Imported objects are frozen, and the garbage collector runs for later ones.
        assert collects
        assert frozen > 100_000


def test_importing_the_package_changes_no_setting_of_the_process(started: list[Any]) -> None:
    assert started[0]["modules"] > 60
    assert started[0]["changed"] == {}


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup_steps", [0, 4])
def test_schedules_equal_those_of_transformers(schedule: str, warmup_steps: int) -> None:
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
            names = ["GOMP_SPINCOUNT", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY",
                     "TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS"]
            print(*map(os.environ.get, names), flush=True)
            os._exit(0)
sys.meta_path.insert(0, AtTorch())
sys.argv = ["rlhf", "sft", "--config", sys.argv[2]] if sys.argv[1] == "rlhf_cli" else sys.argv[1:]
runpy.run_module({"rlhf": "rlhf_cli"}.get(sys.argv[0], sys.argv[0]), run_name="__main__")
"""


@pytest.mark.parametrize("module", ["rlhf_cli", "stages.sft", "stages.rm", "stages.ppo"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "2000 128 32 error 1"),
        ({"GOMP_SPINCOUNT": "7", "TRANSFORMERS_VERBOSITY": "info"}, "7 128 32 info 1"),
        ({"OMP_WAIT_POLICY": "active", "LRU_CACHE_CAPACITY": "9"}, "None 128 9 error 1"),
    ],
)
def test_a_command_sets_its_environment_before_torch_is_imported_and_keeps_user_values(
    module: str, given: dict[str, str], expected: str, tmp_path: Path, write_config, make_model
) -> None:
    config = write_config("sft", tmp_path, model={"path": str(make_model("llama"))})
    command = [sys.executable, "-c", AT_TORCH, module, str(config)]
    environment = {"PATH": "", "PYTHONPATH": str(ROOT), **given}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment)
    assert done.stdout.strip() == expected, done.stderr
