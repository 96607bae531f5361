"""What can be wrong with SFT. See `findings.py` for how rules work."""

from __future__ import annotations

from functools import partial

from rlhf_cli.health.evidence import Evidence
from rlhf_cli.health.findings import Signs, rule, rules_of, shows, supports

cause = partial(rule, stage="sft")

STILL_FALLING = 0.25
"""Share of the whole fall of the training loss that came in the second half of the steps."""
FALL = 0.1
"""Share of its first value by which the training loss must have fallen for that to mean anything."""
LITTLE_LEARNED = 0.75
"""Held-out loss as a share of the loss of a model that knows only how frequent each token is."""
EOS_UNKNOWN = 0.05
"""Mean probability of EOS where demonstrations end. A model that learned them has the share of sentences that end
there, seldom below 0.2."""
EOS_RARE = 0.2
"""Share of replies that end by themselves."""
SAMPLES = 4
LITTLE = 0.05
"""Nats per token. Near a loss of 0 smaller differences mean nothing, however large their ratio is."""
PROMPT_GAIN = 0.03
"""By what share of itself the held-out loss rises behind the prompt of another row. Good: 5."""
FEW_MIXED = 20
MARKUP = 0.02
"""Share of held-out answers."""
CUT = 0.1
"""Share of training answers that do not end with EOS."""
SKIPPED = 0.5
"""Share of a stage's training rows."""
FREQUENT = 0.2
"""Share of training demonstrations that have a frequent answer, if the most frequent one has WORDS words or more ..."""
WORDS = 4
"""... because "yes" may be right as often. Good: 0."""
PLACEHOLDER = 0.5
"""Share of training demonstrations with one shorter answer, if the others are WORDS times as long."""
MEMORISED = 1.5
"""Held-out loss, as a multiple of the training loss at the end. Good: 0.97."""
UNKNOWN_WORDS = 0.2
"""Share of the words of PPO's prompts that the training prompts of a stage lack."""
SPIKE = 10.0
"""The largest gradient norm of the second half of the steps, divided by their median. Good: 2."""
LOST_AGAIN = 1.5
"""Training loss at the end, divided by the lowest tenth of the steps."""


LATER = ("rm_weak", "rm_without_eos", "template_differs", "prompts_differ")
"""What a language model that cannot answer may cause in the later stages."""


@cause(
    "Lower sft optimizer.learning_rate to a third or a tenth, lengthen optimizer.warmup_steps, and run all stages "
    "again",
    explains=("sft_underfit", "sft_without_eos", "sft_ignores_prompts", *LATER),
)
def sft_steps_too_large(run: Evidence) -> Signs:
    """The steps of SFT were too large."""
    if run["sft.loss_end"] > LOST_AGAIN * run["sft.loss_lowest"] + LITTLE:
        yield shows(
            f"The training loss had come down to {run['sft.loss_lowest']:.2f} nats per token and is "
            f"{run['sft.loss_end']:.2f} at the end."
        )
    if run["sft.loss_end"] > run["sft.loss_first"]:
        yield shows(
            f"The training loss is higher at the end ({run['sft.loss_end']:.2f}) than at the first step "
            f"({run['sft.loss_first']:.2f})."
        )
    if run["sft.grad_spike"] > SPIKE:
        yield supports(
            f"In the second half of the steps the gradient norm jumped to {run['sft.grad_spike']:.0f} times its "
            f"median (limit {SPIKE:g})."
        )
        yield from (supports(sign.text) for sign in sft_ignores_prompts.signs(run))
    if run["sft.bad_steps"] > 0:
        yield supports(f"{run['sft.bad_steps']:.0f} steps had a NaN or infinite loss or gradient.")


