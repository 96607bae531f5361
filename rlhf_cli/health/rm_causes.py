"""What can be wrong with the reward model. See `findings.py` for how to read a row."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from rlhf_cli.health.evidence import Evidence
from rlhf_cli.health.findings import Seen, cause, said, shows, supports
from rlhf_cli.health.sft_causes import UNKNOWN_WORDS, dropped

GUESSING = "rm.accuracy_low95 <= 0.5 <= rm.accuracy_high95"
ACCURACY = "{rm.accuracy:.2f} (95 % interval {rm.accuracy_low95:.2f} to {rm.accuracy_high95:.2f})"
MOVED = "the largest relative change of a weight matrix is {rm.moved:.1g} (limit {limit:g})"
UNTRAINED = "rm.moved < 0.001 and not (rm.accuracy_low95 > 0.65 or rm.mse_high95 < rm.target_variance)"
"""A head that was trained on a frozen backbone passes 0.65, a random one does not."""
DIVERGED = "rm.loss_end > 1.2 * 0.693 and rm.training_accuracy >= 0"
DIVERGED_TEXT = (
    "The training loss is {rm.loss_end:.2f} at the end. A model that gives all answers the same score has 0.693."
)
LENGTH_WINS = "0.8 < max(rm.length_baseline, 1 - rm.length_baseline) and not rm.num_rows < 20"
"""Public preference data: 0.5 to 0.65. In fewer than 20 held-out pairs, one length may win by chance."""
OTHER_WORDS = shows(
    f"ppo.unknown_words > {UNKNOWN_WORDS} and ppo.unknown_words > 3 * rm.unknown_words",
    "{ppo.unknown_words:.0%} of the words in PPO's prompts are in none of the prompts that the reward model was "
    "trained on (limit {limit:.0%}); of its own held-out prompts {rm.unknown_words:.0%}.",
)
SHIFTED = supports(
    "abs(ppo.start.score) > 0.5 and ppo.only_normalised_rewards == 1",
    "PPO's first replies score {ppo.start.score:+.2f} standard deviations from SFT's samples in the RM stage (limit "
    "{limit:g}), although the same model wrote both.",
)
JUDGE = "a judge (evaluation.gold)"
PAIRS = "the training pairs of RM"


def _weak(run: Evidence) -> Iterator[Seen]:
    if message := run.weakness:
        yield 2, message


cause = partial(cause, "rm")
CAUSES = (
    cause(
        "labels_swapped",
        "The labels of the pairs are swapped: the rejected answers are the better ones.",
        "Read a few pairs (`rlhf data show`). If they are swapped, set data.train.keys: {chosen: rejected, rejected: "
        "chosen}, also for data.test, and train RM and PPO again",
        # A random head may be below chance too, but its interval is seldom below 0.45.
        shows(
            "rm.accuracy_high95 < 0.45",
            f"The held-out accuracy is {ACCURACY}, below chance: training and held-out pairs have opposite labels.",
        ),
        shows(
            "rm.judge_agrees_with_labels_high < 0.45",
            "The judge prefers the chosen answer in {rm.judge_agrees_with_labels:.0%} of "
            "{rm.judge_agrees_with_labels_rows:.0f} held-out pairs.",
        ),
        shows(
            "rm.judge_agrees_with_model_high < 0.45",
            "The judge and the reward model agree on {rm.judge_agrees_with_model:.0%} of "
            "{rm.judge_agrees_with_model_rows:.0f} held-out pairs.",
        ),
        shows(
            "rm.gold_accuracy < 0.45 and rm.accuracy > 0.5",
            "By the columns gold_chosen and gold_rejected of the held-out pairs, the model is right in "
            "{rm.gold_accuracy:.0%}; by their labels in {rm.accuracy:.0%}.",
        ),
        shows(
            "ppo.score_gold_correlation < -0.2 and ppo.score_gold_pairs >= 100",  # standard error 0.06 with 256 replies
            "Over SFT's replies, score and gold correlate by {ppo.score_gold_correlation:.2f}.",
        ),
        supports(
            "run.gain('score_mean') > 0 > run.gain('gold')",
            "PPO raised the score by {run.gain('score_mean'):.2g} and lowered gold from {ppo.before.gold:.3g} to "
            "{ppo.after.gold:.3g}.",
        ),
        explains=("rm_without_eos", "rm_weak", "rm_memorised"),
        needs=("rm.judge_agrees_with_labels", "rm.gold_accuracy", "ppo.score_gold_correlation"),
        wants=f"{JUDGE} or pairs with the columns gold_chosen and gold_rejected",
    ),
    cause(
        "rm_prompts_differ",
        "The reward model was trained on other prompts than SFT and PPO have.",
        "Train the reward model on pairs of this task, with prompts written as SFT's: `rlhf data show` prints them as "
        "the model reads them",
        lambda run: run.odd_end("rm"),
        shows(f"{OTHER_WORDS.when} and ppo.unknown_to_sft <= {UNKNOWN_WORDS}", OTHER_WORDS.text),
        supports(
            f"{OTHER_WORDS.when} and ppo.unknown_to_sft <= {UNKNOWN_WORDS}",
            "SFT's training prompts lack only {ppo.unknown_to_sft:.0%} of the words in PPO's prompts.",
        ),
        SHIFTED,
        explains=("rm_weak",),
        needs=("rm.prompt_end", "ppo.unknown_to_sft"),
        wants="three prompts in samples.jsonl of SFT, RM and PPO, or a finished PPO stage and its prompts",
    ),
    cause(
        "rm_untrained",
        "The reward model was hardly trained: its scores are those of a random head.",
        "Raise rm optimizer.learning_rate or training.num_steps, and check model.freeze. If rewards.path names a model "
        "of your own, it must have a trained head",
        shows(
            f"{UNTRAINED} and rm.accuracy >= 0",
            f"Its weights are those that it started from: {MOVED}, and the held-out accuracy is {ACCURACY}.",
        ),
        shows(f"{UNTRAINED} and not rm.accuracy >= 0", f"Its weights are those that it started from: {MOVED}."),
        supports(
            f"0.02 > rm.moved >= 0.001 and {GUESSING}",  # good: 0.1
            f"Its weights changed little: {MOVED}, and the held-out accuracy is {ACCURACY}.",
        ),
        supports(
            f"0.97 * min(rm.loss_start, 0.693) <= rm.loss_end <= 1.2 * 0.693 and {GUESSING}",
            "The training loss did not fall: {rm.loss_start:.3f} in the first tenth of the {rm.steps:.0f} steps, "
            "{rm.loss_end:.3f} in the last. Guessing has 0.693.",
        ),
        explains=("rm_without_eos", "labels_swapped", "rm_weak"),
    ),
    cause(
        "rm_steps_too_large",
        "The steps of the reward model were too large.",
        "Lower rm optimizer.learning_rate to a third or a tenth, and lengthen optimizer.warmup_steps",
        # A new head may start with such a loss, so this shows large steps only if the weights moved.
        shows(f"{DIVERGED} and rm.moved > 0.001", DIVERGED_TEXT),
        supports(f"{DIVERGED} and not rm.moved > 0.001", DIVERGED_TEXT),
        shows(
            "rm.moved > 0.5 and run.weakness",
            f"A weight matrix changed by {{rm.moved:.1f}} times its own size, and the held-out accuracy is {ACCURACY}.",
        ),
        supports("rm.bad_steps > 0", "{rm.bad_steps:.0f} steps had a NaN or infinite loss or gradient."),
        explains=("rm_weak", "rm_without_eos"),
    ),
    cause(
        "pairs_dropped",
        "Most pairs are not used.",
        "Raise rm data.max_length: `rlhf data check --for rm` says how many tokens keep 95 % of the rows",
        dropped("rm", "data.max_length"),
        explains=("rm_weak", "rm_memorised", "rm_untrained", "pairs_length_biased"),
        needs=("rm.skipped_share",),
        wants=PAIRS,
    ),
    cause(
        "pairs_mixed_up",
        "The prompts of the pairs do not belong to their answers.",
        "Join the answers to their prompts again, by an id rather than by the order of the rows: `rlhf data show` "
        "prints a few pairs",
        # Good: all of SFT's echo, which is 20 standard errors.
        shows(
            "rm.echo + 2 * rm.echo_error < 0.25 * sft.echo and sft.echo > 5 * sft.echo_error",
            "The answers of the pairs do not repeat words of their own prompts: {rm.echo:+.1%} of their words more "
            "than of another row's prompt (standard error {rm.echo_error:.1%}). In SFT's demonstrations it is "
            "{sft.echo:+.1%} (limit 25% of that).",
        ),
        explains=("labels_noisy", "rm_weak"),
        needs=("rm.echo",),
        wants=PAIRS,
    ),
    cause(
        "pairs_marked",
        "One word or letter tells the chosen answers from the rejected ones.",
        "Remove that word from the answers, or add pairs in which both or neither have it. It often marks which model "
        "or tool wrote an answer",
        shows(
            "abs(rm.word_share) > 0.5",  # good: 0.14
            "In many training pairs only the {'chosen' if rm.word_share > 0 else 'rejected'} answer has "
            "{repr(rm.word)}: in {abs(rm.word_share):.0%} of all more than only the other one (limit {limit:.0%}).",
        ),
        explains=("rm_weak", "pairs_length_biased"),
        needs=("rm.word_share",),
        wants=PAIRS,
    ),
    cause(
        "rm_without_eos",
        "The reward model was not trained where PPO reads it, at EOS.",
        "Train it on whole answers with EOS: raise rm data.max_length, set data.truncation: drop, and encode pairs of "
        "other tools with EOS",
        shows(
            "rm.gain_without_eos > 2 * rm.gain_without_eos_error",
            "On {rm.probed_accuracy_rows:.0f} held-out pairs the accuracy is {rm.probed_accuracy:.3f} at EOS, where "
            "PPO reads the score, and {rm.accuracy_without_eos:.3f} one token earlier (difference "
            "{rm.gain_without_eos:.3f}, standard error {rm.gain_without_eos_error:.3f}).",
        ),
        # Rounding in another precision changes less.
        shows(
            "rm.accuracy - rm.probed_accuracy > 0.02 and rm.probed_accuracy_rows == rm.num_rows",
            "The RM stage measured an accuracy of {rm.accuracy:.3f}. On the same pairs, read at EOS, it is "
            "{rm.probed_accuracy:.3f}.",
        ),
        shows(
            "ppo.cut_share > 0.5 and rm.data.truncation == 'right'",
            "{ppo.cut_share:.0%} of the replies were cut at rm data.max_length: {rm.data.max_length} tokens, so the "
            "model never saw their end.",
        ),
        explains=("rm_weak",),
    ),
    cause(
        "pairs_length_biased",
        "The pairs teach length: one answer is better because it is longer or shorter.",
        "Add pairs of similar length, or pairs whose better answer is the other one in length; until then set "
        "length_correction: true in rm.yaml",
        shows(
            LENGTH_WINS,
            "In {max(rm.length_baseline, 1 - rm.length_baseline):.0%} of the held-out pairs the {'longer' if "
            "rm.length_baseline >= 0.5 else 'shorter'} answer is the chosen one (limit {limit:.0%}), so its length "
            "alone tells which is better.",
        ),
        supports(
            f"{LENGTH_WINS} and abs(rm.score_length_correlation) > 0.5",
            "Score and length of held-out answers correlate by {rm.score_length_correlation:.2f}.",
        ),
        supports(
            f"{LENGTH_WINS} and (ppo.after.length > 1.25 * ppo.before.length or ppo.before.length > 1.25 * "
            "ppo.after.length)",
            "PPO changed the length of replies from {ppo.before.length:.0f} to {ppo.after.length:.0f} tokens.",
        ),
        explains=("rm_weak",),
    ),
    cause(
        "labels_noisy",
        "Many labels of the pairs are wrong.",
        "Label a few pairs yourself (`rlhf label`): where you disagree with one source or labeller, leave it out. "
        "Pairs with a clear difference teach more than many noisy ones",
        # Good: 0.97; people agree with people in 0.65 to 0.75 of hard pairs.
        shows(
            "0.75 > rm.judge_agrees_with_labels_high >= 0.45",
            "The judge prefers the chosen answer in only {rm.judge_agrees_with_labels:.0%} of "
            "{rm.judge_agrees_with_labels_rows:.0f} held-out pairs (limit {limit:.0%}), and the reward model's choice "
            "in {rm.judge_agrees_with_model:.0%}.",
        ),
        shows(
            "rm.gold_accuracy - rm.accuracy > 0.1",
            "By the columns gold_chosen and gold_rejected the model is right in {rm.gold_accuracy:.0%} of the held-out "
            "pairs, by their labels in {rm.accuracy:.0%}.",
        ),
        shows(
            "rm.contradicted_share > 0.15 and rm.repeated_pairs >= 20",
            "{rm.contradicted_share:.0%} of {rm.repeated_pairs:.0f} training pairs that occur again have the opposite "
            "label there (limit {limit:.0%}).",
        ),
        explains=("rm_weak", "rm_memorised", "rm_without_eos"),
    ),
    cause(
        "rm_memorised",
        "The reward model memorised its training pairs.",
        "Add pairs, lower rm training.num_steps, or set evaluation.keep_best",
        said(2, "rm.memorises"),
        # Good: up to 0.03.
        shows(
            "rm.training_accuracy - rm.accuracy > 0.25 and rm.training_accuracy - rm.accuracy_high95 > 0.125",
            f"The training accuracy ended at {{rm.training_accuracy:.2f}}, and the held-out accuracy is {ACCURACY}.",
        ),
        explains=("rm_weak", "rm_without_eos"),
    ),
    cause(
        "rm_weak",
        "The reward model may be no better than guessing, or than a simple rule.",
        "Train it on more pairs, and on pairs that differ in what you want. More rows in data.test narrow the interval",
        _weak,
    ),
)
