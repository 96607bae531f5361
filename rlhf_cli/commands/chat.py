"""`rlhf chat`: a conversation with the models of a run in the terminal, or with the lines of a pipe.

Replies go to stdout, everything else to stderr.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.cells import cell_len
from rich.live import Live
from rich.table import Table

from rlhf_cli.commands.options import Quantized, WhereToRun, WritingStage
from rlhf_cli.data.records import Message, turns_of
from rlhf_cli.errors import ConfigError, DataError, RewardError, RunError, UserError
from rlhf_cli.printing import printable, say
from rlhf_cli.report.progress import Console

if TYPE_CHECKING:
    from rlhf_cli.rewards.base import RewardSource
    from rlhf_cli.rollout.speaker import Reply, Speaker

HELP = """\
/regenerate         another reply to the last message
/clear              start over; the system message stays
/system TEXT        set the system message; without TEXT, remove it
/set NAME VALUE     temperature (0 is greedy), max_new_tokens or seed
/history            show the conversation
/save FILE          write it to a new JSONL file, one row for each model
/exit               end, as Ctrl-D does
Write // for a message that begins with /. End a line with \\ to continue on the
next one."""
LONGEST_WORD = 20
"""Columns after which a word is printed before its end: some languages write without spaces."""


@dataclass(frozen=True)
class ChatSettings:
    """How replies are drawn. None leaves a value to the model."""

    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.0, help="0 is greedy. The run's own by default.")
    ] = None
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, help="Longest reply. The run's own by default.")
    ] = None
    seed: Annotated[int, typer.Option("--seed", help="Seed of the replies.")] = 0


def chat(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A run's directory, or that of any language model.")],
    settings: ChatSettings,
    stage: WritingStage = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="sft and ppo answer side by side, with the score of each reward.")
    ] = False,
    device: WhereToRun = "auto",
    quantize: Quantized = None,
) -> None:
    """Talk to a model that you trained. /help lists the commands of the conversation."""
    from rlhf_cli.processes.distributed import start
    from rlhf_cli.trained.model import find_model

    if compare and stage is not None:
        raise ConfigError("--stage: --compare shows both stages. Remove one of the options")
    if settings.temperature is not None:
        check_temperature(settings.temperature)
    trained = find_model(directory, stage)
    both = [trained.compared(name) for name in ("sft", "ppo")] if compare else [trained]
    where = start(device).device
    models, sources = [model.speaker(where, quantize) for model in both], None
    if compare:
        rewards = trained.rewards()
        assert rewards is not None
        sources, notes = rewards.load(models[1].tokenizer, where, models[1].precision)
        for note in notes:
            say(note, error=True)
    interactive = sys.stdin.isatty()
    session = Session(models, sources, settings, interactive=interactive)
    session.introduce()
    failed = sum(not session.take(line) for line in (typed() if interactive else piped()))
    if failed and not interactive:
        raise ConfigError(f"{failed} line{'s' if failed > 1 else ''} of the input failed, as printed above")


class Session:
    """A conversation with one model, or with two that each see their own replies."""

    def __init__(
        self,
        models: Sequence[Speaker],
        sources: Sequence[RewardSource] | None,
        settings: ChatSettings,
        *,
        interactive: bool,
    ):
        """sources: the rewards that score two models side by side; None for a single model."""
        self.models, self.sources, self.settings, self.interactive = models, sources, settings, interactive
        self.console = Console()
        self.system: list[Message] = []
        self.histories: list[list[Message]] = [[] for _ in models]
        self.last: list[Reply] = []
        self.num_replies = 0
        self.commands: dict[str, Callable[[str], object]] = {
            "regenerate": lambda _: self.regenerate(),
            "clear": lambda _: self.clear(),
            "system": self.set_system,
            "set": self.set_value,
            "history": lambda _: self.show_history(),
            "save": self.save,
            "help": lambda _: say(HELP, error=True),
        }

    def introduce(self) -> None:
        """Say who answers, how it is prompted, and how it draws."""
        for model in self.models:
            say(f"{model.name}: {type(model.model).__name__}", error=True)
        for sentence in dict.fromkeys(model.form.sentence for model in self.models):
            say(f"prompts: {sentence}", error=True)
        self.show_settings()
        if self.interactive:
            say("/help lists the commands, Ctrl-D ends.", error=True)

    def take(self, line: str) -> bool:
        """Answer a message or follow a command; returns whether that succeeded. An error is printed as one line."""
        try:
            if line.startswith("/") and not line.startswith("//"):
                name, _, argument = line[1:].partition(" ")
                if name not in self.commands:
                    raise ConfigError(f"/{name}: no such command. /help lists them; write // for a message with /")
                self.commands[name](argument.strip())
            else:
                self.ask(line[1:] if line.startswith("//") else line)
        except (UserError, RunError) as error:
            say(f"error: {error}", error=True)
            return False
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            say("\nstopped; the conversation is as it was before", error=True)
        return True

    # -------------------------------------------------------------------------------------- replies

    def ask(self, text: str) -> None:
        """Reply to a message. The conversation grows only if every model has replied."""
        message = Message("user", text)
        replies = self.answer([[*history, message] for history in self.histories])
        for history, reply in zip(self.histories, replies, strict=True):
            history += [message, Message("assistant", reply.text)]

    def regenerate(self) -> None:
        """Replace the last reply. It stays if the new one fails."""
        if not self.last:
            raise DataError("/regenerate: there is no reply yet")
        replies = self.answer([history[:-1] for history in self.histories])
        for history, reply in zip(self.histories, replies, strict=True):
            history[-1] = Message("assistant", reply.text)

    def answer(self, histories: Sequence[Sequence[Message]]) -> list[Reply]:
        """The reply of each model, printed while it grows."""
        prompts = [[*self.system, *history] for history in histories]
        replies = [self.stream(prompts[0])] if self.sources is None else self.side_by_side(prompts, self.sources)
        self.num_replies += 1
        self.last = replies
        return replies

    def reply(
        self,
        model: Speaker,
        messages: Sequence[Message],
        on_text: Callable[[str], None],
        *,
        keep_partial: bool = False,
    ) -> Reply:
        """A model's next reply of the session; see `Speaker.stream`. Raises DataError for a conversation that does not
        fit, or that the chat template refuses."""
        from rlhf_cli.rollout.sampling import draw_uniforms

        settings, ids = self.settings, model.form.encode(model.tokenizer, messages)
        room = model.room(ids, "Shorten the message, or start over with /clear")
        longest = settings.max_new_tokens or model.max_new_tokens
        uniforms = draw_uniforms(settings.seed, "chat", self.num_replies, 1, longest)[:, :room]
        return model.at(settings.temperature).stream(ids, uniforms, on_text, keep_partial=keep_partial)

    def stream(self, messages: Sequence[Message]) -> Reply:
        """The reply of the only model."""
        words = Words(shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
        try:
            reply = self.reply(self.models[0], messages, words.grow, keep_partial=self.interactive)
        finally:
            words.end()
        if not reply.text:
            say("(the reply is empty)", error=True)
        elif not reply.response.ended:
            say(f"(cut after {len(reply.response.ids)} tokens)", error=True)
        return reply

    def side_by_side(self, prompts: Sequence[Sequence[Message]], sources: Sequence[RewardSource]) -> list[Reply]:
        """The replies of both models in two columns, with their scores below."""
        texts = ["" for _ in self.models]
        replies: list[Reply] = []
        live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        with live or contextlib.nullcontext():
            for i, (model, messages) in enumerate(zip(self.models, prompts, strict=True)):

                def show(text: str, i: int = i) -> None:
                    texts[i] = text
                    if live is not None:
                        live.update(self.table(texts, []), refresh=True)

                replies.append(self.reply(model, messages, show))
            judged = [reply_scores(sources, *each) for each in zip(self.models, prompts, replies, strict=True)]
            table = self.table([cut_note(reply) for reply in replies], [scores for scores, _ in judged])
            if live is not None:
                live.update(table, refresh=True)
        if live is None:
            self.console.print(table)
        for problem in dict.fromkeys(problem for _, problems in judged for problem in problems):
            say(f"no score: {problem}", error=True)
        return replies

    def table(self, texts: Sequence[str], scores: Sequence[dict[str, float]]) -> Table:
        """A column for each model: its reply, then a line for each reward."""
        table = Table(expand=True, show_lines=False)
        for model in self.models:
            table.add_column(model.name, ratio=1, overflow="fold")
        table.add_row(*texts, end_section=bool(scores))
        for name in dict.fromkeys(name for each in scores for name in each):
            table.add_row(*(f"{name} {each[name]:+.2f}" if name in each else f"{name} none" for each in scores))
        return table

    # ------------------------------------------------------------------------------------- commands

    def clear(self) -> None:
        """Start over."""
        self.histories = [[] for _ in self.models]
        self.last = []
        say("cleared", error=True)

    def set_system(self, text: str) -> None:
        """Set or remove the system message. The old one stays if a model cannot read the new one."""
        system = [Message("system", text)] if text else []
        for model in self.models:
            if text and model.form.kind == "single":
                raise DataError(f"/system: {model.name} reads single messages and has no place for it")
            model.form.encode(model.tokenizer, [*system, Message("user", "Hi")])
        self.system = system
        say("system message set" if text else "system message removed", error=True)

    def set_value(self, argument: str) -> None:
        """`/set NAME VALUE`."""
        name, _, value = argument.partition(" ")
        match name:
            case "":
                pass
            case "temperature":
                self.settings = replace(self.settings, temperature=check_temperature(value))
            case "max_new_tokens":
                self.settings = replace(self.settings, max_new_tokens=_whole_number(name, value, least=1))
            case "seed":
                self.settings = replace(self.settings, seed=_whole_number(name, value, least=0))
            case _:
                raise ConfigError(f"/set {name}: must be temperature, max_new_tokens or seed")
        self.show_settings()

    def show_settings(self) -> None:
        """Print how replies are drawn."""
        settings, own = self.settings, self.models[0]
        temperature = own.sampling.temperature if settings.temperature is None else settings.temperature
        longest = settings.max_new_tokens or own.max_new_tokens
        say(f"temperature {temperature:g}, at most {longest} new tokens, seed {settings.seed}", error=True)

    def show_history(self) -> None:
        """Print the conversation of each model."""
        for model, history in zip(self.models, self.histories, strict=True):
            if len(self.models) > 1:
                say(f"{model.name}:")
            for message in [*self.system, *history]:
                say(f"{message.role}: {message.content}")

    def save(self, argument: str) -> None:
        """Write the conversation of each model as a row of `messages`, which the stages read. Overwrites nothing."""
        if not argument:
            raise ConfigError("/save: needs the name of a new file")
        if not self.last:
            raise DataError("/save: there is no reply yet")
        path = Path(argument).expanduser()
        rows: list[dict[str, Any]] = [
            {
                "messages": turns_of([*self.system, *history]),
                "ended": reply.response.ended,
                "model": model.name,
            }
            for model, history, reply in zip(self.models, self.histories, self.last, strict=True)
        ]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise ConfigError(f"/save: {path} exists. Give the name of a new file") from None
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError, ValueError):
                path.unlink(missing_ok=True)
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"/save: {path} cannot be written ({reason}). Give another file") from None
        say(f"saved to {path}", error=True)


def reply_scores(
    sources: Sequence[RewardSource], model: Speaker, messages: Sequence[Message], reply: Reply
) -> tuple[dict[str, float], list[str]]:
    """Each source's score of a reply, before its weight, and a line for each source that has none.

    With several sources, `sum` is their weighted sum, unless one has no score.
    """
    from rlhf_cli.data.encoders import PromptRow
    from rlhf_cli.rewards.sources import samples_of, total_score

    form, tokenizer = model.form, model.tokenizer
    row = form.row(messages)
    prompt = PromptRow(form.row_text(tokenizer, row), form.encode(tokenizer, messages), row)
    samples = samples_of(sources, tokenizer, [prompt], [model.text(reply.response)], [reply.response])
    found: dict[str, float] = {}
    problems: list[str] = []
    for source in sources:
        try:
            scores = total_score([source], samples)
        except RewardError as error:
            problems.append(str(error))
            continue
        if scores.errors.get(source.name):
            problems.append(f"{source.name}: has no score, which counts as 0.0 (on_error: zero)")
        else:
            found[source.name] = scores.each[source.name].item()
    if len(sources) > 1 and not problems:
        found["sum"] = sum(source.weight * found[source.name] for source in sources)
    return found, problems


def cut_note(reply: Reply) -> str:
    """A reply for the table, marked if it is empty or was cut."""
    if not reply.text:
        return "(the reply is empty)"
    return reply.text if reply.response.ended else f"{reply.text} (cut after {len(reply.response.ids)} tokens)"


# ------------------------------------------------------------------------------------------- input


def typed() -> Iterator[str]:
    """The messages of a terminal, with editing and earlier lines by the arrow keys."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (input() uses it)

    def lines() -> Iterator[str | None]:
        while True:
            try:
                yield input("> ")
            except KeyboardInterrupt:
                say("\nCtrl-D ends the conversation", error=True)
                yield None
            except EOFError:
                say("", error=True)
                return

    return messages(lines())


