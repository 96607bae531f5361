"""`rlhf data generate`: a language model writes prompts, demonstrations, several answers to a prompt, or dialogues.

`rlhf_cli.commands.output` describes the files and how an interrupted run resumes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Annotated, Any, Literal

import typer

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
from rlhf_cli.commands.writer import Failure, Request, Writer, WriterOptions, Written, read_template
from rlhf_cli.data.records import Message, Record, fill, turns_of
from rlhf_cli.data.words import words
from rlhf_cli.errors import ConfigError, DataError, RunError
from rlhf_cli.report.progress import Display

Task = Literal["prompts", "demonstrations", "samples", "dialogues"]
PROMPTS_TEMPLATE = """\
Below are requests that people sent to an assistant.

{seeds}

Write {num} more requests of this kind, on other subjects and in other words. Write each on one line of its own, with \
a number before it, and write nothing else.
"""
USER_TEMPLATE = """\
Below is a conversation between a person and an assistant.

{dialogue}

Write what the person says next: a question or a remark that follows from the conversation, in the words of someone \
who needs help. Write only this one message, and nothing else.
"""
TEMPLATES = {"prompts": ("seeds", PROMPTS_TEMPLATE), "dialogues": ("dialogue", USER_TEMPLATE)}
"""What a template must contain for a task, and the built-in one. The other tasks ask with the prompt itself."""


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
    source = reading.source(path)
    user = writer
    if user_model is not None:
        user = replace(writer, model=user_model, server=user_server, api_key_env=user_api_key_env)
    elif user_server is not None or user_api_key_env is not None:
        raise ConfigError("--user-model: is missing. Give the model's name on the --user-server")
    placeholder, built_in = TEMPLATES.get(task, ("prompt", ""))
    text = read_template(template, [placeholder]) or built_in
    if user_model is not None and task != "dialogues":
        raise ConfigError(f"--user-model: does nothing with --task {task}. Remove it, or give --task dialogues")
    refuse_own_output(source, output.out)
    if task == "prompts" and output.num is None:
        raise ConfigError("--num: is missing. Say how many prompts to write")
    num_answers = samples if task == "samples" else 1
    own: dict[str, Any] = {"num_answers": num_answers}
    if task == "prompts":
        own = {"num_seeds": seeds, "similarity": similarity}
    elif task == "dialogues":
        own = {"num_turns": turns, "user": user.settings()}
    settings = {"task": task, "data": data_digest(source), "template": text or None, **writer.settings(), **own}
    display = Display("generate", quiet=output.quiet)

    def read() -> Iterator[Record | Dropped]:
        return islice(items(source, "ppo", reading.on_bad_row, _require_prompt), output.num)

    def open_models() -> tuple[Writer, Writer]:
        model = writer.open()
        return model, model if user == writer else user.open()

    def answer(models: tuple[Writer, Writer], numbered: Sequence[tuple[int, Record]]) -> list[Outcome]:
        if task != "dialogues":
            return _answers(models[0], numbered, task, text, num_answers, writer.origin)
        about = {"model": writer.model, "user_model": user.model, **writer.origin}
        return write_dialogues(*models, numbered, turns, text, about)

    with Output(output.out, settings, restart=output.restart) as rows:
        if task == "prompts":
            found = [item for item in items(source, "ppo", reading.on_bad_row) if isinstance(item, Record)]
            write_prompts(rows, found, output.num or 0, writer, text, seeds, similarity, display)
        else:
            is_served = writer.server is not None
            each_item(rows, read, open_models, answer, display, chunk=writer.chunk, only_missing=is_served)
        ended = [row.get("ended", True) for row in rows.rows()]
        each = [one for some in ended for one in (some if isinstance(some, list) else [some])]
        num_cut, num_lost = each.count(False), num_answers * len(ended) - len(each)
        cut = f", {num_cut} answers cut at {writer.max_new_tokens} tokens (their `ended` is false)" if num_cut else ""
        lost = f", {num_lost} answers missing in rows with others (they were empty or refused)" if num_lost else ""
        display.note(f"{rows.path}: {rows.num_rows} rows{cut}{lost}{rows.summary_of_dropped()}")
        rows.require_rows()


def _require_prompt(record: Record) -> None:
    if not record.prompt.strip():
        raise DataError(f"{record.where}: the row has no prompt to answer. Give rows with prompts, or map a column")


def _answers(
    writer: Writer,
    numbered: Sequence[tuple[int, Record]],
    task: Task,
    template: str,
    num_answers: int,
    origin: dict[str, Any],
) -> list[Outcome]:
    requests = []
    for n, record in numbered:
        asked = record.messages or (Message("user", record.prompt),)
        if template:
            asked = (Message("user", fill(template, prompt=record.prompt)),)
        requests += [Request(asked, (n, k)) for k in range(num_answers)]
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
    # Scores of null, because a list of answers without scores means a ranking, best first.
    columns: dict[str, Any] = {"responses": texts, "scores": [None] * len(texts), "ended": ended}
    if task == "demonstrations":
        columns = {"response": texts[0], "ended": ended[0]}
    return {"prompt": prompt_column(record), **columns, **origin}


# ------------------------------------------------------------------------------------------- new prompts

NUM_ASKED = 5
"""`{num}` of that template: prompts that one answer is asked for."""
MAX_FRUITLESS = 10
"""Stop after this many consecutive batches of answers without a new prompt."""
ROUNDING = 1e-9
LIST_MARK = re.compile(r"(?:\d+\s*[.):]|[-*•])(?:\s+|$)")


def write_prompts(
    output: Output,
    records: Sequence[Record],
    num: int,
    options: WriterOptions,
    template: str,
    num_seeds: int,
    similarity: float,
    display: Display,
) -> None:
    """Ask in rounds until there are `num` new prompts, as Self-Instruct does (Wang et al. 2023).

    Each line stores its round. A prompt that nearly duplicates a seed or an earlier prompt is dropped. A resumed local
    model repeats the last chunk of rounds, so that its prompts are compared with the same set. A server, which gives
    other answers each time, is asked for the next chunk.
    """
    import torch

    from rlhf_cli.seeding import generator

    # A prompt, the last message of a conversation, or a whole text.
    texts = [one.messages[-1].content if one.messages else one.prompt or one.key for one in records]
    seeds = [" ".join(text.split()) for text in texts]
    if not seeds:
        raise DataError("the source has no readable prompt; at least one is needed as a seed")
    if output.num_rows >= num:
        return

    def request(number: int) -> Request:
        order = torch.randperm(len(seeds), generator=generator(options.seed, "seed prompts", number)).tolist()
        chosen = "\n".join(f"{place}. {seeds[i]}" for place, i in enumerate(order[:num_seeds], 1))
        return Request.of(fill(template, seeds=chosen, num=str(NUM_ASKED)), number)

    last = max((line.number("round") for line in chain(output.rows(), output.drops())), default=-1)
    start = (last // options.chunk + (1 if options.server else 0)) * options.chunk if last >= 0 else 0
    output.cut_from("round", start)
    known = [(words(text), text) for text in (*seeds, *(row["prompt"] for row in output.rows()))]
    writer = options.open()
    fruitless = 0
    with display.counting(num, "prompt", output.num_rows):
        while output.num_rows < num:
            rounds, before = range(start, start + options.chunk), output.num_rows
            answers = writer.write([request(n) for n in rounds])
            output.refuse_all_failed(answers)
            for n, answer in zip(rounds, answers, strict=True):
                if isinstance(answer, Failure):
                    output.write(answer, {"round": n})
                    continue
                texts = prompts_in(answer.text, ended=answer.ended)
                if not texts:
                    output.write(Dropped("no prompt in the answer"), {"round": n})
                for text in texts:
                    if output.num_rows == num:
                        break
                    if (other := near_duplicate(text, known, similarity)) is not None:
                        output.write(Dropped("too similar to another"), {"round": n, "prompt": text, "other": other})
                        continue
                    known.append((words(text), text))
                    output.write({"prompt": text, **options.origin, "round": n}, {})
            fruitless = 0 if output.num_rows > before else fruitless + 1
            if fruitless == MAX_FRUITLESS:
                found = f"{output.path}: no new prompt in the last {MAX_FRUITLESS * options.chunk} answers"
                so_far = f"{output.num_rows} of {num} are written, {output.dropped_path.name} lists the dropped ones"
                advice = "Raise --temperature or --similarity, give more seeds, or change --template"
                raise RunError(f"{found}; {so_far}. {advice}")
            display.step(output.num_rows, [f"dropped {output.num_dropped}"])
            start = rounds.stop


def prompts_in(answer: str, *, ended: bool = True) -> list[str]:
    """The prompts in an answer, one per line. If any line has a list mark, only such lines count; a cut one never does.

    >>> prompts_in("Sure!\\n1. Write a poem.\\n2) Name two rivers.")
    ['Write a poem.', 'Name two rivers.']
    >>> prompts_in("- Name a fish\\n- Name a bi", ended=False)
    ['Name a fish']
    """
    lines = [line.strip() for line in answer.splitlines()][: None if ended else -1]
    marked = [LIST_MARK.sub("", line, count=1).strip() for line in lines if LIST_MARK.match(line)]
    return [line for line in marked or lines if line]


def near_duplicate(text: str, known: Iterable[tuple[frozenset[str], str]], threshold: float) -> str | None:
    """The first known prompt, given with its `words`, that a text nearly duplicates; None without one.

    Near-duplicates have sets of words of a Jaccard similarity |A and B| / |A or B| of at least `threshold`.
    """
    own, least = words(text), threshold - ROUNDING
    return next((other for its, other in known if len(own & its) >= least * len(own | its)), None)


# ------------------------------------------------------------------------------------------- dialogues

# One model answers, and a second one plays the user (Ding et al. 2023). The second reads the dialogue as text in a
# template, because few chat models can write the user's side.

NAMES = {"user": "Person", "assistant": "Assistant"}


@dataclass
class _Dialogue:
    """One dialogue while it is written. It ends early where a model has nothing to say or is cut."""

    number: int
    messages: list[Message]
    num_given: int
    """Messages from the source. A dialogue without a further one has no answer."""
    ended: bool = True
    """False if its last answer was cut."""
    failure: Failure | None = None
    is_open: bool = True

    def take(self, role: str, answer: Written | Failure) -> None:
        """Add what a model wrote in this role, or end the dialogue behind its last whole exchange."""
        text = ""
        if isinstance(answer, Failure):
            self.failure = answer
        else:
            is_user = role == "user"
            text = next_message(answer.text, ended=answer.ended) if is_user else answer.text.strip()
            # An answer that was cut is the last one: SFT learns every answer, and would learn to stop in mid-sentence.
            self.ended = self.is_open = is_user or answer.ended or not text
        if text:
            self.messages.append(Message(role, text))
            return
        self.is_open = False
        if role == "assistant" and len(self.messages) > self.num_given:
            self.messages.pop()  # the user's message, which has no answer

    def outcome(self, origin: dict[str, Any]) -> Outcome:
        """The row, or why there is none. A Failure that ends the run takes the place of the row."""
        has_answer = len(self.messages) > self.num_given
        if self.failure is not None and (self.failure.fatal or not has_answer):
            return self.failure
        row = {"messages": turns_of(self.messages), "ended": self.ended, **origin}
        return row if has_answer else Dropped("empty answers")


def write_dialogues(
    assistant: Writer,
    user: Writer,
    numbered: Sequence[tuple[int, Record]],
    num_turns: int,
    template: str,
    origin: dict[str, Any],
) -> list[Outcome]:
    """A row for each record: its prompt, then up to `num_turns` answers with messages of `user` between them."""
    given = [(n, list(record.messages or (Message("user", record.prompt),))) for n, record in numbered]
    dialogues = [_Dialogue(n, messages, len(messages)) for n, messages in given]
    for turn in range(num_turns):
        for role in ("user", "assistant") if turn else ("assistant",):
            still_open = [dialogue for dialogue in dialogues if dialogue.is_open]
            if role == "user":
                texts = [fill(template, dialogue=as_text(d.messages)) for d in still_open]
                asked = [Request.of(text, d.number, turn, 1) for text, d in zip(texts, still_open, strict=True)]
            else:
                asked = [Request(tuple(d.messages), (d.number, turn, 0)) for d in still_open]
            for dialogue, answer in zip(still_open, (user if role == "user" else assistant).write(asked), strict=True):
                dialogue.take(role, answer)
    return [dialogue.outcome(origin) for dialogue in dialogues]


def as_text(messages: Sequence[Message]) -> str:
    """A dialogue for the template, without the system's message."""
    return "\n\n".join(f"{NAMES[m.role]}: {m.content.strip()}" for m in messages if m.role in NAMES)


def next_message(text: str, *, ended: bool) -> str:
    """The first message in what a model wrote for the user, or "" if it was cut there.

    It may have a name before it and the rest of a conversation after it.

    >>> next_message(" Person: Thanks! And on Sunday?\\n\\nAssistant: Closed on", ended=False)
    'Thanks! And on Sunday?'
    >>> next_message("Thanks! And on", ended=False)
    ''
    """
    message, *more = re.split(rf"\n(?:{'|'.join(NAMES.values())}):", text.strip().removeprefix(f"{NAMES['user']}:"))
    return message.strip() if ended or more else ""
