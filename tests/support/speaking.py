"""A loaded model that speaks, and its replies to a conversation as `rlhf chat` draws them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlhf_cli.commands.chat import ChatSettings, Session
from rlhf_cli.data.records import Message
from rlhf_cli.rollout.speaker import Reply, Speaker
from rlhf_cli.trained.model import Quantize, find_model
from support.tiny import CPU


def speaker_at(directory: Path, stage: str | None = None, quantization: Quantize | None = None) -> Speaker:
    return find_model(str(directory), stage).speaker(CPU, quantization)


def session(speaker: Speaker, *, interactive: bool = False, **settings: Any) -> Session:
    return Session(speaker, ChatSettings(**settings), interactive=interactive)


def reply(
    speaker: Speaker, messages: Sequence[Message], on_text: Callable[[str], object] = len, **settings: Any
) -> Reply:
    """The first reply of a conversation."""
    return session(speaker, **settings).reply(messages, on_text)  # type: ignore[arg-type]
