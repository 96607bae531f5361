"""What can be wrong with PPO: its prompts, its sampling, its step size, its penalty.

See `causes.py` for how rules work. Where a rule of the health checks sees the same thing, its finding is the evidence.
"""

from __future__ import annotations

from rlhf_cli.diagnosis.causes import Cause, Sign
from rlhf_cli.diagnosis.evidence import Evidence
from rlhf_cli.diagnosis.rules_rm import UNKNOWN_WORDS, is_shifted, other_ends, other_words, shift
from rlhf_cli.training.health_trends import KL_RUNAWAY, MOVED

OTHER_TEMPERATURE = 1.25
"""PPO's temperature, as a multiple of the one at which the reward model was normalised, or the other way round."""
OTHER_ENTROPY = 2.0
"""Entropy of the first replies, as a multiple of SFT's held-out loss, or the other way round. At the temperature of
training the two are about equal."""
CHEAP_KL = 0.05
"""Cost of the KL, as a share of the gain in score."""
ENOUGH = ("ppo.approx_kl", "ppo.clip_fraction")
"""Health findings that show too large steps by themselves."""
STEPS = ("ppo.kl_far", "ppo.gradient_far", "ppo.not_finite", "ppo.skipped", "ppo.empty")
"""Health findings that support them."""
TO_ONE_TEXT = tuple(
    f"ppo.{name}" for name in ("entropy_collapse", "alike", "same_word", "kl_runaway", "truncated", "score_saturated")
)
"""Health findings on a policy that left the SFT model behind."""
HARDLY = 0.05
"""Nats per reply."""
CUT_AT_START = 0.5
"""Share of the first replies that end by themselves."""
EOS_KNOWN = 0.2
"""Probability of EOS where demonstrations end."""
BEST_KL = 0.1
"""Nats per reply. Among policies at a KL of K, with normal scores of standard deviation s, the best one gains
s * sqrt(2 * K), so a penalty c * K is best paid at K = s ** 2 / (2 * c ** 2). Good: 45."""
PASSES = 50
"""How often PPO uses each prompt, if all fit into one batch."""
LEARNING = 20
"""Iterations after which a value model should know the mean of the returns."""
VALUE_ERROR = 2.0
"""Squared error of the values, divided by the variance of the returns, the error of their mean. Good: 0.6 to 1.1."""
SMALL_STEP = 0.02
"""Nats: the usual log-ratio of a token, sqrt(2 * approx_kl). Good: 0.03."""
MANY_CLIPPED = 0.02
"""Share of clipped tokens. Good: 0.002 at such steps."""
FLAT = 0.1
"""Change of gold in standard deviations of single answers."""
ROSE = 0.5
"""Change of the score, in standard deviations of the first replies."""


def _template_differs(run: Evidence) -> list[Sign]:
    of_sft, of_rm = other_ends(run)
    if of_rm and not of_sft and "sft.prompt_end" in run.texts:
        return []  # the reward model is the odd one
    signs = [*of_sft, *of_rm]
    if signs and is_shifted(run):
        signs.append(Sign(1, shift(run)))
    return signs


def _temperature_differs(run: Evidence) -> list[Sign]:
    here, there = run.settings.get("ppo.rollout.temperature"), run.settings.get("rm.evaluation.temperature", 1.0)
    if here is None or max(here / there, there / here) < OTHER_TEMPERATURE:
        return []
    signs = [
        Sign(
            1,
            f"PPO samples at rollout.temperature {here:g}, and the reward model was normalised on samples at "
            f"{there:g}.",
        )
    ]
    entropy, loss = run["ppo.start.entropy"], run["sft.loss"]
    if entropy > OTHER_ENTROPY * loss or loss > OTHER_ENTROPY * entropy:
        signs.append(
            Sign(
                2,
                f"The entropy of the first replies is {entropy:.2f} nats per token, and SFT's held-out loss "
                f"{loss:.2f}; at the temperature of training they are about equal.",
            )
        )
    if is_shifted(run):
        signs.append(Sign(1, shift(run)))
    return signs


def _steps_too_large(run: Evidence) -> list[Sign]:
    enough, support = run.said(*ENOUGH), run.said(*STEPS)
    return [*(Sign(2, text) for text in enough), *(Sign(1, text) for text in support)]


