"""What the command-line modules share: common options, and running a command to an exit code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer
import typer.core

from rlhf_cli.usage_errors import one_line

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file. Repeatable."),
]
StageOfRun = Annotated[
    Literal["sft", "rm", "ppo"] | None,
    typer.Option("--stage", help="The stage; ppo by default, or sft without it.", show_default=False),
]
NumProcesses = Annotated[
    int, typer.Option("--nproc", metavar="N", min=1, help="Processes on this machine, one per GPU.")
]
Host = Annotated[str, typer.Option("--host", help="Address to listen on. Other machines need --token-env.")]
TokenEnv = Annotated[
    str | None, typer.Option("--token-env", metavar="NAME", help="Environment variable with the token.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only warnings and errors.")]

ORDER = (
    "sft",
    "rm",
    "ppo",
    "plan",
    "pipeline",
    "sweep",
    "status",
    "watch",
    "eval",
    "diagnose",
    "compare",
    "report",
    "chat",
    "generate",
    "label",
    "serve",
    "push",
    "merge",
    "export",
    "doctor",
    "init",
    "data",
    "config",
)
HELP_NAMES = {"help_option_names": ["-h", "--help"]}


class InOrder(typer.core.TyperGroup):
    """Lists the commands in the order of use, and prints a mistake on the command line as one line.

    Typer alone lists groups, such as `rm`, after all others.
    """

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with one_line():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with one_line():
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


def exit_with(work: Callable[[], object]) -> None:
    """Run a command's work. An expected error becomes one line on stderr, and the exit code says what happened."""
    from rlhf_cli.training.launch import exit_code

    code = exit_code(work)
    if code:
        raise typer.Exit(code)
