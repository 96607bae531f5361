"""A small llama."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_cli.models.load import prepare

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
