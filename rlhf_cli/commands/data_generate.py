"""`rlhf data generate`: a language model writes prompts, demonstrations, several answers to a prompt, or dialogues.

`rlhf_cli.commands.output` describes the files and how an interrupted run resumes. New prompts come several from one
answer, so there a resumed run repeats the last batch of answers. Nothing here imports torch before it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rlhf_cli.commands.dialogues import USER_TEMPLATE, write_dialogues
from rlhf_cli.commands.new_prompts import KnownPrompts, prompts_in
from rlhf_cli.commands.options import (
    ApiKeyEnv,
    BatchSize,
    Concurrency,
    Device,
    Format,
    KeepSpecial,
    Keys,
    MaxNewTokens,
    Model,
    Num,
    OnBadRow,
    Out,
    Quiet,
    RestartOut,
    Retries,
    Seed,
    Server,
    Source,
    SourceSet,
    Temperature,
    Template,
    Timeout,
    TopP,
    source_of,
)
from rlhf_cli.commands.output import data_digest, each_item, items, prompt_column, refuse_own_output
from rlhf_cli.commands.output_files import Dropped, Outcome, Output, OutputRow
from rlhf_cli.commands.writer import WriterOptions, fill, read_template
from rlhf_cli.config.data import DataSource
from rlhf_cli.errors import ConfigError, DataError, RunError
from rlhf_cli.rollout.requests import Failure, Request, Writer, Written
from rlhf_cli.training.progress import Display

if TYPE_CHECKING:
    from rlhf_cli.data.records import Message, Record

Task = Literal["prompts", "demonstrations", "samples", "dialogues"]
PLACEHOLDERS: dict[str, str] = {"prompts": "seeds", "dialogues": "dialogue"}
"""What a template must contain for a task; `prompt` for the others."""

PROMPTS_TEMPLATE = """\
Below are requests that people sent to an assistant.

{seeds}

