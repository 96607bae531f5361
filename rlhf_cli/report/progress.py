"""The output of commands: a live progress line on a terminal, and occasional plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import rich.console
from rich.box import SIMPLE_HEAD
from rich.console import ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rlhf_cli.health.recap import Seen, names_in, state_in, unit_of
from rlhf_cli.printing import printable

SECONDS_BETWEEN_LINES = 10.0
BAR_WIDTH, NARROW_BAR_WIDTH = 20, 6
"""Characters of the bar in a terminal of at least 100 columns, and in a narrower one with room for three figures."""
LONGEST_FIGURE = 28
SHORTEST_LINE = 20  # columns that a wrapped text has at least, in a narrow terminal too
LABELS = {
    "learning_rate": "lr",
    "grad_norm": "grad norm",
    "explained_variance": "explained variance",
    "step_tokens_per_s": "tokens/s",
    "kl": "KL",
}
"""Names on the screen, by the last part of a metric's name."""
GROUPS = {"loss": "loss", "eval": "held-out", "validation": "validation"}
"""Groups of metrics of which the screen shows one."""


class Console(rich.console.Console):
    """rich's console without markup: `[b]` in a name is text. It prints no control characters but its own."""

    def __init__(self, **options: Any):
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of anything that is printed, the cells of a table included."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or text.isprintable() else Segment(printable(text, keep="\n"), style)


class Progress:
    """The live line: stage, bar, steps, time left, as many figures as fit; and below it the health findings."""

    def __init__(self, stage: str, total: int, unit: str, done: int):
        self.stage, self.total, self.unit = stage, total, unit
        self.done = self.done_before = done
        self.started = time.monotonic()
        self.figures: Sequence[str] = ()
        self.findings = ""

    def _pace(self) -> float:
        return max(time.monotonic() - self.started, 1e-9) / max(self.done - self.done_before, 1)

    def rate(self) -> str:
        """Steps per second, or seconds per step, since this process started."""
        pace = self._pace()
        return f"{1 / pace:.1f} {self.unit}s/s" if pace <= 1 else f"{pace:.1f} s/{self.unit}"

    def seconds_left(self) -> float | None:
        """Seconds until the last step at the average pace so far; None before the first step."""
        if self.done == self.done_before:
            return 0.0 if self.done == self.total else None
        return self._pace() * (self.total - self.done)

    def __rich_console__(self, console: rich.console.Console, options: ConsoleOptions) -> Iterable[Text]:
        width = options.max_width
        shown = [one if len(one) <= LONGEST_FIGURE else f"{one[: LONGEST_FIGURE - 3]}..." for one in self.figures]
        figures = [f"  {figure}" for figure in (*shown, self.rate())]
        counts = f"{self.done}/{self.total}  {clock(self.seconds_left())} left"
        bar = max(0, min(BAR_WIDTH if width >= 100 else NARROW_BAR_WIDTH, width - len(self.stage) - len(counts) - 2))
        filled = round(bar * self.done / max(self.total, 1))
        character = "-" if options.ascii_only else "━"
        line = Text.assemble((self.stage, "bold"), " ", no_wrap=True, overflow="crop", end="")
        line.append(character * filled, "cyan")  # rich's own colour looks like an error
        # Without colours the rest of the bar would look like the filled part.
        has_colours = console.color_system is not None and not console.no_color and not options.ascii_only
        line.append((character if has_colours else " ") * (bar - filled), "bar.back")
        line.append(f" {counts}")
        for figure in figures:
            if line.cell_len + len(figure) > width:
                break
            line.append(figure)
        yield line
        if self.findings:
            yield Text(f"\nhealth: {self.findings}", "yellow", end="")


def clock(seconds: float | None) -> str:
    """A duration as minutes and seconds, or hours, minutes and seconds.

    >>> clock(65), clock(3725), clock(None)
    ('1:05', '1:02:05', '-:--')
    """
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


