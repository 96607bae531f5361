"""Models and data of the speed benchmark: the same files and the same tokens for both sides.

The models are Llamas of two sizes (`MODELS`), trained just enough that responses end at various places. The tokenizer
has one token per word, such as `w17`, so that a text's tokens are known without it. Lengths are lognormal, because
padding costs a trainer time: prompts have a median of 46 tokens, answers of 38, within [4, 96] and [2, 64]
(`LENGTHS`).
"""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhf_cli.data.batches import stream
from rlhf_cli.models.load import ensure_pad_token, load_tokenizer, new_reward_model
from rlhf_cli.models.save import save

ROOT = Path(__file__).resolve().parent.parent
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
EOS = SPECIAL.index("<eos>")
SEED = 0
LENGTHS = {"prompt": (46, 0.7, 4, 96), "response": (38, 0.8, 2, 64)}
"""Median, sigma of the logarithm, shortest, longest; a response's EOS is counted."""
NUM_ROWS = 2048
MAX_LENGTH = 512
TEMPERATURE = 0.7
MAX_NEW_TOKENS = 64
ZIPF = 1.2
"""Words are drawn with odds 1 / rank^ZIPF; at temperature 0.7 EOS is then about as frequent as in the data."""


@dataclass(frozen=True)
class Size:
    """A Llama of the benchmark, and its training before the measurement."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int
    ppo_batch: int
    steps: int
    learning_rate: float
    kv_heads: int | None = None
    """Heads of keys and values, if fewer than the query heads."""

    def config(self, **given: Any) -> LlamaConfig:
        """The model's config, with the ids of the tokenizer and further values."""
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            tie_word_embeddings=True,
            pad_token_id=SPECIAL.index("<pad>"),
            bos_token_id=SPECIAL.index("<bos>"),
            eos_token_id=EOS,
            **{"max_position_embeddings": 1024, **given},
        )


MODELS = {
    "a": Size(128, 344, 4, 4, 2048, ppo_batch=64, steps=200, learning_rate=3e-3),
    "b": Size(512, 1376, 6, 8, 8192, ppo_batch=16, steps=60, learning_rate=1e-3),
}


