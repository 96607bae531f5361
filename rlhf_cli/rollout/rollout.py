"""One iteration's rollout: prompts, sampled responses, and everything that the update is computed from."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.algorithms.kl import kl_full
from rlhf_cli.data.batches import Budget, in_order
from rlhf_cli.data.records import Prompt
from rlhf_cli.models.adapters import adapters_off
from rlhf_cli.models.forward import (
    autocast,
    hidden_at,
    logits_and_hidden_at,
    logits_at,
    logprobs_at,
    scalar_head,
    scalar_scores,
    shares_prefixes,
)
from rlhf_cli.packing import SHORTEST_PREFIX, PackedBatch, end_to_end, pack, response_positions
from rlhf_cli.rollout.sampling import Response, Sampling, allowed_logits, sample
from rlhf_cli.tensor_ops import length_mask, pad_rows, token_entropy, token_logprobs

FULL_KL_CHUNK = 512
"""Tokens whose whole distributions are compared at a time: the chunk's [512, V] is all that is held twice."""


@dataclass(frozen=True)
class PromptRow:
    """A prompt as text, as tokens and as the row that it came from."""

    text: str
    ids: list[int]
    row: Prompt


# -------------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class Models:
    """The policy and those that stand beside it while it learns."""

    policy: PreTrainedModel
    ref_policy: PreTrainedModel | None
    """None: the policy with its adapters off."""
    value_model: PreTrainedModel | None = None
    """A model of its own, a sequence classifier with one label; None where there are no values, or where
    `value_head` reads the policy's."""
    value_head: torch.nn.Linear | None = None
    """Values from the policy's own hidden states."""

    @property
    def has_values(self) -> bool:
        return self.value_model is not None or self.value_head is not None


@dataclass(frozen=True)
class TokenScores:
    """Of every response token, laid end to end: [sum of R_b] float32 each; None is what was not asked for."""

    logprobs: torch.Tensor
    """Of the sampled token by the policy as it is now, nats."""
    values: torch.Tensor | None = None
    """Of the state in which the token was chosen."""
    entropy: torch.Tensor | None = None
    """Of the distribution that the token was drawn from, nats."""
    kl_full: torch.Tensor | None = None
    """KL(policy, ref_policy) of that distribution, exact over the vocabulary, nats."""
    ref_logprobs: torch.Tensor | None = None
    """Of the sampled token by ref_policy, nats, which the exact KL needs anyway."""


def score_tokens(
    models: Models,
    prompts: Sequence[PromptRow],
    responses: Sequence[Response],
    sampling: Sampling,
    precision: str,
    *,
    with_values: bool = True,
    with_entropy: bool = False,
    with_full_kl: bool = False,
    detach_backbone: bool = False,
) -> TokenScores:
    """One forward pass of the policy, and one of a separate value model, with gradients where they are on.

    Temperature and what `sampling` forbids are those of the rollout, so everything here speaks of the
    distribution that was sampled from. `detach_backbone` keeps a value head's gradient out of the policy.
    """
    values = None
    if with_values and models.value_model is not None:
        values = response_values(models.value_model, prompts, responses, precision)
    shared = with_values and models.value_head is not None
    if not (shared or with_entropy or with_full_kl):
        return TokenScores(response_logprobs(models.policy, prompts, responses, sampling, precision), values)
    batch, positions, targets = _packed(models.policy, prompts, responses)
    with autocast(batch.ids.device, precision):
        if shared:
            logits, hidden = logits_and_hidden_at(models.policy, batch, positions)
        else:
            logits = logits_at(models.policy, batch, positions)
    logits = allowed_logits(logits, responses, sampling)
    if shared and models.value_head is not None:
        values = scalar_head(models.value_head, hidden.detach() if detach_backbone else hidden)[:, 0]
    kl = ref_logprobs = None
    if with_full_kl:
        with torch.no_grad():
            ref_logits = allowed_logits(_ref_logits(models, prompts, responses, precision), responses, sampling)
            ref_logprobs = token_logprobs(ref_logits, targets, temperature=sampling.temperature)
        kl = _full_kl(logits, ref_logits, sampling.temperature)
    return TokenScores(
        logprobs=token_logprobs(logits, targets, temperature=sampling.temperature),
        values=values,
        entropy=token_entropy(logits, temperature=sampling.temperature) if with_entropy else None,
        kl_full=kl,
        ref_logprobs=ref_logprobs,
    )


