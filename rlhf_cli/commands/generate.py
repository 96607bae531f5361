"""`rlhf generate`: what a trained model answers to the prompts of a file.

`rlhf_cli.commands.output` describes the files and how an interrupted run resumes. Row n draws from (seed, n) alone, so
a reply does not depend on the other rows, and `--shard` divides a file among processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlhf_cli.commands.options import (
    ARGUMENTS,
    SOURCE_HELP,
    Device,
    NumProcesses,
    OutputOptions,
    Quantized,
    Seed,
    SourceOptions,
    TemperatureOfRun,
    TopP,
    WritingStage,
)
from rlhf_cli.commands.output import (
    Dropped,
    Outcome,
    Output,
    OutputRow,
    data_digest,
    each_item,
    items,
    prompt_column,
    refuse_own_output,
    with_columns,
)
from rlhf_cli.config.rewards import ModelReward, NamedReward
from rlhf_cli.errors import ConfigError
from rlhf_cli.processes.environment import is_first_worker
from rlhf_cli.processes.launcher import is_worker, run_again
from rlhf_cli.report.progress import Display
from rlhf_cli.run.artifacts import reward_model_stage

if TYPE_CHECKING:
    import torch

    from rlhf_cli.config.ppo import Rollout
    from rlhf_cli.data.encoders import PromptRow
    from rlhf_cli.data.records import Record
    from rlhf_cli.rewards.base import RewardSource
    from rlhf_cli.trained.model import RewardSet, TrainedLanguageModel


@dataclass(frozen=True)
class ResponseOptions:
    """How responses are chosen. None leaves a value to the run."""

    temperature: TemperatureOfRun = None
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Sample from the K most likely tokens.")] = None
    top_p: TopP = None
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            min=1,
            help="Longest response. The run's own by default; outside of a run 256, or what fits.",
        ),
    ] = None
    best_of: Annotated[
        int, typer.Option("--best-of", min=1, metavar="N", help="Sample N responses, write the best by score.")
    ] = 1
    reward_model: Annotated[
        str | None,
        typer.Option("--reward-model", metavar="DIR", help="Score with this model, not with the run's rewards."),
    ] = None
    label: Annotated[
        str | None, typer.Option("--label", help="For a classifier as --reward-model: the label that is the score.")
    ] = None
    seed: Seed = 0
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Responses per batch.")] = 64
    device: Device = "auto"
    quantization: Quantized = None

    def check(self) -> None:
        """Raise ConfigError for options that exclude or need each other."""
        if self.best_of > 1 and self.temperature == 0:
            raise ConfigError("--best-of: all samples are equal at --temperature 0. Remove one of them")
        if self.label is not None and self.reward_model is None:
            raise ConfigError("--label: needs --reward-model. Give it, or remove --label")
        for option, value in {"--top-k": self.top_k, "--top-p": self.top_p}.items():
            if self.temperature == 0 and value is not None:
                raise ConfigError(f"{option}: does nothing at --temperature 0. Remove one of them")

    def rollout(self, model: TrainedLanguageModel) -> Rollout:
        own = model.rollout()
        given = {"temperature": self.temperature or None, "top_k": self.top_k, "top_p": self.top_p}
        given["max_new_tokens"] = self.max_new_tokens
        changes = {key: value for key, value in given.items() if value is not None}
        shortest = min(own.min_new_tokens, self.max_new_tokens or own.min_new_tokens)
        return own.model_copy(update={**changes, "min_new_tokens": shortest})

    def takes_what_fits(self, model: TrainedLanguageModel) -> bool:
        """True if a response may end at the model's last position; else a prompt must leave room for the longest."""
        return model.run is None and self.max_new_tokens is None

    def rewards(self, model: TrainedLanguageModel, directory: str) -> RewardSet | None:
        """The rewards that score the responses, if any. Raises ConfigError if there is nothing to choose by."""
        from rlhf_cli.trained.model import RewardSet

        if self.reward_model is not None:
            path = reward_model_stage(self.reward_model)
            reward = ModelReward(type="reward_model", path=path, label=self.label)
            return RewardSet([NamedReward("--reward-model", path, reward)])
        if self.best_of == 1:
            return None
        rewards = model.rewards()
        if rewards is None:
            raise ConfigError(f"--best-of: {directory} has no rewards to choose by. Give --reward-model")
        return rewards


