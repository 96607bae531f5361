"""The `rewards` of PPO: reward models, functions, endpoints and rules."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator, Field

from rlhf_cli.config.base import (
    EXPANDED,
    Fraction,
    LocalPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class Limit(Section):
    """A number on one side of which the mean of a source's scores must stay."""

    above: float | None = None
    """The mean must be above this. Set this or `below`."""
    below: float | None = None
    """The mean must be below this."""
    learning_rate: PositiveFloat = 0.3
    """How fast the multiplier follows: its logarithm changes by learning_rate * multiplier * (how far the mean is
    beyond the limit, in standard deviations of the source's first scores), at most by 0.2 per iteration."""

    def rules(self) -> Iterator[str]:
        if (self.above is None) == (self.below is None):
            yield "set above or below, one of them"

    def __str__(self) -> str:
        return f"above {self.above:g}" if self.above is not None else f"below {self.below:g}"


class Shaping(Section):
    """A source's score, compared with the scores of replies of the reference policy to the same prompt."""

    kind: Literal["log_sigmoid", "par"]
    """`log_sigmoid`: log(sigmoid(score - r_ref)), with r_ref a quantile of the replies' scores; the sum of several such
    sources is high only if all are. `par`: the mean over the replies of sigmoid(score - reply's score), between 0 and
    1."""
    num_references: PositiveInt = 4
    """Replies of the reference policy to each prompt of the run. They are sampled and scored before training."""
    quantile: Fraction = 0.85
    """Which of the replies' scores is r_ref of `log_sigmoid`: 0 is the lowest, 0.5 the median, 1 the highest."""

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        self.refuse_unread(self.kind == "log_sigmoid", f"kind: {self.kind}", "quantile")


KIND = Field(description="The kind of source.")


class AnyReward(Section):
    """The keys of every source of rewards. docs/rewards.md has an example of each source."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$")] | None = None
    """The name of the source in metrics and messages. Null uses its type, or the name of the function, with a
    number if there are several sources."""
    weight: float = 1.0
    """The weight of this source in the score."""
    limit: Limit | None = None
    """The source is no term of the score, but a constraint: `{above: x}` or `{below: x}`, in units of its own score.
    PPO then raises the score of the other sources as far as the limit allows."""
    shaping: Shaping | None = None
    """Give PPO this function of the score, bounded where replies are far better than those of the reference policy.
    Null gives it the score itself."""
    on_error: Literal["stop", "zero"] = "stop"
    """What to do when a score cannot be computed (exception, time-out, NaN or infinite value): stop the run, or use
    0.0 and report how many."""

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        self.refuse_unread(self.limit is None, "limit", "weight", "shaping")
        self.refuse_unread(not self.scores_tokens, "scores of single tokens", "limit", "shaping")

    @property
    def scores_tokens(self) -> bool:
        """Whether it scores single tokens or steps, not the response."""
        return False

    @property
    def share(self) -> float:
        """The weight in the score: 0 with a limit."""
        return self.weight if self.limit is None else 0.0


def _check_response_template(template: str) -> str:
    if template != "chat" and (template.count("{response}") != 1 or template.count("{prompt}") > 1):
        raise ValueError("must be `chat` or contain {prompt} and {response} once each")
    return template


class Steps(Section):
    """How a response is cut into steps, for a model that scores each."""

    separator: Annotated[str, Field(min_length=1)] = "\n\n"
    """The text that ends a step. The last step of a response that ended needs none."""
    marker: Annotated[str, Field(min_length=1)] | None = None
    """What the model reads behind each step, and where its score is read: the separator or the special token of its
    training. Null uses `separator`."""
    average: bool = True
    """Divide the scores by the number of steps, so that more steps do not pay."""


class ModelReward(AnyReward):
    """A reward model: an `rm` artifact, or any sequence classifier with its own tokenizer."""

    type: Annotated[Literal["reward_model"], KIND]
    path: LocalPath | None = None
    """A Hugging Face directory or a hub id. Null uses the run's own `rm` stage."""
    revision: str | None = None
    """The branch, tag or commit of a hub model."""
    label: str | None = None
    """For a classifier with several labels: the label whose output is the score. Required for such a classifier, and
    refused for others."""
    output: Literal["logit", "probability"] = "logit"
    """The logit of a classifier, or its probability (softmax over the labels, or sigmoid of a single label). A
    probability is between 0 and 1 and flattens where the classifier is certain."""
    reads: Literal["prompt_and_response", "response"] = "prompt_and_response"
    """What the model reads."""
    template: Annotated[str, AfterValidator(_check_response_template)] | None = None
    """How the text is written for this model, with `{prompt}` (the prompt of the row, without data.prompt_template)
    and `{response}` in it. `chat` uses the chat template of the model's tokenizer. Null gives it the policy's prompt
    followed by the response; models with the same tokenizer get exactly the same tokens."""
    normalize: bool = True
    """Subtract the mean and divide by the standard deviation in the model directory, if it has them."""
    steps: Steps | None = None
    """The model is a token classifier (a process reward model) that scores each step of a response. A step's score
    rewards the token that ends the step."""

    @property
    def scores_tokens(self) -> bool:
        return self.steps is not None

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        self.refuse_unread(self.steps is None, "steps", "reads", "normalize")
        if self.steps is not None and self.path is None:
            yield "steps is for a token classifier, and the run's own rm stage scores whole responses. Set path"
        if self.steps is not None and self.template is not None and not self.template.endswith("{response}"):
            yield "steps needs a template that ends with {response}, because the steps end there. Change it"
        if self.output == "probability" and self.path is None:
            yield "output: probability is for a classifier, not for the run's own rm stage. Remove it, or set path"
        if self.template is not None:
            holds = self.template == "chat" or "{prompt}" in self.template
            if holds != (self.reads == "prompt_and_response"):
                has = "contains the prompt" if holds else "does not contain {prompt}"
                yield f"template {has}, but reads is {self.reads}. Change one of them"


