"""With noise: the PPO stage itself, on sampled responses and with a Llama, comes to pi*; with a bug in it, it doesn't.

The task is that of optimum_task.py with 156 responses to each of 4 prompts. The stage reads a config, a model, prompts
and a reward function as it would from a user; what it learnt is compared with pi* over all responses, exactly.

Run with RLHF_ALL_SEEDS=1 this takes an hour and covers every algorithm and every bug on three seeds; without, as much
of it as fits into the minutes that the slow tests have.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from optimum_task import Task, chances, kl_regularised, make_task, objective, total_variation
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from rlhf_cli.config.loader import load_config
from rlhf_cli.config.schemas import CONFIGS
from rlhf_cli.seeding import seeded
from stages import ppo

BETA = 0.3
LONGEST = 3
TOKENS = ["<eos>", "a", "b", "c", "d", "e"]
PROMPTS = ["ab", "bc", "cd", "de"]
REWARD = """
import json
from pathlib import Path

SCORES = json.loads((Path(__file__).parent / "scores.json").read_text())


def score(prompts, responses, rows):
    return [SCORES[prompt][response] for prompt, response in zip(prompts, responses)]
"""


def text(tokens: tuple[int, ...]) -> str:
    """As the stage decodes it, without EOS: what has fewer than 3 letters has ended, what has 3 was cut."""
    return "".join(TOKENS[token] for token in tokens if token)


def new_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each letter."""
    words = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token=TOKENS[0]))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words.decoder = decoders.Fuse()
    special = dict.fromkeys(("eos_token", "pad_token", "unk_token"), TOKENS[0])
    return PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=False, **special)


def logits_of(model: PreTrainedModel, task: Task) -> Tensor:
    """[S, V] of the next token in every state, by a plain forward pass on padded rows."""
    letters = {token: i for i, token in enumerate(TOKENS)}
    rows = [[letters[letter] for letter in PROMPTS[x]] + list(prefix) for x, *prefix in task.states]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    last = torch.tensor([len(row) - 1 for row in rows])
    return model(input_ids=ids).logits[torch.arange(len(rows)), last]


def prepare(folder: Path, seed: int) -> Task:
    """The model directory, the prompts and the reward function of a task, whose reference policy the model is."""
    task = make_task(seed, vocab_size=len(TOKENS), longest=LONGEST, num_prompts=len(PROMPTS))
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
    wanted = task.ref_logits.log_softmax(-1).float()
    for _ in range(150):
        found = logits_of(model, task).log_softmax(-1)
        optimizer.zero_grad()
        kl_div(found, wanted, log_target=True, reduction="batchmean").backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder / "model")
    new_tokenizer().save_pretrained(folder / "model")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    (folder / "reward.py").write_text(REWARD)
    scores: dict[str, dict[str, float]] = {prompt: {} for prompt in PROMPTS}
    for x, y, r in zip(task.prompt.tolist(), task.responses, task.score.tolist(), strict=True):
        scores[PROMPTS[x]][text(y)] = r
    (folder / "scores.json").write_text(json.dumps(scores))
    with torch.no_grad():
        return replace(task, ref_logits=logits_of(model, task).double())


def run(folder: Path, seed: int, *, samples_per_prompt: int = 1, **choices: Any) -> None:
    """The stage on what `prepare` wrote."""
    config = {
        "artifacts": str(folder),
        "seed": seed,
        "device": "cpu",
        "policy": {"path": str(folder / "model")},
        "rewards": [{"type": "function", "function": f"{folder / 'reward.py'}:score"}],
        "data": {"train": str(folder / "prompts.jsonl"), "test_fraction": 0},
        "rollout": {"max_new_tokens": LONGEST, "samples_per_prompt": samples_per_prompt},
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
    if choices.get("advantage_estimator", "gae") == "gae":
        config["value_model"] = {"learning_rate": 1e-2}
    path = folder / "ppo.yaml"
    path.write_text(yaml.safe_dump(config))
    ppo.run(load_config(path, CONFIGS["ppo"]), quiet=True)


def distances(folder: Path, task: Task) -> tuple[float, float]:
    """(total variation to pi*, how much less than its objective J) of the model that the stage saved."""
    policy = AutoModelForCausalLM.from_pretrained(folder / "ppo" / "model")
    with torch.no_grad():
        found = chances(task, logits_of(policy, task).double())
    best = kl_regularised(task, BETA)
    return total_variation(task, found, best), objective(task, best, BETA) - objective(task, found, BETA)
