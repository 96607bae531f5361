"""A small pretrained model through SFT, a reward model and PPO on labels by people, with a judge of its own rows.

    python benchmarks/real_model.py --work DIR --model MODEL --sentences sentences.jsonl.gz --seeds 0 1 2

MODEL is a story model (docs/results.md names it). The sentences are split once: 40 % for the three stages
(DIR/train.jsonl), 10 % held out (DIR/test.jsonl), 50 % for the judge. Each seed is `rlhf pipeline
configs/sentiment-small` with the settings below, on one thread. Finished seeds are kept; the table is printed last.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import itertools
import json
import math
import os
import random
import re
import resource
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
JUDGE_ROWS = "RLHF_JUDGE_ROWS"
"""The environment variable that names the judge's file."""
SETTINGS = [
    "sft:model.scratch=null",
    "sft:training.num_epochs=1.5",
    "sft:optimizer.learning_rate=1e-3",
    "sft:data.max_length=256",
    "rm:data.max_length=256",
    "rm:training.num_epochs=1.5",
    "rm:evaluation.max_new_tokens=120",
    "ppo:rollout.max_new_tokens=120",
    "ppo:data.max_prompt_length=64",
    "ppo:ppo.num_iterations=25",
    "ppo:evaluation.num_prompts=256",
    "ppo:evaluation.gold=benchmarks/real_model.py:judge",
    "data.test_fraction=0",
    "threads=1",
]
"""Next to configs/sentiment-small: characters instead of tokens, so that texts are longer."""
COLUMNS = {"score_mean": "score", "gold": "judge: positive", "good": "a good word", "bad": "a bad word", "kl": "KL"}
COLUMNS |= {"known_words": "words of the reviews", "length": "characters", "distinct_2": "distinct-2"}
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57}
"""Number of seeds -> half width of Student's 95 % interval, in standard errors of the mean."""
WORD = re.compile(r"[a-z'-]+")


class Bayes:
    """A naive Bayes classifier of sentences by their words and pairs of words.

    >>> bayes = Bayes([("so dull", 0), ("so warm", 1)])
    >>> round(bayes("warm"), 2), bayes("so"), sorted(bayes.words)
    (0.67, 0.5, ['dull', 'so', 'warm'])
    """

    def __init__(self, rows: list[tuple[str, int]]) -> None:
        counts = [Counter(x for text, label in rows if label == side for x in self.features(text)) for side in (0, 1)]
        sizes = [sum(label == side for _, label in rows) for side in (0, 1)]
        self.weights = {
            x: math.log((counts[1][x] + 1) / (sizes[1] + 2)) - math.log((counts[0][x] + 1) / (sizes[0] + 2))
            for x in counts[0] | counts[1]
        }
        self.words = {x for x in self.weights if " " not in x}

    @staticmethod
    def features(text: str) -> set[str]:
        """The words and the pairs of neighbouring words."""
        words = WORD.findall(text.lower())
        return {*words, *map(" ".join, itertools.pairwise(words))}

    def __call__(self, text: str) -> float:
        """The probability that the sentence is positive."""
        return 1 / (1 + math.exp(-sum(self.weights.get(x, 0.0) for x in self.features(text))))


@functools.cache
def bayes() -> Bayes:
    """The judge, trained on its own half of the sentences."""
    return Bayes([(row["text"], row["label"]) for row in read(Path(os.environ[JUDGE_ROWS]))])


def judge(prompts: list[str], responses: list[str], rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """For `evaluation.gold`: is the whole sentence positive, has it a good or a bad word, how many words are known?"""
    sys.path.insert(0, str(ROOT / "data" / "sentiment"))
    import judge as word_lists

    marks = word_lists.judge(prompts, responses, rows)
    for prompt, response, mark in zip(prompts, responses, marks, strict=True):
        words = WORD.findall(response.lower())
        mark["gold"] = float(bayes()(prompt + response) > 0.5)
        mark["known_words"] = sum(word in bayes().words for word in words) / max(1, len(words))
    return marks


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in content.splitlines()]


