"""Where scores come from: reward models, with the policy's tokenizer or their own, and Python functions."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.artifacts import fingerprint, model_directory
from rlhf_cli.config.schemas import FunctionReward, ModelReward
from rlhf_cli.data.batches import chunks
from rlhf_cli.data.encode import encode_for_classifier
from rlhf_cli.errors import ConfigError, RunError
from rlhf_cli.models.forward import autocast, hidden_at, scalar_scores
from rlhf_cli.models.limits import longest_input
from rlhf_cli.models.load import (
    check_vocabulary,
    load_reward_model,
    load_tokenizer,
    prepare,
    reads_last_token,
    same_tokenizer,
)
from rlhf_cli.packing import pack


@dataclass(frozen=True)
class Judged:
    """What is judged: prompts and responses as text and as the policy's tokens, and the prompts' rows."""

    prompts: list[str]
    responses: list[str]
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    ended: list[bool]
    rows: list[dict[str, Any]]
    tokens: list[list[str]] | None = None
    """The text of each response token, for functions that score them one by one."""


@dataclass(frozen=True)
class Scores:
    """What the sources say together."""

    total: torch.Tensor
    """[B] the weighted sum of everything; a dense reward counts with the sum of its tokens."""
    each: dict[str, torch.Tensor]
    """[B] of each source by name, before its weight."""
    dense: list[list[float]] | None
    """For each response a number a token, which is part of `total`; None without such a source."""


@dataclass
class RewardModel:
    """A sequence classifier that scores whole texts, the prompt with its response or the response alone."""

    name: str
    weight: float
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    reads_policy_tokens: bool
    """The policy's ids go in as they are; else the text is encoded anew with the model's own tokenizer."""
    reads_prompt: bool
    label: int
    as_probability: bool
    mean: float
    std: float
    precision: str
    num_cut: int = 0
    """Texts so far that were longer than the model takes and lost their beginning."""

    def report(self) -> str:
        """A line about what was cut, or ""."""
        return (
            f"{self.name}: {self.num_cut} texts lost their beginning, the model takes no more" if self.num_cut else ""
        )

    def score(self, judged: Judged) -> torch.Tensor:
        """Normalised scores, [B] float32 on the CPU, each read at the last token of its response."""
        if self.reads_policy_tokens:
            prompts = judged.prompt_ids if self.reads_prompt else [[]] * len(judged.responses)
            sequences = [p + r for p, r in zip(prompts, judged.response_ids, strict=True)]
        else:
            texts = list(judged.responses)
            if self.reads_prompt:
                texts = [p + r for p, r in zip(judged.prompts, judged.responses, strict=True)]
            sequences = encode_texts(self.model, self.tokenizer, texts, judged.ended)
            longest = longest_input(self.model, self.tokenizer)
            self.num_cut += sum(len(ids) >= longest for ids in sequences)
        scores = score_sequences(
            self.model, sequences, self.precision, label=self.label, as_probability=self.as_probability
        )
        return (scores - self.mean) / self.std


@dataclass
class PythonFunction:
    """A function of the user's that scores texts, or each of their tokens."""

    name: str
    weight: float
    function: Callable[..., Any]
    per_token: bool = False

    def report(self) -> str:
        return ""

    def score(self, judged: Judged) -> torch.Tensor:
        """Its numbers, [B] float32; raises RunError where they are not one finite number a row."""
        assert not self.per_token, "a dense reward has no number a row; see score_per_token"
        return torch.tensor(call(self.name, self.function, judged, finite))

    def score_per_token(self, judged: Judged) -> list[list[float]]:
        """Its numbers for each token of each response; raises RunError where they are not that."""
        rows = call(self.name, self.function, judged, finite_list)
        for number, (row, ids) in enumerate(zip(rows, judged.response_ids, strict=True), 1):
            if len(row) != len(ids):
                raise RunError(
                    f"reward function {self.name}, response {number}: returned {len(row)} numbers for {len(ids)} "
                    "tokens. Return one for each of row['tokens']"
                )
        return rows


RewardSource = RewardModel | PythonFunction


