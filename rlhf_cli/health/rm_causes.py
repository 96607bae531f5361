"""What can be wrong with the reward model. See `findings.py` for how rules work."""

from __future__ import annotations

from functools import partial

from rlhf_cli.health.baselines import GUESSING, weak_reward
from rlhf_cli.health.evidence import Evidence
from rlhf_cli.health.findings import Sign, Signs, rule, rules_of, shows, supports
from rlhf_cli.health.history import STANDARD_ERRORS
from rlhf_cli.health.sft_causes import UNKNOWN_WORDS, skipped

cause = partial(rule, stage="rm")

OPPOSITE = 0.45
"""Share of pairs, with its interval. A random head may be below chance too, but seldom far."""
NOISY = 0.75
"""Share of pairs, with its interval, in which the judge prefers the chosen answer. Good: 0.97; people agree with
people in 0.65 to 0.75 of hard pairs."""
GOLD_KNOWS = 0.1
"""By how much the accuracy by gold columns is above the accuracy by labels."""
CONTRADICTED = 0.15
"""Share of repeated training pairs whose labels differ."""
MEMORISED = 0.25
"""Training accuracy less held-out accuracy at the end. Good: up to 0.03."""
ANTI_CORRELATED = -0.2
"""Correlation of score and gold over SFT's replies. Its standard error is 0.06 with 256 replies."""
MIN_REPLIES = 100
HARDLY_MOVED = 1e-3
"""The largest relative change of a weight matrix of the backbone."""
LEARNED = 0.65
"""Held-out accuracy that a trained head on a frozen backbone passes and a random head does not."""
FELL = 0.97
"""Training loss at the end, as a share of that at the start."""
SAME_ROWS = 0.02
"""Accuracy by which two measurements of one model on the same rows may differ, for rounding in another precision."""
LONG_WINS = 0.8
"""Share of pairs in which the longer answer is the better one, or the shorter. Public preference data: 0.5 to 0.65."""
MIN_PAIRS = 20
"""Held-out pairs. In fewer, one length may win by chance."""
LENGTH_CORRELATION = 0.5
"""Correlation of score and length over held-out answers, without its sign."""
LENGTH_CHANGE = 1.25
"""Length of PPO's replies, as a multiple of SFT's or the other way round."""
CUT = 0.5
"""Share of texts that the reward model had to cut."""
MOVED_LITTLE = 0.02
"""The largest relative change of a weight matrix of the backbone, of a model that is no better than guessing. Good:
0.1."""
MARKED = 0.5
"""Share of the pairs in which only the chosen answer has a word, less the share in which only the rejected one has it.
Good: 0.14."""
ECHO_ERRORS = 5.0
"""Standard errors from which SFT's answers are said to repeat words of their own prompts. Good: 20."""
ECHO = 0.25
"""Share of SFT's echo that the pairs must have. Good: 1."""
LOG_2 = 0.693
"""The loss of a reward model that gives all answers the same score."""
DIVERGED = 1.2
"""Training loss at the end, as a multiple of LOG_2."""
CHANGED_MUCH = 0.5
"""Relative change of a weight matrix, together with an accuracy that is no better than guessing or a simple rule."""
SHIFTED = 0.5
"""Distance of the first scores from 0, in standard deviations of the SFT samples that the score is normalised on."""
MORE_UNKNOWN = 3.0
"""Share of the words of PPO's prompts that the reward model's training prompts lack, as a multiple of the share in its
own held-out prompts."""


def _is_guessing(run: Evidence) -> bool:
    """Whether the interval of the held-out accuracy includes chance."""
    return run["rm.accuracy_low95"] <= GUESSING <= run["rm.accuracy_high95"]


def _accuracy(run: Evidence) -> str:
    low, high = run["rm.accuracy_low95"], run["rm.accuracy_high95"]
    return f"{run['rm.accuracy']:.2f} (95 % interval {low:.2f} to {high:.2f})"


def _weakness(run: Evidence) -> str | None:
    """The message of the health check on reward models; None if the model is better than guessing and simple rules."""
    figures = {f"eval/{name.removeprefix('rm.')}": run[name] for name in run.figures if name.startswith("rm.")}
    return weak_reward("rm", figures)


def other_words(run: Evidence) -> list[Sign]:
    """The sign that the reward model's training prompts lack words of PPO's prompts."""
    unknown, own = run["ppo.unknown_words"], run["rm.unknown_words"]
    if not (unknown > UNKNOWN_WORDS and unknown > MORE_UNKNOWN * own):
        return []
    return [
        shows(
            f"{unknown:.0%} of the words in PPO's prompts are in none of the prompts that the reward model was trained "
            f"on (limit {UNKNOWN_WORDS:.0%}); of its own held-out prompts {own:.0%}."
        )
    ]


