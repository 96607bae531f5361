"""A reward that fails at any call: the last iteration is saved, and the same command resumes to the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.errors import RewardError
from rlhf_cli.run.checkpoint_files import last_step
from support.crash import results
from support.resume import same
from support.tiny import read_jsonl

REWARD = """
from pathlib import Path

HERE = Path(__file__).parent


def score(prompts, responses, rows):
    with (HERE / "calls.txt").open("a") as file:
        file.write("x\\n")
    fail_at = HERE / "fail_at.txt"
    if fail_at.is_file() and len((HERE / "calls.txt").read_text().split()) == int(fail_at.read_text()):
        fail_at.unlink()
        raise ConnectionError("the reward service is down")
    return [float(len(r) % 7) for r in responses]
"""
ROLLOUTS = [f"rollout {number}" for number in range(1, 6)]
CALLS = ["before", *ROLLOUTS[:2], "evaluation 2", *ROLLOUTS[2:4], "evaluation 4", ROLLOUTS[4], "end"]


def run(root: Path, run_stage: Any, make_model: Any) -> None:
    root.mkdir(exist_ok=True)
    (root / "reward.py").write_text(REWARD)
    run_stage(
        "ppo",
        root,
        policy={"path": str(make_model("llama"))},
        rewards=[{"type": "function", "function": f"{root}/reward.py:score"}],
        ppo={"num_iterations": 5, "score_normalization": "running", "kl_controller": "adaptive", "kl_target": 1.0},
        evaluation={"every_iterations": 2, "best_metric": "score_mean"},
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, run_stage: Any, make_model: Any) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("undisturbed")
    run(root, run_stage, make_model)
    assert len((root / "calls.txt").read_text().split()) == len(CALLS)
    assert [row["step"] for row in read_jsonl(root / "ppo/evaluations.jsonl")] == [0, 2, 4, 5]
    return results(root / "ppo")


@pytest.mark.parametrize("name", ["rollout 1", "evaluation 2", "rollout 4", "end"])
def test_a_stopped_run_resumes_to_the_same_bytes(
    name: str, undisturbed: dict[str, Any], tmp_path: Path, run_stage: Any, make_model: Any
) -> None:
    call = CALLS.index(name)
    (tmp_path / "fail_at.txt").write_text(str(call + 1))
    with pytest.raises(RewardError, match="the reward service is down"):
        run(tmp_path, run_stage, make_model)
    done = sum(name.startswith("rollout") for name in CALLS[:call])
    assert last_step(tmp_path, "ppo") == (done or None), "no regular checkpoint is due in a run so short"
    run(tmp_path, run_stage, make_model)
    same(results(tmp_path / "ppo"), undisturbed)
