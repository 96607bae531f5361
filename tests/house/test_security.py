"""Models, data, configs and artifacts from outside run no code and reach no other file.

The traps are real: pickles and modules that write a file when they are read. The only code that runs is a reward
function or judge that your own config names.
"""

import contextlib
import json
import pickle
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers.utils import is_env_variable_true
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.config.by_stage import CONFIGS
from rlhf_cli.config.data import DataSource
from rlhf_cli.config.loader import load_config
from rlhf_cli.data.read import read_rows
from rlhf_cli.errors import ArtifactError, DataError, UserError
from rlhf_cli.models import load
from rlhf_cli.run.artifacts import digest_file
from rlhf_cli.run.checkpoint_files import checkpoints_directory, damage_of, list_checkpoints
from rlhf_cli.run.stage_run import StageRun
from support import crash
from support.paths import ROOT
from support.projects import rlhf, write_project
from support.source import source_files
from support.tiny import write_jsonl

LOADERS = {
    "policy": load.load_policy,
    "reward model": load.load_reward_model,
    "new reward model": lambda path: load.new_reward_model(path, None, seed=0, head_std=None),
    "new value model": lambda path: load.new_value_model(path, None),
    "value model": load.load_value_model,
}


class Trap:
    """An object that writes a file when it is unpickled."""

    def __init__(self, sprung):
        self.sprung = sprung

    def __reduce__(self):
        return (Path.write_text, (self.sprung, "ran"))


opened = []


@pytest.fixture(scope="module", autouse=True)
def _note_opened():
    """Nothing removes the hook, so only a process that runs these tests has it."""

    def note(event, arguments):
        if event == "open" and isinstance(arguments[0], str | Path):
            opened.append(str(arguments[0]))

    sys.addaudithook(note)


@pytest.fixture
def sprung(tmp_path):
    """The path where traps write. The test fails if it exists at the end."""
    path = tmp_path / "sprung"
    yield path
    assert not path.exists()


@pytest.fixture
def model(make_model, tmp_path):
    """A copy of a tiny Llama that a test may change."""
    return Path(shutil.copytree(make_model("llama"), tmp_path / "llama"))


def change_config(model, **values):
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refused(load_model, model):
    """Load a model that must be refused; return the message, one line."""
    with pytest.raises(ArtifactError) as caught:
        load_model(str(model))
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value).removeprefix(f"{model}: ")


# ------------------------------------------------------------------------------------------ pickles


def test_the_traps_spring_when_they_are_read(tmp_path):
    """Loading the pickles normally springs the traps, so the tests below can fail."""
    torch.save({"a": Trap(tmp_path / "one")}, tmp_path / "a.bin")
    torch.load(tmp_path / "a.bin", weights_only=False)
    pickle.loads(pickle.dumps(Trap(tmp_path / "two")))
    exec(module(tmp_path, tmp_path / "three").read_text(), {})
    assert [(tmp_path / name).exists() for name in ("one", "two", "three")] == [True] * 3


@pytest.mark.parametrize("loader", LOADERS)
def test_a_model_whose_weights_are_a_pickle_is_refused(model, sprung, loader):
    (model / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.bin", "adapter_model.bin", "x.pt"):
        torch.save({"model.norm.weight": Trap(sprung)}, model / name)
        opened.clear()
        assert "as *.safetensors" in refused(LOADERS[loader], model)
        assert str(model / name) not in opened
        (model / name).unlink()


@pytest.mark.parametrize("named_by", ["index", "config"])
@pytest.mark.parametrize(
    "name",
    [
        *("pytorch_model.bin", "adapter_model.bin"),
        *("../llama2/model.safetensors", "/etc/model.safetensors", "a/b.safetensors", ".."),
    ],
)
def test_files_that_name_a_pickle_or_a_path_as_weights_are_refused(model, sprung, name, named_by):
    shutil.copytree(model, model.parent / "llama2")
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").rename(model / "others.safetensors")
    for pickled in ("pytorch_model.bin", "adapter_model.bin"):
        torch.save({**tensors, "trap": Trap(sprung)}, model / pickled)
    if named_by == "index":
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        change_config(model, transformers_weights=name)
    opened.clear()
    for loader in LOADERS.values():
        assert refused(loader, model).startswith(f"its files name {name!r} as weights")
    assert not [path for path in opened if path.endswith("_model.bin")]


@pytest.mark.parametrize("kind", ["adapter_model.bin", "adapter_model.safetensors"])
def test_an_adapter_in_a_model_directory_is_not_applied(model, sprung, kind):
    """transformers would read the adapter's weights from a pickle, and would train and save a different model."""
    if kind.endswith(".bin"):
        torch.save({"trap": Trap(sprung)}, model / kind)
    else:
        save_file({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 32)}, model / kind)
    lora = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "base_model_name_or_path": str(model)}
    (model / "adapter_config.json").write_text(json.dumps(lora))
    opened.clear()
    assert "adapter_config.json" in refused(load.load_policy, model)
    assert str(model / kind) not in opened


