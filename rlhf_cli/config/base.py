"""The base of every section of a config file, and the ranges of its numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]

FILLED = "filled"
"""Marks a text field in which `{seed}` or another key in braces stands for that key's value."""


class Section(BaseModel):
    """A mapping of the YAML file: unknown keys are refused and nothing changes after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def refuse_unread(section: Section, is_read: bool, chosen: str, *names: str) -> None:
    """Refuse keys that were changed from their defaults while the choice made means that nothing reads them."""
    if is_read:
        return
    for name in names:
        if getattr(section, name) != type(section).model_fields[name].default:
            raise ValueError(f"{name} does nothing with {chosen}. Remove it, or choose otherwise")