class FunctionReward(AnyReward):
    """A Python function of yours. It runs as code, so name only a file that you trust."""

    type: Annotated[Literal["function"], KIND]
    function: Annotated[str, Field(pattern=r"^.+\.py:[A-Za-z_]\w*$"), EXPANDED]
    """`path/to/file.py:name`. It is called with (prompts, responses, rows), each a list, and returns one number per
    row. It may be an `async def`."""
    per_token: bool = False
    """The function returns a list of numbers per row, one for each of `row["tokens"]`. Each number rewards its own
    token (a dense reward); the rest of the score is at the last token."""
    batch_size: PositiveInt | None = None
    """Rows per call. Null passes all rows in one call."""
    concurrency: PositiveInt | None = None
    """Maximum concurrent calls of an async function. Null uses 8."""
    timeout_s: PositiveFloat | None = None
    """Maximum seconds per call of an async function. Null waits without a limit. A plain function cannot be stopped."""

    @property
    def scores_tokens(self) -> bool:
        return self.per_token

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        if self.concurrency is not None and self.batch_size is None:
            yield "concurrency does nothing without batch_size, because there is only one call. Set batch_size"


SECRET = re.compile(
    r"(?<![a-z])(key|token|secret|password|passwd|pwd|auth|credentials?|sig|signature|code)(?![a-z])"
    "|(api|access|auth)[_-]?(key|token)",
    re.IGNORECASE,
)
"""The names of query parameters that carry secrets, such as api_key, accessToken and X-Amz-Signature."""


def check_url(url: str) -> str:
    """The URL of a server. Raises ValueError for one that is invalid or may contain a secret."""
    try:
        parts = urlsplit(url)
        wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError:
        wrong = True
    if wrong or not url.isprintable() or " " in url:
        raise ValueError("must be http://host:port/path or https://...")
    if parts.username is not None or parts.password is not None:
        raise ValueError("contains a user or a password, which would appear in logs and artifacts. Use api_key_env")
    for name, _ in parse_qsl(parts.query, keep_blank_values=True):
        if (secret := SECRET.search(name)) is not None:
            what = f"its query contains a parameter like {secret[0].lower()!r}"
            raise ValueError(f"{what}, and config.yaml would keep the secret. Use api_key_env")
    if parts.fragment:
        raise ValueError("contains a #, and what follows it is never sent. Remove it")
    return url


class ServerReward(AnyReward):
    """The keys of a source that asks a server."""

    url: Annotated[str, AfterValidator(check_url)]
    """The address that texts are posted to, for example `http://127.0.0.1:5000/get_reward`; for `rubric` the base URL
    of the server, for example `http://127.0.0.1:8000/v1`."""
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] | None = None
    """The environment variable that holds the token. It is sent as `Authorization: Bearer ...`."""
    concurrency: PositiveInt = 4
    """Maximum concurrent requests."""
    timeout_s: PositiveFloat = 60.0
    """Maximum seconds per request, from connecting to the last byte of the answer."""
    retries: NonNegativeInt = 5
    """Maximum retries of a request without an answer, or with status 408, 429 or 5xx."""
    backoff_s: PositiveFloat = 1.0
    """Seconds before the first retry, doubled each time. Longer if the server asks for it (Retry-After)."""


