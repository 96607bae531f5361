"""The options that several commands share, and the source that some of them name."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin, get_type_hints

import typer
import typer.core

if TYPE_CHECKING:
    from rlhf_cli.config.data import DataSource

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file. Repeatable."),
]
StageOverrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="[STAGE:]KEY=VALUE",
        help="Override a key in every file, or in the file of one stage (ppo:seed=1). Repeatable.",
    ),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="The same as FILE.", show_default=False)]
StageOfFile = Annotated[
    Literal["sft", "rm", "ppo"] | None,
    typer.Option("--stage", help="If the name of the file does not tell.", show_default=False),
]
StageOfRun = Annotated[
    Literal["sft", "rm", "ppo"] | None,
    typer.Option("--stage", help="The stage; ppo by default, or sft without it.", show_default=False),
]
WritingStage = Annotated[
    Literal["sft", "ppo", "rm"] | None,  # rm has an error of its own: it writes no text
    typer.Option(
        "--stage", metavar="[sft|ppo]", help="The stage that responds; ppo by default, or sft.", show_default=False
    ),
]
NumProcesses = Annotated[
    int, typer.Option("--nproc", metavar="N", min=1, help="Processes on this machine, one per GPU.")
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", min=1, help="CPU cores to use; the result is the same.", show_default="all"),
]
Host = Annotated[str, typer.Option("--host", help="Address to listen on. Other machines need --token-env.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="0 chooses a free port.")]
TokenEnv = Annotated[
    str | None, typer.Option("--token-env", metavar="NAME", help="Environment variable with the token.")
]
Quantized = Annotated[
    Literal["nf4", "nf4_double", "int8"] | None,
    typer.Option("--quantize", help="Hold the linear layers in 4 or 8 bits.", show_default=False),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only warnings and errors.")]

For = Literal["sft", "rm", "rm-scores", "ppo"]
OnBadRow = Literal["error", "skip"]
SOURCE_HELP = "A data file, a folder of files, a glob, or the id of a hub dataset."
Source = Annotated[str, typer.Argument(metavar="SOURCE", help=SOURCE_HELP)]
Format = Annotated[str | None, typer.Option("--format", help="The format of the rows, if it is not detected.")]
Keys = Annotated[
    list[str] | None,
    typer.Option("--key", "--keys", metavar="OURS=THEIRS", help="Rename a column. Repeatable."),
]
Out = Annotated[Path, typer.Option("--out", help="The .jsonl file to write or to continue.", show_default=False)]
Template = Annotated[Path | None, typer.Option("--template", help="A text file that replaces the built-in prompt.")]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", min=0.001, max=1.0, help="Sample from the smallest set of tokens with this probability."),
]
TemperatureOfRun = Annotated[
    float | None, typer.Option("--temperature", min=0.0, help="0 is greedy. The run's own by default.")
]
Seed = Annotated[int, typer.Option("--seed", help="Another seed samples other answers.")]
Device = Annotated[Literal["auto", "cpu", "cuda", "mps"], typer.Option("--device", help="Where to run.")]
RestartOut = Annotated[bool, typer.Option("--restart", help="Start over and remove the rows in --out.")]


@dataclass(frozen=True)
class SourceOptions:
    """How the rows of a source are read."""

    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set a key of the source: limit=100, split=test (rlhf config docs sft.data.train). Repeatable.",
        ),
    ] = None
    format: Format = None
    keys: Keys = None
    on_bad_row: Annotated[
        OnBadRow, typer.Option("--on-bad-row", help="Stop at a row that cannot be read, or skip it.")
    ] = "error"

    def source(self, path: str) -> DataSource:
        """The source at a path; raises ConfigError if it is not valid."""
        from rlhf_cli.config.data import DataSource
        from rlhf_cli.config.loader import load_values
        from rlhf_cli.errors import ConfigError

        pairs = [pair.split("=", 1) for pair in self.keys or []]
        if any(len(pair) != 2 for pair in pairs):
            raise ConfigError("--key: must be OURS=THEIRS, for example response=output.text")
        values: dict[str, Any] = {"path": path, "keys": dict(pairs)}
        if self.format is not None:
            values["format"] = self.format
        return load_values(values, DataSource, self.overrides or [], "SOURCE")


@dataclass(frozen=True)
class OutputOptions:
    """The file of rows that a command writes and a later one resumes."""

    out: Out
    num: Annotated[int | None, typer.Option("--num", min=1, help="Maximum rows.")] = None
    restart: RestartOut = False
    quiet: Quiet = False


def one_by_one(work: Callable[..., None]) -> Callable[..., None]:
    """The function for typer, where each annotated field of a parameter that is a dataclass is an option."""
    groups: dict[str, tuple[Any, list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(work, eval_str=True).parameters.values():
        own, kind = [parameter], parameter.annotation
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            hints = get_type_hints(kind, include_extras=True)
            fields = [
                field.replace(annotation=hints[field.name]) for field in inspect.signature(kind).parameters.values()
            ]
            own = [field for field in fields if get_origin(field.annotation) is Annotated]
            groups[parameter.name] = kind, [field.name for field in own]
        parameters += [field.replace(kind=inspect.Parameter.KEYWORD_ONLY) for field in own]

    @functools.wraps(work)
    def run(**values: Any) -> None:
        for name, (group, keys) in groups.items():
            values[name] = group(**{key: values.pop(key) for key in keys})
        work(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


ARGUMENTS = "rlhf.arguments"
"""The key of a context under which a command keeps the words behind its name."""


class Command(typer.core.TyperCommand):
    """A command that keeps the words behind its name in its context."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)
