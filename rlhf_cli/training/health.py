"""Is the run well? Each iteration's metrics, read for the ways in which PPO on language models goes wrong.

A finding has a name, a sentence with its numbers and its rule, and what to try. `stop` is for what can't be
right whatever the data: a ratio that is not 1 or a KL that is not 0 before anything was trained, and numbers
that are no numbers. Everything else is a `warning`: it may be what the user wants.

A limit is relative to the run's own first iterations where nature gives none, and it must be passed for
several iterations, so that one odd batch says nothing. The limits stand between runs that went well (the
shop-support task over seeds and 50 to 200 iterations, and in bfloat16; the stories, sentiment and HH tasks)
and runs of the shop-support task made ill on purpose: kl_coef 0, 10 and 50 times its learning rate, 16
ppo_epochs, and rewards for length, for brevity or the same for everything. "Well" and "ill" beside a limit
are the figures of those runs: they say where it comes from, not that every task is like them.

No torch here: numbers go in and sentences come out. Every process that gives the same metrics gets the same
findings, so that all of them stop together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import correlation, fmean
from typing import Any, Literal

START = 3
"""The first iterations, whose mean is what "at the start" means; the very first is the model as it came in."""
PERSIST = 3
"""Iterations in a row, or that are averaged, before most warnings are given."""
WINDOW = 20
"""Iterations over which a trend is read: its later half against its earlier half."""
MIN_TREND = 10
"""Fewer than these make no trend."""
REPEAT = 10
"""Iterations after which a warning that still holds is given again."""
QUIET = 3
"""Iterations for which a warning that comes and goes is not given again."""

RATIO_TOLERANCE = {"float32": 5e-3, "bfloat16": 0.5}
"""Nats; the largest |log ratio| before the first step. Well: 0 on a CPU, however batches were cut; a GPU may
round otherwise for batches of another shape. A temperature that is 1 % off gives 0.1. bfloat16 rounds a logit
near 16 by up to 1/16, and the largest of many thousand tokens lies far out in the tail."""
SAMPLER_FACTOR = 2.0
"""Times the ratio's tolerance may a log-probability differ between sampling (token by token, with a cache) and
training, which are two computations. Well: 3e-5 in float32; 0.1 in bfloat16, with a model of few layers."""
KL_NEGATIVE = -1.0
"""Nats a response, in one iteration (where TRL warns). Well: above -0.04."""
KL_NEGATIVE_LONG = -0.05
"""Nats a response, mean of KL_NEGATIVE_ITERATIONS that are all below 0: chance is not negative for long."""
KL_NEGATIVE_ITERATIONS = 5
APPROX_KL = 0.1
"""Nats a token, PERSIST times in a row. Well: 0.01, single iterations up to 0.07; ill: 0.2 to 0.8."""
CLIP_FRACTION = 0.3
"""PERSIST times in a row. Well: 0.05, single iterations up to 0.09. A far too high learning rate gives 0.1 to
0.3 and shows in approx_kl first: this limit is where a third of the batch is lost, not where ill runs begin."""
ENTROPY = 0.2
"""Share of the start's. Well: 0.4 to 1.1; ill: 0.12 (kl_coef 0), below 0.01 (brevity, learning rates)."""
DISTINCT_2 = 0.4
"""Share of the start's. Well: 0.8 to 1.05; ill: 0.07 (length). It falls with length alone, by a quarter where
the text doubles."""
DUPLICATES = 0.5
"""Share of responses given to another prompt too, PERSIST times in a row. Well: 0.02; ill: 0.6 to 1."""
DUPLICATES_RISE = 0.25
"""And that much above the start, since short answers (yes, no, a number) are alike by nature ..."""
ALL_DUPLICATES = 0.95
"""... unless this many are."""
EMPTY = 0.25
"""Share of responses without text, PERSIST times in a row. Well: 0.005; ill: 1, soon after it passes this."""
NEVER_ENDS = 0.05
"""Share of responses that end by themselves; with fewer there is hardly one to learn an end from."""
FEWER_ENDS = 0.5
"""Share of the start's eos_fraction, where that was at least FEWER_ENDS_FROM."""
FEWER_ENDS_FROM = 0.2
VALUE_ITERATIONS = 10
"""Iterations in a row with explained variance below 0. Well: 5 in all, and these the first."""
VALUE_WARMUP = 5
"""First iterations that don't count: the value head starts at 0, which explains nothing."""
SATURATED = 0.25
"""Share of the start's standard deviation of the score. Well: 0.28 to 0.6; ill: 0.2 (kl_coef 0), 0.05 (length)."""
NEAR_BEST = 0.1
"""Near the best is a score that lacks at most this share of what was gained since the start."""
LENGTH_CORRELATION = 0.5
"""Mean of the window. Well: up to 0.37; ill: 0.6 (a third of the score is length) to 1 (all of it)."""
STANDARD_ERRORS = 2.0
"""By which means must differ to have risen."""
KL_RUNAWAY = 5.0
"""Nats a response; with less the policy has hardly left. Well: 3 to 8, stories of 140 tokens 20."""
KL_GROWTH = 1.5
"""KL now over the KL of the iteration that first came near the best score. With kl_coef 0 it is passed for good
about when the gold score turns; no run that went well passed it."""
GOLD_STANDARD_ERRORS = 3.0
"""By which gold must have fallen since its best. The best of many evaluations looks better than it was: over 20
of a plateau, 2 standard errors give a false alarm in 6 runs of 10, 3 in 1 of 10 (simulated, 100 prompts)."""
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
    """What was found with its numbers, the rule, why it may be; a sentence or two in one line."""
    advice: str
    """What to try, with the keys of the config file; one line."""