class HTTPReward(ServerReward):
    """An HTTP endpoint that scores texts: `rlhf rm serve`, or another one with OpenRLHF's interface."""

    type: Annotated[Literal["http"], KIND]
    label_column: str | None = None
    """The column of the row to send as its label. Null sends empty labels."""
    batch_size: PositiveInt = 64
    """Texts per request."""


class Criterion(Section):
    """One thing that a judge grades."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
    """Its name in metrics, samples and the judge's answer."""
    question: Annotated[str, Field(min_length=1)]
    """What must hold for a full grade. Write a flaw as its absence: "does not flatter the user"."""
    weight: PositiveFloat = 1.0
    """Its share of the score."""


class RubricReward(ServerReward):
    """A language model behind an OpenAI-compatible server that grades each response by criteria: 0 to 1."""

    type: Annotated[Literal["rubric"], KIND]
    model: Annotated[str, Field(min_length=1)]
    """The name of the judge on that server."""
    criteria: Annotated[list[Criterion], Field(min_length=1)]
    """What is graded. The score is the mean of the grades by `weight`."""
    scale: PositiveInt = 1
    """The best grade of a criterion; 0 is the worst. The score is divided by it."""
    attempts: PositiveInt = 3
    """Maximum requests for a response until the judge's answer is valid."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of the judge."""
    max_tokens: PositiveInt = 512
    """Maximum tokens of the judge's answer, with those that it thinks."""
    json_schema: bool = False
    """Ask the server to decode by a JSON schema (`response_format`), if it can."""

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        names = [criterion.name for criterion in self.criteria]
        if len({*names}) < len(names):
            yield "two criteria have one name. Give each its own"
        if urlsplit(self.url).query:
            yield "url has a query (?...), and a base URL has none. Remove it"


class LengthReward(AnyReward):
    """0 within a range of lengths; outside, minus the distance to the range."""

    type: Annotated[Literal["length"], KIND]
    unit: Literal["tokens", "words", "characters"] = "tokens"
    """What to count: the policy's tokens (including EOS), words separated by whitespace, or characters."""
    target: NonNegativeInt | None = None
    """The only length with reward 0. Set this, or `min` and `max`, or one of them."""
    min: NonNegativeInt | None = None
    """The shortest length with reward 0."""
    max: NonNegativeInt | None = None
    """The longest length with reward 0."""

    @property
    def bounds(self) -> tuple[int, int | None]:
        """The shortest and the longest length with reward 0; None for no longest."""
        return (self.target, self.target) if self.target is not None else (self.min or 0, self.max)

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        ranged = self.min is not None or self.max is not None
        if (self.target is not None) == ranged:
            yield "set target, or min and max, or one of these two"
        if self.min is not None and self.max is not None and self.min > self.max:
            yield f"min {self.min} is above max {self.max}"


MAX_PATTERN_SIZE = 100_000
"""The package `regex` writes fixed repeats out when it compiles: `(ab){1000}` takes the memory of 2,000 letters. This
size takes 30 MB; `((a{1000}){1000}){1000}` would take hundreds of gigabytes."""
PATTERN_ITEM = re.compile(r"\\[pPN]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d*)(?:,\d*)?\}|.", re.DOTALL)


def pattern_size(pattern: str) -> int:
    """The number of items in a pattern after its fixed repeats are written out. Counts a little too much.

    >>> pattern_size("(ab){10}c"), pattern_size("[abc]{2,5}"), pattern_size("((a{1000}){1000}){1000}")
    (21, 2, 1000000000)
    """
    groups, last = [0], 0  # the sizes of the open groups, and of the last item
    for match in PATTERN_ITEM.finditer(pattern):
        item, least = match[0], match[1]
        if least is not None:
            repeats = max(1, int(least[:12] or 1))
            groups[-1] += last * (repeats - 1)
            last *= repeats
        elif item == "(":
            groups.append(0)
        elif item == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        elif item not in "*+?" and not item.isspace():  # with (?x) white space may precede a repeat
            last = 1
            groups[-1] += 1
    return sum(groups)


def _check_pattern(pattern: str) -> str:
    import regex

    if (size := pattern_size(pattern)) > MAX_PATTERN_SIZE:
        raise ValueError(
            f"its repeats multiply to {size:,} items, at most {MAX_PATTERN_SIZE:,} are compiled. Lower them"
        )
    try:
        regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"not a valid regular expression ({error})") from None
    return pattern


Pattern = Annotated[str, Field(min_length=1), AfterValidator(_check_pattern)]


class RegexReward(AnyReward):
    """1 for a response that matches a regular expression, 0 otherwise."""

    type: Annotated[Literal["regex"], KIND]
    pattern: Pattern
    """A pattern in the syntax of Python's `re`. `(?i)` at its start ignores case; `(?s)` lets a dot match a line
    end."""
    full: bool = False
    """Match the whole response instead of searching in it."""
    timeout_s: PositiveFloat = 1.0
    """Maximum seconds per response. Some patterns, for example `(a|aa)+$`, would need years on some texts."""


