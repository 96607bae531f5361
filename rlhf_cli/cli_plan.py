"""The command `rlhf plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhf_cli.cli_options import exit_with


def add_plan_command(app: typer.Typer) -> None:
    """Add the command to `rlhf`."""
    app.command()(plan)


def plan(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A stage's YAML file, or a folder of them.", show_default=False),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="The same as FILE.", show_default=False)] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, metavar="N", help="Plan for N GPUs.")] = None,
    gpu_memory: Annotated[
        str | None, typer.Option("--gpu-memory", metavar="SIZE", help="Memory of each GPU, such as 80GB.")
    ] = None,
    per_node: Annotated[int, typer.Option("--gpus-per-node", min=1, metavar="N", help="GPUs of a machine.")] = 8,
    nproc: Annotated[int | None, typer.Option("--nproc", min=1, metavar="N", help="Processes on this machine.")] = None,
    tokens_per_s: Annotated[
        float | None, typer.Option("--tokens-per-s", min=0.001, help="Speed of all processes, for the hours.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", min=1, metavar="N", help="Training rows of SFT and RM. Default: counted.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="[STAGE:]KEY=VALUE", help="Override a key of the files. Repeatable."),
    ] = None,
    stage: Annotated[
        str | None, typer.Option("--stage", help="sft, rm or ppo, if the name of the file does not tell.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compute memory, steps and hours of a run from its configs. No weights are loaded.

    Says for each phase what a process holds, whether it fits, and which changes make it fit.
    """

    def work() -> None:
        from rlhf_cli.commands.plan import plan as show
        from rlhf_cli.errors import ConfigError

        if (file is None) == (config is None):
            raise ConfigError("give one config: rlhf plan FILE, or rlhf plan --config FILE")
        path = file if file is not None else config
        assert path is not None
        show(
            path,
            overrides or [],
            stage=stage,
            gpus=gpus,
            gpu_memory=gpu_memory,
            processes=nproc,
            per_node=per_node,
            tokens_per_s=tokens_per_s,
            num_rows=rows,
            as_json=as_json,
        )

    exit_with(work)
