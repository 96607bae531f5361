"""Two rewards for stories, written as Python functions: `data/stories/reward.py:kindness` and `:dialogue`.

A reward function is called with the prompts, the responses and the prompts' rows, each a list of the same length,
and returns a number for each response. `row["ended"]` is false where the response was cut at its longest length;
its last word is then half a word and is not counted.

Both are bounded, and both take points off for saying things twice: without that a policy finds "happy happy
happy" within a few iterations.
"""

import itertools
import re
from typing import Any

KIND = {
    "happy": ("happy", "happily", "happier"),
    "smile": ("smile", "smiled", "smiles", "smiling"),
    "love": ("love", "loved", "loves", "loving"),
    "laugh": ("laugh", "laughed", "laughing"),
    "hug": ("hug", "hugged", "hugs"),
    "friend": ("friend", "friends", "friendly"),
    "kind": ("kind", "kindly", "kindness"),
    "share": ("share", "shared", "sharing"),
    "thank": ("thank", "thanked", "thanks", "thankful"),
    "help": ("help", "helped", "helping", "helpful"),
    "glad": ("glad", "gladly"),
    "proud": ("proud", "proudly"),
    "gentle": ("gentle", "gently"),
    "together": ("together",),
    "fun": ("fun",),
    "care": ("care", "careful", "cared", "caring"),
}
STEM = {form: stem for stem, forms in KIND.items() for form in forms}
MOST = 4
"""Different kind words that count; a fifth one gives nothing more."""
REPEAT_COST = 3.0
"""Points for a response that is all repetition; in proportion for less."""


def words_of(text: str, ended: bool) -> list[str]:
    """The lower-cased words; a cut text loses its last one where it stops inside it."""
    words = re.findall(r"[a-z']+", text.lower())
    return words if ended or not text[-1:].isalpha() else words[:-1]


def repeated(words: list[str]) -> float:
    """The share of word pairs that came before in the same text, 0 to 1."""
    pairs = list(itertools.pairwise(words))
    return 1.0 - len(set(pairs)) / len(pairs) if pairs else 0.0


def kindness(prompts: list[str], responses: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """How many different kind words a story has, 0 to 4, less 3 times its share of repeated word pairs.

    >>> cut = [{"ended": False}]
    >>> kindness([""], [" They smiled and shared the cake. They were happ"], cut)
    [2.0]
    >>> round(kindness([""], [" happy happy happy happy happy"], [{"ended": True}])[0], 2)
    -1.25
    """
    scores = []
    for _, response, row in zip(prompts, responses, rows, strict=True):
        words = words_of(response, row["ended"])
        stems = {STEM[word] for word in words if word in STEM}
        scores.append(min(len(stems), MOST) - REPEAT_COST * repeated(words))
    return scores


def dialogue(prompts: list[str], responses: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """How much of a story is spoken: 1 for each closed quotation of two words or more, 0 to 3, less repetition.

    >>> dialogue([""], [' Tom said, "Let us play." "No," said Ben. "Do not'], [{"ended": False}])
    [1.0]
    """
    scores = []
    for _, response, row in zip(prompts, responses, rows, strict=True):
        spoken = {text.lower() for text in re.findall(r'"([^"]+)"', response) if len(text.split()) > 1}
        scores.append(min(len(spoken), 3) - REPEAT_COST * repeated(words_of(response, row["ended"])))
    return scores
