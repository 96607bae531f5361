"""PPO beside yardsticks that need no training, and the figures along a run: printed, and as JSON values."""

from __future__ import annotations

import json
import math
from typing import Any

from rlhf_cli.artifacts import stage_directory
from rlhf_cli.data.splits import Drawn
from rlhf_cli.evaluation import policy
from rlhf_cli.evaluation.matched import at_same_kl
from rlhf_cli.evaluation.replies import Arena, Replies
from rlhf_cli.evaluation.run import Run
from rlhf_cli.evaluation.tables import Sentences, as_json, show
from rlhf_cli.report.figure import Figure

MOST_SHOWN = 10
"""Rows of the table of a run, beside its start."""


def best_of_n_report(
    arena: Arena, after: Replies, num_samples: int, num_prompts: int, sentences: Sentences, *, seed: int
) -> dict[str, Any]:
    """Best-of-n of the SFT model on some of the prompts, beside PPO on the same prompts."""
    every, drawn = len(arena.prompts), Drawn(arena.prompts, num_prompts, seed)
    number = len(drawn)
    arena.prompts, after = drawn, after.of(drawn.numbers)
    samples = arena.replies(arena.reference, num_samples)
    rows = policy.yardsticks(samples, seed=seed)
    score, kl = after.score[:, 0].mean().item(), after.kl[:, 0].mean().item()
    gold_name = after.gold_name
    gold = after.gold[gold_name][:, 0].mean().item() if gold_name is not None else None
    with_bound = any(f"{row.kl:.2f}" != f"{row.kl_bound:.2f}" for row in rows)
    lines = [
        [
            f"best of {row.n}",
            str(row.score),
            *([str(row.gold)] if row.gold else []),
            f"{row.kl:.2f}",
            *([f"{row.kl_bound:.2f}"] if with_bound else []),
        ]
        for row in rows
    ]
    lines.append(
        [
            "PPO",
            f"{score:.3f}",
            *([f"{gold:.3f}"] if gold is not None else []),
            f"{kl:.2f}",
            *([""] if with_bound else []),
        ]
    )
    heads = ["", "score", *(["gold"] if gold is not None else []), "KL", *(["KL at most"] if with_bound else [])]
    sentences.display.table(f"Best-of-n of the SFT model, {drawn} prompts", heads, lines)
    needed = policy.samples_needed(samples, score)
    says = f"n = {needed}" if needed is not None else f"more than n = {num_samples}"
    low, high = policy.samples_needed_interval(samples, after.score[:, 0], seed=seed)
    if number > 1:
        most = f"{high:.0f}" if high <= num_samples else f"more than {num_samples}"
        says += f" (95 % interval {low:.0f} to {most})"
    sentences.say(f"to reach PPO's score, best-of-n of the SFT model needs {says} samples a reply")
    found: dict[str, Any] = {"prompts": number, "of_prompts": every, "n_for_ppo_score": needed}
    found["n_for_ppo_score_interval"] = Figure(math.nan, low, high).as_json()
    found["rows"] = [row.as_json() for row in rows]
    found["every_n"] = policy.best_of_every_n(samples)
    found |= _beside_ppo(samples, after, kl, sentences, seed=seed)
    found["ppo"] = {"score": score, "kl": kl} | ({"gold": gold} if gold is not None else {})
    found |= _beside_the_best(samples, after, kl, sentences, seed=seed)
    found["tilt_curve"] = policy.tilt_curve(samples, max(kl, rows[-1].kl))
    if gold is not None and (same := policy.gold_at_score(samples, score)) is not None:
        found["gold_at_ppo_score"] = same
        sentences.say(f"gold at PPO's score of {score:.3f}: best-of-n {same:.3f}, PPO {gold:.3f}")
    elif gold is not None and rows[-1].gold is not None:
        sentences.say(
            f"no best-of-n has PPO's score. Best-of-{rows[-1].n} has score {rows[-1].score.value:.3f} and gold "
            f"{rows[-1].gold.value:.3f}, PPO {score:.3f} and {gold:.3f}"
        )
    return found


def _beside_ppo(samples: Replies, after: Replies, kl: float, sentences: Sentences, *, seed: int) -> dict[str, Any]:
    """PPO and best-of-n at the same KL, as `at_ppo_kl`; {} if no n reaches PPO's KL."""
    same = at_same_kl(samples, after, seed=seed)
    if same is None:
        return {}
    columns = {f"best of {same.n:.0f}": same.best_of_n, "PPO": same.ppo, "difference": same.difference}
    show(sentences.display, f"PPO and best-of-n at the same KL of {kl:.2f} nats", columns)
    sides = {"best_of_n": same.best_of_n, "ppo": same.ppo, "difference": same.difference}
    return {"at_ppo_kl": {"n": same.n} | {name: as_json(figures) for name, figures in sides.items()}}


