"""Saves the state of a run in the background, and restores it.

The state of a run is a set of named objects (`Stateful`), each of which gives tensors and plain numbers. Training waits
while the tensors are copied to the CPU, and goes on while a thread writes them. Nothing is pickled: tensors are
safetensors, numbers are JSON. Of sharded models each process writes its own rows, while training waits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from rlhf_cli.errors import ArtifactError
from rlhf_cli.files import JsonLines, digest_file, digest_once, link, read_text
from rlhf_cli.processes.distributed import ALONE, World
from rlhf_cli.processes.sharding import first_row, like, local
from rlhf_cli.run import artifacts
from rlhf_cli.run.checkpoint_files import MEMBERS, damage_of, list_checkpoints, new_checkpoint, remove

TENSORS, NUMBERS = "state.safetensors", "numbers.json"

State = tuple[dict[str, torch.Tensor], dict[str, Any]]
"""Tensors by name, and numbers as JSON values."""


class Stateful(Protocol):
    def state(self) -> State:
        """Its tensors (not copies) and its numbers. Called on every process."""

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Take over what `state` returned on the first process."""


class Weights:
    """The trained weights of a model. Frozen weights are not saved; they are loaded from their source again."""

    def __init__(self, model: torch.nn.Module):
        self.model = model

    def state(self) -> State:
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}, {}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:  # noqa: ARG002
        trained, _ = self.state()
        assert trained.keys() == tensors.keys(), "a run with the same identity has the same model"
        for name, p in trained.items():
            local(p).copy_(local(restored(tensors, name, p)))


