"""`rlhf watch`: curves and the latest samples of runs in the terminal, from their files alone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from rlhf_cli.config.stage import STAGES
from rlhf_cli.errors import ArtifactError
from rlhf_cli.files import Tail
from rlhf_cli.health.recap import HEALTHY
from rlhf_cli.report.progress import Console, clock, label
from rlhf_cli.report.run_data import names_of
from rlhf_cli.run.artifacts import partial_directory, stage_directory
from rlhf_cli.run.state import NOT_RUN, state_of

SHOWN = {
    "sft": ("loss/sft", "eval/loss", "validation/loss", "sft/grad_norm"),
    "rm": ("loss/rm", "rm/accuracy", "eval/accuracy", "validation/accuracy"),
    "ppo": ("objective/score", "objective/kl", "response/length", "policy/entropy", "value/explained_variance"),
}
BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
LABEL_WIDTH, NUMBER_WIDTH = 19, 11  # a number such as -8.631e-05 and a space
SAMPLES = 2  # latest samples of a stage that are shown
SAMPLE_LINES = 3  # lines of a prompt or a reply, where the screen has room for them
SILENT_SECONDS = 120.0  # a running stage without a new row for this long is shown with that time
FULL, SHORT_SAMPLES, CURVES, ONE_LINE = 3, 2, 1, 0
"""How much is shown of a run: the most that fits the terminal."""


class Watched:
    def __init__(self, root: Path, name: str, stage: str):
        self.root, self.name, self.stage = root, name, stage
        self.curves: dict[str, list[float]] = {}
        self.samples: list[dict[str, Any]] = []
        self.step, self.health, self.state = 0, "", NOT_RUN
        self.elapsed: float | None = None  # seconds that the stage has run, by its last row
        self.silent = 0.0  # seconds since its last row
        self.tails: dict[str, Tail] = {}

    def update(self) -> None:
        """Read what was written since the last call."""
        self.state = state_of(self.root, self.stage)
        is_published = self.state.name in ("finished", "not run")
        directory = (stage_directory if is_published else partial_directory)(self.root, self.stage)

        def new_rows(name: str) -> tuple[bool, list[dict[str, Any]]]:
            tail = self.tails.setdefault(name, Tail(directory / name))
            tail.path = directory / name  # A finished stage is renamed: the same file under another path.
            return tail.new()

        restarted, rows = new_rows("metrics.jsonl")
        if restarted:
            self.curves, self.step = {}, 0
        for row in rows:
            self.step = int(row.get("step", self.step))
            self.elapsed = row.get("time/elapsed_s", self.elapsed)
            for metric in SHOWN[self.stage]:
                if isinstance(value := row.get(metric), int | float):
                    self.curves.setdefault(metric, []).append(float(value))
        with contextlib.suppress(OSError):
            self.silent = time.time() - (directory / "metrics.jsonl").stat().st_mtime
        restarted, rows = new_rows("health.jsonl")
        self.health = ["" if restarted else self.health, *(str(row.get("line", "")) for row in rows)][-1]
        restarted, rows = new_rows("samples.jsonl")
        self.samples = [*([] if restarted else self.samples), *rows][-SAMPLES:]

    @property
    def has_ended(self) -> bool:
        """Without success."""
        return self.state.name in ("failed", "interrupted")

    def words(self) -> str:
        """The steps and the state, and how long a running stage will take."""
        state, total = self.state, self.state.total
        if state.name != "running":
            return f"{self.step}/{self.step}  finished" if state.name == "finished" else state.place(self.stage)
        steps = f"{self.step}/{total}" if total else f"step {self.step}"
        if self.silent > SILENT_SECONDS:
            return f"{steps}  no new row for {clock(self.silent)}"
        if total and self.step and self.elapsed:
            return f"{steps}  {clock(self.elapsed / self.step * max(total - self.step, 0))} left"
        return f"{steps}  running"

    def lines(self, width: int, detail: int, *, ascii_only: bool) -> list[Text]:
        head = Text(f"{self.name} {self.stage}  {self.words()}", "bold", no_wrap=True, overflow="ellipsis")
        blocks = ASCII_BLOCKS if ascii_only else BLOCKS
        shown = {label(metric): self.curves[metric] for metric in SHOWN[self.stage] if self.curves.get(metric)}
        if detail == ONE_LINE:
            for name, values in list(shown.items())[:1]:
                head.append(f"  {name} {values[-1]:.4g} ", "not bold")
                head.append(sparkline(values, max(0, width - head.cell_len), blocks), "not bold cyan")
            return [head]
        lines = [head]
        if self.has_ended:
            lines += _wrapped(self.state.why, "  ", width, SAMPLE_LINES, "red")
        room = max(10, width - LABEL_WIDTH - NUMBER_WIDTH - 3)
        for name, values in shown.items():
            line = Text(f"  {name:<{LABEL_WIDTH}}{values[-1]:>{NUMBER_WIDTH - 1}.4g} ", no_wrap=True)
            lines.append(line.append(sparkline(values, room, blocks), "cyan"))
        if self.health and not self.health.startswith(HEALTHY):  # whose figures are in the rows above
            lines.append(Text(f"  {self.health}", style="yellow", no_wrap=True, overflow="ellipsis"))
        most = SAMPLE_LINES if detail == FULL else 1
        for row in self.samples if detail >= SHORT_SAMPLES else ():
            lines += _wrapped(str(row.get("prompt", "")), "  ", width, most, "dim")
            lines += _wrapped(f"> {row.get('response', '')}", "    ", width, most, "")
        return lines


def _wrapped(text: str, indent: str, width: int, most: int, style: str) -> list[Text]:
    """A text in at most `most` lines behind an indent. A wide character, such as a Chinese one, takes two columns."""
    # Without control characters: an escape sequence in a sample must not reach the terminal.
    line = " ".join("".join(c if c.isprintable() or c.isspace() else "" for c in text).split())
    room, more = max(1, width - len(indent)), " ..."
    wrapped = list(Text(line, style).wrap(Console(), room))
    parts = wrapped[:most]
    if len(wrapped) > most:
        parts[-1].truncate(max(0, room - len(more)))
        parts[-1].append(more)
    return [Text(indent, no_wrap=True, overflow="ellipsis").append_text(part) for part in parts]


def sparkline(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """A curve of at most `width` characters; each is the mean of the values that fall on it.

    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8), sparkline([1, 1, 3, 3], 2), sparkline([2, 2], 9)
    ('▁▂▃▄▅▆▇█', '▁█', '▄▄')
    """
    finite = [value for value in values if abs(value) < float("inf")]
    if not finite or width < 1:
        return ""
    count = min(width, len(finite))
    parts = [finite[i * len(finite) // count : (i + 1) * len(finite) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    if low == high:
        return blocks[len(blocks) // 2 - 1] * count
    return "".join(blocks[min(int((mean - low) / (high - low) * len(blocks)), len(blocks) - 1)] for mean in means)


def watch(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Directories of runs.")],
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="Time between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print a single time.")] = False,
) -> None:
    """Show curves and the latest samples of runs in the terminal, until Ctrl-C."""
    for root in directories:
        if not root.is_dir():
            raise ArtifactError(f"{root}: no such directory. Give the `artifacts` directory of your configs")
    names = names_of(directories)
    stages = [Watched(root, name, stage) for root, name in zip(directories, names, strict=True) for stage in STAGES]
    console = Console()
    if once or not console.is_terminal:
        console.print(_screen(stages, console))
        return
    with Live(console=console, auto_refresh=False, screen=True) as live, contextlib.suppress(KeyboardInterrupt):
        while True:
            live.update(_screen(stages, console, height=console.height), refresh=True)
            time.sleep(seconds)


def _screen(stages: Sequence[Watched], console: RichConsole, *, height: int | None = None) -> RenderableType:
    """The stages of each run, with as much detail as fits into `height` lines; None shows everything.

    First those that failed or were interrupted. A stage that has not run is shown if no stage of its run is at work.
    """
    for stage in stages:
        stage.update()
    running = {stage.name for stage in stages if stage.state.name == "running"}
    seen = {stage.name for stage in stages if stage.state.name != "not run"} - running
    shown = [stage for stage in stages if stage.state.name != "not run" or stage.name in seen]
    if not shown:
        return Text("no stage has metrics yet")
    runs = list(dict.fromkeys(stage.name for stage in shown))
    shown.sort(key=lambda stage: (runs.index(stage.name), not stage.has_ended))
    lines = _lines(shown, console, FULL)
    for detail in (SHORT_SAMPLES, CURVES, ONE_LINE):
        if height is not None and len(lines) > height:
            lines = _lines(shown, console, detail)
    if height is not None and len(lines) > height:
        lines = [*lines[: height - 1], Text(f"and {len(lines) - height + 1} more; enlarge the terminal")]
    return Group(*lines)


def _lines(stages: Sequence[Watched], console: RichConsole, detail: int) -> list[Text]:
    """The screen. At ONE_LINE each run has one line, for the stage that ended early, or else for its latest one.

    Otherwise a finished stage is one line if a later stage of its run has metrics.
    """
    last = {stage.name: stage for stage in stages} | {stage.name: stage for stage in stages if stage.curves}
    chosen = last | {stage.name: stage for stage in stages if stage.has_ended}
    lines: list[Text] = []
    for stage in stages:
        part = stage.lines(console.width, detail, ascii_only=console.options.ascii_only)
        if detail == ONE_LINE:
            lines += part if chosen[stage.name] is stage else []
        elif last[stage.name] is stage or stage.has_ended or stage.state.name == "running":
            lines += [*part, Text("")]
        else:
            lines += part[:1]
    return lines if not lines or lines[-1].plain else lines[:-1]
