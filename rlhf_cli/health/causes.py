"""What can be wrong with a run: the causes that `rlhf diagnose` can name, in the order of the stages.

A cause is a function that yields the signs of it in the figures of a run, `Evidence`. A figure that the run does not
have is NaN, so that no comparison with it is true. Where a rule of a running stage sees the same thing, what it said is
a sign. "Good" figures come from runs without the fault.

A new cause also needs a section in docs/diagnose.md and a run in tests/support/faults.py that shows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from rlhf_cli.config.stage import STAGES
from rlhf_cli.health.evidence import Evidence, Figures, common_end
from rlhf_cli.health.findings import Rule, Seen, rule
from rlhf_cli.health.ppo_rules import KL_RUNAWAY, MOVED

CAUSES: list[Rule] = []
of_sft, of_rm, of_ppo = (partial(rule, CAUSES, stage=stage) for stage in STAGES)
LATER = ("rm_weak", "rm_without_eos", "template_differs", "prompts_differ")
"""What a language model that cannot answer may cause in the later stages."""
UNKNOWN_WORDS = 0.2
"""Share of the words of PPO's prompts that the training prompts of a stage lack."""
FIXED = 4
"""Characters by which two stages' prompts must end otherwise, to count as another template rather than as chance."""
SFT_ROWS = "held-out rows of SFT"
RM_ROWS = "the training pairs of RM"
PPO_ROWS = "a finished PPO stage, and its prompts"
PROMPTS = "three prompts in samples.jsonl of SFT, RM and PPO, or a finished PPO stage and its prompts"


def shows(text: str) -> Seen:
    """A sign that shows a cause by itself."""
    return 2, text


def supports(text: str) -> Seen:
    """A sign that only supports a cause, such as a setting that differs."""
    return 1, text


# ------------------------------------------------------------------------------------- signs of several causes


def odd_end(blamed: str, run: Evidence) -> Iterator[Seen]:
    """The prompts of a stage end otherwise than those of all other stages."""
    ends = {key.partition(".")[0]: end for key, end in run.texts.items() if key.endswith(".prompt_end")}
    if (last := ends.pop("ppo", None)) is None:
        return
    # A few prompts may share more letters than their template by chance.
    others = [s for s, end in ends.items() if max(len(end), len(last)) - len(common_end([end, last])) >= FIXED]
    if blamed == ("ppo" if len(others) == len(ends) else "".join(others)):
        for stage in others:
            one, other = (repr(text[-30:]) if text else "nothing in common" for text in (ends[stage], last))
            yield shows(f"The prompts of {stage} end with {one}, those of PPO with {other}.")


def skipped_rows(stage: str, figures: Figures, limit: str = "max_length") -> Iterator[Seen]:
    """The stage skips most of its rows, because they are longer than `data.<limit>`."""
    if figures.skipped_share > 0.5:
        yield shows(
            f"{figures.skipped_share:.0%} of the rows in {stage} data.train are skipped (limit 50%). data.{limit} is "
            f"{getattr(figures.data, limit)} tokens; the stage prints how many rows are longer."
        )


def ignored_prompts(sft: Figures) -> Iterator[str]:
    """An answer is as likely behind another row's prompt."""
    # The second limit is for losses near 0: there smaller differences mean nothing. Good: 5 times the loss.
    limit = max(0.03 * sft.probed_loss, 0.005)
    if limit > sft.gain_of_prompt + 2 * sft.gain_of_prompt_error and not sft.mixed_rows < 20:
        yield (
            "Behind the prompt of another row the held-out answers are as likely as behind their own: the loss of "
            f"{sft.probed_loss:.3g} nats per token changes by {sft.gain_of_prompt:+.2g} (standard error "
            f"{sft.gain_of_prompt_error:.1g}, limit 3%)."
        )


def other_words(run: Evidence) -> Iterator[str]:
    """PPO's prompts have words that the reward model's training prompts lack."""
    share, own = run.ppo.unknown_words, run.rm.unknown_words
    if share > UNKNOWN_WORDS and share > 3 * own:
        yield (
            f"{share:.0%} of the words in PPO's prompts are in none of the prompts that the reward model was trained "
            f"on (limit {UNKNOWN_WORDS:.0%}); of its own held-out prompts {own:.0%}."
        )


def shifted(ppo: Figures) -> Iterator[str]:
    """The scores of the first replies are not around 0, to which the RM stage normalised them."""
    if abs(ppo.start.score) > 0.5 and ppo.only_normalised_rewards == 1:
        yield (
            f"PPO's first replies score {ppo.start.score:+.2f} standard deviations from SFT's samples in the RM stage "
            "(limit 0.5), although the same model wrote both."
        )


def accuracy(rm: Figures) -> str:
    return f"{rm.accuracy:.2f} (95 % interval {rm.accuracy_low95:.2f} to {rm.accuracy_high95:.2f})"


