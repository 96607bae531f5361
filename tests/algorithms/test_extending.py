"""The diffs of docs/extending.md apply and run. A name that is added alone fails type checking and at run time."""

import re
import shutil
import subprocess
import sys

import pytest

from support.forked import Forked
from support.paths import ROOT

PAGE = ROOT / "docs/extending.md"
CHECKED = ("stages/ppo.py", "rlhf_cli/algorithms", "rlhf_cli/config/ppo.py")
"""Files that mypy checks. Every dispatch over a name of names.py is in these or in FURTHER."""
FURTHER = (
    "rlhf_cli/config/base.py",
    "rlhf_cli/ppo/setup.py",
    "rlhf_cli/ppo/update.py",
    "rlhf_cli/ppo/scores.py",
)


def copy_of_code(folder):
    for package in ("rlhf_cli", "stages"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def apply(diff, folder, only=""):
    """Apply a unified diff to the files whose name contains `only`. The old lines of a hunk must occur exactly once."""
    for part in re.split(r"^--- a/\S+\n", diff, flags=re.M)[1:]:
        name = part.split("\n", 1)[0].removeprefix("+++ b/")
        if only not in name:
            continue
        text = (folder / name).read_text(encoding="utf-8")
        for hunk in re.split(r"^@@ .*\n", part, flags=re.M)[1:]:
            lines = [line or " " for line in hunk.rstrip("\n").split("\n")]
            old, new = ("\n".join(x[1:] for x in lines if x[0] in kept) + "\n" for kept in (" -", " +"))
            assert text.count(old) == 1, f"a hunk of docs/extending.md does not match {name}:\n{old}"
            text = text.replace(old, new)
        (folder / name).write_text(text, encoding="utf-8")


def diffs():
    return re.findall(r"^```diff\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)


def mypy(folder):
    """The errors that mypy reports."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", "--follow-imports=skip"]
    options = ["--ignore-missing-imports", "--check-untyped-defs", "--no-namespace-packages", "--cache-dir=/dev/null"]
    result = subprocess.run([*command, *options, *CHECKED, *FURTHER], cwd=folder, capture_output=True, text=True)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    return [line for line in result.stdout.splitlines() if ": error:" in line]


def run(folder, code):
    """Run code that imports the copy; return the exit code and the output."""
    return Forked(code, folder=folder, log=folder / "log", code_here=True).wait()


ESTIMATOR = """
import torch
from types import SimpleNamespace
from rlhf_cli.processes.distributed import World
import stages.ppo
assert stages.ppo.__file__.startswith({folder!r}), stages.ppo.__file__
ppo = SimpleNamespace(advantage_estimator="median", gamma=1.0, whitens_advantages=False)
config = SimpleNamespace(ppo=ppo, num_prompts=1, rollout=SimpleNamespace(samples_per_prompt=3))
rewards = torch.tensor([[1.0, 1.0], [5.0, 0.0], [90.0, 0.0]])
mask = torch.tensor([[True, True], [True, False], [True, False]])
world = World(0, 1, torch.device("cpu"))
print(stages.ppo._advantages(rewards, torch.zeros(3, 2), mask, config, world)[0].tolist())
"""
KL = """
import torch
import rlhf_cli.algorithms.kl
from rlhf_cli.algorithms.kl import kl_estimate
assert rlhf_cli.algorithms.kl.__file__.startswith({folder!r}), rlhf_cli.algorithms.kl.__file__
print(kl_estimate(torch.tensor([0.0, 0.0]), torch.tensor([0.0, 9.0]), estimator="k3_clamped").tolist())
"""
EXAMPLES = {
    "an estimator": (0, ESTIMATOR, "[[-3.0, -3.0], [0.0, 0.0], [85.0, 0.0]]"),
    "a KL": (1, KL, "[0.0, 10.0]"),
}


def test_the_two_diffs_of_the_page_apply_and_type_check(tmp_path):
    estimator, kl = diffs()
    folder = copy_of_code(tmp_path)
    for diff in (estimator, kl):
        apply(diff, folder)
    assert mypy(folder) == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_each_example_runs_and_raises_where_only_its_name_was_added(example, tmp_path):
    number, code, expected = EXAMPLES[example]
    for only, ending in (("names.py", "Expected code to be unreachable"), ("", expected)):
        folder = copy_of_code(tmp_path / f"copy {only}")
        apply(diffs()[number], folder, only)
        exit_code, output = run(folder, code.format(folder=str(folder)))
        assert (exit_code == 0) == (not only), output
        assert ending in output.strip().splitlines()[-1]
