"""What the user sees while a stage works: a live bar on a terminal, calm lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

SECONDS_BETWEEN_LINES = 10.0


class Display:
    """Progress, notes and tables of one stage; says nothing on processes other than the first or when quiet."""

    def __init__(self, stage: str, *, quiet: bool, silent: bool = False):
        self.stage, self.quiet, self.silent = stage, quiet or silent, silent
        self.console = Console(highlight=False, soft_wrap=not Console().is_terminal)
        self._live: Progress | None = None
        self._task: Any = None
        self._total = 0
        self._started = self._last_line = time.monotonic()

    def begin(self, total: int, unit: str, done: int = 0) -> None:
        """Start counting `total` steps, called `unit` in the rate, of which `done` were done before."""
        self._done_before = done
        self._total, self._started, self._last_line = total, time.monotonic(), 0.0
        self._unit = unit
        if not self.quiet and self.console.is_terminal:
            self._live = Progress(
                TextColumn("[bold]{task.description}[/]"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[shown]}"),
                console=self.console,
            )
            self._task = self._live.add_task(self.stage, total=total, rate="", shown="")
            self._live.start()

    def step(self, done: int, text: str) -> None:
        """`done` steps are behind us; `text` are the few figures that matter."""
        if self.quiet:
            return
        now = time.monotonic()
        elapsed, here = max(now - self._started, 1e-9), max(done - self._done_before, 1)
        rate = f"{here / elapsed:.1f} {self._unit}/s" if here >= elapsed else f"{elapsed / here:.1f} s/{self._unit}"
        if self._live is not None:
            self._live.update(self._task, completed=done, rate=rate, shown=text)
        elif done == self._total or now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            left = elapsed / here * (self._total - done)
            self.console.print(f"{self.stage} {done}/{self._total}  {rate}  {left:.0f} s left  {text}", markup=False)

    def end(self) -> None:
        """The counted steps are over, done or not."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def note(self, text: str) -> None:
        """A line that the user should read once."""
        if not self.quiet:
            self.console.print(f"{self.stage}: {text}", markup=False)

    def about_rows(self, lines: Sequence[str], warnings: Sequence[str]) -> None:
        """What became of the rows of the data: notes, then warnings."""
        for line in lines:
            self.note(line)
        for line in warnings:
            self.warn(line)

    def block(self, title: str, rows: list[tuple[str, str]]) -> None:
        """Some lines under a title, what each is about on the left."""
        if self.quiet:
            return
        width = max(len(name) for name, _ in rows)
        text = "\n".join(f"  {name:{width}}  {line}" for name, line in rows)
        self.console.print(f"{self.stage}: {title}\n{text}", markup=False)

    def warn(self, text: str) -> None:
        """A line that is printed even when quiet (and by one process only)."""
        if self.silent:
            return
        self.console.print(f"{self.stage}: warning: {text}", markup=False, style="yellow")

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """A table; the first column is text, the others are figures."""
        if self.quiet:
            return
        table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
        for number, name in enumerate(columns):
            table.add_column(name, justify="right" if number else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        self.console.print(table, markup=False)

    def before_and_after(self, evaluation: dict[str, Any]) -> None:
        """The end of the pipeline: SFT against PPO in figures and in replies (`evaluation.json`)."""
        sft, ppo = evaluation["sft"], evaluation["ppo"]
        self.table(
            f"SFT against PPO, {evaluation['num_prompts']} held-out prompts, one reply each",
            ["", "SFT", "PPO"],
            [[key, f"{sft[key]:.3f}", f"{ppo[key]:.3f}"] for key in sft],
        )
        for example in evaluation["examples"]:
            replies = {}
            for name in ("sft", "ppo"):
                reply = example[name]
                gold = f", gold {reply['gold']:g}" if "gold" in reply else ""
                replies[f"{name.upper()} (score {reply['score']:+.2f}{gold})"] = reply["reply"]
            self.exchange(example["prompt"], replies)

    def exchange(self, prompt: str, replies: dict[str, str]) -> None:
        """A prompt and what was said to it, a line each: line breaks and runs of blanks become one blank."""
        if self.quiet:
            return
        self.console.print("  " + " ".join(prompt.split()), style="dim", markup=False)
        for name, reply in replies.items():
            self.console.print(f"    {name}> {' '.join(reply.split())}", markup=False)


def figures(shown: dict[str, float]) -> str:
    """A few metrics in a line, by the ends of their names."""
    return "  ".join(f"{name.split('/')[-1]} {_short(value)}" for name, value in shown.items())


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