@cause(
    "Raise sft training.num_steps (or num_epochs), or a learning rate that is too low, until the held-out loss is "
    "flat; then run RM and PPO again",
    explains=("sft_without_eos", "sft_ignores_prompts", *LATER),
)
def sft_underfit(run: Evidence) -> Signs:
    """SFT ended before the model had learned the demonstrations."""
    whole = run["sft.loss_first"] - run["sft.loss_end"]
    late = run["sft.loss_half"] - run["sft.loss_end"]
    if whole > FALL * run["sft.loss_first"] and late > STILL_FALLING * whole:
        yield shows(
            f"The training loss was still falling: {run['sft.loss_first']:.2f} nats per token at the first of "
            f"{run['sft.steps']:.0f} steps, {run['sft.loss_half']:.2f} in the middle, {run['sft.loss_end']:.2f} at "
            f"the end. The second half had {late / whole:.0%} of the fall (limit {STILL_FALLING:.0%})."
        )
    if run["sft.probed_loss"] > LITTLE_LEARNED * run["sft.token_entropy"]:
        yield shows(
            f"The held-out loss is {run['sft.probed_loss']:.2f} nats per token. A model that knows only how "
            f"frequent each token is has {run['sft.token_entropy']:.2f} (limit {LITTLE_LEARNED:.0%} of it)."
        )


@cause(
    "Lower sft training.num_steps, set evaluation.keep_best, or add demonstrations",
    explains=("sft_underfit", "sft_ignores_prompts", *LATER),
)
def sft_memorised(run: Evidence) -> Signs:
    """SFT memorised its training rows."""
    yield from map(shows, run.said("sft.memorises"))
    if run["sft.loss"] > MEMORISED * run["sft.loss_end"] + LITTLE:
        yield shows(
            f"The held-out loss is {run['sft.loss']:.3g} nats per token, and the training loss ended at "
            f"{run['sft.loss_end']:.3g} (limit {MEMORISED:g} times that)."
        )


@cause(
    "Read a few demonstrations (`rlhf data show`): answers may be in another order than their prompts, or the same "
    "for all. If they fit, train longer or lower optimizer.learning_rate",
    explains=LATER,
    needs=("sft.gain_of_prompt",),
    wants="held-out rows of SFT",
)
def sft_ignores_prompts(run: Evidence) -> Signs:
    """SFT's answers do not depend on their prompts."""
    gain, error, loss = run["sft.gain_of_prompt"], run["sft.gain_of_prompt_error"], run["sft.probed_loss"]
    if gain + 2 * error < max(PROMPT_GAIN * loss, LITTLE / 10) and not run["sft.mixed_rows"] < FEW_MIXED:
        yield shows(
            f"Behind the prompt of another row the held-out answers are as likely as behind their own: the loss of "
            f"{loss:.3g} nats per token changes by {gain:+.2g} (standard error {error:.1g}, limit {PROMPT_GAIN:.0%})."
        )


@cause(
    "Raise sft data.max_length: `rlhf data check --for sft` says how many tokens keep 95 % of the rows",
    explains=("sft_underfit", "sft_memorised", "sft_ignores_prompts", *LATER),
    needs=("sft.skipped_share",),
    wants="held-out rows of SFT",
)
def demonstrations_dropped(run: Evidence) -> Signs:
    """Most demonstrations are not used."""
    yield from skipped(run, "sft", "sft.data.max_length")


def skipped(run: Evidence, stage: str, limit: str) -> Signs:
    """The sign that a stage skips most of its training rows. `limit` is the key that most often does that."""
    if run[f"{stage}.skipped_share"] > SKIPPED:
        yield shows(
            f"{run[f'{stage}.skipped_share']:.0%} of the rows in {stage} data.train are skipped (limit {SKIPPED:.0%}). "
            f"{limit.partition('.')[2]} is {run.settings.get(limit)} tokens; the stage prints how many rows are longer."
        )


@cause(
    "Read a few demonstrations (`rlhf data show`), and leave out canned answers, refusals and placeholders, or keep a "
    "few of each (data.deduplicate skips rows that are wholly the same)",
    explains=("sft_underfit", "sft_memorised", "sft_ignores_prompts", *LATER),
    needs=("sft.frequent_share",),
    wants="held-out rows of SFT",
)
def demonstrations_repeat(run: Evidence) -> Signs:
    """Many demonstrations hold the same few answers."""
    answer, frequent, share = run.texts.get("sft.answer", ""), run["sft.frequent_share"], run["sft.answer_share"]
    words, others = len(answer.split()), run["sft.other_words"]
    if words >= WORDS and frequent > FREQUENT:
        yield shows(
            f"{frequent:.0%} of the training demonstrations have one of {run['sft.frequent_answers']:.0f} answers "
            f"(limit {FREQUENT:.0%}); {share:.0%} have {answer.strip()[:60]!r}."
        )
    elif share > PLACEHOLDER and others > WORDS * words:
        yield shows(
            f"{share:.0%} of the training demonstrations have the answer {answer.strip()!r} (limit {PLACEHOLDER:.0%}); "
            f"the others have {others:.0f} words on average."
        )


