"""The rows of a stage: read, mixed, split and deduplicated, and what the stage sees of each.

`StageRows` says which rows a stage reads and with which options, and its `view` leaves the answers that the stage uses.
The stages and `rlhf data check` read rows through it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlhf_cli.config.data import Data, DataSource, Rows, TextRows
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.data.encode import LengthLimits, Skipped
from rlhf_cli.data.formats import Format, Purpose, recognise
from rlhf_cli.data.read import read_records, read_rows
from rlhf_cli.data.records import ASSISTANT, SPEAKERS, Answer, Record, Row, number
from rlhf_cli.data.row_counts import DUPLICATE, Report
from rlhf_cli.data.splits import in_part, in_share, is_held_out, num_copies
from rlhf_cli.errors import DataError

if TYPE_CHECKING:
    import torch

BLANK = "an answer is blank"
"""The reason to skip a row with an answer of white space, such as HH-RLHF has: SFT would learn to end at once, and the
reward model to prefer it."""


@dataclass(frozen=True)
class StageRows:
    """Which rows a stage reads for one purpose, and the options that decide what it sees and keeps of them."""

    rows: Rows
    purpose: Purpose
    role: str = "data"
    """The section that the rows come from, for messages: data, data.probes or ptx."""
    limits: LengthLimits | None = None
    """Length limits in tokens. None keeps every length."""
    length_key: str = "data.max_length"
    """The key that sets the longest sequence."""
    template: str | None = None
    prompt_words: int = 0
    learn_all: bool = False
    """SFT: learn the prompt's tokens too."""
    margin_column: str | None = None
    keep_special: bool = False
    """Special tokens in the rows' text stay special (`data.special_tokens: keep`)."""

    def unweighted(self, **changes: Any) -> StageRows:
        """The same with each row once, and with other settings of the rows."""
        train = [source.model_copy(update={"weight": 1.0}) for source in self.rows.train]
        return replace(self, rows=self.rows.model_copy(update={"train": train, **changes}))

    def view(self, record: Record, side: str) -> Record | Skipped:
        """The record with the answers that the stage uses. Raises DataError for a bad row."""
        found: Record | None
        if self.purpose == "ppo":
            if record.prompt or not record.key.strip():
                return prompt(record)
            if self.prompt_words:
                return Skipped(f"a text of at most {self.prompt_words} words (data.prompt_words)")
            advice = "Set data.prompt_words to take its first words, or give prompts in a column"
            raise DataError(f"{record.where}: plain text has no prompt, and the policy would answer nothing. {advice}")
        if self.purpose == "sft":
            found, reason = demonstration(record), "no answer to learn from"
        elif self.purpose == "rm scores":
            found, reason = scored(record), "no answer with a score"
        else:
            if self.role == "data.probes" and not isinstance(record.columns.get("probe"), str):
                raise DataError(f"{record.where}: a row of data.probes needs a text column `probe`, the probe's name")
            found = ranking(record, margin_column=self.margin_column if side == "train" else None)
            all_equal = len({*record.texts}) == 1 < len(record.answers)
            reason = "its answers are equal" if all_equal else "no answer is better than another"
        if found is None:
            return Skipped(reason)
        return found if all(text.strip() for text in found.texts) else Skipped(BLANK)


# --------------------------------------------------------------------------------- the rows of each stage


def _texts(data: TextRows) -> dict[str, Any]:
    return {"template": data.prompt_template, "keep_special": data.special_tokens == "keep"}


def _limits(data: Data) -> LengthLimits:
    return LengthLimits(data.max_length, data.truncation, data.min_response_length)


def rows_of_stage(config: Any) -> list[StageRows]:
    """Everything that a stage reads: its data, then the probes or the demonstrations of ptx if the config has some."""
    if isinstance(config, SFTConfig):
        return [sft_rows(config)]
    is_rm = isinstance(config, RMConfig)
    both = (rm_rows(config), probe_rows(config)) if is_rm else (ppo_rows(config), ptx_rows(config))
    return [rows for rows in both if rows is not None]


def sft_rows(config: SFTConfig) -> StageRows:
    data, learn_all = config.data, config.data.loss_on == "all"
    words = data.prompt_words
    return StageRows(data, "sft", limits=_limits(data), prompt_words=words, learn_all=learn_all, **_texts(data))


