"""PPO: train a policy to raise the reward model's score while it stays close to the SFT model.

    rlhf ppo --config configs/support/ppo.yaml
    rlhf ppo --config configs/support/ppo.yaml --nproc 2

Reads   prompts, the SFT model (policy and ref_policy), the reward model (also the start of the value model)
Writes  <artifacts>/ppo/model, value_model, metrics.jsonl, health.jsonl, samples.jsonl, evaluation.json;
        on request ema_model, best_model, evaluations.jsonl

Each iteration:

 1. rollout: sample responses to prompts. Ratio, KL and entropy use the distribution that was sampled from, with its
    temperature and filters (top-p and others: `kept_tokens` in rollout/sampling.py). The log-probability of a
    token is `token_logprobs` in tensor_ops.py, fused with the model's head in kernels/head.py
 2. score: the weighted sum of the rewards (a reward model's is `sequence_scores` in rewards/models.py), compared with
    ref_policy's replies by `shaping`, normalised, clipped, mixed with the limits, minus penalties (missing EOS, length)
 3. token rewards: -kl_coef * (logprobs - ref_logprobs), plus the score at the last token (Ziegler et al. 2019, eq. 2)
 4. advantages by GAE (Schulman et al. 2016, eq. 16), returns = advantages + values; advantages are whitened over
    the whole rollout. Without a value model: reward to go, or a comparison of the responses to a prompt
 5. update: ppo_epochs x minibatches x microbatches of the clipped policy loss (Schulman et al. 2017, eq. 7) and the
    clipped value loss; each is a sum over response tokens, divided by the tokens of the whole minibatch. The
    learning-rate schedule is `rate_at` in training/optimizer.py
 6. figures and health: problems are reported by name, with what to try. An adaptive kl_coef follows the measured KL
    (`adaptive_kl_coef` in algorithms/kl.py)

At the end SFT and PPO are compared on held-out prompts. docs/ppo.md gives the reason and the test of each detail,
docs/extending.md shows how to add an advantage estimator or a KL. Shapes: B responses of at most R tokens in a rollout,
b responses of at most r tokens in a microbatch.

Not implemented on purpose: dropout (the ratio would not be 1 before the first step), a KL in both the reward and the
loss (it would be counted twice), a Huber loss for the value model (not shown to help).
"""

from __future__ import annotations

if __name__ == "__main__":  # Before torch is imported, which reads these settings.
    from rlhf_cli.processes.environment import set_up_process

    set_up_process()

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, astuple
from functools import partial
from typing import Any, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_cli.algorithms.advantages import (
    broadcast_to_tokens,
    gae,
    group_advantages,
    masked_whiten,
    reward_to_go,
    token_rewards,
)
from rlhf_cli.algorithms.kl import kl_estimate, kl_loss, sequence_k2_loss
from rlhf_cli.algorithms.losses import (
    Weighting,
    entropy_bonus,
    loss_weights,
    mixed_loss,
    penalty_loss,
    policy_loss,
    value_loss,
)
from rlhf_cli.algorithms.names import GroupBaseline, KLEstimator
from rlhf_cli.algorithms.score_transforms import (
    Moments,
    clip_score,
    length_penalty,
    missing_eos,
    overlong_penalty,
)
from rlhf_cli.config.ppo import PPO, PPOConfig
from rlhf_cli.health.running import Health
from rlhf_cli.models.passes import recomputing
from rlhf_cli.ppo.held_out import HeldOut
from rlhf_cli.ppo.metrics import (
    SHOWN,
    count_rollout,
    count_update,
    failed_batch,
    iteration_metrics,
    log_samples,
    report_iteration,
    report_start,
)
from rlhf_cli.ppo.scores import (
    Limits,
    ReferenceReplies,
    ScoreScale,
    ask_rewards,
    count_failures,
    measure_reference_scores,
    or_failure,
    split_dense,
)
from rlhf_cli.ppo.setup import Setup, adjacent_responses, load_setup, plan, save_models
from rlhf_cli.ppo.update import (
    KLCoefs,
    Recent,
    UpdateBatch,
    adapt_kl_coefs,
    backward_ptx,
    clip_gradients,
    minibatches,
    rows_of_process,
    select,
    take_step,
)
from rlhf_cli.processes.distributed import World
from rlhf_cli.processes.microbatches import GradientSum
from rlhf_cli.rewards.base import Scores
from rlhf_cli.rollout.rollout import (
    RolloutBatch,
    TokenScores,
    collect,
    cut_responses,
    response_values,
    score_tokens,
)
from rlhf_cli.rollout.sampling import Response, draw_uniforms
from rlhf_cli.run.checkpoint import State, Stateful, Weights
from rlhf_cli.run.stage_run import StageRun
from rlhf_cli.tensor_ops import totals


