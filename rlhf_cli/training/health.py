"""Is the run well? Each iteration's metrics, read for the ways in which PPO on language models goes wrong.

A finding has a name, a sentence with its numbers and its rule, and what to try. `stop` is for what can't be
right whatever the data: a ratio that is not 1, or a KL that is not 0, before anything was trained, and numbers
that are no numbers. Everything else is a `warning`: it may be what the user wants.

A limit is relative to the run's own first iterations where there is no natural one, and holds for several
iterations in a row, so that one odd batch says nothing. The limits below were set between runs that were well
(the shop-support task over seeds, lengths of run and precisions; the stories and sentiment tasks) and runs
made ill on purpose (kl_coef 0, learning rates of 10 and 50 times the shipped one, rewards for length, for
brevity, and the same for all). "Well" and "ill" beside a limit are figures of those runs.

No torch here: numbers go in and sentences come out. Every process that calls it with the same metrics gets
the same findings, so all of them stop together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

START = 3
"""The first iterations, whose mean is what "at the start" means; the very first is the model as it came in."""
PERSIST = 3
"""Iterations in a row, or that are averaged, before anything but a stop is said."""
WINDOW = 20
"""Iterations over which a trend is read: its later half against its earlier half."""
MIN_TREND = 10
"""Fewer than these make no trend."""
STANDARD_ERRORS = 2.0
"""A difference of means counts from here; about 2 in 100 pass it by chance in the direction asked for."""
REPEAT = 10
"""Iterations after which a warning that still holds is said again."""
QUIET = 3
"""Iterations for which a warning that comes and goes is not said again."""

RATIO_TOLERANCE = {"float32": 5e-3, "bfloat16": 0.5}
"""Nats; the largest |log ratio| before the first step. Float32 differs by 1e-5 where microbatches are cut
otherwise, and by nothing where they are not; a temperature that is 1 % off gives several 1e-2. In bfloat16 a
logit near 16 is rounded to 1/8 or so, and the largest of many thousand tokens lies in the tail."""
SAMPLER_FACTOR = 2.0
"""Times RATIO_TOLERANCE may a log-probability differ between sampling (one token at a time, with a cache) and
training, which are two computations. Well: 3e-5 in float32, 0.08 in bfloat16, the model being small."""
KL_NEGATIVE = -1.0
"""Nats a response, in one iteration. A mean over responses is noisy, yet well runs stay above -0.05."""
KL_NEGATIVE_LONG = -0.05
"""Nats a response, mean over KL_NEGATIVE_ITERATIONS that are all below 0: a KL can't be, its estimate may."""
KL_NEGATIVE_ITERATIONS = 5
APPROX_KL = 0.1
"""Nats a token within one iteration, ten times the 0.01 at which other PPOs stop an iteration (Spinning Up's
target_kl). Well: below 0.07; ill: 0.2 to 3."""
CLIP_FRACTION = 0.3
"""Share of the tokens whose gradient is cut off. Well: below 0.08. Even a far too high learning rate gives
0.1 to 0.3, so that this only adds to APPROX_KL."""
ENTROPY = 0.2
"""Share of the start's entropy. Well: 0.5 to 1.1; kl_coef 0 goes to 0.17, a reward for brevity to 0.005."""
DISTINCT_2 = 0.4
"""Share of the start's distinct-2. It falls with length too: twice the text gives 0.7 to 0.8 of it. Well:
0.8; a reward for length: 0.1."""
DUPLICATES = 0.5
"""Share of responses that were given to another prompt too, and at least DUPLICATES_RISE above the start,
since short answers (yes, no, a number) are alike by nature. Well: below 0.05."""
DUPLICATES_RISE = 0.25
ALL_DUPLICATES = 0.95
"""From here all responses are the same, whatever the start was."""
EMPTY = 0.25
"""Share of responses without text. Well: below 0.02; ill: 1, within a few iterations of passing this."""
NEVER_ENDS = 0.05
"""Share of responses that end by themselves, below which none learns where to end."""
FEWER_ENDS = 0.5
"""Share of the start's eos_fraction, where the start had at least FEWER_ENDS_FROM."""
FEWER_ENDS_FROM = 0.2
VALUE_ITERATIONS = 10
"""Iterations in a row with explained variance below 0. Well: single ones, within the first five."""
VALUE_WARMUP = 5
"""The first iterations don't count: the value head starts at 0, which explains nothing."""
SATURATED = 0.3
"""Share of the start's standard deviation of the score. Well: 0.35 to 0.6; kl_coef 0: 0.2 to 0.3."""
NEAR_BEST = 0.1
"""Near its best is a score that has lost less than this share of what was gained since the start."""
LENGTH_CORRELATION = 0.5
"""Within batches, mean over the window. Well: up to 0.35 as a mean; a reward for length: 0.9 to 1."""
KL_RUNAWAY = 5.0
"""Nats a response, below which a policy has hardly left."""
KNEE = 0.9
"""Share of the score's whole gain; where it was reached, the gain was nearly had."""
KL_GROWTH = 1.5
"""KL now over the KL at the knee."""
GOLD_STANDARD_ERRORS = 3.0
"""For the fall since the best evaluation, which looks better than it was for having been picked as the best."""
MIN_PROMPTS = 10
"""Fewer held-out prompts give no standard error worth the name."""

