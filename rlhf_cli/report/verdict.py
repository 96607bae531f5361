"""The verdict of a report: what each stage achieved, one or two sentences each."""

from __future__ import annotations

from typing import Any

from rlhf_cli.health.baselines import baselines
from rlhf_cli.report.charts import path_points
from rlhf_cli.report.figure import Figure, as_metrics
from rlhf_cli.report.read import RunData, StageData
from rlhf_cli.report.tables import show

JUDGED = ("accuracy", "longer_wins", "base_rate")
"""The figures of `rlhf eval` by which a reward model is compared with simple rules."""


def headline(run: RunData) -> str:
    """The result in one sentence: what PPO did to gold, or else to the score, at what KL, beside best-of-n.

    Empty without a PPO stage that was measured.
    """
    if (data := run.stages.get("ppo")) is None:
        return ""
    found, own = data.evaluation, data.own_evaluation
    if "ppo" in found:
        name = "gold" if "gold" in found["difference"] else "score"
        change, kl = found["difference"][name], found["ppo"]["kl"]["value"]
        before, after = (found[side][name]["value"] for side in ("sft", "ppo"))
        best = _beside_best_of_n(found.get("best_of_n", {}), name)
    elif "ppo" in own:
        name, key = ("gold", "gold") if "gold" in own["ppo"] else ("score", "score_mean")
        before, after, kl, best = own["sft"][key], own["ppo"][key], own["ppo"]["kl"], ""
        change = {"value": after - before}
    else:
        return ""
    if change.get("low", change["value"]) > 0:
        verb = "raised"
    else:
        verb = "lowered" if change.get("high", change["value"]) < 0 else "did not clearly change"
    return f"PPO {verb} {name} from {before:.2f} to {after:.2f} at {kl:.1f} nats{best}."


def _beside_best_of_n(best: dict[str, Any], name: str) -> str:
    """PPO beside best-of-n at the same KL, or else the n that reaches its score."""
    same = best.get("at_ppo_kl", {})
    if change := same.get("difference", {}).get(name):
        n = f"best-of-{same['n']:.0f}"
        if "low" in change and change["low"] > 0:
            return f", more than {n}"
        return f"; {n} is {'better' if change.get('high', 0) < 0 else 'as good'}"
    if "n_for_ppo_score" not in best:
        return ""
    n = best["n_for_ppo_score"]
    return f"; best-of-{n} reaches its score" if n else f"; best-of-{best['rows'][-1]['n']} does not reach its score"


def verdict(run: RunData) -> list[str]:
    """One sentence per stage about what it achieved."""
    found = []
    for stage, sentence in (("sft", _sft_verdict), ("rm", _rm_verdict), ("ppo", _ppo_verdict)):
        if stage in run.stages and (text := sentence(run.stages[stage])):
            found.append(text)
    return [*found, path] if (path := _path_verdict(run)) else found


def _sft_verdict(data: StageData) -> str:
    figures = data.evaluation.get("figures", {})
    if "loss" in figures:
        accuracy = f", token accuracy {show(figures['token_accuracy'])}" if "token_accuracy" in figures else ""
        return f"SFT: held-out loss {show(figures['loss'])} nats per token{accuracy}."
    metrics = data.manifest.metrics if data.manifest is not None else {}
    return f"SFT: held-out loss {metrics['eval/loss']:.3g} nats per token." if "eval/loss" in metrics else ""


def _rm_verdict(data: StageData) -> str:
    figures = data.evaluation.get("figures", {})
    if "accuracy" not in figures:
        metrics = data.manifest.metrics if data.manifest is not None else {}
        if "eval/accuracy" in metrics:
            return f"The reward model orders {metrics['eval/accuracy']:.2f} of the held-out pairs correctly."
        pearson = figures["pearson"]["value"] if "pearson" in figures else metrics.get("eval/pearson")
        return "" if pearson is None else f"The reward model's correlation with held-out scores is {pearson:.2f}."
    rules = baselines(as_metrics({name: Figure.of(figures[name]) for name in JUDGED if name in figures}))
    above, missed = (
        [f"{rule.rule} ({rule.value:.2g})" for rule in rules if rule.is_beaten is wanted] for wanted in (True, False)
    )
    parts = [f"above {' and '.join(above)}"] * bool(above) + [f"not surely above {' or '.join(missed)}"] * bool(missed)
    does = "labels {} of the held-out answers" if "base_rate" in figures else "orders {} of the held-out pairs"
    text = f"The reward model {does.format(show(figures['accuracy']))} correctly: {', but '.join(parts)}."
    return f"{text} {_calibration_verdict(figures)}".rstrip()


