"""What can be wrong with PPO: its prompts, its sampling, its step size, its penalty.

See `findings.py` for how to read a row. Where a rule of a running stage sees the same thing, its finding is evidence.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from rlhf_cli.health.evidence import Evidence
from rlhf_cli.health.findings import Seen, cause, said, shows, supports
from rlhf_cli.health.ppo_rules import KL_RUNAWAY, MOVED
from rlhf_cli.health.rm_causes import JUDGE, OTHER_WORDS, SHIFTED
from rlhf_cli.health.sft_causes import UNKNOWN_WORDS, dropped

PROMPTS = "a finished PPO stage, and its prompts"
OTHER_TEMPERATURE = 1.25
"""PPO's temperature, as a multiple of the one at which the reward model was normalised, or the other way round."""
BEST_KL = 0.1
"""Nats per reply. Among policies at a KL of K, with normal scores of standard deviation s, the best one gains
s * sqrt(2 * K), so a penalty c * K is best paid at K = s ** 2 / (2 * c ** 2). Good: 45."""
CHEAP_KL = 0.05
"""Cost of the KL, as a share of the gain in score."""
ROSE, FLAT = 0.5, 0.1
"""Change of the score and of gold, in standard deviations of the first replies and of single answers."""
STEP = "(2 * max(ppo.mean.approx_kl, 0.0)) ** 0.5"
"""Nats: the usual log-ratio of a token."""


def _misses_gold(is_rewarded_by_model: bool, run: Evidence) -> Iterator[Seen]:
    """The score rose without gold, in a run whose rewards have a reward model or none."""
    if run.settings.get("ppo.has_reward_model") is not is_rewarded_by_model:
        return
    yield from said(2, "ppo.overoptimisation")(run)
    score, gold = run.gain("score_mean"), run.gain("gold")
    # The means of two sets of replies vary by chance, so a small fall needs the interval of `rlhf eval`.
    falls = gold < -FLAT * run["ppo.gold_std"] or run["ppo.gold_change_high"] < 0
    if score > ROSE * run["ppo.start.score_std"] and (falls or gold < FLAT * run["ppo.gold_std"]):
        yield (
            2,
            f"PPO raised the score from {run['ppo.before.score_mean']:.2f} to {run['ppo.after.score_mean']:.2f} and "
            f"{'lowered gold' if falls else 'hardly changed gold'}, from {run['ppo.before.gold']:.3g} to "
            f"{run['ppo.after.gold']:.3g}.",
        )


def _other_temperature(run: Evidence) -> Iterator[Seen]:
    here, there = run.settings.get("ppo.rollout.temperature"), run.settings.get("rm.evaluation.temperature", 1.0)
    if here is None or max(here / there, there / here) < OTHER_TEMPERATURE:
        return
    yield (
        1,
        f"PPO samples at rollout.temperature {here:g}, and the reward model was normalised on samples at {there:g}.",
    )
    yield from shows(
        # At the temperature of training the two are about equal.
        "ppo.start.entropy > 2 * sft.loss or sft.loss > 2 * ppo.start.entropy",
        "The entropy of the first replies is {ppo.start.entropy:.2f} nats per token, and SFT's held-out loss "
        "{sft.loss:.2f}; at the temperature of training they are about equal.",
    )(run)
    yield from SHIFTED(run)


def _dear_kl(run: Evidence) -> Iterator[Seen]:
    """The best policy at this penalty hardly moves."""
    spread, kl_coef, kl = run["ppo.start.score_std"], run["ppo.end.kl_coef"], run["ppo.end.kl"]
    if not spread > 0 or not kl_coef > 0:
        return
    clip, clipped = run.settings.get("ppo.ppo.score_clip"), ""
    if clip is not None and clip < spread:
        spread, clipped = clip, f"; ppo.score_clip makes that at most {clip:g}"
    best = spread**2 / (2 * kl_coef**2)
    if best < BEST_KL:
        yield (
            2,
            f"The scores of the first replies have a standard deviation of {run['ppo.start.score_std']:.2g}{clipped}, "
            f"so with ppo.kl_coef {kl_coef:.3g} the best policy is {best:.2g} nats from SFT and gains "
            f"{spread**2 / kl_coef:.2g} in score. The run's KL of {kl:.2g} nats costs {kl_coef * kl:.2g}, and its "
            f"score changed by {run['ppo.end.score'] - run['ppo.start.score']:+.2g}.",
        )


