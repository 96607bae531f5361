"""Settings that a user's code changes for the whole process: they apply to its own calls, never to the training."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhf_cli.errors import ConfigError, RewardError
from rlhf_cli.processes.signals import StopRequests, discard_output_of_closed
from rlhf_cli.rewards import guard
from rlhf_cli.rewards.base import total_score
from rlhf_cli.rewards.functions import load_function
from support.rewards import batch, source_of

IMPORTS = "import os, signal\nimport torch\n"


@pytest.fixture(autouse=True)
def _no_earlier_user(monkeypatch):
    monkeypatch.setattr(guard, "_kept", {})


def handler():
    return signal.getsignal(signal.SIGTERM)


CHANGES = {
    "gradients": ("torch.set_grad_enabled(False)", torch.is_grad_enabled),
    "inference mode": ("mode = torch.inference_mode(); mode.__enter__()", torch.is_inference_mode_enabled),
    "default dtype": ("torch.set_default_dtype(torch.float64)", torch.get_default_dtype),
    "default device": ("torch.set_default_device('meta')", torch.get_default_device),
    "threads": ("torch.set_num_threads(3)", torch.get_num_threads),
    "precision of products": ("torch.set_float32_matmul_precision('medium')", torch.get_float32_matmul_precision),
    "determinism": ("torch.use_deterministic_algorithms(True)", torch.are_deterministic_algorithms_enabled),
    "anomaly mode": ("torch.autograd.set_detect_anomaly(True)", torch.is_anomaly_enabled),
    "directory": ("os.chdir('/')", Path.cwd),
    "signals": ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", handler),
}


@pytest.mark.parametrize("when", ["at import", "in a call", "in an async call", "before an error"])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_settings_of_user_code_do_not_reach_the_training(tmp_path, name, when):
    change, read = CHANGES[name]
    inside = {"at import": "0", "before an error": f"{change}\n    raise ValueError"}.get(when, change)
    start = "async def" if when == "in an async call" else "def"
    first = change if when == "at import" else ""
    body = f"{IMPORTS}{first}\n{start} f(prompts, responses, rows):\n    {inside}\n    return [1.0 for _ in rows]\n"
    (tmp_path / "reward.py").write_text(body)
    before = read()
    source = source_of({"type": "function", "function": f"{tmp_path}/reward.py:f", "on_error": "zero"})
    assert read() == before
    for _ in range(2):
        scores = total_score([source], batch(["x", "y"]))
        assert list(scores.errors.values()) == [2 if when == "before an error" else 0]
        assert read() == before


def test_user_code_keeps_what_it_sets(tmp_path):
    (tmp_path / "reward.py").write_text(
        f"{IMPORTS}os.chdir({str(tmp_path)!r}); torch.set_default_dtype(torch.float64)\n"
        "def f(prompts, responses, rows):\n"
        "    assert torch.get_default_dtype() == torch.float64 and os.path.isfile('reward.py')\n"
        "    return [1.0 for _ in rows]\n"
    )
    source = source_of({"type": "function", "function": f"{tmp_path}/reward.py:f"})
    for _ in range(2):
        assert source.score(batch(["x", "y"])).tolist() == [1.0, 1.0]


def test_user_code_that_sets_nothing_follows_the_process(tmp_path, monkeypatch):
    (tmp_path / "reward.py").write_text(
        "import os\ndef f(prompts, responses, rows):\n    return [len(os.getcwd()) for _ in rows]\n"
    )
    source = source_of({"type": "function", "function": f"{tmp_path}/reward.py:f"})
    for directory in ("/", str(tmp_path)):
        monkeypatch.chdir(directory)
        assert source.score(batch(["x"])).item() == len(directory)


# ------------------------------------------------------------------------------------------- exits

EXITS = {
    "sys.exit(0)": "SystemExit: 0",
    "raise SystemExit": "SystemExit",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "raise asyncio.CancelledError": "CancelledError",
    "raise GeneratorExit": "GeneratorExit",
}


@pytest.fixture
def in_a_stage():
    """The signal handlers of a stage: Ctrl-C raises no KeyboardInterrupt by itself."""
    requests = StopRequests()
    requests.install()
    yield requests
    requests.remove()


@pytest.mark.parametrize(
    ("statement", "is_async"),
    # asyncio closes coroutines with GeneratorExit.
    [(text, is_async) for text in EXITS for is_async in (False, True) if not (is_async and "Generator" in text)],
)
@pytest.mark.usefixtures("in_a_stage")
def test_an_exit_from_a_function_is_an_error_of_the_function(function, statement, is_async):
    body = f"import sys\nif rows[0]['n'] == 2: {statement}\nreturn [1.0 for _ in rows]"
    settings = {"is_async": is_async, "batch_size": 2}
    with pytest.raises(RewardError, match=rf"responses 3 to 4: raised {re.escape(EXITS[statement])} \(f0.py:5\)"):
        source_of(function(body, **settings)).score(batch(["x"] * 5))
    source = source_of(function(body, on_error="zero", **settings))
    assert total_score([source], batch(["x"] * 5)).errors == {"f": 2}


@pytest.mark.parametrize("statement", ["sys.exit(0)", "raise KeyboardInterrupt"])
@pytest.mark.usefixtures("in_a_stage")
def test_an_exit_at_import_is_an_error_of_the_file(tmp_path, statement):
    (tmp_path / "reward.py").write_text(f"import sys\n{statement}\n")
    with pytest.raises(ConfigError, match=r"reward.py: cannot be imported \((SystemExit: 0|KeyboardInterrupt: )\)"):
        load_function(f"{tmp_path}/reward.py:f")


@pytest.mark.parametrize("is_async", [False, True])
def test_a_second_signal_during_a_call_stops_immediately(function, in_a_stage, is_async):
    body = "import signal\nsignal.raise_signal(signal.SIGTERM)\nsignal.raise_signal(signal.SIGINT)\nreturn [1.0]"
    with pytest.raises(KeyboardInterrupt):
        source_of(function(body, is_async=is_async, on_error="zero")).score(batch(["x"]))
    assert in_a_stage.received == signal.SIGTERM


@pytest.mark.usefixtures("in_a_stage")
def test_a_child_process_of_the_code_ends_by_sigterm_and_ignores_its_terminal(function):
    """As those of a `multiprocessing.Pool` do. With our handlers it would live on, and a wait for it never end."""
    body = """import os, signal
