"""Turn pydantic's validation errors into lines of the form ``found ..., must be ...; what to do``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlhf_cli.config.yaml_text import SCALARS
from rlhf_cli.printing import Keys, did_you_mean, found, plain

FEW_KEYS = 12
"""List the valid keys in a message only if there are at most this many."""

KEY_SYNONYMS = {
    "lr": "learning_rate",
    "epochs": "num_epochs",
    "num_train_epochs": "num_epochs",
    "steps": "num_steps",
    "max_steps": "num_steps",
    "batch_size": "minibatch_size",
    "mini_batch_size": "minibatch_size",
    "lr_scheduler_type": "schedule",
    "scheduler": "schedule",
    "max_seq_length": "max_length",
    "kl_penalty": "kl_coef",
    "init_kl_coef": "kl_coef",
    "beta": "kl_coef",
    "cliprange": "clip_range",
    "epsilon": "clip_range",
    "lam": "gae_lambda",
    "lambda": "gae_lambda",
    "entropy_bonus": "entropy_coef",
    "num_generations": "samples_per_prompt",
    "max_tokens": "max_new_tokens",
    "output_dir": "artifacts",
    "dtype": "precision",
}
"""Names from other libraries. A name counts only where its translation is a valid key."""

NO_DROPOUT = (
    "dropout is not offered: two passes of the same weights would differ, so the ratio would not be 1 before PPO's "
    "first step, and runs would not repeat. Remove it"
)
NO_ENGINE = (
    "there are no other engines any more, rollout.decoder samples. Remove the key. For vLLM, `rlhf export` writes the "
    "trained model"
)
NOT_OFFERED = {
    **dict.fromkeys(("dropout", "lora_dropout", "actor_dropout", "critic_dropout", "disable_dropout"), NO_DROPOUT),
    "add_tokens": "add_tokens belongs to the SFT stage, which learns the tokens. RM and PPO read the tokenizer of that "
    "stage, and a reward model with another tokenizer reads text",
    "track_model": "models are not sent to trackers any more. Remove the key. `rlhf push` uploads one to the hub",
    **dict.fromkeys(("engine", "engine_memory", "max_staleness"), NO_ENGINE),
    "<<": "mappings are not merged in a file. Write the keys out, or take them from another file by `extends`",
}
"""Keys that a section does not have on purpose, and why."""
GONE = {
    "static": "; this decoder does not exist any more, say plain",
    **dict.fromkeys(("mlflow", "trackio"), "; this tracker does not exist any more, metrics.jsonl has every row"),
}
"""Values that only earlier versions had, and what to use instead."""


def explain(schema: type[BaseModel], value: Any, errors: Iterable[Any]) -> Iterator[tuple[Keys, str]]:
    """Yield a path and a message for each of pydantic's ``errors`` about ``value``, the values of a file.

    The errors of a union of plain values are told in one line. An unknown key that belongs to another section of the
    file is named as such.
    """
    # The errors of a union's branches follow each other. An invalid key is told by itself.
    followed = [(error, *_follow(schema, value, error)) for error in errors]
    for _, group in groupby(followed, key=lambda one: one[:1] if one[0]["loc"][-1:] == ("[key]",) else one[1]):
        (error, keys, above, kind), *others = group
        members, tag = alternatives(kind)
        child = error["input"]
        if error["loc"][-1:] == ("[key]",):
            yield keys, f"as a key, {_message([error], keys[-1], [])}"
        elif error["type"] == "extra_forbidden":
            yield keys, unknown_key(str(keys[-1]), fields_of(above), schema)
        elif error["type"] in ("union_tag_invalid", "union_tag_not_found"):
            options = [option for member in members for option in tag_values(member, str(tag))]
            rule = "one of " + ", ".join(map(plain, options))
            message = f"required key is missing, must be {rule}"
            if isinstance(child, Mapping) and tag in child:
                message = f"found {found(child[tag])}, must be {rule}{did_you_mean(child[tag], options)}"
            yield (*keys, str(tag)), message
        elif error["type"] == "missing":
            yield keys, f"required {'item' if isinstance(keys[-1], int) else 'key'} is missing"
        else:
            yield keys, _message([error, *(other for other, *_ in others)], child, options_of(members))


def _follow(kind: Any, value: Any, error: Any) -> tuple[Keys, Any, Any]:
    """Where an error is: its keys, the section or list around it, and its own annotation.

    Follows annotation, value and ``loc`` together, because a ``loc`` alone does not tell the name of a union's branch
    from a key. A union has a tag, or is one of plain values.
    """
    keys: Keys = ()
    above = None
    for part in error["loc"]:
        members, tag = alternatives(kind)
        if part == "[key]" or (len(members) > 1 and not tag):
            break
        if len(members) > 1:
            kind = next((member for member in members if part in tag_values(member, str(tag))), None)
            continue
        above, kind = members[0], child_kind(members[0], part)
        if isinstance(part, int) and not isinstance(value, list):
            continue  # A validator made a list of this one value, so the value itself is at the list's place.
        keys = (*keys, part)
        if isinstance(value, Mapping):
            value = value.get(part)
        else:
            value = value[part] if isinstance(value, list) and part in range(len(value)) else None
    return keys, above, kind


def _message(errors: list[Any], value: Any, options: list[Any]) -> str:
    """Write pydantic's errors about one value as ``found ..., must be ...; what to do``. Several are of a union."""
    error = errors[0]
    if error["type"] in ("value_error", "assertion_error"):
        return str(error["ctx"]["error"]) or "not valid"
    rules = [_rule(error, options) for error in errors]
    if not all(rules):
        return f"found {found(value)}, {error['msg'][:1].lower()}{error['msg'][1:]}"
    hints = (_hint(error, rule, value, options) for error, rule in zip(errors, rules, strict=True))
    return f"found {found(value)}, must be {' or '.join(dict.fromkeys(rules))}{next(filter(None, hints), '')}"