def _cheap_kl(run: Evidence) -> Iterator[Seen]:
    """The KL costs little beside the gain in score, and grew."""
    kl, kl_coef = run["ppo.end.kl"], run.settings.get("ppo.ppo.kl_coef")
    if kl_coef is None or not kl > KL_RUNAWAY or run.settings.get("ppo.ppo.kl_controller") == "adaptive":
        return
    gain = run["ppo.end.score"] - run["ppo.start.score"]
    if not kl_coef * kl < CHEAP_KL * max(gain, 0.0) and kl_coef > 0:
        return
    yield (
        2 if run.settings.get("ppo.has_reward_model") else 1,
        f"The KL grew to {kl:.1f} nats per reply (limit {KL_RUNAWAY:g}) and cost {kl_coef * kl:.2g} (ppo.kl_coef "
        f"{kl_coef:g}), while the score gained {gain:.2g}: nothing keeps the policy near ref_policy.",
    )
    of_one_text = ("entropy_collapse", "alike", "same_word", "kl_runaway", "truncated", "score_saturated")
    yield from said(1, *(f"ppo.{name}" for name in of_one_text))(run)
    if run.gain("gold") < 0:
        yield 1, f"Gold fell from {run['ppo.before.gold']:.3g} to {run['ppo.after.gold']:.3g}."


