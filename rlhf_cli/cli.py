"""The `rlhf` command: parse, call one function, turn an error into one line and an exit code.

Everything heavy is imported inside its command, so that `--help` and a mistyped key are answered immediately.
The `data` commands are in `cli_data`, `rlhf rm serve` and `score` in `cli_rm`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer
import typer.core

from rlhf_cli.cli_data import data_app
from rlhf_cli.cli_export import export
from rlhf_cli.cli_label import add_label
from rlhf_cli.cli_options import HELP_NAMES, InOrder, NumProcesses, Overrides, Quiet, exit_with
from rlhf_cli.cli_plan import add_plan_command
from rlhf_cli.cli_rm import rm_app
from rlhf_cli.cli_runs import add_run_commands
from rlhf_cli.cli_serve import add_serve_commands
from rlhf_cli.environment import set_up_process

app = typer.Typer(
    name="rlhf",
    cls=InOrder,
    help="From raw text to an aligned language model: SFT, reward model, PPO.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP_NAMES,
)
config_app = typer.Typer(help="Check, show and explain config files.", no_args_is_help=True)
app.command()(export)
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")
app.add_typer(rm_app, name="rm")

File = Annotated[Path | None, typer.Argument(metavar="FILE", help="The YAML file of the stage.", show_default=False)]
Config = Annotated[Path | None, typer.Option("--config", help="The same as FILE.", show_default=False)]
Restart = Annotated[bool, typer.Option("--restart", help="Run again, even if finished and unchanged.")]
StageName = Annotated[
    str | None, typer.Option("--stage", help="sft, rm or ppo, if the name of the file does not tell.")
]


@app.command()
def sft(
    file: File = None,
    config: Config = None,
    overrides: Overrides = None,
    restart: Restart = False,
    quiet: Quiet = False,
    nproc: NumProcesses = 1,
) -> None:
    """Stage 1: train a model to answer, from demonstrations."""
    _stage("sft", _one_file(file, config), overrides, restart, quiet, nproc)


@rm_app.callback()
def rm(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option("--config", help="The YAML file.", show_default=False)] = None,
    overrides: Overrides = None,
    restart: Restart = False,
    quiet: Quiet = False,
    nproc: NumProcesses = 1,
) -> None:
    """Stage 2: train a reward model from preferences or scores."""
    given = config is not None or overrides or restart or quiet or nproc > 1
    if context.invoked_subcommand is not None and given:
        raise typer.BadParameter(f"write options after `{context.invoked_subcommand}`, not before it")
    if context.invoked_subcommand is None:
        _stage("rm", _one_file(None, config), overrides, restart, quiet, nproc)


@app.command()
def ppo(
    file: File = None,
    config: Config = None,
    overrides: Overrides = None,
    restart: Restart = False,
    quiet: Quiet = False,
    nproc: NumProcesses = 1,
) -> None:
    """Stage 3: train the policy to get higher scores from the reward model."""
    _stage("ppo", _one_file(file, config), overrides, restart, quiet, nproc)


@app.command()
def pipeline(
    directory: Annotated[Path, typer.Argument(help="A folder with sft.yaml, rm.yaml and ppo.yaml.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="[STAGE:]KEY=VALUE",
            help="Override a key in every file, or in the file of one stage (ppo:seed=1). Repeatable.",
        ),
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Run every stage again.")] = False,
    quiet: Quiet = False,
    nproc: NumProcesses = 1,
) -> None:
    """Run the stages of a folder in order, skipping those that are up to date."""

    def work() -> None:
        from rlhf_cli.commands.pipeline import run_pipeline

        run_pipeline(directory, overrides or [], _load_stage, restart=restart, quiet=quiet, num_processes=nproc)

    exit_with(work)


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The YAML file of the sweep (docs/evaluation.md).")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and what each would do.")] = False,
    quiet: Quiet = False,
) -> None:
    """Run a folder's stages with several settings and seeds, and compare them."""

    def work() -> None:
        from rlhf_cli.commands.sweep import run_sweep

        run_sweep(file, _load_stage, dry_run=dry_run, quiet=quiet)

    exit_with(work)


@app.command()
def status(
    directory: Annotated[Path, typer.Argument(help="A run's directory, for example artifacts/support.")],
) -> None:
    """Show which stages of a run are finished, out of date or unfinished."""

    def work() -> None:
        from rlhf_cli.commands.status import show_status

        show_status(directory)

    exit_with(work)


