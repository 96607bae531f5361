"""Saving what a run needs to go on, without keeping it waiting, and finding it again.

A run's state is a few named parts, each of which gives tensors and plain numbers and takes them back. The tensors
are copied to the CPU while training waits, and written by a thread while it goes on; the next checkpoint waits for
the one before. Nothing is pickled: tensors are safetensors, numbers are JSON.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rlhf_cli.errors import ArtifactError
from rlhf_cli.training.checkpoint_files import found, new_checkpoint, remove_old, step_of, what_is_wrong
from rlhf_cli.training.memory import is_out_of_memory

TENSORS, NUMBERS = "state.safetensors", "numbers.json"

State = tuple[dict[str, torch.Tensor], dict[str, Any]]


class Part(Protocol):
    """Something that a run carries from step to step."""

    def state(self) -> State:
        """Its tensors by name, as they are (not copies), and its numbers, of JSON values. Every process is asked."""

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Become what `state` gave on the first process."""


class Weights:
    """The trained weights of a model; those that are not trained come from where they came from."""

    def __init__(self, model: torch.nn.Module):
        self.model = model

    def state(self) -> State:
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}, {}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:  # noqa: ARG002
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        assert trained.keys() == tensors.keys(), "the identity of the run says that it is the same model"
        for name, p in trained.items():
            p.copy_(tensors[name])


def copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies on the CPU, of what is there already too: training goes on while they are written."""
    return {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


class Checkpoints:
    """The checkpoints of one run; only the first process writes, all read."""

    def __init__(self, place: Path, *, keep: int, writes: bool):
        self.place, self.keep, self.writes = place, keep, writes
        self.parts: dict[str, Part] = {}
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int) -> float:
        """Take a copy of the state after `step` and have it written; returns the seconds that it kept the run.

        Where there is no memory for a copy it is written here and now. Raises what went wrong with the checkpoint
        before.
        """
        started = time.monotonic()
        self.wait()
        states = {name: part.state() for name, part in self.parts.items()}
        if self.writes:
            live = {f"{name}/{key}": t.detach() for name, (own, _) in states.items() for key, t in own.items()}
            numbers = json.dumps({name: own for name, (_, own) in states.items()})
            try:
                copies = copied(live)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                self._write(step, {name: tensor.contiguous() for name, tensor in live.items()}, numbers)
                self.wait()
            else:
                self._writer = threading.Thread(target=self._write, args=(step, copies, numbers))
                self._writer.start()
        return time.monotonic() - started

    def not_finite(self) -> str | None:
        """The name of a weight that is no number, if there is one: from such a state nothing can go on."""
        for part in self.parts.values():
            if isinstance(part, Weights):
                for name, weight in part.state()[0].items():
                    if not weight.isfinite().all():
                        return name
        return None

    def wait(self) -> None:
        """Wait for the checkpoint that is being written; raises what went wrong with it."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._error is not None:
            error, self._error = self._error, None
            # safetensors writes from Rust and tells of a full disk in an error of its own.
            if isinstance(error, OSError | SafetensorError):
                reason = (error.strerror if isinstance(error, OSError) else None) or error
                raise ArtifactError(
                    f"{self.place}: a checkpoint can't be written ({reason}); those from before it stand. Make room, "
                    "and start again to go on"
                ) from None
            raise error

    def newest(self, unusable: Callable[[Mapping[str, Any]], str | None]) -> tuple[Path | None, dict[Path, str]]:
        """The newest checkpoint that is as it was written, and what is wrong with each newer one.

        `unusable` says of a checkpoint's numbers why they can't be gone on from, if they can't.
        """
        wrong_ones: dict[Path, str] = {}
        for path in reversed(found(self.place)):
            wrong = what_is_wrong(path)
            if wrong is None:
                numbers = json.loads((path / NUMBERS).read_text(encoding="utf-8"))
                other = sorted(numbers.keys() ^ self.parts.keys())
                wrong = f"another version wrote it ({', '.join(other)})" if other else unusable(numbers)
            if wrong is None:
                return path, wrong_ones
            wrong_ones[path] = wrong
        return None, wrong_ones

    def restore(self, path: Path) -> int:
        """Put every part into the state of a checkpoint; returns its step."""
        tensors, numbers = load_file(path / TENSORS), json.loads((path / NUMBERS).read_text(encoding="utf-8"))
        for name, part in self.parts.items():
            own = {key.removeprefix(f"{name}/"): t for key, t in tensors.items() if key.startswith(f"{name}/")}
            part.restore(own, numbers[name])
        return step_of(path)

    def _write(self, step: int, tensors: dict[str, torch.Tensor], numbers: str) -> None:
        try:
            with new_checkpoint(self.place, step) as directory:
                save_file(tensors, directory / TENSORS)
                (directory / NUMBERS).write_text(numbers, encoding="utf-8")
            remove_old(self.place, self.keep)
        except BaseException as error:
            self._error = error
