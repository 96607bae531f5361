"""The figures of an iteration, its logged samples and its health; and the batch of a failed step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf_cli.algorithms.losses import explained_variance
from rlhf_cli.algorithms.statistics import distinct_n, pearson, word_shares
from rlhf_cli.config.rewards import ModelReward
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.health.running import Health
from rlhf_cli.ppo.setup import Setup
from rlhf_cli.rewards.base import Scores
from rlhf_cli.rollout.rollout import RolloutBatch, sequence_lengths, shared_prompts
from rlhf_cli.rollout.sampling import Response, response_text
from rlhf_cli.run.artifacts import read_manifest_or_none
from rlhf_cli.training.bad_steps import no_gradient

if TYPE_CHECKING:
    from rlhf_cli.ppo.update import UpdateBatch

SHOWN = ("objective/score", "objective/kl", "response/length", "policy/entropy")
"""The figures beside the progress, the most important first."""
SPREADS = ("objective/score", "objective/kl", "response/length", "response/prompt_length")
"""Figures of a response whose standard deviation is written too."""


def iteration_metrics(
    setup: Setup, rollout: RolloutBatch, texts: list[str], scores: Scores, kl: Tensor, rewards: Tensor, returns: Tensor
) -> dict[str, float]:
    """The figures of an iteration over the real tokens of all processes' responses.

    policy/entropy is estimated from the sampled tokens; response/duplicate_fraction is the share of responses whose
    text is also the response to another prompt. policy/sampler_gap is the largest absolute difference between the
    sampler's log-probabilities and training's, policy/sampler_gap_mean the mean; if the sampler's are the old
    log-probabilities both are absent, and policy/first_ratio_error shows the difference.
    """
    world, mask = setup.world, rollout.response_mask
    prompt_lengths = torch.tensor([len(prompt.ids) for prompt in rollout.prompts], device=mask.device)
    columns = {
        "objective/score": scores.total,
        "objective/kl": kl.sum(1),
        "objective/reward": rewards.sum(1),
        "response/length": mask.sum(1),
        "response/prompt_length": prompt_lengths,
        "response/total_length": prompt_lengths + mask.sum(1),
        "response/eos_fraction": torch.tensor([r.ended for r in rollout.responses]),
        "response/empty_fraction": torch.tensor([not text.strip() for text in texts]),
        **{f"reward/{name}": values for name, values in scores.each.items()},
    }  # [own B] each
    tokens = [
        t[mask].double().cpu() for t in (rollout.values, returns, rollout.logprobs, rollout.sampled_logprobs)
    ]  # [own tokens] each
    counts = {f"reward/{name}_cut": number for name, number in scores.cut.items()}
    counts |= {f"reward/{name}_tokens": number for name, number in scores.tokens.items()}
    counts |= {f"reward/{s.name}_errors": scores.errors[s.name] for s in setup.rewards if s.on_error == "zero"}
    own_columns = torch.stack([values.double().cpu() for values in columns.values()], dim=1)
    all_columns = torch.cat(world.gather_tensors(own_columns)).unbind(1)
    merged = {name: column.contiguous() for name, column in zip(columns, all_columns, strict=True)}  # [B] each
    values, all_returns, logprobs, sampled = (torch.cat(world.gather_tensors(column)) for column in tokens)
    all_prompts = world.gather([prompt.text for prompt in rollout.prompts])
    pairs = list(zip(chain(*all_prompts), chain(*world.gather(texts)), strict=True))
    all_counts = world.gather(counts)
    correlation = pearson(merged["objective/score"], merged["response/length"])
    prompts_of: dict[str, set[str]] = {}  # by the text of a response
    for prompt, text in pairs:
        prompts_of.setdefault(text, set()).add(prompt)
    metrics = {
        **{name: column.mean().item() for name, column in merged.items()},
        "objective/return": all_returns.mean().item(),
        "objective/return_variance": all_returns.var(correction=0).item(),
        **{f"{name}_std": merged[name].std(correction=0).item() for name in SPREADS},
        "response/score_length_correlation": correlation if math.isfinite(correlation) else 0.0,
        "response/distinct_2": distinct_n([text.split() for _, text in pairs], 2),
        "response/duplicate_fraction": sum(len(prompts_of[text]) > 1 for _, text in pairs) / len(pairs),
        "policy/entropy": -logprobs.mean().item(),
    }
    if rollout.logprobs is not rollout.sampled_logprobs:
        gap = logprobs - sampled
        metrics |= {"policy/sampler_gap": gap.abs().max().item(), "policy/sampler_gap_mean": gap.abs().mean().item()}
        if setup.sampler_may_differ:
            is_capped = gap > math.log(setup.config.ppo.importance_ratio_cap)
            metrics["policy/importance_capped"] = is_capped.double().mean().item()
    metrics |= {name: float(sum(shard[name] for shard in all_counts)) for name in counts}
    if setup.models.has_values:
        metrics |= {
            "value/explained_variance": explained_variance(values, all_returns).item(),
            "value/mean": values.mean().item(),
            "value/variance": values.var(correction=0).item(),
        }
    return metrics


def count_rollout(setup: Setup, rollout: RolloutBatch) -> None:
    """Record the seconds, tokens and operations of sampling and of the forward passes after it, prompts included."""
    speed, (lengths, sampled, shared) = setup.stage.speed, _sizes(rollout.prompts, rollout.responses)
    forward = setup.policy_work.forward(lengths, sampled, shared)
    speed.count("rollout", seconds=rollout.sample_s, tokens=sum(lengths), flops=forward)
    # ref_policy has the policy's shape. The policy itself runs too if its log-probabilities are recomputed.
    flops = forward if rollout.logprobs is rollout.sampled_logprobs else 2 * forward
    if setup.value_work is not None:
        flops += setup.value_work.forward(lengths, 0, shared)
    speed.count("scoring", seconds=rollout.score_s, tokens=sum(lengths), flops=flops)


def count_update(setup: Setup, batch: UpdateBatch, rows: Sequence[int], *, learns_policy: bool) -> None:
    """Record the tokens and operations of a microbatch. Without `learns_policy` the policy only runs forward."""
    lengths, sampled, shared = _sizes([batch.prompts[i] for i in rows], [batch.responses[i] for i in rows])
    work = setup.policy_work
    flops = (work.training if learns_policy else work.forward)(lengths, sampled, shared)
    if setup.value_work is not None:
        flops += setup.value_work.training(lengths, 0, shared)
    setup.stage.speed.count("update", tokens=sum(lengths), flops=flops)


def _sizes(prompts: Sequence[PromptRow], responses: Sequence[Response]) -> tuple[list[int], int, list[int]]:
    """The tokens of each prompt with its response, of all responses, and of each prompt that an earlier row has too.

    The operations of equal prompts count once, and the head runs on response tokens only.
    """
    return sequence_lengths(prompts, responses), sum(len(r.ids) for r in responses), shared_prompts(prompts)


def log_samples(
    setup: Setup, rollout: RolloutBatch, texts: list[str], scores: Scores, kl: Tensor, iteration: int
) -> None:
    """Write the first responses of an iteration, of all processes, to samples.jsonl; print the first one if due."""
    config, stage = setup.config, setup.stage
    every = config.samples_every
    is_due = every is not None and (iteration + 1) % every == 0
    # The number of each own response in the iteration.
    numbers = setup.world.shard(range(config.ppo.rollout_batch_size), setup.adjacent)
    own = [
        (
            number,
            {
                "step": iteration + 1,
                "prompt": rollout.prompts[i].text,
                "response": texts[i],
                "score": scores.total[i].item(),
                "kl": kl[i].sum().item(),
                **({"criteria": {part: scores.each[part][i].item() for part in scores.parts}} if scores.parts else {}),
            },
        )
        for i, number in enumerate(numbers)
        if number < max(config.num_logged_samples, is_due)
    ]
    rows = [row for _, row in sorted(chain(*setup.world.gather(own)), key=itemgetter(0))]
    for row in rows[: config.num_logged_samples]:
        stage.sample(row)
    if is_due:
        first = rows[0]
        name = f"iteration {iteration + 1} (score {first['score']:+.2f}, KL {first['kl']:.2f})"
        stage.display.exchange(str(first["prompt"]), {name: str(first["response"])})


def failed_batch(setup: Setup, batch: UpdateBatch, step: int) -> list[dict[str, Any]]:
    """The minibatch of a step with a NaN or infinite loss or gradient: one JSON row per response, of all processes."""
    own, names = [], ("logprobs", "ref_logprobs", "values", "advantages", "returns")
    for i, (prompt, response) in enumerate(zip(batch.prompts, batch.responses, strict=True)):
        numbers = {name: getattr(batch, name)[i, : len(response.ids)].tolist() for name in names}
        row = {
            "optimizer_step": step,
            "prompt": prompt.text,
            "prompt_ids": prompt.ids,
            "response": response_text(setup.tokenizer, response, setup.sampling),
            "response_ids": response.ids,
            "ended": response.ended,
        }
        # JSON has no NaN: non-finite numbers are written as text.
        own.append(row | {name: [x if math.isfinite(x) else str(x) for x in numbers[name]] for name in names})
    return [row for shard in setup.world.gather(own) for row in shard]


# ---------------------------------------------------------------- health: before the first iteration and after each one


TINY = 1e-6
"""A difference below this may give a gradient whose squares are 0 in float32."""


def report_start(setup: Setup, health: Health) -> None:
    """Report the seconds of `compile`, and reward models that may be no better than guessing."""
    config, stage = setup.config, setup.stage
    if config.compile:
        stage.log(0, {"time/compile_s": setup.compile_s})
    figures = {}
    for _, name, reward, _ in config.named_rewards:
        if isinstance(reward, ModelReward):
            path = Path(config.stage_model(reward.path, "rm"))  # of a stage, or of its model
            manifest = read_manifest_or_none(path.parent if path.name == "model" else path)
            of_rm = manifest is not None and manifest.stage == "rm"
            figures[name] = manifest.metrics if manifest is not None and of_rm else {}
    if findings := health.check_start(figures):
        stage.report(0, findings, None)


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
    no_norm = [key for key in ("policy/grad_norm", "value/grad_norm") if metrics.get(key) == 0.0]
    if no_norm:
        # Nothing is to be learned if every advantage is 0, as with equal rewards in each group, if every token was the
        # only possible one, or if every value equals its return.
        to_learn = {
            "policy/grad_norm": bool(((newest.advantages.abs() > TINY) & (newest.logprobs.abs() > TINY)).any()),
            "value/grad_norm": bool(((newest.returns - newest.values).abs() > TINY).any()),
        }
        everyone = world.gather(to_learn)
        no_norm = [key for key in no_norm if any(process[key] for process in everyone)]
    stops = no_gradient(dict.fromkeys(no_norm, 0.0), f"iteration {step}")
    words = word_shares([text for shard in world.gather(texts) for text in shard])
    findings = [*stops, *health.check(step, metrics, words)]
    setup.stage.report(step, findings, health.line(findings, metrics))
