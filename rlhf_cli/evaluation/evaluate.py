"""`rlhf eval`: measure the finished stages of a run on held-out data, with intervals."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.data.splits import Drawn
from rlhf_cli.errors import ConfigError
from rlhf_cli.evaluation import likelihood
from rlhf_cli.evaluation.benchmark import read_bench
from rlhf_cli.evaluation.figures import Sentences, as_json, ratio_figure, show
from rlhf_cli.evaluation.judging import Judge, judge_replies
from rlhf_cli.evaluation.replies import Arena, Replies, differences, side_figures, win_rates
from rlhf_cli.evaluation.reward_model import measure_reward_model
from rlhf_cli.evaluation.yardstick import along_the_run, best_of_n_report
from rlhf_cli.files import digest_file
from rlhf_cli.processes.distributed import start
from rlhf_cli.report.figure import Figure
from rlhf_cli.report.progress import Display
from rlhf_cli.run.artifacts import MANIFEST, model_directory, stage_directory
from rlhf_cli.trained.run import Run, open_run

FOLDER = "eval"
"""The folder of the run's directory that evaluations are written to."""
FILE = "evaluation.json"
REPLIES = 256
"""Held-out prompts that the SFT model answers."""


@dataclass(frozen=True)
class Settings:
    """The options of `rlhf eval`."""

    stage: str | None
    """One stage, or None for every finished one."""
    samples: int
    """Samples of the SFT model per prompt, for best-of-n; 0 leaves best-of-n out."""
    sampled_prompts: int
    """Held-out prompts that get that many samples."""
    seed: int
    device: str
    bench: Path | None = None
    """Rows in the format of RewardBench 2 for the reward model."""
    judge: Judge | None = None
    """A model that compares the replies of SFT and PPO."""


def evaluate(root: Path, settings: Settings, *, quiet: bool = False) -> None:
    """Measure each finished stage, print its tables and write `<root>/eval/<stage>/evaluation.json`.

    Raises ArtifactError if no stage, or not the one asked for, is finished, ConfigError for an option whose stage is
    not evaluated, DataError for a benchmark that cannot be read.
    """
    world = start(settings.device)
    run = open_run(root, stage=settings.stage, device=world.device, seed=settings.seed)
    display = Display("eval", quiet=quiet)
    for option, value, needed in (("--rm-bench", settings.bench, "rm"), ("--judge", settings.judge, "ppo")):
        if value is not None and needed not in run.stages:
            raise ConfigError(f"{option}: needs the stage {needed}, which is not evaluated here. Remove the option")
    bench = read_bench(settings.bench) if settings.bench is not None else None
    for stage in run.stages:
        match stage:
            case "sft":
                report = _sft(run, display)
            case "rm":
                report = measure_reward_model(run, bench, display)
            case _:
                report = _ppo(run, settings, display)
        path = _write(run, stage, report)
        if stage == "ppo" and settings.judge is not None:  # After everything else is written: a server can fail.
            judge_replies(report, settings.judge, Sentences(display))
            _write(run, stage, report)
        display.note(f"written to {path}")


def _write(run: Run, stage: str, report: dict[str, Any]) -> Path:
    """Write a stage's evaluation.json."""
    path = run.root / FOLDER / stage / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    manifest = digest_file(stage_directory(run.root, stage) / MANIFEST)
    found = {"stage": stage, "seed": run.seed, "manifest": manifest, **report}
    text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")
    return path


# ---------------------------------------------------------------------------------------------- SFT


def _sft(run: Run, display: Display) -> dict[str, Any]:
    """Held-out likelihood of the SFT model, beside the model that it started from."""
    config = run.sft
    assert config is not None
    model, tokenizer = run.load(run.model_path("sft"), config.precision)
    rows = run.demonstrations(model, tokenizer)
    if not rows:
        display.warn("sft: no held-out rows, so no figures. Set data.test or data.test_fraction and train again")
        return {}
    sums = likelihood.row_sums(model, rows, run.budget(model, config.precision), config.precision)
    drawn = Drawn(rows, REPLIES, run.seed)
    replies, form = likelihood.replies(model, tokenizer, drawn, config, seed=run.seed)
    figures = likelihood.likelihood_figures(sums, seed=run.seed) | form
    columns = {"SFT": figures}
    report: dict[str, Any] = {"figures": as_json(figures)} | ({"replies": replies} if replies else {})
    if config.model.path is not None:
        base_path = model_directory(config.model.path)
        base, base_tokenizer = run.load(base_path, config.precision)
        base_sums = likelihood.row_sums(base, rows, run.budget(base, config.precision), config.precision)
        before = likelihood.likelihood_figures(base_sums, seed=run.seed)
        before |= likelihood.replies(base, base_tokenizer, drawn, config, seed=run.seed)[1]
        difference = {"loss": likelihood.loss_difference(sums, base_sums, seed=run.seed)}
        columns = {"before": before, **columns, "difference": difference}
        report |= {"before": as_json(before), "difference": as_json(difference)}
    show(display, f"SFT, {rows} held-out rows; replies to {len(replies):,} of them", columns)
    if rows.by_source:
        loss = {
            name: ratio_figure(sums.nll[numbers], sums.tokens[numbers], seed=run.seed)
            for name, numbers in ((name, list(each)) for name, each in rows.by_source.items())
        }
        show(display, "SFT, held-out loss by source of the data", {"loss": loss}, counts=True)
        report["by_source"] = {"loss": as_json(loss)}
    return report