def _kl_unrestrained(run: Evidence) -> list[Sign]:
    kl, kl_coef = run["ppo.end.kl"], run.settings.get("ppo.ppo.kl_coef")
    if kl_coef is None or not kl > KL_RUNAWAY or run.settings.get("ppo.ppo.kl_controller") == "adaptive":
        return []
    gain = run["ppo.end.score"] - run["ppo.start.score"]
    if not kl_coef * kl < CHEAP_KL * max(gain, 0.0) and kl_coef > 0:
        return []
    signs = [
        Sign(
            2 if run.settings.get("ppo.has_reward_model") else 1,
            f"The KL grew to {kl:.1f} nats per reply (limit {KL_RUNAWAY:g}) and cost {kl_coef * kl:.2g} (ppo.kl_coef "
            f"{kl_coef:g}), while the score gained {gain:.2g}: nothing keeps the policy near ref_policy.",
        )
    ]
    signs += [Sign(1, text) for text in run.said(*TO_ONE_TEXT)]
    if run["ppo.after.gold"] < run["ppo.before.gold"]:
        signs.append(Sign(1, f"Gold fell from {run['ppo.before.gold']:.3g} to {run['ppo.after.gold']:.3g}."))
    return signs


def _overoptimised(run: Evidence) -> list[Sign]:
    return _misses_gold(run) if run.settings.get("ppo.has_reward_model") else []


def _misjudged(run: Evidence) -> list[Sign]:
    return [] if run.settings.get("ppo.has_reward_model", True) else _misses_gold(run)


def _misses_gold(run: Evidence) -> list[Sign]:
    """Signs that the score rose without gold."""
    signs = [Sign(2, text) for text in run.said("ppo.overoptimisation")]
    score, gold = _change(run, "score_mean"), _change(run, "gold")
    # The means of two sets of replies vary by chance, so a small fall needs the interval of `rlhf eval`.
    falls = gold < -FLAT * run["ppo.gold_std"] or run["ppo.gold_change_high"] < 0
    if score > ROSE * run["ppo.start.score_std"] and (falls or gold < FLAT * run["ppo.gold_std"]):
        verb = "lowered gold" if falls else "hardly changed gold"
        signs.append(
            Sign(
                2,
                f"PPO raised the score from {run['ppo.before.score_mean']:.2f} to {run['ppo.after.score_mean']:.2f} "
                f"and {verb}, from {run['ppo.before.gold']:.3g} to {run['ppo.after.gold']:.3g}.",
            )
        )
    return signs


def _change(run: Evidence, name: str) -> float:
    return run[f"ppo.after.{name}"] - run[f"ppo.before.{name}"]


def _opposed(run: Evidence) -> list[Sign]:
    weights = run.settings.get("ppo.opposed", [])
    if not weights:
        return []
    signs = [Sign(2, f"A reward model in rewards has the weight {w:g}: its worst answers score best.") for w in weights]
    if _change(run, "score_mean") > 0 > _change(run, "gold"):
        signs.append(
            Sign(1, f"Gold fell from {run['ppo.before.gold']:.3g} to {run['ppo.after.gold']:.3g} while the score rose.")
        )
    return signs


def _constant(run: Evidence) -> list[Sign]:
    if run["ppo.start.score_std"] != 0 or run["ppo.end.score_std"] != 0:
        return []
    score = run["ppo.start.score"]
    signs = [Sign(2, f"All replies of a batch have the same score, {score:.3g}, at the start and at the end.")]
    return signs + [Sign(1, text) for text in run.said("ppo.score_saturated")]


def _kl_too_strong(run: Evidence) -> list[Sign]:
    spread, kl_coef, kl = run["ppo.start.score_std"], run["ppo.end.kl_coef"], run["ppo.end.kl"]
    if not spread > 0 or not kl_coef > 0:
        return []
    clip, clipped = run.settings.get("ppo.ppo.score_clip"), ""
    if clip is not None and clip < spread:
        spread, clipped = clip, f"; ppo.score_clip makes that at most {clip:g}"
    best = spread**2 / (2 * kl_coef**2)
    if not best < BEST_KL:
        return []
    return [
        Sign(
            2,
            f"The scores of the first replies have a standard deviation of {run['ppo.start.score_std']:.2g}"
            f"{clipped}, so with ppo.kl_coef "
            f"{kl_coef:.3g} the best policy is {best:.2g} nats from SFT and gains {spread**2 / kl_coef:.2g} in score. "
            f"The run's KL of {kl:.2g} nats costs {kl_coef * kl:.2g}, and its score changed by "
            f"{run['ppo.end.score'] - run['ppo.start.score']:+.2g}.",
        )
    ]


def _few_prompts(run: Evidence) -> list[Sign]:
    distinct, batch = run["ppo.distinct_prompts"], run.settings.get("ppo.ppo.rollout_batch_size", 0)
    uses = run["ppo.iterations"] * batch / distinct if distinct else 0.0
    if not (distinct < batch and uses > PASSES):
        return []
    return [
        Sign(
            2,
            f"PPO has {distinct:.0f} different prompts in {run['ppo.prompts']:.0f} rows, fewer than a batch of "
            f"{batch} (ppo.rollout_batch_size), and answered each about {uses:.0f} times.",
        )
    ]


