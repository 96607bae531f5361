"""`rlhf data generate`: a language model writes prompts, demonstrations, several answers to a prompt, or dialogues.

`rlhf_cli.commands.output` describes the files and how an interrupted run resumes. Nothing here imports torch before it
is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Annotated, Any, Literal

import typer

from rlhf_cli.commands.dialogues import USER_TEMPLATE, write_dialogues
from rlhf_cli.commands.new_prompts import PROMPTS_TEMPLATE, write_prompts
from rlhf_cli.commands.options import OutputOptions, Source, SourceOptions, Template
from rlhf_cli.commands.output import (
    Dropped,
    Outcome,
    Output,
    data_digest,
    each_item,
    items,
    prompt_column,
    refuse_own_output,
)
from rlhf_cli.commands.writer import Failure, Request, Writer, WriterOptions, Written, fill, read_template
from rlhf_cli.data.records import Message, Record
from rlhf_cli.errors import ConfigError, DataError
from rlhf_cli.report.progress import Display

Task = Literal["prompts", "demonstrations", "samples", "dialogues"]
PLACEHOLDERS: dict[str, str] = {"prompts": "seeds", "dialogues": "dialogue"}
"""What a template must contain for a task; `prompt` for the others."""
TEMPLATES: dict[str, str] = {"prompts": PROMPTS_TEMPLATE, "dialogues": USER_TEMPLATE}
"""The built-in templates. The other tasks ask with the prompt itself."""


def data_generate(
    path: Source,
    task: Annotated[Task, typer.Option("--task", help="What to write.")],
    output: OutputOptions,
    writer: WriterOptions,
    reading: SourceOptions,
    template: Template = None,
    samples: Annotated[int, typer.Option("--samples", min=2, help="Answers per prompt (with --task samples).")] = 4,
    turns: Annotated[
        int, typer.Option("--turns", min=1, help="Maximum answers per dialogue (with --task dialogues).")
    ] = 3,
    user_model: Annotated[
        str | None,
        typer.Option("--user-model", help="The model that plays the user of a dialogue. By default --model."),
    ] = None,
    user_server: Annotated[
        str | None, typer.Option("--user-server", help="Base URL of the user model's server.")
    ] = None,
    user_api_key_env: Annotated[
        str | None, typer.Option("--user-api-key-env", metavar="NAME", help="As --api-key-env, for --user-server.")
    ] = None,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, help="Example prompts per request (with --task prompts).")
    ] = 3,
    similarity: Annotated[
        float,
        typer.Option(
            "--similarity", min=0.01, max=1.0, help="Reject a prompt that shares this much of its words with another."
        ),
    ] = 0.7,
) -> None:
    """Let a language model write prompts, demonstrations, several answers per prompt, or dialogues."""
    # prompts: --num new prompts, from answers to the template with --seeds random prompts of the source.
    # demonstrations: one response to each of the first --num prompts of the source; samples: --samples responses.
    # dialogues: --turns responses to each, with messages between them that the user's model writes.
    source = reading.source(path)
    user = writer.for_user(user_model, user_server, user_api_key_env)
    text = read_template(template, [PLACEHOLDERS.get(task, "prompt")]) or TEMPLATES.get(task)
    if user is not None and task != "dialogues":
        raise ConfigError(f"--user-model: does nothing with --task {task}. Remove it, or give --task dialogues")
    refuse_own_output(source, output.out)
    num_answers = samples if task == "samples" else 1
    settings: dict[str, Any] = {"task": task, "data": data_digest(source), "template": text, **writer.settings()}
    if task == "prompts":
        if output.num is None:
            raise ConfigError("--num: is missing. Say how many prompts to write")
        settings |= {"num_seeds": seeds, "similarity": similarity}
    elif task == "dialogues":
        settings |= {"num_turns": turns, "user": (user or writer).settings()}
    else:
        settings |= {"num_answers": num_answers}
    origin = {"model": writer.model, "temperature": writer.temperature, "seed": writer.seed}
    display = Display("generate", quiet=output.quiet)

    def read() -> Iterator[Record | Dropped]:
        return islice(items(source, "ppo", reading.on_bad_row, _require_prompt), output.num)

    def start() -> Callable[[Sequence[tuple[int, Record]]], list[Outcome]]:
        model = writer.open()
        if task != "dialogues":
            return lambda numbered: _answers(model, numbered, task, text, num_answers, origin)
        assert text is not None
        other = model if user is None else user.open()
        about = {"model": writer.model, "user_model": (user or writer).model, **origin}
        return lambda numbered: write_dialogues(model, other, numbered, turns, text, about)

    with Output(output.out, settings, restart=output.restart) as rows:
        if task == "prompts":
            assert text is not None
            assert output.num is not None
            found = (item for item in items(source, "ppo", reading.on_bad_row) if not isinstance(item, Dropped))
            write_prompts(rows, list(found), output.num, writer, text, seeds, similarity, display)
        else:
            each_item(rows, read, start, display, chunk=writer.chunk, only_missing=writer.server is not None)
        _report(rows, writer, num_answers, display)


def _report(output: Output, writer: WriterOptions, num_answers: int, display: Display) -> None:
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


def _require_prompt(record: Record) -> None:
    if not record.prompt.strip():
        raise DataError(f"{record.where}: the row has no prompt to answer. Give rows with prompts, or map a column")


def _answers(
    writer: Writer,
    numbered: Sequence[tuple[int, Record]],
    task: Task,
    template: str | None,
    num_answers: int,
    origin: dict[str, Any],
) -> list[Outcome]:
    """A row for each prompt, with `num_answers` answers."""

    def messages(record: Record) -> tuple[Message, ...]:
        if template is not None:
            return (Message("user", fill(template, prompt=record.prompt)),)
        return record.messages or (Message("user", record.prompt),)

    requests = [Request(messages(record), (n, k)) for n, record in numbered for k in range(num_answers)]
    answers = iter(writer.write(requests))
    return [_row(record, list(islice(answers, num_answers)), task, origin) for _, record in numbered]


def _row(record: Record, answers: list[Written | Failure], task: Task, origin: dict[str, Any]) -> Outcome:
    """The row of a prompt. Some of several samples may be missing, but two must be there to be ranked."""
    failures = [answer for answer in answers if isinstance(answer, Failure)]
    written = [answer for answer in answers if isinstance(answer, Written) and answer.text.strip()]
    needed = min(2, len(answers))
    if any(failure.fatal for failure in failures) or (failures and len(written) < needed):
        return max(failures, key=lambda failure: failure.fatal)
    if len(written) < needed:
        return Dropped("empty answers")
    texts, ended = [answer.text for answer in written], [answer.ended for answer in written]
    if task == "demonstrations":
        return {"prompt": prompt_column(record), "response": texts[0], "ended": ended[0], **origin}
    # Scores of null, because a list of answers without scores means a ranking, best first.
    columns = {"responses": texts, "scores": [None] * len(texts), "ended": ended}
    return {"prompt": prompt_column(record), **columns, **origin}
