"""A killed run is resumed and gives the same bytes; on another number of processes, the same up to rounding."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rlhf_cli.program import torchrun
from rlhf_cli.run import artifacts, checkpoint_files
from support import crash
from support.crash import wait_for
from support.paths import ROOT
from support.resume import ALL, PPO_CARRIES, checkpoints, same, status, stopped_after, succeed, truncate
from support.runs import ENVIRONMENT, ended_forked
from support.tiny import merged, read_jsonl

KILLS = 100 if ALL else 8
"""Number of kills per stage."""
STAGES = ("sft", "rm", "ppo") if ALL else ("ppo",)
"""PPO carries every kind of state from one step to the next."""


# -------------------------------------------------------------------------------------------- kills


@pytest.mark.slow
@pytest.mark.parametrize("case", STAGES)
def test_resume_after_a_kill_at_any_moment_gives_the_same_bytes(case, config_in, undisturbed, tmp_path):
    """Kill a run and resume it until it is finished; repeat until there were enough kills.

    The moments are drawn with a fixed seed, over the duration of a whole run on this machine.
    """
    draw, kills, runs = random.Random(f"kills of {case}"), 0, 0
    often = {"checkpoints": {"every_steps": 1}}
    started = time.monotonic()
    assert crash.Attempt(config_in(case, tmp_path / "whole", **often), tmp_path / "log").wait() == 0
    started = time.monotonic()
    assert crash.Attempt([*config_in(case, tmp_path / "whole"), "--restart"], tmp_path / "log").wait() == 0
    duration = time.monotonic() - started
    while kills < KILLS:
        root, runs = tmp_path / f"run{runs}", runs + 1
        arguments = config_in(case, root, **often)
        for _ in range(40):
            attempt = crash.Attempt(arguments, tmp_path / "log")
            code = attempt.kill_after(draw.uniform(0.05, 1) * duration)
            if code == 0:
                break
            assert code == crash.KILLED, attempt.output
            kills += 1
        else:
            succeed(arguments)
        actual = crash.outcome(root / case)
        assert actual.pop("config.yaml")
        same(actual, {name: value for name, value in undisturbed(case).items() if name != "config.yaml"})
        assert {path.name for path in root.iterdir()} <= {"sft", case, "sft.yaml", f"{case}.yaml"}
        shutil.rmtree(root)
    print(f"{case}: {kills} kills in {runs} runs, all equal")


SITUATIONS = ("from the start", "resume from an older checkpoint", "restart over a finished stage")


@pytest.fixture(scope="module")
def situation(config_in, stopped) -> Callable[[str, str, Path], tuple[list[str], list[str]]]:
    """A function: situation, case, artifact root -> the arguments of the killed attempt and of the resumed one."""

    def arrange(name: str, case: str, root: Path) -> tuple[list[str], list[str]]:
        arguments = config_in(case, root) if name == "from the start" else stopped(case, root)
        if name == "resume from an older checkpoint":
            truncate(checkpoints(root, case)[-1] / "state.safetensors")
        if name != "restart over a finished stage":
            return arguments, arguments
        unfinished = [root / f".{case}.{what}" for what in ("checkpoints", "partial")]
        for path in unfinished:
            path.rename(path.with_name(f"kept{path.name}"))
        succeed(arguments, "--quiet", "--set", "optimizer.weight_decay=0.2")
        for path in unfinished:
            path.with_name(f"kept{path.name}").rename(path)
        return [*arguments, "--restart"], arguments

    return arrange


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case"), [*((name, "sft") for name in SITUATIONS), ("resume", "rm"), ("resume", "ppo")]
)
def test_resume_after_a_kill_at_every_file_operation_gives_the_same_bytes(name, case, situation, undisturbed, tmp_path):
    """Kill before each operation of saving, pruning, restoring, discarding and publishing, and within weights and rows.

    A stage that was finished before stays until the new one is finished. An fsync changes no file: a kill before it is
    a kill before the next operation.
    """
    arranged = tmp_path / "arranged"
    first, then = situation(name, case, arranged)
    before = crash.outcome(arranged / case) if (arranged / case).is_dir() else None

    def attempt(label: str | None) -> tuple[int, str]:
        root = tmp_path / "run"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(arranged, root)
        config = root / f"{case}.yaml"
        config.write_text(config.read_text().replace(str(arranged), str(root)), encoding="utf-8")
        record = None if label is not None else str(tmp_path / "points")
        watch = crash.Watch(str(root), record, {label: signal.SIGKILL} if label is not None else {})
        started = crash.Attempt([part.replace(str(arranged), str(root)) for part in first], tmp_path / "log", watch)
        return started.wait(), started.output

    code, output = attempt(None)
    assert code == 0, output
    points = [point for point in (tmp_path / "points").read_text().splitlines() if not point.startswith("fsync ")]
    assert len(set(points)) == len(points) > 20
    chosen = points if ALL else points[len(points) % 7 :: 7]
    root = tmp_path / "run"
    for point in chosen:
        code, output = attempt(point)
        assert code == crash.KILLED, f"{point}: {output}"
        status(root)
        if before is not None:
            artifacts.require_stage(root, case)
            standing = crash.outcome(root / case)
            assert standing == before or standing == undisturbed(case), point
        succeed([part.replace(str(arranged), str(root)) for part in then])
        assert crash.outcome(root / case) == undisturbed(case), point
        assert {path.name for path in root.iterdir()} <= {"sft", case, "sft.yaml", f"{case}.yaml"}, point
    print(f"{name}, {case}: killed at {len(chosen)} of {len(points)} points, all equal")


# ------------------------------------------------------------------------ another number of processes


SEEN = """
import time
from pathlib import Path

