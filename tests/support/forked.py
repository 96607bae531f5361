"""Run Python code in a process of its own that is forked from one with torch imported: without seconds of imports."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.crash import Child, redirect


def _run(code: str, arguments: Sequence[str], folder: str, environment: Mapping[str, str], log: str, code_here: bool):
    redirect(log)
    os.environ.update(environment)
    os.chdir(folder)
    if code_here:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("rlhf_cli", "stages")]:
            del sys.modules[name]
        sys.path.insert(0, folder)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})


class Forked(Child):
    """A process that runs `code`, with its output in `log`.

    With `code_here` it imports the packages `rlhf_cli` and `stages` of `folder`, else those of this checkout.
    """

    def __init__(
        self,
        code: str,
        *arguments: str,
        folder: Path,
        log: Path,
        environment: Mapping[str, str] | None = None,
        code_here: bool = False,
    ):
        super().__init__(_run, (code, list(arguments), str(folder), dict(environment or {}), str(log), code_here), log)

    def wait(self, seconds: float = 600) -> tuple[int, str]:  # type: ignore[override]
        """Wait for the end; return the exit code and the output."""
        return super().wait(seconds), self.output
