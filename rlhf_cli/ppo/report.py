"""What PPO says of itself: figures of an iteration, held-out evaluations, samples; and what it saves."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from rlhf_cli.algorithms.statistics import distinct_n, pearson
from rlhf_cli.algorithms.value import explained_variance
from rlhf_cli.data.batches import chunks, stream
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.errors import ConfigError
from rlhf_cli.models.adapters import merged
from rlhf_cli.models.load import (
    save,
    shared_value_model,
)
from rlhf_cli.ppo.batch import UpdateBatch
from rlhf_cli.ppo.evaluation import Evaluation, evaluate
from rlhf_cli.ppo.setup import Learner
from rlhf_cli.rewards.base import Samples, Scores
from rlhf_cli.rewards.functions import PythonFunction, call, load_function, named_numbers
from rlhf_cli.rewards.sources import total_score
from rlhf_cli.rollout.distribution import Response
from rlhf_cli.rollout.rollout import RolloutBatch, collect, sequence_lengths, shared_prompts
from rlhf_cli.rollout.sampling import draw_uniforms, response_text
from rlhf_cli.training.best import Best


def judged(learner: Learner, prompts: Sequence[PromptRow], texts: list[str], responses: Sequence[Response]) -> Samples:
    dense = any(isinstance(source, PythonFunction) and source.per_token for source in learner.rewards)
    return Samples(
        [p.text for p in prompts],
        texts,
        [p.ids for p in prompts],
        [r.ids for r in responses],
        [r.ended for r in responses],
        [p.row.columns for p in prompts],
        [[str(learner.tokenizer.decode([i])) for i in r.ids] for r in responses] if dense else None,
        [p.row.where for p in prompts],
        [p.row.prompt for p in prompts],
        [p.row.messages for p in prompts],
    )


def iteration_metrics(
    learner: Learner,
    rollout: RolloutBatch,
    texts: list[str],
    scores: Scores,
    kl: torch.Tensor,
    token_reward: torch.Tensor,
    returns: torch.Tensor,
) -> dict[str, float]:
    """The iteration's figures over all processes' responses, from real tokens only.

    policy/entropy is the estimate from the sampled tokens; policy/sampler_gap is the largest difference
    between a log-probability as the sampler saw it and as training computes it. Where the sampler's are the old
    ones there is none: policy/first_ratio_error is that difference then.
    """
    world, mask = learner.world, rollout.response_mask
    columns = {
        "objective/score": scores.total,
        "objective/kl": kl.sum(1),
        "objective/reward": token_reward.sum(1),
        "response/length": mask.sum(1),
        "response/eos_fraction": torch.tensor([r.ended for r in rollout.responses]),
        "response/empty_fraction": torch.tensor([not text.strip() for text in texts]),
        **{f"reward/{name}": values for name, values in scores.each.items()},
    }
    tokens = [t[mask].double().cpu() for t in (rollout.values, returns, rollout.logprobs)]
    recomputed = rollout.logprobs is not rollout.sampled_logprobs
    gap = ((rollout.sampled_logprobs - rollout.logprobs).abs() * mask).max().item() if recomputed else 0.0
    counts = {f"reward/{name}_cut": number for name, number in scores.cut.items()}
    counts |= {f"reward/{s.name}_errors": scores.errors[s.name] for s in learner.rewards if s.on_error == "zero"}
    mine = (
        {name: values.double().cpu() for name, values in columns.items()},
        tokens,
        [(prompt.text, text) for prompt, text in zip(rollout.prompts, texts, strict=True)],
        gap,
        counts,
    )
    everyone = world.gather(mine)
    whole = {name: torch.cat([own[0][name] for own in everyone]) for name in columns}
    values, all_returns, logprobs = (torch.cat([own[1][i] for own in everyone]) for i in range(3))
    pairs = [pair for own in everyone for pair in own[2]]
    metrics = {
        **{name: column.mean().item() for name, column in whole.items()},
        "objective/score_std": whole["objective/score"].std(correction=0).item(),
        "response/score_length_correlation": _or_zero(pearson(whole["objective/score"], whole["response/length"])),
        "response/distinct_2": distinct_n([text.split() for _, text in pairs], 2),
        "response/duplicate_fraction": _duplicates(pairs),
        "policy/entropy": -logprobs.mean().item(),
        **({"policy/sampler_gap": max(own[3] for own in everyone)} if recomputed else {}),
        **{name: float(sum(own[4][name] for own in everyone)) for name in counts},
    }
    if learner.models.has_values:
        real = torch.ones_like(values).bool()
        metrics["value/explained_variance"] = explained_variance(values, all_returns, real).item()
        metrics["value/mean"] = values.mean().item()
    return metrics


def count_rollout(learner: Learner, rollout: RolloutBatch) -> None:
    """How long sampling and the forward passes after it took, and over how many tokens.

    A response counts with its prompt, of the operations those of equal prompts once; one head's product a response
    token.
    """
    speed, models = learner.stage.speed, learner.models
    lengths = sequence_lengths(rollout.prompts, rollout.responses)
    num_tokens, sampled = sum(lengths), sum(len(r.ids) for r in rollout.responses)
    shared = shared_prompts(rollout.prompts)
    forward = learner.policy_work.forward(lengths, sampled, shared)
    speed.count("rollout", seconds=rollout.sample_s, tokens=num_tokens, flops=forward)
    # ref_policy is of the policy's shape; the policy itself where its captured log-probabilities do not serve.
    flops = forward if rollout.logprobs is rollout.sampled_logprobs else 2 * forward
    if learner.value_work is not None and models.value_model is not None:
        flops += learner.value_work.forward(lengths, 0, shared)
    speed.count("scoring", seconds=rollout.score_s, tokens=num_tokens, flops=flops)


def count_update(
    learner: Learner, prompts: Sequence[PromptRow], responses: Sequence[Response], learns_policy: bool
) -> None:
    """Tokens and operations of a microbatch; a policy that does not learn yet is run forward only."""
    lengths, num_answered = sequence_lengths(prompts, responses), sum(len(r.ids) for r in responses)
    work, shared = learner.policy_work, shared_prompts(prompts)
    flops = (work.training if learns_policy else work.forward)(lengths, num_answered, shared)
    if learner.value_work is not None:
        flops += learner.value_work.training(lengths, 0, shared)
    learner.stage.speed.count("update", tokens=sum(lengths), flops=flops)


def _or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _duplicates(pairs: Sequence[tuple[str, str]]) -> float:
    """The share of responses whose very text answers another prompt too."""
    asked: dict[str, set[str]] = {}
    for prompt, text in pairs:
        asked.setdefault(text, set()).add(prompt)
    return sum(len(asked[text]) > 1 for _, text in pairs) / len(pairs)


def keep_samples(
    learner: Learner, rollout: RolloutBatch, texts: list[str], scores: Scores, kl: torch.Tensor, iteration: int
) -> None:
    for i in range(min(learner.config.num_logged_samples, len(texts))):
        learner.stage.sample(
            {
                "step": iteration + 1,
                "prompt": rollout.prompts[i].text,
                "response": texts[i],
                "score": scores.total[i].item(),
                "kl": kl[i].sum().item(),
            }
        )


def measurement(learner: Learner) -> Callable[[], Evaluation]:
    """How the policy is measured on the held-out prompts: the same prompts and uniforms whenever it is called."""
    config = learner.config
    gold_name = config.evaluation.gold
    gold = load_function(gold_name) if gold_name is not None else None

    def score(prompts: Sequence[PromptRow], texts: list[str], responses: Sequence[Response]) -> list[float]:
        values: list[float] = total_score(learner.rewards, judged(learner, prompts, texts, responses)).total.tolist()
        return values

    def judge(prompts: Sequence[PromptRow], texts: list[str], ended: list[bool]) -> list[dict[str, float]]:
        assert gold is not None
        columns, where = [p.row.columns for p in prompts], [p.row.where for p in prompts]
        judged = Samples([p.text for p in prompts], texts, [], [], ended, columns, where=where)
        return call(str(gold_name), gold, judged, named_numbers)

    def measure() -> Evaluation:
        return evaluate(
            learner.models,
            learner.tokenizer,
            learner.test,
            draw_uniforms(config.seed, "ppo evaluation", 0, len(learner.test), config.rollout.max_new_tokens),
            learner.world,
            score=score,
            judge=judge if gold is not None else None,
            sampling=learner.sampling,
            batch_size=config.ppo.rollout_batch_size,
            budget=learner.budget,
            precision=config.precision,
            max_live_rows=config.rollout.max_live_rows,
        )

    return measure


def measure_reference(learner: Learner) -> None:
    """Normalise scores by those of ref_policy's own samples, on prompts of the training set."""
    config, world = learner.config, learner.world
    total = config.ppo.num_reference_samples
    numbers = stream(len(learner.train), total, 0, config.seed, "ppo reference prompts")
    table = draw_uniforms(config.seed, "ppo reference", 0, total, config.rollout.max_new_tokens)
    # The policy that is about to learn is the reference, unless the config names another.
    models = replace(learner.models, policy=learner.models.ref_policy or learner.models.policy)
    for part in chunks(world.shard(list(range(total))), config.ppo.rollout_batch_size):
        rollout = collect(
            [learner.train[numbers[i]] for i in part],
            table[list(part)],
            models,
            sampling=learner.sampling,
            tokenizer=learner.tokenizer,
            budget=learner.budget,
            precision=config.precision,
            recompute=False,
            max_live_rows=config.rollout.max_live_rows,
            with_values=False,
        )
        texts = [response_text(learner.tokenizer, r, learner.sampling) for r in rollout.responses]
        scores = total_score(learner.rewards, judged(learner, rollout.prompts, texts, rollout.responses))
        dense = torch.tensor([sum(row) for row in scores.dense]) if scores.dense is not None else 0.0
        learner.scale.take(scores.total - dense, world)
    learner.stage.display.note(
        f"ref_policy's scores: mean {learner.scale.moments.mean:.3g}, standard deviation "
        f"{learner.scale.moments.std:.3g} over {total} samples; scores are normalised by them"
    )


