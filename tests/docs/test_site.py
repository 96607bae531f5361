"""The site: every page is in its navigation, no link is broken, and it loads nothing from another host."""

import json
import re
import subprocess
import sys

import pytest

from support.forked import Forked
from support.paths import ROOT

DOCS = ROOT / "docs"
LESSONS = sorted(path.stem for path in (DOCS / "course").glob("[0-9]*.md"))


def test_the_start_page_links_to_every_page():
    linked = re.findall(r"\]\(([\w/-]+\.md)\)", (DOCS / "README.md").read_text(encoding="utf-8"))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - {"README.md"}
    assert pages - set(linked) == set(), (
        "name the page in docs/README.md, below the heading where a reader looks for it"
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site. A broken link or a wrong formula fails here."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(DOCS / "build_site.py"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
def test_the_site_loads_nothing_from_another_host(site):
    """A link may lead elsewhere; scripts, styles, fonts, pictures and requests may not."""
    host = r"(?:https?:)?//[^\"')]*"
    load = rf"""<(?:script|img|iframe|link|source|use)\b[^>]*?["']{host}|url\(["']?{host}|@import[^;]*//"""
    request = rf"""(?:fetch|import|importScripts|open)\((?:["']GET["'], *)?["'`]{host}"""
    loads = {
        f"{path.relative_to(site)}: {match}"
        for path in site.rglob("*")
        if path.suffix in (".html", ".css", ".js", ".svg")
        for match in re.findall(f"{load}|{request}", path.read_text(encoding="utf-8"))
    }
    assert loads == set()


@pytest.mark.slow
def test_formulas_become_mathml(site):
    text = (site / "kl.html").read_text(encoding="utf-8")
    assert "<math" in text
    assert not re.search(r"\$[^$<]*\\", text)


@pytest.mark.slow
def test_every_key_and_command_is_in_the_reference(site):
    assert 'id="rollout-max-new-tokens"' in (site / "reference" / "ppo.html").read_text(encoding="utf-8")
    assert "rlhf rm score [OPTIONS]" in (site / "reference" / "commands.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_link_to_a_line_leads_to_that_line(site):
    pages = [path for path in site.rglob("*.html") if path.is_relative_to(site / "course")]
    links = {(page, *link) for page in pages for link in re.findall(r'href="([^"]*)#L-(\d+)"', page.read_text("utf-8"))}
    for page, target, line in links:
        assert f'id="L-{line}"' in (page.parent / target).read_text(encoding="utf-8"), (page, target, line)


RUN = """
import contextlib, io, json, sys
cells, names = [cell for cell in json.load(open(sys.argv[1]))["cells"] if cell["cell_type"] == "code"], {}
for cell in cells:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(cell["source"], "cell", "exec"), names)
    print(json.dumps(printed.getvalue()))
"""
"""Runs the cells of a notebook in one namespace, as a kernel does; prints what each printed."""


@pytest.mark.slow
@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_runs_as_a_notebook_and_prints_what_its_page_says(lesson, site, tmp_path):
    code, output = Forked(RUN, str(site / "course" / f"{lesson}.ipynb"), folder=ROOT, log=tmp_path / "log").wait()
    assert code == 0, output
    page = (DOCS / "course" / f"{lesson}.md").read_text(encoding="utf-8")
    stated = re.findall(r"^```python\n.*?^```\n(?:\n```text\n(.*?)^```\n)?", page, flags=re.MULTILINE | re.DOTALL)
    assert [json.loads(line) for line in output.splitlines() if line.startswith('"')] == stated
