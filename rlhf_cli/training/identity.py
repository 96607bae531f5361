"""What decides a stage's result, as digests: a finished stage with the same identity need not run again.

No torch here: `rlhf pipeline` and `rlhf status` ask this of every stage before anything is loaded.
"""

from __future__ import annotations

from typing import Any

from rlhf_cli.artifacts import fingerprint, require_stage
from rlhf_cli.config.schemas import Stage

NOT_PART = {"artifacts", "device"}
"""Keys that say where a stage runs and not what it computes."""


def identity(config: Stage) -> dict[str, Any]:
    """Config, data and inputs of a stage, the latter two by digest."""
    return {
        "config": config.model_dump(mode="json", exclude=NOT_PART),
        "data": {role: fingerprint(s.path, s.revision) for role, s in config.sources.items()},
        "inputs": {role: fingerprint(*where) for role, where in config.inputs.items()},
    }


def require_inputs(config: Stage) -> None:
    """Raise MissingStageError for the first stage of the run that this one stands on and that is not there."""
    for stage in config.needs:
        require_stage(config.artifacts, stage)
