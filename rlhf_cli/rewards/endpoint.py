"""Scores from an HTTP endpoint: `rlhf rm serve`, or a server with the interface of OpenRLHF's remote reward model.

    POST <url>  {"query": [prompt + response, ...], "prompts": [...], "labels": [...], "ended": [...]}
    answer      {"rewards": [number, ...]}, or the bare list

`ended` is our addition: whether the response ended with EOS. A reward model that reads EOS needs it; other servers
ignore it. `rlhf_cli.rewards.http_client` says how requests are retried and limited.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import torch

from rlhf_cli.config.rewards import HTTPReward, ServerReward
from rlhf_cli.data.batches import chunks
from rlhf_cli.processes.signals import stop_requested
from rlhf_cli.rewards.base import RewardSource, Samples, failure, finite, shown
from rlhf_cli.rewards.concurrency import for_each
from rlhf_cli.rewards.http_client import (
    JSONClient,
    Malformed,
    NoAnswer,
    StopRequestedError,
    is_loopback,
    key_from_environment,
    without_secrets,
)

T = TypeVar("T")


@dataclass(kw_only=True)
class ServerSource(RewardSource):
    """A source that asks a server."""

    config: ServerReward
    token: str | None = field(default=None, repr=False)

    def client(self, url: str, *, retry_malformed: bool = False) -> JSONClient:
        """A client for the requests of one batch."""
        return JSONClient(
            url,
            key=self.token,
            timeout_s=self.config.timeout_s,
            retries=self.config.retries,
            backoff_s=self.config.backoff_s,
            retry_malformed=retry_malformed,
            stop_requested=stop_requested,
        )

    async def answered(self, samples: Samples, rows: Sequence[int], request: Awaitable[T]) -> T | None:
        """The answer to a request about some rows; None if there is none and on_error is zero."""
        try:
            return await request
        except StopRequestedError as error:
            raise failure(f"{self.kind} {self.name}", samples, rows, str(error)) from None
        except NoAnswer as error:
            self.fail(samples, rows, str(error), error)
            return None


@dataclass(kw_only=True)
class Endpoint(ServerSource):
    """A server that receives texts, `config.batch_size` in a request, and returns one score for each."""

    kind: ClassVar[str] = "reward"
    advice: str = "Check the server's log, or count such scores as 0.0 with on_error: zero"
    config: HTTPReward

    def score(self, samples: Samples) -> torch.Tensor:
        """The server's scores, [B] float32."""
        scores = [math.nan] * len(samples.responses)
        asyncio.run(self._request_all(samples, scores))
        return torch.tensor(scores)

    async def _request_all(self, samples: Samples, scores: list[float]) -> None:
        """Fill `scores`, a batch of rows in each request."""
        config = self.config
        async with self.client(config.url) as client:

            async def request(rows: Sequence[int]) -> None:
                asked = client.ask(self._body(samples, rows), lambda answer: rewards_in(answer, len(rows)))
                rewards = await self.answered(samples, rows, asked)
                if rewards is None:
                    return
                for row, reward in zip(rows, rewards, strict=True):
                    try:
                        scores[row] = finite(reward)
                    except ValueError:
                        value = client.quote(repr(reward))
                        problem = f"{without_secrets(config.url)} returned {value}, it must be a finite number"
                        self.fail(samples, [row], problem)

            await for_each(list(chunks(range(len(scores)), config.batch_size)), request, config.concurrency)

    def _body(self, samples: Samples, rows: Sequence[int]) -> dict[str, Any]:
        column = self.config.label_column
        return {
            "query": [samples.prompts[i] + samples.responses[i] for i in rows],
            "prompts": [samples.prompts[i] for i in rows],
            "labels": ["" if column is None else samples.rows[i].get(column) for i in rows],
            "ended": [samples.ended[i] for i in rows],
        }

    @property
    def reads_a_column(self) -> bool:
        return self.config.label_column is not None

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError for a row of the data without the label that would be sent."""
        column = self.config.label_column
        if column is not None and column not in row:
            raise ValueError(f"its row has no column {column!r}; it has {shown(', '.join(map(str, row)))}")


def rewards_in(answer: Any, num_texts: int) -> list[Any]:
    """The list of rewards in an answer, its items unchecked; raises Malformed unless it has `num_texts` items.

    >>> rewards_in({"rewards": [1.5, None]}, 2)
    [1.5, None]
    """
    rewards = answer.get("rewards") if isinstance(answer, dict) else answer
    if not isinstance(rewards, list):
        raise Malformed("has no list of rewards")
    if len(rewards) != num_texts:
        raise Malformed(f"has {len(rewards)} rewards for {num_texts} texts")
    return rewards


def load_endpoint(reward: HTTPReward, name: str, key: str) -> tuple[Endpoint, list[str]]:
    """The source for one entry of `rewards`, and notes for the user.

    Raises ConfigError when the environment does not hold its token.
    """
    token, notes = token_of(reward, key)
    return Endpoint(name=name, weight=reward.share, on_error=reward.on_error, config=reward, token=token), notes


def token_of(reward: ServerReward, key: str) -> tuple[str | None, list[str]]:
    """The token for a server from the environment, None if it needs none, and notes for the user."""
    notes = []
    token = key_from_environment(reward.api_key_env, f"{key}.api_key_env") if reward.api_key_env is not None else None
    parts = urlsplit(reward.url)
    if token is not None and parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        notes.append(f"{key}: the token is sent unencrypted to {without_secrets(reward.url)}. Use https")
    return token, notes