def test_a_trap_beside_the_weights_is_not_read(model, sprung):
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        torch.save(Trap(sprung), model / name)
    (model / ".metadata").write_bytes(pickle.dumps(Trap(sprung)))
    opened.clear()
    load.load_policy(str(model))
    load.load_tokenizer(str(model))
    assert not [path for path in opened if path.endswith((".bin", ".pt", ".metadata"))]


def test_no_conversion_service_is_contacted_for_a_model_without_safetensors(model, monkeypatch):
    name, seen = "DISABLE_SAFETENSORS_CONVERSION", []
    monkeypatch.setenv(name, "0")
    from_pretrained = load.AutoModelForCausalLM.from_pretrained

    def observed(*args, **kwargs):
        seen.append(is_env_variable_true(name))
        return from_pretrained(*args, **kwargs)

    monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", observed)
    load.load_policy(str(model))
    assert seen == [True]


# ------------------------------------------------------------------------------- code beside a model


def module(folder, sprung):
    """Write a working module that also writes a file when it is imported."""
    path = folder / "beside.py"
    path.write_text(
        f"import pathlib\npathlib.Path({str(sprung)!r}).write_text('ran')\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "class Config(LlamaConfig):\n    model_type = 'not_known'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
        "class Classifier(LlamaForSequenceClassification):\n    config_class = Config\n"
        "class Words(PreTrainedTokenizerFast):\n    pass\n"
    )
    return path


CODE = {
    "AutoConfig": "beside.Config",
    "AutoModelForCausalLM": "beside.Model",
    "AutoModelForSequenceClassification": "beside.Classifier",
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("prefix", ["", "somebody/somewhere--"])
def test_a_model_that_needs_its_own_code_is_refused(model, sprung, loader, prefix):
    module(model, sprung)
    change_config(model, model_type="not_known", auto_map={name: prefix + where for name, where in CODE.items()})
    assert "it asks for trust_remote_code, and code that comes with a model is never run" in refused(
        LOADERS[loader], model
    )


def test_a_known_model_with_code_beside_it_runs_without_that_code(model, sprung):
    module(model, sprung)
    change_config(model, auto_map=CODE)
    assert type(load.load_policy(str(model))).__module__.startswith("transformers.")


def test_a_tokenizer_that_needs_its_own_code_is_refused(model, sprung):
    module(model, sprung)
    path = model / "tokenizer_config.json"
    custom = {"auto_map": {"AutoTokenizer": [None, "beside.Words"]}, "tokenizer_class": "Words"}
    path.write_text(json.dumps(json.loads(path.read_text()) | custom))
    assert "trust_remote_code" in refused(load.load_tokenizer, model)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_an_attention_kernel_named_in_a_config_is_not_downloaded(model, key):
    """It may name a kernel on the hub, which is compiled code."""
    change_config(model, **{key: "somebody/kernel"})
    assert load.load_policy(str(model)).config._attn_implementation in ("sdpa", "eager")


def with_chat_template(model, folder, template):
    """Run SFT of a model whose tokenizer has this chat template, which is a program."""
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    (model / "chat_template.jinja").write_text(template)
    write_project(folder)
    changes = [f"model={{path: {model}}}", "data.prompt_template=chat", "training.num_steps=1"]
    arguments = [part for change in changes for part in ("--set", change)]
    return CliRunner().invoke(app, ["sft", "--config", str(folder / "sft.yaml"), "--quiet", *arguments])


ESCAPES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ messages.__init__.__globals__ }}",
    "file": "{% include '/etc/hostname' %}",
    "changes": "{{ messages.clear() }}",
}


