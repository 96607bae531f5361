"""Models whose weights are sharded among the processes, by torch's `fully_shard` (FSDP2).

Each process holds some rows of every weight, as a `DTensor`. Before a block of layers computes, the processes exchange
its rows, so that each has the whole block for a moment. A backward pass sums the gradients and leaves each process its
rows, which may wait in the CPU's memory (`distributed.offload`).

All processes must make the same number of passes of a sharded model, in the same order: see `microbatches.py`. If their
number is not known in advance, as in sampling, each is announced (`announce`), and a process that has made its last one
joins the others' (`join`). What reads weights besides the model's own forward, such as a head, must be `gathered`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=nn.Module)
LARGEST_FILE = 2_000_000_000
"""The most bytes in one file of a sharded model. The first process holds this much while it writes."""
BLOCK = 256
"""Numbers with one scale in the 8-bit AdamW of bitsandbytes."""
_open: set[int] = set()
"""The ids of the sharded models that a function under `gathered` now computes with."""


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def plain_class(model: nn.Module) -> type[nn.Module]:
    """The class of the model before it was sharded."""
    return type(model).__bases__[1] if is_sharded(model) else type(model)


def gathered(compute: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """Decorate a function of a model, its first argument: the weights outside of the blocks are whole while it runs.

    Each block gathers its own, as in a forward pass.
    """

    @functools.wraps(compute)
    def computed(model: M, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if not is_sharded(model) or id(model) in _open:
            return compute(model, *args, **kwargs)
        run: Callable[..., R] = model.run_gathered  # type: ignore[assignment]
        return run(compute, *args, **kwargs)

    return computed


def run_gathered(model: Any, compute: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """The method of a sharded model behind `gathered`: FSDP gathers before it and frees after it."""
    _open.add(id(model))
    # The model's own forward may run inside, and must not free the weights before the function has ended.
    model.set_reshard_after_forward(False, recurse=False)
    try:
        return compute(model, *args, **kwargs)
    finally:
        model.set_reshard_after_forward(True, recurse=False)
        _open.discard(id(model))


def announce(model: nn.Module) -> None:
    """Tell the processes in `join` that this one makes a pass of the model, if it is sharded."""
    if is_sharded(model):
        most(1)


def join(model: nn.Module, idle: Callable[[], object]) -> None:
    """Make a pass of a sharded model, `idle`, for each one that another process announces, until all are here."""
    while is_sharded(model) and most(0):
        idle()


def most(count: int) -> int:
    """The largest count of any process. All processes must call this."""
    if not dist.is_initialized():
        return count
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    largest = torch.tensor([count], device=device)
    begin_exchange()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest.item())


def is_first_process() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def local(tensor: Tensor) -> Tensor:
    """This process's rows of a sharded tensor, as a view of them; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A whole copy of a sharded tensor, on the device of every process; another tensor as it is.

    All processes must call this.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    rows = local(tensor).to(device_of_mesh(tensor.device_mesh))
    begin_exchange()
    return like(tensor, rows).full_tensor()  # type: ignore[attr-defined]


def device_of(model: nn.Module) -> torch.device:
    """The device on which the model computes. Offloaded weights are on the CPU between its passes."""
    weight = next(model.parameters())
    return device_of_mesh(weight.device_mesh) if isinstance(weight, DTensor) else weight.device


def device_of_mesh(mesh: DeviceMesh) -> torch.device:
    kind = mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def first_row(tensor: Tensor) -> int:
    """The number of the first row of `local`; 0 if the tensor is not sharded."""
    if not isinstance(tensor, DTensor):
        return 0
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    # As `torch.chunk` cuts them, among the processes of the last dimension of the mesh.
    return min(coordinate[-1] * -(-len(tensor) // mesh.size(mesh.ndim - 1)), len(tensor))


def has_whole_blocks(weight: Tensor) -> bool:
    """Whether no block of 8-bit moments is in rows of two processes."""
    return not isinstance(weight, DTensor) or math.prod(weight.shape[1:]) % BLOCK == 0


def like(tensor: Tensor, local_rows: Tensor) -> Tensor:
    """This process's rows, of any length, as a tensor that is sharded as `tensor` is, if it is."""
    if not isinstance(tensor, DTensor):
        return local_rows
    # `DTensor.from_local` would move rows that wait in the CPU's memory to the GPU.
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    shape = torch.Size((*tensor.shape[:1], *local_rows.shape[1:]))
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), local_rows.dtype)
    return DTensor(local_rows.detach(), DTensorSpec(tensor.device_mesh, tensor.placements, meta), requires_grad=False)


_begun = 0


def begin_exchange() -> None:
    """Count an exchange. All processes begin the same ones in the same order, so the counts tell who is behind."""
    global _begun
    _begun += 1


def num_begun() -> int:
    return _begun