class Generator:
    """A loaded language model that responds to numbered prompts.

    Response k to prompt n is drawn from the uniforms of (seed, n, k), so it does not depend on the other prompts,
    except for rounding. Raises ConfigError for rewards that do not fit the model.
    """

    def __init__(
        self, source: TrainedLanguageModel, options: ResponseOptions, rewards: RewardSet | None, device: torch.device
    ):
        self.options, self.takes_what_fits = options, options.takes_what_fits(source)
        speaker = source.speaker(device, options.quantization, options.rollout(source))
        self.speaker = speaker.at(0) if options.temperature == 0 else speaker
        self.rewards: list[RewardSource] = []
        self.notes: list[str] = []  # what the rewards tell the user
        if rewards is not None:
            try:
                self.rewards, self.notes = rewards.load(speaker.tokenizer, device, source.precision)
            except ConfigError as error:
                raise ConfigError(str(error).replace("--reward-model.", "--")) from None

    def respond(self, numbered: Sequence[tuple[int, Record]]) -> list[Outcome]:
        """For each prompt `response`, `ended` and, with rewards, `score` of the best sample; or why it has none."""
        import torch

        from rlhf_cli.data.encoders import PromptRow
        from rlhf_cli.rewards.base import samples_of, total_score
        from rlhf_cli.rollout.speaker import PromptRefused
        from rlhf_cli.seeding import generator

        speaker, count = self.speaker, self.options.best_of
        rows: list[PromptRow] = []
        counters: list[tuple[int, int]] = []
        refused: dict[int, Outcome] = {}
        for number, prompt in numbered:
            try:
                ids = speaker.encode(prompt, takes_what_fits=self.takes_what_fits)
            except PromptRefused as error:
                refused[number] = Dropped(error.reason, {"detail": str(error)})
                continue
            rows += [PromptRow(speaker.form.rows(speaker.tokenizer).prompt(prompt), ids, prompt)] * count
            counters += [(number, k) for k in range(count)]
        if not rows:
            return [refused[number] for number, _ in numbered]
        longest = speaker.max_new_tokens
        limits = [min(longest, speaker.room(row.ids)) for row in rows]
        draws = [torch.rand(longest, generator=generator(self.options.seed, "generate", *c)) for c in counters]
        responses = speaker.respond(
            [row.ids for row in rows],
            torch.stack(draws),  # [B, R]
            limits=limits if min(limits) < longest else None,
            max_live_rows=self.options.batch_size,
        )
        texts = list(map(speaker.text, responses))
        found: list[OutputRow] = [{"response": t, "ended": r.ended} for t, r in zip(texts, responses, strict=True)]
        if self.rewards:
            samples = samples_of(self.rewards, speaker.tokenizer, rows, texts, responses)
            for columns, score in zip(found, total_score(self.rewards, samples).total.tolist(), strict=True):
                columns["score"] = score
        groups = (found[first : first + count] for first in range(0, len(found), count))
        best = (max(some, key=lambda response: response.get("score", 0.0)) for some in groups)
        return [refused[number] if number in refused else next(best) for number, _ in numbered]


