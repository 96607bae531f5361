"""Answer `rlhf label` through a pipe in place of a person: the gold judge of data/support decides.

    python docs/gold_labeller.py FILE [--error SHARE] [options of rlhf label]

With --error, this share of the answers is a random key, as a tired person would give them.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "data" / "support"))
from gold import judge_one  # type: ignore[import-not-found]


def key(pair: dict, error: float, rng: random.Random) -> str:
    """The key for a line that `rlhf label` printed."""
    if rng.random() < error:
        return rng.choice("12t")
    first, second = (judge_one(pair["prompt"], reply)["gold"] for reply in pair["replies"])
    return "t" if first == second else "1" if first > second else "2"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--error", type=float, default=0.0)
    options, rest = parser.parse_known_args()
    command = [sys.executable, "-m", "rlhf_cli", "label", *rest]
    rng = random.Random(0)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            process.stdin.write(key(json.loads(line), options.error, rng))
            process.stdin.flush()
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