# ---------------------------------------------------------------------------------------------- PPO


def _ppo(run: Run, settings: Settings, display: Display) -> dict[str, Any]:
    """PPO beside SFT on the held-out prompts, and beside best-of-n of the SFT model."""
    config = run.ppo
    assert config is not None
    reference_path = model_directory(config.stage_model(config.policy.path, "sft"))
    reference, tokenizer = run.load(reference_path, config.precision)
    trained, _ = run.load(run.model_path("ppo"), config.precision)
    arena = Arena(run, config, reference, tokenizer)
    before, after = arena.replies(reference, 1), arena.replies(trained, 1)
    seed, sentences = run.seed, Sentences(display)
    columns = {
        "SFT": side_figures(before, seed=seed),
        "PPO": side_figures(after, seed=seed),
        "difference": differences(before, after, seed=seed),
    }
    show(display, f"SFT and PPO, {arena.prompts} held-out prompts, one reply each", columns)
    by_source = {}
    for name, numbers in arena.prompts.by_source.items():
        some = {"SFT": before.of(numbers), "PPO": after.of(numbers)}
        sides = {side: side_figures(replies, seed=seed) for side, replies in some.items()}
        show(display, f"SFT and PPO, the {len(numbers):,} prompts of {name}", sides)
        by_source[name] = {side.lower(): as_json(figures) for side, figures in sides.items()}
    rates = win_rates(before, after)
    show(display, "PPO against SFT: how often PPO's reply is better", {"win rate": rates})
    report: dict[str, Any] = {name.lower(): as_json(figures) for name, figures in columns.items()}
    report |= {"win_rate": as_json(rates), **({"by_source": by_source} if by_source else {})}
    if (tax := _alignment_tax(run, reference, trained, tokenizer)) is not None:
        report["alignment_tax"] = tax.as_json()
        sentences.say(f"alignment tax: PPO changed the loss on SFT's held-out rows by {tax} nats per token")
    report |= along_the_run(run, before.gold_name, sentences)
    report["replies"] = _examples(arena, before, after)
    if settings.samples:
        report["best_of_n"] = best_of_n_report(
            arena, after, settings.samples, settings.sampled_prompts, sentences, seed=seed
        )
    report["sentences"] = sentences.texts
    return report


def _alignment_tax(
    run: Run, reference: PreTrainedModel, trained: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Figure | None:
    """PPO's loss minus SFT's on the held-out rows of SFT; None without such rows."""
    if run.sft is None or not (rows := run.demonstrations(reference, tokenizer)):
        return None
    precision = run.sft.precision
    before, after = (
        likelihood.row_sums(model, rows, run.budget(model, precision), precision) for model in (reference, trained)
    )
    return likelihood.loss_difference(after, before, seed=run.seed)


def _examples(arena: Arena, before: Replies, after: Replies) -> list[dict[str, Any]]:
    """Every prompt with both replies and their numbers."""

    def side(replies: Replies, i: int) -> dict[str, Any]:
        return {
            "reply": replies.texts[i][0],
            "score": replies.score[i, 0].item(),
            **{f"reward/{name}": values[i, 0].item() for name, values in replies.each.items() if len(replies.each) > 1},
            **{name: values[i, 0].item() for name, values in replies.gold.items()},
            "kl": replies.kl[i, 0].item(),
            "length": int(replies.length[i, 0]),
        }

    def tokens(i: int) -> dict[str, Any]:
        texts = [str(arena.tokenizer.decode([token])) for token in after.ids[i][0]]
        return {"tokens": texts, "token_kl": [round(x, 4) for x in after.token_kl[i][0]]}

    def question(prompt: PromptRow) -> dict[str, str]:
        """The prompt as its row has it, where a template changed it."""
        return {} if prompt.row.prompt == prompt.text else {"question": prompt.row.prompt}

    return [
        {"prompt": prompt.text, **question(prompt), "sft": side(before, i), "ppo": side(after, i) | tokens(i)}
        for i, prompt in enumerate(arena.prompts)
    ]