def misses_gold(run: Evidence) -> Iterator[Seen]:
    """The score rose, and gold did not."""
    yield from map(shows, run.said("ppo.overoptimisation"))
    before, after, change = run.ppo.before, run.ppo.after, run.gain("gold")
    if not run.gain("score_mean") > 0.5 * run.ppo.start.score_std:
        return
    rose = f"PPO raised the score from {before.score_mean:.2f} to {after.score_mean:.2f} and"
    # Two sets of replies vary by chance: a smaller fall needs the interval of `rlhf eval`.
    if change < -0.1 * run.ppo.gold_std or run.ppo.gold_change_high < 0:
        yield shows(f"{rose} lowered gold, from {before.gold:.3g} to {after.gold:.3g}.")
    elif change < 0.1 * run.ppo.gold_std:
        yield shows(f"{rose} hardly changed gold, from {before.gold:.3g} to {after.gold:.3g}.")


# ------------------------------------------------------------------------------------------------------------------ SFT


@of_sft(
    "Lower sft optimizer.learning_rate to a third or a tenth, lengthen optimizer.warmup_steps, and run all stages "
    "again",
    explains=("sft_underfit", "sft_without_eos", "sft_ignores_prompts", *LATER),
)
def sft_steps_too_large(run: Evidence) -> Iterator[Seen]:
    """The steps of SFT were too large."""
    sft = run.sft
    if sft.loss_end > 1.5 * sft.loss_lowest + 0.05:
        yield shows(
            f"The training loss fell to {sft.loss_lowest:.2f} nats per token and is {sft.loss_end:.2f} at the end."
        )
    if sft.loss_end > sft.loss_first:
        yield shows(
            f"The training loss rose from {sft.loss_first:.2f} at the first step to {sft.loss_end:.2f} at the end."
        )
    if sft.grad_spike > 10:  # good: 2
        yield supports(
            f"In the second half the gradient norm jumped to {sft.grad_spike:.0f} times its median (limit 10)."
        )
        yield from map(supports, ignored_prompts(sft))
    if sft.bad_steps > 0:
        yield supports(f"{sft.bad_steps:.0f} steps had a NaN or infinite loss or gradient.")


@of_sft(
    "Raise sft training.num_steps (or num_epochs), or a learning rate that is too low, until the held-out loss is "
    "flat; then run RM and PPO again",
    explains=("sft_without_eos", "sft_ignores_prompts", *LATER),
)
def sft_underfit(run: Evidence) -> Iterator[Seen]:
    """SFT ended before the model had learned the demonstrations."""
    sft = run.sft
    # Only if it fell by a tenth at all.
    if sft.loss_half - sft.loss_end > 0.25 * (sft.loss_first - sft.loss_end) > 0.025 * sft.loss_first:
        yield shows(
            f"The training loss was still falling: {sft.loss_first:.2f} nats per token at the first of {sft.steps:.0f} "
            f"steps, {sft.loss_half:.2f} in the middle, {sft.loss_end:.2f} at the end. The second half had "
            f"{(sft.loss_half - sft.loss_end) / (sft.loss_first - sft.loss_end):.0%} of the fall (limit 25%)."
        )
    if sft.probed_loss > 0.75 * sft.token_entropy:
        yield shows(
            f"The held-out loss is {sft.probed_loss:.2f} nats per token. A model that knows only how frequent each "
            f"token is has {sft.token_entropy:.2f} (limit 75% of it)."
        )


@of_sft(
    "Lower sft training.num_steps, set evaluation.keep_best, or add demonstrations",
    explains=("sft_underfit", "sft_ignores_prompts", *LATER),
)
def sft_memorised(run: Evidence) -> Iterator[Seen]:
    """SFT memorised its training rows."""
    sft = run.sft
    yield from map(shows, run.said("sft.memorises"))
    if sft.loss > 1.5 * sft.loss_end + 0.05:  # good: 0.97 times
        yield shows(
            f"The held-out loss is {sft.loss:.3g} nats per token, and the training loss ended at {sft.loss_end:.3g} "
            "(limit 1.5 times that)."
        )


@of_sft(
    "Read a few demonstrations (`rlhf data show`): answers may be in another order than their prompts, or the same "
    "for all. If they fit, train longer or lower optimizer.learning_rate",
    explains=LATER,
    needs=("sft.gain_of_prompt",),
    wants=SFT_ROWS,
)
def sft_ignores_prompts(run: Evidence) -> Iterator[Seen]:
    """SFT's answers do not depend on their prompts."""
    yield from map(shows, ignored_prompts(run.sft))


@of_sft(
    "Raise sft data.max_length: `rlhf data check --for sft` says how many tokens keep 95 % of the rows",
    explains=("sft_underfit", "sft_memorised", "sft_ignores_prompts", *LATER),
    needs=("sft.skipped_share",),
    wants=SFT_ROWS,
)
def demonstrations_dropped(run: Evidence) -> Iterator[Seen]:
    """Most demonstrations are not used."""
    yield from skipped_rows("sft", run.sft)