def rm_rows(config: RMConfig) -> StageRows:
    """The rows of the reward model: rankings, or scored answers for the pointwise losses and for texts with labels.

    The pairwise losses pair up labelled texts after they are encoded (`LabelledPairs`).
    """
    data = config.data
    is_scored = not config.is_pairwise or first_format(data.train[0], "rm pairs").name == "labelled"
    purpose: Purpose = "rm scores" if is_scored else "rm pairs"
    return StageRows(data, purpose, limits=_limits(data), margin_column=data.margin_column, **_texts(data))


def probe_rows(config: RMConfig) -> StageRows | None:
    """The probes of the reward model, if the config names some."""
    if config.data.probes is None:
        return None
    probes = Rows(train=[config.data.probes], test_fraction=0)
    return replace(rm_rows(config), rows=probes, purpose="rm pairs", role="data.probes", margin_column=None)


def ppo_rows(config: PPOConfig) -> StageRows:
    data = config.data
    limits = LengthLimits(data.max_prompt_length, data.truncation)
    key, words = "data.max_prompt_length", data.prompt_words
    return StageRows(data, "ppo", limits=limits, length_key=key, prompt_words=words, **_texts(data))


def ptx_rows(config: PPOConfig) -> StageRows | None:
    """The demonstrations of PPO's language-model loss, if the config asks for it."""
    if (ptx := config.ptx) is None:
        return None
    rows, limits, learn_all = Rows(train=ptx.train, test_fraction=0), LengthLimits(ptx.max_length), ptx.loss_on == "all"
    given = {"prompt_words": ptx.prompt_words, "learn_all": learn_all, **_texts(config.data)}
    return StageRows(rows, "sft", "ptx", limits, "ptx.max_length", **given)


def rm_purpose(source: DataSource) -> Purpose:
    """What RM can read from a source without a config: rankings if its rows have a preference, else scores."""
    try:
        return "rm scores" if first_format(source, "rm pairs").name == "labelled" else "rm pairs"
    except DataError as error:
        with contextlib.suppress(DataError):
            first_format(source, "rm scores")
            return "rm scores"
        raise error from None


def demonstration(record: Record) -> Record | None:
    """The record with its best answer, for SFT; None without an answer, or if the row marks it as undesirable.

    The best one is the first of ranked answers, and the first with the highest score of others.

    >>> demonstration(Record("1+1=", "file:1", (Answer("3", 0.0), Answer("2", 1.0)))).response
    '2'
    """
    if not record.answers or record.undesirable:
        return None
    answer = record.answers[0]
    if not record.ranked:
        answer = max(record.answers, key=lambda a: -math.inf if a.score is None else a.score)
    return replace(record, answers=(replace(answer, score=None),), ranked=False)


def ranking(record: Record, *, margin_column: str | None = None) -> Record | None:
    """The record with its different answers from best to worst, or None if no answer is better than another.

    Ranked answers keep their order. Other answers are sorted by score, and answers without a score are skipped.
    A text that occurs twice keeps its best rank. Equal scores express no preference, so only the first such answer is
    kept. `margin_column` says how much better the best answer is; raises DataError if that is not a number.

    >>> ranking(Record("1+1=", "file:1", (Answer("3", 0.0), Answer("2", 1.0), Answer("4", 0.0)))).texts
    ('2', '3')
    """
    answers = record.answers
    if not record.ranked:
        with_scores = [(answer.score, answer) for answer in answers if answer.score is not None]
        answers = tuple(answer for _, answer in sorted(with_scores, key=lambda item: -item[0]))
    kept: list[Answer] = []
    seen: set[str] = set()
    for answer in answers:
        tied = kept and not record.ranked and answer.score == kept[-1].score
        if answer.text not in seen and not tied:
            kept.append(answer)
        seen.add(answer.text)
    if len(kept) < 2:
        return None
    margin = number(record.columns.get(margin_column), margin_column, record.where) if margin_column else 0.0
    return replace(record, answers=tuple(replace(one, score=None) for one in kept), ranked=True, margin=margin)


def scored(record: Record) -> Record | None:
    """The record with the answers that have a score, or None if none has."""
    answers = tuple(answer for answer in record.answers if answer.score is not None)
    return replace(record, answers=answers, ranked=False) if answers else None


def prompt(record: Record) -> Record:
    """The record without answers. Raises DataError if its prompt is blank, or the user's last turn in it is.

    Plain text may have an empty prompt: the model then writes from nothing.
    """
    last_turn = record.prompt.removesuffix(ASSISTANT).rpartition(f"\n\n{SPEAKERS['user']}:")[2]
    if not record.key.strip() or (record.prompt and not last_turn.strip()):
        raise DataError(f"{record.where}: the prompt is empty, there is nothing to answer. Remove the row")
    return replace(record, answers=(), ranked=False)


