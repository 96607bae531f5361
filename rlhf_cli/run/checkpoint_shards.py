"""The tensors of a checkpoint in one file, or, for sharded models, in one file of each process.

    state.safetensors                    every tensor
    state-00001-of-00004.safetensors     the rows of the first process, and all tensors that are not sharded

Each file of the second kind says in its header which row of a tensor its first one is. So a checkpoint is read by any
number of processes, each of which reads its own rows only, and by a run that is not sharded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlhf_cli.processes.sharding import first_row, like, local

FIRST_ROWS = "first_rows"
"""The entry of a file's header: the number of the first row of each tensor, as JSON."""


@dataclass(frozen=True)
class Piece:
    """Rows of a tensor in a file."""

    file: Path
    first: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.first + (self.shape[0] if self.shape else 1)


class SavedTensors(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint by name. A tensor is read when it is asked for."""

    def __init__(self, pieces: Mapping[str, list[Piece]], prefix: str = ""):
        self._pieces, self._prefix = pieces, prefix
        self._names = [name.removeprefix(prefix) for name in pieces if name.startswith(prefix)]

    @classmethod
    def of(cls, checkpoint: Path) -> SavedTensors:
        """The tensors of the checkpoint in this directory."""
        pieces: dict[str, list[Piece]] = {}
        for path in sorted(checkpoint.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                first_rows = json.loads((file.metadata() or {}).get(FIRST_ROWS, "{}"))
                for name in file.keys():  # noqa: SIM118
                    shape = tuple(file.get_slice(name).get_shape())
                    pieces.setdefault(name, []).append(Piece(path, first_rows.get(name, 0), shape))
        return cls(pieces)

    def part(self, prefix: str) -> SavedTensors:
        """The tensors whose names begin with `prefix`, without it."""
        return SavedTensors(self._pieces, prefix)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> torch.Tensor:
        pieces = self._pieces[self._prefix + name]
        return (
            self.rows(name, 0, max(piece.end for piece in pieces)) if pieces[0].shape else self._read(name, pieces[0])
        )

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        """`count` rows of a tensor, from the row `first` on."""
        pieces = sorted(self._pieces[self._prefix + name], key=lambda piece: piece.first)
        parts = [
            self._read(name, piece, max(first, piece.first) - piece.first, min(first + count, piece.end) - piece.first)
            for piece in pieces
            if piece.first < first + count and first < piece.end
        ]
        if sum(map(len, parts)) != count:
            raise ValueError(f"{self._prefix}{name} has fewer rows than the model's weight")
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else self._read(name, pieces[0], 0, 1)[:0]

    def _read(self, name: str, piece: Piece, start: int = 0, end: int = 0) -> torch.Tensor:
        with safe_open(piece.file, framework="pt") as file:
            tensor: torch.Tensor = (
                file.get_slice(self._prefix + name)[start:end] if end else file.get_tensor(self._prefix + name)
            )
        return tensor


def restored(tensors: Mapping[str, torch.Tensor], name: str, target: torch.Tensor) -> torch.Tensor:
    """The saved values for a weight: of a sharded one this process's rows, sharded as `target` is."""
    if not isinstance(target, DTensor):
        return tensors[name]
    first, count = first_row(target), len(local(target))
    rows = (
        tensors.rows(name, first, count) if isinstance(tensors, SavedTensors) else tensors[name][first : first + count]
    )
    return like(target, rows.to(target.device))


def save_rows(tensors: Mapping[str, torch.Tensor], directory: Path, rank: int, num_processes: int) -> Path | None:
    """Write this process's file: its rows of sharded tensors, on the first process also the others.

    Where machines hold copies of each other only the first one writes. Returns the file, or None if there is none.
    """
    mine = {name: t for name, t in tensors.items() if (_is_first_copy(t) if isinstance(t, DTensor) else rank == 0)}
    if not mine:
        return None
    first_rows = {name: first_row(t) for name, t in mine.items() if isinstance(t, DTensor)}
    path = directory / f"state-{rank + 1:05}-of-{num_processes:05}.safetensors"
    values = {name: local(t).detach().cpu() for name, t in mine.items()}
    values = {name: value for name, value in values.items() if value.numel() or name not in first_rows}
    save_file(apart(values), path, metadata={FIRST_ROWS: json.dumps(first_rows)})
    return path


def apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as safetensors takes them: contiguous, and a copy of each that shares memory with an earlier one."""
    found: dict[str, torch.Tensor] = {}
    known: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.contiguous()
        address = plain.untyped_storage().data_ptr()
        found[name] = plain.clone() if address in known else plain
        known.add(address)
    return found


def _is_first_copy(tensor: DTensor) -> bool:
    """Whether this process is in the first of the groups that hold the same rows."""
    where = tensor.device_mesh.get_coordinate()
    return where is not None and not any(where[:-1])


# ------------------------------------------------------------------------------------- what AdamW keeps of each weight
#
# It is a tensor with a row for each row of the weight, so a checkpoint of several processes is that of one. In 8 bits
# a moment is a byte and, for each block of 256 numbers, a scale. Two processes may hold two neighbouring rows of a
# sharded weight, so a block must lie within one row. A sharded weight whose row length is not a multiple of 256 keeps
# its moments in float32.


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