def load_rewards(
    rewards: Sequence[ModelReward | FunctionReward],
    artifacts_root: str,
    policy_tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    precision: str,
) -> tuple[list[RewardSource], list[str]]:
    """The sources, ready to score, and the lines that the user should read about them."""
    sources: list[RewardSource] = []
    notes: list[str] = []
    several = len(rewards) > 1
    for number, reward in enumerate(rewards):
        if isinstance(reward, FunctionReward):
            function = reward.function.rpartition(":")[2]
            name = f"{function}_{number}" if several else function
            sources.append(PythonFunction(name, reward.weight, load_function(reward.function), reward.per_token))
            continue
        path = model_directory(reward.path if reward.path is not None else f"{artifacts_root}/rm")
        model, tokenizer = load_reward_model(path, reward.revision), load_tokenizer(path, reward.revision)
        check_vocabulary(model, tokenizer, path)
        note = prepare(model, device)
        if note:
            notes.append(note)
        shares = reads_last_token(model) and same_tokenizer(policy_tokenizer, tokenizer)
        if not shares:
            notes.append(f"{path}: reads text with its own tokenizer")
        mean, std = (getattr(model.config, key, None) for key in ("score_mean", "score_std"))
        if reward.normalize and (mean is None or std is None):
            notes.append(f"{path}: no stored mean and standard deviation of the score, it is used as it is")
        # The stored figures are those of the logit.
        normalize = reward.normalize and mean is not None and std is not None and reward.output == "logit"
        sources.append(
            RewardModel(
                name=f"reward_model_{number}" if several else "reward_model",
                weight=reward.weight,
                model=model,
                tokenizer=tokenizer,
                reads_policy_tokens=shares,
                reads_prompt=reward.reads == "prompt_and_response",
                as_probability=reward.output == "probability",
                label=label_index(model, reward.label, f"rewards.{number}.label"),
                mean=float(mean or 0.0) if normalize else 0.0,
                std=float(std or 1.0) if normalize else 1.0,
                precision=precision,
            )
        )
    return sources, notes


def total_score(sources: Sequence[RewardSource], judged: Judged) -> Scores:
    """The weighted sum of all sources' scores, and each one's own."""
    each: dict[str, torch.Tensor] = {}
    dense: list[list[float]] | None = None
    for source in sources:
        if isinstance(source, PythonFunction) and source.per_token:
            rows = source.score_per_token(judged)
            each[source.name] = torch.tensor([sum(row) for row in rows])
            old = dense or [[0.0] * len(row) for row in rows]
            dense = [
                [a + source.weight * b for a, b in zip(*pair, strict=True)] for pair in zip(old, rows, strict=True)
            ]
        else:
            each[source.name] = source.score(judged)
    total = torch.stack([source.weight * each[source.name] for source in sources]).sum(0)
    return Scores(total, each, dense)


def label_index(model: PreTrainedModel, label: str | None, key: str) -> int:
    """Which logit is the score; raises ConfigError where that is not clear."""
    labels = {str(name): int(i) for i, name in (model.config.id2label or {}).items()}
    if model.config.num_labels == 1:
        if label is not None:
            raise ConfigError(f"{key}: the model has a single score, no label is needed. Remove it")
        return 0
    if label is None or label not in labels:
        found = "none is given" if label is None else f"found {label!r}"
        raise ConfigError(f"{key}: {found}, the model has the labels {', '.join(labels)}. Name the good one")
    return labels[label]


@torch.no_grad()
def score_sequences(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    precision: str,
    *,
    label: int = 0,
    as_probability: bool = False,
    chunk: int = 64,
) -> torch.Tensor:
    """Scores of token sequences, [B] float32 on the CPU: a label's logit, or its probability."""
    device = next(model.parameters()).device
    with autocast(device, precision):
        parts = [sequence_scores(model, list(part)) for part in chunks(sequences, chunk)]
    logits = torch.cat(parts).float().cpu()
    if as_probability:
        logits = logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(1)
    return logits[:, label]


