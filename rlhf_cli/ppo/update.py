"""The update of an iteration: its batch, its minibatches and their optimizer steps, and the coefficients of the KL."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from rlhf_cli.algorithms.kl import adaptive_kl_coef, adaptive_policy_kl_coef, kl_estimate
from rlhf_cli.algorithms.losses import lm_loss, mixed_loss, truncated_importance
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.data.batches import deal, own_share, stream
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.data.records import batched
from rlhf_cli.models.forward import autocast, target_logprobs
from rlhf_cli.packing import send
from rlhf_cli.ppo.setup import Setup
from rlhf_cli.processes.distributed import World
from rlhf_cli.processes.microbatches import GradientSum
from rlhf_cli.rollout.rollout import gather_responses, padded_scores
from rlhf_cli.rollout.sampling import Response
from rlhf_cli.seeding import generator
from rlhf_cli.tensor_ops import length_mask, pad_rows, totals


@dataclass(frozen=True)
class UpdateBatch:
    """B responses with their [B, R] tensors, 0 under padding."""

    prompts: list[PromptRow]
    responses: list[Response]
    response_mask: Tensor  # True on real tokens
    logprobs: Tensor
    """The old log-probabilities, which the ratio divides by: the rollout's, or those at the start of this update."""
    sampled_logprobs: Tensor  # as the sampler computed them, at the sampling temperature
    ref_logprobs: Tensor
    values: Tensor  # the centre of the value clip
    advantages: Tensor
    returns: Tensor

    def to(self, device: torch.device | str) -> Self:
        return replace(self, **{name: getattr(self, name).to(device) for name in TENSORS})

    def pad(self, flat: Tensor) -> Tensor:
        """One number per response token, end to end, as [B, R]."""
        return pad_rows(flat, [len(response.ids) for response in self.responses])


TENSORS = ("response_mask", "logprobs", "sampled_logprobs", "ref_logprobs", "values", "advantages", "returns")


def select(batch: UpdateBatch, rows: Sequence[int]) -> UpdateBatch:
    """Some rows of a batch, in the given order, padded to the longest of them."""
    width = max((len(batch.responses[i].ids) for i in rows), default=0)
    chosen = send(torch.tensor(rows, dtype=torch.int64), batch.response_mask.device)
    return UpdateBatch(
        prompts=[batch.prompts[i] for i in rows],
        responses=[batch.responses[i] for i in rows],
        **{name: getattr(batch, name)[chosen, :width] for name in TENSORS},
    )


def merge(parts: Sequence[UpdateBatch]) -> UpdateBatch:
    """Stack several batches; shorter ones are padded on the right."""
    width = max(part.response_mask.shape[1] for part in parts)

    def stacked(name: str) -> Tensor:
        tensors = [getattr(part, name) for part in parts]
        return torch.cat([torch.nn.functional.pad(tensor, (0, width - tensor.shape[1])) for tensor in tensors])

    return UpdateBatch(
        prompts=[prompt for part in parts for prompt in part.prompts],
        responses=[response for part in parts for response in part.responses],
        **{name: stacked(name) for name in TENSORS},
    )


# ------------------------------------------------------- the newest rollout, and older ones brought up to date


class Recent:
    """The rollouts that an update trains on: the newest one, and older ones if the config keeps them."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self.rollouts: deque[tuple[int, UpdateBatch]] = deque(maxlen=setup.config.ppo.num_rollouts_per_update)
        """This process's rows of each, with its iteration."""

    def add(self, newest: UpdateBatch, iteration: int) -> UpdateBatch:
        """Add the newest rollout; returns the rows of all rollouts, of all processes.

        An older rollout gets the log-probabilities and values of the current policy, from which the ratio and the value
        clip start. If another policy sampled, or the same weights in bfloat16, the advantages are multiplied by
        ``min(exp(logprobs - sampled_logprobs), cap)`` (`truncated_importance`).
        """
        setup, cap = self.setup, self.setup.config.ppo.importance_ratio_cap
        self.rollouts.append((iteration, newest if self.rollouts.maxlen == 1 else newest.to("cpu")))
        parts = []
        for made_in, batch in self.rollouts:
            batch = batch.to(setup.world.device)
            if made_in < iteration:
                now = current_scores(setup, batch)
                batch = replace(batch, logprobs=now["logprobs"], values=now.get("values", batch.values))
            if made_in < iteration or setup.sampler_may_differ:
                weights = truncated_importance(batch.logprobs, batch.sampled_logprobs, batch.response_mask, cap=cap)
                batch = replace(batch, advantages=batch.advantages * weights)
            parts.append(self._of_all_processes(made_in, batch))
        return merge(parts)

    def _of_all_processes(self, iteration: int, batch: UpdateBatch) -> UpdateBatch:
        setup = self.setup
        return from_all_processes(batch, partial(setup.prompts_of, iteration), setup.world, setup.adjacent)

    def state(self) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """The tensors and the responses of the rollouts, for a checkpoint. Prompts follow from the iteration."""
        tensors: dict[str, Tensor] = {}
        rollouts = []
        # The next update adds a rollout, which pushes the oldest one out: it need not be saved.
        for number, (iteration, batch) in enumerate(deque(self.rollouts, (self.rollouts.maxlen or 1) - 1)):
            merged = self._of_all_processes(iteration, batch.to("cpu"))
            tensors |= {f"{number}/{name}": getattr(merged, name) for name in TENSORS}
            responses = [
                {"ids": r.ids, "ended": r.ended, "kept": _each(list, r.allowed_ids), "forbidden": r.forbidden_ids}
                for r in merged.responses
            ]
            rollouts.append({"iteration": iteration, "responses": responses})
        return tensors, rollouts

    def restore(self, tensors: Mapping[str, Tensor], rollouts: Sequence[Mapping[str, Any]]) -> None:
        self.rollouts.clear()
        for number, saved in enumerate(rollouts):
            responses = [
                Response(r["ids"], [], r["ended"], _each(partial(array, "i"), r["kept"]), r.get("forbidden"))
                for r in saved["responses"]
            ]
            own = {name: tensors[f"{number}/{name}"] for name in TENSORS}
            merged = UpdateBatch(prompts=self.setup.prompts_of(saved["iteration"]), responses=responses, **own)
            rows = self.setup.world.shard(range(len(responses)), self.setup.adjacent)
            self.rollouts.append((saved["iteration"], select(merged, rows)))


