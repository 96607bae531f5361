"""How long a run is: training rows, optimizer steps, tokens, and hours from a given speed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf_cli.config.by_stage import AnyConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.data.answers import answer_encoder
from rlhf_cli.data.encode import Example, Skipped, require_eos
from rlhf_cli.data.encoders import DemonstrationEncoder, RowEncoder
from rlhf_cli.data.paths import find_files
from rlhf_cli.data.row_counts import Report
from rlhf_cli.data.stage_rows import StageRows, rm_rows, seen_rows, sft_rows
from rlhf_cli.errors import DataError, UserError
from rlhf_cli.hub import cached
from rlhf_cli.models.load import load_tokenizer
from rlhf_cli.run.artifacts import model_directory

SAMPLE = 1000
"""Rows that are tokenised, drawn at random from all."""


@dataclass(frozen=True)
class TrainingRows:
    """The training rows of SFT or RM."""

    num: int | None
    """How many. None if that is not known."""
    basis: str
    """Where the number comes from, or why it is not known."""
    sequences: float
    """Sequences of a row: its answers, of which each follows the prompt."""
    tokens: float | None = None
    """Mean tokens of a row, in all of its sequences. None without a tokenizer or without the rows."""


@dataclass(frozen=True)
class Length:
    """The length of a stage."""

    steps: int | None
    """Optimizer steps. None: they follow from the number of rows, which is not known."""
    tokens: int | None
    """Tokens of all steps of all members, prompts included; of PPO each response once."""
    is_bound: bool = True
    """Whether `tokens` takes every row to have the maximum length. Otherwise it follows from the mean of the rows."""
    members: int = 1
    """Reward models that are trained one after the other, each for `steps`."""
    rows: TrainingRows | None = None
    epochs: float | None = None
    """Passes over these rows."""
    hours: float | None = None
    """None without a speed. A bound if `tokens` is one."""


def length_of(stage: str, configs: Mapping[str, AnyConfig], tokens_per_s: float | None, num_rows: int | None) -> Length:
    """The length of a stage, whose config is one of `configs`.

    Hours are ``tokens / tokens_per_s / 3600``. `tokens_per_s` counts all processes; for PPO it is that of whole
    iterations, rollouts included. `num_rows` are the training rows of SFT or RM; None counts them (`training_rows`).
    """
    config = configs[stage]
    if isinstance(config, PPOConfig):
        longest = config.data.max_prompt_length + config.rollout.max_new_tokens
        length = Length(config.ppo.total_steps, config.ppo.num_iterations * config.ppo.rollout_batch_size * longest)
    else:
        training, rows = config.training, training_rows(config, configs, num_rows)
        if rows.num is None and training.num_steps is None:
            return Length(None, None, rows=rows)
        steps = training.total_steps(rows.num or 0)
        taken = steps * training.minibatch_size
        of_row = rows.tokens if rows.tokens is not None else rows.sequences * config.data.max_length
        epochs = None if rows.num is None else taken / max(1, rows.num)
        members = config.num_members if isinstance(config, RMConfig) else 1
        length = Length(steps, round(taken * of_row) * members, rows.tokens is None, members, rows, epochs)
    if tokens_per_s is None or length.tokens is None:
        return length
    return replace(length, hours=length.tokens / tokens_per_s / 3600)


def training_rows(config: SFTConfig | RMConfig, configs: Mapping[str, AnyConfig], given: int | None) -> TrainingRows:
    """The training rows of a stage. Never downloads anything.

    `configs`: of the stages beside this one, by name. `given` rows are taken as they are, and no data is read.
    """
    sequences = 2.0 if isinstance(config, RMConfig) and config.is_pairwise else 1.0
    if given is not None:
        return TrainingRows(given, "as given", sequences)
    paths = ", ".join(dict.fromkeys(source.path for source in config.data.train))
    try:
        if all(find_files(source.path) for source in config.data.train):
            return _read(config, configs)
        reason = f"{paths}: the rows of the hub are not counted"
    except DataError as error:
        reason = str(error)
    return TrainingRows(None, reason, sequences)


def _read(config: SFTConfig | RMConfig, configs: Mapping[str, AnyConfig]) -> TrainingRows:
    """Count the rows of local files, and tokenise some of them. Raises DataError as the stage would."""
    spec = sft_rows(config) if isinstance(config, SFTConfig) else rm_rows(config)
    pairs_up = isinstance(config, RMConfig) and config.is_pairwise and spec.purpose == "rm scores"
    report, rng, num, answers = Report(), random.Random(0), 0, 0
    scores: list[float] = []
    sample: list[Any] = []
    for number, (_, seen) in enumerate(seen_rows(spec, report, only="train"), 1):
        num += len(seen.scores) or 1  # The stage takes each scored answer by itself.
        answers += len(seen.answers)
        scores += seen.scores if pairs_up else ()
        if len(sample) < SAMPLE:
            sample.append(seen)
        elif (at := rng.randrange(number)) < SAMPLE:
            sample[at] = seen
    if not num:
        raise report.nothing_left(spec.role, "train", spec.length_key, None)
    sequences, basis = answers / num, "counted in the data files"
    if pairs_up:
        middle = (min(scores) + max(scores)) / 2
        num, sequences = sum(score > middle for score in scores), 2.0
    encoder = _encoder(config, configs, spec)
    items = [] if encoder is None else list(encoder.encode(sample))
    kept = [item for item in items if not isinstance(item, Skipped | DataError)]
    if not kept:
        drops = ", too long ones included" if config.data.truncation == "drop" else ""
        return TrainingRows(num, basis + drops, sequences)
    tokens = fmean(sum(map(len, [item.ids] if isinstance(item, Example) else item.sequences)) for item in kept)
    return TrainingRows(round(num * len(kept) / len(items)), basis, sequences, tokens * (1 + pairs_up))


def _encoder(config: SFTConfig | RMConfig, configs: Mapping[str, AnyConfig], spec: StageRows) -> RowEncoder[Any] | None:
    """The encoder of the stage, with the tokenizer of its model or else of the model that SFT starts from.

    None if the tokenizers are neither directories nor in the hub's cache.
    """
    for one in filter(None, (config, configs.get("sft"))):
        path, revision = one.inputs.get("model", ("", None))
        directory = model_directory(path)
        is_here = Path(directory).is_dir() or cached(path, "tokenizer_config.json", revision)
        try:
            tokenizer = load_tokenizer(directory, revision) if path and is_here else None
        except UserError:
            continue
        if tokenizer is not None and isinstance(config, SFTConfig):
            require_eos(tokenizer, path)
            return DemonstrationEncoder(tokenizer, spec)
        if tokenizer is not None:
            # Tokenizers of encoders have no EOS. The difference is a token or two.
            return answer_encoder(tokenizer, spec, reads_last_token=tokenizer.eos_token_id is not None)
    return None
