"""The verdict of a report: what each stage achieved, a sentence each."""

from __future__ import annotations

from rlhf_cli.health.baselines import held_out_verdict
from rlhf_cli.report.charts import path_points
from rlhf_cli.report.figure import as_metrics, figures_of
from rlhf_cli.report.run_data import RunData
from rlhf_cli.report.tables import show


def headline(run: RunData) -> str:
    """The result of PPO in a sentence: gold or else the score, KL, and best-of-n; "" if it was not measured."""
    if (data := run.stages.get("ppo")) is None:
        return ""
    found, own = data.evaluation, data.own_evaluation
    if "ppo" in found:
        name = "gold" if "gold" in found["difference"] else "score"
        change, kl = found["difference"][name], found["ppo"]["kl"]["value"]
        before, after = (found[side][name]["value"] for side in ("sft", "ppo"))
    elif "ppo" in own:
        name, key = ("gold", "gold") if "gold" in own["ppo"] else ("score", "score_mean")
        before, after, kl = own["sft"][key], own["ppo"][key], own["ppo"]["kl"]
        change = {"value": after - before}
    else:
        return ""
    verb = "did not clearly change"
    if change.get("low", change["value"]) > 0:
        verb = "raised"
    elif change.get("high", change["value"]) < 0:
        verb = "lowered"
    sentence = f"PPO {verb} {name} from {before:.2f} to {after:.2f} at {kl:z.1f} nats"
    best = found.get("best_of_n", {})
    same = best.get("at_ppo_kl", {})
    if beside := same.get("difference", {}).get(name):  # at the same KL
        n = f"best-of-{same['n']:.0f}"
        if "low" in beside and beside["low"] > 0:
            return f"{sentence}, more than {n}."
        return f"{sentence}; {n} is {'better' if beside.get('high', 0) < 0 else 'as good'}."
    if "n_for_ppo_score" not in best:
        return f"{sentence}."
    n = best["n_for_ppo_score"] or best["rows"][-1]["n"]
    return f"{sentence}; best-of-{n} {'reaches' if best['n_for_ppo_score'] else 'does not reach'} its score."


def verdict(run: RunData) -> list[str]:
    """A sentence about each of SFT and RM, and one about PPO's way. `headline` says what PPO achieved."""
    found = []
    if (data := run.stages.get("sft")) is not None:
        figures, metrics = data.evaluation.get("figures", {}), data.manifest.metrics if data.manifest else {}
        if "loss" in figures:
            accuracy = f", token accuracy {show(figures['token_accuracy'])}" if "token_accuracy" in figures else ""
            found.append(f"SFT: held-out loss {show(figures['loss'])} nats per token{accuracy}.")
        elif "eval/loss" in metrics:
            found.append(f"SFT: held-out loss {metrics['eval/loss']:.3g} nats per token.")
    if (data := run.stages.get("rm")) is not None:  # on the figures of `rlhf eval` or else on its own
        metrics = data.manifest.metrics if data.manifest else {}
        if figures := data.evaluation.get("figures"):
            metrics = as_metrics(figures_of(figures))
        if "eval/accuracy" in metrics or {"eval/mse", "eval/target_variance"} <= metrics.keys():
            found.append(f"Reward model: {held_out_verdict(metrics)[0]}.")
    return [*found, *filter(None, [_path_verdict(run)])]


def _path_verdict(run: RunData) -> str:
    """A sentence about gold along the run; the health finding `overoptimisation` decides if it was over-optimised."""
    gold, score = ({row["step"]: row["value"] for row in path_points(run, figure)} for figure in ("gold", "score"))
    if len(gold) < 3:
        return ""
    last = max(gold)
    held = any(finding.name == "overoptimisation" for finding in run.stages["ppo"].findings)
    best = max(gold, key=gold.__getitem__)
    if best == last:
        return f"Along the run gold was highest at the end ({gold[last]:.2f})."
    text = f"gold was highest at iteration {best:g} ({gold[best]:.2f}) and ended at {gold[last]:.2f}"
    if not held:
        return f"Along the run {text}."
    if best in score and last in score:
        text += f", while the score went from {score[best]:.2f} to {score[last]:.2f}"
    return f"Over-optimisation: {text}."
