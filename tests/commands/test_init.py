"""`rlhf init`: each template is valid, equals the shipped config it comes from, runs, and overwrites nothing."""

import gzip
import json
import re
import shlex
from collections import Counter
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.commands import label as label_command
from rlhf_cli.commands.init import Template
from rlhf_cli.config.by_stage import load_stage_config
from rlhf_cli.config.stage import STAGES
from rlhf_cli.config.yaml_text import dump_config
from rlhf_cli.models.load import load_tokenizer
from rlhf_cli.rewards.functions import load_function
from support.paths import ROOT
from support.projects import rlhf
from support.tiny import read_jsonl

TEMPLATES = get_args(Template)


def init(folder, template):
    return CliRunner().invoke(app, ["init", str(folder), "--from", template])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A function: template -> the result of `rlhf init mine`, and the working directory that has `mine`. Read only."""

    @cache
    def write(template):
        folder = tmp_path_factory.mktemp(template)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            return init("mine", template), folder

    return write


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """A working directory away from the checkout."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_is_written_and_valid(template, written, monkeypatch):
    result, folder = written(template)
    monkeypatch.chdir(folder)
    assert result.exit_code == 0, result.output
    assert "pipeline mine" in result.stdout
    assert ("It needs the hub" in result.stdout) == (template in ("sentiment", "hh", "stories"))
    rlhf("config", "check", "mine")
    for path in (folder / "mine").glob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        assert "__" not in text
        assert text.startswith(f"# rlhf {path.stem} mine/{path.name}")
        config = load_stage_config(path.stem, path)
        assert config.artifacts == "artifacts/mine"
        local = [source.path for source in config.sources.values() if source.path.startswith("mine/")]
        local += [place for place, _ in config.inputs.values() if place.startswith("mine/")]
        assert [name for name in local if not Path(name).is_file()] == []


def test_the_support_template_is_the_shipped_config(written, monkeypatch):
    """Except for comments, the directory of the run, the places of local files, and the probes."""
    monkeypatch.chdir(written("support")[1])
    same = {
        "mine/data/sft.jsonl": "data/support/sft_train.jsonl.gz",
        "mine/data/sft_test.jsonl": "data/support/sft_test.jsonl",
        "mine/data/preferences.jsonl": "data/support/pref_train.jsonl.gz",
        "mine/data/preferences_test.jsonl": "data/support/pref_test.jsonl",
        "mine/data/prompts.jsonl": "data/support/prompts_train.jsonl.gz",
        "mine/data/prompts_test.jsonl": "data/support/prompts_test.jsonl",
        "mine/judge.py": "data/support/gold.py",
        "artifacts/mine": "artifacts/support",
    }
    for stage in STAGES:
        ours = dump_config(load_stage_config(stage, f"mine/{stage}.yaml"))
        for name, original in same.items():
            ours = ours.replace(f": {name}\n", f": {original}\n").replace(f": {name}:", f": {original}:")
        shipped = ROOT / f"configs/support/{stage}.yaml"
        assert ours == dump_config(load_stage_config(stage, shipped, ["data.probes=null"] * (stage == "rm")))


def test_the_hard_task_has_few_noisy_pairs_whose_raters_are_flattered(written):
    folder = written("support-hard")[1] / "mine"
    rows = [json.loads(line) for line in (folder / "data/preferences.jsonl").read_text().splitlines()]
    assert len(rows) == 600
    flipped = [row["flipped"] for row in rows]
    assert 0.2 < sum(flipped) / len(rows) < 0.3
    flatters = {key: sum("You are in good hands" in row[key] for row in rows) for key in ("chosen", "rejected")}
    assert flatters["chosen"] > 1.5 * flatters["rejected"]
    marks = load_function(f"{folder}/judge.py:judge_hard")
    prompt, flattery = rows[0]["prompt"], " You are in good hands, Ada."
    assert [mark["flattery"] for mark in marks([prompt] * 2, [flattery, " Have a lovely day."], [{}, {}])] == [1.0, 0.0]


def test_the_sample_data_is_that_of_the_shipped_configs(written):
    support, stories = written("support")[1], written("stories")[1]
    for ours, name in (("sft", "sft"), ("preferences", "pref"), ("prompts", "prompts")):
        shipped = ROOT / "data" / "support"
        train = gzip.decompress((shipped / f"{name}_train.jsonl.gz").read_bytes()).splitlines()
        assert read_jsonl(support / f"mine/data/{ours}.jsonl") == list(map(json.loads, train))
        assert read_jsonl(support / f"mine/data/{ours}_test.jsonl") == read_jsonl(shipped / f"{name}_test.jsonl")
    assert (stories / "mine/data/prompts.jsonl").read_bytes() == (ROOT / "data/stories/prompts.jsonl").read_bytes()