pid = os.fork()
if not pid:
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGHUP):
        signal.raise_signal(number)
    signal.raise_signal(signal.SIGTERM)
    os._exit(7)
return [float(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))]"""
    assert total_score([source_of(function(body))], batch(["x"])).total.tolist() == [-signal.SIGTERM]


HOSTILE = """class Hostile(Exception):
    def __str__(self): raise SystemExit(0)
    __repr__ = __float__ = __iter__ = __str__
"""


@pytest.mark.parametrize("statement", ["raise Hostile", "return [Hostile() for _ in rows]", "return Hostile()"])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.usefixtures("in_a_stage")
def test_objects_of_the_code_whose_conversion_raises_are_errors_of_the_function(function, statement, per_token):
    """SystemExit would end the command with code 0 and publish nothing."""
    source = source_of(function(f"{HOSTILE}{statement}", per_token=per_token))
    with pytest.raises(RewardError, match=r"rows.jsonl:3.*raised \w+.* \(f0.py:\d+\)"):
        total_score([source], replace(batch(["x"]), response_ids=[[1]]))


def test_two_files_with_modules_of_the_same_name_are_refused(tmp_path):
    """Python would give the second file the module of the first one."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "module_of_both.py").write_text(f"VALUE = {folder!r}\n")
        (tmp_path / folder / "reward.py").write_text("from module_of_both import VALUE\ndef f(*_):\n    return VALUE\n")
    for _ in range(2):
        assert load_function(f"{tmp_path}/one/reward.py:f")() == "one"
    with pytest.raises(ConfigError, match=r"two/reward.py: imports module_of_both, which was imported from .*/one/mod"):
        load_function(f"{tmp_path}/two/reward.py:f")


# ------------------------------------------------------------------------------------------- a closed terminal


@pytest.fixture
def hangup():
    """SIGHUP as a terminal's program has it, also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
def test_output_to_a_closed_terminal_is_discarded(in_a_stage):
    """After SIGHUP the run still has to print and save; an open terminal stays."""
    files = SimpleNamespace(open=os.openpty(), closed=os.openpty())
    os.close(files.closed[0])
    discard_output_of_closed([files.open[1], files.closed[1]])
    assert os.write(files.closed[1], b"text") == 4
    assert os.isatty(files.open[1])
    signal.raise_signal(signal.SIGHUP)
    assert in_a_stage.received == signal.SIGHUP
    for file in (*files.open, files.closed[1]):
        os.close(file)


def test_a_run_under_nohup_does_not_stop_at_the_end_of_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    requests = StopRequests()
    requests.install()
    signal.raise_signal(signal.SIGHUP)
    requests.remove()
    assert requests.received is None
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN
