"""Out of memory: what was tried, and which setting to lower."""

from __future__ import annotations

import torch

from rlhf_cli.config.schemas import PPOConfig, RMConfig, SFTConfig, Stage


def is_out_of_memory(error: BaseException) -> bool:
    """A GPU's, Python's, or that of torch's CPU allocator, which has no class of its own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)


def what_to_lower(config: Stage, num_processes: int) -> str:
    """A line about the rows that a process computes at a time, their lengths and the key that makes them fewer.

    >>> config = SFTConfig(
    ...     artifacts="a",
    ...     model={"path": "m"},
    ...     data={"train": "d.jsonl", "max_length": 64},
    ...     training={"num_steps": 1, "minibatch_size": 8},
    ...     optimizer={"learning_rate": 1e-3},
    ... )
    >>> what_to_lower(config, num_processes=2).partition(". ")[0]
    'out of memory with 4 rows of at most 64 tokens at a time'
    """
    assert isinstance(config, SFTConfig | RMConfig | PPOConfig)
    if isinstance(config, PPOConfig):
        key, minibatch, microbatch = "ppo.microbatch_size", config.ppo.minibatch_size, config.ppo.microbatch_size
        what, tokens = "responses", f"{config.data.max_prompt_length} + {config.rollout.max_new_tokens}"
        sampled = -(-config.ppo.rollout_batch_size // num_processes)
        more = f"; where it ran out while sampling, {sampled} responses at a time, ppo.rollout_batch_size"
    else:
        key, minibatch = "training.microbatch_size", config.training.minibatch_size
        microbatch = config.training.microbatch_size
        what, tokens, more = "rows", str(config.data.max_length), ""
    rows = -(-minibatch // num_processes)
    rows = rows if microbatch is None else min(rows, microbatch)
    lower = f"Lower {key}, with which the same command goes on" if rows > 1 else "Lower the longest length"
    return f"out of memory with {rows} {what} of at most {tokens} tokens at a time. {lower}{more}"
