"""`rlhf data generate`: a language model writes prompts, demonstrations, or several answers to each prompt.

    OUT.jsonl             the rows, one line each, written as they come
    OUT.jsonl.dropped     what gave no row, and why, one JSON object a line
    OUT.jsonl.settings    what the rows were made with

Each item of the input ends as one line of one of the first two files, in order, so their lengths say where an
interrupted run goes on. (New prompts come several from one answer: there the last batch of answers is made again.)
Nothing here imports torch before there is something to write.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar

from rlhf_cli.artifacts import differences, digest_file, fingerprint, model_directory
from rlhf_cli.config.data import DataSource
from rlhf_cli.errors import ArtifactError, ConfigError, DataError, Interrupted, RunError
from rlhf_cli.rollout.requests import Drawing, Failure, Request, Writer, Written
from rlhf_cli.training.checkpoint_files import write_text
from rlhf_cli.training.progress import Display

if TYPE_CHECKING:
    from rlhf_cli.data.formats import Purpose
    from rlhf_cli.data.records import Message, Record

Task = Literal["prompts", "demonstrations", "samples"]
OnBadRow = Literal["error", "skip"]
Row = dict[str, Any]
T = TypeVar("T")

PROMPTS_TEMPLATE = """\
Below are requests that people sent to an assistant.

{seeds}

Write {num} more requests of this kind, on other subjects and in other words. Write each on one line of its own, with \
a number before it, and write nothing else.
"""
NUM_ASKED = 5
"""`{num}` of that template: how many prompts one answer is asked for."""
FRUITLESS = 10
"""So many batches of answers without one new prompt end the run."""
ROUNDING = 1e-9
PLACE = re.compile(r"\{(\w+)\}")
LIST_MARK = re.compile(r"(?:\d+\s*[.):]|[-*•])(?:\s+|$)")


@dataclass(frozen=True)
class WriterOptions:
    """Which model writes, and how: one from a directory, or with `server` one of that name behind it."""

    model: str
    server: str | None = None
    api_key_env: str | None = None
    temperature: float = 1.0
    top_p: float | None = None
    max_new_tokens: int = 256
    seed: int = 0
    batch_size: int = 16
    concurrency: int = 8
    timeout_s: float = 120.0
    retries: int = 5
    backoff_s: float = 1.0
    device: str = "auto"

    @property
    def chunk(self) -> int:
        """Items that are under way at a time. Chunks begin at multiples of it, also where a run goes on: the same
        batches give the same bits."""
        return 4 * self.concurrency if self.server else self.batch_size

    def settings(self) -> dict[str, Any]:
        """What decides the text. A server's address does not: a job that starts again may have another."""
        model = {"name": self.model} if self.server else {"path": self.model, "digest": self._digest()}
        return {
            "model": model,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
        }

    def _digest(self) -> str:
        return fingerprint(model_directory(self.model))

    def open(self) -> Writer:
        """The writer; a local model is loaded now."""
        drawing = Drawing(self.temperature, self.top_p, self.max_new_tokens, self.seed)
        if self.server is None:
            from rlhf_cli.rollout.local_writer import LocalWriter

            return LocalWriter(self.model, drawing, batch_size=self.batch_size, device=self.device)
        from rlhf_cli.commands.chat_server import ServerWriter

        return ServerWriter(
            self.server,
            self.model,
            drawing,
            api_key_env=self.api_key_env,
            concurrency=self.concurrency,
            timeout_s=self.timeout_s,
            retries=self.retries,
            backoff_s=self.backoff_s,
        )


@dataclass(frozen=True)
class Dropped:
    """An item that gives no row."""

    reason: str
    """A few words that the same kind of item shares, to be counted."""
    columns: dict[str, Any] = field(default_factory=dict)
    """What else is worth keeping of it."""


# ------------------------------------------------------------------------------------------- the command