class Display:
    """The output of one stage. With `quiet` it prints warnings only; with `silent` (other processes) nothing."""

    def __init__(self, stage: str, *, quiet: bool, silent: bool = False, console: rich.console.Console | None = None):
        self.stage, self.quiet, self.silent = stage, quiet or silent, silent
        self.console = console or Console(soft_wrap=not Console().is_terminal)
        self._progress: Progress | None = None
        self._live: Live | None = None
        self._last_line = 0.0

    def begin(self, total: int, unit: str, done: int = 0) -> None:
        """Start to count `total` steps, of which `done` were done before; `unit` is what a step is called."""
        self._progress = Progress(self.stage, total, unit, done)
        self._last_line = 0.0
        if not self.quiet and self.console.is_terminal:
            self._live = Live(self._progress, console=self.console, refresh_per_second=4)
            self._live.start()

    def step(self, done: int, shown: Sequence[str]) -> None:
        """Update the progress: `done` steps are finished; `shown` are the figures, the most important first."""
        progress = self._progress
        if self.quiet or progress is None:
            return
        progress.done, progress.figures = done, shown
        now = time.monotonic()
        if self._live is None and (done == progress.total or now - self._last_line >= SECONDS_BETWEEN_LINES):
            self._last_line = now
            words = [f"{self.stage} {done}/{progress.total}", f"{clock(progress.seconds_left())} left", *shown]
            self.console.print("  ".join([*words, progress.rate()]))

    def health(self, line: str) -> None:
        """Show the findings of a health line."""
        if self._progress is not None:
            self._progress.findings = state_in(line) if names_in(line) else ""

    def recap(self, seen: Sequence[Seen]) -> None:
        if not seen:
            return
        kinds = "1 kind of warning" if len(seen) == 1 else f"{len(seen)} kinds of warnings"
        lines = [f"{self.stage}: this run had {kinds}:"]
        for one in seen:
            message = "; ".join(each.partition(". ")[0].removesuffix(".") for each in one.message.split("\n"))
            lines += [f"  {one.name}, {one.when(unit_of(self.stage))}: {message}.", f"    To try: {one.advice}"]
        self._print("\n".join(lines), "yellow")

    @contextmanager
    def counting(self, total: int, unit: str, done: int = 0) -> Iterator[None]:
        """`begin`, and `end` also after an error or Ctrl-C, so that the terminal has its cursor again."""
        self.begin(total, unit, done)
        try:
            yield
        finally:
            self.end()

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def note(self, text: str) -> None:
        self._print(f"{self.stage}: {text}")

    def notes(self, *lines: str | None) -> None:
        """Print lines of information, each once; None and an empty line print nothing."""
        for line in filter(None, dict.fromkeys(lines)):
            self.note(line)

    def about_rows(self, lines: Sequence[str], warnings: Sequence[str]) -> None:
        self.notes(*lines)
        for line in warnings:
            self.warn(line)

    def block(self, title: str, rows: list[tuple[str, str]]) -> None:
        width = max(len(name) for name, _ in rows)
        self._print(f"{self.stage}: {title}")
        for name, line in rows:
            self._print(f"  {name:{width}}  {line}", hang=width + 2)

    def warn(self, text: str) -> None:
        """Print a warning, also when quiet; only the first process prints."""
        self._print(f"{self.stage}: warning: {text}", "yellow", is_silent=self.silent)

    def table(self, title: str, columns: list[str], rows: list[list[str]], *, text: Sequence[str] = ()) -> None:
        """Print a table. The first column and those named in `text` hold text, the others hold numbers."""
        if self.quiet:
            return
        widths = [max(map(len, column)) + 3 for column in zip(columns, *rows, strict=True)]
        if sum(widths) > self.console.width:  # the interval behind a number gets a line of its own
            rows = [[row[0], *(cell.replace(" [", "\n[", 1) for cell in row[1:])] for row in rows]
        # Not the table's own title, which is wrapped to the width of its columns.
        self._print(f"\n{title}", "bold")
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for number, name in enumerate(columns):
            is_text = not number or name in text
            table.add_column(name, justify="left" if is_text else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)
        self.console.print()

    def heading(self, text: str) -> None:
        """Print a line that begins a new part, after an empty line."""
        self._print(f"\n{self.stage}: {text}", "bold")

    def before_and_after(self, evaluation: dict[str, Any]) -> None:
        """Print the comparison of SFT and PPO from `evaluation.json`: figures and example replies."""
        sft, ppo = evaluation["sft"], evaluation["ppo"]
        of = f" of {evaluation['of_prompts']}" if "of_prompts" in evaluation else ""
        title = f"SFT against PPO, {evaluation['num_prompts']}{of} held-out prompts, one reply each"
        # A figure near 0 has neither digits nor a sign.
        rows = [
            [key, *(f"{x:.3f}" if abs(x) >= 0.0005 else "0" for x in (sft[key], ppo[key]))]
            for key in sft
            if key != "seconds"
        ]
        self.table(title, ["", "SFT", "PPO"], rows)
        for example in evaluation["examples"]:
            replies = {}
            for name in ("sft", "ppo"):
                reply = example[name]
                gold = f", gold {reply['gold']:g}" if "gold" in reply else ""
                replies[f"{name.upper()} (score {reply['score']:+.2f}{gold})"] = reply["reply"]
            self.exchange(example["prompt"], replies)

    def exchange(self, prompt: str, replies: dict[str, str]) -> None:
        """Print a prompt and the replies to it, each as one line, which a terminal wraps and indents."""
        self._print(f"  {_one_line(prompt)}", "dim", hang=0)
        for name, reply in replies.items():
            self._print(f"    {name}> {_one_line(reply)}", hang=0)

    def _print(self, text: str, style: str = "", *, hang: int = 2, is_silent: bool | None = None) -> None:
        """Print lines. What a terminal wraps is indented like the line's beginning, and by `hang` columns more."""
        if self.quiet if is_silent is None else is_silent:
            return
        for line in text.split("\n"):
            body = Text(line.lstrip(" "), style)
            indent = len(line) - len(body)
            width = max(self.console.width - indent - hang, SHORTEST_LINE)
            parts = body.wrap(self.console, width) if self.console.is_terminal else [body]
            for number, part in enumerate(parts):
                self.console.print(Text(" " * (indent + (hang if number else 0))) + part)


def _one_line(text: str) -> str:
    return " ".join(text.split()) or "(no text)"


def epochs(number: float) -> str:
    """A number of passes over the data in words.

    >>> epochs(1.6), epochs(0.00042)
    ('1.60 epochs', '0.00042 epochs')
    """
    return f"{number:.2f} epochs" if number >= 0.01 else f"{number:.2g} epochs"


def figures(metrics: dict[str, float]) -> list[str]:
    """Metrics as short texts for the progress line.

    >>> figures({"loss/sft": 1.2345, "eval/loss": 1.5, "sft/learning_rate": 1e-3, "rm/accuracy": 0.75})
    ['loss 1.23', 'held-out 1.5', 'lr 0.001', 'accuracy 0.75']
    """
    return [
        f"{label(name)} {value:.0f}" if abs(value) >= 1000 else f"{label(name)} {value:.3g}"
        for name, value in metrics.items()
    ]


def label(name: str) -> str:
    group, _, last = name.rpartition("/")
    return GROUPS.get(group) or LABELS.get(last, last)
