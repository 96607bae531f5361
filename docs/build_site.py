"""Build the site: the pages of docs/ as HTML, with search, mathematics and a dark mode.

    make docs

writes build/site/index.html. The pages are those that GitHub shows. docs/README.md is the start page, and its headings
and links are the navigation. Added at build time: the config keys of each stage, the help of every command, the lessons
as notebooks, and a page for each source file that a page links to. The site asks no other host for anything: formulas
become MathML, which browsers draw themselves. A broken link is an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from docutils.nodes import Element, SkipNode
from docutils.utils.math.latex2mathml import tex2mathml
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BLOCK = r"^(?:```|~~~).*?^(?:```|~~~)$"
LINK = rf"(?ms){BLOCK}|`[^`\n]*`|(!?)\[((?:`[^`\n]*`|[^\]`])*)\]\(([^)\s]+)\)"
"""A link or picture: mark, text and target. Code is matched too, without groups, so that it stays as it is."""

SETTINGS: dict[str, Any] = {
    "project": "rlhf",
    "extensions": ["myst_parser", "build_site"],
    "html_theme": "pydata_sphinx_theme",
    "html_title": "rlhf",
    "html_static_path": [str(DOCS / "site.css")],
    "html_css_files": ["site.css"],
    "html_search_scorer": str(DOCS / "search.js"),
    "html_copy_source": False,
    "html_show_sourcelink": False,
    "html_math_renderer": "mathml",
    "myst_enable_extensions": ["dollarmath"],
    "myst_fence_as_directive": ["math"],
    "myst_heading_anchors": 6,
    "highlight_language": "none",
    "suppress_warnings": ["toc.not_included", "myst.header"],
    "html_theme_options": {
        "navbar_end": ["theme-switcher"],
        "navbar_persistent": ["search-button-field"],
        "header_links_before_dropdown": 6,
        "show_prev_next": True,
        "secondary_sidebar_items": ["page-toc"],
        "footer_start": [],
        "footer_end": [],
        "pygments_light_style": "a11y-high-contrast-light",
        "pygments_dark_style": "a11y-high-contrast-dark",
    },
}
THIN = '<mspace width="0.1667em"/>'


def setup(app: Sphinx) -> None:
    """Sphinx calls this: the file is an extension as well. Formulas become MathML."""
    app.add_html_math_renderer("mathml", (mathml(False), None), (mathml(True), None))


def mathml(block: bool) -> Callable[[Any, Element], None]:
    def visit(translator: Any, node: Element) -> None:
        formula = tex2mathml(node.astext().strip(), as_block=block).replace("<mo>‖</mo>", '<mo stretchy="false">‖</mo>')
        formula = re.sub(r"(?<=</mi>|msub>)(\s*<mi>log</mi>)", rf"{THIN}\1", formula)
        formula = re.sub(r"(<mo>&ApplyFunction;</mo>)(?!\s*<mrow>)", rf"\1{THIN}", formula)
        translator.body.append(f'<div class="math">{formula}</div>' if block else formula)
        raise SkipNode

    return visit


class Site:
    """The folder of Markdown files that Sphinx reads. Pages are added with everything that they link to."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.added: set[Path] = set()

    def place(self, path: Path) -> str:
        """Where a file of the project is in the site. docs/ is the top; source files are in a folder of their own."""
        name = path.relative_to(ROOT).as_posix().removeprefix("docs/")
        if path == DOCS / "README.md":
            return "index.md"
        if path.suffix in (".md", ".svg", ".png"):
            return name
        return f"source/{path.relative_to(ROOT).as_posix()}.md"

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text, encoding="utf-8")

    def add(self, path: Path) -> None:
        if path in self.added:
            return
        self.added.add(path)
        name = self.place(path)
        if path.suffix == ".md":
            text = self.with_links(path.read_text(encoding="utf-8"), path.parent, name)
            self.write(name, text + notebook_link(path))
        elif name.startswith("source/"):
            self.write(name, source_page(path))
        else:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, self.folder / name)

    def with_links(self, text: str, folder: Path, name: str) -> str:
        """The text of a page in ``folder``, with the links that it needs at its place ``name`` in the site."""

        def link(match: re.Match[str]) -> str:
            mark, label, target = match.groups()
            if target is None or target.startswith(("http", "#")):
                return match[0]
            file, _, anchor = target.partition("#")
            path = (folder / file).resolve()
            self.add(path)
            place = os.path.relpath(self.place(path), Path(name).parent)
            if not place.endswith(".py.md") and "source/" not in place:
                return f"{mark}[{label}]({place}{'#' * bool(anchor)}{anchor})"
            line = f"#L-{anchor.removeprefix('L')}" if anchor else ""
            return f'<a href="{place.removesuffix(".md")}.html{line}">{label}</a>'

        return re.sub(LINK, link, text)