def shifted(run: Evidence) -> Signs:
    """The sign that the first replies score otherwise than SFT's samples did."""
    if run["ppo.only_normalised_rewards"] == 1 and abs(run["ppo.start.score"]) > SHIFTED:
        yield supports(
            f"PPO's first replies score {run['ppo.start.score']:+.2f} standard deviations from SFT's samples in the RM "
            f"stage (limit {SHIFTED:g}), although the same model wrote both."
        )


@cause(
    "Read a few pairs (`rlhf data show`). If they are swapped, set data.train.keys: {chosen: rejected, rejected: "
    "chosen}, also for data.test, and train RM and PPO again",
    explains=("rm_without_eos", "rm_weak", "rm_memorised"),
    needs=("rm.judge_agrees_with_labels", "rm.gold_accuracy", "ppo.score_gold_correlation"),
    wants="a judge (evaluation.gold) or pairs with the columns gold_chosen and gold_rejected",
)
def labels_swapped(run: Evidence) -> Signs:
    """The labels of the pairs are swapped: the rejected answers are the better ones."""
    if run["rm.accuracy_high95"] < OPPOSITE:
        yield shows(
            f"The held-out accuracy is {_accuracy(run)}, below chance: training and held-out pairs have opposite "
            "labels."
        )
    if run["rm.judge_agrees_with_labels_high"] < OPPOSITE:
        yield shows(
            f"The judge prefers the chosen answer in {run['rm.judge_agrees_with_labels']:.0%} of "
            f"{run['rm.judge_agrees_with_labels_rows']:.0f} held-out pairs."
        )
    if run["rm.judge_agrees_with_model_high"] < OPPOSITE:
        yield shows(
            f"The judge and the reward model agree on {run['rm.judge_agrees_with_model']:.0%} of "
            f"{run['rm.judge_agrees_with_model_rows']:.0f} held-out pairs."
        )
    if run["rm.gold_accuracy"] < OPPOSITE < GUESSING < run["rm.accuracy"]:
        yield shows(
            f"By the columns gold_chosen and gold_rejected of the held-out pairs, the model is right in "
            f"{run['rm.gold_accuracy']:.0%}; by their labels in {run['rm.accuracy']:.0%}."
        )
    if run["ppo.score_gold_correlation"] < ANTI_CORRELATED and run["ppo.score_gold_pairs"] >= MIN_REPLIES:
        yield shows(f"Over SFT's replies, score and gold correlate by {run['ppo.score_gold_correlation']:.2f}.")
    gold, score = (run[f"ppo.after.{name}"] - run[f"ppo.before.{name}"] for name in ("gold", "score_mean"))
    if score > 0 > gold:
        yield supports(
            f"PPO raised the score by {score:.2g} and lowered gold from {run['ppo.before.gold']:.3g} to "
            f"{run['ppo.after.gold']:.3g}."
        )


@cause(
    "Train the reward model on pairs of this task, with prompts written as SFT's: `rlhf data show` prints them as "
    "the model reads them",
    explains=("rm_weak",),
    needs=("rm.prompt_end", "ppo.unknown_to_sft"),
    wants="three prompts in samples.jsonl of SFT, RM and PPO, or a finished PPO stage and its prompts",
)
def rm_prompts_differ(run: Evidence) -> Signs:
    """The reward model was trained on other prompts than SFT and PPO have."""
    if "sft.prompt_end" in run.texts and not run.other_end("sft"):
        yield from map(shows, run.other_end("rm"))
    if run["ppo.unknown_to_sft"] <= UNKNOWN_WORDS and (words := other_words(run)):
        yield from words
        yield supports(
            f"SFT's training prompts lack only {run['ppo.unknown_to_sft']:.0%} of the words in PPO's prompts."
        )
    yield from shifted(run)