def _beside_the_best(samples: Replies, after: Replies, kl: float, sentences: Sentences, *, seed: int) -> dict[str, Any]:
    """PPO's share of the gain that its KL allows: `yardstick`, and `tilt` if the samples can express the KL. {} if it
    allows none.

    The yardstick is the exponential tilt or best-of-n, whichever has the higher score: both are policies with at most
    PPO's KL.
    """
    prompts, num_samples = samples.score.shape
    own, start = after.score[:, 0], samples.score.mean(1)
    best, tilt = policy.best_of_n_at(samples, kl), policy.tilted(samples, kl)
    found: dict[str, Any] = {}
    if kl <= 0 or not best.mean() > start.mean():
        why = (
            "the samples of each prompt have the same score"
            if kl > 0
            else f"PPO's KL of {abs(kl):.1f} nats is not above 0"
        )
        sentences.say(f"{why}, so there is no gain at that KL with which PPO can be compared")
        return found
    is_too_low = tilt is None or tilt.score.mean() < best.mean()
    if tilt is None:
        sentences.say(
            f"what the best policy gains at PPO's KL of {kl:.1f} nats cannot be estimated from {num_samples} samples a "
            "prompt. Give more --samples"
        )
    else:
        share = policy.share_of_gain(own, tilt.score, start, seed=seed)
        ends = {"share_low": share.low, "share_high": share.high} if prompts > 1 else {}
        found["tilt"] = tilt.as_json() | {"share": share.value, **ends, "too_low": bool(is_too_low)}
    if tilt is None or is_too_low:
        name, highest = "best_of_n", best
    else:
        name, highest = "tilt", tilt.score
    share = policy.share_of_gain(own, highest, start, seed=seed)
    found["yardstick"] = {"policy": name, "score": highest.mean().item(), "share": share.as_json()}
    gain = f"{highest.mean().item():.3f}; PPO has {share:%} of its gain over SFT"
    if name == "tilt":
        sentences.say(f"the exponential tilt of the samples, about the best possible at PPO's KL, has the score {gain}")
        return found
    if tilt is not None:
        sentences.say(
            f"{num_samples} samples a prompt are too few to estimate what the best policy gains at PPO's KL: the "
            f"estimate, {tilt.score.mean().item():.3f}, is below best-of-n. Give more --samples"
        )
    sentences.say(f"best-of-n at PPO's KL or less has the score {gain}. The best possible is higher")
    return found


def along_the_run(run: Run, gold_name: str | None, sentences: Sentences) -> dict[str, Any]:
    """Score, KL and gold at the evaluations that PPO wrote while it trained, and the fit to gold; {} without them."""
    folder = stage_directory(run.root, "ppo")
    if not (folder / "evaluations.jsonl").is_file():
        sentences.say(
            "without evaluation.every_iterations in ppo.yaml there are no score, gold and KL along the run, no fit to "
            "gold, and no place on its curve where the run ended"
        )
        return {}
    rows = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()]
    own = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    first = own.get("validation", own)["sft"]
    points = rows if rows and rows[0]["step"] == 0 else [{"step": 0, **first}, *rows]
    names = ["score_mean", "kl", *([gold_name] if gold_name is not None else [])]
    shown = [points[i] for i in sorted({round(j * (len(points) - 1) / MOST_SHOWN) for j in range(MOST_SHOWN + 1)})]
    lines = [[f"{point['step']:,}", *(f"{point[name]:.3f}" for name in names)] for point in shown]
    heads = ["iteration", "score", "KL", *(["gold"] if gold_name is not None else [])]
    sentences.display.table("Along the run, held-out prompts", heads, lines)
    labels = dict(zip(names, ("score", "kl", "gold"), strict=False))
    along = [{"step": point["step"], **{labels[name]: point[name] for name in names}} for point in points]
    report: dict[str, Any] = {"along": along}
    if gold_name is not None and (curve := policy.gold_curve(points, gold_name)) is not None:
        report["gold_curve"] = curve
        sentences.say(_about_curve(curve))
    return report


def _about_curve(curve: dict[str, Any]) -> str:
    """A sentence on the fit to gold, and where on the curve the run ended."""
    a, b = (Figure(**{"value": math.nan} | curve[name]) for name in ("a", "b"))
    text = f"gold along the run: gold(0) + d (a - b log d) with d = sqrt(KL), a = {a}, b = {b}"
    peak, end = curve["peak"], curve["end"]
    if b.low <= 0 or peak is None:
        return f"{text}. b is not surely above 0, so these KLs do not show a peak; the run ended at d = {end:.2f}"
    place = "before the peak: gold was still rising" if end < peak else "behind the peak: gold was falling"
    return f"{text}. It peaks at d = {peak:.2f} (KL {peak**2:.1f}); the run ended at d = {end:.2f}, {place}"
