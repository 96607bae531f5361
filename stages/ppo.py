"""PPO: make a policy better at what a reward model scores, without letting it leave the SFT model far behind.

    rlhf ppo --config configs/support/ppo.yaml
    torchrun --nproc-per-node 2 -m stages.ppo --config configs/support/ppo.yaml

Reads   prompts, the SFT model (policy and ref_policy), the reward model (and value_model's start)
Writes  <artifacts>/ppo/model, value_model, metrics.jsonl, health.jsonl, samples.jsonl, evaluation.json;
        where asked for ema_model, best_model, evaluations.jsonl

Each iteration:

 1. rollout: sample responses to prompts; ratio, KL and entropy are of the very distribution that was sampled
    from, its temperature and filters included
 2. score: the rewards' weighted sum, normalised, clipped, less the penalties (missing EOS, length)
 3. token rewards: -kl_coef * (logprobs - ref_logprobs), plus the score at the last real token
    (Ziegler et al. 2019, eq. 2)
 4. advantages by GAE (Schulman et al. 2016, eq. 16), returns = advantages + values; advantages are whitened
    over the whole rollout. Without a value model: reward to go, or a comparison of a prompt's responses
 5. update: ppo_epochs x minibatches x microbatches: clipped policy loss (Schulman et al. 2017, eq. 7) and
    clipped value loss, each a sum over response tokens divided by their number in the whole minibatch
 6. health: what went wrong is said by name, with what to try

and at the end SFT against PPO on held-out prompts. docs/ppo.md has each detail's reason and its test.

Left out on purpose: dropout (the ratio would not be 1 before the first step), a KL in the reward and in the
loss at once (it would be counted twice), the value model's Huber loss (not shown to help).
"""

from __future__ import annotations

if __name__ == "__main__":  # Before torch is imported, which reads these settings.
    from rlhf_cli.environment import set_up_process

    set_up_process()

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from rlhf_cli.algorithms.advantages import gae, group_advantages, masked_whiten, reward_to_go, spread, token_rewards
from rlhf_cli.algorithms.aggregation import loss_weights
from rlhf_cli.algorithms.kl import adaptive_kl_coef, adaptive_policy_kl_coef, kl_estimate, kl_loss, sequence_k2_loss
from rlhf_cli.algorithms.language_model import lm_loss
from rlhf_cli.algorithms.policy import entropy_bonus, mixed_loss, penalty_loss, policy_loss, truncated_importance
from rlhf_cli.algorithms.value import value_loss
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.data.batches import chunks, deal, stream
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.errors import RewardError
from rlhf_cli.models.forward import autocast, target_logprobs
from rlhf_cli.models.passes import recomputing
from rlhf_cli.ppo.batch import UpdateBatch, merge
from rlhf_cli.ppo.carried import Carried, Recent, of_all, parts_of
from rlhf_cli.ppo.evaluation import Evaluation
from rlhf_cli.ppo.report import (
    best_of,
    compare,
    count_rollout,
    count_update,
    failed_batch,
    gold_of,
    iteration_metrics,
    judged,
    keep_samples,
    measure_reference,
    measurement,
    save_policy,
    save_value_model,
)
from rlhf_cli.ppo.setup import Learner, load_learner, new_health, plan
from rlhf_cli.rewards.base import Scores
from rlhf_cli.rewards.score import shaped_score
from rlhf_cli.rewards.sources import total_score
from rlhf_cli.rollout.distribution import Response, Sampling
from rlhf_cli.rollout.rollout import RolloutBatch, collect, cut_responses, padded_rows
from rlhf_cli.rollout.sampling import draw_uniforms, response_text
from rlhf_cli.rollout.scoring import response_values, score_tokens
from rlhf_cli.seeding import generator
from rlhf_cli.tensor_ops import pad_rows, totals
from rlhf_cli.training import launch
from rlhf_cli.training.distributed import World, require_rows_for_all
from rlhf_cli.training.stage_run import StageRun


