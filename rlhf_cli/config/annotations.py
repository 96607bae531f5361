"""Read the annotation of a schema's field: the branches of a union, the values of a Literal, a section's fields."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def alternatives(kind: Any) -> tuple[list[Any], str | None]:
    """The types that an annotation allows besides null, and the key that tells them apart, if there is one."""
    tag = None
    while True:
        if get_origin(kind) is Annotated:
            kind, *notes = get_args(kind)
            tags = [note.discriminator for note in notes if isinstance(note, FieldInfo)]
            tag = next((name for name in tags if isinstance(name, str)), tag)
        elif get_origin(kind) in (Union, UnionType):
            members = [member for member in get_args(kind) if member is not NoneType]
            if len(members) > 1:
                return members, tag
            kind = members[0]
        else:
            return [kind], tag


def child_kind(kind: Any, key: str | int) -> Any:
    """The annotation of the value at ``key`` inside a value of ``kind``; None if it is not known."""
    field = fields_of(kind).get(str(key))
    if field is not None:
        return Annotated[field.annotation, field]
    arguments = get_args(kind)
    if get_origin(kind) is tuple and Ellipsis not in arguments and isinstance(key, int):
        return arguments[key] if key < len(arguments) else None
    if get_origin(kind) is Literal or not arguments:
        return None
    return arguments[0] if isinstance(key, int) else arguments[-1]


def fields_of(kind: Any) -> dict[str, FieldInfo]:
    """The fields of a section by name; empty for anything else."""
    return kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else {}


def options_of(kinds: list[Any]) -> list[Any]:
    """The values that the Literals among some annotations allow."""
    return [option for kind in kinds if get_origin(kind) is Literal for option in get_args(kind)]


def tag_values(member: Any, tag: str) -> list[Any]:
    """The values of ``tag`` that choose this member of a tagged union."""
    field = fields_of(alternatives(member)[0][0]).get(tag)
    return options_of([field.annotation]) if field else []