def run(config: PPOConfig, *, quiet: bool = False, restart: bool = False) -> None:
    """Run the stage."""
    with StageRun("ppo", config, quiet=quiet, restart=restart) as stage:
        num_iterations = config.ppo.num_iterations
        setup = load_setup(stage.settled(config), stage)
        stage.display.block("plan", plan(setup))
        state = RunState(setup)  # measures SFT on the held-out prompts
        if config.ppo.uses_reference_scores:
            measure_reference_scores(setup, state.scale)
        state.references.sample()

        first = stage.resume(state.parts(), num_iterations)
        state.references.write()
        if first == 0:
            report_start(setup, state.health)
        stage.display.begin(num_iterations, "iteration", first)
        for iteration in range(first, num_iterations):
            state.held_out.measure_if_due(iteration)
            _iterate(setup, state, iteration)
            stage.finish_step(iteration + 1, num_iterations)
        stage.display.end()

        save_models(setup)  # before anything else can fail
        count_failures(setup)
        stage.display.notes(*(source.report() for source in setup.rewards))
        stage.publish(state.held_out.compare())


class RunState:
    """The state that the run carries from one iteration to the next; a checkpoint stores it."""

    def __init__(self, setup: Setup):
        self.setup, ppo = setup, setup.config.ppo
        self.coefs = KLCoefs(ppo.kl_coef, ppo.policy_kl_coef)
        self.scale = ScoreScale(ppo)
        self.limits = Limits(setup.config.limits)
        self.references = ReferenceReplies(setup)
        self.health = Health(setup.config, "bfloat16" if setup.sampler_may_differ else "float32")
        self.held_out = HeldOut(setup, self.health)
        self.recent = Recent(setup)

    def parts(self) -> dict[str, Stateful]:
        """Everything that a checkpoint stores, by name."""
        setup, models = self.setup, self.setup.models
        parts: dict[str, Stateful] = {
            "policy": Weights(models.policy),
            "policy_optimizer": setup.policy_stepper,
            "carried": self,  # the name in every checkpoint so far
        }
        value = models.value_model if models.value_model is not None else models.value_head
        if value is not None and setup.value_stepper is not None:
            parts |= {"value_model": Weights(value), "value_optimizer": setup.value_stepper}
        if setup.average is not None:
            parts["ema"] = setup.average
        if self.limits.limits:
            parts["limits"] = self.limits
        return parts

    def state(self) -> State:
        tensors, rollouts = self.recent.state()
        return tensors, {
            **asdict(self.coefs),
            "score_moments": astuple(self.scale.moments),
            "health": self.health.state_dict(),
            **self.held_out.state(),
            "rollouts": rollouts,
        }

    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        self.coefs.kl_coef, self.coefs.policy_kl_coef = numbers["kl_coef"], numbers["policy_kl_coef"]
        self.scale.moments = Moments(*numbers["score_moments"])
        self.health.load_state_dict(numbers["health"])
        self.held_out.restore(numbers)
        self.recent.restore(tensors, numbers["rollouts"])


