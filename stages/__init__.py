"""The three stages, each a module that can be run: `python -m stages.sft --config FILE`."""

import rlhf_cli  # noqa: F401  # What it sets has to be set before torch is imported.
