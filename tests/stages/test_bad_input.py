"""Bad input gives one clear line and exit code 2, and finished stages stay as they were."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.data.paths import SUFFIXES, data_fingerprint
from rlhf_cli.program import program
from rlhf_cli.run import artifacts
from support.projects import DEMONSTRATIONS, fails
from support.tiny import write_jsonl

# -------------------------------------------------------------------------------------- stage order


@pytest.mark.parametrize(("stage", "missing"), [("rm", "sft"), ("ppo", "sft"), ("ppo", "rm")])
def test_a_missing_stage_is_reported_with_the_command_that_runs_it(project: Path, stage: str, missing: str) -> None:
    shutil.rmtree(project / "run" / missing)
    message = fails(project, stage)
    assert f"no finished '{missing}' stage. Run: {program()} {missing} --config {project / missing}.yaml" in message


# --------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize(
    ("stage", "setting", "message"),
    [
        ("sft", "data.max_length=3", "longer than 3 tokens"),
        ("rm", "data.max_length=2", "longer than 2 tokens"),
        ("ppo", "data.max_prompt_length=1", "longer than 1 tokens"),
        ("sft", "data.max_length=500", "the model has 128 positions"),
        ("ppo", "rollout.max_new_tokens=500", "the model has 128 positions"),
        ("ppo", "policy.path=./no/such/model", "no such directory"),
        ("sft", "model.scratch.architecture=lama", "no model type 'lama'"),
        ("sft", "model.scratch.config.hiden_size=3", "llama has no setting hiden_size"),
        ("sft", "model.scratch.config.num_attention_heads=3", "cannot build this model"),
        ("sft", "artifacts={project}/pref.jsonl/run", "cannot be written"),
    ],
)
def test_a_setting_that_cannot_work_is_reported(project: Path, stage: str, setting: str, message: str) -> None:
    assert message in fails(project, stage, "--set", setting.format(project=project))


def test_a_file_in_the_place_of_the_folder_that_a_stage_builds_is_reported(project: Path) -> None:
    (project / "run/.sft.partial").touch()
    message = fails(project, "sft", "--restart")
    assert "run/.sft.partial: cannot be written (Not a directory)" in message


def test_a_held_out_prompt_that_is_longer_than_the_model_is_reported(project: Path) -> None:
    path = write_jsonl(project / "long.jsonl", [{"prompt": "late " * 42}])
    message = fails(project, "ppo", "--set", f"data.test={path}", "--set", "data.max_prompt_length=200")
    assert "the model has 128 positions" in message


# ------------------------------------------------------------------------------------------- models


def copy_model(project: Path, stage: str) -> Path:
    copy = project / "copy"
    shutil.copytree(project / "run" / stage / "model", copy)
    return copy


def test_a_model_directory_without_weights_is_reported(project: Path) -> None:
    model = copy_model(project, "sft")
    (model / "model.safetensors").unlink()
    message = fails(project, "ppo", "--set", f"policy.path={model}")
    assert "has no weights. Save the model again with save_pretrained" in message
    (model / "pytorch_model.bin").write_bytes(b"not read")
    assert "a pickle is never read" in fails(project, "ppo", "--set", f"policy.path={model}")
    (model / "config.json").unlink()
    assert "no config.json" in fails(project, "rm", "--set", f"model.path={model}")


def test_models_without_a_head_or_with_truncated_weights_are_refused(project: Path) -> None:
    whole = project / "run" / "sft" / "model"
    message = fails(project, "ppo", "--set", f"rewards=[{{type: reward_model, path: {whole}}}]")
    assert "score.weight" in message
    assert "would be random" in message
    model = copy_model(project, "sft")
    weights = load_file(model / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert "lm_head.weight" in fails(project, "ppo", "--set", f"policy.path={model}")
    (model / "model.safetensors").write_bytes((whole / "model.safetensors").read_bytes()[:1000])
    assert "cannot load a model (" in fails(project, "ppo", "--set", f"policy.path={model}")


def test_weights_with_more_layers_than_the_config_are_refused(project: Path) -> None:
    model = copy_model(project, "sft")
    weights = load_file(model / "model.safetensors")
    beyond = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    weights |= {
        n.replace(".0.", f".{beyond}."): w.clone() for n, w in weights.items() if n.startswith("model.layers.0.")
    }
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    for stage, key in (("rm", "model"), ("ppo", "policy")):
        message = fails(project, stage, "--set", f"{key}.path={model}")
        assert f"weight model.layers.{beyond}." in message
        assert "is of a layer that config.json does not have" in message


def test_a_tokenizer_with_more_ids_than_embeddings_is_refused(project: Path) -> None:
    model = copy_model(project, "sft")
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    size = max(tokenizer["model"]["vocab"].values())
    tokenizer["model"]["vocab"] |= {f"extra{i}": size + 1 + i for i in range(50)}
    path.write_text(json.dumps(tokenizer))
    assert "the model embeds" in fails(project, "ppo", "--set", f"policy.path={model}")


# --------------------------------------------------------------------------------------------- disk


@pytest.mark.parametrize("path", ["/", "{up}", "/proc", "{project}", "{project}/empty"])
def test_a_folder_without_data_or_a_model_is_refused_before_it_is_scanned(project, path, monkeypatch):
    """`data.train: /` would hash the whole disk before any message."""
    path = path.format(project=project, up="../" * 40)
    (project / "empty").mkdir()
    (project / "empty" / "rows.md").write_text("no data")
    (project / "rows.d").mkdir()
    # The project folder itself has data files, so only a model is missing there.
    monkeypatch.setattr(artifacts, "digest_file", lambda path: pytest.fail(f"reads {path}"))
    for stage in ("sft", "rm", "ppo") if path != str(project) else ():
        for key in ("data.train", "data.test"):
            message = fails(project, stage, "--set", f"{key}={path}")
            assert f"{key}: {path}: the folder has no data file" in message
    for stage, key in (("sft", "model"), ("rm", "model"), ("ppo", "policy"), ("ppo", "ref_policy")):
        assert f"{key}: {path}: has no config.json" in fails(project, stage, "--set", f"{key}={{path: {path}}}")


def test_the_fingerprint_of_a_data_folder_covers_its_data_files(tmp_path: Path) -> None:
    """The files that are read: those directly in the folder, or those that match a glob."""
    (tmp_path / "deep").mkdir()
    write_jsonl(tmp_path / "rows.jsonl", DEMONSTRATIONS)
    glob = str(tmp_path / "**" / "*.jsonl")
    before, of_glob = data_fingerprint(str(tmp_path)), data_fingerprint(glob)
    for name in ("notes.txt", "deep/rows.csv", "manifest.yaml"):
        (tmp_path / name).write_text("{}")
        assert data_fingerprint(str(tmp_path)) == before, name
        assert data_fingerprint(glob) == of_glob
    (tmp_path / "deep/rows.jsonl").write_text("{}")
    assert data_fingerprint(str(tmp_path)) == before
    assert data_fingerprint(glob) != of_glob
    fingerprints = {before}
    endings = [ending for ending in SUFFIXES if not ending.startswith(".txt")]
    for name in (f"more{ending}" for ending in endings):
        (tmp_path / name).write_text("{}")
        fingerprints.add(data_fingerprint(str(tmp_path)))
    write_jsonl(tmp_path / "rows.jsonl", DEMONSTRATIONS[1:])
    fingerprints.add(data_fingerprint(str(tmp_path)))
    assert len(fingerprints) == 2 + len(endings)
    assert data_fingerprint("nobody/nothing") == "hub:nobody/nothing@main"
    assert data_fingerprint(str(tmp_path / "gone.jsonl")) == data_fingerprint(str(tmp_path / "gone*")) == "missing"


# ------------------------------------------------------------------------------- files with arbitrary content


OTHERS = ["x", None, -1, 10**400, 1.5, float("nan"), [], {}, [["a"]], True, {"a": {"b": 1}}]
DEEP = "[" * 100_000 + "]" * 100_000


def ends(*arguments: str) -> str:
    """Run a command that may succeed or fail, but only with one line and no traceback; return stderr."""
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code in (0, 1, 2), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    if result.exit_code:
        assert len([line for line in result.stderr.splitlines() if line.startswith("error: ")]) == 1, result.stderr
    return result.stderr


def model_file(project: Path, name: str) -> Path:
    """A file of a finished stage's model, whose manifest has no digests: a changed file is read, not refused."""
    path = project / "run" / name
    manifest = path.parents[1] / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "files": {}}))
    return path


