"""The rules of a running PPO that look at one or a few iterations. `trends.py` has those on the whole run.

The figures after "good" and "bad" come from measured runs (see `running.py`). They explain a limit; other tasks may
differ.
"""

from __future__ import annotations

import math
from statistics import fmean

from rlhf_cli.health.findings import Sign, Signs, rule
from rlhf_cli.health.history import LARGEST, START, History

# ---------------------------------------------------------------------------------------------- stops

MUST_BE_FINITE = (
    "loss/policy",
    "loss/value",
    "objective/score",
    "objective/kl",
    "objective/reward",
    "policy/entropy",
    "policy/grad_norm",
)


@rule(
    "Look for a reward that can divide by zero, lower optimizer.learning_rate, lengthen optimizer.warmup_steps, "
    "or set precision: float32",
    severity="stop",
)
def not_finite(run: History) -> Signs:
    wrong = [f"{key} is {run.metrics[key]}" for key in MUST_BE_FINITE if not math.isfinite(run.metrics.get(key, 0.0))]
    # Bad steps that were skipped have been reported, and too many of them have stopped the run already.
    if wrong and not run.metrics.get("policy/bad_steps", 0.0) > 0:
        yield Sign(
            LARGEST,
            f"{', '.join(wrong)}. These metrics must be finite, or the next step destroys the weights. Either a reward "
            "function returned NaN, or the learning rate is too high, or the precision is too low.",
        )


@rule(
    "Print logprobs and new_logprobs of that minibatch side by side. A constant factor points to rollout.temperature, "
    "random differences to dropout or precision, differences in some rows only to padding or position ids",
    severity="stop",
)
def ratio_not_one(run: History) -> Signs:
    # The mean ratio sees less than the largest error: over samples of one policy, the mean ratio of another policy to
    # it is 1 however far apart they are (the sum of q * p / q), so dropout that was left on does not show in it.
    if "policy/first_ratio_error" in run.metrics:
        error = run.metrics["policy/first_ratio_error"]
        seen = f"policy/first_ratio_error: the log ratio of a token is off by {error:.3g}"
    elif "policy/first_ratio" in run.metrics:
        error = abs(run.metrics["policy/first_ratio"] - 1)
        seen = f"policy/first_ratio: the mean ratio is {run.metrics['policy/first_ratio']:.6g}"
    else:
        return
    if not error <= run.ratio_tolerance:
        yield Sign(
            error,
            f"{seen} in the first minibatch of the iteration. No step was taken since these log-probabilities were "
            f"computed, so every ratio must be 1 (tolerance {run.ratio_tolerance:g}). Possible causes: Dropout is on; "
            "the two passes differ in temperature, filters, position ids or padding; the responses were tokenized "
            "again; the ratio is taken to ref_policy or to an older policy.",
        )


@rule(
    "Check that both models come from policy.path and policy.revision, are in eval mode and compute "
    "log-probabilities at rollout.temperature. If they are meant to differ, set ref_policy.path",
    severity="stop",
)
def kl_not_zero(run: History) -> Signs:
    kl = run.metrics.get("objective/kl", 0.0)
    if run.iteration == 1 and run.starts_at_reference and not abs(kl) <= run.ratio_tolerance:
        yield Sign(
            abs(kl),
            f"objective/kl is {kl:.3g} nats per response in iteration 1. There policy and ref_policy are the same "
            f"model, so it must be 0 (tolerance {run.ratio_tolerance:g}). One of the two has dropout on, uses another "
            "temperature, filter, precision or position ids, or was loaded from other weights.",
        )


# ------------------------------------------------------------------------------- warnings on one iteration

SAMPLER_FACTOR = 2.0
"""Tolerance of the largest difference, in ratio tolerances. Sampling (token by token, with a cache) and training are
two different computations. Good: 3e-5 nats in float32, and 0.1 in bfloat16 with a model of few layers."""
KL_NEGATIVE = -1.0
"""Nats per response in one iteration; TRL warns at the same limit. Good: above -0.04."""
KL_NEGATIVE_LONG = -0.05
"""Nats per response: the mean of KL_NEGATIVE_ITERATIONS that are all below 0. Chance is not negative for long."""
KL_NEGATIVE_ITERATIONS = 5
LAMBDA_FAR = 100.0
"""The multiplier of a limit that still does not hold. It starts at 1 and takes 24 iterations or more to get there."""
KL_FAR = 10.0
"""Nats per response in one iteration, if it is also above KL_FAR_PER_TOKEN: an answer of one token may cost several."""
KL_FAR_PER_TOKEN = 1.0
"""Nats. Good: up to 0.3."""
GRADIENT_FAR = 100.0
"""Norm of the gradient in one iteration, as a multiple of the larger of optimizer.max_grad_norm and of the smallest
norm at the start. Good: up to 4."""


