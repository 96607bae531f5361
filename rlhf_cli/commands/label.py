"""`rlhf label`: a person says on a local page which of two replies is better."""

from __future__ import annotations

import math
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_cli.algorithms.rates import cohen_kappa
from rlhf_cli.commands.labelling import SKIPPED, TIE, Labelling, pair_digest, pairs_of, rate
from rlhf_cli.commands.options import SOURCE_HELP, RestartOut, SourceOptions
from rlhf_cli.commands.output import Dropped, Output, data_digest, items, read_lines, refuse_own_output
from rlhf_cli.config.data import DataSource
from rlhf_cli.data.paths import COMPRESSIONS, find_files
from rlhf_cli.errors import ConfigError, DataError
from rlhf_cli.printing import say
from rlhf_cli.program import command

if TYPE_CHECKING:
    from rlhf_cli.data.records import Record


def label(
    path: Annotated[str, typer.Argument(metavar="FILE", help=SOURCE_HELP)],
    reading: SourceOptions,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The .jsonl file to write or to continue; beside FILE by default."),
    ] = None,
    labeller: Annotated[
        str | None, typer.Option("--labeller", metavar="NAME", help="Who answers; each one has a file.")
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port of the page; 0 chooses a free one.")] = 0,
    agreement: Annotated[
        Path | None, typer.Option("--agreement", metavar="OTHER", help="Compare the answers in FILE with these.")
    ] = None,
    num: Annotated[int | None, typer.Option("--num", min=1, help="Maximum pairs.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Another seed shows the pairs in another order.")] = 0,
    restart: RestartOut = False,
) -> None:
    """Say which of two replies is better, with one key; writes preference rows for `rlhf rm`."""
    if agreement is not None:
        given = {"--out": out, "--labeller": labeller, "--port": port, "--num": num, "--restart": restart}
        for option, value in given.items():
            if value:
                raise ConfigError(f"{option}: does nothing with --agreement, which only reads. Remove it")
        show_agreement(Path(path), agreement)
        return
    source = reading.source(path)
    out = out or default_out(source, labeller)
    refuse_own_output(source, out)
    pairs, unseen = pairs_of(source, reading.on_bad_row)
    for reason, count in unseen.items():
        say(f"label: {count} {'pair is' if count == 1 else 'pairs are'} not shown: {reason}", error=True)
    if not pairs:
        raise DataError(f"{source.path}: no pair to label")
    settings = {"data": data_digest(source), "seed": seed, "labeller": labeller}
    with Output(out, settings, restart=restart) as output:
        from rlhf_cli.commands.label_page import serve

        labelling = Labelling(pairs, output, seed, labeller, num)
        serve(labelling, port)
        for line in labelling.summary():
            say(f"label: {line}", error=True)
        if labelling.done < labelling.total:
            say("label: run the same command to resume", error=True)
        elif output.num_rows:
            train = command("rm", "YOUR_rm.yaml", "--set", f"data.train={out}")
            say(f"label: to train a reward model on them: {train}", error=True)


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


# ------------------------------------------------------------------------------------------- agreement


def show_agreement(first: Path, second: Path) -> None:
    """Print the agreement on the pairs that both files have.

    Each file has rows that say which of two answers is better, by `rlhf label`, a judge, or a data set.
    Raises DataError for files that cannot be read and for two files without a common pair.
    """
    a, b = labels_in(first), labels_in(second)
    common = [pair for pair in a if pair in b]
    both = [(a[pair], b[pair]) for pair in common if SKIPPED not in (a[pair], b[pair])]
    if not both:
        raise DataError(f"{second}: no pair has an answer both here and in {first}. Label the same file with both")
    names = sorted({label for labels in both for label in labels}, key=[*"12", TIE].index)
    table = [[both.count((i, j)) for j in names] for i in names]
    kappa, low, high = cohen_kappa(table)
    say(f"{len(both)} pairs have an answer in both files")
    say(f"  same answer       {rate(sum(i == j for i, j in both), len(both))}")
    if math.isnan(kappa):
        say("  Cohen's kappa     not defined: every answer is the same")
    else:
        say(
            f"  Cohen's kappa     {kappa:.2f} (95 % interval {low:.2f} to {high:.2f}; 0 is chance, 1 is full agreement)"
        )
    ties = [labels.count(TIE) for labels in both]
    opposite = sum(i != j and TIE not in (i, j) for i, j in both)
    for name, count in {"opposite": opposite, "tie in one": ties.count(1), "tie in both": ties.count(2)}.items():
        say(f"  {name:16}  {count}")
    without = {"skipped in one": len(common) - len(both)}
    without |= {f"only in {path}": len(labels) - len(common) for path, labels in ((first, a), (second, b))}
    if any(without.values()):
        say("not counted: " + ", ".join(f"{count} {reason}" for reason, count in without.items() if count))


def labels_in(path: Path) -> dict[str, str]:
    """The answer to each pair: "1" or "2" for the better reply, in an order that is the same in every file, or a tie.

    Kappa's chance agreement depends on which reply is called the first. In the order of a file of `chosen` and
    `rejected`, two labellers who mostly follow it would agree by chance. The order is therefore that of the replies'
    digests. Of a pair that occurs several times the first answer counts.
    """
    labels: dict[str, str] = {}
    for pair, label in _answers(path):
        labels.setdefault(pair, label)
    if not labels:
        raise DataError(f"{path}: has no row with two answers of which one is better")
    return labels


def _answers(path: Path) -> Iterator[tuple[str, str]]:
    """(digest of the pair, its label) of the rows, and of the ties and skipped pairs beside them."""
    dropped = path.with_name(path.name + ".dropped")
    if dropped.is_file():
        for drop in read_lines(dropped):
            if isinstance(drop.get("pair"), str) and drop["reason"] in (TIE, SKIPPED):
                yield drop["pair"], drop["reason"]
        if path.is_file() and path.stat().st_size == 0:
            return
    for item in items(DataSource(path=str(path)), "rm pairs", "error"):
        assert not isinstance(item, Dropped)
        label = _label(item)
        if label is not None:
            yield pair_digest(item.prompt, [answer.text for answer in item.answers]), label


def _label(record: Record) -> str | None:
    """ "1", "2" or a tie; None if the row has not two answers, or does not say which one is better."""
    scores = [answer.score for answer in record.answers]
    if len(scores) != 2 or (not record.ranked and None in scores):
        return None
    texts = [answer.text.strip() for answer in record.answers]
    if not record.ranked:
        a, b = (score or 0.0 for score in scores)
        if a == b:
            return TIE
        texts = texts if a > b else texts[::-1]
    return "1" if sha256(texts[0].encode()).digest() < sha256(texts[1].encode()).digest() else "2"