def records(spec: StageRows, report: Report, *, only: str | None = None) -> Iterator[tuple[str, Record]]:
    """The rows of a stage with their side, "train", "validation" or "test", one by one as they are read.

    `only` limits them to one side. A source of weight 2 gives each training row twice, and one of weight 0.5 half of
    its rows, chosen by a hash. Raises DataError for a row that cannot be read, unless such rows are skipped, and if no
    row is left to train on or to hold out.
    """
    data, purpose = spec.rows, spec.purpose
    for source_side, sources in data.by_side.items():
        splits = source_side == "train" and data.test is None  # training rows may be held out
        if only not in (None, source_side) and not (splits and only == "test"):
            continue
        seen: set[bytes] = set()
        for source in sources:
            for record in read_records(source, purpose, report.kinds, prompt_words=spec.prompt_words):
                if isinstance(record, DataError):
                    report.bad_row(data, source_side, record)
                    continue
                if not in_part(source.select, record.key) or not in_share(data, purpose, record.key):
                    continue
                side = "test" if splits and is_held_out(data, record.key) else source_side
                if only is not None and side != only:
                    continue
                if data.deduplicate:
                    # Equal rows have equal prompts, so they are on the same side.
                    digest = row_digest(record)
                    if digest in seen:
                        report.skip(side, DUPLICATE)
                        continue
                    seen.add(digest)
                for _ in range(1 if side != "train" else num_copies(source.weight, record.key)):
                    report.rows[source.path] += 1
                    report.rows[side] += 1
                    yield side, record
    for side, sources in data.by_side.items():
        if only in (None, side) and sources and not report.rows[side]:
            paths = ", ".join(source.path for source in sources)
            advice = "no row is left to hold out. Widen `select` or `split`"
            if side == "train":
                advice = "no row is left to train on. Widen `select`, `split` or `weight`, or lower test_fraction"
            reasons = [f"{n} rows: {reason}" for some in report.skipped.values() for reason, n in some.items()]
            because = f" ({'; '.join(reasons + report.bad)})" if reasons else ""
            raise DataError(f"{spec.role}.{side}: {paths}: {advice}{because}")


def first_format(source: DataSource, purpose: Purpose) -> Format:
    """The format of a source, from its first readable row; raises DataError if no format fits."""
    for row in read_rows(source):
        if isinstance(row, Row):
            return recognise(row, source, purpose)
    raise DataError(f"{source.path}: none of its rows can be read")


def row_digest(record: Record) -> bytes:
    """A hash of a row's prompt, answers and messages: equal rows are duplicates."""
    answers = [record.prompt, *(answer.text for answer in record.answers), *(m.content for m in record.messages)]
    return hashlib.sha256(json.dumps(answers).encode()).digest()[:16]


def seen_rows(spec: StageRows, report: Report, *, only: str | None = None) -> Iterator[tuple[str, Record]]:
    """(side, row) of each row that the stage has a use for; the others are counted. `only` limits them to one side."""
    for side, record in records(spec, report, only=only):
        try:
            seen = spec.view(record, side)
        except DataError as error:
            report.bad_row(spec.rows, side, error)
            continue
        if isinstance(seen, Skipped):
            report.skip(side, seen.reason)
        else:
            yield side, seen


def pairs_of_labels(scores: Sequence[float], generator: torch.Generator) -> list[tuple[int, int]]:
    """Pairs (index of a higher score, index of a lower one) from rows with one score each.

    A score is high if it lies above the midpoint between the smallest and the largest score. Each high row is in one
    pair, in order. The low rows come in the order that `generator` draws, repeated as often as needed.
    Raises DataError if all scores are equal or there are none.

    >>> import torch
    >>> pairs_of_labels([0.0, 1.0, 1.0], torch.Generator().manual_seed(0))
    [(1, 0), (2, 0)]
    """
    middle = (min(scores, default=0.0) + max(scores, default=0.0)) / 2
    high = [i for i, score in enumerate(scores) if score > middle]
    low = [i for i, score in enumerate(scores) if score <= middle]
    if not high or not low:
        found = f"every label is {scores[0]}" if scores else "no labels"
        raise DataError(f"{found}, pairs need two different labels")
    import torch

    order = torch.randperm(len(low), generator=generator).tolist()
    return [(i, low[order[n % len(low)]]) for n, i in enumerate(high)]
