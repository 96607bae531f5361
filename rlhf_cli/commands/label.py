"""`rlhf label`: a person says which of two replies is better, in the terminal, through a pipe, or on a local page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhf_cli.commands.label_agreement import show_agreement
from rlhf_cli.commands.labelling import Labelling, pairs_of
from rlhf_cli.commands.options import SOURCE_HELP, Format, Keys, OnBadRow, RestartOut, SourceSet, source_of
from rlhf_cli.commands.output import data_digest, refuse_own_output
from rlhf_cli.commands.output_files import Output
from rlhf_cli.config.data import DataSource
from rlhf_cli.data_files import COMPRESSIONS, find_files
from rlhf_cli.errors import ConfigError, DataError
from rlhf_cli.printing import say
from rlhf_cli.program import command


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

    if port is not None and not page:
        raise ConfigError("--port: does nothing without --page")
    if agreement is not None:
        given = {"--out": out, "--labeller": labeller, "--page": page, "--num": num, "--restart": restart}
        for option, value in given.items():
            if value:
                raise ConfigError(f"{option}: does nothing with --agreement, which only reads. Remove it")
        show_agreement(Path(path), agreement)
        return
    ask_for_labels(
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


def ask_for_labels(
    source: DataSource,
    out: Path | None,
    *,
    labeller: str | None = None,
    page: bool = False,
    port: int = 0,
    num: int | None = None,
    seed: int = 0,
    on_bad_row: OnBadRow = "error",
    restart: bool = False,
) -> None:
    """Ask which reply of each pair is better, and write the answers to `out`, or resume.

    Raises DataError for rows that cannot be read and for a source without pairs, ArtifactError for an `out` that cannot
    be written or resumed, ConfigError for settings other than those of the existing answers. After the keys of a pipe,
    DataError if some of them failed or they ended early. The answers before are kept.
    """
    out = out or default_out(source, labeller)
    refuse_own_output(source, out)
    pairs, unseen = pairs_of(source, on_bad_row)
    for reason, count in unseen.items():
        say(f"label: {count} {'pair is' if count == 1 else 'pairs are'} not shown: {reason}", error=True)
    if not pairs:
        raise DataError(f"{source.path}: no pair to label")
    settings = {"data": data_digest(source), "seed": seed, "labeller": labeller}
    with Output(out, settings, restart=restart) as output:
        labelling = Labelling(pairs, output, seed, labeller, num)
        wrong: str | None = None
        if page:
            from rlhf_cli.commands.label_page import serve

            serve(labelling, port)
        else:
            from rlhf_cli.commands.label_terminal import ask

            wrong = ask(labelling)
        for line in labelling.summary():
            say(f"label: {line}", error=True)
        if labelling.done < labelling.total:
            say("label: run the same command to resume", error=True)
        elif output.num_rows:
            train = command("rm", "YOUR_rm.yaml", "--set", f"data.train={out}")
            say(f"label: to train a reward model on them: {train}", error=True)
        if wrong is not None:
            raise DataError(wrong)


def default_out(source: DataSource, labeller: str | None) -> Path:
    """Where the answers go without --out: `replies.labels.jsonl` beside `replies.jsonl`.

    With a labeller it is `replies.labels.NAME.jsonl`. Raises ConfigError for a source of several files.
    """
    files = find_files(source.path)
    if len(files) != 1 or Path(source.path) != Path(files[0]):
        raise ConfigError(f"--out: is missing. {source.path} is not a single file, so say where the answers go")
    if labeller is not None and ("/" in labeller or not labeller.isprintable() or not labeller.strip()):
        raise ConfigError(f"--labeller: {labeller!r} cannot be part of a file name. Choose another, or give --out")
    path = Path(files[0])
    stem = path.stem if path.suffix in COMPRESSIONS else path.name
    name = f"{Path(stem).stem}.labels{'' if labeller is None else '.' + labeller}.jsonl"
    return path.with_name(name)
