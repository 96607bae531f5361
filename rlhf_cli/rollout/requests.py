"""What a language model is asked to write, and what it answers. Shared by the local model and the chat server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rlhf_cli.data.records import Message


@dataclass(frozen=True)
class Drawing:
    """How answers are sampled."""

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float | None = None
    """Nucleus sampling: keep the smallest set of tokens whose probability reaches this."""
    max_new_tokens: int = 256
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """One prompt for the model."""

    messages: tuple[Message, ...]
    """A conversation that ends before the answer."""
    counters: tuple[int, ...]
    """Identify the draw (row, sample, attempt): the same counters draw the same answer, whatever else is asked."""

    @classmethod
    def of(cls, text: str, *counters: int) -> Request:
        """A request of one message."""
        return cls((Message("user", text),), counters)


@dataclass(frozen=True)
class Written:
    """An answer."""

    text: str
    ended: bool
    """False when the answer was cut at `max_new_tokens`."""


@dataclass(frozen=True)
class Failure:
    """Why a request has no answer."""

    reason: str
    fatal: bool = False
    """No further request can be answered, so the run must stop."""


class Writer(Protocol):
    """A source of answers."""

    def write(self, requests: Sequence[Request]) -> list[Written | Failure]:
        """One answer or Failure for each request, in order. A prompt that is too long does not end the run."""
