"""A small llama, and a forward and backward pass whose memory is estimated."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_cli.models.forward import target_logits
from rlhf_cli.models.load import prepare
from rlhf_cli.plan.memory import Batch, Held, Setting
from rlhf_cli.plan.shapes import shape_of_loaded
from rlhf_cli.tensor_ops import token_logprobs

CPU = torch.device("cpu")


def llama(hidden=64, intermediate=176, layers=3, heads=4, key_value_heads=2, vocab=500, cls=LlamaForCausalLM):
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        vocab_size=vocab,
        pad_token_id=0,
        num_labels=1,
    )
    model = cls(config)
    assert prepare(model, CPU) is None
    return model


def run_and_estimate(model, num_tokens):
    """Run a forward and backward pass over rows of 64 tokens; return the bytes that the plan computes for it."""
    torch.set_num_threads(1)
    some = [[(7 * i + row) % 2048 for i in range(64)] for row in range(num_tokens // 64)]
    logits, targets = target_logits(model, some, [[False] + [True] * 63] * len(some))
    (-token_logprobs(logits, targets).sum()).backward()
    held = Held("model", shape_of_loaded(model, "float32"), Setting("cpu"))
    return sum(held.in_training(Batch(num_tokens, len(targets), 1)).values())