def _iterate(setup: Setup, state: RunState, iteration: int) -> None:
    """One iteration: the six steps of the module's docstring."""
    config, stage = setup.config, setup.stage

    # 1. Rollout: this process's share of the iteration's prompts.
    rollout = _rollout(setup, iteration)
    mask = rollout.response_mask  # [B, R]

    # 2. Score.
    with stage.speed.phase("reward"):
        # If a reward fails on any process, all save the last finished iteration.
        ask = partial(ask_rewards, setup, rollout)
        texts, scores = or_failure(setup.world, ask, save=lambda: stage.save_now(iteration))
        scores = state.references.compared(scores, iteration)
        score, dense = _score(scores, rollout.responses, state.scale, state.limits, config, setup.world)

    # 3. Token rewards.
    kl = kl_estimate(rollout.logprobs, rollout.ref_logprobs, estimator="k1")  # [B, R]
    rewards = _token_rewards(rollout, score, dense, config, setup.world, kl_coef=state.coefs.kl_coef)  # [B, R]

    # 4. Advantages.
    advantages, returns = _advantages(rewards, rollout.values, mask, config, setup.world)  # [B, R] each

    # 5. Update, on this rollout and the recent ones that the config keeps.
    old = (rollout.logprobs, rollout.sampled_logprobs, rollout.ref_logprobs, rollout.values)
    newest = UpdateBatch(rollout.prompts, rollout.responses, mask, *old, advantages, returns)
    offload = setup.models.offload
    with stage.speed.phase("update"), offload.update() if offload is not None else nullcontext():
        batch = state.recent.add(newest, iteration)
        update = _update(setup, batch, iteration, state.coefs)

    # 6. Figures and health, then the coefficients that follow the KL or a limit.
    metrics = iteration_metrics(setup, rollout, texts, scores, kl, rewards, returns)
    metrics |= update | {"objective/kl_coef": state.coefs.kl_coef} | stage.speed.row()
    if state.held_out.home is not None:
        metrics |= state.held_out.home.unfamiliarity(scores.features, setup.world)
    metrics |= adapt_kl_coefs(setup, state.coefs, newest, metrics) | state.limits.figures()
    state.limits.adapt(metrics)
    stage.log(iteration + 1, metrics, SHOWN)
    log_samples(setup, rollout, texts, scores, kl, iteration)
    report_iteration(setup, state.health, newest, texts, metrics, iteration)


# ----------------------------------------------------------------------------------- from prompts to advantages


def _rollout(setup: Setup, iteration: int) -> RolloutBatch:
    """This process's share of the responses of an iteration."""
    config, prompts = setup.config, setup.prompts_of(iteration)
    uniforms = draw_uniforms(config.seed, "ppo rollout", iteration, len(prompts), config.rollout.max_new_tokens)
    own = setup.world.shard(range(len(prompts)), setup.adjacent)
    rollout = collect(
        [prompts[i] for i in own],
        uniforms[own],
        setup.models.refreshed(),
        sampling=setup.sampling,
        tokenizer=setup.tokenizer,
        budget=setup.budget,
        precision=config.precision,
        recompute=setup.recomputes_logprobs,
        max_live_rows=config.rollout.max_live_rows,
        with_full_kl=config.ppo.kl_in == "reward" and config.ppo.kl_estimator_used == "full",
    )
    count_rollout(setup, rollout)
    return rollout


def _score(
    scores: Scores, responses: Sequence[Response], scale: ScoreScale, limits: Limits, config: PPOConfig, world: World
) -> tuple[Tensor, Tensor | None]:
    """(score, dense): the shaped score of each response, [B], and the rewards of single tokens, [B, R] or None.

    ``limited(clip((raw - mean) / std)) - missing_eos - length_penalty - overlong_penalty``

    `PPO` in rlhf_cli/config/ppo.py gives the reason for each step.
    """
    ppo, longest = config.ppo, config.rollout.max_new_tokens
    raw, dense = split_dense(scores, [len(r.ids) for r in responses], world.device)
    if scale.kind in ("running", "running_std"):
        # One non-finite score would spoil the statistics for good. The steps that contain it are skipped anyway.
        scale.take(raw[raw.isfinite()], world)
    score = scale.apply(raw)
    if ppo.score_clip is not None:
        score = clip_score(score, ppo.score_clip)
    limits.measure(scores.each, world)
    ended, lengths = torch.tensor([r.ended for r in responses]), raw.new_tensor([len(r.ids) for r in responses])
    score = limits.apply(score, scores.each) - missing_eos(ended, penalty=ppo.missing_eos_penalty)
    score = score - length_penalty(lengths, per_token=ppo.length_penalty)
    if ppo.overlong_buffer:
        buffer, penalty = ppo.overlong_buffer, ppo.overlong_penalty
        score = score - overlong_penalty(lengths, max_new_tokens=longest, buffer=buffer, penalty=penalty)
    return score.to(world.device), dense if dense is None else dense * limits.score_share