@dataclass(frozen=True)
class Inputs:
    """The files that both sides read for one model, in one folder."""

    folder: Path
    size: Size

    @property
    def policy(self) -> Path:
        return self.folder / "artifacts" / "sft" / "model"

    @property
    def reward_model(self) -> Path:
        return self.folder / "artifacts" / "rm" / "model"

    @property
    def rm_start(self) -> Path:
        """The reward model before its first step, for TRL; our stage builds the same from the policy and the seed."""
        return self.folder / "rm_start"

    def sft_rows(self) -> list[tuple[list[int], list[int]]]:
        """(prompt, response with EOS) of each row."""
        return [tuple(json.loads(line)) for line in (self.folder / "sft_ids.jsonl").read_text().splitlines()]

    def rm_rows(self) -> list[tuple[list[int], list[int], list[int]]]:
        """(prompt, chosen, rejected), EOS in both."""
        return [tuple(json.loads(line)) for line in (self.folder / "rm_ids.jsonl").read_text().splitlines()]

    def sft_order(self, steps: int, batch_size: int) -> list[dict[str, list[int]]]:
        """The rows of the first steps for TRL, in our SFT stage's order."""
        rows = self.sft_rows()
        return [
            {"ids": prompt + response, "completion_mask": [0] * len(prompt) + [1] * len(response)}
            for step in range(steps)
            for prompt, response in (rows[i] for i in stream(len(rows), batch_size, step, SEED, "sft order"))
        ]

    def rm_order(self, steps: int, batch_size: int) -> list[dict[str, list[int]]]:
        """The pairs of the first steps for TRL, in our RM stage's order."""
        rows = self.rm_rows()
        return [
            {"chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected}
            for step in range(steps)
            for prompt, chosen, rejected in (rows[i] for i in stream(len(rows), batch_size, step, SEED, "rm order"))
        ]

    def prompt_batches(self, steps: int, batch_size: int) -> list[list[list[int]]]:
        """The prompts of the first iterations, in our PPO stage's order."""
        prompts = [prompt for prompt, _ in self.sft_rows()]
        return [
            [prompts[i] for i in stream(len(prompts), batch_size, step, SEED, "ppo prompts")] for step in range(steps)
        ]


def make_inputs(work: Path, name: str) -> Inputs:
    """Create data, tokenizer, policy and reward model of one size under `work`, unless they exist."""
    inputs = Inputs(work / f"model_{name}", MODELS[name])
    folder, size = inputs.folder, inputs.size
    if (folder / "finished").is_file():
        return inputs
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_rows(folder, size.vocabulary)
    tokenizer = word_tokenizer(size.vocabulary)
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(size.config())
    model.generation_config.update(pad_token_id=0, bos_token_id=1, eos_token_id=EOS)
    for part in (model, tokenizer):
        part.save_pretrained(folder / "start")
    run_stage(folder, "sft", sft_config(folder, folder / "start", size.steps, size.learning_rate, folder / "artifacts"))
    run_stage(folder, "rm", rm_config(folder, inputs.policy, 40, 1e-3, folder / "artifacts"))
    start, _ = new_reward_model(str(inputs.policy), None, seed=SEED, head_std=None)
    ensure_pad_token(start, tokenizer)
    save(start, tokenizer, inputs.rm_start)
    check_tokens(inputs)
    (folder / "finished").touch()
    return inputs


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word (`w4` is 4) that adds no special tokens."""
    words = {word: i for i, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), vocabulary))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def write_rows(folder: Path, vocabulary: int) -> None:
    """Write the rows as ids (`*_ids.jsonl`) and as the texts that our stages read (`sft.jsonl`, `rm.jsonl`)."""
    draw = np.random.default_rng(SEED)
    odds = 1.0 / np.arange(1, vocabulary - len(SPECIAL) + 1) ** ZIPF
    odds /= odds.sum()

    def words(kind: str) -> list[int]:
        median, sigma, shortest, longest = LENGTHS[kind]
        n = int(np.clip(round(draw.lognormal(math.log(median), sigma)), shortest, longest))
        n -= kind == "response"
        return (draw.choice(len(odds), n, p=odds) + len(SPECIAL)).tolist()

    sft = [(words("prompt"), [*words("response"), EOS]) for _ in range(NUM_ROWS)]
    rm = []
    for _ in range(NUM_ROWS):
        # The longer answer is the better one, so that there is something to learn.
        prompt, (rejected, chosen) = words("prompt"), sorted((words("response"), words("response")), key=len)
        rm.append((prompt, [*chosen, EOS], [*rejected, EOS]))
    write_lines(folder / "sft_ids.jsonl", sft)
    write_lines(folder / "rm_ids.jsonl", rm)
    write_lines(folder / "sft.jsonl", [{"prompt": text(p), "response": " " + text(r[:-1])} for p, r in sft])
    write_lines(folder / "prompts.jsonl", [{"prompt": text(p)} for p, _ in sft])
    write_lines(
        folder / "rm.jsonl",
        [{"prompt": text(p), "chosen": " " + text(c[:-1]), "rejected": " " + text(r[:-1])} for p, c, r in rm],
    )


def check_tokens(inputs: Inputs) -> None:
    """Raise SystemExit unless the tokenizer gives exactly the ids."""
    tokenizer = load_tokenizer(str(inputs.policy))
    for line, (prompt, response) in zip(
        (inputs.folder / "sft.jsonl").read_text().splitlines(), inputs.sft_rows(), strict=True
    ):
        row = json.loads(line)
        if tokenizer(row["prompt"] + row["response"])["input_ids"] != prompt + response[:-1]:
            raise SystemExit(f"{inputs.folder}: the tokenizer does not give the ids that the rows were written from")


def text(ids: Sequence[int]) -> str:
    """
    >>> text([4, 17])
    'w4 w17'
    """
    return " ".join(f"w{i}" for i in ids)


def write_lines(path: Path, rows: Sequence[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# ------------------------------------------------------------------------------------------- configs


def sft_config(data: Path, model: Path, steps: int, rate: float, artifacts: Path) -> dict[str, Any]:
    """An SFT config: batches of 16 rows, constant learning rate, no held-out rows."""
    return {
        "artifacts": str(artifacts),
        "seed": SEED,
        "device": "cpu",
        "precision": "float32",
        "model": {"path": str(model)},
        "data": {"train": str(data / "sft.jsonl"), "test_fraction": 0, "max_length": MAX_LENGTH},
        "training": {"num_steps": steps, "minibatch_size": 16},
        "optimizer": optimizer(rate),
        "checkpoints": {"every_minutes": None},
    }


def rm_config(data: Path, model: Path, steps: int, rate: float, artifacts: Path) -> dict[str, Any]:
    """An RM config: batches of 16 pairs with a common prompt, no normalisation of the score."""
    config = sft_config(data, model, steps, rate, artifacts)
    config["data"]["train"] = str(data / "rm.jsonl")
    return config | {"evaluation": {"num_normalization_samples": 0}}


def ppo_config(inputs: Inputs, epochs: int, iterations: int, artifacts: Path) -> dict[str, Any]:
    """A PPO config: one optimizer step per epoch over the whole batch, as with TRL's `num_mini_batches=1`."""
    batch = inputs.size.ppo_batch
    return {
        "artifacts": str(artifacts),
        "seed": SEED,
        "device": "cpu",
        "precision": "float32",
        "policy": {"path": str(inputs.policy)},
        "rewards": [{"type": "reward_model", "path": str(inputs.reward_model)}],
        # With its head, so that the compared values are not all zero.
        "value_model": {"path": str(inputs.reward_model)},
        "data": {"train": str(inputs.folder / "prompts.jsonl"), "test_fraction": 0},
        "rollout": {"max_new_tokens": MAX_NEW_TOKENS, "temperature": TEMPERATURE},
        "ppo": {
            "num_iterations": iterations,
            "rollout_batch_size": batch,
            "minibatch_size": batch,
            "ppo_epochs": epochs,
            "kl_coef": 0.05,
            "vf_coef": 0.1,
        },
        "optimizer": optimizer(1e-6),
        "checkpoints": {"every_minutes": None},
    }


def optimizer(rate: float) -> dict[str, Any]:
    return {"learning_rate": rate, "schedule": "constant", "betas": [0.9, 0.95]}


def write_config(path: Path, config: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


def run_stage(folder: Path, stage: str, config: dict[str, Any]) -> None:
    """Run one stage by the command line."""
    print(f"{folder.name}: {stage}", flush=True)
    path = write_config(folder / f"{stage}.yaml", config)
    command = [sys.executable, "-m", "rlhf_cli", stage, "--config", str(path), "--quiet"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RLHF_CACHE": str(folder / "cache")}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
