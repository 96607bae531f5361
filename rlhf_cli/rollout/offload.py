"""Weights and moments that wait in the CPU's memory while no phase of an iteration uses them.

    phase      optimizer   frozen models
    sampling   CPU         CPU
    scoring    CPU         device
    update     device      CPU

Moving a tensor keeps its bits, so no result changes. Frozen weights are copied to the CPU once and later only dropped
from the device; the moments are copied in both directions in each iteration. Pinned memory makes these copies faster.
Each process moves its rows of sharded moments. A sharded frozen model is not moved here: torch keeps its rows on the
CPU and copies each block for its passes (`rlhf_cli.models.shard`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_cli.processes.sharding import like, local

CPU = torch.device("cpu")


class Offload:
    """Moves the weights of `frozen` models and the state of `optimizers` between a device and the CPU.

    Weights that frozen models share with the `shared` ones stay on the device. `update_needs_frozen`: the update runs a
    frozen model.
    """

    def __init__(
        self,
        device: torch.device,
        frozen: Sequence[PreTrainedModel],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        shared: Iterable[PreTrainedModel] = (),
        update_needs_frozen: bool = False,
    ):
        self.device, self.frozen, self.optimizers = device, frozen, optimizers
        self.update_needs_frozen = update_needs_frozen
        stay = {id(p) for model in shared for p in model.parameters()}
        self._weights = {id(p): p for model in frozen for p in model.parameters() if id(p) not in stay}
        self._on_cpu: dict[int, Tensor] = {}  # the CPU copies of the frozen weights, made once
        self._frozen_are_away = False
        self._moments_are_away = False

    def sampling(self, policy: PreTrainedModel) -> None:
        """Before `policy` is sampled from: nothing else is needed on the device."""
        self._move_moments(away=True)
        if any(policy is model for model in self.frozen):
            self.scoring()
        else:
            self._park_frozen()

    def scoring(self) -> None:
        """Before frozen models run."""
        if self._frozen_are_away:
            for number, weight in self._weights.items():
                weight.data = _copied(self._on_cpu[number], self.device)
            self._frozen_are_away = False

    @contextmanager
    def update(self) -> Iterator[None]:
        """Within this context optimizers may step."""
        if self.update_needs_frozen:
            self.scoring()
        else:
            self._park_frozen()
        self._move_moments(away=False)
        yield
        self._move_moments(away=True)

    def _park_frozen(self) -> None:
        if not self._frozen_are_away:
            for number, weight in self._weights.items():
                if number not in self._on_cpu:
                    self._on_cpu[number] = _copied(weight.data, CPU)
                weight.data = self._on_cpu[number]
            self._frozen_are_away = True

    def _move_moments(self, *, away: bool) -> None:
        """Move every state tensor that has as many numbers as its weight; others are small or counts."""
        if away == self._moments_are_away or not any(optimizer.state for optimizer in self.optimizers):
            return  # before the first step there are none, and a run that is resumed reads them after it has sampled
        for optimizer in self.optimizers:
            for weight, state in optimizer.state.items():
                for name, tensor in state.items():
                    if isinstance(tensor, Tensor) and local(tensor).shape == local(weight).shape:
                        state[name] = like(tensor, _copied(local(tensor), CPU if away else self.device))
        self._moments_are_away = away


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on another device; one on the CPU is in pinned memory if it comes from a GPU."""
    if device.type == "cpu" and tensor.device.type == "cuda":
        pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return pinned.copy_(tensor)
    return tensor.to(device, copy=True)