def _prompts_differ(run: Evidence) -> list[Sign]:
    return [] if run["ppo.unknown_to_sft"] <= UNKNOWN_WORDS else other_words(run)


def _value_untrained(run: Evidence) -> list[Sign]:
    signs = [Sign(2, text) for text in run.said("ppo.value_blind")]
    error, variance = run["ppo.end.error"], run["ppo.end.return_variance"]
    if run["ppo.iterations"] >= LEARNING and variance > 0 and error > VALUE_ERROR * variance:
        signs.append(
            Sign(
                2,
                f"At the end the squared error of the values is {error:.3g}; that of the returns' mean alone is "
                f"{variance:.3g} (limit {VALUE_ERROR:g} times that). Explained variance: "
                f"{run['ppo.end.explained_variance']:.2g}.",
            )
        )
    return signs


def _clip_narrow(run: Evidence) -> list[Sign]:
    step, clipped = (2 * max(run["ppo.mean.approx_kl"], 0.0)) ** 0.5, run["ppo.mean.clip_fraction"]
    if not (clipped > MANY_CLIPPED and step < SMALL_STEP):
        return []
    return [
        Sign(
            2,
            f"{clipped:.1%} of the tokens are clipped (limit {MANY_CLIPPED:.0%}), although a token's log-probability "
            f"changes by only about {step:.2g} nats in an iteration. ppo.clip_range is "
            f"{run.settings.get('ppo.ppo.clip_range')}.",
        )
    ]


def _unlearned(run: Evidence) -> list[Sign]:
    signs = [Sign(2, text) for text in run.said("ppo.objective_falls")]
    change, spread, kl = _change(run, "score_mean"), run["ppo.start.score_std"], run["ppo.after.kl"]
    if run["ppo.iterations"] >= LEARNING and kl > MOVED and change < FLAT * spread:
        signs.append(
            Sign(
                2,
                f"After {run['ppo.iterations']:.0f} iterations the policy is {kl:.2g} nats from SFT, and the score of "
                f"held-out replies changed by {change:+.2g}. Its standard deviation was {spread:.2g} (limit {FLAT:.0%} "
                "of it).",
            )
        )
    return signs


def _hardly_moved(run: Evidence) -> list[Sign]:
    if not abs(run["ppo.after.kl"]) < HARDLY:
        return []
    return [
        Sign(
            2,
            f"After {run['ppo.iterations']:.0f} iterations the KL to SFT is {run['ppo.after.kl']:.2g} nats per reply "
            f"(limit {HARDLY:g}), and the score went from {run['ppo.before.score_mean']:.2f} to "
            f"{run['ppo.after.score_mean']:.2f}.",
        )
    ]


def _replies_cut(run: Evidence) -> list[Sign]:
    if not (run["ppo.start.eos_fraction"] < CUT_AT_START and run["sft.eos_probability"] > EOS_KNOWN):
        return []
    return [
        Sign(
            2,
            f"Only {run['ppo.start.eos_fraction']:.0%} of the first replies end within rollout.max_new_tokens "
            f"{run.settings.get('ppo.rollout.max_new_tokens')}, although SFT learned EOS (probability "
            f"{run['sft.eos_probability']:.2f} where demonstrations end).",
        )
    ]


