"""The commands that give a trained model to others: serve, push."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from rlhf_cli.cli_data import Device
from rlhf_cli.cli_options import Host, StageOfRun, TokenEnv, exit_with


def add_serve_commands(app: typer.Typer) -> None:
    """Add the commands of this module to `rlhf`."""
    app.command()(serve)
    app.command()(push)


def serve(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A run's directory, or that of a model.")],
    stage: StageOfRun = None,
    engine: Annotated[
        Literal["auto", "transformers", "vllm"],
        typer.Option("--engine", help="vLLM, the default where it is installed, or this process."),
    ] = "auto",
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 chooses a free port.")] = 8000,
    token_env: TokenEnv = None,
    name: Annotated[
        str | None, typer.Option("--name", help="The model's name in requests; RUN-STAGE by default.")
    ] = None,
    device: Device = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command line of vLLM and start nothing.")
    ] = False,
) -> None:
    """Serve a trained model with OpenAI's API: chat and completions."""

    def work() -> None:
        from rlhf_cli.commands.serve_model import ServeOptions
        from rlhf_cli.commands.serve_model import serve as start

        start(directory, stage, ServeOptions(engine, host, port, token_env, name, device, dry_run))

    exit_with(work)


def push(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A run's directory, or that of a model.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="The repository on the hub: OWNER/NAME.")],
    stage: StageOfRun = None,
    yes: Annotated[bool, typer.Option("--yes", help="Upload. Without it, only show what would be uploaded.")] = False,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public, not private.")] = False,
) -> None:
    """Upload a trained model with its card to the Hugging Face hub. Shows what it would upload without --yes."""

    def work() -> None:
        from rlhf_cli.commands.push import push as upload

        upload(directory, repo, stage, yes=yes, public=public)

    exit_with(work)
