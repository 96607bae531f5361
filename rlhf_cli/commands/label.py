"""`rlhf label`: a person says on a local page which of two replies is better.

`rlhf_cli.commands.output` describes the files. A tie and a skipped pair are lines of the file of dropped items.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rlhf_cli.algorithms.counts import cohen_kappa, wilson_interval
from rlhf_cli.commands.options import SOURCE_HELP, OnBadRow, RestartOut, SourceOptions
from rlhf_cli.commands.output import (
    Dropped,
    Line,
    Outcome,
    Output,
    data_digest,
    items,
    prompt_column,
    read_lines,
    refuse_own_output,
    text_of,
)
from rlhf_cli.commands.serving import Server, bind, json_line
from rlhf_cli.config.data import DataSource
from rlhf_cli.data.paths import COMPRESSIONS, find_files
from rlhf_cli.errors import ArtifactError, ConfigError, DataError
from rlhf_cli.files import json_object
from rlhf_cli.printing import say
from rlhf_cli.program import command

if TYPE_CHECKING:
    from rlhf_cli.data.records import Record

COMPARED = ("sft", "base")  # prefixes of the second response in a row of `rlhf generate --compare`
TIE, SKIPPED = "tie", "skipped"
"""Reasons in the file of dropped items."""
REASONS = {"t": TIE, "s": SKIPPED}
KEYS = ("1", "2", "t", "s", "b", "q")  # first is better, second is better, tie, skip, back, quit


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
        given: dict[str, object] = {"--out": out, "--labeller": labeller, "--port": port, "--num": num, "--seed": seed}
        given |= {"--restart": restart, "--set": reading.overrides, "--format": reading.format, "--key": reading.keys}
        given |= {"--on-bad-row": reading.on_bad_row != "error"}
        if option := next((name for name, value in given.items() if value), None):
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
        labelling = Labelling(pairs, output, seed, labeller, num)
        serve(labelling, port)
        for line in labelling.summary() if output.is_started else [f"no answer, {out} is as it was before"]:
            say(f"label: {line}", error=True)
        if labelling.done < labelling.total:
            say(f"label: run {output.to_resume} to resume", error=True)
        elif output.num_rows:
            train = command("rm", "YOUR_rm.yaml", "--set", f"data.train={out}")
            say(f"label: to train a reward model on them: {train}", error=True)


def default_out(source: DataSource, labeller: str | None) -> Path:
    """Where the answers go without --out: `replies.labels.jsonl` or `replies.labels.NAME.jsonl` beside them."""
    path = Path(source.path)
    if find_files(source.path) != [path]:
        raise ConfigError(f"--out: is missing. {source.path} is not a single file, so say where the answers go")
    if labeller is not None and ("/" in labeller or not labeller.isprintable() or not labeller.strip()):
        raise ConfigError(f"--labeller: {labeller!r} cannot be part of a file name. Choose another, or give --out")
    stem = path.stem if path.suffix in COMPRESSIONS else path.name
    return path.with_name(f"{Path(stem).stem}.labels{'' if labeller is None else '.' + labeller}.jsonl")


# ------------------------------------------------------------------------------------------- pairs


@dataclass(frozen=True)
class Candidate:
    text: str
    column: str  # the column that it comes from. The labeller does not see it.
    ended: bool = True


@dataclass(frozen=True)
class Pair:
    prompt: str  # as it is shown; a conversation is a transcript
    prompt_column: str | list[dict[str, str]]
    replies: tuple[Candidate, Candidate]
    where: str


def pairs_of(source: DataSource, on_bad_row: OnBadRow) -> tuple[list[Pair], Counter[str]]:
    """The pairs of a source, and why others are not shown.

    A row of several answers gives the first with the second, the third with the fourth, and so on. Equal replies teach
    nothing, and `rlhf rm` refuses a blank one. Raises DataError for rows that cannot be read or have a single reply.
    """
    pairs: list[Pair] = []
    unseen = Counter[str]()
    for item in items(source, "sft", on_bad_row):
        if isinstance(item, Dropped):
            unseen["cannot be read"] += 1
            continue
        replies = _replies(item, source)
        if len(replies) < 2:
            advice = "Write two with `rlhf generate --compare` or `rlhf data generate --task samples`"
            found = f"{item.where}: the row has {'1 reply' if replies else 'no replies'}, a pair needs two"
            raise DataError(f"{found}. {advice}, or map columns with --key chosen=A --key rejected=B")
        for a, b in zip(replies[::2], replies[1::2], strict=False):
            if not (a.text.strip() and b.text.strip()):
                unseen["a reply is blank"] += 1
            elif a.text.strip() == b.text.strip():
                unseen["the replies are equal"] += 1
            else:
                pairs.append(Pair(item.prompt, prompt_column(item), (a, b), item.where))
    return pairs, unseen


def _replies(record: Record, source: DataSource) -> list[Candidate]:
    """The replies of a row, each with the column of the file that it comes from."""
    columns, count = record.columns, len(record.answers)
    names = ["response"] if count == 1 else [f"reply {n}" for n in range(1, count + 1)]
    if {"chosen", "rejected"} <= {*columns, *source.keys} and count == 2:
        names = [source.keys.get(name, name) for name in ("chosen", "rejected")]
    each = zip(record.answers, names, strict=True)
    replies = [Candidate(text_of(record, answer.text), name, answer.ended) for answer, name in each]
    for prefix in COMPARED if count == 1 else ():
        if isinstance(other := columns.get(f"{prefix}_response"), str):
            replies.append(Candidate(other, f"{prefix}_response", columns.get(f"{prefix}_ended") is not False))
    return replies


def pair_digest(prompt: str, replies: Sequence[str]) -> str:
    """The identity of a pair, whatever the order of its replies and the white space around them."""
    return _digest(prompt.strip(), *sorted(text.strip() for text in replies)).hex()[:16]


def _digest(*parts: str | int | None) -> bytes:
    return hashlib.sha256(json.dumps(parts).encode()).digest()


# ------------------------------------------------------------------------------------------- answers


class Labelling:
    """The answers of one labeller. The number of lines in the files of `output` says which pair is next.

    The seed alone decides the order of the pairs, so two labellers who stop early have seen the same pairs. The seed
    and the labeller decide the sides, so a habit of taking the first reply is no agreement.
    """

    def __init__(self, pairs: Sequence[Pair], output: Output, seed: int, labeller: str | None, num: int | None = None):
        order = sorted(range(len(pairs)), key=lambda n: _digest("order", seed, n))[:num]
        swapped = {n for n in order if _digest("side", seed, labeller, n)[0] % 2 == 1}
        self.pairs = [replace(pairs[n], replies=pairs[n].replies[::-1]) if n in swapped else pairs[n] for n in order]
        self.output, self.labeller = output, labeller
        numbers = [line.number("number") for lines in (output.rows(), output.drops()) for line in map(_checked, lines)]
        last = max(numbers, default=-1)
        if last + 1 != self.done or len(set(numbers)) != self.done:
            found = f"{self.done} answers are in it and in {output.dropped_path.name}"
            advice = "Restore the missing lines, give another --out, or pass --restart to start over"
            raise ArtifactError(f"{output.path}: {found}, but the last one is number {last + 1}. {advice}")

    @property
    def done(self) -> int:
        return self.output.num_rows + self.output.num_dropped

    @property
    def total(self) -> int:
        """Number of pairs, at least those with an answer."""
        return max(len(self.pairs), self.done)

    @property
    def current(self) -> dict[str, Any] | None:
        """The number, prompt and replies of the next pair; None if every pair has an answer."""
        if self.done >= len(self.pairs):
            return None
        pair = self.pairs[self.done]
        return {"number": self.done, "prompt": pair.prompt, "replies": [reply.text for reply in pair.replies]}

    def take(self, key: str) -> bool:
        """Write the answer of a key to the current pair, or take back the last one; False if there is none.

        The answer is then on the disk. Raises ArtifactError if it cannot be written.
        """
        number = self.done
        if key == "b":
            if number == 0:
                return False
            self.output.cut_from("number", number - 1)
        elif number >= len(self.pairs):
            return False
        else:
            self.output.write(self._outcome(number, key), {})
        self.output.sync()
        return True

    def _outcome(self, number: int, key: str) -> Outcome:
        pair = self.pairs[number]
        labeller = {} if self.labeller is None else {"labeller": self.labeller}
        about: dict[str, Any] = {"where": pair.where, "number": number, **labeller}
        if key in REASONS:
            columns = [reply.column for reply in pair.replies]
            digest = pair_digest(pair.prompt, [reply.text for reply in pair.replies])
            return Dropped(REASONS[key], {**about, "pair": digest, "columns": columns})
        chosen, rejected = pair.replies if key == "1" else pair.replies[::-1]
        row: dict[str, Any] = {"prompt": pair.prompt_column, "chosen": chosen.text, "rejected": rejected.text}
        if not (chosen.ended and rejected.ended):
            row["ended"] = [chosen.ended, rejected.ended]
        return {**row, "chosen_column": chosen.column, "rejected_column": rejected.column, "side": int(key), **about}

    def counts(self) -> dict[str, int]:
        reasons = Counter(drop["reason"] for drop in self.output.drops())
        return {"preferences": self.output.num_rows, "ties": reasons[TIE], "skipped": reasons[SKIPPED]}

    def summary(self) -> list[str]:
        """The counts, and, once every pair has an answer, which column won and which side."""
        counts = ", ".join(f"{name} {count}" for name, count in self.counts().items())
        lines = [f"{self.output.path}: {self.done} of {self.total} pairs: {counts}"]
        if self.done < self.total or not self.output.num_rows:
            return lines
        rows = list(self.output.rows())
        first = sum(row["side"] == 1 for row in rows)
        lines.append(f"the first reply was better in {rate(first, len(rows))}; without position bias half")
        ties = [drop["columns"] for drop in self.output.drops() if drop["reason"] == TIE]
        columns = {name for row in rows for name in (row["chosen_column"], row["rejected_column"])}
        columns |= {name for names in ties for name in names}
        if len(columns) == 2 and not any(name.startswith("reply ") for name in columns):
            name, other = sorted(columns, key=lambda name: (name != "response", name))
            won = sum(row["chosen_column"] == name for row in rows) + len(ties) / 2
            halves = ", a tie counts as half" if ties else ""
            lines.append(f"`{name}` was better than `{other}` in {rate(won, len(rows) + len(ties))}{halves}")
        return lines


def _checked(line: Line) -> Line:
    """A line of an earlier run. Raises ArtifactError if it was edited and does not hold an answer any more."""
    if "reason" in line:
        names, is_answer = line["columns"], line["reason"] in (TIE, SKIPPED)
        rule = f"`reason` must be {TIE} or {SKIPPED}"
    else:
        names, is_answer = [line["chosen_column"], line["rejected_column"]], line["side"] in (1, 2)
        rule = "`side` must be 1 or 2"
    if not isinstance(names, list) or [type(name) for name in names] != [str, str] or not is_answer:
        raise line.error(f"{rule}, and the names of the columns two texts")
    return line


def rate(successes: float, n: int) -> str:
    """A rate with its 95 % interval.

    >>> rate(31, 50)
    '31 of 50 (62.0 %, 95 % interval 48.2 % to 74.1 %)'
    """
    low, high = (f"{100 * bound:.1f} %" for bound in wilson_interval(successes, n))
    return f"{successes:g} of {n} ({100 * successes / n:.1f} %, 95 % interval {low} to {high})"


# ------------------------------------------------------------------------------------------- the page

#    GET  /TOKEN/         the page, one HTML file
#    GET  /TOKEN/state    the current pair
#    POST /TOKEN/answer   {"done": number of answers that the page knows of, "key": "1"}  ->  the next pair
#
# TOKEN is random, so that other users of the machine cannot read or answer.

MAX_BODY_BYTES = 1024
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Page(Server):
    def __init__(self, labelling: Labelling, port: int):
        self.labelling, self.token = labelling, secrets.token_urlsafe(16)
        self.ended = threading.Event()
        self.error: ArtifactError | None = None  # why answers cannot be written any more
        place = f"/{self.token}/"
        routes = [
            Route(place, page),
            Route(f"{place}state", self.show),
            Route(f"{place}answer", self.answer, methods=["POST"]),
        ]
        super().__init__(bind(None, port), routes, None, lambda text, _: {"error": text})

    async def show(self, _request: Request) -> Response:
        return self.state()

    async def answer(self, request: Request) -> Response:
        """Take a key, if the page knows of all answers; else only send it the current pair."""
        body = json_object(await self.read(request, MAX_BODY_BYTES)) or {}
        key, done = body.get("key"), body.get("done")
        if not isinstance(key, str) or key not in KEYS:
            return self.state(400, error="no such key")
        if key == "q":
            self.ended.set()
            return self.state(ended=True)
        if done != self.labelling.done:
            return self.state(409, error="another window has answered this pair")
        try:
            taken = self.labelling.take(key)
        except ArtifactError as error:
            self.error = error
            self.ended.set()
            return json_line({"error": str(error), "ended": True}, 507, HEADERS)
        return self.state() if taken else self.state(400, error="no such answer here")

    def state(self, status: int = 200, **more: Any) -> Response:
        labelling = self.labelling
        pair = labelling.current or {"number": None, "prompt": "", "replies": ["", ""]}
        state = {**pair, "done": labelling.done, "total": labelling.total, "counts": labelling.counts()}
        return json_line({"state": state, **more}, status, HEADERS)


async def page(_request: Request) -> Response:
    """The HTML file. Only its own script and style run, by a nonce."""
    nonce = secrets.token_urlsafe(16)
    text = (resources.files("rlhf_cli.commands") / "label_page.html").read_text(encoding="utf-8")
    headers = {**HEADERS, "Content-Security-Policy": POLICY.format(nonce=nonce)}
    return Response(text.replace("NONCE", nonce), media_type="text/html", headers=headers)


def serve(labelling: Labelling, port: int) -> None:
    """Serve the page until its `q`, SIGINT or SIGTERM. Raises ArtifactError when an answer cannot be written."""
    server = Page(labelling, port)
    address = f"{server.url}/{server.token}/"
    server.run_until_signal(f"label: open {address} in a browser on this machine; Ctrl-C ends", server.ended)
    if server.error is not None:
        raise server.error


# ------------------------------------------------------------------------------------------- agreement


def show_agreement(first: Path, second: Path) -> None:
    """Print the agreement on the pairs that both files have: rows of `rlhf label`, a judge, or a data set."""
    a, b = labels_in(first), labels_in(second)
    common = [pair for pair in a if pair in b]
    both = [(a[pair], b[pair]) for pair in common if SKIPPED not in (a[pair], b[pair])]
    if not both:
        raise DataError(f"{second}: no pair has an answer both here and in {first}. Label the same file with both")
    names = sorted({label for labels in both for label in labels}, key=[*"12", TIE].index)
    table = [[both.count((i, j)) for j in names] for i in names]
    kappa, low, high = cohen_kappa(table)
    known = f"{kappa:.2f} (95 % interval {low:.2f} to {high:.2f}; 0 is chance, 1 is full agreement)"
    say(f"{len(both)} pairs have an answer in both files")
    say(f"  same answer       {rate(sum(i == j for i, j in both), len(both))}")
    say(f"  Cohen's kappa     {'not defined: every answer is the same' if math.isnan(kappa) else known}")
    ties = [labels.count(TIE) for labels in both]
    opposite = sum(i != j and TIE not in (i, j) for i, j in both)
    for name, count in {"opposite": opposite, "tie in one": ties.count(1), "tie in both": ties.count(2)}.items():
        say(f"  {name:16}  {count}")
    without = {"skipped in one": len(common) - len(both)}
    without |= {f"only in {path}": len(labels) - len(common) for path, labels in ((first, a), (second, b))}
    if any(without.values()):
        say("not counted: " + ", ".join(f"{count} {reason}" for reason, count in without.items() if count))


def labels_in(path: Path) -> dict[str, str]:
    """The answer to each pair: "1" or "2" for the better reply in the order of the replies' digests, or a tie.

    Kappa's chance agreement depends on which reply is called the first. In the order of a file of `chosen` and
    `rejected`, two labellers who mostly follow it would agree by chance. If a pair occurs several times, its first
    answer counts.
    """
    labels: dict[str, str] = {}
    dropped, has_rows = path.with_name(path.name + ".dropped"), True
    if dropped.is_file():
        has_rows = not path.is_file() or path.stat().st_size > 0
        for drop in read_lines(dropped):
            if isinstance(drop.get("pair"), str) and drop["reason"] in (TIE, SKIPPED):
                labels.setdefault(drop["pair"], drop["reason"])
    for item in items(DataSource(path=str(path)), "rm pairs", "error") if has_rows else ():
        assert not isinstance(item, Dropped)
        if (label := _label(item)) is not None:
            labels.setdefault(pair_digest(item.prompt, item.texts), label)
    if not labels:
        raise DataError(f"{path}: has no row with two answers of which one is better")
    return labels


def _label(record: Record) -> str | None:
    """ "1", "2" or a tie; None if the row has not two answers, or does not say which one is better."""
    texts = [text.strip() for text in record.texts]
    if len(texts) != 2 or not (record.ranked or len(record.scores) == 2):
        return None
    if not record.ranked:
        a, b = record.scores
        if a == b:
            return TIE
        texts = texts if a > b else texts[::-1]
    return "1" if hashlib.sha256(texts[0].encode()).digest() < hashlib.sha256(texts[1].encode()).digest() else "2"