@pytest.mark.parametrize("key", ["score_mean", "score_std"])
def test_reward_model_settings_of_a_wrong_type_are_reported(project: Path, key: str) -> None:
    path = model_file(project, "rm/model/config.json")
    config = json.loads(path.read_text())
    for value in (*OTHERS, *((0, 0.0) if key == "score_std" else ())):
        path.write_text(json.dumps(config | {key: value}))
        if value in (None, 1.5) or value is True or (value == -1 and key == "score_mean"):
            continue
        assert f"config.json has {key}: " in fails(project, "ppo", "--restart"), value


@pytest.mark.parametrize("name", ["manifest.json", "model/config.json", "model/tokenizer_config.json"])
def test_a_stage_file_with_arbitrary_content_is_reported(project: Path, name: str) -> None:
    path = project / "run/sft" / name if name == "manifest.json" else model_file(project, f"sft/{name}")
    for text in (DEEP, '{"a":' * 50_000, "", "null", "[]", "{}", "\xff"):
        path.write_bytes(text.encode("latin-1"))
        stderr = ends("rm", "--config", str(project / "rm.yaml"), "--restart", "--quiet")
        if name == "manifest.json":
            assert "manifest.json: " in stderr
        ends("status", str(project / "run"))


OPTIONAL = ("contract", "dtypes", "precision")
"""Keys that manifests of older versions lack."""