def _each(kind: Callable[[Sequence[int]], Sequence[int]], ids: Sequence[Sequence[int]] | None) -> Any:
    return ids and list(map(kind, ids))


def current_scores(setup: Setup, batch: UpdateBatch) -> dict[str, Tensor]:
    """`logprobs` of a batch under the current policy, and `values` if there are any, [B, R] each."""
    precision = setup.config.precision
    return padded_scores(setup.models, batch.prompts, batch.responses, setup.sampling, precision, setup.budget)


# ------------------------------------------------------------------------------------- which process has which rows


def rows_of_process(batch: UpdateBatch, minibatch: Sequence[int], world: World) -> list[int]:
    """This process's rows of a minibatch. Every process gets about the same number of tokens to compute."""
    if world.size == 1:
        return sorted(minibatch)
    # Rows one by one, or all responses to a prompt together: whichever gives the slowest process fewer tokens.
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for row in minibatch:
        by_prompt.setdefault(tuple(batch.prompts[row].ids), []).append(row)

    def tokens(rows: Sequence[int]) -> int:
        prompts = {tuple(batch.prompts[row].ids) for row in rows}
        return sum(map(len, prompts)) + sum(len(batch.responses[row].ids) for row in rows)

    ways = [
        [[row for piece in hand for row in pieces[piece]] for hand in deal([tokens(p) for p in pieces], world.size)]
        for pieces in ([[row] for row in minibatch], list(by_prompt.values()))
    ]
    return sorted(min(ways, key=lambda hands: max(map(tokens, hands)))[world.rank])


def from_all_processes(
    batch: UpdateBatch, prompts: Callable[[], list[PromptRow]], world: World, adjacent: int
) -> UpdateBatch:
    """The rows of all processes in the order of the iteration; `prompts` returns its prompts.

    The processes exchange the numbers of real tokens alone.
    """
    if world.size == 1:
        return batch
    responses = world.interleave(gather_responses(world, batch.responses), adjacent)
    names = [name for name in TENSORS if name != "response_mask"]
    packed = torch.stack([getattr(batch, name)[batch.response_mask] for name in names], dim=1)  # [own tokens, 6]
    lengths = [len(response.ids) for response in responses]
    table = packed.new_zeros(len(names), len(lengths), max(lengths))  # [6, B, R]
    for rank, part in enumerate(world.gather_tensors(packed)):
        rows = replace(world, rank=rank).shard(range(len(lengths)), adjacent)
        for row, numbers in zip(rows, part.split([lengths[row] for row in rows]), strict=True):
            table[:, row, : lengths[row]] = numbers.T
    tensors = dict(zip(names, table, strict=True))
    mask = length_mask(torch.tensor(lengths, device=packed.device))
    return UpdateBatch(prompts=prompts(), responses=responses, response_mask=mask, **tensors)


# ------------------------------------------------- minibatches, and the optimizer step of each


def minibatches(num_rows: int, iteration: int, config: PPOConfig) -> list[Sequence[int]]:
    """The row numbers of each minibatch of an update, shuffled anew for each epoch."""
    chosen: list[Sequence[int]] = []
    for epoch in range(config.ppo.ppo_epochs):
        shuffle = generator(config.seed, "ppo minibatches", iteration, epoch)
        chosen += batched(torch.randperm(num_rows, generator=shuffle).tolist(), config.ppo.minibatch_size)
    return chosen


