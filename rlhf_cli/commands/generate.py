"""`rlhf generate`: what a trained model answers to the prompts of a file.

`rlhf_cli.commands.output` describes the files and how an interrupted run resumes. Row n draws from (seed, n) alone, so
a reply does not depend on the other rows, and `--shard` divides a file among processes. Nothing here imports torch
before it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlhf_cli.commands.data_score import with_columns
from rlhf_cli.commands.options import (
    ARGUMENTS,
    SOURCE_HELP,
    Device,
    Format,
    Keys,
    NumProcesses,
    OnBadRow,
    Out,
    Quantized,
    Quiet,
    RestartOut,
    Seed,
    SourceSet,
    TopP,
    WritingStage,
    source_of,
)
from rlhf_cli.commands.output import data_digest, each_item, items, prompt_column, refuse_own_output
from rlhf_cli.commands.output_files import Dropped, Outcome, Output
from rlhf_cli.config.data import DataSource
from rlhf_cli.config.ppo import Rollout
from rlhf_cli.errors import ConfigError
from rlhf_cli.training.processes import is_first_worker, is_worker, run_again
from rlhf_cli.training.progress import Display

if TYPE_CHECKING:
    from rlhf_cli.data.records import Record
    from rlhf_cli.evaluation.generation import Answer, Decoding, Generator, Refused
    from rlhf_cli.evaluation.trained import Quantize, RewardSet, TrainedModel
    from rlhf_cli.training.distributed import World

Temperature = Annotated[
    float | None, typer.Option("--temperature", min=0.0, help="0 is greedy. The run's own by default.")
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens",
        min=1,
        help="Longest response. The run's own by default; outside of a run 256, or what fits.",
    ),
]
BestOf = Annotated[
    int, typer.Option("--best-of", min=1, metavar="N", help="Sample N responses, write the best by score.")
]
PenaltyAlpha = Annotated[
    float | None,
    typer.Option("--penalty-alpha", min=0, max=1, help="Contrastive search among --top-k tokens (4)."),
]
Compared = Annotated[
    Literal["base", "sft"] | None,
    typer.Option("--compare", help="Also write the responses of this model of the run.", show_default=False),
]
Shard = Annotated[
    str | None, typer.Option("--shard", metavar="I/N", help="Every Nth row from row I: one of N machines.")
]


@dataclass(frozen=True)
class Options:
    """How responses are chosen. None leaves a value to the run."""

    temperature: float | None = None
    """0 takes the most likely token."""
    top_k: int | None = None
    top_p: float | None = None
    max_new_tokens: int | None = None
    best_of: int = 1
    """Responses per prompt, of which the rewards choose one."""
    reward_model: str | None = None
    """Scores the responses instead of the run's rewards."""
    beams: int = 1
    penalty_alpha: float | None = None
    """The penalty of contrastive search, which chooses among `top_k` tokens, or 4."""
    seed: int = 0
    batch_size: int = 64
    device: str = "auto"
    quantization: Quantize | None = None

    def check(self) -> None:
        """Raise ConfigError for options that exclude each other."""
        if self.best_of > 1 and self.temperature == 0:
            raise ConfigError("--best-of: all samples are equal at --temperature 0. Remove one of them")
        given = {"--best-of": self.best_of > 1, "--temperature": self.temperature is not None}
        given |= {"--top-k": self.top_k is not None, "--top-p": self.top_p is not None}
        if self.beams > 1 and self.penalty_alpha is not None:
            raise ConfigError("--penalty-alpha: does nothing with --beams. Remove one of them")
        search = "--beams" if self.beams > 1 else "--penalty-alpha" if self.penalty_alpha is not None else None
        for option, is_given in given.items():
            if search is not None and is_given and (search, option) != ("--penalty-alpha", "--top-k"):
                raise ConfigError(f"{option}: does nothing with {search}, which draws no samples. Remove one of them")
            if self.temperature == 0 and is_given and option in ("--top-k", "--top-p"):
                raise ConfigError(f"{option}: does nothing at --temperature 0. Remove one of them")