CAUSES = (
    Cause(
        "reward_opposed",
        "ppo",
        "The reward asks for the opposite: a reward model has a negative weight.",
        _opposed,
        "Give the reward model in rewards a weight above 0, unless it scores something bad",
        explains=("policy_overoptimised", "kl_unrestrained", "ppo_hardly_moved"),
    ),
    Cause(
        "reward_constant",
        "ppo",
        "The reward is the same for every reply.",
        _constant,
        "Score two replies of samples.jsonl by hand with your reward function: it must tell them apart",
        explains=(
            "value_untrained",
            "policy_misjudged",
            "policy_overoptimised",
            "ppo_hardly_moved",
            "kl_too_strong",
            "score_unlearned",
        ),
    ),
    Cause(
        "prompts_few",
        "ppo",
        "PPO has too few different prompts.",
        _few_prompts,
        "Add prompts to ppo data.train, some thousand different ones; `rlhf data check` counts rows that repeat",
        explains=("policy_overoptimised", "kl_unrestrained"),
        needs=("ppo.distinct_prompts",),
        wants="a finished PPO stage, and its prompts",
    ),
    Cause(
        "prompts_differ",
        "ppo",
        "PPO's prompts are of another kind than those that the reward model was trained on.",
        _prompts_differ,
        "Train SFT and the reward model on prompts of this kind too, or give PPO prompts of theirs",
        explains=(
            "policy_overoptimised",
            "kl_unrestrained",
            "ppo_hardly_moved",
            "ppo_steps_too_large",
            "replies_cut",
            "template_differs",
            "score_unlearned",
        ),
    ),
    Cause(
        "template_differs",
        "ppo",
        "PPO's prompts are written in another template than those of the stages before.",
        _template_differs,
        "Give data.prompt_template the same value in all three stages, or write the prompts as SFT's: `rlhf data show` "
        "prints them as the model reads them. If they are cut, raise data.max_prompt_length",
        explains=("ppo_steps_too_large", "kl_unrestrained", "policy_overoptimised", "replies_cut", "ppo_hardly_moved"),
        needs=("sft.prompt_end", "rm.prompt_end"),
        wants="three prompts in samples.jsonl of SFT or RM",
    ),
    Cause(
        "temperature_differs",
        "ppo",
        "PPO samples at another temperature than the stages before.",
        _temperature_differs,
        "Set rollout.temperature to that of the model's use, usually 1.0, and rm evaluation.temperature to the same",
        explains=("ppo_steps_too_large", "kl_unrestrained", "policy_overoptimised", "replies_cut", "ppo_hardly_moved"),
    ),
    Cause(
        "kl_too_strong",
        "ppo",
        "The KL penalty costs more than the score can gain.",
        _kl_too_strong,
        "Lower ppo.kl_coef (0.05 to 0.2 for normalised scores), or raise ppo.kl_target. If ppo.score_clip is below the "
        "standard deviation of the scores, raise it to about 5 of them",
        explains=("ppo_hardly_moved", "value_untrained", "score_unlearned"),
    ),
    Cause(
        "clip_too_narrow",
        "ppo",
        "The clip range is smaller than ordinary steps.",
        _clip_narrow,
        "Set ppo.clip_range to 0.2",
        explains=("ppo_hardly_moved",),
    ),
    Cause(
        "value_untrained",
        "ppo",
        "The value model did not learn: its values are worse than a constant.",
        _value_untrained,
        "Set value_model.learning_rate to that of the policy or a few times it, and give value_model.warmup_iterations",
    ),
    Cause(
        "replies_cut",
        "ppo",
        "Replies are cut before they end.",
        _replies_cut,
        "Raise rollout.max_new_tokens to the length of the demonstrations",
        explains=("ppo_hardly_moved", "policy_overoptimised", "policy_misjudged", "score_unlearned"),
    ),
    Cause(
        "ppo_steps_too_large",
        "ppo",
        "The steps of PPO were too large.",
        _steps_too_large,
        "Lower ppo optimizer.learning_rate to a third or a tenth, lower ppo.ppo_epochs, or set ppo.max_approx_kl",
        explains=("kl_unrestrained", "policy_overoptimised", "value_untrained", "score_unlearned"),
    ),
    Cause(
        "kl_unrestrained",
        "ppo",
        "The KL penalty is too small to keep the policy near SFT.",
        _kl_unrestrained,
        "Raise ppo.kl_coef (0.05 to 0.2 for normalised scores), or use ppo.kl_controller: adaptive; keep the policy of "
        "the best evaluation (evaluation.best_metric)",
        explains=("policy_overoptimised",),
    ),
    Cause(
        "policy_overoptimised",
        "ppo",
        "The policy exploits errors of the reward model.",
        _overoptimised,
        "Raise ppo.kl_coef or lower ppo.num_iterations, keep the policy of the best evaluation "
        "(evaluation.best_metric), or train the reward model on labelled samples of this policy",
        needs=("ppo.before.gold",),
        wants="a judge (evaluation.gold)",
    ),
    Cause(
        "policy_misjudged",
        "ppo",
        "The reward is not what the judge measures: the score rose without gold.",
        _misjudged,
        "Read rows of samples.jsonl with a high score: change the reward so that they would not score well",
        needs=("ppo.before.gold",),
        wants="a judge (evaluation.gold)",
        explains=("value_untrained",),
    ),
    Cause(
        "score_unlearned",
        "ppo",
        "PPO moved the policy, and the score did not rise.",
        _unlearned,
        "Check that the reward gives two replies to one prompt different scores for a reason that can be learned. If "
        "it does, lower optimizer.learning_rate, or raise ppo.rollout_batch_size",
        explains=("value_untrained",),
    ),
    Cause(
        "ppo_hardly_moved",
        "ppo",
        "PPO hardly changed the policy.",
        _hardly_moved,
        "Raise ppo optimizer.learning_rate or ppo.num_iterations, or lower ppo.kl_coef",
    ),
)