def _token_rewards(
    rollout: RolloutBatch, score: Tensor, dense: Tensor | None, config: PPOConfig, world: World, *, kl_coef: float
) -> Tensor:
    """The reward of each token, [B, R], from the score of each response, [B]."""
    ppo, mask = config.ppo, rollout.response_mask
    if ppo.advantage_estimator == "reinforce_pp_baseline":
        score = _over_groups(score, "dr_grpo", config, world)
    if ppo.kl_in == "reward":
        kl = _token_kl(rollout.logprobs, rollout.ref_logprobs, rollout.kl_full, ppo.kl_estimator_used)
    else:  # the loss charges it
        kl = torch.zeros_like(rollout.logprobs)
    rewards = token_rewards(score, kl, mask, kl_coef=kl_coef, dense=dense)
    if ppo.whiten_rewards:
        rewards = masked_whiten(rewards, mask, shift_mean=False, reduce=world.sum)
    return rewards


def _token_kl(logprobs: Tensor, ref_logprobs: Tensor, kl_full: Tensor | None, estimator: KLEstimator) -> Tensor:
    """The KL to ref_policy at each token, [B, R]; `kl_full` is the exact one, if it was computed."""
    if estimator == "full":
        assert kl_full is not None
        return kl_full
    assert estimator != "k2_sequence", "a loss of whole responses"
    return kl_estimate(logprobs, ref_logprobs, estimator=estimator)


def _advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, config: PPOConfig, world: World
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), [B, R] each, from token rewards and values, [B, R]. The value model learns the returns."""
    ppo, estimator = config.ppo, config.ppo.advantage_estimator
    match estimator:
        case "gae" | "monte_carlo":
            gae_lambda = ppo.gae_lambda if estimator == "gae" else 1.0
            advantages, returns = gae(
                rewards, values, mask, gamma=ppo.gamma, gae_lambda=gae_lambda, value_lambda=ppo.value_lambda
            )
        case "reinforce" | "reinforce_pp" | "reinforce_pp_baseline":
            advantages = returns = reward_to_go(rewards, mask, gamma=ppo.gamma)
        case "rloo" | "grpo" | "dr_grpo":
            returns = reward_to_go(rewards, mask, gamma=ppo.gamma)
            # Compare the total rewards, KL included, of the responses to a prompt.
            advantages = broadcast_to_tokens(_over_groups(rewards.sum(1), estimator, config, world), mask)
        case _:
            assert_never(estimator)
    if ppo.whitens_advantages:
        advantages = masked_whiten(advantages, mask, reduce=world.sum)
    return advantages, returns


def _over_groups(totals: Tensor, baseline: GroupBaseline, config: PPOConfig, world: World) -> Tensor:
    """`group_advantages` of this process's responses, from the totals [B] of all processes, which share groups: [B]."""
    adjacent = adjacent_responses(config, world.size)
    shards = [part.tolist() for part in world.gather_tensors(totals.double())]
    everyone = torch.tensor(world.interleave(shards, adjacent), dtype=torch.float64)
    compared = group_advantages(everyone, samples_per_prompt=config.rollout.samples_per_prompt, baseline=baseline)
    return compared[world.shard(range(len(compared)), adjacent)].to(totals)


# ----------------------------------------------------------------------------------------------- the update


