"""One iteration's rollout: responses sampled to prompts, and what the models compute for each of their tokens."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.algorithms.kl import kl_full
from rlhf_cli.config.ppo import PPOModelName
from rlhf_cli.data.batches import Budget, in_order
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.models.forward import (
    autocast,
    choose_attention,
    hidden_at,
    is_packed,
    logits_and_hidden_at,
    logits_at,
    logprobs_at,
    scalar_head,
)
from rlhf_cli.models.frozen import hold_frozen
from rlhf_cli.models.seq2seq import is_seq2seq, with_prompts
from rlhf_cli.packing import SHORTEST_PREFIX, PackedBatch, end_to_end, pack, response_positions
from rlhf_cli.processes.distributed import World
from rlhf_cli.processes.microbatches import over_microbatches
from rlhf_cli.processes.sharding import device_of, gathered, whole
from rlhf_cli.rollout.sampling import Response, Sampling, allowed_logits, sample
from rlhf_cli.tensor_ops import length_mask, pad_rows, token_entropy, token_logprobs

if TYPE_CHECKING:
    from rlhf_cli.rollout.offload import Offload


@dataclass(frozen=True)
class RolloutBatch:
    """B responses of at most R tokens. Tensors are float32 on one device, and 0 under padding."""

    prompts: list[PromptRow]
    responses: list[Response]
    response_mask: Tensor  # [B, R] bool, True on real tokens, EOS included
    sampled_logprobs: Tensor  # [B, R] log-probabilities as the sampler computed them
    logprobs: Tensor
    """[B, R] the same, or recomputed by the forward pass that training uses; at the sampling temperature, in nats."""
    ref_logprobs: Tensor  # [B, R] log-probabilities under ref_policy
    values: Tensor
    """[B, R] value of the state before each token was chosen, before the update; 0 without values."""
    kl_full: Tensor | None  # [B, R] exact KL(policy, ref_policy) at each token, if requested
    sample_s: float  # seconds spent sampling
    score_s: float  # seconds spent on log-probabilities and values


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

    With `recompute`, `logprobs` come from the forward pass that training uses. Before the first step the ratio is then
    1 and the KL to an equal ref_policy is 0, to the last bit if the microbatches are the same. Without it they are the
    sampler's, unless the policy runs anyway: for values from a head on its hidden states, or for the full KL. Without a
    value model the values are 0; without `with_ref_logprobs`, `ref_logprobs` are the sampler's. With sharded models all
    processes must call this, also one that has no prompt.
    """
    device = device_of(models.policy)
    start = time.monotonic()
    if models.offload is not None:
        models.offload.sampling(models.policy)
    with torch.no_grad(), autocast(device, precision):
        ids = [p.ids for p in prompts]
        responses = sample(models.samples, ids, uniforms, sampling, tokenizer, max_live_rows=max_live_rows)
    sampled = time.monotonic()
    if models.offload is not None:
        models.offload.scoring()
    recompute = recompute or with_full_kl or (with_values and models.value_head is not None)
    lengths = [len(r.ids) for r in responses]
    sampled_logprobs = pad_rows(torch.tensor([x for r in responses for x in r.logprobs], device=device), lengths)
    rest = prompts, responses, sampling, precision, budget
    padded = padded_scores(
        models,
        *rest,
        with_logprobs=recompute,
        with_values=with_values,
        with_ref_logprobs=with_ref_logprobs,
        with_full_kl=with_full_kl,
    )
    if with_ref_logprobs and models.ref_policy is None and not with_full_kl:
        with reference(models) as ref_policy:
            of_ref = padded_scores(Models(ref_policy, None), *rest)
        padded["ref_logprobs"] = of_ref.get("logprobs", sampled_logprobs)
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
    if not is_packed(policy):
        return budget.cut(lengths)
    groups: list[Hashable] = []
    seen: set[Hashable] = set()
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        # `pack` shares no prompt among equal sequences, or if it is too short: such rows count in full.
        sequence = (tuple(prompt.ids), tuple(response.ids))
        groups.append(row if sequence in seen else sequence[0])
        seen.add(sequence)
    return budget.cut(lengths, groups, [len(p.ids) if len(p.ids) >= SHORTEST_PREFIX else 0 for p in prompts])


