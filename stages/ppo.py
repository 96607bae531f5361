"""PPO: make a policy better at what a reward model scores, without letting it leave the SFT model far behind.

    rlhf ppo --config configs/support/ppo.yaml
    torchrun --nproc-per-node 2 -m stages.ppo --config configs/support/ppo.yaml

Reads   prompts, the SFT model (policy and ref_policy), the reward model (and value_model's start)
Writes  <artifacts>/ppo/model, value_model, metrics.jsonl, samples.jsonl, evaluation.json

Each iteration:

 1. rollout: sample a response to each prompt at the temperature that every log-probability is taken at
 2. score: the rewards' weighted sum, read at the last real token; a missing EOS costs a penalty
 3. token rewards: -kl_coef * (logprobs - ref_logprobs), plus the score at the last token
    (Ziegler et al. 2019, eq. 2)
 4. advantages by GAE (Schulman et al. 2016, eq. 16), returns = advantages + values; advantages are whitened
    over the whole rollout
 5. ppo_epochs x minibatches x microbatches: clipped policy loss (Schulman et al. 2017, eq. 7) and clipped
    value loss, each a sum over response tokens divided by their number in the whole minibatch

and at the end SFT against PPO on held-out prompts.

Left out on purpose: sampling filters (they would sample from another distribution than the one that is
scored), dropout (the ratio would not be 1 before the first step), a KL term in the loss beside the one in the
reward (it would be counted twice).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.algorithms.advantages import gae, token_rewards
from rlhf_cli.algorithms.kl import kl_estimate
from rlhf_cli.algorithms.policy import policy_loss
from rlhf_cli.algorithms.value import explained_variance, value_loss
from rlhf_cli.artifacts import model_directory
from rlhf_cli.config.schemas import ModelReward, PPOConfig
from rlhf_cli.data.batches import chunks, stream
from rlhf_cli.data.encode import drop_too_long, encode_rows, prompt_text, require_eos
from rlhf_cli.data.formats import prompts as read_prompts
from rlhf_cli.data.split import read_split
from rlhf_cli.errors import ConfigError, RunError
from rlhf_cli.models.limits import check_positions
from rlhf_cli.models.load import (
    check_vocabulary,
    load_policy,
    load_tokenizer,
    new_value_model,
    prepare,
    save,
)
from rlhf_cli.rewards.sources import (
    Judged,
    RewardModel,
    RewardSource,
    call,
    load_function,
    load_rewards,
    named_numbers,
    total_score,
)
from rlhf_cli.rollout.evaluation import Evaluation, evaluate
from rlhf_cli.rollout.experience import (
    PromptRow,
    Rollout,
    collect,
    decode_responses,
    response_logprobs,
    response_values,
)
from rlhf_cli.rollout.sampling import Response, stop_ids, uniforms
from rlhf_cli.seeding import generator
from rlhf_cli.tensor_ops import masked_whiten, pad_rows
from rlhf_cli.training import launch
from rlhf_cli.training.distributed import World, require_rows_for_all
from rlhf_cli.training.optimizer import Stepper, build_stepper, warmup_warning
from rlhf_cli.training.stage_run import StageRun

STATISTICS = (
    "loss/policy",
    "loss/value",
    "policy/approx_kl",
    "policy/clip_fraction",
    "policy/ratio",
    "value/clip_fraction",
    "value/error",
)
"""What a minibatch reports; each adds up over its microbatches and processes."""
SHOWN = ("objective/score", "objective/kl", "response/length", "value/explained_variance")


def run(config: PPOConfig, *, quiet: bool = False) -> None:
    """Run the stage: everything that the module's docstring lists, in its order."""
    with StageRun("ppo", config, quiet=quiet) as stage:
        world, display, ppo = stage.world, stage.display, config.ppo
        require_rows_for_all(world, ppo.minibatch_size, "ppo.minibatch_size")

        # The four models and the prompts.
        path = model_directory(config.stage_model(config.policy.path, "sft"))
        tokenizer = load_tokenizer(path, config.policy.revision)
        policy, ref_policy = (
            load_policy(path, config.policy.revision),
            load_policy(path, config.policy.revision),
        )
        check_vocabulary(policy, tokenizer, path)
        require_eos(tokenizer, path)
        rewards, notes = load_rewards(config.rewards, config.artifacts, tokenizer, world.device, config.precision)
        value_model, note = _value_model(config, path, rewards)
        models = (policy, ref_policy, value_model)
        lines = [*notes, note, *(prepare(model, world.device) for model in models)]
        ref_policy.requires_grad_(False)
        for line in dict.fromkeys(lines):
            if line:
                display.note(line)
        train, test = _prompts(config, tokenizer, stage)
        longest = max(len(p.ids) for p in train + test) + config.rollout.max_new_tokens
        readers = [source.model for source in rewards if isinstance(source, RewardModel) and source.reads_policy_tokens]
        for model in (policy, value_model, *readers):
            check_positions(model, longest, "rollout.max_new_tokens")
        stop = stop_ids(policy, tokenizer)

        steps = ppo.num_iterations * ppo.steps_per_iteration
        policy_stepper = build_stepper(policy, config.optimizer, steps)
        value_stepper = build_stepper(
            value_model, config.optimizer, steps, learning_rate=config.value_model.learning_rate
        )
        display.note(
            f"{len(train)} prompts; {ppo.num_iterations} iterations of {ppo.rollout_batch_size} responses "
            f"({ppo.num_iterations * ppo.rollout_batch_size / len(train):.2f} epochs); "
            f"{ppo.steps_per_iteration} optimizer steps each = {ppo.ppo_epochs} ppo_epochs x "
            f"{ppo.rollout_batch_size // ppo.minibatch_size} minibatches of {ppo.minibatch_size}"
        )

        if config.optimizer.warmup_steps >= steps:
            display.warn(warmup_warning(config.optimizer.warmup_steps, steps))

        # SFT on the held-out prompts: before training, so that a judge that fails does so now.
        measure = _measurement(ref_policy, tokenizer, test, rewards, config, stage, stop)
        before = measure(ref_policy) if test else None
        if before is None:
            display.note("no held-out prompts, so no figures of SFT against PPO")

        display.begin(ppo.num_iterations, "iteration")
        for iteration in range(ppo.num_iterations):
            # 1. Rollout: this process's share of the iteration's prompts and uniforms.
            numbers = stream(len(train), ppo.rollout_batch_size, iteration, config.seed, "ppo prompts")
            table = uniforms(
                config.seed, "ppo rollout", iteration, ppo.rollout_batch_size, config.rollout.max_new_tokens
            )
            mine = world.shard(list(range(ppo.rollout_batch_size)))
            rollout = collect(
                [train[numbers[i]] for i in mine],
                table[mine],
                policy,
                ref_policy,
                value_model,
                temperature=config.rollout.temperature,
                stop=stop,
                microbatch_size=ppo.microbatch_size or ppo.minibatch_size,
                precision=config.precision,
            )

            # 2. Score.
            started = time.monotonic()
            texts = decode_responses(tokenizer, rollout.responses)
            score, raw_score, score_metrics = _score(rewards, rollout.prompts, texts, rollout.responses, config)
            score = score.to(world.device)
            reward_s = time.monotonic() - started

            # 3. Token rewards.
            kl = kl_estimate(rollout.logprobs, rollout.ref_logprobs, estimator="k1")
            token_reward = token_rewards(score, kl, rollout.response_mask, kl_coef=ppo.kl_coef)

            # 4. Advantages.
            advantages, returns = gae(
                token_reward,
                rollout.values,
                rollout.response_mask,
                gamma=ppo.gamma,
                gae_lambda=ppo.gae_lambda,
            )
            if ppo.whiten_advantages:
                advantages = masked_whiten(advantages, rollout.response_mask, reduce=world.sum)

            # 5. Update.
            started = time.monotonic()
            rates = {
                "policy/learning_rate": policy_stepper.learning_rate,
                "value/learning_rate": value_stepper.learning_rate,
            }
            update = _update(
                policy,
                value_model,
                policy_stepper,
                value_stepper,
                rollout,
                advantages,
                returns,
                config,
                world,
                iteration,
            )
            update_s = time.monotonic() - started

            metrics = _metrics(rollout, raw_score, score_metrics, kl, token_reward, returns, world)
            metrics |= (
                update
                | rates
                | {
                    "time/sample_s": rollout.sample_s,
                    "time/score_s": rollout.score_s + reward_s,
                    "time/update_s": update_s,
                }
            )
            stage.log(iteration + 1, metrics, SHOWN)
            stage.sample(
                {
                    "step": iteration + 1,
                    "prompt": rollout.prompts[0].text,
                    "response": texts[0],
                    "score": raw_score[0].item(),
                    "kl": kl[0].sum().item(),
                }
            )
        display.end()

        # The product is saved before anything else can fail; then what it was before, and what it is now.
        policy.generation_config.update(
            do_sample=True, temperature=config.rollout.temperature, top_k=0, top_p=1.0, eos_token_id=sorted(stop)
        )
        if world.is_main:
            save(policy, tokenizer, stage.directory / "model")
            save(value_model, tokenizer, stage.directory / "value_model")
        for line in dict.fromkeys(source.report() for source in rewards):
            if line:
                display.note(line)
        final = _compare(before, measure(policy), test, config, stage) if before is not None else {}
        stage.publish(final)