@rule(
    "Set precision: float32. If the gap remains, compare one response token by token with rollout.temperature: 1.0 "
    "and without rollout.top_k, rollout.top_p and rollout.min_p"
)
def sampler_gap(run: History) -> Signs:
    largest, limit = run.metrics.get("policy/sampler_gap", 0.0), SAMPLER_FACTOR * run.ratio_tolerance
    mean = run.metrics.get("policy/sampler_gap_mean", 0.0)
    if mean > run.gap_tolerance:
        seen = (
            f"policy/sampler_gap_mean: on average the log-probability of a token differs by {mean:.3g} nats between "
            f"sampling and training (tolerance {run.gap_tolerance:g})."
        )
    elif largest > limit:
        seen = (
            f"policy/sampler_gap: the log-probability of a token differs by {largest:.3g} nats between sampling and "
            f"training (tolerance {limit:g})."
        )
    else:
        return
    yield Sign(
        max(mean / run.gap_tolerance, largest / limit),
        f"{seen} So the responses come from another policy than the one that is trained: the cache, position ids, "
        "temperature or a filter differ, or the precision is too low.",
    )


@rule("Lower {steps}, raise ppo.minibatch_size, or {end_early}")
def skipped(run: History) -> Signs:
    skipped = run.metrics.get("policy/skipped_steps", 0.0)
    if skipped > 0:
        yield Sign(
            skipped,
            f"policy/skipped_steps: {skipped:g} minibatches of this iteration were skipped, because their mean ratio "
            "was above ppo.max_ratio. Once is an accident; repeatedly, it means that the policy moves too far per "
            "iteration.",
        )


@rule(
    "Compare with policy/sampler_gap. Sample with rollout.temperature: 1.0 and without rollout.top_k, "
    "rollout.top_p, rollout.min_p and rollout.min_new_tokens. If it is chance, raise ppo.rollout_batch_size"
)
def kl_negative(run: History) -> Signs:
    now, last = run.now("objective/kl"), run.last("objective/kl", KL_NEGATIVE_ITERATIONS)
    if now < KL_NEGATIVE:
        seen, size = f"{now:.3g} nats per response (limit {KL_NEGATIVE:g})", -now
    elif last and max(last) < 0 and fmean(last) < KL_NEGATIVE_LONG:
        size = -fmean(last)
        seen = (
            f"below 0 for {len(last)} iterations, on average {-size:.3g} nats per response (limit {KL_NEGATIVE_LONG:g})"
        )
    else:
        return
    pays = " As a penalty in the reward it now pays the policy." if run.kl_in_reward else ""
    yield Sign(
        size,
        f"objective/kl is {seen}.{pays} A KL is never negative. Its estimate, logprobs - ref_logprobs of the sampled "
        "tokens, can be negative by chance with few responses. It also is if the tokens were not sampled from the "
        "policy of logprobs, because a filter or a temperature was used for sampling only.",
    )


@rule(
    "Read the last rows of samples.jsonl. Start over with a lower {steps}; {stay}. If the KL is in the loss, set "
    "ppo.kl_estimator: k2_sequence, or lower ppo.kl_coef"
)
def kl_far(run: History) -> Signs:
    kl, length = run.now("objective/kl"), run.now("response/length")
    in_loss = run.metrics.get("policy/ref_kl", 0.0)
    if in_loss > KL_FAR_PER_TOKEN:
        yield Sign(
            in_loss,
            f"policy/ref_kl, the KL in the loss, is {in_loss:.3g} nats per token (limit {KL_FAR_PER_TOKEN:g}). A few "
            "tokens to which the policy gives far less than ref_policy decide the whole step: the estimate k3 of such "
            "a token grows as the ratio of the two probabilities.",
        )
    elif kl > KL_FAR and kl > KL_FAR_PER_TOKEN * length:
        yield Sign(
            kl,
            f"objective/kl is {kl:.3g} nats per response of {length:.3g} tokens (limits {KL_FAR:g} per response and "
            f"{KL_FAR_PER_TOKEN:g} per token). ref_policy would hardly ever write these responses, so the reward model "
            "has seen none like them. The last steps were too large, or nothing keeps the policy near ref_policy.",
        )


@rule(
    "Lower {steps}, or set ppo.max_ratio, which skips such minibatches. If policy/ref_kl is large too, set "
    "ppo.kl_estimator: k2_sequence"
)
def gradient_far(run: History) -> Signs:
    norm, clipped_at = run.metrics.get("policy/grad_norm", 0.0), run.config.get("optimizer.max_grad_norm") or 1.0
    start = min((row["policy/grad_norm"] for row in run.start[:START] if "policy/grad_norm" in row), default=math.nan)
    if norm > GRADIENT_FAR * start and norm > GRADIENT_FAR * clipped_at:
        yield Sign(
            norm,
            f"policy/grad_norm is {norm:.3g}, and {start:.3g} at the start (limit {GRADIENT_FAR:g} times the larger of "
            f"that and of the {clipped_at:g} at which it is clipped). Few tokens decide the whole step.",
        )


