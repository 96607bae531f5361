"""The README.md of each model directory: a model card in the Hugging Face hub's format."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

import rlhf_cli
from rlhf_cli.config.by_stage import AnyConfig
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.config.stage import STAGES
from rlhf_cli.data.paths import SUFFIXES
from rlhf_cli.hub import cached, is_local
from rlhf_cli.run.artifacts import (
    MANIFEST,
    MODEL_CONFIG,
    is_adapter,
    model_directory,
    read_manifest_or_none,
    repeat_commands,
)

CARD = "README.md"

TASKS = {"sft": "text-generation", "rm": "text-classification", "ppo": "text-generation"}
WHAT = {
    "sft": "A language model trained on demonstrations (supervised fine-tuning).",
    "rm": "A reward model: a sequence classifier with one label, whose logit is the score of a prompt with its answer.",
    "ppo": "A language model trained with PPO to get higher scores from its rewards, near the model it started from.",
}
PARTS = {
    "best_model": "This is the model with the best held-out figure of the run.",
    "ema_model": "Its weights are the moving average of those of the run.",
    "value_model": "This is the value model of the run: a sequence classifier that predicts the return.",
}
"""Directories beside `model`, and what to say of them."""
METRICS = {
    "eval/loss": ("loss", "loss, nats per token"),
    "eval/perplexity": ("perplexity", "perplexity"),
    "eval/token_accuracy": ("accuracy", "token accuracy"),
    "eval/accuracy": ("accuracy", "pairs in the right order"),
    "eval/mse": ("mse", "mean squared error"),
    "eval/pearson": ("pearsonr", "Pearson correlation"),
    "ppo/score_mean": ("score", "mean score of the rewards"),
    "ppo/gold": ("gold", "mean score of the judge evaluation.gold"),
    "ppo/kl": ("kl", "KL to the initial policy, nats per reply"),
}
"""Final metric -> (its type in the card, its name)."""
WORDS = {"score_mean": "score", "score_median": "score_p50", "eos_fraction": "eos_rate"}
"""Names of the stage's own evaluation, and what `rlhf eval` calls the same figures."""


