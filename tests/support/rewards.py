"""Build reward sources from a config mapping, and the responses that they score."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from rlhf_cli.config.rewards import Reward, named_rewards
from rlhf_cli.rewards.base import Samples, total_score
from rlhf_cli.rewards.sources import load_rewards
from support.tiny import CPU, merged


def refused(reward, message):
    """Assert that an entry of `rewards` is refused with this message."""
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(Reward).validate_python(reward)


def batch(responses, rows=None, *, ended=True, ids=None, prompts=None, messages=()):
    """Responses as a reward source receives them. Prompt i is `p<i>`, from row i + 3 of a file."""
    several = range(len(responses))
    return Samples(
        prompts or [f"p{i} " for i in several],
        list(responses),
        [[7] for _ in several],
        ids or [[1] * (len(r.split()) + 1) for r in responses],
        [ended] * len(responses),
        rows or [{"n": i} for i in several],
        where=[f"rows.jsonl:{i + 3}" for i in several],
        messages=list(messages),
    )


def source_of(reward, policy_tokenizer=None, **settings):
    """The reward source of one entry of `rewards` in a config."""
    rewards = [TypeAdapter(Reward).validate_python({**reward, **settings})]
    (source,), _ = load_rewards(named_rewards(rewards, "none", 0.1), "none", policy_tokenizer, CPU, "float32")
    return source


def scores_of(reward, responses, rows=None, **settings):
    return total_score([source_of(reward, **settings)], batch(responses, rows)).total.tolist()


CHAT = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def lengths(number, body):  # noqa: ARG001
    return 200, {}, {"rewards": [float(len(text)) for text in body["query"]]}


def asks(server, **settings):
    reward = {"type": "http", "url": server.url, "timeout_s": 60.0, "backoff_s": 0.01, "retries": 2}
    return source_of(merged(reward, settings))
