"""The examples that `rlhf init` writes: YAML files by example, and the code that writes or judges their data."""
