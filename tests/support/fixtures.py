"""Fixtures that several folders use: tiny data, tiny models, and functions that run the stages on them."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.testing
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForSequenceClassification, BertTokenizer, PreTrainedTokenizerFast

from rlhf_cli.config.by_stage import CONFIGS
from rlhf_cli.config.loader import load_config
from rlhf_cli.config.models import ScratchModel, TokenizerTraining
from rlhf_cli.config.stage import Stage
from rlhf_cli.models.load import load_policy, load_tokenizer, prepare
from rlhf_cli.models.save import save
from rlhf_cli.models.scratch import new_model, train_tokenizer
from rlhf_cli.report.page import FOLDER
from rlhf_cli.rollout.sampling import draw_uniforms
from rlhf_cli.run.artifacts import digest_file, read_manifest
from support.projects import rlhf, write_project
from support.rewards import CHAT
from support.tiny import (
    ARCHITECTURES,
    BAD,
    CPU,
    GOOD,
    LONGEST,
    PROMPTS,
    SETTINGS,
    WORDS,
    merged,
    read_jsonl,
    sentence,
    write_jsonl,
)


def all_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The temporary folder that all workers of xdist share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Keep the token cache in a temporary folder, also for stages in other processes.

    The JavaScript of reports, which takes seconds to bundle, is shared by all workers.
    """
    cache = tmp_path_factory.mktemp("tokens")
    os.environ["RLHF_CACHE"] = str(cache)
    shared = all_workers(tmp_path_factory) / FOLDER
    shared.mkdir(exist_ok=True)
    (cache / FOLDER).symlink_to(shared)


@pytest.fixture(scope="session", autouse=True)
def _build_the_command_once():
    """Typer builds every command from its signature at each `CliRunner.invoke`, which costs more than most commands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_wait_for_the_disk():
    """Do not flush files, also in processes of `support.crash`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tiny matrices are slower on several threads, and other tests need the other cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _fork_server(_own_cache, _no_wait_for_the_disk, _one_thread, request):
    """Fork the server of `support.crash`, if a test may use it, before one has changed this process.

    The first run of a stage computes twice as long as the next ones. With it before the fork, no child has it.
    """
    if "support.crash" in sys.modules:
        # The tests of a stage say what is wrong with it.
        with contextlib.suppress(Exception), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: False)  # CUDA does not survive a fork
            request.getfixturevalue("pipeline")("llama")
        sys.modules["support.crash"].server()


@pytest.fixture(autouse=True)
def _no_process_is_left():
    """End the processes of `support.crash` that a test has started."""
    yield
    if "support.crash" in sys.modules:
        sys.modules["support.crash"].end_all()


if torch.cuda.is_available():

    @pytest.fixture(autouse=True)
    def _without_gpu(request, monkeypatch):
        """Only tests that are marked `gpu` see one. The others expect what a CPU computes."""
        if request.node.get_closest_marker("gpu") is None:
            monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> dict[str, Path]:
    """Files of rows of unequal length: demonstrations, preferences, scored, prompts. Each is also its own test set."""
    folder, rng = tmp_path_factory.mktemp("data"), random.Random(1)
    prompts = [f"Q: {sentence(rng, 1, 8)} {i}\nA:" for i in range(24)]

    def answer(*extra: str) -> str:
        words = sentence(rng, 1, 9).split() + list(extra)
        rng.shuffle(words)
        return " " + " ".join(words)

    rows = {
        "demonstrations": [{"prompt": p, "response": answer()} for p in prompts],
        "preferences": [{"prompt": p, "chosen": answer(GOOD), "rejected": answer(BAD)} for p in prompts],
        "scored": [{"prompt": p, "response": answer(), "score": float(i % 5 - 2)} for i, p in enumerate(prompts)],
        "prompts": [{"prompt": p, "number": i} for i, p in enumerate(prompts)],
    }
    return {name: write_jsonl(folder / f"{name}.jsonl", items) for name, items in rows.items()}


@pytest.fixture(scope="session")
def texts(data) -> list[str]:
    rows = read_jsonl(data["preferences"])
    return [row["prompt"] + row["chosen"] + row["rejected"] for row in rows] + [" ".join(WORDS)]


@pytest.fixture(scope="session")
def tokenizer(texts) -> PreTrainedTokenizerFast:
    return train_tokenizer(texts, TokenizerTraining(vocab_size=300))


