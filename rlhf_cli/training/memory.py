"""Out of memory: what was tried, and which setting to lower."""

from __future__ import annotations

import torch

from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.config.stage import Stage


def is_out_of_memory(error: BaseException) -> bool:
    """A GPU's, Python's, or that of torch's CPU allocator, which has no class of its own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)


def what_to_lower(config: Stage, num_processes: int, tokens_per_microbatch: int | None) -> str:
    """A line about what a process computes at a time and the key that makes it less.

    `tokens_per_microbatch` is what the stage goes by, None where it came no further than loading.

    >>> config = SFTConfig(
    ...     artifacts="a",
    ...     model={"path": "m"},
    ...     data={"train": "d.jsonl", "max_length": 64},
    ...     training={"num_steps": 1, "minibatch_size": 8},
    ...     optimizer={"learning_rate": 1e-3},
    ... )
    >>> what_to_lower(config, 2, 2048)
    'out of memory with 4 rows of at most 64 tokens at a time. Lower training.tokens_per_microbatch below 256, with \
which the same command goes on'
    >>> what_to_lower(config, 2, 100).partition(",")[0]
    'out of memory with 4 rows of at most 64 tokens and 100 tokens in all at a time. Lower \
training.tokens_per_microbatch below 100'
    """
    assert isinstance(config, SFTConfig | RMConfig | PPOConfig)
    if isinstance(config, PPOConfig):
        section, minibatch, microbatch = "ppo", config.ppo.minibatch_size, config.ppo.microbatch_size
        what, longest = "responses", config.data.max_prompt_length + config.rollout.max_new_tokens
        lengths = f"{config.data.max_prompt_length} + {config.rollout.max_new_tokens}"
        sampled = config.rollout.max_live_rows or -(-config.ppo.rollout_batch_size // num_processes)
        more = f"; where it ran out while sampling, {sampled} responses at a time, rollout.max_live_rows"
    else:
        section, minibatch = "training", config.training.minibatch_size
        microbatch = config.training.microbatch_size
        what, longest, lengths, more = "rows", config.data.max_length, str(config.data.max_length), ""
    rows = -(-minibatch // num_processes)
    rows = rows if microbatch is None else min(rows, microbatch)
    at_once = rows * longest
    whole = ""
    if tokens_per_microbatch is not None and tokens_per_microbatch < at_once:
        at_once = tokens_per_microbatch
        whole = f" and {at_once} tokens in all"
    lower = f"Lower {section}.tokens_per_microbatch below {at_once}, with which the same command goes on"
    if at_once <= longest:
        # A row of the longest length is computed alone, and whether there was one is not known here.
        lower = "Lower the longest length" if rows == 1 else f"{lower}, or the longest length"
    if not (config.gradient_checkpointing or config.compile):
        more += "; gradient_checkpointing: true takes less as well"
    return f"out of memory with {rows} {what} of at most {lengths} tokens{whole} at a time. {lower}{more}"
