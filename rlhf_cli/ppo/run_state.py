"""What a PPO run carries from one iteration to the next, and how a checkpoint stores it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from rlhf_cli.algorithms.score_transforms import Moments
from rlhf_cli.ppo.held_out import HeldOut
from rlhf_cli.ppo.metrics import new_health
from rlhf_cli.ppo.scores import Limits, ReferenceReplies, ScoreScale
from rlhf_cli.ppo.setup import Setup
from rlhf_cli.ppo.update import TENSORS, KLCoefs, Recent, UpdateBatch, from_all_processes, select
from rlhf_cli.rollout.distribution import Response
from rlhf_cli.run.checkpoint import State, Stateful, Weights


class RunState:
    """The adaptive coefficients, the multipliers of limits, the score statistics, health, held-out figures and recent
    rollouts."""

    def __init__(self, setup: Setup):
        self.setup = setup
        ppo = setup.config.ppo
        self.coefs = KLCoefs(ppo.kl_coef, ppo.policy_kl_coef)
        self.scale = ScoreScale(ppo)
        self.limits = Limits(setup.config.limits)
        self.references = ReferenceReplies(setup)
        self.health = new_health(setup)
        self.held_out = HeldOut(setup, self.health)
        self.recent: Recent = deque(maxlen=ppo.num_rollouts_per_update)

    def parts(self) -> dict[str, Stateful]:
        """Everything that a checkpoint of the run stores."""
        setup, models = self.setup, self.setup.models
        parts: dict[str, Stateful] = {
            "policy": Weights(models.policy),
            "policy_optimizer": setup.policy_stepper,
            "carried": self,  # the name in every checkpoint so far
        }
        value = models.value_model if models.value_model is not None else models.value_head
        if value is not None and setup.value_stepper is not None:
            parts |= {"value_model": Weights(value), "value_optimizer": setup.value_stepper}
        if setup.average is not None:
            parts["ema"] = setup.average
        if self.limits.limits:
            parts["limits"] = self.limits
        return parts

    def state(self) -> State:
        """Tensors and numbers for a checkpoint."""
        moments, best = self.scale.moments, self.held_out.best
        tensors: dict[str, torch.Tensor] = {}
        rollouts = []
        # The next update adds a rollout, which pushes the oldest one out: it need not be saved.
        length = self.recent.maxlen or 1
        for number, (iteration, batch) in enumerate(list(self.recent)[1 - length :] if length > 1 else []):
            prompts = partial(self.setup.prompts_of, iteration)
            merged = from_all_processes(batch.to("cpu"), prompts, self.setup.world, self.setup.adjacent)
            tensors |= {f"{number}/{name}": getattr(merged, name) for name in TENSORS}
            responses = [
                {"ids": r.ids, "ended": r.ended, "kept": r.allowed_ids, "forbidden": r.forbidden_ids}
                for r in merged.responses
            ]
            rollouts.append({"iteration": iteration, "responses": responses})
        return tensors, {
            **asdict(self.coefs),
            "score_moments": [moments.count, moments.mean, moments.squared_deviations],
            "health": self.health.state_dict(),
            "best": {"step": best.step, "value": self._signed(best.value)},
            "evaluated": self.held_out.last_step,
            "rollouts": rollouts,
        }

    def _signed(self, value: float | None) -> float | None:
        """The best value as a checkpoint stores it: higher is better, so a figure to be minimised is negated."""
        return -value if value is not None and self.held_out.best.lower else value

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Take tensors and numbers from a checkpoint. Prompts are not stored: they follow from the iteration."""
        self.coefs.kl_coef, self.coefs.policy_kl_coef = numbers["kl_coef"], numbers["policy_kl_coef"]
        self.scale.moments = Moments(*numbers["score_moments"])
        self.health.load_state_dict(numbers["health"])
        best = numbers["best"]
        self.held_out.best.restore({}, {"step": best["step"], "value": self._signed(best["value"])})
        self.held_out.last_step = numbers["evaluated"]
        self.recent.clear()
        for number, saved in enumerate(numbers["rollouts"]):
            responses = [Response(r["ids"], [], r["ended"], r["kept"], r.get("forbidden")) for r in saved["responses"]]
            own = {name: tensors[f"{number}/{name}"] for name in TENSORS}
            merged = UpdateBatch(prompts=self.setup.prompts_of(saved["iteration"]), responses=responses, **own)
            rows = self.setup.world.shard(range(len(responses)), self.setup.adjacent)
            self.recent.append((saved["iteration"], select(merged, rows)))