class CheckpointStore:
    """The checkpoints of one run. Only the first process writes, but for rows of sharded models; all processes read."""

    def __init__(self, directory: Path, *, keep: int, world: World = ALONE):
        self.directory, self.keep, self.world = directory, keep, world
        self._absolute = directory.absolute()  # a reward function may change the directory while the thread writes
        self.parts: dict[str, Stateful] = {}
        """The objects whose state is saved, by name."""
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int) -> None:
        """Copy the state after `step` and start to write it; raises the error of the previous checkpoint, if any."""
        self.wait()
        states = {name: part.state() for name, part in self.parts.items()}
        live = {f"{name}/{key}": t.detach() for name, (tensors, _) in states.items() for key, t in tensors.items()}
        numbers = json.dumps({name: values for name, (_, values) in states.items()})
        if any(isinstance(tensor, DTensor) for tensor in live.values()):
            self._write_shards(step, live, numbers)
        elif self.world.is_main:
            # Copies also of CPU tensors, which training changes while they are written.
            copies = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in live.items()}
            self._writer = threading.Thread(target=self._write, args=(step, copies, numbers))
            self._writer.start()

    def not_finite(self) -> str | None:
        """The name of the first weight with a NaN or infinite value, in this process's rows; None if all are finite."""
        models = [part.state()[0] for part in self.parts.values() if isinstance(part, Weights)]
        weights = ((name, local(weight)) for model in models for name, weight in model.items())
        return next((name for name, weight in weights if not weight.isfinite().all()), None)

    def wait(self) -> None:
        """Wait until the current checkpoint is written; raises its error, if it had one."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._error is not None:
            error, self._error = self._error, None
            if not self.directory.is_dir():
                raise ArtifactError(f"{self.directory}: was removed during a checkpoint. Run the same command again")
            # safetensors writes from Rust and reports a full disk with its own exception.
            if isinstance(error, OSError | SafetensorError):
                raise self._unwritable(getattr(error, "strerror", None) or error) from None
            raise error

    def newest(self, unusable: Callable[[Mapping[str, Any]], str | None]) -> tuple[Path | None, dict[Path, str]]:
        """The newest usable checkpoint, and why each newer one is not: damage, or the answer of `unusable`."""
        rejected: dict[Path, str] = {}
        for path in reversed(list_checkpoints(self.directory)):
            reason = damage_of(path)
            if reason is None:
                numbers = json.loads(read_text(path / NUMBERS))
                other = sorted(numbers.keys() ^ self.parts.keys())
                reason = f"another version of rlhf wrote it ({', '.join(other)})" if other else unusable(numbers)
            if reason is None:
                return path, rejected
            rejected[path] = reason
        return None, rejected

    def restore(self, path: Path) -> None:
        tensors, numbers = SavedTensors.of(path), json.loads((path / NUMBERS).read_text(encoding="utf-8"))
        try:
            for name, part in self.parts.items():
                part.restore(tensors.part(f"{name}/"), numbers[name])
        except (ValueError, TypeError, KeyError, AttributeError) as error:  # of another version
            raise ArtifactError(
                f"{path}: {name} cannot be restored from its {NUMBERS} ({type(error).__name__}: {error}). Remove the "
                "checkpoint to resume from an older one, or pass --restart to start over"
            ) from None

    def _write_shards(self, step: int, tensors: dict[str, torch.Tensor], numbers: str) -> None:
        """Write a checkpoint of sharded models, together with the other processes."""
        world, digests = self.world, dict[str, str]()
        # The first process makes the folder before the others write into it, and completes it after them.
        with self._new(step, numbers, digests) if world.is_main else contextlib.nullcontext() as made:
            directory = world.gather(made)[0]
            problem, own = "", None
            try:
                own = save_rows(tensors, directory, world.rank, world.size)
            except (OSError, SafetensorError) as error:
                problem = str(error)
            world.barrier("the checkpoint to be written")  # a slow disk may take longer than a collective operation
            everyone = world.gather((problem, own and (own.name, digest_file(own))))
            for text, file in everyone:
                if text:
                    raise self._unwritable(text)
                digests |= dict([file] if file else [])
        world.barrier()

    def _unwritable(self, reason: object) -> ArtifactError:
        return ArtifactError(
            f"{self.directory}: could not write a checkpoint ({reason}); earlier ones are intact. Free disk "
            "space and run the same command to resume"
        )

    def _write(self, step: int, tensors: dict[str, torch.Tensor], numbers: str) -> None:
        try:
            with self._new(step, numbers, {}) as directory:
                save_file(tensors, directory / TENSORS)
        except BaseException as error:
            self._error = error

    @contextlib.contextmanager
    def _new(self, step: int, numbers: str, digests: dict[str, str]) -> Iterator[Path]:
        """`new_checkpoint` with these numbers. Afterwards the oldest ones are removed."""
        with new_checkpoint(self._absolute, step, digests) as directory:
            yield directory
            (directory / NUMBERS).write_text(numbers, encoding="utf-8")
        remove(list_checkpoints(self._absolute)[: -self.keep])


# ----------------------------------- the directory of a running stage, whose content belongs to the state that is saved


NOTHING_WRITTEN: dict[str, Any] = {"sizes": {}, "folders": [], "seconds": 0.0, "held_out": {}}
"""The state before the first checkpoint."""


BEFORE = ".before"
"""Ends the name of a folder that the newest checkpoint has, and that was written again since."""


class StageFiles:
    """What a stage has written, and its running time. Only the first process writes, saves and restores it."""

    def __init__(self, directory: Path, *, writes: bool):
        self.directory, self.writes = directory, writes
        self.started = time.monotonic()
        self.latest: dict[str, float] = {}
        """The latest value of each metric beside the progress. A checkpoint stores the held-out ones."""
        self._rows: dict[str, JsonLines] = {}
        self._held: set[str] = set()
        """The folders that the newest checkpoint has and that are as they were then."""

    def set_aside(self, name: str, *, copy: bool = False) -> None:
        """Call before the folder `name` is written again, or changed (`copy`): a resume may need it as it is."""
        path, before = self.directory / name, self.directory / (name + BEFORE)
        if name in self._held:
            self._held.remove(name)
            shutil.rmtree(before, ignore_errors=True)
            shutil.copytree(path, before, copy_function=link) if copy else path.rename(before)
        elif not copy:
            shutil.rmtree(path, ignore_errors=True)

    def rows(self, name: str) -> JsonLines:
        if name not in self._rows:
            self._rows[name] = JsonLines(self.directory / f"{name}.jsonl")
        return self._rows[name]

    def paths(self) -> list[Path]:
        return [file.path for file in self._rows.values()]

    def seconds(self) -> float:
        """Seconds that the stage has run, also before an interruption."""
        return round(time.monotonic() - self.started, 3)

    def close(self) -> None:
        for file in self._rows.values():
            file.close()

    def state(self) -> State:
        if not self.writes:
            return {}, {}
        artifacts.sync_tree(self.directory)
        digests = {f"{name}.jsonl": file.digest() for name, file in self._rows.items()}
        folders = sorted(path for path in self.directory.iterdir() if path.is_dir() and path.suffix != BEFORE)
        self._held = {folder.name for folder in folders}
        for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
            digests[path.relative_to(self.directory).as_posix()] = digest_once(path)
        return {}, {
            "sizes": {name: file.size for name, file in self._rows.items()},
            "digests": digests,
            "folders": [folder.name for folder in folders],
            "seconds": self.seconds(),
            "held_out": {k: value for k, value in self.latest.items() if k.startswith(("eval/", "validation/"))},
        }

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Remove everything written after the checkpoint: rows, models, the manifest of an unfinished publication."""
        if not self.writes:
            return
        self.started -= numbers["seconds"]
        self.latest = dict(numbers["held_out"])
        for folder in numbers["folders"]:
            if (place := self._place(folder, numbers)).suffix == BEFORE:
                shutil.rmtree(self.directory / folder, ignore_errors=True)
                place.rename(self.directory / folder)
        self._held = set(numbers["folders"])
        kept = {"config.yaml", MEMBERS, *(f"{name}.jsonl" for name in numbers["sizes"]), *numbers["folders"]}
        for path in self.directory.iterdir():
            if path.name not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name, size in numbers["sizes"].items():
            os.truncate(self.directory / f"{name}.jsonl", size)
            self._rows[name] = JsonLines(self.directory / f"{name}.jsonl")

    def mismatch(self, numbers: Mapping[str, Any]) -> str | None:
        """Why the directory lacks the rows and models of a checkpoint with these numbers; None if it has them."""
        if any("/" in name for name in numbers["sizes"]):
            return "it names a file outside the stage"
        for name, digest in numbers["digests"].items():
            folder, _, file = name.rpartition("/")
            path, size = self._place(folder, numbers) / file, numbers["sizes"].get(name.removesuffix(".jsonl"))
            if not path.is_file():
                return f"{name} is missing"
            with path.open("rb") as file:  # rows may follow that were written after the checkpoint
                present = digest_once(path) if size is None else hashlib.sha256(file.read(size)).hexdigest()
            if present != digest:
                return f"{name} was modified after it was saved"
        return None

    def _place(self, folder: str, numbers: Mapping[str, Any]) -> Path:
        """Where a folder is as a checkpoint with these numbers has it: under its name, or set aside."""
        top, _, rest = folder.partition("/")
        before = self.directory / (top + BEFORE)
        if not top or not before.is_dir():
            return self.directory / folder
        own = {
            name.partition("/")[2]: digest for name, digest in numbers["digests"].items() if name.startswith(f"{top}/")
        }
        found = all((before / name).is_file() and digest_once(before / name) == own[name] for name in own)
        return (before if found else self.directory / top) / rest