@of_sft(
    "Read a few demonstrations (`rlhf data show`), and leave out canned answers, refusals and placeholders, or keep "
    "a few of each (data.deduplicate skips rows that are wholly the same)",
    explains=("sft_underfit", "sft_memorised", "sft_ignores_prompts", *LATER),
    needs=("sft.frequent_share",),
    wants=SFT_ROWS,
)
def demonstrations_repeat(run: Evidence) -> Iterator[Seen]:
    """Many demonstrations hold the same few answers."""
    sft = run.sft
    # "yes" may be right as often. Good: 0
    if sft.frequent_share > 0.2 and len(sft.answer.split()) >= 4:
        yield shows(
            f"{sft.frequent_share:.0%} of the training demonstrations have one of {sft.frequent_answers:.0f} answers "
            f"(limit 20%); {sft.answer_share:.0%} have {sft.answer.strip()[:60]!r}."
        )
    elif sft.answer_share > 0.5 and sft.other_words > 4 * len(sft.answer.split()):
        yield shows(
            f"{sft.answer_share:.0%} of the training demonstrations have the answer {sft.answer.strip()!r} (limit "
            f"50%); the others have {sft.other_words:.0f} words on average."
        )


@of_sft(
    "Cut the answers where the turn ends: `rlhf data show` marks the learned tokens. This program adds EOS itself",
    explains=("sft_without_eos", *LATER),
    needs=("sft.answers_with_markup",),
    wants=SFT_ROWS,
)
def demonstrations_hold_markup(run: Evidence) -> Iterator[Seen]:
    """The demonstrations contain the template or an end token as text, and so will the replies."""
    sft = run.sft
    if sft.answers_with_markup > 0.02:
        yield shows(
            f"{sft.answers_with_markup:.0%} of the held-out answers contain {sft.markup!r} as letters, which belongs "
            "around prompts or at the end of a turn."
        )


@of_sft(
    "Write the prompts of all stages alike, and look at the columns: `rlhf data show` prints demonstrations as the "
    "model reads them. If prompt and answer are swapped, set data.train.keys: {prompt: response, response: prompt}",
    explains=("demonstrations_repeat", "sft_memorised", "sft_ignores_prompts", *LATER),
    needs=("sft.prompt_end", "ppo.unknown_to_sft"),
    wants=PROMPTS,
)
def sft_prompts_differ(run: Evidence) -> Iterator[Seen]:
    """SFT learned to answer other prompts than the reward model and PPO have."""
    ppo = run.ppo
    yield from odd_end("sft", run)
    if ppo.unknown_words <= UNKNOWN_WORDS < ppo.unknown_to_sft:
        yield shows(
            f"{ppo.unknown_to_sft:.0%} of the words in PPO's prompts are in none of SFT's (limit {UNKNOWN_WORDS:.0%}), "
            f"and {ppo.unknown_words:.0%} in none of the reward model's training prompts."
        )


@of_sft(
    "Train SFT on whole answers whose EOS is a target: `rlhf data show` marks the learned tokens. In another tool, "
    "use a padding token that is not EOS. If replies end with another token, name it in rollout.stop_tokens",
    explains=("rm_weak", "rm_without_eos"),
    needs=("sft.eos_probability", "ppo.start.eos_fraction"),
    wants="held-out rows of SFT, or a PPO stage",
)
def sft_without_eos(run: Evidence) -> Iterator[Seen]:
    """The SFT model did not learn to end its replies."""
    sft, ppo = run.sft, run.ppo
    # A model that learned to end has the share of sentences that end there, seldom below 0.2.
    if sft.eos_probability < 0.05:
        yield shows(
            f"Where held-out demonstrations end, SFT gives EOS a probability of {sft.eos_probability:.2g} (limit 0.05)."
        )
    if sft.cut_share > 0.1:
        yield shows(
            f"{sft.cut_share:.0%} of the training answers do not end with EOS (limit 10%): they were cut at sft "
            f"data.max_length: {sft.data.max_length} tokens, in the middle of a sentence."
        )
    if sft.samples_ended == 0 and sft.samples >= 4:
        yield supports(f"None of SFT's last {sft.samples:.0f} samples ended by itself.")
    if ppo.start.eos_fraction < 0.2:
        yield supports(f"Before PPO trained, {ppo.start.eos_fraction:.0%} of the replies ended by themselves.")
    if sft.pad_is_eos == 1:
        yield supports("Padding and EOS are the same token; a loss that skips padding never learns to end.")


# ----------------------------------------------------------------------------------------------------- the reward model