def generate(
    context: typer.Context,
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A run's directory, or that of any language model.")],
    prompts: Annotated[str, typer.Option("--prompts", metavar="FILE", help=SOURCE_HELP, show_default=False)],
    output: OutputOptions,
    options: ResponseOptions,
    reading: SourceOptions,
    stage: WritingStage = None,
    compared: Annotated[
        Literal["base", "sft"] | None,
        typer.Option("--compare", help="Also write the responses of this model of the run.", show_default=False),
    ] = None,
    shard: Annotated[
        str | None, typer.Option("--shard", metavar="I/N", help="Every Nth row from row I: one of N machines.")
    ] = None,
    nproc: NumProcesses = 1,
) -> None:
    """Let a trained model respond to the prompts of a file."""
    # With --compare a row also has `base_response`, ... of that model. Of several processes the first one writes.
    if nproc > 1 and not is_worker():
        run_again(["generate", *context.meta[ARGUMENTS]], nproc)
        return
    from rlhf_cli.data.stage_rows import prompt
    from rlhf_cli.trained.model import find_model

    source = reading.source(prompts)
    options.check()
    number, count = _shard(shard)
    refuse_own_output(source, output.out)
    model = find_model(directory, stage)
    models = {"": model}  # by the prefix of their columns
    if compared == model.name:
        raise ConfigError(f"--compare {compared}: the responses are those of {compared} already. Remove the option")
    if compared is not None:
        models[f"{compared}_"] = model.compared(compared)
    rewards = options.rewards(model, directory)
    prompt_words = model.config.data.prompt_words if model.config is not None else 0
    opened: dict[str, Generator] = {}

    def read() -> Iterator[Record | Dropped]:
        rows = items(source, "ppo", reading.on_bad_row, prompt, prompt_words=prompt_words)
        return islice(map(with_prompt, islice(rows, output.num)), number, None, count)

    def open_models() -> dict[str, Generator]:
        from rlhf_cli.processes import distributed

        device = distributed.start(options.device).device
        opened.update({prefix: Generator(model, options, rewards, device) for prefix, model in models.items()})
        display.notes(*(note for generator in opened.values() for note in generator.notes))
        return opened

    def answer(generators: dict[str, Generator], numbered: Sequence[tuple[int, Record]]) -> list[Outcome]:
        prompts = [(n * count + number, prompt(record)) for n, record in numbered]
        found = [generator.respond(prompts) for generator in generators.values()]
        each = zip(numbered, *found, strict=True)
        return [_row(record, dict(zip(generators, own, strict=True))) for (_, record), *own in each]

    settings = {"data": data_digest(source), "shard": f"{number + 1}/{count}", **_settings(models, options, rewards)}
    is_main = nproc == 1 or is_first_worker()
    display = Display("generate", quiet=output.quiet, silent=not is_main)
    rows = Output(output.out, settings, restart=output.restart, keep_dropped=False) if is_main else None
    chunk = max(1, options.batch_size // options.best_of)
    with rows or nullcontext():
        shared_on = options.device if nproc > 1 else None
        each_item(rows, read, open_models, answer, display, chunk=chunk, shared_on=shared_on)
        if nproc > 1:
            from rlhf_cli.processes import distributed

            distributed.stop()
        for report in [source.report() for generator in opened.values() for source in generator.rewards]:
            if report:
                display.warn(report)
        if rows is not None:
            num_cut = sum(row["ended"] is False for row in rows.rows())
            where = f"{options.rollout(model).max_new_tokens} tokens"
            where += " or at the model's last position" if options.takes_what_fits(model) else ""
            cut = f", {num_cut} responses cut at {where} (their `ended` is false)" if num_cut else ""
            display.note(f"{rows.path}: {rows.num_rows} rows{cut}{rows.summary_of_dropped()}")
            rows.require_rows(may_be_none=count > 1)


def _settings(
    models: dict[str, TrainedLanguageModel], options: ResponseOptions, rewards: RewardSet | None
) -> dict[str, Any]:
    """The settings that a resumed run shares with the run that it resumes, apart from the data."""
    named = {
        prefix or "response": {"path": source.path, "digest": source.digest(), "template": source.template}
        for prefix, source in models.items()
    }
    return {
        "models": named,
        "rollout": options.rollout(models[""]).model_dump(mode="json"),
        **({"takes_what_fits": True} if options.takes_what_fits(models[""]) else {}),
        **({"quantize": options.quantization} if options.quantization is not None else {}),
        "greedy": options.temperature == 0,
        "best_of": options.best_of,
        "seed": options.seed,
        "judges": rewards.settings() if rewards is not None else None,
    }


def with_prompt(item: Record | Dropped) -> Record | Dropped:
    """A row of plain text with its text as the prompt, unless its first words are the prompt already."""
    if isinstance(item, Dropped) or item.prompt or item.messages:
        return item
    return replace(item, prompt=item.key)


def _row(record: Record, found: dict[str, Outcome]) -> Outcome:
    columns: dict[str, Any] = {"prompt": prompt_column(record)}
    for prefix, outcome in found.items():
        if not isinstance(outcome, dict):
            return outcome
        columns |= {prefix + name: value for name, value in outcome.items()}
    return with_columns(record, columns)


def _shard(shard: str | None) -> tuple[int, int]:
    """(number from 0, count) of `2/4`; raises ConfigError for anything else."""
    number, _, count = (shard or "1/1").partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ConfigError(f"--shard: {shard}, must be the number of this process and of all, for example 1/4")
    return int(number) - 1, int(count)
