"""The tensors of a checkpoint in one file, or, for sharded models, in one file of each process.

    state.safetensors                    every tensor
    state-00001-of-00004.safetensors     the rows of the first process, and all tensors that are not sharded

Each file of the second kind says in its header which row of a tensor its first one is. So a checkpoint is read by any
number of processes, each of which reads its own rows only, and by a run that is not sharded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
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