def test_a_chat_template_that_would_leave_its_sandbox_is_reported_in_one_line(model, tmp_path):
    for name, template in ESCAPES.items():
        result = with_chat_template(model, tmp_path, template)
        assert result.exit_code == 2, (name, result.exception)
        assert len(result.stderr.splitlines()) == 1, name
        assert not (tmp_path / "run" / ".sft.partial" / "model").exists(), name
    assert with_chat_template(model, tmp_path, "{{ messages[0].content }}").exit_code == 0


# --------------------------------------------------------------------------------- source code


RUNS_CODE = re.compile(
    r"""
    ^\s*(?:import|from)\ (?:.*,\ *)?(?:pickle|cPickle|dill|cloudpickle|joblib|shelve|marshal|code|codeop|runpy|ctypes)\b
    | (?<![\w.])(?:(?:eval|exec|compile|__import__)\([^)]|(?:breakpoint|input)\() | =\ (?:eval|exec|compile)$
    | \b(?:torch|hub|jit|export|numpy|np|yaml)\.(?:unsafe_|full_)?load(?:_all)?\b | PackageImporter | read_pickle
    | from\ (?:torch|numpy|yaml)\ import\ .*load | os\.(?:system|popen)\b | \.exec_module\b | custom_generate
    | (?:trust_remote_code|allow_pickle|weights_only|shell)=(?!False) | Loader=(?!ConfigLoader)
    """,
    re.VERBOSE | re.MULTILINE,
)
"""Source that could run code that was read."""


def test_no_module_runs_code_that_was_read():
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in source_files()}
    assert {name: found for name, text in texts.items() if (found := RUNS_CODE.findall(text))} == {
        "rlhf_cli/rewards/functions.py": [".exec_module"],  # reward functions and judges that your own config names
        "rlhf_cli/commands/init.py": ["import runpy"],  # a script of this package, which draws an example's rows
        "rlhf_cli/commands/chat.py": ["input("] * 2,  # once in a comment; reads a line as text, only from a terminal
    }


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import dill as d", "import os, marshal", "from torch import load",
        "torch.load(f)", "x = torch.load", "torch.load(f, weights_only=True)", "torch.hub.load('a', 'b')", "eval('1')",
        "exec(s)", "f = exec", "compile(s, 'a', 'exec')", "yaml.load(s, Loader=yaml.SafeLoader)", "yaml.unsafe_load(s)",
        "yaml.compose(s, Loader=yaml.UnsafeLoader)", "from yaml import load", "np.load(f, allow_pickle=True)",
        "f(trust_remote_code=True)", "f(trust_remote_code=config.trust)", "spec.loader.exec_module(m)",
        "os.system('x')", "run('x', shell=True)",
    ],
)  # fmt: skip
def test_the_scan_detects(source):
    assert RUNS_CODE.search(source)


@pytest.mark.parametrize(
    "source", ["model.eval()", "re.compile('a')", "yaml.compose(s, Loader=ConfigLoader)", "f(trust_remote_code=False)"]
)
def test_the_scan_accepts(source):
    assert not RUNS_CODE.search(source)


def test_the_yaml_loader_is_safe():
    from rlhf_cli.config import yaml_text

    assert issubclass(yaml_text.ConfigLoader, yaml.SafeLoader)
    assert not issubclass(yaml_text.ConfigLoader, yaml.UnsafeLoader | yaml.FullLoader)


# ------------------------------------------------------------------------------------------- data


