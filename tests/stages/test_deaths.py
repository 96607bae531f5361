"""A process of RM or PPO is killed or runs out of memory, and one line says which, when, and who waited.

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
    if os.environ["RANK"] == "1" and len(calls) == 3:
        {fate}
    return work(*given, **more)
{stage}.{work} = fails
launch.main("{stage}", {stage}.run)
"""
KILLED, MEMORY = "os.kill(os.getpid(), signal.SIGKILL)", "torch.empty(10**15)"
LINES = {
    KILLED: r"ppo step 3: process 0 waited for the rewards of all 2 processes, but process 1 \(last seen at ppo "
    r"(start|step [123])\) ended without a message\. The system kills a process when memory runs out\. The run ends\. "
    r"The checkpoint of step [12] is intact\.",
    MEMORY: r"rm step 3, process 1 of 2: out of memory .*",
}


@pytest.mark.parametrize(("fate", "stage", "work"), [(MEMORY, "rm", "_accumulate"), (KILLED, "ppo", "ask_rewards")])
def test_one_line_names_rank_stage_step_and_wait(fate, stage, work, write_config, make_model, tmp_path):
    (tmp_path / "rewards.py").write_text("def score(prompts, responses, rows):\n    return [1.0] * len(responses)\n")
    model = {"path": str(make_model("llama"))}
    changes = {"model": model}
    if stage == "ppo":
        rewards = [{"type": "function", "function": f"{tmp_path}/rewards.py:score"}]
        changes = {"policy": model, "rewards": rewards, "ppo": {"num_iterations": 3}}
    config = write_config(stage, tmp_path, checkpoints={"every_steps": 1}, **changes)
    code = CODE.format(stage=stage, work=work, fate=fate)
    processes = start_forked(variables(2), code, "--config", str(config), "--quiet", log=tmp_path / "log")
    exit_code, output = processes[0].wait()
    processes[1].kill()
    assert exit_code != 0
    errors = (output + processes[1].output).strip()
    assert re.fullmatch("error: " + LINES[fate], errors), errors
