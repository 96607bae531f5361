"""Startup: a stage imports no heavy package it does not need, and imports change no setting of the process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from rlhf_cli.cli import app
from rlhf_cli.config.stage import STAGES
from support import projects
from support.forked import Forked
from support.paths import ROOT

# datasets and its imports, pandas, which pyarrow imports, and peft, which transformers' Trainer imports.
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


# One process imports every module, none of which may import a heavy package, and then runs the stages.
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
def started(tmp_path_factory, write_config, make_model):
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


def test_stages_do_not_import_heavy_packages_they_do_not_need(started):
    stages = started[1:]
    assert [(stage, code, heavy) for stage, code, heavy, _, _ in stages] == [(stage, 0, []) for stage in STAGES]
    for *_, collects, frozen in stages:
        # Imported objects are frozen, and the garbage collector runs for later ones.
        assert collects
        assert frozen > 100_000


def test_importing_the_package_changes_no_setting_of_the_process(started):
    assert started[0]["modules"] > 60
    assert started[0]["changed"] == {}


TORCH = """
import os
names = ["GOMP_SPINCOUNT", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"]
print(*map(os.environ.get, [*names, "TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS"]), flush=True)
os._exit(0)
"""
"""In place of torch."""


@pytest.mark.parametrize(
    ("program", "given", "expected"),
    [
        ("rlhf_cli sft", {}, "4000 128 32 error 1"),
        ("rlhf_cli sft", {"GOMP_SPINCOUNT": "7", "TRANSFORMERS_VERBOSITY": "info"}, "7 128 32 info 1"),
        ("rlhf_cli sft", {"OMP_WAIT_POLICY": "active", "LRU_CACHE_CAPACITY": "9"}, "None 128 9 error 1"),
        *((f"stages.{stage}", {}, "4000 128 32 error 1") for stage in STAGES),
    ],
)
def test_a_command_sets_its_environment_before_torch_is_imported_and_keeps_user_values(
    program, given, expected, tmp_path, write_config, make_model
):
    (tmp_path / "torch.py").write_text(TORCH)
    config = write_config("sft", tmp_path, model={"path": str(make_model("llama"))})
    command = [sys.executable, "-m", *program.split(), str(config)]
    environment = {"PATH": "", "PYTHONPATH": f"{tmp_path}:{ROOT}", **given}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment)
    assert done.stdout.strip() == expected, done.stderr


COLD = """
import importlib, json, os, pkgutil, signal, sys, threading, time, traceback
from pathlib import Path
import peft, torch, rlhf_cli, stages.ppo, stages.rm, stages.sft
for module in pkgutil.walk_packages(rlhf_cli.__path__, "rlhf_cli."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)  # else each command would import what it needs
from rlhf_cli import cli
from rlhf_cli.kernels import linear

log, keys, commands = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
linear.maker = lambda: "AuthenticAMD"
torch.backends.cpu.get_cpu_capability = lambda: "AVX512"

def stop_the_server():
    while "http://" not in Path(log).read_text():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)

for command in commands:
    process = os.fork()
    if not process:
        os.dup2(os.open(keys, os.O_RDONLY), 0)
        sys.stdin = open(0, closefd=False)
        for number in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        if "serve" in command or "label" in command:
            threading.Thread(target=stop_the_server, daemon=True).start()
        sys.argv, code = ["rlhf", *command], 1
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    print(json.dumps([command, code, Path(log).read_text(errors="replace")]), flush=True)
"""


COMMANDS = """
sft --config {folder}/sft.yaml --quiet
rm --config {folder}/rm.yaml --quiet
ppo --config {folder}/ppo.yaml --quiet
plan {folder}
eval {run} --samples 2 --sampled-prompts 2
diagnose {run}
report {run}
compare {run} {folder}/other
status {run}
watch {run} --once
doctor {run}
pipeline {folder}
sweep {folder}/sweep.yaml --dry-run
chat {run}
generate {run} --prompts {rows} --out {folder}/replies.jsonl --max-new-tokens 4 --num 2
label {pairs} --num 1
merge {run}/rm {folder}/merged
export {run} --out {folder}/exported
push {run} me/model
serve {run} --port 0
rm serve {run} --port 0
rm score {run} {rows}
data check {rows} --for sft
data show {rows} --for sft
data convert {pairs} --for rm --out {folder}/converted.jsonl
data generate {rows} --task demonstrations --out {folder}/new.jsonl --model {run}/sft/model --max-new-tokens 4 --num 2
data score {rows} --out {folder}/scored.jsonl --model {run}/sft/model --max-new-tokens 4 --num 2
config check {folder}/sft.yaml
config show {folder}/sft.yaml
config docs sft.model
config schema
init {folder}/init --from blank
"""
"""A line for every command, in an order in which they can run in one folder."""


def cold_commands(folder):
    files = {"folder": folder, "run": folder / "run", "rows": folder / "sft.jsonl", "pairs": folder / "pref.jsonl"}
    return [line.format(**files).split() for line in COMMANDS.strip().splitlines()]


def test_every_command_runs_first_in_its_process(tmp_path):
    """A warm process hides what a command asks first, such as which library computes the products of this processor:
    here oneDNN, as on one of AMD. Here all of rlhf is imported anew, and each command runs in a fork.

    The tiny models have learned nothing, so `diagnose` names causes, and no answer of a judge is a score.
    """
    projects.write_project(tmp_path)
    given = {stage: yaml.safe_load((tmp_path / f"{stage}.yaml").read_text()) for stage in STAGES}
    given["sft"]["model"]["scratch"]["config"]["max_position_embeddings"] = 512  # for the prompts of a judge
    given["rm"]["model"] = {"path": str(tmp_path / "run/sft"), "lora": {"r": 2, "save": "adapter"}}
    for stage, config in given.items():
        (tmp_path / f"{stage}.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "sweep.yaml").write_text(
        yaml.safe_dump({"base": str(tmp_path), "artifacts": str(tmp_path / "sweep"), "grid": {"seed": [1, 2]}})
    )
    (tmp_path / "keys").write_text("1\nq\n")
    (tmp_path / "other").mkdir()  # a second run for `compare`: the first under another name
    for stage in ("eval", "ppo"):
        (tmp_path / "other" / stage).symlink_to(tmp_path / "run" / stage)
    commands = cold_commands(tmp_path)
    files = [str(tmp_path / name) for name in ("output", "keys")]
    code, output = Forked(
        COLD, *files, json.dumps(commands), folder=tmp_path, log=tmp_path / "log", code_here=True
    ).wait()
    assert code == 0, output
    ended = [json.loads(line) for line in output.splitlines()]
    assert [command for command, _, _ in ended] == commands
    failed = [
        f"{command}: {code}\n{text[-1500:]}"
        for command, code, text in ended
        if code != {"diagnose": 2, "data score": 1}.get(" ".join(command[: 1 + (command[0] == "data")]), 0)
    ]
    assert not failed, "\n".join(failed)


def test_the_cold_commands_are_all_commands():
    def names(command, before=()):
        if not hasattr(command, "commands"):
            return [before]
        return [name for key, inner in command.commands.items() for name in names(inner, (*before, key))]

    cold = {tuple(line[:length]) for line in cold_commands(Path("folder")) for length in (1, 2)}
    assert set(names(get_command(app))) <= cold
