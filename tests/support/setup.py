"""A Setup for single functions of the PPO stage, and steppers that record gradients."""

from __future__ import annotations

from types import SimpleNamespace

from rlhf_cli.config.loader import load_config
from rlhf_cli.data.batches import Budget
from rlhf_cli.data.splits import Drawn, HeldOutRows
from rlhf_cli.models.adapter_files import BaseModel
from rlhf_cli.models.cost import Work
from rlhf_cli.ppo.setup import Setup
from rlhf_cli.processes.distributed import World
from rlhf_cli.rollout.sampling import Sampling
from rlhf_cli.training.bad_steps import LossScale
from rlhf_cli.training.speed import Speed
from support.compare import grads
from support.tiny import CPU, STOP

ALONE = World(0, 1, CPU)
NO_SCALE = LossScale(CPU, "float32")
STAGE = SimpleNamespace(world=ALONE, loss_scale=NO_SCALE)
"""A StageRun for the functions that compute gradients."""
LARGE = 10**6
BUDGETS = (
    *(Budget(LARGE, rows) for rows in (1, 2, 4, None)),
    Budget(1),
    Budget(40),
    Budget(70, 3),
    Budget(70, padded=True),
)


def config_of(write_config, stage, schema, root, **changes):
    return load_config(write_config(stage, root, **changes), schema)


class Recorder:
    """A Stepper that records gradients and leaves the weights unchanged."""

    def __init__(self, model):
        self.model, self.steps = model, []

    learning_rate = 0.0

    def clip(self, world):  # noqa: ARG002
        self.steps.append(grads(self.model))
        return 0.0

    def advance(self, *, move=True):  # noqa: ARG002
        self.model.zero_grad()


def setup_of(config, models, rewards=(), policy_stepper=None, value_stepper=None):
    """A Setup without data for one process."""
    tokens = config.ppo.tokens_per_microbatch
    return Setup(
        config=config,
        stage=SimpleNamespace(world=ALONE, may_step=lambda *_: True, speed=Speed("ppo", ALONE), loss_scale=NO_SCALE),
        tokenizer=None,
        models=models,
        policy_base=BaseModel("base"),
        value_base=None,
        rewards=rewards,
        sampling=Sampling(temperature=config.rollout.temperature, stop=frozenset(STOP)),
        train=[],
        held_out=HeldOutRows(Drawn([], 1, 0), Drawn([], 1, 0)),
        ptx=[],
        policy_stepper=policy_stepper,
        value_stepper=value_stepper,
        average=None,
        budget=Budget(LARGE if tokens == "auto" else tokens, config.ppo.microbatch_size),
        policy_work=Work(1, 1, 1, 1, 1),
        value_work=None,
        compile_s=0.0,
    )


NO_TEST = {"test": None, "test_fraction": 0}


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def reward_calls(setup, number=0):
    """Arguments and results of every call of reward function `number` of a run."""
    return setup.rewards[number].function.__globals__["CALLS"]


def learning(**ppo):
    """Config changes for a run that moves far from its initial weights: 12 steps per iteration, large learning rate."""
    return {
        "ppo": {"num_iterations": 1, "minibatch_size": 2, "ppo_epochs": 3, **ppo},
        "optimizer": {"learning_rate": 2e-2, "schedule": "linear", "min_lr_ratio": 0.1},
    }