def sequence_scores(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """All labels' scores of token sequences with gradient, [B, labels] float32.

    A causal backbone is read at the last token of each sequence, whatever that token is; an encoder pools as
    it was built to. The head runs in float32: in bfloat16 it would round margins away.
    """
    device = next(model.parameters()).device
    if reads_last_token(model):
        batch = pack(sequences, device)
        hidden = hidden_at(model, batch, batch.last)
        return scalar_scores(model, hidden)
    width = max(map(len, sequences))
    ids = torch.full((len(sequences), width), model.config.pad_token_id or 0, dtype=torch.int64)
    mask = torch.zeros(len(sequences), width, dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    # Whole in float32: its head can't be told from its backbone as a causal model's can.
    with torch.autocast(device.type, enabled=False):
        output = model(input_ids=ids.to(device), attention_mask=mask.to(device))
    return output.logits.float()


def encode_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], ended: Sequence[bool]
) -> list[list[int]]:
    """Texts for a reward model with its own tokenizer; a causal one gets EOS where the response ended."""
    longest = longest_input(model, tokenizer)
    eos = tokenizer.eos_token_id
    if not reads_last_token(model) or eos is None:
        return encode_for_classifier(tokenizer, texts, longest)
    # A causal one gets an EOS of its own where the response ended.
    sequences = []
    for ids, end in zip(encode_for_classifier(tokenizer, texts, longest - 1), ended, strict=True):
        bare = ids[:-1] if ids[-1:] == [int(eos)] else ids
        sequences.append([*bare, int(eos)] if end or not bare else bare)
    return sequences


# ------------------------------------------------------------------------------------- user's functions


def load_function(reference: str) -> Callable[..., Any]:
    """The function that `path/to/file.py:name` names. The file is run as code."""
    path, _, name = reference.rpartition(":")
    if not Path(path).is_file():
        raise ConfigError(f"{reference}: no such file (looked from {Path.cwd()})")
    place = Path(path).resolve()
    spec = importlib.util.spec_from_file_location(f"rlhf_user_{place.stem}_{fingerprint(path)[:8]}", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up, and the file may import its neighbours.
    sys.modules[spec.name] = module
    sys.path.insert(0, str(place.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{path}: can't be imported ({type(error).__name__}: {error})") from error
    finally:
        sys.path.pop(0)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{reference}: {path} has no function {name}")
    return function


def call(name: str, function: Callable[..., Any], judged: Judged, check: Callable[[str, Any], Any]) -> list[Any]:
    """Call a user's function on texts; each row of the prompt's file also carries whether the reply `ended` and,
    for a dense reward, the text of its `tokens`.

    Raises RunError, with the row and the value, where it fails or does not give one good value a row.
    """
    rows = [{**row, "ended": ended} for row, ended in zip(judged.rows, judged.ended, strict=True)]
    if judged.tokens is not None:
        rows = [{**row, "tokens": tokens} for row, tokens in zip(rows, judged.tokens, strict=True)]
    try:
        values = list(function(list(judged.prompts), list(judged.responses), rows))
    except Exception as error:
        raise RunError(f"reward function {name}: raised {type(error).__name__}: {error}") from error
    if len(values) != len(rows):
        raise RunError(f"reward function {name}: returned {len(values)} values for {len(rows)} responses")
    return [check(f"reward function {name}, response {i}", value) for i, value in enumerate(values, 1)]


def finite(where: str, value: Any) -> float:
    """A finite float, or RunError."""
    try:
        result = float(value)
    except (TypeError, ValueError):
        result = math.nan
    if not math.isfinite(result):
        raise RunError(f"{where}: returned {value!r}, a finite number is needed")
    return result


def finite_list(where: str, value: Any) -> list[float]:
    """A list of finite floats, or RunError."""
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise RunError(f"{where}: returned {value!r}, a list of numbers is needed, one for each of row['tokens']")
    return [finite(f"{where}, token {number}", item) for number, item in enumerate(value, 1)]


def named_numbers(where: str, value: Any) -> dict[str, float]:
    """A judge's row: a number (called gold) or a mapping of names to numbers."""
    if isinstance(value, dict):
        return {str(key): finite(f"{where} {key}", item) for key, item in value.items()}
    return {"gold": finite(where, value)}
