"""The `rlhf rm` group: `serve` and `score` put a reward model to use. The stage itself is in `cli`.

Everything heavy is imported inside its command, as in `cli`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from rlhf_cli.cli_data import Device, Format, Keys, OnBadRow, Source, SourceCommand, SourceSet, source_of
from rlhf_cli.cli_options import Host, Quiet, TokenEnv, exit_with


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # the name is too long
        return False


class FileOrCommand(typer.core.TyperGroup):
    """`rlhf rm`: takes the stage's file like `rlhf sft` does, and has the commands `serve` and `score` besides."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        skip = False
        for index, argument in enumerate(args):
            if skip or argument.startswith("-"):
                skip = not skip and argument in ("--config", "--set")
                continue
            is_file = "/" in argument or argument.endswith((".yaml", ".yml")) or _is_file(argument)
            if argument not in self.commands and is_file:
                if "--config" in args:
                    raise typer.BadParameter("give FILE or --config, not both", ctx=ctx)
                args = [*args[:index], "--config", argument, *args[index + 1 :]]
            break
        return super().parse_args(ctx, args)


rm_app = typer.Typer(
    cls=FileOrCommand, invoke_without_command=True, subcommand_metavar="[FILE] | serve MODEL | score MODEL FILE"
)

Raw = Annotated[bool, typer.Option("--raw", help="Return scores without normalisation.")]
Label = Annotated[str | None, typer.Option("--label", help="For a classifier: the label whose output is the score.")]
Probability = Annotated[
    bool, typer.Option("--probability", help="For a classifier: return its probability, not its logit.")
]
KeepSpecial = Annotated[
    bool, typer.Option("--keep-special", help="Read special tokens in texts as special, not as plain text.")
]
RewardTemplate = Annotated[
    str | None, typer.Option("--template", help="How texts are written: chat, or {prompt} and {response}.")
]


@rm_app.command("serve")
def rm_serve(
    model: Annotated[str, typer.Argument(help="A model directory, a finished rm stage, or a run's directory.")],
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 chooses a free port.")] = 5000,
    token_env: TokenEnv = None,
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="Maximum texts per request.")] = 1024,
    raw: Raw = False,
    label: Label = None,
    probability: Probability = False,
    template: RewardTemplate = None,
    device: Device = "auto",
    keep_special: KeepSpecial = False,
) -> None:
    """Serve a reward model over HTTP, for `type: http` rewards and for OpenRLHF."""

    def work() -> None:
        from rlhf_cli.commands.serve import Settings, serve

        settings = Settings(
            model, host, port, token_env, max_batch, raw, label, probability, template, device, keep_special
        )
        serve(settings)

    exit_with(work)


@rm_app.command("score", cls=SourceCommand)
def rm_score(
    model: Annotated[str, typer.Argument(help="A model directory, a finished rm stage, or a run's directory.")],
    path: Source,
    out: Annotated[
        Path | None, typer.Option("--out", help="The .jsonl file to write. Without it, stdout.", show_default=False)
    ] = None,
    num: Annotated[int | None, typer.Option("--num", min=1, help="Maximum rows.")] = None,
    raw: Raw = False,
    label: Label = None,
    probability: Probability = False,
    template: RewardTemplate = None,
    device: Device = "auto",
    overrides: SourceSet = None,
    format: Format = None,
    keys: Keys = None,
    on_bad_row: OnBadRow = "error",
    quiet: Quiet = False,
) -> None:
    """Score the answers of a file with a reward model; of pairs, show good beside bad."""

    def work() -> None:
        from rlhf_cli.commands.rm_score import score_file
        from rlhf_cli.commands.serve import Settings

        settings = Settings(model, raw=raw, label=label, probability=probability, template=template, device=device)
        source = source_of(path, overrides, format, keys)
        score_file(settings, source, out, num=num, on_bad_row=on_bad_row, quiet=quiet)

    exit_with(work)
