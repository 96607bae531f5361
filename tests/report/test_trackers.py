"""Trackers get the rows of the files once, also across an interruption, and never stop a run."""

from __future__ import annotations

import importlib
import importlib.util
import json
import time
from typing import Any, ClassVar

import pytest

from rlhf_cli.config.by_stage import load_stage_config
from rlhf_cli.errors import ArtifactError, Interrupted
from rlhf_cli.files import JsonLines
from rlhf_cli.processes.signals import SecondSignal
from rlhf_cli.report import trackers as module
from rlhf_cli.report.progress import Display
from rlhf_cli.report.trackers import FILES, TRACKERS, Trackers
from rlhf_cli.run import artifacts
from rlhf_cli.run.stage_run import StageRun
from support.crash import wait_for
from support.paths import ROOT
from support.resume import ask_to_stop
from support.tiny import read_jsonl

FINDING = {"name": "length_grows", "severity": "warning", "message": "replies grow.", "advice": "lower the reward."}
STEPS = list(range(1, 8))


class Recorder:
    """A tracker that keeps what it gets, in the class: a resumed run adds to it."""

    calls: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, run, id):
        self.calls.append(("open", f"{run.name}/{run.stage}", id))
        self.id, self.url = "run-1", "here"

    def metrics(self, step, values):
        self.calls.append(("metrics", step, dict(values)))

    def samples(self, step, rows):
        self.calls.append(("samples", step, [row["response"] for row in rows]))

    def alert(self, step, finding, _text):
        self.calls.append(("alert", step, finding["name"]))

    def close(self, status):
        self.calls.append(("close", status))


class Fails(Recorder):
    def metrics(self, *_):
        raise SystemExit("the server said no")


class Hangs(Recorder):
    def metrics(self, *_):
        time.sleep(600)


