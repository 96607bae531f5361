"""Tiny models, tiny data and a way to run the stages on them."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlhf_cli.environment import DEFAULTS

os.environ.update(DEFAULTS, HF_HUB_OFFLINE="1")

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlhf_cli.config.by_stage import CONFIGS
from rlhf_cli.config.loader import load_config
from rlhf_cli.config.models import ScratchModel, TokenizerTraining
from rlhf_cli.config.stage import Stage
from rlhf_cli.models.load import save
from rlhf_cli.models.scratch import new_model, train_tokenizer

ARCHITECTURES = ("llama", "gpt2", "qwen2", "gpt_neox")
_LLAMA_LIKE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA_LIKE,
    "qwen2": _LLAMA_LIKE,
    # Dropout stays in the config files, so that whatever forgets to turn it off is found out.
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "initializer_range": 0.2,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
    },
    "gpt_neox": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    },
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2, "hidden_dropout": 0.1},
    "gemma2": {**_LLAMA_LIKE, "head_dim": 8, "sliding_window": 6},
    "opt": {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 48,
        "max_position_embeddings": 128,
        "init_std": 0.2,
        "dropout": 0.1,
    },
}
TEXT = "the tent lamp radio map is late broken please help thank you we will send a new one today sorry"
WORDS = TEXT.split()
GOOD, BAD = "thank", "sorry"
"""Every chosen answer has the one, every rejected answer the other."""


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Tokenised rows go where they are removed again, those of the stages that run as processes of their own too."""
    os.environ["RLHF_CACHE"] = str(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tiny matrices: more threads cost more than they give, and the other core is somebody else's."""
    torch.set_num_threads(1)


def sentence(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choice(WORDS[:10]) for _ in range(rng.randint(low, high)))


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> dict[str, Path]:
    """Rows of unequal length: demonstrations, preferences, scored, prompts; each file is also its own test."""
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
    """Like GPT-2's: <eos> is the only special token and stands for bos and pad too."""
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
    """A function: architecture to the directory of a tiny random model of it, made once."""
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            own = copy.deepcopy(eos_only_tokenizer if architecture == "gpt2" else tokenizer)
            if architecture == "qwen2":
                own.unk_token = "<pad>"  # as released ones have: AutoTokenizer gives one without a 301st token
            model = new_model(ScratchModel(architecture=architecture, config=SETTINGS[architecture]), own, seed=3)
            made[architecture] = tmp_path_factory.mktemp(architecture) / "model"
            save(model, own, made[architecture])
        return made[architecture]

    return make


@pytest.fixture(scope="session")
def configs(data) -> dict[str, dict[str, Any]]:
    """A small config of each stage, without `artifacts` and without SFT's `model`."""
    training = {"num_steps": 3, "minibatch_size": 4}
    optimizer = {"learning_rate": 1e-3, "schedule": "constant"}
    return {
        "sft": {
            "data": {
                "train": str(data["demonstrations"]),
                "test": {"path": str(data["demonstrations"]), "limit": 5},
                "max_length": 96,
            },
            "training": training,
            "optimizer": optimizer,
            "evaluation": {"num_samples": 2, "max_new_tokens": 6},
        },
        "rm": {
            "data": {
                "train": str(data["preferences"]),
                "test": {"path": str(data["preferences"]), "limit": 7},
                "max_length": 96,
            },
            "training": training,
            "optimizer": optimizer,
            "evaluation": {"num_normalization_samples": 6, "max_new_tokens": 6},
        },
        "ppo": {
            "data": {"train": str(data["prompts"]), "test": {"path": str(data["prompts"]), "limit": 5}},
            "rollout": {"max_new_tokens": 8},
            "ppo": {"num_iterations": 2, "rollout_batch_size": 8, "minibatch_size": 4, "ppo_epochs": 2},
            "optimizer": optimizer,
        },
    }


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it, mapping by mapping; a key changed to None is set to null."""
    whole = copy.deepcopy(base)
    for key, value in changes.items():
        old = whole.get(key)
        whole[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return whole


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


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory, make_model, run_stage) -> Callable[[str], Path]:
    """A function: architecture to the artifact root of its three finished stages, run once.

    A test that patches something calls it before: what is made here is everybody's.
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
