"""Fixtures for the tests of PPO: a config that needs no earlier stage, a loaded setup, and a recorded run."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.ppo.setup import load_setup
from rlhf_cli.run.stage_run import StageRun
from rlhf_cli.training.optimizer import Stepper
from stages import ppo as ppo_stage
from support.setup import NO_TEST, config_of, weights_of
from support.tiny import STOP, merged, read_jsonl

FUNCTIONS = '''
CALLS = []


def letters(prompts, responses, rows):
    """Scores of both signs that differ for almost every response. CALLS records arguments and scores."""
    values = [len(r) % 7 - 3.0 + 0.25 * r.count("e") for r in responses]
    CALLS.append({"prompts": prompts, "responses": responses, "rows": rows, "values": values})
    return values


def ends(prompts, responses, rows):
    return [0.5 + row["ended"] for row in rows]


def tokens(prompts, responses, rows):
    values = [[0.25 * len(text) - 0.5 * (i % 3) for i, text in enumerate(row["tokens"])] for row in rows]
    CALLS.append({"prompts": prompts, "responses": responses, "rows": rows, "dense": values})
    return values


def fails(prompts, responses, rows):
    return [1 / 0 for _ in rows]


def constant(prompts, responses, rows):
    return [0.0] * len(rows)
'''


@pytest.fixture(scope="session")
def functions(tmp_path_factory):
    path = tmp_path_factory.mktemp("functions") / "rewards.py"
    path.write_text(FUNCTIONS, encoding="utf-8")
    return path


@pytest.fixture
def base(make_model, tokenizer, functions):
    """Config of a PPO run that needs no earlier stage. About one token in six ends a response."""
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
    """A function: config changes -> context manager with a loaded Setup whose stage is open."""

    @contextmanager
    def begin(**changes):
        config = config_of(write_config, "ppo", PPOConfig, tmp_path / "setup", **merged(base, changes))
        with StageRun("ppo", config, quiet=True) as stage:
            yield load_setup(config, stage)

    return begin


@pytest.fixture
def watch(monkeypatch, run_stage, base, tmp_path):
    """A function: config changes -> record of a PPO run.

    The record has these attributes. setup: the Setup. rollouts: one per iteration. models: a copy of the models before
    each rollout. batches: the UpdateBatch of each iteration. steps: the statistics of each minibatch. moves: a pair
    (name of the model, whether it stepped) for each call of `advance`. weights: the weights of the policy after each
    such call. after: the weights of the policy after each update. metrics: the rows of metrics.jsonl. stage_dir: the
    directory of the stage.
    """

    def run(name="run", before_rollout=None, **changes):
        record = SimpleNamespace(
            setup=None, rollouts=[], models=[], batches=[], steps=[], moves=[], after=[], weights=[]
        )
        real = {part: getattr(ppo_stage, part) for part in ("load_setup", "_rollout", "_update", "_backward")}
        advance = Stepper.advance

        def load_setup(config, stage):
            record.setup = real["load_setup"](config, stage)
            return record.setup

        def rollout(setup, iteration):
            if before_rollout is not None:
                before_rollout(setup, iteration)
            record.models.append(copy.deepcopy(setup.models))
            record.rollouts.append(real["_rollout"](setup, iteration))
            return record.rollouts[-1]

        def backward(*args, **options):
            sums, error = real["_backward"](*args, **options)
            record.steps.append(dict(sums))
            return sums, error

        def update(setup, batch, iteration, coefs):
            record.batches.append(batch)
            stats = real["_update"](setup, batch, iteration, coefs)
            record.after.append(weights_of(setup.models.policy))
            return stats

        def recorded_advance(self, *, move=True):
            advance(self, move=move)
            which = "policy" if self is record.setup.policy_stepper else "value"
            record.moves.append((which, move))
            if which == "policy":
                record.weights.append(weights_of(self.model))

        with monkeypatch.context() as patch:
            patch.setattr(ppo_stage, "load_setup", load_setup)
            patch.setattr(ppo_stage, "_rollout", rollout)
            patch.setattr(ppo_stage, "_backward", backward)
            patch.setattr(ppo_stage, "_update", update)
            patch.setattr(Stepper, "advance", recorded_advance)
            record.stage_dir = run_stage("ppo", tmp_path / name, **merged(base, changes))
        record.metrics = read_jsonl(record.stage_dir / "metrics.jsonl")
        return record

    return run
