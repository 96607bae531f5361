"""One iteration's rollout: responses sampled to prompts, with the log-probabilities and values that training needs."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.data.batches import Budget, in_order
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.models.forward import autocast, shares_prefixes
from rlhf_cli.packing import SHORTEST_PREFIX
from rlhf_cli.processes.distributed import World, gather_rows
from rlhf_cli.processes.pass_loop import over_pieces
from rlhf_cli.processes.sharding import device_of
from rlhf_cli.rollout.distribution import Response, Sampling
from rlhf_cli.rollout.sampling import sample
from rlhf_cli.rollout.token_scores import (
    Models,
    reference,
    response_logprobs,
    response_values,
    score_tokens,
)
from rlhf_cli.tensor_ops import length_mask, pad_rows


@dataclass(frozen=True)
class RolloutBatch:
    """B responses of at most R tokens. Tensors are float32 on one device, and 0 under padding."""

    prompts: list[PromptRow]
    responses: list[Response]
    response_mask: Tensor
    """[B, R] bool, True on real tokens, EOS included."""
    sampled_logprobs: Tensor
    """[B, R] log-probabilities as the sampler computed them."""
    logprobs: Tensor
    """[B, R] log-probabilities under the policy that sampled, at the sampling temperature, in nats. Either
    `sampled_logprobs` or recomputed by the forward pass that training uses."""
    ref_logprobs: Tensor
    """[B, R] log-probabilities under ref_policy."""
    values: Tensor
    """[B, R] value of the state before each token was chosen, before the update; 0 without values."""
    kl_full: Tensor | None
    """[B, R] exact KL(policy, ref_policy) at each token, if requested."""
    sample_s: float
    """Seconds spent sampling."""
    score_s: float
    """Seconds spent on log-probabilities and values."""


def collect(
    prompts: Sequence[PromptRow],
    uniforms: Tensor,
    models: Models,
    *,
    sampling: Sampling,
    tokenizer: PreTrainedTokenizerBase,
    budget: Budget,
    precision: str,
    recompute: bool,
    max_live_rows: int | None = None,
    with_values: bool = True,
    with_ref_logprobs: bool = True,
    with_full_kl: bool = False,
) -> RolloutBatch:
    """Sample a response to each prompt, then compute log-probabilities and values.

    With sharded models all processes must call this, also one that has no prompt.

    With `recompute`, `logprobs` come from the forward pass that training uses. Before the first step the ratio is then
    1 and the KL to an equal ref_policy is 0; both are exact to the last bit if the microbatches are the same.
    Otherwise they are the sampler's, unless the policy's forward pass is needed anyway: for values from a head on its
    hidden states, or for the full KL. Without a value model the values are 0. Without `with_ref_logprobs` those of
    ref_policy are the sampler's.
    """
    device = device_of(models.policy)
    start = time.monotonic()
    models.offload.sampling(models.policy)
    with torch.no_grad(), autocast(device, precision):
        ids = [p.ids for p in prompts]
        policy = models.sampler or models.policy
        responses = sample(policy, ids, uniforms, sampling, tokenizer, max_live_rows=max_live_rows)
    sampled = time.monotonic()
    models.offload.scoring()
    recompute = recompute or with_full_kl or (with_values and models.value_head is not None)

    def score_under(model: PreTrainedModel, rows: Sequence[int]) -> Tensor:
        texts = [prompts[i] for i in rows], [responses[i] for i in rows]
        return response_logprobs(model, *texts, sampling, precision)

    def score(rows: Sequence[int]) -> dict[str, Tensor]:
        """One number per token of these responses, [sum of R_b] each, by name."""
        texts = [prompts[i] for i in rows], [responses[i] for i in rows]
        found: dict[str, Tensor] = {}
        if recompute:
            scores = score_tokens(
                models, *texts, sampling, precision, with_values=with_values, with_full_kl=with_full_kl
            )
            found |= {name: numbers for name, numbers in vars(scores).items() if numbers is not None}
        elif with_values and models.value_model is not None:
            found["values"] = response_values(models.value_model, *texts, precision)
        return found

    cut, lengths = cut_responses(budget, models.policy, prompts, responses), [len(r.ids) for r in responses]
    with torch.no_grad():
        in_turn = with_full_kl and models.ref_policy is None  # each pass switches the adapters off and on
        parts = over_pieces(cut, score, *models.with_weights, in_turn=in_turn)
        names = parts[0] if parts else ()
        padded = {name: padded_rows([part[name] for part in parts], cut, lengths) for name in names}  # [B, R] each
        if with_ref_logprobs and not with_full_kl:
            with reference(models) as ref_policy:
                ref_logprobs = over_pieces(cut, partial(score_under, ref_policy), ref_policy)
            if cut:
                padded["ref_logprobs"] = padded_rows(ref_logprobs, cut, lengths)
    sampled_logprobs = pad_rows(torch.tensor([x for r in responses for x in r.logprobs], device=device), lengths)
    return RolloutBatch(
        prompts=list(prompts),
        responses=responses,
        response_mask=length_mask(torch.tensor(lengths, device=device)),
        sampled_logprobs=sampled_logprobs,
        logprobs=padded.get("logprobs", sampled_logprobs),
        ref_logprobs=padded.get("ref_logprobs", sampled_logprobs),  # without a response both are empty
        values=padded.get("values", torch.zeros_like(sampled_logprobs)),
        kl_full=padded.get("kl_full"),
        sample_s=sampled - start,
        score_s=time.monotonic() - sampled,
    )


# ------------------------------------------------------------------------------------- microbatches


def sequence_lengths(prompts: Sequence[PromptRow], responses: Sequence[Response]) -> list[int]:
    """[B] number of tokens of each prompt with its response."""
    return [len(p.ids) + len(r.ids) for p, r in zip(prompts, responses, strict=True)]


def shared_prompts(prompts: Sequence[PromptRow]) -> list[int]:
    """[B] number of prompt tokens of each row that an earlier row has too: the whole prompt or 0."""
    seen: set[tuple[int, ...]] = set()
    shared = []
    for ids in (tuple(prompt.ids) for prompt in prompts):
        shared.append(len(ids) if ids in seen else 0)
        seen.add(ids)
    return shared


def cut_responses(
    budget: Budget, policy: PreTrainedModel, prompts: Sequence[PromptRow], responses: Sequence[Response]
) -> list[list[int]]:
    """The row numbers of each microbatch. Responses to one prompt stay together if the policy shares prompts."""
    lengths = sequence_lengths(prompts, responses)
    if not shares_prefixes(policy):
        return budget.cut(lengths)
    groups: list[Hashable] = []
    seen: set[Hashable] = set()
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        # `pack` shares no prompt among equal sequences, or if it is too short: such rows count in full.
        sequence = (tuple(prompt.ids), tuple(response.ids))
        groups.append(row if sequence in seen else sequence[0])
        seen.add(sequence)
    return budget.cut(lengths, groups, [len(p.ids) if len(p.ids) >= SHORTEST_PREFIX else 0 for p in prompts])


def padded_rows(parts: Sequence[Tensor], cut: Sequence[Sequence[int]], lengths: Sequence[int]) -> Tensor:
    """Put numbers computed per microbatch of `cut` back in the order of the rows: [B, R].

    >>> padded_rows([torch.tensor([1.0, 2.0]), torch.tensor([3.0])], [[1], [0]], [1, 2])
    tensor([[3., 0.],
            [1., 2.]])
    """
    rows = [part.split([lengths[i] for i in microbatch]) for part, microbatch in zip(parts, cut, strict=True)]
    return pad_rows(torch.cat(in_order(rows, cut)), lengths)


# ------------------------------------------------------------------------------- responses exchanged between processes


def gather_responses(world: World, responses: Sequence[Response]) -> list[list[Response]]:
    """Every process's responses, in order of rank, on every process; with several, without their log-probabilities."""
    if world.size == 1:
        return [list(responses)]
    ids = gather_rows(world, [response.ids for response in responses])
    ended = world.gather_tensors(torch.tensor([response.ended for response in responses], dtype=torch.bool))
    allowed = _gather_ids_of_tokens(world, [response.allowed_ids for response in responses])
    forbidden = _gather_ids_of_tokens(world, [response.forbidden_ids for response in responses])
    return [
        [Response(a, [], b, c, d) for a, b, c, d in zip(*columns, strict=True)]
        for columns in zip(ids, (part.tolist() for part in ended), allowed, forbidden, strict=True)
    ]


def _gather_ids_of_tokens(
    world: World, responses: Sequence[list[list[int]] | None]
) -> list[list[list[list[int]] | None]]:
    """For each process and each of its responses, the ids that belong to each token, or None."""
    absent = -1
    counts = world.gather_tensors(
        torch.tensor([absent if tokens is None else len(tokens) for tokens in responses]).long()
    )
    if all(bool((part == absent).all()) for part in counts):
        return [[None] * len(part) for part in counts]
    everyone = gather_rows(world, [ids for tokens in responses if tokens is not None for ids in tokens])
    found: list[list[list[list[int]] | None]] = []
    for rows, sizes in zip(everyone, counts, strict=True):
        remaining = iter(rows)
        found.append([None if n == absent else [next(remaining) for _ in range(n)] for n in sizes.tolist()])
    return found
