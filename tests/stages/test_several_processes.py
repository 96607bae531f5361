"""PPO on four processes, sharded and with whole copies: the tokens and figures of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_cli.run.artifacts import read_manifest
from support.compare import same_runs
from support.runs import run_forked
from support.tiny import STOP, merged, tiny_model

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
            model = tiny_model(family, **special, vocab_size=VOCABULARY, tie_word_embeddings=TIED[family])
            directories[family] = tmp_path_factory.mktemp(family) / "model"
            model.save_pretrained(directories[family])
            tokenizer.save_pretrained(directories[family])
        return str(directories[family])

    return make


ITERATIONS = {
    "ppo": {"num_iterations": 3, "ppo_epochs": 1, "tokens_per_microbatch": 60},  # unequal numbers of passes
    "num_logged_samples": 8,
    "optimizer": {"eps": 1e-3},  # makes the size of a gradient visible in Adam's first steps
}


@pytest.mark.parametrize(
    ("distributed", "policy", "scorer"),
    [({}, "gpt2", "llama"), ({"distributed": {"shard": True}}, "qwen2", "gpt2")],
    ids=["whole", "sharded"],
)
def test_four_processes_give_the_tokens_and_figures_of_one(
    distributed, policy, scorer, model_of, write_config, run_stage, tokenizer, tmp_path
):
    """Shares of one row and of two. Reward and value model are of another family than the policy."""
    rm = run_stage("rm", tmp_path, model={"path": model_of(scorer)}, training={"num_steps": 1})
    models = {
        "policy": {"path": model_of(policy)},
        "rewards": [{"type": "reward_model", "path": str(rm)}],
        "rollout": {"stop_tokens": tokenizer.convert_ids_to_tokens(sorted(STOP))},
    }
    one = run_stage("ppo", tmp_path / "one", **merged(ITERATIONS, models))
    run_forked(4, "ppo", write_config("ppo", tmp_path / "four", **merged(ITERATIONS, models | distributed)))
    four = tmp_path / "four/ppo"
    assert read_manifest(four).num_processes == 4
    same_runs(one, four)
