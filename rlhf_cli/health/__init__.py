"""What is wrong with a run: the checks while it runs, and `rlhf diagnose` after it."""
