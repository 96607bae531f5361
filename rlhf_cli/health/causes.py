"""What can be wrong with a run: the causes that `rlhf diagnose` can name, in the order of the stages.

See `findings.py` for how to read a row. Where a rule of a running stage sees the same thing, its finding is evidence.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_cli.health.evidence import Evidence, common_end
from rlhf_cli.health.findings import Seen, said, table
from rlhf_cli.health.ppo_rules import KL_RUNAWAY, MOVED  # noqa: F401  they are in the table

LATER = "rm_weak rm_without_eos template_differs prompts_differ"
"""What a language model that cannot answer may cause in the later stages."""
UNKNOWN_WORDS = 0.2
"""Share of the words of PPO's prompts that the training prompts of a stage lack."""
IGNORES_PROMPTS = (
    "max(0.03 * sft.probed_loss, 0.005) > sft.gain_of_prompt + 2 * sft.gain_of_prompt_error and not sft.mixed_rows < 20"
)
"""The second limit is for losses near 0: there smaller differences mean nothing. Good: 5 times the loss."""
IGNORES_PROMPTS_TEXT = (
    "Behind the prompt of another row the held-out answers are as likely as behind their own: the loss of "
    "{sft.probed_loss:.3g} nats per token changes by {sft.gain_of_prompt:+.2g} (standard error "
    "{sft.gain_of_prompt_error:.1g}, limit {limit:.0%})."
)
GUESSING = "rm.accuracy_low95 <= 0.5 <= rm.accuracy_high95"
ACCURACY = "{rm.accuracy:.2f} (95 % interval {rm.accuracy_low95:.2f} to {rm.accuracy_high95:.2f})"
WEIGHTS_MOVED = "the largest relative change of a weight matrix is {rm.moved:.1g} (limit {limit:g})"
UNTRAINED = "rm.moved < 0.001 and not (rm.accuracy_low95 > 0.65 or rm.mse_high95 < rm.target_variance)"
"""A head that was trained on a frozen backbone passes 0.65, a random one does not."""
DIVERGED = "rm.loss_end > 1.2 * 0.693 and rm.training_accuracy >= 0"
DIVERGED_TEXT = (
    "The training loss is {rm.loss_end:.2f} at the end. A model that gives all answers the same score has 0.693."
)
LENGTH_WINS = "0.8 < max(rm.length_baseline, 1 - rm.length_baseline) and not rm.num_rows < 20"
"""Public preference data: 0.5 to 0.65. In fewer than 20 held-out pairs, one length may win by chance."""
OTHER_WORDS = "ppo.unknown_words > $UNKNOWN_WORDS and ppo.unknown_words > 3 * rm.unknown_words"
OTHER_WORDS_TEXT = (
    "{ppo.unknown_words:.0%} of the words in PPO's prompts are in none of the prompts that the reward model was "
    "trained on (limit {limit:.0%}); of its own held-out prompts {rm.unknown_words:.0%}."
)
SHIFTED = "abs(ppo.start.score) > 0.5 and ppo.only_normalised_rewards == 1"
SHIFTED_TEXT = (
    "PPO's first replies score {ppo.start.score:+.2f} standard deviations from SFT's samples in the RM stage (limit "
    "{limit:g}), although the same model wrote both."
)
RM_TEMPERATURE = "run.settings.get('rm.evaluation.temperature', 1.0)"
CLIPS = "ppo.ppo.score_clip is not none and ppo.ppo.score_clip < ppo.start.score_std"
SPREAD = "(ppo.ppo.score_clip if $CLIPS else ppo.start.score_std)"
BEST_KL = "$SPREAD ** 2 / (2 * ppo.end.kl_coef ** 2)"
"""Nats per reply. Among policies at a KL of K, with normal scores of standard deviation s, the best one gains
s * sqrt(2 * K), so a penalty c * K is best paid at K = s ** 2 / (2 * c ** 2). Good: 45."""
DEAR_KL = (
    ", so with ppo.kl_coef {ppo.end.kl_coef:.3g} the best policy is {$BEST_KL:.2g} nats from SFT and gains "
    "{$SPREAD ** 2 / ppo.end.kl_coef:.2g} in score. The run's KL of {ppo.end.kl:.2g} nats costs "
    "{ppo.end.kl_coef * ppo.end.kl:.2g}, and its score changed by {ppo.end.score - ppo.start.score:+.2g}."
)
KL_GREW = (
    "The KL grew to {ppo.end.kl:.1f} nats per reply (limit {$KL_RUNAWAY:g}) and cost "
    "{ppo.ppo.kl_coef * ppo.end.kl:.2g} (ppo.kl_coef {ppo.ppo.kl_coef:g}), while the score gained "
    "{ppo.end.score - ppo.start.score:.2g}: nothing keeps the policy near ref_policy."
)
ROSE = "run.gain('score_mean') > 0.5 * ppo.start.score_std"
FELL = "(run.gain('gold') < -0.1 * ppo.gold_std or ppo.gold_change_high < 0)"
"""By more than two sets of replies vary by chance: a smaller fall needs the interval of `rlhf eval`."""
MISSES_GOLD = """said: 2 ppo.overoptimisation
shows: $ROSE and $FELL
    PPO raised the score from {ppo.before.score_mean:.2f} to {ppo.after.score_mean:.2f} and lowered gold, from
    {ppo.before.gold:.3g} to {ppo.after.gold:.3g}.
shows: $ROSE and not $FELL and run.gain('gold') < 0.1 * ppo.gold_std
    PPO raised the score from {ppo.before.score_mean:.2f} to {ppo.after.score_mean:.2f} and hardly changed gold, from
    {ppo.before.gold:.3g} to {ppo.after.gold:.3g}."""