@dataclass(frozen=True)
class _Plan:
    """The models that respond, by the prefix of their columns, and everything that decides the text."""

    models: dict[str, TrainedModel]
    decoding: Decoding
    rewards: RewardSet | None
    device: str
    server: None = None

    @property
    def prompt_words(self) -> int:
        """`data.prompt_words` of the stage whose prompts the models get."""
        config = self.models[""].config
        return config.data.prompt_words if config is not None else 0

    @property
    def chunk(self) -> int:
        """Prompts that are sampled at the same time, see `WriterOptions.chunk`."""
        return max(1, self.decoding.batch_size // self.decoding.num_samples)

    def open(self) -> dict[str, Generator]:
        """Load the models."""
        from rlhf_cli.evaluation.generation import Generator
        from rlhf_cli.training.distributed import start

        device = start(self.device).device
        return {
            prefix: Generator(source, self.decoding, self.rewards, device) for prefix, source in self.models.items()
        }

    def join(self) -> World:
        """Meet the other processes."""
        from rlhf_cli.training import distributed

        world = distributed.start(self.device)
        distributed.at_step("generate")
        return world

    @staticmethod
    def leave() -> None:
        """Part from the other processes."""
        from rlhf_cli.training import distributed

        distributed.stop()

    def settings(self) -> dict[str, Any]:
        """What a resumed run must have in common with the run that it resumes."""
        decoding = self.decoding
        models = {
            prefix or "response": {"path": source.path, "digest": source.digest(), "template": source.template}
            for prefix, source in self.models.items()
        }
        return {
            "models": models,
            "rollout": decoding.rollout.model_dump(mode="json"),
            **({"takes_what_fits": True} if decoding.takes_what_fits else {}),
            **({"quantize": decoding.quantization} if decoding.quantization is not None else {}),
            "greedy": decoding.greedy,
            "best_of": decoding.num_samples,
            "beams": decoding.num_beams,
            "contrastive": [decoding.penalty_alpha, decoding.num_candidates],
            "seed": decoding.seed,
            "judges": self.rewards.settings() if self.rewards is not None else None,
        }


def generate(
    context: typer.Context,
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A run's directory, or that of any language model.")],
    prompts: Annotated[str, typer.Option("--prompts", metavar="FILE", help=SOURCE_HELP, show_default=False)],
    out: Out,
    stage: WritingStage = None,
    compared: Compared = None,
    temperature: Temperature = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Sample from the K most likely tokens.")] = None,
    top_p: TopP = None,
    max_new_tokens: MaxNewTokens = None,
    best_of: BestOf = 1,
    reward_model: Annotated[
        str | None,
        typer.Option("--reward-model", metavar="DIR", help="Score with this model, not with the run's rewards."),
    ] = None,
    beams: Annotated[int, typer.Option("--beams", min=1, help="Beam search with this many beams.")] = 1,
    penalty_alpha: PenaltyAlpha = None,
    seed: Seed = 0,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Responses per batch.")] = 64,
    shard: Shard = None,
    nproc: NumProcesses = 1,
    num: Annotated[int | None, typer.Option("--num", min=1, help="Maximum rows.")] = None,
    device: Device = "auto",
    quantize: Quantized = None,
    overrides: SourceSet = None,
    format: Format = None,
    keys: Keys = None,
    on_bad_row: OnBadRow = "error",
    restart: RestartOut = False,
    quiet: Quiet = False,
) -> None:
    """Let a trained model respond to the prompts of a file."""
    if nproc > 1 and not is_worker():
        run_again(["generate", *context.meta[ARGUMENTS]], nproc)
        return
    sampling = (temperature, top_k, top_p, max_new_tokens)
    write_responses(
        directory,
        source_of(prompts, overrides, format, keys),
        out,
        Options(*sampling, best_of, reward_model, beams, penalty_alpha, seed, batch_size, device, quantize),
        stage=stage,
        compare=compared,
        shard=shard,
        num=num,
        on_bad_row=on_bad_row,
        restart=restart,
        quiet=quiet,
        in_several_processes=nproc > 1,
    )


def write_responses(
    directory: str,
    source: DataSource,
    out: Path,
    options: Options,
    *,
    stage: str | None = None,
    compare: str | None = None,
    shard: str | None = None,
    num: int | None = None,
    on_bad_row: OnBadRow = "error",
    restart: bool = False,
    quiet: bool = False,
    in_several_processes: bool = False,
) -> None:
    """Write a response to each of the first `num` prompts to `out`, or resume.

    Each row has the columns of its prompt, `response`, `ended` and, if rewards chose among several, `score`. With
    `compare` it also has `base_response`, ... of that model. With `in_several_processes` this is one of the processes
    that `rlhf_cli.training.processes` started; the first of them writes.
    Raises ConfigError for options that do not fit together, ArtifactError for a model that is missing and for an `out`
    that cannot be written or resumed, DataError for rows that cannot be read. Written rows are kept.
    """
    from rlhf_cli.data.views import prompt

    options.check()
    number, count = _shard(shard)
    refuse_own_output(source, out)
    plan = _plan(directory, stage, compare, options)
    is_main = not in_several_processes or is_first_worker()
    display = Display("generate", quiet=quiet, silent=not is_main)

    def check(record: Record) -> None:
        prompt(record)

    def read() -> Iterator[Record | Dropped]:
        rows = items(source, "ppo", on_bad_row, check, prompt_words=plan.prompt_words)
        return islice(map(_with_prompt, islice(rows, num)), number, None, count)

    def answer(generators: dict[str, Generator], numbered: Sequence[tuple[int, Record]]) -> list[Outcome]:
        prompts = [(n * count + number, prompt(record)) for n, record in numbered]
        replies = {prefix: generator.respond(prompts) for prefix, generator in generators.items()}
        return [
            _row(record, {prefix: found[n] for prefix, found in replies.items()})
            for n, (_, record) in enumerate(numbered)
        ]

    settings = {"data": data_digest(source), "shard": f"{number + 1}/{count}", **plan.settings()}
    output = Output(out, settings, restart=restart, keep_dropped=False) if is_main else None
    with output or nullcontext():
        each_item(output, read, None, plan, answer, display, plan.join if in_several_processes else None)
        if in_several_processes:
            plan.leave()
        if output is not None:
            _report(output, plan, display)


def _report(output: Output, plan: _Plan, display: Display) -> None:
    """Say what was written. Raises RunError if that is nothing."""
    num_cut = sum(row["ended"] is False for row in output.rows())
    where = f"{plan.decoding.rollout.max_new_tokens} tokens"
    where += " or at the model's last position" if plan.decoding.takes_what_fits else ""
    cut = f", {num_cut} responses cut at {where} (their `ended` is false)" if num_cut else ""
    display.note(f"{output.path}: {output.num_rows} rows{cut}{output.summary_of_dropped()}")
    output.require_rows()


def _with_prompt(item: Record | Dropped) -> Record | Dropped:
    """A row of plain text with its text as the prompt, unless its first words are the prompt already."""
    if isinstance(item, Dropped) or item.prompt or item.messages:
        return item
    return replace(item, prompt=item.key)


def _row(record: Record, answers: dict[str, Answer | Refused]) -> Outcome:
    """The columns of a row, or why it has none: a prompt that one of the models cannot take."""
    from rlhf_cli.evaluation.generation import Refused

    columns: dict[str, Any] = {"prompt": prompt_column(record)}
    for prefix, answer in answers.items():
        if isinstance(answer, Refused):
            return Dropped(answer.reason, {"detail": answer.detail})
        columns |= {f"{prefix}response": answer.text, f"{prefix}ended": answer.ended}
        if answer.score is not None:
            columns[f"{prefix}score"] = answer.score
    return with_columns(record, columns)


def _shard(shard: str | None) -> tuple[int, int]:
    """(number from 0, count) of `2/4`; raises ConfigError for anything else."""
    number, _, count = (shard or "1/1").partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ConfigError(f"--shard: {shard}, must be the number of this process and of all, for example 1/4")
    return int(number) - 1, int(count)


# ------------------------------------------------------------------------------------------- what responds


def _plan(directory: str, stage: str | None, compare: str | None, options: Options) -> _Plan:
    """Which models respond, and how; raises ConfigError or ArtifactError for a model that there is not."""
    from rlhf_cli.evaluation.generation import Decoding
    from rlhf_cli.evaluation.trained import RewardSet, find_model

    model = find_model(directory, stage)
    models = {"": model}
    if compare is not None:
        if compare == model.name:
            raise ConfigError(f"--compare {compare}: the responses are those of {compare} already. Remove the option")
        models[f"{compare}_"] = model.compared(compare)
    rewards = model.rewards()
    if options.reward_model is not None:
        rewards = RewardSet.of_model(options.reward_model, "--reward-model")
    elif options.best_of > 1 and rewards is None:
        raise ConfigError(f"--best-of: {directory} has no rewards to choose by. Give --reward-model")
    elif options.best_of == 1:
        rewards = None
    contrastive = options.penalty_alpha is not None
    decoding = Decoding(
        _changed(model.rollout(), replace(options, top_k=None) if contrastive else options),
        takes_what_fits=model.run is None and options.max_new_tokens is None,
        greedy=options.temperature == 0,
        num_samples=options.best_of,
        num_beams=options.beams,
        penalty_alpha=options.penalty_alpha,
        num_candidates=options.top_k or 4,
        seed=options.seed,
        batch_size=options.batch_size,
        quantization=options.quantization,
    )
    return _Plan(models, decoding, rewards, options.device)


def _changed(rollout: Rollout, options: Options) -> Rollout:
    """The rollout with the options that were given."""
    given = {"temperature": options.temperature or None, "top_k": options.top_k, "top_p": options.top_p}
    given["max_new_tokens"] = options.max_new_tokens
    changes = {key: value for key, value in given.items() if value is not None}
    shortest = min(rollout.min_new_tokens, options.max_new_tokens or rollout.min_new_tokens)
    return rollout.model_copy(update={**changes, "min_new_tokens": shortest})