def test_a_manifest_with_values_of_a_wrong_type_is_reported(project: Path) -> None:
    """At the top, within a mapping, or where one is missing."""
    path = project / "run" / "ppo" / "manifest.json"
    manifest = json.loads(path.read_text())
    for key, right in manifest.items():
        within = [right | {"x": value} for value in OTHERS] if isinstance(right, dict) else []
        for wrong in (*OTHERS[:: 1 + len(within)], *within):
            path.write_text(json.dumps(manifest | {key: wrong}))
            ends("status", str(project / "run"))
        path.write_text(json.dumps({k: v for k, v in manifest.items() if k != key}))
        assert "broken" in CliRunner().invoke(app, ["status", str(project / "run")]).stdout or key in OPTIONAL


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("config.json", "num_hidden_layers", -1, ""),
        ("config.json", "attention_dropout", None, ""),
        ("config.json", "num_attention_heads", 3, "cannot load a tokenizer (Class validation error for validator "),
        ("config.json", "num_hidden_layers", 10**9, ""),
        ("tokenizer_config.json", "model_max_length", "x", "cannot load a tokenizer ("),
        ("tokenizer_config.json", "chat_template", 3, "cannot load a tokenizer ("),
        # At the start, not when the trained model is saved.
        ("generation_config.json", None, None, "generation_config.json: cannot be read ("),
        ("generation_config.json", "eos_token_id", ["x"], ""),
        ("generation_config.json", "output_attentions", True, ""),
    ],
)
def test_a_file_of_a_model_with_wrong_values_is_reported(project, name, key, value, message):
    path = model_file(project, f"sft/model/{name}")
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}) if key is not None else "{")
    line = fails(project, "ppo" if name == "generation_config.json" else "rm", "--restart")
    assert f"run/sft/model{'/' if message.startswith(name) else ': '}{message}" in line
    assert name in line or name != "generation_config.json"


def test_a_generation_config_with_temperature_but_no_sampling_is_saved(project: Path) -> None:
    """Some released models have such a generation config."""
    path = model_file(project, "sft/model/generation_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_sample": False, "temperature": 0.6}))
    override = f"model={{path: {project}/run/sft/model}}"
    assert ends("sft", "--config", str(project / "sft.yaml"), "--quiet", "--set", override) == ""
