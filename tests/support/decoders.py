"""Tiny models of every family that a decoder supports, with prompts and sampling settings for them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from rlhf_cli.kernels import linear
from rlhf_cli.models.load import prepare
from rlhf_cli.rollout.sampling import Sampling, draw_uniforms, sample
from support.tiny import CPU, tiny_model

VOCAB = 97
STOP = frozenset(range(10, 16))
ROPE = {"rope_theta": 100.0, "original_max_position_embeddings": 64}
FAST = {
    "llama": ("llama", {"num_key_value_heads": 4}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama one key head": ("llama", {"num_key_value_heads": 1}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama wide heads": ("llama", {"head_dim": 12}),
    "llama 3 rope": (
        "llama",
        {
            "rope_parameters": ROPE
            | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        },
    ),
    "yarn": ("llama", {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0}}),
    "mistral": ("mistral", {"sliding_window": 200}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gpt2": ("gpt2", {}),
    "gpt2 odd": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"}),
}
"""Models that the fast decoders support."""
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
UNSUPPORTED = {
    "gpt_neox": ("gpt_neox", {}, "the family gpt_neox"),
    "mixtral": ("mixtral", {"sliding_window": None}, "the family mixtral"),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC}, "changes with the length"),
}
"""Models that the fast decoders do not support, with words of the reason that they give."""
SETTINGS = FAST | {name: parts[:2] for name, parts in UNSUPPORTED.items()}


@cache
def made(name):
    """A tiny model with random weights, biases and norms included. It is shared: do not change it."""
    kind, settings = SETTINGS[name]
    model = tiny_model(kind, **{"n_positions" if kind == "gpt2" else "max_position_embeddings": 256} | settings)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight += 0.3 * torch.randn(weight.shape, generator=generator)
    assert prepare(model, CPU) is None
    return model


def random_ids(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


PROMPTS = random_ids(1, 40, 7, 32, 33, 7, 31, 2, 70, 5, seed=4)
PROMPTS[5] = PROMPTS[2]
PROMPTS[9] = PROMPTS[8]  # Two full pages, which both prompts share.
LONGEST = 45
UNIFORMS = draw_uniforms(1, "fast decoder", 0, len(PROMPTS), LONGEST)


@torch.no_grad()
def plain_logits(model, text):
    return model(input_ids=torch.tensor([text])).logits[0]


@cache
def plain_responses(name, kind):
    """What the plain decoder draws for PROMPTS with the model and sampling of these names. Read only."""
    return sample(made(name), PROMPTS, UNIFORMS, replace(SAMPLINGS[kind], decoder="plain"))


def compare_steps(decoder, model, steps, flipped=False):
    """Assert that the logits of every step are those of a plain forward pass; return the number of rows compared.

    More than 16 rows, which are computed as 20. Some leave, and others enter beside those that stay.
    """
    device, drawn = decoder.network.weights[0].device, torch.Generator().manual_seed(5)
    later = random_ids(3, 66, 20, seed=8)
    prompts = [*PROMPTS, *random_ids(*range(25, 70, 5), seed=9)]
    assert linear.rounded_up(len(prompts)) == len(prompts) + 1
    texts, logits = [list(prompt) for prompt in prompts], decoder.admit(prompts)
    seen = [(text, []) for text in texts]
    rows = [found for _, found in seen]  # of the live texts
    for step in range(steps):
        for text, found, row in zip(texts, rows, logits.cpu(), strict=True):
            found.append((len(text), row.clone()))
        if step in (3, 20, 21, 40):
            stay = torch.tensor([i for i in range(len(texts)) if (i + step) % 3 != 0])
            stay = stay.flip(0) if flipped else stay
            decoder.keep(stay.to(device))
            texts, rows = [texts[i] for i in stay], [rows[i] for i in stay]
        ids = torch.randint(0, VOCAB, (len(texts),), generator=drawn)
        for text, token in zip(texts, ids.tolist(), strict=True):
            text.append(token)
        logits = decoder.step(ids.to(device))
        if step in (5, 30):
            logits = torch.cat([logits, decoder.admit(later)])
            seen += [(list(prompt), []) for prompt in later]
            texts, rows = texts + [text for text, _ in seen[-3:]], rows + [found for _, found in seen[-3:]]
    for text, found in seen:
        lengths = torch.tensor([length for length, _ in found])
        plain = plain_logits(model, text)[lengths - 1]  # a causal model has the logits of all positions in one pass
        gaps = (torch.stack([row for _, row in found]) - plain).abs().amax(1)
        assert (gaps <= 1e-4 * plain.abs().amax(1).clamp_min(1)).all(), gaps
    return sum(len(found) for _, found in seen)


def same(found, wanted):
    """Assert that two lists of responses are equal; log-probabilities may differ by rounding."""
    assert [r.ids for r in found] == [r.ids for r in wanted]
    assert [r.ended for r in found] == [r.ended for r in wanted]
    assert [r.allowed_ids for r in found] == [r.allowed_ids for r in wanted]
    for a, b in zip(found, wanted, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=2e-4)


SAMPLINGS = {
    "plain": Sampling(stop=STOP),
    "temperature": Sampling(0.6, stop=STOP),
    "filters": Sampling(1.2, top_k=40, top_p=0.8, min_p=0.02, stop=STOP),
    "min_new_tokens": Sampling(min_new_tokens=9, stop=STOP),
    "endless": Sampling(),
}