@of_rm(
    "Read a few pairs (`rlhf data show`). If they are swapped, set data.train.keys: "
    "{chosen: rejected, rejected: chosen}, also for data.test, and train RM and PPO again",
    explains=("rm_without_eos", "rm_weak", "rm_memorised"),
    needs=("rm.judge_agrees_with_labels", "rm.gold_accuracy", "ppo.score_gold_correlation"),
    wants="a judge (evaluation.gold) or pairs with the columns gold_chosen and gold_rejected",
)
def labels_swapped(run: Evidence) -> Iterator[Seen]:
    """The labels of the pairs are swapped: the rejected answers are the better ones."""
    rm, ppo = run.rm, run.ppo
    # A random head may be below chance too, but its interval is seldom below 0.45.
    if rm.accuracy_high95 < 0.45:
        yield shows(
            f"The held-out accuracy is {accuracy(rm)}, below chance: training and held-out pairs have opposite labels."
        )
    if rm.judge_agrees_with_labels_high < 0.45:
        yield shows(
            f"The judge prefers the chosen answer in {rm.judge_agrees_with_labels:.0%} of "
            f"{rm.judge_agrees_with_labels_rows:.0f} held-out pairs."
        )
    if rm.judge_agrees_with_model_high < 0.45:
        yield shows(
            f"The judge and the reward model agree on {rm.judge_agrees_with_model:.0%} of "
            f"{rm.judge_agrees_with_model_rows:.0f} held-out pairs."
        )
    if rm.gold_accuracy < 0.45 and rm.accuracy > 0.5:
        yield shows(
            "By the columns gold_chosen and gold_rejected of the held-out pairs, the model is right in "
            f"{rm.gold_accuracy:.0%}; by their labels in {rm.accuracy:.0%}."
        )
    if ppo.score_gold_correlation < -0.2 and ppo.score_gold_pairs >= 100:  # standard error 0.06 with 256 replies
        yield shows(f"Over SFT's replies, score and gold correlate by {ppo.score_gold_correlation:.2f}.")
    if run.gain("score_mean") > 0 > run.gain("gold"):
        yield supports(
            f"PPO raised the score by {run.gain('score_mean'):.2g} and lowered gold from {ppo.before.gold:.3g} to "
            f"{ppo.after.gold:.3g}."
        )


@of_rm(
    "Train the reward model on pairs of this task, with prompts written as SFT's: `rlhf data show` prints them as "
    "the model reads them",
    explains=("rm_weak",),
    needs=("rm.prompt_end", "ppo.unknown_to_sft"),
    wants=PROMPTS,
)
def rm_prompts_differ(run: Evidence) -> Iterator[Seen]:
    """The reward model was trained on other prompts than SFT and PPO have."""
    ppo = run.ppo
    yield from odd_end("rm", run)
    if ppo.unknown_to_sft <= UNKNOWN_WORDS:
        for text in other_words(run):
            yield shows(text)
            yield supports(f"SFT's training prompts lack only {ppo.unknown_to_sft:.0%} of the words in PPO's prompts.")
    yield from map(supports, shifted(ppo))


@of_rm(
    "Raise rm optimizer.learning_rate or training.num_steps, and check model.freeze. If rewards.path names a model "
    "of your own, it must have a trained head",
    explains=("rm_without_eos", "labels_swapped", "rm_weak"),
)
def rm_untrained(run: Evidence) -> Iterator[Seen]:
    """The reward model was hardly trained: its scores are those of a random head."""
    rm = run.rm
    moved = f"the largest relative change of a weight matrix is {rm.moved:.1g}"  # good: 0.1
    measured = f", and the held-out accuracy is {accuracy(rm)}" if rm.accuracy >= 0 else ""
    # A head that was trained on a frozen backbone passes 0.65, a random one does not.
    if rm.moved < 0.001 and not (rm.accuracy_low95 > 0.65 or rm.mse_high95 < rm.target_variance):
        yield shows(f"Its weights are those that it started from: {moved} (limit 0.001){measured}.")
    is_guessing = rm.accuracy_low95 <= 0.5 <= rm.accuracy_high95
    if 0.02 > rm.moved >= 0.001 and is_guessing:
        yield supports(f"Its weights changed little: {moved} (limit 0.02){measured}.")
    if 0.97 * min(rm.loss_start, 0.693) <= rm.loss_end <= 1.2 * 0.693 and is_guessing:
        yield supports(
            f"The training loss did not fall: {rm.loss_start:.3f} in the first tenth of the {rm.steps:.0f} steps, "
            f"{rm.loss_end:.3f} in the last. Guessing has 0.693."
        )


@of_rm(
    "Lower rm optimizer.learning_rate to a third or a tenth, and lengthen optimizer.warmup_steps",
    explains=("rm_weak", "rm_without_eos"),
)
def rm_steps_too_large(run: Evidence) -> Iterator[Seen]:
    """The steps of the reward model were too large."""
    rm = run.rm
    if rm.loss_end > 1.2 * 0.693 and rm.training_accuracy >= 0:
        # A new head may start with such a loss, so this shows large steps only if the weights moved.
        sign = shows if rm.moved > 0.001 else supports
        yield sign(
            f"The training loss is {rm.loss_end:.2f} at the end. With the same score for all answers it is 0.693."
        )
    if rm.moved > 0.5 and run.weakness:
        yield shows(
            f"A weight matrix changed by {rm.moved:.1f} times its own size, and the held-out accuracy is "
            f"{accuracy(rm)}."
        )
    if rm.bad_steps > 0:
        yield supports(f"{rm.bad_steps:.0f} steps had a NaN or infinite loss or gradient.")


@of_rm(
    "Raise rm data.max_length: `rlhf data check --for rm` says how many tokens keep 95 % of the rows",
    explains=("rm_weak", "rm_memorised", "rm_untrained", "pairs_length_biased"),
    needs=("rm.skipped_share",),
    wants=RM_ROWS,
)
def pairs_dropped(run: Evidence) -> Iterator[Seen]:
    """Most pairs are not used."""
    yield from skipped_rows("rm", run.rm)


