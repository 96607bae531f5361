"""How long a run is: training rows, optimizer steps, tokens, and hours from a given or a measured speed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedTokenizerBase

from rlhf_cli.config.data import DataSource
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.config.stage import Stage
from rlhf_cli.data.answers import answer_encoder
from rlhf_cli.data.encode import Example, Skipped, require_eos
from rlhf_cli.data.encoders import DemonstrationEncoder, RowEncoder
from rlhf_cli.data.formats import Purpose
from rlhf_cli.data.paths import find_files
from rlhf_cli.data.row_counts import Report
from rlhf_cli.data.splits import SHARES
from rlhf_cli.data.views import StageRows, Viewed, answers_of, rm_rows, seen_rows, sft_rows
from rlhf_cli.errors import DataError, UserError
from rlhf_cli.files import json_rows
from rlhf_cli.models.load import load_tokenizer
from rlhf_cli.run.artifacts import model_directory, partial_directory, stage_directory

PUBLISHED = {
    "Anthropic/hh-rlhf": 160_800,
    "cornell-movie-review-data/rotten_tomatoes": 8_530,
    "data/hh/helpful-base/test.jsonl.gz": 2_354,
    "data/sentiment/sentences.jsonl.gz": 10_662,
}
"""Rows of the data of the shipped configs that you have to download: the split `train`, or the file."""
LABELLED = ("cornell-movie-review-data/rotten_tomatoes", "data/sentiment/sentences.jsonl.gz")
"""Those of them with one label a row, half of them positive. The pairwise losses make a pair of two rows."""
SAMPLE = 1000
"""Rows that are tokenised, drawn at random from all."""
NO_PHASES = ("time/elapsed_s", "time/waited_s", "time/compile_s")
"""Seconds of a row of metrics that are not those of a phase of its step: since the start, inside a phase, or once."""


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
    basis: str = ""
    """Where the hours come from."""
    hours_are_bound: bool = False
    """Whether the hours follow from tokens that are a bound."""


def length_of(stage: str, configs: Mapping[str, Stage], tokens_per_s: float | None, num_rows: int | None) -> Length:
    """The length of a stage, whose config is one of `configs`.

    Hours are ``tokens / tokens_per_s / 3600``, or follow from the mean time of a step in the metrics that this run has
    written so far. `tokens_per_s` counts all processes; for PPO it is that of whole iterations, rollouts included.
    `num_rows` are the training rows of SFT or RM; None counts them (`training_rows`).
    """
    config = configs[stage]
    units: int | None
    if isinstance(config, PPOConfig):
        units, unit = config.ppo.num_iterations, "an iteration"
        of_row = config.data.max_prompt_length + config.rollout.max_new_tokens
        length = Length(config.ppo.total_steps, units * config.ppo.rollout_batch_size * of_row)
    else:
        assert isinstance(config, SFTConfig | RMConfig)
        length = _length(config, training_rows(config, configs, num_rows))
        units, unit = length.steps, "a step"
    if tokens_per_s is not None and length.tokens is not None:
        hours = length.tokens / tokens_per_s / 3600
        basis = f"at {tokens_per_s:,g} tokens a second"
        return replace(length, hours=hours, basis=basis, hours_are_bound=length.is_bound)
    measured = _seconds_of_a_unit(stage, config)
    if measured is None or units is None:
        return length
    seconds, path = measured
    hours = units * length.members * seconds / 3600
    return replace(length, hours=hours, basis=f"at {seconds:.3g} s {unit}, as in {path}")


def _length(config: SFTConfig | RMConfig, rows: TrainingRows) -> Length:
    training = config.training
    if rows.num is None and training.num_steps is None:
        return Length(None, None, rows=rows)
    steps = training.total_steps(rows.num or 0)
    taken = steps * training.minibatch_size
    of_row = rows.tokens if rows.tokens is not None else rows.sequences * config.data.max_length
    epochs = None if rows.num is None else taken / max(1, rows.num)
    members = config.num_members if isinstance(config, RMConfig) else 1
    return Length(steps, round(taken * of_row) * members, rows.tokens is None, members, rows, epochs)


def _seconds_of_a_unit(stage: str, config: Stage) -> tuple[float, Path] | None:
    """The mean seconds of a step (PPO: an iteration) so far, and the file that says so."""
    for directory in (stage_directory(config.artifacts, stage), partial_directory(config.artifacts, stage)):
        path = directory / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
        phases = [
            [
                value
                for name, value in row.items()
                if name.startswith("time/") and name not in NO_PHASES and isinstance(value, int | float)
            ]
            for row in json_rows(lines)
        ]
        seconds = [sum(times) for times in phases if times]
        if seconds:
            return fmean(seconds), path
    return None


# --------------------------------------------------------------------------------------------- training rows


def training_rows(config: SFTConfig | RMConfig, configs: Mapping[str, Stage], given: int | None) -> TrainingRows:
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
    sizes = [_published(source, config) for source in config.data.train]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return TrainingRows(None, reason, sequences)
    return TrainingRows(round(sum(known)), f"from the published size of {paths}", sequences)


def _published(source: DataSource, config: SFTConfig | RMConfig) -> float | None:
    """The training rows that a source of known size gives, on average over the hashes that choose them."""
    plain = source.split == "train" and source.name is None and source.data_dir is None
    if source.path not in PUBLISHED or not plain:
        return None
    data, purpose = config.data, _purpose(config)
    rows = source.weight * min(PUBLISHED[source.path], source.limit or PUBLISHED[source.path])
    if source.select is not None:
        rows *= min(1.0, sum(1 / int(part.partition("/")[2]) for part in source.select.split(",")))
    if data.split is not None:
        rows *= data.split[SHARES[purpose]] / sum(data.split)
    if data.test is None:
        rows *= 1 - data.test_fraction
    return rows / 2 if purpose == "rm pairs" and source.path in LABELLED else rows


def _purpose(config: SFTConfig | RMConfig) -> Purpose:
    if isinstance(config, SFTConfig):
        return "sft"
    return "rm pairs" if config.is_pairwise else "rm scores"


def _read(config: SFTConfig | RMConfig, configs: Mapping[str, Stage]) -> TrainingRows:
    """Count the rows of local files, and tokenise some of them. Raises DataError as the stage would."""
    spec = sft_rows(config) if isinstance(config, SFTConfig) else rm_rows(config)
    pairs_up = _purpose(config) != spec.purpose
    report, rng = Report(), random.Random(0)
    num, answers = 0, 0
    scores: list[float] = []
    sample: list[Viewed] = []
    for number, (_, seen) in enumerate(seen_rows(spec, report, only="train"), 1):
        row = seen.row
        # The stage takes each scored answer by itself.
        num += len(row) if isinstance(row, list) else 1
        answers += len(answers_of(row))
        scores += [one.score for one in row] if isinstance(row, list) and pairs_up else []
        if len(sample) < SAMPLE:
            sample.append(row)
        elif (at := rng.randrange(number)) < SAMPLE:
            sample[at] = row
    if not num:
        raise report.nothing_left(spec.role, "train", spec.length_key, None)
    sequences = answers / num
    share, tokens = _measure(sample, _encoder(config, configs, spec))
    if pairs_up:
        middle = (min(scores) + max(scores)) / 2
        num, sequences, tokens = sum(score > middle for score in scores), 2.0, None if tokens is None else 2 * tokens
    if share is not None:
        return TrainingRows(round(num * share), "counted in the data files", sequences, tokens)
    drops = ", too long ones included" if config.data.truncation == "drop" else ""
    return TrainingRows(num, f"counted in the data files{drops}", sequences)


def _measure(rows: list[Viewed], encoder: RowEncoder[Any, Any] | None) -> tuple[float | None, float | None]:
    """(share of the rows that are kept, mean tokens of these); None if there is no tokenizer or no row is kept."""
    items = [] if encoder is None else list(encoder.encode(rows))
    kept = [item for item in items if not isinstance(item, Skipped)]
    if not kept:
        return None, None
    lengths = [sum(map(len, [item.ids] if isinstance(item, Example) else item.sequences)) for item in kept]
    return len(kept) / len(items), fmean(lengths)


def _encoder(
    config: SFTConfig | RMConfig, configs: Mapping[str, Stage], spec: StageRows
) -> RowEncoder[Any, Any] | None:
    """The encoder of the stage, with the tokenizer of its model or else of the model that SFT starts from."""
    for one in (config, configs.get("sft")):
        path, revision = ("", None) if one is None else one.inputs.get("model", ("", None))
        tokenizer = _tokenizer(path, revision) if path else None
        if tokenizer is not None and isinstance(config, SFTConfig):
            require_eos(tokenizer, path)
            return DemonstrationEncoder(tokenizer, spec)
        if tokenizer is not None:
            # Tokenizers of encoders have no EOS. The difference is a token or two.
            return answer_encoder(tokenizer, spec, reads_last_token=tokenizer.eos_token_id is not None)
    return None


def _tokenizer(path: str, revision: str | None) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a directory or of the hub's cache, or None if it is in neither."""
    directory = model_directory(path)
    try:
        if Path(directory).is_dir() or try_to_load_from_cache(path, "tokenizer_config.json", revision=revision):
            return load_tokenizer(directory, revision)
    except (UserError, HFValidationError):
        pass  # HFValidationError: a path, and not a hub id
    return None
