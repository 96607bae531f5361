"""The command `rlhf diagnose`: what it prints, its exit codes, and runs that are incomplete or damaged."""

import json
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import yaml
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.config.sft_rm import RMConfig
from rlhf_cli.data.answers import RankedIds
from rlhf_cli.data.records import Answer, Record
from rlhf_cli.health import probes
from rlhf_cli.health.causes import odd_end
from rlhf_cli.health.evidence import Evidence
from rlhf_cli.health.probes import _marked
from rlhf_cli.health.ranking import gather
from rlhf_cli.trained.run import open_run
from support.tiny import read_jsonl, tiny_model, write_jsonl


def run_command(*arguments):
    return CliRunner().invoke(app, ["diagnose", *map(str, arguments)], env={"COLUMNS": "80"})


@pytest.fixture
def run(project, monkeypatch):
    monkeypatch.chdir(project)
    return project / "run"


def add_finding(run, name, message):
    path = run / "ppo" / "health.jsonl"
    rows = read_jsonl(path)
    rows[-1]["findings"] = [{"name": name, "severity": "warning", "message": message, "advice": "Rest"}]
    write_jsonl(path, rows)


def test_a_finding_is_printed_with_its_evidence_and_exit_code_2(run):
    add_finding(run, "approx_kl", "The steps were 9 nats.")
    result = run_command(run, "--files-only")
    assert result.exit_code == 2
    assert "likely: The steps of PPO were too large." in result.output
    assert "   - The steps were 9 nats.\n" in result.output
    assert "optimizer.learning_rate" in result.output
    assert "error:" not in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_json_is_one_object_with_causes_and_figures(run):
    add_finding(run, "approx_kl", "The steps were 9 nats.")
    found = json.loads(run_command(run, "--files-only", "--json").stdout)
    (cause,) = [cause for cause in found["causes"] if cause["name"] == "ppo_steps_too_large"]
    assert cause["evidence"] == ["The steps were 9 nats."]
    assert found["evidence"]["figures"]["ppo.iterations"] == 1


def test_models_are_probed_unless_only_files_are_read(run):
    probed = gather(run, device="cpu").figures
    assert 0 < probed["sft.eos_probability"] < 1
    found = open_run(run, stage=None, device=torch.device("cpu"), seed=0)
    rows = found.demonstrations(*found.load(found.model_path("sft")))
    counts = Counter(token for row in rows for token, wanted in zip(row.ids, row.loss_mask, strict=True) if wanted)
    frequencies = torch.distributions.Categorical(torch.tensor(list(counts.values()), dtype=torch.float64))
    assert probed["sft.token_entropy"] == pytest.approx(frequencies.entropy().item())
    assert probed["rm.probed_accuracy"] * probed["rm.probed_accuracy_rows"] % 0.5 == 0
    assert not probed.keys() & {"rm.judge_agrees_with_labels"}, "the project has no judge"
    assert "sft.eos_probability" not in gather(run, device="cpu", files_only=True).figures


def test_a_probe_that_fails_is_named_and_the_others_are_made(run):
    shutil.rmtree(run / "sft" / "model")
    evidence = gather(run, device="cpu")
    assert len(evidence.problems) == 2, "SFT's own probe, and how far the reward model moved from it"
    result = run_command(run)
    assert "Not measured: sft:" in result.output
    assert "Traceback" not in result.output


def test_a_stage_that_is_still_running_is_judged_by_its_files(run):
    (run / "ppo").rename(run / ".ppo.partial")
    (run / ".ppo.partial" / "manifest.json").unlink()
    evidence = gather(run, device="cpu", files_only=True)
    assert evidence.stages == ["sft", "rm", "ppo"]
    assert evidence.finished == ["sft", "rm"]
    assert evidence.ppo.iterations == 1


def test_a_directory_without_a_run_is_one_line_and_exit_code_2(tmp_path):
    result = run_command(tmp_path)
    assert result.exit_code == 2
    assert "no stage has metrics yet" in result.output


