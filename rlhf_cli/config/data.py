"""The `data` section: where the rows of a stage come from, which ones it takes, and how they become text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from rlhf_cli.config.base import EXPANDED, BelowOne, NonNegativeInt, PositiveFloat, PositiveInt, Section

Format = Literal[
    "auto",
    "prompt_response",
    "prompt",
    "text",
    "labelled",
    "messages",
    "alpaca",
    "instruction",
    "preference",
    "hh",
    "shp",
    "summarize",
    "webgpt",
    "stackexchange",
    "pandalm",
    "ultrafeedback",
    "helpsteer",
    "kto",
    "ranking",
    "scored",
]


def _check_select(select: str) -> str:
    """Check a list of parts such as "0/10,1/10": part k of n exists for k from 0 to n - 1."""
    for part in select.split(","):
        k, n = map(int, part.split("/"))
        if k >= n:
            parts = f"the parts of {n} are 0/{n} to {n - 1}/{n}" if n else "a file has at least one part"
            raise ValueError(f"part {part} does not exist; {parts}")
    return select


class DataSource(Section):
    """Rows from local files or a hub dataset. A plain string is short for its path. docs/data.md shows a row of
    every format."""

    path: Annotated[str, Field(min_length=1), EXPANDED]
    """A file (JSON, JSONL, CSV, TSV, Parquet or plain text, also compressed), a folder of such files, a glob, or
    the id of a hub dataset. Relative to the directory that you run the command from."""
    format: Format = "auto"
    """The format of the rows. `auto` decides by the keys of the first row and prints its choice."""
    keys: dict[str, str] = {}
    """Maps our column names to the file's: `{prompt: question, response: output.text}`. A dot reaches into
    a mapping, and a dot and a number into a list: `passages.0.text` is the text of the first passage."""
    weights: dict[str, float] = {}
    """For rows with several grades (HelpSteer, UltraFeedback): the weight of each grade in the score."""
    name: str | None = None
    """The subset of a hub dataset."""
    data_dir: str | None = None
    """A folder inside a hub dataset that has several (HH-RLHF: helpful-base, harmless-base, ...)."""
    split: str = "train"
    """The split of a hub dataset."""
    revision: str | None = None
    """The branch, tag or commit of a hub dataset."""
    streaming: bool = False
    """Read a hub dataset row by row instead of storing all of it on disk. Set `limit` for a large dataset."""
    limit: PositiveInt | None = None
    """Read only this many rows, from the first. `select` then chooses among them."""
    select: Annotated[str, Field(pattern=r"^\d+/\d+(,\d+/\d+)*$"), AfterValidator(_check_select)] | None = None
    """Take only some parts of the file, chosen by a hash of each row's prompt: "0/10" is the first tenth,
    "1/10,2/10" are the next two. One file can hold training and test rows, or the rows of several stages, and no
    prompt is in two parts."""
    weight: PositiveFloat = 1.0
    """How often an epoch uses these rows: 2 means twice, 0.5 means half of them, chosen by a hash of the prompt.
    Training rows only."""


Source = Annotated[
    DataSource,
    BeforeValidator(
        lambda value: {"path": value} if isinstance(value, str) else value, json_schema_input_type=str | DataSource
    ),
]
"""A plain path is a source."""
Sources = Annotated[
    list[Source],
    Field(min_length=1),
    BeforeValidator(
        lambda value: list(value) if isinstance(value, list | tuple) else [value],
        json_schema_input_type=str | DataSource | list[str | DataSource],
    ),
]
"""A single source is a list of one."""


def _check_prompt_template(template: str) -> str:
    if template != "chat" and template.count("{prompt}") != 1:
        raise ValueError("must be `chat` or contain {prompt} exactly once")
    return template


PromptTemplate = Annotated[str, AfterValidator(_check_prompt_template)]
SpecialTokens = Literal["split", "keep"]


class Rows(Section):
    """Where the rows of a stage come from, and which ones it takes."""

    train: Sources
    """The rows to train on: a path, a mapping, or a list of them (a mixture)."""
    validation: Sources | None = None
    """Held-out rows to measure while the stage trains: `evaluation.keep_best`, `best_metric` and PPO's `require` read
    their figures, and `test` is measured at the end only. Null uses the test rows for both."""
    test: Sources | None = None
    """The held-out rows. Null holds out `test_fraction` of the training rows instead."""
    test_fraction: BelowOne = 0.05
    """The share of the training rows to hold out if `test` is null. Rows are chosen by a hash of the prompt, so no
    prompt is on both sides. 0 holds out nothing."""
    split: Annotated[list[NonNegativeInt], Field(min_length=3, max_length=3)] | None = None
    """Share one dataset among SFT, RM and PPO in these proportions, for example [2, 4, 4]. A hash assigns each
    prompt to one of the three. Use the same value in every stage's file."""
    deduplicate: bool = False
    """Skip a row whose prompt and answers are the same as an earlier row's."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Whether a row that cannot be read stops the run or is skipped and counted."""

    @property
    def by_side(self) -> dict[str, list[DataSource]]:
        """The sources of each side; empty for a side that names none."""
        return {"train": self.train, "validation": self.validation or [], "test": self.test or []}

    def rules(self) -> Iterator[str]:
        if self.split is not None and not sum(self.split):
            yield "split: all three shares are 0; at least one must be above 0"


class TextRows(Rows):
    """Where the rows come from, and how they become text."""

    prompt_template: PromptTemplate | None = None
    """How a prompt is written: text with `{prompt}` in it. `chat` uses the tokenizer's chat template. Null leaves
    the prompt as it is; rows of messages then use the chat template if the tokenizer has one. Use the same value in
    every stage."""
    special_tokens: SpecialTokens = "split"
    """Special tokens in the text of rows, such as `<eos>`, in PPO also of `ptx` and in what reward models read as text:
    `split` encodes them as the plain text that they are, so that no row can end an answer early or forge a message.
    `keep` encodes them as special tokens, for rows that are already written in a chat template. Use the same value in
    every stage."""


class Data(TextRows):
    """Where the rows come from, and how they become text."""

    max_length: PositiveInt = 512
    """Maximum length of a sequence in tokens, including EOS."""
    truncation: Literal["drop", "left", "right"] = "drop"
    """What to do with a longer row. `drop` skips it: a cut answer would teach the model to end anywhere. `left`
    cuts the beginning of the prompt. `right` cuts the end of the answer, including EOS. All are counted."""
    min_response_length: NonNegativeInt = 0
    """Minimum length of a response in tokens, including EOS. Rows with a shorter one are dropped and counted."""


class PromptData(TextRows):
    """Where the prompts come from, and how they become text."""

    prompt_words: NonNegativeInt = 0
    """For rows of plain text: the prompt is this many words from the start."""
    max_prompt_length: PositiveInt = 512
    """Maximum length of a prompt in tokens."""
    truncation: Literal["drop", "left", "right"] = "drop"
    """What to do with a longer prompt: skip it, or cut its beginning or its end. All are counted."""


def numbered(sources: dict[str, list[DataSource]]) -> dict[str, DataSource]:
    """Sources by role. The sources of a mixture are numbered: train.0, train.1."""
    by_role: dict[str, DataSource] = {}
    for role, several in sources.items():
        for number, source in enumerate(several):
            by_role[role if len(several) == 1 else f"{role}.{number}"] = source
    return by_role
