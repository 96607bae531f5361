"""The progress line: in a terminal of any width it shows steps and time left, then the figures that fit."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from rich.console import Console

from rlhf_cli.training import progress as progress_module
from rlhf_cli.training.progress import Display, Progress, clock, figures

SFT = figures(
    {"loss/sft": 1.2345, "sft/learning_rate": 5e-4, "sft/grad_norm": 0.87, "speed/step_tokens_per_s": 25305.0}
)
PPO = ["healthy", "score 0.512", "KL 1.23", "length 25.4", "entropy 0.355"]


@contextmanager
def still_clock() -> Iterator[float]:
    """The time of a clock that stands still, which the progress line reads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: 1000.0))
        yield 1000.0


def line(width: int, shown: list[str], done: int = 123, total: int = 500, stage: str = "sft") -> str:
    """The progress line of a run that did its first `done` steps in a little more than 123 seconds."""
    progress = Progress(stage, total, "step", 0)
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    with still_clock() as now, console.capture() as capture:
        progress.done, progress.figures, progress.started = done, shown, now - 123.01
        console.print(progress)
    text = capture.get()
    assert "\n" not in text.strip("\n"), "one line"
    assert len(text.rstrip("\n")) <= width
    return " ".join(text.split())


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
@pytest.mark.parametrize("shown", [SFT, PPO, []])
def test_steps_and_time_left_are_shown_at_any_width(width: int, shown: list[str]) -> None:
    text = line(width, shown)
    assert text.startswith("sft ")
    assert "123/500 6:17 left" in text
    assert "━" in text


def test_80_columns_show_the_first_figures_and_120_all() -> None:
    assert line(80, SFT).endswith("6:17 left loss 1.23 lr 0.0005 grad norm 0.87")
    assert line(120, SFT).endswith("6:17 left loss 1.23 lr 0.0005 grad norm 0.87 tokens/s 25305 1.0 s/step")
    assert line(80, PPO, stage="ppo").endswith("6:17 left healthy score 0.512 KL 1.23 length 25.4")
    assert line(120, PPO, stage="ppo").endswith("left healthy score 0.512 KL 1.23 length 25.4 entropy 0.355 1.0 s/step")


def test_figures_are_dropped_from_the_right_and_never_skipped() -> None:
    """A short figure behind a long one must not take its place: which ones are shown would change with their values."""
    full = [f"{name} 0.{'1' * size}" for name, size in (("a", 3), ("b", 9), ("c", 15), ("d", 1))]
    for width in range(40, 140):
        shown = [figure for figure in full if figure in line(width, full)]
        assert shown == full[: len(shown)], width


def test_a_long_finding_leaves_room_for_the_figures() -> None:
    text = line(120, ["entropy_collapse (since iteration 3), kl_runaway (since iteration 5)", "score 0.5"])
    assert "entropy_collapse (since i... score 0.5" in text


def test_the_bar_grows_with_the_steps() -> None:
    def filled(done: int) -> int:
        return line(80, [], done, total=100).count("━")

    assert [filled(done) for done in (0, 50, 100)] == [0, 6, 12]
    assert line(80, [], 0, total=100).count("-:--") == 1


def test_a_resumed_run_estimates_the_time_from_its_own_steps() -> None:
    progress = Progress("sft", 100, "step", done=90)
    with still_clock() as now:
        progress.done, progress.started = 95, now - 10
        assert progress.seconds_left() == pytest.approx(10)
        assert progress.rate() == "2.0 s/step"


def test_a_terminal_shows_the_line_and_a_file_gets_plain_lines() -> None:
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), width=80, force_terminal=is_terminal, color_system=None)
        display = Display("sft", quiet=False, console=console)
        display.begin(2, "step")
        display.step(1, ["loss 2"])
        display.step(2, ["loss 1"])
        display.end()
        assert isinstance(console.file, io.StringIO)
        written = console.file.getvalue()
        assert "2/2  0:00 left  loss 1" in written
        assert ("━" in written) is is_terminal
        assert ("\x1b" in written) is is_terminal


def test_quiet_shows_nothing() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    display = Display("sft", quiet=True, console=console)
    display.begin(2, "step")
    display.step(1, ["loss 2"])
    display.end()
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (7384, "2:03:04")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


# --------------------------------------------------------------------------------------------------- the end of PPO


def written_on(display: Display) -> str:
    assert isinstance(display.console.file, io.StringIO)
    return display.console.file.getvalue()


def new_display(width: int, *, is_terminal: bool) -> Display:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None, soft_wrap=not is_terminal
    )
    return Display("ppo", quiet=False, console=console)


def test_the_final_table_shows_no_seconds_and_no_rounding_errors() -> None:
    display = new_display(80, is_terminal=False)
    sft, ppo = ({"score_mean": x, "kl": kl, "seconds": 2.0} for x, kl in ((0.1, -3e-7), (1.5, 2.5391)))
    display.before_and_after({"num_prompts": 3, "sft": sft, "ppo": ppo, "examples": []})
    rows = [line.split() for line in written_on(display).splitlines()]
    assert ["score_mean", "0.100", "1.500"] in rows
    assert ["kl", "0", "2.539"] in rows
    assert "seconds" not in written_on(display)


def test_an_exchange_is_wrapped_and_indented_on_a_terminal() -> None:
    reply = "word " * 30
    display = new_display(40, is_terminal=True)
    display.exchange("A prompt\nof two lines :smile: [b]", {"PPO": reply})
    first, *lines = [line.rstrip() for line in written_on(display).splitlines()]
    assert first == "  A prompt of two lines :smile: [b]"
    assert len(lines) > 3
    assert all(len(line) <= 40 and line.startswith("    ") for line in lines)
    assert " ".join(" ".join(lines).split()) == f"PPO> {reply.strip()}"


def test_an_exchange_is_one_line_each_in_a_file() -> None:
    display = new_display(40, is_terminal=False)
    display.exchange("A prompt", {"PPO": "word " * 30})
    assert written_on(display).splitlines() == ["  A prompt", "    PPO> " + ("word " * 30).strip()]