def response_logprobs(
    policy: PreTrainedModel,
    prompts: Sequence[PromptRow],
    responses: Sequence[Response],
    sampling: Sampling,
    precision: str,
) -> torch.Tensor:
    """Log-probability of every response token, laid end to end: [sum of R_b] float32."""
    batch, positions, targets = _packed(policy, prompts, responses)
    with autocast(batch.ids.device, precision):
        if not sampling.restricts:
            return logprobs_at(policy, batch, positions, targets, sampling.temperature)
        logits = logits_at(policy, batch, positions)
    logits = allowed_logits(logits, responses, sampling)
    return token_logprobs(logits, targets, temperature=sampling.temperature)


def ref_response_logprobs(
    models: Models,
    prompts: Sequence[PromptRow],
    responses: Sequence[Response],
    sampling: Sampling,
    precision: str,
) -> torch.Tensor:
    """`response_logprobs` by ref_policy."""
    with nullcontext() if models.ref_policy is not None else adapters_off(models.policy):
        return response_logprobs(models.ref_policy or models.policy, prompts, responses, sampling, precision)


def response_values(
    value_model: PreTrainedModel, prompts: Sequence[PromptRow], responses: Sequence[Response], precision: str
) -> torch.Tensor:
    """The value at every response token, of the state before it was chosen: [sum of R_b] float32."""
    batch, positions, _ = _packed(value_model, prompts, responses)
    with autocast(batch.ids.device, precision):
        hidden = hidden_at(value_model, batch, positions)
    return scalar_scores(value_model, hidden)[:, 0]


def _packed(
    model: PreTrainedModel, prompts: Sequence[PromptRow], responses: Sequence[Response]
) -> tuple[PackedBatch, torch.Tensor, torch.Tensor]:
    """The rows packed, responses to one prompt sharing it; where each response token is predicted; and these tokens."""
    device = next(model.parameters()).device
    sequences = [p.ids + r.ids for p, r in zip(prompts, responses, strict=True)]
    batch = pack(sequences, device, groups=[tuple(p.ids) for p in prompts] if shares_prefixes(model) else None)
    positions = response_positions(batch, [len(p.ids) for p in prompts])
    return batch, positions, end_to_end([r.ids for r in responses], device)


def _ref_logits(
    models: Models, prompts: Sequence[PromptRow], responses: Sequence[Response], precision: str
) -> torch.Tensor:
    batch, positions, _ = _packed(models.ref_policy or models.policy, prompts, responses)
    with autocast(batch.ids.device, precision):
        if models.ref_policy is not None:
            return logits_at(models.ref_policy, batch, positions)
        with adapters_off(models.policy):
            return logits_at(models.policy, batch, positions)


