"""The 8-bit AdamW of bitsandbytes (Dettmers et al. 2022), which also steps weights that are sharded among processes."""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.optim import AdamW8bit
from torch import nn
from torch.distributed.tensor import DTensor

from rlhf_cli.processes.sharding import has_whole_blocks, local


class ShardedAdamW8bit(AdamW8bit):
    """bitsandbytes reads weights by their address, which a `DTensor` lacks. So it gets this process's rows.

    Whether a weight has 8-bit moments is decided by its whole size, as in one process (`has_whole_blocks`).
    """

    def get_config(self, group_number: int, number: int, group: dict[str, Any]) -> dict[str, Any]:
        config: dict[str, Any] = super().get_config(group_number, number, group)
        weight = group["params"][number]
        if isinstance(weight, DTensor):
            is_large = weight.numel() >= config["min_8bit_size"] and has_whole_blocks(weight)
            config["min_8bit_size"] = 0 if is_large else weight.numel() + 1
        return config

    @torch.no_grad()
    def init_state(self, group: dict[str, Any], weight: nn.Parameter, group_number: int, number: int) -> None:
        rows = nn.Parameter(local(weight).detach(), requires_grad=False)
        super().init_state(group, rows, group_number, number)
        self.state[weight] = self.state.pop(rows)

    @torch.no_grad()
    def update_step(self, group: dict[str, Any], weight: nn.Parameter, group_number: int, number: int) -> None:
        if not isinstance(weight, DTensor):
            super().update_step(group, weight, group_number, number)
            return
        rows = nn.Parameter(local(weight).detach(), requires_grad=False)
        rows.grad = local(weight.grad) if weight.grad is not None else None
        if not rows.numel():
            self.state[weight]["step"] += 1
            return
        self.state[rows] = self.state[weight]
        super().update_step(group, rows, group_number, number)
        del self.state[rows]