@cause(
    "Cut the answers where the turn ends: `rlhf data show` marks the learned tokens. This program adds EOS itself",
    explains=("sft_without_eos", *LATER),
    needs=("sft.answers_with_markup",),
    wants="held-out rows of SFT",
)
def demonstrations_hold_markup(run: Evidence) -> Signs:
    """The demonstrations contain the template or an end token as text, and so will the replies."""
    word = run.texts.get("sft.markup")
    if word is not None and run["sft.answers_with_markup"] > MARKUP:
        yield shows(
            f"{run['sft.answers_with_markup']:.0%} of the held-out answers contain {word!r} as letters, which "
            "belongs around prompts or at the end of a turn."
        )


@cause(
    "Write the prompts of all stages alike, and look at the columns: `rlhf data show` prints demonstrations as the "
    "model reads them. If prompt and answer are swapped, set data.train.keys: {prompt: response, response: prompt}",
    explains=("demonstrations_repeat", "sft_memorised", "sft_ignores_prompts", *LATER),
    needs=("sft.prompt_end", "ppo.unknown_to_sft"),
    wants="three prompts in samples.jsonl of SFT, RM and PPO, or a finished PPO stage and its prompts",
)
def sft_prompts_differ(run: Evidence) -> Signs:
    """SFT learned to answer other prompts than the reward model and PPO have."""
    if "rm.prompt_end" in run.texts and not run.other_end("rm"):
        yield from map(shows, run.other_end("sft"))
    if run["ppo.unknown_words"] <= UNKNOWN_WORDS < run["ppo.unknown_to_sft"]:
        yield shows(
            f"{run['ppo.unknown_to_sft']:.0%} of the words in PPO's prompts are in none of SFT's (limit "
            f"{UNKNOWN_WORDS:.0%}), and {run['ppo.unknown_words']:.0%} in none of the reward model's training prompts."
        )


@cause(
    "Train SFT on whole answers whose EOS is a target: `rlhf data show` marks the learned tokens. In another tool, "
    "use a padding token that is not EOS. If replies end with another token, name it in rollout.stop_tokens",
    explains=("rm_weak", "rm_without_eos"),
    needs=("sft.eos_probability", "ppo.start.eos_fraction"),
    wants="held-out rows of SFT, or a PPO stage",
)
def sft_without_eos(run: Evidence) -> Signs:
    """The SFT model did not learn to end its replies."""
    if run["sft.eos_probability"] < EOS_UNKNOWN:
        yield shows(
            f"Where held-out demonstrations end, SFT gives EOS a probability of {run['sft.eos_probability']:.2g} "
            f"(limit {EOS_UNKNOWN:g})."
        )
    if run["sft.cut_share"] > CUT:
        yield shows(
            f"{run['sft.cut_share']:.0%} of the training answers do not end with EOS (limit {CUT:.0%}): they were cut "
            f"at sft data.max_length: {run.settings.get('sft.data.max_length')} tokens, in the middle of a sentence."
        )
    if run["sft.samples_ended"] == 0 and run["sft.samples"] >= SAMPLES:
        yield supports(f"None of SFT's last {run['sft.samples']:.0f} samples ended by itself.")
    if run["ppo.start.eos_fraction"] < EOS_RARE:
        yield supports(f"Before PPO trained, {run['ppo.start.eos_fraction']:.0%} of the replies ended by themselves.")
    if run["sft.pad_is_eos"] == 1:
        yield supports("Padding and EOS are the same token; a loss that skips padding never learns to end.")


CAUSES = rules_of(globals())