def generate(
    source: DataSource,
    task: Task,
    out: Path,
    writer: WriterOptions,
    *,
    template: Path | None = None,
    num: int | None = None,
    num_samples: int = 4,
    num_seeds: int = 3,
    similarity: float = 0.7,
    on_bad_row: OnBadRow = "error",
    restart: bool = False,
    quiet: bool = False,
) -> None:
    """Write rows to `out`, or go on with it.

    prompts: `num` new ones, from answers to the template with `num_seeds` random prompts of the source in it.
    demonstrations: a response to each of the first `num` prompts of the source. samples: `num_samples` responses.
    Raises ConfigError for options that don't go together, DataError for rows that can't be read, ArtifactError for
    an `out` that can't be written or gone on with, RunError where the server answers no more: what is written stands.
    """
    text = read_template(template, ["seeds"] if task == "prompts" else ["prompt"])
    refuse_own_output(source, out)
    settings = {"task": task, "data": data_digest(source), **writer.settings()}
    display = Display("generate", quiet=quiet)
    if task == "prompts":
        if num is None:
            raise ConfigError("--task prompts: how many? Give --num")
        text = text or PROMPTS_TEMPLATE
        settings |= {"template": text, "num_seeds": num_seeds, "similarity": similarity}
        with Output(out, settings, restart=restart) as output:
            read = items(source, "ppo", on_bad_row)
            seeds = [_seed(item) for item in read if not isinstance(item, Dropped)]
            _write_prompts(output, seeds, text, num, writer, num_seeds, similarity, display)
            display.note(_summary(output, writer.max_new_tokens))
        return
    num_answers = num_samples if task == "samples" else 1
    settings |= {"template": text, "num_answers": num_answers}
    with Output(out, settings, restart=restart) as output:
        _write_answers(output, source, task, text, num, writer, num_answers, on_bad_row, display)
        display.note(_summary(output, writer.max_new_tokens))


def _write_answers(
    output: Output,
    source: DataSource,
    task: Task,
    template: str | None,
    num: int | None,
    options: WriterOptions,
    num_answers: int,
    on_bad_row: OnBadRow,
    display: Display,
) -> None:
    from rlhf_cli.data.records import Message

    drawn = {"model": options.model, "temperature": options.temperature, "seed": options.seed}
    needed = min(2, num_answers)  # One answer alone can't be ranked.

    def messages(record: Record) -> tuple[Message, ...]:
        if template is not None:
            return (Message("user", fill(template, prompt=record.prompt)),)
        return record.messages or (Message("user", record.prompt),)

    def outcome(record: Record, answers: list[Written | Failure]) -> Row | Dropped | Failure:
        failures = [answer for answer in answers if isinstance(answer, Failure)]
        written = [answer for answer in answers if isinstance(answer, Written) and answer.text.strip()]
        if any(failure.fatal for failure in failures) or (failures and len(written) < needed):
            return max(failures, key=lambda failure: failure.fatal)
        if len(written) < needed:
            return Dropped("empty answers")
        return _row(task, record, written) | drawn

    def answer(writer: Writer, numbered: Sequence[tuple[int, Record]]) -> list[Row | Dropped | Failure]:
        requests = [Request(messages(record), (n, k)) for n, record in numbered for k in range(num_answers)]
        answers = iter(writer.write(requests))
        return [outcome(record, list(islice(answers, num_answers))) for _, record in numbered]

    each_item(output, lambda: items(source, "ppo", on_bad_row, _require_prompt), num, options, answer, display)


def _require_prompt(record: Record) -> None:
    if not record.prompt.strip():
        raise DataError(
            f"{record.where}: the row has no prompt, there is nothing to answer. Give prompts, or map --key"
        )


def _row(task: Task, record: Record, answers: list[Written]) -> dict[str, Any]:
    texts, ended = [answer.text for answer in answers], [answer.ended for answer in answers]
    if task == "samples":
        # Scores of null: without them a list of answers is one that stands best first.
        return {"prompt": prompt_column(record), "responses": texts, "scores": [None] * len(texts), "ended": ended}
    return {"prompt": prompt_column(record), "response": texts[0], "ended": ended[0]}


def prompt_column(record: Record) -> str | list[dict[str, str]]:
    """A record's prompt as our rows have it: text, or the messages of a conversation."""
    if record.messages:
        return [{"role": m.role, "content": m.content} for m in record.messages]
    return record.prompt


def _summary(output: Output, max_new_tokens: int) -> str:
    cut = 0
    for row in output.rows():
        ended = row.get("ended", True)
        cut += ended.count(False) if isinstance(ended, list) else not ended
    told = f", {cut} answers cut at {max_new_tokens} tokens (`ended` is false there)" if cut else ""
    return f"{output.path}: {output.num_rows} rows{told}{output.what_was_dropped()}"