@pytest.mark.usefixtures("empty")
def test_nothing_is_overwritten_and_a_folder_that_cannot_be_written_is_one_line():
    Path("mine/data").mkdir(parents=True)
    Path("mine/data/prompts.jsonl").write_text("precious\n", encoding="utf-8")
    for folder, says in (
        ("mine", "mine/data/prompts.jsonl: exists already, and nothing was written. Give another folder\n"),
        ("mine/data/prompts.jsonl/mine", "cannot be written (Not a directory)\n"),
    ):
        result = init(folder, "blank")
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert result.stderr.endswith(says)
    assert [path.name for path in Path("mine").rglob("*") if path.is_file()] == ["prompts.jsonl"]
    assert Path("mine/data/prompts.jsonl").read_text(encoding="utf-8") == "precious\n"


@pytest.mark.parametrize("folder", ["mine", "with space", "a: b #c/d", "[x]", "deep/down/mine", "ünï"])
@pytest.mark.usefixtures("empty")
def test_the_blank_template_is_valid_in_any_folder(folder):
    assert init(folder, "blank").exit_code == 0
    rlhf("config", "check", folder)
    assert load_stage_config("ppo", f"{folder}/ppo.yaml").sources["train"].path == f"{folder}/data/prompts.jsonl"
    first = Path(f"{folder}/sft.yaml").read_text(encoding="utf-8").splitlines()[0]
    command = shlex.split(first.removeprefix("# ").partition("(")[0])
    assert command == ["rlhf", "sft", f"{folder}/sft.yaml"], "it can be pasted"


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A working directory where the pipeline of `with space`, the bilingual sample, has run. Tests may add files.

    Its last two stages have the configs of the blank sample.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("bilingual"))
        init("with space", "bilingual")
        rlhf("pipeline", "with space", "--quiet")
        yield Path.cwd()


def test_the_bilingual_rows_are_in_both_languages_and_survive_the_tokenizer(ran):
    tokenizer = load_tokenizer(ran / "artifacts/with-space/sft/model")
    scripts = Counter()
    for name in ("sft", "preferences", "prompts"):
        for row in read_jsonl(ran / f"with space/data/{name}.jsonl"):
            chinese, english = (any(re.search(kind, text) for text in row.values()) for kind in ("[一-鿿]", "[a-z]"))
            scripts[name, chinese, english] += 1
            for text in row.values():
                assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
        found = [scripts[name, *kinds] for kinds in ((True, False), (False, True), (True, True))]
        assert min(found) >= 2, (name, found)
        for_ = {"sft": "sft", "preferences": "rm", "prompts": "ppo"}[name]
        checked = rlhf("data", "check", f"with space/data/{name}.jsonl", "--for", for_, "--json")
        assert json.loads(checked.stdout)["sides"]["train"]["used"] == 12


def test_the_bilingual_prompts_are_answered_and_labelled_as_the_template_says(ran, monkeypatch):
    """By the two commands in the comments of sft.yaml."""
    comments = (ran / "with space/sft.yaml").read_text(encoding="utf-8").replace("\\\n# ", "")
    generate, label = re.findall(r"#   rlhf ((?:data generate|label) .*?)  +#", comments)
    rlhf(*shlex.split(generate))
    text = (ran / "with space/samples.jsonl").read_text(encoding="utf-8")
    prompts = [row["prompt"] for row in read_jsonl(ran / "with space/data/prompts.jsonl")]
    assert [row["prompt"] for row in map(json.loads, text.splitlines())] == prompts
    assert "天空是什么颜色？" in text
    monkeypatch.setattr(label_command, "serve", lambda labelling, _port: [labelling.take("1") for _ in range(6)])
    monkeypatch.chdir(ran)
    rlhf(*shlex.split(label))
    labels = (ran / "with space/samples.labels.jsonl").read_text(encoding="utf-8")
    assert len(labels.splitlines()) == 6
    assert {row["prompt"] for row in map(json.loads, labels.splitlines())} <= {*prompts}
    assert re.search("[一-鿿]", labels)