add_run_commands(app)
add_label(app)
add_plan_command(app)
add_serve_commands(app)


@app.command()
def doctor(
    directory: Annotated[
        Path | None, typer.Argument(help="A run's directory, or that of one stage, to check as well.")
    ] = None,
) -> None:
    """Check this machine and, if given, the integrity of a run's files."""

    def work() -> None:
        from rlhf_cli.commands.doctor import examine

        examine(directory)

    exit_with(work)


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to create.")],
    template: Annotated[
        Literal["support", "sentiment", "hh", "stories", "blank"],
        typer.Option("--from", help="The example to start from. support and blank run without the hub."),
    ] = "support",
) -> None:
    """Write configs, sample data and a reward function to start from."""

    def work() -> None:
        from rlhf_cli.commands.init import initialize

        initialize(directory, template)

    exit_with(work)


@config_app.command("check")
def config_check(
    files: Annotated[list[Path], typer.Argument(help="YAML files, or folders with YAML files.")],
    stage: StageName = None,
    overrides: Overrides = None,
) -> None:
    """Read config files and report every mistake."""

    def work() -> None:
        from rlhf_cli.commands.config import check

        check(files, stage, overrides or [])

    exit_with(work)


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

    exit_with(work)


def _config_keys(incomplete: str) -> list[str]:
    """The keys that begin with a text, for completion in the shell."""
    from rlhf_cli.commands.config_docs import all_keys

    return [key for key in all_keys() if key.startswith(incomplete)]


@config_app.command("docs")
def config_docs(
    key: Annotated[
        str,
        typer.Argument(help="A stage, a section or a key: ppo, ppo.rollout, rm.loss.", autocompletion=_config_keys),
    ],
) -> None:
    """Explain a key, or every key of a section."""

    def work() -> None:
        from rlhf_cli.commands.config_docs import show_docs

        show_docs(key)

    exit_with(work)


@config_app.command("schema")
def config_schema(
    stage: Annotated[str | None, typer.Argument(help="sft, rm or ppo. All three by default.")] = None,
) -> None:
    """Print the JSON Schema of a stage's config, for completion in editors."""

    def work() -> None:
        from rlhf_cli.commands.config import schema

        schema(stage)

    exit_with(work)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from rlhf_cli import __version__
        from rlhf_cli.printing import say

        say(__version__)
        raise typer.Exit


def _one_file(file: Path | None, config: Path | None) -> Path:
    """The file of a stage, given either as FILE or as --config."""
    if file is not None and config is not None:
        raise typer.BadParameter("give FILE or --config, not both")
    chosen = file or config
    if chosen is None:
        raise typer.BadParameter("the stage needs its YAML file", param_hint="FILE")
    return chosen


def _stage(stage: str, config: Path, overrides: list[str] | None, restart: bool, quiet: bool, nproc: int) -> None:
    def work() -> None:
        from rlhf_cli.training.launch import run_stage

        run_stage(
            stage,
            lambda: _load_stage(stage),
            config,
            overrides or [],
            restart=restart,
            quiet=quiet,
            num_processes=nproc,
        )

    exit_with(work)


def _load_stage(stage: str) -> Callable[..., None]:
    """Import the `run` of a stage. Other projects use the name `stages` too, so only the one beside this package
    is accepted."""
    import gc
    import importlib
    import importlib.util

    import rlhf_cli
    from rlhf_cli.errors import ConfigError

    spec = importlib.util.find_spec("stages")
    ours = Path(rlhf_cli.__file__).resolve().parent.parent / "stages" / "__init__.py"
    other = Path(spec.origin).resolve() if spec is not None and spec.origin else None
    if other != ours:
        raise ConfigError(
            f"Python finds another package 'stages' ({other}) before rlhf's own ({ours}). "
            "Uninstall it, or run the command from another directory"
        )
    # The import creates several hundred thousand objects that stay. Scanning them again and again would take the
    # garbage collector a third of the import's time. Frozen objects are not scanned during the run either.
    gc.disable()
    try:
        run: Callable[..., None] = importlib.import_module(f"stages.{stage}").run
    finally:
        gc.enable()
    gc.freeze()
    return run


def main() -> None:
    """The console script."""
    set_up_process()
    sys.exit(app(standalone_mode=True))


if __name__ == "__main__":
    main()