def source_page(path: Path) -> str:
    """A file with its line numbers, or the list of a folder's files."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return f"# {name}/\n\n" + "\n".join(f"- {each.name}" for each in sorted(path.glob("[!_.]*")))
    code = path.read_text(encoding="utf-8")
    try:
        lexer = get_lexer_for_filename(name)
    except ClassNotFound:
        lexer = TextLexer()
    html = highlight(code, lexer, HtmlFormatter(linenos="inline", linespans="L"))
    return f"# {name}\n\n~~~~~~~~{{raw}} html\n{html}\n~~~~~~~~\n"


# ----------------------------------------------------------------------------------------------- the navigation


def sections(text: str) -> Iterator[tuple[str, str]]:
    """Title and text of each section of the start page."""
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        yield title.strip(), body.strip()


def toctree(names: list[str]) -> str:
    return "\n\n```{toctree}\n:hidden:\n\n" + "\n".join(names) + "\n```\n"


def add_navigation(site: Site) -> None:
    """A page per section of the start page, with the section's text and links. A section of one page is that page."""
    text, top = (site.folder / "index.md").read_text(encoding="utf-8"), []
    for title, body in sections(text):
        if title == "Reference":
            body += "\n" + reference(site)
        pages = [f"{match[2]} <{match[3]}>" for match in re.finditer(LINK, body) if match[2]]
        if len(pages) == 1:
            top.append(re.sub(r".* <", f"{title} <", pages[0]))
            continue
        name = re.sub(r"\W+", "-", title.lower())
        site.write(f"{name}.md", f"# {title}\n\n{body}" + toctree(pages))
        top.append(f"{title} <{name}.md>")
    site.write("index.md", text + toctree(top))


# ------------------------------------------------------------------------------------------------ the reference


def reference(site: Site) -> str:
    """Write the pages of the config keys and of the commands; returns their links."""
    from rlhf_cli.commands.config import CONFIGS, entries

    for stage in CONFIGS:
        parts = [f"# The keys of {stage}.yaml\n\nAlso in the terminal: `rlhf config docs {stage}`."]
        for entry in entries(stage):
            about = " ".join(entry.schema.get("description", "").split())
            level = "##" if "." not in entry.name else "###"
            parts.append(f"{level} `{entry.name}`\n\n*{entry.facts}*\n\n{plain_text(about)}")
        site.write(f"reference/{stage}.md", "\n\n".join(parts) + "\n")
    site.write("reference/commands.md", "# Commands\n\n" + "\n\n".join(commands()) + "\n")
    keys = [f"- [Keys of {stage}.yaml](reference/{stage}.md)" for stage in CONFIGS]
    return "\n".join([*keys, "- [Commands](reference/commands.md)"])


def plain_text(text: str) -> str:
    """Text in which Markdown sees only its code spans."""
    return re.sub(r"`[^`]*`|([*_<\[$])", lambda match: f"\\{match[1]}" if match[1] else match[0], text)


def commands() -> Iterator[str]:
    """The help of every command."""
    import typer

    from rlhf_cli.cli import COMMANDS, app

    top: Any = typer.main.get_command(app)
    for group, names in COMMANDS.items():
        for name in names:
            words, command, context = ([name] if group == "rlhf" else [group, name]), top, None
            for word in words:
                context = type(command).context_class(command, info_name=command.name, parent=context)
                _, command, _ = command.resolve_command(context, [word])
            command.rich_markup_mode = None  # plain text, without frames
            context = type(command).context_class(command, info_name=name, parent=context, max_content_width=100)
            yield f"## rlhf {' '.join(words)}\n\n```\n{command.get_help(context)}\n```"


# ------------------------------------------------------------------------------------------------ the notebooks


def notebook_link(page: Path) -> str:
    if page.parent.name != "course":
        return ""
    return f'\n\n---\n\nThis lesson as a notebook: <a href="{page.stem}.ipynb" download>{page.stem}.ipynb</a>\n'


def notebook(page: Path) -> dict[str, Any]:
    """A lesson as a notebook: its Python blocks are cells to run, all else is text. The outputs are left out."""
    cells: list[dict[str, Any]] = []
    for part in re.split(
        r"^(```python\n.*?^```\n(?:\n```text\n.*?^```\n)?)", page.read_text("utf-8"), flags=re.M | re.S
    ):
        code = re.match(r"```python\n(.*?)^```", part, re.M | re.S)
        source = (code[1] if code else part).strip()
        kind = {"cell_type": "code", "execution_count": None, "outputs": []} if code else {"cell_type": "markdown"}
        if source:
            cells.append({**kind, "id": f"cell-{len(cells)}", "metadata": {}, "source": source})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


# --------------------------------------------------------------------------------------------------- the program


def build(out: Path) -> int:
    """Build the site in ``out``; returns Sphinx's exit code."""
    shutil.rmtree(out, ignore_errors=True)
    site = Site(out / "pages")
    for page in [DOCS / "README.md", *sorted(DOCS.rglob("*.md"))]:
        site.add(page)
    add_navigation(site)
    app = Sphinx(
        site.folder, None, out, out / "cache", "html", SETTINGS, status=None, warningiserror=True, keep_going=True
    )
    app.build()
    for page in sorted((DOCS / "course").glob("[0-9]*.md")):
        (out / "course" / f"{page.stem}.ipynb").write_text(json.dumps(notebook(page), indent=1), encoding="utf-8")
    shutil.rmtree(out / "pages")
    shutil.rmtree(out / "cache")
    return app.statuscode


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "site").absolute()
    if code := build(folder):
        sys.exit(code)
    print(folder / "index.html")