@cause(
    "Raise rm optimizer.learning_rate or training.num_steps, and check model.freeze. If rewards.path names a model "
    "of your own, it must have a trained head",
    explains=("rm_without_eos", "labels_swapped", "rm_weak"),
)
def rm_untrained(run: Evidence) -> Signs:
    """The reward model was hardly trained: its scores are those of a random head."""
    learned = run["rm.accuracy_low95"] > LEARNED or run["rm.mse_high95"] < run["rm.target_variance"]
    if run["rm.moved"] < HARDLY_MOVED and not learned:
        accuracy = f", and the held-out accuracy is {_accuracy(run)}" if "rm.accuracy" in run.figures else ""
        yield shows(
            f"Its weights are those that it started from: the largest relative change of a weight matrix is "
            f"{run['rm.moved']:.1g} (limit {HARDLY_MOVED:g}){accuracy}."
        )
    elif run["rm.moved"] < MOVED_LITTLE and _is_guessing(run):
        yield supports(
            f"Its weights changed little: the largest relative change of a weight matrix is {run['rm.moved']:.1g} "
            f"(limit {MOVED_LITTLE:g}), and the held-out accuracy is {_accuracy(run)}."
        )
    if _is_guessing(run) and FELL * min(run["rm.loss_start"], LOG_2) <= run["rm.loss_end"] <= DIVERGED * LOG_2:
        yield supports(
            f"The training loss did not fall: {run['rm.loss_start']:.3f} in the first tenth of the "
            f"{run['rm.steps']:.0f} steps, {run['rm.loss_end']:.3f} in the last. Guessing has {LOG_2}."
        )


@cause(
    "Lower rm optimizer.learning_rate to a third or a tenth, and lengthen optimizer.warmup_steps",
    explains=("rm_weak", "rm_without_eos"),
)
def rm_steps_too_large(run: Evidence) -> Signs:
    """The steps of the reward model were too large."""
    if run["rm.loss_end"] > DIVERGED * LOG_2 and "rm.training_accuracy" in run.figures:
        # A new head may start with such a loss, so this shows large steps only if the weights moved.
        yield (shows if run["rm.moved"] > HARDLY_MOVED else supports)(
            f"The training loss is {run['rm.loss_end']:.2f} at the end. A model that gives all answers the same "
            f"score has {LOG_2}."
        )
    if run["rm.moved"] > CHANGED_MUCH and _weakness(run) is not None:
        yield shows(
            f"A weight matrix changed by {run['rm.moved']:.1f} times its own size, and the held-out accuracy is "
            f"{_accuracy(run)}."
        )
    if run["rm.bad_steps"] > 0:
        yield supports(f"{run['rm.bad_steps']:.0f} steps had a NaN or infinite loss or gradient.")


@cause(
    "Raise rm data.max_length: `rlhf data check --for rm` says how many tokens keep 95 % of the rows",
    explains=("rm_weak", "rm_memorised", "rm_untrained", "pairs_length_biased"),
    needs=("rm.skipped_share",),
    wants="the training pairs of RM",
)
def pairs_dropped(run: Evidence) -> Signs:
    """Most pairs are not used."""
    yield from skipped(run, "rm", "rm.data.max_length")


@cause(
    "Join the answers to their prompts again, by an id rather than by the order of the rows: `rlhf data show` prints a "
    "few pairs",
    explains=("labels_noisy", "rm_weak"),
    needs=("rm.echo",),
    wants="the training pairs of RM",
)
def pairs_mixed_up(run: Evidence) -> Signs:
    """The prompts of the pairs do not belong to their answers."""
    usual = run["sft.echo"]
    if usual > ECHO_ERRORS * run["sft.echo_error"] and run["rm.echo"] + 2 * run["rm.echo_error"] < ECHO * usual:
        yield shows(
            f"The answers of the pairs do not repeat words of their own prompts: {run['rm.echo']:+.1%} of their words "
            f"more than of another row's prompt (standard error {run['rm.echo_error']:.1%}). In SFT's demonstrations "
            f"it is {usual:+.1%} (limit {ECHO:.0%} of that)."
        )


@cause(
    "Remove that word from the answers, or add pairs in which both or neither have it. It often marks which model or "
    "tool wrote an answer",
    explains=("rm_weak", "pairs_length_biased"),
    needs=("rm.word_share",),
    wants="the training pairs of RM",
)
def pairs_marked(run: Evidence) -> Signs:
    """One word or letter tells the chosen answers from the rejected ones."""
    share = run["rm.word_share"]
    if abs(share) > MARKED:
        which = "chosen" if share > 0 else "rejected"
        yield shows(
            f"In many training pairs only the {which} answer has {run.texts.get('rm.word')!r}: in "
            f"{abs(share):.0%} of all more than only the other one (limit {MARKED:.0%})."
        )


