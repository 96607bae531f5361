"""Mistakes on the command line as one line, instead of typer's usage, hint and box."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from rlhf_cli.printing import say
from rlhf_cli.program import command

USAGE_ERROR: type[Any] = typer.BadParameter.__mro__[1]
"""What typer raises for a mistake on the command line. typer has its own copy of click, and exports only some names."""


@contextmanager
def one_line() -> Iterator[None]:
    """Print a mistake on the command line as one line on stderr, and exit with code 2."""
    try:
        yield
    except USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # `rlhf data` alone prints its help
            raise
        say(f"error: {sentence(error)}. Run: {help_of(error.ctx)}", error=True)
        raise typer.Exit(2) from None


def sentence(error: Any) -> str:
    """What is wrong, without the period at the end: `--port: 99999, must be less than or equal to 65535`."""
    if not isinstance(error, typer.BadParameter):
        return str(error.format_message()).removesuffix(".")
    name = error.param_hint or (name_of(error.param) if error.param is not None else None)
    text = error.message.removesuffix(".").removeprefix("Value error, ")
    if type(error).__name__ == "MissingParameter":
        text = "is required"
    if text.startswith("Input should be "):
        text = f"{value_of(error)}must be {text.removeprefix('Input should be ')}"
    if " is not one of " in text:
        value, _, names = text.partition(" is not one of ")
        shown = str(getattr(error.param, "metavar", None) or "")  # may leave out a name with an error of its own
        names = shown[1:-1].replace("|", ", ") if shown.startswith("[") else names.replace("'", "")
        text = f"{value} is not one of {names}"
    return f"{name}: {text}" if name else text


def name_of(param: Any) -> str:
    """How the user writes a parameter: the long form of an option, the placeholder of an argument."""
    if param.param_type_name == "option":
        return str(max(param.opts, key=len))
    return str(param.metavar or param.name.upper())


def value_of(error: Any) -> str:
    """The refused value and a comma; "" if typer does not say which one it was."""
    cause = error.__cause__
    values = [each.get("input") for each in cause.errors()] if cause is not None and hasattr(cause, "errors") else []
    return f"{values[0]}, " if values and isinstance(values[0], str | int | float) else ""


def help_of(context: Any) -> str:
    """The command that prints the help of the command in which the mistake is."""
    names: list[str] = []
    while context is not None and context.parent is not None:
        names.insert(0, str(context.info_name))
        context = context.parent
    return command(*names, "-h")