@of_rm(
    "Join the answers to their prompts again, by an id rather than by the order of the rows: `rlhf data show` prints "
    "a few pairs",
    explains=("labels_noisy", "rm_weak"),
    needs=("rm.echo",),
    wants=RM_ROWS,
)
def pairs_mixed_up(run: Evidence) -> Iterator[Seen]:
    """The prompts of the pairs do not belong to their answers."""
    sft, rm = run.sft, run.rm
    # Good: all of SFT's echo, which is 20 standard errors.
    if rm.echo + 2 * rm.echo_error < 0.25 * sft.echo and sft.echo > 5 * sft.echo_error:
        yield shows(
            f"The answers of the pairs do not repeat words of their own prompts: {rm.echo:+.1%} of their words more "
            f"than of another row's prompt (standard error {rm.echo_error:.1%}). In SFT's demonstrations it is "
            f"{sft.echo:+.1%} (limit 25% of that)."
        )


@of_rm(
    "Remove that word from the answers, or add pairs in which both or neither have it. It often marks which model or "
    "tool wrote an answer",
    explains=("rm_weak", "pairs_length_biased"),
    needs=("rm.word_share",),
    wants=RM_ROWS,
)
def pairs_marked(run: Evidence) -> Iterator[Seen]:
    """One word or letter tells the chosen answers from the rejected ones."""
    rm = run.rm
    if abs(rm.word_share) > 0.5:  # good: 0.14
        yield shows(
            f"In many training pairs only the {'chosen' if rm.word_share > 0 else 'rejected'} answer has {rm.word!r}: "
            f"in {abs(rm.word_share):.0%} of all more than only the other one (limit 50%)."
        )


@of_rm(
    "Train it on whole answers with EOS: raise rm data.max_length, set data.truncation: drop, and encode pairs of "
    "other tools with EOS",
    explains=("rm_weak",),
)
def rm_without_eos(run: Evidence) -> Iterator[Seen]:
    """The reward model was not trained where PPO reads it, at EOS."""
    rm, ppo = run.rm, run.ppo
    if rm.gain_without_eos > 2 * rm.gain_without_eos_error:
        yield shows(
            f"On {rm.probed_accuracy_rows:.0f} held-out pairs the accuracy is {rm.probed_accuracy:.3f} at EOS, where "
            f"PPO reads the score, and {rm.accuracy_without_eos:.3f} one token earlier (difference "
            f"{rm.gain_without_eos:.3f}, standard error {rm.gain_without_eos_error:.3f})."
        )
    # Rounding in another precision changes less.
    if rm.accuracy - rm.probed_accuracy > 0.02 and rm.probed_accuracy_rows == rm.num_rows:
        yield shows(
            f"The RM stage measured an accuracy of {rm.accuracy:.3f}. On the same pairs, read at EOS, it is "
            f"{rm.probed_accuracy:.3f}."
        )
    if ppo.cut_share > 0.5 and rm.data.truncation == "right":
        yield shows(
            f"{ppo.cut_share:.0%} of the replies were cut at rm data.max_length: {rm.data.max_length} tokens, so the "
            "model never saw their end."
        )


@of_rm(
    "Add pairs of similar length, or pairs whose better answer is the other one in length; until then set "
    "length_correction: true in rm.yaml",
    explains=("rm_weak",),
)
def pairs_length_biased(run: Evidence) -> Iterator[Seen]:
    """The pairs teach length: one answer is better because it is longer or shorter."""
    rm, ppo = run.rm, run.ppo
    share, which = max((rm.length_baseline, "longer"), (1 - rm.length_baseline, "shorter"))
    # Public preference data: 0.5 to 0.65. In fewer than 20 held-out pairs, one length may win by chance.
    if not share > 0.8 or rm.num_rows < 20:
        return
    yield shows(
        f"In {share:.0%} of the held-out pairs the {which} answer is the chosen one (limit 80%), so its length alone "
        "tells which is better."
    )
    if abs(rm.score_length_correlation) > 0.5:
        yield supports(f"Score and length of held-out answers correlate by {rm.score_length_correlation:.2f}.")
    if ppo.after.length > 1.25 * ppo.before.length or ppo.before.length > 1.25 * ppo.after.length:
        yield supports(
            f"PPO changed the length of replies from {ppo.before.length:.0f} to {ppo.after.length:.0f} tokens."
        )


@of_rm(
    "Label a few pairs yourself (`rlhf label`): where you disagree with one source or labeller, leave it out. Pairs "
    "with a clear difference teach more than many noisy ones",
    explains=("rm_weak", "rm_memorised", "rm_without_eos"),
)
def labels_noisy(run: Evidence) -> Iterator[Seen]:
    """Many labels of the pairs are wrong."""
    rm = run.rm
    # Good: 0.97; people agree with people in 0.65 to 0.75 of hard pairs.
    if 0.75 > rm.judge_agrees_with_labels_high >= 0.45:
        yield shows(
            f"The judge prefers the chosen answer in only {rm.judge_agrees_with_labels:.0%} of "
            f"{rm.judge_agrees_with_labels_rows:.0f} held-out pairs (limit 75%), and the reward model's choice in "
            f"{rm.judge_agrees_with_model:.0%}."
        )
    if rm.gold_accuracy - rm.accuracy > 0.1:
        yield shows(
            f"By the columns gold_chosen and gold_rejected the model is right in {rm.gold_accuracy:.0%} of the "
            f"held-out pairs, by their labels in {rm.accuracy:.0%}."
        )
    if rm.contradicted_share > 0.15 and rm.repeated_pairs >= 20:
        yield shows(
            f"{rm.contradicted_share:.0%} of {rm.repeated_pairs:.0f} training pairs that occur again have the opposite "
            "label there (limit 15%)."
        )


