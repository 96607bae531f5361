"""Every stage on four processes, sharded, and PPO with whole copies: the tokens and figures of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_cli.run.artifacts import read_manifest
from support.compare import same_runs
from support.runs import run_forked
from support.tiny import SETTINGS, STOP, merged

pytestmark = pytest.mark.slow
VOCABULARY = 301
"""Neither 2 nor 4 processes divide it."""
TIED = {"llama": False, "qwen2": True, "gpt2": True}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory, tokenizer) -> Callable[[str], str]:
    """A function: family -> directory of a tiny random model. All families have one tokenizer."""
    directories: dict[str, Path] = {}

    def make(family: str) -> str:
        if family not in directories:
            special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
            settings = SETTINGS[family] | special | {"vocab_size": VOCABULARY, "tie_word_embeddings": TIED[family]}
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
            directories[family] = tmp_path_factory.mktemp(family) / "model"
            model.save_pretrained(directories[family])
            tokenizer.save_pretrained(directories[family])
        return str(directories[family])

    return make


FEW_TOKENS = {"tokens_per_microbatch": 60}
"""Some processes make more passes than others."""
STEPS = {"training": {"num_steps": 5, "minibatch_size": 6, **FEW_TOKENS}, "evaluation": {"every_steps": 2}}
ITERATIONS = {"ppo": {"num_iterations": 3, "ppo_epochs": 1, **FEW_TOKENS}, "num_logged_samples": 8}


@pytest.fixture
def changes_of(model_of, run_stage, tokenizer, tmp_path) -> Callable[..., dict[str, Any]]:
    """A function: stage, family of its model or policy, family of PPO's reward and value model -> config changes."""

    def changes(stage: str, family: str, scorer: str = "") -> dict[str, Any]:
        # A large eps makes the size of a gradient visible in Adam's first steps.
        common = {"optimizer": {"eps": 1e-3}}
        if stage != "ppo":
            return merged(STEPS, {"model": {"path": model_of(family)}, **common})
        run_stage("rm", tmp_path, model={"path": model_of(scorer)}, training={"num_steps": 1})
        models = {
            "policy": {"path": model_of(family)},
            "rewards": [{"type": "reward_model", "path": str(tmp_path / "rm")}],
            "rollout": {"stop_tokens": tokenizer.convert_ids_to_tokens(sorted(STOP))},
        }
        return merged(ITERATIONS, models | common)

    return changes


SHARDED = {"distributed": {"shard": True}}
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "sft sharded": (("sft", "qwen2"), SHARDED),
    "rm sharded": (("rm", "gpt2"), SHARDED),
    "ppo whole": (("ppo", "gpt2", "llama"), {}),
    "ppo sharded": (("ppo", "qwen2", "gpt2"), SHARDED),
    "ppo sampled from the shards": (("ppo", "gpt2", "qwen2"), {**SHARDED, "rollout": {"decoder": "sharded"}}),
}


@pytest.mark.parametrize("name", CASES)
def test_four_processes_give_the_tokens_and_figures_of_one(name, changes_of, write_config, run_stage, tmp_path):
    """Five optimizer steps or more, on shares of one row and of two. The value model is of another family."""
    (stage, *families), distributed = CASES[name]
    changes = changes_of(stage, *families)
    one = run_stage(stage, tmp_path / "one", **changes)
    run_forked(4, stage, write_config(stage, tmp_path / "four", **merged(changes, distributed)))
    four = tmp_path / "four" / stage
    manifest = read_manifest(four)
    assert manifest is not None
    assert manifest.num_processes == 4
    same_runs(one, four)
