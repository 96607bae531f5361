"""The health checks of a run: before its first iteration and after each one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from rlhf_cli.algorithms.statistics import word_shares
from rlhf_cli.config.rewards import ModelReward
from rlhf_cli.health.history import GAP_TOLERANCE, RATIO_TOLERANCE
from rlhf_cli.health.running import Health
from rlhf_cli.models.forward import compute_dtype
from rlhf_cli.ppo.setup import Setup
from rlhf_cli.ppo.update import UpdateBatch
from rlhf_cli.processes.distributed import gather_texts
from rlhf_cli.run.artifacts import flat, read_manifest_or_none
from rlhf_cli.training.bad_steps import no_gradient

TINY = 1e-6
"""A difference below this may give a gradient whose squares are 0 in float32."""


def new_health(setup: Setup) -> Health:
    """The health checks of the run, with the limits that fit its config."""
    config = setup.config
    is_float32 = compute_dtype(setup.world.device, config.precision) == torch.float32
    precision = "float32" if is_float32 else "bfloat16"
    return Health(
        kl_in_reward=config.ppo.kl_in == "reward",
        has_value_model=config.ppo.has_value_model,
        starts_at_reference=config.ref_policy is None,
        max_new_tokens=config.rollout.max_new_tokens,
        ratio_tolerance=RATIO_TOLERANCE[precision],
        gap_tolerance=GAP_TOLERANCE[precision],
        config=flat(config.model_dump(mode="json")),
    )


def report_start(setup: Setup, health: Health) -> None:
    """Report the seconds of `compile`, and reward models that may be no better than guessing."""
    config, stage = setup.config, setup.stage
    if config.compile:
        stage.log(0, {"time/compile_s": setup.compile_s})
    figures = {}
    for _, name, reward, _ in config.named_rewards:
        if isinstance(reward, ModelReward):
            figures[name] = _held_out_figures(config.stage_model(reward.path, "rm"))
    findings = health.check_start(figures)
    if findings:
        stage.report(0, findings, None)


def _held_out_figures(path: str) -> dict[str, float]:
    """The held-out figures of an `rm` stage, given its directory or its `model`; {} for another model."""
    directory = Path(path)
    manifest = read_manifest_or_none(directory if directory.name != "model" else directory.parent)
    return manifest.metrics if manifest is not None and manifest.stage == "rm" else {}


def report_iteration(
    setup: Setup,
    health: Health,
    newest: UpdateBatch,
    texts: Sequence[str],
    metrics: Mapping[str, float],
    iteration: int,
) -> None:
    """Check the health of an iteration; raises RunError for a finding that stops the run."""
    step, world = iteration + 1, setup.world
    stops = no_gradient(_norms_that_should_not_be_zero(setup, newest, metrics), f"iteration {step}")
    words = word_shares([text for shard in gather_texts(world, texts) for text in shard])
    findings = [*stops, *health.check(step, metrics, words)]
    setup.stage.report(step, findings, health.line(findings, metrics))


def _norms_that_should_not_be_zero(setup: Setup, newest: UpdateBatch, metrics: Mapping[str, float]) -> dict[str, float]:
    """The gradient norms of 0 of an iteration whose rollout has something to learn.

    Nothing is to be learned if every advantage is 0, as with equal rewards in each group, if every token was the only
    possible one, or if every value equals its return.
    """
    zero = [key for key in ("policy/grad_norm", "value/grad_norm") if metrics.get(key) == 0.0]
    if not zero:
        return {}
    to_learn = {
        "policy/grad_norm": bool(((newest.advantages.abs() > TINY) & (newest.logprobs.abs() > TINY)).any()),
        "value/grad_norm": bool(((newest.returns - newest.values).abs() > TINY).any()),
    }
    everyone = setup.world.gather(to_learn)
    return {key: 0.0 for key in zero if any(process[key] for process in everyone)}
