"""One iteration's rollout: prompts, sampled responses, and everything that the update is computed from."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.data.batches import chunks
from rlhf_cli.data.formats import Prompt
from rlhf_cli.models.forward import autocast, hidden_at, logits_at, scalar_scores
from rlhf_cli.packing import pack, response_positions
from rlhf_cli.rollout.sampling import Response, sample
from rlhf_cli.tensor_ops import length_mask, pad_rows, token_logprobs


@dataclass(frozen=True)
class PromptRow:
    """A prompt as text, as tokens and as the row that it came from."""

    text: str
    ids: list[int]
    row: Prompt


@dataclass(frozen=True)
class Rollout:
    """B responses of at most R tokens; every tensor is float32 on the compute device, zero under padding."""

    prompts: list[PromptRow]
    responses: list[Response]
    response_mask: torch.Tensor
    """[B, R] bool, True on real tokens, EOS included."""
    sampled_logprobs: torch.Tensor
    """[B, R] as the sampler saw them; only to check that sampler and trainer are the same policy."""
    logprobs: torch.Tensor
    """[B, R] of the sampled tokens by the policy that sampled, at the sampling temperature, in nats."""
    ref_logprobs: torch.Tensor
    """[B, R] by ref_policy."""
    values: torch.Tensor
    """[B, R] by value_model before the update: the value of the state in which the token was chosen."""
    sample_s: float
    """Seconds that sampling took."""
    score_s: float
    """Seconds that the log-probabilities and values took."""


def collect(
    prompts: Sequence[PromptRow],
    table: torch.Tensor,
    policy: PreTrainedModel,
    ref_policy: PreTrainedModel,
    value_model: PreTrainedModel | None,
    *,
    temperature: float,
    stop: set[int],
    microbatch_size: int | None,
    precision: str,
) -> Rollout:
    """Sample a response to each prompt and score it by the policies and the value model.

    Log-probabilities are computed by the forward pass that training uses, not taken from the sampler: before
    the first step the ratio is then 1 and the KL to an equal ref_policy 0, to the last bit where the chunks
    are the same. Without a value model the values are zero.
    """
    device = next(policy.parameters()).device
    start = time.monotonic()
    with torch.no_grad(), autocast(device, precision):
        responses = sample(policy, [p.ids for p in prompts], table, temperature=temperature, stop=stop)
    sampled = time.monotonic()
    lengths = [len(response.ids) for response in responses]
    flat: dict[str, list[torch.Tensor]] = {"logprobs": [], "ref_logprobs": [], "values": []}
    with torch.no_grad():
        for part in chunks(range(len(prompts)), microbatch_size):
            some, answers = [prompts[i] for i in part], [responses[i] for i in part]
            flat["logprobs"].append(response_logprobs(policy, some, answers, temperature, precision))
            flat["ref_logprobs"].append(response_logprobs(ref_policy, some, answers, temperature, precision))
            if value_model is not None:
                flat["values"].append(response_values(value_model, some, answers, precision))
    padded = {key: pad_rows(torch.cat(parts), lengths) for key, parts in flat.items() if parts}
    drawn = torch.tensor([x for response in responses for x in response.logprobs], device=device)
    return Rollout(
        prompts=list(prompts),
        responses=responses,
        response_mask=length_mask(torch.tensor(lengths, device=device)),
        sampled_logprobs=pad_rows(drawn, lengths),
        logprobs=padded["logprobs"],
        ref_logprobs=padded["ref_logprobs"],
        values=padded.get("values", torch.zeros_like(padded["logprobs"])),
        sample_s=sampled - start,
        score_s=time.monotonic() - sampled,
    )


def response_logprobs(
    policy: PreTrainedModel,
    prompts: Sequence[PromptRow],
    responses: Sequence[Response],
    temperature: float,
    precision: str,
) -> torch.Tensor:
    """Log-probability of every response token, laid end to end: [sum of R_b] float32."""
    batch = pack([p.ids + r.ids for p, r in zip(prompts, responses, strict=True)], _device(policy))
    positions = response_positions(batch, [len(p.ids) for p in prompts])
    with autocast(batch.ids.device, precision):
        logits = logits_at(policy, batch, positions)
    return token_logprobs(logits, batch.ids[positions + 1], temperature=temperature)


def response_values(
    value_model: PreTrainedModel, prompts: Sequence[PromptRow], responses: Sequence[Response], precision: str
) -> torch.Tensor:
    """The value at every response token, of the state before it was chosen: [sum of R_b] float32."""
    batch = pack([p.ids + r.ids for p, r in zip(prompts, responses, strict=True)], _device(value_model))
    positions = response_positions(batch, [len(p.ids) for p in prompts])
    with autocast(batch.ids.device, precision):
        hidden = hidden_at(value_model, batch, positions)
    return scalar_scores(value_model, hidden)[:, 0]


def decode_responses(tokenizer: PreTrainedTokenizerBase, responses: Sequence[Response]) -> list[str]:
    """The responses as text, without special tokens."""
    return [str(tokenizer.decode(response.ids, skip_special_tokens=True)) for response in responses]


def _device(model: PreTrainedModel) -> torch.device:
    return next(model.parameters()).device