def piped() -> Iterator[str]:
    """The messages of a pipe."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    return messages(line.rstrip("\n") for line in sys.stdin)


def messages(lines: Iterable[str | None]) -> Iterator[str]:
    r"""The messages of some lines, to their end or to /exit. Empty lines are skipped, None drops a begun message.

    >>> list(messages(["Hi", " ", "one\\", "two", "not this\\", None, "/exit", "three"]))
    ['Hi', 'one\ntwo']
    """
    begun: list[str] = []
    for line in lines:
        if line is None:
            begun = []
            continue
        if line.endswith("\\"):
            begun.append(line[:-1])
            continue
        message = "\n".join([*begun, line])
        begun = []
        if message.strip() in ("/exit", "/quit"):
            return
        if message.strip():
            yield message
    if "".join(begun).strip():
        yield "\n".join(begun)


def check_temperature(value: object) -> float:
    """The temperature as a number. Raises ConfigError unless it is finite and at least 0."""
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(f"temperature: {value!r} is not a number of at least 0")
    return number


def _whole_number(name: str, value: str, *, least: int) -> int:
    if not value.isdecimal() or int(value) < least:
        raise ConfigError(f"/set {name}: {value!r} is not a whole number of at least {least}")
    return int(value)


class Words:
    """Prints a growing text word by word, so that no word is broken at the right edge of the terminal."""

    def __init__(self, width: int | None):
        """width: columns of the terminal; None does not break lines."""
        self.width = width
        self.taken = 0
        self.word = ""
        self.column = 0

    def grow(self, text: str) -> None:
        """The whole text so far."""
        pieces = re.findall(r"\S+|\s", self.word + text[self.taken :])
        self.taken = max(self.taken, len(text))
        is_open = pieces and not pieces[-1].isspace() and cell_len(pieces[-1]) < LONGEST_WORD
        self.word = pieces.pop() if is_open else ""
        for piece in pieces:
            self._put(piece)

    def end(self) -> None:
        """The text is complete."""
        if self.word:
            self._put(self.word)
        if self.taken:
            say("", flush=True)

    def _put(self, piece: str) -> None:
        if piece == "\n":
            self.column = 0
            say("")
            return
        piece = piece.replace("\t", "    ")
        cells = cell_len(printable(piece))
        if self.width is not None and self.column and self.column + cells > self.width:
            say("")
            self.column = 0
            if piece.isspace():
                return
        say(piece, end="", flush=True)
        self.column += cells
