"""The sources of a config, loaded, and what they say together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_cli.config.rewards import FunctionReward, HTTPReward, ModelReward, Reward, reward_names
from rlhf_cli.errors import DataError
from rlhf_cli.rewards.endpoint import Endpoint, load_endpoint
from rlhf_cli.rewards.functions import PythonFunction, call, load_function, load_function_reward, named_numbers
from rlhf_cli.rewards.judged import Judged, RewardSource, Scores
from rlhf_cli.rewards.models import RewardModel, encode_texts, load_reward_source, score_sequences, sequence_scores
from rlhf_cli.rewards.rules import Rule

__all__ = [
    "Judged",
    "PythonFunction",
    "RewardModel",
    "RewardSource",
    "Scores",
    "call",
    "check_rows",
    "encode_texts",
    "load_function",
    "load_rewards",
    "named_numbers",
    "score_sequences",
    "sequence_scores",
    "total_score",
]


def load_rewards(
    rewards: Sequence[Reward],
    artifacts_root: str,
    policy_tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    precision: str,
) -> tuple[list[RewardSource], list[str]]:
    """The sources, ready to score, and the lines that the user should read about them."""
    sources: list[RewardSource] = []
    notes: list[str] = []
    for number, (reward, name) in enumerate(zip(rewards, reward_names(rewards), strict=True)):
        key = f"rewards.{number}"
        lines: list[str] = []
        source: RewardSource
        if isinstance(reward, ModelReward):
            path = reward.path if reward.path is not None else f"{artifacts_root}/rm"
            source, lines = load_reward_source(reward, path, policy_tokenizer, device, precision, name=name, key=key)
        elif isinstance(reward, FunctionReward):
            source = load_function_reward(reward, name, key)
        elif isinstance(reward, HTTPReward):
            source, lines = load_endpoint(reward, name, key)
        else:
            source = Rule(name=name, weight=reward.weight, on_error=reward.on_error, rule=reward)
        sources.append(source)
        notes += lines
    return sources, notes


def check_rows(sources: Sequence[RewardSource], rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise DataError for the first (where, columns) that no response could be judged by, before anything is trained.

    With on_error "zero" such rows are left to count as 0.0.
    """
    strict = [s for s in sources if isinstance(s, Rule | Endpoint) and s.reads_a_column and s.on_error == "stop"]
    if not strict:
        return
    for where, row in rows:
        for source in strict:
            try:
                source.check_row(row)
            except ValueError as error:
                advice = "Mend the row, or have such scores count as 0.0 with on_error: zero"
                raise DataError(f"{where}: reward {source.name}: {error}. {advice}") from None


def total_score(sources: Sequence[RewardSource], judged: Judged) -> Scores:
    """The weighted sum of all sources' scores, and each one's own.

    What a source has no score for is nan there (or no list of numbers), and 0.0 here, which is counted.
    """
    each: dict[str, torch.Tensor] = {}
    errors: dict[str, int] = {}
    cut: dict[str, int] = {}
    dense: list[list[float]] | None = None
    for source in sources:
        cut_before = source.num_cut if isinstance(source, RewardModel) else 0
        if isinstance(source, PythonFunction) and source.per_token:
            found = source.score_per_token(judged)
            errors[source.name] = sum(row is None for row in found)
            rows = [
                row if row is not None else [0.0] * len(ids)
                for row, ids in zip(found, judged.response_ids, strict=True)
            ]
            each[source.name] = torch.tensor([sum(row) for row in rows])
            old = dense or [[0.0] * len(row) for row in rows]
            dense = [
                [a + source.weight * b for a, b in zip(*pair, strict=True)] for pair in zip(old, rows, strict=True)
            ]
        else:
            score = source.score(judged)
            errors[source.name] = int(score.isnan().sum())
            each[source.name] = torch.where(score.isnan(), 0.0, score)
        if isinstance(source, RewardModel):
            cut[source.name] = source.num_cut - cut_before
    total = torch.stack([source.weight * each[source.name] for source in sources]).sum(0)
    return Scores(total, each, dense, errors, cut)