# ------------------------------------------------------------------------------------------- new prompts


def _write_prompts(
    output: Output,
    seeds: list[str],
    template: str,
    num: int,
    options: WriterOptions,
    num_seeds: int,
    similarity: float,
    display: Display,
) -> None:
    """Ask in rounds until there are `num` new prompts, as Self-Instruct does (Wang et al. 2023).

    A round's seeds are drawn from (seed, round), and its lines know their round. What is too similar to a seed or to
    a prompt before it is dropped. Going on, a local model makes the last chunk of rounds again, so that the same
    prompts are compared with the same pool; a server, whose answers come only once, is asked the next chunk.
    """
    if not seeds:
        raise DataError("no seed prompt can be read, at least one is needed")
    if output.num_rows >= num:
        return
    last = max((line["round"] for line in (*output.last_row(), *output.last_drop())), default=-1)
    start = (last // options.chunk + (1 if options.server else 0)) * options.chunk if last >= 0 else 0
    output.cut_from("round", start)
    known = Known(similarity)
    for text in (*seeds, *(row["prompt"] for row in output.rows())):
        known.add(text)

    import torch

    from rlhf_cli.data.records import Message
    from rlhf_cli.seeding import generator

    writer = options.open()
    fruitless = 0
    display.begin(num, "prompts", output.num_rows)
    while output.num_rows < num:
        rounds, before = range(start, start + options.chunk), output.num_rows
        requests = []
        for n in rounds:
            order = torch.randperm(len(seeds), generator=generator(options.seed, "seed prompts", n)).tolist()
            shown = "\n".join(f"{place}. {seeds[i]}" for place, i in enumerate(order[:num_seeds], 1))
            content = fill(template, seeds=shown, num=str(NUM_ASKED))
            requests.append(Request((Message("user", content),), (n,)))
        answers = writer.write(requests)
        output.refuse_all_failed(answers)
        for n, answer in zip(rounds, answers, strict=True):
            if isinstance(answer, Failure):
                output.take(answer, {"round": n})
                continue
            found = prompts_in(answer.text, ended=answer.ended)
            if not found:
                output.take(Dropped("no prompt in the answer"), {"round": n})
            for text in found:
                if output.num_rows == num:
                    break
                like = known.similar(text)
                if like is not None:
                    output.take(Dropped("too similar to another"), {"round": n, "prompt": text, "other": like})
                    continue
                known.add(text)
                drawn = {"model": options.model, "temperature": options.temperature, "seed": options.seed, "round": n}
                output.take({"prompt": text, **drawn}, {})
        fruitless = 0 if output.num_rows > before else fruitless + 1
        if fruitless == FRUITLESS:
            raise RunError(
                f"{output.path}: no new prompt in the last {FRUITLESS * options.chunk} answers, {output.num_rows} of "
                f"{num} are written; {output.dropped_path.name} says what came. Raise --temperature or --similarity, "
                "give more seeds or another --template"
            )
        display.step(output.num_rows, f"dropped {output.num_dropped}")
        start = rounds.stop
    display.end()


def _seed(record: Record) -> str:
    """What of a row is shown as a seed: its prompt, of a conversation the last message, of a text all of it."""
    return one_line(record.messages[-1].content if record.messages else record.prompt or record.key)


def prompts_in(answer: str, *, ended: bool = True) -> list[str]:
    """The prompts of an answer, one a line: only the lines with a list mark where there are such, else all.

    The last line of an answer that did not end is half a prompt and is left out.

    >>> prompts_in("Sure!\\n1. Write a poem.\\n2) Name two rivers.")
    ['Write a poem.', 'Name two rivers.']
    >>> prompts_in("- Name a fish\\n- Name a bi", ended=False)
    ['Name a fish']
    """
    lines = [line.strip() for line in answer.splitlines()]
    if not ended:
        lines = lines[:-1]
    marked = [LIST_MARK.sub("", line, count=1).strip() for line in lines if LIST_MARK.match(line)]
    return [line for line in marked or lines if line]


class Known:
    """Prompts, and whether another one is nearly one of them.

    A and B are similar when the share of their words that they have in common, |A and B| / |A or B| of the sets of
    words in lower case (Jaccard), is `threshold` or more. Order and repetition don't count.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold
        self._known: list[tuple[frozenset[str], str]] = []
        self._marked: dict[str, list[int]] = {}

    def add(self, text: str) -> None:
        """Compare later ones with this one too."""
        own = words(text)
        for word in self._marks(own):
            self._marked.setdefault(word, []).append(len(self._known))
        self._known.append((own, text))

    def similar(self, text: str) -> str | None:
        """The first that `text` is similar to, or None."""
        own = words(text)
        for n in sorted({n for word in self._marks(own) for n in self._marked.get(word, ())}):
            other, known = self._known[n]
            if len(own & other) >= self.threshold * len(own | other) - ROUNDING:
                return known
        return None

    def _marks(self, own: frozenset[str]) -> list[str]:
        """Words of which two similar sets have one in common at least (Bayardo et al. 2007).

        Of n words all but `threshold * n` may be missing in the other set. So if both are in the same order, a common
        one is among the first n - ceil(threshold * n) + 1 of both. Long words first: few others have them.
        """
        first = len(own) - math.ceil(self.threshold * len(own) - ROUNDING) + 1
        return sorted(own, key=lambda word: (-len(word), word))[:first]


def words(text: str) -> frozenset[str]:
    """The words of a text as a set, in lower case; the text itself where it has none.

    >>> sorted(words("What is the TIME, what time?"))
    ['is', 'the', 'time', 'what']
    """
    return frozenset(re.findall(r"\w+", text.casefold()) or [text.strip()])


def one_line(text: str) -> str:
    """A text with its line breaks and runs of blanks as one blank each."""
    return " ".join(text.split())


# -------------------------------------------------------------------- what generate and score have in common


def items(
    source: DataSource, purpose: Purpose, on_bad_row: OnBadRow, check: Callable[[Record], None] | None = None
) -> Iterator[Record | Dropped]:
    """The rows of a source as records; one that can't be read, or that `check` raises DataError for, ends the
    command, or with `skip` is Dropped."""
    from rlhf_cli.data.formats import read_record, recognise
    from rlhf_cli.data.sources import BadRow, read_rows

    format_ = None
    for row in read_rows(source):
        try:
            if isinstance(row, BadRow):
                raise DataError(f"{row.where}: {row.reason}")
            if format_ is None:
                format_ = recognise(row, source, purpose)
            record = read_record(row, format_, source)
            if check is not None:
                check(record)
        except DataError as error:
            # A first row that nobody recognises says that the file is another one, not that a row is broken.
            if on_bad_row == "error" or (format_ is None and not isinstance(row, BadRow)):
                raise
            yield Dropped("can't be read", {"detail": str(error)})
            continue
        yield record


def each_item(
    output: Output,
    read: Callable[[], Iterator[Record | Dropped]],
    num: int | None,
    options: WriterOptions,
    answer: Callable[[Writer, Sequence[tuple[int, Record]]], list[Row | Dropped | Failure]],
    display: Display,
) -> None:
    """Bring each of the first `num` items to a line of the output, behind those that are there.

    Everything is read once before the model is asked, so that a broken row costs nothing. `answer` gets records
    with their numbers and gives what becomes of each.
    """
    total = sum(1 for _ in islice(read(), num))
    done = output.num_rows + output.num_dropped
    if done >= total:
        return
    writer = options.open()
    display.begin(total, "rows", done)
    for number, chunk in enumerate(batched(islice(read(), num), options.chunk)):
        begin = number * options.chunk
        if begin + len(chunk) <= done:
            continue
        # The rows of a chunk that are written already are answered again by a local model: the same batches give
        # the same bits. A server's answers would differ anyway, and cost.
        skip = max(0, done - begin)
        first = skip if options.server else 0
        records = [(begin + n, item) for n, item in enumerate(chunk) if n >= first and not isinstance(item, Dropped)]
        found = dict(zip((n for n, _ in records), answer(writer, records), strict=True))
        outcomes = [item if isinstance(item, Dropped) else found.get(begin + n) for n, item in enumerate(chunk)]
        output.refuse_all_failed(list(found.values()))
        for item, outcome in zip(chunk[skip:], outcomes[skip:], strict=True):
            assert outcome is not None
            output.take(outcome, {} if isinstance(item, Dropped) else {"where": item.where})
        display.step(output.num_rows + output.num_dropped, f"dropped {output.num_dropped}")
    display.end()


def batched(things: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of `size`, the last one of what is left."""
    things = iter(things)
    while batch := list(islice(things, size)):
        yield batch


def read_template(path: Path | None, needed: Sequence[str]) -> str | None:
    """The text of a template file; raises ConfigError where it can't be read or lacks one of its places."""
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigError(f"--template: {path}: can't be read ({reason})") from None
    missing = [f"{{{name}}}" for name in needed if name not in PLACE.findall(text)]
    if missing:
        raise ConfigError(f"--template: {path}: has no {' and no '.join(missing)} in it, where the text goes")
    return text


def fill(template: str, **values: str) -> str:
    """The template with each `{name}` that has a value replaced by it, all at once: what stands in a value stays.

    >>> fill("{prompt} -> {response} {x}", prompt="{response}?", response="yes")
    '{response}? -> yes {x}'
    """
    return PLACE.sub(lambda place: values.get(place[1], place[0]), template)


def data_digest(source: DataSource) -> dict[str, Any]:
    """What decides which rows a source gives, its files by their bytes."""
    from rlhf_cli.data.sources import find_files

    files = find_files(source.path)
    whole = hashlib.sha256("".join(digest_file(file) for file in files).encode()).hexdigest()
    how = source.model_dump(mode="json", exclude={"path", "limit"}, exclude_defaults=True)
    return {"rows": whole if files else fingerprint(source.path, source.revision), **how}


def refuse_own_output(source: DataSource, out: Path) -> None:
    """Raise ConfigError where what is written would be read again as a row of the source, or is no .jsonl."""
    if not out.name.endswith(".jsonl"):
        raise ConfigError(f"--out: {out}: must end in .jsonl, one JSON object a line is written")
    place, source_path = out.absolute(), Path(source.path).absolute()
    inside = place.parent == source_path or fnmatch.fnmatch(str(place), str(source_path))
    if inside or place.resolve() == source_path.resolve():
        raise ConfigError(f"--out: {out}: would be one of the files of {source.path}. Write it to another folder")


class Output:
    """Rows and dropped items, a line each, in files that an interrupted run of the same settings goes on with.

    Raises ArtifactError where the files are another program's, in use, a link or not to be written, and ConfigError
    where the settings differ from those of the rows that are there (`restart` begins anew).
    """

    def __init__(self, path: Path, settings: dict[str, Any], *, restart: bool = False):
        self.path, self.restart = path, restart
        self.dropped_path = path.with_name(path.name + ".dropped")
        self.settings_path = path.with_name(path.name + ".settings")
        self.settings = json.loads(json.dumps(settings))
        self.num_rows = self.num_dropped = 0
        self._files: list[BinaryIO] = []

    def __enter__(self) -> Output:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._files = [self._open(self.path), self._open(self.dropped_path)]
            self._begin()
        except OSError as error:
            self._close()
            raise self._unwritable(error) from None
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(
                f"interrupted: {self.num_rows} rows are in {self.path}, and the same command goes on behind them", 130
            ) from None

    def _open(self, path: Path) -> BinaryIO:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644), "r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ArtifactError(f"{path}: another process is writing it. Wait for it, or give another --out") from None
        return file

    def _begin(self) -> None:
        rows, drops = self._files
        before = self._settings_before()
        empty = all(os.fstat(file.fileno()).st_size == 0 for file in self._files)
        if before is None and not empty:
            raise ArtifactError(
                f"{self.path}: is there already, and {self.settings_path.name}, which says how it was made, is not "
                "there or can't be read. Remove the file, or give another --out"
            )
        if self.restart:
            # Without settings, what a kill leaves from here on is never taken for rows of these.
            self.settings_path.unlink(missing_ok=True)
            rows.truncate(0)
            drops.truncate(0)
            empty = True
        if empty:
            write_text(self.settings_path, json.dumps(self.settings, indent=2) + "\n")
        elif before is not None and (changed := differences(before, self.settings)):
            raise ConfigError(
                f"{self.path}: was made with other settings: {self._changes(before, changed)}. Give those, another "
                "--out, or --restart to begin anew"
            )
        self.num_rows, self.num_dropped = _whole_lines(rows), _whole_lines(drops)

    def _settings_before(self) -> dict[str, Any] | None:
        try:
            values = json.loads(self.settings_path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return values if isinstance(values, dict) else None

    def _changes(self, before: dict[str, Any], changed: list[str]) -> str:
        told = []
        for key in changed:
            old, new = (_at(values, key) for values in (before, self.settings))
            short = all(isinstance(v, int | float | None) or (isinstance(v, str) and len(v) < 60) for v in (old, new))
            told.append(f"{key} ({json.dumps(old)}, now {json.dumps(new)})" if short else key)
        return ", ".join(told)

    def take(self, outcome: Row | Dropped | Failure, about: dict[str, Any]) -> None:
        """Write what became of an item: a row, or why there is none with what is known `about` the item.

        Raises RunError for a Failure that ends the run.
        """
        if isinstance(outcome, dict):
            self._line(0, outcome)
            self.num_rows += 1
            return
        if isinstance(outcome, Dropped):
            line = {"reason": outcome.reason, **about, **outcome.columns}
        elif outcome.fatal:
            raise RunError(f"{about['where']}: {outcome.reason}" if "where" in about else outcome.reason)
        else:
            line = {"reason": "no answer", **about, "detail": outcome.reason}
        self._line(1, line)
        self.num_dropped += 1

    def refuse_all_failed(self, outcomes: Sequence[Any]) -> None:
        """Raise RunError where nothing is written yet and none of these was answered: it is not about one row."""
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        if any(failure.fatal for failure in failures):
            return  # `take` says what it is.
        if self.num_rows + self.num_dropped == 0 and failures and len(failures) == len(outcomes):
            raise RunError(f"{self.path}: none of the first {len(failures)} rows was answered: {failures[0].reason}")

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows that are written, from the file."""
        return self._read(self.path)

    def drops(self) -> Iterator[dict[str, Any]]:
        """The dropped items that are written, from the file."""
        return self._read(self.dropped_path)

    def last_row(self) -> list[dict[str, Any]]:
        """The last row, or nothing."""
        return _last(self.rows())

    def last_drop(self) -> list[dict[str, Any]]:
        """The last dropped item, or nothing."""
        return _last(self.drops())

    def cut_from(self, key: str, value: int) -> None:
        """Remove the lines from the first one on whose `key`, which never falls, is `value` or more."""
        for file in self._files:
            file.seek(0)
            end = 0
            for line in file:
                if json.loads(line)[key] >= value:
                    break
                end += len(line)
            file.truncate(end)
        self.num_rows, self.num_dropped = map(_whole_lines, self._files)

    def what_was_dropped(self) -> str:
        """For the last line of a run: how many items gave no row, and why."""
        reasons = Counter(drop["reason"] for drop in self.drops())
        if not reasons:
            return ""
        told = ", ".join(f"{number} {reason}" for reason, number in reasons.most_common())
        return f"; {self.num_dropped} dropped ({told}), see {self.dropped_path.name}"

    def _read(self, path: Path) -> Iterator[dict[str, Any]]:
        with path.open("rb") as file:
            for line in file:
                yield json.loads(line)

    def _line(self, which: int, values: dict[str, Any]) -> None:
        try:
            line = json.dumps(values, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:  # Half a character in a column that came with the row.
            line = json.dumps(values, default=str).encode()
        try:
            self._files[which].write(line + b"\n")
            self._files[which].flush()
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> ArtifactError:
        return ArtifactError(
            f"{error.filename or self.path}: can't be written ({error.strerror or error}). Make room, remove what is "
            "in the way, or give another --out"
        )

    def _close(self) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):  # A full disk was told of when the line was written.
                file.close()


def _whole_lines(file: BinaryIO) -> int:
    """How many lines a file has, after half a line at its end, which a kill left, is cut off."""
    file.seek(0)
    count = end = 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        count, end = count + 1, end + len(line)
    file.truncate(end)
    return count


def _last(lines: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    last: list[dict[str, Any]] = []
    for line in lines:
        last = [line]
    return last


def _at(values: dict[str, Any], dotted: str) -> Any:
    found: Any = values
    for key in dotted.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found
