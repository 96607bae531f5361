"""Scores from an HTTP endpoint: `rlhf rm serve`, or a server with the interface of OpenRLHF's remote reward model.

    POST <url>  {"query": [prompt + response, ...], "prompts": [...], "labels": [...], "ended": [...]}
    answer      {"rewards": [number, ...]}, or the bare list

`ended` is our addition: whether the response ended with EOS. A reward model that reads EOS needs it; other servers
ignore it. `rlhf_cli.rewards.http_client` says how requests are retried and limited.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import torch

from rlhf_cli.config.rewards import HTTPReward, ServerReward
from rlhf_cli.data.records import batched
from rlhf_cli.processes.signals import stop_requested
from rlhf_cli.rewards.base import RewardSource, Samples, failure, finite
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
    config: ServerReward
    token: str | None = field(default=None, repr=False)

    @classmethod
    def load(cls, reward: ServerReward, name: str, key: str) -> tuple[Self, list[str]]:
        """The source for one entry of `rewards`, and notes; ConfigError if the environment does not hold its token."""
        token, parts, notes = key_from_environment(reward.api_key_env, f"{key}.api_key_env"), urlsplit(reward.url), []
        if token is not None and parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            notes.append(f"{key}: the token is sent unencrypted to {without_secrets(reward.url)}. Use https")
        return cls(name=name, weight=reward.share, on_error=reward.on_error, config=reward, token=token), notes

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

    advice: str = "Check the server's log, or count such scores as 0.0 with on_error: zero"
    config: HTTPReward

    def score(self, samples: Samples) -> torch.Tensor:
        config, scores = self.config, [math.nan] * len(samples.responses)
        client = self.client(config.url)

        async def request(rows: Sequence[int]) -> None:
            column = config.label_column
            body = {
                "query": [samples.prompts[i] + samples.responses[i] for i in rows],
                "prompts": [samples.prompts[i] for i in rows],
                "labels": ["" if column is None else samples.rows[i].get(column) for i in rows],
                "ended": [samples.ended[i] for i in rows],
            }
            asked = client.ask(body, lambda answer: rewards_in(answer, len(rows)))
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

        client.for_each(list(batched(range(len(scores)), config.batch_size)), request, config.concurrency)
        return torch.tensor(scores)

    @property
    def column(self) -> str | None:
        return self.config.label_column


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