def _calibration_verdict(figures: dict[str, Any]) -> str:
    """Whether the stated probabilities are too high or too low."""
    error = figures.get("calibration_error", {}).get("value")
    temperature = figures.get("best_temperature", {}).get("value")
    if error is None or temperature is None:
        return ""
    direction = "overconfident" if temperature > 1 else "underconfident"
    return f"It is {direction}: the probabilities that it states are off by {error:.2f} on average."


def _ppo_verdict(data: StageData) -> str:
    found = data.evaluation
    if "ppo" not in found:
        return _ppo_verdict_of_the_stage(data)
    changes = [
        f"{name} by {show(found['difference'][name])}, from {found['sft'][name]['value']:.2f} to "
        f"{found['ppo'][name]['value']:.2f}"
        for name in ("score", "gold")
        if name in found["difference"]
    ]
    text = f"PPO moved {' and '.join(changes)}, at a KL of {found['ppo']['kl']['value']:.2f} nats per reply."
    return f"{text} {_best_of_n_verdict(best)}" if (best := found.get("best_of_n")) else text


def _ppo_verdict_of_the_stage(data: StageData) -> str:
    """From the evaluation of the stage itself, which has no intervals."""
    own = data.own_evaluation
    if "ppo" not in own:
        return ""
    changes = [
        f"{label} from {own['sft'][name]:.2f} to {own['ppo'][name]:.2f}"
        for name, label in (("score_mean", "score"), ("gold", "gold"))
        if name in own["ppo"]
    ]
    return f"PPO moved {' and '.join(changes)} at a KL of {own['ppo']['kl']:.2f} nats per reply."


def _best_of_n_verdict(best: dict[str, Any]) -> str:
    """PPO against best-of-n of the SFT model, and against the best that its KL allows."""
    n, last, own = best.get("n_for_ppo_score"), best["rows"][-1], best["ppo"]
    needed = f"n = {n}" if n else f"more than n = {last['n']}"
    part, on_them = "Best-of-n", ""
    if best["prompts"] < best.get("of_prompts", 0):
        part, on_them = f"On {best['prompts']} of the prompts best-of-n", " on them"
    text = f"{part} of the SFT model needs {needed} for PPO's score."
    if same := best.get("at_ppo_kl"):
        differences = " and ".join(f"{show(figure)} in {name}" for name, figure in same["difference"].items())
        text += (
            f" At PPO's KL{on_them}, {own['kl']:.2f} nats (n = {same['n']:.0f}), PPO minus best-of-n is {differences}."
        )
    elif own["kl"] > last["kl"]:
        text += (
            f" PPO's KL{on_them}, {own['kl']:.2f} nats, is beyond that of best of {last['n']} ({last['kl']:.2f} nats)"
        )
        text += f", whose gold is {last['gold']['value']:.2f} (PPO: {own['gold']:.2f})." if "gold" in last else "."
    return text + _yardstick_verdict(best)


def _yardstick_verdict(best: dict[str, Any]) -> str:
    """PPO's share of the gain of the exponential tilt, or of best-of-n where its score is higher than the tilt's."""
    yardstick = best.get("yardstick")
    if yardstick is None or "value" not in yardstick["share"]:
        return ""  # without a share the yardstick itself gains nothing at this KL
    share = f"{100 * yardstick['share']['value']:.0f} %"
    if yardstick["policy"] == "tilt":
        return f" PPO has {share} of what the best policy at this KL gains (the exponential tilt of the SFT samples)."
    text = f" PPO has {share} of what best-of-n gains there."
    unknown = f"{best['rows'][-1]['n']} samples a prompt are too few to estimate what the best policy gains at this KL"
    return f"{text} {unknown}." if "tilt" in best else text


def _path_verdict(run: RunData) -> str:
    """Whether gold fell along the run while the score rose, as the health finding `overoptimisation` decides."""
    gold, score = ({row["step"]: row["value"] for row in path_points(run, figure)} for figure in ("gold", "score"))
    if len(gold) < 3 or "ppo" not in run.stages:
        return ""
    last = max(gold)
    held = [row["step"] for row in run.stages["ppo"].findings if row.get("name") == "overoptimisation"]
    best = max(gold, key=gold.__getitem__)
    if best == last:
        return f"Along the run gold was highest at the end ({gold[last]:.2f})."
    if not held:
        return f"Along the run gold was highest at iteration {best:g} ({gold[best]:.2f}) and ended at {gold[last]:.2f}."
    text = f"Gold was highest at iteration {best:g} ({gold[best]:.2f}) and ended at {gold[last]:.2f}"
    if best in score and last in score:
        text += f", while the score went from {score[best]:.2f} to {score[last]:.2f}"
    return f"Over-optimisation: {text[0].lower()}{text[1:]}."
