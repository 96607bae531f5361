"""Turns the errors of a command or a stage into one line and an exit code. Does not import torch.

Exit codes: 0 done, 1 the run failed or rlhf has a bug, 2 a mistake in the input, 130 or 143 interrupted.
"""

from __future__ import annotations

import errno
import json
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlhf_cli.errors import EndedElsewhere, Interrupted, RunError, UserError
from rlhf_cli.printing import say
from rlhf_cli.processes.signals import LAUNCHED


def exit_code(work: Callable[[], object]) -> int:
    """Call `work`; expected errors become one line on stderr and an exit code, bugs keep their traceback."""
    try:
        work()
    except (UserError, RunError) as error:
        _say_once(f"error: {error}", error.exit_code)
        return error.exit_code
    except Interrupted as stop:
        if os.environ.get("RANK", "0") == "0":
            say(stop, error=True)
            _leave(stop.exit_code, has_printed=True)
        return stop.exit_code
    except EndedElsewhere as end:
        _leave(end.exit_code)
        return end.exit_code
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        _say_once(f"error: {str(error.filename)[:80]}...: the name is too long. Shorten it", 2)
        return 2
    except KeyboardInterrupt:
        say("interrupted; finished stages and the last checkpoint are intact", error=True)
        return 130
    except Exception:
        if not _is_one_of_several():
            raise
        _say_once(traceback.format_exc().rstrip(), 1)
        return 1
    return 0


def _say_once(line: str, exit_code: int) -> None:
    """Print why the run ends. Of processes that `torchrun` or `srun` started, the first one prints."""
    if _is_one_of_several():
        from rlhf_cli.processes import ending

        ending.say_once(lambda: say(line, error=True, flush=True), exit_code)
    else:
        say(line, error=True)


def _leave(exit_code: int, *, has_printed: bool = False) -> None:
    if _is_one_of_several():
        from rlhf_cli.processes import ending

        ending.leave(exit_code, has_printed=has_printed)


def _is_one_of_several() -> bool:
    """Whether this is one of several processes, and `--nproc`, which passes on one of their lines, did not start it."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and LAUNCHED not in os.environ


# ------------------------------------------------------------------------- what a process tells the one that started it


LOST = 87
"""The exit code of a process that ends because it lost the connection to another one."""
FAILURES = "RLHF_FAILURES_FILE"
"""The environment variable that names a file in which `--nproc` notes that a process has failed, and the others what
they waited for."""


def another_has_failed() -> bool:
    """Whether `--nproc`, if it started this process, has noted that another one failed."""
    return FAILURES in os.environ and Path(os.environ[FAILURES]).stat().st_size > 0


def note_wait(step: str, rank: int, what: str) -> bool:
    """Tell `--nproc` that process `rank` waited for `what` when another one ended.

    Returns False if something else started this process.
    """
    return _note({"step": step, "rank": rank, "what": what})


def note_hanging(ranks: Sequence[int]) -> None:
    """Tell `--nproc`, if it started this process, which processes hang, so that it kills them at once."""
    if ranks:
        _note({"hanging": list(ranks)})


def _note(row: dict[str, Any]) -> bool:
    """Write a row for `--nproc`; False if something else started this process."""
    if FAILURES in os.environ:
        with Path(os.environ[FAILURES]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return FAILURES in os.environ
