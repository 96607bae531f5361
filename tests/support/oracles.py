"""Slow, obvious oracles of PPO: plain forward passes in float64 and loops over single tokens.

`slow_losses` computes the losses of an update token by token, with the gradients that the stage must produce.
`check_update_batch` computes advantages and returns from raw scores and compares them with those of a whole run.
"""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import linear

from rlhf_cli.rollout.sampling import Sampling
from support.compare import close
from support.setup import reward_calls

# --------------------------------------------------------------------------------------- plain forwards


def plain_copy(model):
    """A copy of the model with the plain attention of transformers and without gradients."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("sdpa")
    model.zero_grad()
    return model


def allowed_ids(response, t, sampling, vocabulary):
    """The ids that the sampler could draw for token t of a response."""
    if response.allowed_ids is not None:
        return list(response.allowed_ids[t])
    early = t + 1 < sampling.min_new_tokens
    forbidden = response.forbidden_ids[t] if response.forbidden_ids is not None else []
    return [i for i in range(vocabulary) if i not in forbidden and not (early and i in sampling.stop)]


def distributions(model, prompts, responses, sampling):
    """For each token of each response: (log-probabilities of the allowed ids, index of the chosen id among them)."""
    rows = []
    for prompt, response in zip(prompts, responses, strict=True):
        logits = model(input_ids=torch.tensor([prompt.ids + response.ids])).logits[0]
        at, row = len(prompt.ids), []
        for t, token in enumerate(response.ids):
            ids = allowed_ids(response, t, sampling, logits.shape[1])
            row.append(((logits[at + t - 1, ids] / sampling.temperature).log_softmax(0), ids.index(token)))
        rows.append(row)
    return rows


def hidden_states(backbone, prompts, responses):
    """For each token of each response: the last hidden state before it was chosen."""
    rows = []
    for prompt, response in zip(prompts, responses, strict=True):
        hidden = backbone(input_ids=torch.tensor([prompt.ids + response.ids])).last_hidden_state[0]
        rows.append([hidden[len(prompt.ids) + t - 1] for t in range(len(response.ids))])
    return rows


def chosen(rows):
    """The log-probability of each chosen token, from `distributions`."""
    return [[logprobs[k] for logprobs, k in row] for row in rows]


def full_kl(logprobs, ref_logprobs):
    """sum p * (log p - log q) over the allowed ids."""
    return (logprobs.exp() * (logprobs - ref_logprobs)).sum()


def numbers(rows):
    return [[float(x) for x in row] for row in rows]


def padded(rows):
    width = max(map(len, rows))
    return torch.tensor([[*map(float, row), *[0.0] * (width - len(row))] for row in rows], dtype=torch.float64)


@dataclass
class Case:
    """A rollout of float64 models, and the same models with noise. Some ratios leave the clip range."""

    sampling: Sampling
    prompts: list
    responses: list
    rollout: object
    policy: torch.nn.Module
    ref_policy: torch.nn.Module
    value_model: torch.nn.Module
    head: torch.nn.Linear
    advantages: torch.Tensor
    returns: torch.Tensor
    ptx: list


KL_COEF, POLICY_KL_COEF = 0.4, 0.7
"""The coefficients of the update under test. They differ from those of the config."""


def slow_losses(case, config, *, shared=False, learns_policy=True):
    """Compute every loss of one minibatch token by token, and the gradients.

    Returns (policy with gradients, value model or head with gradients, losses and counts by name).
    """
    ppo, ptx = config.ppo, config.ptx
    policy, ref_policy = plain_copy(case.policy), plain_copy(case.ref_policy)
    value_model = copy.deepcopy(case.head) if shared else plain_copy(case.value_model)
    value_model.zero_grad()
    new = distributions(policy, case.prompts, case.responses, case.sampling)
    with torch.no_grad():
        ref = distributions(ref_policy, case.prompts, case.responses, case.sampling)
    backbone = policy.base_model if shared else value_model.base_model
    hidden = hidden_states(backbone, case.prompts, case.responses)
    head = value_model.weight if shared else value_model.score.weight
    num_tokens = sum(len(r.ids) for r in case.responses)
    counts = Counter()
    losses = {"policy": 0.0, "kl": 0.0, "entropy": 0.0, "value": 0.0, "ptx": 0.0}
    for b, response in enumerate(case.responses):
        length = len(response.ids)
        weight = {
            "token": 1 / num_tokens,
            "sequence": 1 / (len(case.responses) * length),
            "constant": 1 / (len(case.responses) * config.rollout.max_new_tokens),
        }[ppo.loss_aggregation]
        log_ratio_to_ref = 0.0
        for t in range(length):
            (p, k), (q, _) = new[b][t], ref[b][t]
            ratio = (p[k] - case.rollout.logprobs[b, t]).exp()
            advantage = case.advantages[b, t].item()
            if ppo.objective == "clip":
                high = ppo.clip_range if ppo.clip_range_high is None else ppo.clip_range_high
                clipped = ratio.clamp(1 - ppo.clip_range, 1 + high)
                gain = torch.minimum(ratio * advantage, clipped * advantage)
                counts["clipped"] += int((clipped * advantage < ratio * advantage).item())
                if ppo.dual_clip is not None and advantage < 0 and gain < ppo.dual_clip * advantage:
                    gain = torch.tensor(ppo.dual_clip * advantage, dtype=torch.float64)
                    counts["capped"] += 1
            else:
                gain = ratio * advantage - POLICY_KL_COEF * (ratio - 1 - ratio.log())
            losses["policy"] = losses["policy"] - weight * gain
            difference = p[k] - q[k]
            log_ratio_to_ref = log_ratio_to_ref + difference
            if ppo.kl_in == "loss" and ppo.kl_estimator not in (None, "k2_sequence"):
                kl = {
                    "k2": difference**2 / 2,
                    "k3": (-difference).exp() - 1 + difference,
                    "abs": difference.abs(),
                    "full": full_kl(p, q),
                }[ppo.kl_estimator]
                losses["kl"] = losses["kl"] + weight * kl
            losses["entropy"] = losses["entropy"] - weight * (p.exp() * p).sum()
            state = hidden[b][t].detach() if shared and not learns_policy else hidden[b][t]
            old, target = case.rollout.values[b, t], case.returns[b, t]
            value = linear(state, head)[0]
            error = (value - target) ** 2
            if ppo.value_clip_range is not None:
                near = old + (value - old).clamp(-ppo.value_clip_range, ppo.value_clip_range)
                counts["value_clipped"] += int(((near - target) ** 2 > error).item())
                error = torch.maximum(error, (near - target) ** 2)
            losses["value"] = losses["value"] + weight * 0.5 * error
        if ppo.kl_in == "loss" and ppo.kl_estimator in (None, "k2_sequence"):
            losses["kl"] = losses["kl"] + weight * log_ratio_to_ref**2 / 2
    total = losses["policy"] - ppo.entropy_coef * losses["entropy"]
    if ppo.kl_in == "loss":
        total = total + KL_COEF * losses["kl"]
    if ptx is not None:
        learned = sum(sum(row.loss_mask) for row in case.ptx)
        for row in case.ptx:
            logprobs = policy(input_ids=torch.tensor([row.ids])).logits[0].log_softmax(-1)
            for t, is_learned in enumerate(row.loss_mask):
                if is_learned:
                    losses["ptx"] = losses["ptx"] - logprobs[t - 1, row.ids[t]] / learned
        share = 1 - ptx.coef if ptx.mode == "convex" else 1.0
        total = share * total + ptx.coef * losses["ptx"]
    value_total = ppo.vf_coef * losses["value"]
    (total + value_total if learns_policy else value_total).backward()
    return (
        policy,
        value_model,
        {name: float(torch.as_tensor(loss).detach()) for name, loss in losses.items()} | dict(counts),
    )


def mean_std(values):
    return statistics.fmean(values), statistics.stdev(values)


def whiten(rows, *, keep_mean):
    mean, std = mean_std(list(itertools.chain(*rows)))
    scale = math.sqrt(std**2 + 1e-8)
    return [[(x - mean) / scale + (mean if keep_mean else 0.0) for x in row] for row in rows]


def slow_score(config, raw, responses, mean, std):
    """The score of each response: normalized, clipped, minus each penalty."""
    ppo, longest = config.ppo, config.rollout.max_new_tokens
    scores = []
    for score, response in zip(raw, responses, strict=True):
        length = len(response.ids)
        score = (score - mean) / std
        if ppo.score_clip is not None:
            score = max(-ppo.score_clip, min(score, ppo.score_clip))
        if not response.ended:
            score -= ppo.missing_eos_penalty
        score -= ppo.length_penalty * length
        if ppo.overlong_buffer and length > longest - ppo.overlong_buffer:
            score -= ppo.overlong_penalty * (length - (longest - ppo.overlong_buffer)) / ppo.overlong_buffer
        scores.append(score)
    return scores


def over_groups(config, totals, kind):
    n, advantages = config.rollout.samples_per_prompt, []
    for i, total in enumerate(totals):
        group = totals[i // n * n : i // n * n + n]
        others = [x for j, x in enumerate(group) if j != i % n]
        mean = statistics.fmean(group)
        advantages.append(
            {
                "rloo": lambda total=total, others=others: total - statistics.fmean(others),
                "grpo": lambda total=total, mean=mean, group=group: (total - mean) / (statistics.stdev(group) + 1e-6),
                "dr_grpo": lambda total=total, mean=mean: total - mean,
            }[kind]()
        )
    return advantages


def slow_token_rewards(config, score, dense, logprobs, ref_logprobs, kl_full, kl_coef):
    ppo = config.ppo
    if ppo.advantage_estimator == "reinforce_pp_baseline":
        score = over_groups(config, score, "dr_grpo")
    rows = []
    for b, row in enumerate(logprobs):
        rewards = []
        for t, logprob in enumerate(row):
            difference = logprob - ref_logprobs[b][t]
            kl = {
                None: difference,
                "k1": difference,
                "k2": difference**2 / 2,
                "k3": math.exp(-difference) - 1 + difference,
                "abs": abs(difference),
                "full": kl_full[b][t],
            }[ppo.kl_estimator if ppo.kl_in == "reward" else None]
            reward = -kl_coef * kl if ppo.kl_in == "reward" else 0.0
            if dense is not None:
                reward += dense[b][t]
            if t == len(row) - 1:
                reward += score[b]
            rewards.append(reward)
        rows.append(rewards)
    return rows


def slow_importance(logprobs, responses, cap):
    """The factor of each advantage: the token's probability in training over the sampler's, at most `cap`."""
    return [
        [min(math.exp(trained - sampled), cap) for trained, sampled in zip(row, response.logprobs, strict=True)]
        for row, response in zip(logprobs, responses, strict=True)
    ]


def slow_advantages(config, rewards, values):
    """Advantages and returns by their definitions, as sums over later tokens."""
    ppo, name = config.ppo, config.ppo.advantage_estimator
    gamma = ppo.gamma

    def by_lambda(lam):
        rows = []
        for r, v in zip(rewards, values, strict=True):
            deltas = [r[t] + gamma * (v[t + 1] if t + 1 < len(r) else 0.0) - v[t] for t in range(len(r))]
            rows.append([sum((gamma * lam) ** (j - t) * deltas[j] for j in range(t, len(r))) for t in range(len(r))])
        return rows

    to_go = [[sum(gamma ** (j - t) * r[j] for j in range(t, len(r))) for t in range(len(r))] for r in rewards]
    returns = to_go
    if name == "gae":
        advantages = by_lambda(ppo.gae_lambda)
        learned = by_lambda(ppo.gae_lambda if ppo.value_lambda is None else ppo.value_lambda)
        returns = [[a + v for a, v in zip(x, y, strict=True)] for x, y in zip(learned, values, strict=True)]
    elif name == "monte_carlo":
        advantages = [[a - v for a, v in zip(x, y, strict=True)] for x, y in zip(to_go, values, strict=True)]
    elif name in ("rloo", "grpo", "dr_grpo"):
        totals = over_groups(config, [sum(r) for r in rewards], name)
        advantages = [[total] * len(r) for total, r in zip(totals, rewards, strict=True)]
    else:
        advantages = to_go
    by_default = name.startswith("reinforce_pp") or (name in ("gae", "monte_carlo") and ppo.kl_in == "reward")
    if by_default if ppo.whiten_advantages is None else ppo.whiten_advantages:
        advantages = whiten(advantages, keep_mean=False)
    return advantages, returns


def weighted_scores(config, setup, call):
    """From call `call` of the reward functions: (weighted sums of scores, weighted sums of dense rewards or None)."""
    sums, dense = None, None
    for number, reward in enumerate(config.rewards):
        function = reward.function.rpartition(":")[2]
        if reward.per_token:
            rows = [[reward.weight * x for x in row] for row in reward_calls(setup, number)[call]["dense"]]
            old = dense or [[0.0] * len(row) for row in rows]
            dense = [[a + b for a, b in zip(*two, strict=True)] for two in zip(old, rows, strict=True)]
            continue
        answer = reward_calls(setup)[call]
        values = answer["values"] if function == "letters" else [0.5 + row["ended"] for row in answer["rows"]]
        values = [reward.weight * x for x in values]
        sums = values if sums is None else [a + b for a, b in zip(sums, values, strict=True)]
    num_rows = len(reward_calls(setup)[call]["responses"])
    return sums if sums is not None else [0.0] * num_rows, dense


def check_figures(row, responses, logprobs, values, returns):
    """Compare the figures of an iteration that are means over real tokens or responses with plain means."""
    assert row["policy/entropy"] == pytest.approx(-statistics.fmean(itertools.chain(*logprobs)), abs=1e-4)
    assert row["response/length"] == pytest.approx(statistics.fmean(len(r.ids) for r in responses))
    assert row["response/eos_fraction"] == pytest.approx(statistics.fmean(r.ended for r in responses))
    if values is None:
        return
    flat, targets = list(itertools.chain(*values)), list(itertools.chain(*returns))
    assert row["value/mean"] == pytest.approx(statistics.fmean(flat), abs=1e-4)
    errors = [target - value for target, value in zip(targets, flat, strict=True)]
    explained = 1 - statistics.pvariance(errors) / statistics.pvariance(targets)
    assert row["value/explained_variance"] == pytest.approx(explained, abs=1e-3)


@torch.no_grad()
def check_update_batch(run, num_reference_calls=0):
    """Compare advantages, returns, log-probabilities and values of each update with slow loops over raw scores.

    Returns the results of the slow loops for each iteration.
    """
    setup, config = run.setup, run.setup.config
    ppo, kl_coef = config.ppo, config.ppo.kl_coef
    all_scores, iterations = [], []
    for i, (rollout, models, batch) in enumerate(zip(run.rollouts, run.models, run.batches, strict=True)):
        policy, ref_policy = plain_copy(models.policy), plain_copy(models.ref_policy)
        rollout_args = (rollout.prompts, rollout.responses, setup.sampling)
        p, q = distributions(policy, *rollout_args), distributions(ref_policy, *rollout_args)
        logprobs, ref_logprobs = numbers(chosen(p)), numbers(chosen(q))
        kl_full = [[float(full_kl(a[0], b[0])) for a, b in zip(*two, strict=True)] for two in zip(p, q, strict=True)]
        values = [[0.0] * len(row) for row in logprobs]
        if ppo.advantage_estimator in ("gae", "monte_carlo"):
            backbone = policy.base_model
            weight = models.value_head.weight if models.value_head is not None else models.value_model.score.weight
            if models.value_model is not None:
                backbone = plain_copy(models.value_model).base_model
            states = hidden_states(backbone, *rollout_args[:2])
            values = [[float(linear(state, weight)[0]) for state in row] for row in states]
        raw, dense = weighted_scores(config, setup, num_reference_calls + i)
        all_scores += raw
        mean, std = 0.0, 1.0
        if ppo.score_normalization.startswith("running"):
            mean, std = mean_std(all_scores)
        elif ppo.score_normalization.startswith("reference"):
            samples = [weighted_scores(config, setup, call)[0] for call in range(num_reference_calls)]
            mean, std = mean_std(list(itertools.chain(*samples)))
        if ppo.score_normalization.endswith("_std"):
            mean = 0.0
        score = slow_score(config, raw, rollout.responses, mean, std)
        unwhitened = slow_token_rewards(config, score, dense, logprobs, ref_logprobs, kl_full, kl_coef)
        rewards = whiten(unwhitened, keep_mean=True) if ppo.whiten_rewards else unwhitened
        advantages, returns = slow_advantages(config, rewards, values)
        weights = slow_importance(logprobs, rollout.responses, ppo.importance_ratio_cap)
        advantages = [[a * w for a, w in zip(*two, strict=True)] for two in zip(advantages, weights, strict=True)]
        for tensor, expected in (
            (batch.advantages, advantages),
            (batch.returns, returns),
            (batch.logprobs, logprobs),
            (batch.ref_logprobs, ref_logprobs),
            (batch.values, values),
        ):
            close(tensor.double(), padded(expected), 1e-4)
        row = run.metrics[i]
        response_kl = statistics.fmean(sum(a) - sum(b) for a, b in zip(logprobs, ref_logprobs, strict=True))
        assert row["objective/kl"] == pytest.approx(response_kl, abs=1e-4)
        assert row["objective/kl_coef"] == pytest.approx(kl_coef, rel=1e-6)
        assert row["objective/reward"] == pytest.approx(statistics.fmean(map(sum, rewards)), abs=1e-4)
        total = [a + sum(b) for a, b in zip(raw, dense or [[]] * len(raw), strict=True)]
        assert row["objective/score"] == pytest.approx(statistics.fmean(total), abs=1e-4)
        check_figures(row, rollout.responses, logprobs, values if models.has_values else None, returns)
        if ppo.kl_controller == "adaptive":
            error = max(-0.2, min(row["objective/kl"] / ppo.kl_target - 1, 0.2))
            kl_coef *= 1 + error * ppo.rollout_batch_size / ppo.kl_horizon
        iterations.append(SimpleNamespace(raw=raw, score=score, unwhitened=unwhitened, rewards=rewards))
    return iterations