def _rule(error: Any, options: list[Any]) -> str:
    """The rule behind one of pydantic's error types, as the end of "must be"; empty if there is none."""
    code, ctx = error["type"], dict(error.get("ctx", {}))
    for name, bound in ctx.items():  # pydantic turns the bound of a float into 0.0; write "greater than 0"
        ctx[name] = int(bound) if isinstance(bound, float) and bound.is_integer() else bound
    if code == "literal_error":
        allowed = ", ".join(map(plain, options)) or str(ctx["expected"])
        return f"one of {allowed}" if "," in allowed or " or " in allowed else allowed
    return _RULES.get(code, "").format(**ctx)


_RULES = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "a mapping"),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    "string_type": "text",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "too_short": "at least {min_length} long",
    "too_long": "at most {max_length} long",
    "string_too_short": "at least {min_length} characters long",
    "string_pattern_mismatch": "text that matches {pattern}",
}


def _hint(error: Any, rule: str, value: Any, options: list[Any]) -> str:
    """What to do about a value of the wrong type, where that is clear."""
    if error["type"] == "literal_error":
        return GONE.get(str(value)) or did_you_mean(value, options)
    if rule == "a whole number" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if rule == "text" and isinstance(value, bool | int | float):
        return "; put it in quotes"
    scalars = {"a whole number": ("int",), "a number": ("int", "float"), "true or false": ("bool",)}.get(rule, ())
    is_quoted = isinstance(value, str) and any(SCALARS[name].match(value) for name in scalars)
    return "; remove the quotes" if is_quoted else ""


def unknown_key(key: str, valid: Iterable[str], root: Any) -> str:
    """The message for a key that its section does not have, with the key that was meant if there is one."""
    valid = list(valid)
    if key.lower() in NOT_OFFERED:
        return NOT_OFFERED[key.lower()]
    synonym = KEY_SYNONYMS.get(key.lower(), "")
    if synonym in valid:
        return f"unknown key; say {synonym}"
    close = did_you_mean(key, valid)
    if close or not valid:
        return f"unknown key{close}"
    elsewhere = _elsewhere(key, root) or _elsewhere(synonym, root)
    if elsewhere:
        return f"unknown key here; did you mean {elsewhere}?"
    if len(valid) <= FEW_KEYS:
        return f"unknown key; valid here: {', '.join(valid)}"
    return f"unknown key; none of the {len(valid)} keys valid here is like it"


def _elsewhere(key: str, root: Any) -> str:
    """Where else in the file ``key`` is valid: what wrong indentation looks like after parsing. Empty if nowhere."""
    fields = fields_of(root)
    if key in fields:
        return f"{key} at the top level"
    sections = [
        f"{name}.{key}"
        for name, field in fields.items()
        if any(key in fields_of(member) for member in alternatives(field.annotation)[0])
    ]
    return " or ".join(sections)


# ------------------------------------------------------------------- what the annotation of a field allows


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
    if get_origin(kind) is tuple and isinstance(key, int):
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