def run(config: PPOConfig, *, quiet: bool = False, restart: bool = False) -> None:
    """Run the stage: everything that the module's docstring lists, in its order."""
    with StageRun("ppo", config, quiet=quiet, restart=restart) as stage:
        world, display, speed, ppo = stage.world, stage.display, stage.speed, config.ppo
        require_rows_for_all(world, ppo.minibatch_size, "ppo.minibatch_size")
        learner = load_learner(config, stage)
        health = new_health(learner)
        display.block("plan", plan(learner))

        # SFT on the held-out prompts: before training, so that a judge that fails does so now.
        measure = measurement(learner)
        with speed.phase("evaluation"):
            before = measure() if learner.test else None
        if before is None:
            display.note("no held-out prompts, so no figures of SFT against PPO")
        else:
            health.check_evaluation(0, before.scores, gold_of(before))
        best = best_of(config.evaluation.best_metric, before)
        if ppo.score_normalization == "reference":
            measure_reference(learner)

        recent: Recent = deque(maxlen=ppo.num_rollouts_per_update)
        carried = Carried(learner, health, best, recent, lambda iteration: _prompts(learner, iteration))
        first = stage.resume(parts_of(learner, carried), ppo.num_iterations)
        if config.compile and first == 0:
            stage.log(first, {"time/compile_s": learner.compile_s})
        display.begin(ppo.num_iterations, "iteration", first)
        every = config.evaluation.every_iterations
        for iteration in range(first, ppo.num_iterations):
            # Held-out figures of what the iterations before left, which is saved by now if it was time to.
            due = before is not None and every is not None and iteration % every == 0
            if due and iteration > carried.evaluated:
                now = _measure(learner, measure, iteration)
                stage.record("evaluations", {"step": iteration, **now.metrics})
                stage.report(iteration, health.check_evaluation(iteration, now.scores, gold_of(now)), None)
                if best.is_better(iteration, now.metrics) and world.is_main:
                    save_policy(learner, "best_model")
                carried.evaluated = iteration

            # 1. Rollout: this process's share of the iteration's prompts and uniforms.
            rollout = _rollout(learner, iteration)

            # 2. Score.
            with speed.phase("reward"):
                texts = [response_text(learner.tokenizer, r, learner.sampling) for r in rollout.responses]
                scores = _judge(learner, rollout, texts, iteration)
                score, dense = _score(learner, scores, rollout.responses)

            # 3. Token rewards.
            kl = kl_estimate(rollout.logprobs, rollout.ref_logprobs, estimator="k1")
            token_reward = _token_rewards(learner, rollout, score, dense)

            # 4. Advantages.
            advantages, returns = _advantages(learner, rollout, token_reward)

            # 5. Update: on this rollout and the ones kept before it.
            experience = UpdateBatch(
                rollout.prompts,
                rollout.responses,
                rollout.response_mask,
                rollout.logprobs,
                rollout.ref_logprobs,
                rollout.values,
                advantages,
                returns,
            )
            with speed.phase("update"):
                recent.append((iteration, experience if ppo.num_rollouts_per_update == 1 else experience.to("cpu")))
                batch = merge([of_all(learner, _refreshed(learner, part, made < iteration)) for made, part in recent])
                update = _update(learner, batch, iteration)

            # 6. Figures and health; then the coefficients that follow the KL.
            metrics = iteration_metrics(learner, rollout, texts, scores, kl, token_reward, returns)
            metrics |= update | {"objective/kl_coef": learner.kl_coef} | speed.row()
            _follow_kl(learner, experience, metrics)
            stage.log(iteration + 1, metrics)
            keep_samples(learner, rollout, texts, scores, kl, iteration)
            findings = health.check(iteration + 1, metrics)
            stage.report(iteration + 1, findings, health.line(findings, metrics))
            stage.finish_step(iteration + 1, ppo.num_iterations)
        display.end()

        # The product is saved before anything else can fail; then what it was before, and what it is now.
        if world.is_main:
            save_policy(learner, "model")
            save_value_model(learner)
            if learner.average is not None:
                with learner.average.applied():
                    save_policy(learner, "ema_model")
        for line in dict.fromkeys(source.report() for source in learner.rewards):
            if line:
                display.note(line)
        final = {}
        if before is not None:
            after = _measure(learner, measure, ppo.num_iterations)
            if every is not None:
                stage.record("evaluations", {"step": ppo.num_iterations, **after.metrics})
            findings = health.check_evaluation(ppo.num_iterations, after.scores, gold_of(after))
            stage.report(ppo.num_iterations, findings, None)
            final = compare(learner, before, after, best)
        stage.publish(final)


