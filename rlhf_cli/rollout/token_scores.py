"""Forward passes over responses and demonstrations: log-probabilities, values, entropy and exact KL per token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlhf_cli.algorithms.kl import kl_full
from rlhf_cli.data.batches import Budget
from rlhf_cli.data.encode import Example
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.models.forward import (
    autocast,
    hidden_at,
    logits_and_hidden_at,
    logits_at,
    logprobs_at,
    shares_prefixes,
    target_logits,
    vocabulary_rows,
)
from rlhf_cli.models.heads import scalar_head, scalar_scores
from rlhf_cli.models.seq2seq import is_seq2seq, with_prompts
from rlhf_cli.packing import PackedBatch, end_to_end, pack, response_positions
from rlhf_cli.processes.pass_loop import over_pieces
from rlhf_cli.processes.sharding import device_of, gathered
from rlhf_cli.rollout.distribution import Response, Sampling, allowed_logits
from rlhf_cli.rollout.offload import Offload
from rlhf_cli.tensor_ops import token_entropy, token_logprobs

MAX_LOGITS = 1 << 28
"""Logits that are held at the same time: 1 GB in float32."""
FULL_KL_CHUNK = 512
"""Tokens whose full distributions are compared per chunk. Only one chunk's [512, V] is held twice."""


@dataclass(frozen=True)
class Models:
    """The policy and the models that accompany it during training."""

    policy: PreTrainedModel
    ref_policy: PreTrainedModel | None
    """None: the policy with its adapters switched off."""
    value_model: PreTrainedModel | None = None
    """A separate sequence classifier with one label. None without values, or if `value_head` computes them."""
    value_head: torch.nn.Linear | None = None
    """Computes values from the policy's own hidden states."""
    sampler: PreTrainedModel | None = None
    """A whole copy of a sharded policy, which samples in its place."""
    offload: Offload = field(default_factory=Offload)
    """Moves what a phase does not use to the CPU. By default nothing."""

    @property
    def with_weights(self) -> tuple[PreTrainedModel | None, ...]:
        """Policy, ref_policy and value model; None where there is none."""
        return self.policy, self.ref_policy, self.value_model

    @property
    def has_values(self) -> bool:
        """Whether anything predicts values."""
        return self.value_model is not None or self.value_head is not None


@dataclass(frozen=True)
class TokenScores:
    """One float32 number per response token, end to end: [sum of R_b] each. None if it was not requested."""

    logprobs: Tensor
    """Log-probability of the sampled token under the current policy, in nats."""
    values: Tensor | None = None
    """Value of the state before the token was chosen."""
    entropy: Tensor | None = None
    """Entropy of the distribution that the token was drawn from, in nats."""
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

    Log-probabilities, entropy and KL use the temperature and the allowed tokens of the rollout, so they describe the
    distribution that was sampled from. With `detach_backbone` the value head's gradient does not reach the policy.
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
    logits = allowed_logits(logits, responses, sampling)  # [sum of R_b, V]
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
) -> Tensor:
    """Log-probability of every response token, end to end: [sum of R_b] float32.

    ``logits[t - 1, ids[t]] / temperature - logsumexp(logits[t - 1] / temperature)``

    The logits at t - 1 predict token t. The sum runs over the tokens that could have been drawn (`allowed_logits`).
    """
    batch, positions, targets = _packed(policy, prompts, responses)
    with autocast(batch.ids.device, precision):
        if not sampling.restricts:
            # The same formula, without holding all [sum of R_b, V] logits if they are large.
            return logprobs_at(policy, batch, positions, targets, sampling.temperature)
        logits = logits_at(policy, batch, positions)
    logits = allowed_logits(logits, responses, sampling)
    return token_logprobs(logits, targets, temperature=sampling.temperature)


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
    return scalar_scores(value_model, hidden)[:, 0]


def _packed(
    model: PreTrainedModel, prompts: Sequence[PromptRow], responses: Sequence[Response]
) -> tuple[PackedBatch, Tensor, Tensor]:
    """(packed rows, positions, targets): `positions` are where each response token in `targets` is predicted.

    Responses to the same prompt share its tokens if the model supports that.
    """
    device = device_of(model)
    sequences = [p.ids + r.ids for p, r in zip(prompts, responses, strict=True)]
    batch = pack(sequences, device, groups=[tuple(p.ids) for p in prompts] if shares_prefixes(model) else None)
    prompt_lengths = [len(p.ids) for p in prompts]
    if is_seq2seq(model):
        batch = with_prompts(batch, prompt_lengths)
    positions = response_positions(batch, prompt_lengths)
    return batch, positions, end_to_end([r.ids for r in responses], device)


def _ref_logits(models: Models, prompts: Sequence[PromptRow], responses: Sequence[Response], precision: str) -> Tensor:
    """The logits of ref_policy that predict each response token: [sum of R_b, V]."""
    with reference(models) as model:
        batch, positions, _ = _packed(model, prompts, responses)
        with autocast(batch.ids.device, precision):
            return logits_at(model, batch, positions)


def _full_kl(logits: Tensor, ref_logits: Tensor, temperature: float) -> Tensor:
    """`kl_full` in chunks of tokens; the backward pass recomputes each chunk."""

    def chunk_kl(a: Tensor, b: Tensor) -> Tensor:
        return kl_full(a, b, temperature=temperature)

    chunks = zip(logits.split(FULL_KL_CHUNK), ref_logits.split(FULL_KL_CHUNK), strict=True)
    if logits.requires_grad:
        return torch.cat([checkpoint(chunk_kl, a, b, use_reentrant=False) for a, b in chunks])
    return torch.cat([chunk_kl(a, b) for a, b in chunks])


# ------------------------------------------------------------------------------------------- demonstrations


def scored_targets(
    model: PreTrainedModel, rows: Sequence[Example], budget: Budget, precision: str
) -> list[tuple[Sequence[int], Tensor, Tensor]]:
    """The targets of the rows, chunk by chunk: the row numbers of a chunk, and for each of its N targets, row by row,
    the log-probability and whether the target is the likeliest token, [N] float64 each."""
    # This needs all logits of a token, which training never holds (kernels/head.py).
    budget = replace(budget, tokens=max(1, min(budget.tokens, MAX_LOGITS // vocabulary_rows(model))))
    device = device_of(model)

    def score(part: Sequence[int]) -> tuple[Sequence[int], Tensor, Tensor]:
        with autocast(device, precision):  # [N, V] and [N]
            logits, targets = target_logits(model, [rows[i].ids for i in part], [rows[i].loss_mask for i in part])
        return part, token_logprobs(logits, targets).cpu().double(), (logits.argmax(-1) == targets).cpu().double()

    return over_pieces(budget.cut([len(row.ids) for row in rows]), score, model)
