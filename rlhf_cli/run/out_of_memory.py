"""Out-of-memory errors: how to recognise one, and which key to lower."""

from __future__ import annotations

from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.config.stage import Stage
from rlhf_cli.processes.threads import is_out_of_memory, lacks_thread


def what_is_lacking(
    error: BaseException, config: Stage, num_processes: int, tokens_per_microbatch: int | None
) -> str | None:
    """What to do about an error of memory or threads, with the arguments of `what_to_lower`; None for another error."""
    if lacks_thread(error):
        return (
            f"the system refused to start a thread ({error}). Raise its limit of memory or processes "
            "(ulimit -v, ulimit -u) and run the same command again"
        )
    return what_to_lower(config, num_processes, tokens_per_microbatch) if is_out_of_memory(error) else None


def what_to_lower(config: Stage, num_processes: int, tokens_per_microbatch: int | None) -> str:
    """A message with the size of a microbatch on one process, and the key to lower.

    `tokens_per_microbatch` is the limit in use; None if memory ran out while the model was loaded.

    >>> config = SFTConfig(
    ...     artifacts="a",
    ...     model={"path": "m"},
    ...     data={"train": "d.jsonl", "max_length": 64},
    ...     training={"num_steps": 1, "minibatch_size": 8},
    ...     optimizer={"learning_rate": 1e-3},
    ... )
    >>> what_to_lower(config, 2, 2048).partition("; ")[0]
    'out of memory with a microbatch of 4 rows of at most 64 tokens. Lower training.tokens_per_microbatch below 256 \
and run the same command to resume'
    >>> what_to_lower(config, 2, 100).partition(" and run")[0]
    'out of memory with a microbatch of 4 rows of at most 64 tokens and 100 tokens in total. Lower \
training.tokens_per_microbatch below 100'
    """
    assert isinstance(config, SFTConfig | RMConfig | PPOConfig)
    if isinstance(config, PPOConfig):
        section, minibatch, microbatch = "ppo", config.ppo.minibatch_size, config.ppo.microbatch_size
        what, longest = "responses", config.data.max_prompt_length + config.rollout.max_new_tokens
        lengths = f"{config.data.max_prompt_length} + {config.rollout.max_new_tokens}"
        length_keys = "data.max_prompt_length or rollout.max_new_tokens"
        sampled = config.rollout.max_live_rows or -(-config.ppo.rollout_batch_size // num_processes)
        more = f"; if it ran out while sampling, lower rollout.max_live_rows below {sampled}"
    else:
        section, minibatch = "training", config.training.minibatch_size
        microbatch = config.training.microbatch_size
        what, longest, lengths, more = "rows", config.data.max_length, str(config.data.max_length), ""
        length_keys = "data.max_length"
        if isinstance(config, RMConfig) and (samples := config.evaluation.num_normalization_samples):
            sampled = config.evaluation.max_live_rows or -(-samples // num_processes)
            more = f"; if it ran out while sampling, lower evaluation.max_live_rows below {sampled}"
    rows = -(-minibatch // num_processes)
    rows = rows if microbatch is None else min(rows, microbatch)
    tokens = rows * longest
    limit = ""
    if tokens_per_microbatch is not None and tokens_per_microbatch < tokens:
        tokens = tokens_per_microbatch
        limit = f" and {tokens} tokens in total"
    lower = f"Lower {section}.tokens_per_microbatch below {tokens} and run the same command to resume"
    if tokens <= longest:
        # A row that is longer than the limit is a microbatch by itself, and this may have been one.
        lower = f"Lower {length_keys}" if rows == 1 else f"{lower}, or lower {length_keys}"
    if not (config.gradient_checkpointing or config.compile):
        more += "; gradient_checkpointing: true needs less memory too"
    return f"out of memory with a microbatch of {rows} {what} of at most {lengths} tokens{limit}. {lower}{more}"
