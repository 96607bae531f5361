"""The PPO stage trains a tiny Llama by sampling and ends at pi*. With a bug it ends elsewhere: see test_optimum.py.

The task is that of tests/support/optimum_task.py, with 156 responses to each of 4 prompts. The stage reads a config, a
model, prompts and a reward function, as in real use. The learned policy is compared with pi* over all responses.

An update learns from 512 responses; 400 updates take 50 to 80 s on one core. RLHF_ALL_SEEDS=1 adds two seeds.
"""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rlhf_cli.config.loader import load_config
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.errors import RunError
from rlhf_cli.ppo.update import UpdateBatch
from rlhf_cli.seeding import seeded
from stages import ppo
from support.optimum_task import (
    Task,
    chances,
    kl_regularised,
    make_task,
    total_variation,
)
from support.tiny import character_tokenizer, read_jsonl

pytestmark = pytest.mark.slow
BETA = 0.3
LONGEST = 3
TOKENS = ["<eos>", "a", "b", "c", "d", "e"]
PROMPTS = ["ab", "bc", "cd", "de"]
EVERYTHING = os.environ.get("RLHF_ALL_SEEDS") == "1"
REWARD = """
import json
from pathlib import Path

SCORES = json.loads((Path(__file__).parent / "scores.json").read_text())


def score(prompts, responses, rows):
    return [SCORES[prompt][response] for prompt, response in zip(prompts, responses)]


def cost(prompts, responses, rows):
    return [-len(response) + 2.0 * ("a" in response) for response in responses]
"""


# ---- the task as files, and the stage on them


def logits_of(model: PreTrainedModel, task: Task) -> Tensor:
    """Logits [S, V] of the next token in every state. Transformers computes them in one forward pass on padded rows."""
    rows = [[TOKENS.index(letter) for letter in PROMPTS[x]] + list(tokens) for x, *tokens in task.states]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return model(input_ids=ids).logits[torch.arange(len(rows)), torch.tensor([len(row) - 1 for row in rows])]


def reference_policy(task: Task, seed: int) -> LlamaForCausalLM:
    """A Llama trained to imitate the random reference policy of the task."""
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    with seeded(seed, "model"):
        model = LlamaForCausalLM(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=150)
    target = task.ref_logits.log_softmax(-1).float()
    for _ in range(150):
        optimizer.zero_grad()
        logprobs = logits_of(model, task).log_softmax(-1)
        kl_div(logprobs, target, log_target=True, reduction="batchmean").backward()
        optimizer.step()
        schedule.step()
    return model


def write_task(folder: Path, seed: int) -> Task:
    """Write the model, prompts and reward function. Return the task with that model as its reference policy."""
    task = make_task(seed, vocab_size=len(TOKENS), longest=LONGEST, num_prompts=len(PROMPTS))
    model = reference_policy(task, seed)
    model.save_pretrained(folder / "model")
    character_tokenizer(TOKENS).save_pretrained(folder / "model")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    (folder / "reward.py").write_text(REWARD)
    # EOS adds no text. A response of fewer than 3 letters ended with EOS, and one of 3 letters was cut.
    scores: dict[str, dict[str, float]] = {prompt: {} for prompt in PROMPTS}
    for x, tokens, score in zip(task.prompt.tolist(), task.responses, task.score.tolist(), strict=True):
        scores[PROMPTS[x]]["".join(TOKENS[token] for token in tokens if token)] = score
    (folder / "scores.json").write_text(json.dumps(scores))
    with torch.no_grad():
        return replace(task, ref_logits=logits_of(model, task).double())


