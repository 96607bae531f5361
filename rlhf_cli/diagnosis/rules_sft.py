"""What can be wrong with SFT. See `causes.py` for how rules work."""

from __future__ import annotations

from dataclasses import replace

from rlhf_cli.diagnosis.causes import Cause, Sign
from rlhf_cli.diagnosis.evidence import Evidence

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
MEMORISED = 1.5
"""Held-out loss, as a multiple of the training loss at the end. Good: 0.97."""
SPIKE = 10.0
"""The largest gradient norm of the second half of the steps, divided by their median. Good: 2."""
LOST_AGAIN = 1.5
"""Training loss at the end, divided by the lowest tenth of the steps."""


def _underfit(run: Evidence) -> list[Sign]:
    signs = []
    whole = run["sft.loss_first"] - run["sft.loss_end"]
    late = run["sft.loss_half"] - run["sft.loss_end"]
    if whole > FALL * run["sft.loss_first"] and late > STILL_FALLING * whole:
        signs.append(
            Sign(
                2,
                f"The training loss was still falling: {run['sft.loss_first']:.2f} nats per token at the first of "
                f"{run['sft.steps']:.0f} steps, {run['sft.loss_half']:.2f} in the middle, {run['sft.loss_end']:.2f} at "
                f"the end. The second half had {late / whole:.0%} of the fall (limit {STILL_FALLING:.0%}).",
            )
        )
    if run["sft.probed_loss"] > LITTLE_LEARNED * run["sft.token_entropy"]:
        signs.append(
            Sign(
                2,
                f"The held-out loss is {run['sft.probed_loss']:.2f} nats per token. A model that knows only how "
                f"frequent each token is has {run['sft.token_entropy']:.2f} (limit {LITTLE_LEARNED:.0%} of it).",
            )
        )
    return signs


def _without_eos(run: Evidence) -> list[Sign]:
    signs = []
    if run["sft.eos_probability"] < EOS_UNKNOWN:
        signs.append(
            Sign(
                2,
                f"Where held-out demonstrations end, SFT gives EOS a probability of {run['sft.eos_probability']:.2g} "
                f"(limit {EOS_UNKNOWN:g}).",
            )
        )
    if run["sft.samples_ended"] == 0 and run["sft.samples"] >= SAMPLES:
        signs.append(Sign(1, f"None of SFT's last {run['sft.samples']:.0f} samples ended by itself."))
    if run["ppo.start.eos_fraction"] < EOS_RARE:
        signs.append(
            Sign(1, f"Before PPO trained, {run['ppo.start.eos_fraction']:.0%} of the replies ended by themselves.")
        )
    if signs and run["sft.pad_is_eos"] == 1:
        signs.append(Sign(1, "Padding and EOS are the same token; a loss that skips padding never learns to end."))
    return signs


def _ignores_prompts(run: Evidence) -> list[Sign]:
    gain, error, loss = run["sft.gain_of_prompt"], run["sft.gain_of_prompt_error"], run["sft.probed_loss"]
    if not (gain + 2 * error < max(PROMPT_GAIN * loss, LITTLE / 10)) or run["sft.mixed_rows"] < FEW_MIXED:
        return []
    return [
        Sign(
            2,
            f"Behind the prompt of another row the held-out answers are as likely as behind their own: the loss of "
            f"{loss:.3g} nats per token changes by {gain:+.2g} (standard error {error:.1g}, limit {PROMPT_GAIN:.0%}).",
        )
    ]


def _steps_too_large(run: Evidence) -> list[Sign]:
    signs = []
    if run["sft.loss_end"] > LOST_AGAIN * run["sft.loss_lowest"] + LITTLE:
        signs.append(
            Sign(
                2,
                f"The training loss had come down to {run['sft.loss_lowest']:.2f} nats per token and is "
                f"{run['sft.loss_end']:.2f} at the end.",
            )
        )
    if run["sft.loss_end"] > run["sft.loss_first"]:
        signs.append(
            Sign(
                2,
                f"The training loss is higher at the end ({run['sft.loss_end']:.2f}) than at the first step "
                f"({run['sft.loss_first']:.2f}).",
            )
        )
    if run["sft.grad_spike"] > SPIKE:
        ignores = _ignores_prompts(run)
        signs.append(
            Sign(
                1,
                f"In the second half of the steps the gradient norm jumped to {run['sft.grad_spike']:.0f} times its "
                f"median (limit {SPIKE:g}).",
            )
        )
        signs += [replace(sign, weight=1) for sign in ignores]
    if run["sft.bad_steps"] > 0:
        signs.append(Sign(1, f"{run['sft.bad_steps']:.0f} steps had a NaN or infinite loss or gradient."))
    return signs


