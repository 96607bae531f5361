"""How often a judge model prefers PPO's reply to SFT's, asked in both orders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from rlhf_cli.algorithms.comparison import length_controlled_interval, length_controlled_win_rate
from rlhf_cli.errors import RunError
from rlhf_cli.evaluation.figures import Sentences, as_json, share_figure, show
from rlhf_cli.report.figure import Figure, Figures

Verdict = Literal["first", "second"]
POINTS: dict[Verdict, float] = {"first": 1.0, "second": 0.0}
"""What the first of two replies gets."""


class Judge(Protocol):
    """A model that says which of two replies is better."""

    name: str

    def compare(self, pairs: Sequence[tuple[str, str, str]]) -> list[Verdict | None]:
        """The better reply of each (prompt, first reply, second reply); None without a clear answer.

        Raises RunError if the judge cannot be asked.
        """


def judge_replies(report: dict[str, Any], judge: Judge, sentences: Sentences) -> None:
    """Add the judge's win rates to the report of a PPO stage, and to each of its replies what PPO's reply got there.

    Each pair is asked in both orders. PPO's reply gets 1 if it wins both, 1/2 for a contradiction (a tie), 0 if it
    loses both. Equal texts are a tie and are not asked. A pair without a clear answer in one order is left out.

    Raises RunError if the judge cannot be asked, or answers no pair clearly.
    """
    rows = report["replies"]
    texts = [(row.get("question", row["prompt"]), row["sft"]["reply"], row["ppo"]["reply"]) for row in rows]
    asked = [i for i, (_, sft, ppo) in enumerate(texts) if sft.strip() != ppo.strip()]
    questions = [(p, b, a) for p, a, b in (texts[i] for i in asked)] + [texts[i] for i in asked]
    answers = judge.compare(questions)
    won: dict[int, float] = {i: 0.5 for i in range(len(rows)) if i not in set(asked)}
    both = zip(asked, answers[: len(asked)], answers[len(asked) :], strict=True)
    clear = [(i, ppo_first, sft_first) for i, ppo_first, sft_first in both if ppo_first and sft_first]
    if asked and not clear:
        raise RunError(
            f"--judge: {judge.name} gave no clear answer on any of {len(asked)} pairs. Raise --judge-tokens, or write "
            "a --judge-template that asks for the letter A or B alone"
        )
    for i, ppo_first, sft_first in clear:
        won[i] = (POINTS[ppo_first] + 1 - POINTS[sft_first]) / 2
    order = sorted(won)
    for i in order:
        rows[i]["judge"] = won[i]
    result = torch.tensor([won[i] for i in order], dtype=torch.float64)
    lengths = [torch.tensor([float(rows[i][side]["length"]) for i in order]) for side in ("ppo", "sft")]
    figures: Figures = {
        "judge": share_figure(result),
        "judge_equal_length": equal_length_figure(result, *lengths),
        "judge_ties": share_figure((result == 0.5).double()),
    }
    if clear:
        first = [POINTS[verdict] for _, *verdicts in clear for verdict in verdicts]
        figures["judge_first_position"] = share_figure(torch.tensor(first))
    show(sentences.display, f"PPO against SFT by {judge.name}, {len(order)} prompts, both orders", {"rate": figures})
    sentences.say(
        f"the judge {judge.name} prefers PPO's reply in {figures['judge'].value:.1%} of {len(order)} prompts, ties "
        "counted 1/2"
    )
    if len(order) < len(rows):
        sentences.say(f"the judge {judge.name} gave no clear answer on {len(rows) - len(order)} of {len(rows)} prompts")
    report["win_rate"] |= as_json(figures)
    report["judge"] = {"name": judge.name, "pairs": len(order), "unclear": len(rows) - len(order)}
    report["sentences"] = [*report.get("sentences", []), *sentences.texts]


def equal_length_figure(win: Tensor, length_a: Tensor, length_b: Tensor) -> Figure:
    """The share of rows that A would win at equal length, with its interval (`length_controlled_win_rate`)."""
    rate = length_controlled_win_rate(win, length_a, length_b)
    return Figure(rate, *length_controlled_interval(win, length_a, length_b), len(win))
