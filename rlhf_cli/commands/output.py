"""Resumable output of `rlhf generate`, `rlhf data generate` and `rlhf data score`: one line for each item.

    OUT.jsonl             the rows, one JSON object a line, written as they arrive
    OUT.jsonl.dropped     the items without a row and why, one JSON object a line
    OUT.jsonl.settings    the settings that the rows were made with

Every input item becomes one line of one of the first two files, in order, so that their lengths say where a run
resumes.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rlhf_cli.artifacts import fingerprint
from rlhf_cli.commands.options import OnBadRow
from rlhf_cli.commands.output_files import Dropped, Outcome, Output
from rlhf_cli.config.data import DataSource
from rlhf_cli.data_files import find_files
from rlhf_cli.errors import ConfigError, DataError
from rlhf_cli.files import digest_file
from rlhf_cli.training.progress import Display

if TYPE_CHECKING:
    from rlhf_cli.data.formats import Purpose
    from rlhf_cli.data.records import Record
    from rlhf_cli.training.distributed import World

T = TypeVar("T")
W = TypeVar("W")
W_co = TypeVar("W_co", covariant=True)


# ------------------------------------------------------------------------------------------- items


class Opens(Protocol[W_co]):
    """The model that is asked for each item, not loaded yet: `WriterOptions` for example."""

    @property
    def server(self) -> str | None:
        """The address of its server; None for a model on this machine."""

    @property
    def chunk(self) -> int:
        """Number of items per call."""

    def open(self) -> W_co:
        """Load it."""


def items(
    source: DataSource,
    purpose: Purpose,
    on_bad_row: OnBadRow,
    check: Callable[[Record], None] | None = None,
    *,
    prompt_words: int = 0,
) -> Iterator[Record | Dropped]:
    """The rows of a source as records; the first `prompt_words` words of a plain text are its prompt.

    A row that cannot be read, or for which `check` raises DataError, stops the command or, with "skip", is Dropped.
    """
    from rlhf_cli.data.formats import read_record, recognise
    from rlhf_cli.data.rows import BadRow
    from rlhf_cli.data.sources import read_rows

    format_ = None
    for row in read_rows(source):
        try:
            if isinstance(row, BadRow):
                raise DataError(f"{row.where}: {row.reason}")
            if format_ is None:
                format_ = recognise(row, source, purpose)
            record = read_record(row, format_, source, prompt_words=prompt_words)
            if check is not None:
                check(record)
        except DataError as error:
            # If no format fits the first row, the file is the wrong one; skipping would drop every row.
            if on_bad_row == "error" or (format_ is None and not isinstance(row, BadRow)):
                raise
            yield Dropped("cannot be read", {"detail": str(error)})
            continue
        yield record


def each_item(
    output: Output | None,
    read: Callable[[], Iterator[Record | Dropped]],
    num: int | None,
    options: Opens[W],
    answer: Callable[[W, Sequence[tuple[int, Record]]], list[Outcome]],
    display: Display,
    join: Callable[[], World] | None = None,
) -> None:
    """Write a line for each of the first `num` items that has none yet.

    All items are read once before the model is asked, so that a bad row costs nothing. `answer` turns records with
    their numbers into outcomes. With `join`, which meets other processes, each of them answers a chunk at the same time
    as the others, and the first one, which alone has an `output`, writes them. So the lines do not depend on the number
    of processes.
    """
    total = sum(1 for _ in islice(read(), num))
    world = join() if join is not None else None
    done = _on_main(world, lambda: output.num_rows + output.num_dropped if output is not None else 0)
    if done >= total:
        return
    writer = options.open()
    display.begin(total, "row", done)
    chunks = enumerate(batched(islice(read(), num), options.chunk))
    unfinished = ((n * options.chunk, chunk) for n, chunk in chunks if n * options.chunk + len(chunk) > done)

    def answered(begin: int, chunk: Sequence[Record | Dropped]) -> list[Outcome]:
        # A local model answers the rows of a started chunk again: the same batches give the same bits. A server is
        # asked for the missing rows only: its answers cost and would differ anyway.
        skip = max(0, done - begin)
        first = skip if options.server else 0
        records = [(begin + n, item) for n, item in enumerate(chunk) if n >= first and not isinstance(item, Dropped)]
        found = dict(zip((n for n, _ in records), answer(writer, records), strict=True))
        return [item if isinstance(item, Dropped) else found[begin + n] for n, item in enumerate(chunk) if n >= skip]

    for together in batched(unfinished, world.size if world is not None else 1):
        for (begin, chunk), outcomes in zip(together, _answers(world, together, answered), strict=False):
            if output is not None:
                _write(output, chunk[max(0, done - begin) :], outcomes)
                display.step(output.num_rows + output.num_dropped, [f"dropped {output.num_dropped}"])
    if world is not None:
        world.barrier("the last rows")
    display.end()


def _on_main(world: World | None, compute: Callable[[], T]) -> T:
    """The result of `compute`, which only the first process calls."""
    return compute() if world is None else world.of_main(compute)


def _answers(
    world: World | None, chunks: Sequence[tuple[int, list[T]]], answered: Callable[[int, list[T]], list[Outcome]]
) -> list[list[Outcome]]:
    """The outcomes of each chunk. Each process of `world` answers one of them; there may be fewer chunks."""
    if world is None:
        return [answered(*chunk) for chunk in chunks]
    own = answered(*chunks[world.rank]) if world.rank < len(chunks) else []
    world.barrier("the responses")  # one chunk may take much longer than another
    return world.gather(own)


def _write(output: Output, items: Sequence[Record | Dropped], outcomes: Sequence[Outcome]) -> None:
    """Write the lines of some items."""
    pairs = list(zip(items, outcomes, strict=True))
    output.refuse_all_failed([outcome for item, outcome in pairs if not isinstance(item, Dropped)])
    for item, outcome in pairs:
        output.write(outcome, {} if isinstance(item, Dropped) else {"where": item.where})


def batched(things: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of `size` things; the last one may be shorter."""
    things = iter(things)
    while batch := list(islice(things, size)):
        yield batch


def data_digest(source: DataSource) -> dict[str, Any]:
    """Everything that decides which rows a source gives; of local files their content."""
    files = find_files(source.path)
    digest = hashlib.sha256("".join(digest_file(file) for file in files).encode()).hexdigest()
    options = source.model_dump(mode="json", exclude={"path", "limit"}, exclude_defaults=True)
    return {"rows": digest if files else fingerprint(source.path, source.revision), **options}


def prompt_column(record: Record) -> str | list[dict[str, str]]:
    """The `prompt` column of a row: text, or the messages of a conversation."""
    if record.messages:
        return [{"role": m.role, "content": m.content} for m in record.messages]
    return record.prompt


def refuse_own_output(source: DataSource, out: Path) -> None:
    """Raise ConfigError if the output would be a file of the source, or is not a .jsonl file."""
    if not out.name.endswith(".jsonl"):
        raise ConfigError(f"--out: {out}: must end in .jsonl, the rows are written as JSON Lines")
    target, source_path = out.absolute(), Path(source.path).absolute()
    inside = target.parent == source_path or fnmatch.fnmatch(str(target), str(source_path))
    if inside or target.resolve() == source_path.resolve():
        raise ConfigError(f"--out: {out}: would be one of the files of {source.path}. Write it to another folder")
