"""The rich console of every command: colours and tables, with control characters in the text as their escapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment

from rlhf_cli.printing import printable


class Console(rich.console.Console):
    """rich's console. What it prints contains no control characters but its own.

    Text is printed as it is: `[b]` in a name or a prompt is not read as markup.
    """

    def __init__(self, **options: Any):
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **options})

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The segments of anything that is printed, also of the cells of a table."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or text.isprintable() else Segment(printable(text, keep="\n"), style)