Write {num} more requests of this kind, on other subjects and in other words. Write each on one line of its own, with \
a number before it, and write nothing else.
"""
NUM_ASKED = 5
"""`{num}` of that template: prompts that one answer is asked for."""
MAX_FRUITLESS = 10
"""Stop after this many consecutive batches of answers without a new prompt."""


NumSamples = Annotated[int, typer.Option("--samples", min=2, help="Answers per prompt (with --task samples).")]
NumTurns = Annotated[int, typer.Option("--turns", min=1, help="Maximum answers per dialogue (with --task dialogues).")]
UserModel = Annotated[
    str | None, typer.Option("--user-model", help="The model that plays the user of a dialogue. By default --model.")
]
UserServer = Annotated[str | None, typer.Option("--user-server", help="Base URL of the user model's server.")]
UserApiKeyEnv = Annotated[
    str | None, typer.Option("--user-api-key-env", metavar="NAME", help="As --api-key-env, for --user-server.")
]
NumSeeds = Annotated[int, typer.Option("--seeds", min=1, help="Example prompts per request (with --task prompts).")]
Similarity = Annotated[
    float,
    typer.Option(
        "--similarity", min=0.01, max=1.0, help="Reject a prompt that shares this much of its words with another."
    ),
]


def data_generate(
    path: Source,
    task: Annotated[Task, typer.Option("--task", help="What to write.")],
    out: Out,
    model: Model,
    server: Server = None,
    api_key_env: ApiKeyEnv = None,
    template: Template = None,
    num: Num = None,
    samples: NumSamples = 4,
    turns: NumTurns = 3,
    user_model: UserModel = None,
    user_server: UserServer = None,
    user_api_key_env: UserApiKeyEnv = None,
    seeds: NumSeeds = 3,
    similarity: Similarity = 0.7,
    temperature: Temperature = 1.0,
    top_p: TopP = None,
    max_new_tokens: MaxNewTokens = 256,
    seed: Seed = 0,
    batch_size: BatchSize = 16,
    concurrency: Concurrency = 8,
    timeout: Timeout = 120.0,
    retries: Retries = 5,
    device: Device = "auto",
    keep_special: KeepSpecial = False,
    overrides: SourceSet = None,
    format: Format = None,
    keys: Keys = None,
    on_bad_row: OnBadRow = "error",
    restart: RestartOut = False,
    quiet: Quiet = False,
) -> None:
    """Let a language model write prompts, demonstrations, several answers per prompt, or dialogues."""
    sampling = (temperature, top_p, max_new_tokens, seed, batch_size, concurrency)
    options = WriterOptions(
        model, server, api_key_env, *sampling, timeout, retries, device=device, keep_special=keep_special
    )
    generate(
        source_of(path, overrides, format, keys),
        task,
        out,
        options,
        template=template,
        num=num,
        num_samples=samples,
        num_turns=turns,
        user=options.for_user(user_model, user_server, user_api_key_env),
        num_seeds=seeds,
        similarity=similarity,
        on_bad_row=on_bad_row,
        restart=restart,
        quiet=quiet,
    )


def generate(
    source: DataSource,
    task: Task,
    out: Path,
    writer: WriterOptions,
    *,
    template: Path | None = None,
    num: int | None = None,
    num_samples: int = 4,
    num_turns: int = 3,
    user: WriterOptions | None = None,
    num_seeds: int = 3,
    similarity: float = 0.7,
    on_bad_row: OnBadRow = "error",
    restart: bool = False,
    quiet: bool = False,
) -> None:
    """Write rows to `out`, or resume.

    prompts: `num` new prompts, from answers to the template with `num_seeds` random prompts of the source.
    demonstrations: one response to each of the first `num` prompts of the source. samples: `num_samples` responses.
    dialogues: `num_turns` responses to each, with messages between them that `user` writes, or `writer` if it is None.
    Raises ConfigError for options that do not fit together, DataError for rows that cannot be read, ArtifactError for
    an `out` that cannot be written or resumed, and RunError when the server gives no answers. Written rows are kept.
    """
    text = read_template(template, [PLACEHOLDERS.get(task, "prompt")])
    if user is not None and task != "dialogues":
        raise ConfigError(f"--user-model: does nothing with --task {task}. Remove it, or give --task dialogues")
    refuse_own_output(source, out)
    settings = {"task": task, "data": data_digest(source), **writer.settings()}
    display = Display("generate", quiet=quiet)
    if task == "prompts":
        if num is None:
            raise ConfigError("--num: is missing. Say how many prompts to write")
        text = text or PROMPTS_TEMPLATE
        settings |= {"template": text, "num_seeds": num_seeds, "similarity": similarity}
        with Output(out, settings, restart=restart) as output:
            seeds = [_seed(item) for item in items(source, "ppo", on_bad_row) if not isinstance(item, Dropped)]
            _write_prompts(output, seeds, text, num, writer, num_seeds, similarity, display)
            _finish(output, writer, 1, display)
        return
    if task == "dialogues":
        text = text or USER_TEMPLATE
        settings |= {"template": text, "num_turns": num_turns, "user": (user or writer).settings()}
        with Output(out, settings, restart=restart) as output:
            _write_dialogues(output, source, text, num, writer, user, num_turns, on_bad_row, display)
            _finish(output, writer, 1, display)
        return
    num_answers = num_samples if task == "samples" else 1
    settings |= {"template": text, "num_answers": num_answers}
    with Output(out, settings, restart=restart) as output:
        _write_answers(output, source, task, text, num, writer, num_answers, on_bad_row, display)
        _finish(output, writer, num_answers, display)


def _finish(output: Output, writer: WriterOptions, num_answers: int, display: Display) -> None:
    """Print how many rows there are, and how many answers were cut, lost or dropped; raises RunError without a row."""
    num_cut = num_lost = 0
    for row in output.rows():
        ended = row.get("ended", True)
        ended = ended if isinstance(ended, list) else [ended]
        num_cut += ended.count(False)
        num_lost += num_answers - len(ended)
    cut = f", {num_cut} answers cut at {writer.max_new_tokens} tokens (their `ended` is false)" if num_cut else ""
    lost = f", {num_lost} answers missing in rows with others (they were empty or refused)" if num_lost else ""
    display.note(f"{output.path}: {output.num_rows} rows{cut}{lost}{output.summary_of_dropped()}")
    output.require_rows()


# ------------------------------------------------------------------------------------------- answers


def _write_answers(
    output: Output,
    source: DataSource,
    task: Task,
    template: str | None,
    num: int | None,
    options: WriterOptions,
    num_answers: int,
    on_bad_row: OnBadRow,
    display: Display,
) -> None:
    """Write one row for each prompt, with `num_answers` answers."""
    from rlhf_cli.data.records import Message

    origin = {"model": options.model, "temperature": options.temperature, "seed": options.seed}
    needed = min(2, num_answers)  # a single answer cannot be ranked

    def messages(record: Record) -> tuple[Message, ...]:
        if template is not None:
            return (Message("user", fill(template, prompt=record.prompt)),)
        return record.messages or (Message("user", record.prompt),)

    def outcome(record: Record, answers: list[Written | Failure]) -> Outcome:
        failures = [answer for answer in answers if isinstance(answer, Failure)]
        written = [answer for answer in answers if isinstance(answer, Written) and answer.text.strip()]
        if any(failure.fatal for failure in failures) or (failures and len(written) < needed):
            return max(failures, key=lambda failure: failure.fatal)
        if len(written) < needed:
            return Dropped("empty answers")
        return _row(task, record, written) | origin

    def answer(writer: Writer, numbered: Sequence[tuple[int, Record]]) -> list[Outcome]:
        requests = [Request(messages(record), (n, k)) for n, record in numbered for k in range(num_answers)]
        answers = iter(writer.write(requests))
        return [outcome(record, list(islice(answers, num_answers))) for _, record in numbered]

    each_item(output, lambda: items(source, "ppo", on_bad_row, _require_prompt), num, options, answer, display)


def _require_prompt(record: Record) -> None:
    if not record.prompt.strip():
        raise DataError(f"{record.where}: the row has no prompt to answer. Give rows with prompts, or map a column")


def _row(task: Task, record: Record, answers: list[Written]) -> OutputRow:
    texts, ended = [answer.text for answer in answers], [answer.ended for answer in answers]
    if task == "samples":
        # Scores of null, because a list of answers without scores means a ranking, best first.
        return {"prompt": prompt_column(record), "responses": texts, "scores": [None] * len(texts), "ended": ended}
    return {"prompt": prompt_column(record), "response": texts[0], "ended": ended[0]}


# ------------------------------------------------------------------------------------------- dialogues


def _write_dialogues(
    output: Output,
    source: DataSource,
    template: str,
    num: int | None,
    options: WriterOptions,
    user: WriterOptions | None,
    num_turns: int,
    on_bad_row: OnBadRow,
    display: Display,
) -> None:
    """Write one row for each prompt, with a dialogue of up to `num_turns` answers."""
    origin = {
        "model": options.model,
        "user_model": (user or options).model,
        "temperature": options.temperature,
        "seed": options.seed,
    }
    writers: list[Writer] = []  # the user's, once there is something to write

    def answer(writer: Writer, numbered: Sequence[tuple[int, Record]]) -> list[Outcome]:
        if not writers:
            writers.append(writer if user is None else user.open())
        outcomes = write_dialogues(writer, writers[0], numbered, num_turns, template)
        return [outcome | origin if isinstance(outcome, dict) else outcome for outcome in outcomes]

    each_item(output, lambda: items(source, "ppo", on_bad_row, _require_prompt), num, options, answer, display)


# ------------------------------------------------------------------------------------------- new prompts


def _write_prompts(
    output: Output,
    seeds: list[str],
    template: str,
    num: int,
    options: WriterOptions,
    num_seeds: int,
    similarity: float,
    display: Display,
) -> None:
    """Ask in rounds until there are `num` new prompts, as Self-Instruct does (Wang et al. 2023).

    Each line stores its round. A prompt that nearly duplicates a seed or an earlier prompt is dropped. When a run
    resumes, a local model repeats the last chunk of rounds, so that the same prompts are compared with the same set.
    A server gives different answers each time, so it is asked for the next chunk.
    """
    if not seeds:
        raise DataError("the source has no readable prompt; at least one is needed as a seed")
    if output.num_rows >= num:
        return
    last = output.last("round")
    start = (last // options.chunk + (1 if options.server else 0)) * options.chunk if last >= 0 else 0
    output.cut_from("round", start)
    known = KnownPrompts(similarity)
    for text in (*seeds, *(row["prompt"] for row in output.rows())):
        known.add(text)
    writer = options.open()
    fruitless = 0
    display.begin(num, "prompt", output.num_rows)
    while output.num_rows < num:
        rounds, before = range(start, start + options.chunk), output.num_rows
        answers = writer.write([_ask_for_prompts(n, seeds, template, num_seeds, options.seed) for n in rounds])
        output.refuse_all_failed(answers)
        for n, answer in zip(rounds, answers, strict=True):
            _take_prompts(output, answer, n, num, known, options)
        fruitless = 0 if output.num_rows > before else fruitless + 1
        if fruitless == MAX_FRUITLESS:
            raise RunError(
                f"{output.path}: no new prompt in the last {MAX_FRUITLESS * options.chunk} answers; {output.num_rows} "
                f"of {num} are written, and {output.dropped_path.name} lists the dropped ones. Raise --temperature or "
                "--similarity, give more seeds, or change --template"
            )
        display.step(output.num_rows, [f"dropped {output.num_dropped}"])
        start = rounds.stop
    display.end()


def _ask_for_prompts(number: int, seeds: list[str], template: str, num_seeds: int, seed: int) -> Request:
    """The request of a round: the template with seed prompts that are drawn from (seed, round)."""
    import torch

    from rlhf_cli.data.records import Message
    from rlhf_cli.seeding import generator

    order = torch.randperm(len(seeds), generator=generator(seed, "seed prompts", number)).tolist()
    chosen = "\n".join(f"{place}. {seeds[i]}" for place, i in enumerate(order[:num_seeds], 1))
    return Request((Message("user", fill(template, seeds=chosen, num=str(NUM_ASKED))),), (number,))


def _take_prompts(
    output: Output, answer: Written | Failure, number: int, num: int, known: KnownPrompts, options: WriterOptions
) -> None:
    """Write the new prompts of a round's answer, until there are `num` in all."""
    about = {"round": number}
    if isinstance(answer, Failure):
        output.write(answer, about)
        return
    texts = prompts_in(answer.text, ended=answer.ended)
    if not texts:
        output.write(Dropped("no prompt in the answer"), about)
    for text in texts:
        if output.num_rows == num:
            break
        other = known.similar(text)
        if other is not None:
            output.write(Dropped("too similar to another"), {**about, "prompt": text, "other": other})
            continue
        known.add(text)
        origin = {"model": options.model, "temperature": options.temperature, "seed": options.seed, **about}
        output.write({"prompt": text, **origin}, {})


def _seed(record: Record) -> str:
    """A row as a seed on one line: its prompt, the last message of a conversation, or a whole text."""
    text = record.messages[-1].content if record.messages else record.prompt or record.key
    return " ".join(text.split())
