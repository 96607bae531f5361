"""Write the story openings: `python data/stories/generate.py [--out DIR]`.

Every combination of an opening, a hero and a place or wish is drawn once; a shuffle with a fixed seed gives the
order and the first 400 are kept. Standard library only; the same bytes every time.
"""

import argparse
import itertools
import json
import random
from pathlib import Path

NUM_PROMPTS = 400
MAX_CHARACTERS = 64
NAMES = ("Lily", "Tom", "Mia", "Ben", "Sue", "Max", "Anna", "Tim", "Lucy", "Sam")
HEROES = (
    "a little girl named Lily",
    "a little boy named Tim",
    "a small dog named Max",
    "a big bear named Ben",
    "a cat named Tom",
    "a tiny bird named Sue",
    "a fish named Sam",
    "a rabbit named Mia",
)
PLACES = ("the park", "the zoo", "the beach", "the shop", "the farm", "the market", "the lake", "the school")
THINGS = ("a red ball", "a box", "a toy car", "an old hat", "a key", "a big tree", "a blue bird", "a book")


def openings() -> list[str]:
    """Every opening, in a fixed order. Each ends in a full stop, so that the model writes the next sentence."""
    heroes = [f"{start} {hero}." for start, hero in itertools.product(("Once upon a time, there was",), HEROES)]
    visits = [f"One day, {name} went to {place}." for name, place in itertools.product(NAMES, PLACES)]
    finds = [f"One day, {name} saw {thing}." for name, thing in itertools.product(NAMES, THINGS)]
    wishes = [f"{name} wanted to play with {thing}." for name, thing in itertools.product(NAMES, THINGS)]
    losses = [f"{name} was sad. {thing.capitalize()} was lost." for name, thing in itertools.product(NAMES, THINGS)]
    pairs = [
        f"{first} and {second} were at {place}."
        for (first, second), place in itertools.product(itertools.combinations(NAMES, 2), PLACES)
    ]
    return [text for text in heroes + visits + finds + wishes + losses + pairs if len(text) <= MAX_CHARACTERS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    texts = openings()
    random.Random(7).shuffle(texts)
    lines = [json.dumps({"prompt": text}) + "\n" for text in texts[:NUM_PROMPTS]]
    (out / "prompts.jsonl").write_bytes("".join(lines).encode())


if __name__ == "__main__":
    main()