@cause(
    "Train it on whole answers with EOS: raise rm data.max_length, set data.truncation: drop, and encode pairs of "
    "other tools with EOS",
    explains=("rm_weak",),
)
def rm_without_eos(run: Evidence) -> Signs:
    """The reward model was not trained where PPO reads it, at EOS."""
    if run["rm.gain_without_eos"] > STANDARD_ERRORS * run["rm.gain_without_eos_error"]:
        yield shows(
            f"On {run['rm.probed_accuracy_rows']:.0f} held-out pairs the accuracy is {run['rm.probed_accuracy']:.3f} "
            f"at EOS, where PPO reads the score, and {run['rm.accuracy_without_eos']:.3f} one token earlier "
            f"(difference {run['rm.gain_without_eos']:.3f}, standard error {run['rm.gain_without_eos_error']:.3f})."
        )
    is_same = run["rm.probed_accuracy_rows"] == run["rm.num_rows"]
    if is_same and run["rm.accuracy"] - run["rm.probed_accuracy"] > SAME_ROWS:
        yield shows(
            f"The RM stage measured an accuracy of {run['rm.accuracy']:.3f}. On the same pairs, read at EOS, it is "
            f"{run['rm.probed_accuracy']:.3f}."
        )
    if run["ppo.cut_share"] > CUT and run.settings.get("rm.data.truncation") == "right":
        yield shows(
            f"{run['ppo.cut_share']:.0%} of the replies were cut at rm data.max_length: "
            f"{run.settings.get('rm.data.max_length')} tokens, so the model never saw their end."
        )


@cause(
    "Add pairs of similar length, or pairs whose better answer is the other one in length; until then set "
    "length_correction: true in rm.yaml",
    explains=("rm_weak",),
)
def pairs_length_biased(run: Evidence) -> Signs:
    """The pairs teach length: one answer is better because it is longer or shorter."""
    longer = run["rm.length_baseline"]
    share, side = (longer, "longer") if longer >= GUESSING else (1 - longer, "shorter")
    if not share > LONG_WINS or run["rm.num_rows"] < MIN_PAIRS:
        return
    yield shows(
        f"In {share:.0%} of the held-out pairs the {side} answer is the chosen one (limit {LONG_WINS:.0%}), so its "
        "length alone tells which is better."
    )
    if abs(run["rm.score_length_correlation"]) > LENGTH_CORRELATION:
        yield supports(f"Score and length of held-out answers correlate by {run['rm.score_length_correlation']:.2f}.")
    before, after = run["ppo.before.length"], run["ppo.after.length"]
    if after > LENGTH_CHANGE * before or before > LENGTH_CHANGE * after:
        yield supports(f"PPO changed the length of replies from {before:.0f} to {after:.0f} tokens.")


@cause(
    "Label a few pairs yourself (`rlhf label`): where you disagree with one source or labeller, leave it out. "
    "Pairs with a clear difference teach more than many noisy ones",
    explains=("rm_weak", "rm_memorised", "rm_without_eos"),
)
def labels_noisy(run: Evidence) -> Signs:
    """Many labels of the pairs are wrong."""
    agrees, model = run["rm.judge_agrees_with_labels"], run["rm.judge_agrees_with_model"]
    if OPPOSITE <= run["rm.judge_agrees_with_labels_high"] < NOISY:
        yield shows(
            f"The judge prefers the chosen answer in only {agrees:.0%} of "
            f"{run['rm.judge_agrees_with_labels_rows']:.0f} held-out pairs (limit {NOISY:.0%}), and the reward "
            f"model's choice in {model:.0%}."
        )
    if run["rm.gold_accuracy"] - run["rm.accuracy"] > GOLD_KNOWS:
        yield shows(
            f"By the columns gold_chosen and gold_rejected the model is right in {run['rm.gold_accuracy']:.0%} of "
            f"the held-out pairs, by their labels in {run['rm.accuracy']:.0%}."
        )
    if run["rm.repeated_pairs"] >= MIN_PAIRS and run["rm.contradicted_share"] > CONTRADICTED:
        yield shows(
            f"{run['rm.contradicted_share']:.0%} of {run['rm.repeated_pairs']:.0f} training pairs that occur again "
            f"have the opposite label there (limit {CONTRADICTED:.0%})."
        )


@cause("Add pairs, lower rm training.num_steps, or set evaluation.keep_best", explains=("rm_weak", "rm_without_eos"))
def rm_memorised(run: Evidence) -> Signs:
    """The reward model memorised its training pairs."""
    yield from map(shows, run.said("rm.memorises"))
    if run["rm.training_accuracy"] - run["rm.accuracy_high95"] > MEMORISED / 2 and (
        run["rm.training_accuracy"] - run["rm.accuracy"] > MEMORISED
    ):
        yield shows(
            f"The training accuracy ended at {run['rm.training_accuracy']:.2f}, and the held-out accuracy is "
            f"{_accuracy(run)}."
        )


@cause("Train it on more pairs, and on pairs that differ in what you want. More rows in data.test narrow the interval")
def rm_weak(run: Evidence) -> Signs:
    """The reward model may be no better than guessing, or than a simple rule."""
    if message := _weakness(run):
        yield shows(message)


CAUSES = rules_of(globals())