def _update(
    policy: PreTrainedModel,
    value_model: PreTrainedModel,
    policy_stepper: Stepper,
    value_stepper: Stepper,
    rollout: Rollout,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    config: PPOConfig,
    world: World,
    iteration: int,
) -> dict[str, float]:
    """`ppo_epochs` passes over the rollout, in minibatches drawn anew each time; returns mean statistics.

    A minibatch is one optimizer step of each model; its microbatches' losses are sums over tokens divided by
    the tokens of the whole minibatch over all processes, so their gradients add up to the minibatch's own.
    """
    ppo = config.ppo
    steps: list[dict[str, float]] = []
    for epoch in range(ppo.ppo_epochs):
        draw = generator(config.seed, "ppo minibatches", iteration, epoch)
        order = torch.randperm(ppo.rollout_batch_size, generator=draw).tolist()
        for minibatch in chunks(order, ppo.minibatch_size):
            # The minibatch is the same however many processes there are; this one has its own rows of it.
            rows = sorted(i // world.size for i in minibatch if i % world.size == world.rank)
            num_tokens = world.sum(rollout.response_mask[rows].sum()).item()
            sums = dict.fromkeys(STATISTICS, 0.0)
            for part in chunks(rows, ppo.microbatch_size):
                prompts, responses = [rollout.prompts[i] for i in part], [rollout.responses[i] for i in part]
                mask, lengths = rollout.response_mask[part], [len(r.ids) for r in responses]
                new_logprobs = pad_rows(
                    response_logprobs(policy, prompts, responses, config.rollout.temperature, config.precision),
                    lengths,
                )
                new_values = pad_rows(response_values(value_model, prompts, responses, config.precision), lengths)
                width = new_logprobs.shape[1]
                mask = mask[:, :width]
                loss, policy_stats = policy_loss(
                    new_logprobs,
                    rollout.logprobs[part, :width],
                    advantages[part, :width],
                    mask,
                    clip_range=ppo.clip_range,
                    num_tokens=num_tokens,
                )
                error, value_stats = value_loss(
                    new_values,
                    rollout.values[part, :width],
                    returns[part, :width],
                    mask,
                    value_clip_range=ppo.value_clip_range,
                    num_tokens=num_tokens,
                )
                # Two models, two graphs: neither loss reaches the other model's weights.
                loss.backward()
                (ppo.vf_coef * error).backward()
                stats = {"loss/policy": loss, "loss/value": error, **policy_stats, **value_stats}
                for key, value in stats.items():
                    sums[key] += value.item()
            sums = world.sum_floats(sums)
            if not (math.isfinite(sums["loss/policy"]) and math.isfinite(sums["loss/value"])):
                raise RunError(
                    f"ppo iteration {iteration + 1}: the policy loss is {sums['loss/policy']}, the value loss "
                    f"{sums['loss/value']}, nothing was stepped. Lower optimizer.learning_rate"
                )
            sums["policy/grad_norm"] = policy_stepper.step(world, f"ppo iteration {iteration + 1}, policy")
            sums["value/grad_norm"] = value_stepper.step(world, f"ppo iteration {iteration + 1}, value model")
            steps.append(sums)
    means = {key: sum(step[key] for step in steps) / len(steps) for key in steps[0]}
    # Before the first step policy and sampler are the same model: anything but 1 is a bug.
    return means | {"policy/first_ratio": steps[0]["policy/ratio"]}


def _score(
    rewards: Sequence[RewardSource],
    prompts: Sequence[PromptRow],
    texts: list[str],
    responses: Sequence[Response],
    config: PPOConfig,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The score that is optimised, [B], the rewards' own sum before clip and penalty, [B], and each reward."""
    ended = [response.ended for response in responses]
    raw, each = total_score(rewards, _judged(prompts, texts, [r.ids for r in responses], ended))
    score = raw if config.ppo.score_clip is None else raw.clamp(-config.ppo.score_clip, config.ppo.score_clip)
    score = score - config.ppo.missing_eos_penalty * (~torch.tensor(ended)).float()
    return score, raw, each


def _judged(prompts: Sequence[PromptRow], texts: list[str], response_ids: list[list[int]], ended: list[bool]) -> Judged:
    return Judged(
        [p.text for p in prompts],
        texts,
        [p.ids for p in prompts],
        response_ids,
        ended,
        [p.row.columns for p in prompts],
    )


def _metrics(
    rollout: Rollout,
    score: torch.Tensor,
    each: dict[str, torch.Tensor],
    kl: torch.Tensor,
    token_reward: torch.Tensor,
    returns: torch.Tensor,
    world: World,
) -> dict[str, float]:
    """The iteration's figures over all processes' responses, from real tokens only.

    policy/entropy is the estimate from the sampled tokens; policy/sampler_gap is the largest difference
    between a log-probability as the sampler saw it and as training computes it.
    """
    mask = rollout.response_mask
    rows = {
        "objective/score": score,
        "objective/kl": kl.sum(1),
        "objective/reward": token_reward.sum(1),
        "response/length": mask.sum(1),
        "response/eos_fraction": torch.tensor([r.ended for r in rollout.responses]),
        **{f"reward/{name}": values for name, values in each.items()},
    }
    sums = world.sum_floats({"rows": float(len(score)), **{k: v.cpu().double().sum().item() for k, v in rows.items()}})
    metrics = {key: sums[key] / sums["rows"] for key in rows}
    gap = ((rollout.sampled_logprobs - rollout.logprobs).abs() * mask).max().item()
    everyone = world.gather([t[mask].cpu() for t in (rollout.values, returns, rollout.logprobs)])
    values, all_returns, logprobs = (torch.cat([own[i] for own in everyone]) for i in range(3))
    return metrics | {
        "value/explained_variance": explained_variance(values, all_returns, torch.ones_like(values).bool()).item(),
        "value/mean": values.mean().item(),
        "policy/entropy": -logprobs.mean().item(),
        "policy/sampler_gap": max(world.gather(gap)),
    }


def _measurement(
    ref_policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    test: list[PromptRow],
    rewards: Sequence[RewardSource],
    config: PPOConfig,
    stage: StageRun,
    stop: set[int],
) -> Callable[[PreTrainedModel], Evaluation]:
    """How a policy is measured on the held-out prompts: the same prompts and uniforms whenever it is called."""
    gold_name = config.evaluation.gold
    gold = load_function(gold_name) if gold_name is not None else None

    def score(prompts: Sequence[PromptRow], texts: list[str], ids: list[list[int]], ended: list[bool]) -> list[float]:
        values: list[float] = total_score(rewards, _judged(prompts, texts, ids, ended))[0].tolist()
        return values

    def judge(prompts: Sequence[PromptRow], texts: list[str], ended: list[bool]) -> list[dict[str, float]]:
        assert gold is not None
        return call(str(gold_name), gold, _judged(prompts, texts, [[]] * len(texts), ended), named_numbers)

    def measure(policy: PreTrainedModel) -> Evaluation:
        return evaluate(
            policy,
            ref_policy,
            tokenizer,
            test,
            uniforms(config.seed, "ppo evaluation", 0, len(test), config.rollout.max_new_tokens),
            stage.world,
            score=score,
            judge=judge if gold is not None else None,
            temperature=config.rollout.temperature,
            stop=stop,
            batch_size=config.ppo.rollout_batch_size,
            precision=config.precision,
        )

    return measure


def _compare(
    before: Evaluation, after: Evaluation, test: list[PromptRow], config: PPOConfig, stage: StageRun
) -> dict[str, float]:
    """The table of the end, SFT against PPO, for the eye and as evaluation.json."""
    sides = {"sft": before, "ppo": after}
    examples = [
        {"prompt": test[i].text, **{name: side.example(i) for name, side in sides.items()}}
        for i in range(min(config.evaluation.num_examples, len(test)))
    ]
    whole = {"num_prompts": len(test), "sft": before.metrics, "ppo": after.metrics, "examples": examples}
    stage.display.before_and_after(whole)
    if stage.world.is_main:
        text = json.dumps(whole, indent=2, ensure_ascii=False) + "\n"
        (stage.directory / "evaluation.json").write_text(text, encoding="utf-8")
    return {f"{name}/{key}": v for name, e in sides.items() for key, v in e.metrics.items()}


def _value_model(
    config: PPOConfig, policy_path: str, rewards: Sequence[RewardSource]
) -> tuple[PreTrainedModel, str | None]:
    """The value model and a line about where it comes from, if the user should know."""
    own = [
        (model_directory(config.stage_model(reward.path, "rm")), reward.revision)
        for reward, source in zip(config.rewards, rewards, strict=True)
        if isinstance(reward, ModelReward) and isinstance(source, RewardModel) and source.reads_policy_tokens
    ]
    init = config.value_model.init
    if init == "reward_model" and not own:
        raise ConfigError(
            "value_model.init: reward_model, but no reward is a model that reads the policy's tokens. Set it to policy"
        )
    if own and init != "policy":
        return new_value_model(*own[0]), None
    note = "no reward model reads the policy's tokens: the value model starts from the policy"
    return new_value_model(policy_path, config.policy.revision), note if init == "auto" else None


def _prompts(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, stage: StageRun
) -> tuple[list[PromptRow], list[PromptRow]]:
    """The training prompts and the held-out ones."""
    data = config.data
    sides: list[list[PromptRow]] = []
    for what, rows in zip(("train", "test"), read_split(data), strict=True):
        if not rows:
            sides.append([])
            continue
        prompts, kind = read_prompts(rows, prompt_words=data.prompt_words)
        if what == "train":
            stage.display.note(f"{data.train.path}: rows of {kind}")
        ids = encode_rows(tokenizer, prompts, data.prompt_template)
        texts = [prompt_text(p.prompt, data.prompt_template, tokenizer, p.messages) for p in prompts]
        items = [PromptRow(text, i, p) for text, i, p in zip(texts, ids, prompts, strict=True)]
        kept, dropped = drop_too_long(items, lambda p: len(p.ids), data.max_prompt_length, f"data.{what}")
        if dropped:
            stage.display.note(
                f"data.{what}: {dropped} of {len(items)} prompts longer than {data.max_prompt_length} dropped"
            )
        sides.append(kept)
    return sides[0], sides[1][: config.evaluation.num_prompts]


if __name__ == "__main__":
    launch.main("ppo", run)
