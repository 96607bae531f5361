"""What can be wrong with PPO: its prompts, its sampling, its step size, its penalty.

See `findings.py` for how rules work. Where a rule of a running stage sees the same thing, its finding is evidence.
"""

from __future__ import annotations

from rlhf_cli.health.evidence import Evidence
from rlhf_cli.health.findings import Signs, rule, rules_of, shows, supports
from rlhf_cli.health.rm_causes import other_words, shifted
from rlhf_cli.health.sft_causes import UNKNOWN_WORDS, skipped
from rlhf_cli.health.trends import KL_RUNAWAY, MOVED

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
FAR_AT_START = 8.0
"""Nats per reply before training. Good: 0; a run that continues another: 3 to 5."""
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


def _misses_gold(run: Evidence) -> Signs:
    """The signs that the score rose without gold."""
    yield from map(shows, run.said("ppo.overoptimisation"))
    score, gold = _change(run, "score_mean"), _change(run, "gold")
    # The means of two sets of replies vary by chance, so a small fall needs the interval of `rlhf eval`.
    falls = gold < -FLAT * run["ppo.gold_std"] or run["ppo.gold_change_high"] < 0
    if score > ROSE * run["ppo.start.score_std"] and (falls or gold < FLAT * run["ppo.gold_std"]):
        verb = "lowered gold" if falls else "hardly changed gold"
        yield shows(
            f"PPO raised the score from {run['ppo.before.score_mean']:.2f} to {run['ppo.after.score_mean']:.2f} "
            f"and {verb}, from {run['ppo.before.gold']:.3g} to {run['ppo.after.gold']:.3g}."
        )


def _change(run: Evidence, name: str) -> float:
    return run[f"ppo.after.{name}"] - run[f"ppo.before.{name}"]


@rule("Give the reward model in rewards a weight above 0, unless it scores something bad")
def reward_opposed(run: Evidence) -> Signs:
    """The reward asks for the opposite: a reward model has a negative weight."""
    for weight in run.settings.get("ppo.opposed", []):
        yield shows(f"A reward model in rewards has the weight {weight:g}: its worst answers score best.")
    if _change(run, "score_mean") > 0 > _change(run, "gold"):
        yield supports(
            f"Gold fell from {run['ppo.before.gold']:.3g} to {run['ppo.after.gold']:.3g} while the score rose."
        )


@rule(
    "Score two replies of samples.jsonl by hand with your reward function: it must tell them apart",
    explains=("kl_too_strong",),
)
def reward_constant(run: Evidence) -> Signs:
    """The reward is the same for every reply."""
    if run["ppo.start.score_std"] == 0 == run["ppo.end.score_std"]:
        score = run["ppo.start.score"]
        yield shows(f"All replies of a batch have the same score, {score:.3g}, at the start and at the end.")
        yield from map(supports, run.said("ppo.score_saturated"))
    elif run["ppo.end.score_std"] == 0 and not _change(run, "score_mean") > run["ppo.start.score_std"]:
        yield shows(
            f"At the end all replies of a batch have the same score, {run['ppo.end.score']:.3g}. PPO hardly raised it: "
            f"the first replies scored {run['ppo.start.score']:.3g} already, with a standard deviation of "
            f"{run['ppo.start.score_std']:.2g}."
        )


@rule(
    "Remove ref_policy: null measures the KL to the model that PPO starts from. If it is meant, to continue an earlier "
    "run, see that it is the model which that run started from"
)
def reference_differs(run: Evidence) -> Signs:
    """The KL is measured to another model than the one that PPO starts from."""
    kl = run["ppo.before.kl"]
    if kl > FAR_AT_START:
        yield shows(
            f"Before PPO trained, the KL is {kl:.3g} nats per reply already (limit {FAR_AT_START:g}), and "
            f"{run['ppo.after.kl']:.3g} at the end: the penalty pulls the policy to a model that writes other replies."
        )


@rule(
    "Raise ppo data.max_prompt_length: `rlhf data check --for ppo` says how many tokens keep 95 % of the prompts",
    explains=("prompts_few",),
    needs=("ppo.skipped_share",),
    wants="a finished PPO stage, and its prompts",
)
def prompts_dropped(run: Evidence) -> Signs:
    """Most prompts are not used."""
    yield from skipped(run, "ppo", "ppo.data.max_prompt_length")


@rule(
    "Add prompts to ppo data.train, some thousand different ones; `rlhf data check` counts rows that repeat",
    needs=("ppo.distinct_prompts",),
    wants="a finished PPO stage, and its prompts",
)
def prompts_few(run: Evidence) -> Signs:
    """PPO has too few different prompts."""
    distinct, batch = run["ppo.distinct_prompts"], run.settings.get("ppo.ppo.rollout_batch_size", 0)
    uses = run["ppo.iterations"] * batch / distinct if distinct else 0.0
    if distinct < batch and uses > PASSES:
        yield shows(
            f"PPO has {distinct:.0f} different prompts in {run['ppo.prompts']:.0f} rows, fewer than a batch of "
            f"{batch} (ppo.rollout_batch_size), and answered each about {uses:.0f} times."
        )


