"""What a PPO run carries from one iteration to the next beside weights and optimizers, to be saved with them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlhf_cli.algorithms.moments import Moments
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.ppo.batch import TENSORS, UpdateBatch, merge, select
from rlhf_cli.ppo.setup import Learner
from rlhf_cli.rollout.distribution import Response
from rlhf_cli.training.best import Best
from rlhf_cli.training.checkpoint import Part, State, Weights
from rlhf_cli.training.health import Health

Recent = deque[tuple[int, UpdateBatch]]
"""The rollouts that the next update learns from too, with the iteration that each was made in."""


def parts_of(learner: Learner, carried: Carried) -> dict[str, Part]:
    """Everything that a checkpoint of this run holds."""
    models = learner.models
    parts: dict[str, Part] = {
        "policy": Weights(models.policy),
        "policy_optimizer": learner.policy_stepper,
        "carried": carried,
    }
    value = models.value_model if models.value_model is not None else models.value_head
    if value is not None and learner.value_stepper is not None:
        parts |= {"value_model": Weights(value), "value_optimizer": learner.value_stepper}
    if learner.average is not None:
        parts["ema"] = learner.average
    return parts


class Carried:
    """The coefficients that follow the KL, the scores' statistics, health, the best figure, recent rollouts."""

    def __init__(
        self,
        learner: Learner,
        health: Health,
        best: Best,
        recent: Recent,
        prompts_of: Callable[[int], list[PromptRow]],
    ):
        self.learner, self.health, self.best, self.recent = learner, health, best, recent
        self.prompts_of = prompts_of
        """The prompts of all processes' responses in an iteration: they need not be saved."""
        self.evaluated = 0
        """The iteration of the last held-out figures."""

    def state(self) -> State:
        moments = self.learner.scale.moments
        tensors: dict[str, torch.Tensor] = {}
        rollouts = []
        # The last one needed is that of the next update, for which the oldest makes room.
        kept = list(self.recent)[-(self.recent.maxlen or 1) + 1 :] if (self.recent.maxlen or 1) > 1 else []
        for number, (iteration, update_batch) in enumerate(kept):
            whole = of_all(self.learner, update_batch.to("cpu"))
            tensors |= {f"{number}/{name}": getattr(whole, name) for name in TENSORS}
            responses = [{"ids": r.ids, "ended": r.ended, "kept": r.allowed_ids} for r in whole.responses]
            rollouts.append({"iteration": iteration, "responses": responses})
        return tensors, {
            "kl_coef": self.learner.kl_coef,
            "policy_kl_coef": self.learner.policy_kl_coef,
            "score_moments": [moments.count, moments.mean, moments.squared_deviations],
            "health": self.health.state_dict(),
            "best": {"step": self.best.step, "value": self._signed(self.best.value)},
            "evaluated": self.evaluated,
            "rollouts": rollouts,
        }

    def _signed(self, value: float | None) -> float | None:
        """The best value as checkpoints hold it: higher is better, so a figure to be minimised is negated."""
        return -value if value is not None and self.best.lower else value

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        self.learner.kl_coef, self.learner.policy_kl_coef = numbers["kl_coef"], numbers["policy_kl_coef"]
        self.learner.scale.moments = Moments(*numbers["score_moments"])
        self.health.load_state_dict(numbers["health"])
        self.evaluated = numbers["evaluated"]
        best = numbers["best"]
        self.best.step, self.best.value = best["step"], self._signed(best["value"])
        self.recent.clear()
        for number, saved in enumerate(numbers["rollouts"]):
            responses = [Response(r["ids"], [], r["ended"], r["kept"]) for r in saved["responses"]]
            own = {name: tensors[f"{number}/{name}"] for name in TENSORS}
            whole = UpdateBatch(prompts=self.prompts_of(saved["iteration"]), responses=responses, **own)
            mine = self.learner.world.shard(range(len(responses)), self.learner.together)
            self.recent.append((saved["iteration"], select(whole, mine)))


def of_all(learner: Learner, update_batch: UpdateBatch) -> UpdateBatch:
    """All processes' rows of a rollout, in the order of the iteration, on the device of this process's own."""
    world = learner.world
    if world.size == 1:
        return update_batch
    everyone = world.gather(update_batch.to("cpu"))
    ends = list(itertools.accumulate(len(own.responses) for own in everyone))
    rows = [range(end - len(own.responses), end) for own, end in zip(everyone, ends, strict=True)]
    whole = select(merge(everyone), world.interleave(rows, learner.together))
    return whole.to(update_batch.response_mask.device)
