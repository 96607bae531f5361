"""`rlhf data check`: what a stage would read, counted before it runs.

Rows go through the views and encoders of the stage, so both count the same rows as kept and as skipped. A source's
`weight` is not applied: each row counts once. For each row the check keeps two hashes of 8 bytes, its lengths and its
place, so memory does not grow with the texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf_cli.commands.data_count import Check, encoder_of, in_tokens, in_words
from rlhf_cli.commands.data_report import figures, new_console, print_bad_rows, print_figures
from rlhf_cli.commands.options import SOURCE_HELP, For, Format, Keys, OnBadRow, SourceOptions
from rlhf_cli.config.by_stage import load_stage_config, stage_of
from rlhf_cli.config.data import DataSource, Rows
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.data.encode import Limits
from rlhf_cli.data.views import StageRows, ppo_rows, probe_rows, ptx_rows, rm_purpose, rm_rows, sft_rows
from rlhf_cli.errors import ConfigError, DataError, RunError
from rlhf_cli.printing import say
from rlhf_cli.report.progress import Console
from rlhf_cli.run.artifacts import model_directory

# ----------------------------------------------------------------------------------------- which rows to read


def rows_of_source(
    source: DataSource,
    for_: For,
    *,
    test: str | None = None,
    max_length: int | None = None,
    on_bad_row: OnBadRow = "skip",
) -> StageRows:
    """What a stage would read from a source. The file `test` is read with the same options."""
    held_out = [source.model_copy(update={"path": test})] if test is not None else None
    rows = Rows(train=[source], test=held_out, test_fraction=0, on_bad_row=on_bad_row)
    purposes = {"sft": "sft", "rm-scores": "rm scores", "ppo": "ppo"}
    return StageRows(
        rows,
        rm_purpose(source) if for_ == "rm" else purposes[for_],  # type: ignore[arg-type]
        limits=Limits(max_length) if max_length is not None else None,
        length_key="--max-length",
    )


def rows_of_config(path: Path, stage: str | None, overrides: Sequence[str]) -> tuple[list[StageRows], str | None]:
    """What the stage of a config reads, and the path of its tokenizer if that is on this disk."""
    config = load_stage_config(stage_of(path, stage), path, overrides)
    found: list[StageRows | None] = []
    if isinstance(config, PPOConfig):
        found = [ppo_rows(config), ptx_rows(config)]
    elif isinstance(config, RMConfig):
        found = [rm_rows(config), probe_rows(config)]
    elif isinstance(config, SFTConfig):
        found = [sft_rows(config)]
    model, _ = config.inputs.get("policy" if isinstance(config, PPOConfig) else "model", (None, None))
    # A model made from scratch has a tokenizer once its stage is finished.
    folder = Path(model_directory(model or config.stage_model(None, "sft")))
    is_there = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    return [rows for rows in found if rows is not None], str(folder) if is_there else None


@dataclass(frozen=True)
class RowsOptions:
    """Which rows to read as a stage would: those of a source, or of a stage's config."""

    path: Annotated[str | None, typer.Argument(metavar="SOURCE", help=SOURCE_HELP)] = None
    for_: Annotated[
        For | None,
        typer.Option("--for", help="The stage to read for. rm-scores is rm with loss: mse or bce.", show_default=False),
    ] = None
    config: Annotated[Path | None, typer.Option("--config", help="A stage's YAML file instead of SOURCE.")] = None
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set a key of the source, such as limit=100 or split=test, or of the config. Repeatable.",
        ),
    ] = None
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="A model directory or hub id. Without it, lengths are in words.")
    ] = None
    max_length: Annotated[int | None, typer.Option("--max-length", min=1, help="Longest row that the stage takes.")] = (
        None
    )
    format: Format = None
    keys: Keys = None

    def read(self, test: str | None = None) -> tuple[list[StageRows], str | None]:
        """The rows, and the path of the tokenizer to measure them with, if one is known.

        `test` is a file of held-out rows. Raises ConfigError unless either a source or a config is named.
        """
        if (self.path is None) == (self.config is None):
            raise ConfigError("give either SOURCE and --for, or --config")
        if self.config is not None:
            given = {"--key": self.keys, "--format": self.format, "--test": test, "--max-length": self.max_length}
            for option, value in given.items():
                if value is not None:
                    raise ConfigError(f"{option}: does not go with --config. Change the file, or --set a key of it")
            stage = "rm" if self.for_ == "rm-scores" else self.for_
            parts, found = rows_of_config(self.config, stage, self.overrides or [])
            return parts, self.tokenizer or found
        if self.for_ is None:
            raise ConfigError("--for: is missing, must be one of sft, rm, rm-scores, ppo: the stage to read for")
        assert self.path is not None
        source = SourceOptions(self.overrides, self.format, self.keys).source(self.path)
        return [rows_of_source(source, self.for_, test=test, max_length=self.max_length)], self.tokenizer


# -------------------------------------------------------------------------------------------- the command


def data_check(
    rows: RowsOptions,
    test: Annotated[
        str | None,
        typer.Option("--test", metavar="FILE", help="Held-out rows. Reports prompts that are in both files."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a stage would read: counts, lengths, duplicates, leaks, labels, bad rows.

    Exit code 0: every row can be read. 1: some rows cannot. 2: the source or an option is wrong.
    """
    check_data(*rows.read(test), as_json=as_json)


def check_data(specs: Sequence[StageRows], tokenizer_path: str | None, *, as_json: bool) -> None:
    """Read the rows of a stage and print what they are.

    Raises RunError with the number of bad rows if there are any, and DataError for a source that cannot be read at all
    or that the stage cannot use.
    """
    tokenizer = None
    if tokenizer_path is not None:
        from rlhf_cli.models.load import load_tokenizer

        tokenizer_path = model_directory(tokenizer_path)
        tokenizer = load_tokenizer(tokenizer_path)
    console = new_console()
    # A line with the count so far, on the error output of a terminal. It disappears at the end.
    status = Console(stderr=True).status("reading")
    check = Check(lambda number: status.update(f"{number:,} rows"))
    try:
        with status:
            for spec in specs:
                encoder = encoder_of(spec, tokenizer, str(tokenizer_path)) if tokenizer is not None else None
                check.count(spec, partial(in_tokens, encoder) if encoder is not None else in_words)
    except DataError:
        if not as_json:
            print_bad_rows(console, check.bad, check.num_bad.total())
        raise
    found: dict[str, Any] = figures(check, specs, "words" if tokenizer is None else "tokens")
    if as_json:
        say(json.dumps(found, indent=2))
    else:
        print_figures(console, found)
    bad = check.num_bad.total()
    if bad:
        raise RunError(f"{bad:,} bad row{'s' if bad > 1 else ''}. Fix or remove them, or set data.on_bad_row: skip")