@pytest.fixture(scope="session")
def tokenizer_path(tokenizer, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def eos_only_tokenizer(texts) -> PreTrainedTokenizerFast:
    """Like GPT-2's: <eos> is the only special token, and also serves as bos and pad."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<eos>",
        bos_token="<eos>",
        pad_token="<eos>",
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def make_model(tmp_path_factory, tokenizer, eos_only_tokenizer) -> Callable[..., Path]:
    """A function: architecture -> directory of a tiny random model, built once."""
    directories: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in directories:
            own_tokenizer = copy.deepcopy(eos_only_tokenizer if architecture == "gpt2" else tokenizer)
            if architecture == "qwen2":
                own_tokenizer.unk_token = (
                    "<pad>"  # as in released tokenizers; AutoTokenizer would add a 301st token otherwise
                )
            model = new_model(
                ScratchModel(architecture=architecture, config=SETTINGS[architecture]), own_tokenizer, seed=3
            )
            directories[architecture] = tmp_path_factory.mktemp(architecture) / "model"
            save(model, own_tokenizer, directories[architecture])
        return directories[architecture]

    return make


@pytest.fixture(scope="session")
def configs(data) -> dict[str, dict[str, Any]]:
    """A small config of each stage, without `artifacts` and without SFT's `model`."""
    optimizer = {"learning_rate": 1e-3, "schedule": "constant"}

    def supervised(rows: str, num_test: int, **evaluation: int) -> dict[str, Any]:
        path = str(data[rows])
        return {
            "data": {"train": path, "test": {"path": path, "limit": num_test}, "max_length": 96},
            "training": {"num_steps": 3, "minibatch_size": 4},
            "optimizer": optimizer,
            "evaluation": {"max_new_tokens": 6, **evaluation},
        }

    return {
        "sft": supervised("demonstrations", 5, num_samples=2),
        "rm": supervised("preferences", 7, num_normalization_samples=6),
        "ppo": {
            "data": {"train": str(data["prompts"]), "test": {"path": str(data["prompts"]), "limit": 5}},
            "rollout": {"max_new_tokens": 8},
            # With `auto` the set-up of so small a run would take a tenth longer.
            "ppo": {
                "num_iterations": 2,
                "rollout_batch_size": 8,
                "minibatch_size": 4,
                "ppo_epochs": 2,
                "tokens_per_microbatch": 2048,
            },
            "optimizer": optimizer,
        },
    }


@pytest.fixture(scope="session")
def write_config(configs) -> Callable[..., Path]:
    """A function: stage, artifact root, changes -> the YAML file."""

    def write(stage: str, root: Path, **changes: Any) -> Path:
        root.mkdir(parents=True, exist_ok=True)
        path = root / f"{stage}.yaml"
        path.write_text(yaml.safe_dump({"artifacts": str(root), **merged(configs[stage], changes)}), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def run_stage(write_config) -> Callable[..., Path]:
    """A function: run a stage in an artifact root, return the stage's directory."""
    from stages import ppo, rm, sft

    programs = {"sft": sft, "rm": rm, "ppo": ppo}

    def run(stage: str, root: Path, **changes: Any) -> Path:
        config: Stage = load_config(write_config(stage, root, **changes), CONFIGS[stage])
        programs[stage].run(config, quiet=True)
        return root / stage

    return run


@pytest.fixture
def compare_processes(run_stage, write_config, tmp_path) -> Callable[..., Path]:
    """A function: run a stage on one process and on `count`; both have the same weights, figures and samples.

    Returns the directory of the first run; the other one is in `tmp_path / "two"`. `more` are changes of the second
    run. The processes are threads, or with `forked` real ones.
    """
    from support.compare import same_runs
    from support.runs import run_forked
    from support.worlds import run_in_threads

    def run(stage: str, changes: Any, more: Any = None, *, count: int = 2, forked: bool = False) -> Path:
        one, two = run_stage(stage, tmp_path / "one", **changes), tmp_path / "two" / stage
        config = write_config(stage, tmp_path / "two", **merged(changes, more or {}))
        (run_forked if forked else run_in_threads)(count, stage, config)
        assert [read_manifest(folder).num_processes for folder in (one, two)] == [1, count]
        same_runs(one, two)
        return one

    return run


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory, make_model, run_stage) -> Callable[[str], Path]:
    """A function: architecture -> artifact root of its three finished stages, run once.

    Tests share these runs: call it before you patch anything.
    """
    roots: dict[str, Path] = {}

    def run_all(architecture: str) -> Path:
        if architecture not in roots:
            root = tmp_path_factory.mktemp(f"run_{architecture}")
            run_stage("sft", root, model={"path": str(make_model(architecture))})
            run_stage("rm", root)
            run_stage("ppo", root)
            roots[architecture] = root
        return roots[architecture]

    return run_all


@pytest.fixture(scope="session")
def word_piece(tmp_path_factory):
    folder = tmp_path_factory.mktemp("word_piece")
    letters = [chr(c) for c in range(33, 127)]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{x}" for x in letters), *WORDS[:12]]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(vocabulary)) + "\n", encoding="utf-8")
    return BertTokenizer(str(folder / "vocab.txt"))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def arch(request):
    return request.param


@pytest.fixture(scope="module")
def plain(arch, make_model):
    """The model as transformers loads it, run on one sequence at a time: the reference of the comparisons."""
    return load_policy(str(make_model(arch)))


@pytest.fixture(scope="module")
def policy(arch, make_model):
    model = load_policy(str(make_model(arch)))
    assert prepare(model, CPU) is None, "this architecture runs on packed rows"
    return model


@pytest.fixture(scope="module")
def uniforms():
    return draw_uniforms(0, "test", 0, len(PROMPTS), LONGEST)


@pytest.fixture
def chat_reward_model(make_model, tmp_path):
    """A function: chat template -> directory of a reward model (a decoder) whose tokenizer has that template."""

    def make(template=CHAT):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(make_model("llama"), num_labels=1).eval()
        tokenizer = load_tokenizer(str(make_model("llama")))
        model.config.pad_token_id = tokenizer.pad_token_id
        tokenizer.chat_template = template
        save(model, tokenizer, tmp_path / "chat")
        return tmp_path / "chat"

    return make


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, configs and three finished stages."""
    folder = tmp_path_factory.mktemp("finished")
    write_project(folder)
    rlhf("pipeline", folder, "--quiet")
    return folder


@pytest.fixture
def project(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished project that a test may change. Its stages are finished there too: paths are replaced."""
    copy = Path(shutil.copytree(finished, tmp_path / "p"))
    for path in [*copy.glob("*.yaml"), *copy.glob("run/*/config.yaml"), *copy.glob("run/*/manifest.json")]:
        text = path.read_text(encoding="utf-8").replace(str(finished), str(copy))
        if path.name == "manifest.json":
            manifest = json.loads(text)
            manifest["files"]["config.yaml"] = digest_file(path.with_name("config.yaml"))
            text = json.dumps(manifest, indent=2) + "\n"
        path.write_text(text, encoding="utf-8")
    return copy
