"""Write the shop-support data: `python data/support/generate.py [--out DIR] [--seed 7]`.

Everything is drawn from the grammar in gold.py. Each row has its own random generator, seeded by the file's name and
the row's number. So the files do not depend on one another, a longer file begins with the shorter one, and the same
seed always gives the same text. Training files are gzipped. The demonstrations are of deliberately mixed quality:
supervised training on them learns the language and leaves room for improvement.
"""

import argparse
import gzip
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import gold

ROWS = {
    "sft_train": 6000,
    "sft_test": 400,
    "pref_train": 6000,
    "pref_test": 400,
    "scored_train": 12000,
    "scored_test": 400,
    "prompts_train": 2000,
    "prompts_test": 256,
}

# Number of held-out prompts per probe. The wrong remedy is the defect that a reward model finds hardest to learn, so it
# gets a narrower interval.
PROBES = {
    "wrong_remedy": 150,
    "vague": 100,
    "rude": 100,
    "filler": 100,
    "no_polite": 100,
    "no_close": 100,
    "wrong_product": 100,
    "wrong_order": 100,
    "wrong_name": 100,
    "doubled_polite": 60,
}

# What differs in a near-miss pair, with its weight. No slot (name, product, order) is wrong in one: a small reward
# model cannot compare slots, and such pairs would be label noise for it.
NEAR_MISSES = {"wrong_remedy": 55, "vague": 12, "rude": 12, "no_polite": 12, "no_close": 12, "filler": 9}
NEAR_MISS_SHARE = 0.6

# The parts of a reply in their order; each is a sentence or absent.
PARTS = ("opener", "second", "rude", "filler", "remedy", "close", "again")
LINE_END = b"\n"

# The raters of the hard task judge by gold and by what flatters them: points for each word and for one phrase. Then one
# label in four is flipped.
HARD_PAIRS = 600
HARD_FLIPS = 0.25
POINTS_PER_WORD = 0.03
FLATTERY_POINTS = 3.0
FLATTERY_SHARE = 0.15
Reply = dict[str, str]


def is_held_out(product: str, issue: str) -> bool:
    """Is this pair reserved for the test files? One pair in eight is: one issue per product."""
    return (gold.PRODUCTS.index(product) + 3 * list(gold.PHRASINGS).index(issue)) % 8 == 5


def draw_slots(rng: random.Random, held_out: bool) -> dict[str, str]:
    """The facts of one prompt; its (product, issue) pair is from the given side of the split."""
    while True:
        product, issue = rng.choice(gold.PRODUCTS), rng.choice(list(gold.PHRASINGS))
        if is_held_out(product, issue) == held_out:
            return {
                "name": rng.choice(gold.NAMES),
                "product": product,
                "order": rng.choice(gold.ORDERS),
                "issue": issue,
            }


def write_prompt(rng: random.Random, slots: dict[str, str]) -> str:
    """A customer's message in the single-turn chat form the trainers read."""
    sentences = [
        rng.choice(gold.INTROS),
        rng.choice(gold.PHRASINGS[slots["issue"]]),
        rng.choices(gold.ORDER_LINES, [4, 1, 1, 1])[0],
    ]
    if rng.random() < 0.4:
        sentences.append(rng.choice(gold.TAILS))
    return "Human: " + " ".join(sentences).format(**slots) + "\n\nAssistant:"


def other(rng: random.Random, values: list[str], value: str) -> str:
    """A random value other than the given one."""
    return rng.choice([one for one in values if one != value])


def pick(rng: random.Random, templates: list[str], slots: dict[str, str]) -> str:
    """One sentence from a list of templates."""
    return rng.choice(templates).format(**slots)


def wrong_remedy(rng: random.Random, slots: dict[str, str]) -> str:
    """A remedy for some other issue, about the right product and order."""
    return pick(rng, gold.REMEDIES[other(rng, list(gold.REMEDIES), slots["issue"])], slots)


def spoil_slot(rng: random.Random, slots: dict[str, str], slot: str) -> dict[str, str]:
    """The facts with one of them changed."""
    values = {"name": gold.NAMES, "product": gold.PRODUCTS, "order": gold.ORDERS}[slot]
    return slots | {slot: other(rng, values, slots[slot])}


