"""Run Python code in a process of its own that is forked from one with torch imported: without seconds of imports."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.crash import redirect, server


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


class Forked:
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
        self.log = log
        args = (code, list(arguments), str(folder), dict(environment or {}), str(log), code_here)
        self._process: Any = server().Process(target=_run, args=args, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return int(self._process.pid)

    def kill(self) -> None:
        """End the process, also one that was stopped."""
        self._process.kill()
        self._process.join()

    def wait(self, seconds: float = 600) -> tuple[int, str]:
        """Wait for the end; return the exit code and the output."""
        self._process.join(seconds)
        if self._process.exitcode is None:
            self._process.kill()
            raise TimeoutError(self.log.read_text(encoding="utf-8"))
        return self._process.exitcode, self.log.read_text(encoding="utf-8")
