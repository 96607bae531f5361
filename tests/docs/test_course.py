"""The course: its figures are there, and each planted fault is the one that the solution names and is found."""

import contextlib
import io
import re
import shutil

import pytest

from support.faults import FAULTS
from support.forked import Forked
from support.paths import ROOT

COURSE = ROOT / "docs" / "course"
LESSONS = sorted(COURSE.glob("[0-9]*.md"))
SOLUTIONS = re.split(r"^## Lesson \d\n", (COURSE / "solutions.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
PLANTED = dict(re.findall(r"^    (\d): \"(\w+)\",$", (COURSE / "lesson.py").read_text(encoding="utf-8"), re.MULTILINE))
CHANGE = r"In `([\w/]+\.py)` .*?```diff\n-(.*?)\n\+(.*?)\n```\n\nRun `python (-m pytest -q [\w/.]+)`"


def change_of(lesson):
    """File, old line, new line and test command of a lesson's first exercise."""
    match = re.search(CHANGE, lesson.read_text(encoding="utf-8"), re.DOTALL)
    assert match, f"{lesson.name}: its first exercise has another form"
    return match[1], match[2], match[3], match[4].split()


def test_there_are_eight_lessons_with_two_solutions_each():
    assert [lesson.name[:2] for lesson in LESSONS] == [f"{n:02}" for n in range(1, 9)]
    assert [re.findall(r"^\*\*(\d\.\d)\*\*", text, re.MULTILINE) for text in SOLUTIONS] == [
        [f"{n}.1", f"{n}.2"] for n in range(1, 9)
    ]


@pytest.mark.parametrize("number", range(1, 9))
def test_a_lesson_has_its_figure_and_two_exercises(number):
    text = LESSONS[number - 1].read_text(encoding="utf-8")
    assert f"]({number}.svg)" in text
    assert f"`python docs/course/lesson.py figure {number}`" in text
    assert f"**{number}.2** `python docs/course/lesson.py plant {number}`" in text
    file, old, new, _ = change_of(LESSONS[number - 1])
    assert (ROOT / file).read_text(encoding="utf-8").splitlines().count(old) == 1, "the line of the exercise"
    assert new != old


@pytest.mark.parametrize("number", range(1, 9))
def test_the_solution_names_the_cause_of_the_planted_run(number):
    assert re.search(r"^\*\*\d\.2\*\* `(\w+)`:", SOLUTIONS[number - 1], re.MULTILINE)[1] == (
        FAULTS[PLANTED[str(number)]].cause
    )


TEST = """
import sys
for name in [name for name in sys.modules if name.startswith(("support", "test_"))]:
    del sys.modules[name]
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 9))
def test_the_test_of_the_solution_sees_the_change(number, tmp_path):
    """It passes without the change, in the suite itself."""
    file, old, new, (_, _, *options) = change_of(LESSONS[number - 1])
    named = re.search(r"`(test_\w+)(\.py)?`", SOLUTIONS[number - 1])
    assert named
    for folder in ("rlhf_cli", "stages", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / file).write_text((tmp_path / file).read_text("utf-8").replace(f"{old}\n", f"{new}\n"), "utf-8")
    only = [] if named[2] else ["-k", named[1]]
    test = Forked(TEST, *options, *only, "-x", "--noconftest", folder=tmp_path, log=tmp_path / "log", code_here=True)
    code, output = test.wait()
    assert (code, "1 failed" in output, "error" in output.splitlines()[-1]) == (1, True, False), output[-2000:]


def test_the_example_of_the_kl_article_prints_what_the_page_says():
    page = (ROOT / "docs" / "kl.md").read_text(encoding="utf-8")
    code, stated = re.search(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL).groups()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "kl.md", "exec"), {})
    assert printed.getvalue() == stated
