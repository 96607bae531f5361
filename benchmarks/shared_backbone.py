"""Measure the memory of PPO's four models with LoRA: weights of their own, one shared backbone, and 4 bits.

    python benchmarks/shared_backbone.py            # a 90 M Llama, about a minute

The models are loaded as PPO loads them, each form in a process of its own. The figures are MB above the imports: what
the process holds afterwards, and its peak while it loads.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_cli.config.models import Lora
from rlhf_cli.models.adapter_files import BaseModel, save_adapter
from rlhf_cli.models.adapters import add_lora
from rlhf_cli.models.frozen import hold_base
from rlhf_cli.models.load import load_policy, load_reward_model, new_reward_model, new_value_model, prepare
from rlhf_cli.models.lora import Backbone
from rlhf_cli.tensor_ops import num_weights

FORMS = ("own weights", "shared", "shared, nf4")
CPU = torch.device("cpu")


def resident() -> float:
    """MB of this process in memory."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1e3


def write(root: Path) -> None:
    """A language model, and a reward model in both forms."""
    config = LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=12,
        vocab_size=30000,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    base = BaseModel(str(root / "sft"))
    LlamaForCausalLM(config).save_pretrained(base.path)
    model, _ = new_reward_model(base.path, None, seed=0, head_std=None)
    model.save_pretrained(root / "rm")
    add_lora(model, Lora(), "lora", seed=0)
    save_adapter(model, root / "adapter", base)
    save_adapter(model, root / "adapter_nf4", base, "nf4")


def load(root: Path, form: str) -> None:
    """Load the models as PPO does, and print the memory."""
    load_policy(str(root / "sft"))  # what the first load imports does not count
    before, base = resident(), BaseModel(str(root / "sft"))
    lora = Lora(quantize="nf4" if "nf4" in form else None)
    policy = load_policy(base.path)
    if form == "own weights":
        value, reward = new_value_model(base.path, None), load_reward_model(str(root / "rm"))
    else:
        hold_base(policy, lora, "lora", CPU, "auto")
        backbone = Backbone(policy, base, lora.quantize)
        assert backbone is not None
        path = root / ("adapter_nf4" if "nf4" in form else "adapter")
        shared_value, shared_reward = backbone.classifier(), backbone.reward_model(str(path))
        assert shared_value is not None
        assert shared_reward is not None
        value, reward = shared_value, shared_reward
    for model in (policy, value, reward):
        prepare(model, CPU)
    for model in (policy, value):
        add_lora(model, lora, "lora", seed=0)
    weights = {id(p): p.nbytes for model in (policy, value, reward) for p in model.parameters()}
    count = sum(map(num_weights, policy.parameters())) / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    held = f"weights {sum(weights.values()) / 1e6:6.0f} MB, process {resident() - before:6.0f} MB"
    print(f"{form:12} policy of {count:.1f} M weights: {held}, peak {peak - before:6.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", nargs=2, metavar=("ROOT", "FORM"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        load(Path(arguments.load[0]), arguments.load[1])
        return
    with tempfile.TemporaryDirectory() as root:
        write(Path(root))
        for form in FORMS:
            subprocess.run([sys.executable, __file__, "--load", root, form], check=True)


if __name__ == "__main__":
    main()