def _holds_markup(run: Evidence) -> list[Sign]:
    signs, word = [], run.texts.get("sft.markup")
    if word is not None and run["sft.answers_with_markup"] > MARKUP:
        signs.append(
            Sign(
                2,
                f"{run['sft.answers_with_markup']:.0%} of the held-out answers contain {word!r} as letters, which "
                "belongs around prompts or at the end of a turn.",
            )
        )
    return signs


def _memorised(run: Evidence) -> list[Sign]:
    signs = [Sign(2, text) for text in run.said("sft.memorises")]
    if run["sft.loss"] > MEMORISED * run["sft.loss_end"] + LITTLE:
        signs.append(
            Sign(
                2,
                f"The held-out loss is {run['sft.loss']:.3g} nats per token, and the training loss ended at "
                f"{run['sft.loss_end']:.3g} (limit {MEMORISED:g} times that).",
            )
        )
    return signs


DOWNSTREAM = (
    "rm_weak",
    "rm_without_eos",
    "template_differs",
    "replies_cut",
    "ppo_steps_too_large",
    "kl_unrestrained",
    "ppo_hardly_moved",
    "policy_overoptimised",
    "policy_misjudged",
    "value_untrained",
    "score_unlearned",
    "prompts_differ",
)
"""What a language model that cannot answer may cause in the later stages."""

CAUSES = (
    Cause(
        "sft_steps_too_large",
        "sft",
        "The steps of SFT were too large.",
        _steps_too_large,
        "Lower sft optimizer.learning_rate to a third or a tenth, lengthen optimizer.warmup_steps, and run all stages "
        "again",
        explains=("sft_underfit", "sft_without_eos", "sft_ignores_prompts", *DOWNSTREAM),
    ),
    Cause(
        "sft_underfit",
        "sft",
        "SFT ended before the model had learned the demonstrations.",
        _underfit,
        "Raise sft training.num_steps (or num_epochs), or a learning rate that is too low, until the held-out loss is "
        "flat; then run RM and PPO again",
        explains=("sft_without_eos", "sft_ignores_prompts", *DOWNSTREAM),
    ),
    Cause(
        "sft_memorised",
        "sft",
        "SFT memorised its training rows.",
        _memorised,
        "Lower sft training.num_steps, set evaluation.keep_best, or add demonstrations",
        explains=("sft_underfit", "sft_ignores_prompts", *DOWNSTREAM),
    ),
    Cause(
        "sft_ignores_prompts",
        "sft",
        "SFT's answers do not depend on their prompts.",
        _ignores_prompts,
        "Read a few demonstrations (`rlhf data show`): answers may be in another order than their prompts, or the same "
        "for all. If they fit, train longer or lower optimizer.learning_rate",
        explains=DOWNSTREAM,
        needs=("sft.gain_of_prompt",),
        wants="held-out rows of SFT",
    ),
    Cause(
        "demonstrations_hold_markup",
        "sft",
        "The demonstrations contain the template or an end token as text, and so will the replies.",
        _holds_markup,
        "Cut the answers where the turn ends: `rlhf data show` marks the learned tokens. This program adds EOS itself",
        explains=("sft_without_eos", *DOWNSTREAM),
        needs=("sft.answers_with_markup",),
        wants="held-out rows of SFT",
    ),
    Cause(
        "sft_without_eos",
        "sft",
        "The SFT model did not learn to end its replies.",
        _without_eos,
        "Train SFT on whole answers whose EOS is a target: `rlhf data show` marks the learned tokens. In another tool, "
        "use a padding token that is not EOS. If replies end with another token, name it in rollout.stop_tokens",
        explains=("replies_cut", "rm_weak", "rm_without_eos", "ppo_hardly_moved", "kl_unrestrained"),
        needs=("sft.eos_probability", "ppo.start.eos_fraction"),
        wants="held-out rows of SFT, or a PPO stage",
    ),
)
