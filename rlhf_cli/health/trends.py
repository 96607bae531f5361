"""The rules of a running stage that compare it with its own start or follow it over many steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import correlation, fmean

from rlhf_cli.health.findings import Sign, Signs, rule
from rlhf_cli.health.history import (
    BEFORE_KL,
    EARLY,
    LARGEST,
    PERSIST,
    STANDARD_ERRORS,
    History,
    Judged,
    halves,
    paired,
    rises,
    standard_error,
)

TINY = 1e-9
"""Stands for 0 below a fraction bar."""

# ----------------------------------------------------------------------------------- against the start

ENTROPY, ENTROPY_FAR = 0.2, 0.02
"""Share of the entropy at the start: mean of PERSIST iterations, or once. Good: 0.4 to 1.1; bad: 0.12 (kl_coef 0),
below 0.01 (brevity, learning rates)."""
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
UNFAMILIAR_RISE = 2.0
"""Multiple of response/unfamiliarity at the start that it must exceed, besides 1: the training prompts may be unlike
the held-out ones. Good: up to 0.7; bad: 1.4 (kl_coef 0 with a reward model of 600 pairs, a quarter of them flipped). On
support-hard runs whose gold held came to 1.3 to 1.5 too: it says that the scores are extrapolated, not that they are
wrong. No multiple from 1 to 8 tells the two apart (docs/overoptimization.md)."""
NEVER_ENDS = 0.05
"""Share of responses that end by themselves. With fewer there is hardly an example of an end to learn from."""
FEWER_ENDS = 0.5
"""Share of eos_fraction at the start, if that was at least FEWER_ENDS_FROM."""
FEWER_ENDS_FROM = 0.2
SATURATED = 0.15
"""Share of the score's standard deviation at the start. Good: 0.19 to 0.6 (0.19 is the shop-support task, whose gold
still rises then); bad: 0.05 (length). It is no sign of over-optimisation: of 18 runs on support-hard whose gold fell
none was below 0.19 before."""


@rule(
    "Look in samples.jsonl for a phrase that is in every response; {stay}, raise ppo.entropy_coef, or lower "
    "optimizer.learning_rate or ppo.ppo_epochs"
)
def entropy_collapse(run: History) -> Signs:
    entropy, start = run.mean("policy/entropy"), run.mean_at_start("policy/entropy")
    when = f"over {PERSIST} iterations"
    if run.now("policy/entropy") < ENTROPY_FAR * start:
        entropy, when = run.now("policy/entropy"), "in this iteration"
    if not entropy < ENTROPY * start:
        return
    yield Sign(
        start / max(entropy, TINY),
        f"policy/entropy is {entropy:.3g} nats per token {when}, {entropy / start:.0%} of the {start:.3g} at the start "
        f"(limit {ENTROPY:.0%}). The responses hardly vary, so there is little left to compare and to learn from.",
    )


@rule(
    "Read samples.jsonl, and score such a response under other prompts; {stay}, raise ppo.entropy_coef, lower "
    "optimizer.learning_rate, or train the reward model on pairs that reject such responses"
)
def alike(run: History) -> Signs:
    seen, size = [], 0.0
    last, before = run.last("response/duplicate_fraction", PERSIST), run.mean_at_start("response/duplicate_fraction")
    now, limit = run.now("response/duplicate_fraction"), min(max(DUPLICATES, before + DUPLICATES_RISE), ALL_DUPLICATES)
    persists = not math.isnan(before) and bool(last) and min(last) >= limit
    if persists or (before < DUPLICATES and now >= DUPLICATES_FAR):
        seen.append(
            f"response/duplicate_fraction: {now:.0%} of the responses were given to another prompt too, word for word "
            f"({before:.0%} at the start, limit {limit:.0%} "
            f"{f'for {PERSIST} iterations' if persists else 'and far above it in this one'})"
        )
        size = now
    distinct, start = run.mean("response/distinct_2"), run.mean_at_start("response/distinct_2")
    if distinct < DISTINCT_2 * start:
        seen.append(
            f"response/distinct_2 is {distinct:.3g}, {distinct / start:.0%} of the {start:.3g} at the start (limit "
            f"{DISTINCT_2:.0%} for {PERSIST} iterations)"
        )
        size = max(size, start / max(distinct, TINY))
    if not seen:
        return
    yield Sign(
        size,
        f"{'; '.join(seen)}. The responses repeat each other or themselves. Either the policy found a text that scores "
        "well for every prompt, or it is broken.",
    )


@rule("Score a response with and without this word; {stay}, or train the reward model on pairs that both contain it")
def same_word(run: History) -> Signs:
    distinct, start = run.mean("response/distinct_2"), run.mean_at_start("response/distinct_2")
    if not distinct < SAME_WORD_DISTINCT_2 * start or not run.first_words:
        return
    rises_of = {}
    for word in run.recent_words[-1]:
        shares = [words.get(word, 0.0) for words in run.recent_words]
        before = fmean(words.get(word, 0.0) for words in run.first_words)
        if len(shares) == PERSIST and min(shares) >= SAME_WORD and shares[-1] - before >= SAME_WORD_RISE:
            rises_of[word] = shares[-1] - before
    if not rises_of:
        return
    word = max(rises_of, key=rises_of.__getitem__)
    now = run.recent_words[-1][word]
    yield Sign(
        now,
        f"{now:.0%} of the responses contain the word {word!r}, and {now - rises_of[word]:.0%} did at the start (limit "
        f"{SAME_WORD:.0%} for {PERSIST} iterations). response/distinct_2 is {distinct:.3g}, {distinct / start:.0%} of "
        f"the {start:.3g} at the start (limit {SAME_WORD_DISTINCT_2:.0%}). The policy may have found a word that the "
        "reward likes in any response.",
    )


@rule(
    "Compare samples.jsonl of then and now: the score may be wrong on such replies; {judge}; {stay}, or train the "
    "reward model on labelled samples of this policy"
)
def unfamiliar(run: History) -> Signs:
    last, start = run.last("response/unfamiliarity", PERSIST), run.mean_at_start("response/unfamiliarity")
    limit = max(1.0, UNFAMILIAR_RISE * start)
    if not (last and min(last) > limit):
        return
    yield Sign(
        last[-1],
        f"response/unfamiliarity is {last[-1]:.3g} and was {start:.2g} at the start (limit {limit:.2g} for {PERSIST} "
        "iterations): as the reward model sees them, the replies together are as far from the SFT model's as only a "
        "single reply is by chance. The reward model was trained on replies like the SFT model's, so its scores may be "
        "wrong here.",
    )


@rule(
    "Look at the SFT stage's samples.jsonl; raise rollout.max_new_tokens, name the token in rollout.stop_tokens, or "
    "train SFT on complete responses"
)
def never_ends(run: History) -> Signs:
    last, start = run.last("response/eos_fraction", PERSIST), run.mean_at_start("response/eos_fraction")
    if not (last and start < NEVER_ENDS and max(last) < NEVER_ENDS):
        return
    yield Sign(
        1 - last[-1],
        f"response/eos_fraction is {last[-1]:.0%} and was {start:.0%} at the start (limit {NEVER_ENDS:.0%}). Almost no "
        f"response ends within {run.max_new_tokens} tokens. Either good responses are longer, or the SFT model did not "
        "learn to end, or it ends with another token than EOS.",
    )


@rule(
    "Look at response/score_length_correlation; raise ppo.missing_eos_penalty above what length earns, set "
    "ppo.length_penalty, {stay}; raise rollout.max_new_tokens only if good responses need it"
)
def truncated(run: History) -> Signs:
    last, start = run.last("response/eos_fraction", PERSIST), run.mean_at_start("response/eos_fraction")
    now, since = run.now("response/eos_fraction"), f"for {PERSIST} iterations"
    limit = max(NEVER_ENDS, FEWER_ENDS * start) if start >= FEWER_ENDS_FROM else NEVER_ENDS
    if not start >= NEVER_ENDS or math.isnan(now):
        return
    if start >= FEWER_ENDS_FROM and now == 0:
        since = "in this iteration, by far"
    elif not last or max(last) >= limit:
        return
    yield Sign(
        1 - now,
        f"response/eos_fraction is {now:.0%}, below {limit:.0%} {since} ({start:.0%} at the start). The responses are "
        f"cut at {run.max_new_tokens} tokens. The policy unlearns to end, usually because longer text scores higher.",
    )


@rule(
    "Stop here (lower ppo.num_iterations), or use harder prompts or a reward model trained on samples of this "
    "policy. If it was so from the start, the reward is the same for every response"
)
def score_saturated(run: History) -> Signs:
    spread, start = run.mean("objective/score_std"), run.mean_at_start("objective/score_std")
    score, first = run.mean("objective/score"), run.mean_at_start("objective/score")
    if math.isnan(start + score + first) or not run.bests:
        return
    if spread == 0:
        seen = f"All responses of a batch have the same score, {score:.3g} on average"
    elif spread < SATURATED * start and score >= run.near_best(first):
        seen = (
            f"objective/score_std is {spread:.3g}, {spread / start:.0%} of the {start:.3g} at the start (limit "
            f"{SATURATED:.0%}), and the score of {score:.3g} is near its best"
        )
    else:
        return
    yield Sign(
        LARGEST if spread == 0 else start / spread,
        f"{seen}, over {PERSIST} iterations. The reward no longer distinguishes the responses, and whitening amplifies "
        "its noise to the size that its signal had.",
    )


# --------------------------------------------------------------------------------------- over the run

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


@rule(
    "Score a response with and without added empty sentences; set ppo.length_penalty, {stay}, raise "
    "ppo.missing_eos_penalty, or train the reward model on pairs of similar length"
)
def length_explains_score(run: History) -> Signs:
    scores, lengths = run.trend("objective/score"), run.trend("response/length")
    within = run.trend("response/score_length_correlation")
    if not scores or not lengths or not within or fmean(within) <= LENGTH_CORRELATION:
        return
    if not (rises(scores) and rises(lengths)):
        return
    score, length = halves(scores), halves(lengths)
    yield Sign(
        fmean(within),
        f"Over {len(scores)} iterations the score rose from {fmean(score[0]):.3g} to {fmean(score[1]):.3g} and the "
        f"length from {fmean(length[0]):.1f} to {fmean(length[1]):.1f} tokens. The two correlate by "
        f"{fmean(within):.2f} within a batch (limit {LENGTH_CORRELATION:g}) and by {correlation(scores, lengths):.2f} "
        "between iterations. Length alone may explain the score.",
    )


@rule(
    "Check that the reward tells good responses from bad ones: the RM stage prints its held-out accuracy, and "
    "samples.jsonl has scored responses. Lower optimizer.learning_rate, {stay}, or raise ppo.rollout_batch_size"
)
def objective_falls(run: History) -> Signs:
    kls, scores, gross = (run.before_and_now(key) for key in ("objective/kl", "objective/score", BEFORE_KL))
    spread, kl_coef = run.mean_at_start("objective/score_std"), run.recent[-1].get("objective/kl_coef", 0.0)
    if not (run.rewards_can_be_compared and kls and scores and gross):
        return
    # Both with the coefficient of now, which an adaptive controller may have moved.
    first, now = ([r - kl_coef * kl for r, kl in zip(*pair, strict=True)] for pair in zip(gross, kls, strict=True))
    fall, gain = fmean(first) - fmean(now), fmean(scores[1]) - fmean(scores[0])
    moved = fmean(kls[1]) - fmean(kls[0])
    if moved < MOVED or not fall > FALL * spread:
        return
    possible, error = spread * math.sqrt(2 * fmean(kls[1])), standard_error(*scores)
    is_useless = gain + STANDARD_ERRORS * error < POSSIBLE_GAIN * possible
    if not is_useless and fall <= STANDARD_ERRORS * standard_error(first, now):
        return
    yield Sign(
        fall,
        f"The objective (score less KL and penalties) fell from {fmean(first):.3g} over the first {EARLY} iterations "
        f"to {fmean(now):.3g} over the last {EARLY}. The KL rose by {moved:.3g} nats and the score changed by "
        f"{gain:+.2g} (standard error {error:.2g}), while a gain of about {possible:.2g} is possible at this KL. So "
        "the policy pays for its distance from ref_policy and gets too little for it. Either the score is noise, or "
        "the steps are too large.",
    )


@rule("Compare samples.jsonl of then and now, or {judge}; {stay}, lower ppo.num_iterations or optimizer.learning_rate")
def kl_runaway(run: History) -> Signs:
    kl, first = run.mean("objective/kl"), run.mean_at_start("objective/score")
    if not kl > KL_RUNAWAY or not run.bests or math.isnan(first):
        return
    iteration, score, kl_then = next(row for row in run.bests if row[1] >= run.near_best(first))
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
    yield Sign(
        kl,
        f"objective/kl is {kl:.3g} nats per response over {PERSIST} iterations, more than {KL_GROWTH:g} times the "
        f"{kl_then:.3g} of iteration {iteration:.0f}. The score was {score:.3g} there already; its best since then is "
        f"{run.bests[-1][1]:.3g}. So the policy keeps moving away from ref_policy and gains little. In Gao et al. 2022 "
        "(arXiv 2210.10760) true quality first rises and then falls as sqrt(KL) grows, while the score keeps rising. "
        f"{gold}",
    )


# -------------------------------------------------------------------------------- between evaluations

GOLD_STANDARD_ERRORS = 3.0
"""Standard errors by which gold must have fallen since its best. The best of many evaluations looks better than it was:
over 20 evaluations of a plateau, 2 standard errors give a false alarm in 6 of 10 runs, 3 in 1 of 10 (simulated, 100
prompts)."""
MIN_PROMPTS = 10
"""With fewer held-out prompts the standard error is too uncertain."""


@rule(
    "Use the policy of about iteration {best} ({best_model}, or lower ppo.num_iterations); {stay}, or train the reward "
    "model on labelled samples of this policy"
)
def overoptimisation(evaluations: tuple[Judged, Judged]) -> Signs:
    best, now = evaluations  # the one with the highest mean gold, and the newest
    if len(now.golds) < MIN_PROMPTS:
        return
    rise, rise_error = paired(now.scores, best.scores)
    fall, fall_error = paired(now.golds, best.golds)
    if rise > STANDARD_ERRORS * rise_error and fall < -GOLD_STANDARD_ERRORS * fall_error:
        yield Sign(
            -fall,
            f"Gold fell from {fmean(best.golds):.3g}, its best, at iteration {best.iteration} to "
            f"{fmean(now.golds):.3g} at iteration {now.iteration} ({fall:+.2g}, standard error {fall_error:.2g}), "
            f"while the score rose from {fmean(best.scores):.3g} to {fmean(now.scores):.3g} ({rise:+.2g}, standard "
            f"error {rise_error:.2g}), on {len(now.golds)} held-out prompts. The policy exploits errors of the reward "
            "model.",
        )


# ------------------------------------------------------------------------------------- held-out rows of SFT and RM

MEMORISES = "memorises"
"""The name of the finding."""
HELD_OUT_RISE = 1.05
"""Held-out loss, divided by its lowest so far. Good: up to 1.01."""
LEAST_RISE = 0.01
"""Nats: near a loss of 0 smaller differences mean nothing."""


def memorises(held_out: Sequence[tuple[int, float]], training: Sequence[tuple[int, float]]) -> str | None:
    """The message if the held-out loss is above its lowest while the training loss fell further; else None.

    Both are (step, loss), in order. The training loss is averaged over as many steps as lie between two evaluations.

    >>> held_out, training = [(10, 1.0), (20, 1.2)], [(step, 2.0 - step / 10) for step in range(1, 21)]
    >>> memorises(held_out, training)[:78]
    'The held-out loss is 1.2, 20% above the 1 of step 10, and the training loss fe'
    """
    if len(held_out) < 2:
        return None
    (best_step, best), (step, now) = min(held_out, key=lambda one: one[1]), held_out[-1]
    window = step - held_out[-2][0]
    before = [loss for at, loss in training if best_step - window < at <= best_step]
    last = [loss for at, loss in training if step - window < at <= step]
    rises = now > max(HELD_OUT_RISE * best, best + LEAST_RISE)
    if not (rises and before and last and fmean(last) < fmean(before)):
        return None
    return (
        f"The held-out loss is {now:.3g}, {now / best - 1:.0%} above the {best:.3g} of step {best_step}, and the "
        f"training loss fell from {fmean(before):.3g} to {fmean(last):.3g} since then (means of {window} steps). The "
        "model memorises its training rows."
    )


WARNINGS = (
    entropy_collapse, alike, same_word, unfamiliar, never_ends, truncated, score_saturated,
    length_explains_score, objective_falls, kl_runaway,
)  # fmt: skip
