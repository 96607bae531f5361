"""What AdamW keeps of each weight, as a checkpoint holds it: a tensor with a row for each row of the weight.

Of a divided weight each process then writes and reads its rows, and the checkpoint is that of one process. In 8 bits a
moment is a byte and, for each block of 256 numbers, a scale. Two processes may hold two neighbouring rows of a divided
weight, so a block must lie within one row. A divided weight whose row length is not a multiple of 256 keeps its moments
in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlhf_cli.sharding import first_row, like, local
from rlhf_cli.training.checkpoint_shards import restored

BLOCK = 256
"""Numbers with one scale in the 8-bit AdamW of bitsandbytes."""
SAME_FOR_ALL = ("step", "qmap1", "qmap2")
"""What is the same on every process: the number of steps, and the tables from a byte to its value."""


def has_whole_blocks(weight: Tensor) -> bool:
    """Whether no block of 8-bit moments is in two rows that may be those of two processes."""
    return not isinstance(weight, DTensor) or math.prod(weight.shape[1:]) % BLOCK == 0


def saved_state(weight: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state of an optimizer for a weight, as tensors for a checkpoint."""
    found = {key: value if isinstance(value, Tensor) else torch.tensor(value) for key, value in state.items()}
    if not isinstance(weight, DTensor):
        return found
    num_rows, num_blocks = len(local(weight)), math.prod(weight.shape[1:]) // BLOCK
    for key, value in found.items():
        if key not in SAME_FOR_ALL and not isinstance(value, DTensor):
            shape = (num_rows, num_blocks) if key.startswith("absmax") else local(weight).shape
            found[key] = like(weight, value.view(shape))
    return found


def restored_state(weight: Tensor, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor | int]:
    """What the optimizer keeps of a weight, from a checkpoint.

    `names` are those in the checkpoint, by the optimizer's own. The 8-bit AdamW counts its steps in a Python integer.
    """
    first, count = first_row(weight), len(local(weight)) if weight.ndim else 0
    if "absmax1" in names and not has_whole_blocks(weight):
        step = {"step": int(tensors[names["step"]])}
        return step | {
            f"state{n}": _numbers(tensors, names, n)[first : first + count].to(weight.device) for n in (1, 2)
        }
    found: dict[str, Tensor | int] = {}
    for key, name in names.items():
        if key in SAME_FOR_ALL:
            value = tensors[name]
            found[key] = int(value) if value.dtype == torch.int64 else value
        elif key.startswith("absmax"):
            scales = tensors[name]
            if isinstance(weight, DTensor):
                scales = scales.reshape(len(weight), -1)[first : first + count]
            found[key] = scales.reshape(-1)
        else:
            value = restored(tensors, name, weight)
            found[key] = local(value) if key in ("state1", "state2") else value
    return found


def _numbers(tensors: Mapping[str, Tensor], names: Mapping[str, str], which: int) -> Tensor:
    """A moment of a whole weight in float32."""
    codes, scales = tensors[names[f"state{which}"]], tensors[names[f"absmax{which}"]].reshape(-1)
    numbers = tensors[names[f"qmap{which}"]][codes.long()]
    return (numbers.view(-1) * scales.repeat_interleave(BLOCK)[: numbers.numel()]).view(codes.shape)