def test_a_script_in_a_data_folder_is_not_run(tmp_path, sprung):
    folder = tmp_path / "folder"
    folder.mkdir()
    module(folder, sprung).rename(folder / "folder.py")
    with pytest.raises(DataError, match="the folder has no data file"):
        list(read_rows(DataSource(path=str(folder))))
    with pytest.raises(DataError, match="unknown ending"):
        list(read_rows(DataSource(path=str(folder / "folder.py"))))
    write_jsonl(folder / "rows.jsonl", [{"prompt": "a"}])
    (folder / "rows.pkl").write_bytes(pickle.dumps(Trap(sprung)))
    opened.clear()
    assert [row.values for row in read_rows(DataSource(path=str(folder)))] == [{"prompt": "a"}]
    assert not [path for path in opened if path.endswith((".py", ".pkl")) and path.startswith(str(folder))]


@pytest.mark.parametrize("reader", ["pandas", "csv", "json", "parquet", "text", "arrow", "webdataset", "sql"])
def test_a_data_path_cannot_name_a_reader_of_datasets(tmp_path, sprung, reader):
    """`pandas` reads pickles in some allowed versions; other readers read any file that `data_dir` names."""
    (tmp_path / "rows.pkl").write_bytes(pickle.dumps(Trap(sprung)))
    with pytest.raises(DataError, match="not a dataset"):
        list(read_rows(DataSource(path=reader, data_dir=str(tmp_path))))


# ---------------------------------------------------------------------------------------- artifacts


@pytest.fixture
def config(tmp_path):
    """An SFT config that saves after every step."""
    write_project(tmp_path)
    return load_config(tmp_path / "sft.yaml", CONFIGS["sft"], ["checkpoints.every_steps=1"])


def interrupt(config):
    """Stop a run after its first step; return its checkpoint."""
    with contextlib.suppress(KeyboardInterrupt), StageRun("sft", config, quiet=True) as stage:
        stage.resume({}, 5)
        stage.log(1, {"loss": 1.0})
        stage.finish_step(1, 5)
        raise KeyboardInterrupt
    (checkpoint,) = list_checkpoints(checkpoints_directory(config.artifacts, "sft"))
    return checkpoint


def resumed_step(config):
    """Start again and return the step it resumes from; 0 if the checkpoint is refused."""
    try:
        with StageRun("sft", config, quiet=True) as stage:
            return stage.resume({}, 5)
    except UserError:
        return 0


