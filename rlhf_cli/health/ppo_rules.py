"""The rules of a running PPO: one or a few iterations, then its own start, then the whole run and evaluations.

A rule is a function that yields what it sees in a `History`: how bad it is, and a sentence. A metric that the run does
not have is NaN, so that no comparison with it is true. The figures after "good" and "bad" come from measured runs (see
`running.py`). They explain a limit; other tasks may differ.

A new rule also needs a row in docs/health.md and a test in tests/health/test_running.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from statistics import correlation, fmean

from rlhf_cli.health.findings import Rule, Seen, rule
from rlhf_cli.health.history import (
    BEFORE_KL,
    EARLY,
    GAP_TOLERANCE,
    LARGEST,
    PERSIST,
    STANDARD_ERRORS,
    START,
    History,
    halves,
    paired,
    rises,
    standard_error,
)

STOPS: list[Rule] = []
WARNINGS: list[Rule] = []
EVALUATION: list[Rule] = []
"""Rules of an evaluation on held-out prompts."""
stop = partial(rule, STOPS, severity="stop")
warning = partial(rule, WARNINGS)
TINY = 1e-9
"""Stands for 0 below a fraction bar."""

# ----------------------------------------------------------------------------------------------- wrong in any iteration
MUST_BE_FINITE = (
    "loss/policy",
    "loss/value",
    "objective/score",
    "objective/kl",
    "objective/reward",
    "policy/entropy",
    "policy/grad_norm",
)


@stop(
    "Look for a reward that can divide by zero, lower optimizer.learning_rate, lengthen optimizer.warmup_steps, or "
    "set precision: float32"
)
def not_finite(run: History) -> Iterator[Seen]:
    wrong = [f"{key} is {run.metrics[key]}" for key in MUST_BE_FINITE if not math.isfinite(run.metrics.get(key, 0.0))]
    # Bad steps that were skipped have been reported, and too many of them have stopped the run already.
    if wrong and not run.metrics.get("policy/bad_steps", 0.0) > 0:
        yield (
            LARGEST,
            f"{', '.join(wrong)}. These metrics must be finite, or the next step destroys the weights. Either a reward "
            "function returned NaN, or the learning rate is too high, or the precision is too low.",
        )


@stop(
    "Print logprobs and new_logprobs of that minibatch side by side. A constant factor points to "
    "rollout.temperature, random differences to dropout or precision, differences in some rows only to padding or "
    "position ids"
)
def ratio_not_one(run: History) -> Iterator[Seen]:
    if "policy/first_ratio_error" in run.metrics:
        size = run["policy/first_ratio_error"]
        text = f"policy/first_ratio_error: the log ratio of a token is off by {size:.3g}"
    elif "policy/first_ratio" in run.metrics:
        # The mean ratio sees less: over samples of one policy, the mean ratio of another policy to it is 1 however far
        # apart they are (the sum of q * p / q), so dropout that was left on does not show in it.
        ratio = run["policy/first_ratio"]
        size, text = abs(ratio - 1), f"policy/first_ratio: the mean ratio is {ratio:.6g}"
    else:
        return
    if not size <= run.ratio_tolerance:
        yield (
            size,
            f"{text} in the first minibatch of the iteration. No step was taken since these log-probabilities were "
            f"computed, so every ratio must be 1 (tolerance {run.ratio_tolerance:g}). Possible causes: Dropout is on; "
            "the two passes differ in temperature, filters, position ids or padding; the responses were tokenized "
            "again; the ratio is taken to ref_policy or to an older policy.",
        )


@stop(
    "Check that both models come from policy.path and policy.revision, are in eval mode and compute "
    "log-probabilities at rollout.temperature. If they are meant to differ, set ref_policy.path"
)
def kl_not_zero(run: History) -> Iterator[Seen]:
    kl = run.metrics.get("objective/kl", 0.0)
    if run.iteration == 1 and run.config.ref_policy is None and not abs(kl) <= run.ratio_tolerance:
        yield (
            abs(kl),
            f"objective/kl is {kl:.3g} nats per response in iteration 1. There policy and ref_policy are the same "
            f"model, so it must be 0 (tolerance {run.ratio_tolerance:g}). One of the two has dropout on, uses another "
            "temperature, filter, precision or position ids, or was loaded from other weights.",
        )


# ---------------------------------------------------------------------------------------------- one or a few iterations
LAMBDA_FAR = 100.0
"""The multiplier of a limit that still does not hold. It starts at 1 and takes 24 iterations or more to get there."""
GRADIENT_FAR = 100.0
"""Norm of the gradient in one iteration, as a multiple of the larger of optimizer.max_grad_norm and of the smallest
norm at the start. Good: up to 4."""


# Sampling (token by token, with a cache) and training are two different computations. Good: 3e-5 nats in float32,
# and 0.1 in bfloat16 with a model of few layers.
@warning(
    "Set precision: float32. If the gap remains, compare one response token by token with rollout.temperature: 1.0 "
    "and without rollout.top_k, rollout.top_p and rollout.min_p"
)
def sampler_gap(run: History) -> Iterator[Seen]:
    of_both = (
        ("policy/sampler_gap_mean: on average", run["policy/sampler_gap_mean"], GAP_TOLERANCE[run.precision]),
        ("policy/sampler_gap:", run["policy/sampler_gap"], 2 * run.ratio_tolerance),
    )
    for name, gap, tolerance in of_both:
        if gap > tolerance:
            yield (
                gap / tolerance,
                f"{name} the log-probability of a token differs by {gap:.3g} nats between sampling and training "
                f"(tolerance {tolerance:g}). So the responses come from another policy than the one that is trained: "
                "the cache, position ids, temperature or a filter differ, or the precision is too low.",
            )


@warning("Lower {steps}, raise ppo.minibatch_size, or {end_early}")
def skipped(run: History) -> Iterator[Seen]:
    if (count := run["policy/skipped_steps"]) > 0:
        yield (
            count,
            f"policy/skipped_steps: {count:g} minibatches of this iteration were skipped, because their mean ratio was "
            "above ppo.max_ratio. Once is an accident; repeatedly, it means that the policy moves too far per "
            "iteration.",
        )


# TRL warns at -1 too. Good: above -0.04. Chance is not negative for long.
@warning(
    "Compare with policy/sampler_gap. Sample with rollout.temperature: 1.0 and without rollout.top_k, rollout.top_p, "
    "rollout.min_p and rollout.min_new_tokens. If it is chance, raise ppo.rollout_batch_size"
)
def kl_negative(run: History) -> Iterator[Seen]:
    kl, mean = run["objective/kl"], run.mean("objective/kl", 5)
    pays = " As a penalty in the reward it now pays the policy." if run.config.ppo.kl_in == "reward" else ""
    estimate = (
        f"{pays} A KL is never negative. Its estimate, logprobs - ref_logprobs of the sampled tokens, can be negative "
        "by chance with few responses. It also is if the tokens were not sampled from the policy of logprobs, because "
        "a filter or a temperature was used for sampling only."
    )
    if kl < -1:
        yield -kl, f"objective/kl is {kl:.3g} nats per response (limit -1).{estimate}"
    if mean < -0.05 and run.most("objective/kl", 5) < 0:
        yield (
            -mean,
            f"objective/kl is below 0 for 5 iterations, on average {mean:.3g} nats per response (limit -0.05)."
            f"{estimate}",
        )


# Good: up to 0.3 nats per token. An answer of one token may cost several nats.
@warning(
    "Read the last rows of samples.jsonl. Start over with a lower {steps}; {stay}. If the KL is in the loss, set "
    "ppo.kl_estimator: k2_sequence, or lower ppo.kl_coef"
)
def kl_far(run: History) -> Iterator[Seen]:
    in_loss, kl, length = run["policy/ref_kl"], run["objective/kl"], run["response/length"]
    if in_loss > 1:
        yield (
            in_loss,
            f"policy/ref_kl, the KL in the loss, is {in_loss:.3g} nats per token (limit 1). A few tokens "
            "to which the policy gives far less than ref_policy decide the whole step: the estimate k3 of such a "
            "token grows as the ratio of the two probabilities.",
        )
    if kl > 10 and kl > length:
        yield (
            kl,
            f"objective/kl is {kl:.3g} nats per response of {length:.3g} tokens (limits 10 per response and 1 per "
            "token). ref_policy would hardly ever write these responses, so the reward model has seen none like them. "
            "The last steps were too large, or nothing keeps the policy near ref_policy.",
        )


@warning(
    "Lower {steps}, or set ppo.max_ratio, which skips such minibatches. If policy/ref_kl is large too, set "
    "ppo.kl_estimator: k2_sequence"
)
def gradient_far(run: History) -> Iterator[Seen]:
    norm, clipped_at = run.metrics.get("policy/grad_norm", 0.0), run.config.optimizer.max_grad_norm or 1.0
    start = min((row["policy/grad_norm"] for row in run.start[:START] if "policy/grad_norm" in row), default=math.nan)
    if norm > GRADIENT_FAR * start and norm > GRADIENT_FAR * clipped_at:
        yield (
            norm,
            f"policy/grad_norm is {norm:.3g}, and {start:.3g} at the start (limit {GRADIENT_FAR:g} times the larger of "
            f"that and of the {clipped_at:g} at which it is clipped). Few tokens decide the whole step.",
        )


@warning(
    "Loosen this limit, or another one that contradicts it; lower ppo.kl_coef, which may keep the policy where the "
    "limit does not hold; or raise ppo.num_iterations or optimizer.learning_rate if its mean still moves"
)
def limit_missed(run: History) -> Iterator[Seen]:
    seen, most = [], 0.0
    for name, limit in run.config.limits.items():
        mean, lam = run.metrics.get(f"reward/{name}", math.nan), run.metrics.get(f"lambda/{name}", 0.0)
        misses = mean <= limit.above if limit.above is not None else limit.below is not None and mean >= limit.below
        if misses and lam >= LAMBDA_FAR:
            seen.append(f"reward/{name} is {mean:.3g}, must be {limit}, and lambda/{name} is {lam:.3g}")
            most = max(most, lam)
    if seen:
        yield (
            most,
            f"{'; '.join(seen)} (at most {LAMBDA_FAR:g}). The score hardly counts beside the limit any more, and it "
            "still does not hold.",
        )


def above(run: History, key: str, limit: float, far: float, form: str, why: str) -> Iterator[Seen]:
    """A metric that is above its limit for PERSIST iterations, or above `far` in this one."""
    persists = run.least(key) > limit
    if persists or run[key] > far:
        since = f"for {PERSIST} iterations" if persists else "in this iteration, by far"
        yield run[key], f"{key} is {form.format(run[key])}, above {form.format(limit)} {since}. {why}"


# Good: 0.01 nats per token, single iterations up to 0.07; bad: 0.2 to 0.8.
@warning(
    "Lower {steps} (the learning rate for example to a third), lengthen optimizer.warmup_steps, or raise "
    "ppo.minibatch_size. To end such an update early, {end_early}"
)
def approx_kl(run: History) -> Iterator[Seen]:
    why = (
        "Within one iteration the policy moves so far from the one that sampled the responses that they no longer show "
        "what is good for it."
    )
    yield from above(run, "policy/approx_kl", 0.1, 1.0, "{:.3g} nats per token", why)


# Good: 0.05, single iterations up to 0.09. A far too high learning rate gives 0.1 to 0.3 and shows in approx_kl
# first. At this limit a third of the batch is lost.
@warning("Lower {steps}, or raise ppo.minibatch_size. A wider ppo.clip_range would only hide the problem")
def clip_fraction(run: History) -> Iterator[Seen]:
    why = "The ratio of these tokens is outside ppo.clip_range, so they have no gradient."
    yield from above(run, "policy/clip_fraction", 0.3, 0.8, "{:.0%}", why)


# Good: 0.005; bad: 1, soon after this limit is passed.
@warning(
    "Start over, because empty responses give nothing to learn from. If policy/approx_kl was high, lower "
    "optimizer.learning_rate. If empty responses score well, set rollout.min_new_tokens or add a reward against "
    "them: a reward model that never saw an empty response cannot judge one"
)
def empty(run: History) -> Iterator[Seen]:
    why = (
        "These responses have no text. Either an empty response scores better than text, or too large a step broke the "
        "policy."
    )
    yield from above(run, "response/empty_fraction", 0.25, 0.9, "{:.0%}", why)


# Good: 5 iterations, the first ones: the value head starts at 0, which explains nothing.
@warning(
    "Raise value_model.warmup_iterations. Raise value_model.learning_rate if value/error falls slowly, lower it if "
    "value/error jumps. If scores are far from 1 in size, widen ppo.value_clip_range or set ppo.score_normalization"
)
def value_blind(run: History) -> Iterator[Seen]:
    if run.most("value/explained_variance", 10) < 0 and run.iteration >= 15 and run.config.ppo.has_value_model:
        explained = run["value/explained_variance"]
        yield (
            -explained,
            f"value/explained_variance is {explained:.3g} and was below 0 for 10 iterations. "
            "The value model predicts the returns worse than their mean would, so the advantages are noisier than "
            "without it. It learns too slowly or in too large steps, or the returns hardly vary.",
        )


# ---------------------------------------------------------------------------------------------------- against the start
DISTINCT_2 = 0.4
"""Share of distinct_2 at the start. Good: 0.8 to 1.05; bad: 0.07 (length). It falls with length alone: by a quarter if
the text is twice as long."""
DUPLICATES = 0.5
"""Share of responses that were given to another prompt too, PERSIST times in a row. Good: 0.02; bad: 0.6 to 1."""
DUPLICATES_RISE = 0.25
"""The share must also be this much above the start: short answers (yes, no, a number) repeat by nature ..."""
ALL_DUPLICATES = 0.95
"""... unless it is this high."""
DUPLICATES_FAR = 0.98
"""Once, if it was below DUPLICATES at the start."""
SAME_WORD = 0.7
"""Share of responses that contain one word, PERSIST times in a row. Bad: 0.83 ("great" in film reviews) ..."""
SAME_WORD_RISE = 0.4
"""... if the share is this much above the start, because every English text contains "the" ..."""
SAME_WORD_DISTINCT_2 = 0.65
"""... and distinct_2 is below this share of the start's: a word that belongs to the task leaves the rest varied. Good:
0.8 to 1.05; bad: 0.5."""
NEVER_ENDS = 0.05
"""Share of responses that end by themselves. With fewer there is hardly an example of an end to learn from."""


# Good: 0.4 to 1.1 of the start; bad: 0.12 (kl_coef 0), below 0.01 (brevity, learning rates).
@warning(
    "Look in samples.jsonl for a phrase that is in every response; {stay}, raise ppo.entropy_coef, or lower "
    "optimizer.learning_rate or ppo.ppo_epochs"
)
def entropy_collapse(run: History) -> Iterator[Seen]:
    start = run.at_start("policy/entropy")
    now, mean = run["policy/entropy"], run.mean("policy/entropy")
    for entropy, limit, when in ((now, 0.02, "in this iteration"), (mean, 0.2, f"over {PERSIST} iterations")):
        if entropy < limit * start:
            yield (
                start / max(entropy, TINY),
                f"policy/entropy is {entropy:.3g} nats per token {when}, {entropy / start:.0%} of the {start:.3g} at "
                f"the start (limit {limit:.0%}). The responses hardly vary, so there is little left to compare and to "
                "learn from.",
            )


@warning(
    "Read samples.jsonl, and score such a response under other prompts; {stay}, raise ppo.entropy_coef, lower "
    "optimizer.learning_rate, or train the reward model on pairs that reject such responses"
)
def alike(run: History) -> Iterator[Seen]:
    seen, size = [], 0.0
    before, now = run.at_start("response/duplicate_fraction"), run["response/duplicate_fraction"]
    limit = min(max(DUPLICATES, before + DUPLICATES_RISE), ALL_DUPLICATES)
    persists = not math.isnan(before) and run.least("response/duplicate_fraction") >= limit
    if persists or (before < DUPLICATES and now >= DUPLICATES_FAR):
        seen.append(
            f"response/duplicate_fraction: {now:.0%} of the responses were given to another prompt too, word for word "
            f"({before:.0%} at the start, limit {limit:.0%} "
            f"{f'for {PERSIST} iterations' if persists else 'and far above it in this one'})"
        )
        size = now
    distinct, start = run.mean("response/distinct_2"), run.at_start("response/distinct_2")
    if distinct < DISTINCT_2 * start:
        seen.append(
            f"response/distinct_2 is {distinct:.3g}, {distinct / start:.0%} of the {start:.3g} at the start (limit "
            f"{DISTINCT_2:.0%} for {PERSIST} iterations)"
        )
        size = max(size, start / max(distinct, TINY))
    if seen:
        yield (
            size,
            f"{'; '.join(seen)}. The responses repeat each other or themselves. Either the policy found a text that "
            "scores well for every prompt, or it is broken.",
        )


@warning("Score a response with and without this word; {stay}, or train the reward model on pairs that both contain it")
def same_word(run: History) -> Iterator[Seen]:
    distinct, start = run.mean("response/distinct_2"), run.at_start("response/distinct_2")
    if not distinct < SAME_WORD_DISTINCT_2 * start or not run.first_words:
        return
    rises_of = {}
    for word in run.recent_words[-1]:
        shares = [words.get(word, 0.0) for words in run.recent_words]
        before = fmean(words.get(word, 0.0) for words in run.first_words)
        if len(shares) == PERSIST and min(shares) >= SAME_WORD and shares[-1] - before >= SAME_WORD_RISE:
            rises_of[word] = shares[-1] - before
    if rises_of:
        word = max(rises_of, key=rises_of.__getitem__)
        now = run.recent_words[-1][word]
        yield (
            now,
            f"{now:.0%} of the responses contain the word {word!r}, and {now - rises_of[word]:.0%} did at the start "
            f"(limit {SAME_WORD:.0%} for {PERSIST} iterations). response/distinct_2 is {distinct:.3g}, "
            f"{distinct / start:.0%} of the {start:.3g} at the start (limit {SAME_WORD_DISTINCT_2:.0%}). The policy "
            "may have found a word that the reward likes in any response.",
        )


# The training prompts may be unlike the held-out ones, so the start counts too. Good: up to 0.7; bad: 1.4 (kl_coef
# 0 with a reward model of 600 pairs, a quarter of them flipped). On support-hard runs whose gold held came to 1.3
# to 1.5 too: it says that the scores are extrapolated, not that they are wrong. No multiple of the start from 1 to
# 8 tells the two apart (docs/overoptimization.md).
@warning(
    "Compare samples.jsonl of then and now: the score may be wrong on such replies; {judge}; {stay}, or train the "
    "reward model on labelled samples of this policy"
)
def unfamiliar(run: History) -> Iterator[Seen]:
    now, start = run["response/unfamiliarity"], run.at_start("response/unfamiliarity")
    limit = max(1, 2 * start)
    if run.least("response/unfamiliarity") > limit:
        yield (
            now,
            f"response/unfamiliarity is {now:.3g} and was {start:.2g} at the start (limit {limit:.2g} for {PERSIST} "
            "iterations): as the reward model sees them, the replies together are as far from the SFT model's as only "
            "a single reply is by chance. The reward model was trained on replies like the SFT model's, so its scores "
            "may be wrong here.",
        )


@warning(
    "Look at the SFT stage's samples.jsonl; raise rollout.max_new_tokens, name the token in rollout.stop_tokens, or "
    "train SFT on complete responses"
)
def never_ends(run: History) -> Iterator[Seen]:
    ended, start = run["response/eos_fraction"], run.at_start("response/eos_fraction")
    if start < NEVER_ENDS and run.most("response/eos_fraction") < NEVER_ENDS:
        yield (
            1 - ended,
            f"response/eos_fraction is {ended:.0%} and was {start:.0%} at the start (limit {NEVER_ENDS:.0%}). Almost "
            f"no response ends within {run.config.rollout.max_new_tokens} tokens. Either good responses are longer, or "
            "the SFT model did not learn to end, or it ends with another token than EOS.",
        )


@warning(
    "Look at response/score_length_correlation; raise ppo.missing_eos_penalty above what length earns, set "
    "ppo.length_penalty, {stay}; raise rollout.max_new_tokens only if good responses need it"
)
def truncated(run: History) -> Iterator[Seen]:
    ended, start = run["response/eos_fraction"], run.at_start("response/eos_fraction")
    limit = max(NEVER_ENDS, 0.5 * start) if start >= 0.2 else NEVER_ENDS
    if start >= 0.2 and ended == 0:
        since = "in this iteration, by far"
    elif start >= NEVER_ENDS and run.most("response/eos_fraction") < limit:
        since = f"for {PERSIST} iterations"
    else:
        return
    yield (
        1 - ended,
        f"response/eos_fraction is {ended:.0%}, below {limit:.0%} {since} ({start:.0%} at the start). The responses "
        f"are cut at {run.config.rollout.max_new_tokens} tokens. The policy unlearns to end, usually because longer "
        "text scores higher.",
    )


# Good: 0.19 to 0.6 (0.19 is the shop-support task, whose gold still rises then); bad: 0.05 (length). It is no sign
# of over-optimisation: of 18 runs on support-hard whose gold fell none was below 0.19 before.
@warning(
    "Stop here (lower ppo.num_iterations), or use harder prompts or a reward model trained on samples of this "
    "policy. If it was so from the start, the reward is the same for every response"
)
def score_saturated(run: History) -> Iterator[Seen]:
    score, spread = run.mean("objective/score"), run.mean("objective/score_std")
    start = run.at_start("objective/score_std")
    if math.isnan(score):
        return
    if spread == 0:
        size, text = LARGEST, f"All responses of a batch have the same score, {score:.3g} on average"
    elif spread < 0.15 * start and score >= run.near_best:
        size = start / spread
        text = (
            f"objective/score_std is {spread:.3g}, {spread / start:.0%} of the {start:.3g} at the start (limit 15%), "
            f"and the score of {score:.3g} is near its best"
        )
    else:
        return
    yield (
        size,
        f"{text}, over {PERSIST} iterations. The reward no longer distinguishes the responses, and whitening amplifies "
        "its noise to the size that its signal had.",
    )


# -------------------------------------------------------------------------------- over the run, and between evaluations
LENGTH_CORRELATION = 0.5
"""Mean of the window. Good: up to 0.37; bad: 0.6 (a third of the score is length) to 1 (all of it)."""
MOVED = 0.5
"""Nats per response. A policy that moved less cannot have lost anything."""
FALL = 0.05
"""Standard deviations of the score by which the objective must have fallen to be worth a warning."""
POSSIBLE_GAIN = 0.2
"""Share of the gain in score that is possible at the KL. Among policies at a KL of K, with normal scores of standard
deviation s, the best one gains s * sqrt(2 * K). Good: 0.4 to 0.65; bad: 0 (a reward of noise)."""
KL_RUNAWAY = 5.0
"""Nats per response; below this the policy has hardly moved. Good: 3 to 8; 20 for stories of 140 tokens."""
KL_GROWTH = 1.5
"""KL now, divided by the KL of the iteration that first came near the best score. With kl_coef 0 it is passed about
when the gold score turns; no good run passed it. On support-hard 1.1 warns of more runs in time (15 of 20, not 2), and
of 3 of 4 runs whose gold holds."""
GOLD_STANDARD_ERRORS = 3.0
"""Standard errors by which gold must have fallen since its best. The best of many evaluations looks better than it was:
over 20 evaluations of a plateau, 2 standard errors give a false alarm in 6 of 10 runs, 3 in 1 of 10 (simulated, 100
prompts)."""
MIN_PROMPTS = 10
"""With fewer held-out prompts the standard error is too uncertain."""


@warning(
    "Score a response with and without added empty sentences; set ppo.length_penalty, {stay}, raise "
    "ppo.missing_eos_penalty, or train the reward model on pairs of similar length"
)
def length_explains_score(run: History) -> Iterator[Seen]:
    scores, lengths = run.trend("objective/score"), run.trend("response/length")
    within = run.trend("response/score_length_correlation")
    if not scores or not lengths or not within or fmean(within) <= LENGTH_CORRELATION:
        return
    if rises(scores) and rises(lengths):
        score, length = halves(scores), halves(lengths)
        yield (
            fmean(within),
            f"Over {len(scores)} iterations the score rose from {fmean(score[0]):.3g} to {fmean(score[1]):.3g} and the "
            f"length from {fmean(length[0]):.1f} to {fmean(length[1]):.1f} tokens. The two correlate by "
            f"{fmean(within):.2f} within a batch (limit {LENGTH_CORRELATION:g}) and by "
            f"{correlation(scores, lengths):.2f} between iterations. Length alone may explain the score.",
        )


@warning(
    "Check that the reward tells good responses from bad ones: the RM stage prints its held-out accuracy, and "
    "samples.jsonl has scored responses. Lower optimizer.learning_rate, {stay}, or raise ppo.rollout_batch_size"
)
def objective_falls(run: History) -> Iterator[Seen]:
    kls, scores, gross = (run.before_and_now(key) for key in ("objective/kl", "objective/score", BEFORE_KL))
    spread, kl_coef = run.at_start("objective/score_std"), run.recent[-1].get("objective/kl_coef", 0.0)
    ppo = run.config.ppo
    is_scaled = ppo.whiten_rewards or ppo.score_normalization == "running"  # in another unit in each iteration
    if is_scaled or ppo.advantage_estimator == "reinforce_pp_baseline" or not (kls and scores and gross):
        return
    # Both with the coefficient of now, which an adaptive controller may have moved.
    first, now = ([r - kl_coef * kl for r, kl in zip(*pair, strict=True)] for pair in zip(gross, kls, strict=True))
    fall, gain = fmean(first) - fmean(now), fmean(scores[1]) - fmean(scores[0])
    moved = fmean(kls[1]) - fmean(kls[0])
    if moved < MOVED or not fall > FALL * spread:
        return
    possible, error = spread * math.sqrt(2 * fmean(kls[1])), standard_error(*scores)
    is_useless = gain + STANDARD_ERRORS * error < POSSIBLE_GAIN * possible
    if is_useless or fall > STANDARD_ERRORS * standard_error(first, now):
        yield (
            fall,
            f"The objective (score less KL and penalties) fell from {fmean(first):.3g} over the first {EARLY} "
            f"iterations to {fmean(now):.3g} over the last {EARLY}. The KL rose by {moved:.3g} nats and the score "
            f"changed by {gain:+.2g} (standard error {error:.2g}), while a gain of about {possible:.2g} is possible at "
            "this KL. So the policy pays for its distance from ref_policy and gets too little for it. Either the score "
            "is noise, or the steps are too large.",
        )


@warning(
    "Compare samples.jsonl of then and now, or {judge}; {stay}, lower ppo.num_iterations or optimizer.learning_rate"
)
def kl_runaway(run: History) -> Iterator[Seen]:
    kl, near = run.mean("objective/kl"), run.near_best
    if not kl > KL_RUNAWAY or math.isnan(near):
        return
    iteration, score, kl_then = next(row for row in run.bests if row[1] >= near)
    if kl <= KL_GROWTH * kl_then:
        return
    missing = "Until gold is measured again" if run.has_judge else "Without a gold score"
    gold = f"{missing} it is unknown on which side this run is."
    if before := [one for one in run.golds[:-1] if one[0] <= iteration] or run.golds[:-1][:1]:
        # The last evaluation before the score came near its best, or the one before the newest.
        (then, best), (newest, now) = before[-1], run.golds[-1]
        if now > best:
            return
        gold = f"Gold was {best:.3g} at iteration {then:.0f} and is {now:.3g} at iteration {newest:.0f}."
    yield (
        kl,
        f"objective/kl is {kl:.3g} nats per response over {PERSIST} iterations, more than {KL_GROWTH:g} times the "
        f"{kl_then:.3g} of iteration {iteration:.0f}. The score was {score:.3g} there already; its best since then is "
        f"{run.bests[-1][1]:.3g}. So the policy keeps moving away from ref_policy and gains little. In Gao et al. 2022 "
        "(arXiv 2210.10760) true quality first rises and then falls as sqrt(KL) grows, while the score keeps rising. "
        f"{gold}",
    )


@rule(
    EVALUATION,
    "Use the policy of about iteration {best} ({best_model}, or lower ppo.num_iterations); {stay}, or train the "
    "reward model on labelled samples of this policy",
)
def overoptimisation(run: History) -> Iterator[Seen]:
    best, now = run.best_gold, run.judged  # the evaluation with the highest mean gold, and the newest
    if best is None or now is None or len(now["golds"]) < MIN_PROMPTS:
        return
    rise, rise_error = paired(now["scores"], best["scores"])
    fall, fall_error = paired(now["golds"], best["golds"])
    if rise > STANDARD_ERRORS * rise_error and fall < -GOLD_STANDARD_ERRORS * fall_error:
        yield (
            -fall,
            f"Gold fell from {fmean(best['golds']):.3g}, its best, at iteration {best['iteration']} to "
            f"{fmean(now['golds']):.3g} at iteration {now['iteration']} ({fall:+.2g}, standard error "
            f"{fall_error:.2g}), while the score rose from {fmean(best['scores']):.3g} to {fmean(now['scores']):.3g} "
            f"({rise:+.2g}, standard error {rise_error:.2g}), on {len(now['golds'])} held-out prompts. The policy "
            "exploits errors of the reward model.",
        )