def library_versions() -> dict[str, str]:
    """The versions of rlhf, torch, transformers and Python, for manifests and cards."""
    return {
        "rlhf": rlhf_cli.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def write_cards(
    stage: str, config: AnyConfig, metrics: Mapping[str, float], versions: Mapping[str, str], root: Path
) -> None:
    """Write README.md into every model directory of a stage that is built in `root`."""
    stages = [*(name for name in STAGES[: STAGES.index(stage)] if (root.parent / name / MANIFEST).is_file()), stage]
    base = base_model(config, root.parent)
    for folder in sorted(root.iterdir()):
        adapter = is_adapter(folder)
        file = folder / (MODEL_CONFIG if adapter else "config.json")
        if not file.is_file():
            continue
        values = json.loads(file.read_text(encoding="utf-8"))
        mean, std = values.get("score_mean"), values.get("score_std")
        scale = (mean, std) if isinstance(mean, int | float) and isinstance(std, int | float) else None
        text = card(stage, folder.name, config, metrics, versions, scale, base=base, stages=stages, is_adapter=adapter)
        (folder / CARD).write_text(text, encoding="utf-8")


def card(
    stage: str,
    part: str,
    config: AnyConfig,
    metrics: Mapping[str, float],
    versions: Mapping[str, str],
    scale: tuple[float, float] | None,
    *,
    base: Origin | None = None,
    stages: Sequence[str] = (),
    is_adapter: bool = False,
) -> str:
    """The card of one model directory, `part` of a stage.

    Args:
        scale: (score_mean, score_std) of a reward model.
        base: the model that the run started from; None for one made from scratch.
        stages: the finished stages of the run, up to this one.
        is_adapter: whether the directory has adapters only.
    """
    from huggingface_hub import EvalResult, ModelCardData

    finite = {key: metrics[key] for key in METRICS if key in metrics and math.isfinite(metrics[key])}
    shown = finite if part == "model" else {}  # the figures are those of `model`
    words = METRICS if stage == "sft" else METRICS | {"eval/loss": ("loss", "loss")}
    task = TASKS[stage] if part != "value_model" else "text-classification"
    name = f"{Path(config.artifacts).name}-{stage}"
    dataset = "held-out", "held-out rows of the run"
    figures = [(*words[key], round(value, 6)) for key, value in shown.items()]
    results = [EvalResult(task, *dataset, kind, value, metric_name=label) for kind, label, value in figures]
    names = {part.path for part in config.data.train if not is_local(part.path) and not Path(part.path).exists()}
    datasets = sorted(name for name in names if not name.lower().endswith(SUFFIXES))
    hub_id = base.path if base is not None and not _is_directory(base.path) else None
    licence = license_of(base) if base is not None else None
    data = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag=task,
        tags=["rlhf", stage],
        license=licence,
        base_model=hub_id,
        datasets=datasets or None,
        model_name=name if results else None,
        eval_results=results or None,
    )
    if hub_id is not None:
        data["base_model_relation"] = "adapter" if is_adapter else "finetune"
    body = [f"# {name}", WHAT[stage] if part not in PARTS else f"{WHAT[stage]} {PARTS[part]}"]
    if isinstance(config, RMConfig) and scale is not None:
        logit, curve = "logit", ""
        if config.length_correction:
            logit = "(logit - value)"
            curve = " `value` is read from `length_curve` at the characters of the reply, linear between its points."
        body.append(
            f"## The score\n\nPPO uses `({logit} - score_mean) / score_std`, with the two numbers of `config.json`: "
            f"`score_mean` {scale[0]:.6g} and `score_std` {scale[1]:.6g}.{curve} Other servers ignore them, and some "
            "apply a sigmoid: compare raw logits only, or apply the formula yourself. The text ends with EOS; the "
            "logit is read there."
        )
    if shown:
        rows = [f"| {words[key][1]} | {value:.4g} |" for key, value in shown.items()]
        body.append("\n".join(["## Held-out figures", "", "| | |", "|---|---|", *rows]))
    both = [key.removeprefix("ppo/") for key in metrics if key.startswith("ppo/") and f"sft/{key[4:]}" in metrics]
    if both and part == "model":
        rows = [
            f"| {WORDS.get(name, name)} | {metrics[f'sft/{name}']:.4g} | {metrics[f'ppo/{name}']:.4g} |"
            for name in both
            if name != "seconds"  # differs between two runs of the same computation
        ]
        body.append("\n".join(["## Before and after", "", "| | SFT | PPO |", "|---|---|---|", *rows]))
    used = ", ".join(f"{package} {version}" for package, version in versions.items())
    commands = "\n".join(repeat_commands("DIR", stages or [stage]))
    body.append(
        f"## Training\n\nSeed {config.seed}; {used}. `DIR` is the directory of the run. These commands repeat it:\n\n"
        f"```\n{commands}\n```"
    )
    if licence is None:
        body.append("Licence: that of the data and of the base model, which is not known here.")
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(body) + "\n"


# ---------------------------------------------------------------------------- the base model of a run, and its licence


class Origin(NamedTuple):
    """A model that no stage of this program made."""

    path: str
    """A directory or a hub id."""
    revision: str | None = None


def base_model(config: AnyConfig, root: Path) -> Origin | None:
    """The model from which the stages up to this one started; None if it was made from scratch.

    The manifests of earlier stages name it, which may belong to other runs. `root` is the directory of this run.
    """
    _, start = config.trained
    stage = "sft" if isinstance(config, SFTConfig) else None
    path, revision = start.path, start.revision
    seen: set[Path] = set()
    while path is None or _is_directory(path):
        if path is None and stage == "sft":
            return None
        directory = root / "sft" if path is None else Path(path)
        manifest = read_manifest_or_none(directory)
        if manifest is None:
            directory, manifest = directory.parent, read_manifest_or_none(directory.parent)
        if manifest is None or directory in seen:
            return None if path is None else Origin(path, revision)
        seen.add(directory)
        section = manifest.identity["config"].get("policy" if manifest.stage == "ppo" else "model") or {}
        path, revision, stage, root = section.get("path"), section.get("revision"), manifest.stage, directory.parent
    return Origin(path, revision)


def license_of(base: Origin) -> str | None:
    """The licence in the base model's card, in its directory or in the local cache; None if no card names one."""
    from huggingface_hub import ModelCard

    is_here = _is_directory(base.path)
    file = f"{model_directory(base.path)}/{CARD}" if is_here else cached(base.path, CARD, base.revision)
    if file is None or not Path(file).is_file():
        return None
    try:
        licence = ModelCard.load(file, ignore_metadata_errors=True).data.to_dict().get("license")
    except Exception:  # A card is written by hand, and may contain anything.
        return None
    return licence if isinstance(licence, str) else None


def _is_directory(path: str) -> bool:
    return is_local(path) or Path(path).is_dir()
