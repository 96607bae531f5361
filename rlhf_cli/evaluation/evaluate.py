"""Measure SFT and PPO for `rlhf eval`, with intervals, ask its judge, and write its file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.data.splits import Drawn
from rlhf_cli.errors import ArtifactError, RunError
from rlhf_cli.evaluation import likelihood
from rlhf_cli.evaluation.figures import Sentences, as_json, equal_length_figure, ratio_figure, share_figure, show
from rlhf_cli.evaluation.replies import Arena, Replies, differences, side_figures, win_rates
from rlhf_cli.evaluation.yardstick import along_the_run, best_of_n_report
from rlhf_cli.files import digest_file
from rlhf_cli.models.forward import vocabulary_rows
from rlhf_cli.report.figure import Figures
from rlhf_cli.report.progress import Display
from rlhf_cli.run.artifacts import MANIFEST, model_directory, stage_directory
from rlhf_cli.run.checkpoint_files import write_text
from rlhf_cli.trained.run import Run

REPLIES = 256  # held-out prompts that the SFT model answers


Compare = Callable[[Sequence[tuple[str, str, str]]], list[Literal["first", "second"] | None]]
"""The better reply of each (prompt, first reply, second reply), None without a clear answer."""


def write_evaluation(run: Run, stage: str, report: dict[str, Any]) -> Path:
    """Write `<root>/eval/<stage>/evaluation.json`, and return its path. Raises ArtifactError if it cannot."""
    path = run.root / "eval" / stage / "evaluation.json"
    manifest = digest_file(stage_directory(run.root, stage) / MANIFEST)
    found = {"stage": stage, "seed": run.seed, "manifest": manifest, **report}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        advice = "Free disk space, or make the run's directory writable"
        raise ArtifactError(f"{path}: cannot be written ({error.strerror}). {advice}") from None
    return path


def measure_sft(run: Run, display: Display) -> dict[str, Any]:
    """Held-out likelihood of the SFT model, beside the model that it started from."""
    config = run.sft
    assert config is not None
    model, tokenizer = run.load(run.model_path("sft"), config.precision)
    rows, seed = run.demonstrations(model, tokenizer), run.seed
    if not rows:
        display.warn("sft: no held-out rows, so no figures. Set data.test or data.test_fraction and train again")
        return {}
    sums = likelihood.row_sums(model, rows, run.budget(model, config.precision), config.precision)
    drawn = Drawn(rows, REPLIES, seed)
    replies, form = likelihood.replies(model, tokenizer, drawn, config, seed=seed)
    figures = likelihood.likelihood_figures(sums, seed=seed) | form
    columns = {"SFT": figures}
    report: dict[str, Any] = {"figures": as_json(figures)} | ({"replies": replies} if replies else {})
    if config.model.path is not None:
        base, base_tokenizer = run.load(
            model_directory(config.model.path), config.precision, revision=config.model.revision
        )
        if vocabulary_rows(base) < vocabulary_rows(model):
            display.note("the model before SFT lacks embeddings for model.add_tokens, so it is not compared")
        else:
            base_sums = likelihood.row_sums(base, rows, run.budget(base, config.precision), config.precision)
            before = likelihood.likelihood_figures(base_sums, seed=seed)
            before |= likelihood.replies(base, base_tokenizer, drawn, config, seed=seed)[1]
            difference = {"loss": likelihood.loss_difference(sums, base_sums, seed=seed)}
            columns = {"before": before, **columns, "difference": difference}
            report |= {"before": as_json(before), "difference": as_json(difference)}
    show(display, f"SFT, {rows} held-out rows; replies to {len(replies):,} of them", columns)
    if rows.by_source:
        loss = {
            name: ratio_figure(sums.nll[list(numbers)], sums.tokens[list(numbers)], seed=seed)
            for name, numbers in rows.by_source.items()
        }
        show(display, "SFT, held-out loss by source of the data", {"loss": loss}, counts=True)
        report["by_source"] = {"loss": as_json(loss)}
    return report


def measure_ppo(run: Run, num_samples: int, num_prompts: int, display: Display) -> dict[str, Any]:
    """PPO beside SFT on the held-out prompts, and beside best-of-n of the SFT model."""
    config = run.ppo
    assert config is not None
    path = model_directory(config.stage_model(config.policy.path, "sft"))
    reference, tokenizer = run.load(path, config.precision, revision=config.policy.revision)
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
    if run.sft is not None and (rows := run.demonstrations(reference, tokenizer)):
        sums = (
            likelihood.row_sums(model, rows, run.budget(model, run.sft.precision), run.sft.precision)
            for model in (trained, reference)
        )
        tax = likelihood.loss_difference(*sums, seed=seed)
        report["alignment_tax"] = tax.as_json()
        sentences.say(f"alignment tax: PPO changed the loss on SFT's held-out rows by {tax} nats per token")
    report |= along_the_run(run, before.gold_name, sentences)
    report["replies"] = _examples(arena, before, after)
    if num_samples:
        report["best_of_n"] = best_of_n_report(arena, after, num_samples, num_prompts, sentences, seed=seed)
    report["sentences"] = sentences.texts
    return report


def _examples(arena: Arena, before: Replies, after: Replies) -> list[dict[str, Any]]:
    """Every prompt with both replies and their numbers."""

    def side(replies: Replies, i: int) -> dict[str, Any]:
        return {
            "reply": replies.texts[i][0],
            **{name: values[i, 0].item() for name, values in replies.numbers.items()},
            "kl": replies.kl[i, 0].item(),
            "length": int(replies.length[i, 0]),
        }

    def tokens(i: int) -> dict[str, Any]:
        texts = [str(arena.tokenizer.decode([token])) for token in after.ids[i][0]]
        return {"tokens": texts, "token_kl": [round(x, 4) for x in after.token_kl[i][0]]}

    def prompt(one: PromptRow) -> dict[str, str]:
        """The prompt, and as its row has it where a template changed it."""
        return {"prompt": one.text} | ({} if one.row.prompt == one.text else {"question": one.row.prompt})

    return [
        {**prompt(one), "sft": side(before, i), "ppo": side(after, i) | tokens(i)}
        for i, one in enumerate(arena.prompts)
    ]


def judge_replies(report: dict[str, Any], name: str, compare: Compare, sentences: Sentences) -> None:
    """Add the win rates of the judge `name` to the report of a PPO stage, and to each reply what PPO's got there.

    Each pair is asked in both orders. PPO's reply gets 1 if it wins both, 1/2 for a contradiction (a tie), 0 if it
    loses both. Equal texts are a tie and are not asked. A pair without a clear answer in one order is left out.

    Raises RunError if it answers no pair clearly.
    """
    rows = report["replies"]
    texts = [(row.get("question", row["prompt"]), row["sft"]["reply"], row["ppo"]["reply"]) for row in rows]
    asked = [i for i, (_, sft, ppo) in enumerate(texts) if sft.strip() != ppo.strip()]
    questions = [(p, b, a) for p, a, b in (texts[i] for i in asked)] + [texts[i] for i in asked]
    answers = compare(questions)
    both = zip(asked, answers[: len(asked)], answers[len(asked) :], strict=True)
    # What the first of two replies gets, with PPO's first and with SFT's first.
    clear = {i: (float(ppo == "first"), float(sft == "first")) for i, ppo, sft in both if ppo and sft}
    if asked and not clear:
        raise RunError(
            f"--judge: {name} gave no clear answer on any of {len(asked)} pairs. Raise --judge-tokens, or write "
            "a --judge-template that asks for the letter A or B alone"
        )
    unclear = set(asked) - clear.keys()
    judged = [i for i in range(len(rows)) if i not in unclear]
    for i in judged:
        ppo_first, sft_first = clear.get(i, (0.5, 0.5))
        rows[i]["judge"] = (ppo_first + 1 - sft_first) / 2
    result = torch.tensor([rows[i]["judge"] for i in judged], dtype=torch.float64)
    lengths = [torch.tensor([float(rows[i][side]["length"]) for i in judged]) for side in ("ppo", "sft")]
    figures: Figures = {
        "judge": share_figure(result),
        "judge_equal_length": equal_length_figure(result, *lengths),
        "judge_ties": share_figure((result == 0.5).double()),
    }
    if clear:  # one trial a pair: its two answers are not independent
        figures["judge_first_position"] = share_figure(torch.tensor(list(clear.values())).mean(1))
    show(sentences.display, f"PPO against SFT by {name}, {len(judged)} prompts, both orders", {"rate": figures})
    sentences.say(
        f"the judge {name} prefers PPO's reply in {figures['judge'].value:.1%} of {len(judged)} prompts, ties "
        "counted 1/2"
    )
    if unclear:
        sentences.say(f"the judge {name} gave no clear answer on {len(unclear)} of {len(rows)} prompts")
    report["win_rate"] |= as_json(figures)
    report["judge"] = {"name": name, "pairs": len(judged), "unclear": len(unclear)}
    report["sentences"] = [*report.get("sentences", []), *sentences.texts]
