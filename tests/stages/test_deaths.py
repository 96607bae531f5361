"""A process of RM or PPO is killed, hangs or runs out of memory, and one line says which, when, and who waited.

Nothing of ours started the processes, as under `srun`, so that they must agree on who prints. SFT with `--nproc` is in
test_nproc.py.
"""

from __future__ import annotations

import re

import pytest

from support.runs import start_forked, variables

pytestmark = pytest.mark.slow
CODE = """
import os, signal, torch
from rlhf_cli.processes import ending, signs_of_life
from rlhf_cli.run import launch
from stages import {stage}
signs_of_life.EVERY_S, signs_of_life.PATIENCE_S, ending.PATIENCE_S, ending.KNOWN_S = 0.2, 3.0, 3.0, 0.5
work, calls = {stage}.{work}, []
def fails(*given, **more):
    calls.append(given)
    if os.environ["RANK"] == "{rank}" and len(calls) == 3:
        {fate}
    return work(*given, **more)
{stage}.{work} = fails
launch.main("{stage}", {stage}.run)
"""
FATES = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "memory": "torch.empty(10**15)",
}
INTACT = r"The run ends\. The checkpoint of step [12] is intact\."
LINES = {
    "hangs": r"{stage} step 3: process {other} waited \d+ s for [\w ]+ of all 2 processes: process {rank}{at} gives no "
    rf"sign of life\. {INTACT} If a step takes that long, raise distributed\.timeout_s",
    "memory": r"{stage} step 3, process {rank} of 2: out of memory .*",
}


@pytest.mark.parametrize(
    ("fate", "stage", "work", "rank"),
    [
        ("memory", "rm", "_accumulate", 1),
        # The others wait without a connection to it: it gives no sign of life, killed or not.
        ("killed", "ppo", "ask_rewards", 1),
    ],
)
def test_one_line_names_rank_stage_step_and_wait(fate, stage, work, rank, write_config, make_model, tmp_path):
    (tmp_path / "rewards.py").write_text("def score(prompts, responses, rows):\n    return [1.0] * len(responses)\n")
    action = FATES[fate]
    if (fate, work) == ("killed", "ask_rewards"):
        fate = "hangs"
    timeout_s = 5 if fate == "hangs" else 60
    model = {"path": str(make_model("llama"))}
    changes = {
        "rm": {"model": model},
        "ppo": {
            "policy": model,
            "rewards": [{"type": "function", "function": f"{tmp_path}/rewards.py:score"}],
            "ppo": {"num_iterations": 3},
        },
    }[stage] | {"checkpoints": {"every_steps": 1}, "distributed": {"timeout_s": timeout_s}}
    config = write_config(stage, tmp_path, **changes)
    code = CODE.format(stage=stage, work=work, rank=rank, fate=action)
    processes = start_forked(variables(2), code, "--config", str(config), "--quiet", log=tmp_path / "log")
    exit_code, output = processes[1 - rank].wait()
    processes[rank].kill()
    errors = output + processes[rank].log.read_text(encoding="utf-8")
    assert exit_code != 0
    # The first process holds the store, so the other cannot read its step. A sign of life may be of an earlier step.
    at = rf" \(last seen at {stage} (start|step [123])\)" if rank else ""
    names = {"stage": stage, "rank": rank, "other": 1 - rank, "at": at}
    pattern = "error: " + re.sub(r"\{(\w+)\}", lambda name: str(names[name[1]]), LINES[fate])
    assert re.fullmatch(pattern, errors.strip()), errors