# ---------------------- the tensors of a checkpoint: in one file or, for sharded models, in one file of each process
#
#     state.safetensors                    every tensor
#     state-00001-of-00004.safetensors     the rows of the first process, and all tensors that are not sharded
#
# A header of the second kind says which row of a tensor is the file's first. So any number of processes can resume,
# sharded or not, and each reads its own rows only.


FIRST_ROWS = "first_rows"
"""The entry of a file's header: the number of the first row of each tensor, as JSON."""


@dataclass(frozen=True)
class Piece:
    """Rows of a tensor in a file."""

    file: Path
    name: str
    first: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.first + (self.shape[0] if self.shape else 1)

    def read(self, first: int, end: int) -> torch.Tensor:
        """The rows from `first` to `end` that are in this file."""
        with safe_open(self.file, framework="pt") as file:
            if not self.shape:
                return file.get_tensor(self.name)
            rows = slice(max(first, self.first) - self.first, min(end, self.end) - self.first)
            return file.get_slice(self.name)[rows]


class SavedTensors(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint by name. A tensor is read when it is asked for."""

    def __init__(self, pieces: Mapping[str, list[Piece]]):
        self._pieces = pieces

    @classmethod
    def of(cls, checkpoint: Path) -> SavedTensors:
        """The tensors of the checkpoint in this directory."""
        pieces: dict[str, list[Piece]] = {}
        for path in sorted(checkpoint.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                first_rows = json.loads((file.metadata() or {}).get(FIRST_ROWS, "{}"))
                for name in file.keys():  # noqa: SIM118
                    shape = tuple(file.get_slice(name).get_shape())
                    pieces.setdefault(name, []).append(Piece(path, name, first_rows.get(name, 0), shape))
        return cls(pieces)

    def part(self, prefix: str) -> SavedTensors:
        """The tensors whose names begin with `prefix`, without it."""
        own = (name for name in self._pieces if name.startswith(prefix))
        return SavedTensors({name.removeprefix(prefix): self._pieces[name] for name in own})

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, name: str) -> torch.Tensor:
        pieces = self._pieces[name]
        return self.rows(name, 0, max(piece.end for piece in pieces)) if pieces[0].shape else pieces[0].read(0, 1)

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        """`count` rows of a tensor, from the row `first` on."""
        pieces, end = sorted(self._pieces[name], key=lambda piece: piece.first), first + count
        parts = [piece.read(first, end) for piece in pieces if piece.first < end and first < piece.end]
        if sum(map(len, parts)) != count:
            raise ValueError(f"{pieces[0].name} has fewer rows than the model's weight")
        return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else pieces[0].read(0, 1)[:0]


def restored(tensors: Mapping[str, torch.Tensor], name: str, target: torch.Tensor) -> torch.Tensor:
    """The saved values for a weight; for a sharded one this process's rows, sharded as `target` is."""
    if not isinstance(target, DTensor):
        return tensors[name]
    first, count = first_row(target), len(local(target))
    rows = tensors.rows(name, first, count) if isinstance(tensors, SavedTensors) else tensors[name][first:][:count]
    return like(target, rows.to(target.device))


def save_rows(tensors: Mapping[str, torch.Tensor], directory: Path, rank: int, num_processes: int) -> Path | None:
    """Write this process's rows of sharded tensors and, on the first process, the others; None if it has none."""

    def writes(tensor: torch.Tensor) -> bool:
        if not isinstance(tensor, DTensor):
            return rank == 0
        where = tensor.device_mesh.get_coordinate()
        return where is not None and not any(where[:-1])  # of machines that hold copies of each other, the first

    mine = {name: tensor for name, tensor in tensors.items() if writes(tensor)}
    if not mine:
        return None
    first_rows = {name: first_row(t) for name, t in mine.items() if isinstance(t, DTensor)}
    path = directory / f"state-{rank + 1:05}-of-{num_processes:05}.safetensors"
    rows = {name: local(t).detach().cpu().contiguous() for name, t in mine.items() if name in first_rows}
    values = {name: value for name, value in rows.items() if value.numel()}
    # 8-bit AdamW has one table for all weights, and safetensors takes no tensors that share memory.
    values |= {name: t.detach().to("cpu", copy=True).contiguous() for name, t in mine.items() if name not in rows}
    save_file(values, path, metadata={FIRST_ROWS: json.dumps(first_rows)})
    return path