def run_stage(
    folder: Path, seed: int, choices: dict[str, Any], temperature: float, limit: dict[str, float] | None = None
) -> None:
    """Run PPO with `choices` as changes to the `ppo` section of the config, and perhaps a limit on the cost."""
    groups = choices.get("advantage_estimator") in ("rloo", "grpo", "dr_grpo", "reinforce_pp_baseline")
    has_values = choices.get("advantage_estimator", "gae") in ("gae", "monte_carlo")
    config: dict[str, Any] = {
        "artifacts": str(folder),
        "seed": seed,
        "device": "cpu",
        "policy": {"path": str(folder / "model")},
        "rewards": [{"type": "function", "function": f"{folder / 'reward.py'}:score"}],
        "data": {"train": str(folder / "prompts.jsonl"), "test_fraction": 0},
        "rollout": {
            "max_new_tokens": LONGEST,
            "samples_per_prompt": 512 // len(PROMPTS) if groups else 1,
            "temperature": temperature,
        },
        "ppo": {
            "num_iterations": 400,
            "rollout_batch_size": 512,
            "minibatch_size": 512,
            "kl_coef": BETA,
            "missing_eos_penalty": 0.0,
            **choices,
        },
        "optimizer": {"learning_rate": 5e-3, "schedule": "linear"},
    }
    if limit is not None:
        config["rewards"].append({"type": "function", "function": f"{folder / 'reward.py'}:cost", "limit": limit})
    if has_values:
        config["value_model"] = {"learning_rate": 1e-2}
    path = folder / "ppo.yaml"
    path.write_text(yaml.safe_dump(config))
    ppo.run(load_config(path, PPOConfig), quiet=True)


# ---- the runs


def pi_star(task: Task) -> Tensor:
    return kl_regularised(task, BETA)


def learned_by(folder: Path, task: Task, temperature: float = 1.0) -> Tensor:
    """pi(y|x) [B] of the policy that a run in the folder has saved."""
    policy = AutoModelForCausalLM.from_pretrained(folder / "ppo" / "model")
    with torch.no_grad():
        return chances(task, logits_of(policy, task).double() / temperature)


def ratio_to_ref(*rollout: Any) -> UpdateBatch:
    experience = UpdateBatch(*rollout)
    return replace(experience, logprobs=experience.ref_logprobs)


# ---- the tests


@pytest.mark.parametrize("seed", [0, 1, 2] if EVERYTHING else [0])
@pytest.mark.parametrize(("choices", "temperature"), [({"advantage_estimator": "rloo"}, 1.0), ({}, 0.7)])
def test_the_stage_ends_at_its_optimum(tmp_path, choices, temperature, seed):
    """The distances are of total variation: from ref_policy, and from what was learned, to pi*."""
    task = write_task(tmp_path, seed)
    run_stage(tmp_path, seed, choices | {"num_iterations": 200}, temperature)
    # At a temperature, the logits of both the policy and the reference are divided by it.
    task = replace(task, ref_logits=task.ref_logits / temperature)
    assert total_variation(task, chances(task, task.ref_logits), pi_star(task)) > 0.1
    assert total_variation(task, learned_by(tmp_path, task, temperature), pi_star(task)) < 0.13


def test_a_limit_holds_and_the_policy_is_near_the_constrained_optimum(tmp_path):
    """The limit is the mean cost of ref * exp((r - c) / 2 / beta): there lambda is 1, in units of the cost."""
    task = write_task(tmp_path, seed=0)
    cost = torch.tensor([2.0 * (1 in tokens) - sum(map(bool, tokens)) for tokens in task.responses]).double()
    optimum = kl_regularised(replace(task, score=(task.score - cost) / 2), BETA)
    ref = chances(task, task.ref_logits)
    mean, mean_of_ref, free = ((p * cost).sum().item() / task.num_prompts for p in (optimum, ref, pi_star(task)))
    unit = ((ref * (cost - mean_of_ref).square()).sum() / task.num_prompts).sqrt().item()
    assert min(mean_of_ref, free) > mean + 0.3
    run_stage(tmp_path, 0, {}, temperature=1.0, limit={"below": mean, "learning_rate": 0.1})
    rows = read_jsonl(tmp_path / "ppo/metrics.jsonl")
    assert statistics.fmean(row["reward/cost_1"] for row in rows[-50:]) == pytest.approx(mean, abs=0.02)
    assert rows[-1]["lambda/cost_1"] == pytest.approx(unit, rel=0.3)  # here the mean cost hardly depends on lambda
    learned = learned_by(tmp_path, task)
    assert total_variation(task, learned, optimum) < 0.1
    assert ((learned * cost).sum() / task.num_prompts).item() == pytest.approx(mean, abs=0.02)


def test_a_ratio_against_the_reference_stops_the_run(tmp_path, monkeypatch):
    """Health stops it in the second iteration, where the first ratio is not 1. It would also end far from pi*."""
    write_task(tmp_path, seed=0)
    monkeypatch.setattr("stages.ppo.UpdateBatch", ratio_to_ref)
    with pytest.raises(RunError, match="ratio_not_one"):
        run_stage(tmp_path, 0, {"num_iterations": 3}, temperature=1.0)
