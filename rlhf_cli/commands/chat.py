"""`rlhf chat`: a conversation in the terminal, or with the lines of a pipe. Only replies go to stdout."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_cli.commands.options import Device, Quantized, TemperatureOfRun, WritingStage
from rlhf_cli.config.base import expand_home
from rlhf_cli.data.records import Message, turns_of
from rlhf_cli.errors import ConfigError, DataError, RunError, UserError
from rlhf_cli.printing import say, shown

if TYPE_CHECKING:
    from rlhf_cli.rollout.speaker import Reply, Speaker

MAX_DIGITS = 18  # of a number that is typed
HELP = """\
/regenerate         another reply to the last message
/clear              start over; the system message stays
/system TEXT        set the system message; without TEXT, remove it
/set NAME VALUE     temperature (0 is greedy), max_new_tokens or seed
/history            show the conversation
/save FILE          write it to a new JSONL file, as one row
/exit               end, as Ctrl-D does
Write // for a message that begins with /. End a line with \\ to continue on the
next one."""


@dataclass(frozen=True)
class ChatSettings:
    """How replies are drawn. None leaves a value to the model."""

    temperature: TemperatureOfRun = None
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, help="Longest reply. The run's own by default.")
    ] = None
    seed: Annotated[int, typer.Option("--seed", help="Seed of the replies.")] = 0


def chat(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A run's directory, or that of any language model.")],
    settings: ChatSettings,
    stage: WritingStage = None,
    device: Device = "auto",
    quantize: Quantized = None,
) -> None:
    """Talk to a model that you trained. /help lists the commands of the conversation."""
    from rlhf_cli.processes.distributed import start
    from rlhf_cli.trained.model import find_model

    if settings.temperature is not None:
        check_temperature(settings.temperature)
    model = find_model(directory, stage).speaker(start(device).device, quantize)
    session = Session(model, settings, interactive=sys.stdin.isatty())
    say(f"{model.name}: {type(model.model).__name__}", error=True)
    say(f"prompts: {model.form.sentence}", error=True)
    session.show_settings()
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding=None if session.interactive else "utf-8-sig", errors="replace")
    if session.interactive:
        say("/help lists the commands, Ctrl-D ends.", error=True)
        lines: Iterator[str | None] = typed()
    else:
        lines = (line.rstrip("\n") for line in sys.stdin)
    failed = sum(not session.take(message) for message in messages(lines))
    if failed and not session.interactive:
        raise ConfigError(f"{failed} line{'s' if failed > 1 else ''} of the input failed, as printed above")


class Session:
    def __init__(self, model: Speaker, settings: ChatSettings, *, interactive: bool):
        self.model, self.settings, self.interactive = model, settings, interactive
        self.system: list[Message] = []
        self.history: list[Message] = []
        self.last: Reply | None = None
        self.num_replies = 0
        self.commands: dict[str, Callable[[str], object]] = {
            "regenerate": self.regenerate,
            "clear": self.clear,
            "system": self.set_system,
            "set": self.set_value,
            "history": self.show_history,
            "save": self.save,
            "help": lambda _: say(HELP, error=True),
        }

    def take(self, line: str) -> bool:
        """Answer a message or follow a command; returns whether that succeeded. An error is printed as one line."""
        try:
            if line.startswith("/") and not line.startswith("//"):
                name, _, argument = line[1:].partition(" ")
                if name not in self.commands:
                    raise ConfigError(f"/{name}: no such command. /help lists them; write // for a message with /")
                self.commands[name](argument.strip())
            else:
                message = Message("user", line[1:] if line.startswith("//") else line)
                reply = self.answer([*self.history, message])
                self.history += [message, Message("assistant", reply.text)]  # unchanged if the reply failed
        except (UserError, RunError) as error:
            say(f"error: {error}", error=True)
            return False
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            say("\nstopped; the conversation is as it was before", error=True)
        return True

    @property
    def longest(self) -> int:
        return self.settings.max_new_tokens or self.model.max_new_tokens

    # -------------------------------------------------------------------------------------- replies

    def regenerate(self, _: str) -> None:
        """Replace the last reply. It stays if the new one fails."""
        if self.last is None:
            raise DataError("/regenerate: there is no reply yet")
        self.history[-1] = Message("assistant", self.answer(self.history[:-1]).text)

    def answer(self, history: Sequence[Message]) -> Reply:
        """The reply to a conversation, printed while it grows."""
        printed = 0

        def grow(text: str) -> None:
            nonlocal printed
            say(text[printed:], end="", flush=True)
            printed = max(printed, len(text))

        try:
            reply = self.reply([*self.system, *history], grow)
        finally:
            if printed:
                say("", flush=True)
        if not reply.text:
            say("(the reply is empty)", error=True)
        elif not reply.response.ended:
            say(f"(cut after {len(reply.response.ids)} tokens)", error=True)
        self.num_replies += 1
        self.last = reply
        return reply

    def reply(self, messages: Sequence[Message], on_text: Callable[[str], None]) -> Reply:
        """The next reply. Raises DataError for a conversation that does not fit, or that the chat template refuses."""
        from rlhf_cli.rollout.sampling import draw_uniforms

        model, settings = self.model, self.settings
        ids = model.form.encode(model.tokenizer, messages)
        room = model.room(ids, "Shorten the message, or start over with /clear")
        uniforms = draw_uniforms(settings.seed, "chat", self.num_replies, 1, min(self.longest, room))
        return model.at(settings.temperature).stream(ids, uniforms, on_text, keep_partial=self.interactive)

    # ------------------------------------------------------------------------------------- commands

    def clear(self, _: str) -> None:
        self.history, self.last = [], None
        say("cleared", error=True)

    def set_system(self, text: str) -> None:
        """Set or remove the system message. The old one stays if the model cannot read the new one."""
        system, model = [Message("system", text)] if text else [], self.model
        if text and model.form.kind == "single":
            raise DataError(f"/system: {model.name} reads single messages and has no place for it")
        model.form.encode(model.tokenizer, [*system, Message("user", "Hi")])
        self.system = system
        say("system message set" if text else "system message removed", error=True)

    def set_value(self, argument: str) -> None:
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
        settings, own = self.settings, self.model
        temperature = own.sampling.temperature if settings.temperature is None else settings.temperature
        say(f"temperature {temperature:g}, at most {self.longest} new tokens, seed {settings.seed}", error=True)

    def show_history(self, _: str) -> None:
        for message in [*self.system, *self.history]:
            say(f"{message.role}: {message.content}", error=True)

    def save(self, argument: str) -> None:
        """Write the conversation as a row of `messages`, which the stages read. Overwrites nothing."""
        if not argument:
            raise ConfigError("/save: needs the name of a new file")
        if self.last is None:
            raise DataError("/save: there is no reply yet")
        try:
            path = Path(expand_home(argument))
        except ValueError as error:
            raise ConfigError(f"/save: {error}") from None
        turns, ended = turns_of([*self.system, *self.history]), self.last.response.ended
        row = {"messages": turns, "ended": ended, "model": self.model.name}
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        except FileExistsError:
            raise ConfigError(f"/save: {path} exists. Give the name of a new file") from None
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError, ValueError):
                path.unlink(missing_ok=True)
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"/save: {path} cannot be written ({reason}). Give another file") from None
        say(f"saved to {path}", error=True)


# ------------------------------------------------------------------------------------------- input


def typed() -> Iterator[str | None]:
    """The lines of a terminal, with editing and earlier lines by the arrow keys; None for Ctrl-C."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (input() uses it)
    while True:
        try:
            if not sys.stdout.isatty():
                say("> ", error=True, end="", flush=True)
            yield input("> " if sys.stdout.isatty() else "")
        except KeyboardInterrupt:
            say("\nCtrl-D ends the conversation", error=True)
            yield None
        except EOFError:
            say("", error=True)
            return


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
    value = value.strip()
    if not value.isdecimal() or len(value) > MAX_DIGITS or int(value) < least:
        rule = f"a whole number of at least {least} and at most {MAX_DIGITS} digits"
        raise ConfigError(f"/set {name}: {shown(value)} is not {rule}")
    return int(value)