def _full_kl(logits: torch.Tensor, ref_logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """kl_full, a chunk of tokens at a time; the backward pass computes each chunk again."""

    def part(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return kl_full(a, b, temperature=temperature)

    parts = zip(logits.split(FULL_KL_CHUNK), ref_logits.split(FULL_KL_CHUNK), strict=True)
    if logits.requires_grad:
        return torch.cat([checkpoint(part, a, b, use_reentrant=False) for a, b in parts])
    return torch.cat([part(a, b) for a, b in parts])


# ------------------------------------------------------------------------------------------- rollout


@dataclass(frozen=True)
class Rollout:
    """B responses of at most R tokens; every tensor is float32 on one device, zero under padding."""

    prompts: list[PromptRow]
    responses: list[Response]
    response_mask: torch.Tensor
    """[B, R] bool, True on real tokens, EOS included."""
    sampled_logprobs: torch.Tensor
    """[B, R] as the sampler saw them."""
    logprobs: torch.Tensor
    """[B, R] of the sampled tokens by the policy that sampled, at the sampling temperature, in nats: those, or
    computed again by the forward pass that training uses."""
    ref_logprobs: torch.Tensor
    """[B, R] by ref_policy."""
    values: torch.Tensor
    """[B, R] before the update: the value of the state in which the token was chosen; zero without values."""
    kl_full: torch.Tensor | None
    """[B, R] exact KL(policy, ref_policy) at each token, where it was asked for."""
    sample_s: float
    """Seconds that sampling took."""
    score_s: float
    """Seconds that the log-probabilities and values took."""


def whole_lengths(prompts: Sequence[PromptRow], responses: Sequence[Response]) -> list[int]:
    """[B] tokens of each prompt with its response."""
    return [len(p.ids) + len(r.ids) for p, r in zip(prompts, responses, strict=True)]


def cut_responses(
    budget: Budget, policy: PreTrainedModel, prompts: Sequence[PromptRow], responses: Sequence[Response]
) -> list[list[int]]:
    """Microbatches of prompts with their responses, by number; those to one prompt together where it is shared."""
    lengths = whole_lengths(prompts, responses)
    if not shares_prefixes(policy):
        return budget.cut(lengths)
    groups: list[Hashable] = []
    seen: set[Hashable] = set()
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        # What `pack` lets stand whole counts whole: equal sequences, and what is too short to share.
        whole = (tuple(prompt.ids), tuple(response.ids))
        groups.append(row if whole in seen else whole[0])
        seen.add(whole)
    return budget.cut(lengths, groups, [len(p.ids) if len(p.ids) >= SHORTEST_PREFIX else 0 for p in prompts])


def shared_prompts(prompts: Sequence[PromptRow]) -> list[int]:
    """[B] of each row, how many tokens of its prompt an earlier row has: all or none."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for ids in (tuple(prompt.ids) for prompt in prompts):
        found.append(len(ids) if ids in seen else 0)
        seen.add(ids)
    return found


def padded_rows(parts: Sequence[torch.Tensor], cut: Sequence[Sequence[int]], lengths: Sequence[int]) -> torch.Tensor:
    """Numbers of tokens, computed microbatch by microbatch of `cut`, as one row a response: [B, R], in their order.

    >>> padded_rows([torch.tensor([1.0, 2.0]), torch.tensor([3.0])], [[1], [0]], [1, 2])
    tensor([[3., 0.],
            [1., 2.]])
    """
    rows = [part.split([lengths[i] for i in chunk]) for part, chunk in zip(parts, cut, strict=True)]
    return pad_rows(torch.cat(in_order(rows, cut)), lengths)


def collect(
    prompts: Sequence[PromptRow],
    table: torch.Tensor,
    models: Models,
    *,
    sampling: Sampling,
    tokenizer: PreTrainedTokenizerBase,
    budget: Budget,
    precision: str,
    recompute: bool,
    max_live_rows: int | None = None,
    with_values: bool = True,
    with_full_kl: bool = False,
) -> Rollout:
    """Sample a response to each prompt and score it by the policies and the value model.

    With `recompute` the log-probabilities are computed again by the forward pass that training uses: before the
    first step the ratio is then 1 and the KL to an equal ref_policy 0, to the last bit where the chunks are the
    same. Else they are those that the sampler captured, unless the policy's forward pass is needed anyway, for
    values from its own hidden states or the full KL. Without a value model the values are zero.
    """
    recompute = recompute or with_full_kl or (with_values and models.value_head is not None)
    device = next(models.policy.parameters()).device
    start = time.monotonic()
    with torch.no_grad(), autocast(device, precision):
        responses = sample(
            models.policy, [p.ids for p in prompts], table, sampling, tokenizer, max_live_rows=max_live_rows
        )
    sampled = time.monotonic()
    lengths = [len(response.ids) for response in responses]
    flat: dict[str, list[torch.Tensor]] = {"logprobs": [], "ref_logprobs": [], "values": [], "kl_full": []}
    cut = cut_responses(budget, models.policy, prompts, responses)
    with torch.no_grad():
        for part in cut:
            some, answers = [prompts[i] for i in part], [responses[i] for i in part]
            if not with_full_kl:
                flat["ref_logprobs"].append(ref_response_logprobs(models, some, answers, sampling, precision))
            if recompute:
                scores = score_tokens(
                    models, some, answers, sampling, precision, with_values=with_values, with_full_kl=with_full_kl
                )
                flat["logprobs"].append(scores.logprobs)
                if scores.values is not None:
                    flat["values"].append(scores.values)
                if scores.kl_full is not None and scores.ref_logprobs is not None:
                    flat["kl_full"].append(scores.kl_full)
                    flat["ref_logprobs"].append(scores.ref_logprobs)
            elif with_values and models.value_model is not None:
                flat["values"].append(response_values(models.value_model, some, answers, precision))
    padded = {key: padded_rows(parts, cut, lengths) for key, parts in flat.items() if parts}
    drawn = torch.tensor([x for response in responses for x in response.logprobs], device=device)
    sampled_logprobs = pad_rows(drawn, lengths)
    return Rollout(
        prompts=list(prompts),
        responses=responses,
        response_mask=length_mask(torch.tensor(lengths, device=device)),
        sampled_logprobs=sampled_logprobs,
        logprobs=padded.get("logprobs", sampled_logprobs),
        ref_logprobs=padded["ref_logprobs"],
        values=padded.get("values", torch.zeros_like(padded["ref_logprobs"])),
        kl_full=padded.get("kl_full"),
        sample_s=sampled - start,
        score_s=time.monotonic() - sampled,
    )


# ---------------------------------------------------------------------------------------- experience


@dataclass(frozen=True)
class Experience:
    """What an update learns from: B responses with [B, R] tensors, zero under padding."""

    prompts: list[PromptRow]
    responses: list[Response]
    response_mask: torch.Tensor
    logprobs: torch.Tensor
    """By the policy that the ratio is taken against: the one that sampled, or the one at this update's start."""
    ref_logprobs: torch.Tensor
    values: torch.Tensor
    """What the value clip is centred on."""
    advantages: torch.Tensor
    returns: torch.Tensor

    def to(self, device: torch.device | str) -> Self:
        """The same with its tensors on another device."""
        return replace(self, **{name: getattr(self, name).to(device) for name in TENSORS})


TENSORS = ("response_mask", "logprobs", "ref_logprobs", "values", "advantages", "returns")


def select(experience: Experience, rows: Sequence[int]) -> Experience:
    """Some of its rows, in the order given; as wide as before."""
    return Experience(
        prompts=[experience.prompts[i] for i in rows],
        responses=[experience.responses[i] for i in rows],
        **{name: getattr(experience, name)[list(rows)] for name in TENSORS},
    )


def merge(parts: Sequence[Experience]) -> Experience:
    """Several rollouts one below the other, the shorter ones padded on the right."""
    width = max(part.response_mask.shape[1] for part in parts)
    tensors = {
        name: torch.cat(
            [torch.nn.functional.pad(getattr(p, name), (0, width - getattr(p, name).shape[1])) for p in parts]
        )
        for name in TENSORS
    }
    return Experience(
        prompts=[prompt for part in parts for prompt in part.prompts],
        responses=[response for part in parts for response in part.responses],
        **tensors,
    )
