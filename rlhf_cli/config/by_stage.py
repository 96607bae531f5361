"""The schema of each stage's config file."""

from __future__ import annotations

from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.config.stage import Stage

CONFIGS: dict[str, type[Stage]] = {"sft": SFTConfig, "rm": RMConfig, "ppo": PPOConfig}