def failing(error):
    """A tracker that cannot be created."""

    def create(*_):
        raise error

    return create


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The directory of a run that has begun; the trackers write below it."""
    for name in (".sft.partial", ".sft.checkpoints"):
        (tmp_path / "run" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(Recorder, "calls", [])
    monkeypatch.setattr(module, "SECONDS_TO_CLOSE", 120)  # a tracker's package may be slow to import
    return tmp_path / "run"


def trackers_of(root, name, monkeypatch, service=None):
    if service is not None:
        monkeypatch.setitem(TRACKERS, name, service)
    overrides = [f"artifacts={root}", f"trackers=[{name}]"]
    config = load_stage_config("sft", ROOT / "configs" / "support" / "sft.yaml", overrides)
    return Trackers("sft", config, Display("sft", quiet=True))


def write(root, steps, trackers=None):
    """The rows of these steps: metrics, a sample, and a finding in step 3. Trackers that have begun get them too."""
    for step in steps:
        rows = {
            "metrics": {"step": step, "loss/sft": 1 / step, "eval/nan": float("nan"), "time/elapsed_s": 1.0},
            "evaluations": {"step": step, "score": 2.0 * step},
            "samples": {"step": step, "prompt": "Hello | you", "response": f"reply {step}", "score": 0.5},
            "health": {"step": step, "line": "healthy", "findings": [FINDING] if step == 3 else []},
        }
        for name, row in rows.items():
            file = JsonLines(root / ".sft.partial" / f"{name}.jsonl")
            written = file.write(row)
            file.close()
            if trackers is not None:
                trackers.send(name, written)


def cut(root, num_steps):
    """What a resumed run does first: remove the rows after the checkpoint."""
    for name in FILES:
        path = root / ".sft.partial" / f"{name}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:num_steps]))


def interrupted_and_resumed(root, name, monkeypatch, service=None):
    """Five steps, a crash, and the rest from the checkpoint of step 3."""
    first = trackers_of(root, name, monkeypatch, service)
    write(root, STEPS[:5])
    first.start()
    first.close("failed")
    cut(root, 3)
    second = trackers_of(root, name, monkeypatch, service)
    second.start()
    write(root, STEPS[3:], second)
    second.close("finished")


def test_each_row_is_sent_once_in_the_order_of_the_steps(root, monkeypatch):
    interrupted_and_resumed(root, "wandb", monkeypatch, Recorder)
    calls = Recorder.calls
    assert [call for call in calls if call[0] == "open"] == [("open", "run/sft", None), ("open", "run/sft", "run-1")]
    metrics = [call[1:] for call in calls if call[0] == "metrics"]
    numbers = [({"loss/sft": 1 / step, "time/elapsed_s": 1.0}, {"evaluation/score": 2.0 * step}) for step in STEPS]
    expected = [(step, row) for step, pair in zip(STEPS, numbers, strict=True) for row in pair]
    assert metrics == expected
    assert [call[1:] for call in calls if call[0] == "samples"] == [(step, [f"reply {step}"]) for step in STEPS]
    assert [call[1:] for call in calls if call[0] == "alert"] == [(3, "length_grows")]
    assert [call[1] for call in calls if call[0] == "close"] == ["failed", "finished"]
    steps = [call[1] for call in calls if call[0] in ("metrics", "samples", "alert")]
    assert steps == sorted(steps)


@pytest.mark.parametrize(
    ("service", "seconds", "words"),
    [
        (Fails, 120, "wandb: is off, the run continues without it (SystemExit: the server said no)"),
        (Hangs, 0.2, "wandb: did not answer for 0.2 s; 0 of 28 rows arrived there. The files of the stage have all"),
        (failing(OSError(f"{'The store is old. ' * 12}Set STORE=sqlite")), 120, "The store is old. Set STORE=sqlite)"),
        (failing(ModuleNotFoundError("No wandb")), 120, "cannot be imported (No wandb), so it is off. Run: "),
    ],
)
def test_a_tracker_that_fails_or_hangs_is_one_warning(root, monkeypatch, capsys, service, seconds, words):
    monkeypatch.setattr(module, "SECONDS_TO_CLOSE", seconds)
    trackers = trackers_of(root, "wandb", monkeypatch, service)
    trackers.start()
    write(root, STEPS, trackers)
    trackers.close("finished")
    trackers.close("failed")
    output = " ".join(capsys.readouterr().out.split())
    assert words in output
    assert output.count("warning") == 1
    assert ("pip install -e '" in output and "[wandb]'" in output) is ("Run: " in words)


def test_a_second_signal_does_not_wait_for_a_tracker(tmp_path, monkeypatch, make_model, run_stage):
    monkeypatch.setitem(TRACKERS, "wandb", Hangs)
    monkeypatch.setattr(module, "SECONDS_TO_CLOSE", 120)
    began = []

    def stop(*_):
        began.append(time.monotonic())
        raise SecondSignal

    monkeypatch.setattr(StageRun, "finish_step", stop)
    with pytest.raises(KeyboardInterrupt):
        run_stage("sft", tmp_path, model={"path": str(make_model("llama"))}, trackers=["wandb"])
    assert time.monotonic() - began[0] < 60


def test_a_run_that_is_resumed_with_fewer_evaluations_misses_no_step(root, monkeypatch):
    """Rows have other numbers in the file then. After a crash in step 5 it continues from the checkpoint of step 3."""
    Recorder.calls.clear()
    for first, last, resumes in ((1, 5, False), (4, 8, True)):
        path = root / ".sft.partial" / "metrics.jsonl"
        if resumes:
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:6]))
        trackers = trackers_of(root, "wandb", monkeypatch, Recorder)
        trackers.start()
        file = JsonLines(path)
        for step in range(first, last + 1):
            for row in [{"loss/sft": 1.0}, *[{"eval/loss": 1.0}] * (not resumes)]:
                trackers.send("metrics", file.write({"step": step, **row}))
        file.close()
        trackers.close("finished")
    sent = [(step, *row) for kind, step, row in [call for call in Recorder.calls if call[0] == "metrics"]]
    evaluated = [(step, name) for step in range(1, 6) for name in ("loss/sft", "eval/loss")]
    assert sent == [*evaluated, *((step, "loss/sft") for step in range(6, 9))]


def test_a_stage_sends_what_it_writes_and_resumes_its_run(tmp_path, monkeypatch, make_model, run_stage):
    monkeypatch.setattr(Recorder, "calls", [])
    monkeypatch.setitem(TRACKERS, "wandb", Recorder)
    settings = {
        "model": {"path": str(make_model("llama"))},
        "training": {"num_steps": 4},
        "trackers": ["wandb"],
        "evaluation": {"num_samples": 1, "every_steps": 2},
    }
    with monkeypatch.context() as patch:
        patch.setattr(StageRun, "publish", lambda *_: ask_to_stop(None))
        with pytest.raises(Interrupted):
            run_stage("sft", tmp_path, **settings, checkpoints={"every_steps": 3})
    with monkeypatch.context() as patch:
        patch.setattr(artifacts, "publish", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(ArtifactError):
            run_stage("sft", tmp_path, **settings)
    directory = run_stage("sft", tmp_path, **settings)
    assert [call for call in Recorder.calls if call[0] == "open"][1][2] == "run-1"
    assert [call[1] for call in Recorder.calls if call[0] == "close"] == ["stopped", "failed", "finished"]
    rows = [(row.pop("step"), row) for row in read_jsonl(directory / "metrics.jsonl")]
    sent = [call[1:] for call in Recorder.calls if call[0] == "metrics"]
    assert [(step, row.keys()) for step, row in sent] == [(step, row.keys()) for step, row in rows]


def tensorboard_points(root):
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(root / "tensorboard" / "sft"))
    events.Reload()
    tags = events.Tags()
    scalars = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in tags["scalars"]}
    return scalars, {name: [event.step for event in events.Tensors(name)] for name in tags["tensors"]}


def test_tensorboard_has_every_step_once(root, monkeypatch):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    interrupted_and_resumed(root, "tensorboard", monkeypatch)
    scalars, texts = tensorboard_points(root)
    assert scalars["loss/sft"] == [(step, pytest.approx(1 / step)) for step in STEPS]
    assert [step for step, _ in scalars["evaluation/score"]] == STEPS
    assert texts["samples/text_summary"] == STEPS
    assert texts["health/length_grows/text_summary"] == [3]
    assert texts["config/text_summary"] == [0]


def wandb_records(path):
    """The records of an offline run's file, which has the log format of LevelDB: blocks of 32 KB."""
    record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    data, position, parts, found = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(record.FromString(parts))
            parts = b""
    return found


@pytest.mark.slow
def test_wandb_offline_has_every_step_once_in_one_run(root, monkeypatch):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    interrupted_and_resumed(root, "wandb", monkeypatch)
    files = sorted((root / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    assert len({path.name for path in files}) == 1, "the same run id"
    # W&B's own process writes the files, and may end after ours is told so.
    wait_for(lambda: all(any(record.HasField("exit") for record in wandb_records(path)) for path in files), every=0.1)
    records = [record for path in files for record in wandb_records(path)]
    points, tables = [], []
    for record in records:
        values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        if "loss/sft" in values:
            points.append((record.history.step.num, values["loss/sft"]))
        if any(key.startswith("samples") for key in values):
            tables.append(record.history.step.num)
    assert points == [(step, pytest.approx(1 / step)) for step in STEPS]
    assert tables == STEPS
    assert [record.alert.title for record in records if record.HasField("alert")] == ["sft: length_grows"]
    config = {item.key for record in records for item in record.run.config.update}
    assert {"optimizer", "training", "seed"} <= config
