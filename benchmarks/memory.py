"""Measure the memory of PPO with each way to save some.

    python benchmarks/memory.py                     # Llamas of 100 million weights, about six minutes
    python benchmarks/memory.py --hidden 256        # smaller ones, to try the script

Each way runs two iterations of PPO in a process of its own, on a CPU: policy, value model, ref_policy and reward model
of the same size, 4 responses of 16 tokens, one microbatch each. The published weights are bfloat16 numbers.

`peak` is the largest memory of the process above its imports. `held` counts the weights, gradients and moments in the
phase that has most of them on the device. On a CPU nothing is gained by offloading, which moves tensors within the same
memory, so only `held` shows it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import stages.ppo
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.ppo import setup as ppo_setup
from rlhf_cli.ppo.setup import Setup
from rlhf_cli.processes.environment import set_up_process
from rlhf_cli.rewards.models import RewardModel

VOCABULARY = 32_000
HALF = {"precision": "bfloat16"}
NARROW = {**HALF, "optimizer": {"precision": "bfloat16"}}
OFFLOAD = {"offload": ["optimizer", "frozen"]}
LORA = {**HALF, "policy": {"lora": {}}, "value_model": {"init": "policy", "lora": {}}}
WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32, optimizer.precision: 8bit": {"optimizer": {"precision": "8bit"}},
    "bfloat16": HALF,
    "float16": {"precision": "float16"},
    "bfloat16, optimizer.precision: 8bit": {**HALF, "optimizer": {"precision": "8bit"}},
    "bfloat16, optimizer.precision: bfloat16": NARROW,
    "bfloat16, offload": {**HALF, **OFFLOAD},
    "bfloat16, optimizer.precision: bfloat16, offload": {**NARROW, **OFFLOAD},
    "bfloat16, lora": LORA,
}


def main() -> None:
    """Run every way, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768, help="hidden size of the models (768)")
    parser.add_argument("--only", help="only the ways whose names contain this")
    parser.add_argument("--run", nargs=2, metavar=("ROOT", "WAY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run(Path(arguments.run[0]), arguments.run[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        millions = write(Path(folder), arguments.hidden)
        print(f"models of {millions:.0f} M weights\n")
        print("| precision and keys | peak, MB | of float32 | held, MB | of float32 |\n| --- | --- | --- | --- | --- |")
        first: dict[str, float] = {}
        for name in WAYS:
            if arguments.only and arguments.only not in name:
                continue
            output = subprocess.run(
                [sys.executable, __file__, "--run", folder, name], check=True, capture_output=True, text=True
            ).stdout
            found = json.loads(output.splitlines()[-1])
            first = first or found
            cells = [f"{found[key]:,.0f} | {found[key] / first[key]:.2f}" for key in ("peak", "held")]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


def write(root: Path, hidden: int) -> float:
    """A language model, a reward model and prompts; returns the millions of weights of the language model."""
    words = {f"w{i}": i for i in range(VOCABULARY)}
    bpe = Tokenizer(models.WordLevel(words, unk_token="w3"))
    bpe.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="w0", bos_token="w1", eos_token="w2")
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=8,
        num_attention_heads=hidden // 64,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        num_labels=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).bfloat16()
    for name, one in {"sft": model, "rm": AutoModelForSequenceClassification.from_config(config).bfloat16()}.items():
        one.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    rows = [{"prompt": " ".join(f"w{(7 * i + j) % 1000 + 10}" for j in range(8))} for i in range(16)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return sum(p.numel() for p in model.parameters()) / 1e6


def run(root: Path, way: str) -> None:
    """Two iterations of PPO; prints the figures as JSON."""
    set_up_process()
    ppo_setup.leaves = lambda _: True  # so that `offload` does what it would do on a GPU
    held: list[float] = []
    save = stages.ppo.save_models

    def observed(setup: Setup) -> None:
        held.append(held_megabytes(setup))
        save(setup)

    stages.ppo.save_models = observed
    values = settings(root)
    for key, value in WAYS[way].items():
        values[key] = {**values[key], **value} if isinstance(values.get(key), dict) else value
    config = PPOConfig.model_validate({**values, "artifacts": str(root / way.replace(":", "").replace(",", ""))})
    before = megabytes("VmRSS")
    stages.ppo.run(config, quiet=True)
    print(json.dumps({"peak": megabytes("VmHWM") - before, "held": held[0]}))


def megabytes(name: str) -> float:
    """A figure of this process: VmRSS is its memory now, VmHWM its peak (getrusage may give its parent's)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024 / 1e6


def settings(root: Path) -> dict[str, Any]:
    """The config of a run, as a mapping."""
    return {
        "policy": {"path": str(root / "sft")},
        "rewards": [{"type": "reward_model", "path": str(root / "rm")}],
        "data": {"train": str(root / "prompts.jsonl"), "test_fraction": 0},
        "rollout": {"max_new_tokens": 16, "max_live_rows": 4},
        "ppo": {
            "num_iterations": 2,
            "rollout_batch_size": 4,
            "minibatch_size": 4,
            "ppo_epochs": 1,
            "tokens_per_microbatch": 128,
        },
        "optimizer": {"learning_rate": 1e-5},
        "value_model": {"init": "reward_model"},
        "checkpoints": {"every_minutes": None},
    }


def held_megabytes(setup: Setup) -> float:
    """Weights, gradients and moments on the device, in the phase that has most of them."""
    models, offloaded = setup.models, setup.config.offload
    trained = [model for model in (models.policy, models.value_model) if model is not None]
    frozen = [model for model in (models.ref_policy,) if model is not None]
    frozen += [source.model for source in setup.rewards if isinstance(source, RewardModel)]
    weights = {id(p): p.nbytes for model in trained for p in model.parameters()}
    others = {id(p): p.nbytes for model in frozen for p in model.parameters() if id(p) not in weights}
    gradients = sum(p.nbytes for model in trained for p in model.parameters() if p.requires_grad)
    steppers = [stepper for stepper in (setup.policy_stepper, setup.value_stepper) if stepper is not None]
    moments = sum(tensor.nbytes for stepper in steppers for tensor in stepper.state()[0].values())
    scoring = sum(others.values()) + (0 if "optimizer" in offloaded else moments)
    update = gradients + moments + (0 if "frozen" in offloaded else sum(others.values()))
    return (sum(weights.values()) + max(scoring, update)) / 1e6


if __name__ == "__main__":
    main()
