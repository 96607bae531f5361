"""`rlhf generate`: what a trained model answers to the prompts of a file.

`rlhf_cli.commands.output` describes the files and how an interrupted run resumes. Row n draws from (seed, n) alone, so
a reply does not depend on the other rows, and `--shard` divides a file among processes. Nothing here imports torch
before it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    TopP,
    WritingStage,
)
from rlhf_cli.commands.output import (
    Dropped,
    Outcome,
    Output,
    data_digest,
    each_item,
    items,
    prompt_column,
    refuse_own_output,
    with_columns,
)
from rlhf_cli.errors import ConfigError
from rlhf_cli.processes.launcher import is_first_worker, is_worker, run_again
from rlhf_cli.training.progress import Display

if TYPE_CHECKING:
    from rlhf_cli.data.records import Record
    from rlhf_cli.evaluation.generation import Answer, Decoding, Refused
    from rlhf_cli.evaluation.trained import RewardSet, TrainedModel
    from rlhf_cli.processes.distributed import World


@dataclass(frozen=True)
class ResponseOptions:
    """How responses are chosen. None leaves a value to the run."""

    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.0, help="0 is greedy. The run's own by default.")
    ] = None
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
    beams: Annotated[int, typer.Option("--beams", min=1, help="Beam search with this many beams.")] = 1
    penalty_alpha: Annotated[
        float | None,
        typer.Option("--penalty-alpha", min=0, max=1, help="Contrastive search among --top-k tokens (4)."),
    ] = None
    seed: Seed = 0
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Responses per batch.")] = 64
    device: Device = "auto"
    quantization: Quantized = None

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

    def decoding(self, model: TrainedModel) -> Decoding:
        """How `model` decodes: its run's rollout with the options that were given."""
        from rlhf_cli.evaluation.generation import Decoding

        rollout, contrastive = model.rollout(), self.penalty_alpha is not None
        given = {"temperature": self.temperature or None, "top_k": None if contrastive else self.top_k}
        given |= {"top_p": self.top_p, "max_new_tokens": self.max_new_tokens}
        changes = {key: value for key, value in given.items() if value is not None}
        shortest = min(rollout.min_new_tokens, self.max_new_tokens or rollout.min_new_tokens)
        return Decoding(
            rollout.model_copy(update={**changes, "min_new_tokens": shortest}),
            takes_what_fits=model.run is None and self.max_new_tokens is None,
            greedy=self.temperature == 0,
            num_samples=self.best_of,
            num_beams=self.beams,
            penalty_alpha=self.penalty_alpha,
            num_candidates=self.top_k or 4,
            seed=self.seed,
            batch_size=self.batch_size,
            quantization=self.quantization,
        )

    def rewards(self, model: TrainedModel, directory: str) -> RewardSet | None:
        """What scores the responses; None if nothing does. Raises ConfigError if there is nothing to choose by."""
        from rlhf_cli.evaluation.trained import RewardSet

        if self.reward_model is not None:
            return RewardSet.of_model(self.reward_model, "--reward-model")
        if self.best_of == 1:
            return None
        rewards = model.rewards()
        if rewards is None:
            raise ConfigError(f"--best-of: {directory} has no rewards to choose by. Give --reward-model")
        return rewards


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
    # Each row has the columns of its prompt, `response`, `ended` and, if rewards chose among several, `score`. With
    # --compare it also has `base_response`, ... of that model. Of several processes the first one writes.
    if nproc > 1 and not is_worker():
        run_again(["generate", *context.meta[ARGUMENTS]], nproc)
        return
    from rlhf_cli.data.views import prompt
    from rlhf_cli.evaluation.trained import find_model

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
    rewards, decoding = options.rewards(model, directory), options.decoding(model)
    prompt_words = model.config.data.prompt_words if model.config is not None else 0

    def read() -> Iterator[Record | Dropped]:
        rows = items(source, "ppo", reading.on_bad_row, prompt, prompt_words=prompt_words)
        return islice(map(_with_prompt, islice(rows, output.num)), number, None, count)

    def start() -> Callable[[Sequence[tuple[int, Record]]], list[Outcome]]:
        from rlhf_cli.evaluation.generation import Generator
        from rlhf_cli.processes import distributed

        device = distributed.start(options.device).device
        generators = {prefix: Generator(model, decoding, rewards, device) for prefix, model in models.items()}

        def answer(numbered: Sequence[tuple[int, Record]]) -> list[Outcome]:
            prompts = [(n * count + number, prompt(record)) for n, record in numbered]
            replies = {prefix: generator.respond(prompts) for prefix, generator in generators.items()}
            return [
                _row(record, {prefix: found[n] for prefix, found in replies.items()})
                for n, (_, record) in enumerate(numbered)
            ]

        return answer

    def join() -> World:
        from rlhf_cli.processes import distributed

        world = distributed.start(options.device)
        distributed.at_step("generate")
        return world

    settings = {"data": data_digest(source), "shard": f"{number + 1}/{count}", **_settings(models, decoding, rewards)}
    is_main = nproc == 1 or is_first_worker()
    display = Display("generate", quiet=output.quiet, silent=not is_main)
    rows = Output(output.out, settings, restart=output.restart, keep_dropped=False) if is_main else None
    chunk = max(1, options.batch_size // options.best_of)
    with rows or nullcontext():
        each_item(rows, read, start, display, chunk=chunk, join=join if nproc > 1 else None)
        if nproc > 1:
            from rlhf_cli.processes import distributed

            distributed.stop()
        if rows is not None:
            _report(rows, decoding, display)


def _settings(models: dict[str, TrainedModel], decoding: Decoding, rewards: RewardSet | None) -> dict[str, Any]:
    """What a resumed run must have in common with the run that it resumes, apart from the data."""
    named = {
        prefix or "response": {"path": source.path, "digest": source.digest(), "template": source.template}
        for prefix, source in models.items()
    }
    return {
        "models": named,
        "rollout": decoding.rollout.model_dump(mode="json"),
        **({"takes_what_fits": True} if decoding.takes_what_fits else {}),
        **({"quantize": decoding.quantization} if decoding.quantization is not None else {}),
        "greedy": decoding.greedy,
        "best_of": decoding.num_samples,
        "beams": decoding.num_beams,
        "contrastive": [decoding.penalty_alpha, decoding.num_candidates],
        "seed": decoding.seed,
        "judges": rewards.settings() if rewards is not None else None,
    }


def _report(output: Output, decoding: Decoding, display: Display) -> None:
    """Say what was written. Raises RunError if that is nothing."""
    num_cut = sum(row["ended"] is False for row in output.rows())
    where = f"{decoding.rollout.max_new_tokens} tokens"
    where += " or at the model's last position" if decoding.takes_what_fits else ""
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
