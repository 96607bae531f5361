"""What can be wrong with SFT. See `findings.py` for how to read a row."""

from __future__ import annotations

from functools import partial

from rlhf_cli.health.findings import Sign, cause, said, shows, supports

LATER = ("rm_weak", "rm_without_eos", "template_differs", "prompts_differ")
"""What a language model that cannot answer may cause in the later stages."""
UNKNOWN_WORDS = 0.2
"""Share of the words of PPO's prompts that the training prompts of a stage lack."""
HELD_OUT = "held-out rows of SFT"
# The second limit is for losses near 0: there smaller differences mean nothing. Good: 5 times the loss.
IGNORES_PROMPTS = shows(
    "max(0.03 * sft.probed_loss, 0.005) > sft.gain_of_prompt + 2 * sft.gain_of_prompt_error and not sft.mixed_rows < "
    "20",
    "Behind the prompt of another row the held-out answers are as likely as behind their own: the loss of "
    "{sft.probed_loss:.3g} nats per token changes by {sft.gain_of_prompt:+.2g} (standard error "
    "{sft.gain_of_prompt_error:.1g}, limit {limit:.0%}).",
)


def dropped(stage: str, key: str) -> Sign:
    """The sign that a stage skips most of its training rows; `key` is the limit that most often does that."""
    return shows(
        f"{stage}.skipped_share > 0.5",
        f"{{{stage}.skipped_share:.0%}} of the rows in {stage} data.train are skipped (limit {{limit:.0%}}). {key} is "
        f"{{{stage}.{key}}} tokens; the stage prints how many rows are longer.",
    )


