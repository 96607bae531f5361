"""PPO-ptx: the language-model loss on SFT or pretraining rows beside the policy loss (Ouyang et al. 2022)."""

from __future__ import annotations

import torch

from rlhf_cli.algorithms.language_model import lm_loss
from rlhf_cli.algorithms.policy import mixed_loss
from rlhf_cli.data.batches import deal, stream
from rlhf_cli.models.forward import autocast, target_logprobs
from rlhf_cli.ppo.setup import Setup
from rlhf_cli.sharding import IDLE, in_step
from rlhf_cli.tensor_ops import totals
from rlhf_cli.training.gradients import GradientSum


def backward_ptx(setup: Setup, step: int, gradients: GradientSum) -> dict[str, float]:
    """Add the gradients of the ptx loss on the rows of optimizer step `step` (from 1), and begin to sum `gradients`.

    Returns this process's part of ``loss/ptx``; nothing without `ptx`. `mixed_loss` is linear, so the policy loss is
    mixed in separately.
    """
    config, ptx = setup.config, setup.config.ptx
    if ptx is None:
        return {}
    size = ptx.minibatch_size or config.ppo.minibatch_size
    rows = [setup.ptx[i] for i in stream(len(setup.ptx), size, step - 1, config.seed, "ppo ptx")]
    num_tokens = sum(sum(row.loss_mask) for row in rows)  # of all processes
    own = [rows[i] for i in deal([len(row.ids) for row in rows], setup.world.size)[setup.world.rank]]
    losses = []

    def idle() -> None:
        with autocast(setup.world.device, config.precision):
            (0.0 * target_logprobs(setup.models.policy, [IDLE], [[False, True]]).sum()).backward()

    cuts = setup.budget.cut([len(row.ids) for row in own])
    for cut in gradients.passes(in_step(setup.models.policy, cuts, idle)):
        with autocast(setup.world.device, config.precision):
            logprobs = target_logprobs(setup.models.policy, [own[i].ids for i in cut], [own[i].loss_mask for i in cut])
        loss, _ = lm_loss(logprobs, num_tokens=num_tokens)
        mixed = mixed_loss(torch.zeros_like(loss), loss, ptx_coef=ptx.coef, ptx_mode=ptx.mode)
        setup.stage.loss_scale.backward(mixed)
        losses.append({"loss": loss})
    lengths = [len(row.ids) for row in own]
    flops = setup.policy_work.training(lengths, sum(sum(row.loss_mask) for row in own))
    setup.stage.speed.count("update", tokens=sum(lengths), flops=flops)
    return {"loss/ptx": totals(losses).get("loss", 0.0)}
