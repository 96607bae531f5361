"""Measure time and memory of reading, checking and tokenising a generated file of 2 million rows.

    .venv/bin/python benchmarks/data.py --work DIR

Needs about 8 GB under DIR for the file, the tokens and the tokenizer, and removes them at the end. Each line of the
table is a separate process:

    read             read the rows as the stages do, nothing else
    check            `rlhf data check`, lengths in words
    check, tokens    the same with a tokenizer
    tokenise         `rlhf_cli.data.cache.tokenise` as the SFT stage calls it, into an empty cache
    tokenise again   the same, from the cache

Memory is the largest resident set. CPU / wall is the average number of busy cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

WORDS = 20_000
SENTENCES = 50_000
VOCAB_SIZE = 8192
MAX_LENGTH = 1024
TASKS = ("read", "check", "check, tokens", "tokenise", "tokenise again")


def main() -> None:
    """Write the files, run each task in its own process and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="an empty or new folder")
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 2_000_000])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--task", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ |= {"RLHF_CACHE": str(args.work / "cache"), "HF_HUB_OFFLINE": "1"}
    if args.task:
        print(json.dumps(measured(args.task, args.work / f"{args.rows[0]}.jsonl", args.work / "tokenizer")))
        return
    args.work.mkdir(parents=True, exist_ok=True)
    print(f"{os.cpu_count()} cores, load before {os.getloadavg()[0]:.1f}", flush=True)
    made = [args.work / f"{rows}.jsonl" for rows in args.rows]
    try:
        for rows, path in zip(args.rows, made, strict=True):
            write_rows(path, rows)
            print(f"{rows:,} rows, {path.stat().st_size / 2**20:,.0f} MiB", flush=True)
        subprocess.run([sys.executable, __file__, *_arguments(args, args.rows[0], "tokenizer")], check=True)
        print("| rows | task | wall s | beyond reading s | rows/s | CPU / wall | memory MiB |")
        print("|---|---|---|---|---|---|---|", flush=True)
        for rows in args.rows:
            reading = 0.0
            for task in args.tasks:
                output = subprocess.run(
                    [sys.executable, __file__, *_arguments(args, rows, task)],
                    check=True,
                    capture_output=True,
                    text=True,
                ).stdout
                found = json.loads(output.splitlines()[-1])
                reading = found["wall"] if task == "read" else reading
                beyond = f"{found['wall'] - reading:.1f}" if reading and task not in ("read", "tokenise again") else ""
                print(
                    f"| {rows:,} | {task} | {found['wall']:.1f} | {beyond} | {rows / found['wall']:,.0f} "
                    f"| {found['cpu'] / found['wall']:.2f} | {found['memory']:,.0f} |",
                    flush=True,
                )
        print(f"load after {os.getloadavg()[0]:.1f}")
    finally:
        for path in made:
            path.unlink(missing_ok=True)
        for folder in ("cache", "tokenizer"):
            shutil.rmtree(args.work / folder, ignore_errors=True)


def _arguments(args: argparse.Namespace, rows: int, task: str) -> list[str]:
    return ["--work", str(args.work), "--rows", str(rows), "--task", task]


# ------------------------------------------------------------------------------------------------ rows


def write_rows(path: Path, count: int) -> None:
    """Write prompts and responses of random words: word frequencies by Zipf's law, lengths nearly log-normal.

    A row has 60 words at the median, 90 on average and 400 at the 99th percentile.
    """
    rng = random.Random(0)
    syllables = [a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er", "in", "or")]
    words = ["".join(rng.choices(syllables, k=rng.choice((1, 1, 2, 2, 2, 3, 4)))) for _ in range(WORDS)]
    weights = [1 / (rank + 3) for rank in range(WORDS)]
    sentences = [
        " ".join(rng.choices(words, weights, k=rng.randint(4, 16))).capitalize() + rng.choice((".", ".", ".", "!", "?"))
        for _ in range(SENTENCES)
    ]
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            asked = " ".join(rng.choices(sentences, k=min(30, 1 + int(rng.lognormvariate(0.3, 0.8)))))
            said = " ".join(rng.choices(sentences, k=min(80, 1 + int(rng.lognormvariate(1.3, 0.9)))))
            row = {"prompt": f"Question {number}: {asked}\n\nAnswer:", "response": f" {said}"}
            file.write(json.dumps(row) + "\n")


# ----------------------------------------------------------------------------------------------- tasks


def measured(task: str, path: Path, tokenizer: Path) -> dict[str, float]:
    """Run one task in this process; returns wall and processor seconds without imports, and memory in MiB."""
    work = prepared(task, path, tokenizer)
    wall, before = time.perf_counter(), time.process_time()
    work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - before
    return {"wall": wall, "cpu": cpu, "memory": largest_resident_set()}


def prepared(task: str, path: Path, tokenizer: Path) -> Callable[[], object]:
    """The function to time; imports and loading are done before."""
    import rlhf_cli.commands.data_check as data_check
    from rlhf_cli.config.data import DataSource, Rows
    from rlhf_cli.config.models import TokenizerTraining
    from rlhf_cli.data.cache import tokenise
    from rlhf_cli.data.encode import LengthLimits
    from rlhf_cli.data.encoders import DemonstrationEncoder
    from rlhf_cli.data.row_counts import Report
    from rlhf_cli.data.stage_rows import StageRows, records
    from rlhf_cli.models.load import load_tokenizer
    from rlhf_cli.models.scratch import train_tokenizer

    source = DataSource(path=str(path))
    rows = Rows(train=[source], test_fraction=0.05)
    if task == "tokenizer":
        few = Rows(train=[source.model_copy(update={"limit": 20_000})], test_fraction=0)

        def texts() -> Iterator[str]:
            for _, record in records(few, "sft", Report()):
                yield record.prompt + record.answers[0].text

        def make() -> None:
            train_tokenizer(texts(), TokenizerTraining(vocab_size=VOCAB_SIZE)).save_pretrained(tokenizer)
            (tokenizer / "config.json").write_text('{"model_type": "llama"}\n', encoding="utf-8")

        return make
    if task == "read":
        return lambda: sum(1 for _ in records(rows, "sft", Report()))
    if task.startswith("check"):
        with_tokens = str(tokenizer) if "tokens" in task else None
        options = data_check.RowsOptions(str(path), "sft", tokenizer=with_tokens, max_length=MAX_LENGTH)
        return lambda: data_check.data_check(options, as_json=True)
    loaded = load_tokenizer(str(tokenizer))

    spec = StageRows(rows, "sft", limits=LengthLimits(MAX_LENGTH))

    def tokenised() -> int:
        found = tokenise(DemonstrationEncoder(loaded, spec))
        return len(found.train) + len(found.test)

    return tokenised


def largest_resident_set() -> float:
    """Peak memory of this process in MiB. getrusage may report the peak of the parent process instead."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**10
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


if __name__ == "__main__":
    main()