def write_manifest(checkpoint, files):
    """Write a manifest of our format for these files."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "files": files}, indent=2) + "\n")


def test_a_checkpoint_whose_manifest_was_changed_is_refused(config):
    """It names a file outside, has values of a wrong type, or is no manifest."""
    checkpoint = interrupt(config)
    assert damage_of(checkpoint) is None
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    (checkpoint.parent / "secret").write_text("not yours")
    digest = digest_file(checkpoint.parent / "secret")
    opened.clear()
    for name in ("../secret", "/etc/hostname", "a/b", "", ".", "..", "a\0b", "../../secret"):
        write_manifest(checkpoint, files | {name: digest})
        assert damage_of(checkpoint) is not None, name
    assert not [path for path in opened if path.endswith(("secret", "hostname"))]
    for wrong in ([[1, 2]], [["a", "b"]], "ab", 3, None, {"a": 1}, {"a": None}):
        write_manifest(checkpoint, wrong)
        assert damage_of(checkpoint) is not None, wrong
    for text in (b"[" * 100_000, b"\xff", b"", b"3"):
        (checkpoint / "manifest.json").write_bytes(text)
        assert damage_of(checkpoint) is not None, text[:5]


@pytest.mark.parametrize("linked", ["nothing", "", "state.safetensors"])
def test_a_checkpoint_that_is_or_contains_a_link_is_refused(config, tmp_path, linked):
    """Even if the target has the right bytes: it may change later and lies outside the artifact."""
    checkpoint = interrupt(config)
    if linked != "nothing":
        (checkpoint / linked).rename(tmp_path / "elsewhere")
        (checkpoint / linked).symlink_to(tmp_path / "elsewhere")
    assert resumed_step(config) == (1 if linked == "nothing" else 0)


@pytest.mark.parametrize("name", ["../../victim", "{root}/victim", "../.sft.checkpoints/victim"])
def test_a_checkpoint_cannot_truncate_a_file_outside(config, tmp_path, name):
    """Resuming truncates the files of rows to the size in the checkpoint, and no other file."""
    checkpoint = interrupt(config)
    victims = [tmp_path / "victim.jsonl", checkpoint.parent / "victim.jsonl"]
    for victim in victims:
        victim.write_text("rows\n")
    numbers = json.loads((checkpoint / "numbers.json").read_text())
    numbers["files"]["sizes"] |= {name.format(root=tmp_path): 1}
    (checkpoint / "numbers.json").write_text(json.dumps(numbers))
    names = [path.name for path in sorted(checkpoint.iterdir()) if path.name != "manifest.json"]
    write_manifest(checkpoint, {n: digest_file(checkpoint / n) for n in names})
    resumed_step(config)
    for victim in victims:
        assert not victim.exists() or victim.read_text() == "rows\n"
    assert (tmp_path / "victim.jsonl").exists()


@pytest.mark.parametrize("name", [".sft.lock", ".sft.checkpoints", ".sft.partial", ".sft.partial/metrics.jsonl"])
def test_a_start_changes_nothing_behind_a_link(config, tmp_path, name):
    """It writes the lock, removes leftovers (names with a dot) beside checkpoints, empties the folder of an unfinished
    stage and truncates its rows."""
    link, target = Path(config.artifacts) / name, tmp_path / "home"
    if "partial" in name:
        interrupt(config)
        link.rename(target)
    link.parent.mkdir(exist_ok=True)
    if name.endswith((".lock", ".jsonl")):
        with target.open("a") as file:
            file.write("x" * 1000)
    else:
        (target / ".ssh").mkdir(parents=True)
        for file in (".profile", "mine"):
            (target / file).write_text("mine")
    link.symlink_to(target)
    paths = [target, *target.rglob("*")]
    before = {path: path.read_bytes() for path in paths if path.is_file()}
    resumed_step(config)
    assert {path: path.read_bytes() for path in before if path.exists()} == before
    assert all(path.exists() for path in paths)


def test_artifacts_can_be_any_folder_and_only_the_stage_is_written_there(tmp_path, monkeypatch):
    """`artifacts: ..` is allowed. Only the stage and its hidden names are written there."""
    inner = tmp_path / "inner"
    inner.mkdir()
    write_project(inner)
    monkeypatch.chdir(inner)
    before = {path: path.read_bytes() for path in inner.iterdir()}
    rlhf("sft", "--config", "sft.yaml", "--quiet", "--set", "artifacts=..")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inner", "sft"]
    assert {path: path.read_bytes() for path in inner.iterdir()} == before


# ------------------------------------------------------------------------------------------ secrets


MARKER = "s3cr3t-m4rker"
SECRETS = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "GITHUB_TOKEN",
    "RLHF_SERVER_TOKEN", "HTTPS_PROXY_PASSWORD", "DATABASE_URL",
)  # fmt: skip


def test_secrets_in_the_environment_are_never_written(tmp_path):
    write_project(tmp_path)
    (tmp_path / "reward.py").write_text(
        "import os\n"
        f"assert os.environ['HF_TOKEN'].startswith({MARKER[:6]!r})  # it is there to be leaked\n"
        "def score(prompts, responses, rows):\n    return [float(len(r)) for r in responses]\n"
    )
    rewards = f"ppo:rewards=[{{type: reward_model}}, {{type: function, function: {tmp_path}/reward.py:score}}]"
    for arguments in (["pipeline", str(tmp_path), "--set", rewards], ["status", str(tmp_path / "run")]):
        # In a fork of this process, with secrets in its environment.
        attempt = crash.Attempt(arguments, tmp_path / "log", **{name: f"{MARKER}-{name}" for name in SECRETS})
        assert attempt.wait() == 0, attempt.output
        assert MARKER not in attempt.output
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert [str(path) for path in files if MARKER.encode() in path.read_bytes()] == []
