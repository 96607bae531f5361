"""The sources of rewards that PPO may use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from rlhf_cli.config.base import NonNegativeInt, PositiveFloat, PositiveInt, Section


class AnyReward(Section):
    """What every source of rewards says. docs/rewards.md has an example of each."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$")] | None = None
    """Its name in metrics and messages; null takes its type (a function's own name), numbered where there are
    several sources."""
    weight: float = 1.0
    on_error: Literal["stop", "zero"] = "stop"
    """What a score that can't be had does (an exception, a time-out, a value that is no finite number): it stops the
    run, or is 0.0 and counted."""


def _holds_response(template: str) -> str:
    if template != "chat" and (template.count("{response}") != 1 or template.count("{prompt}") > 1):
        raise ValueError("must be `chat` or hold {prompt} and {response} once each")
    return template


class ModelReward(AnyReward):
    """A reward model: our `rm` artifact, or any sequence classifier with its own tokenizer."""

    type: Literal["reward_model"]
    path: str | None = None
    """A Hugging Face directory or hub id; null takes the run's own `rm` stage."""
    revision: str | None = None
    label: str | None = None
    """The label of a classifier with several whose output is the score; needed there and only there."""
    output: Literal["logit", "probability"] = "logit"
    """A classifier's logit, or its probability (softmax over the labels, sigmoid of a single one): that lies
    between 0 and 1 and flattens where the classifier is sure."""
    reads: Literal["prompt_and_response", "response"] = "prompt_and_response"
    """What the model is given."""
    template: Annotated[str, AfterValidator(_holds_response)] | None = None
    """How the text is written for this model, with `{prompt}` (the row's own, without data.prompt_template) and
    `{response}` in it; `chat` takes the chat template of its tokenizer. Null gives what the policy read and wrote,
    one behind the other, as the very same tokens where the tokenizers are the same."""
    normalize: bool = True
    """Subtract the mean and divide by the standard deviation stored in the model directory, if any."""

    @model_validator(mode="after")
    def _scale(self) -> Self:
        if self.output == "probability" and self.path is None:
            raise ValueError("output: probability is for a classifier; the run's own rm stage gives a score, no class")
        if self.template is not None:
            holds = self.template == "chat" or "{prompt}" in self.template
            if holds != (self.reads == "prompt_and_response"):
                has = "has a place for the prompt" if holds else "has no {prompt}"
                raise ValueError(f"template {has}, and reads is {self.reads}. Change one of them")
        return self


class FunctionReward(AnyReward):
    """A Python function of yours. It is run as code: name only a file that you trust."""

    type: Literal["function"]
    function: Annotated[str, Field(pattern=r"^.+\.py:[A-Za-z_]\w*$")]
    """`path/to/file.py:name`, called with (prompts, responses, rows), each a list; returns a number a row. It may be
    an `async def`."""
    per_token: bool = False
    """The function returns a list of numbers a row instead, one for each of `row["tokens"]`: each stands at its
    own token (a dense reward), and only the rest of the score at the last."""
    batch_size: PositiveInt | None = None
    """Rows of one call; null gives all of them at once."""
    concurrency: PositiveInt | None = None
    """Calls of an async function that are under way at once, at most; null takes 8."""
    timeout_s: PositiveFloat | None = None
    """Seconds that one call of an async function may take; null waits. A plain function can't be stopped."""

    @model_validator(mode="after")
    def _pieces(self) -> Self:
        if self.concurrency is not None and self.batch_size is None:
            raise ValueError("concurrency does nothing without batch_size: there is one call. Give batch_size")
        return self


def _is_endpoint(url: str) -> str:
    try:
        parts = urlsplit(url)
        wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError:
        wrong = True
    if wrong or not url.isprintable() or " " in url:
        raise ValueError("must be http://host:port/path or https://...")
    if parts.username is not None or parts.password is not None:
        raise ValueError("holds a user or a password, which would stand in logs and artifacts. Take api_key_env")
    return url


