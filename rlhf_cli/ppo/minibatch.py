"""Minibatches, their microbatches, and the optimizer step of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.data.batches import chunks
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.ppo.batch import UpdateBatch
from rlhf_cli.ppo.setup import Setup
from rlhf_cli.rollout.distribution import Response
from rlhf_cli.rollout.rollout import cut_responses
from rlhf_cli.rollout.scoring import IDLE_PROMPT, idle_response
from rlhf_cli.seeding import generator
from rlhf_cli.sharding import num_missing
from rlhf_cli.tensor_ops import pad_rows


@contextmanager
def update_phase(setup: Setup) -> Iterator[None]:
    """The context of an update: it is timed, and the optimizers have their state."""
    with setup.stage.speed.phase("update"), setup.models.offload.update():
        yield


def minibatches(num_rows: int, iteration: int, config: PPOConfig) -> list[Sequence[int]]:
    """The row numbers of each minibatch of an update, shuffled anew for each epoch."""
    chosen: list[Sequence[int]] = []
    for epoch in range(config.ppo.ppo_epochs):
        shuffle = generator(config.seed, "ppo minibatches", iteration, epoch)
        chosen += chunks(torch.randperm(num_rows, generator=shuffle).tolist(), config.ppo.minibatch_size)
    return chosen


@dataclass(frozen=True)
class Microbatch:
    """b responses of at most r tokens, computed in one forward and backward pass. Tensors are [b, r]."""

    prompts: list[PromptRow]
    responses: list[Response]
    mask: Tensor
    logprobs: Tensor
    """Old log-probabilities: the ratio compares the new ones with these."""
    ref_logprobs: Tensor
    values: Tensor
    """Old values: the centre of the value clip."""
    advantages: Tensor
    returns: Tensor

    @cached_property
    def lengths(self) -> list[int]:
        """[b] tokens of each response."""
        return [len(response.ids) for response in self.responses]

    def pad(self, flat: Tensor) -> Tensor:
        """One number per response token, end to end, as [b, r]."""
        return pad_rows(flat, self.lengths)


def microbatches(setup: Setup, batch: UpdateBatch, rows: Sequence[int]) -> Iterator[Microbatch]:
    """Cut rows of a batch into microbatches that fit the budget.

    With sharded models all processes get the same number of them; those that one lacks have no real token.
    """
    models = setup.models
    prompts, responses = [batch.prompts[i] for i in rows], [batch.responses[i] for i in rows]
    cut = cut_responses(setup.budget, models.policy, prompts, responses)
    missing = num_missing(models.first_sharded, len(cut))
    for part in cut:
        chosen = [rows[i] for i in part]
        width = max(len(batch.responses[i].ids) for i in chosen)
        yield Microbatch(
            [batch.prompts[i] for i in chosen],
            [batch.responses[i] for i in chosen],
            *(tensor[chosen, :width] for tensor in _tensors(batch)),
        )
    for _ in range(missing):
        empty = (torch.zeros_like(tensor[:1, :1]) for tensor in _tensors(batch))
        yield Microbatch([IDLE_PROMPT], [idle_response(setup.sampling)], *empty)


def _tensors(batch: UpdateBatch) -> tuple[Tensor, ...]:
    """The tensors of a microbatch, in its order."""
    return (
        batch.response_mask,
        batch.logprobs,
        batch.ref_logprobs,
        batch.values,
        batch.advantages,
        batch.returns,
    )


def clip_gradients(setup: Setup, *, learns_policy: bool) -> dict[str, float]:
    """Clip the gradients, which are those of all processes; returns their norms before clipping.

    ``gradient * min(1, max_grad_norm / norm)``, for each model by itself (`Stepper` in training/optimizer.py).
    """
    norms = setup.stage.loss_scale.figures("policy")
    if learns_policy:
        norms["policy/grad_norm"] = setup.policy_stepper.clip(setup.world)
    if setup.value_stepper is not None:
        norms["value/grad_norm"] = setup.value_stepper.clip(setup.world)
    return norms


def take_step(setup: Setup, *, learns_policy: bool, move: bool) -> None:
    """One optimizer step of each model that trains; without `move` only the learning-rate schedules advance.

    After a step of the policy, ``average = ema_decay * average + (1 - ema_decay) * weights`` (training/ema.py). The
    schedules are `rate_at` in training/optimizer.py.
    """
    if learns_policy:
        setup.policy_stepper.advance(move=move)
        if setup.average is not None and move:
            setup.average.update()
    if setup.value_stepper is not None:
        setup.value_stepper.advance(move=move)
    setup.stage.loss_scale.update()
