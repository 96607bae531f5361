"""PPO with models that are divided among the processes (`distributed.shard`, rlhf_cli/sharding.py).

Policy, reference, value model and reward models are divided, but for those in `distributed.keep_whole`. A process
samples from a whole copy of the policy, so that responses of different lengths do not make the processes wait for each
other. With `rollout.decoder: sharded` all processes sample from the divided policy together, without a copy. All
processes make every other pass together. One that has fewer microbatches than another makes passes over a sequence of
two tokens, whose loss counts 0.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf_cli.config.ppo import PPOConfig, PPOModelName
from rlhf_cli.config.stage import Stage
from rlhf_cli.errors import ConfigError
from rlhf_cli.models.forward import choose_attention
from rlhf_cli.models.frozen import hold_frozen
from rlhf_cli.models.shard import divides, shard_for
from rlhf_cli.rollout.scoring import Models
from rlhf_cli.sharding import whole


def to_divide(config: PPOConfig, name: PPOModelName) -> Stage | None:
    """The config if it divides this model among the processes, else None."""
    if not divides(config) or name in config.distributed.keep_whole:
        return None
    is_sampled = name == "ref_policy" and config.ref_policy is not None and config.ppo.uses_reference_scores
    return None if is_sampled and config.rollout.decoder != "sharded" else config


def require_dividable(config: PPOConfig) -> None:
    """Raise ConfigError for a copy of a divided policy in 4 bits."""
    divides_policy = to_divide(config, "policy") is not None
    in_4_bits = config.policy.lora is not None and config.policy.lora.quantize is not None
    if divides_policy and in_4_bits and config.rollout.decoder != "sharded":
        raise ConfigError(
            "policy.lora.quantize does not work with a policy that is divided among the processes, whose copy samples. "
            "Remove it, or set rollout.decoder: sharded or distributed.keep_whole: [policy]"
        )


class Sampler:
    """A whole copy of a sharded policy, from which a process samples.

    Create it before the policy is sharded. Each process holds it in the precision of the passes, but in float32 until
    the first sampling: while the run is set up, the decoder is compared with its forward pass.
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


def shard_models(models: Models, config: PPOConfig, device: torch.device) -> tuple[Sampler | None, list[str | None]]:
    """Divide the models that the config divides.

    Returns the copy of the policy that samples, if there is one, and notes for the user.
    """
    needs_copy = to_divide(config, "policy") is not None and config.rollout.decoder != "sharded"
    sampler = Sampler(models.policy, device, config.precision) if needs_copy else None
    notes: list[str | None] = []
    named: dict[PPOModelName, PreTrainedModel | None] = {
        "policy": models.policy,
        "ref_policy": models.ref_policy,
        "value_model": models.value_model,
    }
    for name, model in named.items():
        if model is not None and to_divide(config, name) is not None:
            notes.append(shard_for(config, model, device))
    if sampler is not None:
        sampler.refresh()
    return sampler, notes