def mixed_reply(rng: random.Random, slots: dict[str, str]) -> Reply:
    """A reply of mixed quality, as an overworked shop might send it."""
    reply: Reply = {}
    said = slots
    if rng.random() < 0.06:
        said = spoil_slot(rng, slots, rng.choice(["product", "order"]))

    opener = rng.random()
    if opener < 0.42:
        named = spoil_slot(rng, slots, "name") if rng.random() < 0.02 else slots
        reply["opener"] = pick(rng, gold.POLITE, named)
    elif opener < 0.6:
        reply["opener"] = pick(rng, gold.NEUTRAL, slots)
    polite = opener < 0.42

    if polite and rng.random() < 0.03:
        reply["second"] = pick(rng, gold.POLITE, slots)
    if rng.random() < (0.14 if polite else 0.51):
        reply["rude"] = pick(rng, gold.RUDE, slots)
    if rng.random() < 0.12:
        reply["filler"] = pick(rng, gold.FILLER, slots)

    remedy = rng.random()
    if remedy < 0.42:
        reply["remedy"] = pick(rng, gold.REMEDIES[slots["issue"]], said)
    elif remedy < 0.70:
        reply["remedy"] = wrong_remedy(rng, said)
    elif remedy < 0.93 or not reply:
        reply["remedy"] = pick(rng, gold.VAGUE, slots)

    if rng.random() < 0.40:
        reply["close"] = pick(rng, gold.CLOSE, slots)
    if rng.random() < 0.05:
        reply["again"] = pick(rng, gold.CLOSE, slots)
    return reply


def good_reply(rng: random.Random, slots: dict[str, str]) -> Reply:
    """A faultless reply."""
    return {
        "opener": pick(rng, gold.POLITE, slots),
        "remedy": pick(rng, gold.REMEDIES[slots["issue"]], slots),
        "close": pick(rng, gold.CLOSE, slots),
    }


def text_of(reply: Reply) -> str:
    """The reply as text, with a leading space so that a token boundary falls at the end of the prompt."""
    return "".join(" " + reply[part] for part in PARTS if part in reply)


def gold_of(prompt: str, reply: Reply) -> float:
    """The gold score of one reply."""
    return gold.judge_one(prompt, text_of(reply))["gold"]


def with_defect(rng: random.Random, reply: Reply, slots: dict[str, str], defect: str) -> Reply:
    """The reply with one part made worse."""
    if defect == "wrong_remedy":
        return reply | {"remedy": wrong_remedy(rng, slots)}
    if defect == "vague":
        return reply | {"remedy": pick(rng, gold.VAGUE, slots)}
    if defect == "rude":
        return reply | {"rude": pick(rng, gold.RUDE, slots)}
    if defect == "filler":
        return reply | {"filler": pick(rng, gold.FILLER, slots)}
    if defect == "no_polite":
        return reply | {"opener": pick(rng, gold.NEUTRAL, slots)}
    if defect == "no_close":
        return {part: sentence for part, sentence in reply.items() if part != "close"}
    if defect == "doubled_polite":
        said = gold.blank(reply["opener"])[0]
        return reply | {"second": other(rng, gold.POLITE, said).format(**slots)}
    slot = defect.removeprefix("wrong_")
    part = "opener" if slot == "name" else "remedy"
    wrong = spoil_slot(rng, slots, slot)
    return reply | {part: gold.blank(reply[part])[0].format(**wrong)}


def near_miss(rng: random.Random, prompt: str, slots: dict[str, str]) -> tuple[Reply, Reply]:
    """Two replies of mixed quality that differ in one part, the better one first."""
    defect = rng.choices(list(NEAR_MISSES), list(NEAR_MISSES.values()))[0]
    while True:
        better = mixed_reply(rng, slots)
        if defect == "no_polite":
            better["opener"] = pick(rng, gold.POLITE, slots)
            better.pop("second", None)
        elif defect == "no_close":
            better["close"] = pick(rng, gold.CLOSE, slots)
        elif defect in ("rude", "filler"):
            better.pop(defect, None)
        else:
            better["remedy"] = pick(rng, gold.REMEDIES[slots["issue"]], slots)
        worse = with_defect(rng, better, slots, defect)
        if gold_of(prompt, better) - gold_of(prompt, worse) >= 0.5:
            return better, worse


def independent_pair(rng: random.Random, prompt: str, slots: dict[str, str]) -> tuple[Reply, Reply]:
    """Two independent replies whose gold scores differ by one point or more."""
    while True:
        one, two = mixed_reply(rng, slots), mixed_reply(rng, slots)
        if abs(gold_of(prompt, one) - gold_of(prompt, two)) >= 1:
            return one, two


def sft_row(rng: random.Random, prompt: str, slots: dict[str, str], _test: bool) -> dict:
    """A demonstration."""
    return {"prompt": prompt, "response": text_of(mixed_reply(rng, slots))}


def pref_row(rng: random.Random, prompt: str, slots: dict[str, str], test: bool) -> dict:
    """A comparison by a rater who usually prefers the better reply."""
    draw = near_miss if rng.random() < NEAR_MISS_SHARE else independent_pair
    chosen, rejected = draw(rng, prompt, slots)
    gap = gold_of(prompt, chosen) - gold_of(prompt, rejected)
    if rng.random() > 1 / (1 + math.exp(-3 * gap)):
        chosen, rejected = rejected, chosen
    row = {"prompt": prompt, "chosen": text_of(chosen), "rejected": text_of(rejected)}
    if test:
        row |= {"gold_chosen": gold_of(prompt, chosen), "gold_rejected": gold_of(prompt, rejected)}
    return row


