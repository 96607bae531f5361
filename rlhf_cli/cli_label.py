"""`rlhf label`. Everything heavy is imported inside the command, as in `cli`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhf_cli.cli_data import SOURCE_HELP, Format, Keys, OnBadRow, RestartOut, SourceCommand, SourceSet, source_of
from rlhf_cli.cli_options import exit_with
from rlhf_cli.errors import ConfigError


def add_label(app: typer.Typer) -> None:
    """Add the command to `rlhf`."""
    app.command(cls=SourceCommand)(label)


def label(
    path: Annotated[str, typer.Argument(metavar="FILE", help=SOURCE_HELP)],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The .jsonl file to write or to continue; beside FILE by default."),
    ] = None,
    labeller: Annotated[
        str | None, typer.Option("--labeller", metavar="NAME", help="Who answers; each one has a file.")
    ] = None,
    page: Annotated[bool, typer.Option("--page", help="Ask on a local page, not in the terminal.")] = False,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="Port of the page; a free one by default.")
    ] = None,
    agreement: Annotated[
        Path | None, typer.Option("--agreement", metavar="OTHER", help="Compare the answers in FILE with these.")
    ] = None,
    num: Annotated[int | None, typer.Option("--num", min=1, help="Maximum pairs.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Another seed shows the pairs in another order.")] = 0,
    overrides: SourceSet = None,
    format: Format = None,
    keys: Keys = None,
    on_bad_row: OnBadRow = "error",
    restart: RestartOut = False,
) -> None:
    """Say which of two replies is better, with one key; writes preference rows for `rlhf rm`."""

    def work() -> None:
        if port is not None and not page:
            raise ConfigError("--port: does nothing without --page")
        if agreement is not None:
            from rlhf_cli.commands.label_agreement import agreement as compare

            given = {"--out": out, "--labeller": labeller, "--page": page, "--num": num, "--restart": restart}
            for option, value in given.items():
                if value:
                    raise ConfigError(f"{option}: does nothing with --agreement, which only reads. Remove it")
            compare(Path(path), agreement)
            return
        from rlhf_cli.commands.label import label as ask

        ask(
            source_of(path, overrides, format, keys),
            out,
            labeller=labeller,
            page=page,
            port=port or 0,
            num=num,
            seed=seed,
            on_bad_row=on_bad_row,
            restart=restart,
        )

    exit_with(work)
