"""`python -m rlhf_cli`: the same as `rlhf`."""

from rlhf_cli.cli import main

if __name__ == "__main__":
    main()