class HTTPReward(AnyReward):
    """An endpoint that scores texts, `rlhf rm serve` or another of OpenRLHF's shape."""

    type: Literal["http"]
    url: Annotated[str, AfterValidator(_is_endpoint)]
    """Where the texts are posted to, `http://127.0.0.1:5000/get_reward` say."""
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] | None = None
    """The name of the environment variable that holds the token, sent as `Authorization: Bearer ...`."""
    label_column: str | None = None
    """The column of the row that is sent as its label; null sends empty ones."""
    batch_size: PositiveInt = 64
    """Texts of one request."""
    concurrency: PositiveInt = 4
    """Requests that are under way at once, at most."""
    timeout_s: PositiveFloat = 60.0
    """Seconds that one request may take, from connecting to the last byte of the answer."""
    retries: NonNegativeInt = 5
    """How often a request is sent again that got no answer, 408, 429 or an error of the server's (5xx)."""
    backoff_s: PositiveFloat = 1.0
    """Seconds before it is sent again, doubled each time; longer where the server says so (Retry-After)."""


class LengthReward(AnyReward):
    """0 within a range of lengths, and outside minus the distance to it."""

    type: Literal["length"]
    unit: Literal["tokens", "words", "characters"] = "tokens"
    """What is counted: the policy's tokens (EOS included), words between blanks, or characters."""
    target: NonNegativeInt | None = None
    """The one length that costs nothing."""
    min: NonNegativeInt | None = None
    """The shortest length that costs nothing."""
    max: NonNegativeInt | None = None
    """The longest length that costs nothing."""

    @property
    def bounds(self) -> tuple[int, int | None]:
        """The lengths that cost nothing, from and to; None is without an end."""
        return (self.target, self.target) if self.target is not None else (self.min or 0, self.max)

    @model_validator(mode="after")
    def _one_range(self) -> Self:
        ranged = self.min is not None or self.max is not None
        if (self.target is not None) == ranged:
            raise ValueError("give target, or min and max or one of them")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self


def _compiles(pattern: str) -> str:
    import regex

    try:
        regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"is no regular expression ({error})") from None
    return pattern


Pattern = Annotated[str, Field(min_length=1), AfterValidator(_compiles)]


class RegexReward(AnyReward):
    """1 for a response in which a regular expression is found, else 0."""

    type: Literal["regex"]
    pattern: Pattern
    """As of Python's `re`; `(?i)` at its start ignores case, `(?s)` lets a dot be a line's end."""
    full: bool = False
    """The whole response must fit, not a part of it."""
    timeout_s: PositiveFloat = 1.0
    """Seconds that one response may take: some patterns need years for some texts, `(a|aa)+$` say."""


class AnswerReward(AnyReward):
    """1 for a response whose answer is the row's own, else 0."""

    type: Literal["answer_match"]
    column: str
    """The column that holds the truth: as it stands, or what follows its last `####` (GSM8K)."""
    mode: Literal["numeric", "exact"] = "numeric"
    """numeric compares numbers ($1,200.00 is 1200, 1/2 is 0.5); exact compares text, blanks at the ends aside."""
    pattern: Pattern | None = None
    """What finds the answer in the response: the first group of its last match, or all of that. Null takes what
    follows the last `####`; without one the last number, or, with `exact`, all of the response."""
    timeout_s: PositiveFloat = 1.0
    """Seconds that `pattern` may take for one response."""


class RepetitionReward(AnyReward):
    """Minus the share of n-grams that have come before in the same response: 0 without a repetition, towards -1."""

    type: Literal["repetition"]
    n: PositiveInt = 3
    """How many words or tokens make an n-gram."""
    unit: Literal["words", "tokens"] = "words"
    """What the n-grams are of."""


class JSONReward(AnyReward):
    """1 for a response that is valid JSON and nothing else, else 0."""

    type: Literal["json"]
    required: list[str] = []
    """Keys that the object must have, at its top level."""


RuleReward = LengthReward | RegexReward | AnswerReward | RepetitionReward | JSONReward
Reward = Annotated[ModelReward | FunctionReward | HTTPReward | RuleReward, Field(discriminator="type")]


def reward_names(rewards: Sequence[Reward]) -> list[str]:
    """What each source is called in metrics and messages."""
    several = len(rewards) > 1
    names = []
    for number, reward in enumerate(rewards):
        kind = reward.function.rpartition(":")[2] if isinstance(reward, FunctionReward) else reward.type
        names.append(reward.name or (f"{kind}_{number}" if several else kind))
    return names