STEP = "(2 * max(ppo.mean.approx_kl, 0.0)) ** 0.5"
"""Nats: the usual log-ratio of a token."""
FIXED = 4
"""Characters by which two stages' prompts must end otherwise, to count as another template rather than as chance."""


def odd_end(blamed: str, run: Evidence) -> Iterator[Seen]:
    """The prompts of a stage end otherwise than those of all other stages."""
    ends = {key.partition(".")[0]: end for key, end in run.texts.items() if key.endswith(".prompt_end")}
    if (of_ppo := ends.pop("ppo", None)) is None:
        return
    # A few prompts may share more letters than their template by chance.
    others = [s for s, end in ends.items() if max(len(end), len(of_ppo)) - len(common_end([end, of_ppo])) >= FIXED]
    if blamed == ("ppo" if len(others) == len(ends) else "".join(others)):
        for stage in others:
            one, other = (repr(text[-30:]) if text else "nothing in common" for text in (ends[stage], of_ppo))
            yield 2, f"The prompts of {stage} end with {one}, those of PPO with {other}."


def opposed(run: Evidence) -> Iterator[Seen]:
    for weight in run.settings.get("ppo.opposed", []):
        yield 2, f"A reward model in rewards has the weight {weight:g}: its worst answers score best."


def saturated(run: Evidence) -> Iterator[Seen]:
    if run["ppo.start.score_std"] == 0 == run["ppo.end.score_std"]:
        yield from said(1, "ppo.score_saturated")(run)