def hard_pref_row(rng: random.Random, prompt: str, slots: dict[str, str], _test: bool) -> dict:
    """A comparison by a hurried rater, who likes long replies and one phrase, and confuses one pair in four."""

    flattery = gold.FLATTERY.format(**slots)

    def liking(reply: Reply) -> float:
        text = text_of(reply)
        return gold_of(prompt, reply) + POINTS_PER_WORD * len(text.split()) + FLATTERY_POINTS * (flattery in text)

    one, two = (
        reply | {"second": flattery} if rng.random() < FLATTERY_SHARE else reply
        for reply in independent_pair(rng, prompt, slots)
    )
    prefers_one = rng.random() < 1 / (1 + math.exp(-3 * (liking(one) - liking(two))))
    flipped = rng.random() < HARD_FLIPS
    chosen, rejected = (one, two) if prefers_one != flipped else (two, one)
    return {"prompt": prompt, "chosen": text_of(chosen), "rejected": text_of(rejected), "flipped": flipped}


def scored_row(rng: random.Random, prompt: str, slots: dict[str, str], test: bool) -> dict:
    """A reply with a rater's mark from 0 to 5."""
    reply = mixed_reply(rng, slots)
    mark = gold_of(prompt, reply)
    noisy = math.floor(mark + rng.gauss(0, 0.5) + 0.5)
    row = {"prompt": prompt, "response": text_of(reply), "score": min(5, max(0, noisy))}
    return row | {"gold": mark} if test else row


def prompt_row(_rng: random.Random, prompt: str, _slots: dict[str, str], _test: bool) -> dict:
    """A prompt alone, for PPO."""
    return {"prompt": prompt}


def draw_rows(seed: int, file: str, count: int, write_row: Callable[..., dict]) -> Iterator[dict]:
    """The rows of one file, without repeated prompts."""
    test = file.endswith("_test")
    seen: set[str] = set()
    number = 0
    while len(seen) < count:
        rng = random.Random(f"{seed}/{file}/{number}")
        number += 1
        slots = draw_slots(rng, held_out=test)
        prompt = write_prompt(rng, slots)
        if prompt not in seen:
            seen.add(prompt)
            yield write_row(rng, prompt, slots, test)


def draw_probes(seed: int) -> Iterator[dict]:
    """Clean replies beside the same reply with one defect, one probe after another over the same prompts."""
    prompts = draw_rows(seed, "probes_test", max(PROBES.values()), prompt_row)
    for number, row in enumerate(prompts):
        rng = random.Random(f"{seed}/probes_test/reply/{number}")
        slots = gold.read_prompt(row["prompt"])
        clean = good_reply(rng, slots)
        for defect, count in PROBES.items():
            if number < count:
                spoilt = with_defect(rng, clean, slots, defect)
                yield row | {"chosen": text_of(clean), "rejected": text_of(spoilt), "probe": defect}


def write_rows(path: Path, rows: Iterator[dict]) -> bytes:
    """Write one compact JSON object per line, gzipped if the path ends in .gz; returns the text as bytes.

    The gzip header holds no time and no file name, so the same rows give the same file every time.
    """
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode()
    with path.open("wb") as file:
        if path.suffix == ".gz":
            with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=file, mtime=0) as packed:
                packed.write(text)
        else:
            file.write(text)
    return text


def main() -> None:
    """Write every file into the output folder and print its size."""
    parser = argparse.ArgumentParser(description="Write the shop-support data.")
    here = Path(__file__).resolve().parent
    parser.add_argument("--out", type=Path, default=here, help="folder to write into")
    parser.add_argument("--seed", type=int, default=7, help="another seed gives other rows of the same kind")
    parser.add_argument("--scale", type=int, default=1, help="factor for the rows of every training file")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    writers = {"sft": sft_row, "pref": pref_row, "scored": scored_row, "prompts": prompt_row}
    files: dict[str, Iterator[dict]] = {}
    for file, count in ROWS.items():
        task, side = file.split("_")
        if side == "train":
            files[f"{file}.jsonl.gz"] = draw_rows(args.seed, file, count * args.scale, writers[task])
        else:
            files[f"{file}.jsonl"] = draw_rows(args.seed, file, count, writers[task])
    files["probes_test.jsonl"] = draw_probes(args.seed)

    for name, rows in files.items():
        text = write_rows(args.out / name, rows)
        size = (args.out / name).stat().st_size
        print(f"{name:23} {text.count(LINE_END):6} rows {len(text):9} bytes of text {size:9} on disk")


if __name__ == "__main__":
    main()
