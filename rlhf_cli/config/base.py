"""The base of every section of a config file, and the ranges of its numbers.

A config file is one frozen pydantic model per stage. No module here imports torch, so that a wrong key is
reported immediately. A derived number is a property, never a field. Every field is read by some code, which
tests/config/test_config_schemas.py checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
BelowHalf = Annotated[float, Field(ge=0, lt=0.5)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def expand_home(path: str) -> str:
    """A path with `~` at its start replaced by the home directory; others, and hub ids, as they are."""
    if not path.startswith("~"):
        return path
    try:
        return str(Path(path).expanduser())
    except RuntimeError:
        raise ValueError(f"{path}: the home directory is not known. Write the path out") from None


EXPANDED = AfterValidator(expand_home)
LocalPath = Annotated[str, EXPANDED]
"""A path or a hub id."""
REMOVED = {"rollout.engine": "own", "rollout.engine_memory": 0.4, "rollout.max_staleness": 0, "track_model": False}
"""Keys that only earlier versions had, each with the value that means what every run does now. With it a key is
ignored, so that configs and runs of those versions can be read."""


class UnreadError(ValueError):
    """Keys of a section that nothing reads with the option that was chosen, each with its message."""

    def __init__(self, messages: dict[str, str]):
        super().__init__("; ".join(messages.values()))
        self.messages = messages


class Section(BaseModel):
    """A mapping in the YAML file. Unknown keys are refused, and values cannot change after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def rules(self) -> Iterator[str]:
        """What is wrong with the combination of keys, a message for each rule that is broken. The first is reported."""
        yield from ()

    def refuse_unread(self, is_read: bool, chosen: str, *names: str) -> None:
        """Raise UnreadError for keys that differ from their defaults although nothing reads them with the option that
        was chosen. Null counts as the default."""
        fields = type(self).model_fields
        defaults = {name: fields[name].get_default(call_default_factory=True) for name in names}
        unread = [name for name in names if getattr(self, name) not in (defaults[name], None)]
        if unread and not is_read:
            advice = "Remove it (`--set` with null does so), or choose another option"
            raise UnreadError({name: f"{name} does nothing with {chosen}. {advice}" for name in unread})

    @model_validator(mode="after")
    def _obeys_rules(self) -> Self:
        if (message := next(self.rules(), None)) is not None:
            raise ValueError(message)
        return self