@torch.no_grad()
def padded_scores(
    models: Models,
    prompts: Sequence[PromptRow],
    responses: Sequence[Response],
    sampling: Sampling,
    precision: str,
    budget: Budget,
    *,
    with_logprobs: bool = True,
    with_values: bool = True,
    with_ref_logprobs: bool = False,
    with_full_kl: bool = False,
) -> dict[str, Tensor]:
    """The numbers of `score_tokens` by name, in microbatches and without gradients: [B, R] each, {} for no response.

    Policy, value model and ref_policy run at the same time. `with_ref_logprobs` needs a ref_policy of its own: adapters
    cannot be off in one pass while another needs them. All processes must call this for sharded models.
    """

    def policy_scores(rows: Sequence[int]) -> dict[str, Tensor | None]:
        alone = replace(models, value_model=None)
        scores = score_tokens(
            alone, *texts(rows), sampling, precision, with_values=with_values, with_full_kl=with_full_kl
        )
        return vars(scores)

    def values(rows: Sequence[int]) -> dict[str, Tensor | None]:
        assert models.value_model is not None
        return {"values": response_values(models.value_model, *texts(rows), precision)}

    def ref_logprobs(rows: Sequence[int]) -> dict[str, Tensor | None]:
        assert models.ref_policy is not None
        alone = Models(models.ref_policy, None)
        return {"ref_logprobs": score_tokens(alone, *texts(rows), sampling, precision).logprobs}

    def texts(rows: Sequence[int]) -> tuple[list[PromptRow], list[Response]]:
        return [prompts[i] for i in rows], [responses[i] for i in rows]

    passes: list[Callable[[Sequence[int]], dict[str, Tensor | None]]] = []
    if with_logprobs:
        passes.append(policy_scores)
    if with_values and models.value_model is not None:
        passes.append(values)
    if with_ref_logprobs and models.ref_policy is not None and not with_full_kl:
        passes.append(ref_logprobs)
    microbatches, lengths = cut_responses(budget, models.policy, prompts, responses), [len(r.ids) for r in responses]
    in_turn = with_full_kl and models.ref_policy is None  # each pass switches the adapters off and on
    found = over_microbatches(microbatches, *passes, models=models.with_weights, in_turn=in_turn)
    parts: dict[str, list[Sequence[Tensor]]] = {}
    for number, scores in enumerate(found):
        sizes = [lengths[i] for i in microbatches[number // len(passes)]]
        for name, numbers in scores.items():
            if numbers is not None:
                parts.setdefault(name, []).append(numbers.split(sizes))
    return {name: pad_rows(torch.cat(in_order(each, microbatches)), lengths) for name, each in parts.items()}


# ------------------------------------------------------------------------------- responses exchanged between processes


def gather_responses(world: World, responses: Sequence[Response]) -> list[list[Response]]:
    """Every process's responses, in order of rank, on every process, without their log-probabilities."""
    return world.gather([replace(response, logprobs=[]) for response in responses])


# -------------------------------------------------------- log-probabilities, values, entropy and exact KL of each token


FULL_KL_CHUNK = 512
"""Tokens whose full distributions are compared per chunk. Only one chunk's [512, V] is held twice."""


class Sampler:
    """A whole copy of a sharded policy, from which a process samples without waiting for longer responses of others.

    Create it before the policy is sharded. Each process holds it in the precision of the passes, but in float32 until
    the first sampling: while the run is set up, the decoder is compared with its forward pass. With
    `rollout.decoder: sharded` all sample from the sharded policy together, without a copy.
    """

    def __init__(self, policy: PreTrainedModel, device: torch.device, precision: str):
        self.policy, self.precision, self._num_copied = policy, precision, 0
        with torch.device(device):
            empty = {id(p): nn.Parameter(torch.empty(p.shape), requires_grad=False) for p in policy.parameters()}
        self.model: PreTrainedModel = copy.deepcopy(policy, dict(empty))

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the policy's weights, one at a time. All processes must call this."""
        if self._num_copied == 1:
            device = next(self.model.parameters()).device
            hold_frozen(self.model, device, self.precision, exact=False, constant=False)
        for mine, weight in zip(self.model.parameters(), self.policy.parameters(), strict=True):
            mine.copy_(whole(weight.detach()))
        if not self._num_copied:  # this needs real weights
            choose_attention(self.model)
        self._num_copied += 1


WITH_WEIGHTS: tuple[PPOModelName, ...] = ("policy", "ref_policy", "value_model")


@dataclass(frozen=True)
class Models:
    """The policy and the models that accompany it during training."""

    policy: PreTrainedModel
    ref_policy: PreTrainedModel | None  # None: the policy with its adapters switched off
    value_model: PreTrainedModel | None = None
    """A separate sequence classifier with one label. None without values, or if `value_head` computes them."""
    value_head: torch.nn.Linear | None = None  # computes values from the policy's own hidden states
    sampler: Sampler | None = None  # a copy of a sharded policy, which samples in its place
    offload: Offload | None = None  # moves what a phase does not use to the CPU

    def refreshed(self) -> Models:
        """The models, after the copy that samples has got the weights of a sharded policy. A collective operation."""
        if self.sampler is not None:
            self.sampler.refresh()
        return self

    @property
    def samples(self) -> PreTrainedModel:
        """The policy, or the copy that samples in its place."""
        return self.sampler.model if self.sampler is not None else self.policy

    @property
    def with_weights(self) -> tuple[PreTrainedModel | None, ...]:
        return tuple(getattr(self, name) for name in WITH_WEIGHTS)

    @property
    def has_values(self) -> bool:
        return self.value_model is not None or self.value_head is not None


@dataclass(frozen=True)
class TokenScores:
    """One float32 number per response token, end to end: [sum of R_b] each. None if it was not requested."""

    logprobs: Tensor
    """Log-probability of the sampled token under the current policy, in nats."""
    values: Tensor | None = None  # value of the state before the token was chosen
    entropy: Tensor | None = None  # entropy of the distribution that the token was drawn from, in nats
    kl_full: Tensor | None = None
    """Exact KL(policy, ref_policy) of that distribution, summed over the vocabulary, in nats."""
    ref_logprobs: Tensor | None = None
    """Log-probability of the sampled token under ref_policy, in nats; a by-product of the exact KL."""


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
    """Run the policy once, and a separate value model once; gradients flow wherever they are enabled.

    ``logprob = logits[t - 1, ids[t]] / temperature - logsumexp(logits[t - 1] / temperature)``

    The logits at t - 1 predict token t. The sum runs over the tokens that could have been drawn (`allowed_logits`), so
    log-probabilities, entropy and KL describe the distribution that was sampled from. With `detach_backbone` the value
    head's gradient does not reach the policy.
    """
    temperature, values = sampling.temperature, None
    if with_values and models.value_model is not None:
        values = response_values(models.value_model, prompts, responses, precision)
    shared = with_values and models.value_head is not None
    batch, positions, targets = _packed(models.policy, prompts, responses)
    with autocast(batch.ids.device, precision):
        if not (shared or with_entropy or with_full_kl or sampling.restricts):
            # The same formula, without holding all [sum of R_b, V] logits if they are large.
            return TokenScores(logprobs_at(models.policy, batch, positions, targets, temperature), values)
        if shared:
            logits, hidden = logits_and_hidden_at(models.policy, batch, positions)
        else:
            logits = logits_at(models.policy, batch, positions)
    logits = allowed_logits(logits, responses, sampling)  # [sum of R_b, V]
    if shared and models.value_head is not None:
        values = scalar_head(models.value_head, hidden.detach() if detach_backbone else hidden)[:, 0]
    kl = ref_logprobs = None
    if with_full_kl:
        with torch.no_grad(), reference(models) as ref_policy:
            batch, positions, _ = _packed(ref_policy, prompts, responses)
            with autocast(batch.ids.device, precision):
                ref_logits = logits_at(ref_policy, batch, positions)
        ref_logits = allowed_logits(ref_logits, responses, sampling)
        ref_logprobs = token_logprobs(ref_logits, targets, temperature=temperature)
        kl = _full_kl(logits, ref_logits, temperature)
    return TokenScores(
        logprobs=token_logprobs(logits, targets, temperature=temperature),
        values=values,
        entropy=token_entropy(logits, temperature=temperature) if with_entropy else None,
        kl_full=kl,
        ref_logprobs=ref_logprobs,
    )


@contextmanager
def reference(models: Models) -> Iterator[PreTrainedModel]:
    """ref_policy; without one, the policy, whose adapters are switched off inside the block."""
    if models.ref_policy is not None:
        yield models.ref_policy
        return
    from rlhf_cli.models.adapters import adapters_off

    with adapters_off(models.policy):
        yield models.policy


@gathered
def response_values(
    value_model: PreTrainedModel, prompts: Sequence[PromptRow], responses: Sequence[Response], precision: str
) -> Tensor:
    """The value of the state before each response token was chosen, end to end: [sum of R_b] float32.

    ``values[t] = head(hidden[t - 1])``: the head of the value model on the hidden state that predicts token t.
    """
    batch, positions, _ = _packed(value_model, prompts, responses)
    with autocast(batch.ids.device, precision):
        hidden = hidden_at(value_model, batch, positions)
    return scalar_head(value_model.score, hidden)[:, 0]


def _packed(
    model: PreTrainedModel, prompts: Sequence[PromptRow], responses: Sequence[Response]
) -> tuple[PackedBatch, Tensor, Tensor]:
    """(packed rows, positions, targets): the logits at `positions[i]` predict `targets[i]`, the next token."""
    device = device_of(model)
    sequences = [p.ids + r.ids for p, r in zip(prompts, responses, strict=True)]
    batch = pack(sequences, device, groups=[tuple(p.ids) for p in prompts] if is_packed(model) else None)
    prompt_lengths = [len(p.ids) for p in prompts]
    if is_seq2seq(model):
        batch = with_prompts(batch, prompt_lengths)
    positions = response_positions(batch, prompt_lengths)
    return batch, positions, end_to_end([r.ids for r in responses], device)


def _full_kl(logits: Tensor, ref_logits: Tensor, temperature: float) -> Tensor:
    """`kl_full` in chunks of tokens; the backward pass recomputes each chunk."""
    kl = partial(kl_full, temperature=temperature)
    chunks = zip(logits.split(FULL_KL_CHUNK), ref_logits.split(FULL_KL_CHUNK), strict=True)
    return torch.cat([checkpoint(kl, a, b, use_reentrant=False) for a, b in chunks])