from rlhf_cli.processes.signals import stop_requested

METRICS = Path("{root}/.ppo.partial/metrics.jsonl")

def is_third():
    return METRICS.is_file() and METRICS.read_text().count(chr(10)) >= 2

def seen(prompts, responses, rows):
    while Path("{to_be_stopped}").exists() and is_third() and not stop_requested():
        time.sleep(0.01)
    return [2.0 ** row["number"] for row in rows]
"""


@pytest.mark.slow
@pytest.mark.parametrize("begins_with", [2, 1])
def test_resume_with_another_number_of_processes(begins_with, config_in, tmp_path):
    """Each prompt is used once per epoch, and the weights equal those of one process up to rounding.

    A reward of weight 0 records the prompts: it returns two to the power of the prompt's number. In the run that is
    stopped it waits for the signal in the third iteration, if there is one. On rounding, see `eps` in
    tests/stages/test_stages.py.
    """
    judge, to_be_stopped = tmp_path / "judge.py", tmp_path / "to_be_stopped"
    judge.write_text(SEEN.format(root=tmp_path / "changed", to_be_stopped=to_be_stopped))
    changes = merged(PPO_CARRIES, {"ppo": {"num_iterations": 9}, "optimizer": {"eps": 1e-3}})

    def config(name: str) -> list[str]:
        arguments = config_in("ppo", tmp_path / name, **changes, checkpoints={"every_steps": None})
        settings = yaml.safe_load(Path(arguments[2]).read_text())
        settings["rewards"].append({"type": "function", "function": f"{judge}:seen", "weight": 0.0})
        Path(arguments[2]).write_text(yaml.safe_dump(settings))
        return arguments

    succeed(config("undisturbed"))
    arguments, log = config("changed"), tmp_path / "log"
    if begins_with == 2:
        to_be_stopped.touch()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["-m", "stages.ppo", *arguments[1:]]
        with log.open("w") as file:
            process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=file, stderr=file)
            rows = tmp_path / "changed/.ppo.partial/metrics.jsonl"
            wait_for(lambda: process.poll() is not None or (rows.is_file() and rows.read_text().count("\n") >= 2))
            process.send_signal(signal.SIGTERM)
            assert process.wait(600) != 0
        again = f"To resume: {torchrun()} --nproc-per-node 2 -m stages.ppo --config {arguments[2]}"
        assert again in log.read_text()
        to_be_stopped.unlink()
        [newest] = checkpoints(tmp_path / "changed", "ppo")
        assert checkpoint_files.step_of(newest) in (2, 3)
        assert f"resuming after step {checkpoint_files.step_of(newest)}" in succeed(arguments)
    else:
        stopped_after(4, arguments)
        (code, output), (other, _) = ended_forked(2, "ppo", *arguments[1:], log=log)
        assert (code, other) == (0, 0), output
        assert "resuming after step 4 of 9" in output
    runs = ("undisturbed", "changed")
    one, two = (read_jsonl(tmp_path / run / "ppo/metrics.jsonl") for run in runs)
    [key] = [key for key in one[0] if key.startswith("reward/") and "seen" in key]
    assert [row["step"] for row in two] == list(range(1, 10))
    assert [row[key] for row in two] == [row[key] for row in one]
    for epoch in range(3):
        assert sum(8 * row[key] for row in two[3 * epoch : 3 * epoch + 3]) == 2**24 - 1
    for row, other in zip(one, two, strict=True):
        assert other["objective/kl_coef"] == pytest.approx(row["objective/kl_coef"], rel=1e-6)
    for name in ("model", "ema_model", "value_model"):
        first, second = (load_file(tmp_path / run / "ppo" / name / "model.safetensors") for run in runs)
        assert first.keys() == second.keys()
        for key in first:
            torch.testing.assert_close(second[key], first[key], rtol=1e-5, atol=1e-5)
