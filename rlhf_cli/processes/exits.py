"""Turns the errors of a command or a stage into one line and an exit code. Does not import torch.

Exit codes: 0 done, 1 the run failed or rlhf has a bug, 2 a mistake in the input, 130 or 143 interrupted.
"""

from __future__ import annotations

import errno
import os
import signal
import traceback
from collections.abc import Callable

from rlhf_cli.errors import EndedElsewhere, Interrupted, RunError, UserError
from rlhf_cli.printing import say
from rlhf_cli.processes.environment import is_first_worker

LOST = 87
"""The exit code of a process that ends because it lost the connection to another one, which reports the error."""
INTERRUPTED = "interrupted; finished stages and the last checkpoint are intact"


def exit_code(work: Callable[[], object]) -> int:
    """Call `work`; expected errors become one line on stderr and an exit code, bugs keep their traceback."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        work()
    except (UserError, RunError) as error:
        return _end(error.exit_code, f"error: {error}")
    except Interrupted as stop:  # every process raises it
        return _end(stop.exit_code, str(stop) if is_first_worker() else None)
    except EndedElsewhere as end:
        return _end(end.exit_code)
    except KeyboardInterrupt as stop:
        if is_first_worker():
            say(str(stop) or "interrupted", error=True)
        return 130
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            return _end(2, f"error: {str(error.filename)[:80]}...: the name is too long. Shorten it")
        if isinstance(error, PermissionError) and error.filename is not None:
            return _end(2, f"error: {error.filename}: permission denied. Check its permissions, also of its folders")
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            raise
        return _end(1, traceback.format_exc().rstrip())
    return 0


def _end(exit_code: int, line: str | None = None) -> int:
    """Print why the run ends, and return the exit code. Of several processes the first that has a line prints."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from rlhf_cli.processes import ending

        ending.end(exit_code, line)
    elif line is not None:
        say(line, error=True)
    return exit_code
