"""rlhf: from raw text to an aligned language model in three stages, SFT, reward model, PPO."""

__version__ = "0.9.0"