cause = partial(cause, "sft")
CAUSES = (
    cause(
        "sft_steps_too_large",
        "The steps of SFT were too large.",
        "Lower sft optimizer.learning_rate to a third or a tenth, lengthen optimizer.warmup_steps, and run all stages "
        "again",
        shows(
            "sft.loss_end > 1.5 * sft.loss_lowest + 0.05",
            "The training loss had come down to {sft.loss_lowest:.2f} nats per token and is {sft.loss_end:.2f} at the "
            "end.",
        ),
        shows(
            "sft.loss_end > sft.loss_first",
            "The training loss is higher at the end ({sft.loss_end:.2f}) than at the first step "
            "({sft.loss_first:.2f}).",
        ),
        supports(
            "sft.grad_spike > 10",  # good: 2
            "In the second half of the steps the gradient norm jumped to {sft.grad_spike:.0f} times its median (limit "
            "{limit:g}).",
        ),
        supports(f"{IGNORES_PROMPTS.when} and sft.grad_spike > 10", IGNORES_PROMPTS.text),
        supports("sft.bad_steps > 0", "{sft.bad_steps:.0f} steps had a NaN or infinite loss or gradient."),
        explains=("sft_underfit", "sft_without_eos", "sft_ignores_prompts", *LATER),
    ),
    cause(
        "sft_underfit",
        "SFT ended before the model had learned the demonstrations.",
        "Raise sft training.num_steps (or num_epochs), or a learning rate that is too low, until the held-out loss is "
        "flat; then run RM and PPO again",
        # Only if it fell by a tenth at all.
        shows(
            "sft.loss_half - sft.loss_end > 0.25 * (sft.loss_first - sft.loss_end) > 0.025 * sft.loss_first",
            "The training loss was still falling: {sft.loss_first:.2f} nats per token at the first of {sft.steps:.0f} "
            "steps, {sft.loss_half:.2f} in the middle, {sft.loss_end:.2f} at the end. The second half had "
            "{(sft.loss_half - sft.loss_end) / (sft.loss_first - sft.loss_end):.0%} of the fall (limit {limit:.0%}).",
        ),
        shows(
            "sft.probed_loss > 0.75 * sft.token_entropy",
            "The held-out loss is {sft.probed_loss:.2f} nats per token. A model that knows only how frequent each "
            "token is has {sft.token_entropy:.2f} (limit {limit:.0%} of it).",
        ),
        explains=("sft_without_eos", "sft_ignores_prompts", *LATER),
    ),
    cause(
        "sft_memorised",
        "SFT memorised its training rows.",
        "Lower sft training.num_steps, set evaluation.keep_best, or add demonstrations",
        said(2, "sft.memorises"),
        shows(
            "sft.loss > 1.5 * sft.loss_end + 0.05",  # good: 0.97 times
            "The held-out loss is {sft.loss:.3g} nats per token, and the training loss ended at {sft.loss_end:.3g} "
            "(limit {limit:g} times that).",
        ),
        explains=("sft_underfit", "sft_ignores_prompts", *LATER),
    ),
    cause(
        "sft_ignores_prompts",
        "SFT's answers do not depend on their prompts.",
        "Read a few demonstrations (`rlhf data show`): answers may be in another order than their prompts, or the same "
        "for all. If they fit, train longer or lower optimizer.learning_rate",
        IGNORES_PROMPTS,
        explains=LATER,
        needs=("sft.gain_of_prompt",),
        wants=HELD_OUT,
    ),
    cause(
        "demonstrations_dropped",
        "Most demonstrations are not used.",
        "Raise sft data.max_length: `rlhf data check --for sft` says how many tokens keep 95 % of the rows",
        dropped("sft", "data.max_length"),
        explains=("sft_underfit", "sft_memorised", "sft_ignores_prompts", *LATER),
        needs=("sft.skipped_share",),
        wants=HELD_OUT,
    ),
    cause(
        "demonstrations_repeat",
        "Many demonstrations hold the same few answers.",
        "Read a few demonstrations (`rlhf data show`), and leave out canned answers, refusals and placeholders, or "
        "keep a few of each (data.deduplicate skips rows that are wholly the same)",
        shows(
            "sft.frequent_share > 0.2 and len(words(sft.answer)) >= 4",  # "yes" may be right as often. Good: 0
            "{sft.frequent_share:.0%} of the training demonstrations have one of {sft.frequent_answers:.0f} answers "
            "(limit {limit:.0%}); {sft.answer_share:.0%} have {repr('%.60s' % strip(sft.answer))}.",
        ),
        # If the others are four times as long.
        shows(
            "sft.answer_share > 0.5 and sft.other_words > 4 * len(words(sft.answer)) and not "
            "(sft.frequent_share > 0.2 and len(words(sft.answer)) >= 4)",
            "{sft.answer_share:.0%} of the training demonstrations have the answer {repr(strip(sft.answer))} "
            "(limit {limit:.0%}); the others have {sft.other_words:.0f} words on average.",
        ),
        explains=("sft_underfit", "sft_memorised", "sft_ignores_prompts", *LATER),
        needs=("sft.frequent_share",),
        wants=HELD_OUT,
    ),
    cause(
        "demonstrations_hold_markup",
        "The demonstrations contain the template or an end token as text, and so will the replies.",
        "Cut the answers where the turn ends: `rlhf data show` marks the learned tokens. This program adds EOS itself",
        shows(
            "sft.answers_with_markup > 0.02",
            "{sft.answers_with_markup:.0%} of the held-out answers contain {repr(sft.markup)} as letters, which "
            "belongs around prompts or at the end of a turn.",
        ),
        explains=("sft_without_eos", *LATER),
        needs=("sft.answers_with_markup",),
        wants=HELD_OUT,
    ),
    cause(
        "sft_prompts_differ",
        "SFT learned to answer other prompts than the reward model and PPO have.",
        "Write the prompts of all stages alike, and look at the columns: `rlhf data show` prints demonstrations as the "
        "model reads them. If prompt and answer are swapped, set data.train.keys: {prompt: response, response: prompt}",
        lambda run: run.odd_end("sft"),
        shows(
            f"ppo.unknown_words <= {UNKNOWN_WORDS} < ppo.unknown_to_sft",
            "{ppo.unknown_to_sft:.0%} of the words in PPO's prompts are in none of SFT's (limit {limit:.0%}), and "
            "{ppo.unknown_words:.0%} in none of the reward model's training prompts.",
        ),
        explains=("demonstrations_repeat", "sft_memorised", "sft_ignores_prompts", *LATER),
        needs=("sft.prompt_end", "ppo.unknown_to_sft"),
        wants="three prompts in samples.jsonl of SFT, RM and PPO, or a finished PPO stage and its prompts",
    ),
    cause(
        "sft_without_eos",
        "The SFT model did not learn to end its replies.",
        "Train SFT on whole answers whose EOS is a target: `rlhf data show` marks the learned tokens. In another tool, "
        "use a padding token that is not EOS. If replies end with another token, name it in rollout.stop_tokens",
        # A model that learned to end has the share of sentences that end there, seldom below 0.2.
        shows(
            "sft.eos_probability < 0.05",
            "Where held-out demonstrations end, SFT gives EOS a probability of {sft.eos_probability:.2g} (limit "
            "{limit:g}).",
        ),
        shows(
            "sft.cut_share > 0.1",
            "{sft.cut_share:.0%} of the training answers do not end with EOS (limit {limit:.0%}): they were cut at sft "
            "data.max_length: {sft.data.max_length} tokens, in the middle of a sentence.",
        ),
        supports(
            "sft.samples_ended == 0 and sft.samples >= 4",
            "None of SFT's last {sft.samples:.0f} samples ended by itself.",
        ),
        supports(
            "ppo.start.eos_fraction < 0.2",
            "Before PPO trained, {ppo.start.eos_fraction:.0%} of the replies ended by themselves.",
        ),
        supports(
            "sft.pad_is_eos == 1", "Padding and EOS are the same token; a loss that skips padding never learns to end."
        ),
        explains=("rm_weak", "rm_without_eos"),
        needs=("sft.eos_probability", "ppo.start.eos_fraction"),
        wants="held-out rows of SFT, or a PPO stage",
    ),
)
