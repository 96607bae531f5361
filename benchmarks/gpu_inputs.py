"""Sizes, models and rows of the GPU benchmark.

The models are Llamas of the sizes of Qwen2, with random weights. (For the class Qwen2 transformers loads that class's
tokenizer, whatever the directory says.) The tokenizer has one token per word (speed_inputs.py).
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from speed_inputs import EOS, Size, optimizer, text, word_tokenizer, write_lines
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

from rlhf_cli.models.load import prepare

EOS_SCALE = 6.0
"""In `policy` EOS's embedding is this many times as large as the others', so that random weights end their responses
now and then: its logit then varies so much that about one in fifty is above all others. `base` hardly ever ends one."""


@dataclass(frozen=True)
class Plan:
    """The sizes of a run."""

    rows: int
    """Rows of a training step."""
    median: int
    longest: int
    rollout_rows: int
    prompt: int
    response: int
    ppo_rows: int
    repeats: int


FULL = Plan(32, 400, 1024, 256, 128, 128, 64, 3)
TINY = Plan(4, 20, 40, 8, 8, 8, 8, 2)
SIZES = {
    "1.5 B": Size(1536, 8960, 28, 12, 151936, ppo_batch=64, steps=0, learning_rate=0.0, kv_heads=2),
    "0.5 B": Size(896, 4864, 24, 14, 151936, ppo_batch=64, steps=0, learning_rate=0.0, kv_heads=2),
}
MEDIUM = Plan(32, 100, 128, 64, 64, 64, 32, 2)
MEDIUM_SIZES = {"25 M": Size(512, 1408, 6, 8, 8192, ppo_batch=32, steps=0, learning_rate=0.0)}
"""For the tests."""
TINY_SIZES = {"tiny": Size(64, 128, 2, 4, 512, ppo_batch=8, steps=0, learning_rate=0.0, kv_heads=2)}


@dataclass(frozen=True)
class Inputs:
    """The files of one size, each written when it is first asked for."""

    folder: Path
    size: Size
    plan: Plan
    device: torch.device

    @property
    def base(self) -> Path:
        """A language model whose responses have the maximum length."""
        return self._once("base", lambda folder: self._save(LlamaForCausalLM, folder))

    @property
    def policy(self) -> Path:
        """A language model that ends its responses now and then."""
        return self._once("policy", lambda folder: self._save(LlamaForCausalLM, folder, eos_scale=EOS_SCALE))

    @property
    def reward(self) -> Path:
        """A classifier with one label."""
        return self._once("reward", lambda folder: self._save(LlamaForSequenceClassification, folder))

    @property
    def rows(self) -> Path:
        """A folder with sft.jsonl, rm.jsonl and prompts.jsonl, all of the maximum length."""
        return self._once("rows", self._write_rows)

    def ids(self, count: int, number: int) -> list[int]:
        """Token ids, different for each number."""
        return [4 + (7919 * number + 31 * t) % (self.size.vocabulary - 4) for t in range(count)]

    def model(self, kind: Any, *, packed: bool = True) -> PreTrainedModel:
        """A model with random weights, created on the device."""
        torch.manual_seed(0)
        config = self.size.config(num_labels=1, max_position_embeddings=4096)
        with self.device:
            model: PreTrainedModel = kind(config)
        if packed:
            prepare(model, self.device)
        return model.eval()

    def stage_config(self, artifacts: Path) -> dict[str, Any]:
        """The keys that the configs of all stages share."""
        return {
            "artifacts": str(artifacts),
            "device": self.device.type,
            "precision": "bfloat16",
            "optimizer": optimizer(1e-6),
            "checkpoints": {"every_minutes": None},
        }

    def _save(self, kind: Any, folder: Path, *, eos_scale: float = 1.0) -> None:
        """Write a model directory. Weights in bfloat16 halve the time to write and read them."""
        model = self.model(kind, packed=False).to(torch.bfloat16)
        if kind is LlamaForCausalLM:
            with torch.no_grad():
                model.get_input_embeddings().weight[EOS] *= eos_scale
            model.generation_config.update(pad_token_id=0, bos_token_id=1, eos_token_id=EOS)
        model.save_pretrained(folder)
        word_tokenizer(self.size.vocabulary).save_pretrained(folder)

    def _write_rows(self, folder: Path) -> None:
        plan, numbers = self.plan, range(max(self.plan.rows, self.plan.ppo_rows) * (self.plan.repeats + 2))

        def words(count: int, number: int) -> str:
            return text(self.ids(count, number))

        prompts = [words(plan.prompt, i) for i in numbers]
        answers = [[" " + words(plan.response - 1, i + k) for k in (1, 2)] for i in numbers]
        rows = list(zip(prompts, answers, strict=True))
        write_lines(folder / "sft.jsonl", [{"prompt": p, "response": a} for p, (a, _) in rows])
        write_lines(folder / "rm.jsonl", [{"prompt": p, "chosen": a, "rejected": b} for p, (a, b) in rows])
        write_lines(folder / "prompts.jsonl", [{"prompt": p} for p in prompts])

    def _once(self, name: str, write: Callable[[Path], None]) -> Path:
        folder = self.folder / name
        if not (folder / "finished").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            write(folder)
            (folder / "finished").touch()
        return folder
