"""What a stage reads is what the earlier stage wrote: damaged, foreign and stale inputs are named by every command."""

import json
import math
import os
import shutil
from datetime import datetime
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from rlhf_cli import files
from rlhf_cli.cli import app
from rlhf_cli.config.by_stage import load_stage_config
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.errors import ArtifactError
from rlhf_cli.models.load import load_policy, load_reward_model, load_tokenizer, new_reward_model
from rlhf_cli.run import artifacts
from rlhf_cli.run.artifacts import DamagedStageError, read_manifest, require_intact
from rlhf_cli.run.identity import identity, imported_files
from rlhf_cli.run.state import what_changed
from support.projects import write_project
from support.setup import config_of


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A project with relative paths, so that a copy of it is up to date, and its three finished stages."""
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_project(Path())
        result = CliRunner().invoke(app, ["pipeline", ".", "--quiet"])
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def here(built, tmp_path, monkeypatch):
    """A copy of the built project, which is the working directory."""
    shutil.copytree(built, tmp_path / "p")
    monkeypatch.chdir(tmp_path / "p")
    monkeypatch.setenv("COLUMNS", "400")
    return tmp_path / "p"


def rlhf(*arguments, code=0):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return " ".join((result.output if code == 0 else result.stderr).split())


def flip_a_bit(weights):
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)


def put_another_run_there(weights):
    """With the time stamps of the other file."""
    os.utime("run/sft/model/model.safetensors", (1, 1))
    shutil.copy2("run/sft/model/model.safetensors", weights)


DAMAGES = {
    "weights of another run": (put_another_run_there, "was modified after the stage was finished"),
    "removed": (Path.unlink, "is missing"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_model_is_named_by_every_command(here, name):
    """By the stage itself, by the stage that reads it, finished or not, by the pipeline and by status."""
    assert rlhf("pipeline", ".").count("skipped") == 6, "three lines and three rows of the table"
    damage, words = DAMAGES[name]
    damage(here / "run/rm/model/model.safetensors")
    expected = f"run/rm: model/model.safetensors {words}. Restore it, or rebuild the rm stage with --restart"
    for arguments in (["pipeline", "."], ["rm", "rm.yaml"], ["ppo", "ppo.yaml"], ["ppo", "ppo.yaml", "--restart"]):
        message = rlhf(*arguments, code=2)
        assert expected in message
        assert "rm --config rm.yaml --restart" in message
    status = rlhf("status", "run")
    assert f"damaged: model/model.safetensors {words}" in status
    assert "stale, changed since: input rewards.0" in status
    if name == "removed":
        assert rlhf("rm", "rm.yaml", "--restart", "--quiet").startswith("rm: warning: held-out accuracy")
        assert "damaged" not in rlhf("status", "run")


def test_damage_without_new_time_stamps_is_found_when_the_model_is_loaded(here):
    """The quick check trusts time stamps; loading does not."""
    flip_a_bit(here / "run/rm/model/model.safetensors")
    manifest = here / "run/rm/manifest.json"
    manifest.write_bytes(manifest.read_bytes())  # its time stamp is now the newest
    later = datetime.fromisoformat(read_manifest("run/rm").finished).timestamp() + 10
    os.utime(here / "run/rm/model/model.safetensors", (later, later))
    manifest.write_bytes(manifest.read_bytes())
    assert "damaged: model/model.safetensors was modified" in rlhf("status", "run"), "it trusts no later touch"
    os.utime(here / "run/rm/model/model.safetensors", (1, 1))
    manifest.write_bytes(manifest.read_bytes())
    for load in (load_reward_model, load_policy):
        with pytest.raises(DamagedStageError, match=r"run/rm: model/model.safetensors was modified"):
            load("run/rm/model")
    tokenizer = here / "run/sft/model/tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    with pytest.raises(DamagedStageError, match=r"run/sft: model/tokenizer.json was modified"):
        load_tokenizer("run/sft/model")


def test_a_copied_model_and_one_without_digests_are_accepted(here):
    """A changed model can be used under another path; manifests without digests check nothing."""
    flip_a_bit(here / "run/rm/model/model.safetensors")
    shutil.copytree("run/rm/model", "mine")
    load_reward_model("mine")
    path = here / "run/rm/manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "files": {}}))
    load_reward_model("run/rm/model")
    require_intact("run/rm", thorough=True)


def test_a_model_card_may_be_edited(here):
    card = here / "run/rm/model/README.md"
    assert "model/README.md" in read_manifest("run/rm").files
    card.write_text("my own words")
    assert "rm: skipped" in rlhf("rm", "rm.yaml")
    load_reward_model("run/rm/model")


def test_each_file_is_read_once_for_its_digest(here, monkeypatch):
    """However often a process identifies, checks and loads a model. A changed file is read again."""
    reads = []
    real = files.digest_file
    monkeypatch.setattr(files, "digest_file", lambda path: reads.append(str(path)) or real(path))
    monkeypatch.setattr(files, "SETTLED_NS", -1)
    config = load_stage_config("rm", "rm.yaml")
    for _ in range(2):
        identity(config)
        artifacts.fingerprint("run/sft/model")
        load_tokenizer("run/sft/model")
        load_policy("run/sft/model")
    assert reads.count("run/sft/model/model.safetensors") == 1
    assert reads.count("pref.jsonl") == 1
    before = artifacts.fingerprint("run/sft/model")
    flip_a_bit(here / "run/sft/model/model.safetensors")
    assert artifacts.fingerprint("run/sft/model") != before


def test_a_stage_whose_manifest_is_broken_runs_again_by_restart(here):
    (here / "run/rm/manifest.json").write_text("{}")
    assert "cannot be read by this version of rlhf" in rlhf("rm", "rm.yaml", code=2)
    assert "rm broken" in rlhf("status", "run")
    assert "rm: runs again (its manifest cannot be read); run/rm is replaced" in rlhf("rm", "rm.yaml", "--restart")
    assert read_manifest("run/rm").stage == "rm"


def test_a_stale_input_is_named(here):
    """The rm stage was trained on other rows than its config names now; PPO says so, and still runs or skips."""
    with (here / "pref.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "the lamp", "chosen": " is new", "rejected": " is late"}) + "\n")
    output = rlhf("ppo", "ppo.yaml")
    assert "ppo: warning: run/rm is used as it is, but it is stale, changed since: data train" in output
    assert "ppo: skipped" in output
    assert "stale, changed since: data train" in rlhf("status", "run")


# ---------------------------------------------------------------------------------------- loaded weights


def not_finite(tensors):
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = math.nan
    tensors["model.layers.1.mlp.up_proj.weight"][4, 5] = math.inf


def cut_short(tensors):
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        tensors[name] = tensors[name][:7].clone()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (not_finite, r"m: weight model.layers.1.mlp.up_proj.weight contains NaN or inf \(2 of 1,536 values\)"),
        (
            cut_short,
            r"layers.0.mlp.up_proj.weight has shape \[7, 32\] in the file, and config.json says \[48, 32\] \(and 1",
        ),
    ],
)
def test_a_wrong_weight_is_reported_with_its_name(make_model, tmp_path, change, says):
    folder = shutil.copytree(make_model("llama"), tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for load in (load_policy, lambda path: new_reward_model(path, None, seed=0, head_std=None)):
        with pytest.raises(ArtifactError, match=says):
            load(str(folder))


# --------------------------------------------------------------------------------------- helper modules

REWARD = """
import json
import os.path as p
from neighbour import scale
from package.inner import value
def f(prompts, responses, rows):
    import late.module
    return [scale * value for _ in rows]
