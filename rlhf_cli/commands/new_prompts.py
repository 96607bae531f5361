"""`rlhf data generate --task prompts`: new prompts from a model's answers, without near-duplicates."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from rlhf_cli.commands.output import Dropped, Output
from rlhf_cli.commands.writer import Failure, Request, WriterOptions, fill
from rlhf_cli.data.records import Record
from rlhf_cli.data.words import words
from rlhf_cli.errors import DataError, RunError
from rlhf_cli.report.progress import Display

PROMPTS_TEMPLATE = """\
Below are requests that people sent to an assistant.

{seeds}

Write {num} more requests of this kind, on other subjects and in other words. Write each on one line of its own, with \
a number before it, and write nothing else.
"""
NUM_ASKED = 5
"""`{num}` of that template: prompts that one answer is asked for."""
MAX_FRUITLESS = 10
"""Stop after this many consecutive batches of answers without a new prompt."""
ROUNDING = 1e-9
LIST_MARK = re.compile(r"(?:\d+\s*[.):]|[-*•])(?:\s+|$)")


def write_prompts(
    output: Output,
    records: Sequence[Record],
    num: int,
    options: WriterOptions,
    template: str,
    num_seeds: int,
    similarity: float,
    display: Display,
) -> None:
    """Ask in rounds until there are `num` new prompts, as Self-Instruct does (Wang et al. 2023).

    Each line stores its round. A prompt that nearly duplicates a seed or an earlier prompt is dropped. When a run
    resumes, a local model repeats the last chunk of rounds, so that the same prompts are compared with the same set.
    A server gives different answers each time, so it is asked for the next chunk.
    """
    seeds = [_seed(record) for record in records]
    if not seeds:
        raise DataError("the source has no readable prompt; at least one is needed as a seed")
    if output.num_rows >= num:
        return
    last = output.last("round")
    start = (last // options.chunk + (1 if options.server else 0)) * options.chunk if last >= 0 else 0
    output.cut_from("round", start)
    known = KnownPrompts(similarity)
    for text in (*seeds, *(row["prompt"] for row in output.rows())):
        known.add(text)
    writer = options.open()
    origin = {"model": options.model, "temperature": options.temperature, "seed": options.seed}
    fruitless = 0
    display.begin(num, "prompt", output.num_rows)
    while output.num_rows < num:
        rounds, before = range(start, start + options.chunk), output.num_rows
        answers = writer.write([_request(n, seeds, template, num_seeds, options.seed) for n in rounds])
        output.refuse_all_failed(answers)
        for n, answer in zip(rounds, answers, strict=True):
            if isinstance(answer, Failure):
                output.write(answer, {"round": n})
                continue
            texts = prompts_in(answer.text, ended=answer.ended)
            if not texts:
                output.write(Dropped("no prompt in the answer"), {"round": n})
            for text in texts:
                if output.num_rows == num:
                    break
                if (other := known.similar(text)) is not None:
                    output.write(Dropped("too similar to another"), {"round": n, "prompt": text, "other": other})
                    continue
                known.add(text)
                output.write({"prompt": text, **origin, "round": n}, {})
        fruitless = 0 if output.num_rows > before else fruitless + 1
        if fruitless == MAX_FRUITLESS:
            raise RunError(
                f"{output.path}: no new prompt in the last {MAX_FRUITLESS * options.chunk} answers; {output.num_rows} "
                f"of {num} are written, and {output.dropped_path.name} lists the dropped ones. Raise --temperature or "
                "--similarity, give more seeds, or change --template"
            )
        display.step(output.num_rows, [f"dropped {output.num_dropped}"])
        start = rounds.stop
    display.end()


def _request(number: int, seeds: list[str], template: str, num_seeds: int, seed: int) -> Request:
    """The request of a round: the template with seed prompts that are drawn from (seed, round)."""
    import torch

    from rlhf_cli.seeding import generator

    order = torch.randperm(len(seeds), generator=generator(seed, "seed prompts", number)).tolist()
    chosen = "\n".join(f"{place}. {seeds[i]}" for place, i in enumerate(order[:num_seeds], 1))
    return Request.of(fill(template, seeds=chosen, num=str(NUM_ASKED)), number)


def _seed(record: Record) -> str:
    """A row as a seed on one line: its prompt, the last message of a conversation, or a whole text."""
    text = record.messages[-1].content if record.messages else record.prompt or record.key
    return " ".join(text.split())


def prompts_in(answer: str, *, ended: bool = True) -> list[str]:
    """The prompts in an answer, one per line. If any line has a list mark, only lines with one count.

    The last line of an answer that was cut is incomplete and is dropped.

    >>> prompts_in("Sure!\\n1. Write a poem.\\n2) Name two rivers.")
    ['Write a poem.', 'Name two rivers.']
    >>> prompts_in("- Name a fish\\n- Name a bi", ended=False)
    ['Name a fish']
    """
    lines = [line.strip() for line in answer.splitlines()]
    if not ended:
        lines = lines[:-1]
    marked = [LIST_MARK.sub("", line, count=1).strip() for line in lines if LIST_MARK.match(line)]
    return [line for line in marked or lines if line]


class KnownPrompts:
    """A set of prompts that finds near-duplicates.

    A and B are near-duplicates if the Jaccard similarity of their sets of `words`, |A and B| / |A or B|, is
    at least `threshold`. Order and repetition do not count.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold
        self._known: list[tuple[frozenset[str], str]] = []
        self._by_word: dict[str, list[int]] = {}

    def add(self, text: str) -> None:
        """Compare later prompts with this one too."""
        word_set = words(text)
        for word in self._index_words(word_set):
            self._by_word.setdefault(word, []).append(len(self._known))
        self._known.append((word_set, text))

    def similar(self, text: str) -> str | None:
        """The first known prompt that `text` nearly duplicates, or None."""
        word_set = words(text)
        for n in sorted({n for word in self._index_words(word_set) for n in self._by_word.get(word, ())}):
            other, known = self._known[n]
            if len(word_set & other) >= self.threshold * len(word_set | other) - ROUNDING:
                return known
        return None

    def _index_words(self, word_set: frozenset[str]) -> list[str]:
        """The words under which a set is indexed. Two similar sets share at least one of them (Bayardo et al. 2007).

        Of n words a similar set lacks at most n - ceil(threshold * n). With both sets in the same order, a common
        word is therefore among the first n - ceil(threshold * n) + 1 of each. Long words come first: they are rare.
        """
        length = len(word_set) - math.ceil(self.threshold * len(word_set) - ROUNDING) + 1
        return sorted(word_set, key=lambda word: (-len(word), word))[:length]