def gold_of(evaluation: Evaluation) -> list[float] | None:
    """The judge's own number of each reply: `gold`, or the first that it gives."""
    if not evaluation.gold:
        return None
    name = "gold" if "gold" in evaluation.gold[0] else next(iter(evaluation.gold[0]))
    return [row[name] for row in evaluation.gold]


def best_of(key: str | None, before: Evaluation | None) -> Best:
    """The figure that `evaluation.best_metric` names: the highest is the best, with a minus before it the lowest.

    `before` is the evaluation of the policy before PPO. Raises ConfigError if it lacks that figure.
    """
    if key is None:
        return Best(None, lower=False)
    if before is None:
        raise ConfigError("evaluation.best_metric: no held-out prompts. Set data.test or data.test_fraction")
    metric = key.removeprefix("-")
    if metric not in before.metrics:
        raise ConfigError(f"evaluation.best_metric: found {key}, the figures are {', '.join(before.metrics)}")
    return Best(metric, lower=key.startswith("-"))


def compare(learner: Learner, before: Evaluation, after: Evaluation, best: Best) -> dict[str, float]:
    """The table of the end, SFT against PPO, for the eye and as evaluation.json."""
    config, stage, test = learner.config, learner.stage, learner.test
    if best.metric is not None and best.is_better(config.ppo.num_iterations, after.metrics) and stage.world.is_main:
        save_policy(learner, "best_model")
    sides = {"sft": before, "ppo": after}
    examples = [
        {"prompt": test[i].text, **{name: side.example(i) for name, side in sides.items()}}
        for i in range(min(config.evaluation.num_examples, len(test)))
    ]
    whole = {"num_prompts": len(test), "sft": before.metrics, "ppo": after.metrics, "examples": examples}
    if best.metric is not None:
        whole["best"] = {
            "step": best.step,
            "metric": config.evaluation.best_metric,
            "value": best.value,
        }
        stage.display.note(f"best_model is the policy of iteration {best.step}, by {config.evaluation.best_metric}")
    stage.display.before_and_after(whole)
    if stage.world.is_main:
        text = json.dumps(whole, indent=2, ensure_ascii=False) + "\n"
        (stage.directory / "evaluation.json").write_text(text, encoding="utf-8")
    return {f"{name}/{key}": v for name, e in sides.items() for key, v in e.metrics.items()}