def test_a_template_is_what_prompts_end_with():
    def signs(sft, ppo):
        evidence = Evidence(["sft", "ppo"], texts={"sft.prompt_end": sft, "ppo.prompt_end": ppo})
        return len(list(odd_end("ppo", evidence)))

    assert signs("\n\nAssistant:", "\n### Answer\n") == 1
    assert signs("\n\nAssistant:", "") == 1
    assert signs("", "\n\nAssistant:") == 1
    assert signs("\n\nAssistant:", "\n\nAssistant:\n\nAssistant:") == 1, "the template was applied twice"
    assert signs(".\n\nAssistant:", "\n\nAssistant:") == 0, "four prompts may share their last letter by chance"
    assert signs("?", ".") == 0
    assert signs("", "") == 0


def write_stage(run, stage, metrics, final, report=None):
    """Replace the metrics of a stage, its final figures, and what `rlhf eval` found out about it."""
    write_jsonl(run / stage / "metrics.jsonl", metrics)
    manifest = run / stage / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"metrics": final}))
    if report is not None:
        (run / "eval" / stage).mkdir(parents=True, exist_ok=True)
        (run / "eval" / stage / "evaluation.json").write_text(json.dumps(report))


def test_every_figure_is_computed_from_the_rows_of_its_own_stage(run):
    """The files of a real run with rows of which each figure was worked out by hand; no two figures are equal."""
    squares = [float((i - 14) ** 2 + 1) for i in range(20)]  # 197 170 ... 37 26 ... 2 1 2 5 10 17 26
    rows = [
        {"step": i + 1, "loss/sft": loss, "sft/bad_steps": float(i == 3), "sft/grad_norm": i + 1.0}
        for i, loss in enumerate(squares)
    ]
    rows.append({"step": 21, "loss/sft": None, "sft/grad_norm": None})  # a bad step: they were not finite
    write_stage(run, "sft", [*rows, {"step": 20, "eval/loss": 9.25}], {"eval/loss": 9.25})
    prompts = ["Q: one A:", "Q: two A:", "Q: three A:", "Q: two A:"]
    samples = [{"step": 20, "prompt": prompt, "ended": prompt < "Q: t"} for prompt in prompts]
    write_jsonl(run / "sft/samples.jsonl", [{"step": 10, "prompt": "Q: one A:", "ended": True}, *samples])

    rows = [{"step": i + 1, "loss/rm": 0.9 - i / 100, "rm/accuracy": i / 20, "rm/bad_steps": 2.0} for i in range(20)]
    length = {"figures": {"score_length_correlation": {"value": 0.31, "high": 0.42}, "margin": {"value": 8.0}}}
    write_stage(run, "rm", rows, {"eval/accuracy": 0.61, "rm/sft_score_mean": -0.3}, length)

    averaged = ["objective/score", "objective/kl", "objective/kl_coef", "policy/entropy", "response/eos_fraction"]
    averaged += ["objective/score_std", "objective/return_variance", "value/error", "value/explained_variance"]
    rows = [  # i is 1 to 8: the first three have the mean 2, the last three 7
        {name: 10.0 * number + i for number, name in enumerate(averaged, 1)}
        | {"step": i, "policy/approx_kl": 0.5 * i, "policy/clip_fraction": 0.01 * i, "reward/rm_cut": float(i)}
        for i in range(1, 9)
    ]
    rows[4] |= dict.fromkeys(("policy/approx_kl", "policy/clip_fraction"))
    before = {"score_mean": 1.5, "kl": 0.25, "length": 31.0, "eos_fraction": 0.75, "distinct_2": 0.125, "seconds": 3.0}
    before |= {"wit": 2.5}  # the judge's only number
    sides = {f"sft/{k}": v for k, v in before.items()} | {f"ppo/{k}": v + 100 for k, v in before.items()}
    replies = [{"sft": {"score": x, "gold": y}} for x, y in ((0.0, 0.0), (1.0, 1.0), (2.0, 0.0), (3.0, 1.0))]
    write_stage(run, "ppo", rows, sides, {"difference": {"gold": {"low": -0.7, "high": 0.9}}, "replies": replies})
    findings = [
        {"name": "empty", "severity": "warning", "message": text, "advice": "Rest."} for text in ("First.", "Last.")
    ]
    write_jsonl(
        run / "ppo/health.jsonl", [{"step": i, "line": None, "findings": [one]} for i, one in enumerate(findings)]
    )

    evidence = gather(run, files_only=True)
    batch = yaml.safe_load((run / "ppo/config.yaml").read_text())["ppo"]["rollout_batch_size"]
    kept = {"score_mean": 1.5, "kl": 0.25, "length": 31.0, "gold": 2.5}
    assert evidence.figures == pytest.approx(
        {
            "sft.loss": 9.25,
            "sft.steps": 20.0,
            "sft.loss_first": 197.0,
            "sft.loss_start": 183.5,
            "sft.loss_half": 31.5,
            "sft.loss_end": 21.5,
            "sft.loss_lowest": 1.5,
            "sft.bad_steps": 1.0,
            "sft.grad_spike": 20 / 15.5,
            "sft.samples": 4.0,
            "sft.samples_ended": 0.25,
            "rm.accuracy": 0.61,
            "rm.rm/sft_score_mean": -0.3,
            "rm.steps": 20.0,
            "rm.loss_first": 0.9,
            "rm.loss_start": 0.895,
            "rm.loss_half": 0.815,
            "rm.loss_end": 0.715,
            "rm.loss_lowest": 0.715,
            "rm.bad_steps": 40.0,
            "rm.training_accuracy": 0.925,
            "rm.score_length_correlation": 0.31,
            **{f"ppo.start.{name.partition('/')[2]}": 10.0 * number + 2 for number, name in enumerate(averaged, 1)},
            **{f"ppo.end.{name.partition('/')[2]}": 10.0 * number + 7 for number, name in enumerate(averaged, 1)},
            **{f"ppo.before.{k}": v for k, v in kept.items()},
            **{f"ppo.after.{k}": v + 100 for k, v in kept.items()},
            "ppo.iterations": 8.0,
            "ppo.mean.approx_kl": 0.5 * 31 / 7,  # of iterations 1 to 8 without 5
            "ppo.mean.clip_fraction": 0.01 * 31 / 7,
            "ppo.cut_share": 4.5 / batch,
            "ppo.only_normalised_rewards": 1.0,
            "ppo.gold_change_low": -0.7,
            "ppo.gold_change_high": 0.9,
            "ppo.score_gold_correlation": 5**-0.5,
            "ppo.score_gold_pairs": 4.0,
        }
    )
    assert evidence.texts["sft.prompt_end"] == " A:"
    assert evidence.findings == {"ppo.empty": {"message": "Last.", "advice": "Rest."}}
    assert evidence.settings["ppo.ppo.rollout_batch_size"] == batch
    for stage in ("sft", "rm"):
        longest = yaml.safe_load((run / stage / "config.yaml").read_text())["data"]["max_length"]
        assert evidence.settings[f"{stage}.data.max_length"] == longest


