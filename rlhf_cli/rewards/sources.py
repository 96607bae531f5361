"""Load the reward sources of a config and add up their scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, assert_never

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_cli.algorithms.score_transforms import pessimistic_score
from rlhf_cli.config.rewards import (
    AnswerReward,
    FunctionReward,
    HTTPReward,
    JSONReward,
    LengthReward,
    ModelReward,
    NamedReward,
    RegexReward,
    RepetitionReward,
    RubricReward,
)
from rlhf_cli.config.stage import Stage
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.errors import DataError, RewardError
from rlhf_cli.processes.sharding import is_sharded
from rlhf_cli.rewards.base import NOTHING, RewardSource, Samples, Scores, Spoken
from rlhf_cli.rewards.models import RewardModel, load_reward_source

if TYPE_CHECKING:
    from rlhf_cli.models.shared import Backbone


def load_rewards(
    rewards: Sequence[NamedReward],
    artifacts_root: str,
    policy_tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    precision: str,
    *,
    keep_special: bool = False,
    backbone: Backbone | None = None,
    sharded_by: Stage | None = None,
) -> tuple[list[RewardSource], list[str]]:
    """The sources, ready to score, and notes for the user.

    With `keep_special`, reward models that encode text keep special tokens in it (`data.special_tokens`). Reward
    models that are adapters on `backbone` share its weights. With `sharded_by` reward models are sharded among the
    processes as that config says.
    """
    sources: list[RewardSource] = []
    notes: list[str] = []
    for key, name, reward, ensemble in rewards:
        lines: list[str] = []
        source: RewardSource
        match reward:
            case ModelReward():
                path = reward.path if reward.path is not None else f"{artifacts_root}/rm"
                source, lines = load_reward_source(
                    reward,
                    path,
                    policy_tokenizer,
                    device,
                    precision,
                    name=name,
                    key=key,
                    keep_special=keep_special,
                    backbone=backbone,
                    sharded_by=sharded_by,
                )
            case FunctionReward():
                from rlhf_cli.rewards.functions import load_function_reward

                source = load_function_reward(reward, name, key)
            case HTTPReward():
                from rlhf_cli.rewards.endpoint import load_endpoint

                source, lines = load_endpoint(reward, name, key)
            case RubricReward():
                from rlhf_cli.rewards.rubric import load_rubric

                source, lines = load_rubric(reward, name, key)
            case LengthReward() | RegexReward() | AnswerReward() | RepetitionReward() | JSONReward():
                from rlhf_cli.rewards.rules import RuleSource

                source = RuleSource(name=name, weight=reward.share, on_error=reward.on_error, rule=reward)
            case _:
                assert_never(reward)
        source.ensemble = ensemble
        sources.append(source)
        notes += lines
    return sources, notes


def check_rows(sources: Sequence[RewardSource], rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Check before training that each (place, columns) has the columns that the sources read; raises DataError.

    Sources with on_error "zero" are not checked: they count such rows as 0.0.
    """
    strict = [s for s in sources if s.reads_a_column and s.on_error == "stop"]
    if not strict:
        return
    for where, row in rows:
        for source in strict:
            try:
                source.check_row(row)
            except ValueError as error:
                advice = "Fix the row, or count such scores as 0.0 with on_error: zero"
                raise DataError(f"{where}: reward {source.name}: {error}. {advice}") from None


def samples_of(
    sources: Sequence[RewardSource],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[PromptRow],
    texts: list[str],
    responses: Sequence[Spoken],
) -> Samples:
    """The responses as the sources read them. Their tokens have texts only if a source scores every token."""
    dense = any(source.per_token for source in sources)
    return Samples(
        [p.text for p in prompts],
        texts,
        [p.ids for p in prompts],
        [r.ids for r in responses],
        [r.ended for r in responses],
        [p.row.columns for p in prompts],
        [[str(tokenizer.decode([i])) for i in r.ids] for r in responses] if dense else None,
        [p.row.where for p in prompts],
        [p.row.prompt for p in prompts],
        [p.row.messages for p in prompts],
    )


def total_score(sources: Sequence[RewardSource], samples: Samples) -> Scores:
    """The weighted sum of all sources' scores, an ensemble being one, and each source's own scores.

    A failed score (NaN, or None from a per-token source) counts as 0.0 and is counted in `errors`. Raises RewardError.
    """
    each: dict[str, torch.Tensor] = {}
    errors: dict[str, int] = {}
    cut: dict[str, int] = {}
    tokens: dict[str, int] = {}
    dense: list[list[float]] | None = None
    failed: RewardError | None = None
    # A source that fails on one process must not keep it from the passes of a sharded model: those come first, and
    # after a failure the other models score nothing.
    for source in sorted(sources, key=lambda s: not (isinstance(s, RewardModel) and is_sharded(s.model))):
        if not samples.responses and not isinstance(source, RewardModel):
            each[source.name] = torch.zeros(0)
            each |= {f"{source.name}_{part}": torch.zeros(0) for part in source.part_names}
            if source.num_tokens is not None:
                tokens[source.name] = 0
            continue
        tokens_before = source.num_tokens
        cut_before = source.num_cut if isinstance(source, RewardModel) else 0
        try:
            found = source.score_per_token(samples) if source.per_token else source.score(samples)
        except RewardError as error:
            failed, samples = failed or error, NOTHING
        if failed is not None:
            continue
        if isinstance(found, list):
            errors[source.name] = sum(row is None for row in found)
            rows = [
                row if row is not None else [0.0] * len(ids)
                for row, ids in zip(found, samples.response_ids, strict=True)
            ]
            each[source.name] = torch.tensor([sum(row) for row in rows])
            old = dense or [[0.0] * len(row) for row in rows]
            dense = [
                [a + source.weight * b for a, b in zip(*pair, strict=True)] for pair in zip(old, rows, strict=True)
            ]
        else:
            errors[source.name] = int(found.isnan().sum())
            each[source.name] = torch.where(found.isnan(), 0.0, found)
            each |= {f"{source.name}_{part}": values.nan_to_num(0.0) for part, values in source.parts.items()}
        if isinstance(source, RewardModel):
            cut[source.name] = source.num_cut - cut_before
        if source.num_tokens is not None and tokens_before is not None:
            tokens[source.name] = source.num_tokens - tokens_before
    if failed is not None:
        raise failed
    weighted = [source.weight * each[source.name] for source in sources if source.ensemble is None]
    for ensemble in dict.fromkeys(source.ensemble for source in sources if source.ensemble is not None):
        members = torch.stack([each[source.name] for source in sources if source.ensemble == ensemble])  # [K, B]
        each[ensemble.name] = pessimistic_score(members, ensemble.beta)
        each[f"{ensemble.name}_std"] = members.std(0)
        weighted.append(ensemble.weight * each[ensemble.name])
    total = torch.stack(weighted).sum(0)  # [B]
    features = [source.features for source in sources if source.features is not None]
    parts = tuple(f"{source.name}_{part}" for source in sources for part in source.part_names)
    return Scores(total, each, dense, errors, cut, parts, tokens, torch.cat(features, 1) if features else None)
