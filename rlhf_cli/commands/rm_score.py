"""`rlhf rm score`: what a reward model gives to the answers of a file, good beside bad.

A decoder reads prompt and answer in the tokens of its training, with EOS, as it reads PPO's responses.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_cli.commands.options import Quiet, Source, SourceOptions
from rlhf_cli.commands.output import (
    Dropped,
    OutputRow,
    items,
    json_line,
    new_file,
    prompt_column,
    refuse_own_output,
    require_answer,
    text_of,
    with_columns,
)
from rlhf_cli.commands.rm_serve import RewardModelOptions
from rlhf_cli.data.records import Answer, Record, batched
from rlhf_cli.data.stage_rows import ranking
from rlhf_cli.errors import ConfigError, DataError
from rlhf_cli.report.progress import Console, Display
from rlhf_cli.run.artifacts import model_directory, read_manifest_or_none, reward_model_stage

if TYPE_CHECKING:
    from rlhf_cli.rewards.base import Samples
    from rlhf_cli.rewards.models import RewardModel

CHUNK = 256
NUM_SHOWN = 3


def rm_score(
    options: RewardModelOptions,
    path: Source,
    reading: SourceOptions,
    out: Annotated[
        Path | None, typer.Option("--out", help="The .jsonl file to write. Without it, stdout.", show_default=False)
    ] = None,
    num: Annotated[int | None, typer.Option("--num", min=1, help="Maximum rows.")] = None,
    quiet: Quiet = False,
) -> None:
    """Score the answers of a file with a reward model; of pairs, show good beside bad.

    SOURCE - scores what you type. Type a line per answer; a tab separates the prompt before it. The score of each line
    follows it.
    """
    if path == "-":
        given: dict[str, object] = {"--out": out, "--num": num, "--set": reading.overrides}
        given |= {"--format": reading.format, "--keys": reading.keys}
        if used := next((name for name, value in given.items() if value), None):
            raise ConfigError(f"{used}: does not go with SOURCE -, which scores what you type. Remove it")
        _score_typed(options, quiet=quiet)
        return
    source = reading.source(path)
    if out is not None:
        refuse_own_output(source, out)
    display = Display("score", quiet=quiet, console=Console(soft_wrap=True, stderr=out is None))
    model, template, notes = _load(options)
    display.notes(*notes)
    summary = _Summary()
    with new_file(out) if out is not None else contextlib.nullcontext(sys.stdout.buffer) as file:
        for chunk in batched(islice(items(source, "sft", reading.on_bad_row, require_answer), num), CHUNK):
            records = [record for record in chunk if not isinstance(record, Dropped)]
            summary.num_bad_rows += len(chunk) - len(records)
            samples = as_samples(model, records, template)
            scores = iter(model.score(samples).tolist())
            ids = iter([p + r for p, r in zip(samples.prompt_ids, samples.response_ids, strict=True)])
            for record in records:
                own_scores = [next(scores) for _ in record.answers]
                summary.add(record, own_scores, [next(ids) for _ in record.answers])
                file.write(json_line(scored_row(record, own_scores)))
        file.flush()
    if out is not None:
        display.note(f"{out}: {summary.num_rows} rows")
    summary.show(display, model.report())


def _score_typed(options: RewardModelOptions, *, quiet: bool) -> None:
    """Score each line of standard input: below the line on a terminal, in a JSON line with its text in a pipe."""
    display = Display("score", quiet=quiet, console=Console(soft_wrap=True, stderr=True))
    model, template, notes = _load(options)
    is_terminal = sys.stdin.isatty()
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="replace")
    display.notes(*notes, "a line is an answer, or a prompt, a tab and an answer" if is_terminal else None)
    for number, line in enumerate(sys.stdin, 1):
        prompt, _, answer = line.rstrip("\r\n").rpartition("\t")
        if not answer.strip():
            continue
        if prompt and template is None and not prompt[-1].isspace() and not answer[0].isspace():
            answer = f" {answer}"  # as answers begin in rows whose prompt ends with a word
        record = Record(prompt, f"line {number}", (Answer(answer),), prompt or answer)
        (score,) = model.score(as_samples(model, [record], template)).tolist()
        text = f"{score:.3f}\n".encode() if is_terminal else json_line(scored_row(record, [score]))
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()


def _load(options: RewardModelOptions) -> tuple[RewardModel, str | None, list[str]]:
    """The reward model, the prompt template of its training if that is known, and notes for the user."""
    from rlhf_cli.data.encode import require_eos
    from rlhf_cli.models.heads import reads_last_token
    from rlhf_cli.models.load import load_tokenizer

    path = reward_model_stage(options.model)
    manifest = read_manifest_or_none(path)
    data = manifest.identity["config"].get("data") if manifest is not None else None
    data = data if isinstance(data, dict) else {}
    # With its own tokenizer it scores token ids, as it does for a policy of the same run.
    tokenizer = load_tokenizer(model_directory(path))
    model, notes = options.load(path, tokenizer, keep_special=data.get("special_tokens") == "keep")
    if reads_last_token(model.model):
        require_eos(tokenizer, path)
    return model, data.get("prompt_template"), notes


def as_samples(model: RewardModel, records: Sequence[Record], template: str | None) -> Samples:
    """Every answer of every record, in order, as a reward model receives PPO's responses."""
    from rlhf_cli.data.encode import RowText, encode_for_classifier, last_run
    from rlhf_cli.models.heads import reads_last_token
    from rlhf_cli.rewards.base import Samples

    text = RowText(model.tokenizer, template, model.keep_special)
    rows = [row for record in records for row in record.each()]
    if reads_last_token(model.model):
        encoded = text.answer_ids(rows, start=False)
        ids = [ids for ids, _ in encoded]
        cuts = [len(ids) - last_run(answer_mask) for ids, answer_mask in encoded]
    else:
        ids = encode_for_classifier(model.tokenizer, [text.whole(row) for row in rows], None)
        cuts = [0] * len(ids)
    return Samples(
        prompts=list(map(text.prompt, rows)),
        responses=[text_of(row, row.response) if text.is_chat(row) else row.response for row in rows],
        prompt_ids=[each[:cut] for each, cut in zip(ids, cuts, strict=True)],
        response_ids=[each[cut:] for each, cut in zip(ids, cuts, strict=True)],
        ended=[row.answers[0].ended for row in rows],
        rows=[row.columns for row in rows],
        where=[row.where for row in rows],
        own_prompts=[row.prompt for row in rows],
        messages=[row.messages for row in rows],
    )


