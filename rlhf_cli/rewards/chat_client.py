"""The interface of OpenAI-compatible chat servers: addresses, answers and their tokens. Imports no torch.

`data generate`, `data score`, `rlhf eval --judge` and `type: rubric` rewards ask such servers by a `JSONClient`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from rlhf_cli.rewards.http_client import Malformed


@dataclass(frozen=True)
class OptionNames:
    """The names of a command's options, for messages."""

    server: str = "--server"
    key: str = "--api-key-env"
    after_failure: str = "Rows written so far are kept; run the same command without --restart to resume"
    """The advice after the server failed."""


OF_DATA = OptionNames()  # of `rlhf data generate` and `rlhf data score`


@dataclass(frozen=True)
class Written:
    text: str
    ended: bool  # False when the answer was cut at `max_new_tokens`


def completion_in(answer: Any) -> Written | None:
    """The text of a chat completion, None if it has none (a refusal or a tool call); raises Malformed otherwise.

    >>> completion_in({"choices": [{"message": {"content": "Hi"}, "finish_reason": "length"}]})
    Written(text='Hi', ended=False)
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise Malformed("has no choices[0].message")
    content = message.get("content")
    if content is None:
        return None
    if not isinstance(content, str):
        raise Malformed(f"has a {type(content).__name__} in choices[0].message.content, it must be text")
    # JSON can hold lone surrogates, a UTF-8 file cannot.
    return Written(content.encode("utf-8", "replace").decode(), choice.get("finish_reason") != "length")


def usage_in(answer: Any) -> int | None:
    """The tokens of a chat completion, prompt and answer together; None if the server does not say.

    >>> usage_in({"usage": {"prompt_tokens": 7, "completion_tokens": 2}}), usage_in({})
    (9, None)
    """
    usage = answer.get("usage") if isinstance(answer, dict) else None
    counts = [usage.get(f"{kind}_tokens") for kind in ("prompt", "completion")] if isinstance(usage, dict) else [None]
    numbers = [n for n in counts if isinstance(n, int) and n >= 0]
    return sum(numbers) if len(numbers) == len(counts) else None


def completions_url(base_url: str) -> str:
    """The endpoint below a base URL, given with or without `/v1` or the whole path.

    >>> completions_url("http://localhost:8000"), completions_url("https://host/api/v1/")
    ('http://localhost:8000/v1/chat/completions', 'https://host/api/v1/chat/completions')
    """
    parts = urlsplit(base_url)
    path = parts.path.rstrip("/")
    if not path.endswith("/chat/completions"):
        path += "/chat/completions" if path.endswith("/v1") else "/v1/chat/completions"
    return urlunsplit(parts._replace(path=path))