def clip_gradients(setup: Setup, *, learns_policy: bool) -> dict[str, float]:
    """Clip each model's summed gradients: ``gradient * min(1, max_grad_norm / norm)``; returns the norms before."""
    norms = setup.stage.loss_scale.figures("policy")
    if learns_policy:
        norms["policy/grad_norm"] = setup.policy_stepper.clip(setup.world)
    if setup.value_stepper is not None:
        norms["value/grad_norm"] = setup.value_stepper.clip(setup.world)
    return norms


def take_step(setup: Setup, *, learns_policy: bool, move: bool) -> None:
    """One optimizer step of each model that trains; without `move` only the learning-rate schedules advance.

    After a step of the policy, ``average = ema_decay * average + (1 - ema_decay) * weights`` (`ema`).
    """
    if learns_policy:
        setup.policy_stepper.advance(move=move)
        if setup.average is not None and move:
            setup.average.update()
    if setup.value_stepper is not None:
        setup.value_stepper.advance(move=move)
    setup.stage.loss_scale.update()


# ------------------------------------------------------------------------ PPO-ptx (Ouyang et al. 2022, section 3.4)


def backward_ptx(setup: Setup, step: int, gradients: GradientSum) -> dict[str, float]:
    """Add the gradients of the ptx loss on the rows of optimizer step `step` (from 1), and begin to sum `gradients`.

    Returns this process's part of ``loss/ptx``. `mixed_loss` is linear, so the policy loss is mixed in separately.
    """
    config, ptx = setup.config, setup.config.ptx
    if ptx is None:
        return {}
    size = ptx.minibatch_size or config.ppo.minibatch_size
    examples = [setup.ptx[i] for i in stream(len(setup.ptx), size, step - 1, config.seed, "ppo ptx")]
    num_tokens = sum(sum(example.loss_mask) for example in examples)  # of all processes
    own = own_share(examples, lambda example: len(example.ids), setup.world)

    def loss_of(rows: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
        with autocast(setup.world.device, config.precision):
            ids, masks = [own[i].ids for i in rows], [own[i].loss_mask for i in rows]
            logprobs = target_logprobs(setup.models.policy, ids, masks)
        loss, _ = lm_loss(logprobs, num_tokens=num_tokens)
        return mixed_loss(torch.zeros_like(loss), loss, ptx_coef=ptx.coef, ptx_mode=ptx.mode), {"loss/ptx": loss}

    lengths = [len(example.ids) for example in own]
    stats = gradients.add(setup.budget.cut(lengths), loss_of)
    flops = setup.policy_work.training(lengths, sum(sum(example.loss_mask) for example in own))
    setup.stage.speed.count("update", tokens=sum(lengths), flops=flops)
    return {"loss/ptx": 0.0, **totals(stats)}


# ------------------------------------------------------------------- KL coefficients that follow the measured KL


@dataclass
class KLCoefs:
    kl_coef: float  # the coefficient of the KL to ref_policy
    policy_kl_coef: float
    """The coefficient of PPO-penalty's KL between the policy before and after an update."""


def adapt_kl_coefs(setup: Setup, coefs: KLCoefs, newest: UpdateBatch, metrics: Mapping[str, float]) -> dict[str, float]:
    """Adapt the coefficients after an update to the figures of its iteration; returns the figures of PPO-penalty."""
    ppo, penalty = setup.config.ppo, {}
    # Not learned: in the warm-up, or if every step was bad. Then the KL says nothing about the coefficients.
    learned = "policy/grad_norm" in metrics
    if ppo.kl_controller == "adaptive" and learned:
        assert ppo.kl_target is not None
        coefs.kl_coef = adaptive_kl_coef(
            coefs.kl_coef,
            metrics["objective/kl"],
            target=ppo.kl_target,
            horizon=ppo.kl_horizon,
            num_episodes=ppo.rollout_batch_size,
        )
    if ppo.objective == "penalty":
        penalty["policy/policy_kl_coef"] = coefs.policy_kl_coef
    if ppo.policy_kl_target is not None:
        # KL(old, new) per token after the update, by k3 on the newest rollout's tokens.
        logprobs, mask = current_scores(setup, newest)["logprobs"].to(newest.logprobs), newest.response_mask
        token_kl = kl_estimate(newest.logprobs, logprobs, estimator="k3")  # [B, R]
        sums = setup.world.sum_floats({"kl": (token_kl * mask).sum().item(), "tokens": float(mask.sum().item())})
        kl = penalty["policy/kl_after_update"] = sums["kl"] / sums["tokens"]
        if learned:
            coefs.policy_kl_coef = adaptive_policy_kl_coef(coefs.policy_kl_coef, kl, target=ppo.policy_kl_target)
    return penalty