CAUSES = (
    *table(
        """
sft_steps_too_large: The steps of SFT were too large.
try: Lower sft optimizer.learning_rate to a third or a tenth, lengthen optimizer.warmup_steps, and run all stages again
shows: sft.loss_end > 1.5 * sft.loss_lowest + 0.05
    The training loss had come down to {sft.loss_lowest:.2f} nats per token and is {sft.loss_end:.2f} at the end.
shows: sft.loss_end > sft.loss_first
    The training loss is higher at the end ({sft.loss_end:.2f}) than at the first step ({sft.loss_first:.2f}).
# good: 2
supports: sft.grad_spike > 10
    In the second half of the steps the gradient norm jumped to {sft.grad_spike:.0f} times its median (limit {limit:g}).
supports: $IGNORES_PROMPTS and sft.grad_spike > 10
    $IGNORES_PROMPTS_TEXT
supports: sft.bad_steps > 0
    {sft.bad_steps:.0f} steps had a NaN or infinite loss or gradient.
explains: sft_underfit sft_without_eos sft_ignores_prompts $LATER

sft_underfit: SFT ended before the model had learned the demonstrations.
try: Raise sft training.num_steps (or num_epochs), or a learning rate that is too low, until the held-out loss is flat;
  then run RM and PPO again
# Only if it fell by a tenth at all.
shows: sft.loss_half - sft.loss_end > 0.25 * (sft.loss_first - sft.loss_end) > 0.025 * sft.loss_first
    The training loss was still falling: {sft.loss_first:.2f} nats per token at the first of {sft.steps:.0f} steps,
    {sft.loss_half:.2f} in the middle, {sft.loss_end:.2f} at the end. The second half had {(sft.loss_half -
    sft.loss_end) / (sft.loss_first - sft.loss_end):.0%} of the fall (limit {limit:.0%}).
shows: sft.probed_loss > 0.75 * sft.token_entropy
    The held-out loss is {sft.probed_loss:.2f} nats per token. A model that knows only how frequent each token is has
    {sft.token_entropy:.2f} (limit {limit:.0%} of it).
explains: sft_without_eos sft_ignores_prompts $LATER

sft_memorised: SFT memorised its training rows.
try: Lower sft training.num_steps, set evaluation.keep_best, or add demonstrations
said: 2 sft.memorises
# good: 0.97 times
shows: sft.loss > 1.5 * sft.loss_end + 0.05
    The held-out loss is {sft.loss:.3g} nats per token, and the training loss ended at {sft.loss_end:.3g} (limit
    {limit:g} times that).
explains: sft_underfit sft_ignores_prompts $LATER

sft_ignores_prompts: SFT's answers do not depend on their prompts.
try: Read a few demonstrations (`rlhf data show`): answers may be in another order than their prompts, or the same for
  all. If they fit, train longer or lower optimizer.learning_rate
shows: $IGNORES_PROMPTS
    $IGNORES_PROMPTS_TEXT
explains: $LATER
needs: sft.gain_of_prompt
wants: held-out rows of SFT

demonstrations_dropped: Most demonstrations are not used.
try: Raise sft data.max_length: `rlhf data check --for sft` says how many tokens keep 95 % of the rows
shows: sft.skipped_share > 0.5
    {sft.skipped_share:.0%} of the rows in sft data.train are skipped (limit {limit:.0%}). data.max_length is
    {sft.data.max_length} tokens; the stage prints how many rows are longer.
explains: sft_underfit sft_memorised sft_ignores_prompts $LATER
needs: sft.skipped_share
wants: held-out rows of SFT

demonstrations_repeat: Many demonstrations hold the same few answers.
try: Read a few demonstrations (`rlhf data show`), and leave out canned answers, refusals and placeholders, or keep a
  few of each (data.deduplicate skips rows that are wholly the same)
# "yes" may be right as often. Good: 0
shows: sft.frequent_share > 0.2 and len(words(sft.answer)) >= 4
    {sft.frequent_share:.0%} of the training demonstrations have one of {sft.frequent_answers:.0f} answers (limit
    {limit:.0%}); {sft.answer_share:.0%} have {repr('%.60s' % strip(sft.answer))}.
# If the others are four times as long.
shows: sft.answer_share > 0.5 and sft.other_words > 4 * len(words(sft.answer)) and not (sft.frequent_share > 0.2 and
  len(words(sft.answer)) >= 4)
    {sft.answer_share:.0%} of the training demonstrations have the answer {repr(strip(sft.answer))} (limit {limit:.0%});
    the others have {sft.other_words:.0f} words on average.
explains: sft_underfit sft_memorised sft_ignores_prompts $LATER
needs: sft.frequent_share
wants: held-out rows of SFT

demonstrations_hold_markup: The demonstrations contain the template or an end token as text, and so will the replies.
try: Cut the answers where the turn ends: `rlhf data show` marks the learned tokens. This program adds EOS itself
shows: sft.answers_with_markup > 0.02
    {sft.answers_with_markup:.0%} of the held-out answers contain {repr(sft.markup)} as letters, which belongs around
    prompts or at the end of a turn.
explains: sft_without_eos $LATER
needs: sft.answers_with_markup
wants: held-out rows of SFT

sft_prompts_differ: SFT learned to answer other prompts than the reward model and PPO have.
try: Write the prompts of all stages alike, and look at the columns: `rlhf data show` prints demonstrations as the model
  reads them. If prompt and answer are swapped, set data.train.keys: {prompt: response, response: prompt}
sign: odd_end sft
shows: ppo.unknown_words <= $UNKNOWN_WORDS < ppo.unknown_to_sft
    {ppo.unknown_to_sft:.0%} of the words in PPO's prompts are in none of SFT's (limit {limit:.0%}), and
    {ppo.unknown_words:.0%} in none of the reward model's training prompts.
explains: demonstrations_repeat sft_memorised sft_ignores_prompts $LATER
needs: sft.prompt_end ppo.unknown_to_sft
wants: three prompts in samples.jsonl of SFT, RM and PPO, or a finished PPO stage and its prompts

sft_without_eos: The SFT model did not learn to end its replies.
try: Train SFT on whole answers whose EOS is a target: `rlhf data show` marks the learned tokens. In another tool, use a
  padding token that is not EOS. If replies end with another token, name it in rollout.stop_tokens
# A model that learned to end has the share of sentences that end there, seldom below 0.2.
shows: sft.eos_probability < 0.05
    Where held-out demonstrations end, SFT gives EOS a probability of {sft.eos_probability:.2g} (limit {limit:g}).
shows: sft.cut_share > 0.1
    {sft.cut_share:.0%} of the training answers do not end with EOS (limit {limit:.0%}): they were cut at sft
    data.max_length: {sft.data.max_length} tokens, in the middle of a sentence.
supports: sft.samples_ended == 0 and sft.samples >= 4
    None of SFT's last {sft.samples:.0f} samples ended by itself.
supports: ppo.start.eos_fraction < 0.2
    Before PPO trained, {ppo.start.eos_fraction:.0%} of the replies ended by themselves.
supports: sft.pad_is_eos == 1
    Padding and EOS are the same token; a loss that skips padding never learns to end.
explains: rm_weak rm_without_eos
needs: sft.eos_probability ppo.start.eos_fraction
wants: held-out rows of SFT, or a PPO stage
""",
        globals(),
        stage="sft",
    ),
    *table(
        """
labels_swapped: The labels of the pairs are swapped: the rejected answers are the better ones.
try: Read a few pairs (`rlhf data show`). If they are swapped, set data.train.keys: {chosen: rejected, rejected:
  chosen}, also for data.test, and train RM and PPO again
# A random head may be below chance too, but its interval is seldom below 0.45.
shows: rm.accuracy_high95 < 0.45
    The held-out accuracy is $ACCURACY, below chance: training and held-out pairs have opposite labels.
shows: rm.judge_agrees_with_labels_high < 0.45
    The judge prefers the chosen answer in {rm.judge_agrees_with_labels:.0%} of {rm.judge_agrees_with_labels_rows:.0f}
    held-out pairs.
shows: rm.judge_agrees_with_model_high < 0.45
    The judge and the reward model agree on {rm.judge_agrees_with_model:.0%} of {rm.judge_agrees_with_model_rows:.0f}
    held-out pairs.
shows: rm.gold_accuracy < 0.45 and rm.accuracy > 0.5
    By the columns gold_chosen and gold_rejected of the held-out pairs, the model is right in {rm.gold_accuracy:.0%}; by
    their labels in {rm.accuracy:.0%}.
# standard error 0.06 with 256 replies
shows: ppo.score_gold_correlation < -0.2 and ppo.score_gold_pairs >= 100
    Over SFT's replies, score and gold correlate by {ppo.score_gold_correlation:.2f}.
supports: run.gain('score_mean') > 0 > run.gain('gold')
    PPO raised the score by {run.gain('score_mean'):.2g} and lowered gold from {ppo.before.gold:.3g} to
    {ppo.after.gold:.3g}.
explains: rm_without_eos rm_weak rm_memorised
needs: rm.judge_agrees_with_labels rm.gold_accuracy ppo.score_gold_correlation
wants: a judge (evaluation.gold) or pairs with the columns gold_chosen and gold_rejected

rm_prompts_differ: The reward model was trained on other prompts than SFT and PPO have.
try: Train the reward model on pairs of this task, with prompts written as SFT's: `rlhf data show` prints them as the
  model reads them
sign: odd_end rm
shows: $OTHER_WORDS and ppo.unknown_to_sft <= $UNKNOWN_WORDS
    $OTHER_WORDS_TEXT
supports: $OTHER_WORDS and ppo.unknown_to_sft <= $UNKNOWN_WORDS
    SFT's training prompts lack only {ppo.unknown_to_sft:.0%} of the words in PPO's prompts.
supports: $SHIFTED
    $SHIFTED_TEXT
explains: rm_weak
needs: rm.prompt_end ppo.unknown_to_sft
wants: three prompts in samples.jsonl of SFT, RM and PPO, or a finished PPO stage and its prompts

rm_untrained: The reward model was hardly trained: its scores are those of a random head.
try: Raise rm optimizer.learning_rate or training.num_steps, and check model.freeze. If rewards.path names a model of
  your own, it must have a trained head
shows: $UNTRAINED and rm.accuracy >= 0
    Its weights are those that it started from: $WEIGHTS_MOVED, and the held-out accuracy is $ACCURACY.
shows: $UNTRAINED and not rm.accuracy >= 0
    Its weights are those that it started from: $WEIGHTS_MOVED.
# good: 0.1
supports: 0.02 > rm.moved >= 0.001 and $GUESSING
    Its weights changed little: $WEIGHTS_MOVED, and the held-out accuracy is $ACCURACY.
supports: 0.97 * min(rm.loss_start, 0.693) <= rm.loss_end <= 1.2 * 0.693 and $GUESSING
    The training loss did not fall: {rm.loss_start:.3f} in the first tenth of the {rm.steps:.0f} steps,
    {rm.loss_end:.3f} in the last. Guessing has 0.693.
explains: rm_without_eos labels_swapped rm_weak

rm_steps_too_large: The steps of the reward model were too large.
try: Lower rm optimizer.learning_rate to a third or a tenth, and lengthen optimizer.warmup_steps
# A new head may start with such a loss, so this shows large steps only if the weights moved.
shows: $DIVERGED and rm.moved > 0.001
    $DIVERGED_TEXT
supports: $DIVERGED and not rm.moved > 0.001
    $DIVERGED_TEXT
shows: rm.moved > 0.5 and run.weakness
    A weight matrix changed by {rm.moved:.1f} times its own size, and the held-out accuracy is $ACCURACY.
supports: rm.bad_steps > 0
    {rm.bad_steps:.0f} steps had a NaN or infinite loss or gradient.
explains: rm_weak rm_without_eos

pairs_dropped: Most pairs are not used.
try: Raise rm data.max_length: `rlhf data check --for rm` says how many tokens keep 95 % of the rows
shows: rm.skipped_share > 0.5
    {rm.skipped_share:.0%} of the rows in rm data.train are skipped (limit {limit:.0%}). data.max_length is
    {rm.data.max_length} tokens; the stage prints how many rows are longer.
explains: rm_weak rm_memorised rm_untrained pairs_length_biased
needs: rm.skipped_share
wants: the training pairs of RM

pairs_mixed_up: The prompts of the pairs do not belong to their answers.
try: Join the answers to their prompts again, by an id rather than by the order of the rows: `rlhf data show` prints a
  few pairs
# Good: all of SFT's echo, which is 20 standard errors.
shows: rm.echo + 2 * rm.echo_error < 0.25 * sft.echo and sft.echo > 5 * sft.echo_error
    The answers of the pairs do not repeat words of their own prompts: {rm.echo:+.1%} of their words more than of
    another row's prompt (standard error {rm.echo_error:.1%}). In SFT's demonstrations it is {sft.echo:+.1%} (limit 25%
    of that).
explains: labels_noisy rm_weak
needs: rm.echo
wants: the training pairs of RM

pairs_marked: One word or letter tells the chosen answers from the rejected ones.
try: Remove that word from the answers, or add pairs in which both or neither have it. It often marks which model or
  tool wrote an answer
# good: 0.14
shows: abs(rm.word_share) > 0.5
    In many training pairs only the {'chosen' if rm.word_share > 0 else 'rejected'} answer has {repr(rm.word)}: in
    {abs(rm.word_share):.0%} of all more than only the other one (limit {limit:.0%}).
explains: rm_weak pairs_length_biased
needs: rm.word_share
wants: the training pairs of RM

rm_without_eos: The reward model was not trained where PPO reads it, at EOS.
try: Train it on whole answers with EOS: raise rm data.max_length, set data.truncation: drop, and encode pairs of other
  tools with EOS
shows: rm.gain_without_eos > 2 * rm.gain_without_eos_error
    On {rm.probed_accuracy_rows:.0f} held-out pairs the accuracy is {rm.probed_accuracy:.3f} at EOS, where PPO reads the
    score, and {rm.accuracy_without_eos:.3f} one token earlier (difference {rm.gain_without_eos:.3f}, standard error
    {rm.gain_without_eos_error:.3f}).
# Rounding in another precision changes less.
shows: rm.accuracy - rm.probed_accuracy > 0.02 and rm.probed_accuracy_rows == rm.num_rows
    The RM stage measured an accuracy of {rm.accuracy:.3f}. On the same pairs, read at EOS, it is
    {rm.probed_accuracy:.3f}.
shows: ppo.cut_share > 0.5 and rm.data.truncation == 'right'
    {ppo.cut_share:.0%} of the replies were cut at rm data.max_length: {rm.data.max_length} tokens, so the model never
    saw their end.
explains: rm_weak

pairs_length_biased: The pairs teach length: one answer is better because it is longer or shorter.
try: Add pairs of similar length, or pairs whose better answer is the other one in length; until then set
  length_correction: true in rm.yaml
shows: $LENGTH_WINS
    In {max(rm.length_baseline, 1 - rm.length_baseline):.0%} of the held-out pairs the {'longer' if rm.length_baseline
    >= 0.5 else 'shorter'} answer is the chosen one (limit {limit:.0%}), so its length alone tells which is better.
supports: $LENGTH_WINS and abs(rm.score_length_correlation) > 0.5
    Score and length of held-out answers correlate by {rm.score_length_correlation:.2f}.
supports: $LENGTH_WINS and (ppo.after.length > 1.25 * ppo.before.length or ppo.before.length > 1.25 * ppo.after.length)
    PPO changed the length of replies from {ppo.before.length:.0f} to {ppo.after.length:.0f} tokens.
explains: rm_weak

labels_noisy: Many labels of the pairs are wrong.
try: Label a few pairs yourself (`rlhf label`): where you disagree with one source or labeller, leave it out. Pairs with
  a clear difference teach more than many noisy ones
# Good: 0.97; people agree with people in 0.65 to 0.75 of hard pairs.
shows: 0.75 > rm.judge_agrees_with_labels_high >= 0.45
    The judge prefers the chosen answer in only {rm.judge_agrees_with_labels:.0%} of
    {rm.judge_agrees_with_labels_rows:.0f} held-out pairs (limit {limit:.0%}), and the reward model's choice in
    {rm.judge_agrees_with_model:.0%}.
shows: rm.gold_accuracy - rm.accuracy > 0.1
    By the columns gold_chosen and gold_rejected the model is right in {rm.gold_accuracy:.0%} of the held-out pairs, by
    their labels in {rm.accuracy:.0%}.
shows: rm.contradicted_share > 0.15 and rm.repeated_pairs >= 20
    {rm.contradicted_share:.0%} of {rm.repeated_pairs:.0f} training pairs that occur again have the opposite label there
    (limit {limit:.0%}).
explains: rm_weak rm_memorised rm_without_eos

rm_memorised: The reward model memorised its training pairs.
try: Add pairs, lower rm training.num_steps, or set evaluation.keep_best
said: 2 rm.memorises
# Good: up to 0.03.
shows: rm.training_accuracy - rm.accuracy > 0.25 and rm.training_accuracy - rm.accuracy_high95 > 0.125
    The training accuracy ended at {rm.training_accuracy:.2f}, and the held-out accuracy is $ACCURACY.
explains: rm_weak rm_without_eos

rm_weak: The reward model may be no better than guessing, or than a simple rule.
try: Train it on more pairs, and on pairs that differ in what you want. More rows in data.test narrow the interval
shows: run.weakness
    {run.weakness}
""",
        globals(),
        stage="rm",
    ),
    *table(
        """
reward_opposed: The reward asks for the opposite: a reward model has a negative weight.
try: Give the reward model in rewards a weight above 0, unless it scores something bad
sign: opposed
supports: run.gain('score_mean') > 0 > run.gain('gold')
    Gold fell from {ppo.before.gold:.3g} to {ppo.after.gold:.3g} while the score rose.

reward_constant: The reward is the same for every reply.
try: Score two replies of samples.jsonl by hand with your reward function: it must tell them apart
shows: ppo.start.score_std == 0 == ppo.end.score_std
    All replies of a batch have the same score, {ppo.start.score:.3g}, at the start and at the end.
sign: saturated
shows: ppo.end.score_std == 0 != ppo.start.score_std and not run.gain('score_mean') > ppo.start.score_std
    At the end all replies of a batch have the same score, {ppo.end.score:.3g}. PPO hardly raised it: the first replies
    scored {ppo.start.score:.3g} already, with a standard deviation of {ppo.start.score_std:.2g}.
explains: kl_too_strong

reference_differs: The KL is measured to another model than the one that PPO starts from.
try: Remove ref_policy: null measures the KL to the model that PPO starts from. If it is meant, to continue an earlier
  run, see that it is the model which that run started from
# Good: 0; a run that continues another: 3 to 5.
shows: ppo.before.kl > 8
    Before PPO trained, the KL is {ppo.before.kl:.3g} nats per reply already (limit {limit:g}), and {ppo.after.kl:.3g}
    at the end: the penalty pulls the policy to a model that writes other replies.

prompts_dropped: Most prompts are not used.
try: Raise ppo data.max_prompt_length: `rlhf data check --for ppo` says how many tokens keep 95 % of the prompts
shows: ppo.skipped_share > 0.5
    {ppo.skipped_share:.0%} of the rows in ppo data.train are skipped (limit {limit:.0%}). data.max_prompt_length is
    {ppo.data.max_prompt_length} tokens; the stage prints how many rows are longer.
explains: prompts_few
needs: ppo.skipped_share
wants: a finished PPO stage, and its prompts

prompts_few: PPO has too few different prompts.
try: Add prompts to ppo data.train, some thousand different ones; `rlhf data check` counts rows that repeat
# More than 50 uses of each.
shows: ppo.iterations * ppo.ppo.rollout_batch_size > 50 * ppo.distinct_prompts and 0 < ppo.distinct_prompts <
  ppo.ppo.rollout_batch_size
    PPO has {ppo.distinct_prompts:.0f} different prompts in {ppo.prompts:.0f} rows, fewer than a batch of
    {ppo.ppo.rollout_batch_size} (ppo.rollout_batch_size), and answered each about {ppo.iterations *
    ppo.ppo.rollout_batch_size / ppo.distinct_prompts:.0f} times.
needs: ppo.distinct_prompts
wants: a finished PPO stage, and its prompts

prompts_differ: PPO's prompts are of another kind than those that the reward model was trained on.
try: Train SFT and the reward model on prompts of this kind too, or give PPO prompts of theirs
shows: $OTHER_WORDS and not ppo.unknown_to_sft <= $UNKNOWN_WORDS
    $OTHER_WORDS_TEXT

template_differs: PPO's prompts are written in another template than those of the stages before.
try: Give data.prompt_template the same value in all three stages, or write the prompts as SFT's: `rlhf data show`
  prints them as the model reads them. If they are cut, raise data.max_prompt_length
sign: odd_end ppo
supports: $SHIFTED
    $SHIFTED_TEXT
explains: prompts_differ
needs: sft.prompt_end rm.prompt_end
wants: three prompts in samples.jsonl of SFT or RM

temperature_differs: PPO samples at another temperature than the stages before.
try: Set rollout.temperature to that of the model's use, usually 1.0, and rm evaluation.temperature to the same
given: max(ppo.rollout.temperature / $RM_TEMPERATURE, $RM_TEMPERATURE / ppo.rollout.temperature) >= 1.25
supports: true
    PPO samples at rollout.temperature {ppo.rollout.temperature:g}, and the reward model was normalised on samples at
    {$RM_TEMPERATURE:g}.
# At the temperature of training the two are about equal.
shows: ppo.start.entropy > 2 * sft.loss or sft.loss > 2 * ppo.start.entropy
    The entropy of the first replies is {ppo.start.entropy:.2f} nats per token, and SFT's held-out loss {sft.loss:.2f};
    at the temperature of training they are about equal.
supports: $SHIFTED
    $SHIFTED_TEXT

kl_too_strong: The KL penalty costs more than the score can gain.
try: Lower ppo.kl_coef (0.05 to 0.2 for normalised scores), or raise ppo.kl_target. If ppo.score_clip is below the
  standard deviation of the scores, raise it to about 5 of them
given: ppo.start.score_std > 0 and ppo.end.kl_coef > 0
shows: $BEST_KL < 0.1 and not ($CLIPS)
    The scores of the first replies have a standard deviation of {ppo.start.score_std:.2g}$DEAR_KL
shows: $BEST_KL < 0.1 and $CLIPS
    The scores of the first replies have a standard deviation of {ppo.start.score_std:.2g}; ppo.score_clip makes that at
    most {ppo.ppo.score_clip:g}$DEAR_KL

clip_too_narrow: The clip range is smaller than ordinary steps.
try: Set ppo.clip_range to 0.2
# Good: a step of 0.03, and then 0.002 of the tokens.
shows: ppo.mean.clip_fraction > 0.02 and $STEP < 0.02
    {ppo.mean.clip_fraction:.1%} of the tokens are clipped (limit {limit:.0%}), although a token's log-probability
    changes by only about {$STEP:.2g} nats in an iteration. ppo.clip_range is {ppo.ppo.clip_range}.
explains: ppo_hardly_moved

value_untrained: The value model did not learn: its values are worse than a constant.
try: Set value_model.learning_rate to that of the policy or a few times it, and give value_model.warmup_iterations
said: 2 ppo.value_blind
# The variance is the error of the returns' mean. Good: 0.6 to 1.1 times that. Early values know no mean yet.
shows: ppo.end.error > 2 * ppo.end.return_variance > 0 and ppo.iterations >= 20
    At the end the squared error of the values is {ppo.end.error:.3g}; that of the returns' mean alone is
    {ppo.end.return_variance:.3g} (limit {limit:g} times that). Explained variance: {ppo.end.explained_variance:.2g}.

replies_cut: Replies are cut before they end.
try: Raise rollout.max_new_tokens to the length of the demonstrations
shows: ppo.start.eos_fraction < 0.5 and sft.eos_probability > 0.2
    Only {ppo.start.eos_fraction:.0%} of the first replies end within rollout.max_new_tokens
    {ppo.rollout.max_new_tokens}, although SFT learned EOS (probability {sft.eos_probability:.2f} where demonstrations
    end).
explains: ppo_hardly_moved policy_overoptimised policy_misjudged score_unlearned

ppo_steps_too_large: The steps of PPO were too large.
try: Lower ppo optimizer.learning_rate to a third or a tenth, lower ppo.ppo_epochs, or set ppo.max_approx_kl
said: 2 ppo.approx_kl ppo.clip_fraction
said: 1 ppo.kl_far ppo.gradient_far ppo.not_finite ppo.skipped ppo.empty
explains: kl_unrestrained policy_overoptimised value_untrained score_unlearned

kl_unrestrained: The KL penalty is too small to keep the policy near SFT.
try: Raise ppo.kl_coef (0.05 to 0.2 for normalised scores), or use ppo.kl_controller: adaptive; keep the policy of the
  best evaluation (evaluation.best_metric)
given: ppo.end.kl > $KL_RUNAWAY and ppo.ppo.kl_coef is not none and ppo.ppo.kl_controller != 'adaptive' and
  (ppo.ppo.kl_coef * ppo.end.kl < 0.05 * max(ppo.end.score - ppo.start.score, 0.0) or ppo.ppo.kl_coef <= 0)
shows: ppo.has_reward_model == true
    $KL_GREW
supports: not ppo.has_reward_model == true
    $KL_GREW
said: 1 ppo.entropy_collapse ppo.alike ppo.same_word ppo.kl_runaway ppo.truncated ppo.score_saturated
supports: run.gain('gold') < 0
    Gold fell from {ppo.before.gold:.3g} to {ppo.after.gold:.3g}.
explains: policy_overoptimised

policy_overoptimised: The policy exploits errors of the reward model.
try: Raise ppo.kl_coef or lower ppo.num_iterations, keep the policy of the best evaluation (evaluation.best_metric), or
  train the reward model on labelled samples of this policy
given: ppo.has_reward_model == true
$MISSES_GOLD
needs: ppo.before.gold
wants: a judge (evaluation.gold)

policy_misjudged: The reward is not what the judge measures: the score rose without gold.
try: Read rows of samples.jsonl with a high score: change the reward so that they would not score well
given: ppo.has_reward_model == false
$MISSES_GOLD
explains: value_untrained
needs: ppo.before.gold
wants: a judge (evaluation.gold)

score_unlearned: PPO moved the policy, and the score did not rise.
try: Check that the reward gives two replies to one prompt different scores for a reason that can be learned. If it
  does, lower optimizer.learning_rate, or raise ppo.rollout_batch_size
said: 2 ppo.objective_falls
shows: run.gain('score_mean') < 0.1 * ppo.start.score_std and ppo.after.kl > $MOVED and ppo.iterations >= 20
    After {ppo.iterations:.0f} iterations the policy is {ppo.after.kl:.2g} nats from SFT, and the score of held-out
    replies changed by {run.gain('score_mean'):+.2g}. Its standard deviation was {ppo.start.score_std:.2g} (limit
    {limit:.0%} of it).
explains: value_untrained

ppo_hardly_moved: PPO hardly changed the policy.
try: Raise ppo optimizer.learning_rate or ppo.num_iterations, or lower ppo.kl_coef
shows: abs(ppo.after.kl) < 0.05
    After {ppo.iterations:.0f} iterations the KL to SFT is {ppo.after.kl:.2g} nats per reply (limit {limit:g}), and the
    score went from {ppo.before.score_mean:.2f} to {ppo.after.score_mean:.2f}.
""",
        globals(),
    ),
)
