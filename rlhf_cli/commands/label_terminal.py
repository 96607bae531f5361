"""Asking the labeller: keys of the terminal or characters of a pipe; pairs on the screen or as lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rlhf_cli.commands.labelling import KEYS, Labelling, Shown, counted
from rlhf_cli.printing import say
from rlhf_cli.report.progress import Console

TWO_COLUMNS = 120
"""Columns of a terminal that shows the replies side by side. A narrower one shows one above the other."""
END = "q"


def ask(labelling: Labelling) -> str | None:
    """Show one pair after the other and take keys until all have an answer, `q`, or the end of a pipe.

    On a terminal the end is asked for even when all pairs have an answer, so that the last one can be taken back. If
    stdout is not a terminal, each pair is a line of JSON: a program can answer through a pipe.

    Returns what was wrong with the keys of a pipe: some mean nothing, or they end before the pairs do, without `q`.
    """
    num_wrong = 0
    screen = Screen() if sys.stdout.isatty() else None
    with keyboard() as interactive:
        while (shown := labelling.current) is not None or interactive:
            if screen is not None:
                screen.show(labelling, shown)
            elif shown is not None:
                say(json.dumps(asdict(shown)), flush=True)
            while (key := read_key(interactive=interactive)) not in (END, "") and not (
                key in KEYS and labelling.take(key)
            ):
                num_wrong += key not in KEYS
                names = ", ".join(f"{name} {what}" for name, what in KEYS.items())
                say("no earlier answer" if key == "b" else f"{key!r}: no such key here. Keys: {names}", error=True)
            if key in (END, ""):
                early = key == "" and not interactive and labelling.done < labelling.total
                return _wrong_keys(num_wrong if not interactive else 0, early=early)
    return _wrong_keys(num_wrong, early=False)


def _wrong_keys(count: int, *, early: bool) -> str | None:
    """What was wrong with the keys of a pipe, or None."""
    found = [f"{count} key{'s' if count > 1 else ''} of the input failed, as printed above"] if count else []
    return "; ".join([*found, *(["the input ended before the pairs did"] if early else [])]) or None


@contextlib.contextmanager
def keyboard() -> Iterator[bool]:
    """A context in which a terminal sends keys without Enter and Ctrl-C ends like `q`. Yields whether stdin is one.

    The terminal is restored at the end, after SIGTERM and SIGHUP too.
    """
    if not sys.stdin.isatty():
        yield False
        return
    before = termios.tcgetattr(sys.stdin.fileno())
    handlers = {number: signal.signal(number, _exit) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield True
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        # The terminal of a SIGHUP is gone.
        with contextlib.suppress(termios.error):
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, before)


def _exit(number: int, _: object) -> None:
    sys.exit(128 + number)


def read_key(*, interactive: bool) -> str:
    """The next key, or "" at the end of a pipe. Ctrl-D is `q`; white space in a pipe is skipped.

    Keys that were typed before the pair was on the screen do not count, nor do the further characters of an arrow key.
    """
    descriptor = sys.stdin.fileno()
    if interactive:
        tty.setcbreak(descriptor, termios.TCSAFLUSH)  # each time: the shell may have changed it while rlhf was stopped
    while (read := os.read(descriptor, 1)).isspace() and not interactive:
        pass
    return END if read == b"\x04" else read.decode(errors="replace").lower()


class Screen:
    """The terminal: it shows one pair at a time."""

    def __init__(self) -> None:
        self.console = Console()

    def show(self, labelling: Labelling, shown: Shown | None) -> None:
        """Show a pair, or that there is none left."""
        console = self.console
        place = f"pair {shown.number + 1} of {labelling.total}" if shown else f"all {labelling.total} pairs"
        console.clear()
        console.print(Rule(Text(f"{place}  {counted(labelling.counts())} "), align="left"))
        if shown is None:
            console.print("Every pair has an answer.  b back  q quit")
            return
        panels = [
            Panel(Text(text.strip()), title=str(n), title_align="left") for n, text in enumerate(shown.replies, 1)
        ]
        pair: RenderableType = Group(*panels)
        if console.width >= TWO_COLUMNS:
            pair = table = Table.grid(expand=True)
            for _ in panels:  # a reply without spaces is one long word
                table.add_column(ratio=1, overflow="fold")
            table.add_row(*panels)
        body = Group(Text(shown.prompt.strip()), "", pair)
        console.print(body)
        if len(console.render_lines(body)) > console.height - 3:
            console.print("The pair is longer than the screen. Scroll up, or use --page.", style="yellow")
        console.print("Which is better?  1  2  t tie  s skip  b back  q quit")