@of_rm("Add pairs, lower rm training.num_steps, or set evaluation.keep_best", explains=("rm_weak", "rm_without_eos"))
def rm_memorised(run: Evidence) -> Iterator[Seen]:
    """The reward model memorised its training pairs."""
    rm = run.rm
    yield from map(shows, run.said("rm.memorises"))
    # Good: up to 0.03.
    if rm.training_accuracy - rm.accuracy > 0.25 and rm.training_accuracy - rm.accuracy_high95 > 0.125:
        yield shows(
            f"The training accuracy ended at {rm.training_accuracy:.2f}, and the held-out accuracy is {accuracy(rm)}."
        )


@of_rm("Train it on more pairs, and on pairs that differ in what you want. More rows in data.test narrow the interval")
def rm_weak(run: Evidence) -> Iterator[Seen]:
    """The reward model may be no better than guessing, or than a simple rule."""
    if run.weakness:
        yield shows(run.weakness)


# ------------------------------------------------------------------------------------------------------------------ PPO


@of_ppo("Give the reward model in rewards a weight above 0, unless it scores something bad")
def reward_opposed(run: Evidence) -> Iterator[Seen]:
    """The reward asks for the opposite: a reward model has a negative weight."""
    ppo = run.ppo
    for weight in run.settings.get("ppo.opposed", []):
        yield shows(f"A reward model in rewards has the weight {weight:g}: its worst answers score best.")
    if run.gain("score_mean") > 0 > run.gain("gold"):
        yield supports(f"Gold fell from {ppo.before.gold:.3g} to {ppo.after.gold:.3g} while the score rose.")


@of_ppo(
    "Score two replies of samples.jsonl by hand with your reward function: it must tell them apart",
    explains=("kl_too_strong",),
)
def reward_constant(run: Evidence) -> Iterator[Seen]:
    """The reward is the same for every reply."""
    ppo = run.ppo
    if ppo.start.score_std == 0 == ppo.end.score_std:
        yield shows(f"All replies of a batch have the same score, {ppo.start.score:.3g}, at the start and at the end.")
        yield from map(supports, run.said("ppo.score_saturated"))
    if ppo.end.score_std == 0 != ppo.start.score_std and not run.gain("score_mean") > ppo.start.score_std:
        yield shows(
            f"At the end all replies of a batch have the same score, {ppo.end.score:.3g}. PPO hardly raised it: the "
            f"first replies scored {ppo.start.score:.3g} already, with a standard deviation of "
            f"{ppo.start.score_std:.2g}."
        )


@of_ppo(
    "Remove ref_policy: null measures the KL to the model that PPO starts from. If it is meant, to continue an "
    "earlier run, see that it is the model which that run started from"
)
def reference_differs(run: Evidence) -> Iterator[Seen]:
    """The KL is measured to another model than the one that PPO starts from."""
    ppo = run.ppo
    if ppo.before.kl > 8:  # Good: 0; a run that continues another: 3 to 5.
        yield shows(
            f"Before PPO trained, the KL is {ppo.before.kl:.3g} nats per reply already (limit 8), and "
            f"{ppo.after.kl:.3g} at the end: the penalty pulls the policy to a model that writes other replies."
        )


@of_ppo(
    "Raise ppo data.max_prompt_length: `rlhf data check --for ppo` says how many tokens keep 95 % of the prompts",
    explains=("prompts_few",),
    needs=("ppo.skipped_share",),
    wants=PPO_ROWS,
)
def prompts_dropped(run: Evidence) -> Iterator[Seen]:
    """Most prompts are not used."""
    yield from skipped_rows("ppo", run.ppo, "max_prompt_length")


@of_ppo(
    "Add prompts to ppo data.train, some thousand different ones; `rlhf data check` counts rows that repeat",
    needs=("ppo.distinct_prompts",),
    wants=PPO_ROWS,
)
def prompts_few(run: Evidence) -> Iterator[Seen]:
    """PPO has too few different prompts."""
    ppo = run.ppo
    batch_size = ppo.ppo.rollout_batch_size
    uses = ppo.iterations * batch_size / max(ppo.distinct_prompts, 1)
    if 0 < ppo.distinct_prompts < batch_size and uses > 50:
        yield shows(
            f"PPO has {ppo.distinct_prompts:.0f} different prompts in {ppo.prompts:.0f} rows, fewer than a batch of "
            f"{batch_size} (ppo.rollout_batch_size), and answered each about {uses:.0f} times."
        )