def scored_row(record: Record, scores: Sequence[float]) -> OutputRow:
    """The row with the scores of its answers. A preference pair has its better answer under `chosen`."""
    texts = [text_of(record, text) for text in record.texts]
    prompt = prompt_column(record)
    if len(texts) == 1:
        return with_columns(record, {"prompt": prompt, "response": texts[0], "score": scores[0]})
    ranked = ranking(record)
    if len(texts) > 2 or ranked is None:
        return with_columns(record, {"prompt": prompt, "responses": texts, "scores": list(scores)})
    best = record.texts.index(ranked.response)
    pair: OutputRow = {"prompt": prompt, "chosen": texts[best], "rejected": texts[1 - best]}
    if "ended" in record.columns:
        pair["ended"] = [record.answers[n].ended for n in (best, 1 - best)]
    return record.columns | pair | {"chosen_score": scores[best], "rejected_score": scores[1 - best]}


class _Summary:
    def __init__(self) -> None:
        self.num_rows = self.num_bad_rows = 0
        self.scores: list[float] = []
        self.of_rankings: list[float] = []  # the scores of all rankings end to end, best answer first within each
        self.sizes: list[int] = []
        self.longer: list[float] = []
        self.gold: list[float | None] = []
        self.targets: list[tuple[float, float]] = []  # (score, score or label of the row) of single answers
        self.shown: list[tuple[str, dict[str, str]]] = []

    def add(self, record: Record, scores: Sequence[float], ids: Sequence[list[int]]) -> None:
        from rlhf_cli.algorithms.counts import longer_wins
        from rlhf_cli.evaluation.agreement import gold_gap

        self.num_rows += 1
        self.scores += scores
        ranked = ranking(record)
        if ranked is None:
            # The score or label of the row, whatever its format.
            columns = (record.answers[0].score, record.columns.get("score"), record.columns.get("label"))
            numbers = (x for x in columns if isinstance(x, int | float))
            targets = [float(x) for x in numbers if abs(x) <= sys.float_info.max]
            if len(scores) == 1 and targets:
                self.targets.append((scores[0], targets[0]))
            return
        order = [record.texts.index(text) for text in ranked.texts]
        self.of_rankings += [scores[n] for n in order]
        self.sizes.append(len(order))
        self.longer.append(longer_wins([len(ids[n]) for n in order]))
        self.gold.append(gold_gap(ranked))
        if len(self.shown) < NUM_SHOWN:
            sides = {"good": order[0], "bad": order[-1]}
            texts = {f"{side} ({scores[n]:+.2f})": record.answers[n].text for side, n in sides.items()}
            self.shown.append((record.prompt, texts))

    def show(self, display: Display, report: str) -> None:
        import torch

        from rlhf_cli.algorithms.statistics import pearson, spearman
        from rlhf_cli.evaluation.agreement import ranking_figures
        from rlhf_cli.health.baselines import held_out_verdict

        for prompt, sides in self.shown:
            display.exchange(prompt, sides)
        if report:
            display.warn(report)
        if self.num_bad_rows:
            display.warn(f"{self.num_bad_rows} rows cannot be read and have no scores")
        if not self.scores:
            raise DataError("no row has a score. Check the file with `rlhf data check`")
        mean, spread = statistics.fmean(self.scores), statistics.pstdev(self.scores)
        counts = f"{len(self.scores):,} answers of {self.num_rows:,} rows"
        display.note(f"{counts}: mean {mean:.3f}, standard deviation {spread:.3f}")
        if self.sizes:
            figures = ranking_figures(torch.tensor(self.of_rankings), self.sizes, self.longer, self.gold)
            display.note(f"{held_out_verdict(figures)[0]}; mean margin {figures['eval/margin']:.3f}")
        if len(self.targets) > 1:
            scores, targets = torch.tensor(self.targets, dtype=torch.float64).unbind(1)
            display.note(
                f"{len(targets):,} rows have a score or label: correlation {pearson(scores, targets):.3f}, "
                f"of ranks {spearman(scores, targets):.3f}"
            )
