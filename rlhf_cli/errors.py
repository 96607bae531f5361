"""The failures that a user can mend: one line each, exit code 2.

The line reads ``<file>:<line or row>: <what was found>, <the rule>. <what to do>``.
Anything else that goes wrong is a bug of ours, keeps its traceback and exits with 1.
"""


class UserError(Exception):
    """A mistake in what the user gave; shown without a traceback, exit code 2."""

    exit_code = 2


class ConfigError(UserError):
    """A config file, or a ``--set``, that can't be used."""


class DataError(UserError):
    """A data file or a row of one that can't be used."""


class ArtifactError(UserError):
    """An artifact or model directory that is missing, incomplete or can't be written."""


class Interrupted(Exception):
    """A signal asked the run to stop; it was saved and can go on. Exit code 130 (Ctrl-C) or 143."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class RunError(Exception):
    """The run itself failed (the loss is not a number, say): one line, exit code 1."""

    exit_code = 1


class RewardError(RunError):
    """A source of rewards has no number for a response: names the source, the row and what it gave instead."""