WATCHED = (
    "objective/score",
    "objective/score_std",
    "objective/kl",
    "objective/kl_coef",
    "response/length",
    "response/eos_fraction",
    "response/empty_fraction",
    "response/distinct_2",
    "response/duplicate_fraction",
    "response/score_length_correlation",
    "policy/entropy",
    "policy/approx_kl",
    "policy/clip_fraction",
    "value/explained_variance",
)
"""What is remembered of an iteration."""
MUST_BE_FINITE = (
    "loss/policy",
    "loss/value",
    "objective/score",
    "objective/kl",
    "objective/reward",
    "policy/entropy",
    "policy/grad_norm",
)
SHOWN = {
    "score": "objective/score",
    "KL": "objective/kl",
    "length": "response/length",
    "entropy": "policy/entropy",
}
"""The figures of the health line."""
OF_EVALUATIONS = ("overoptimisation",)
"""Findings of check_evaluation; they hold until the next evaluation."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with the run, or may be."""

    name: str
    severity: Literal["stop", "warning"]
    message: str
    """One line: what was found with its numbers, the rule, why it may be."""
    advice: str
    """One line: what to try, with the keys of the config file."""


class Health:
    """Watches a run, one iteration after the other.

    Args:
        kl_in_reward: ppo.kl_in is reward.
        has_value_model: there is a value model; without one its metrics say nothing.
        starts_at_reference: policy and ref_policy start as the same model, so that the first KL is 0.
        max_new_tokens: rollout.max_new_tokens.
        ratio_tolerance: nats; RATIO_TOLERANCE has one for each precision. Also that of the first KL, a response.
    """

    def __init__(
        self,
        *,
        kl_in_reward: bool,
        has_value_model: bool,
        starts_at_reference: bool,
        max_new_tokens: int,
        ratio_tolerance: float = RATIO_TOLERANCE["float32"],
    ):
        self.has_value_model = has_value_model
        self.starts_at_reference = starts_at_reference
        self.max_new_tokens = max_new_tokens
        self.ratio_tolerance = ratio_tolerance
        self.sampler_tolerance = SAMPLER_FACTOR * ratio_tolerance
        self.kl_in_reward = kl_in_reward
        self._start: list[dict[str, float]] = []
        """The rows of the first START iterations."""
        self._recent: list[dict[str, float]] = []
        """The rows of the last WINDOW iterations, this one included."""
        self._bests: list[list[float]] = []
        """Each new best score so far: [iteration, score, KL], the two being means of PERSIST iterations."""
        self._best_gold: dict[str, Any] | None = None
        """The evaluation with the highest mean gold: iteration, scores, golds."""
        self._present: dict[str, int] = {}
        """The warnings that hold now, and since which iteration."""
        self._said: dict[str, int] = {}
        """The iteration in which a warning was last said."""

    # -------------------------------------------------------------------------------------- what is called

    def check(self, iteration: int, metrics: Mapping[str, float]) -> list[Finding]:
        """What is wrong after `iteration` (from 1): the stops, and the warnings that are new or due again.

        A metric that is absent, or nan, is not judged; the few that must be finite stop the run if they are
        not. The first check of a run that began earlier needs `load_state_dict`, or takes it for the start.
        """
        row = {key: _within_floats(metrics[key]) for key in WATCHED if not math.isnan(metrics.get(key, math.nan))}
        if len(self._start) < START:
            self._start.append(row)
        self._recent = [*self._recent, row][-WINDOW:]
        score, kl = self._mean("objective/score"), self._mean("objective/kl")
        if score is not None and kl is not None and (not self._bests or score > self._bests[-1][1]):
            self._bests.append([iteration, score, kl])

        stops = [self._not_finite(metrics), self._ratio_not_one(metrics), self._kl_not_zero(iteration, metrics)]
        warnings = [
            self._sampler_gap(metrics),
            self._skipped(metrics),
            self._kl_negative(),
            self._approx_kl(),
            self._clip_fraction(),
            self._entropy_collapse(),
            self._alike(),
            self._empty(),
            self._cut(),
            self._value_blind(iteration),
            self._score_saturated(),
            self._length_explains_score(),
            self._kl_runaway(),
        ]
        return [stop for stop in stops if stop] + self._new(iteration, [w for w in warnings if w], evaluation=False)

    def check_evaluation(
        self, iteration: int, scores: Sequence[float], golds: Sequence[float] | None = None
    ) -> list[Finding]:
        """What held-out prompts say after `iteration` (0 before training), each with its score and gold.

        Always the same prompts in the same order, since evaluations are compared prompt by prompt. Without
        gold scores over-optimisation can't be seen, and nothing is said.
        """
        if golds is None:
            return []
        if len(scores) != len(golds) or (self._best_gold and len(golds) != len(self._best_gold["golds"])):
            raise ValueError(f"iteration {iteration}: evaluations are compared prompt by prompt, and the number differs")
        finding = self._overoptimisation(iteration, scores, golds)
        if golds and (self._best_gold is None or fmean(golds) > fmean(self._best_gold["golds"])):
            self._best_gold = {"iteration": iteration, "scores": list(scores), "golds": list(golds)}
        return self._new(iteration, [finding] if finding else [], evaluation=True)

    def line(self, findings: Sequence[Finding], metrics: Mapping[str, float]) -> str:
        """One line: `healthy`, or what was found and what still holds, and a few figures."""
        new = list(dict.fromkeys(finding.name for finding in findings))
        old = [f"{name} (since iteration {since})" for name, since in self._present.items() if name not in new]
        figures = ", ".join(f"{word} {metrics[key]:.3g}" for word, key in SHOWN.items() if key in metrics)
        return (", ".join(new + old) or "healthy") + (f": {figures}" if figures else "")

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on as if nothing had been interrupted; plain JSON values."""
        best = self._best_gold
        return {
            "start": [dict(row) for row in self._start],
            "recent": [dict(row) for row in self._recent],
            "bests": [list(row) for row in self._bests],
            "best_gold": best and {**best, "scores": list(best["scores"]), "golds": list(best["golds"])},
            "present": dict(self._present),
            "said": dict(self._said),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self._start = [dict(row) for row in state["start"]]
        self._recent = [dict(row) for row in state["recent"]]
        self._bests = [list(row) for row in state["bests"]]
        best = state["best_gold"]
        self._best_gold = best and {**best, "scores": list(best["scores"]), "golds": list(best["golds"])}
        self._present = dict(state["present"])
        self._said = dict(state["said"])

    # ---------------------------------------------------------------------------------------------- stops

    def _not_finite(self, metrics: Mapping[str, float]) -> Finding | None:
        found = [f"{key} {metrics[key]}" for key in MUST_BE_FINITE if not math.isfinite(metrics.get(key, 0.0))]
        if not found:
            return None
        return Finding(
            "not_finite",
            "stop",
            f"{', '.join(found)}: every number of an iteration must be finite, or the next step ruins the weights. "
            "A reward that is nan, a learning rate that is too high, or too little precision",
            "look for a reward function that returns nan; lower optimizer.learning_rate or lengthen "
            "optimizer.warmup_steps; try precision: float32",
        )

    def _ratio_not_one(self, metrics: Mapping[str, float]) -> Finding | None:
        """The mean ratio stands in where there is no largest error, though it sees less of it.

        The mean of a ratio between two policies is 1 over samples of the lower one, however different they
        are (sum of p * q / p): dropout left on hides from the mean and not from the largest error.
        """
        if "policy/first_ratio_error" in metrics:
            error, key = metrics["policy/first_ratio_error"], "policy/first_ratio_error"
            seen = f"a token's |log ratio| is {error:.3g} in the iteration's first minibatch"
        elif "policy/first_ratio" in metrics:
            error, key = abs(metrics["policy/first_ratio"] - 1), "policy/first_ratio"
            seen = f"the mean ratio is {metrics[key]:.6g} in the iteration's first minibatch"
        else:
            return None
        if error <= self.ratio_tolerance:
            return None
        return Finding(
            "ratio_not_one",
            "stop",
            f"{key}: {seen}, before any step, where the policy is still the one that sampled and the ratio must be "
            f"1 (tolerance {self.ratio_tolerance:g}). Dropout is left on, sampling and training differ in "
            "temperature, filters, position ids or padding, the responses were tokenized again, the ratio is taken "
            "against ref_policy, or the rollout is an older policy's",
            "print both log-probabilities of that batch, token by token: all off by a factor is temperature, all "
            "off at random is dropout or precision, off after a prompt's padding is positions; check "
            "rollout.temperature and precision, and compare policy/sampler_gap",
        )

    def _kl_not_zero(self, iteration: int, metrics: Mapping[str, float]) -> Finding | None:
        kl = metrics.get("objective/kl")
        if iteration != 1 or not self.starts_at_reference or kl is None or abs(kl) <= self.ratio_tolerance:
            return None
        return Finding(
            "kl_not_zero",
            "stop",
            f"objective/kl is {kl:.3g} nats a response in iteration 1, where policy and ref_policy are the same model "
            f"and it must be 0 (tolerance {self.ratio_tolerance:g}). One of them has dropout on, another temperature, "
            "other position ids or another precision, or they were not loaded from the same weights",
            "check that policy.path and its revision are what ref_policy was loaded from, and that both take their "
            "log-probabilities at rollout.temperature with dropout off",
        )

    # ------------------------------------------------------------------------------------ warnings at once

    def _sampler_gap(self, metrics: Mapping[str, float]) -> Finding | None:
        gap = metrics.get("policy/sampler_gap", 0.0)
        if not gap > self.sampler_tolerance:
            return None
        return Finding(
            "sampler_gap",
            "warning",
            f"policy/sampler_gap: a log-probability differs by {gap:.3g} nats between sampling and training (tolerance "
            f"{self.sampler_tolerance:g}). The responses come from a slightly different policy than the one that is "
            "scored: the cache, position ids, temperature or a filter of the sampler, or low precision",
            "try precision: float32; if the gap stays, sampling and training disagree about the model itself, "
            "so compare one response token by token, and keep filters off next to rollout.temperature",
        )

    def _skipped(self, metrics: Mapping[str, float]) -> Finding | None:
        skipped = metrics.get("policy/skipped_steps", 0.0)
        if not skipped > 0:
            return None
        return Finding(
            "skipped",
            "warning",
            f"policy/skipped_steps is {skipped:g}: minibatches whose ratio was out of range were thrown away. One is "
            "an accident; with many the policy moves too far within an iteration",
            "lower optimizer.learning_rate or ppo.ppo_epochs, or enlarge ppo.minibatch_size",
        )

    # -------------------------------------------------------------------------------- warnings that persist

    def _kl_negative(self) -> Finding | None:
        now = self._recent[-1].get("objective/kl", 0.0)
        last = self._last("objective/kl", KL_NEGATIVE_ITERATIONS)
        if now < KL_NEGATIVE:
            seen = f"{now:.3g} nats a response (limit {KL_NEGATIVE:g})"
        elif last and max(last) < 0 and fmean(last) < KL_NEGATIVE_LONG:
            seen = f"below 0 for {len(last)} iterations, {fmean(last):.3g} nats a response (limit {KL_NEGATIVE_LONG:g})"
        else:
            return None
        return Finding(
            "kl_negative",
            "warning",
            f"objective/kl is {seen}: a KL is never negative. Its estimate, the mean of logprobs - ref_logprobs, is "
            "only where the responses were not sampled from the policy that logprobs belong to: top-k, top-p, a "
            "least length or a forbidden EOS in sampling, another temperature; or by chance, with few responses",
            "take every filter off sampling and every log-probability at rollout.temperature, compare "
            "policy/sampler_gap; if both are right, enlarge ppo.rollout_batch_size",
        )

    def _approx_kl(self) -> Finding | None:
        last = self._last("policy/approx_kl", PERSIST)
        if not last or min(last) <= APPROX_KL:
            return None
        return Finding(
            "approx_kl",
            "warning",
            f"policy/approx_kl is {last[-1]:.3g} nats a token, above {APPROX_KL:g} for {PERSIST} iterations: the policy "
            "leaves the one that sampled so far in an iteration that the responses no longer tell what it does, "
            "and PPO's clipped objective is no longer a guide",
            "lower optimizer.learning_rate (to a third, say) or ppo.ppo_epochs, lengthen optimizer.warmup_steps, "
            "enlarge ppo.minibatch_size",
        )

    def _clip_fraction(self) -> Finding | None:
        last = self._last("policy/clip_fraction", PERSIST)
        if not last or min(last) <= CLIP_FRACTION:
            return None
        return Finding(
            "clip_fraction",
            "warning",
            f"policy/clip_fraction is {last[-1]:.0%}, above {CLIP_FRACTION:.0%} for {PERSIST} iterations: so many tokens "
            "are further from the policy that sampled than ppo.clip_range allows that much of the batch teaches nothing",
            "lower optimizer.learning_rate or ppo.ppo_epochs, or enlarge ppo.minibatch_size; a wider ppo.clip_range "
            "hides it only",
        )

    def _entropy_collapse(self) -> Finding | None:
        entropy, start = self._mean("policy/entropy"), self._mean_at_start("policy/entropy")
        if entropy is None or start is None or start <= 0 or entropy >= ENTROPY * start:
            return None
        return Finding(
            "entropy_collapse",
            "warning",
            f"policy/entropy is {entropy:.3g} nats a token over {PERSIST} iterations, {entropy / start:.0%} of the "
            f"start's {start:.3g} (limit {ENTROPY:.0%}): the policy hardly varies what it says, so there is little "
            "left to compare and to learn from",
            f"{self._hold}, raise ppo.entropy_coef, lower optimizer.learning_rate or ppo.ppo_epochs; read samples.jsonl: "
            "one phrase in every response is the reward model's favourite",
        )

    def _alike(self) -> Finding | None:
        seen = []
        duplicates = self._last("response/duplicate_fraction", PERSIST)
        before = self._mean_at_start("response/duplicate_fraction")
        if duplicates and before is not None:
            limit = min(max(DUPLICATES, before + DUPLICATES_RISE), ALL_DUPLICATES)
            if min(duplicates) >= limit:
                seen.append(
                    f"response/duplicate_fraction: {duplicates[-1]:.0%} of the responses were given to another prompt "
                    f"too, word for word ({before:.0%} at the start, limit {limit:.0%})"
                )
        distinct, start = self._mean("response/distinct_2"), self._mean_at_start("response/distinct_2")
        if distinct is not None and start is not None and distinct < DISTINCT_2 * start:
            seen.append(
                f"response/distinct_2 is {distinct:.3g}, {distinct / start:.0%} of the start's {start:.3g} (limit "
                f"{DISTINCT_2:.0%})"
            )
        if not seen:
            return None
        return Finding(
            "alike",
            "warning",
            f"{'; '.join(seen)}: over {PERSIST} iterations the responses repeat one another or themselves, the policy has "
            "found something that scores well whatever was asked",
            f"read samples.jsonl, the reward model likes something that it should not; {self._hold} or "
            "ppo.entropy_coef, lower optimizer.learning_rate, train the reward model on such responses as rejected ones",
        )

    def _empty(self) -> Finding | None:
        last = self._last("response/empty_fraction", PERSIST)
        if not last or min(last) <= EMPTY:
            return None
        return Finding(
            "empty",
            "warning",
            f"response/empty_fraction: {last[-1]:.0%} of the responses hold no text, above {EMPTY:.0%} for {PERSIST} "
            "iterations: ending at once scores better than saying anything, or the policy is broken",
            "score an empty response by hand: a reward model that never saw one may like it, so train it on some or "
            "add a function reward against them; lower optimizer.learning_rate if policy/approx_kl is high; start "
            "again from an earlier policy, as this one no longer samples anything to learn from",
        )

    def _cut(self) -> Finding | None:
        """Either name: `never_ends` where it was so from the start, `truncated` where training made it so."""
        last, start = self._last("response/eos_fraction", PERSIST), self._mean_at_start("response/eos_fraction")
        if not last or start is None:
            return None
        limit = max(NEVER_ENDS, FEWER_ENDS * start) if start >= FEWER_ENDS_FROM else NEVER_ENDS
        if max(last) >= limit:
            return None
        if start < NEVER_ENDS:
            return Finding(
                "never_ends",
                "warning",
                f"response/eos_fraction is {last[-1]:.0%} and has been so from the start: (nearly) no response ends "
                f"within {self.max_new_tokens} tokens. The SFT model did not learn to end, its EOS is another token "
                "than the one sampling stops at, or its texts are longer than that",
                "look at sft's samples.jsonl; raise rollout.max_new_tokens if good answers are longer; otherwise "
                "train SFT on whole answers (data.max_length drops long ones), and keep ppo.missing_eos_penalty above 0",
            )
        return Finding(
            "truncated",
            "warning",
            f"response/eos_fraction is {last[-1]:.0%}, below {limit:.0%} for {PERSIST} iterations ({start:.0%} at the "
            f"start): the responses are cut at {self.max_new_tokens} tokens. The policy learns not to end, mostly "
            "because more text scores more, and the reward model reads half sentences",
            f"raise ppo.missing_eos_penalty above what length earns, {self._hold}, see whether "
            "response/score_length_correlation is high; raise rollout.max_new_tokens only if good answers need it",
        )

    def _value_blind(self, iteration: int) -> Finding | None:
        last = self._last("value/explained_variance", VALUE_ITERATIONS)
        if not self.has_value_model or iteration < VALUE_WARMUP + VALUE_ITERATIONS or not last or max(last) >= 0:
            return None
        return Finding(
            "value_blind",
            "warning",
            f"value/explained_variance was below 0 for {VALUE_ITERATIONS} iterations, now {last[-1]:.3g}: the value model "
            "predicts the returns worse than their mean would, and its advantages are noisier than without it. It "
            "is too slow, too fast, or chases returns that change faster than it learns",
            "raise value_model.warmup_iterations, change value_model.learning_rate (a falling value/error asks for a "
            "higher one, a rising one for a lower), widen ppo.value_clip_range, look at the scale of the scores "
            "(rewards.normalize, ppo.score_clip)",
        )

    def _score_saturated(self) -> Finding | None:
        spread, start = self._mean("objective/score_std"), self._mean_at_start("objective/score_std")
        score, first = self._mean("objective/score"), self._mean_at_start("objective/score")
        if spread is None or start is None or score is None or first is None or not self._bests:
            return None
        best = self._bests[-1][1]
        if spread == 0:
            seen = f"every response scores {score:.3g}"
        elif spread < SATURATED * start and score >= best - NEAR_BEST * (best - first):
            seen = (
                f"objective/score_std is {spread:.3g}, {spread / start:.0%} of the start's {start:.3g} (limit "
                f"{SATURATED:.0%}), with the score at {score:.3g}, near its best"
            )
        else:
            return None
        return Finding(
            "score_saturated",
            "warning",
            f"{seen}, over {PERSIST} iterations: the reward no longer tells the responses apart, and whitened advantages "
            "make as much of its noise as they made of its signal",
            "stop here, lower ppo.num_iterations; harder prompts or a reward model trained on samples of this policy "
            "would tell more; a score that is the same from the start is a broken reward (or ppo.score_clip too low)",
        )

    # --------------------------------------------------------------------------------------------- trends

    def _length_explains_score(self) -> Finding | None:
        scores, lengths = self._trend("objective/score"), self._trend("response/length")
        within = self._trend("response/score_length_correlation")
        if not scores or not lengths or not within or fmean(within) <= LENGTH_CORRELATION:
            return None
        if not (_rises(scores) and _rises(lengths)):
            return None
        score, length = _halves(scores), _halves(lengths)
        return Finding(
            "length_explains_score",
            "warning",
            f"the score rose from {fmean(score[0]):.3g} to {fmean(score[1]):.3g} over {len(scores)} iterations and the "
            f"length from {fmean(length[0]):.1f} to {fmean(length[1]):.1f} tokens; score and length correlate by "
            f"{fmean(within):.2f} within a batch (limit {LENGTH_CORRELATION:g}) and by {_pearson(scores, lengths):.2f} "
            "between iterations: length alone may explain the score",
            "score one answer and the same answer padded with idle sentences; train the reward model on pairs of like "
            f"length or add a function reward against length; {self._hold}, raise ppo.missing_eos_penalty, lower "
            "rollout.max_new_tokens",
        )

    def _kl_runaway(self) -> Finding | None:
        kl, first = self._mean("objective/kl"), self._mean_at_start("objective/score")
        if kl is None or first is None or not self._bests or kl <= KL_RUNAWAY:
            return None
        _, best, _ = self._bests[-1]
        knee, score, kl_then = next(row for row in self._bests if row[1] >= first + KNEE * (best - first))
        if kl <= KL_GROWTH * kl_then:
            return None
        return Finding(
            "kl_runaway",
            "warning",
            f"objective/kl is {kl:.3g} nats a response over {PERSIST} iterations, more than {KL_GROWTH:g} times the "
            f"{kl_then:.3g} of iteration {knee:.0f}, when the score was {score:.3g}; it was {best:.3g} at best since. The "
            "policy goes on leaving ref_policy and the score hardly pays for it. In Gao et al. 2022 (arXiv 2210.10760) "
            "the true quality rises and then falls as sqrt(KL) grows while the score does not show it; whether that "
            "has happened here can't be told without a gold score.",
            f"Read samples.jsonl of then and now, or give evaluation.gold and evaluation.every_iterations; {self._hold}, "
            "lower ppo.num_iterations or optimizer.learning_rate",
        )

    def _overoptimisation(self, iteration: int, scores: Sequence[float], golds: Sequence[float]) -> Finding | None:
        best = self._best_gold
        if best is None or len(golds) < MIN_PROMPTS:
            return None
        rise, rise_error = _paired(scores, best["scores"])
        fall, fall_error = _paired(golds, best["golds"])
        if not (rise > STANDARD_ERRORS * rise_error and fall < -GOLD_STANDARD_ERRORS * fall_error):
            return None
        return Finding(
            "overoptimisation",
            "warning",
            f"on {len(golds)} held-out prompts gold fell from {fmean(best['golds']):.3g}, its best, at iteration "
            f"{best['iteration']} to {fmean(golds):.3g} at {iteration} ({fall:+.2g}, standard error {fall_error:.2g}) "
            f"while the score rose from {fmean(best['scores']):.3g} to {fmean(scores):.3g} ({rise:+.2g}, standard error "
            f"{rise_error:.2g}): the policy exploits what the reward model gets wrong (Gao et al. 2022, arXiv 2210.10760)",
            f"take the policy of about iteration {best['iteration']} (ppo.num_iterations); {self._hold}; train the "
            "reward model on samples of this policy, labelled anew",
        )

    @property
    def _hold(self) -> str:
        """How to hold the policy nearer to ref_policy."""
        if self._recent and self._recent[-1].get("objective/kl_coef") == 0:
            return "set ppo.kl_coef above 0 (at 0 nothing holds the policy near ref_policy)"
        return "raise ppo.kl_coef"

    # ------------------------------------------------------------------------------------------- the rows

    def _last(self, key: str, n: int) -> list[float]:
        """The last n values; none where there are fewer iterations or one of them lacks the key."""
        rows = self._recent[-n:]
        return [row[key] for row in rows] if len(rows) == n and all(key in row for row in rows) else []

    def _mean(self, key: str) -> float | None:
        last = self._last(key, PERSIST)
        return fmean(last) if last else None

    def _mean_at_start(self, key: str) -> float | None:
        values = [row[key] for row in self._start if key in row]
        return fmean(values) if values else None

    def _trend(self, key: str) -> list[float]:
        """The window's values, an even number of them; none where they are too few or one is missing."""
        n = len(self._recent) // 2 * 2
        return self._last(key, n) if n >= MIN_TREND else []

    def _new(self, iteration: int, found: list[Finding], *, evaluation: bool) -> list[Finding]:
        """Those to be said: not there before and not said just now, or said long ago."""
        names = {finding.name for finding in found}
        before = self._present
        # What was found by the other kind of check still holds.
        self._present = {
            name: since
            for name, since in before.items()
            if name in names or (name in OF_EVALUATIONS) is not evaluation
        }
        say = []
        for finding in found:
            self._present.setdefault(finding.name, iteration)
            wait = REPEAT if finding.name in before else QUIET
            if finding.name not in self._said or iteration - self._said[finding.name] >= wait:
                self._said[finding.name] = iteration
                say.append(finding)
        return say


