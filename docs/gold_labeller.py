"""Answer what `rlhf label` asks, in place of a person: the gold judge of data/support decides.

    python docs/gold_labeller.py FILE --out LABELS [--num N] [--error SHARE]

With --error, this share of the answers is a random key, as a tired person would give them.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

from rlhf_cli.commands.label import Labelling, pairs_of
from rlhf_cli.commands.output import Output
from rlhf_cli.config.data import DataSource

sys.path.insert(0, str(Path(__file__).parent.parent / "data" / "support"))
from gold import judge_one  # type: ignore[import-not-found]


def key(pair: dict[str, Any], error: float, rng: random.Random) -> str:
    """The key for a pair."""
    if rng.random() < error:
        return rng.choice("12t")
    first, second = (judge_one(pair["prompt"], reply)["gold"] for reply in pair["replies"])
    return "t" if first == second else "1" if first > second else "2"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num", type=int)
    parser.add_argument("--error", type=float, default=0.0)
    options, rng = parser.parse_args(), random.Random(0)
    pairs, _ = pairs_of(DataSource(path=options.file), "error")
    with Output(options.out, {}) as output:
        labelling = Labelling(pairs, output, 0, None, options.num)
        while (pair := labelling.current) is not None:
            labelling.take(key(pair, options.error, rng))
        print(*labelling.summary(), sep="\n")


if __name__ == "__main__":
    main()