@rule(
    "Loosen this limit, or another one that contradicts it; lower ppo.kl_coef, which may keep the policy where the "
    "limit does not hold; or raise ppo.num_iterations or optimizer.learning_rate if its mean still moves"
)
def limit_missed(run: History) -> Signs:
    limits = [reward["limit"] for reward in run.config.get("rewards", ()) if reward.get("limit")]
    names = [key.removeprefix("lambda/") for key in run.metrics if key.startswith("lambda/")]
    seen, most = [], 0.0
    for name, limit in zip(names, limits, strict=False):
        side = "above" if limit["above"] is not None else "below"
        mean, lam = run.metrics.get(f"reward/{name}", math.nan), run.metrics[f"lambda/{name}"]
        misses = mean <= limit[side] if side == "above" else mean >= limit[side]
        if misses and lam >= LAMBDA_FAR:
            seen.append(f"reward/{name} is {mean:.3g}, must be {side} {limit[side]:g}, and lambda/{name} is {lam:.3g}")
            most = max(most, lam)
    if seen:
        yield Sign(
            most,
            f"{'; '.join(seen)} (at most {LAMBDA_FAR:g}). The score hardly counts beside the limit any more, and it "
            "still does not hold.",
        )


# --------------------------------------------------------------------------- warnings on a few iterations

APPROX_KL, APPROX_KL_FAR = 0.1, 1.0
"""Nats per token: PERSIST times in a row, or once. Good: 0.01, single iterations up to 0.07; bad: 0.2 to 0.8."""
CLIP_FRACTION, CLIP_FRACTION_FAR = 0.3, 0.8
"""PERSIST times in a row, or once. Good: 0.05, single iterations up to 0.09. A far too high learning rate gives 0.1 to
0.3 and shows in approx_kl first. At this limit a third of the batch is lost."""
EMPTY, EMPTY_FAR = 0.25, 0.9
"""Share of responses without text: PERSIST times in a row, or once. Good: 0.005; bad: 1, soon after this limit is
passed."""
VALUE_ITERATIONS = 10
"""Consecutive iterations with explained variance below 0. Good: 5 in total, the first ones."""
VALUE_WARMUP = 5
"""First iterations that do not count: the value head starts at 0, which explains nothing."""


@rule(
    "Lower {steps} (the learning rate for example to a third), lengthen optimizer.warmup_steps, or raise "
    "ppo.minibatch_size. To end such an update early, {end_early}"
)
def approx_kl(run: History) -> Signs:
    now, since = run.above("policy/approx_kl", APPROX_KL, APPROX_KL_FAR)
    if since:
        yield Sign(
            now,
            f"policy/approx_kl is {now:.3g} nats per token, above {APPROX_KL:g} {since}. Within one iteration the "
            "policy moves so far from the one that sampled the responses that they no longer show what is good for it.",
        )


@rule("Lower {steps}, or raise ppo.minibatch_size. A wider ppo.clip_range would only hide the problem")
def clip_fraction(run: History) -> Signs:
    now, since = run.above("policy/clip_fraction", CLIP_FRACTION, CLIP_FRACTION_FAR)
    if since:
        yield Sign(
            now,
            f"policy/clip_fraction is {now:.0%}, above {CLIP_FRACTION:.0%} {since}. "
            "The ratio of these tokens is outside ppo.clip_range, so they have no gradient.",
        )


@rule(
    "Start over, because empty responses give nothing to learn from. If policy/approx_kl was high, lower "
    "optimizer.learning_rate. If empty responses score well, set rollout.min_new_tokens or add a reward against "
    "them: a reward model that never saw an empty response cannot judge one"
)
def empty(run: History) -> Signs:
    now, since = run.above("response/empty_fraction", EMPTY, EMPTY_FAR)
    if since:
        yield Sign(
            now,
            f"response/empty_fraction: {now:.0%} of the responses have no text, above {EMPTY:.0%} {since}. Either an "
            "empty response scores better than text, or too large a step broke the policy.",
        )


@rule(
    "Raise value_model.warmup_iterations. Raise value_model.learning_rate if value/error falls slowly, lower it if "
    "value/error jumps. If scores are far from 1 in size, widen ppo.value_clip_range or set ppo.score_normalization"
)
def value_blind(run: History) -> Signs:
    last = run.last("value/explained_variance", VALUE_ITERATIONS)
    is_early = run.iteration < VALUE_WARMUP + VALUE_ITERATIONS
    if run.has_value_model and not is_early and last and max(last) < 0:
        yield Sign(
            -last[-1],
            f"value/explained_variance is {last[-1]:.3g} and was below 0 for {VALUE_ITERATIONS} iterations. The value "
            "model predicts the returns worse than their mean would, so the advantages are noisier than without it. It "
            "learns too slowly or in too large steps, or the returns hardly vary.",
        )


STOPS = (not_finite, ratio_not_one, kl_not_zero)
WARNINGS = (
    sampler_gap, skipped, kl_negative, kl_far, gradient_far, limit_missed,
    approx_kl, clip_fraction, empty, value_blind,
)  # fmt: skip