def _within_floats(value: float) -> float:
    """JSON has no infinity: the largest float stands for it."""
    return max(-1e308, min(1e308, float(value)))


def _halves(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    return values[: len(values) // 2], values[len(values) // 2 :]


def _variance_of_mean(values: Sequence[float]) -> float:
    mean = fmean(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)


def _rises(values: Sequence[float]) -> bool:
    """The later half's mean is above the earlier half's by more than STANDARD_ERRORS of the difference."""
    early, late = _halves(values)
    error = math.sqrt(_variance_of_mean(early) + _variance_of_mean(late))
    return fmean(late) - fmean(early) > STANDARD_ERRORS * error


def _paired(now: Sequence[float], before: Sequence[float]) -> tuple[float, float]:
    """The mean difference of pairs and its standard error."""
    differences = [a - b for a, b in zip(now, before, strict=True)]
    return fmean(differences), math.sqrt(_variance_of_mean(differences))


def _pearson(x: Sequence[float], y: Sequence[float]) -> float:
    """The correlation, 0 where one of them is constant; that of algorithms.statistics would need torch."""
    mean_x, mean_y = fmean(x), fmean(y)
    both = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    scale = math.sqrt(sum((a - mean_x) ** 2 for a in x) * sum((b - mean_y) ** 2 for b in y))
    return both / scale if scale else 0.0
