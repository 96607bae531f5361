"""Which causes `rlhf diagnose` names, and in what order. Does not import torch itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from rlhf_cli.health.causes import CAUSES
from rlhf_cli.health.evidence import Evidence, read_evidence
from rlhf_cli.health.findings import Cause, Rule

OUTCOMES = (
    "replies_cut",
    "value_untrained",
    "ppo_steps_too_large",
    "kl_unrestrained",
    "policy_overoptimised",
    "policy_misjudged",
    "score_unlearned",
    "ppo_hardly_moved",
)
"""What becomes of a policy. Any other cause may have led to them."""
NAMED = 2
"""The weight of its signs at which a cause is named."""
SURE = 3
"""The weight from which a cause is called sure instead of likely."""


def gather(root: Path, *, device: str = "auto", files_only: bool = False) -> Evidence:
    """The evidence in the files of a run and, unless `files_only`, in forward passes of its finished stages."""
    evidence = read_evidence(root)
    if files_only or not evidence.finished:
        return evidence
    from rlhf_cli.health.probes import probe

    found, problems = probe(root, device)
    figures = {name: value for name, value in found.items() if not isinstance(value, str)}
    texts = {name: value for name, value in found.items() if isinstance(value, str)}
    return replace(evidence, figures=evidence.figures | figures, texts=evidence.texts | texts, problems=problems)


def rank(evidence: Evidence) -> list[Cause]:
    """The causes that the evidence shows, first the one to mend first.

    A cause that another named cause explains comes after it. Otherwise the surer one comes first, and of equally sure
    ones that of the earlier stage.
    """
    named = []
    for rule in CAUSES:
        signs = list(rule.signs(evidence)) if rule.stage in evidence.stages else []
        weight = sum(weight for weight, _ in signs)
        if weight >= NAMED:
            certainty: Literal["sure", "likely"] = "sure" if weight >= SURE else "likely"
            texts = tuple(text for _, text in signs)
            named.append((rule, Cause(rule.name, certainty, rule.title, rule.advice, rule.stage, texts)))
    named.sort(key=lambda one: one[1].order)
    unexplained, explained = [], []
    for rule, cause in named:
        # What may have led to this one.
        by = [
            one for one, _ in named if rule.name in one.explains or (rule.name in OUTCOMES and one.name not in OUTCOMES)
        ]
        if by:
            explained.append((cause, by))
        else:
            unexplained.append(cause)
    order = [cause.name for cause in (*unexplained, *(cause for cause, _ in explained))]
    return unexplained + [
        replace(cause, explained_by=min((rule.name for rule in by), key=order.index)) for cause, by in explained
    ]


def not_judged(evidence: Evidence) -> list[Rule]:
    """The causes of the run's stages that need a figure which the run does not have."""
    known = evidence.figures.keys() | evidence.texts.keys()
    return [
        rule for rule in CAUSES if rule.stage in evidence.stages and rule.needs and not known.intersection(rule.needs)
    ]