def _update(setup: Setup, batch: UpdateBatch, iteration: int, coefs: KLCoefs) -> dict[str, float]:
    """Make `ppo_epochs` passes over the batch, in newly shuffled minibatches; returns mean statistics.

    A minibatch is one optimizer step of each model. All processes decide from the same sums whether to step, skip or
    stop. A step skipped for a NaN or infinite number does not enter the means.
    """
    config, ppo, stage = setup.config, setup.config.ppo, setup.stage
    learns_policy = iteration >= config.value_model.warmup_iterations
    rates = {"policy/learning_rate": setup.policy_stepper.learning_rate}
    if setup.value_stepper is not None:
        rates["value/learning_rate"] = setup.value_stepper.learning_rate
    step = sum(ppo.updates(i) for i in range(iteration))  # optimizer steps of the run so far
    taken: list[dict[str, float]] = []
    first: dict[str, float] = {}
    largest = 0.0  # |log ratio| of a token of this process
    num_bad, num_skipped, stopped = 0, 0, False
    for rows in minibatches(len(batch.responses), iteration, config):
        step += 1
        if stopped:
            take_step(setup, learns_policy=learns_policy, move=False)
            continue
        minibatch = select(batch, rows_of_process(batch, rows, setup.world))
        with recomputing(setup.models.policy, setup.models.value_model):
            stats, log_ratio = _backward(setup, minibatch, step, coefs, learns_policy=learns_policy)
        if not first:
            # Before the first step the policy is the one that sampled: any ratio but 1 is a bug.
            error = max(setup.world.gather(log_ratio))
            first = {"policy/first_ratio": stats["policy/ratio"], "policy/first_ratio_error": error}
        stats |= clip_gradients(setup, learns_policy=learns_policy)
        where = f"ppo iteration {iteration + 1}, step {step}"
        if not stage.may_step(iteration + 1, where, stats, partial(failed_batch, setup, minibatch, step)):
            num_bad += 1
            take_step(setup, learns_policy=learns_policy, move=False)
            continue
        taken.append(stats)
        largest = max(largest, log_ratio)
        skipped = ppo.max_ratio is not None and stats["policy/ratio"] > ppo.max_ratio
        stopped = ppo.max_approx_kl is not None and stats["policy/approx_kl"] > ppo.max_approx_kl
        num_skipped += skipped
        take_step(setup, learns_policy=learns_policy, move=not (skipped or stopped))
    means = {key: sum(stats[key] for stats in taken) / len(taken) for key in (taken[0] if taken else ())}
    finite = {key: value for key, value in first.items() if math.isfinite(value)}
    counts = {"bad_steps": num_bad, "skipped_steps": num_skipped, "stopped_early": stopped}
    finite["policy/largest_ratio"] = math.exp(min(max(setup.world.gather(largest)), 700.0))  # exp overflows above 709
    return means | rates | finite | {f"policy/{name}": float(count) for name, count in counts.items()}


