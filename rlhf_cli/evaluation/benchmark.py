"""`rlhf eval --rm-bench FILE`: a reward model on rows in the format of RewardBench 2.

A row has `prompt`, a list `chosen` of right answers, a list `rejected` of wrong ones, and `subset`. Rows of the subset
Ties also have `id`, `ref:N` or `tied:N`: two rows belong to one prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_cli.algorithms.length import reply_length
from rlhf_cli.algorithms.reward_bench import Answers, best_is_right, ties_scores
from rlhf_cli.config.data import DataSource
from rlhf_cli.data.answers import AnswerEncoder, answer_encoder
from rlhf_cli.data.encode import LengthLimits, Skipped
from rlhf_cli.data.read import read_rows
from rlhf_cli.data.records import Answer, BadRow, Message, Record
from rlhf_cli.data.stage_rows import StageRows
from rlhf_cli.errors import DataError
from rlhf_cli.evaluation.figures import rate_figure
from rlhf_cli.models.heads import reads_last_token
from rlhf_cli.report.figure import Figure, Figures
from rlhf_cli.rewards.models import length_limit
from rlhf_cli.run.artifacts import fingerprint, read_manifest_or_none, stage_directory
from rlhf_cli.trained.run import Run

TIES = "ties"
RESAMPLES = 2000
BASES = {"rm": "model", "ppo": "policy"}  # the role of the model that a stage starts from, in its manifest


@dataclass(frozen=True)
class BenchRow:
    row: Record  # right answers, then wrong ones
    num_right: int
    subset: str
    name: str  # `id`, for Ties


def read_bench(path: Path) -> list[BenchRow]:
    """A file of any kind that the stages read. Raises DataError for a row of another form."""
    rows = []
    for row in read_rows(DataSource(path=str(path))):
        if isinstance(row, BadRow):
            raise DataError(f"{row.where}: {row.reason}")
        rows.append(_bench_row(row.values, row.where))
    return rows


def _bench_row(values: dict[str, Any], where: str) -> BenchRow:
    prompt, subset = values.get("prompt"), values.get("subset", "all")
    name = str(values.get("id", ""))
    if not isinstance(prompt, str) or not isinstance(subset, str):
        raise DataError(f"{where}: `prompt` and `subset` must be text, as in RewardBench 2. Check --rm-bench")
    answers = []
    for key in ("chosen", "rejected"):
        texts = values.get(key)
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise DataError(f"{where}: `{key}` must be a list of at least one text, as in RewardBench 2")
        answers.append(texts)
    if subset.lower() == TIES and name.partition(":")[0] not in ("ref", "tied"):
        raise DataError(f"{where}: `id` is {name!r}, a row of the subset {subset} needs ref:N or tied:N")
    both = tuple(map(Answer, answers[0] + answers[1]))
    row = Record(prompt, where, both, ranked=True, messages=(Message("user", prompt),))
    return BenchRow(row, len(answers[0]), subset, name)


def encode_bench(
    rows: Sequence[BenchRow], model: Any, tokenizer: PreTrainedTokenizerBase, stage_rows: StageRows
) -> tuple[list[list[list[int]]], bool]:
    """The sequences of each row's answers, cut to what the model accepts, and whether a chat template wrote them.

    A tokenizer with a chat template reads each row as a conversation, unless the stage has a template of its own.
    """
    limits = LengthLimits(*length_limit(model, tokenizer))
    stage_rows = replace(stage_rows, purpose="rm pairs", limits=limits)
    encoder: AnswerEncoder[Any] = answer_encoder(tokenizer, stage_rows, reads_last_token=reads_last_token(model))
    found: list[list[list[int]]] = []
    for one in rows:
        views = one.row.each()
        found.append([])
        for view, tokens in zip(views, encoder.encode_rows(views), strict=True):
            ids = encoder.cut(view, tokens)
            found[-1].append(tokens[0][: limits.max_length] if isinstance(ids, Skipped) else ids)
    return found, encoder.text.is_chat(rows[0].row)


def is_joined(row: Record) -> bool:
    """True if a plain prompt and its first answer would meet without a space between them."""
    return not row.prompt[-1:].isspace() and row.response[:1].isalnum()


def num_unpaired(rows: Sequence[BenchRow]) -> int:
    """Rows of Ties whose prompt has only one of its two rows; they are not scored."""
    numbers = Counter(one.name.partition(":")[2] for one in rows if one.subset.lower() == TIES)
    return sum(count % 2 for count in numbers.values())


def bench_figures(
    rows: Sequence[BenchRow],
    score: Callable[[list[list[list[int]]], list[list[int]]], Tensor],
    sequences: list[list[list[int]]],
    *,
    seed: int,
) -> tuple[Figures, dict[str, float]]:
    """The score of each subset and their mean, and the score that guessing has.

    Outside Ties a row counts 1 if a right answer has the highest score. Chance is the share of right answers among
    all, 1/4 in RewardBench 2. It is not defined for Ties.
    """
    flat = score(sequences, [[reply_length(answer) for answer in one.row.texts] for one in rows]).tolist()
    of_subset: dict[str, list[float]] = {}
    chance: dict[str, list[float]] = {}
    ties: dict[str, dict[str, dict[str, Answers]]] = {}
    start = 0
    for one in rows:
        size = len(one.row.answers)
        right, wrong = flat[start : start + one.num_right], flat[start + one.num_right : start + size]
        start += size
        if one.subset.lower() == TIES:
            kind, _, number = one.name.partition(":")
            ties.setdefault(one.subset, {"ref": {}, "tied": {}})[kind][number] = (right, wrong)
        else:
            of_subset.setdefault(one.subset, []).append(best_is_right(right, wrong))
            chance.setdefault(one.subset, []).append(one.num_right / size)
    for subset, sides in ties.items():
        if values := ties_scores(sides["ref"], sides["tied"]):
            of_subset[subset] = values
    each = {name: torch.tensor(values, dtype=torch.float64) for name, values in of_subset.items()}
    figures = {name: rate_figure(values, seed=seed) for name, values in each.items()}
    if len(figures) > 1:  # The mean of the subsets' means; rows are drawn again within each subset.
        subsets, generator = list(each.values()), torch.Generator().manual_seed(seed)
        resampled = [v[torch.randint(len(v), (RESAMPLES, len(v)), generator=generator)].mean(1) for v in subsets]
        low, high = torch.stack(resampled).mean(0).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        mean = sum(v.mean().item() for v in subsets) / len(subsets)
        figures["mean of subsets"] = Figure(mean, low, high, sum(map(len, subsets)))
    return figures, {name: sum(values) / len(values) for name, values in chance.items()}


def shares_base(run: Run) -> bool | None:
    """True if the reward model and the policy of the run come from the same model; None if that is not recorded."""
    directory = stage_directory(run.root, "sft")
    sft = read_manifest_or_none(directory)
    digest_of_sft = fingerprint(str(directory)) if sft is not None else None

    def bases(stage: str) -> set[str]:
        """Digests of the models that a stage comes from, as far as the run's manifests record them."""
        digest = digest_of_sft
        if stage != "sft":
            manifest = read_manifest_or_none(stage_directory(run.root, stage))
            digest = manifest.identity["inputs"].get(BASES[stage]) if manifest is not None else None
        of_sft = sft.identity["inputs"].get("model") if sft is not None and digest == digest_of_sft else None
        return {one for one in (digest, of_sft) if one is not None}

    both = [bases("rm"), bases("ppo" if "ppo" in run.stages else "sft")]
    return bool(both[0] & both[1]) if all(both) else None