def test_the_evidence_knows_a_reward_model_with_a_negative_weight(run):
    path = run / "ppo" / "config.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    config["rewards"][0]["weight"] = -1.5
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    settings = gather(run, files_only=True).settings
    assert (settings["ppo.opposed"], settings["ppo.has_reward_model"]) == ([-1.5], True)


def test_what_health_said_is_printed_even_if_no_cause_reads_it(run):
    path = run / "sft" / "health.jsonl"
    finding = {"name": "high_loss", "severity": "warning", "message": "The loss is 9.", "advice": "Lower it"}
    write_jsonl(path, [{"step": 1, "line": None, "findings": [finding]}])
    output = run_command(run, "--files-only").output
    assert "Health of sft, high_loss: The loss is 9.\n  To try: Lower it\n" in output


def test_of_words_that_mark_as_many_pairs_the_first_is_named():
    """The order of a set of words differs from process to process."""
    row = Record("Q", "a:1", (Answer("some of these words"), Answer("no such letters")), ranked=True)
    assert _marked([RankedIds([], row)]) == {"rm.word": "letters", "rm.word_share": -1.0}


def test_the_base_of_the_reward_model_is_read_at_its_revision(monkeypatch):
    model, read = tiny_model("llama"), []
    monkeypatch.setattr(probes, "load_policy", lambda *place: read.append(place) or model)
    config = RMConfig(
        artifacts="a",
        model={"path": "owner/name", "revision": "abc"},
        data={"train": "d.jsonl"},
        training={"num_steps": 1},
        optimizer={"learning_rate": 1e-3},
    )
    probe = probes.Probes(None)
    vars(probe)["scorer"] = SimpleNamespace(config=config, model=model)
    assert probe.moved() == {"rm.moved": 0.0}
    assert read == [("owner/name", "abc")]
