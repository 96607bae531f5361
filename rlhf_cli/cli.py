"""The `rlhf` command: parse, call one thing, turn an error into one line and an exit code.

Everything heavy is imported inside its command, so that `--help` and a mistyped key are answered at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="rlhf",
    help="From raw text to an aligned language model: SFT, reward model, PPO.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Check, show and describe config files.", no_args_is_help=True)
app.add_typer(config_app, name="config")

Config = Annotated[Path, typer.Option("--config", help="The stage's YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file; may be given again."),
]
Restart = Annotated[bool, typer.Option("--restart", help="Run again even if finished and unchanged.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print warnings and errors only.")]
StageName = Annotated[
    str | None, typer.Option("--stage", help="sft, rm or ppo, where the file's name does not say it.")
]


@app.command()
def sft(config: Config, overrides: Overrides = None, restart: Restart = False, quiet: Quiet = False) -> None:
    """Stage 1: teach a model to answer, from demonstrations."""
    _stage("sft", config, overrides, restart, quiet)


@app.command()
def rm(config: Config, overrides: Overrides = None, restart: Restart = False, quiet: Quiet = False) -> None:
    """Stage 2: teach a reward model what people prefer."""
    _stage("rm", config, overrides, restart, quiet)


@app.command()
def ppo(config: Config, overrides: Overrides = None, restart: Restart = False, quiet: Quiet = False) -> None:
    """Stage 3: make the policy better at what the reward model scores."""
    _stage("ppo", config, overrides, restart, quiet)


@app.command()
def pipeline(
    directory: Annotated[Path, typer.Argument(help="A folder with sft.yaml, rm.yaml and ppo.yaml.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="[STAGE:]KEY=VALUE",
            help="Override a key in every file, or in one stage's (ppo:seed=1).",
        ),
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Run every stage again.")] = False,
    quiet: Quiet = False,
) -> None:
    """The stages of a folder in order; what is finished and unchanged is skipped."""

    def work() -> None:
        from rlhf_cli.commands.pipeline import run_pipeline

        run_pipeline(directory, overrides or [], _load_stage, restart=restart, quiet=quiet)

    _exit(work)


@app.command()
def status(
    directory: Annotated[Path, typer.Argument(help="A run's artifact root, e.g. artifacts/support.")],
) -> None:
    """What is finished, stale or unfinished in an artifact root."""

    def work() -> None:
        from rlhf_cli.commands.status import show_status

        show_status(directory)

    _exit(work)


@app.command()
def doctor(
    directory: Annotated[
        Path | None, typer.Argument(help="An artifact root, or one stage's directory, to look at too.")
    ] = None,
) -> None:
    """Can this machine do what a run needs, and is an artifact root as it was written?"""

    def work() -> None:
        from rlhf_cli.commands.doctor import examine

        examine(directory)

    _exit(work)


@config_app.command("check")
def config_check(
    files: Annotated[list[Path], typer.Argument(help="YAML files, or folders of them.")],
    stage: StageName = None,
    overrides: Overrides = None,
) -> None:
    """Read config files and report every mistake at once."""

    def work() -> None:
        from rlhf_cli.commands.config import check

        check(files, stage, overrides or [])

    _exit(work)


@config_app.command("show")
def config_show(
    file: Annotated[Path, typer.Argument(help="A YAML file.")],
    stage: StageName = None,
    overrides: Overrides = None,
) -> None:
    """Print a config with every default filled in."""

    def work() -> None:
        from rlhf_cli.commands.config import show

        show(file, stage, overrides or [])

    _exit(work)


@config_app.command("schema")
def config_schema(
    stage: Annotated[str | None, typer.Argument(help="sft, rm or ppo; all three without it.")] = None,
) -> None:
    """Print the JSON Schema of a stage's config, for completion in editors."""

    def work() -> None:
        from rlhf_cli.commands.config import schema

        schema(stage)

    _exit(work)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from rlhf_cli import __version__

        print(__version__)
        raise typer.Exit


def _stage(stage: str, config: Path, overrides: list[str] | None, restart: bool, quiet: bool) -> None:
    def work() -> None:
        from rlhf_cli.training.launch import run_stage

        run_stage(stage, lambda: _load_stage(stage), config, overrides or [], restart=restart, quiet=quiet)

    _exit(work)


def _load_stage(stage: str) -> Callable[..., None]:
    """The stage's `run`. `stages` is a name that others use too: only the one beside this package is ours."""
    import importlib
    import importlib.util

    import rlhf_cli
    from rlhf_cli.errors import ConfigError

    spec = importlib.util.find_spec("stages")
    ours = Path(rlhf_cli.__file__).resolve().parent.parent / "stages" / "__init__.py"
    found = Path(spec.origin).resolve() if spec is not None and spec.origin else None
    if found != ours:
        raise ConfigError(
            f"the package 'stages' that Python finds is {found}, not rlhf's own {ours}. "
            "Uninstall the other one, or start from another directory"
        )
    run: Callable[..., None] = importlib.import_module(f"stages.{stage}").run
    return run


def _exit(work: Callable[[], object]) -> None:
    from rlhf_cli.training.launch import exit_code

    code = exit_code(work)
    if code:
        raise typer.Exit(code)


def main() -> None:
    """The console script."""
    sys.exit(app(standalone_mode=True))


if __name__ == "__main__":
    main()