@rule("Train SFT and the reward model on prompts of this kind too, or give PPO prompts of theirs")
def prompts_differ(run: Evidence) -> Signs:
    """PPO's prompts are of another kind than those that the reward model was trained on."""
    if not run["ppo.unknown_to_sft"] <= UNKNOWN_WORDS:
        yield from other_words(run)


@rule(
    "Give data.prompt_template the same value in all three stages, or write the prompts as SFT's: `rlhf data show` "
    "prints them as the model reads them. If they are cut, raise data.max_prompt_length",
    explains=("prompts_differ",),
    needs=("sft.prompt_end", "rm.prompt_end"),
    wants="three prompts in samples.jsonl of SFT or RM",
)
def template_differs(run: Evidence) -> Signs:
    """PPO's prompts are written in another template than those of the stages before."""
    known = [stage for stage in ("sft", "rm") if f"{stage}.prompt_end" in run.texts]
    others = [sentence for stage in known for sentence in run.other_end(stage)]
    if len(others) == len(known):  # else one of the two is the odd one
        yield from map(shows, others)
    yield from shifted(run)


@rule("Set rollout.temperature to that of the model's use, usually 1.0, and rm evaluation.temperature to the same")
def temperature_differs(run: Evidence) -> Signs:
    """PPO samples at another temperature than the stages before."""
    here, there = run.settings.get("ppo.rollout.temperature"), run.settings.get("rm.evaluation.temperature", 1.0)
    if here is None or max(here / there, there / here) < OTHER_TEMPERATURE:
        return
    yield supports(
        f"PPO samples at rollout.temperature {here:g}, and the reward model was normalised on samples at {there:g}."
    )
    entropy, loss = run["ppo.start.entropy"], run["sft.loss"]
    if entropy > OTHER_ENTROPY * loss or loss > OTHER_ENTROPY * entropy:
        yield shows(
            f"The entropy of the first replies is {entropy:.2f} nats per token, and SFT's held-out loss "
            f"{loss:.2f}; at the temperature of training they are about equal."
        )
    yield from shifted(run)


@rule(
    "Lower ppo.kl_coef (0.05 to 0.2 for normalised scores), or raise ppo.kl_target. If ppo.score_clip is below the "
    "standard deviation of the scores, raise it to about 5 of them"
)
def kl_too_strong(run: Evidence) -> Signs:
    """The KL penalty costs more than the score can gain."""
    spread, kl_coef, kl = run["ppo.start.score_std"], run["ppo.end.kl_coef"], run["ppo.end.kl"]
    if not spread > 0 or not kl_coef > 0:
        return
    clip, clipped = run.settings.get("ppo.ppo.score_clip"), ""
    if clip is not None and clip < spread:
        spread, clipped = clip, f"; ppo.score_clip makes that at most {clip:g}"
    best = spread**2 / (2 * kl_coef**2)
    if best < BEST_KL:
        yield shows(
            f"The scores of the first replies have a standard deviation of {run['ppo.start.score_std']:.2g}{clipped}, "
            f"so with ppo.kl_coef {kl_coef:.3g} the best policy is {best:.2g} nats from SFT and gains "
            f"{spread**2 / kl_coef:.2g} in score. The run's KL of {kl:.2g} nats costs {kl_coef * kl:.2g}, and its "
            f"score changed by {run['ppo.end.score'] - run['ppo.start.score']:+.2g}."
        )


@rule("Set ppo.clip_range to 0.2", explains=("ppo_hardly_moved",))
def clip_too_narrow(run: Evidence) -> Signs:
    """The clip range is smaller than ordinary steps."""
    step, clipped = (2 * max(run["ppo.mean.approx_kl"], 0.0)) ** 0.5, run["ppo.mean.clip_fraction"]
    if clipped > MANY_CLIPPED and step < SMALL_STEP:
        yield shows(
            f"{clipped:.1%} of the tokens are clipped (limit {MANY_CLIPPED:.0%}), although a token's log-probability "
            f"changes by only about {step:.2g} nats in an iteration. ppo.clip_range is "
            f"{run.settings.get('ppo.ppo.clip_range')}."
        )


@rule("Set value_model.learning_rate to that of the policy or a few times it, and give value_model.warmup_iterations")
def value_untrained(run: Evidence) -> Signs:
    """The value model did not learn: its values are worse than a constant."""
    yield from map(shows, run.said("ppo.value_blind"))
    error, variance = run["ppo.end.error"], run["ppo.end.return_variance"]
    if run["ppo.iterations"] >= LEARNING and variance > 0 and error > VALUE_ERROR * variance:
        yield shows(
            f"At the end the squared error of the values is {error:.3g}; that of the returns' mean alone is "
            f"{variance:.3g} (limit {VALUE_ERROR:g} times that). Explained variance: "
            f"{run['ppo.end.explained_variance']:.2g}."
        )


