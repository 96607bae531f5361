"""Failures that a user can fix: one line each, no traceback.

A message reads ``<file>:<line or row>: <what was found>, <the rule>. <what to do>``.
Any other exception is a bug in rlhf: it keeps its traceback and exits with code 1.
"""


class UserError(Exception):
    """A mistake in the input. Exit code 2."""

    exit_code = 2


class ConfigError(UserError):
    """An invalid config file or ``--set`` option."""


class DataError(UserError):
    """An invalid data file, or an invalid row in one."""


class ArtifactError(UserError):
    """An artifact or model directory that is missing, incomplete or not writable."""


class Interrupted(Exception):
    """A signal stopped the run after it was saved; it can be resumed. Exit code 130 (Ctrl-C) or 143."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class EndedElsewhere(Exception):
    """Another process of the same run ended with an error that it reports; this process ends silently."""

    def __init__(self, exit_code: int):
        super().__init__("another process of the run reports the error")
        self.exit_code = exit_code


class RunError(Exception):
    """The run itself failed, for example on a NaN loss. Exit code 1."""

    exit_code = 1


class RewardError(RunError):
    """A reward source returned no valid score. The message names the source, the row and the returned value."""