def save_policy(learner: Learner, name: str) -> None:
    """The policy as a plain Hugging Face directory that generates as it was trained to."""
    policy, sampling, place = merged(learner.models.policy), learner.sampling, learner.stage.directory / name
    policy.generation_config.update(
        do_sample=True,
        temperature=sampling.temperature,
        top_k=sampling.top_k or 0,
        top_p=sampling.top_p or 1.0,
        min_p=sampling.min_p,
        min_new_tokens=sampling.min_new_tokens or None,
        eos_token_id=sorted(sampling.stop),
    )
    shutil.rmtree(place, ignore_errors=True)
    save(policy, learner.tokenizer, place)


def save_value_model(learner: Learner) -> None:
    """The value model as a sequence classifier; a head on the policy's backbone gets a copy of that."""
    models, place = learner.models, learner.stage.directory / "value_model"
    if models.value_model is not None:
        save(merged(models.value_model), learner.tokenizer, place)
    elif models.value_head is not None:
        save(shared_value_model(merged(models.policy), models.value_head), learner.tokenizer, place)


def failed_batch(learner: Learner, batch: UpdateBatch, rows: list[int], step: int) -> list[dict[str, Any]]:
    """A minibatch that can't be learnt from, to be looked at: a row a response, over all processes."""
    mine = [
        {
            "optimizer_step": step,
            "prompt": batch.prompts[i].text,
            "prompt_ids": batch.prompts[i].ids,
            "response": response_text(learner.tokenizer, batch.responses[i], learner.sampling),
            "response_ids": batch.responses[i].ids,
            "ended": batch.responses[i].ended,
            **{
                # JSON has no nan: what is not finite stands as text.
                name: [
                    x if math.isfinite(x) else str(x)
                    for x in getattr(batch, name)[i, : len(batch.responses[i].ids)].tolist()
                ]
                for name in ("logprobs", "ref_logprobs", "values", "advantages", "returns")
            },
        }
        for i in rows
    ]
    return [row for part in learner.world.gather(mine) for row in part]