def _backward(
    setup: Setup, minibatch: UpdateBatch, step: int, coefs: KLCoefs, *, learns_policy: bool
) -> tuple[dict[str, float], float]:
    """Compute the gradients of this process's rows of one minibatch.

    The loss of a microbatch is a sum over its tokens, divided by the tokens of the whole minibatch, so gradients add
    up. Returns the minibatch's statistics over all processes, and this process's largest |log ratio|.
    """
    config, ppo, value_model = setup.config, setup.config.ppo, setup.models.value_model
    num_tokens = setup.world.sum(minibatch.response_mask.sum()).item()
    log_ratios: list[Tensor] = []

    def weighting_of(mb: UpdateBatch, numbers: Tensor) -> Weighting:
        weights = loss_weights(
            mb.response_mask,
            aggregation=ppo.loss_aggregation,
            num_tokens=num_tokens,
            num_sequences=ppo.minibatch_size,
            max_new_tokens=config.rollout.max_new_tokens,
            dtype=numbers.dtype,
        )
        return Weighting(weights=weights, num_tokens=num_tokens)

    def of_policy(rows: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of the policy, plus the value loss of a head on it."""
        mb = select(minibatch, rows)
        with torch.set_grad_enabled(learns_policy or value_model is None):
            new = score_tokens(
                setup.models,
                mb.prompts,
                mb.responses,
                setup.sampling,
                config.precision,
                with_values=value_model is None,
                with_entropy=ppo.entropy_coef != 0,
                with_full_kl=ppo.has_full_kl_loss,
                detach_backbone=not learns_policy,
            )
        new_logprobs = mb.pad(new.logprobs)  # [b, r]
        gaps = (new_logprobs - mb.logprobs).detach().abs() * mb.response_mask
        log_ratios.append(F.pad(gaps.flatten(), (0, 1)).max())  # 0 without a row
        loss, stats = _policy_terms(mb, new, new_logprobs, config, coefs, weighting_of(mb, new_logprobs))
        if not learns_policy:
            loss = torch.zeros_like(loss)
        if new.values is not None:
            value, value_stats = _value_term(mb, new.values, ppo, weighting_of(mb, new_logprobs))
            loss, stats = loss + value, stats | value_stats
        return loss, stats

    def of_value_model(rows: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
        assert value_model is not None
        mb = select(minibatch, rows)
        values = response_values(value_model, mb.prompts, mb.responses, config.precision)
        return _value_term(mb, values, ppo, weighting_of(mb, values))

    steppers = [setup.policy_stepper if learns_policy else None, setup.value_stepper]
    gradients = GradientSum(
        setup.world,
        setup.stage.loss_scale.scaled,
        *[stepper.model for stepper in steppers if stepper is not None],
        beside=setup.models.with_weights,
        # Each pass switches the adapters off and on.
        in_turn=ppo.has_full_kl_loss and setup.models.ref_policy is None,
    )
    losses = (of_policy,) if value_model is None else (of_policy, of_value_model)
    microbatches = cut_responses(setup.budget, setup.models.policy, minibatch.prompts, minibatch.responses)
    stats = gradients.add(microbatches, *losses, last=config.ptx is None)
    for rows in microbatches:
        count_update(setup, minibatch, rows, learns_policy=learns_policy)
    ptx = backward_ptx(setup, step, gradients) if learns_policy else {}
    gradients.receive()
    largest = max([0.0, *torch.stack(log_ratios).tolist()]) if log_ratios else 0.0
    shards = setup.world.gather(totals(stats) | ptx)  # a process without rows of the minibatch has no statistics
    return {key: sum(shard.get(key, 0.0) for shard in shards) for key in max(shards, key=len)}, largest


def _value_term(
    mb: UpdateBatch, new_values: Tensor, ppo: PPO, weighting: Weighting
) -> tuple[Tensor, dict[str, Tensor]]:
    """``vf_coef * value loss``, and statistics."""
    tensors = (mb.pad(new_values), mb.values, mb.returns, mb.response_mask)  # [b, r] each
    value, stats = value_loss(*tensors, value_clip_range=ppo.value_clip_range, **weighting)
    return ppo.vf_coef * value, stats | {"loss/value": value.detach()}


def _policy_terms(
    mb: UpdateBatch, new: TokenScores, new_logprobs: Tensor, config: PPOConfig, coefs: KLCoefs, weighting: Weighting
) -> tuple[Tensor, dict[str, Tensor]]:
    """``objective + kl_coef * kl (if kl_in is loss) - entropy_coef * entropy``, mixed with ptx; and statistics."""
    ppo, mask, high = config.ppo, mb.response_mask, config.ppo.clip_range_high
    tensors = (new_logprobs, mb.logprobs, mb.advantages, mask)  # [b, r] each
    match ppo.objective:
        case "clip":
            clips: Any = {"clip_range": ppo.clip_range, "clip_range_high": high, "dual_clip": ppo.dual_clip}
            policy, stats = policy_loss(*tensors, **clips, **weighting)
        case "penalty":
            policy, stats = penalty_loss(*tensors, policy_kl_coef=coefs.policy_kl_coef, **weighting)
        case _:
            assert_never(ppo.objective)
    stats["loss/policy"] = policy.detach()
    if ppo.kl_in == "loss":
        if ppo.kl_estimator_used == "k2_sequence":
            kl, kl_stats = sequence_k2_loss(new_logprobs, mb.ref_logprobs, mask, **weighting)
        else:
            kl_full = mb.pad(new.kl_full) if new.kl_full is not None else None
            token_kl = _token_kl(new_logprobs, mb.ref_logprobs, kl_full, ppo.kl_estimator_used)
            kl, kl_stats = kl_loss(token_kl, mask, **weighting)
        policy = policy + coefs.kl_coef * kl
        stats |= kl_stats | {"loss/kl": kl.detach()}
    if new.entropy is not None:
        bonus, entropy_stats = entropy_bonus(mb.pad(new.entropy), mask, **weighting)
        policy = policy - ppo.entropy_coef * bonus
        stats |= entropy_stats
    if config.ptx is not None:
        # The mix is linear: `backward_ptx` adds the language-model loss.
        policy = mixed_loss(policy, torch.zeros_like(policy), ptx_coef=config.ptx.coef, ptx_mode=config.ptx.mode)
    return policy, stats


if __name__ == "__main__":
    from rlhf_cli.run import launch

    launch.main("ppo", run)
