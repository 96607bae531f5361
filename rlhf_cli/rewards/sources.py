"""Load the reward sources of a config, and check the rows that they read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, assert_never

import torch
from transformers import PreTrainedTokenizerBase

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
from rlhf_cli.errors import DataError
from rlhf_cli.rewards.base import RewardSource, Samples

if TYPE_CHECKING:
    from rlhf_cli.models.lora import Backbone

Judge = Callable[[Samples], list[dict[str, float]]]  # from replies to a row of named numbers for each


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
                from rlhf_cli.rewards.models import load_reward_source

                path = reward.path if reward.path is not None else f"{artifacts_root}/rm"
                settings: dict[str, Any] = {"name": name, "key": key, "keep_special": keep_special}
                settings |= {"backbone": backbone, "sharded_by": sharded_by}
                if reward.steps is not None:
                    from rlhf_cli.rewards.process_reward import StepModel

                    make = partial(StepModel, steps=reward.steps, policy_tokenizer=policy_tokenizer)
                    settings |= {"backbone": None, "sharded_by": None, "make": make}
                source, lines = load_reward_source(reward, path, policy_tokenizer, device, precision, **settings)
            case FunctionReward():
                from rlhf_cli.rewards.functions import load_function_reward

                source = load_function_reward(reward, name, key)
            case HTTPReward():
                from rlhf_cli.rewards.endpoint import Endpoint

                source, lines = Endpoint.load(reward, name, key)
            case RubricReward():
                from rlhf_cli.rewards.rubric import Rubric

                source, lines = Rubric.load(reward, name, key)
            case LengthReward() | RegexReward() | AnswerReward() | RepetitionReward() | JSONReward():
                from rlhf_cli.rewards.rules import RuleSource

                source = RuleSource(name=name, weight=reward.share, on_error=reward.on_error, rule=reward)
            case _:
                assert_never(reward)
        source.ensemble = ensemble
        sources.append(source)
        notes += lines
    return sources, notes


GOLD_ADVICE = "Fix the function, set evaluation.gold to one that fits your data, or remove evaluation.gold"


def load_judge(reference: str, advice: str = GOLD_ADVICE) -> Judge:
    """The user's function `evaluation.gold`. Called, it raises RewardError with the row, the value and the advice."""
    from rlhf_cli.rewards.functions import PythonFunction, load_function, named_numbers

    function = load_function(reference)
    source = PythonFunction(name=f"evaluation.gold ({reference})", function=function, advice=advice)

    def judge(samples: Samples) -> list[dict[str, float]]:
        found = source.values(samples, check=named_numbers)
        for number, row in enumerate(found):
            if row.keys() != found[0].keys():
                names = [", ".join(sorted(each)) for each in (row, found[0])]
                source.fail(samples, [number], f"has the numbers {names[0]}, and the first one {names[1]}")
        return found

    return judge


def main_number(row: Mapping[str, Any]) -> str:
    """The name of a judge's main number: `gold`, or else its first.

    >>> main_number({"kind": 1.0, "gold": 2.0}), main_number({"kind": 1.0, "true": 0.0})
    ('gold', 'kind')
    """
    return "gold" if "gold" in row else next(iter(row))


def check_rows(sources: Sequence[RewardSource], rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Check before training that each (place, columns) has the columns that the sources read; raises DataError."""
    strict = [s for s in sources if s.column is not None and s.on_error == "stop"]
    if not strict:
        return
    for where, row in rows:
        for source in strict:
            try:
                source.check_row(row)
            except ValueError as error:
                advice = "Fix the row, or count such scores as 0.0 with on_error: zero"
                raise DataError(f"{where}: reward {source.name}: {error}. {advice}") from None
