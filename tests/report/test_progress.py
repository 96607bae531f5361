"""What a stage prints: the progress line in a terminal of any width, health findings, the end of PPO."""

import io
import json
import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from rich.console import Console

from rlhf_cli import files
from rlhf_cli.files import last_row
from rlhf_cli.health.recap import findings_of
from rlhf_cli.report import progress as progress_module
from rlhf_cli.report.progress import Display, Progress
from rlhf_cli.run.checkpoint import StageFiles

FIGURES = {
    "sft": ["loss 1.23", "held-out 1.31", "grad norm 0.87", "lr 0.0005", "tokens/s 25305"],
    "rm": ["loss 0.245", "accuracy 0.875", "held-out 0.812", "margin 1.24", "tokens/s 25305"],
    "ppo": ["score -0.512", "KL 1.23", "length 25.4", "entropy 0.355"],
}
SFT, PPO = FIGURES["sft"], FIGURES["ppo"]


@contextmanager
def still_clock():
    """The time of a clock that stands still, which the progress line reads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: 1000.0))
        yield 1000.0


def line(width, shown, done=123, total=500, stage="sft", findings=""):
    """The progress line of a run that did its first `done` steps in a little more than 123 seconds."""
    progress = Progress(stage, total, "step", 0)
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    with still_clock() as now, console.capture() as capture:
        progress.done, progress.figures, progress.started = done, shown, now - 123.01
        progress.findings = findings
        console.print(progress)
    first, *others = capture.get().splitlines()
    assert all(len(text) <= width for text in (first, *others))
    assert " ".join(" ".join(others).split()) == (f"health: {findings}" if findings else "")
    return " ".join(first.split())


@pytest.mark.parametrize("shown", [SFT, PPO, []])
def test_steps_and_time_left_are_shown_at_any_width(shown):
    for width in (40, 60, 80, 100, 120, 200):
        assert re.match("sft ━+ *123/500 6:17 left", line(width, shown)), width
    assert line(24, shown) == "sft 123/500 6:17 left", "the bar makes room"


def test_80_columns_show_the_first_figures_and_120_all():
    assert line(80, SFT).endswith("6:17 left loss 1.23 held-out 1.31 grad norm 0.87")
    assert line(120, SFT).endswith("left loss 1.23 held-out 1.31 grad norm 0.87 lr 0.0005 tokens/s 25305")
    assert line(120, PPO, stage="ppo").endswith("left score -0.512 KL 1.23 length 25.4 entropy 0.355 1.0 s/step")


@pytest.mark.parametrize("findings", ["", "entropy_collapse (since iteration 3), kl_runaway (since iteration 5)" * 3])
@pytest.mark.parametrize(("done", "total"), [(1, 50), (123, 1000), (1234, 500_000)])
@pytest.mark.parametrize("stage", FIGURES)
@pytest.mark.parametrize("width", [80, 120])
def test_the_three_main_figures_are_always_there(width, stage, done, total, findings):
    """Also beside a run of half a million steps with half a day left, and whatever the health findings are."""
    text = line(width, FIGURES[stage], done, total, stage, findings)
    assert f"{done}/{total} " in text
    assert " ".join(FIGURES[stage][:3]) in text


def test_figures_are_dropped_from_the_right_and_never_skipped():
    """A short figure behind a long one must not take its place: which ones are shown would change with their values."""
    full = [f"{name} 0.{'1' * size}" for name, size in (("a", 3), ("b", 9), ("c", 15), ("d", 1))]
    for width in range(40, 140):
        shown = [figure for figure in full if figure in line(width, full)]
        assert shown == full[: len(shown)], width


def test_the_bar_grows_with_the_steps():
    def filled(done):
        return line(80, [], done, total=100).count("━")

    assert [filled(done) for done in (0, 50, 100)] == [0, 3, 6]
    assert line(80, [], 0, total=100).count("-:--") == 1


def test_a_resumed_run_estimates_the_time_from_its_own_steps():
    progress = Progress("sft", 100, "step", done=90)
    with still_clock() as now:
        progress.done, progress.started = 95, now - 10
        assert progress.seconds_left() == pytest.approx(10)
        assert progress.rate() == "2.0 s/step"


@pytest.mark.parametrize(("is_terminal", "quiet"), [(True, False), (False, False), (True, True)])
def test_a_terminal_shows_the_line_a_file_gets_plain_lines_and_quiet_shows_nothing(is_terminal, quiet):
    display = new_display(80, is_terminal=is_terminal, quiet=quiet)
    display.begin(2, "step")
    display.step(1, ["loss 2"])
    display.step(2, ["loss 1"])
    display.end()
    written = written_on(display)
    assert ("2/2  0:00 left  loss 1" in written) is not quiet
    assert all((character in written) is (is_terminal and not quiet) for character in "━\x1b")
    assert bool(written) is not quiet


# ------------------------------------------------------------------------------------------------------- health


def test_the_line_has_the_findings_that_hold_without_their_figures():
    display = new_display(80, is_terminal=True)
    display.begin(50, "iteration")
    shown = []
    for line in ("empty (since iteration 3), alike: score 1", "healthy: score 1"):
        display.health(line)
        shown.append(display._progress.findings)
    display.end()
    assert shown == ["empty (since iteration 3), alike", ""]


def test_the_recap_has_every_kind_of_finding_with_its_steps(tmp_path):
    def finding(name, message):
        return {"name": name, "severity": "warning", "message": message, "advice": f"Mend {name}"}

    weak = [finding("weak_reward_model", f"{name}: accuracy 0.55. It may be noise.") for name in ("a", "b")]
    rows = [
        {"step": 0, "line": None, "findings": weak},
        {"step": 1, "line": "weak_reward_model (from the start): score 1", "findings": []},
        {"step": 2, "line": "empty, weak_reward_model (from", "findings": [finding("empty", "30% are. Once.")]},
        {"step": 3, "line": "empty (since iteration 2): score 1", "findings": []},
        {"step": 4, "line": "empty (since iteration 2): score 1", "findings": [finding("empty", "90% are empty.")]},
        {"step": 4, "line": None, "findings": [finding("overoptimisation", "Gold fell.")]},
    ]
    (tmp_path / "health.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    display = new_display(200, is_terminal=False)
    display.begin(4, "iteration")
    display.recap(findings_of(tmp_path))
    assert written_on(display).splitlines() == [
        "ppo: this run had 3 kinds of warnings:",
        "  weak_reward_model, 2 iterations (1 to 2): a: accuracy 0.55; b: accuracy 0.55.",
        "    To try: Mend weak_reward_model",
        "  empty, 3 iterations (2 to 4): 90% are empty.",
        "    To try: Mend empty",
        "  overoptimisation, iteration 4: Gold fell.",
        "    To try: Mend overoptimisation",
    ]


# --------------------------------------------------------------------------------------------- a run in progress


def test_a_checkpoint_keeps_the_held_out_figures_of_the_screen(tmp_path):
    files = StageFiles(tmp_path, writes=True)
    files.latest = {"loss/sft": 2.0, "eval/loss": 1.5}
    _, numbers = files.state()
    resumed = StageFiles(tmp_path, writes=True)
    resumed.restore({}, numbers)
    assert resumed.latest == {"eval/loss": 1.5}


def test_the_last_row_of_a_file_that_is_being_written(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    assert last_row(path) is None
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "los')
    assert last_row(path) == {"step": 2}
    monkeypatch.setattr(files, "LAST_BYTES", 20)
    path.write_text('{"step": 1}\n' * 1000 + '{"step": 7}\n')
    assert last_row(path) == {"step": 7}


# --------------------------------------------------------------------------------------------------- the end of PPO


def written_on(display):
    assert isinstance(display.console.file, io.StringIO)
    return display.console.file.getvalue()


def new_display(width, *, is_terminal, quiet=False):
    console = Console(
        file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None, soft_wrap=not is_terminal
    )
    return Display("ppo", quiet=quiet, console=console)


def test_the_final_table_shows_no_seconds_and_no_rounding_errors():
    display = new_display(80, is_terminal=False)
    sft, ppo = ({"score_mean": x, "kl": kl, "seconds": 2.0} for x, kl in ((0.1, -3e-7), (0.0009, 2.5391)))
    display.before_and_after({"num_prompts": 3, "sft": sft, "ppo": ppo, "examples": []})
    rows = [line.split() for line in written_on(display).splitlines()]
    assert ["score_mean", "0.100", "0.001"] in rows
    assert ["kl", "0", "2.539"] in rows
    assert "seconds" not in written_on(display)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_exchange_is_wrapped_and_indented_on_a_terminal_and_one_line_each_in_a_file(is_terminal):
    reply = "word " * 30
    display = new_display(40, is_terminal=is_terminal)
    display.exchange("A prompt\nof two lines :smile: [b]", {"PPO": reply})
    first, *lines = [line.rstrip() for line in written_on(display).splitlines()]
    assert first == "  A prompt of two lines :smile: [b]"
    assert (len(lines) > 3) is is_terminal
    assert all(line.startswith("    ") and (len(line) <= 40 or not is_terminal) for line in lines)
    assert " ".join(" ".join(lines).split()) == f"PPO> {reply.strip()}"


def test_notes_are_printed_once_and_without_empty_ones(capsys):
    Display("ppo", quiet=False).notes("held in bfloat16", None, "slow layers", "", "held in bfloat16")
    assert capsys.readouterr().out == "ppo: held in bfloat16\nppo: slow layers\n"