class Health:
    """Watches a run, one iteration after the other.

    Args:
        kl_in_reward: ppo.kl_in is reward.
        has_value_model: there is a value model; without one its metrics say nothing.
        starts_at_reference: policy and ref_policy start as the same model, so that the first KL is 0.
        max_new_tokens: rollout.max_new_tokens.
        ratio_tolerance: nats, RATIO_TOLERANCE has one for each precision; the first KL may be that far from 0
            too, and the sampler's log-probabilities SAMPLER_FACTOR times as far from training's.

    >>> health = Health(kl_in_reward=True, has_value_model=True, starts_at_reference=True, max_new_tokens=64)
    >>> metrics = {"objective/score": 0.5, "objective/kl": 0.25, "policy/first_ratio_error": 0.0}
    >>> findings = health.check(1, metrics)
    >>> [(finding.name, finding.severity) for finding in findings]
    [('kl_not_zero', 'stop')]
    >>> health.line(findings, metrics)
    'kl_not_zero: score 0.5, KL 0.25'
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
            raise ValueError(
                f"iteration {iteration}: evaluations are compared prompt by prompt, and the number differs"
            )
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
        state = {
            "start": self._start,
            "recent": self._recent,
            "bests": self._bests,
            "best_gold": self._best_gold,
            "present": self._present,
            "said": self._said,
        }
        return deepcopy(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        state = deepcopy(dict(state))
        self._start, self._recent, self._bests = state["start"], state["recent"], state["bests"]
        self._best_gold, self._present, self._said = state["best_gold"], state["present"], state["said"]

    # ---------------------------------------------------------------------------------------------- stops

    def _not_finite(self, metrics: Mapping[str, float]) -> Finding | None:
        found = [f"{key} is {metrics[key]}" for key in MUST_BE_FINITE if not math.isfinite(metrics.get(key, 0.0))]
        # Steps that were left out have been said, and so many of them in a row as stop the run have stopped it.
        if not found or metrics.get("policy/bad_steps", 0.0) > 0:
            return None
        return Finding(
            "not_finite",
            "stop",
            f"{', '.join(found)}: these must be finite, or the next step ruins the weights. A reward function gave "
            "nan, the learning rate is too high or the precision too low.",
            "Look for a reward that can divide by zero, lower optimizer.learning_rate, lengthen "
            "optimizer.warmup_steps, try precision: float32",
        )

    def _ratio_not_one(self, metrics: Mapping[str, float]) -> Finding | None:
        """The mean ratio stands in where there is no largest error, though it sees less.

        Over samples of one policy the mean of another's ratio to it is 1, however far apart they are (the sum
        of q * p / q): dropout that was left on hides from the mean, and not from the largest error.
        """
        if "policy/first_ratio_error" in metrics:
            error = metrics["policy/first_ratio_error"]
            seen = f"policy/first_ratio_error: the log ratio of a token is off by {error:.3g}"
        elif "policy/first_ratio" in metrics:
            error = abs(metrics["policy/first_ratio"] - 1)
            seen = f"policy/first_ratio: the mean ratio is {metrics['policy/first_ratio']:.6g}"
        else:
            return None
        if error <= self.ratio_tolerance:
            return None
        return Finding(
            "ratio_not_one",
            "stop",
            f"{seen} in the iteration's first minibatch. No step was taken since these log-probabilities were "
            f"computed, so every ratio must be 1 (tolerance {self.ratio_tolerance:g}). Dropout is left on, the two "
            "passes differ in temperature, filters, position ids or padding, the responses were tokenized again, or "
            "the ratio is taken to ref_policy or to an older policy.",
            "Print logprobs and new_logprobs of that minibatch side by side: off by a factor points to "
            "rollout.temperature, off at random to dropout or precision, off in some rows only to padding or "
            "positions",
        )

    def _kl_not_zero(self, iteration: int, metrics: Mapping[str, float]) -> Finding | None:
        kl = metrics.get("objective/kl")
        if iteration != 1 or not self.starts_at_reference or kl is None or abs(kl) <= self.ratio_tolerance:
            return None
        return Finding(
            "kl_not_zero",
            "stop",
            f"objective/kl is {kl:.3g} nats a response in iteration 1, where policy and ref_policy are one and the "
            f"same model and it must be 0 (tolerance {self.ratio_tolerance:g}). One of the two has dropout on, or "
            "another temperature, filter, precision or set of position ids, or was loaded from other weights.",
            "Check that both come from policy.path and policy.revision, are in eval mode and take their "
            "log-probabilities at rollout.temperature; where they are meant to differ, give ref_policy.path",
        )

    # ------------------------------------------------------------------------------------ warnings at once

    def _sampler_gap(self, metrics: Mapping[str, float]) -> Finding | None:
        gap = metrics.get("policy/sampler_gap", 0.0)
        if not gap > self.sampler_tolerance:
            return None
        return Finding(
            "sampler_gap",
            "warning",
            f"policy/sampler_gap: a token's log-probability differs by {gap:.3g} nats between sampling and training "
            f"(tolerance {self.sampler_tolerance:g}). The responses then come from another policy than the one that "
            "is trained: the cache, position ids, temperature or a filter differ, or the precision is low.",
            "Try precision: float32; if the gap stays, compare one response token by token at rollout.temperature: "
            "1.0 and without rollout.top_k, rollout.top_p and rollout.min_p",
        )

    def _skipped(self, metrics: Mapping[str, float]) -> Finding | None:
        skipped = metrics.get("policy/skipped_steps", 0.0)
        if not skipped > 0:
            return None
        return Finding(
            "skipped",
            "warning",
            f"policy/skipped_steps: {skipped:g} of this iteration's minibatches had a mean ratio above ppo.max_ratio "
            "and were not learnt from. Once is an accident; again and again, the policy moves too far in an "
            "iteration.",
            "Lower optimizer.learning_rate or ppo.ppo_epochs, enlarge ppo.minibatch_size, set ppo.max_approx_kl",
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
        pays = ", and as a penalty in the reward it now pays the policy" if self.kl_in_reward else ""
        return Finding(
            "kl_negative",
            "warning",
            f"objective/kl is {seen}{pays}. A KL is never negative; its estimate, logprobs - ref_logprobs of the "
            "sampled tokens, is so by chance with few responses, or where the tokens were not drawn from the policy "
            "that logprobs belong to: a filter or a temperature that sampling had and logprobs have not.",
            "Compare policy/sampler_gap; sample without rollout.top_k, rollout.top_p, rollout.min_p and "
            "rollout.min_new_tokens at rollout.temperature: 1.0; if it is chance, enlarge ppo.rollout_batch_size",
        )

    def _approx_kl(self) -> Finding | None:
        last = self._last("policy/approx_kl", PERSIST)
        if not last or min(last) <= APPROX_KL:
            return None
        return Finding(
            "approx_kl",
            "warning",
            f"policy/approx_kl is {last[-1]:.3g} nats a token and was above {APPROX_KL:g} for {PERSIST} iterations. "
            "Within one iteration the policy goes so far from the one that sampled that its responses no longer tell "
            "what is good for it.",
            "Lower optimizer.learning_rate (to a third, say) or ppo.ppo_epochs, lengthen optimizer.warmup_steps, "
            "enlarge ppo.minibatch_size; ppo.max_approx_kl ends an update in time",
        )

    def _clip_fraction(self) -> Finding | None:
        last = self._last("policy/clip_fraction", PERSIST)
        if not last or min(last) <= CLIP_FRACTION:
            return None
        return Finding(
            "clip_fraction",
            "warning",
            f"policy/clip_fraction is {last[-1]:.0%} and was above {CLIP_FRACTION:.0%} for {PERSIST} iterations. "
            "These tokens are further from the policy that sampled than ppo.clip_range allows and teach nothing any "
            "more.",
            "Lower optimizer.learning_rate or ppo.ppo_epochs, enlarge ppo.minibatch_size; a wider ppo.clip_range "
            "would only hide it",
        )

    def _entropy_collapse(self) -> Finding | None:
        entropy, start = self._mean("policy/entropy"), self._mean_at_start("policy/entropy")
        if entropy is None or start is None or entropy >= ENTROPY * start:
            return None
        return Finding(
            "entropy_collapse",
            "warning",
            f"policy/entropy is {entropy:.3g} nats a token over {PERSIST} iterations, {entropy / start:.0%} of the "
            f"{start:.3g} at the start (limit {ENTROPY:.0%}). The policy hardly varies what it says, so there is "
            "little left to compare and to learn from.",
            f"Read samples.jsonl for a phrase that is in every response; {self._hold}, raise ppo.entropy_coef, lower "
            "optimizer.learning_rate or ppo.ppo_epochs",
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
                f"response/distinct_2 is {distinct:.3g}, {distinct / start:.0%} of the {start:.3g} at the start "
                f"(limit {DISTINCT_2:.0%})"
            )
        if not seen:
            return None
        return Finding(
            "alike",
            "warning",
            f"{'; '.join(seen)}, for {PERSIST} iterations. The responses repeat one another or themselves: the policy "
            "has found something that scores well whatever was asked, or it is broken.",
            f"Read samples.jsonl and score such a response under other prompts; {self._hold}, raise ppo.entropy_coef, "
            "lower optimizer.learning_rate, train the reward model on pairs that reject such responses",
        )

    def _empty(self) -> Finding | None:
        last = self._last("response/empty_fraction", PERSIST)
        if not last or min(last) <= EMPTY:
            return None
        return Finding(
            "empty",
            "warning",
            f"response/empty_fraction: {last[-1]:.0%} of the responses hold no text, above {EMPTY:.0%} for {PERSIST} "
            "iterations. Ending at once scores better than saying something, or too large a step broke the policy.",
            "Begin again, as empty responses leave nothing to learn from: with a lower optimizer.learning_rate if "
            "policy/approx_kl was high; with rollout.min_new_tokens or a reward against empty responses if they "
            "score well, which a reward model that never saw one can't know",
        )

    def _cut(self) -> Finding | None:
        """`never_ends` where it was so from the start, `truncated` where training made it so."""
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
                f"response/eos_fraction is {last[-1]:.0%} and was {start:.0%} at the start (limit {NEVER_ENDS:.0%}): "
                f"hardly a response ends within {self.max_new_tokens} tokens. Good responses are longer than that, "
                "the SFT model did not learn to end, or it ends with another token than EOS.",
                "Look at SFT's samples.jsonl; raise rollout.max_new_tokens, name the token in rollout.stop_tokens, "
                "or train SFT on whole responses",
            )
        return Finding(
            "truncated",
            "warning",
            f"response/eos_fraction is {last[-1]:.0%} and was below {limit:.0%} for {PERSIST} iterations ({start:.0%} "
            f"at the start): the responses are cut at {self.max_new_tokens} tokens. The policy unlearns to end, "
            "mostly because more text scores more.",
            "See response/score_length_correlation; raise ppo.missing_eos_penalty above what length earns, set "
            f"ppo.length_penalty, {self._hold}; raise rollout.max_new_tokens only if good responses need it",
        )

    def _value_blind(self, iteration: int) -> Finding | None:
        last = self._last("value/explained_variance", VALUE_ITERATIONS)
        if not self.has_value_model or iteration < VALUE_WARMUP + VALUE_ITERATIONS or not last or max(last) >= 0:
            return None
        return Finding(
            "value_blind",
            "warning",
            f"value/explained_variance is {last[-1]:.3g} and was below 0 for {VALUE_ITERATIONS} iterations. The value "
            "model predicts the returns worse than their mean would, so the advantages are noisier than without it: "
            "it learns too slowly or in too large steps, or the returns hardly vary any more.",
            "Raise value_model.warmup_iterations; raise value_model.learning_rate if value/error falls slowly, lower "
            "it if value/error jumps; widen ppo.value_clip_range where scores are far from 1 in size, or set "
            "ppo.score_normalization",
        )

    def _score_saturated(self) -> Finding | None:
        spread, start = self._mean("objective/score_std"), self._mean_at_start("objective/score_std")
        score, first = self._mean("objective/score"), self._mean_at_start("objective/score")
        if spread is None or start is None or score is None or first is None or not self._bests:
            return None
        if spread == 0:
            seen = f"every response of a batch scores the same, {score:.3g} on average"
        elif spread < SATURATED * start and score >= self._near_best(first):
            seen = (
                f"objective/score_std is {spread:.3g}, {spread / start:.0%} of the {start:.3g} at the start (limit "
                f"{SATURATED:.0%}), and the score {score:.3g} near its best"
            )
        else:
            return None
        return Finding(
            "score_saturated",
            "warning",
            f"{seen}, over {PERSIST} iterations. The reward no longer tells the responses apart, and whitened "
            "advantages make as much of its noise as they made of its signal.",
            "Stop here (lower ppo.num_iterations), or give harder prompts or a reward model trained on samples of "
            "this policy; if it was so from the start, the reward is the same for everything",
        )

    # ------------------------------------------------------------------------------- what a run comes to

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
            f"over {len(scores)} iterations the score rose from {fmean(score[0]):.3g} to {fmean(score[1]):.3g} and "
            f"the length from {fmean(length[0]):.1f} to {fmean(length[1]):.1f} tokens, and the two correlate by "
            f"{fmean(within):.2f} within a batch (limit {LENGTH_CORRELATION:g}) and by "
            f"{correlation(scores, lengths):.2f} between iterations. Length alone may explain the score.",
            f"Score a response with and without idle sentences added; set ppo.length_penalty, {self._hold}, raise "
            "ppo.missing_eos_penalty, train the reward model on pairs of like length",
        )

    def _kl_runaway(self) -> Finding | None:
        kl, first = self._mean("objective/kl"), self._mean_at_start("objective/score")
        if kl is None or first is None or not self._bests or kl <= KL_RUNAWAY:
            return None
        knee, score, kl_then = next(row for row in self._bests if row[1] >= self._near_best(first))
        if kl <= KL_GROWTH * kl_then:
            return None
        return Finding(
            "kl_runaway",
            "warning",
            f"objective/kl is {kl:.3g} nats a response over {PERSIST} iterations, more than {KL_GROWTH:g} times the "
            f"{kl_then:.3g} of iteration {knee:.0f}, where the score was {score:.3g} already; its best since is "
            f"{self._bests[-1][1]:.3g}. The policy goes on leaving ref_policy and the score hardly pays for it. In "
            "Gao et al. 2022 (arXiv 2210.10760) true quality first rises and then falls as sqrt(KL) grows, while the "
            "score goes on rising; without a gold score nobody can say on which side this run is.",
            "Read samples.jsonl of then and now, or give evaluation.gold and evaluation.every_iterations; "
            f"{self._hold}, lower ppo.num_iterations or optimizer.learning_rate",
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
            f"gold fell from {fmean(best['golds']):.3g}, its best, at iteration {best['iteration']} to "
            f"{fmean(golds):.3g} at iteration {iteration} ({fall:+.2g}, standard error {fall_error:.2g}) while the "
            f"score rose from {fmean(best['scores']):.3g} to {fmean(scores):.3g} ({rise:+.2g}, standard error "
            f"{rise_error:.2g}), on {len(golds)} held-out prompts. The policy exploits what the reward model gets "
            "wrong.",
            f"Take the policy of about iteration {best['iteration']} (evaluation.best_metric keeps it, or lower "
            f"ppo.num_iterations); {self._hold}, train the reward model on labelled samples of this policy",
        )

    @property
    def _hold(self) -> str:
        """How to hold the policy nearer to ref_policy."""
        if self._recent and self._recent[-1].get("objective/kl_coef") == 0:
            return "set ppo.kl_coef above 0 (nothing holds the policy near ref_policy)"
        return "raise ppo.kl_coef (or lower ppo.kl_target)"

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

    def _near_best(self, first: float) -> float:
        """The least score that is near the best one; `first` is the start's."""
        best = self._bests[-1][1]
        return best - NEAR_BEST * max(best - first, 0.0)

    def _trend(self, key: str) -> list[float]:
        """The window's values; none where they are too few or one is missing."""
        n = len(self._recent)
        return self._last(key, n) if n >= MIN_TREND else []

    def _new(self, iteration: int, found: list[Finding], *, evaluation: bool) -> list[Finding]:
        """Those to be said: not there before and not said just now, or said long ago."""
        names = {finding.name for finding in found}
        before = self._present
        # What was found by the other kind of check still holds.
        self._present = {
            name: since for name, since in before.items() if name in names or (name in OF_EVALUATIONS) is not evaluation
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
    """JSON has no infinity: a number that float32 has none of stands for it, whose square can still be summed."""
    return max(-1e75, min(1e75, float(value)))


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