class AnswerReward(AnyReward):
    """1 for a response with the correct answer of its row, 0 otherwise."""

    type: Annotated[Literal["answer_match"], KIND]
    column: str
    """The column with the correct answer: all of it, or the text after its last `####` (GSM8K)."""
    mode: Literal["numeric", "exact"] = "numeric"
    """`numeric` compares numbers ($1,200.00 equals 1200, 1/2 equals 0.5). `exact` compares text and ignores
    whitespace at both ends."""
    pattern: Pattern | None = None
    """A regular expression that finds the answer in the response: the first group of its last match, or the whole
    match. Null uses the text after the last `####`; without one, the last number or, with `exact`, the whole
    response."""
    timeout_s: PositiveFloat = 1.0
    """Maximum seconds that `pattern` may take per response."""


class RepetitionReward(AnyReward):
    """Minus the share of n-grams that repeat an earlier one in the same response: 0 without repetition, down to -1."""

    type: Annotated[Literal["repetition"], KIND]
    n: PositiveInt = 3
    """The number of words or tokens in an n-gram."""
    unit: Literal["words", "tokens"] = "words"
    """Whether n-grams consist of words or tokens."""


class JSONReward(AnyReward):
    """1 for a response that is valid JSON and nothing else, 0 otherwise."""

    type: Annotated[Literal["json"], KIND]
    required: list[str] = []
    """Keys that the object must have at its top level."""


class EnsembleReward(AnyReward):
    """Several reward models as one score, which is high only if all of them agree."""

    type: Annotated[Literal["ensemble"], KIND]
    members: Annotated[int, Field(ge=2)] | Annotated[list[LocalPath], Field(min_length=2)]
    """The directories of the reward models, or how many members of the run's own `rm` stage to take (the key
    `members` of rm.yaml)."""
    beta: Annotated[float, Field(ge=0)] | Literal["mean"] | None = None
    """The score is -beta * log(mean over the members of exp(-score / beta)): 0 is the lowest of their scores, `mean`
    the limit of a large beta, their mean. Null uses ppo.kl_coef."""
    normalize: bool = True
    """Subtract each member's mean and divide by its standard deviation, if its directory has them."""


RuleReward = LengthReward | RegexReward | AnswerReward | RepetitionReward | JSONReward
SingleReward = ModelReward | FunctionReward | HTTPReward | RubricReward | RuleReward
Reward = Annotated[SingleReward | EnsembleReward, Field(discriminator="type")]


class Ensemble(NamedTuple):
    """The ensemble that a reward model is a member of."""

    name: str
    weight: float
    beta: float


class NamedReward(NamedTuple):
    """A source of rewards, which may be a member of an ensemble."""

    key: str
    """Where it is in the config: `rewards.0`, `rewards.0.members.1`."""
    name: str
    """In metrics and messages."""
    reward: SingleReward
    ensemble: Ensemble | None = None


OWN_REWARD_MODEL = NamedReward("rewards.0", "reward_model", ModelReward(type="reward_model"))
"""The reward model of the run's own `rm` stage."""


def named_rewards(rewards: Sequence[Reward], artifacts: str, kl_coef: float) -> list[NamedReward]:
    """All sources in order, with the members of each ensemble in its place. `artifacts` is the run's directory."""
    found: list[NamedReward] = []
    for number, (reward, name) in enumerate(zip(rewards, reward_names(rewards), strict=True)):
        key = f"rewards.{number}"
        if not isinstance(reward, EnsembleReward):
            found.append(NamedReward(key, name, reward))
            continue
        if isinstance(reward.members, int):
            paths: list[str | None] = [None, *(f"{artifacts}/rm/members/{k}" for k in range(1, reward.members))]
        else:
            paths = list(reward.members)
        beta = math.inf if reward.beta == "mean" else kl_coef if reward.beta is None else reward.beta
        ensemble = Ensemble(name, reward.share, beta)
        for k, path in enumerate(paths):
            member = ModelReward(type="reward_model", path=path, normalize=reward.normalize, on_error=reward.on_error)
            found.append(NamedReward(f"{key}.members.{k}", f"{name}_{k}", member, ensemble))
    return found


def reward_names(rewards: Sequence[Reward]) -> list[str]:
    """The name of each source in metrics and messages."""
    several = len(rewards) > 1
    names = []
    for number, reward in enumerate(rewards):
        kind = reward.function.rpartition(":")[2] if isinstance(reward, FunctionReward) else reward.type
        names.append(reward.name or (f"{kind}_{number}" if several else kind))
    return names
