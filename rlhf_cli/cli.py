"""The `rlhf` command: parse, call one function, turn an error into one line and an exit code.

COMMANDS names the file of every command in `rlhf_cli/commands/`. It is imported when the command is called, so that
`--help` and a mistyped command are answered immediately. The three stages are here.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from rlhf_cli.commands.options import Command, ConfigFile, NumProcesses, Overrides, Quiet, Threads, one_by_one
from rlhf_cli.printing import say
from rlhf_cli.processes.environment import set_up_process
from rlhf_cli.program import command

FOLDER = Path(__file__).with_name("commands")
COMMANDS: dict[str, dict[str, str | None]] = {
    "rlhf": {
        "sft": None,
        "rm": None,
        "ppo": None,
        "plan": "plan.plan",
        "pipeline": "pipeline.pipeline",
        "sweep": "sweep.sweep",
        "status": "status.status",
        "watch": "watch.watch",
        "eval": "eval.evaluate",
        "diagnose": "diagnose.diagnose",
        "compare": "compare.compare",
        "report": "report.report",
        "chat": "chat.chat",
        "generate": "generate.generate",
        "label": "label.label",
        "serve": "serve.serve_command",
        "push": "push.push",
        "merge": "merge.merge",
        "export": "export.export",
        "doctor": "doctor.doctor",
        "init": "init.init",
        "data": None,
        "config": None,
    },
    "rm": {"serve": "rm_serve.serve", "score": "rm_score.rm_score"},
    "data": {
        "check": "data_check.data_check",
        "show": "data_show.data_show",
        "convert": "data_convert.data_convert",
        "generate": "data_generate.data_generate",
        "score": "data_score.data_score",
    },
    "config": {"check": "config.check", "show": "config.show", "docs": "config.docs", "schema": "config.schema"},
}
"""The commands of each group in the order of use: the file in `rlhf_cli/commands/` and the function in it. None: a
stage or a group, which is below."""


def first_line(place: str) -> str:
    """The line of a command in the list of commands: the first of its docstring, without importing the file."""
    module, _, function = place.partition(".")
    text = (FOLDER / f"{module}.py").read_text(encoding="utf-8")
    found = re.search(rf'^def {function}\(.*?\n    """(.*?)(?:\n\n|""")', text, re.MULTILINE | re.DOTALL)
    assert found is not None, place
    return " ".join(found[1].split())


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


class LazyGroup(typer.core.TyperGroup):
    """Lists commands without importing them, and prints a mistake on the command line as one line."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        listed = COMMANDS[str(self.name)].items()
        self.commands = {
            name: typer.core.TyperCommand(name, help=first_line(place)) if place else self.commands[name]
            for name, place in listed
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, found, rest = super().resolve_command(ctx, args)
        place = COMMANDS[str(self.name)].get(name or "")
        return name, imported(str(name), place) if place else found, rest

    @one_line()
    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        return super().make_context(*args, **kwargs)

    @one_line()
    def invoke(self, ctx: Any) -> Any:
        return super().invoke(ctx)


@functools.cache
def imported(name: str, place: str) -> Any:
    """The command behind an entry of COMMANDS. The errors of its function become an exit code."""
    module, _, function = place.partition(".")
    work = getattr(importlib.import_module(f"rlhf_cli.commands.{module}"), function)

    @functools.wraps(options := one_by_one(work))
    def run(**values: Any) -> None:
        exit_with(lambda: options(**values))

    app = typer.Typer(add_completion=False)
    app.command(name, cls=Command)(run)
    return typer.main.get_command(app)


def exit_with(work: Callable[[], object]) -> None:
    """Run a command's work. An expected error becomes one line on stderr, and the exit code says what happened."""
    from rlhf_cli.processes.exits import exit_code

    if code := exit_code(work):
        raise typer.Exit(code)


class FileOrCommand(LazyGroup):
    """`rlhf rm`: takes the stage's file like `rlhf sft` does, and has the commands `serve` and `score` besides."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        skip = False
        for index, argument in enumerate(args):
            if skip or argument.startswith("-"):
                skip = not skip and argument in ("--config", "--set", "--nproc", "--threads", "--members")
                continue
            is_file = os.path.isfile(argument)  # noqa: PTH113  # False for a name that is too long
            if argument not in self.commands and (is_file or "/" in argument or argument.endswith((".yaml", ".yml"))):
                if "--config" in args:
                    raise typer.BadParameter("give FILE or --config, not both", ctx=ctx)
                args = [*args[:index], "--config", argument, *args[index + 1 :]]
            break
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="rlhf",
    cls=LazyGroup,
    help="From raw text to an aligned language model: SFT, reward model, PPO.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
rm_app = typer.Typer(
    cls=FileOrCommand, invoke_without_command=True, subcommand_metavar="[FILE] | serve MODEL | score MODEL FILE"
)
data_app = typer.Typer(
    cls=LazyGroup, help="Check data, convert it, and write it with a language model.", no_args_is_help=True
)
config_app = typer.Typer(cls=LazyGroup, help="Check, show and explain config files.", no_args_is_help=True)
app.add_typer(rm_app, name="rm")
app.add_typer(data_app, name="data")
app.add_typer(config_app, name="config")

File = Annotated[Path | None, typer.Argument(metavar="FILE", help="The YAML file of the stage.", show_default=False)]


@dataclass(frozen=True)
class StageOptions:
    """The options that the three stages share."""

    config: ConfigFile = None
    overrides: Overrides = None
    restart: Annotated[bool, typer.Option("--restart", help="Run again, even if finished and unchanged.")] = False
    quiet: Quiet = False
    nproc: NumProcesses = 1
    threads: Threads = None

    def run(self, stage: str, file: Path | None = None, members: int | None = None) -> None:
        """Run a stage, whose file is given either as FILE or as --config."""
        if file is not None and self.config is not None:
            raise typer.BadParameter("give FILE or --config, not both")
        config = file or self.config
        if config is None:
            raise typer.BadParameter("the stage needs its YAML file", param_hint="FILE")
        given = {"members": members, "threads": self.threads}
        keys = [*(self.overrides or []), *(f"{key}={value}" for key, value in given.items() if value)]

        def work() -> None:
            from rlhf_cli.run.launch import load_stage, run_stage

            load, num = functools.partial(load_stage, stage), self.nproc
            run_stage(stage, load, config, keys, restart=self.restart, quiet=self.quiet, num_processes=num)

        exit_with(work)


@app.command()
@one_by_one
def sft(options: StageOptions, file: File = None) -> None:
    """Stage 1: train a model to answer, from demonstrations."""
    options.run("sft", file)


@rm_app.callback()
@one_by_one
def rm(
    context: typer.Context,
    options: StageOptions,
    members: Annotated[
        int | None, typer.Option("--members", min=1, metavar="K", help="Train K reward models (the key members).")
    ] = None,
) -> None:
    """Stage 2: train a reward model from preferences or scores."""
    if context.invoked_subcommand is None:
        options.run("rm", members=members)
    elif members or options != StageOptions():
        raise typer.BadParameter(f"write options after `{context.invoked_subcommand}`, not before it")


@app.command()
@one_by_one
def ppo(options: StageOptions, file: File = None) -> None:
    """Stage 3: train the policy to get higher scores from the reward model."""
    options.run("ppo", file)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from rlhf_cli import __version__

        say(__version__)
        raise typer.Exit


INSTEAD = {
    "chat --compare": "`rlhf generate DIR --prompts FILE --compare sft` and the page of `rlhf report` show both",
    "eval --tasks": "Run lm-evaluation-harness itself: lm_eval --model hf --model_args pretrained=DIR/ppo/model",
    "generate --beams": "Give its options to `generate` of transformers, which reads the folder of the model",
    "generate --penalty-alpha": "Give its options to `generate` of transformers, which reads the folder of the model",
    "label --page": "The page is the only way to answer. Remove the option",
    "serve --engine": "For vLLM: rlhf export DIR --out OUT, then vllm serve OUT",
    "serve --dry-run": "For vLLM: rlhf export DIR --out OUT, then vllm serve OUT",
}
"""Options that only earlier versions had, by command, and what to use instead."""
OF_SOURCE = ("limit", "name", "data_dir", "split", "revision", "select")
SET_INSTEAD = {f"--{key.replace('_', '-')}": f"{key}=VALUE" for key in OF_SOURCE}
SET_INSTEAD |= {"--streaming": "streaming=true", **dict.fromkeys(("--weight", "--weights"), "weights.NAME=NUMBER")}
"""Keys of a source that are written as an option, and the `--set` to write instead."""


def sentence(error: Any) -> str:
    """What is wrong, without the period at the end: `--port: 99999, must be less than or equal to 65535`."""
    if not isinstance(error, typer.BadParameter):
        option = getattr(error, "option_name", "")
        if error.ctx is not None and (instead := INSTEAD.get(f"{error.ctx.info_name} {option}")):
            return f"{option}: does not exist any more. {instead}"
        if option in SET_INSTEAD and any(param.name == "keys" for param in error.ctx.command.params):
            return f"{option}: is a key of the source. Write --set {SET_INSTEAD[option]}"
        return str(error.format_message()).removesuffix(".")
    param, text = error.param, error.message.removesuffix(".").removeprefix("Value error, ")
    if type(error).__name__ == "MissingParameter":
        text = "is required"
    if text.startswith("Input should be "):
        values = [each.get("input") for each in getattr(error.__cause__, "errors", list)()]
        value = f"{values[0]}, " if values and isinstance(values[0], str | int | float) else ""
        text = f"{value}must be {text.removeprefix('Input should be ')}"
    if " is not one of " in text:
        value, _, names = text.partition(" is not one of ")
        shown = str(getattr(param, "metavar", None) or "")  # may leave out a name with an error of its own
        names = shown[1:-1].replace("|", ", ") if shown.startswith("[") else names.replace("'", "")
        text = f"{value} is not one of {names}"
    name = error.param_hint
    if not name and param is not None:  # as the user writes it: an option's long form, an argument's placeholder
        is_option = param.param_type_name == "option"
        name = max(param.opts, key=len) if is_option else param.metavar or param.name.upper()
    return f"{name}: {text}" if name else text


def help_of(context: Any) -> str:
    """The command that prints the help of the command in which the mistake is."""
    names: list[str] = []
    while context is not None and context.parent is not None:
        names.insert(0, str(context.info_name))
        context = context.parent
    return command(*names, "-h")


def main() -> None:
    set_up_process()
    sys.exit(app(standalone_mode=True))