# ------------------------------------------------------------------------------------ the iteration


def _rollout(learner: Learner, iteration: int) -> RolloutBatch:
    """This process's share of the iteration's responses."""
    config, world = learner.config, learner.world
    prompts, size = _prompts(learner, iteration), config.ppo.rollout_batch_size
    table = draw_uniforms(config.seed, "ppo rollout", iteration, size, config.rollout.max_new_tokens)
    mine = world.shard(range(size), learner.together)
    rollout = collect(
        [prompts[i] for i in mine],
        table[mine],
        learner.models,
        sampling=learner.sampling,
        tokenizer=learner.tokenizer,
        budget=learner.budget,
        precision=config.precision,
        recompute=learner.recomputes_logprobs,
        max_live_rows=config.rollout.max_live_rows,
        with_full_kl=config.ppo.kl_in == "reward" and config.ppo.kl_estimator_used == "full",
    )
    count_rollout(learner, rollout)
    return rollout


def _prompts(learner: Learner, iteration: int) -> list[PromptRow]:
    """The prompt of each response of an iteration, over all processes; a prompt's responses stand together."""
    config = learner.config
    numbers = stream(len(learner.train), config.num_prompts, iteration, config.seed, "ppo prompts")
    return [prompt for i in numbers for prompt in [learner.train[i]] * config.rollout.samples_per_prompt]


def _measure(learner: Learner, measure: Callable[[], Evaluation], step: int) -> Evaluation:
    """Held-out figures after `step` iterations; where a reward fails, what they left is saved first."""
    try:
        with learner.stage.speed.phase("evaluation"):
            return measure()
    except RewardError:
        learner.stage.save_what_stands(step)
        raise


def _judge(learner: Learner, rollout: RolloutBatch, texts: list[str], iteration: int) -> Scores:
    """What the rewards say. Where one fails, on any process, what the iteration before left is saved first."""
    scores, failure = None, ""
    try:
        scores = total_score(learner.rewards, judged(learner, rollout.prompts, texts, rollout.responses))
    except RewardError as error:
        failure = str(error)
    if told := learner.world.first_failure(failure):
        learner.stage.save_what_stands(iteration)
        raise RewardError(told)
    assert scores is not None
    return scores


