"""The command `rlhf diagnose`: what it prints, its exit codes, and runs that are incomplete or damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.diagnosis.diagnose import gather
from rlhf_cli.diagnosis.evidence import Evidence
from rlhf_cli.diagnosis.rules_ppo import CAUSES as PPO
from support.tiny import read_jsonl, write_jsonl


def run_command(*arguments: object):
    return CliRunner().invoke(app, ["diagnose", *map(str, arguments)], env={"COLUMNS": "80"})


@pytest.fixture
def run(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(project)
    return project / "run"


def add_finding(run: Path, name: str, message: str) -> None:
    path = run / "ppo" / "health.jsonl"
    rows = read_jsonl(path)
    rows[-1]["findings"] = [{"name": name, "severity": "warning", "message": message, "advice": "Rest"}]
    write_jsonl(path, rows)


def test_a_finding_is_printed_with_its_evidence_and_exit_code_2(run: Path) -> None:
    add_finding(run, "approx_kl", "The steps were 9 nats.")
    result = run_command(run, "--files-only")
    assert result.exit_code == 2
    assert "likely: The steps of PPO were too large." in result.output
    assert "   - The steps were 9 nats.\n" in result.output
    assert "optimizer.learning_rate" in result.output
    assert "error:" not in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_json_is_one_object_with_causes_and_figures(run: Path) -> None:
    add_finding(run, "approx_kl", "The steps were 9 nats.")
    found = json.loads(run_command(run, "--files-only", "--json").stdout)
    (cause,) = [cause for cause in found["causes"] if cause["name"] == "ppo_steps_too_large"]
    assert cause["evidence"] == ["The steps were 9 nats."]
    assert found["evidence"]["figures"]["ppo.iterations"] == 1


def test_models_are_probed_unless_only_files_are_read(run: Path) -> None:
    probed = gather(run, device="cpu").figures
    assert 0 < probed["sft.eos_probability"] < 1
    assert probed["rm.probed_accuracy"] * probed["rm.probed_accuracy_rows"] % 0.5 == 0
    assert not probed.keys() & {"rm.judge_agrees_with_labels"}, "the project has no judge"
    assert "sft.eos_probability" not in gather(run, device="cpu", files_only=True).figures


def test_a_probe_that_fails_is_named_and_the_others_are_made(run: Path) -> None:
    shutil.rmtree(run / "sft" / "model")
    evidence = gather(run, device="cpu")
    assert len(evidence.problems) == 2, "SFT's own probe, and how far the reward model moved from it"
    result = run_command(run)
    assert "Not measured: sft:" in result.output
    assert "Traceback" not in result.output


def test_a_stage_that_is_still_running_is_judged_by_its_files(run: Path) -> None:
    (run / "ppo").rename(run / ".ppo.partial")
    (run / ".ppo.partial" / "manifest.json").unlink()
    evidence = gather(run, device="cpu", files_only=True)
    assert evidence.stages == ["sft", "rm", "ppo"]
    assert evidence.finished == ["sft", "rm"]
    assert evidence["ppo.iterations"] == 1


def test_a_directory_without_a_run_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    result = run_command(tmp_path)
    assert result.exit_code == 2
    assert "no stage has metrics yet" in result.output


def test_a_template_is_what_prompts_end_with() -> None:
    (cause,) = [cause for cause in PPO if cause.name == "template_differs"]

    def signs(sft: str, ppo: str) -> int:
        return len(cause.signs(Evidence(["sft", "ppo"], texts={"sft.prompt_end": sft, "ppo.prompt_end": ppo})))

    assert signs("\n\nAssistant:", "\n### Answer\n") == 1
    assert signs("\n\nAssistant:", "") == 1
    assert signs("", "\n\nAssistant:") == 1
    assert signs(".\n\nAssistant:", "\n\nAssistant:") == 0, "four prompts may share their last letter by chance"
    assert signs("?", ".") == 0
    assert signs("", "") == 0
