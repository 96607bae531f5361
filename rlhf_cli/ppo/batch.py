"""What an update learns from: one or more rollouts with their advantages and returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.rollout.distribution import Response


@dataclass(frozen=True)
class UpdateBatch:
    """B responses with their [B, R] tensors, 0 under padding."""

    prompts: list[PromptRow]
    responses: list[Response]
    response_mask: Tensor
    """True on real tokens."""
    logprobs: Tensor
    """Under the policy that the ratio compares with: the one that sampled, or the one at the start of this update."""
    sampled_logprobs: Tensor
    """As the sampler computed them, at the sampling temperature."""
    ref_logprobs: Tensor
    values: Tensor
    """The centre of the value clip."""
    advantages: Tensor
    returns: Tensor

    def to(self, device: torch.device | str) -> Self:
        """The same batch with its tensors on another device."""
        return replace(self, **{name: getattr(self, name).to(device) for name in TENSORS})


TENSORS = ("response_mask", "logprobs", "sampled_logprobs", "ref_logprobs", "values", "advantages", "returns")


def select(batch: UpdateBatch, rows: Sequence[int]) -> UpdateBatch:
    """Some rows of a batch, in the given order, with the same padding."""
    return UpdateBatch(
        prompts=[batch.prompts[i] for i in rows],
        responses=[batch.responses[i] for i in rows],
        **{name: getattr(batch, name)[list(rows)] for name in TENSORS},
    )


def merge(parts: Sequence[UpdateBatch]) -> UpdateBatch:
    """Stack several batches; shorter ones are padded on the right."""
    width = max(part.response_mask.shape[1] for part in parts)
    tensors = {
        name: torch.cat(
            [torch.nn.functional.pad(getattr(p, name), (0, width - getattr(p, name).shape[1])) for p in parts]
        )
        for name in TENSORS
    }
    return UpdateBatch(
        prompts=[prompt for part in parts for prompt in part.prompts],
        responses=[response for part in parts for response in part.responses],
        **tensors,
    )