cause = partial(cause, "ppo")
CAUSES = (
    cause(
        "reward_opposed",
        "The reward asks for the opposite: a reward model has a negative weight.",
        "Give the reward model in rewards a weight above 0, unless it scores something bad",
        lambda run: (
            (2, f"A reward model in rewards has the weight {weight:g}: its worst answers score best.")
            for weight in run.settings.get("ppo.opposed", [])
        ),
        supports(
            "run.gain('score_mean') > 0 > run.gain('gold')",
            "Gold fell from {ppo.before.gold:.3g} to {ppo.after.gold:.3g} while the score rose.",
        ),
    ),
    cause(
        "reward_constant",
        "The reward is the same for every reply.",
        "Score two replies of samples.jsonl by hand with your reward function: it must tell them apart",
        shows(
            "ppo.start.score_std == 0 == ppo.end.score_std",
            "All replies of a batch have the same score, {ppo.start.score:.3g}, at the start and at the end.",
        ),
        lambda run: (
            said(1, "ppo.score_saturated")(run)
            if run["ppo.start.score_std"] == 0 == run["ppo.end.score_std"]
            else iter(())
        ),
        shows(
            "ppo.end.score_std == 0 != ppo.start.score_std and not run.gain('score_mean') > ppo.start.score_std",
            "At the end all replies of a batch have the same score, {ppo.end.score:.3g}. PPO hardly raised it: the "
            "first replies scored {ppo.start.score:.3g} already, with a standard deviation of "
            "{ppo.start.score_std:.2g}.",
        ),
        explains=("kl_too_strong",),
    ),
    cause(
        "reference_differs",
        "The KL is measured to another model than the one that PPO starts from.",
        "Remove ref_policy: null measures the KL to the model that PPO starts from. If it is meant, to continue an "
        "earlier run, see that it is the model which that run started from",
        # Good: 0; a run that continues another: 3 to 5.
        shows(
            "ppo.before.kl > 8",
            "Before PPO trained, the KL is {ppo.before.kl:.3g} nats per reply already (limit {limit:g}), and "
            "{ppo.after.kl:.3g} at the end: the penalty pulls the policy to a model that writes other replies.",
        ),
    ),
    cause(
        "prompts_dropped",
        "Most prompts are not used.",
        "Raise ppo data.max_prompt_length: `rlhf data check --for ppo` says how many tokens keep 95 % of the prompts",
        dropped("ppo", "data.max_prompt_length"),
        explains=("prompts_few",),
        needs=("ppo.skipped_share",),
        wants=PROMPTS,
    ),
    cause(
        "prompts_few",
        "PPO has too few different prompts.",
        "Add prompts to ppo data.train, some thousand different ones; `rlhf data check` counts rows that repeat",
        # More than 50 uses of each.
        shows(
            "ppo.iterations * ppo.ppo.rollout_batch_size > 50 * ppo.distinct_prompts and 0 < ppo.distinct_prompts < "
            "ppo.ppo.rollout_batch_size",
            "PPO has {ppo.distinct_prompts:.0f} different prompts in {ppo.prompts:.0f} rows, fewer than a batch of "
            "{ppo.ppo.rollout_batch_size} (ppo.rollout_batch_size), and answered each about "
            "{ppo.iterations * ppo.ppo.rollout_batch_size / ppo.distinct_prompts:.0f} times.",
        ),
        needs=("ppo.distinct_prompts",),
        wants=PROMPTS,
    ),
    cause(
        "prompts_differ",
        "PPO's prompts are of another kind than those that the reward model was trained on.",
        "Train SFT and the reward model on prompts of this kind too, or give PPO prompts of theirs",
        shows(f"{OTHER_WORDS.when} and not ppo.unknown_to_sft <= {UNKNOWN_WORDS}", OTHER_WORDS.text),
    ),
    cause(
        "template_differs",
        "PPO's prompts are written in another template than those of the stages before.",
        "Give data.prompt_template the same value in all three stages, or write the prompts as SFT's: `rlhf data show` "
        "prints them as the model reads them. If they are cut, raise data.max_prompt_length",
        lambda run: run.odd_end("ppo"),
        SHIFTED,
        explains=("prompts_differ",),
        needs=("sft.prompt_end", "rm.prompt_end"),
        wants="three prompts in samples.jsonl of SFT or RM",
    ),
    cause(
        "temperature_differs",
        "PPO samples at another temperature than the stages before.",
        "Set rollout.temperature to that of the model's use, usually 1.0, and rm evaluation.temperature to the same",
        _other_temperature,
    ),
    cause(
        "kl_too_strong",
        "The KL penalty costs more than the score can gain.",
        "Lower ppo.kl_coef (0.05 to 0.2 for normalised scores), or raise ppo.kl_target. If ppo.score_clip is below the "
        "standard deviation of the scores, raise it to about 5 of them",
        _dear_kl,
    ),
    cause(
        "clip_too_narrow",
        "The clip range is smaller than ordinary steps.",
        "Set ppo.clip_range to 0.2",
        # Good: a step of 0.03, and then 0.002 of the tokens.
        shows(
            f"ppo.mean.clip_fraction > 0.02 and {STEP} < 0.02",
            "{ppo.mean.clip_fraction:.1%} of the tokens are clipped (limit {limit:.0%}), although a token's "
            f"log-probability changes by only about {{{STEP}:.2g}} nats in an iteration. ppo.clip_range is "
            "{ppo.ppo.clip_range}.",
        ),
        explains=("ppo_hardly_moved",),
    ),
    cause(
        "value_untrained",
        "The value model did not learn: its values are worse than a constant.",
        "Set value_model.learning_rate to that of the policy or a few times it, and give value_model.warmup_iterations",
        said(2, "ppo.value_blind"),
        # The variance is the error of the returns' mean. Good: 0.6 to 1.1 times that. Early values know no mean yet.
        shows(
            "ppo.end.error > 2 * ppo.end.return_variance > 0 and ppo.iterations >= 20",
            "At the end the squared error of the values is {ppo.end.error:.3g}; that of the returns' mean alone is "
            "{ppo.end.return_variance:.3g} (limit {limit:g} times that). Explained variance: "
            "{ppo.end.explained_variance:.2g}.",
        ),
    ),
    cause(
        "replies_cut",
        "Replies are cut before they end.",
        "Raise rollout.max_new_tokens to the length of the demonstrations",
        shows(
            "ppo.start.eos_fraction < 0.5 and sft.eos_probability > 0.2",
            "Only {ppo.start.eos_fraction:.0%} of the first replies end within rollout.max_new_tokens "
            "{ppo.rollout.max_new_tokens}, although SFT learned EOS (probability {sft.eos_probability:.2f} where "
            "demonstrations end).",
        ),
        explains=("ppo_hardly_moved", "policy_overoptimised", "policy_misjudged", "score_unlearned"),
    ),
    cause(
        "ppo_steps_too_large",
        "The steps of PPO were too large.",
        "Lower ppo optimizer.learning_rate to a third or a tenth, lower ppo.ppo_epochs, or set ppo.max_approx_kl",
        said(2, "ppo.approx_kl", "ppo.clip_fraction"),
        said(1, "ppo.kl_far", "ppo.gradient_far", "ppo.not_finite", "ppo.skipped", "ppo.empty"),
        explains=("kl_unrestrained", "policy_overoptimised", "value_untrained", "score_unlearned"),
    ),
    cause(
        "kl_unrestrained",
        "The KL penalty is too small to keep the policy near SFT.",
        "Raise ppo.kl_coef (0.05 to 0.2 for normalised scores), or use ppo.kl_controller: adaptive; keep the policy of "
        "the best evaluation (evaluation.best_metric)",
        _cheap_kl,
        explains=("policy_overoptimised",),
    ),
    cause(
        "policy_overoptimised",
        "The policy exploits errors of the reward model.",
        "Raise ppo.kl_coef or lower ppo.num_iterations, keep the policy of the best evaluation "
        "(evaluation.best_metric), or train the reward model on labelled samples of this policy",
        partial(_misses_gold, True),
        needs=("ppo.before.gold",),
        wants=JUDGE,
    ),
    cause(
        "policy_misjudged",
        "The reward is not what the judge measures: the score rose without gold.",
        "Read rows of samples.jsonl with a high score: change the reward so that they would not score well",
        partial(_misses_gold, False),
        explains=("value_untrained",),
        needs=("ppo.before.gold",),
        wants=JUDGE,
    ),
    cause(
        "score_unlearned",
        "PPO moved the policy, and the score did not rise.",
        "Check that the reward gives two replies to one prompt different scores for a reason that can be learned. If "
        "it does, lower optimizer.learning_rate, or raise ppo.rollout_batch_size",
        said(2, "ppo.objective_falls"),
        shows(
            f"run.gain('score_mean') < {FLAT} * ppo.start.score_std and ppo.after.kl > {MOVED} and ppo.iterations >= "
            f"20",
            "After {ppo.iterations:.0f} iterations the policy is {ppo.after.kl:.2g} nats from SFT, and the score of "
            "held-out replies changed by {run.gain('score_mean'):+.2g}. Its standard deviation was "
            "{ppo.start.score_std:.2g} (limit {limit:.0%} of it).",
        ),
        explains=("value_untrained",),
    ),
    cause(
        "ppo_hardly_moved",
        "PPO hardly changed the policy.",
        "Raise ppo optimizer.learning_rate or ppo.num_iterations, or lower ppo.kl_coef",
        shows(
            "abs(ppo.after.kl) < 0.05",
            "After {ppo.iterations:.0f} iterations the KL to SFT is {ppo.after.kl:.2g} nats per reply (limit "
            "{limit:g}), and the score went from {ppo.before.score_mean:.2f} to {ppo.after.score_mean:.2f}.",
        ),
    ),
)