@of_ppo("Train SFT and the reward model on prompts of this kind too, or give PPO prompts of theirs")
def prompts_differ(run: Evidence) -> Iterator[Seen]:
    """PPO's prompts are of another kind than those that the reward model was trained on."""
    if not run.ppo.unknown_to_sft <= UNKNOWN_WORDS:
        yield from map(shows, other_words(run))


@of_ppo(
    "Give data.prompt_template the same value in all three stages, or write the prompts as SFT's: `rlhf data show` "
    "prints them as the model reads them. If they are cut, raise data.max_prompt_length",
    explains=("prompts_differ",),
    needs=("sft.prompt_end", "rm.prompt_end"),
    wants="three prompts in samples.jsonl of SFT or RM",
)
def template_differs(run: Evidence) -> Iterator[Seen]:
    """PPO's prompts are written in another template than those of the stages before."""
    yield from odd_end("ppo", run)
    yield from map(supports, shifted(run.ppo))


@of_ppo("Set rollout.temperature to that of the model's use, usually 1.0, and rm evaluation.temperature to the same")
def temperature_differs(run: Evidence) -> Iterator[Seen]:
    """PPO samples at another temperature than the stages before."""
    sft, ppo = run.sft, run.ppo
    before, now = run.settings.get("rm.evaluation.temperature", 1.0), ppo.rollout.temperature
    if not max(now / before, before / now) >= 1.25:
        return
    yield supports(
        f"PPO samples at rollout.temperature {now:g}, and the reward model was normalised on samples at {before:g}."
    )
    # At the temperature of training the two are about equal.
    if ppo.start.entropy > 2 * sft.loss or sft.loss > 2 * ppo.start.entropy:
        yield shows(
            f"The entropy of the first replies is {ppo.start.entropy:.2f} nats per token, and SFT's held-out loss "
            f"{sft.loss:.2f}; at the temperature of training they are about equal."
        )
    yield from map(supports, shifted(ppo))


@of_ppo(
    "Lower ppo.kl_coef (0.05 to 0.2 for normalised scores), or raise ppo.kl_target. If ppo.score_clip is below the "
    "standard deviation of the scores, raise it to about 5 of them"
)
def kl_too_strong(run: Evidence) -> Iterator[Seen]:
    """The KL penalty costs more than the score can gain."""
    ppo = run.ppo
    spread, clip, kl_coef = ppo.start.score_std, ppo.ppo.score_clip, ppo.end.kl_coef
    if not (spread > 0 and kl_coef > 0):
        return
    text = f"The scores of the first replies have a standard deviation of {spread:.2g}"
    if clip is not None and clip < spread:
        spread, text = clip, f"{text}; ppo.score_clip makes that at most {clip:g}"
    # Among policies at a KL of K, with normal scores of standard deviation s, the best one gains s * sqrt(2 * K), so a
    # penalty c * K is best paid at K = s ** 2 / (2 * c ** 2).
    best_kl = spread**2 / (2 * kl_coef**2)
    if best_kl < 0.1:  # nats per reply; good: 45
        yield shows(
            f"{text}, so with ppo.kl_coef {kl_coef:.3g} the best policy is {best_kl:.2g} nats from SFT and gains "
            f"{spread**2 / kl_coef:.2g} in score. The run's KL of {ppo.end.kl:.2g} nats costs "
            f"{kl_coef * ppo.end.kl:.2g}, and its score changed by {ppo.end.score - ppo.start.score:+.2g}."
        )


@of_ppo("Set ppo.clip_range to 0.2", explains=("ppo_hardly_moved",))
def clip_too_narrow(run: Evidence) -> Iterator[Seen]:
    """The clip range is smaller than ordinary steps."""
    ppo = run.ppo
    step = math.sqrt(2 * max(ppo.mean.approx_kl, 0.0))  # nats: the usual log-ratio of a token
    if ppo.mean.clip_fraction > 0.02 and step < 0.02:  # good: a step of 0.03, and then 0.002 of the tokens
        yield shows(
            f"{ppo.mean.clip_fraction:.1%} of the tokens are clipped (limit 2%), although a token's log-probability "
            f"changes by only about {step:.2g} nats in an iteration. ppo.clip_range is {ppo.ppo.clip_range}."
        )


@of_ppo("Set value_model.learning_rate to that of the policy or a few times it, and give value_model.warmup_iterations")
def value_untrained(run: Evidence) -> Iterator[Seen]:
    """The value model did not learn: its values are worse than a constant."""
    ppo = run.ppo
    yield from map(shows, run.said("ppo.value_blind"))
    # The variance is the error of the returns' mean. Good: 0.6 to 1.1 times that. Early values know no mean yet.
    if ppo.end.error > 2 * ppo.end.return_variance > 0 and ppo.iterations >= 20:
        yield shows(
            f"At the end the squared error of the values is {ppo.end.error:.3g}; that of the returns' mean alone is "
            f"{ppo.end.return_variance:.3g} (limit 2 times that). Explained variance: {ppo.end.explained_variance:.2g}."
        )


