"""Turns the errors of a command or a stage into one line and an exit code. Does not import torch.

Exit codes: 0 done, 1 the run failed or rlhf has a bug, 2 a mistake in the input, 130 or 143 interrupted.
"""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Callable
from pathlib import Path

from rlhf_cli.errors import EndedElsewhere, Interrupted, RunError, UserError
from rlhf_cli.printing import say

LOST = 87
"""The exit code of a process that ends because it lost the connection to another one, which reports the error."""
FAILED = "RLHF_FAILED_FILE"
"""The environment variable that names a file to which `--nproc` writes as soon as one of its processes has failed."""


def exit_code(work: Callable[[], object]) -> int:
    """Call `work`; expected errors become one line on stderr and an exit code, bugs keep their traceback."""
    try:
        work()
    except (UserError, RunError) as error:
        return _say_once(f"error: {error}", error.exit_code)
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
        return _say_once(f"error: {str(error.filename)[:80]}...: the name is too long. Shorten it", 2)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            say("interrupted; finished stages and the last checkpoint are intact", error=True)
        return 130
    except Exception:
        if not _is_one_of_several():
            raise
        return _say_once(traceback.format_exc().rstrip(), 1)
    return 0


def _say_once(line: str, exit_code: int) -> int:
    """Print why the run ends; returns the exit code. Of several processes the first that asks prints."""
    if _is_one_of_several():
        from rlhf_cli.processes import ending

        ending.say_once(lambda: say(line, error=True, flush=True), exit_code)
    else:
        say(line, error=True)
    return exit_code


def _leave(exit_code: int, *, has_printed: bool = False) -> None:
    if _is_one_of_several():
        from rlhf_cli.processes import ending

        ending.leave(exit_code, has_printed=has_printed)


def _is_one_of_several() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def another_has_failed() -> bool:
    """Whether `--nproc`, if it started this process, has seen another one fail."""
    return FAILED in os.environ and Path(os.environ[FAILED]).stat().st_size > 0