def _score(learner: Learner, scores: Scores, responses: Sequence[Response]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The score that stands at the last token, [B], and the rewards of single tokens, [B, R]."""
    lengths = [len(r.ids) for r in responses]
    at_end = scores.total
    dense = None
    if scores.dense is not None:
        at_end = at_end - torch.tensor([sum(row) for row in scores.dense])
        dense = pad_rows(torch.tensor([x for row in scores.dense for x in row]), lengths).to(learner.world.device)
    if learner.scale.kind == "running":
        # One that is no number would make the statistics none for good; the steps that it is in are not taken.
        learner.scale.take(at_end[at_end.isfinite()], learner.world)
    score = shaped_score(
        at_end,
        lengths,
        [r.ended for r in responses],
        learner.scale,
        learner.config.ppo,
        max_new_tokens=learner.config.rollout.max_new_tokens,
    )
    return score.to(learner.world.device), dense


def _token_rewards(
    learner: Learner, rollout: RolloutBatch, score: torch.Tensor, dense: torch.Tensor | None
) -> torch.Tensor:
    """The reward of each token, [B, R]; a KL that is a term of the loss has no part in it."""
    ppo, estimator = learner.config.ppo, learner.config.ppo.kl_estimator_used
    if ppo.kl_in == "loss":
        kl = torch.zeros_like(rollout.logprobs)
    elif estimator == "full":
        assert rollout.kl_full is not None
        kl = rollout.kl_full
    else:
        assert estimator != "k2_sequence", "the config refuses it"
        kl = kl_estimate(rollout.logprobs, rollout.ref_logprobs, estimator=estimator)
    if ppo.advantage_estimator == "reinforce_pp_baseline":
        score = _over_groups(learner, score)
    rewards = token_rewards(score, kl, rollout.response_mask, kl_coef=learner.kl_coef, dense=dense)
    if ppo.whiten_rewards:
        rewards = masked_whiten(rewards, rollout.response_mask, shift_mean=False, reduce=learner.world.sum)
    return rewards


def _advantages(
    learner: Learner, rollout: RolloutBatch, token_reward: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns), [B, R] each; the returns of an estimator without values are read by nobody."""
    ppo, mask = learner.config.ppo, rollout.response_mask
    estimator = ppo.advantage_estimator
    if estimator in ("gae", "monte_carlo"):
        advantages, returns = gae(
            token_reward,
            rollout.values,
            mask,
            gamma=ppo.gamma,
            gae_lambda=ppo.gae_lambda if estimator == "gae" else 1.0,
            value_lambda=ppo.value_lambda,
        )
    else:
        returns = reward_to_go(token_reward, mask, gamma=ppo.gamma)
        advantages = returns
        if estimator in ("rloo", "grpo", "dr_grpo"):
            # The whole response's reward, its KL with it, against those of the same prompt.
            advantages = spread(_over_groups(learner, token_reward.sum(1)), mask)
    if ppo.whitens_advantages:
        advantages = masked_whiten(advantages, mask, reduce=learner.world.sum)
    return advantages, returns


def _over_groups(learner: Learner, totals: torch.Tensor) -> torch.Tensor:
    """Each response's number [B] against those of its prompt's other responses, which other processes may have."""
    world, estimator = learner.world, learner.config.ppo.advantage_estimator
    kind: Literal["rloo", "grpo", "dr_grpo"] = (
        "rloo" if estimator == "rloo" else "grpo" if estimator == "grpo" else "dr_grpo"
    )
    together = learner.together
    everyone = torch.tensor(world.interleave(world.gather(totals.double().tolist()), together), dtype=torch.float64)
    compared = group_advantages(everyone, samples_per_prompt=learner.config.rollout.samples_per_prompt, baseline=kind)
    return compared[world.shard(range(len(compared)), together)].to(totals)


@torch.no_grad()
def _refreshed(learner: Learner, experience: UpdateBatch, is_old: bool) -> UpdateBatch:
    """A rollout as this update sees it, on the compute device.

    One of an older policy gets the log-probabilities and values of the policy as it is now, which the ratio and
    the value clip then start from, and its advantages the weight of its truncated importance.
    """
    experience = experience.to(learner.world.device)
    if not is_old:
        return experience
    prompts, responses = experience.prompts, experience.responses
    cut = cut_responses(learner.budget, learner.models.policy, prompts, responses)
    parts = [
        score_tokens(learner.models, [prompts[i] for i in part], [responses[i] for i in part], *_how(learner))
        for part in cut
    ]
    lengths = [len(r.ids) for r in responses]
    logprobs = padded_rows([part.logprobs for part in parts], cut, lengths)
    values = [part.values for part in parts if part.values is not None]
    importance = truncated_importance(
        logprobs, experience.logprobs, experience.response_mask, cap=learner.config.ppo.importance_ratio_cap
    )
    return replace(
        experience,
        logprobs=logprobs,
        values=padded_rows(values, cut, lengths) if values else experience.values,
        advantages=experience.advantages * importance,
    )


def _update(learner: Learner, batch: UpdateBatch, iteration: int) -> dict[str, float]:
    """`ppo_epochs` passes over the experience, in minibatches drawn anew each time; returns mean statistics.

    A minibatch is one optimizer step of each model; its microbatches' losses are sums over tokens divided by
    the tokens of the whole minibatch over all processes, so their gradients add up to the minibatch's own.
    Whether to step, to skip or to stop is decided by numbers summed over all processes, so by all alike. A step
    that was not taken because they are no numbers has no part in the means.
    """
    config, world, ppo = learner.config, learner.world, learner.config.ppo
    num_rows = min(iteration + 1, ppo.num_rollouts_per_update) * ppo.rollout_batch_size
    learns_policy = iteration >= config.value_model.warmup_iterations
    rates = {"policy/learning_rate": learner.policy_stepper.learning_rate}
    if learner.value_stepper is not None:
        rates["value/learning_rate"] = learner.value_stepper.learning_rate
    step = sum(ppo.updates(i) for i in range(iteration))
    steps: list[dict[str, float]] = []
    first: dict[str, float] = {}
    num_bad, num_skipped, stopped = 0, 0, False
    for epoch in range(ppo.ppo_epochs):
        draw = generator(config.seed, "ppo minibatches", iteration, epoch)
        order = torch.randperm(num_rows, generator=draw).tolist()
        for minibatch in chunks(order, ppo.minibatch_size):
            step += 1
            if stopped:
                _step(learner, learns_policy, move=False)
                continue
            # The minibatch is the same however many processes there are; this one has its own rows of it.
            rows = _own_rows(batch, minibatch, world)
            with recomputing(learner.models.policy, learner.models.value_model):
                sums, error = _backward(learner, batch, rows, step, learns_policy)
            if not first:
                # Before the first step policy and sampler are the same model: anything but 1 is a bug.
                first_error = max(world.gather(error))
                first = {"policy/first_ratio": sums["policy/ratio"], "policy/first_ratio_error": first_error}
            numbers = sums | _norms(learner, learns_policy)
            if not learner.stage.may_step(
                iteration + 1,
                f"ppo iteration {iteration + 1}, step {step}",
                numbers,
                partial(failed_batch, learner, batch, rows, step),
            ):
                num_bad += 1
                _step(learner, learns_policy, move=False)
                continue
            steps.append(numbers)
            skipped = ppo.max_ratio is not None and sums["policy/ratio"] > ppo.max_ratio
            stopped = ppo.max_approx_kl is not None and sums["policy/approx_kl"] > ppo.max_approx_kl
            num_skipped += skipped
            _step(learner, learns_policy, move=not (skipped or stopped))
    means = {key: sum(s[key] for s in steps) / len(steps) for key in (steps[0] if steps else ())}
    return (
        means
        | rates
        | {key: value for key, value in first.items() if math.isfinite(value)}
        | {
            "policy/bad_steps": float(num_bad),
            "policy/skipped_steps": float(num_skipped),
            "policy/stopped_early": float(stopped),
        }
    )


def _backward(
    learner: Learner, batch: UpdateBatch, rows: list[int], step: int, learns_policy: bool
) -> tuple[dict[str, float], float]:
    """The gradients of one minibatch; returns its statistics over all processes, and this one's largest
    |log ratio|."""
    config, world, ppo = learner.config, learner.world, learner.config.ppo
    estimator, value_model = ppo.kl_estimator_used, learner.models.value_model
    num_tokens = world.sum(batch.response_mask[rows].sum()).item()
    parts: list[dict[str, torch.Tensor]] = []
    gaps: list[torch.Tensor] = []
    own_prompts, own_responses = [batch.prompts[i] for i in rows], [batch.responses[i] for i in rows]
    cut = cut_responses(learner.budget, learner.models.policy, own_prompts, own_responses)
    for part in ([rows[i] for i in places] for places in cut):
        prompts, responses = [batch.prompts[i] for i in part], [batch.responses[i] for i in part]
        lengths = [len(r.ids) for r in responses]
        mask = batch.response_mask[part, : max(lengths)]
        logprobs, ref_logprobs, values, advantages, returns = (
            tensor[part, : max(lengths)]
            for tensor in (batch.logprobs, batch.ref_logprobs, batch.values, batch.advantages, batch.returns)
        )
        with torch.set_grad_enabled(learns_policy or value_model is None):
            now = score_tokens(
                learner.models,
                prompts,
                responses,
                *_how(learner),
                with_values=value_model is None,
                with_entropy=ppo.entropy_coef != 0,
                with_full_kl=ppo.kl_in == "loss" and estimator == "full",
                detach_backbone=not learns_policy,
            )
        new_logprobs = pad_rows(now.logprobs, lengths)
        gaps.append(((new_logprobs - logprobs).detach().abs() * mask).max())
        weights = loss_weights(
            mask,
            aggregation=ppo.loss_aggregation,
            num_tokens=num_tokens,
            num_sequences=ppo.minibatch_size,
            max_new_tokens=config.rollout.max_new_tokens,
            dtype=new_logprobs.dtype,
        )

        # The policy's loss, and what is added to it.
        if ppo.objective == "clip":
            policy, stats = policy_loss(
                new_logprobs,
                logprobs,
                advantages,
                mask,
                clip_range=ppo.clip_range,
                clip_range_high=ppo.clip_range_high,
                dual_clip=ppo.dual_clip,
                weights=weights,
                num_tokens=num_tokens,
            )
        else:
            policy, stats = penalty_loss(
                new_logprobs,
                logprobs,
                advantages,
                mask,
                policy_kl_coef=learner.policy_kl_coef,
                weights=weights,
                num_tokens=num_tokens,
            )
        stats["loss/policy"] = policy.detach()
        if ppo.kl_in == "loss":
            if estimator == "k2_sequence":
                kl, kl_stats = sequence_k2_loss(
                    new_logprobs, ref_logprobs, mask, weights=weights, num_tokens=num_tokens
                )
            else:
                if estimator == "full":
                    assert now.kl_full is not None
                    each = pad_rows(now.kl_full, lengths)
                else:
                    each = kl_estimate(new_logprobs, ref_logprobs, estimator=estimator)
                kl, kl_stats = kl_loss(each, mask, weights=weights, num_tokens=num_tokens)
            policy = policy + learner.kl_coef * kl
            stats |= kl_stats | {"loss/kl": kl.detach()}
        if now.entropy is not None:
            bonus, entropy_stats = entropy_bonus(
                pad_rows(now.entropy, lengths), mask, weights=weights, num_tokens=num_tokens
            )
            policy = policy - ppo.entropy_coef * bonus
            stats |= entropy_stats
        if config.ptx is not None:
            # The rows' own loss follows below; both are linear in the mix.
            policy = mixed_loss(policy, torch.zeros_like(policy), ptx_coef=config.ptx.coef, ptx_mode=config.ptx.mode)
        total = policy if learns_policy else torch.zeros_like(policy)

        # The value model's loss. A model of its own has a graph of its own, and neither reaches the other's weights:
        # the policy's is used up before the other is made, so that there is only one at a time.
        new_values = now.values
        if value_model is not None:
            if total.requires_grad:
                total.backward()
            total = torch.zeros_like(policy)
            new_values = response_values(value_model, prompts, responses, config.precision)
        if new_values is not None:
            error, value_stats = value_loss(
                pad_rows(new_values, lengths),
                values,
                returns,
                mask,
                value_clip_range=ppo.value_clip_range,
                weights=weights,
                num_tokens=num_tokens,
            )
            total = total + ppo.vf_coef * error
            stats |= value_stats | {"loss/value": error.detach()}
        if total.requires_grad:
            total.backward()
        parts.append(stats)
        count_update(learner, prompts, responses, learns_policy)
    ptx = {"loss/ptx": _ptx_backward(learner, step)} if config.ptx is not None and learns_policy else {}
    largest = max([0.0, *torch.stack(gaps).tolist()]) if gaps else 0.0
    return _summed(totals(parts) | ptx, world), largest


def _ptx_backward(learner: Learner, step: int) -> float:
    """The gradients of the language-model loss on this step's own rows; returns this process's part of it."""
    config, ptx = learner.config, learner.config.ptx
    assert ptx is not None
    size = ptx.minibatch_size or config.ppo.minibatch_size
    rows = [learner.ptx[i] for i in stream(len(learner.ptx), size, step - 1, config.seed, "ppo ptx")]
    num_tokens = sum(sum(row.loss_mask) for row in rows)
    mine = [rows[i] for i in deal([len(row.ids) for row in rows], learner.world.size)[learner.world.rank]]
    losses = []
    for part in learner.budget.cut([len(row.ids) for row in mine]):
        with autocast(learner.world.device, config.precision):
            logprobs = target_logprobs(
                learner.models.policy, [mine[i].ids for i in part], [mine[i].loss_mask for i in part]
            )
        loss, _ = lm_loss(logprobs, num_tokens=num_tokens)
        mixed_loss(torch.zeros_like(loss), loss, ptx_coef=ptx.coef, ptx_mode=ptx.mode).backward()
        losses.append({"loss": loss})
    lengths = [len(row.ids) for row in mine]
    flops = learner.policy_work.training(lengths, sum(sum(row.loss_mask) for row in mine))
    learner.stage.speed.count("update", tokens=sum(lengths), flops=flops)
    return totals(losses).get("loss", 0.0)


def _summed(sums: dict[str, float], world: World) -> dict[str, float]:
    """Each statistic over all processes; one without rows of the minibatch has none to give."""
    everyone = world.gather(sums)
    return {key: sum(own.get(key, 0.0) for own in everyone) for key in max(everyone, key=len)}


def _norms(learner: Learner, learns_policy: bool) -> dict[str, float]:
    """Sum the gradients over the processes and clip them; their norms before that."""
    norms = {}
    if learns_policy:
        norms["policy/grad_norm"] = learner.policy_stepper.clip(learner.world)
    if learner.value_stepper is not None:
        norms["value/grad_norm"] = learner.value_stepper.clip(learner.world)
    return norms


def _step(learner: Learner, learns_policy: bool, *, move: bool) -> None:
    """One optimizer step of each model that learns, or, without `move`, one step of the schedules only."""
    if learns_policy:
        learner.policy_stepper.advance(move=move)
        if learner.average is not None and move:
            learner.average.update()
    if learner.value_stepper is not None:
        learner.value_stepper.advance(move=move)


def _own_rows(batch: UpdateBatch, minibatch: Sequence[int], world: World) -> list[int]:
    """This process's rows of a minibatch, with about as many tokens to compute as each other's.

    The responses to a prompt stay together, for it is encoded once then, where that costs the slowest process less.
    """
    if world.size == 1:
        return sorted(minibatch)
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for row in minibatch:
        by_prompt.setdefault(tuple(batch.prompts[row].ids), []).append(row)

    def tokens(rows: Sequence[int]) -> int:
        prompts = {tuple(batch.prompts[row].ids) for row in rows}
        return sum(map(len, prompts)) + sum(len(batch.responses[row].ids) for row in rows)

    ways = [
        [[row for piece in hand for row in pieces[piece]] for hand in deal([tokens(p) for p in pieces], world.size)]
        for pieces in ([[row] for row in minibatch], list(by_prompt.values()))
    ]
    return sorted(min(ways, key=lambda hands: max(map(tokens, hands)))[world.rank])


def _how(learner: Learner) -> tuple[Sampling, str]:
    return learner.sampling, learner.config.precision


def _follow_kl(learner: Learner, experience: UpdateBatch, metrics: dict[str, float]) -> None:
    """Move the adaptive coefficients by the iteration's KL, and write what they were moved by."""
    ppo, world = learner.config.ppo, learner.world
    if ppo.kl_controller == "adaptive":
        assert ppo.kl_target is not None
        learner.kl_coef = adaptive_kl_coef(
            learner.kl_coef,
            metrics["objective/kl"],
            target=ppo.kl_target,
            horizon=ppo.kl_horizon,
            num_episodes=ppo.rollout_batch_size,
        )
    if ppo.objective == "penalty":
        metrics["policy/policy_kl_coef"] = learner.policy_kl_coef
    if ppo.policy_kl_target is not None:
        # KL(old, new) after the update, by k3 on the newest rollout's tokens.
        with torch.no_grad():
            now = _refreshed(learner, experience, True)
        mask = experience.response_mask
        kl = kl_estimate(experience.logprobs, now.logprobs.to(experience.logprobs), estimator="k3")
        sums = world.sum_floats({"kl": (kl * mask).sum().item(), "tokens": float(mask.sum().item())})
        metrics["policy/kl_after_update"] = sums["kl"] / sums["tokens"]
        learner.policy_kl_coef = adaptive_policy_kl_coef(
            learner.policy_kl_coef, metrics["policy/kl_after_update"], target=ppo.policy_kl_target
        )


if __name__ == "__main__":
    launch.main("ppo", run)
