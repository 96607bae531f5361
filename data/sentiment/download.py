"""Write sentences.jsonl.gz: the 10,662 labelled film-review sentences of Pang and Lee (2005), read from the hub.

python data/sentiment/download.py [--out FILE]
"""

import argparse
import gzip
import json
from pathlib import Path

DATASET = "cornell-movie-review-data/rotten_tomatoes"


def main() -> None:
    """Read every split and write one row {"text", "label"} per line; label 1 is positive."""
    import datasets

    parser = argparse.ArgumentParser(description="Write the film-review sentences from the hub.")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "sentences.jsonl.gz")
    out = parser.parse_args().out
    splits = datasets.load_dataset(DATASET)
    rows = [{"text": row["text"], "label": row["label"]} for split in splits.values() for row in split]
    with gzip.open(out, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    print(f"{out}: {len(rows):,} rows")


if __name__ == "__main__":
    main()