@rule(
    "Raise rollout.max_new_tokens to the length of the demonstrations",
    explains=("ppo_hardly_moved", "policy_overoptimised", "policy_misjudged", "score_unlearned"),
)
def replies_cut(run: Evidence) -> Signs:
    """Replies are cut before they end."""
    if run["ppo.start.eos_fraction"] < CUT_AT_START and run["sft.eos_probability"] > EOS_KNOWN:
        yield shows(
            f"Only {run['ppo.start.eos_fraction']:.0%} of the first replies end within rollout.max_new_tokens "
            f"{run.settings.get('ppo.rollout.max_new_tokens')}, although SFT learned EOS (probability "
            f"{run['sft.eos_probability']:.2f} where demonstrations end)."
        )


@rule(
    "Lower ppo optimizer.learning_rate to a third or a tenth, lower ppo.ppo_epochs, or set ppo.max_approx_kl",
    explains=("kl_unrestrained", "policy_overoptimised", "value_untrained", "score_unlearned"),
)
def ppo_steps_too_large(run: Evidence) -> Signs:
    """The steps of PPO were too large."""
    yield from map(shows, run.said(*ENOUGH))
    yield from map(supports, run.said(*STEPS))


@rule(
    "Raise ppo.kl_coef (0.05 to 0.2 for normalised scores), or use ppo.kl_controller: adaptive; keep the policy of "
    "the best evaluation (evaluation.best_metric)",
    explains=("policy_overoptimised",),
)
def kl_unrestrained(run: Evidence) -> Signs:
    """The KL penalty is too small to keep the policy near SFT."""
    kl, kl_coef = run["ppo.end.kl"], run.settings.get("ppo.ppo.kl_coef")
    if kl_coef is None or not kl > KL_RUNAWAY or run.settings.get("ppo.ppo.kl_controller") == "adaptive":
        return
    gain = run["ppo.end.score"] - run["ppo.start.score"]
    if not kl_coef * kl < CHEAP_KL * max(gain, 0.0) and kl_coef > 0:
        return
    yield (shows if run.settings.get("ppo.has_reward_model") else supports)(
        f"The KL grew to {kl:.1f} nats per reply (limit {KL_RUNAWAY:g}) and cost {kl_coef * kl:.2g} (ppo.kl_coef "
        f"{kl_coef:g}), while the score gained {gain:.2g}: nothing keeps the policy near ref_policy."
    )
    yield from map(supports, run.said(*TO_ONE_TEXT))
    if run["ppo.after.gold"] < run["ppo.before.gold"]:
        yield supports(f"Gold fell from {run['ppo.before.gold']:.3g} to {run['ppo.after.gold']:.3g}.")


@rule(
    "Raise ppo.kl_coef or lower ppo.num_iterations, keep the policy of the best evaluation "
    "(evaluation.best_metric), or train the reward model on labelled samples of this policy",
    needs=("ppo.before.gold",),
    wants="a judge (evaluation.gold)",
)
def policy_overoptimised(run: Evidence) -> Signs:
    """The policy exploits errors of the reward model."""
    if run.settings.get("ppo.has_reward_model"):
        yield from _misses_gold(run)


@rule(
    "Read rows of samples.jsonl with a high score: change the reward so that they would not score well",
    explains=("value_untrained",),
    needs=("ppo.before.gold",),
    wants="a judge (evaluation.gold)",
)
def policy_misjudged(run: Evidence) -> Signs:
    """The reward is not what the judge measures: the score rose without gold."""
    if not run.settings.get("ppo.has_reward_model", True):
        yield from _misses_gold(run)


@rule(
    "Check that the reward gives two replies to one prompt different scores for a reason that can be learned. If "
    "it does, lower optimizer.learning_rate, or raise ppo.rollout_batch_size",
    explains=("value_untrained",),
)
def score_unlearned(run: Evidence) -> Signs:
    """PPO moved the policy, and the score did not rise."""
    yield from map(shows, run.said("ppo.objective_falls"))
    change, spread, kl = _change(run, "score_mean"), run["ppo.start.score_std"], run["ppo.after.kl"]
    if run["ppo.iterations"] >= LEARNING and kl > MOVED and change < FLAT * spread:
        yield shows(
            f"After {run['ppo.iterations']:.0f} iterations the policy is {kl:.2g} nats from SFT, and the score of "
            f"held-out replies changed by {change:+.2g}. Its standard deviation was {spread:.2g} (limit {FLAT:.0%} "
            "of it)."
        )


@rule("Raise ppo optimizer.learning_rate or ppo.num_iterations, or lower ppo.kl_coef")
def ppo_hardly_moved(run: Evidence) -> Signs:
    """PPO hardly changed the policy."""
    if abs(run["ppo.after.kl"]) < HARDLY:
        yield shows(
            f"After {run['ppo.iterations']:.0f} iterations the KL to SFT is {run['ppo.after.kl']:.2g} nats per reply "
            f"(limit {HARDLY:g}), and the score went from {run['ppo.before.score_mean']:.2f} to "
            f"{run['ppo.after.score_mean']:.2f}."
        )


CAUSES = rules_of(globals())