"""


@pytest.fixture
def modules(tmp_path):
    """A reward file with modules beside it, some of which it imports."""
    files = {
        "reward.py": REWARD,
        "neighbour.py": "from package import other\nscale = 1\n",
        "package/__init__.py": "",
        "package/inner.py": "from . import sibling\nfrom .deep.er import x\nvalue = 2\n",
        "package/other.py": "import rlhf_cli.errors\n",
        "package/sibling.py": "import reward\n",
        "package/deep/er.py": "from ..wide import y\n",
        "package/wide.py": "this is no Python",
        "package/unused.py": "",
        "late/module.py": "",
        "unused.py": "",
        "rlhf_cli/errors.py": "",
    }
    for name, text in files.items():
        (tmp_path / "own" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "own" / name).write_text(text)
    return tmp_path / "own"


def test_the_modules_that_a_file_imports_are_found(modules):
    names = [path.relative_to(modules).as_posix() for path in imported_files(modules / "reward.py")]
    package = ["__init__", "deep/er", "inner", "other", "sibling", "wide"]
    assert names == ["late/module.py", "neighbour.py", *(f"package/{name}.py" for name in package)]


@pytest.mark.parametrize("changed", ["reward.py", "neighbour.py", "package/deep/er.py"])
def test_a_change_of_a_helper_module_is_a_change_of_the_reward(modules, changed, write_config, make_model, tmp_path):
    config = config_of(
        write_config,
        "ppo",
        PPOConfig,
        tmp_path / "run",
        policy={"path": str(make_model("llama"))},
        rewards=[{"type": "function", "function": f"{modules}/reward.py:f"}],
        evaluation={"gold": f"{modules}/unused.py:f"},
    )
    before = json.loads(json.dumps(identity(config)))
    (modules / "unused.py").touch()
    (modules / "package/unused.py").write_text("changed = True")
    assert identity(config) == before
    assert what_changed(config, before, tmp_path / "run") == ""
    (modules / changed).write_text((modules / changed).read_text() + "\n# changed\n")
    role = "rewards.0" if changed == "reward.py" else f"rewards.0 import {changed}"
    assert artifacts.differences(before, identity(config)) == [f"inputs.{role}"]
    assert what_changed(config, before, tmp_path / "run") == f"stale, changed since: input {role}"
    if changed != "reward.py":
        (modules / changed).unlink()
        assert f"input {role}" in what_changed(config, before, tmp_path / "run"), "a module that is gone"
