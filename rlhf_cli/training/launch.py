"""From a command line to a stage and to an exit code, for `rlhf <stage>` and `torchrun -m stages.<stage>`.

0 done, 1 the run's or ours, 2 the user's mistake, 130 interrupted. `rlhf <stage>` reads and checks the config
before anything heavy is imported.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlhf_cli import artifacts
from rlhf_cli.config.by_stage import CONFIGS
from rlhf_cli.config.loader import load_config
from rlhf_cli.config.stage import Stage
from rlhf_cli.errors import ArtifactError, ConfigError, Interrupted, RunError, UserError
from rlhf_cli.training import checkpoint_files
from rlhf_cli.training.identity import identity, require_files, require_inputs

Run = Callable[..., None]
FULL_OR_UNWRITABLE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS),
    *(errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE),
}


def load_stage_config(stage: str, path: str | Path, overrides: Sequence[str] = ()) -> Stage:
    """The checked config of a stage."""
    config: Stage = load_config(path, CONFIGS[stage], overrides)
    return config


def run_stage(
    stage: str,
    load_run: Callable[[], Run],
    config_path: str | Path,
    overrides: Sequence[str] = (),
    *,
    restart: bool = False,
    quiet: bool = False,
) -> bool:
    """Run one stage unless it is finished and unchanged; returns whether it ran.

    `load_run` imports the stage's `run`, and is called once the config is known to be right.
    """
    config = load_stage_config(stage, config_path, overrides)
    silent = quiet or os.environ.get("RANK", "0") != "0"
    with explained(config_path, config.artifacts):
        require_inputs(config)
        require_files(config)
        place = artifacts.stage_directory(config.artifacts, stage)
        mine = json.loads(json.dumps(identity(config)))
        # A finished stage may be run again by --restart, and that be stopped: the same command goes on with it.
        goes_on = checkpoint_files.unfinished(config.artifacts, stage) == mine
        try:
            why = artifacts.why_run(config.artifacts, stage, mine)
        except ArtifactError:
            if not restart:
                raise
            why = "its manifest can't be read"
        if why is None and not restart and not goes_on:
            if not silent:
                print(
                    f"{stage}: {place} is finished, and config, data and inputs are unchanged: skipped",
                    flush=True,
                )
            if os.environ.get("RANK", "0") == "0":
                checkpoint_files.remove_left_behind(config.artifacts, stage)
            return False
        if not silent and why != "":
            reason = why or ("--restart" if restart else "a --restart of it was stopped")
            print(
                f"{stage}: {place} runs again ({reason}); the old one stands until the new one is done",
                flush=True,
            )
        try:
            load_run()(config, quiet=quiet, restart=restart)
        except Interrupted as error:
            if checkpoint_files.unfinished(config.artifacts, stage) is None:
                raise
            arguments = ["--config", str(config_path), *(part for text in overrides for part in ("--set", text))]
            raise Interrupted(
                f"{error}. Go on with: {_command(stage)} {shlex.join(arguments)}", error.exit_code
            ) from None
    return True


def _command(stage: str) -> str:
    """What starts this stage as it was started."""
    processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return f"rlhf {stage}" if processes == "1" else f"torchrun --nproc-per-node {processes} -m stages.{stage}"


class explained:
    """A context that finishes the messages of errors from inside it with what only the caller knows."""

    def __init__(self, config_path: str | Path, root: str):
        self.config_path, self.root = Path(config_path), root

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, artifacts.MissingStageError):
            sibling = self.config_path.parent / f"{error.stage}.yaml"
            config = sibling if sibling.is_file() else f"YOUR_{error.stage.upper()}.yaml"
            raise ArtifactError(f"{error}. Run: rlhf {error.stage} --config {config}") from None
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            raise ConfigError(f"{str(error.filename)[:80]}...: the name is too long for a file. Shorten it") from None
        if isinstance(error, OSError) and error.errno in FULL_OR_UNWRITABLE:
            raise ArtifactError(
                f"{error.filename or self.root}: can't be written ({error.strerror}); what was finished before "
                "still stands. Make room or give another `artifacts`"
            ) from None


def exit_code(work: Callable[[], object]) -> int:
    """Do the work; errors become one line on stderr and an exit code, bugs keep their traceback."""
    try:
        work()
    except (UserError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except Interrupted as stop:
        if os.environ.get("RANK", "0") == "0":
            print(stop, file=sys.stderr)
        return stop.exit_code
    except KeyboardInterrupt:
        print("interrupted; nothing finished was touched, and the last checkpoint stands", file=sys.stderr)
        return 130
    return 0


def main(stage: str, run: Run) -> None:
    """`python -m stages.<stage>`, also under torchrun."""
    parser = argparse.ArgumentParser(prog=f"stages.{stage}", description=f"The {stage} stage by itself.")
    parser.add_argument("--config", required=True, help="YAML file")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--restart", action="store_true", help="run again even if finished and unchanged")
    parser.add_argument("--quiet", action="store_true")
    args = parser.parse_args()
    code = exit_code(
        lambda: run_stage(stage, lambda: run, args.config, args.overrides, restart=args.restart, quiet=args.quiet)
    )
    if code == 0:
        from rlhf_cli.training import distributed

        distributed.stop()
    sys.exit(code)
