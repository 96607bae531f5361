"""Fixtures of PPO's tests: a run that needs no earlier stage, a loaded setup, and a recorded run."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.ppo.setup import load_setup
from rlhf_cli.training.optimizer import Stepper
from rlhf_cli.training.stage_run import StageRun
from stages import ppo as ppo_stage
from support.setup import NO_TEST, config_of, weights_of
from support.tiny import STOP, merged, read_jsonl

FUNCTIONS = '''
SEEN = []


def letters(prompts, responses, rows):
    """Scores of both signs, different for almost every response. Calls and answers are recorded."""
    values = [len(r) % 7 - 3.0 + 0.25 * r.count("e") for r in responses]
    SEEN.append({"prompts": prompts, "responses": responses, "rows": rows, "values": values})
    return values


def ends(prompts, responses, rows):
    return [0.5 + row["ended"] for row in rows]


def tokens(prompts, responses, rows):
    values = [[0.25 * len(text) - 0.5 * (i % 3) for i, text in enumerate(row["tokens"])] for row in rows]
    SEEN.append({"prompts": prompts, "responses": responses, "rows": rows, "dense": values})
    return values


def infinite(prompts, responses, rows):
    SEEN.append({})
    return [float("inf") if len(SEEN) > 1 else 0.0 for _ in rows]
'''


@pytest.fixture(scope="session")
def functions(tmp_path_factory):
    path = tmp_path_factory.mktemp("functions") / "rewards.py"
    path.write_text(FUNCTIONS, encoding="utf-8")
    return path


@pytest.fixture
def base(make_model, tokenizer, functions):
    """A PPO run that needs no earlier stage. About one token in six ends a response."""
    return {
        "policy": {"path": str(make_model("llama"))},
        "rewards": [{"type": "function", "function": f"{functions}:letters"}],
        "data": NO_TEST,
        "rollout": {"max_new_tokens": 8, "stop_tokens": tokenizer.convert_ids_to_tokens(sorted(STOP))},
        "ppo": {"num_iterations": 2, "rollout_batch_size": 8, "minibatch_size": 4, "ppo_epochs": 1},
        "optimizer": {"learning_rate": 5e-3},
    }


@pytest.fixture
def start(write_config, base, tmp_path):
    """A function from config changes to a loaded Setup whose stage is open inside the context."""

    @contextmanager
    def begin(**changes):
        config = config_of(write_config, "ppo", PPOConfig, tmp_path / "setup", **merged(base, changes))
        with StageRun("ppo", config, quiet=True) as stage:
            yield load_setup(config, stage)

    return begin


@pytest.fixture
def watch(monkeypatch, run_stage, base, tmp_path):
    """A function that runs PPO and records what passed between its steps.

    setup; rollouts, and models as they were at each; batches, what each update learnt from; steps, the
    statistics of each minibatch; moves, whether each call of `advance` stepped, by (name of the model); after,
    the policy's weights behind each update; metrics, the rows of metrics.jsonl; place, the stage's directory.
    """

    def run(name="run", before_rollout=None, **changes):
        seen = SimpleNamespace(setup=None, rollouts=[], models=[], batches=[], steps=[], moves=[], after=[], weights=[])
        real = {part: getattr(ppo_stage, part) for part in ("load_setup", "_rollout", "_update", "_backward")}
        advance = Stepper.advance

        def load_setup(config, stage):
            seen.setup = real["load_setup"](config, stage)
            return seen.setup

        def rollout(setup, iteration):
            if before_rollout is not None:
                before_rollout(setup, iteration)
            seen.models.append(copy.deepcopy(setup.models))
            seen.rollouts.append(real["_rollout"](setup, iteration))
            return seen.rollouts[-1]

        def backward(*args, **options):
            sums, error = real["_backward"](*args, **options)
            seen.steps.append(dict(sums))
            return sums, error

        def one_update(setup, batch, iteration, coefs):
            seen.batches.append(batch)
            stats = real["_update"](setup, batch, iteration, coefs)
            seen.after.append(weights_of(setup.models.policy))
            return stats

        def step(self, *, move=True):
            advance(self, move=move)
            which = "policy" if self is seen.setup.policy_stepper else "value"
            seen.moves.append((which, move))
            if which == "policy":
                seen.weights.append(weights_of(self.model))

        with monkeypatch.context() as patch:
            patch.setattr(ppo_stage, "load_setup", load_setup)
            patch.setattr(ppo_stage, "_rollout", rollout)
            patch.setattr(ppo_stage, "_backward", backward)
            patch.setattr(ppo_stage, "_update", one_update)
            patch.setattr(Stepper, "advance", step)
            seen.place = run_stage("ppo", tmp_path / name, **merged(base, changes))
        seen.metrics = read_jsonl(seen.place / "metrics.jsonl")
        return seen

    return run