@of_ppo(
    "Raise rollout.max_new_tokens to the length of the demonstrations",
    explains=("ppo_hardly_moved", "policy_overoptimised", "policy_misjudged", "score_unlearned"),
)
def replies_cut(run: Evidence) -> Iterator[Seen]:
    """Replies are cut before they end."""
    sft, ppo = run.sft, run.ppo
    if ppo.start.eos_fraction < 0.5 and sft.eos_probability > 0.2:
        yield shows(
            f"Only {ppo.start.eos_fraction:.0%} of the first replies end within rollout.max_new_tokens "
            f"{ppo.rollout.max_new_tokens}, although SFT learned EOS (probability {sft.eos_probability:.2f} where "
            "demonstrations end)."
        )


@of_ppo(
    "Lower ppo optimizer.learning_rate to a third or a tenth, lower ppo.ppo_epochs, or set ppo.max_approx_kl",
    explains=("kl_unrestrained", "policy_overoptimised", "value_untrained", "score_unlearned"),
)
def ppo_steps_too_large(run: Evidence) -> Iterator[Seen]:
    """The steps of PPO were too large."""
    yield from map(shows, run.said("ppo.approx_kl", "ppo.clip_fraction"))
    yield from map(supports, run.said("ppo.kl_far", "ppo.gradient_far", "ppo.not_finite", "ppo.skipped", "ppo.empty"))


@of_ppo(
    "Raise ppo.kl_coef (0.05 to 0.2 for normalised scores), or use ppo.kl_controller: adaptive; keep the policy of "
    "the best evaluation (evaluation.best_metric)",
    explains=("policy_overoptimised",),
)
def kl_unrestrained(run: Evidence) -> Iterator[Seen]:
    """The KL penalty is too small to keep the policy near SFT."""
    ppo = run.ppo
    kl_coef, gain = ppo.ppo.kl_coef, ppo.end.score - ppo.start.score
    if not ppo.end.kl > KL_RUNAWAY or kl_coef is None or ppo.ppo.kl_controller == "adaptive":
        return
    if not (kl_coef <= 0 or kl_coef * ppo.end.kl < 0.05 * max(gain, 0.0)):
        return
    sign = shows if ppo.has_reward_model is True else supports
    yield sign(
        f"The KL grew to {ppo.end.kl:.1f} nats per reply (limit {KL_RUNAWAY:g}) and cost {kl_coef * ppo.end.kl:.2g} "
        f"(ppo.kl_coef {kl_coef:g}), while the score gained {gain:.2g}: nothing keeps the policy near ref_policy."
    )
    extremes = ("entropy_collapse", "alike", "same_word", "kl_runaway", "truncated", "score_saturated")
    yield from map(supports, run.said(*(f"ppo.{name}" for name in extremes)))
    if run.gain("gold") < 0:
        yield supports(f"Gold fell from {ppo.before.gold:.3g} to {ppo.after.gold:.3g}.")


@of_ppo(
    "Raise ppo.kl_coef or lower ppo.num_iterations, keep the policy of the best evaluation (evaluation.best_metric), "
    "or train the reward model on labelled samples of this policy",
    needs=("ppo.before.gold",),
    wants="a judge (evaluation.gold)",
)
def policy_overoptimised(run: Evidence) -> Iterator[Seen]:
    """The policy exploits errors of the reward model."""
    if run.ppo.has_reward_model is True:
        yield from misses_gold(run)


@of_ppo(
    "Read rows of samples.jsonl with a high score: change the reward so that they would not score well",
    explains=("value_untrained",),
    needs=("ppo.before.gold",),
    wants="a judge (evaluation.gold)",
)
def policy_misjudged(run: Evidence) -> Iterator[Seen]:
    """The reward is not what the judge measures: the score rose without gold."""
    if run.ppo.has_reward_model is False:
        yield from misses_gold(run)


@of_ppo(
    "Check that the reward gives two replies to one prompt different scores for a reason that can be learned. If it "
    "does, lower optimizer.learning_rate, or raise ppo.rollout_batch_size",
    explains=("value_untrained",),
)
def score_unlearned(run: Evidence) -> Iterator[Seen]:
    """PPO moved the policy, and the score did not rise."""
    ppo = run.ppo
    yield from map(shows, run.said("ppo.objective_falls"))
    if run.gain("score_mean") < 0.1 * ppo.start.score_std and ppo.after.kl > MOVED and ppo.iterations >= 20:
        yield shows(
            f"After {ppo.iterations:.0f} iterations the policy is {ppo.after.kl:.2g} nats from SFT, and the score of "
            f"held-out replies changed by {run.gain('score_mean'):+.2g}. Its standard deviation was "
            f"{ppo.start.score_std:.2g} (limit 10% of it)."
        )


@of_ppo("Raise ppo optimizer.learning_rate or ppo.num_iterations, or lower ppo.kl_coef")
def ppo_hardly_moved(run: Evidence) -> Iterator[Seen]:
    """PPO hardly changed the policy."""
    ppo = run.ppo
    if abs(ppo.after.kl) < 0.05:
        yield shows(
            f"After {ppo.iterations:.0f} iterations the KL to SFT is {ppo.after.kl:.2g} nats per reply (limit 0.05), "
            f"and the score went from {ppo.before.score_mean:.2f} to {ppo.after.score_mean:.2f}."
        )
