"""Where the rows of a stage come from, which of them are taken, and how they become text."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from rlhf_cli.config.base import BelowOne, NonNegativeInt, PositiveFloat, PositiveInt, Section

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


def _parts(select: str) -> str:
    for part in select.split(","):
        k, n = map(int, part.split("/"))
        if k >= n:
            raise ValueError(f"part {part} does not exist, the {n} parts are 0/{n} to {max(n - 1, 0)}/{n}")
    return select


class DataSource(Section):
    """Rows from local files or a dataset of the hub. A plain string is its path. docs/data.md shows every format
    with a row of it."""

    path: Annotated[str, Field(min_length=1)]
    """A file (JSON, JSONL, CSV, TSV, Parquet, plain text; compressed too), a folder of such files, a glob, or a hub
    dataset's id."""
    format: Format = "auto"
    """What the rows are; auto goes by the keys of the first one and says what it took them for."""
    keys: dict[str, str] = {}
    """Which column of the file is meant by each of ours, `{prompt: question, response: output.text}`; a dot goes
    into a mapping."""
    weights: dict[str, float] = {}
    """For rows with several grades (HelpSteer, UltraFeedback): the weight of each in the score."""
    name: str | None = None
    """The subset of a hub dataset."""
    data_dir: str | None = None
    """A folder inside a hub dataset, where it has several (HH-RLHF: helpful-base, harmless-base, ...)."""
    split: str = "train"
    """The split of a hub dataset."""
    revision: str | None = None
    """Branch, tag or commit of a hub dataset."""
    streaming: bool = False
    """Read a hub dataset row by row and never hold it on disk whole; give a `limit` with a large one."""
    limit: PositiveInt | None = None
    """Read only the first rows (before `select` chooses among them)."""
    select: Annotated[str, Field(pattern=r"^\d+/\d+(,\d+/\d+)*$"), AfterValidator(_parts)] | None = None
    """Parts of the file by a hash of each row's prompt, "0/10" the first tenth, "1/10,2/10" two more: one
    file serves as train and test rows, or several stages, and no prompt stands in two parts."""
    weight: PositiveFloat = 1.0
    """How often an epoch goes through these rows: 2 twice, 0.5 through the half of them that a hash of the prompt
    picks. Training rows only."""


def _path_alone(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else [value]


Source = Annotated[DataSource, BeforeValidator(_path_alone, json_schema_input_type=str | DataSource)]

Sources = Annotated[
    list[Source],
    Field(min_length=1),
    BeforeValidator(_as_list, json_schema_input_type=str | DataSource | list[str | DataSource]),
]


def _holds_prompt(template: str) -> str:
    if template != "chat" and template.count("{prompt}") != 1:
        raise ValueError("must be `chat` or hold {prompt} exactly once")
    return template


PromptTemplate = Annotated[str, AfterValidator(_holds_prompt)]


class Rows(Section):
    """Where the rows of a stage come from, and which of them are taken."""

    train: Sources
    """The rows to learn from: a path, a mapping, or a list of them, which is a mixture."""
    test: Sources | None = None
    """The held-out rows. Without them `test_fraction` of the training rows is held out."""
    test_fraction: BelowOne = 0.05
    """The share of the training rows held out where `test` is not given, by a hash of the prompt, so that a prompt
    never stands on both sides; 0 holds out nothing."""
    split: Annotated[list[NonNegativeInt], Field(min_length=3, max_length=3)] | None = None
    """Shares of SFT, RM and PPO in one dataset, [2, 4, 4] say: each prompt belongs to one of the three, by its hash.
    Give the same in every stage's file."""
    deduplicate: bool = False
    """Leave out a row whose prompt and answers have come before."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that can't be read stops the run, or is left out and counted."""

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if self.split is not None and not sum(self.split):
            raise ValueError("split: all three shares are 0, at least one must not be")
        return self


class Data(Rows):
    """Where the rows come from and how they become text."""

    prompt_template: PromptTemplate | None = None
    """How a prompt is written, with `{prompt}` in it; `chat` takes the tokenizer's chat template; null takes
    the prompt as it stands (and the chat template for rows of messages where the tokenizer has one)."""
    max_length: PositiveInt = 512
    """Longest sequence in tokens, EOS included."""
    truncation: Literal["drop", "left", "right"] = "drop"
    """What happens to a longer row. `drop` leaves it out: a cut answer would teach that answers end anywhere.
    `left` cuts the beginning of its prompt, `right` the end of its answer, and with it EOS. All are counted."""
    min_response_length: NonNegativeInt = 0
    """Shortest response in tokens, EOS included; rows with a shorter one are dropped and counted."""


class PromptData(Rows):
    """Where the prompts come from."""

    prompt_template: PromptTemplate | None = None
    """As in the SFT stage; use the same."""
    prompt_words: NonNegativeInt = 0
    """For rows that are plain text: this many first words are the prompt."""
    max_prompt_length: PositiveInt = 512
    """Longest prompt in tokens."""
    truncation: Literal["drop", "left", "right"] = "drop"
    """What happens to a longer prompt: it is left out, or loses its beginning or its end. All are counted."""


def numbered(sources: dict[str, DataSource | list[DataSource] | None]) -> dict[str, DataSource]:
    """Sources by role; of a mixture each by its number: train.0, train.1."""
    found: dict[str, DataSource] = {}
    for role, given in sources.items():
        several = given if isinstance(given, list) else [] if given is None else [given]
        for number, source in enumerate(several):
            found[role if len(several) == 1 else f"{role}.{number}"] = source
    return found