def split(sentences: Path, work: Path) -> None:
    """Write the parts of the sentences."""
    if (work / "judge.jsonl").is_file():
        return
    rows = read(sentences)
    random.Random(0).shuffle(rows)
    ends = [round(len(rows) * share) for share in (0, 0.4, 0.5, 1)]
    work.mkdir(parents=True, exist_ok=True)
    for name, start, end in zip(("train", "test", "judge"), ends, ends[1:], strict=False):
        text = "".join(json.dumps(row) + "\n" for row in rows[start:end])
        (work / f"{name}.jsonl").write_text(text, encoding="utf-8")


def train(model: Path, work: Path, seed: int) -> None:
    """Run the three stages, and note their processor seconds."""
    run = work / f"seed{seed}"
    if (run / "ppo" / "evaluation.json").is_file():
        return
    settings = [*SETTINGS, f"seed={seed}", f"artifacts={run}", f"sft:model.path={model}"]
    settings += [f"data.train={work / 'train.jsonl'}", f"data.test={work / 'test.jsonl'}"]
    command = [sys.executable, "-m", "rlhf_cli", "pipeline", "configs/sentiment-small"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", JUDGE_ROWS: str(work / "judge.jsonl")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (work / f"seed{seed}.log").open("w", encoding="utf-8") as log:
        subprocess.run(
            [*command, *(x for setting in settings for x in ("--set", setting))],
            check=True,
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    (run / "processor_s").write_text(str(after.ru_utime - before.ru_utime), encoding="utf-8")


def report(work: Path, seeds: list[int]) -> str:
    """The tables in Markdown."""
    os.environ[JUDGE_ROWS] = str(work / "judge.jsonl")
    test = read(work / "test.jsonl")
    accuracy = statistics.fmean((bayes()(row["text"]) > 0.5) == row["label"] for row in test)
    lines = [f"The judge is right on {accuracy:.3f} of {len(test):,} held-out sentences.\n"]
    lines += ["| seed | SFT loss | RM accuracy | processor s |", "|---|---|---|---|"]
    found = []
    for seed in seeds:
        run = work / f"seed{seed}"
        sft, rm = (json.loads((run / x / "manifest.json").read_text())["metrics"] for x in ("sft", "rm"))
        found.append(json.loads((run / "ppo" / "evaluation.json").read_text()))
        interval = f"{rm['eval/accuracy_low95']:.3f} to {rm['eval/accuracy_high95']:.3f}"
        seconds = float((run / "processor_s").read_text())
        lines += [f"| {seed} | {sft['eval/loss']:.3f} | {rm['eval/accuracy']:.3f} ({interval}) | {seconds:.0f} |"]
    lines += ["", f"| | {' | '.join(f'seed {x}' for x in seeds)} | mean change |", "|---" * (len(seeds) + 2) + "|"]
    for key, title in COLUMNS.items():
        pairs = [(row["sft"][key], row["ppo"][key]) for row in found]
        changes = [after - before for before, after in pairs]
        spread = STUDENT[len(seeds)] * statistics.stdev(changes) / len(seeds) ** 0.5 if len(seeds) > 1 else math.nan
        cells = [f"{before:.2f} -> {after:.2f}" for before, after in pairs]
        lines += [f"| {title} | {' | '.join(cells)} | {statistics.fmean(changes):+.2f} ± {spread:.2f} |"]
    return "\n".join(lines)


def main() -> None:
    """Split, train and report."""
    parser = argparse.ArgumentParser(description="A pretrained model through the three stages, with its own judge.")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--sentences", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    split(args.sentences, args.work)
    for seed in args.seeds:
        train(args.model.resolve(), args.work.resolve(), seed)
    print(report(args.work, args.seeds))


if __name__ == "__main__":
    main()
