"""How figures are printed and written: tables, JSON values, and sentences that the report repeats."""

from __future__ import annotations

from typing import Any

from rlhf_cli.report.figure import Figures, cells, readable
from rlhf_cli.training.progress import Display


class Sentences:
    """What figures mean, in words: each sentence is printed, and kept for the file and the report."""

    def __init__(self, display: Display):
        self.display = display
        self.texts: list[str] = []

    def say(self, text: str) -> None:
        """Print a sentence, given without its period, and keep it."""
        sentence = f"{text[0].upper()}{text[1:]}."
        self.display.note(sentence)
        self.texts.append(sentence)


def as_json(figures: Figures) -> dict[str, Any]:
    """Figures as JSON values."""
    return {name: figure.as_json() for name, figure in figures.items()}


def show(display: Display, title: str, columns: dict[str, Figures], *, counts: bool = False) -> None:
    """Print figures as a table: one row per name, one column per side.

    A row has as many digits as its narrowest interval justifies. With `counts` the names are those of groups of rows,
    and the last column has the number of rows.
    """
    lines = []
    for name in dict.fromkeys(name for figures in columns.values() for name in figures):
        row = [figures.get(name) for figures in columns.values()]
        rows = [f"{next(figure.rows for figure in row if figure is not None):,}"] if counts else []
        lines.append([name if counts else readable(name), *cells(name, row), *rows])
    display.table(title, ["", *columns, *(["rows"] if counts else [])], lines)
