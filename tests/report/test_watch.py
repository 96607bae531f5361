"""`rlhf watch`: what it shows of a run, while it is written and after."""

import io
import os
import re
import shutil
from unicodedata import east_asian_width

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.commands.watch import ASCII_BLOCKS, Watched, _screen, sparkline, watch
from rlhf_cli.files import Tail
from rlhf_cli.run.lock import Lock
from rlhf_cli.run.state import state_of
from support.projects import rlhf
from support.tiny import write_jsonl as write


@pytest.fixture
def run(tmp_path):
    """A finished SFT stage, and a PPO stage that is running."""
    lock = Lock(tmp_path / "run", "ppo")
    lock.acquire()
    write(tmp_path / "run" / "sft" / "manifest.json", [{}])
    write(tmp_path / "run" / "sft" / "metrics.jsonl", [{"step": 1, "loss/sft": 2.0}, {"step": 2, "loss/sft": 1.0}])
    ppo = tmp_path / "run" / ".ppo.partial"
    write(
        ppo / "metrics.jsonl",
        [{"step": i, "objective/score": i / 10, "objective/kl": -8.631e-05, "time/elapsed_s": i} for i in range(1, 13)],
    )
    write(ppo / "health.jsonl", [{"step": 12, "line": "healthy: score 1.2", "findings": []}])
    write(ppo / "samples.jsonl", [{"step": 12, "prompt": "Where is [b]my\n\ntent?", "response": "Here \x1b[31mit is."}])
    write(tmp_path / "run" / ".ppo.checkpoints" / "total.json", [{"total": 50}])
    yield tmp_path / "run"
    lock.release()


def finish(run):
    (run / ".ppo.partial").rename(run / "ppo")
    (run / ".ppo.lock").unlink()
    (run / "ppo" / "manifest.json").touch()


def shown(run, width=80, **options):
    console = Console(file=io.StringIO(), width=width, highlight=False, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhf_cli.commands.watch.Console", lambda: console)
        watch([run])
    return console.file.getvalue()


def test_a_running_stage_shows_steps_curves_health_and_samples(run):
    text = shown(run)
    assert "run ppo  12/50  0:38 left" in text
    assert "run sft  2/2  finished" in text
    assert "1.2 ▁▁▂" in text
    score, kl = (next(line for line in text.splitlines() if f"  {name} " in line) for name in ("score", "KL"))
    assert score.index("▁") == kl.index("▄")
    assert "healthy" not in text, "its figures are in the rows above"
    assert "Where is [b]my tent?" in text
    assert "held-out loss" not in text
    assert "\x1b[31m" not in text, "an escape of a sample does not reach the terminal"


def test_a_finished_run_shows_the_latest_samples_of_its_last_stage_and_a_health_finding(run):
    finish(run)
    write(run / "ppo" / "health.jsonl", [{"step": 12, "line": "kl_runaway: KL 90", "findings": []}], "a")
    text = shown(run)
    assert "run ppo  12/12  finished" in text
    assert "> Here" in text
    assert "kl_runaway: KL 90" in text


def test_a_running_stage_that_writes_nothing_for_minutes_says_so(run):
    path = run / ".ppo.partial" / "metrics.jsonl"
    os.utime(path, (0, path.stat().st_mtime - 605))
    assert re.search(r"run ppo  12/50  no new row for 1\d:\d\d", shown(run))


def test_many_runs_fit_the_terminal_and_every_run_is_named(run, tmp_path):
    """The more runs, the fewer details; what does not fit even on one line each is counted."""
    console = Console(file=io.StringIO(), width=80, highlight=False)
    runs = [run]
    for number in range(2, 9):
        runs.append(shutil.copytree(run, tmp_path / f"run{number}"))

    def lines(height, count):
        stages = [Watched(root, root.name, stage) for root in runs[:count] for stage in ("sft", "ppo")]
        with console.capture() as capture:
            console.print(_screen(stages, console, height=height))
        return capture.get().splitlines()

    for height, count in ((24, 1), (24, 2), (24, 5), (24, 8), (8, 8)):
        text = lines(height, count)
        assert len(text) <= height
        assert all(any(line.startswith(f"{root.name} ppo") for line in text) for root in runs[:count])
    assert "> Here" in "".join(lines(24, 2))
    assert lines(6, 8)[-1] == "and 3 more; enlarge the terminal"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(run, width):
    assert max(len(line.rstrip()) for line in shown(run, width).splitlines()) <= width


@pytest.mark.parametrize(("width", "rest"), [(40, " ..."), (80, "")])
def test_a_sample_of_wide_characters_takes_two_columns_for_each(run, width, rest):
    row = {"step": 13, "prompt": "天空是什么颜色" * 10 + "！", "response": "蓝"}
    write(run / ".ppo.partial" / "samples.jsonl", [row])
    lines = [line.rstrip() for line in shown(run, width).splitlines() if "天" in line]
    cells = [sum(1 + (east_asian_width(character) in ("W", "F")) for character in line) for line in lines]
    assert cells == {40: [40, 40, 40], 80: [80, 66]}[width]
    assert "".join(line.strip() for line in lines).removesuffix(rest) == row["prompt"][: 55 if rest else None]


def test_only_new_rows_are_read_and_a_half_written_one_waits(tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, [{"step": 1}])
    tail = Tail(path)
    assert tail.new() == (True, [{"step": 1}])
    with path.open("a") as file:
        file.write('{"step": 2}\n{"ste')
    assert tail.new() == (False, [{"step": 2}])
    with path.open("a") as file:
        file.write('p": 3}\n')
    assert tail.new() == (False, [{"step": 3}])
    write(path, [{"step": 9}])
    assert tail.new() == (True, [{"step": 9}])


def test_a_stage_that_finishes_keeps_its_curve(run):
    stage = Watched(run, "run", "ppo")
    stage.update()
    finish(run)
    write(run / "ppo" / "metrics.jsonl", [{"step": 13, "objective/score": 2.0}], "a")
    stage.update()
    assert stage.words() == "13/13  finished"
    assert stage.curves["objective/score"] == [*(i / 10 for i in range(1, 13)), 2.0]


def test_sparklines_without_unicode_and_of_nothing():
    assert sparkline([0.0, 1.0], 5, ASCII_BLOCKS) == "_#"
    assert sparkline([float("nan"), float("inf")], 5) == ""
    assert sparkline([1.0, 2.0], 0) == "", "a name may take the whole line"
    assert len(sparkline(list(range(1000)), 37)) == 37


def test_the_command_prints_once_into_a_pipe(run, tmp_path):
    result = rlhf("watch", run)
    assert "12/50" in result.output
    rlhf("watch", tmp_path / "missing", code=2)
    (tmp_path / "empty" / "sft").mkdir(parents=True)
    assert state_of(tmp_path / "empty", "sft").name == "not run", "it has no manifest"
    assert "no stage has metrics yet" in CliRunner().invoke(app, ["watch", str(tmp_path / "empty")]).output
